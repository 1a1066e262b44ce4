"""The coefficient block that every chunk form shares: momentum and decay over one chunk, solved in closed form.

For one chunk of n tokens with rank-one gradients u_i (the papers' "momentary surprise"), the two linear recurrences

    S_t = eta_t S_{t-1} - theta_t u_t          W_t = (1 - alpha_t) W_{t-1} + S_t          (Titans Eqs. 13-14)

have the solution

    W_t = b_t W_0 + f_t S_0 - sum_{i<=t} G[t,i] u_i          S_t = m_t S_0 - sum_{i<=t} GS[t,i] u_i

with   Db[t,i] = prod_{i<l<=t} (1 - alpha_l),  Dm[t,i] = prod_{i<l<=t} eta_l   (lower triangular)
       b = prod (1 - alpha),  m = prod eta,  f = Db m,  GS = Dm diag(theta),  G = Db GS.

Every ratio is exp(difference of cumulative logs), masked before exp: a quotient of cumulative products is 0/0 after 64 tokens of
alpha = 0.9 in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KEEP_FLOOR = 1e-6  # smallest 1 - alpha and smallest eta: below it a logarithm would swallow its neighbours' digits in float32


class Coefficients(NamedTuple):
    """One block a chunk; the leading dimensions are those of the gates. All factors are at most 1 apart from `f` and theta's size."""

    b: Tensor  # (..., n)    weight of W_0 in W_t
    f: Tensor  # (..., n)    weight of S_0 in W_t
    m: Tensor  # (..., n)    weight of S_0 in S_t
    G: Tensor  # (..., n, r) weight of -u_i in W_t; r = n, or n + c - 1 under an Omega window
    GS: Tensor  # (..., n, r) weight of -u_i in S_t

    def before(self) -> Coefficients:
        """The block of the state BEFORE each token: rows shifted down by one, the first row being the chunk's start."""
        return Coefficients(
            b=_shift(self.b.unsqueeze(-1), 1.0).squeeze(-1),
            f=_shift(self.f.unsqueeze(-1), 0.0).squeeze(-1),
            m=_shift(self.m.unsqueeze(-1), 1.0).squeeze(-1),
            G=_shift(self.G, 0.0),
            GS=_shift(self.GS, 0.0),
        )


def clamp_gates(eta: Tensor | None, alpha: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """eta >= 1e-6 and alpha <= 1 - 1e-6, the limits every implementation shares (None: no momentum, no decay)."""
    return (
        None if eta is None else eta.clamp(min=KEEP_FLOOR),
        None if alpha is None else alpha.clamp(max=1.0 - KEEP_FLOOR),
    )


def coefficients(theta: Tensor, eta: Tensor | None, alpha: Tensor | None, write: Tensor | None = None) -> Coefficients:
    """theta, eta, alpha (..., n): step, momentum decay, forget; eta None means no momentum, alpha None no decay.

    write (..., n) bool: False marks a slot that changes neither W nor S. (Padding by theta=0, alpha=0, eta=1 would not do:
    W would still move by S.)
    Computes in float32, or in float64 if theta is float64.
    """
    dtype = torch.float64 if theta.dtype == torch.float64 else torch.float32
    theta = theta.to(dtype)
    eta, alpha = clamp_gates(eta, alpha)
    log_keep = None if alpha is None else torch.log1p(-alpha.to(dtype))
    log_momentum = None if eta is None else torch.log(eta.to(dtype))
    if write is not None:
        theta = theta * write
        log_keep = None if log_keep is None else log_keep * write
        log_momentum = None if log_momentum is None else log_momentum * write
    n = theta.shape[-1]
    lower = torch.ones(n, n, dtype=torch.bool, device=theta.device).tril()
    if log_momentum is None:
        m = torch.zeros_like(theta)
        momentum = torch.eye(n, dtype=dtype, device=theta.device).expand(*theta.shape, n)
        if write is not None:  # a skipped first slot has not yet lost S_0
            m = (write.cumsum(-1) == 0).to(dtype).expand(theta.shape)
            momentum = _no_momentum(write, lower, dtype).expand(*theta.shape, n)
    else:
        m, momentum = _products(log_momentum, lower)
    GS = momentum * theta.unsqueeze(-2)
    if log_keep is None:
        b = torch.ones_like(theta)
        decay = lower.to(dtype).expand(*theta.shape, n)
    else:
        b, decay = _products(log_keep, lower)
    applied = decay if write is None else decay * write.unsqueeze(-2)
    f = (applied @ m.unsqueeze(-1)).squeeze(-1)
    return Coefficients(b=b, f=f, m=m, G=applied @ GS, GS=GS)


def _products(logs: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """prod_{l<=t} and prod_{i<l<=t} of exp(logs), the second lower triangular."""
    total = logs.cumsum(-1)
    return total.exp(), (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()


def _no_momentum(write: Tensor, lower: Tensor, dtype: torch.dtype) -> Tensor:
    """Dm for eta = 0 with skipped slots: S_t is the last written gradient, so token i counts until the next written token."""
    seen = write.cumsum(-1)
    return (seen.unsqueeze(-1) == seen.unsqueeze(-2)).logical_and(lower).to(dtype)


def _shift(x: Tensor, first: float) -> Tensor:
    """Rows 1..n-1 of (..., n, r) become rows 2..n; row 1 is `first`."""
    return torch.cat([torch.full_like(x[..., :1, :], first), x[..., :-1, :]], -2)


def window(block: Coefficients, gamma: Tensor) -> Coefficients:
    """Omega rule: the gradient of token t is sum_r gamma[t,r] u_{t-r}, r = 0..c-1 (ATLAS Eqs. 8-11, banded form of section 3.3).

    gamma (..., n, c) lag-indexed -> G, GS (..., n, n + c - 1) over the c - 1 carried tokens followed by the chunk's n.
    """
    n, c = gamma.shape[-2:]
    band = gamma.new_zeros(*gamma.shape[:-1], n + c - 1)
    column = torch.arange(n, device=gamma.device).unsqueeze(-1) + (c - 1) - torch.arange(c, device=gamma.device)
    band = band.scatter(-1, column.expand(gamma.shape), gamma)
    band = band.to(block.G.dtype)
    return block._replace(G=block.G @ band, GS=block.GS @ band)
