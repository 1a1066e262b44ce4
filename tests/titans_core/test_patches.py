"""Blocks over patches of rows: the same in any split, apart in a batch, and able to learn what a line cannot say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titans_core import state as value
from titans_core.config import ConfigError
from titans_core.patches import PatchConfig, PatchMemory, PatchRows, PatchState, fit_patches

LAYERS = ["lmm", "mac", "mag", "mal"]


def memory(layer: str, rows: int = 4) -> PatchMemory:
    torch.manual_seed(3)
    model = PatchMemory(PatchConfig(rows=rows, layers=(layer,), dim=16, heads=2), horizon=3, cycles=(5, 7))  # type: ignore[arg-type]
    torch.nn.init.normal_(model.last.weight, std=0.3)
    return model.eval()


def stream(n: int, length: int, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, length, generator=g)
    seen = torch.rand(n, length, generator=g) > 0.1
    phase = torch.stack([torch.arange(length) % 5, torch.arange(length) % 7], -1).expand(n, -1, -1)
    return rows, seen, torch.zeros(n, length), torch.ones(n, length), phase


def run(model: PatchMemory, parts: tuple[Tensor, ...], cuts: list[int], state: PatchState | None = None) -> PatchState:
    n, length = parts[0].shape
    state = model.initial_state(n) if state is None else state
    past = torch.zeros(n, 8)
    for a, b in zip([0, *cuts], [*cuts, length], strict=True):
        piece = [x[:, a:b] for x in parts]
        with torch.inference_mode():
            state = model.observe(state, past, *piece)
        past = torch.cat([past, piece[0]], 1)[:, -8:]
    return state


@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 29), max_size=6, unique=True).map(sorted))
def test_any_split_of_the_rows_gives_the_same_reading(layer: str, cuts: list[int]) -> None:
    model, parts = memory(layer), stream(2, 30)
    torch.testing.assert_close(model.read(run(model, parts, cuts)), model.read(run(model, parts, [])), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_streams_whose_patches_end_at_other_rows_go_together(layer: str) -> None:
    model = memory(layer)
    a, b, rest = stream(1, 5, 1), stream(1, 11, 2), stream(2, 9, 3)
    state_a, state_b = run(model, a, []), run(model, b, [])
    past = torch.cat([torch.nn.functional.pad(a[0], (3, 0))[:, -8:], b[0][:, -8:]])
    with torch.inference_mode():
        together = model.read(model.observe(value.stack([state_a, state_b]), past, *rest))
        for i, alone in enumerate((state_a, state_b)):
            one = model.read(model.observe(alone, past[i : i + 1], *(x[i : i + 1] for x in rest)))
            torch.testing.assert_close(together[i : i + 1], one, atol=1e-5, rtol=1e-5)


def test_nothing_is_said_before_the_first_full_patch() -> None:
    model = memory("lmm")
    assert not model.read(run(model, stream(2, 3), [])).any()
    assert model.read(run(model, stream(2, 4), [])).abs().min() > 0


def test_it_learns_from_far_back_what_no_window_holds_and_stays_the_line_when_there_is_nothing() -> None:
    """The future depends on a sign given 40 rows ago, beyond the patch: only a carried memory can know it."""
    g = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (6, 16), generator=g) * 2.0 - 1.0
    rows = torch.randn(6, 1280, generator=g) * 0.1
    rows[:, ::80] += 3 * sign
    left = torch.full((6, 1280, 1), torch.nan)
    left[:, 40::80] = sign.unsqueeze(2)
    t = torch.arange(1280)
    phase = torch.stack([t % 80, t % 40], -1).expand(6, -1, -1)
    past = PatchRows(rows, torch.ones(6, 1280, dtype=torch.bool), torch.zeros(6, 1280), torch.ones(6, 1280), phase)
    known, judged = t < 960, t >= 960
    options: dict[str, Any] = {"epochs": 60, "seed": 0, "rate": 5e-3}
    model = PatchMemory(PatchConfig(rows=8, dim=16, heads=2, dropout=0.0), horizon=1, cycles=(80, 40))
    found = fit_patches(model, past, left, known, judged, **options)
    assert found[0] == pytest.approx(1.0) and min(found) < 0.3
    noise = torch.full_like(left, torch.nan)
    noise[:, 40::80] = torch.randn(6, 16, 1, generator=g)
    untaught = PatchMemory(PatchConfig(rows=8, dim=16, heads=2), horizon=1, cycles=(80, 40))
    found = fit_patches(untaught, past, noise, known, judged, epochs=3, seed=0)
    assert min(found) <= found[0]


def test_a_wrong_configuration_says_which_field() -> None:
    with pytest.raises(ConfigError, match="patch of 0 rows"):
        PatchConfig(rows=0)
