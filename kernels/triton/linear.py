"""Matrix memory on a GPU: the exact chunk form and the papers' chunk-start form, forward and backward.

Three kernels each way: one over all chunks at once (prepare), one that carries the state from chunk to chunk and is
split over the columns of the values, which are independent, and one over all chunks again (output, gradients).
Rows are tokens; with `C` the coefficient block and A = (Q K^T) o G,

    exact   E = (I + Gp o K K^T)^{-1} (bp o K W_0^T + fp o K S_0^T - V)          D.1, solved by blocks of 16 rows
    stale   E = K A_0^T - V, A_0 the weights at the chunk's start                Titans, section 3.2
    both    Y = b o Q W_0^T + f o Q S_0^T - A E
            W = b_n W_0 + f_n S_0 - (g o E)^T K,    S = m_n S_0 - (s o E)^T K

States are kept transposed (d_k, d_v) between kernels.
"""

# The bodies of kernels are another language, which no type checker follows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton import target
from kernels.triton.coefficients import Coefficients, Gates, Rows, coefficients, coefficients_backward, new_rows
from kernels.triton.cut import LARGEST_CHUNK, Cut, fixed_cut, phased_cut, span
from kernels.triton.target import COUNTS, LARGEST_WIDTH, block, flat, matmul, operand, put, some, storage, tile


@triton.jit
def _solve(N, row, BC: tl.constexpr, PREC: tl.constexpr):
    """(I + N)^{-1} for a strictly lower triangular N.

    Diagonal blocks of 16 rows by substitution, all at once; then with D their inverse and F the rest of N,
    (I + D F)^{-1} by doubling, which has few levels. Doubling on N itself would subtract binomial coefficients
    of 64 from each other when keys repeat.
    """
    diagonal = (row[:, None] // 16) == (row[None, :] // 16)
    lower = tl.where(diagonal, N, 0.0)
    across = tl.trans(lower)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for r in range(1, 16):
        weights = tl.sum(tl.where((row % 16 == r)[None, :], across, 0.0), 1)
        new = tl.sum(weights[:, None] * inverse, 0)
        inverse = tl.where(diagonal & (row % 16 == r)[:, None], inverse - new[None, :], inverse)
    if BC > 16:
        rest = tl.dot(inverse, N - lower, input_precision=PREC)
        upper = tl.where(row[:, None] == row[None, :], 1.0, 0.0) - rest
        power = rest
        if BC > 32:
            power = tl.dot(power, power, input_precision=PREC)
            upper += tl.dot(upper, power, input_precision=PREC)
        if BC > 64:
            power = tl.dot(power, power, input_precision=PREC)
            upper += tl.dot(upper, power, input_precision=PREC)
        inverse = tl.dot(upper, inverse, input_precision=PREC)
    return inverse


@triton.jit(do_not_specialize=COUNTS)
def _prepare(
    k_p, v_p, Gp_p, bp_p, fp_p, Kb_p, Kf_p, Ve_p, T_p, starts_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KEEP: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Exact: the inverse T applied to [bp o K | fp o K | V], so that the state kernel only multiplies."""
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    start, count = span(starts_p, n // per, stride, x)
    slot = n * chunks + x
    row = tl.arange(0, BC)
    kcol = tl.arange(0, BK)
    k = tile(k_p, n * length + start, row, count, kcol, dk, dk)
    Gp = tile(Gp_p, slot * BC, row, count, row, count, BC)
    T = _solve(Gp * matmul(k, tl.trans(k), DT, PREC), row, BC, PREC)
    if KEEP:
        put(T_p, slot * BC, row, BC, row, BC, BC, T)
    bp = tl.load(bp_p + slot * BC + row, mask=row < count, other=0.0)
    fp = tl.load(fp_p + slot * BC + row, mask=row < count, other=0.0)
    put(Kb_p, slot * BC, row, BC, kcol, dk, dk, matmul(T, bp[:, None] * k, DT, PREC))
    put(Kf_p, slot * BC, row, BC, kcol, dk, dk, matmul(T, fp[:, None] * k, DT, PREC))
    for left in range(0, dv, BV):
        vcol = left + tl.arange(0, BV)
        v = tile(v_p, n * length + start, row, count, vcol, dv, dv)
        put(Ve_p, slot * BC, row, BC, vcol, dv, dv, matmul(T, v, DT, PREC))


@triton.jit(do_not_specialize=COUNTS)
def _state(
    k_p, v_p, Kb_p, Kf_p, Ve_p, g_p, s_p, end_p, starts_p, carried_p, last_p, W_p, S_p, anchor_p,
    E_p, Ws_p, Ss_p, Wout_p, Sout_p, anchorout_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr,
    BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    EXACT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Errors of every chunk and the state at its start; one program a head and tile of value columns."""
    vcol = tl.program_id(1) * BV + tl.arange(0, BV)
    n = tl.program_id(0).to(tl.int64)
    kcol = tl.arange(0, BK)
    col = tl.arange(0, BJ)
    base = n * dv * dk
    at = vcol[None, :] * dk + kcol[:, None]
    inside = (kcol < dk)[:, None] & (vcol < dv)[None, :]
    Wt = tl.load(W_p + base + at, mask=inside, other=0.0).to(tl.float32)
    St = tl.load(S_p + base + at, mask=inside, other=0.0).to(tl.float32)
    for x in range(0, chunks):
        start, count = span(starts_p, n // per, stride, x)
        slot = n * chunks + x
        keys = tl.where(count > 0, count + W - 1, 0)
        token = n * (length + W - 1) + start
        put(Ws_p, slot * dk, kcol, dk, vcol, dv, dv, Wt)
        put(Ss_p, slot * dk, kcol, dk, vcol, dv, dv, St)
        k = tile(k_p, token, col, keys, kcol, dk, dk)
        if EXACT:
            Kb = tile(Kb_p, slot * BJ, col, keys, kcol, dk, dk)
            Kf = tile(Kf_p, slot * BJ, col, keys, kcol, dk, dk)
            E = matmul(Kb, Wt, DT, PREC) + matmul(Kf, St, DT, PREC)
            E -= tile(Ve_p, slot * BJ, col, keys, vcol, dv, dv)
        else:
            anchor = Wt
            if x == 0:
                if tl.load(carried_p + n // per) != 0:
                    anchor = tl.load(anchor_p + base + at, mask=inside, other=0.0).to(tl.float32)
            E = matmul(k, anchor, DT, PREC) - tile(v_p, token, col, keys, vcol, dv, dv)
            if x == tl.load(last_p + n // per):
                tl.store(anchorout_p + base + at, anchor, mask=inside)
        put(E_p, slot * BJ, col, keys, vcol, dv, dv, E)
        g = tl.load(g_p + slot * BJ + col, mask=col < keys, other=0.0)
        s = tl.load(s_p + slot * BJ + col, mask=col < keys, other=0.0)
        kt = tl.trans(k)
        Wt = tl.load(end_p + slot * 3) * Wt + tl.load(end_p + slot * 3 + 1) * St - matmul(kt, g[:, None] * E, DT, PREC)
        St = tl.load(end_p + slot * 3 + 2) * St - matmul(kt, s[:, None] * E, DT, PREC)
    tl.store(Wout_p + base + at, Wt, mask=inside)
    tl.store(Sout_p + base + at, St, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _output(
    q_p, k_p, G_p, b_p, f_p, starts_p, E_p, Ws_p, Ss_p, y_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr,
    BC: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    start, count = span(starts_p, n // per, stride, x)
    slot = n * chunks + x
    keys = tl.where(count > 0, count + W - 1, 0)
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    q = tile(q_p, n * length + start, row, count, kcol, dk, dk)
    k = tile(k_p, n * (length + W - 1) + start, col, keys, kcol, dk, dk)
    A = tile(G_p, slot * BC, row, count, col, keys, BJ) * matmul(q, tl.trans(k), DT, PREC)
    b = tl.load(b_p + slot * BC + row, mask=row < count, other=0.0)
    f = tl.load(f_p + slot * BC + row, mask=row < count, other=0.0)
    for left in range(0, dv, BV):
        vcol = left + tl.arange(0, BV)
        y = b[:, None] * matmul(q, tile(Ws_p, slot * dk, kcol, dk, vcol, dv, dv), DT, PREC)
        y += f[:, None] * matmul(q, tile(Ss_p, slot * dk, kcol, dk, vcol, dv, dv), DT, PREC)
        y -= matmul(A, tile(E_p, slot * BJ, col, keys, vcol, dv, dv), DT, PREC)
        put(y_p, n * length + start, row, count, vcol, dv, dv, y)


@triton.jit(do_not_specialize=COUNTS)
def _prepare_backward(
    q_p, k_p, G_p, starts_p, T_p, g_p, s_p, dy_p, J_p, Kg_p, Ks_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr,
    BC: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    EXACT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dE from the chunk's own outputs, J = -A^T dY, and the factors of dW, dS in it; exact: all times T^T."""
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    start, count = span(starts_p, n // per, stride, x)
    slot = n * chunks + x
    keys = tl.where(count > 0, count + W - 1, 0)
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    q = tile(q_p, n * length + start, row, count, kcol, dk, dk)
    k = tile(k_p, n * (length + W - 1) + start, col, keys, kcol, dk, dk)
    At = tl.trans(tile(G_p, slot * BC, row, count, col, keys, BJ) * matmul(q, tl.trans(k), DT, PREC))
    if EXACT:
        Tt = tl.trans(tile(T_p, slot * BC, row, BC, row, BC, BC))
        At = matmul(Tt, At, DT, PREC)
        g = tl.load(g_p + slot * BJ + col, mask=col < keys, other=0.0)
        s = tl.load(s_p + slot * BJ + col, mask=col < keys, other=0.0)
        put(Kg_p, slot * BC, row, BC, kcol, dk, dk, matmul(Tt, g[:, None] * k, DT, PREC))
        put(Ks_p, slot * BC, row, BC, kcol, dk, dk, matmul(Tt, s[:, None] * k, DT, PREC))
    for left in range(0, dv, BV):
        vcol = left + tl.arange(0, BV)
        dy = tile(dy_p, n * length + start, row, count, vcol, dv, dv)
        put(J_p, slot * BJ, col, BJ, vcol, dv, dv, -matmul(At, dy, DT, PREC))


@triton.jit(do_not_specialize=COUNTS)
def _state_backward(
    q_p, k_p, Kg_p, Ks_p, J_p, b_p, f_p, bp_p, fp_p, g_p, s_p, end_p, starts_p, carried_p, last_p, dy_p, dW_p, dS_p, danchor_p,
    dU_p, dWs_p, dSs_p, dWin_p, dSin_p, danchorin_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr,
    BC: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    EXACT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: dU (exact) or dE (stale) of every chunk and the gradient of its end state."""
    vcol = tl.program_id(1) * BV + tl.arange(0, BV)
    n = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    base = n * dv * dk
    at = vcol[None, :] * dk + kcol[:, None]
    inside = (kcol < dk)[:, None] & (vcol < dv)[None, :]
    dW = tl.load(dW_p + base + at, mask=inside, other=0.0).to(tl.float32)
    dS = tl.load(dS_p + base + at, mask=inside, other=0.0).to(tl.float32)
    for back in range(0, chunks):
        x = chunks - 1 - back
        start, count = span(starts_p, n // per, stride, x)
        slot = n * chunks + x
        keys = tl.where(count > 0, count + W - 1, 0)
        put(dWs_p, slot * dk, kcol, dk, vcol, dv, dv, dW)
        put(dSs_p, slot * dk, kcol, dk, vcol, dv, dv, dS)
        k = tile(k_p, n * (length + W - 1) + start, col, keys, kcol, dk, dk)
        if EXACT:
            Kg = tile(Kg_p, slot * BJ, col, keys, kcol, dk, dk)
            Ks = tile(Ks_p, slot * BJ, col, keys, kcol, dk, dk)
        else:
            Kg = k * tl.load(g_p + slot * BJ + col, mask=col < keys, other=0.0)[:, None]
            Ks = k * tl.load(s_p + slot * BJ + col, mask=col < keys, other=0.0)[:, None]
        dU = tile(J_p, slot * BJ, col, keys, vcol, dv, dv) - matmul(Kg, dW, DT, PREC) - matmul(Ks, dS, DT, PREC)
        put(dU_p, slot * BJ, col, keys, vcol, dv, dv, dU)

        qt = tl.trans(tile(q_p, n * length + start, row, count, kcol, dk, dk))
        dy = tile(dy_p, n * length + start, row, count, vcol, dv, dv)
        b = tl.load(b_p + slot * BC + row, mask=row < count, other=0.0)
        f = tl.load(f_p + slot * BC + row, mask=row < count, other=0.0)
        dS = tl.load(end_p + slot * 3 + 2) * dS + tl.load(end_p + slot * 3 + 1) * dW
        dS += matmul(qt, f[:, None] * dy, DT, PREC)
        dW = tl.load(end_p + slot * 3) * dW + matmul(qt, b[:, None] * dy, DT, PREC)
        kt = tl.trans(k)
        if EXACT:
            bp = tl.load(bp_p + slot * BC + col, mask=col < keys, other=0.0)
            fp = tl.load(fp_p + slot * BC + col, mask=col < keys, other=0.0)
            dW += matmul(kt, bp[:, None] * dU, DT, PREC)
            dS += matmul(kt, fp[:, None] * dU, DT, PREC)
        else:
            last = tl.load(last_p + n // per)
            danchor = matmul(kt, dU, DT, PREC)
            if (x == last) | ((x == 0) & (last < 0)):
                danchor += tl.load(danchor_p + base + at, mask=inside, other=0.0).to(tl.float32)
            ours = (x > 0) | (tl.load(carried_p + n // per) == 0)
            if ours & (last >= 0):  # the anchor was W
                dW += danchor
                danchor = tl.zeros_like(danchor)
            if x == 0:
                tl.store(danchorin_p + base + at, danchor, mask=inside)
    tl.store(dWin_p + base + at, dW, mask=inside)
    tl.store(dSin_p + base + at, dS, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _query_backward(
    q_p, k_p, G_p, b_p, f_p, starts_p, E_p, Ws_p, Ss_p, dy_p, dq_p, dG_p, db_p, df_p,
    length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr,
    BC: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    start, count = span(starts_p, n // per, stride, x)
    slot = n * chunks + x
    keys = tl.where(count > 0, count + W - 1, 0)
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    dA = tl.zeros((BC, BJ), tl.float32)
    dqW = tl.zeros((BC, BK), tl.float32)
    dqS = tl.zeros((BC, BK), tl.float32)
    for left in range(0, dv, BV):
        vcol = left + tl.arange(0, BV)
        dy = tile(dy_p, n * length + start, row, count, vcol, dv, dv)
        dA -= matmul(dy, tl.trans(tile(E_p, slot * BJ, col, keys, vcol, dv, dv)), DT, PREC)
        dqW += matmul(dy, tl.trans(tile(Ws_p, slot * dk, kcol, dk, vcol, dv, dv)), DT, PREC)
        dqS += matmul(dy, tl.trans(tile(Ss_p, slot * dk, kcol, dk, vcol, dv, dv)), DT, PREC)
    b = tl.load(b_p + slot * BC + row, mask=row < count, other=0.0)
    f = tl.load(f_p + slot * BC + row, mask=row < count, other=0.0)
    q = tile(q_p, n * length + start, row, count, kcol, dk, dk)
    k = tile(k_p, n * (length + W - 1) + start, col, keys, kcol, dk, dk)
    tl.store(db_p + slot * BC + row, tl.sum(q * dqW, 1))
    tl.store(df_p + slot * BC + row, tl.sum(q * dqS, 1))
    put(dG_p, slot * BC, row, BC, col, BJ, BJ, dA * matmul(q, tl.trans(k), DT, PREC))
    dA *= tile(G_p, slot * BC, row, count, col, keys, BJ)
    dq = b[:, None] * dqW + f[:, None] * dqS + matmul(dA, k, DT, PREC)
    put(dq_p, n * length + start, row, count, kcol, dk, dk, dq)


@triton.jit(do_not_specialize=COUNTS)
def _key_backward(
    q_p, k_p, G_p, Gp_p, bp_p, fp_p, g_p, s_p, starts_p, carried_p, E_p, dU_p, Ws_p, Ss_p, anchor_p, dWs_p, dSs_p, dy_p,
    dk_p, dv_p, dGp_p, dbp_p, dfp_p, dg_p, ds_p, dend_p, length, chunks, stride, per, dk: tl.constexpr, dv: tl.constexpr,
    BC: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    EXACT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    start, count = span(starts_p, n // per, stride, x)
    slot = n * chunks + x
    keys = tl.where(count > 0, count + W - 1, 0)
    token = n * (length + W - 1) + start
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    kcol = tl.arange(0, BK)
    dA = tl.zeros((BC, BJ), tl.float32)
    dN = tl.zeros((BC, BJ), tl.float32)
    dkU = tl.zeros((BJ, BK), tl.float32)  # through the prediction made with the (anchor) weights
    dkg = tl.zeros((BJ, BK), tl.float32)
    dks = tl.zeros((BJ, BK), tl.float32)
    dkS = tl.zeros((BJ, BK), tl.float32)
    db = 0.0
    df = 0.0
    dm = 0.0
    carried = 0
    if not EXACT:
        if x == 0:
            carried = tl.load(carried_p + n // per)
    for left in range(0, dv, BV):
        vcol = left + tl.arange(0, BV)
        E = tile(E_p, slot * BJ, col, keys, vcol, dv, dv)
        dU = tile(dU_p, slot * BJ, col, keys, vcol, dv, dv)
        dy = tile(dy_p, n * length + start, row, count, vcol, dv, dv)
        dA -= matmul(dy, tl.trans(E), DT, PREC)
        Ws = tile(Ws_p, slot * dk, kcol, dk, vcol, dv, dv)
        Ss = tile(Ss_p, slot * dk, kcol, dk, vcol, dv, dv)
        dWs = tile(dWs_p, slot * dk, kcol, dk, vcol, dv, dv)
        dSs = tile(dSs_p, slot * dk, kcol, dk, vcol, dv, dv)
        db += tl.sum(dWs * Ws)
        df += tl.sum(dWs * Ss)
        dm += tl.sum(dSs * Ss)
        dkg -= matmul(E, tl.trans(dWs), DT, PREC)
        dks -= matmul(E, tl.trans(dSs), DT, PREC)
        if EXACT:
            dN -= matmul(dU, tl.trans(E), DT, PREC)
            dkS += matmul(dU, tl.trans(Ss), DT, PREC)
        else:
            if carried != 0:
                at = vcol[None, :] * dk + kcol[:, None]
                inside = (kcol < dk)[:, None] & (vcol < dv)[None, :]
                Ws = tl.load(anchor_p + n * dv * dk + at, mask=inside, other=0.0).to(tl.float32)
        dkU += matmul(dU, tl.trans(Ws), DT, PREC)
        if W == 1:
            put(dv_p, token, col, keys, vcol, dv, dv, -dU)
        else:  # a key lies in the windows of two chunks
            at = col[:, None] * dv + vcol[None, :]
            tl.atomic_add(dv_p + token * dv + at, -dU, mask=(col < keys)[:, None] & (vcol < dv)[None, :])
    tl.store(dend_p + slot * 3, db)
    tl.store(dend_p + slot * 3 + 1, df)
    tl.store(dend_p + slot * 3 + 2, dm)
    q = tile(q_p, n * length + start, row, count, kcol, dk, dk)
    k = tile(k_p, token, col, keys, kcol, dk, dk)
    tl.store(dg_p + slot * BJ + col, tl.sum(k * dkg, 1))
    tl.store(ds_p + slot * BJ + col, tl.sum(k * dks, 1))
    g = tl.load(g_p + slot * BJ + col, mask=col < keys, other=0.0)
    s = tl.load(s_p + slot * BJ + col, mask=col < keys, other=0.0)
    grad = g[:, None] * dkg + s[:, None] * dks
    if EXACT:
        tl.store(dbp_p + slot * BC + col, tl.sum(k * dkU, 1))
        tl.store(dfp_p + slot * BC + col, tl.sum(k * dkS, 1))
        bp = tl.load(bp_p + slot * BC + col, mask=col < keys, other=0.0)
        fp = tl.load(fp_p + slot * BC + col, mask=col < keys, other=0.0)
        grad += bp[:, None] * dkU + fp[:, None] * dkS
        put(dGp_p, slot * BC, row, BC, col, BJ, BJ, dN * matmul(k, tl.trans(k), DT, PREC))
        dN *= tile(Gp_p, slot * BC, row, count, col, keys, BJ)
        grad += matmul(dN + tl.trans(dN), k, DT, PREC)
    else:
        grad += dkU
    dA *= tile(G_p, slot * BC, row, count, col, keys, BJ)
    grad += matmul(tl.trans(dA), q, DT, PREC)
    if W == 1:
        put(dk_p, token, col, keys, kcol, dk, dk, grad)
    else:
        at = col[:, None] * dk + kcol[None, :]
        tl.atomic_add(dk_p + token * dk + at, grad, mask=(col < keys)[:, None] & (kcol < dk)[None, :])


class _Sizes(NamedTuple):
    dk: int
    dv: int
    BK: int
    BV: int


def _sizes(k: torch.Tensor, v: torch.Tensor) -> _Sizes:
    dk, dv = k.shape[-1], v.shape[-1]
    return _Sizes(dk, dv, block(dk), min(block(dv), 16 if k.dtype == torch.float32 else 32))


def _options(q: torch.Tensor, cut: Cut, sizes: _Sizes) -> dict[str, int]:
    """Three products for one leave float32 fewer registers to keep loads in."""
    return target.options(2 if q.dtype == torch.float32 else 3, small=max(cut.keys, sizes.BK) <= 32)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Gates, W: torch.Tensor, S: torch.Tensor,
    anchor: torch.Tensor | None, cut: Cut, read: str, keep: bool,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:  # fmt: skip
    """q, k, v (N, T (+ c - 1), d), states (N, d_v, d_k); anchor None: the exact form.

    Results (y, W, S[, anchor]), and what the backward pass reads.
    """
    N, exact = q.shape[0], anchor is None
    sizes = _sizes(k, v)
    dk, dv, BK, BV = sizes
    DT, PREC, kept = operand(q.dtype), target.precision(), storage(q.dtype)
    after = read == "after"
    coefs = coefficients(gates, cut, after=after, before=exact or not after)
    grid, common = (N, cut.chunks), (cut.length, cut.chunks, cut.stride, gates.per, dk, dv)
    meta = {"BJ": cut.keys, "BK": BK, "BV": BV, "W": cut.window, "DT": DT, "PREC": PREC, **_options(q, cut, sizes)}
    T = None
    Kb = Kf = Ve = k
    if exact:
        assert coefs.before is not None
        Kb, Kf, Ve = (cut.blocks(q, N, cut.tokens, width, dtype=kept) for width in (dk, dk, dv))
        T = cut.blocks(q, N, cut.tokens, cut.tokens) if keep else None
        _prepare[grid](
            k, v, *coefs.before, Kb, Kf, Ve, *some(Kb, T), cut.starts, *common,
            BC=cut.tokens, BK=BK, BV=BV, KEEP=keep, DT=DT, PREC=PREC, **_options(q, cut, sizes),
        )  # fmt: skip
    E = cut.blocks(q, N, cut.keys, dv, dtype=kept)
    Ws, Ss = (cut.blocks(q, N, dk, dv, dtype=kept) for _ in range(2))
    Wout, Sout = torch.empty_like(W), torch.empty_like(S)
    anchorout = None if anchor is None else anchor.clone()
    _state[(N, triton.cdiv(dv, BV))](
        k, v, Kb, Kf, Ve, coefs.g, coefs.s, coefs.end, cut.starts, *some(cut.starts, cut.carried, cut.last),
        W, S, *some(W, anchor), E, Ws, Ss, Wout, Sout, *some(Wout, anchorout), *common, EXACT=exact, **meta,
    )  # fmt: skip
    y = torch.empty(N, cut.length, dv, device=q.device, dtype=v.dtype)
    seen = coefs.after or coefs.before
    assert seen is not None
    _output[grid](q, k, *seen, cut.starts, E, Ws, Ss, y, *common, BC=cut.tokens, **meta)
    results = (y, Wout, Sout) if anchorout is None else (y, Wout, Sout, anchorout)
    return results, (*seen, *(coefs.before or (None,) * 3), coefs.g, coefs.s, coefs.end, T, E, Ws, Ss)


class _Memory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, theta: torch.Tensor, eta: torch.Tensor | None,
        alpha: torch.Tensor | None, gamma: torch.Tensor | None, W: torch.Tensor, S: torch.Tensor,
        anchor: torch.Tensor | None, cut: Cut, per: int, read: str,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        gates = Gates(theta, eta, alpha, gamma, per)
        keep = any(ctx.needs_input_grad)
        results, saved = _run(q, k, v, gates, W, S, anchor, cut, read, keep)
        if keep:
            ctx.save_for_backward(q, k, v, theta, eta, alpha, gamma, anchor, *saved)
            ctx.cut, ctx.per, ctx.after = cut, per, read == "after"
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dW: torch.Tensor, dS: torch.Tensor, danchor: torch.Tensor | None = None) -> tuple[Any, ...]:
        q, k, v, theta, eta, alpha, gamma, anchor, *saved = ctx.saved_tensors
        seen, before, (g, s, end, T, E, Ws, Ss) = Rows(*saved[:3]), saved[3:6], saved[6:]
        cut, after = ctx.cut, ctx.after
        gates = Gates(theta, eta, alpha, gamma, ctx.per)
        N, exact = q.shape[0], anchor is None
        sizes = _sizes(k, v)
        dk, dv, BK, BV = sizes
        kept = storage(q.dtype)
        dy, dW, dS = (grad.contiguous() for grad in (dy, dW, dS))
        grid, common = (N, cut.chunks), (cut.length, cut.chunks, cut.stride, ctx.per, dk, dv)
        meta = {
            "BC": cut.tokens, "BJ": cut.keys, "BK": BK, "BV": BV, "W": cut.window,
            "DT": operand(q.dtype), "PREC": target.precision(), **_options(q, cut, sizes),
        }  # fmt: skip

        J = cut.blocks(q, N, cut.keys, dv, dtype=kept)
        Kg, Ks = (cut.blocks(q, N, cut.tokens, dk, dtype=kept) for _ in range(2)) if exact else (k, k)
        _prepare_backward[grid](
            q, k, seen[0], cut.starts, *some(J, T), g, s, dy, J, Kg, Ks, *common, EXACT=exact, **meta,
        )  # fmt: skip
        dU = torch.empty_like(J)
        dWs, dSs = torch.empty_like(Ws), torch.empty_like(Ss)
        dWin, dSin = torch.empty_like(dW), torch.empty_like(dS)
        danchorin = None
        if danchor is not None:
            danchor, danchorin = danchor.contiguous(), torch.empty_like(dW)
        _state_backward[(N, triton.cdiv(dv, BV))](
            q, k, Kg, Ks, J, *seen[1:], *some(J, *before[1:]), g, s, end, cut.starts,
            *some(cut.starts, cut.carried, cut.last), dy, dW, dS, *some(dW, danchor), dU, dWs, dSs, dWin, dSin,
            *some(dWin, danchorin), *common, EXACT=exact, **meta,
        )  # fmt: skip

        dq = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        dseen = new_rows(cut, q, N)
        _query_backward[grid](q, k, *seen, cut.starts, E, Ws, Ss, dy, dq, *dseen, *common, **meta)
        new = torch.empty if cut.window == 1 else torch.zeros
        dk_, dv_ = (new(x.shape, device=x.device, dtype=x.dtype if cut.window == 1 else torch.float32) for x in (k, v))
        dbefore = new_rows(cut, q, N) if exact else None
        dg, ds, dend = (torch.empty_like(x) for x in (g, s, end))
        _key_backward[grid](
            q, k, seen.G, *some(J, *before), g, s, cut.starts, *some(cut.starts, cut.carried),
            E, dU, Ws, Ss, *some(J, anchor), dWs, dSs, dy, dk_, dv_, *(dbefore or (J,) * 3),
            dg, ds, dend, *common, EXACT=exact, **meta,
        )  # fmt: skip
        if dbefore is not None and not after:  # rows before the write are both read and solved with
            dbefore = Rows(*(a + b for a, b in zip(dseen, dbefore, strict=True)))
        grad = Coefficients(dseen if after else None, dbefore or (None if after else dseen), dg, ds, dend)
        dtheta, deta, dalpha, dgamma = coefficients_backward(gates, cut, grad)
        return (dq, dk_.to(k.dtype), dv_.to(v.dtype), dtheta, deta, dalpha, dgamma, dWin, dSin, danchorin, None, None, None)


EXACT_ROWS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}  # a chunk of the exact form: more spill registers
PIECE = 256  # chunks a launch without autograd: the buffers between kernels do not grow with T


def linear_exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, theta: torch.Tensor, eta: torch.Tensor | None, alpha: torch.Tensor | None,
    state: Any, *, chunk: int = 64, read: str = "after", write: torch.Tensor | None = None, decayed_error: bool = False,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """As `kernels.linear.linear_exact`: q, k (B, H, T, d_k), v (B, H, T, d_v), gates (B, H, T), state (W, S) (B, H, d_v, d_k).

    The state is float32 whatever the dtype of q, k, v; `chunk` is an upper limit. Raises ValueError for what only the torch
    form has: a forget gate for each output row, decayed_error, widths above 128.
    """
    if decayed_error or (alpha is not None and alpha.dim() == 4):
        raise ValueError("linear_exact: channel-wise alpha and decayed_error have only the torch form")
    _check("linear_exact", q, k, v, theta, eta, alpha, *state)
    B, H, T, _ = q.shape
    if T == 0:
        return torch.zeros_like(v), state
    chunk = min(chunk, EXACT_ROWS[q.dtype])
    if not torch.is_grad_enabled() and T > PIECE * chunk:
        outputs = []
        for part in (slice(at, at + PIECE * chunk) for at in range(0, T, PIECE * chunk)):
            gates = [None if x is None else x[:, :, part] for x in (eta, alpha)]
            y, state = linear_exact(
                q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], gates[0], gates[1], state,
                chunk=chunk, read=read, write=None if write is None else write[:, part],
            )  # fmt: skip
            outputs.append(y)
        return torch.cat(outputs, 2), state
    cut = fixed_cut(T, chunk, write, q.device)
    y, W, S = _Memory.apply(*flat(q, k, v, theta, eta, alpha), None, *flat(*state), None, cut, H, read)
    return y.view(B, H, T, -1), type(state)(*(x.view(B, H, *x.shape[1:]) for x in (W, S)))


def linear_stale(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, theta: torch.Tensor, eta: torch.Tensor | None, alpha: torch.Tensor | None,
    state: Any, *, chunk: int = 16, read: str = "after", write: torch.Tensor | None = None, gamma: torch.Tensor | None = None,
    loss: str = "l2",
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """As `kernels.linear.linear_stale`, with its state; gamma (B, H, T, c) is the Omega window by lag.

    Raises ValueError for what only the torch form has: loss "dot", read "anchor", gamma together with write, chunks above
    128 tokens (window included), widths above 128.
    """
    if loss != "l2" or read == "anchor" or (gamma is not None and write is not None):
        raise ValueError("linear_stale: loss 'dot', read 'anchor' and gamma with write have only the torch form")
    lags = state.keys.shape[2]
    if (0 if gamma is None else gamma.shape[-1] - 1) != lags:
        raise ValueError(f"linear_stale: the state carries a window of c = {lags + 1} tokens; gamma (..., c) must have the same c")
    if chunk + lags > LARGEST_CHUNK:
        raise ValueError(f"linear_stale: chunk {chunk} with {lags} tokens before it exceeds the {LARGEST_CHUNK} rows of a program")
    _check("linear_stale", q, k, v, theta, eta, alpha, state.W, state.S)
    B, H, T, _ = q.shape
    if T == 0:
        return torch.zeros_like(v), state
    cut = phased_cut(T, chunk, state.phase, write, lags + 1)
    piece = T if torch.is_grad_enabled() else PIECE * chunk
    if cut.slots > LARGEST_CHUNK:
        piece = LARGEST_CHUNK
    if T > piece:
        outputs = []
        for part in (slice(at, at + piece) for at in range(0, T, piece)):
            gates = [None if x is None else x[:, :, part] for x in (eta, alpha, gamma)]
            y, state = linear_stale(
                q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], gates[0], gates[1], state,
                chunk=chunk, read=read, write=None if write is None else write[:, part], gamma=gates[2],
            )  # fmt: skip
            outputs.append(y)
        return torch.cat(outputs, 2), state
    keys, values = k, v
    if lags:
        keys, values = torch.cat([state.keys.to(k.dtype), k], 2), torch.cat([state.values.to(v.dtype), v], 2)
    y, W, S, anchor = _Memory.apply(*flat(q, keys, values, theta, eta, alpha, gamma, state.W, state.S, state.anchor), cut, H, read)
    W, S, anchor = (x.view(B, H, *x.shape[1:]) for x in (W, S, anchor))
    tails = {"keys": keys[:, :, T:].to(state.keys.dtype), "values": values[:, :, T:].to(state.values.dtype)} if lags else {}
    return y.view(B, H, T, -1), state._replace(W=W, S=S, anchor=anchor, phase=cut.phase, **tails)


def _check(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor | None) -> None:
    given = [tensor for tensor in rest if tensor is not None]
    target.require(name, q, k, v, *given)
    if k.shape[-1] > LARGEST_WIDTH or v.shape[-1] > LARGEST_WIDTH:
        raise ValueError(f"{name}: widths {k.shape[-1]} and {v.shape[-1]}; a program holds at most {LARGEST_WIDTH}")
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise ValueError(f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be (B, H, T, d) with one B, H, T")
