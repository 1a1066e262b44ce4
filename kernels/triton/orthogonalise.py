"""Newton-Schulz orthogonalisation on a GPU, forward and backward (twin of `kernels.newton_schulz`).

One program a matrix. X passes through memory in tiles of columns, so the longer side has no limit; products of the small
Gram matrix A = X X^T with itself pass through memory too, for their operands would fill the registers at once.
"""

# The bodies of kernels are another language, which no type checker follows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton import target
from kernels.triton.target import COUNTS, LARGEST_WIDTH, block, matmul, operand, put, tile

MUON = ((3.4445, -4.7750, 2.0315),) * 5


@triton.jit
def _gram(x_p, base, A_p, n, row, rows, cols, BM: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """A = X X^T and A A; A is left in memory."""
    A = tl.zeros((BM, BM), tl.float32)
    for left in range(0, cols, BN):
        x = tile(x_p, base, row, rows, left + tl.arange(0, BN), cols, cols)
        A += matmul(x, tl.trans(x), DT, PREC)
    put(A_p, n * rows, row, rows, row, rows, rows, A)
    tl.debug_barrier()
    return A, _times(A_p, n * rows, A_p, n * rows, row, rows, BM, DT, PREC)


@triton.jit
def _times(x_p, x_base, y_p, y_base, row, rows, BM: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """Product of two square matrices in memory."""
    out = tl.zeros((BM, BM), tl.float32)
    for left in range(0, rows, 16):
        inner = left + tl.arange(0, 16)
        x = tile(x_p, x_base, row, rows, inner, rows, rows)
        out += matmul(x, tile(y_p, y_base, inner, rows, row, rows, rows), DT, PREC)
    return out


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    S_p, X_p, A_p, B_p, inverse_p, steps_p, steps, rows, cols, eps,
    BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """KEEP: X of step i in slot i of `steps` + 1; else every step in the one slot."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BM)
    slots = 1
    if KEEP:
        slots = steps + 1
    total = 0.0
    for left in range(0, cols, BN):
        x = tile(S_p, n * rows, row, rows, left + tl.arange(0, BN), cols, cols)
        total += tl.sum(x * x)
    inverse = 1.0 / tl.sqrt(total + eps * eps)
    tl.store(inverse_p + n, inverse)
    for left in range(0, cols, BN):
        col = left + tl.arange(0, BN)
        put(X_p, n * slots * rows, row, rows, col, cols, cols, inverse * tile(S_p, n * rows, row, rows, col, cols, cols))
    tl.debug_barrier()
    for step in range(0, steps):
        base = n * slots * rows
        after = base
        if KEEP:
            base += step * rows
            after = base + rows
        A, square = _gram(X_p, base, A_p, n, row, rows, cols, BM, BN, DT, PREC)
        put(B_p, n * rows, row, rows, row, rows, rows, tl.load(steps_p + 3 * step + 1) * A + tl.load(steps_p + 3 * step + 2) * square)
        tl.debug_barrier()
        for left in range(0, cols, BN):
            col = left + tl.arange(0, BN)
            x = tl.load(steps_p + 3 * step) * tile(X_p, base, row, rows, col, cols, cols)
            for top in range(0, rows, 16):
                inner = top + tl.arange(0, 16)
                B = tile(B_p, n * rows, row, rows, inner, rows, rows)
                x += matmul(B, tile(X_p, base, inner, rows, col, cols, cols), DT, PREC)
            tl.debug_barrier()  # every thread has read this tile before it is overwritten
            put(X_p, after, row, rows, col, cols, cols, x)
        tl.debug_barrier()


@triton.jit(do_not_specialize=COUNTS)
def _backward(
    X_p, D_p, A_p, B_p, C_p, inverse_p, dS_p, steps_p, steps, rows, cols,
    BM: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """D holds the gradient of the result and is overwritten by those of the steps before.

    X' = a X + B X, B = b A + c A A:  dB = dX' X^T, dA = b dB + c (dB A + A dB), dX = (a + B) dX' + (dA + dA^T) X.
    """
    n = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BM)
    for back in range(0, steps):
        step = steps - 1 - back
        base = n * (steps + 1) * rows + step * rows
        b = tl.load(steps_p + 3 * step + 1)
        c = tl.load(steps_p + 3 * step + 2)
        A, square = _gram(X_p, base, A_p, n, row, rows, cols, BM, BN, DT, PREC)
        put(B_p, n * rows, row, rows, row, rows, rows, b * A + c * square)
        dB = tl.zeros((BM, BM), tl.float32)
        for left in range(0, cols, BN):
            col = left + tl.arange(0, BN)
            x = tile(X_p, base, row, rows, col, cols, cols)
            dB += matmul(tile(D_p, n * rows, row, rows, col, cols, cols), tl.trans(x), DT, PREC)
        dB += tl.trans(dB)  # A is symmetric, so only the symmetric part of dB counts
        put(C_p, n * rows, row, rows, row, rows, rows, dB)
        tl.debug_barrier()
        mixed = _times(C_p, n * rows, A_p, n * rows, row, rows, BM, DT, PREC)
        tl.debug_barrier()
        put(C_p, n * rows, row, rows, row, rows, rows, b * dB + c * (mixed + tl.trans(mixed)))
        tl.debug_barrier()
        for left in range(0, cols, BN):
            col = left + tl.arange(0, BN)
            d = tl.load(steps_p + 3 * step) * tile(D_p, n * rows, row, rows, col, cols, cols)
            for top in range(0, rows, 16):
                inner = top + tl.arange(0, 16)
                B = tile(B_p, n * rows, row, rows, inner, rows, rows)
                d += matmul(B, tile(D_p, n * rows, inner, rows, col, cols, cols), DT, PREC)
                C = tile(C_p, n * rows, row, rows, inner, rows, rows)
                d += matmul(C, tile(X_p, base, inner, rows, col, cols, cols), DT, PREC)
            tl.debug_barrier()
            put(D_p, n * rows, row, rows, col, cols, cols, d)
        tl.debug_barrier()
    along = 0.0  # X_0 = S / sqrt(||S||^2 + eps^2)
    first = n * (steps + 1) * rows
    for left in range(0, cols, BN):
        col = left + tl.arange(0, BN)
        along += tl.sum(tile(D_p, n * rows, row, rows, col, cols, cols) * tile(X_p, first, row, rows, col, cols, cols))
    inverse = tl.load(inverse_p + n)
    for left in range(0, cols, BN):
        col = left + tl.arange(0, BN)
        d = tile(D_p, n * rows, row, rows, col, cols, cols) - along * tile(X_p, first, row, rows, col, cols, cols)
        put(dS_p, n * rows, row, rows, col, cols, cols, inverse * d)


def _meta(S: torch.Tensor) -> dict[str, Any]:
    return {
        "BM": block(S.shape[1]), "BN": min(block(S.shape[2]), 32), "DT": operand(S.dtype), "PREC": target.precision(),
        **target.options(2),
    }  # fmt: skip


class _Orthogonalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: torch.Tensor, steps: Sequence[tuple[float, float, float]], eps: float) -> torch.Tensor:
        N, rows, cols = S.shape
        keep = ctx.needs_input_grad[0]
        X = torch.empty(N, len(steps) + 1 if keep else 1, rows, cols, device=S.device)
        A, B = (torch.empty(N, rows, rows, device=S.device) for _ in range(2))
        inverse = torch.empty(N, device=S.device)
        table = torch.tensor(steps, device=S.device, dtype=torch.float32)
        _forward[(N,)](S, X, A, B, inverse, table, len(steps), rows, cols, eps, KEEP=keep, **_meta(S))
        if keep:
            ctx.save_for_backward(X, inverse, table)
            ctx.dtype = S.dtype
        return X[:, -1].to(S.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dX: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        X, inverse, table = ctx.saved_tensors
        N, _, rows, cols = X.shape
        D = dX.float().clone(memory_format=torch.contiguous_format)
        A, B, C = (torch.empty(N, rows, rows, device=X.device) for _ in range(3))
        dS = torch.empty(N, rows, cols, device=X.device, dtype=ctx.dtype)
        _backward[(N,)](X, D, A, B, C, inverse, dS, table, len(table), rows, cols, **_meta(dS))
        return dS, None, None


def newton_schulz(S: torch.Tensor, steps: Sequence[tuple[float, float, float]] = MUON, eps: float = 1e-4) -> torch.Tensor:
    """As `kernels.newton_schulz.newton_schulz`: S (..., m, n) -> about U V^T, in S's dtype.

    Raises ValueError where the smaller side exceeds 128.
    """
    if S.shape[-2] > S.shape[-1]:
        return newton_schulz(S.mT, steps, eps).mT
    if S.shape[-2] > LARGEST_WIDTH:
        raise ValueError(f"newton_schulz: {tuple(S.shape[-2:])} has no side of at most {LARGEST_WIDTH}; use the torch form")
    target.require("newton_schulz", S)
    return _Orthogonalise.apply(S.reshape(-1, *S.shape[-2:]).contiguous(), tuple(steps), eps).view(S.shape)
