"""The native CPU form of the two memories that carry most of the work: the exact matrix memory and the 2-layer deep memory, in float32.

Same signatures and the same numbers (to float32 rounding) as `kernels.linear.linear_exact` and `kernels.mlp.deep`; forward, a hand-written
backward that recomputes every chunk from its saved start, and the streaming step. The library is built ahead of time by
`python -m kernels.native.build`; it is only ever loaded here, never built. Without it `status()` says so and callers use the torch form.

One memory (stream, head) is one unit of work: its result is the same bits whatever else is in the batch and however many threads run.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kernels.linear import READS, MatrixState
from kernels.mlp import DeepState
from kernels.network import DEFAULT, Network

__all__ = [
    "Form",
    "Layer",
    "Status",
    "conv_heads",
    "deep",
    "deep_step_",
    "fma_peak",
    "gated_norm",
    "linear_exact",
    "linear_step_",
    "select_width",
    "status",
    "supports",
    "supports_deep",
    "supports_linear",
]

Precision = Literal["float32", "bfloat16"]
PRECISIONS = get_args(Precision)
HERE = Path(__file__).parent
LIBRARY = HERE / "tethys_native.so"  # made by kernels.native.build
SOURCES = sorted(p.name for p in HERE.iterdir() if p.suffix in (".h", ".cpp"))


def fingerprint() -> str:
    """Of the C++ sources; the library carries the one it was built from, so that a stale library is never run."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Status:
    """Whether the native kernels run here, and if not, why and what that costs."""

    available: bool
    reason: str  # what runs, or why the torch form runs instead
    width: int  # floats a vector: 16 (AVX-512), 8 (AVX2), 4 (any); 0 if not available
    cost: str  # what the form that runs costs, against the other


_SLOWER = "chunk forms 2 to 8 times slower, a streaming step 5 to 10 times; the numbers are the same"


@functools.cache
def status() -> Status:
    """Loads the library once a process. Never builds and never raises."""
    if not LIBRARY.exists():
        return Status(False, f"{LIBRARY.name} is not built; run `python -m kernels.native.build`", 0, _SLOWER)
    try:
        torch.ops.load_library(str(LIBRARY))
        built = torch.ops.tethys_native.sources()
        if built != fingerprint():
            return Status(False, f"{LIBRARY.name} was built from other sources; run `python -m kernels.native.build` again", 0, _SLOWER)
        width = int(torch.ops.tethys_native.select_width(0))
    except (OSError, RuntimeError, AttributeError) as error:  # another libc, another torch, a library cut short
        return Status(False, f"{LIBRARY.name} does not load: {error}", 0, _SLOWER)
    name = {16: "AVX-512", 8: "AVX2", 4: "128-bit vectors"}[width]
    half = "bfloat16 products in hardware" if torch.ops.tethys_native.has_half() else "bfloat16 products only emulated"
    return Status(True, f"native kernels, {name}, {half}", width, "none")


@functools.cache
def _ops() -> Any:
    """The operators; RuntimeError with the reason where the library cannot run."""
    if not status().available:
        raise RuntimeError(f"native kernels: {status().reason}")
    return torch.ops.tethys_native


def select_width(width: int) -> int:
    """Vectors of 16, 8 or 4 floats for every later call of this process (0: the widest); returns the width, 0 if the processor lacks it."""
    return int(_ops().select_width(width))


def fma_peak(seconds: float = 0.2) -> float:
    """FLOP/s of one core's fused multiply-adds in registers: the limit every share of peak is measured against (best of the time given)."""
    fma, best, end = _ops().fma_flops, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()  # processor time: a busy neighbour is not a slower processor
        flops = fma(100_000)
        best = max(best, flops / (time.thread_time() - start))
    return best


def _half(precision: Precision) -> bool:
    """Whether products round their operands to bfloat16; sums, states, gates and triangles are float32 in any case."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    return precision == "bfloat16"


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _rows(x: Tensor) -> Tensor:
    """Unit stride in the last dimension, which is all the kernels ask of q, k and v."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_rows(x: Tensor, d: int) -> Tensor:
    """(B, H, T, d) laid out as (B, T, H, d), so that joining the heads afterwards is a view."""
    B, H, T, _ = x.shape
    return x.new_empty(B, T, H, d).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------- matrix memory


def supports(*tensors: Tensor) -> str:
    """Empty if the native kernels run here and take tensors of this dtype and device, else why not."""
    if not status().available:
        return status().reason
    for x in tensors:
        if x.dtype is not torch.float32 or x.device.type != "cpu":
            return f"native kernels are float32 on the CPU, not {x.dtype} on {x.device}"
    return ""


def supports_linear(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, state: MatrixState, decayed_error: bool = False) -> str:
    """Empty if `linear_exact` here can take the call, else why not."""
    if not status().available:
        return status().reason
    if decayed_error:
        return "decayed_error is not native"
    if alpha is not None and alpha.dim() == 4:
        return "channel-wise forgetting is not native"
    return supports(q, k, v, *state)


def linear_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: MatrixState,
    *,
    chunk: int = 64,
    read: str = "after",
    write: Tensor | None = None,
    precision: Precision = "float32",
) -> tuple[Tensor, MatrixState]:
    """`kernels.linear.linear_exact`, float32: q, k (B, H, T, d_k), v (B, H, T, d_v), gates (B, H, T), state (B, H, d_v, d_k)."""
    half = _half(precision)
    if read not in ("after", "before"):
        raise ValueError(f"linear_exact: read is 'after' or 'before', not {read!r}")
    if q.shape[2] == 0:
        return torch.zeros_like(v), state
    q, k, v = _rows(q), _rows(k), _rows(v)
    W, S = state.W.contiguous(), state.S.contiguous()
    if _wants_grad(q, k, v, theta, eta, alpha, W, S):
        y, W, S = _Linear.apply(q, k, v, theta, eta, alpha, write, W, S, chunk, read == "before", half)  # type: ignore[no-untyped-call]
        return y, MatrixState(W, S)
    y, W1, S1 = _empty_rows(v, v.shape[-1]), torch.empty_like(W), torch.empty_like(S)
    _ops().linear_forward(q, k, v, theta, eta, alpha, write, W, S, y, W1, S1, None, chunk, read == "before", half)
    return y, MatrixState(W1, S1)


def linear_step_(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor | None, alpha: Tensor | None, state: MatrixState, y: Tensor
) -> None:
    """One token, in place: q, k (B, H, 1, d_k), v and y (B, H, 1, d_v); `state` and `y` are overwritten. Under inference_mode only."""
    W, S = state
    _ops().linear_forward(q, k, v, theta, eta, alpha, None, W, S, y, W, S, None, 1, False, False)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor | None, alpha: Tensor | None, write: Tensor | None, W: Tensor,
        S: Tensor, chunk: int, before: bool, half: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ops = _ops()
        B, H, T, d_v = v.shape
        saved = v.new_empty(B * H * ops.linear_saved(T, k.shape[-1], d_v, chunk))
        y, W1, S1 = _empty_rows(v, d_v), torch.empty_like(W), torch.empty_like(S)
        ops.linear_forward(q, k, v, theta, eta, alpha, write, W, S, y, W1, S1, saved, chunk, before, half)
        ctx.save_for_backward(q, k, v, theta, eta, alpha, write, saved)
        ctx.flags = (chunk, before, half)
        return y, W1, S1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dW1: Tensor, dS1: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, theta, eta, alpha, write, saved = ctx.saved_tensors
        dq, dk, dv = _empty_rows(q, q.shape[-1]), _empty_rows(k, k.shape[-1]), _empty_rows(v, v.shape[-1])
        gates = [None if g is None else torch.empty_like(g) for g in (theta, eta, alpha)]
        dW1, dS1 = dW1.contiguous(), dS1.contiguous()
        dW, dS = torch.empty_like(dW1), torch.empty_like(dS1)
        _ops().linear_backward(
            q, k, v, theta, eta, alpha, write, saved, _rows(dy), dW1, dS1, dq, dk, dv, *gates, dW, dS, *ctx.flags
        )
        return dq, dk, dv, *gates, None, dW, dS, None, None, None


# ---------------------------------------------------------------------------------------------------------------- deep memory


def supports_deep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DeepState,
    network: Network = DEFAULT,
    gamma: Tensor | None = None,
    exact_last: bool = False,
) -> str:
    """Empty if `deep` here can take the call, else why not."""
    if not status().available:
        return status().reason
    if len(state.W) != 2 or network.gated:
        return "native deep memories have 2 layers and no gate"
    if network.loss != "l2" or network.unit_hidden:
        return "native deep memories have the l2 loss and plain hidden features"
    if gamma is not None or state.keys.shape[2] or exact_last:
        return "the Omega window and the exact last layer are not native"
    return supports(q, k, v, *state.W, *state.S, *state.anchor)


def deep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: DeepState,
    *,
    init: Sequence[Tensor] | None,
    chunk: int = 16,
    network: Network = DEFAULT,
    affine: tuple[Tensor, Tensor] | None = None,
    read: str = "after",
    write: Tensor | None = None,
    precision: Precision = "float32",
) -> tuple[Tensor, DeepState]:
    """`kernels.mlp.deep` for two layers, float32: q, k (B, H, T, d_in), v (B, H, T, d_out), gates (B, H, T, 2) or (B, H, T) shared.

    One call may mix streams at different places of their chunks; unlike the torch form this costs nothing.
    """
    if read not in READS:
        raise ValueError(f"deep: read is one of {READS}, not {read!r}")
    if q.shape[2] == 0:
        return torch.zeros_like(v), state
    T = q.shape[2]
    phase = state.phase.contiguous()
    outer = _outer(init, affine, network)
    tensors = (*state.W, *state.S, *state.anchor)
    flags = (chunk, READS.index(read), network.norm, network.residual, network.eps, _half(precision))
    gates = tuple(_by_layer(g) for g in (theta, eta, alpha))
    if _wants_grad(q, k, v, theta, eta, alpha, *tensors, *outer):
        y, *out = _Deep.apply(write, phase, flags, _rows(q), _rows(k), _rows(v), *gates, *outer, *tensors)  # type: ignore[no-untyped-call]
    else:
        y, out = _empty_rows(v, v.shape[-1]), [torch.empty_like(x) for x in tensors]
        _ops().deep_forward(
            _rows(q), _rows(k), _rows(v), *gates, write, phase, *outer, [x.contiguous() for x in tensors], y, out, None, 0, *flags
        )
    written = T if write is None else write.sum(-1)
    new = DeepState(tuple(out[:2]), tuple(out[2:4]), tuple(out[4:]), (phase + written) % chunk, state.keys, state.values)
    return y, new


def deep_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: DeepState,
    y: Tensor,
    *,
    init: Sequence[Tensor] | None,
    chunk: int,
    network: Network = DEFAULT,
    affine: tuple[Tensor, Tensor] | None = None,
    read: str = "after",
) -> None:
    """One token, in place: q, k, v and y (B, H, 1, d); `state`, its phase included, and `y` are overwritten. Under inference_mode only."""
    tensors = [*state.W, *state.S, *state.anchor]
    _ops().deep_forward(
        q, k, v, _by_layer(theta), _by_layer(eta), _by_layer(alpha), None, state.phase, *_outer(init, affine, network), tensors, y, tensors,
        None, 0, chunk, READS.index(read), network.norm, network.residual, network.eps, False,
    )  # fmt: skip
    state.phase.add_(1).remainder_(chunk)


def _by_layer(gate: Tensor | None) -> Tensor | None:
    """(B, H, T) -> (B, H, T, 2) of stride 0, which the kernels recognise as shared."""
    return gate.unsqueeze(-1).expand(-1, -1, -1, 2) if gate is not None and gate.dim() == 3 else gate


def _outer(
    init: Sequence[Tensor] | None, affine: tuple[Tensor, Tensor] | None, network: Network
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    first, second = [*(x.contiguous() for x in init or ()), None, None][:2]
    scale, shift = (None, None) if affine is None or not network.norm else (affine[0].contiguous(), affine[1].contiguous())
    return first, second, scale, shift


class _Deep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, write: Tensor | None, phase: Tensor, flags: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, theta: Tensor,
        eta: Tensor | None, alpha: Tensor | None, init1: Tensor | None, init2: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ops = _ops()
        B, H, T, d_out = v.shape
        h, d_in = state[0].shape[-2:]
        blocks = ops.deep_count(phase, write, T, flags[0])
        saved = v.new_empty(B * H * blocks * ops.deep_saved(d_in, d_out, h))
        state = tuple(x.contiguous() for x in state)
        y, out = _empty_rows(v, d_out), [torch.empty_like(x) for x in state]
        ops.deep_forward(q, k, v, theta, eta, alpha, write, phase, init1, init2, scale, shift, list(state), y, out, saved, blocks, *flags)
        ctx.save_for_backward(q, k, v, theta, eta, alpha, write, phase, init1, init2, scale, shift, state[4], state[5], saved)
        ctx.flags, ctx.blocks = flags, blocks
        return y, *out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *dstate: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, theta, eta, alpha, write, phase, init1, init2, scale, shift, anchor1, anchor2, saved = ctx.saved_tensors
        dstate = tuple(x.contiguous() for x in dstate)
        B, H, T, d_out = v.shape
        dq, dk, dv = _empty_rows(q, q.shape[-1]), _empty_rows(k, k.shape[-1]), _empty_rows(v, d_out)
        given = [g for g in (theta, eta, alpha) if g is not None]
        shared = all(g.stride(-1) == 0 for g in given)  # then the kernel writes the sum over layers to layer 0
        dgates = [
            None if g is None else torch.empty_like(g[..., :1] if shared else g, memory_format=torch.contiguous_format)
            for g in (theta, eta, alpha)
        ]
        grads = [torch.empty_like(x) for x in dstate]
        dinit = [] if init1 is None else [dstate[0].new_empty(B, *init1.shape), dstate[0].new_empty(B, *init2.shape)]
        daffine = [] if scale is None else [v.new_empty(B, H, d_out), v.new_empty(B, H, d_out)]
        _ops().deep_backward(
            q, k, v, theta, eta, alpha, write, phase, init1, init2, scale, shift, [anchor1, anchor2], saved, ctx.blocks, _rows(dy),
            list(dstate), dq, dk, dv, *(g if g is None else g.expand(B, H, T, 2) for g in dgates), [*grads, *dinit, *daffine], *ctx.flags,
        )  # fmt: skip
        if shared:  # `expand` in the forward pass sums over its copies: all of the gradient in the first, zeros in the second
            dgates = [None if g is None else torch.nn.functional.pad(g, [0, 1]) for g in dgates]
        outer = [x.sum(0) for x in (*dinit, *daffine)]
        outer = ([None, None] if init1 is None else outer[:2]) + ([None, None] if scale is None else outer[-2:])
        return None, None, None, dq, dk, dv, *dgates, *outer, *grads


# ---------------------------------------------------------------------------------------------------------------- around a memory


def conv_heads(u: Tensor, tail: Tensor, weight: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, d) from u = x W_qkv (B, T, 3 D): causal depthwise convolution, SiLU, and rows of length `scale` for q and k.

    tail (B, taps - 1, 3 D): the inputs before the first token; weight (taps, 3 D), its last row for the newest input.
    """
    return _ConvHeads.apply(u, tail.contiguous(), weight.contiguous(), heads, scale)  # type: ignore[no-untyped-call]


def gated_norm(y: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """(B, T, D) from reads y (B, H, T, d) and g (B, T, D): RMSNorm of every head's row, times weight (d), times SiLU(g)."""
    return _GatedNorm.apply(_rows(y), g, weight.contiguous())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Form:
    """What a whole layer computes, apart from its weights.

    theta = sigmoid(.) (1 - eta if momentum) / divisor; queries and keys have length `scale`. chunk, network and read are those of the memory.
    precision: of the products, those of the memory included; one token alone is always float32.
    """

    heads: int
    scale: float
    divisor: float
    chunk: int
    network: Network = DEFAULT
    read: str = "after"
    momentum: bool = True
    decay: bool = True
    precision: Precision = "float32"


class Layer:
    """A whole memory layer without autograd in one call: projections, convolution, gates, memory, norm, output gate, projection.

    Built once from trained weights, which it copies: qkv (3 D, D), gate (D, D), gates (3 H L, D) with bias (3 H L) in the order alpha, eta,
    theta (L = 1 for a matrix memory, 2 for a deep one), conv (taps, 3 D), norm (D / H), out (D, D). init: what the memory decays
    towards, each (H, out, in); None: zero. The state of a matrix memory is its difference from it.
    """

    def __init__(self, weights: Sequence[Tensor], init: Sequence[Tensor] | None, form: Form) -> None:
        def columns(weight: Tensor) -> Tensor:  # an odd number of whole vectors a row: rows then fall into different cache sets
            wide = (-(-weight.shape[0] // 16) | 1) * 16
            return torch.nn.functional.pad(weight.detach().mT, [0, wide - weight.shape[0]]).contiguous()

        qkv, gate, gates, bias, conv, norm, out = weights
        outer = (None if x is None else x.detach() for x in _outer(init, None, form.network))
        self._call = _ops().layer.default
        self._fixed = (
            columns(torch.cat((qkv, gate, gates))), *(x.detach().clone() for x in (conv, bias, norm)), columns(out), *outer,
            form.heads, form.scale, form.divisor, form.momentum, form.decay, form.chunk, READS.index(form.read), form.network.norm,
            form.network.residual, form.network.eps, _half(form.precision),
        )  # fmt: skip

    def __call__(self, x: Tensor, tail: Tensor, memory: MatrixState | DeepState) -> Tensor:
        """x (B, T, D) -> y (B, T, D); tail (B, taps - 1, 3 D) and `memory`, phase included, are overwritten. Under inference_mode only."""
        y = torch.empty_like(x)
        if isinstance(memory, DeepState):
            self._call(x, tail, [*memory.W, *memory.S, *memory.anchor], memory.phase, y, *self._fixed)
        else:
            self._call(x, tail, [*memory], None, y, *self._fixed)
        return y


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, tail: Tensor, weight: Tensor, heads: int, scale: float) -> tuple[Tensor, ...]:
        out = torch.empty_like(u, memory_format=torch.contiguous_format)
        _ops().heads_forward(u, tail, weight, out, heads, scale)
        ctx.save_for_backward(u, tail, weight)
        ctx.heads, ctx.scale = heads, scale
        B, T, width = u.shape
        return tuple(out.view(B, T, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4).unbind(0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        u, tail, weight = ctx.saved_tensors
        du, dtail = torch.empty_like(u, memory_format=torch.contiguous_format), torch.empty_like(tail)
        dweight = weight.new_empty(u.shape[0], *weight.shape)
        _ops().heads_backward(u, tail, weight, *map(_rows, grads), du, dtail, dweight, ctx.heads, ctx.scale)
        return du, dtail, dweight.sum(0), None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(g, memory_format=torch.contiguous_format)
        _ops().gate_forward(y, g, weight, out)
        ctx.save_for_backward(y, g, weight)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, g, weight = ctx.saved_tensors
        dy, dg = _empty_rows(y, y.shape[-1]), torch.empty_like(g, memory_format=torch.contiguous_format)
        dweight = weight.new_empty(*y.shape[:2], y.shape[-1])
        _ops().gate_backward(y, g, weight, dout.contiguous(), dy, dg, dweight)
        return dy, dg, dweight.sum((0, 1))
