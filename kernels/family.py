"""The relatives of Titans and ATLAS as special cases of the same forms (ATLAS section 3 and Table 1; Titans appendix C).

Each is a setting of `linear_exact`, `linear_stale` or `deep`; nothing is computed here. Where a rule uses features phi, pass
phi(q) and phi(k) from `kernels.features`. The papers print the dot-product losses with a plus sign; the writes they state need the minus
that Network(loss="dot") has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kernels.dispatch import deep, linear_exact, linear_stale
from kernels.linear import MatrixState, StaleState
from kernels.mlp import Affine, DeepState
from kernels.network import DEFAULT, Network


def delta_net(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: MatrixState, *, chunk: int = 64) -> tuple[Tensor, MatrixState]:
    """DeltaNet: W_t = W_{t-1} - beta_t (W_{t-1} k_t - v_t) k_t^T. No momentum, no decay; beta (B, H, T)."""
    return linear_exact(q, k, v, beta, None, None, state, chunk=chunk)


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor, state: MatrixState, *, chunk: int = 64
) -> tuple[Tensor, MatrixState]:
    """Gated DeltaNet: W_t = (1 - alpha_t) W_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

    Its error is that of the decayed memory. Titans without momentum takes the error before decay, so the two are not the same rule,
    although Titans appendix C calls them equivalent.
    """
    return linear_exact(q, k, v, beta, None, alpha, state, chunk=chunk, decayed_error=True)


def decayed_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, alpha: Tensor | None, state: StaleState, *, chunk: int = 64
) -> tuple[Tensor, StaleState]:
    """W_t = (1 - alpha_t) W_{t-1} + theta_t v_t k_t^T: DLA with a matrix memory. The chunk size does not change the result."""
    return linear_stale(q, k, v, theta, None, alpha, state, chunk=chunk, loss="dot")


def swla(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, alpha: Tensor | None, gamma: Tensor, state: StaleState, *, chunk: int = 64
) -> tuple[Tensor, StaleState]:
    """Sliding-window linear attention: W_t = (1 - alpha_t) W_{t-1} + theta_t sum_r gamma_{t,r} v_{t-r} k_{t-r}^T."""
    return linear_stale(q, k, v, theta, None, alpha, state, chunk=chunk, gamma=gamma, loss="dot")


def dla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    state: DeepState,
    *,
    init: Sequence[Tensor] | None,
    chunk: int = 16,
    network: Network = DEFAULT,
    affine: Affine = None,
) -> tuple[Tensor, DeepState]:
    """Deep linear attention: a deep memory that descends -<M(k_t), v_t>, with decay and without momentum."""
    return deep(q, k, v, theta, None, alpha, state, init=init, chunk=chunk, network=replace(network, loss="dot"), affine=affine)


def omega_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    gamma: Tensor,
    state: DeepState,
    *,
    init: Sequence[Tensor] | None,
    chunk: int = 16,
    network: Network = DEFAULT,
    affine: Affine = None,
) -> tuple[Tensor, DeepState]:
    """OmegaNet: gradient descent with decay on the last c tokens (ATLAS Eqs. 8-11); Atlas without Muon."""
    return deep(q, k, v, theta, None, alpha, state, init=init, chunk=chunk, network=network, affine=affine, gamma=gamma)


def ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    state: DeepState,
    *,
    chunk: int = 16,
    network: Network = DEFAULT,
    affine: Affine = None,
) -> tuple[Tensor, DeepState]:
    """TTT: gradient descent at the chunk's start, no momentum and no decay; TTT-Linear has one weight, TTT-MLP two."""
    return deep(q, k, v, theta, None, None, state, init=None, chunk=chunk, network=network, affine=affine)
