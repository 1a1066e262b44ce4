"""The matrix memory M(x) = W x: the exact chunk form and the papers' chunk-start form.

Per token (Titans Eqs. 11-15 with loss 1/2 ||W k - v||^2):

    e_t = W_{t-1} k_t - v_t      S_t = eta_t S_{t-1} - theta_t e_t k_t^T      W_t = (1 - alpha_t) W_{t-1} + S_t      y_t = W_t q_t

`linear_exact` computes precisely this for any chunk size: the squared loss has a gradient linear in W, so the errors of a chunk solve one
unit lower-triangular system. `linear_stale` takes every gradient of a chunk at the weights the chunk began with (Titans section 3.2);
there the chunk size is part of the function. Shapes: q, k (B, H, T, d_k), v and y (B, H, T, d_v), gates (B, H, T).
The arithmetic is that of the state's dtype (float32; float64 in tests); y comes back in v's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.coefficients import KEEP_FLOOR, Coefficients, clamp_gates, coefficients, window
from kernels.grid import Grid, check_phase, fixed_grid, part_of, phased_grid

READS = ("after", "before", "anchor")
WEIGHTS = {"W", "S", "anchor"}  # the parts of a state that have the memory's rows
BLOCK = 32  # chunks computed at once without autograd: their intermediate arrays stay in the cache, and memory does not grow with T


class MatrixState(NamedTuple):
    """All that an exact matrix memory keeps of its past, whatever the chunk size."""

    W: Tensor  # (B, H, d_v, d_k) weights, applied as W @ k
    S: Tensor  # (B, H, d_v, d_k) momentum


class StaleState(NamedTuple):
    """The matrix memory under chunk-start gradients: also the open chunk, so that any split of calls gives equal results."""

    W: Tensor  # (B, H, d_v, d_k)
    S: Tensor  # (B, H, d_v, d_k)
    anchor: Tensor  # (B, H, d_v, d_k) weights at the start of the open chunk
    phase: Tensor  # (B,) int64, tokens written into the open chunk; 0: the next write opens one
    keys: Tensor  # (B, H, c - 1, d_k) the Omega window's carried keys, oldest first; zeros before the stream began
    values: Tensor  # (B, H, c - 1, d_v)


def matrix_state(init: Tensor, streams: int) -> MatrixState:
    """A fresh memory for each of `streams`: W = init (H, d_v, d_k), S = 0."""
    W = init.expand(streams, *init.shape).clone()
    return MatrixState(W=W, S=torch.zeros_like(W))


def stale_state(init: Tensor, streams: int, window: int = 1) -> StaleState:
    """As `matrix_state`; window: the number of tokens c that the Omega rule looks at (1: only the newest)."""
    W = init.expand(streams, *init.shape).clone()
    H, d_v, d_k = init.shape
    return StaleState(
        W=W,
        S=torch.zeros_like(W),
        anchor=W.clone(),
        phase=torch.zeros(streams, dtype=torch.long, device=init.device),
        keys=W.new_zeros(streams, H, window - 1, d_k),
        values=W.new_zeros(streams, H, window - 1, d_v),
    )


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
    decayed_error: bool = False,
) -> tuple[Tensor, MatrixState]:
    """The generalised delta rule with momentum and decay, exactly; the chunk size changes the speed and nothing else.

    eta None: no momentum. alpha None: no decay; alpha (B, H, T, d_v): a forget gate for each output row, see `by_row`.
    write (B, T) bool, False: the token reads and leaves the state exactly as it was. read: "after" or "before" the write.
    decayed_error: the error is that of (1 - alpha_t) W_{t-1}, which makes eta=None Gated DeltaNet.

    With per-chunk matrices (rows t, Gp etc. the coefficients before token t, see `kernels.coefficients`):
        (I + Gp * K K^T) E = bp * (K W_0^T) + fp * (K S_0^T) - V            true online errors
        Y   = b * (Q W_0^T) + f * (Q S_0^T) - (G * Q K^T) E
        W_n = b_n W_0 + f_n S_0 - E^T diag(G[n]) K ;   S_n = m_n S_0 - E^T diag(GS[n]) K
    """
    check(q, k, v, theta, eta, alpha, state.W, chunk, read, ("after", "before"))
    if alpha is not None and alpha.dim() == 4:
        rule = partial(linear_exact, chunk=min(chunk, 16), read=read, write=write, decayed_error=decayed_error)
        return by_row(rule, q, k, v, theta, eta, alpha, state)  # type: ignore[no-any-return]
    dtype, B, H, T = state.W.dtype, *theta.shape
    if T == 0 or B == 0:  # no token or no stream
        return torch.zeros_like(v), state
    if T == 1:
        return _exact_step(q, k, v, theta, eta, alpha, state, read, write, decayed_error)
    if not wants_grad(q, k, v, theta, eta, alpha, *state) and T > BLOCK * chunk:
        outputs = []
        for at in range(0, T, BLOCK * chunk):
            part = slice(at, at + BLOCK * chunk)
            y, state = linear_exact(
                q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], part_of(eta, part), part_of(alpha, part), state,
                chunk=chunk, read=read, write=None if write is None else write[:, part], decayed_error=decayed_error,
            )  # fmt: skip
            outputs.append(y)
        return torch.cat(outputs, 2), state
    grid = fixed_grid(T, chunk, write, theta.device)
    Q, K, V = (grid.split(x.to(dtype)) for x in (q, k, v))
    forget = None if alpha is None else grid.split(alpha)
    block = cast_block(coefficients(grid.split(theta), None if eta is None else grid.split(eta), forget, grid.writes(B, H)), dtype)
    before = block.before()
    error_b, error_f, error_G = before.b, before.f, before.G
    if decayed_error and forget is not None:
        keep = (1.0 - forget.clamp(max=1.0 - KEEP_FLOOR)).to(dtype)
        error_b, error_f, error_G = error_b * keep, error_f * keep, error_G * keep.unsqueeze(-1)
    right = torch.cat([error_b.unsqueeze(-1) * K, error_f.unsqueeze(-1) * K, V], -1)
    solved = torch.linalg.solve_triangular((K @ K.mT) * error_G, right, upper=False, unitriangular=True)
    reader, target = solved.split([2 * K.shape[-1], V.shape[-1]], -1)
    E, starts, end = run_chunks(reader, target, K, block, torch.cat([state.W, state.S], -1).flatten(0, 1))
    seen = block if read == "after" else before
    Y = read_chunks(Q, K, E, starts, seen)
    W, S = end.view(B, H, *end.shape[-2:]).split(K.shape[-1], -1)
    return grid.join(Y, B, H).to(v.dtype), MatrixState(W=W, S=S)


def linear_stale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: StaleState,
    *,
    chunk: int = 16,
    read: str = "after",
    write: Tensor | None = None,
    gamma: Tensor | None = None,
    loss: str = "l2",
) -> tuple[Tensor, StaleState]:
    """The papers' chunk form: every gradient of a chunk of `chunk` tokens is taken at the weights W_a the chunk began with.

        E = K W_a^T - V   (loss "l2")      E = -V   (loss "dot", -<W k, v>: linear attention; then nothing is approximate)

    and the rest as `linear_exact`, channel-wise forgetting included. gamma (B, H, T, c): the Omega rule; each token descends the
    loss of the last c tokens, weighted by lag, the carried tokens re-evaluated at the current anchor (ATLAS Eq. 16); c - 1 must be
    the length of state.keys.
    read: "after" or "before" the write, or "anchor": the weights the chunk began with.
    Equal to `linear_exact` only for chunk = 1 (and loss "l2").
    """
    check(q, k, v, theta, eta, alpha, state.W, chunk, read, READS)
    if loss not in ("l2", "dot"):
        raise ValueError(f"linear_stale: loss is 'l2' or 'dot', not {loss!r}")
    check_window(gamma, state.keys, "linear_stale")
    if alpha is not None and alpha.dim() == 4:
        rule = partial(linear_stale, chunk=chunk, read=read, write=write, loss=loss)
        return by_row(rule, q, k, v, theta, eta, alpha, state, gamma)  # type: ignore[no-any-return]
    dtype, B, H, T = state.W.dtype, *theta.shape
    if T == 0 or B == 0:  # no token or no stream
        return torch.zeros_like(v), state
    if T == 1:
        return _stale_step(q, k, v, theta, eta, alpha, state, chunk, read, write, gamma, loss)
    piece = T
    if gamma is not None and write is not None:
        piece = 1  # the window holds written tokens only: with gaps, one token at a time is the whole rule
    elif not wants_grad(q, k, v, theta, eta, alpha, gamma, *state) or write is not None:
        piece = BLOCK * chunk
    if T > piece:
        outputs = []
        for at in range(0, T, piece):
            part = slice(at, at + piece)
            y, state = linear_stale(
                q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], part_of(eta, part), part_of(alpha, part), state,
                chunk=chunk, read=read, write=None if write is None else write[:, part], gamma=part_of(gamma, part), loss=loss,
            )  # fmt: skip
            outputs.append(y)
        return torch.cat(outputs, 2), state
    grid = phased_grid(T, chunk, state.phase, write)
    Q = grid.split(q.to(dtype))
    K = grid.split_window(k.to(dtype), state.keys)
    V = grid.split_window(v.to(dtype), state.values)
    momentum, forget = (None if g is None else grid.split(g) for g in (eta, alpha))
    block = coefficients(grid.split(theta), momentum, forget, grid.writes(B, H))
    if gamma is not None:
        block = window(block, grid.split(gamma))
    block = cast_block(block, dtype)
    first = opening(state.phase, state.W, state.anchor)
    if loss == "dot":
        reader = K[..., :0]
        target = V
    else:  # the first chunk's error is taken at the carried anchor; as a constant it needs no reader
        at_anchor = V[:1] - K[:1] @ first.flatten(0, 1).mT
        reader = torch.cat([torch.zeros_like(K[:1]), K[1:]])
        target = torch.cat([at_anchor, V[1:]])
    E, starts, end = run_chunks(reader, target, K, block, torch.cat([state.W, state.S], -1).flatten(0, 1))
    d = K.shape[-1]
    anchors = first.flatten(0, 1).unsqueeze(0)
    if len(starts) > 1:
        anchors = torch.cat([anchors, starts[1:, ..., :d]])
    Y = Q @ anchors.mT if read == "anchor" else read_chunks(Q, K, E, starts, block if read == "after" else block.before())
    W, S = end.view(B, H, *end.shape[-2:]).split(d, -1)
    new = StaleState(
        W=W,
        S=S,
        anchor=closing(grid, anchors.unflatten(1, (B, H)), state.anchor),
        phase=grid.phase,  # type: ignore[arg-type]
        keys=carry_window(state.keys, k.to(dtype), write),
        values=carry_window(state.values, v.to(dtype), write),
    )
    return grid.join(Y, B, H).to(v.dtype), new


def _stale_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: StaleState,
    chunk: int,
    read: str,
    write: Tensor | None,
    gamma: Tensor | None,
    loss: str,
) -> tuple[Tensor, StaleState]:
    """One token (T = 1), straight from the rule: what a live stream does."""
    dtype = state.W.dtype
    check_phase(state.phase, chunk)
    eta, alpha = clamp_gates(eta, alpha)
    anchor = opening(state.phase, state.W, state.anchor)
    key, value = k.to(dtype), v.to(dtype)
    keys, values = key, value
    if gamma is not None:
        keys, values = torch.cat([state.keys, key], 2), torch.cat([state.values, value], 2)
    error = -values if loss == "dot" else keys @ anchor.mT - values
    error = error * -theta.to(dtype).unsqueeze(-1)
    if gamma is not None:  # the newest token is the last row, and lag 0
        error = error * gamma.to(dtype).flip(-1).mT
    S = error.mT @ keys
    if eta is not None:
        S = torch.addcmul(S, state.S, eta.to(dtype).unsqueeze(-1))
    W = state.W + S if alpha is None else torch.addcmul(S, state.W, (1.0 - alpha).to(dtype).unsqueeze(-1))
    carried = anchor
    if write is not None:
        at = write.view(-1, 1, 1, 1)
        W, S, carried = torch.where(at, W, state.W), torch.where(at, S, state.S), torch.where(at, anchor, state.anchor)
    y = q.to(dtype) @ {"after": W, "before": state.W, "anchor": anchor}[read].mT
    new = StaleState(
        W=W,
        S=S,
        anchor=carried,
        phase=(state.phase + (1 if write is None else write[:, 0].long())) % chunk,
        keys=carry_window(state.keys, key, write),
        values=carry_window(state.values, value, write),
    )
    return y.to(v.dtype), new


def opening(phase: Tensor, W: Tensor, anchor: Tensor) -> Tensor:
    """The anchor of the first chunk of a call: W where the stream opens a chunk, else the one it carries. W (B, H, out, in)."""
    opens = phase == 0
    if not opens.any():
        return anchor
    if opens.all():
        return W
    return torch.where(opens.view(-1, 1, 1, 1), W, anchor)


def closing(grid: Grid, anchors: Tensor, carried: Tensor) -> Tensor:
    """The anchor to carry on: that of the last chunk each stream wrote in; anchors (N, B, H, out, in)."""
    if grid.last is None:
        return anchors[-1]
    index = grid.last.clamp(min=0).view(1, -1, 1, 1, 1).expand(1, *anchors.shape[1:])
    return torch.where((grid.last >= 0).view(-1, 1, 1, 1), anchors.gather(0, index)[0], carried)


def carry_window(tail: Tensor, x: Tensor, write: Tensor | None) -> Tensor:
    """The last c - 1 rows of [tail ; x]; a single unwritten token leaves its stream's tail."""
    lags = tail.shape[2]
    if lags == 0:
        return tail
    new = torch.cat([tail, x], 2)[:, :, -lags:]
    return new if write is None else torch.where(write.view(-1, 1, 1, 1), new, tail)


def check_window(gamma: Tensor | None, keys: Tensor, name: str) -> None:
    """The window of gamma and that of the state must agree; a state made for another c is a user error, not a truncated window."""
    lags = 0 if gamma is None else gamma.shape[-1] - 1
    if lags != keys.shape[2]:
        raise ValueError(f"{name}: gamma has c = {lags + 1} lags but the state carries a window of c = {keys.shape[2] + 1} tokens")


def read_chunks(Q: Tensor, K: Tensor, E: Tensor, starts: Tensor, seen: Coefficients) -> Tensor:
    """Y = b * (Q W_0^T) + f * (Q S_0^T) - (G * Q K^T) E for all chunks at once."""
    queries = torch.cat([seen.b.unsqueeze(-1) * Q, seen.f.unsqueeze(-1) * Q], -1)
    return queries @ starts.mT - ((Q @ K.mT) * seen.G) @ E


def run_chunks(reader: Tensor, target: Tensor, K: Tensor, block: Coefficients, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sequential part: two products a chunk. start = [W_0 | S_0] (B * H, d_v, 2 d_k)."""
    last = torch.cat([block.G[..., -1, :].unsqueeze(-1) * K, block.GS[..., -1, :].unsqueeze(-1) * K], -1)
    E, starts, end = _Chunks.apply(reader, target, last, block.b[..., -1], block.f[..., -1], block.m[..., -1], start)  # type: ignore[no-untyped-call]
    return E, starts, end


class _Chunks(torch.autograd.Function):
    """For each chunk n:  E = R Z^T - U ;  Z' = [b W + f S | m S] - E^T L  with Z = [W | S], R reading Z's first columns.

    R (N, BH, s, r) with r = 2 d_k, d_k or 0; U (N, BH, s, d_v); L (N, BH, s, 2 d_k); b, f, m (N, BH); Z (BH, d_v, 2 d_k).
    Returns E, the Z each chunk starts with (N, BH, d_v, 2 d_k), and the last Z. The backward pass walks the chunks in reverse with two
    products each; everything else is batched over chunks.
    """

    @staticmethod
    def forward(ctx: Any, R: Tensor, U: Tensor, L: Tensor, b: Tensor, f: Tensor, m: Tensor, Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        N, d, r = R.shape[0], Z.shape[-1] // 2, R.shape[-1]
        scale = torch.cat([b.unsqueeze(-1).expand(-1, -1, d), m.unsqueeze(-1).expand(-1, -1, d)], -1).unsqueeze(-2)
        mix = f.view(*f.shape, 1, 1)
        starts = Z.new_empty(N, *Z.shape)
        E = torch.empty_like(U, memory_format=torch.contiguous_format)
        at = Z
        for n, (R_n, U_n, L_n, scale_n, mix_n, start, E_n) in enumerate(
            zip(R.unbind(0), U.unbind(0), L.unbind(0), scale.unbind(0), mix.unbind(0), starts.unbind(0), E.unbind(0), strict=True)
        ):
            start.copy_(at)
            if r:
                torch.baddbmm(U_n, R_n, start[..., :r].mT, beta=-1, out=E_n)
            else:
                torch.neg(U_n, out=E_n)
            at = torch.mul(start, scale_n, out=starts[n + 1] if n + 1 < N else None)
            at[..., :d].addcmul_(start[..., d:], mix_n)
            at.baddbmm_(E_n.mT, L_n, alpha=-1)
        ctx.save_for_backward(R, L, b, f, m, starts, E)
        return E, starts, at

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dE_out: Tensor, dstarts: Tensor, dend: Tensor) -> tuple[Tensor, ...]:
        R, L, b, f, m, starts, E = ctx.saved_tensors
        N, d, r = R.shape[0], starts.shape[-1] // 2, R.shape[-1]
        scale = torch.cat([b.unsqueeze(-1).expand(-1, -1, d), m.unsqueeze(-1).expand(-1, -1, d)], -1).unsqueeze(-2)
        mix = f.view(*f.shape, 1, 1)
        dE = torch.empty_like(E)
        ends = torch.empty_like(starts)  # gradient at the end of each chunk
        g = dend
        for n in reversed(range(N)):
            ends[n].copy_(g)
            torch.baddbmm(dE_out[n], L[n], ends[n].mT, alpha=-1, out=dE[n])
            g = torch.addcmul(dstarts[n], ends[n], scale[n])
            g[..., d:].addcmul_(ends[n][..., :d], mix[n])
            if r:
                g[..., :r].baddbmm_(dE[n].mT, R[n])
        W, S = starts[..., :d], starts[..., d:]
        gW, gS = ends[..., :d], ends[..., d:]
        return (
            dE @ starts[..., :r],
            -dE,
            -(E @ ends),
            (gW * W).sum((-2, -1)),
            (gW * S).sum((-2, -1)),
            (gS * S).sum((-2, -1)),
            g,
        )


def _exact_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: MatrixState,
    read: str,
    write: Tensor | None,
    decayed_error: bool,
) -> tuple[Tensor, MatrixState]:
    """One token (T = 1), straight from the rule: what a live stream does."""
    dtype = state.W.dtype
    eta, alpha = clamp_gates(eta, alpha)
    keep = None if alpha is None else (1.0 - alpha).to(dtype).unsqueeze(-1)  # (B, H, 1, 1)
    key = k.to(dtype)  # (B, H, 1, d_k)
    error = key @ state.W.mT
    if decayed_error and keep is not None:
        error = error * keep
    error = (error - v.to(dtype)) * -theta.to(dtype).unsqueeze(-1)
    outer = error.mT * key
    S = outer if eta is None else torch.addcmul(outer, state.S, eta.to(dtype).unsqueeze(-1))
    W = state.W + S if keep is None else torch.addcmul(S, state.W, keep)
    if write is not None:
        at = write.view(-1, 1, 1, 1)
        W, S = torch.where(at, W, state.W), torch.where(at, S, state.S)
    y = q.to(dtype) @ (W if read == "after" else state.W).mT
    return y.to(v.dtype), MatrixState(W=W, S=S)


def by_row(
    rule: Callable[..., tuple[Tensor, Any]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor,
    state: Any,
    gamma: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Channel-wise forgetting, alpha (B, H, T, d_v): a gate for each output row (Titans NeurIPS section 2.1; papers D.2).

    The output rows of a matrix memory never mix, whatever the rule, so each row is a memory of its own with d_v = 1: `rule` sees H * d_v heads,
    and with an Omega window gamma besides. state: a MatrixState, StaleState or OmegaState, and so is the one that comes back.
    Costs d_v times the chunk matrices of the scalar gate: chunks should be small where the rule leaves them free.
    """
    B, H, T, d_v = v.shape
    fields = set(state._fields)

    def each(x: Tensor) -> Tensor:  # (B, H, ...) -> (B, H * d_v, ...): all rows of a head share it
        return x.unsqueeze(2).expand(B, H, d_v, *x.shape[2:]).flatten(1, 2)

    def own(x: Tensor) -> Tensor:  # (B, H, n, d_v) -> (B, H * d_v, n, 1)
        return x.mT.reshape(B, H * d_v, x.shape[2], 1)

    rows = {name: getattr(state, name).flatten(1, 2).unsqueeze(-2) for name in WEIGHTS & fields}
    if "keys" in fields:
        rows |= {"keys": each(state.keys), "values": own(state.values)}
    y, new = rule(
        each(q), each(k), own(v), each(theta), None if eta is None else each(eta), own(alpha).squeeze(-1), state=state._replace(**rows),
        **({} if gamma is None else {"gamma": each(gamma)}),
    )  # fmt: skip
    back = {name: getattr(new, name).view(B, H, d_v, k.shape[-1]) for name in WEIGHTS & fields}
    if "keys" in fields:
        c = state.keys.shape[2]
        back |= {"keys": new.keys.view(B, H, d_v, c, k.shape[-1])[:, :, 0], "values": new.values.view(B, H, d_v, c).mT}
    return y.view(B, H, d_v, T).mT, new._replace(**back)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    W: Tensor,
    chunk: int,
    read: str,
    reads: tuple[str, ...],
) -> None:
    """A wrong shape broadcasts silently into a wrong memory; say which one it is instead."""
    B, H, T, d_k = k.shape
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "q": (q, (B, H, T, d_k)),
        "v": (v, (B, H, T, W.shape[-2])),
        "theta": (theta, (B, H, T)),
        "W": (W, (B, H, v.shape[-1], d_k)),
    }
    if eta is not None:
        wanted["eta"] = (eta, (B, H, T))
    if alpha is not None:
        wanted["alpha"] = (alpha, (B, H, T, v.shape[-1]) if alpha.dim() == 4 else (B, H, T))
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"matrix memory: {name} has shape {tuple(x.shape)}, expected {shape} for k of shape {tuple(k.shape)}")
    if chunk < 1:
        raise ValueError(f"matrix memory: chunk must be at least 1, not {chunk}")
    if read not in reads:
        raise ValueError(f"matrix memory: read is one of {reads}, not {read!r}")


def cast_block(block: Coefficients, dtype: torch.dtype) -> Coefficients:
    return Coefficients(*(x.to(dtype) for x in block))


def wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
