"""Momentum and decay by a parallel associative scan: the papers' way (Titans section 3.2), equal to the coefficient block.

It forms the weights of every token, which the dual forms avoid; it is here as the named equal form, for memories whose gradients are
already materialised and for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_recurrence(decay: Tensor, x: Tensor, initial: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + x_t for all t in log2(T) rounds; decay (..., T), x (..., T, r, c), initial (..., r, c) -> (..., T, r, c).

    The pairs (decay, x) compose as (a1, x1) then (a2, x2) = (a1 a2, a2 x1 + x2), which is associative (Blelloch).
    """
    a = decay[..., None, None]
    h = torch.cat([x[..., :1, :, :] + a[..., :1, :, :] * initial.unsqueeze(-3), x[..., 1:, :, :]], -3)
    reach = 1
    while reach < x.shape[-3]:
        h = torch.cat([h[..., :reach, :, :], h[..., reach:, :, :] + a[..., reach:, :, :] * h[..., :-reach, :, :]], -3)
        a = torch.cat([a[..., :reach, :, :], a[..., reach:, :, :] * a[..., :-reach, :, :]], -3)
        reach *= 2
    return h


def momentum_and_decay(u: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, W: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """All W_t and S_t (..., T, r, c) of Titans Eqs. 13-14 for given gradients u (..., T, r, c), by two scans."""
    momentum = linear_recurrence(eta, -theta[..., None, None] * u, S)
    return linear_recurrence(1.0 - alpha, momentum, W), momentum
