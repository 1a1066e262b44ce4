"""Carried sliding-window attention against its definition (papers' tests T6, T7)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import KeyValues, empty_past, rope, sliding_window


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def slow_attention(q: Tensor, k: Tensor, v: Tensor, window: int, prefix: KeyValues) -> Tensor:
    """One query at a time, from the definition."""
    outputs = []
    for t in range(q.shape[2]):
        seen = slice(max(0, t + 1 - window), t + 1)
        keys = torch.cat([prefix.keys.expand(q.shape[0], -1, -1, -1), k[:, :, seen]], 2)
        values = torch.cat([prefix.values.expand(q.shape[0], -1, -1, -1), v[:, :, seen]], 2)
        weight = torch.softmax(torch.einsum("bhd,bhnd->bhn", q[:, :, t], keys) / q.shape[-1] ** 0.5, -1)
        outputs.append(torch.einsum("bhn,bhnd->bhd", weight, values))
    return torch.stack(outputs, 2)


@settings(max_examples=20)
@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 17), st.lists(st.integers(0, 17), max_size=3))
def test_attention_sees_its_window_and_its_prefix_in_any_split(seed: int, window: int, T: int, cuts: list[int]) -> None:
    B, H, d = 2, 2, 4
    q, k, v = (draw(seed + i, B, H, T, d) for i in range(3))
    prefix = KeyValues(draw(seed + 3, 1, H, 2, d), draw(seed + 4, 1, H, 2, d))
    want = slow_attention(q, k, v, window, prefix)
    past, seen, pieces = empty_past(B, H, window - 1, d, q), torch.zeros(B, dtype=torch.long), []
    edges = [0, *sorted(min(c, T) for c in cuts), T]
    for a, b in zip(edges, edges[1:], strict=False):
        if a == b:
            continue
        y, past = sliding_window(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], past, seen, prefix)
        seen = seen + (b - a)
        pieces.append(y)
    close(torch.cat(pieces, 2), want)


def test_attention_is_causal() -> None:
    q, k, v = (draw(i, 1, 2, 12, 4).requires_grad_() for i in range(3))
    y, _ = sliding_window(q, k, v, empty_past(1, 2, 4, 4, q.detach()), torch.zeros(1, dtype=torch.long))
    y[:, :, 6].sum().backward()
    for x in (k, v):
        assert x.grad is not None and not x.grad[:, :, 7:].any() and not x.grad[:, :, :2].any()


def test_rotation_depends_on_distance_alone() -> None:
    q, k = draw(0, 1, 1, 1, 8), draw(1, 1, 1, 1, 8)

    def score(at: int, of: int) -> Tensor:
        return (rope(q, torch.tensor([[at]])) * rope(k, torch.tensor([[of]]))).sum()

    close(score(5, 2), score(105, 102), 1e-5)
