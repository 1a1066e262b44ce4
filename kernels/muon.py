"""Atlas: the Omega rule with Muon as the inner optimiser (ATLAS Eqs. 32-33, 57-58, in a consistent sign).

    G_t = grad_W sum_{i in window} gamma_{t,i} loss_i
    S_t = eta_t S_{t-1} + G_t
    W_t = (1 - alpha_t) W_{t-1} - theta_t NS(S_t)

Orthogonalisation is not linear, so the dual form ends here: momentum is formed for the tokens that orthogonalise. `every` says which:

    every = 1      per token, the papers' Atlas; about 200 times the cost of the gradient at the papers' sizes
    every = s      block-Muon: the weights move once every s tokens, by the orthogonalised momentum of the block's last token, with the
                   block's decay and its decayed sum of theta; tokens inside a block read the weights of the last finished block
    every = chunk  chunk-Muon, as large-chunk test-time training does

Only chunk = 1, every = 1 is the per-token recurrence with true gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.coefficients import clamp_gates, coefficients, window
from kernels.grid import check_phase, part_of
from kernels.linear import carry_window, check_window, opening
from kernels.mlp import Affine, Weights, deep_state
from kernels.network import DEFAULT, Network, forward, inputs_and_deltas
from kernels.newton_schulz import newton_schulz


class AtlasState(NamedTuple):
    """As DeepState, with raw (not orthogonalised) momentum, and what the open block has yet to write."""

    W: Weights  # each (B, H, out, in)
    S: Weights
    anchor: Weights
    phase: Tensor  # (B,) int64
    keys: Tensor  # (B, H, c - 1, d_in)
    values: Tensor  # (B, H, c - 1, d_out)
    keep: Tensor  # (B, H, L) decay the open block has gathered; 1 when no block is open
    step: Tensor  # (B, H, L) decayed sum of theta the open block has gathered


def atlas_state(init: Sequence[Tensor], streams: int, window: int = 1) -> AtlasState:
    """A fresh memory for each of `streams`: W = init (each (H, out, in)), S = 0."""
    state = deep_state(init, streams, window)
    pending = torch.zeros(streams, init[0].shape[0], len(init), dtype=init[0].dtype, device=init[0].device)
    return AtlasState(*state, keep=pending + 1, step=pending)


def atlas(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: AtlasState,
    *,
    init: Sequence[Tensor] | None,
    chunk: int = 16,
    every: int = 1,
    network: Network = DEFAULT,
    affine: Affine = None,
    gamma: Tensor | None = None,
    read: str = "after",
    write: Tensor | None = None,
    orthogonalise: Callable[[Tensor], Tensor] = newton_schulz,
) -> tuple[Tensor, AtlasState]:
    """Arguments as `kernels.mlp.deep`; every: tokens a Muon write gathers, a divisor of chunk; orthogonalise: the form of `newton_schulz`
    that runs. theta about 1e-2 to 1e-3: its size is the
    size of the write, whatever the surprise.

    Forms one momentum matrix a write and one weight matrix a token: keep chunks and widths small where every = 1.
    """
    if chunk % every:
        raise ValueError(f"atlas: every ({every}) must divide chunk ({chunk})")
    if read not in ("after", "before"):
        raise ValueError(f"atlas: read is 'after' or 'before', not {read!r}")
    check_window(gamma, state.keys, "atlas")
    B, H, T = k.shape[:3]
    depth = len(state.W)
    theta = _by_layer(theta, depth)
    eta, alpha = (None if g is None else _by_layer(g, depth) for g in (eta, alpha))
    if T == 0 or B == 0:  # no token or no stream
        return torch.zeros_like(v), state
    low, high = check_phase(state.phase, chunk)
    outputs = [v.new_zeros(B, H, 0, v.shape[-1])]
    at = 0
    while at < T:
        # a piece ends with its chunk; streams at different places, or with gaps, go one token at a time
        size = 1 if low != high or write is not None else min(T - at, chunk - (low + at) % chunk)
        part = slice(at, at + size)
        y, state = _piece(
            q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], part_of(eta, part), part_of(alpha, part),
            state, init, chunk, every, network, affine, part_of(gamma, part), read, None if write is None else write[:, part],
            orthogonalise,
        )  # fmt: skip
        outputs.append(y)
        at += size
    return torch.cat(outputs, 2), state


def _by_layer(gate: Tensor, depth: int) -> Tensor:
    """(B, H, T) -> (B, H, T, L); a gate of its own for each layer stays as it is."""
    return gate.unsqueeze(-1).expand(*gate.shape, depth) if gate.dim() == 3 else gate


def _piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: AtlasState,
    init: Sequence[Tensor] | None,
    chunk: int,
    every: int,
    network: Network,
    affine: Affine,
    gamma: Tensor | None,
    read: str,
    write: Tensor | None,
    orthogonalise: Callable[[Tensor], Tensor],
) -> tuple[Tensor, AtlasState]:
    """n tokens inside one chunk. Gates (B, H, n, L)."""
    dtype = state.W[0].dtype
    n, depth = theta.shape[2:]
    anchor = tuple(opening(state.phase, w, a) for w, a in zip(state.W, state.anchor, strict=True))
    norm = None if affine is None else (affine[0].unsqueeze(-2), affine[1].unsqueeze(-2))
    keys = torch.cat([state.keys, k.to(dtype)], 2)
    inputs, deltas = inputs_and_deltas(anchor, keys, torch.cat([state.values, v.to(dtype)], 2), network, norm)

    # positions at which a block closes; one token at a time, each stream has its own answer in `closes`
    place = state.phase.unsqueeze(-1) + torch.arange(1, n + 1, device=theta.device)  # (B, n)
    closes = place % every == 0
    ends: list[int] = closes.any(0).nonzero().flatten().tolist()
    rows = ends if ends and ends[-1] == n - 1 else [*ends, n - 1]  # momentum is needed at the ends, and at the last token to carry on

    written: list[Tensor] = []
    S_end: list[Tensor] = []
    W_end: list[Tensor] = []
    new_keep, new_step = [], []
    for i in range(depth):
        one = torch.ones_like(theta[..., i])
        e = None if eta is None else eta[..., i]
        momentum = coefficients(one, e, None)
        if gamma is not None:
            momentum = window(momentum, gamma)
        m, GS = momentum.m[..., rows].to(dtype), momentum.GS[..., rows, :].to(dtype)
        S = m[..., None, None] * state.S[i].unsqueeze(2)
        S = S + torch.einsum("bhrt,bhto,bhti->bhroi", GS, deltas[i], inputs[i])
        S_end.append(S[:, :, -1])
        _, a = clamp_gates(None, None if alpha is None else alpha[..., i])
        keep_of = torch.ones_like(one) if a is None else 1.0 - a
        W, target = state.W[i], None if init is None else init[i]
        versions = [W]
        keep, step = state.keep[..., i], state.step[..., i]
        done = 0
        orthogonal = _recomputed(orthogonalise, S[:, :, : len(ends)]) if ends else S
        for j, end in enumerate(ends):
            for t in range(done, end + 1):
                keep, step = keep * keep_of[:, :, t].to(dtype), step * keep_of[:, :, t].to(dtype) + theta[:, :, t, i].to(dtype)
            done = end + 1
            old = W if target is None else W - target
            moved = keep[..., None, None] * old - step[..., None, None] * orthogonal[:, :, j]
            moved = moved if target is None else moved + target
            if n == 1:
                closed = closes[:, 0].view(-1, 1, 1, 1)
                W = torch.where(closed, moved, W)
                keep = torch.where(closed[..., 0, 0], torch.ones_like(keep), keep)
                step = torch.where(closed[..., 0, 0], torch.zeros_like(step), step)
            else:
                W, keep, step = moved, torch.ones_like(keep), torch.zeros_like(step)
            versions.append(W)
        for t in range(done, n):
            keep, step = keep * keep_of[:, :, t].to(dtype), step * keep_of[:, :, t].to(dtype) + theta[:, :, t, i].to(dtype)
        new_keep.append(keep)
        new_step.append(step)
        W_end.append(W)
        # the version each token reads: the number of blocks closed up to it (or strictly before it)
        seen = [sum(end <= t if read == "after" else end < t for end in ends) for t in range(n)]
        written.append(torch.stack(versions, 2)[:, :, seen])  # (B, H, n, out, in)

    def layer(index: int, x: Tensor) -> Tensor:
        return (written[index] @ x.unsqueeze(-1)).squeeze(-1)

    y = forward(layer, depth, q.to(dtype), network, norm)
    new = AtlasState(
        W=tuple(W_end),
        S=tuple(S_end),
        anchor=anchor,
        phase=(state.phase + n) % chunk,
        keys=carry_window(state.keys, k.to(dtype), write),
        values=carry_window(state.values, v.to(dtype), write),
        keep=torch.stack(new_keep, -1),
        step=torch.stack(new_step, -1),
    )
    if write is not None:
        if read == "after":  # an unwritten token reads the weights as they were
            plain = forward(lambda index, x: x @ state.W[index].mT, depth, q.to(dtype), network, norm)
            y = torch.where(write.view(-1, 1, 1, 1), y, plain)
        new = _only(write[:, 0], new, state)
    return y.to(v.dtype), new


def _recomputed(orthogonalise: Callable[[Tensor], Tensor], S: Tensor) -> Tensor:
    """NS of every momentum matrix; recomputed in the backward pass, which would otherwise keep three matrices an iteration."""
    if torch.is_grad_enabled() and S.requires_grad:
        return checkpoint(orthogonalise, S, use_reentrant=False)
    return orthogonalise(S)


def _only(write: Tensor, new: AtlasState, old: AtlasState) -> AtlasState:
    """The new state for the streams that wrote, the old one bit for bit for the others."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(write.view(-1, *[1] * (a.dim() - 1)), a, b)

    return AtlasState(
        W=tuple(choose(a, b) for a, b in zip(new.W, old.W, strict=True)),
        S=tuple(choose(a, b) for a, b in zip(new.S, old.S, strict=True)),
        anchor=tuple(choose(a, b) for a, b in zip(new.anchor, old.anchor, strict=True)),
        phase=choose(new.phase, old.phase),
        keys=choose(new.keys, old.keys),
        values=choose(new.values, old.values),
        keep=choose(new.keep, old.keep),
        step=choose(new.step, old.step),
    )
