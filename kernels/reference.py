"""The oracle: every write rule once, one token at a time, as the papers state it. Clarity first; run it in float64.

    u_t = grad_W loss(W; k_t, v_t)                         momentary surprise, by autograd: no closed form is trusted here
    S_t = eta_t S_{t-1} - theta_t u_t                      Titans Eq. 13 (momentum)
    W_t = (1 - alpha_t) W_{t-1} + S_t                      Titans Eq. 14 (forgetting)
    y_t = M_{W_t}(q_t)                                     read after the write ("before": M_{W_{t-1}})

The gradient is taken at the true weights W_{t-1} (anchor_every=1), or, for the papers' chunk-parallel form, at the weights the chunk of
C tokens began with (anchor_every=C; the printed index t - mod(t, b) is off by one, its text shows b * floor((t - 1) / b)).
Options of the same rule: `gamma` for the Omega window (ATLAS Eqs. 8-11), `muon_every` for Atlas (ATLAS Eqs. 32-33), `init` for weights that
decay towards the learned initial weights instead of to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.network import Network
from kernels.newton_schulz import newton_schulz


@dataclass(frozen=True)
class OracleState:
    """W, S, anchor: one tensor (B, H, out, in) a memory layer; phase: tokens in the open chunk; tail: last c - 1 pairs."""

    W: tuple[Tensor, ...]
    S: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    phase: int = 0
    tail: tuple[tuple[Tensor, Tensor], ...] = ()
    gathered: tuple[tuple[Tensor | float, Tensor | float], ...] = ()  # Muon only: decay and step of the block that is still open, by layer


def oracle_state(weights: Sequence[Tensor], momentum: Sequence[Tensor] | None = None) -> OracleState:
    """A fresh state at `weights` (each (B, H, out, in)); S_0 = 0 unless given."""
    S = tuple(torch.zeros_like(w) for w in weights) if momentum is None else tuple(momentum)
    return OracleState(W=tuple(weights), S=S, anchor=tuple(weights))


def memory_output(weights: Sequence[Tensor], x: Tensor, network: Network, affine: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """M_W(x): x (B, H, d_in) -> (B, H, d_out)."""

    def layer(w: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("bhoi,bhi->bho", w, a)

    if network.gated:
        z = layer(weights[2], F.gelu(layer(weights[0], x)) * layer(weights[1], x))
    else:
        a = x
        for w in weights[:-1]:
            a = F.gelu(layer(w, a))
        if network.unit_hidden and len(weights) > 1:
            a = a / (a.square().sum(-1, keepdim=True) + 1e-12).sqrt()
        z = layer(weights[-1], a)
    if network.norm:
        z = F.layer_norm(z, z.shape[-1:], eps=network.eps)
        if affine is not None:
            z = z * affine[0] + affine[1]
    return x + z if network.residual else z


def memory_loss(weights: Sequence[Tensor], k: Tensor, v: Tensor, network: Network, affine: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """(B, H): 1/2 ||M(k) - v||^2, or -<M(k), v> for the linear-attention family."""
    out = memory_output(weights, k, network, affine)
    if network.loss == "dot":
        return -(out * v).sum(-1)
    return 0.5 * (out - v).square().sum(-1)


def titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: OracleState,
    *,
    network: Network,
    anchor_every: int = 1,
    read: str = "after",
    init: Sequence[Tensor] | None = None,
    affine: tuple[Tensor, Tensor] | None = None,
    gamma: Tensor | None = None,
    write: Tensor | None = None,
    muon_every: int | None = None,
    exact_last: bool = False,
) -> tuple[Tensor, OracleState]:
    """q, k (B, H, T, d_in), v (B, H, T, d_out) -> y (B, H, T, d_out) and the state after the last token.

    theta, eta, alpha (B, H, T), or (B, H, T, L) with one gate a memory layer, or alpha (B, H, T, L, out) channel-wise (a matrix memory may
    give (B, H, T, 1, d_v)). init[l] broadcasts to (B, H, out, in).
    gamma (B, H, T, c) by lag. write (B, T) bool; False: the token reads and changes nothing. Streams share one phase, so `write` with
    anchor_every > 1 must be the same for all of them.
    read: "after", "before" (the write), or "anchor" (the weights the chunk began with).
    muon_every: None, or s: the weights move every s tokens of a chunk by -(decayed sum of theta) NS(S_t); 1 is the papers' Atlas.
    exact_last: the last layer's gradient at its true weights, over hidden features of the anchored layers below it.
    """
    L = len(state.W)

    def gate(g: Tensor | None, t: int, layer: int) -> Tensor | float:
        if g is None:
            return 0.0
        at = g[:, :, t] if g.dim() == 3 else g[:, :, t, layer]
        return at.unsqueeze(-1).unsqueeze(-1) if at.dim() == 2 else at.unsqueeze(-1)

    outputs = []
    for t in range(q.shape[2]):
        if write is not None and anchor_every > 1 and not (write[:, t].all() or not write[:, t].any()):
            raise ValueError("the oracle keeps one phase for all streams: with anchor_every > 1, write must not differ between them")
        writes = write is None or bool(write[:, t].any())
        before = state
        anchor = state.W if state.phase == 0 else state.anchor
        if writes:
            window = (*state.tail, (k[:, :, t], v[:, :, t]))
            lags = 1 if gamma is None else gamma.shape[-1]
            window = window[-lags:]
            gradient = list(_surprise(anchor, window, None if gamma is None else gamma[:, :, t], network, affine))
            if exact_last:
                mixed = (*anchor[:-1], state.W[-1])
                gradient[-1] = _surprise(mixed, window, None if gamma is None else gamma[:, :, t], network, affine)[-1]
            S, W, gathered = [], [], []
            for i in range(L):
                step, keep = gate(theta, t, i), 1.0 - gate(alpha, t, i)
                target = 0.0 if init is None else init[i]
                if muon_every is None:
                    S.append(gate(eta, t, i) * state.S[i] - step * gradient[i])
                    W.append(target + keep * (state.W[i] - target) + S[i])
                    continue
                S.append(gate(eta, t, i) * state.S[i] + gradient[i])  # raw momentum carries, its orthogonalisation writes
                decay, size = state.gathered[i] if state.gathered else (1.0, 0.0)
                decay, size = keep * decay, keep * size + step
                if (state.phase + 1) % muon_every == 0:
                    W.append(target + decay * (state.W[i] - target) - size * newton_schulz(S[i]))
                    decay, size = 1.0, 0.0
                else:
                    W.append(state.W[i])
                gathered.append((decay, size))
            state = OracleState(
                W=tuple(W),
                S=tuple(S),
                anchor=anchor,
                phase=(state.phase + 1) % anchor_every,
                tail=window[-(lags - 1) :] if lags > 1 else (),
                gathered=tuple(gathered),
            )
            if write is not None:
                state = _only(write[:, t], state, before)
        weights = {"after": state.W, "before": before.W, "anchor": anchor}[read]
        outputs.append(memory_output(weights, q[:, :, t], network, affine))
    return torch.stack(outputs, 2), state


def _surprise(
    weights: Sequence[Tensor],
    window: Sequence[tuple[Tensor, Tensor]],
    gamma: Tensor | None,
    network: Network,
    affine: tuple[Tensor, Tensor] | None,
) -> Sequence[Tensor]:
    """grad_W of sum over the window (newest last) of gamma * loss; second-order terms stay in the graph when one is wanted."""
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        at = [w if w.requires_grad else w.detach().requires_grad_() for w in weights]
        loss = torch.zeros((), dtype=at[0].dtype)
        for lag, (k, v) in enumerate(reversed(window)):
            each = memory_loss(at, k, v, network, affine)
            loss = loss + (each if gamma is None else gamma[..., lag] * each).sum()
        gradient = torch.autograd.grad(loss, at, create_graph=keep, materialize_grads=True)
    return gradient if keep else [g.detach() for g in gradient]


def _only(write: Tensor, new: OracleState, old: OracleState) -> OracleState:
    """The new state for the streams that wrote, the old one bit for bit for the others."""
    at = write.view(-1, 1, 1, 1)

    def choose(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.where(at, x, y) for x, y in zip(a, b, strict=True))

    tail = new.tail if bool(write.all()) else old.tail
    if bool(write.any()) and not bool(write.all()) and new.tail:
        raise ValueError("the oracle keeps one window for all streams: with gamma, write must not differ between them")
    return replace(new, W=choose(new.W, old.W), S=choose(new.S, old.S), anchor=choose(new.anchor, old.anchor), tail=tail)
