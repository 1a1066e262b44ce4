"""Attention that can be carried: sliding window, segments, and ATLAS' exponential-kernel memories in exact form.

`attend` is the short-range attention of the blocks. Its state is a cache of the last `window - 1` tokens, so that any split of calls equals one
call. The kernel memories at the end (DeepTransformer, SWDT, Dot; ATLAS section 4) replace the infinite features phi* by their kernel
exp(q . k): a matrix memory over phi* is then exactly a set of rows, one a token, that grows with the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.coefficients import coefficients, window


class AttentionState(NamedTuple):
    """The last tokens' keys and values, oldest first; zeros, never visible, before the stream began."""

    keys: Tensor  # (B, H, window - 1, m, d) for m lanes a token
    values: Tensor  # (B, H, window - 1, m, d_v)
    count: Tensor  # (B,) int64 tokens seen since the stream began


def attention_state(
    streams: int, heads: int, window: int, d: int, d_v: int, *, lanes: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> AttentionState:
    """An empty cache for a window (or a segment) of `window` tokens."""
    return AttentionState(
        keys=torch.zeros(streams, heads, window - 1, lanes, d, dtype=dtype, device=device),
        values=torch.zeros(streams, heads, window - 1, lanes, d_v, dtype=dtype, device=device),
        count=torch.zeros(streams, dtype=torch.long, device=device),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AttentionState,
    *,
    segments: bool = False,
    prefix: tuple[Tensor, Tensor] | None = None,
    write: Tensor | None = None,
) -> tuple[Tensor, AttentionState]:
    """Causal softmax attention over the last w tokens, w - 1 being the length of the cache. q (B, H, T, d) -> (B, H, T, d_v).

    k (B, H, T, d) or (B, H, T, m, d), v likewise: m lanes a token share its place in time (MAC: the retrieved h_t beside the token, so
    that token i sees h_j only for j <= i).
    segments: only the tokens of the query's own segment of w tokens are seen, counted from the stream's start (MAC); else the last w
    tokens (MAG, MAL).
    prefix: persistent keys and values (H, p, d), (H, p, d_v), visible to every query (Titans section 3).
    write (B, T) bool, False: the token is not remembered: later tokens do not see it and the state stays as it was. It sees itself.
    """
    if k.dim() == 4:
        k, v = k.unsqueeze(3), v.unsqueeze(3)
    B, H, T, m, d = k.shape
    past = state.keys.shape[2]
    if k.shape[3:] != state.keys.shape[3:] or v.shape[3:] != state.values.shape[3:]:
        token, cached = (tuple(k.shape[3:]), tuple(v.shape[3:])), (tuple(state.keys.shape[3:]), tuple(state.values.shape[3:]))
        raise ValueError(f"attend: one token's k and v have shapes {token}, the cache holds {cached}")
    size = max(past + 1, 1) if write is None else 1
    outputs = [v.new_zeros(B, H, 0, v.shape[-1])]
    for at in range(0, T, size):
        part = slice(at, min(at + size, T))
        keys = torch.cat([state.keys.to(k.dtype), k[:, :, part]], 2)
        values = torch.cat([state.values.to(v.dtype), v[:, :, part]], 2)
        n = keys.shape[2] - past
        row = torch.arange(n, device=q.device).unsqueeze(-1)
        age = row + past - torch.arange(past + n, device=q.device)  # (n, past + n), 0: the token itself
        count = state.count.view(-1, 1, 1)
        reach = (count + row) % (past + 1) if segments else (count + row).clamp(max=past)
        seen = (age >= 0) & (age <= reach)  # (B, n, past + n)
        seen = seen.unsqueeze(-1).expand(B, n, past + n, m).reshape(B, 1, n, -1)
        flat_k, flat_v = keys.reshape(B, H, -1, d), values.reshape(B, H, -1, v.shape[-1])
        if prefix is not None:
            p = prefix[0].shape[-2]
            flat_k = torch.cat([prefix[0].to(k.dtype).expand(B, H, p, d), flat_k], 2)
            flat_v = torch.cat([prefix[1].to(v.dtype).expand(B, H, p, v.shape[-1]), flat_v], 2)
            seen = torch.cat([seen.new_ones(B, 1, n, p), seen], -1)
        outputs.append(torch.nn.functional.scaled_dot_product_attention(q[:, :, part], flat_k, flat_v, attn_mask=seen))
        new = AttentionState(keys=keys[:, :, n:], values=values[:, :, n:], count=state.count + n)
        if write is not None:
            one = write[:, part].view(-1, 1, 1, 1, 1)
            new = AttentionState(
                keys=torch.where(one, new.keys, state.keys),
                values=torch.where(one, new.values, state.values),
                count=torch.where(write[:, at], new.count, state.count),
            )
        state = new
    return torch.cat(outputs, 2), state


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


def swdt(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: KernelState, *, kernel: Kernel = exponential
) -> tuple[Tensor, KernelState]:
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
