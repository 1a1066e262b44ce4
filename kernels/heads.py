"""The elementwise parts around a memory: from the joint projection to heads of queries, keys and values, and from reads to the output.

Queries, keys and values pass a short causal depthwise convolution and SiLU; queries and keys have a fixed length (papers A.8). Reads are
normalised head by head and gated. Axis letters: B streams, T tokens, D model width, H heads, d = D / H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT_FLOOR = 1e-6  # added to a squared length: a zero row stays zero, with a finite gradient (papers E.6.5)
RMS_FLOOR = 1e-6


def unit(x: Tensor) -> Tensor:
    """Rows of length one; a zero row stays zero."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_FLOOR)


def convolve(x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of x (B, T, channels) behind tail (B, taps - 1, channels); weight (taps, channels), newest last."""
    if weight.shape[0] == 1:
        return x * weight[0]
    padded, length = torch.cat((tail, x), dim=1), x.shape[1]
    y = padded[:, :length] * weight[0]
    for lag in range(1, weight.shape[0]):
        y = y + padded[:, lag : lag + length] * weight[lag]
    return y


def next_tail(x: Tensor, tail: Tensor) -> Tensor:
    """The last taps - 1 inputs, to carry to the next call: their own memory, not a window into all of x."""
    keep = tail.shape[1]
    return x[:, x.shape[1] - keep :].clone() if x.shape[1] >= keep else torch.cat((tail, x), dim=1)[:, x.shape[1] :]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) -> (B, H, T, D / H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def conv_heads(u: Tensor, tail: Tensor, weight: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, d) from u = x W_qkv (B, T, 3 D): convolution, SiLU, rows of length `scale` for q and k."""
    q, k, v = (split_heads(z, heads) for z in F.silu(convolve(u, tail, weight)).chunk(3, dim=-1))
    q, k = unit(q), unit(k)
    return (q, k, v) if scale == 1 else (q * scale, k * scale, v)


def gated_norm(y: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """(B, T, D) from reads y (B, H, T, d) and g (B, T, D): RMSNorm of every head's row, times weight (d), times SiLU(g)."""
    return F.rms_norm(y, (y.shape[-1],), weight, RMS_FLOOR).transpose(1, 2).flatten(-2) * F.silu(g)
