"""ATLAS' exponential-kernel memories in exact form: DeepTransformer, SWDT and Dot (ATLAS section 4 and Table 1).

Their features phi* are infinite, phi*(x) . phi*(y) = exp(x . y), so no weight matrix can hold them. A *matrix* memory over phi* is
still exactly a set of rows, one a token, that grows with the stream and meets queries through the kernel. (A deep memory over phi* is not
computable; the paper gives no recipe for one.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.coefficients import coefficients, window


class KernelState(NamedTuple):
    """A matrix memory over phi*: W = sum_i rows_i phi*(keys_i)^T, one row a token since the stream began."""

    keys: Tensor  # (B, H, n, d)
    rows: Tensor  # (B, H, n, d_v)
    values: Tensor  # (B, H, n, d_v) what each token stored or should have stored: a window looks at it again


Kernel = Callable[[Tensor, Tensor], Tensor]


def kernel_state(streams: int, heads: int, d: int, d_v: int, dtype: torch.dtype = torch.float32) -> KernelState:
    """An empty memory."""
    rows = torch.zeros(streams, heads, 0, d_v, dtype=dtype)
    return KernelState(keys=torch.zeros(streams, heads, 0, d, dtype=dtype), rows=rows, values=rows)


def exponential(x: Tensor, y: Tensor) -> Tensor:
    """exp(x . y) = phi*(x) . phi*(y) for all pairs of rows (ATLAS Eqs. 22-23)."""
    return (x @ y.mT).exp()


def truncated_exponential(x: Tensor, y: Tensor, degree: int = 2) -> Tensor:
    """sum_{i <= degree} (x . y)^i / i!: the kernel of `kernels.features.polynomial` at its initial coefficients, unnormalised."""
    product = x @ y.mT
    total, term = torch.ones_like(product), torch.ones_like(product)
    for i in range(1, degree + 1):
        term = term * product / i
        total = total + term
    return total


def deep_transformer(q: Tensor, k: Tensor, v: Tensor, state: KernelState, *, kernel: Kernel = exponential) -> tuple[Tensor, KernelState]:
    """y_t = sum_{i <= t} v_i K(q_t, k_i): attention without its denominator (ATLAS Table 1; a matrix memory, loss -<W phi(k), v>)."""
    new = KernelState(*(torch.cat(pair, 2) for pair in ((state.keys, k), (state.rows, v), (state.values, v))))
    return kernel(q, new.keys).tril(state.keys.shape[2]) @ new.rows, new


def swdt(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: KernelState, *, kernel: Kernel = exponential) -> tuple[Tensor, KernelState]:
    """Sliding-window DeepTransformer: W_t = W_{t-1} + sum_r gamma_{t,r} v_{t-r} phi*(k_{t-r})^T; gamma (B, H, T, c).

    A token is written once by each later token whose window holds it: y_t = sum_i K(q_t, k_i) (rows_i + G[t,i] v_i).
    """
    T, past, reach = q.shape[2], state.keys.shape[2], gamma.shape[-1] - 1
    G = window(coefficients(torch.ones_like(gamma[..., 0]), None, None), gamma).G.to(v.dtype)  # (B, H, T, reach + T)
    missing = max(reach - past, 0)  # before the stream began there is nothing to write
    G = torch.nn.functional.pad(G[..., missing:], [past - (reach - missing), 0])  # (B, H, T, past + T)
    keys, values = torch.cat([state.keys, k], 2), torch.cat([state.values, v], 2)
    scores = kernel(q, keys)
    y = scores[..., :past] @ state.rows + (scores * G) @ values
    rows = torch.nn.functional.pad(state.rows, [0, 0, 0, T])
    return y, KernelState(keys, rows + G[:, :, -1:].mT * values if T else rows, values)


def dot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None,
    state: KernelState,
    *,
    gamma: Tensor | None = None,
    kernel: Kernel = exponential,
) -> tuple[Tensor, KernelState]:
    """Dot: the Omega rule over phi* (ATLAS section 4), exactly, one token at a time; theta, alpha (B, H, T), gamma (B, H, T, c).

        rows *= 1 - alpha_t ;  for i in the window:  rows_i -= theta_t gamma_{t,i} (sum_j K(k_i, k_j) rows_j^old - v_i)

    Without a window and decay this is delta-rule attention, which `dot_triangular` solves at once.
    """
    outputs = [v.new_zeros(*v.shape[:2], 0, v.shape[-1])]
    for t in range(q.shape[2]):
        keys, values = torch.cat([state.keys, k[:, :, t : t + 1]], 2), torch.cat([state.values, v[:, :, t : t + 1]], 2)
        old = torch.nn.functional.pad(state.rows, [0, 0, 0, 1])
        size = 1 if gamma is None else min(gamma.shape[-1], keys.shape[2])
        error = kernel(keys[:, :, -size:], keys) @ old - values[:, :, -size:]
        step = theta[:, :, t, None, None]
        if gamma is not None:
            step = step * gamma[:, :, t, :size].flip(-1).unsqueeze(-1)
        rows = old if alpha is None else (1 - alpha[:, :, t, None, None]) * old
        state = KernelState(keys, torch.cat([rows[:, :, :-size], rows[:, :, -size:] - step * error], 2), values)
        outputs.append(kernel(q[:, :, t : t + 1], keys) @ state.rows)
    return torch.cat(outputs, 2), state


def dot_triangular(q: Tensor, k: Tensor, v: Tensor, theta: Tensor, *, kernel: Kernel = exponential) -> Tensor:
    """Delta-rule attention from W_0 = 0: (I + tril(K(K, K), -1) diag(theta)) E = V, y_t = sum_{i<=t} theta_i E_i K(q_t, k_i)."""
    step = theta.unsqueeze(-2)
    E = torch.linalg.solve_triangular(kernel(k, k) * step, v, upper=False, unitriangular=True)
    return (kernel(q, k) * step).tril() @ E
