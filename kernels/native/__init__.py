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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.linear import MatrixState

__all__ = ["Status", "fma_peak", "linear_exact", "linear_step_", "status", "supports_linear"]


HERE = Path(__file__).parent
LIBRARY = HERE / "tethys_native.so"  # made by kernels.native.build
SOURCES = ("core.h", "vector.h", "coefficients.h", "linear.h", "core.cpp", "bindings.cpp")


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
    return Status(True, f"native kernels, {name}", width, "none")


def select_width(width: int) -> int:
    """Vectors of 16, 8 or 4 floats for every later call of this process (0: the widest); returns the width, 0 if the processor lacks it."""
    return int(torch.ops.tethys_native.select_width(width)) if status().available else 0


def fma_peak(seconds: float = 0.2) -> float:
    """FLOP/s of one core's fused multiply-adds in registers: the limit every share of peak is measured against (best of the time given)."""
    fma, best, end = torch.ops.tethys_native.fma_flops, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()  # processor time: a busy neighbour is not a slower processor
        flops = fma(100_000)
        best = max(best, flops / (time.thread_time() - start))
    return best


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


def supports_linear(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, state: MatrixState, decayed_error: bool = False
) -> str:
    """Empty if `linear_exact` here can take the call, else why not."""
    if not status().available:
        return status().reason
    if decayed_error:
        return "decayed_error is not native"
    if alpha is not None and alpha.dim() == 4:
        return "channel-wise forgetting is not native"
    for x in (q, k, v, *state):
        if x.dtype is not torch.float32 or x.device.type != "cpu":
            return f"native kernels are float32 on the CPU, not {x.dtype} on {x.device}"
    return ""


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
) -> tuple[Tensor, MatrixState]:
    """`kernels.linear.linear_exact`, float32: q, k (B, H, T, d_k), v (B, H, T, d_v), gates (B, H, T), state (B, H, d_v, d_k)."""
    if read not in ("after", "before"):
        raise ValueError(f"linear_exact: read is 'after' or 'before', not {read!r}")
    if q.shape[2] == 0:
        return torch.zeros_like(v), state
    q, k, v = _rows(q), _rows(k), _rows(v)
    W, S = state.W.contiguous(), state.S.contiguous()
    if _wants_grad(q, k, v, theta, eta, alpha, W, S):
        y, W, S = _Linear.apply(q, k, v, theta, eta, alpha, write, W, S, chunk, read == "before")  # type: ignore[no-untyped-call]
        return y, MatrixState(W, S)
    y, W1, S1 = _empty_rows(v, v.shape[-1]), torch.empty_like(W), torch.empty_like(S)
    torch.ops.tethys_native.linear_forward(q, k, v, theta, eta, alpha, write, W, S, y, W1, S1, None, chunk, read == "before")
    return y, MatrixState(W1, S1)


def linear_step_(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor | None, alpha: Tensor | None, state: MatrixState, y: Tensor
) -> None:
    """One token, in place: q, k (B, H, 1, d_k), v and y (B, H, 1, d_v); `state` and `y` are overwritten. For streams under inference_mode."""
    W, S = state
    torch.ops.tethys_native.linear_forward(q, k, v, theta, eta, alpha, None, W, S, y, W, S, None, 1, False)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor | None, alpha: Tensor | None, write: Tensor | None, W: Tensor,
        S: Tensor, chunk: int, before: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ops = torch.ops.tethys_native
        B, H, T, d_v = v.shape
        saved = v.new_empty(B * H * ops.linear_saved(T, k.shape[-1], d_v, chunk))
        y, W1, S1 = _empty_rows(v, d_v), torch.empty_like(W), torch.empty_like(S)
        ops.linear_forward(q, k, v, theta, eta, alpha, write, W, S, y, W1, S1, saved, chunk, before)
        ctx.save_for_backward(q, k, v, theta, eta, alpha, write, saved)
        ctx.chunk, ctx.before = chunk, before
        return y, W1, S1

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor, dW1: Tensor, dS1: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, theta, eta, alpha, write, saved = ctx.saved_tensors
        dq, dk, dv = _empty_rows(q, q.shape[-1]), _empty_rows(k, k.shape[-1]), _empty_rows(v, v.shape[-1])
        gates = [None if g is None else torch.empty_like(g) for g in (theta, eta, alpha)]
        dW1, dS1 = dW1.contiguous(), dS1.contiguous()
        dW, dS = torch.empty_like(dW1), torch.empty_like(dS1)
        torch.ops.tethys_native.linear_backward(
            q, k, v, theta, eta, alpha, write, saved, _rows(dy), dW1, dS1, dq, dk, dv, *gates, dW, dS, ctx.chunk, ctx.before
        )
        return dq, dk, dv, *gates, None, dW, dS, None, None
