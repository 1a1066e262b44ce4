"""Ahead-of-time compilation of every launch, for GPUs that are not here, with a gate on what the compiled code uses.

The launches are those that the functions really make: the launcher is replaced by a recorder, so signatures, constants and
numbers of warps cannot drift from the code. A gate on registers, stack and spills, shared memory, tensor-core instructions
and traps (a kernel that asks for too much can "compile" into a bare trap).
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is an extra")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import kernels.triton.target as target  # noqa: E402

if knobs.runtime.interpret:
    pytest.skip("the interpreter does not compile", allow_module_level=True)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int8: "*i8", torch.int64: "*i64"}


def record(monkeypatch, call):
    """Every distinct launch that `call` makes: name -> (kernel, signature, constants, options)."""
    launches = {}

    def run(kernel, *args, grid, warmup, **kwargs):
        options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages") if key in kwargs}
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | kwargs
        assert set(values) == set(names), set(names) ^ set(values)
        signature, constants, attributes = {}, {}, {}
        for at, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(at,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
                attributes[(at,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(at,)] = [["tt.divisibility", 16]]
        key = (kernel.__name__, str(signature), str(constants))
        launches[key] = (kernel, signature, constants, attributes, options)

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *a, **k: run(self, *a, **k))
        call()
    return list(launches.values())


def usage(code, gpu):
    """registers, bytes of stack or spilled registers, bytes of shared memory, tensor-core instructions, traps."""
    if gpu.startswith("gfx"):
        text = code.asm["amdgcn"]

        def figure(name):
            return max(int(found) for found in re.findall(rf"\.{name}:\s+(\d+)", text))

        spilled = figure("private_segment_fixed_size") + figure("vgpr_spill_count")
        return figure("vgpr_count"), spilled, code.metadata.shared, len(re.findall(r"v_mfma", text)), text.count("s_trap")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        sizes = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    out = sizes.stdout + sizes.stderr
    registers, stack = (int(re.search(rf"{name}:(\d+)", out)[1]) for name in ("REG", "STACK"))
    products = len(re.findall(r"\b(?:HMMA|HGMMA)\b", sass))
    return registers, stack, code.metadata.shared, products, len(re.findall(r"\btrap;", code.asm["ptx"]))


def call_linear(kind, dtype, d, chunk, window=1, B=2, H=2, T=256):
    from kernels.linear import MatrixState, StaleState
    from kernels.triton import linear_exact, linear_stale

    q, k, v = (torch.zeros(B, H, T, d, dtype=dtype, requires_grad=True) for _ in range(3))
    gates = [torch.zeros(B, H, T, requires_grad=True) for _ in range(3)]
    W, S, anchor = (torch.zeros(B, H, d, d) for _ in range(3))
    if kind == "exact":
        out, _ = linear_exact(q, k, v, *gates, MatrixState(W, S), chunk=chunk)
    else:
        tail = torch.zeros(B, H, window - 1, d), torch.zeros(B, H, window - 1, d)
        gamma = torch.zeros(B, H, T, window, requires_grad=True) if window > 1 else None
        state = StaleState(W, S, anchor, torch.zeros(B, dtype=torch.long), *tail)
        out, _ = linear_stale(q, k, v, *gates, state, chunk=chunk, gamma=gamma)
    out.sum().backward()


def call_deep(dtype, d, hidden, chunk, window=1, B=2, H=2, T=256):
    from kernels.mlp import DeepState
    from kernels.triton import deep

    q, k, v = (torch.zeros(B, H, T, d, dtype=dtype, requires_grad=True) for _ in range(3))
    gates = [torch.zeros(B, H, T, 2, requires_grad=True) for _ in range(3)]
    gamma = torch.zeros(B, H, T, window, requires_grad=True) if window > 1 else None
    init = (torch.zeros(H, hidden, d), torch.zeros(H, d, hidden))
    weights = tuple(torch.zeros(B, *x.shape) for x in init)
    tail = torch.zeros(B, H, window - 1, d)
    state = DeepState(weights, weights, weights, torch.zeros(B, dtype=torch.long), tail, tail)
    affine = (torch.ones(H, d), torch.zeros(H, d))
    out, _ = deep(q, k, v, *gates, state, init=init, chunk=chunk, affine=affine, gamma=gamma)
    out.sum().backward()


def call_newton_schulz(dtype, rows, cols):
    from kernels.triton import newton_schulz

    newton_schulz(torch.zeros(4, rows, cols, dtype=dtype, requires_grad=True)).sum().backward()


CALLS = {
    "exact bf16": lambda: call_linear("exact", torch.bfloat16, 64, 64),
    "exact fp32": lambda: call_linear("exact", torch.float32, 64, 32),
    "stale bf16": lambda: call_linear("stale", torch.bfloat16, 64, 16),
    "omega bf16": lambda: call_linear("stale", torch.bfloat16, 64, 16, 8),
    "deep bf16": lambda: call_deep(torch.bfloat16, 64, 128, 32),
    "deep fp32": lambda: call_deep(torch.float32, 64, 128, 16),
    "deep omega bf16": lambda: call_deep(torch.bfloat16, 64, 128, 16, 8),
    "newton_schulz bf16": lambda: call_newton_schulz(torch.bfloat16, 64, 128),
    "newton_schulz fp32": lambda: call_newton_schulz(torch.float32, 64, 128),
}


QUICK = [("sm_90", "exact bf16"), ("sm_90", "newton_schulz bf16"), ("gfx942", "deep bf16"), ("sm_80", "stale bf16")]
FULL = [
    *[("sm_90", name) for name in CALLS],
    *[("gfx942", name) for name in ("exact bf16", "deep bf16", "stale bf16", "newton_schulz bf16")],
    *[("sm_80", name) for name in ("exact bf16", "deep bf16", "stale bf16", "newton_schulz bf16")],
]
# Bytes of stack a thread that kernels may use, measured with triton 3.9.0 and rounded up; all others none.
STACK = {
    ("sm_90", "deep bf16", "_output_backward"): 128,
    ("sm_90", "deep bf16", "_state_backward"): 192,
    ("sm_90", "deep bf16", "_key_backward"): 192,
    ("sm_90", "newton_schulz fp32", "_backward"): 64,
    ("sm_90", "exact fp32", "_state"): 192,
    ("sm_90", "exact fp32", "_state_backward"): 128,
    ("sm_90", "deep fp32", "_output"): 256,
    ("sm_90", "deep fp32", "_output_backward"): 256,
    ("sm_90", "deep fp32", "_state_backward"): 256,
    ("sm_90", "deep fp32", "_key_backward"): 256,
    ("sm_90", "deep omega bf16", "_state_backward"): 192,
    ("sm_90", "deep omega bf16", "_key_backward"): 192,
    ("gfx942", "deep bf16", "_state_backward"): 448,
    ("sm_80", "deep bf16", "_state"): 64,
    ("sm_80", "deep bf16", "_output_backward"): 128,
    ("sm_80", "deep bf16", "_state_backward"): 192,
    ("sm_80", "deep bf16", "_key_backward"): 128,
    ("sm_80", "exact bf16", "_prepare"): 128,
    ("sm_80", "exact bf16", "_key_backward"): 448,
}


@pytest.mark.parametrize(("gpu", "name"), QUICK if os.environ.get("TETHYS_COMPILE") != "all" else FULL)
def test_resources(monkeypatch, gpu, name):
    """TETHYS_COMPILE=all compiles for a quarter of an hour; without it, one call of each kind."""
    monkeypatch.setattr(target, "require", lambda *_: None)
    if gpu.startswith("gfx"):
        monkeypatch.setattr(target, "is_hip", lambda: True)
    launches = record(monkeypatch, CALLS[name])
    assert launches
    for kernel, signature, constants, attributes, options in launches:
        source = ASTSource(kernel, signature, constants, attributes)
        code = triton.compile(source, target=TARGETS[gpu][0], options=options)
        registers, stack, shared, products, traps = usage(code, gpu)
        label = f"{gpu}, {name}, {kernel.__name__}: {registers} registers, {stack} bytes of stack, {shared} of shared memory"
        assert registers <= (512 if gpu.startswith("gfx") else 255), label
        assert stack <= STACK.get((gpu, name, kernel.__name__), 0), label
        assert shared <= TARGETS[gpu][1], label
        assert (products > 0) != kernel.__module__.endswith("coefficients"), f"{label}; {products} tensor-core instructions"
        assert not traps, label
