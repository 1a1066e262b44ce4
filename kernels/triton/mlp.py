"""The memory of two layers on a GPU, in the dual form (twin of `kernels.mlp` at depth 2), forward and backward.

M(x) = x + LN(W_2 gelu(W_1 x)), norm and residual by option. Gradients of a chunk are those at the weights A_1, A_2 that
it began with, so that they are outer products of deltas and inputs known at once:

    Z_1 = K A_1^T ; A = gelu(Z_1) ; Z_2 = A A_2^T ; D_2 = LN-backward(out - V) ; D_1 = (D_2 A_2) o gelu'(Z_1)
    read   Z_1q = b o Q W_1^T + f o Q S_1^T - (Q K^T o G_1) D_1 ; A_q = gelu(Z_1q)
           Z_2q = b o A_q W_2^T + f o A_q S_2^T - (A_q A^T o G_2) D_2
    carry  W_1 = b_n W_1 + f_n S_1 - (g o D_1)^T K, and so for S_1, W_2, S_2

The first layer's error needs every hidden unit, so the state kernel has one program a head. It keeps no weight in
registers: it walks the hidden units in tiles, and weights and momentum pass through their chunk-start buffer, which the
other kernels need anyway and which stays in the L2 cache. Reading is parallel over chunks. Backward mirrors this: reads of
all chunks at once, the states from last to first, then the rest of the gradients of all chunks at once.
"""

# The bodies of kernels are another language, which no type checker follows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.network import DEFAULT, Network
from kernels.triton import target
from kernels.triton.coefficients import Coefficients, Gates, Rows, coefficients, coefficients_backward, new_rows
from kernels.triton.cut import LARGEST_CHUNK, Cut, phased_cut, span
from kernels.triton.target import COUNTS, LARGEST_WIDTH, block, flat, matmul, operand, put, some, storage, tile

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _gelu(z):
    return 0.5 * z * (1.0 + tl.erf(z * SQRT_HALF))


@triton.jit
def _slope(z):
    return 0.5 * (1.0 + tl.erf(z * SQRT_HALF)) + z * tl.exp(-0.5 * z * z) * INV_SQRT_2PI


@triton.jit
def _bend(z):
    """Second derivative of gelu."""
    return (2.0 - z * z) * tl.exp(-0.5 * z * z) * INV_SQRT_2PI


@triton.jit
def _norm(z, inside, dv, eps):
    """(z - mean) / sqrt(var + eps) of each row over its dv columns, and the factor."""
    centred = tl.where(inside, z - tl.sum(z, 1)[:, None] / dv, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / dv + eps)
    return centred * inverse[:, None], inverse


@triton.jit
def _norm_backward(g, unit, inverse, inside, dv):
    """Gradient of a row before the norm, given that after it; its own adjoint in g."""
    mean = tl.sum(g, 1)[:, None] / dv
    along = tl.sum(g * unit, 1)[:, None] / dv
    return tl.where(inside, (g - mean - unit * along) * inverse[:, None], 0.0)


@triton.jit
def _affine(scale_p, shift_p, head, col, dv, AFFINE: tl.constexpr):
    if AFFINE:
        scale = tl.load(scale_p + head * dv + col, mask=col < dv, other=0.0).to(tl.float32)
        shift = tl.load(shift_p + head * dv + col, mask=col < dv, other=0.0).to(tl.float32)
    else:
        scale = tl.where(col < dv, 1.0, 0.0)
        shift = tl.zeros(col.shape, tl.float32)
    return scale[None, :], shift[None, :]


@triton.jit
def _last(g_p, s_p, end_p, slot, col, keys, BJ: tl.constexpr):
    """Rows g, s and numbers b, f, m of the end of a chunk."""
    g = tl.load(g_p + slot * BJ + col, mask=col < keys, other=0.0)[:, None]
    s = tl.load(s_p + slot * BJ + col, mask=col < keys, other=0.0)[:, None]
    return g, s, tl.load(end_p + slot * 3), tl.load(end_p + slot * 3 + 1), tl.load(end_p + slot * 3 + 2)


@triton.jit(do_not_specialize=COUNTS)
def _state(
    k_p, v_p, g_p, s_p, end_p, starts_p, carried_p, last_p, anchor1_p, anchor2_p, init1_p, init2_p, scale_p, shift_p,
    W1_p, S1_p, W2_p, S2_p, Z1_p, Z2_p, D1_p, D2_p, out1_p, out2_p,
    length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr, hidden, eps,
    BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, INIT: tl.constexpr, AFFINE: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Deltas of every chunk and the state at its start, in slot x of the weights' buffers; slot 0 holds the call's state."""
    n = tl.program_id(0).to(tl.int64)
    head = n % per
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    vcol = tl.arange(0, BV)
    scale, shift = _affine(scale_p, shift_p, head, vcol, dv, AFFINE)
    carried = tl.load(carried_p + n // per)
    last = tl.load(last_p + n // per)
    for x in range(0, chunks):
        start, count = span(starts_p, n // per, stride, x)
        keys = tl.where(count > 0, count + W - 1, 0)
        token = n * (length + W - 1) + start
        slot = n * chunks + x
        at = n * (chunks + 1) + x
        k = tile(k_p, token, col, keys, kcol, dk, dk)
        a1_p = W1_p + at * hidden * dk
        a2_p = W2_p + at * dv * hidden
        if x == 0:
            if carried != 0:
                a1_p = anchor1_p + n * hidden * dk
                a2_p = anchor2_p + n * dv * hidden
        z2 = tl.zeros((BJ, BV), tl.float32)
        for left in range(0, hidden, BH):
            hcol = left + tl.arange(0, BH)
            a1 = tile(a1_p, 0, hcol, hidden, kcol, dk, dk)
            a2 = tile(a2_p, 0, vcol, dv, hcol, hidden, hidden)
            z1 = matmul(k, tl.trans(a1), DT, PREC)
            put(Z1_p, slot * BJ, col, keys, hcol, hidden, hidden, z1)
            z2 += matmul(_gelu(z1), tl.trans(a2), DT, PREC)
            if x == last:
                put(out1_p, n * hidden, hcol, hidden, kcol, dk, dk, a1)
                put(out2_p, n * dv, vcol, dv, hcol, hidden, hidden, a2)
        put(Z2_p, slot * BJ, col, keys, vcol, dv, dv, z2)
        wanted = tile(v_p, token, col, keys, vcol, dv, dv)
        if RESIDUAL:
            wanted -= k
        if NORM:
            inside = (vcol < dv)[None, :]
            unit, inverse = _norm(z2, inside, dv, eps)
            d2 = _norm_backward((unit * scale + shift - wanted) * scale, unit, inverse, inside, dv)
        else:
            d2 = z2 - wanted
        put(D2_p, slot * BJ, col, keys, vcol, dv, dv, d2)
        g1, s1, b1, f1, m1 = _last(g_p, s_p, end_p, n * L * chunks + x, col, keys, BJ)
        g2, s2, b2, f2, m2 = _last(g_p, s_p, end_p, (n * L + L - 1) * chunks + x, col, keys, BJ)
        kt = tl.trans(k)
        tl.debug_barrier()  # Z1 was stored by other threads
        for left in range(0, hidden, BH):
            hcol = left + tl.arange(0, BH)
            z1 = tile(Z1_p, slot * BJ, col, keys, hcol, hidden, hidden)
            d1 = matmul(d2, tile(a2_p, 0, vcol, dv, hcol, hidden, hidden), DT, PREC) * _slope(z1)
            put(D1_p, slot * BJ, col, keys, hcol, hidden, hidden, d1)
            w = tile(W1_p, at * hidden, hcol, hidden, kcol, dk, dk)
            s = tile(S1_p, at * hidden, hcol, hidden, kcol, dk, dk)
            if INIT:
                w = b1 * w + (1.0 - b1) * tile(init1_p, head * hidden, hcol, hidden, kcol, dk, dk)
            else:
                w = b1 * w
            w += f1 * s - tl.trans(matmul(kt, g1 * d1, DT, PREC))
            s = m1 * s - tl.trans(matmul(kt, s1 * d1, DT, PREC))
            put(W1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk, w)
            put(S1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk, s)
            a = _gelu(z1)
            w = tile(W2_p, at * dv, vcol, dv, hcol, hidden, hidden)
            s = tile(S2_p, at * dv, vcol, dv, hcol, hidden, hidden)
            if INIT:
                w = b2 * w + (1.0 - b2) * tile(init2_p, head * dv, vcol, dv, hcol, hidden, hidden)
            else:
                w = b2 * w
            w += f2 * s - matmul(tl.trans(g2 * d2), a, DT, PREC)
            s = m2 * s - matmul(tl.trans(s2 * d2), a, DT, PREC)
            put(W2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden, w)
            put(S2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden, s)
        tl.debug_barrier()  # the next chunk reads slot x + 1


@triton.jit(do_not_specialize=COUNTS)
def _output(
    q_p, k_p, G_p, b_p, f_p, starts_p, init1_p, init2_p, scale_p, shift_p, W1_p, S1_p, W2_p, S2_p, Z1_p, D1_p, D2_p,
    Z1q_p, Z2q_p, P_p, y_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr, hidden, eps,
    BC: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, INIT: tl.constexpr, AFFINE: tl.constexpr, KEEP: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    head = n % per
    start, count = span(starts_p, n // per, stride, x)
    keys = tl.where(count > 0, count + W - 1, 0)
    slot = n * chunks + x
    at = n * (chunks + 1) + x
    first = n * L * chunks + x
    second = (n * L + L - 1) * chunks + x
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    vcol = tl.arange(0, BV)
    q = tile(q_p, n * length + start, row, count, kcol, dk, dk)
    k = tile(k_p, n * (length + W - 1) + start, col, keys, kcol, dk, dk)
    A1 = tile(G_p, first * BC, row, count, col, keys, BJ) * matmul(q, tl.trans(k), DT, PREC)
    b1 = tl.load(b_p + first * BC + row, mask=row < count, other=0.0)[:, None]
    f1 = tl.load(f_p + first * BC + row, mask=row < count, other=0.0)[:, None]
    b2 = tl.load(b_p + second * BC + row, mask=row < count, other=0.0)[:, None]
    f2 = tl.load(f_p + second * BC + row, mask=row < count, other=0.0)[:, None]
    P = tl.zeros((BC, BJ), tl.float32)
    z2 = tl.zeros((BC, BV), tl.float32)
    for left in range(0, hidden, BH):
        hcol = left + tl.arange(0, BH)
        w = tile(W1_p, at * hidden, hcol, hidden, kcol, dk, dk)
        z1 = matmul(f1 * q, tl.trans(tile(S1_p, at * hidden, hcol, hidden, kcol, dk, dk)), DT, PREC)
        if INIT:
            init = tile(init1_p, head * hidden, hcol, hidden, kcol, dk, dk)
            w -= init
            z1 += matmul(q, tl.trans(init), DT, PREC)
        z1 += matmul(b1 * q, tl.trans(w), DT, PREC)
        z1 -= matmul(A1, tile(D1_p, slot * BJ, col, keys, hcol, hidden, hidden), DT, PREC)
        aq = _gelu(z1)
        P += matmul(aq, tl.trans(_gelu(tile(Z1_p, slot * BJ, col, keys, hcol, hidden, hidden))), DT, PREC)
        w = tile(W2_p, at * dv, vcol, dv, hcol, hidden, hidden)
        z2 += matmul(f2 * aq, tl.trans(tile(S2_p, at * dv, vcol, dv, hcol, hidden, hidden)), DT, PREC)
        if INIT:
            init = tile(init2_p, head * dv, vcol, dv, hcol, hidden, hidden)
            w -= init
            z2 += matmul(aq, tl.trans(init), DT, PREC)
        z2 += matmul(b2 * aq, tl.trans(w), DT, PREC)
        if KEEP:
            put(Z1q_p, slot * BC, row, count, hcol, hidden, hidden, z1)
    A2 = P * tile(G_p, second * BC, row, count, col, keys, BJ)
    z2 -= matmul(A2, tile(D2_p, slot * BJ, col, keys, vcol, dv, dv), DT, PREC)
    if KEEP:
        put(P_p, slot * BC, row, count, col, BJ, BJ, P)
        put(Z2q_p, slot * BC, row, count, vcol, dv, dv, z2)
    if NORM:
        scale, shift = _affine(scale_p, shift_p, head, vcol, dv, AFFINE)
        unit, _ = _norm(z2, (vcol < dv)[None, :], dv, eps)
        z2 = unit * scale + shift
    if RESIDUAL:
        z2 += q
    put(y_p, n * length + start, row, count, vcol, dv, dv, z2)


@triton.jit(do_not_specialize=COUNTS)
def _output_backward(
    q_p, k_p, G_p, b_p, f_p, starts_p, init1_p, init2_p, scale_p, shift_p, W1_p, S1_p, W2_p, S2_p, Z1_p, D1_p, D2_p,
    Z1q_p, Z2q_p, P_p, dy_p,
    dq_p, dk_p, dG_p, db_p, df_p, dW1_p, dS1_p, dW2_p, dS2_p, dinit1_p, dinit2_p, dA_p, dD1_p, dD2_p, dscale_p, dshift_p,
    length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr, hidden, eps,
    BC: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, INIT: tl.constexpr, AFFINE: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Back through the reads of a chunk: what they give to its start state, its deltas and its activations.

    Gates shared by the layers (L = 1) still get one gradient a layer here.
    """
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    head = n % per
    start, count = span(starts_p, n // per, stride, x)
    keys = tl.where(count > 0, count + W - 1, 0)
    slot = n * chunks + x
    at = n * (chunks + 1) + x
    first = n * L * chunks + x
    second = (n * L + L - 1) * chunks + x
    dfirst = n * 2 * chunks + x
    dsecond = dfirst + chunks
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    vcol = tl.arange(0, BV)
    dy = tile(dy_p, n * length + start, row, count, vcol, dv, dv)
    dz2 = dy
    if NORM:
        inside = (vcol < dv)[None, :]
        scale, _ = _affine(scale_p, shift_p, head, vcol, dv, AFFINE)
        unit, inverse = _norm(tile(Z2q_p, slot * BC, row, count, vcol, dv, dv), inside, dv, eps)
        dz2 = _norm_backward(dy * scale, unit, inverse, inside, dv)
        if AFFINE:
            tl.store(dscale_p + slot * dv + vcol, tl.sum(dy * unit, 0), mask=vcol < dv)
            tl.store(dshift_p + slot * dv + vcol, tl.sum(dy, 0), mask=vcol < dv)
    G2 = tile(G_p, second * BC, row, count, col, keys, BJ)
    P = tile(P_p, slot * BC, row, count, col, keys, BJ)
    dP = -matmul(dz2, tl.trans(tile(D2_p, slot * BJ, col, keys, vcol, dv, dv)), DT, PREC)
    put(dG_p, dsecond * BC, row, BC, col, BJ, BJ, dP * P)
    dP *= G2
    put(dD2_p, slot * BJ, col, BJ, vcol, dv, dv, -matmul(tl.trans(P * G2), dz2, DT, PREC))
    b1 = tl.load(b_p + first * BC + row, mask=row < count, other=0.0)[:, None]
    f1 = tl.load(f_p + first * BC + row, mask=row < count, other=0.0)[:, None]
    b2 = tl.load(b_p + second * BC + row, mask=row < count, other=0.0)[:, None]
    f2 = tl.load(f_p + second * BC + row, mask=row < count, other=0.0)[:, None]
    q = tile(q_p, n * length + start, row, count, kcol, dk, dk)
    k = tile(k_p, n * (length + W - 1) + start, col, keys, kcol, dk, dk)
    A1t = tl.trans(tile(G_p, first * BC, row, count, col, keys, BJ) * matmul(q, tl.trans(k), DT, PREC))
    db2 = tl.zeros((BC,), tl.float32)
    df2 = tl.zeros((BC,), tl.float32)
    dA1 = tl.zeros((BC, BJ), tl.float32)
    dqW = tl.zeros((BC, BK), tl.float32)
    dqS = tl.zeros((BC, BK), tl.float32)
    dq = tl.zeros((BC, BK), tl.float32)
    for left in range(0, hidden, BH):
        hcol = left + tl.arange(0, BH)
        z = tile(Z1q_p, slot * BC, row, count, hcol, hidden, hidden)
        aq = _gelu(z)
        a = _gelu(tile(Z1_p, slot * BJ, col, keys, hcol, hidden, hidden))
        w = tile(W2_p, at * dv, vcol, dv, hcol, hidden, hidden)
        dz1 = matmul(dP, a, DT, PREC)
        if INIT:
            init = tile(init2_p, head * dv, vcol, dv, hcol, hidden, hidden)
            w -= init
            dz1 += matmul(dz2, init, DT, PREC)
        through = matmul(dz2, w, DT, PREC)
        db2 += tl.sum(aq * through, 1)
        dz1 += b2 * through
        through = matmul(dz2, tile(S2_p, at * dv, vcol, dv, hcol, hidden, hidden), DT, PREC)
        df2 += tl.sum(aq * through, 1)
        dz1 += f2 * through
        dz1 *= _slope(z)
        put(dA_p, slot * BJ, col, BJ, hcol, hidden, hidden, matmul(tl.trans(dP), aq, DT, PREC))
        dw = matmul(tl.trans(b2 * dz2), aq, DT, PREC)
        put(dW2_p, at * dv, vcol, dv, hcol, hidden, hidden, dw)
        put(dS2_p, at * dv, vcol, dv, hcol, hidden, hidden, matmul(tl.trans(f2 * dz2), aq, DT, PREC))
        if INIT:
            put(dinit2_p, slot * dv, vcol, dv, hcol, hidden, hidden, matmul(tl.trans(dz2), aq, DT, PREC) - dw)

        dA1 -= matmul(dz1, tl.trans(tile(D1_p, slot * BJ, col, keys, hcol, hidden, hidden)), DT, PREC)
        put(dD1_p, slot * BJ, col, BJ, hcol, hidden, hidden, -matmul(A1t, dz1, DT, PREC))
        w = tile(W1_p, at * hidden, hcol, hidden, kcol, dk, dk)
        dw = matmul(tl.trans(b1 * dz1), q, DT, PREC)
        if INIT:
            init = tile(init1_p, head * hidden, hcol, hidden, kcol, dk, dk)
            w -= init
            dq += matmul(dz1, init, DT, PREC)
            put(dinit1_p, slot * hidden, hcol, hidden, kcol, dk, dk, matmul(tl.trans(dz1), q, DT, PREC) - dw)
        dqW += matmul(dz1, w, DT, PREC)
        dqS += matmul(dz1, tile(S1_p, at * hidden, hcol, hidden, kcol, dk, dk), DT, PREC)
        put(dW1_p, at * hidden, hcol, hidden, kcol, dk, dk, dw)
        put(dS1_p, at * hidden, hcol, hidden, kcol, dk, dk, matmul(tl.trans(f1 * dz1), q, DT, PREC))
    tl.store(db_p + dsecond * BC + row, db2)
    tl.store(df_p + dsecond * BC + row, df2)
    tl.store(db_p + dfirst * BC + row, tl.sum(q * dqW, 1))
    tl.store(df_p + dfirst * BC + row, tl.sum(q * dqS, 1))
    put(dG_p, dfirst * BC, row, BC, col, BJ, BJ, dA1 * matmul(q, tl.trans(k), DT, PREC))
    dA1 *= tile(G_p, first * BC, row, count, col, keys, BJ)
    dq += b1 * dqW + f1 * dqS + matmul(dA1, k, DT, PREC)
    if RESIDUAL:
        dq += dy
    put(dq_p, n * length + start, row, count, kcol, dk, dk, dq)
    put(dk_p, slot * BJ, col, BJ, kcol, dk, dk, matmul(tl.trans(dA1), q, DT, PREC))


@triton.jit(do_not_specialize=COUNTS)
def _state_backward(
    k_p, v_p, g_p, s_p, end_p, starts_p, carried_p, last_p, anchor2_p, scale_p, shift_p,
    W2_p, Z1_p, Z2_p, D1_p, D2_p, dA_p, dD1_p, dD2_p, dout1_p, dout2_p,
    dW1_p, dS1_p, dW2_p, dS2_p, danchor1_p, danchor2_p, dZ1_p, dR_p, dscale_p, dshift_p,
    length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr, hidden, eps,
    BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, INIT: tl.constexpr, AFFINE: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first. Slot x of the gradients' buffers receives the gradient of the state that chunk x
    starts with, on top of what the chunk's reads put there; slot `chunks` holds that of the call's result.

    Second order: the deltas are gradients themselves, of a loss at the anchor.
    """
    n = tl.program_id(0).to(tl.int64)
    head = n % per
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    vcol = tl.arange(0, BV)
    inside = (vcol < dv)[None, :]
    scale, shift = _affine(scale_p, shift_p, head, vcol, dv, AFFINE)
    carried = tl.load(carried_p + n // per)
    last = tl.load(last_p + n // per)
    dscale = tl.zeros((BV,), tl.float32)
    dshift = tl.zeros((BV,), tl.float32)
    for back in range(0, chunks):
        x = chunks - 1 - back
        start, count = span(starts_p, n // per, stride, x)
        keys = tl.where(count > 0, count + W - 1, 0)
        token = n * (length + W - 1) + start
        slot = n * chunks + x
        at = n * (chunks + 1) + x
        a2_p = W2_p + at * dv * hidden
        ours = 1  # the anchor is the state that the chunk starts with
        if x == 0:
            if carried != 0:
                a2_p = anchor2_p + n * dv * hidden
            if (carried != 0) | (last < 0):
                ours = 0
        outside = (x == last) | ((x == 0) & (last < 0))  # the anchor is a result of the call
        k = tile(k_p, token, col, keys, kcol, dk, dk)
        d2 = tile(D2_p, slot * BJ, col, keys, vcol, dv, dv)
        g1, s1, b1, f1, m1 = _last(g_p, s_p, end_p, n * L * chunks + x, col, keys, BJ)
        g2, s2, b2, f2, m2 = _last(g_p, s_p, end_p, (n * L + L - 1) * chunks + x, col, keys, BJ)
        dd2 = tile(dD2_p, slot * BJ, col, keys, vcol, dv, dv)
        for left in range(0, hidden, BH):
            hcol = left + tl.arange(0, BH)
            z1 = tile(Z1_p, slot * BJ, col, keys, hcol, hidden, hidden)
            dd1 = tile(dD1_p, slot * BJ, col, keys, hcol, hidden, hidden)
            dd1 -= g1 * matmul(k, tl.trans(tile(dW1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk)), DT, PREC)
            dd1 -= s1 * matmul(k, tl.trans(tile(dS1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk)), DT, PREC)
            a2 = tile(a2_p, 0, vcol, dv, hcol, hidden, hidden)
            put(dZ1_p, slot * BJ, col, keys, hcol, hidden, hidden, dd1 * matmul(d2, a2, DT, PREC) * _bend(z1))
            dd1 *= _slope(z1)
            put(dD1_p, slot * BJ, col, keys, hcol, hidden, hidden, dd1)
            dd2 += matmul(dd1, tl.trans(a2), DT, PREC)
            a = _gelu(z1)
            dd2 -= g2 * matmul(a, tl.trans(tile(dW2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden)), DT, PREC)
            dd2 -= s2 * matmul(a, tl.trans(tile(dS2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden)), DT, PREC)
        if NORM:
            unit, inverse = _norm(tile(Z2_p, slot * BJ, col, keys, vcol, dv, dv), inside, dv, eps)
            wanted = tile(v_p, token, col, keys, vcol, dv, dv)
            if RESIDUAL:
                wanted -= k
            error = tl.where((col < keys)[:, None], unit * scale + shift - wanted, 0.0)
            g = error * scale
            dg = _norm_backward(dd2, unit, inverse, inside, dv)
            dr = dg * scale
            # the norm's own backward depends on unit and inverse
            dunit = dr * scale - inverse[:, None] * (dd2 * (tl.sum(g * unit, 1)[:, None] / dv) + g * (tl.sum(dd2 * unit, 1)[:, None] / dv))
            along = tl.sum(dd2 * d2, 1) * inverse / dv  # d2 has the factor inverse, and d inverse / d z2 = -inverse^2 unit / dv
            dz2 = _norm_backward(dunit, unit, inverse, inside, dv) - unit * along[:, None]
            if AFFINE:
                dscale += tl.sum(dg * error + dr * unit, 0)
                dshift += tl.sum(dr, 0)
        else:
            dr = dd2
            dz2 = dd2
        put(dR_p, slot * BJ, col, keys, vcol, dv, dv, dr)
        tl.debug_barrier()  # dZ1 and dD1 were stored by other threads
        for left in range(0, hidden, BH):
            hcol = left + tl.arange(0, BH)
            z1 = tile(Z1_p, slot * BJ, col, keys, hcol, hidden, hidden)
            a = _gelu(z1)
            dw = tile(dW2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden)
            ds = tile(dS2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden)
            da = tile(dA_p, slot * BJ, col, keys, hcol, hidden, hidden)
            da += matmul(dz2, tile(a2_p, 0, vcol, dv, hcol, hidden, hidden), DT, PREC)
            da -= matmul(g2 * d2, dw, DT, PREC) + matmul(s2 * d2, ds, DT, PREC)
            dz1 = tile(dZ1_p, slot * BJ, col, keys, hcol, hidden, hidden) + da * _slope(z1)
            put(dZ1_p, slot * BJ, col, keys, hcol, hidden, hidden, dz1)
            dd1 = tile(dD1_p, slot * BJ, col, keys, hcol, hidden, hidden)
            danchor = matmul(tl.trans(d2), dd1, DT, PREC) + matmul(tl.trans(dz2), a, DT, PREC)
            if outside:
                danchor += tile(dout2_p, n * dv, vcol, dv, hcol, hidden, hidden)
            put(dS2_p, at * dv, vcol, dv, hcol, hidden, hidden,
                tile(dS2_p, at * dv, vcol, dv, hcol, hidden, hidden) + f2 * dw + m2 * ds)  # fmt: skip
            dw = b2 * dw + tile(dW2_p, at * dv, vcol, dv, hcol, hidden, hidden)
            if ours != 0:
                dw += danchor
            else:
                put(danchor2_p, n * dv, vcol, dv, hcol, hidden, hidden, danchor)
            put(dW2_p, at * dv, vcol, dv, hcol, hidden, hidden, dw)

            dw = tile(dW1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk)
            ds = tile(dS1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk)
            danchor = matmul(tl.trans(dz1), k, DT, PREC)
            if outside:
                danchor += tile(dout1_p, n * hidden, hcol, hidden, kcol, dk, dk)
            put(dS1_p, at * hidden, hcol, hidden, kcol, dk, dk,
                tile(dS1_p, at * hidden, hcol, hidden, kcol, dk, dk) + f1 * dw + m1 * ds)  # fmt: skip
            dw = b1 * dw + tile(dW1_p, at * hidden, hcol, hidden, kcol, dk, dk)
            if ours != 0:
                dw += danchor
            else:
                put(danchor1_p, n * hidden, hcol, hidden, kcol, dk, dk, danchor)
            put(dW1_p, at * hidden, hcol, hidden, kcol, dk, dk, dw)
        tl.debug_barrier()  # the chunk before reads slot x
    if AFFINE:
        tl.store(dscale_p + n * dv + vcol, dscale, mask=vcol < dv)
        tl.store(dshift_p + n * dv + vcol, dshift, mask=vcol < dv)


@triton.jit(do_not_specialize=COUNTS)
def _key_backward(
    k_p, g_p, s_p, starts_p, carried_p, anchor1_p, init1_p, init2_p, W1_p, S1_p, W2_p, S2_p, Z1_p, D1_p, D2_p,
    dW1_p, dS1_p, dW2_p, dS2_p, dZ1_p, dR_p, dkq_p,
    dk_p, dv_p, dg_p, ds_p, dend_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr, hidden, eps,
    BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, INIT: tl.constexpr, AFFINE: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, values and the coefficients of the chunk's end, once those of all states are known."""
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    head = n % per
    start, count = span(starts_p, n // per, stride, x)
    keys = tl.where(count > 0, count + W - 1, 0)
    token = n * (length + W - 1) + start
    slot = n * chunks + x
    at = n * (chunks + 1) + x
    dfirst = n * 2 * chunks + x
    dsecond = dfirst + chunks
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    vcol = tl.arange(0, BV)
    k = tile(k_p, token, col, keys, kcol, dk, dk)
    d2 = tile(D2_p, slot * BJ, col, keys, vcol, dv, dv)
    a1_p = W1_p + at * hidden * dk
    if x == 0:
        if tl.load(carried_p + n // per) != 0:
            a1_p = anchor1_p + n * hidden * dk
    first = (n * L * chunks + x) * BJ
    grad = tile(dkq_p, slot * BJ, col, keys, kcol, dk, dk)
    dr = tile(dR_p, slot * BJ, col, keys, vcol, dv, dv)
    if RESIDUAL:
        grad += dr
    dkg = tl.zeros((BJ, BK), tl.float32)
    dks = tl.zeros((BJ, BK), tl.float32)
    dg2 = tl.zeros((BJ,), tl.float32)
    ds2 = tl.zeros((BJ,), tl.float32)
    db1 = 0.0
    df1 = 0.0
    dm1 = 0.0
    db2 = 0.0
    df2 = 0.0
    dm2 = 0.0
    for left in range(0, hidden, BH):
        hcol = left + tl.arange(0, BH)
        dz1 = tile(dZ1_p, slot * BJ, col, keys, hcol, hidden, hidden)
        d1 = tile(D1_p, slot * BJ, col, keys, hcol, hidden, hidden)
        grad += matmul(dz1, tile(a1_p, 0, hcol, hidden, kcol, dk, dk), DT, PREC)
        dw = tile(dW1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk)
        ds = tile(dS1_p, (at + 1) * hidden, hcol, hidden, kcol, dk, dk)
        dkg -= matmul(d1, dw, DT, PREC)
        dks -= matmul(d1, ds, DT, PREC)
        w = tile(W1_p, at * hidden, hcol, hidden, kcol, dk, dk)
        s = tile(S1_p, at * hidden, hcol, hidden, kcol, dk, dk)
        if INIT:
            w -= tile(init1_p, head * hidden, hcol, hidden, kcol, dk, dk)
        db1 += tl.sum(dw * w)
        df1 += tl.sum(dw * s)
        dm1 += tl.sum(ds * s)
        a = _gelu(tile(Z1_p, slot * BJ, col, keys, hcol, hidden, hidden))
        dw = tile(dW2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden)
        ds = tile(dS2_p, (at + 1) * dv, vcol, dv, hcol, hidden, hidden)
        dg2 -= tl.sum(a * matmul(d2, dw, DT, PREC), 1)
        ds2 -= tl.sum(a * matmul(d2, ds, DT, PREC), 1)
        w = tile(W2_p, at * dv, vcol, dv, hcol, hidden, hidden)
        s = tile(S2_p, at * dv, vcol, dv, hcol, hidden, hidden)
        if INIT:
            w -= tile(init2_p, head * dv, vcol, dv, hcol, hidden, hidden)
        db2 += tl.sum(dw * w)
        df2 += tl.sum(dw * s)
        dm2 += tl.sum(ds * s)
    tl.store(dg_p + dfirst * BJ + col, tl.sum(k * dkg, 1))
    tl.store(ds_p + dfirst * BJ + col, tl.sum(k * dks, 1))
    tl.store(dg_p + dsecond * BJ + col, dg2)
    tl.store(ds_p + dsecond * BJ + col, ds2)
    tl.store(dend_p + dfirst * 3, db1)
    tl.store(dend_p + dfirst * 3 + 1, df1)
    tl.store(dend_p + dfirst * 3 + 2, dm1)
    tl.store(dend_p + dsecond * 3, db2)
    tl.store(dend_p + dsecond * 3 + 1, df2)
    tl.store(dend_p + dsecond * 3 + 2, dm2)
    grad += tl.load(g_p + first + col, mask=col < keys, other=0.0)[:, None] * dkg
    grad += tl.load(s_p + first + col, mask=col < keys, other=0.0)[:, None] * dks
    if W == 1:
        put(dk_p, token, col, keys, kcol, dk, dk, grad)
        put(dv_p, token, col, keys, vcol, dv, dv, -dr)
    else:  # a key lies in the windows of two chunks
        there = (col < keys)[:, None]
        tl.atomic_add(dk_p + token * dk + (col[:, None] * dk + kcol[None, :]), grad, mask=there & (kcol < dk)[None, :])
        tl.atomic_add(dv_p + token * dv + (col[:, None] * dv + vcol[None, :]), -dr, mask=there & (vcol < dv)[None, :])


class _Form:
    """Sizes and options of one call: everything that kernels take besides tensors."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: int, network: Network, heads: int, cut: Cut, layers: int,
                 init: bool, affine: bool) -> None:  # fmt: skip
        dk, dv = k.shape[-1], v.shape[-1]
        small = q.dtype == torch.float32
        self.kept = storage(q.dtype)
        self.sizes = (cut.length, cut.chunks, cut.stride, heads, dk, dv, hidden)
        self.number = (*self.sizes, network.eps)
        self.meta: dict[str, Any] = {
            "BJ": cut.keys, "BK": block(dk), "BV": block(dv), "BH": min(block(hidden), 16 if small else 32), "W": cut.window,
            "L": layers, "NORM": network.norm, "RESIDUAL": network.residual, "INIT": init, "AFFINE": affine,
            "DT": operand(q.dtype), "PREC": target.precision(), **target.options(1),
        }  # fmt: skip


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, coefs: Coefficients, seen: Rows,
    W1: torch.Tensor, W2: torch.Tensor, S1: torch.Tensor, S2: torch.Tensor, anchor1: torch.Tensor, anchor2: torch.Tensor,
    init: tuple[torch.Tensor | None, ...], affine: tuple[torch.Tensor | None, ...], cut: Cut, form: _Form, keep: bool,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:  # fmt: skip
    """Results (y, W1, W2, S1, S2, anchor1, anchor2), and what the backward pass reads."""
    N, hidden, dv = q.shape[0], W1.shape[1], v.shape[-1]

    def slots(first: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(N, cut.chunks + 1, *first.shape[1:], device=first.device)
        buffer[:, 0] = first
        return buffer

    W1s, S1s, W2s, S2s = (slots(x) for x in (W1, S1, W2, S2))
    Z1, D1 = (cut.blocks(q, N, cut.keys, hidden, dtype=form.kept) for _ in range(2))
    Z2, D2 = (cut.blocks(q, N, cut.keys, dv, dtype=form.kept) for _ in range(2))
    out1, out2 = anchor1.clone(), anchor2.clone()
    fixed = (*some(W1, *init), *some(W1, *affine))
    _state[(N,)](
        k, v, coefs.g, coefs.s, coefs.end, cut.starts, cut.carried, cut.last, anchor1, anchor2, *fixed,
        W1s, S1s, W2s, S2s, Z1, Z2, D1, D2, out1, out2, *form.number, **form.meta,
    )  # fmt: skip
    Z1q, Z2q, P = (cut.blocks(q, N, cut.tokens, size, dtype=form.kept) if keep else None for size in (hidden, dv, cut.keys))
    y = torch.empty(N, cut.length, dv, device=q.device, dtype=v.dtype)
    _output[(N, cut.chunks)](
        q, k, *seen, cut.starts, *fixed, W1s, S1s, W2s, S2s, Z1, D1, D2, *some(Z1, Z1q, Z2q, P), y,
        *form.number, BC=cut.tokens, KEEP=keep, **form.meta,
    )  # fmt: skip
    ends = (x[:, -1].contiguous() for x in (W1s, W2s, S1s, S2s))
    return (y, *ends, out1, out2), (W1s, S1s, W2s, S2s, Z1, Z2, D1, D2, Z1q, Z2q, P)


class _Memory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, theta: torch.Tensor, eta: torch.Tensor | None,
        alpha: torch.Tensor | None, gamma: torch.Tensor | None, W1: torch.Tensor, W2: torch.Tensor, S1: torch.Tensor,
        S2: torch.Tensor, anchor1: torch.Tensor, anchor2: torch.Tensor, init1: torch.Tensor | None, init2: torch.Tensor | None,
        scale: torch.Tensor | None, shift: torch.Tensor | None, cut: Cut, heads: int, layers: int, network: Network, read: str,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        gates = Gates(theta, eta, alpha, gamma, heads * layers, layers)
        after = read == "after"
        coefs = coefficients(gates, cut, after=after, before=not after)
        seen = coefs.after or coefs.before
        assert seen is not None
        form = _Form(q, k, v, W1.shape[1], network, heads, cut, layers, init1 is not None, scale is not None)
        keep = any(ctx.needs_input_grad)
        results, kept = _run(q, k, v, coefs, seen, W1, W2, S1, S2, anchor1, anchor2, (init1, init2), (scale, shift), cut, form, keep)
        if keep:
            inputs = (q, k, v, theta, eta, alpha, gamma, anchor1, anchor2, init1, init2, scale, shift)
            ctx.save_for_backward(*inputs, *seen, coefs.g, coefs.s, coefs.end, *kept)
            ctx.cut, ctx.gates, ctx.form, ctx.after = cut, (heads * layers, layers), form, after
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *dends: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, theta, eta, alpha, gamma, anchor1, anchor2, init1, init2, scale, shift, *rest = ctx.saved_tensors
        seen, (g, s, end), kept = rest[:3], rest[3:6], rest[6:]
        W1s, S1s, W2s, S2s, Z1, Z2, D1, D2, Z1q, Z2q, P = kept
        cut, form = ctx.cut, ctx.form
        gates = Gates(theta, eta, alpha, gamma, *ctx.gates)
        N, dv = q.shape[0], v.shape[-1]
        grid, tokens = (N, cut.chunks), {"BC": cut.tokens}
        dy = dy.contiguous()
        dW1, dW2, dS1, dS2 = (torch.empty_like(x) for x in (W1s, W2s, S1s, S2s))
        for buffer, grad in zip((dW1, dW2, dS1, dS2), dends, strict=False):
            buffer[:, -1] = grad
        dout1, dout2 = (x.contiguous() for x in dends[4:])
        fixed, affine = (*some(W1s, init1, init2), *some(W1s, scale, shift)), some(W1s, scale, shift)

        dq = torch.empty_like(q)
        dkq = cut.blocks(q, N, cut.keys, k.shape[-1], dtype=form.kept)
        rows = new_rows(cut, q, 2 * N)
        dg, ds, dend = (cut.blocks(q, 2 * N, size) for size in (cut.keys, cut.keys, 3))
        dinit1, dinit2 = (None if x is None else cut.blocks(q, N, *x.shape[1:]) for x in (init1, init2))
        dA, dD1, dZ1, dD2, dR = (torch.empty_like(x) for x in (Z1, D1, Z1, D2, D2))
        read_scale, read_shift = (None if x is None else cut.blocks(q, N, dv) for x in (scale, shift))
        _output_backward[grid](
            q, k, *seen, cut.starts, *fixed, W1s, S1s, W2s, S2s, Z1, D1, D2, Z1q, Z2q, P, dy,
            dq, dkq, *rows, dW1, dS1, dW2, dS2, *some(dq, dinit1, dinit2), dA, dD1, dD2, *some(dq, read_scale, read_shift),
            *form.number, **tokens, **form.meta,
        )  # fmt: skip
        danchor1, danchor2 = torch.zeros_like(anchor1), torch.zeros_like(anchor2)
        write_scale, write_shift = (None if x is None else torch.empty(N, dv, device=q.device) for x in (scale, shift))
        _state_backward[(N,)](
            k, v, g, s, end, cut.starts, cut.carried, cut.last, anchor2, *affine,
            W2s, Z1, Z2, D1, D2, dA, dD1, dD2, dout1, dout2,
            dW1, dS1, dW2, dS2, danchor1, danchor2, dZ1, dR, *some(dq, write_scale, write_shift), *form.number, **form.meta,
        )  # fmt: skip
        new, kind = (torch.empty, None) if cut.window == 1 else (torch.zeros, torch.float32)
        dk_, dv_ = (new(x.shape, device=x.device, dtype=kind or x.dtype) for x in (k, v))
        _key_backward[grid](
            k, g, s, cut.starts, cut.carried, anchor1, *some(W1s, init1, init2), W1s, S1s, W2s, S2s, Z1, D1, D2,
            dW1, dS1, dW2, dS2, dZ1, dR, dkq, dk_, dv_, dg, ds, dend, *form.number, **form.meta,
        )  # fmt: skip
        heads = ctx.gates[0] // ctx.gates[1]
        if dinit1 is not None and dinit2 is not None:
            ends = end.view(N, -1, cut.chunks, 3)[..., 0]
            dinit1 = _init_gradient(dinit1, dW1, ends[:, 0], heads)
            dinit2 = _init_gradient(dinit2, dW2, ends[:, -1], heads)
        dscale = dshift = None
        if read_scale is not None and read_shift is not None:
            dscale = (read_scale.sum(1) + write_scale).view(-1, heads, dv).sum(0)
            dshift = (read_shift.sum(1) + write_shift).view(-1, heads, dv).sum(0)
        if ctx.gates[1] == 1:  # shared gates: the layers' gradients add up
            rows = Rows(*(_over_layers(part) for part in rows))
            dg, ds, dend = (_over_layers(part) for part in (dg, ds, dend))
        grads = Coefficients(rows if ctx.after else None, None if ctx.after else rows, dg, ds, dend)
        dtheta, deta, dalpha, dgamma = coefficients_backward(gates, cut, grads)
        if dgamma is not None:
            dgamma = dgamma.view(N, -1, *dgamma.shape[1:]).sum(1)
        return (
            dq, dk_.to(k.dtype), dv_.to(v.dtype), dtheta, deta, dalpha, dgamma,
            dW1[:, 0], dW2[:, 0], dS1[:, 0], dS2[:, 0], danchor1, danchor2, dinit1, dinit2, dscale, dshift,
            None, None, None, None, None,
        )  # fmt: skip


def _over_layers(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1, 2, *part.shape[1:]).sum(1)


def _init_gradient(read: torch.Tensor, dW: torch.Tensor, kept: torch.Tensor, heads: int) -> torch.Tensor:
    """(H, out, in): from reads (N, X, out, in) and from W' = b W + (1 - b) init at the end of each chunk."""
    ends = torch.einsum("nx,nxoi->noi", 1.0 - kept, dW[:, 1:])
    return (read.sum(1) + ends).view(-1, heads, *read.shape[2:]).sum(0)


PIECE = 64  # chunks a launch without autograd: the buffer of chunk-start states does not grow with T


def deep(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, theta: torch.Tensor, eta: torch.Tensor | None, alpha: torch.Tensor | None,
    state: Any, *, init: Sequence[torch.Tensor] | None, chunk: int = 16, network: Network = DEFAULT,
    affine: tuple[torch.Tensor, torch.Tensor] | None = None, read: str = "after", write: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None, exact_last: bool = False,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """As `kernels.mlp.deep` for a memory of two layers: q, k (B, H, T, d_in), v (B, H, T, d_out), gates (B, H, T[, 2]).

    The state is float32 whatever the dtype of q, k, v. Raises ValueError for what only the torch form has: other depths,
    gated and unit_hidden networks, loss "dot", read "anchor", exact_last, gamma together with write, chunks above 128
    tokens (window included), widths above 128.
    """
    if len(state.W) != 2 or network.gated or network.unit_hidden or network.loss != "l2" or exact_last or read == "anchor":
        raise ValueError("deep: Triton has two layers, loss 'l2', reads 'after' and 'before'; the rest has only the torch form")
    if gamma is not None and write is not None:
        raise ValueError("deep: gamma together with write has only the torch form")
    lags = state.keys.shape[2]
    if (0 if gamma is None else gamma.shape[-1] - 1) != lags:
        raise ValueError(f"deep: the state carries a window of c = {lags + 1} tokens; gamma (..., c) must have the same c")
    if chunk + lags > LARGEST_CHUNK:
        raise ValueError(f"deep: chunk {chunk} with {lags} tokens before it exceeds the {LARGEST_CHUNK} rows of a program")
    B, H, T, dk = k.shape
    dv = v.shape[-1]
    if max(dk, dv) > LARGEST_WIDTH:
        raise ValueError(f"deep: widths {dk} and {dv}; a program holds at most {LARGEST_WIDTH}")
    if q.shape != k.shape or q.shape[:3] != v.shape[:3] or (network.residual and dk != dv):
        raise ValueError(f"deep: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be (B, H, T, d) with one B, H, T")
    optional = [x for x in (eta, alpha, gamma, *(init or ()), *(affine or ())) if x is not None]
    target.require("deep", q, k, v, theta, *optional, *state.W, *state.S, *state.anchor)
    if T == 0:
        return torch.zeros_like(v), state
    cut = phased_cut(T, chunk, state.phase, write, lags + 1)
    piece = T if torch.is_grad_enabled() else PIECE * chunk
    if cut.slots > LARGEST_CHUNK:
        piece = LARGEST_CHUNK
    if T > piece:
        outputs = []
        for part in (slice(at, at + piece) for at in range(0, T, piece)):
            gates = [None if x is None else x[:, :, part] for x in (eta, alpha)]
            y, state = deep(
                q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], gates[0], gates[1], state,
                init=init, chunk=chunk, network=network, affine=affine, read=read, write=None if write is None else write[:, part],
                gamma=None if gamma is None else gamma[:, :, part],
            )  # fmt: skip
            outputs.append(y)
        return torch.cat(outputs, 2), state
    keys, values = k, v
    if lags:
        keys, values = torch.cat([state.keys.to(k.dtype), k], 2), torch.cat([state.values.to(v.dtype), v], 2)
    layers = 2 if any(gate is not None and gate.dim() == 4 for gate in (theta, eta, alpha)) else 1
    y, *ends = _Memory.apply(
        *flat(q, keys, values), *(_by_layer(gate, layers) for gate in (theta, eta, alpha)), *flat(gamma, *state.W, *state.S, *state.anchor),
        *(x.contiguous() for x in init or ()), *(() if init else (None, None)),
        *(x.contiguous() for x in affine or ()), *(() if affine else (None, None)), cut, H, layers, network, read,
    )  # fmt: skip
    W, S, anchor = (tuple(x.view(B, H, *x.shape[1:]) for x in ends[i : i + 2]) for i in (0, 2, 4))
    tails = {"keys": keys[:, :, T:].to(state.keys.dtype), "values": values[:, :, T:].to(state.values.dtype)} if lags else {}
    return y.view(B, H, T, dv), state._replace(W=W, S=S, anchor=anchor, phase=cut.phase, **tails)


def _by_layer(gate: torch.Tensor | None, layers: int) -> torch.Tensor | None:
    """(B, H, T) or (B, H, T, L) -> (B * H * layers, T)."""
    if gate is None:
        return None
    if gate.dim() == 3:
        gate = gate.unsqueeze(-1).expand(*gate.shape, layers)
    return gate.movedim(-1, 2).reshape(-1, gate.shape[2]).contiguous()
