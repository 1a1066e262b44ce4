"""State as a value: joined, parted, moved and saved without a change in any bit."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from titans_core import state as value


class Pair(NamedTuple):
    weights: Tensor
    momentum: Tensor | None


@dataclasses.dataclass(frozen=True)
class Example:
    memory: Pair
    layers: tuple[Tensor, ...]
    position: Tensor


def example(n: int, seed: int = 0) -> Example:
    g = torch.Generator().manual_seed(seed)
    return Example(
        Pair(torch.randn(n, 2, 3, generator=g), None),
        (torch.randn(n, 4, generator=g), torch.randn(n, generator=g).double()),
        torch.arange(n),
    )


def equal(a: Example, b: Example) -> bool:
    return all(p == q and torch.equal(x, y) for (p, x), (q, y) in zip(value.leaves(a), value.leaves(b), strict=True))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_split_then_stack_is_the_same(sizes: list[int]) -> None:
    whole = example(sum(sizes))
    assert equal(value.stack(value.split(whole, sizes)), whole)
    assert [value.count(p) for p in value.split(whole, sizes)] == sizes
    assert equal(value.stack(value.split(whole)), whole)


def test_select_and_replace_touch_only_the_streams_named() -> None:
    whole, other = example(5), example(2, seed=1)
    changed = value.replace(whole, [3, 1], other)
    assert equal(value.select(changed, [3, 1]), other)
    assert equal(value.select(changed, [0, 2, 4]), value.select(whole, [0, 2, 4]))
    assert equal(whole, example(5))


def test_bytes_round_trip_is_exact_and_stable() -> None:
    whole = example(3)
    data = value.to_bytes(whole, model="m@1")
    assert data == value.to_bytes(example(3), model="m@1")
    assert value.read_metadata(data) == {"model": "m@1"}
    assert equal(value.from_bytes(data, like=example(1)), whole)


def test_parts_that_are_one_tensor_are_saved_each_by_itself() -> None:
    shared = torch.randn(2, 3)
    saved = value.from_bytes(value.to_bytes((shared, shared)), like=(shared, shared))
    assert torch.equal(saved[0], shared) and torch.equal(saved[1], shared)


def test_bytes_that_do_not_fit_are_refused_by_name() -> None:
    data = value.to_bytes(example(3))
    with pytest.raises(value.StateError, match=r"memory\.weights"):
        value.from_bytes(data, like=dataclasses.replace(example(1), memory=Pair(torch.zeros(1, 2, 9), None)))
    with pytest.raises(value.StateError, match="missing.*memory.momentum"):
        value.from_bytes(data, like=dataclasses.replace(example(1), memory=Pair(torch.zeros(1, 2, 3), torch.zeros(1))))
    with pytest.raises(value.StateError):
        value.from_bytes(data[: len(data) // 2], like=example(1))
    with pytest.raises(value.StateError):
        value.from_bytes(b"", like=example(1))
    newer = data.replace(b'format_version\\": 1', b'format_version\\": 7')
    assert newer != data
    with pytest.raises(value.StateError, match="version 7.*reads 1"):
        value.from_bytes(newer, like=example(1))


def test_streams_that_disagree_are_refused() -> None:
    with pytest.raises(value.StateError, match="disagree"):
        value.count(dataclasses.replace(example(3), position=torch.arange(2)))
