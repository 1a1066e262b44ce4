"""The coefficient block of one chunk and its gradient (twin of `kernels.coefficients`).

With keep = 1 - alpha and S_t = eta_t S_{t-1} - theta_t u_t, W_t = keep_t W_{t-1} + S_t, a chunk of n tokens gives

    S_t = m_t S_0 - sum_i GS[t, i] u_i,    GS[t, i] = theta_i prod_{i<l<=t} eta_l
    W_t = b_t W_0 + f_t S_0 - sum_i G[t, i] u_i

The block holds the same for W_{t-1} (`bp`, `fp`, `Gp`), from which row t follows without a division:
b_t = keep_t bp_t, f_t = keep_t fp_t + m_t, G[t] = keep_t Gp[t] + GS[t]. Products of gates are exponentials of
differences of sums of logarithms, never quotients of products, which underflow.

The Omega rule writes sum_{r<w} gamma_{t,r} u_{t-r} in place of u_t: G, Gp and GS become G Gamma over the w - 1 keys
before the chunk and its own, with Gamma[t, t + w - 1 - r] = gamma_{t,r} (ATLAS, equations 9 and 16).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton import target
from kernels.triton.cut import Cut, span

FLOOR = tl.constexpr(1e-6)  # of keep and eta inside logarithms: a gate at its limit must not give -inf - -inf


@dataclass(frozen=True)
class Coefficients:
    """N = streams x heads (x layers) rows, X chunks of at most C tokens in blocks of C', J' >= C + w - 1 keys a block."""

    G: torch.Tensor | None  # (N, X, C', J') for W_t
    b: torch.Tensor | None  # (N, X, C')
    f: torch.Tensor | None  # (N, X, C')
    Gp: torch.Tensor | None  # (N, X, C', J') for W_{t-1}
    bp: torch.Tensor | None  # (N, X, C')
    fp: torch.Tensor | None  # (N, X, C')
    g: torch.Tensor  # (N, X, J') row of G at the last token of the chunk
    s: torch.Tensor  # (N, X, J') row of GS there
    end: torch.Tensor  # (N, X, 3) b, f, m there; 1, 0, 1 for a chunk without tokens

    def parts(self) -> tuple[torch.Tensor | None, ...]:
        return (self.G, self.b, self.f, self.Gp, self.bp, self.fp, self.g, self.s, self.end)


@triton.jit
def _block(theta_p, eta_p, alpha_p, live_p, n, stream, start, count, length, row,
           MOMENTUM: tl.constexpr, DECAY: tl.constexpr, HAS_LIVE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """`writes` is 1 for a token that writes: at any other, W does not move by S, and S does not decay."""
    at = n * length + start + row
    valid = row < count
    writes = valid
    if HAS_LIVE:
        writes = tl.load(live_p + stream * length + start + row, mask=valid, other=0) != 0
    theta = tl.load(theta_p + at, mask=writes, other=0.0).to(tl.float32)
    lower = row[:, None] >= row[None, :]
    if MOMENTUM:
        eta = tl.load(eta_p + at, mask=writes, other=1.0).to(tl.float32)
        cm = tl.cumsum(tl.log(tl.maximum(eta, FLOOR)), 0)
        decay = tl.exp(tl.where(lower, cm[:, None] - cm[None, :], float("-inf")))
        m = tl.exp(cm)
    else:  # S is the last written gradient
        seen = tl.cumsum(writes.to(tl.int32), 0)
        decay = tl.where(lower & (seen[:, None] == seen[None, :]), 1.0, 0.0)
        m = tl.where(seen == 0, 1.0, 0.0)
        eta = m
    keep = tl.full(theta.shape, 1.0, tl.float32)
    if DECAY:
        keep = tl.maximum(1.0 - tl.load(alpha_p + at, mask=writes, other=0.0).to(tl.float32), FLOOR)
    la = tl.log(keep)
    ca = tl.cumsum(la, 0)
    before = tl.exp(tl.where(row[:, None] > row[None, :], (ca - la)[:, None] - ca[None, :], float("-inf")))
    writes = writes.to(tl.float32)
    GS = decay * theta[None, :]
    bp = tl.exp(ca - la)
    fp = tl.sum(before * (writes * m)[None, :], 1)
    Gp = tl.dot(before, writes[:, None] * GS, input_precision=PREC)
    return eta, keep, writes, bp, fp, Gp, m, GS, before, decay


@triton.jit
def _band(gamma_p, n, start, count, length, row, col, W: tl.constexpr):
    lag = row[:, None] + (W - 1) - col[None, :]
    inside = (lag >= 0) & (lag < W) & (row[:, None] < count)
    at = (n * length + start + row[:, None]) * W + lag
    return tl.load(gamma_p + at, mask=inside, other=0.0).to(tl.float32), at, inside


@triton.jit
def _forward(
    theta_p, eta_p, alpha_p, gamma_p, starts_p, live_p, G_p, b_p, f_p, Gp_p, bp_p, fp_p, g_p, s_p, end_p, length, chunks, stride, per, layers,
    BC: tl.constexpr, BJ: tl.constexpr, W: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr,
    HAS_LIVE: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    stream = n // per
    start, count = span(starts_p, stream, stride, x)
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    eta, keep, writes, bp, fp, Gp, m, GS, before, decay = _block(
        theta_p, eta_p, alpha_p, live_p, n, stream, start, count, length, row, MOMENTUM, DECAY, HAS_LIVE, PREC
    )
    b = keep * bp
    f = keep * fp + writes * m
    if W > 1:
        band, at, inside = _band(gamma_p, n // layers, start, count, length, row, col, W)
        Gp = tl.dot(Gp, band, input_precision=PREC)
        GS = tl.dot(GS, band, input_precision=PREC)
    G = keep[:, None] * Gp + writes[:, None] * GS

    slot = n * chunks + x
    last = row == count - 1
    tl.store(g_p + slot * BJ + col, tl.sum(tl.where(last[:, None], G, 0.0), 0))
    tl.store(s_p + slot * BJ + col, tl.sum(tl.where(last[:, None], GS, 0.0), 0))
    some = count > 0
    tl.store(end_p + slot * 3, tl.where(some, tl.sum(tl.where(last, b, 0.0), 0), 1.0))
    tl.store(end_p + slot * 3 + 1, tl.where(some, tl.sum(tl.where(last, f, 0.0), 0), 0.0))
    tl.store(end_p + slot * 3 + 2, tl.where(some, tl.sum(tl.where(last, m, 0.0), 0), 1.0))
    tile = (slot * BC + row[:, None]) * BJ + col[None, :]
    if AFTER:
        tl.store(G_p + tile, G)
        tl.store(b_p + slot * BC + row, b)
        tl.store(f_p + slot * BC + row, f)
    if BEFORE:
        tl.store(Gp_p + tile, Gp)
        tl.store(bp_p + slot * BC + row, bp)
        tl.store(fp_p + slot * BC + row, fp)


@triton.jit
def _backward(
    theta_p, eta_p, alpha_p, gamma_p, starts_p, live_p, dG_p, db_p, df_p, dGp_p, dbp_p, dfp_p, dg_p, ds_p, dend_p,
    dtheta_p, deta_p, dalpha_p, dgamma_p, length, chunks, stride, per, layers,
    BC: tl.constexpr, BJ: tl.constexpr, W: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr,
    HAS_LIVE: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    stream = n // per
    start, count = span(starts_p, stream, stride, x)
    row = tl.arange(0, BC)
    col = tl.arange(0, BJ)
    valid = row < count
    eta, keep, writes, bp, fp, Gp, m, GS, before, decay = _block(
        theta_p, eta_p, alpha_p, live_p, n, stream, start, count, length, row, MOMENTUM, DECAY, HAS_LIVE, PREC
    )

    slot = n * chunks + x
    last = row == count - 1
    tile = (slot * BC + row[:, None]) * BJ + col[None, :]
    read = valid[:, None] & (col[None, :] < count + W - 1)
    keys = col < count + W - 1
    dg = tl.load(dg_p + slot * BJ + col, mask=keys, other=0.0)
    ds = tl.load(ds_p + slot * BJ + col, mask=keys, other=0.0)
    dG = tl.where(last[:, None], dg[None, :], 0.0)  # G[last] = g
    db = tl.where(last, tl.load(dend_p + slot * 3), 0.0)
    df = tl.where(last, tl.load(dend_p + slot * 3 + 1), 0.0)
    dm = tl.where(last, tl.load(dend_p + slot * 3 + 2), 0.0)
    if AFTER:
        dG += tl.load(dG_p + tile, mask=read, other=0.0)
        db += tl.load(db_p + slot * BC + row, mask=valid, other=0.0)
        df += tl.load(df_p + slot * BC + row, mask=valid, other=0.0)
    dGS = writes[:, None] * dG + tl.where(last[:, None], ds[None, :], 0.0)
    dGp = keep[:, None] * dG
    dbp = keep * db
    dfp = keep * df
    if BEFORE:
        dGp += tl.load(dGp_p + tile, mask=read, other=0.0)
        dbp += tl.load(dbp_p + slot * BC + row, mask=valid, other=0.0)
        dfp += tl.load(dfp_p + slot * BC + row, mask=valid, other=0.0)
    if W > 1:
        band, at, inside = _band(gamma_p, n // layers, start, count, length, row, col, W)
        dkeep = tl.sum(dG * tl.dot(Gp, band, input_precision=PREC), 1)
        dband = tl.dot(tl.trans(Gp), dGp, input_precision=PREC) + tl.dot(tl.trans(GS), dGS, input_precision=PREC)
        lag = row[:, None] + (W - 1) - col[None, :]
        tl.store(dgamma_p + (n * length + start + row[:, None]) * W + lag, dband, mask=inside)
        dGp = tl.dot(dGp, tl.trans(band), input_precision=PREC)
        dGS = tl.dot(dGS, tl.trans(band), input_precision=PREC)
    else:
        dkeep = tl.sum(dG * Gp, 1)
    dkeep += db * bp + df * fp
    dm += writes * (df + tl.sum(before * dfp[:, None], 0))

    dGS += writes[:, None] * tl.dot(tl.trans(before), dGp, input_precision=PREC)
    dbefore = tl.dot(dGp, tl.trans(writes[:, None] * GS), input_precision=PREC) + dfp[:, None] * (writes * m)[None, :]
    flow = dbefore * before
    dstart = tl.sum(flow, 1) + dbp * bp  # towards the sum of log keep before token t
    dla = tl.cumsum(dstart - tl.sum(flow, 0), 0, reverse=True) - dstart
    flow = dGS * GS
    dlm = tl.cumsum(tl.sum(flow, 1) - tl.sum(flow, 0) + dm * m, 0, reverse=True)
    at = n * length + start + row
    tl.store(dtheta_p + at, writes * tl.sum(dGS * decay, 0), mask=valid)
    if MOMENTUM:
        tl.store(deta_p + at, writes * tl.where(eta > FLOOR, dlm / tl.maximum(eta, FLOOR), 0.0), mask=valid)
    if DECAY:
        tl.store(dalpha_p + at, -writes * tl.where(keep > FLOOR, dkeep + dla / keep, 0.0), mask=valid)


@dataclass(frozen=True)
class Gates:
    """theta, eta, alpha (N, T) contiguous, None: no momentum, no decay; gamma (N / layers, T, w), None: no window."""

    theta: torch.Tensor
    eta: torch.Tensor | None
    alpha: torch.Tensor | None
    gamma: torch.Tensor | None
    per: int  # rows of one stream: heads x layers
    layers: int = 1


def _arguments(gates: Gates, cut: Cut) -> tuple[torch.Tensor, ...]:
    """Pointers of the inputs; a program never follows one that stands for None."""
    given = (gates.theta, gates.eta, gates.alpha, gates.gamma, cut.starts, cut.live)
    return tuple(gates.theta if x is None else x for x in given)


def _meta(gates: Gates, cut: Cut, after: bool, before: bool) -> dict[str, object]:
    return {
        "BC": cut.tokens, "BJ": cut.keys, "W": cut.window, "MOMENTUM": gates.eta is not None, "DECAY": gates.alpha is not None,
        "HAS_LIVE": cut.live is not None, "AFTER": after, "BEFORE": before, "PREC": target.precision(),
        "num_warps": 16 if cut.keys > 32 else 8,
    }  # fmt: skip


def coefficients(gates: Gates, cut: Cut, *, after: bool, before: bool) -> Coefficients:
    N, BC, BJ = gates.theta.shape[0], cut.tokens, cut.keys
    reads = [cut.blocks(gates.theta, N, *size) if wanted else None
             for wanted in (after, before) for size in ((BC, BJ), (BC,), (BC,))]  # fmt: skip
    g, s, end = (cut.blocks(gates.theta, N, size) for size in (BJ, BJ, 3))
    _forward[(cut.chunks, N)](
        *_arguments(gates, cut), *(gates.theta if read is None else read for read in reads), g, s, end,
        cut.length, cut.chunks, cut.stride, gates.per, gates.layers, **_meta(gates, cut, after, before),
    )  # fmt: skip
    return Coefficients(*reads, g, s, end)


def coefficients_backward(
    gates: Gates, cut: Cut, grad: Coefficients
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of theta, eta, alpha (N, T) and gamma (N, T, w), from those of every part of the block."""
    theta = gates.theta
    N = theta.shape[0]
    reads = (grad.G, grad.b, grad.f, grad.Gp, grad.bp, grad.fp)
    dtheta, deta, dalpha = (
        None if gate is None else torch.empty(theta.shape, device=theta.device) for gate in (theta, gates.eta, gates.alpha)
    )
    dgamma = None
    if gates.gamma is not None:
        dgamma = torch.empty(N, cut.length, cut.window, device=theta.device)
    _backward[(cut.chunks, N)](
        *_arguments(gates, cut), *(theta if read is None else read for read in reads), grad.g, grad.s, grad.end,
        *(theta if out is None else out for out in (dtheta, deta, dalpha, dgamma)),
        cut.length, cut.chunks, cut.stride, gates.per, gates.layers,
        **_meta(gates, cut, grad.G is not None, grad.Gp is not None),
    )  # fmt: skip
    assert dtheta is not None
    return dtheta, deta, dalpha, dgamma
