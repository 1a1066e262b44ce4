"""Softmax attention that streams: sliding window and segment, both strictly causal, with carried keys and values.

Axis letters: B streams, H heads, T new tokens, P persistent tokens, N tokens kept from before, d width of a head.
One call over T tokens equals any split of it into calls, because every query sees the same keys either way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyValues(NamedTuple):
    """Keys and values kept from earlier tokens, oldest first: two tensors (B, H, N, d)."""

    keys: Tensor
    values: Tensor


def frequencies(width: int, device: torch.device, base: float = 10_000.0) -> Tensor:
    """Of the rotation of a head's pairs of channels (d / 2,): radians a position, in float32."""
    half = width // 2
    return base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)


def rotation(position: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, T, d / 2) of the angles at integer positions (B, T); the angles are rounded to float32."""
    angle = (position[..., None].float() * frequencies(width, position.device)).to(dtype)
    return angle.cos(), angle.sin()


def rope(x: Tensor, position: Tensor) -> Tensor:
    """Rotary position embedding of x (B, H, T, d), d even, at integer positions (1 or B, T)."""
    half = x.shape[-1] // 2
    cos, sin = (each[:, None] for each in rotation(position, x.shape[-1], x.dtype))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def empty_past(batch: int, heads: int, length: int, width: int, like: Tensor) -> KeyValues:
    """A cache of `length` slots with nothing in it yet (zeros; the caller's position masks them)."""
    zeros = like.new_zeros(batch, heads, length, width)
    return KeyValues(zeros, zeros.clone())


def sliding_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: KeyValues,
    seen: Tensor,
    prefix: KeyValues | None = None,
) -> tuple[Tensor, KeyValues]:
    """Attention over the last `window` tokens, each query its own included, plus an always visible prefix.

    q, k, v (B, H, T, d); past holds window - 1 slots; seen (B,) counts the tokens each stream has had before, so that
    slots never filled stay masked; prefix (1 or B, H, P, d) are the persistent tokens.
    Returns y (B, H, T, d) and the past for the next call.
    """
    batch, heads, length, width = q.shape
    kept = past.keys.shape[2]
    keys, values = torch.cat((past.keys, k), dim=2), torch.cat((past.values, v), dim=2)
    slot = torch.arange(kept + length, device=q.device)
    filled = slot[None, :] >= (kept - seen.clamp(max=kept))[:, None]  # (B, kept + T)
    pieces = []
    block = max(kept + 1, 64)  # queries at a time: at most block + kept keys are visible to them
    for start in range(0, length, block):
        stop = min(start + block, length)
        columns = slot[start : stop + kept]
        row = torch.arange(start, stop, device=q.device)[:, None] + kept
        visible = (columns[None, :] <= row) & (columns[None, :] >= row - kept)  # (t, columns)
        mask = visible[None, None] & filled[:, None, None, start : stop + kept]
        block_keys, block_values = keys[:, :, start : stop + kept], values[:, :, start : stop + kept]
        if prefix is not None:
            shape = (batch, heads, prefix.keys.shape[2], width)
            block_keys = torch.cat((prefix.keys.expand(shape), block_keys), dim=2)
            block_values = torch.cat((prefix.values.expand(shape), block_values), dim=2)
            mask = F.pad(mask, (shape[2], 0), value=True)
        pieces.append(F.scaled_dot_product_attention(q[:, :, start:stop], block_keys, block_values, attn_mask=mask))
    y = torch.cat(pieces, dim=2) if len(pieces) != 1 else pieces[0]
    return y, KeyValues(keys[:, :, length:].contiguous(), values[:, :, length:].contiguous())


def causal_offsets(queries: int, start: int, total: int, device: torch.device) -> Tensor:
    """Mask (queries, total): query i, at place start + i of a segment, sees the places up to its own."""
    place = torch.arange(queries, device=device)[:, None] + start
    return torch.arange(total, device=device)[None, :] <= place
