"""The forecaster's contract: a pure function of (rows, state), the same in any split of calls, row by row or all at once."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

from kernels.linear import MatrixState, linear_exact
from titans_core import state as value
from titans_core.config import ConfigError
from titans_core.forecaster import WIDE, Forecaster, ForecasterConfig, PhaseMemory, Season, write_slot
from titans_core.training import Rows, Training, calibrate, fit_line, fit_network, initial_memory, replay

SEASONS = (
    Season(rows=1, slots=1, rates=(0.05, 0.01)),
    Season(rows=6, slots=6, rates=(0.3, 0.1)),
    Season(rows=12, slots=4, rates=(0.2,)),
)


def model(memory: str = "carried", **options: object) -> Forecaster:
    torch.manual_seed(0)
    config = ForecasterConfig(
        **{"look_back": 10, "horizon": 9, "seasons": SEASONS, "memory": memory, "hidden": 8, **options}
    )  # type: ignore[arg-type]
    made = Forecaster(config)
    made.line.normal_(std=0.1)
    made.offsets.copy_(torch.linspace(-1, 1, len(config.quantiles)).expand_as(made.offsets))
    for p in made.parameters():
        p.data.normal_(std=0.1)
    return made


def stream(
    rows: int = 90, series: int = 3, missing: float = 0.2, offset: float = 50.0
) -> tuple[Tensor, Tensor, Tensor]:
    """y, observed, phase with 20 rows more than y."""
    generator = torch.Generator().manual_seed(1)
    t = torch.arange(rows + 20)
    y = (
        offset
        + torch.sin(t[:rows] * math.tau / 6) * 3
        + torch.randn(series, rows, generator=generator, dtype=torch.float64)
    )
    observed = torch.rand(series, rows, generator=generator) >= missing
    phase = torch.stack([t // s.stride % s.slots for s in SEASONS], -1).expand(series, -1, -1).to(torch.int16)
    return y, observed, phase


def assert_equal(a: object, b: object, tolerance: float = 1e-6) -> None:
    for (path, left), (_, right) in zip(value.leaves(a), value.leaves(b), strict=True):
        assert torch.allclose(left.double(), right.double(), rtol=tolerance, atol=tolerance), path


@pytest.mark.parametrize("memory", ["carried", "window", "frozen"])
@pytest.mark.parametrize("cuts", [[1] * 90, [89, 1], [7, 64, 0, 19], [45, 45]], ids=["rows", "long", "odd", "half"])
def test_any_split_gives_the_same_state(memory: str, cuts: list[int]) -> None:
    m, (y, observed, phase) = model(memory), stream()
    with torch.inference_mode():
        whole = m.observe(m.initial_state(3), y, observed, phase[:, :90])
        state, at = m.initial_state(3), 0
        for n in cuts:
            part = slice(at, at + n)
            state, at = m.observe(state, y[:, part], observed[:, part], phase[:, part]), at + n
        assert_equal(state, whole)
        future = phase[:, 90:99]
        torch.testing.assert_close(m.forecast(state, future), m.forecast(whole, future), rtol=1e-6, atol=1e-6)


def test_missing_rows_write_nothing_whatever_they_hold() -> None:
    m, (y, observed, phase) = model(), stream()
    garbage = torch.where(observed, y, torch.nan)
    clean = m.observe(m.initial_state(3), y, observed, phase[:, :90])
    assert_equal(m.observe(m.initial_state(3), garbage, observed, phase[:, :90]), clean, 0)
    before = value.to_bytes(clean.memory)
    after = m.observe(clean, y[:, :4], torch.zeros(3, 4, dtype=torch.bool), phase[:, 90:94])
    assert value.to_bytes(after.memory) == before


def test_a_forecast_changes_no_state_and_rows_of_a_batch_are_independent() -> None:
    m, (y, observed, phase) = model(), stream()
    state = m.observe(m.initial_state(3), y, observed, phase[:, :90])
    before = value.to_bytes(state)
    together = m.forecast(state, phase[:, 90:99])
    assert value.to_bytes(state) == before
    alone = m.forecast(value.select(state, [1]), phase[1:2, 90:99])
    torch.testing.assert_close(alone, together[1:2], rtol=1e-6, atol=1e-6)


def test_state_survives_bytes() -> None:
    m, (y, observed, phase) = model(), stream()
    state = m.observe(m.initial_state(3), y, observed, phase[:, :90])
    again = value.from_bytes(value.to_bytes(state), m.initial_state(1))
    assert_equal(again, state, 0)


def test_the_memory_is_the_exact_rule_with_one_hot_keys() -> None:
    """`write_slot`, the rule in closed form for one-hot keys, equals linear_exact."""
    generator = torch.Generator().manual_seed(2)
    slots = torch.randint(0, 5, (2, 40), generator=generator)
    v = torch.randn(2, 40, generator=generator)
    memory = PhaseMemory(torch.zeros(2, 1, 1, 5), torch.full((2, 5), 1000.0))
    for t in range(40):
        write_slot(memory, (0.3,), slots[:, t], v[:, t], torch.ones(2, dtype=torch.bool))
    key = torch.nn.functional.one_hot(slots, 5).float().unsqueeze(1)
    zeros = torch.zeros(2, 1, 1, 5)
    _, exact = linear_exact(
        key, key, v[:, None, :, None], torch.full((2, 1, 40), 0.3), None, None, MatrixState(zeros, zeros)
    )
    torch.testing.assert_close(memory.W, exact.W, rtol=1e-5, atol=1e-6)


def test_quantiles_never_cross() -> None:
    m, (y, observed, phase) = model(quantiles=(0.05, 0.25, 0.5, 0.75, 0.95)), stream()
    q = m.forecast(m.observe(m.initial_state(3), y, observed, phase[:, :90]), phase[:, 90:99])
    assert q.shape == (3, 9, 5)
    assert (q.diff(dim=2) >= 0).all()


def test_a_constant_stream_is_forecast_exactly_even_far_from_zero() -> None:
    m, (_, _, phase) = model(), stream()
    y = torch.full((3, 90), 1e9 + 0.25, dtype=torch.float64)
    q = m.forecast(
        m.observe(m.initial_state(3), y, torch.ones_like(y, dtype=torch.bool), phase[:, :90]), phase[:, 90:99]
    )
    assert (q == 1e9 + 0.25).all()


def test_forecasts_move_and_stretch_with_the_series() -> None:
    m, (y, observed, phase) = model(), stream()
    future = phase[:, 90:99]
    plain = m.forecast(m.observe(m.initial_state(3), y, observed, phase[:, :90]), future)
    moved = m.forecast(m.observe(m.initial_state(3), y * 20 - 1e5, observed, phase[:, :90]), future)
    torch.testing.assert_close((moved + 1e5) / 20, plain, rtol=1e-4, atol=1e-4)


def test_nothing_known_is_nan_and_the_first_row_is_enough() -> None:
    m, (y, _, phase) = model(), stream()
    state = m.initial_state(3)
    assert m.forecast(state, phase[:, :9]).isnan().all()
    state = m.observe(state, y[:, :1], torch.ones(3, 1, dtype=torch.bool), phase[:, :1])
    assert m.forecast(state, phase[:, 1:10]).isfinite().all()


@pytest.mark.parametrize("memory", ["carried", "window", "frozen"])
def test_replayed_windows_equal_the_live_stream(memory: str) -> None:
    """The features that training sees are those that a stream sees, to rounding."""
    m, (y, observed, phase) = model(memory), stream()
    start = m.initial_state(3)
    if memory != "carried":
        start = initial_memory(m, start, Rows(y, observed, phase))
        start = dataclasses.replace(
            start, centre=torch.full((3,), 49.0, dtype=torch.float64), count=torch.ones(3, dtype=torch.float64)
        )
    origins = torch.tensor([10, 11, 40, 70])
    (windows,), end = replay(m, start, Rows(y, observed, phase), [origins])
    assert_equal(end, m.observe(start, y, observed, phase[:, :90]))
    for i, t in enumerate(origins.tolist()):
        state = m.observe(start, y[:, :t], observed[:, :t], phase[:, :t])
        x, level, _ = m.features(state, phase[:, t : t + 9])
        rows = slice(3 * i, 3 * i + 3)
        torch.testing.assert_close(windows.x[rows], x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(windows.level[rows], level[:, 0])
        seen = observed[:, t : t + 9]
        torch.testing.assert_close(
            (windows.level[rows, None] + windows.unit[rows, None] * windows.y[rows])[seen],
            y[:, t : t + 9][seen],
            rtol=1e-5,
            atol=1e-4,
        )
        assert windows.y[rows][~seen].isnan().all()


def test_training_learns_keeps_the_best_epoch_and_calibrates() -> None:
    y, observed, phase = stream(rows=400, missing=0.0)
    t = torch.arange(420)
    phase = torch.stack([t // s.stride % s.slots for s in SEASONS], -1).expand(3, -1, -1).to(torch.int16)
    m = Forecaster(dataclasses.replace(model().config, quantiles=(0.1, 0.5, 0.9)))
    (train, valid, test), _ = replay(
        m,
        m.initial_state(3),
        Rows(y, observed, phase),
        [torch.arange(30, 240), torch.arange(250, 320), torch.arange(320, 391)],
    )
    line = fit_line(m, train, valid)
    naive = float((valid.y**2).mean())
    assert line.error < 0.7 * naive
    seen: list[float] = []
    best = fit_network(m, line, train, valid, Training(epochs=3, batch=64, seed=3), lambda _, error: seen.append(error))
    assert len(seen) == 6 and best < 1.1 * line.error
    calibrate(m, valid)
    with torch.no_grad():
        q = m.centre_of(test.x).unsqueeze(2) + (m.roughness(test.x) ** m.config.spread).unsqueeze(2) * m.offsets
    target = test.y
    covered = ((target > q[:, :, 0]) & (target < q[:, :, 2])).float().mean()
    assert 0.72 < covered < 0.88


def test_carried_memory_matters() -> None:
    """With the writes switched off the same stream is forecast measurably worse: a dead memory fails here."""
    t = torch.arange(1500)
    generator = torch.Generator().manual_seed(4)
    shape = torch.randn(4, 12, generator=generator, dtype=torch.float64).cumsum(1)
    y = shape[:, t % 12] + 0.3 * torch.randn(4, 1500, generator=generator, dtype=torch.float64)
    seasons = (Season(rows=1, slots=1, rates=(0.01,)), Season(rows=12, slots=12, rates=(0.1,)))
    phase = torch.stack([t * 0, t % 12], -1).expand(4, -1, -1).to(torch.int16)
    errors = {}
    for memory in ("carried", "frozen"):
        m = Forecaster(ForecasterConfig(look_back=6, horizon=12, seasons=seasons, memory=memory, hidden=0))
        rows = Rows(y, torch.ones_like(y, dtype=torch.bool), phase)
        (train, valid), _ = replay(m, m.initial_state(4), rows, [torch.arange(100, 1000), torch.arange(1000, 1480)])
        errors[memory] = fit_line(m, train, valid).error
    assert errors["carried"] < 0.9 * errors["frozen"]


def test_wrong_use_is_named() -> None:
    with pytest.raises(ConfigError, match="slots"):
        Season(rows=10, slots=3, rates=(0.1,))
    with pytest.raises(ConfigError, match="quantiles"):
        ForecasterConfig(quantiles=(0.9, 0.1))
    m, (y, observed, phase) = model(), stream()
    with pytest.raises(ValueError, match="observe"):
        m.observe(m.initial_state(3), y, observed, phase[:, :5])


def test_config_survives_json() -> None:
    config = model().config
    assert ForecasterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("memory", ["carried", "window", "frozen"])
def test_many_streams_row_after_row_equal_each_one_in_chunks(memory):
    seasons = (Season(rows=1, slots=1, rates=(0.01, 0.1)), Season(rows=24, slots=12, rates=(0.2, 0.05)))
    model = Forecaster(ForecasterConfig(memory=memory, look_back=20, seasons=seasons))
    generator = torch.Generator().manual_seed(0)
    streams, rows = 2 * WIDE, 150
    y = 1e6 + 5 * torch.randn(streams, rows, generator=generator, dtype=torch.float64)
    observed = torch.rand(streams, rows, generator=generator) > 0.2
    observed[3], observed[4, :100] = False, False
    steps = torch.arange(rows)
    phase = torch.stack([0 * steps, steps // 2 % 12], -1).expand(streams, -1, -1)
    with torch.inference_mode():
        together = model.observe(model.initial_state(streams), y, observed, phase)
        split = model.observe(model.initial_state(streams), y[:, :60], observed[:, :60], phase[:, :60])
        split = model.observe(split, y[:, 60:], observed[:, 60:], phase[:, 60:])
        alone = value.stack([model.observe(model.initial_state(1), y[i : i + 1], observed[i : i + 1], phase[i : i + 1]) for i in range(streams)])
    for (name, a), (_, b), (_, c) in zip(*map(value.leaves, (together, alone, split)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(a, c, rtol=1e-6, atol=1e-6, msg=name)
