"""The Triton kernels on the GPU at hand: first that they are right, then how fast, against the torch form and the device's limits.

Checks: values and gradients of every kernel against the torch form in float64 on the same GPU, in float32 and bfloat16. A check that fails
ends the run with exit status 1 after the JSON line. Timings: medians of CUDA events, in turns with the torch form on the same tensors.
`share` is the time that the call's necessary bytes or products take at the bandwidth and matrix rate measured in this run, over the time
it took. Stops timing when `--seconds` are over and names what it left out, so that the whole stays under four minutes.
Without a CUDA or HIP device it says so and exits with status 2.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import report

if TYPE_CHECKING:
    import torch

DEVICE = "cuda"  # HIP devices go by this name too
# Relative to the largest entry. float32 is three tf32 or bfloat16 products for one; bfloat16 rounds inputs and what passes between kernels.
TOLERANCE = {"float32": 2e-4, "bfloat16": 4e-2}


def main() -> int:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=200.0, help="no new timing begins after this long")
    options = parser.parse_args()
    began = time.perf_counter()
    report.limit_threads(options.threads)

    import torch

    if not torch.cuda.is_available():
        report.progress(
            "benchmarks/gpu.py: no CUDA or HIP device here, nothing was measured; tests/kernels/test_triton.py checks without one"
        )
        return 2
    torch.manual_seed(options.seed)
    device = torch.cuda.get_device_properties(0)
    figures: dict[str, Any] = {"device": {"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1)}}
    figures["checks"], failed = checks()
    figures["limits"] = measured = limits()
    figures["timings"], figures["left_out"] = timings(measured, lambda: time.perf_counter() - began > options.seconds)
    figures["seconds"] = round(time.perf_counter() - began, 1)
    report.finish("gpu", figures, libraries=("torch", "triton"))
    for name in failed:
        report.progress(f"benchmarks/gpu.py: {name} is outside its tolerance")
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------------------------- cases


def tokens(B: int, H: int, T: int, d: int, layers: int = 0) -> dict[str, torch.Tensor]:
    """float64; unit keys and queries, gates within the stable range. layers: one gate a memory layer, smaller steps."""
    import torch

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, dtype=torch.float64)

    gate = (B, H, T, layers) if layers else (B, H, T)
    eta = 0.3 + 0.6 * torch.rand(gate, device=DEVICE, dtype=torch.float64)
    x = {name: torch.nn.functional.normalize(normal(B, H, T, d), dim=-1) for name in ("q", "k")}
    step = 0.05 if layers else 0.5
    return x | {"v": normal(B, H, T, d), "theta": step * (1 - eta) * torch.rand_like(eta), "eta": eta, "alpha": 0.05 * torch.rand_like(eta)}


Case = tuple[dict[str, "torch.Tensor"], Callable[[Any, dict[str, "torch.Tensor"]], list["torch.Tensor"]]]


def exact_case(B: int, H: int, T: int, d: int, chunk: int) -> Case:
    import torch

    x = tokens(B, H, T, d)
    x |= {name: 0.1 * torch.randn(B, H, d, d, device=DEVICE, dtype=torch.float64) for name in ("W", "S")}

    def run(module: Any, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        from kernels.linear import MatrixState

        y, state = module.linear_exact(*(x[n] for n in NAMES), MatrixState(x["W"], x["S"]), chunk=chunk)
        return [y, *state]

    return x, run


def stale_case(B: int, H: int, T: int, d: int, chunk: int, window: int) -> Case:
    import torch

    x = tokens(B, H, T, d)
    x["theta"] /= chunk
    x |= {name: 0.1 * torch.randn(B, H, d, d, device=DEVICE, dtype=torch.float64) for name in ("W", "S", "anchor")}
    x |= {name: torch.randn(B, H, window - 1, d, device=DEVICE, dtype=torch.float64) for name in ("keys", "values")}
    if window > 1:
        x["gamma"] = torch.rand(B, H, T, window, device=DEVICE, dtype=torch.float64)
    phase = torch.arange(B, device=DEVICE) % chunk

    def run(module: Any, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        from kernels.linear import StaleState

        state = StaleState(x["W"], x["S"], x["anchor"], phase, x["keys"], x["values"])
        y, state = module.linear_stale(*(x[n] for n in NAMES), state, chunk=chunk, gamma=x.get("gamma"))
        return [y, *state[:3]]

    return x, run


def deep_case(B: int, H: int, T: int, d: int, hidden: int, chunk: int) -> Case:
    import torch

    x = tokens(B, H, T, d, layers=2)
    x["q"], x["k"] = x["q"] * d**0.5, x["k"] * d**0.5
    x["theta"] /= d
    init = {"init1": torch.randn(H, hidden, d, device=DEVICE) * d**-0.5, "init2": torch.randn(H, d, hidden, device=DEVICE) * hidden**-0.5}
    x |= {name: w.double() for name, w in init.items()}
    x |= {"scale": torch.ones(H, d, device=DEVICE, dtype=torch.float64), "shift": torch.zeros(H, d, device=DEVICE, dtype=torch.float64)}

    def run(module: Any, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        from kernels.mlp import DeepState

        W = tuple(x[name].expand(B, *x[name].shape).clone() for name in init)
        S = tuple(torch.zeros_like(w) for w in W)
        tail = W[0].new_zeros(B, H, 0, d)
        state = DeepState(W, S, W, torch.zeros(B, device=DEVICE, dtype=torch.long), tail, tail)
        y, state = module.deep(
            *(x[n] for n in NAMES), state, init=(x["init1"], x["init2"]), chunk=chunk, affine=(x["scale"], x["shift"])
        )  # fmt: skip
        return [y, *state.W, *state.S]

    return x, run


def orthogonal_case(n: int, rows: int, cols: int) -> Case:
    import torch

    def run(module: Any, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [module.newton_schulz(x["matrices"])]

    return {"matrices": torch.randn(n, rows, cols, device=DEVICE, dtype=torch.float64)}, run


NAMES = ("q", "k", "v", "theta", "eta", "alpha")
NARROW = ("q", "k", "v", "matrices")  # what comes in the layer's dtype; gates and states stay float32


class Torch:
    """The torch forms, under the names of `kernels.triton`."""

    def __getattr__(self, name: str) -> Any:
        from importlib import import_module

        homes = {"deep": "kernels.mlp", "newton_schulz": "kernels.newton_schulz"}
        return getattr(import_module(homes.get(name, "kernels.linear")), name)


def cast(x: dict[str, torch.Tensor], dtype: torch.dtype, grad: bool) -> dict[str, torch.Tensor]:
    import torch

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.detach().to(dtype if name in NARROW else wide).requires_grad_(grad) for name, t in x.items()}


# --------------------------------------------------------------------------------------------------------------- checks


def checks() -> tuple[dict[str, dict[str, float]], list[str]]:
    """Largest relative error of results and of gradients, by kernel and dtype, and the names of those out of tolerance."""
    import torch

    import kernels.triton

    cases = {
        "exact": exact_case(2, 3, 208, 64, 64),  # ragged: 208 is no multiple of a chunk
        "stale": stale_case(2, 3, 104, 64, 16, 1),
        "omega": stale_case(2, 3, 104, 64, 16, 8),
        "deep": deep_case(2, 3, 104, 64, 128, 16),
        "newton_schulz": orthogonal_case(6, 64, 128),
    }
    figures: dict[str, dict[str, float]] = {}
    failed = []
    for name, (x, run) in cases.items():
        weights: list[torch.Tensor] = []
        for dtype in (torch.float32, torch.bfloat16):
            # The reference sees the inputs that the kernel sees, rounded to its dtype, in float64.
            seen = {n: t.double() for n, t in cast(x, dtype, False).items()}
            reference = cast(seen, torch.float64, True)
            wanted = run(Torch(), reference)
            weights = weights or [torch.randn_like(w) for w in wanted]
            sum((w * r).sum() for w, r in zip(wanted, weights, strict=True)).backward()  # type: ignore[union-attr]
            inputs = cast(x, dtype, True)
            got = run(kernels.triton, inputs)
            sum((g.double() * r).sum() for g, r in zip(got, weights, strict=True)).backward()  # type: ignore[union-attr]
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            values = max(_error(g, w) for g, w in zip(got, wanted, strict=True))
            gradients = max(_error(inputs[n].grad, reference[n].grad) for n in inputs if reference[n].grad is not None)
            figures[label] = {"values": values, "gradients": gradients}
            report.progress(f"check {label:<24} values {values:.1e}  gradients {gradients:.1e}")
            if not (values < TOLERANCE[label.split()[1]] and gradients < 3 * TOLERANCE[label.split()[1]]):  # NaN fails too
                failed.append(label)
    return figures, failed


def _error(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    if want is None or not want.numel():
        return 0.0
    if got is None:
        return float("nan")
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1e-6))


# -------------------------------------------------------------------------------------------------------------- timings


def seconds(call: Callable[[], Any], rounds: int = 7) -> float:
    """Median over rounds of one call, with what it allocates warm."""
    import torch

    call()
    taken = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def limits() -> dict[str, float]:
    """Bytes a second of a copy (read and write), products a second (two operations each counted) of a large bfloat16 matmul."""
    import torch

    source = torch.empty(2**29, device=DEVICE, dtype=torch.int8).fill_(1)
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    return {
        "gb_per_s": 2 * source.numel() / seconds(lambda: target.copy_(source)) / 1e9,
        "tflop_per_s": 2 * 8192**3 / seconds(lambda: matrix @ matrix) / 1e12,
    }


def timings(measured: dict[str, float], over: Callable[[], bool]) -> tuple[dict[str, Any], list[str]]:
    import torch

    import kernels.triton

    torch.set_float32_matmul_precision("high")  # the torch form may use tensor cores too
    B, H, T, d, hidden = 8, 8, 4096, 64, 128
    rows = B * H * T
    io = rows * (4 * d * 2 + 3 * 4)  # q, k, v read and y written in bfloat16, three gates in float32
    plans: dict[str, tuple[Callable[[], Case], float, float]] = {
        # operations of the forward pass a token and head: kernels without the solve's inverse; bytes that must move
        "exact d64 C64": (lambda: exact_case(B, H, T, d, 64), rows * (12 * d * d + 12 * 64 * d), io),
        "deep d64 h128 C32": (lambda: deep_case(B, H, T, d, hidden, 32), rows * (22 * d * hidden + 4 * 32 * (d + hidden)), io + rows * 12),
        "stale d64 C16": (lambda: stale_case(B, H, T, d, 16, 1), rows * (10 * d * d + 6 * 16 * d), io),
        "deep d64 h128 C16": (lambda: deep_case(B, H, T, d, hidden, 16), rows * (22 * d * hidden + 4 * 16 * (d + hidden)), io + rows * 12),
        "omega 8 d64 C16": (lambda: stale_case(B, H, T, d, 16, 8), rows * (10 * d * d + 6 * 32 * d), io + rows * 32),
        "newton_schulz 512 x 64 x 128": (
            lambda: orthogonal_case(512, 64, 128),
            512 * 5 * (4 * 64**2 * 128 + 2 * 64**3),
            512 * 64 * 128 * 4,
        ),
    }
    figures: dict[str, Any] = {}
    left_out = []
    for name, (case, operations, moved) in plans.items():
        for mode in ("forward", "train"):
            label = f"{name} {mode}"
            if over():
                left_out.append(label)
                continue
            x, run = case()
            inputs = {side: cast(x, torch.bfloat16, mode == "train") for side in ("triton", "torch")}
            del x

            def call(side: str, inputs: Any = inputs, run: Any = run, train: bool = mode == "train") -> None:
                with torch.set_grad_enabled(train):
                    results = run(Torch() if side == "torch" else kernels.triton, inputs[side])
                    if train:
                        sum(r.float().sum() for r in results).backward()

            ours = seconds(partial(call, "triton"))
            theirs = seconds(partial(call, "torch"), rounds=3)
            passes = 3.0 if mode == "train" else 1.0
            limit = passes * max(operations / measured["tflop_per_s"] / 1e12, moved / measured["gb_per_s"] / 1e9)
            figures.setdefault(name, {})[mode] = {
                "ms": ours * 1e3, "torch_ms": theirs * 1e3, "vs_torch": theirs / ours, "share": limit / ours,
                "bound": "arithmetic" if operations / measured["tflop_per_s"] / 1e3 > moved / measured["gb_per_s"] else "bandwidth",
            }  # fmt: skip
            report.progress(f"{label:<36} {ours * 1e3:9.2f} ms   torch {theirs * 1e3:9.2f} ms   share {limit / ours:.2f}")
            torch.cuda.empty_cache()
    return figures, left_out


if __name__ == "__main__":
    sys.exit(main())
