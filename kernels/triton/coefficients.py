"""The coefficient block of one chunk and its gradient (twin of `kernels.coefficients`).

With keep = 1 - alpha and S_t = eta_t S_{t-1} - theta_t u_t, W_t = keep_t W_{t-1} + S_t, a chunk of n tokens gives

    S_t = m_t S_0 - sum_i GS[t, i] u_i,    GS[t, i] = theta_i prod_{i<l<=t} eta_l
    W_t = b_t W_0 + f_t S_0 - sum_i G[t, i] u_i

The block holds the same for W_{t-1} (`bp`, `fp`, `Gp`). Row by row these are the two recurrences themselves, column by
column independent, so one warp runs them in order: no logarithms, no quotients, exact where a gate is at its limit.

The Omega rule writes sum_{r<w} gamma_{t,r} u_{t-r} in place of u_t: G, Gp and GS become G Gamma over the w - 1 keys
before the chunk and its own, with Gamma[t, t + w - 1 - r] = gamma_{t,r} (ATLAS, equations 9 and 16).
"""

# The bodies of kernels are another language, which no type checker follows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.cut import Cut, span
from kernels.triton.target import COUNTS, some

FLOOR = tl.constexpr(1e-6)  # of keep and eta, as in `kernels.coefficients`


class Rows(NamedTuple):
    """The rows that W_t, or W_{t-1}, is read with; unwritten behind the last token of a chunk."""

    G: torch.Tensor  # (N, X, C', J')
    b: torch.Tensor  # (N, X, C')
    f: torch.Tensor  # (N, X, C')


class Coefficients(NamedTuple):
    """N = streams x heads (x layers) rows, X chunks of at most C tokens in blocks of C', J' >= C + w - 1 keys a block."""

    after: Rows | None  # G, b, f, for W_t
    before: Rows | None  # Gp, bp, fp, for W_{t-1}
    g: torch.Tensor  # (N, X, J') row of G at the last token of the chunk
    s: torch.Tensor  # (N, X, J') row of GS there
    end: torch.Tensor  # (N, X, 3) b, f, m there; 1, 0, 1 for a chunk without tokens


def new_rows(cut: Cut, like: torch.Tensor, N: int) -> Rows:
    return Rows(cut.blocks(like, N, cut.tokens, cut.keys), cut.blocks(like, N, cut.tokens), cut.blocks(like, N, cut.tokens))


@triton.jit
def _gates(theta_p, eta_p, alpha_p, live_p, at, token, MOMENTUM: tl.constexpr, DECAY: tl.constexpr, HAS_LIVE: tl.constexpr):
    """theta, eta, keep of one token and 1 if it writes; a token that does not leaves both recurrences as they are."""
    writes = 1.0
    if HAS_LIVE:
        writes = tl.load(live_p + token).to(tl.float32)
    theta = tl.load(theta_p + at).to(tl.float32) * writes
    eta = 1.0 - writes
    if MOMENTUM:
        eta += writes * tl.maximum(tl.load(eta_p + at).to(tl.float32), FLOOR)
    keep = 1.0
    if DECAY:
        keep -= writes * (1.0 - tl.maximum(1.0 - tl.load(alpha_p + at).to(tl.float32), FLOOR))
    return theta, eta, keep, writes


@triton.jit
def _looks(gamma_p, at, t, col, W: tl.constexpr):
    """Row t of Gamma: the weights of the keys that token t writes."""
    if W == 1:
        return tl.where(col == t, 1.0, 0.0)
    lag = t + (W - 1) - col
    return tl.load(gamma_p + at * W + lag, mask=(lag >= 0) & (lag < W), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    theta_p, eta_p, alpha_p, gamma_p, starts_p, live_p, G_p, b_p, f_p, Gp_p, bp_p, fp_p, g_p, s_p, end_p,
    length, chunks, stride, per, layers,
    BC: tl.constexpr, BJ: tl.constexpr, W: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr,
    HAS_LIVE: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """One warp a chunk: lanes are columns, which do not meet; the rows are the recurrences themselves, in order."""
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    stream = n // per
    start, count = span(starts_p, stream, stride, x)
    slot = n * chunks + x
    col = tl.arange(0, BJ)
    g = tl.zeros((BJ,), tl.float32)
    s = tl.zeros((BJ,), tl.float32)
    b = 1.0
    f = 0.0
    m = 1.0
    for t in range(0, count):
        token = start + t
        theta, eta, keep, writes = _gates(
            theta_p, eta_p, alpha_p, live_p, n * length + token, stream * length + token, MOMENTUM, DECAY, HAS_LIVE
        )
        row = slot * BC + t
        if BEFORE:
            tl.store(Gp_p + row * BJ + col, g)
            tl.store(bp_p + row, b)
            tl.store(fp_p + row, f)
        s = eta * s + theta * _looks(gamma_p, (n // layers) * length + token, t, col, W)
        g = keep * g + writes * s
        m = eta * m
        f = keep * f + writes * m
        b = keep * b
        if AFTER:
            tl.store(G_p + row * BJ + col, g)
            tl.store(b_p + row, b)
            tl.store(f_p + row, f)
    tl.store(g_p + slot * BJ + col, g)
    tl.store(s_p + slot * BJ + col, s)
    tl.store(end_p + slot * 3, b)
    tl.store(end_p + slot * 3 + 1, f)
    tl.store(end_p + slot * 3 + 2, m)


@triton.jit(do_not_specialize=COUNTS)
def _backward(
    theta_p, eta_p, alpha_p, gamma_p, starts_p, live_p, dG_p, db_p, df_p, dGp_p, dbp_p, dfp_p, dg_p, ds_p, dend_p,
    rows_p, numbers_p, dtheta_p, deta_p, dalpha_p, dgamma_p, length, chunks, stride, per, layers,
    BC: tl.constexpr, BJ: tl.constexpr, W: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr,
    HAS_LIVE: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """The recurrences once more, keeping the rows before each token, then back through them."""
    x = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64)
    stream = n // per
    start, count = span(starts_p, stream, stride, x)
    slot = n * chunks + x
    col = tl.arange(0, BJ)
    g = tl.zeros((BJ,), tl.float32)
    s = tl.zeros((BJ,), tl.float32)
    b = 1.0
    f = 0.0
    m = 1.0
    for t in range(0, count):
        token = start + t
        theta, eta, keep, writes = _gates(
            theta_p, eta_p, alpha_p, live_p, n * length + token, stream * length + token, MOMENTUM, DECAY, HAS_LIVE
        )
        row = slot * BC + t
        tl.store(rows_p + 2 * row * BJ + col, g)
        tl.store(rows_p + (2 * row + 1) * BJ + col, s)
        tl.store(numbers_p + 3 * row, b)
        tl.store(numbers_p + 3 * row + 1, f)
        tl.store(numbers_p + 3 * row + 2, m)
        s = eta * s + theta * _looks(gamma_p, (n // layers) * length + token, t, col, W)
        g = keep * g + writes * s
        m = eta * m
        f = keep * f + writes * m
        b = keep * b
    tl.debug_barrier()  # other lanes read these rows
    keys = col < count + W - 1
    dg = tl.load(dg_p + slot * BJ + col, mask=keys, other=0.0)
    ds = tl.load(ds_p + slot * BJ + col, mask=keys, other=0.0)
    db = tl.load(dend_p + slot * 3)
    df = tl.load(dend_p + slot * 3 + 1)
    dm = tl.load(dend_p + slot * 3 + 2)
    for back in range(0, count):
        t = count - 1 - back
        token = start + t
        at = n * length + token
        theta, eta, keep, writes = _gates(theta_p, eta_p, alpha_p, live_p, at, stream * length + token, MOMENTUM, DECAY, HAS_LIVE)
        row = slot * BC + t
        if AFTER:
            dg += tl.load(dG_p + row * BJ + col, mask=keys, other=0.0)
            db += tl.load(db_p + row)
            df += tl.load(df_p + row)
        g = tl.load(rows_p + 2 * row * BJ + col)
        s = tl.load(rows_p + (2 * row + 1) * BJ + col)
        b = tl.load(numbers_p + 3 * row)
        f = tl.load(numbers_p + 3 * row + 1)
        m = tl.load(numbers_p + 3 * row + 2)
        ds += writes * dg
        dm += writes * df
        looks = _looks(gamma_p, (n // layers) * length + token, t, col, W)
        tl.store(dtheta_p + at, writes * tl.sum(ds * looks, 0))
        if W > 1:
            lag = t + (W - 1) - col
            tl.store(dgamma_p + at * W + lag, theta * ds, mask=(lag >= 0) & (lag < W))
        if MOMENTUM:
            free = tl.load(eta_p + at).to(tl.float32) > FLOOR
            tl.store(deta_p + at, tl.where(free, writes * (tl.sum(ds * s, 0) + dm * m), 0.0))
        if DECAY:
            free = 1.0 - tl.load(alpha_p + at).to(tl.float32) > FLOOR
            tl.store(dalpha_p + at, tl.where(free, -writes * (tl.sum(dg * g, 0) + db * b + df * f), 0.0))
        ds = eta * ds
        dm = eta * dm
        dg = keep * dg
        db = keep * db
        df = keep * df
        if BEFORE:
            dg += tl.load(dGp_p + row * BJ + col, mask=keys, other=0.0)
            db += tl.load(dbp_p + row)
            df += tl.load(dfp_p + row)


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
    return some(gates.theta, gates.theta, gates.eta, gates.alpha, gates.gamma, cut.starts, cut.live)


def _meta(gates: Gates, cut: Cut, after: bool, before: bool) -> dict[str, object]:
    return {
        "BC": cut.tokens, "BJ": cut.keys, "W": cut.window, "MOMENTUM": gates.eta is not None, "DECAY": gates.alpha is not None,
        "HAS_LIVE": cut.live is not None, "AFTER": after, "BEFORE": before, "num_warps": 1,
    }  # fmt: skip


def _pointers(unused: torch.Tensor, after: Rows | None, before: Rows | None) -> tuple[torch.Tensor, ...]:
    return (*(after or (unused,) * 3), *(before or (unused,) * 3))


def coefficients(gates: Gates, cut: Cut, *, after: bool, before: bool) -> Coefficients:
    theta = gates.theta
    N = theta.shape[0]
    seen_after, seen_before = (new_rows(cut, theta, N) if wanted else None for wanted in (after, before))
    g, s, end = (cut.blocks(theta, N, size) for size in (cut.keys, cut.keys, 3))
    _forward[(N, cut.chunks)](
        *_arguments(gates, cut), *_pointers(theta, seen_after, seen_before), g, s, end,
        cut.length, cut.chunks, cut.stride, gates.per, gates.layers, **_meta(gates, cut, after, before),
    )  # fmt: skip
    return Coefficients(seen_after, seen_before, g, s, end)


def coefficients_backward(
    gates: Gates, cut: Cut, grad: Coefficients
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of theta, eta, alpha (N, T) and gamma (N, T, w), from those of every part of the block."""
    theta = gates.theta
    N = theta.shape[0]
    dtheta = torch.empty(theta.shape, device=theta.device)
    deta, dalpha = (None if gate is None else torch.empty(theta.shape, device=theta.device) for gate in (gates.eta, gates.alpha))
    dgamma = None if gates.gamma is None else torch.empty(N, cut.length, cut.window, device=theta.device)
    _backward[(N, cut.chunks)](
        *_arguments(gates, cut), *_pointers(theta, grad.after, grad.before), grad.g, grad.s, grad.end,
        cut.blocks(theta, N, cut.tokens, 2, cut.keys), cut.blocks(theta, N, cut.tokens, 3),
        dtheta, *some(theta, deta, dalpha, dgamma), cut.length, cut.chunks, cut.stride, gates.per, gates.layers,
        **_meta(gates, cut, grad.after is not None, grad.before is not None),
    )  # fmt: skip
    return dtheta, deta, dalpha, dgamma
