"""The Omega rule with a matrix memory, exactly: every token descends the loss of its last c tokens at its true weights (ATLAS Eqs. 8-11).

    e_{t,r} = W_{t-1} k_{t-r} - v_{t-r} ,  r = 0..c-1
    S_t = eta_t S_{t-1} - theta_t sum_r gamma_{t,r} e_{t,r} k_{t-r}^T         W_t = (1 - alpha_t) W_{t-1} + S_t         y_t = W_t q_t

The papers give the chunk-start approximation only (`kernels.linear.linear_stale` with gamma). But the squared loss is linear in W, so the
errors of a chunk again solve one unit lower-triangular system, now with a row for each (token, lag):

    E[t,r] = bp_t W_0 k_{t-r} + fp_t S_0 k_{t-r} - v_{t-r} - sum_{s<t} Gp[t,s] sum_r' gamma_{s,r'} (k_{s-r'} . k_{t-r}) E[s,r']

A chunk of n tokens solves n * c rows: take n about 64 / c. The chunk size never changes the result, and the rule is as stable as the
per-token one; the chunk-start form needs steps smaller by the chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.coefficients import coefficients
from kernels.grid import fixed_grid, part_of
from kernels.linear import (
    BLOCK,
    StaleState,
    by_row,
    carry_window,
    cast_block,
    check,
    check_window,
    linear_stale,
    read_chunks,
    run_chunks,
    wants_grad,
)


class OmegaState(NamedTuple):
    """All that an exact Omega memory keeps of its past."""

    W: Tensor  # (B, H, d_v, d_k)
    S: Tensor  # (B, H, d_v, d_k) momentum
    keys: Tensor  # (B, H, c - 1, d_k) the window's carried keys, oldest first; zeros before the stream began
    values: Tensor  # (B, H, c - 1, d_v)


def omega_state(init: Tensor, streams: int, window: int) -> OmegaState:
    """A fresh memory for each of `streams`: W = init (H, d_v, d_k), S = 0, an empty window of c = `window` tokens."""
    W = init.expand(streams, *init.shape).clone()
    H, d_v, d_k = init.shape
    return OmegaState(
        W=W,
        S=torch.zeros_like(W),
        keys=W.new_zeros(streams, H, window - 1, d_k),
        values=W.new_zeros(streams, H, window - 1, d_v),
    )


def omega_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    gamma: Tensor,
    state: OmegaState,
    *,
    chunk: int = 16,
    read: str = "after",
    write: Tensor | None = None,
) -> tuple[Tensor, OmegaState]:
    """q, k (B, H, T, d_k), v (B, H, T, d_v), theta, eta, alpha (B, H, T), gamma (B, H, T, c) by lag -> y (B, H, T, d_v), state.

    eta None: no momentum; alpha None: no decay; alpha (B, H, T, d_v): a forget gate for each output row. read: "after" or
    "before" the write. write (B, T) bool, False: the token reads and leaves state and window as they were.
    The chunk size changes the speed and nothing else.
    """
    check(q, k, v, theta, eta, alpha, state.W, chunk, read, ("after", "before"))
    check_window(gamma, state.keys, "omega_exact")
    if alpha is not None and alpha.dim() == 4:
        return by_row(partial(omega_exact, chunk=chunk, read=read, write=write), q, k, v, theta, eta, alpha, state, gamma)  # type: ignore[no-any-return]
    dtype, B, H, T = state.W.dtype, *theta.shape
    c = gamma.shape[-1]
    if T == 0 or B == 0:  # no token or no stream
        return torch.zeros_like(v), state
    if T == 1:  # with a chunk of one token the chunk-start form is the rule itself
        start = StaleState(state.W, state.S, state.W, torch.zeros(B, dtype=torch.long, device=k.device), state.keys, state.values)
        y, after = linear_stale(q, k, v, theta, eta, alpha, start, chunk=1, read=read, write=write, gamma=gamma)
        return y, OmegaState(after.W, after.S, after.keys, after.values)
    piece = T
    if write is not None:
        piece = 1  # the window holds written tokens only: with gaps, one token at a time is the whole rule
    elif not wants_grad(q, k, v, theta, eta, alpha, gamma, *state):
        piece = BLOCK * chunk
    if T > piece:
        outputs = []
        for at in range(0, T, piece):
            part = slice(at, at + piece)
            y, state = omega_exact(
                q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], part_of(eta, part), part_of(alpha, part),
                gamma[:, :, part], state, chunk=chunk, read=read, write=None if write is None else write[:, part],
            )  # fmt: skip
            outputs.append(y)
        return torch.cat(outputs, 2), state
    grid = fixed_grid(T, chunk, None, theta.device)
    Q = grid.split(q.to(dtype))
    n = grid.slots
    # rows (token, lag): the pair that token t sees r tokens back lies at t + c - 1 - r of the chunk with its window before it
    row = (torch.arange(n, device=k.device).unsqueeze(-1) + (c - 1) - torch.arange(c, device=k.device)).flatten()
    K = grid.split_window(k.to(dtype), state.keys)[:, :, row]  # (N, B * H, n * c, d_k)
    V = grid.split_window(v.to(dtype), state.values)[:, :, row]
    momentum, forget = (None if g is None else grid.split(g) for g in (eta, alpha))
    block = coefficients(grid.split(theta), momentum, forget, grid.writes(B, H))
    before = block.before()
    lags = grid.split(gamma).to(block.G.dtype).unsqueeze(-3)  # (N, B * H, 1, n, c)

    def by_lag(G: Tensor) -> Tensor:  # (N, B * H, n, n) -> (N, B * H, n, n * c)
        return (G.unsqueeze(-1) * lags).flatten(-2)

    def each_lag(x: Tensor, dim: int) -> Tensor:  # every lag of a token meets the same weights
        return x.to(dtype).repeat_interleave(c, dim)

    right = torch.cat([each_lag(before.b, -1).unsqueeze(-1) * K, each_lag(before.f, -1).unsqueeze(-1) * K, V], -1)
    system = (K @ K.mT) * each_lag(by_lag(before.G), -2)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    reader, target = solved.split([2 * K.shape[-1], V.shape[-1]], -1)
    block = cast_block(block._replace(G=by_lag(block.G), GS=by_lag(block.GS)), dtype)
    E, starts, end = run_chunks(reader, target, K, block, torch.cat([state.W, state.S], -1).flatten(0, 1))
    Y = read_chunks(Q, K, E, starts, block if read == "after" else block.before())
    W, S = end.view(B, H, *end.shape[-2:]).split(K.shape[-1], -1)
    new = OmegaState(
        W=W,
        S=S,
        keys=carry_window(state.keys, k.to(dtype), None),
        values=carry_window(state.values, v.to(dtype), None),
    )
    return grid.join(Y, B, H).to(v.dtype), new
