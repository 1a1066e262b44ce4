"""The outcome memory: exact least squares, strictly delayed, a value in any batching."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

from titans_core import state as value
from titans_core.config import ConfigError
from titans_core.forecaster import Forecaster, ForecasterConfig, Season
from titans_core.outcome import Origin, OutcomeConfig, OutcomeMemory, OutcomeState, origin_of

ROWS, SERIES, H = 70, 3, 5
SEASONS = (Season(rows=1, slots=1, rates=(0.1,)), Season(rows=6, slots=3, rates=(0.3, 0.1)))


def forecaster() -> Forecaster:
    torch.manual_seed(0)
    model = Forecaster(ForecasterConfig(look_back=8, horizon=H, seasons=SEASONS, hidden=0))
    model.line.normal_(std=0.2)
    return model


def memory(model: Forecaster, **options: object) -> OutcomeMemory:
    config = OutcomeConfig.daily(model, 6, outcomes=3, block=7, forget=(20.0, 60.0), penalty=0.5, mix_penalty=0.5, **options)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, config.features, generator=generator)
    x[:, -1] = 1.0
    y = x @ torch.randn(config.features, H, generator=generator) * 0.3
    return OutcomeMemory(config).fit(x, y, model.line)


def rows(missing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    t = torch.arange(ROWS + H + 1)
    y = 1e6 + 3 * torch.sin(t[:ROWS] * math.tau / 6) + torch.randn(SERIES, ROWS, generator=generator, dtype=torch.float64)
    observed = torch.rand(SERIES, ROWS, generator=generator) >= missing
    phase = torch.stack([t // s.stride % s.slots for s in SEASONS], -1).expand(SERIES, -1, -1).to(torch.int16)
    return y, observed, phase


def run(
    y: Tensor, observed: Tensor, phase: Tensor, streams: list[int] | None = None, stop: int = ROWS, **options: object
) -> tuple[list[OutcomeState], Tensor]:
    """All states after each row, and all corrected forecasts (rows, B, H)."""
    model = forecaster()
    outcome = memory(model, **options)
    chosen = torch.arange(SERIES) if streams is None else torch.tensor(streams)
    y, observed, phase = y[chosen], observed[chosen], phase[chosen]
    state, learnt = model.initial_state(len(chosen)), outcome.initial_state(len(chosen))
    states, forecasts = [], []
    with torch.inference_mode():
        for t in range(stop):
            now = slice(t, t + 1)
            state = model.observe(state, torch.where(observed[:, now], y[:, now], 0.0), observed[:, now], phase[:, now])
            origin = origin_of(model, state, phase[:, t + 1 : t + 1 + H])
            learnt, corrected = outcome.step(learnt, origin, y[:, t], observed[:, t])
            states.append(learnt)
            forecasts.append(corrected)
    return states, torch.stack(forecasts)


def same(a: OutcomeState, b: OutcomeState) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(value.leaves(a), value.leaves(b), strict=True))


def direct(keys: Tensor, targets: Tensor, lam: float, penalty: float, done: int, h: int) -> Tensor:
    """W_h in float64 from all that is there before row `done`: faded squares of the contexts and of the rehearsed axes. (d,)"""
    d = keys.shape[1]
    gram, cross = torch.eye(d, dtype=torch.float64) * penalty, torch.zeros(d, dtype=torch.float64)
    for s in range(done - h):
        gram, cross = lam * gram, lam * cross  # the first rows have a zero context: nothing was known yet
        gram += torch.outer(keys[s], keys[s])
        cross += keys[s] * targets[s]
        gram[s % d, s % d] += penalty * (1 - lam) * d
    return torch.linalg.solve(gram, cross)


@pytest.mark.parametrize("h", [1, 2, H])
@pytest.mark.parametrize("rate", [0, 1])
def test_the_memory_is_the_least_squares_solution_of_what_is_there(h: int, rate: int) -> None:
    y, observed, phase = rows()
    states, _ = run(y, observed, phase, clip=1e6)
    c = memory(forecaster()).config
    last, b = states[-1], 1
    keys = torch.stack([s.keys[b, 0, : c.whole] for s in states]).double()
    # Row t closes step h of the origin t - h: what it was wrong by, as the definition says.
    targets = torch.zeros(ROWS, dtype=torch.float64)
    for t in range(h, ROWS):
        made = states[t - h]
        if made.unit[b, 0] == 0:
            continue
        truth = (y[b, t] - made.level[b, 0]) / made.unit[b, 0]
        targets[t - h] = truth - made.pending[b, 0, h - 1, 0]
    expected = direct(keys, targets, 1 - 1 / c.forget[rate], c.penalty * H, ROWS, h)
    assert torch.allclose(last.memory[b, rate, h - 1].double(), expected, atol=1e-3, rtol=1e-3)
    assert float(expected.abs().max()) > 0.01  # it has learnt something


@pytest.mark.parametrize("poison", [math.nan, 1e6, -1e30])
@pytest.mark.parametrize("at", [1, 17, 18, 50])
def test_no_forecast_and_no_state_knows_a_later_value(poison: float, at: int) -> None:
    y, observed, phase = rows()
    states, forecasts = run(y, observed, phase, stop=at)
    y = y.clone()
    y[:, at:] = poison
    again, later = run(y, observed, phase, stop=min(at + H + 2, ROWS))
    assert torch.equal(forecasts, later[:at])
    assert all(same(a, b) for a, b in zip(states, again[:at], strict=True))


def test_a_missing_row_teaches_nothing_whatever_stands_in_it() -> None:
    y, observed, phase = rows(missing=0.3)
    states, forecasts = run(y, observed, phase)
    again, same_forecasts = run(torch.where(observed, y, torch.nan), observed, phase)
    assert torch.equal(forecasts.nan_to_num(), same_forecasts.nan_to_num()) and same(states[-1], again[-1])
    assert bool(forecasts[5:].isfinite().all())


def test_a_stream_alone_or_among_others_gives_the_same_numbers() -> None:
    y, observed, phase = rows(missing=0.1)
    states, forecasts = run(y, observed, phase)
    for b in range(SERIES):
        alone, its = run(y, observed, phase, streams=[b])
        assert torch.allclose(forecasts[:, b], its[:, 0], rtol=0, atol=1e-4, equal_nan=True)
        for (path, left), (_, right) in zip(value.leaves(value.select(states[-1], [b])), value.leaves(alone[-1]), strict=True):
            assert torch.allclose(left.double(), right.double(), rtol=1e-4, atol=1e-4), path


def test_saved_and_loaded_it_goes_on_to_the_same_bits() -> None:
    model = forecaster()
    outcome = memory(model)
    config = OutcomeConfig.from_json(json.loads(json.dumps(outcome.config.to_json())))
    assert config == outcome.config
    twin = OutcomeMemory(config)
    twin.load_state_dict(outcome.state_dict())
    generator = torch.Generator().manual_seed(5)
    a = outcome.initial_state(SERIES)
    b = twin.initial_state(SERIES)
    for t in range(30):
        x = torch.randn(SERIES, config.features, generator=generator)
        level = torch.randn(SERIES, generator=generator, dtype=torch.float64)
        origin = Origin(x, torch.randn(SERIES, H, generator=generator), level, torch.ones(SERIES, dtype=torch.float64))
        y = torch.randn(SERIES, generator=generator, dtype=torch.float64)
        a, first = outcome.step(a, origin, y, torch.ones(SERIES, dtype=torch.bool))
        b = value.from_bytes(value.to_bytes(b), twin.initial_state(1))
        b, second = twin.step(b, origin, y, torch.ones(SERIES, dtype=torch.bool))
        assert torch.equal(first, second) and same(a, b), t


def test_skipped_rows_drop_what_was_due_at_them() -> None:
    y, observed, phase = rows()
    states, _ = run(y, observed, phase, stop=30)
    outcome = memory(forecaster())
    skipped = outcome.skip(states[-1], torch.tensor([0, 2, H + 3]))
    assert skipped.rows.tolist() == [30, 32, 30 + H + 3]
    assert same(value.select(skipped, [0]), value.select(states[-1], [0]))
    assert torch.equal(skipped.unit[1, 2:], states[-1].unit[1, :-2]) and float(skipped.unit[1, :2].abs().sum()) == 0
    assert float(skipped.unit[2].abs().sum()) == 0 and torch.equal(skipped.memory, states[-1].memory)


def test_it_learns_what_the_frozen_forecast_is_wrong_by() -> None:
    """A forecast that is always off by the same share of the context is corrected at every step of the horizon."""
    model = forecaster()
    outcome = memory(model)
    state = outcome.initial_state(1)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(600, outcome.config.features, generator=generator)
    noise[:, -1] = 1.0
    weights = torch.randn(outcome.config.features, generator=generator) * 0.3
    y = torch.zeros(600 + H, dtype=torch.float64)
    for s in range(600):  # every row follows from the features one horizon before it
        y[s + H] = float(noise[s] @ weights)
    zero = torch.zeros(1, dtype=torch.float64)
    errors = []
    for t in range(600):
        origin = Origin(noise[t : t + 1], torch.zeros(1, H), zero, zero + 1.0)
        state, corrected = outcome.step(state, origin, y[t : t + 1], torch.ones(1, dtype=torch.bool))
        errors.append(float((corrected[0, -1] - y[t + H]) ** 2))
    before, after = sum(errors[:60]) / 60, sum(errors[-200:]) / 200
    # 7 of 13 directions lie in the block: the wide memory learns the others too.
    assert after < 0.1 * before, after / before


def test_long_streams_stay_finite_and_bounded() -> None:
    outcome = memory(forecaster())
    state = outcome.initial_state(2)
    generator = torch.Generator().manual_seed(4)
    one = torch.ones(2, dtype=torch.float64)
    for t in range(1500):
        x = torch.randn(2, outcome.config.features, generator=generator) * (1e4 if t % 500 == 7 else 1.0)
        x[1] = 1e-9  # a context that never excites most directions
        y = torch.tensor([-9999.0 if t % 400 == 3 else float(x[0, 0]), 1.0], dtype=torch.float64)
        state, corrected = outcome.step(state, Origin(x, x[:, :H], one * 0, one), y, torch.ones(2, dtype=torch.bool))
    for path, leaf in value.leaves(state):
        assert bool(leaf.isfinite().all()), path
    assert bool(corrected.isfinite().all()) and float(corrected[1].abs().max()) < 10
    assert torch.equal(state.inverse, state.inverse.mT)
    bound = 3.0 / (outcome.config.penalty * H)
    assert float(torch.linalg.eigvalsh(state.inverse.double()).max()) < bound
    assert float(torch.linalg.eigvalsh(state.inverse.double()).min()) > 0


def test_nothing_known_is_the_base_and_wrong_shapes_are_named() -> None:
    outcome = memory(forecaster())
    origin = Origin(torch.zeros(1, outcome.config.features), torch.ones(1, H), torch.ones(1).double() * 5, torch.ones(1).double() * 2)
    _, corrected = outcome.step(outcome.initial_state(1), origin, torch.zeros(1), torch.zeros(1, dtype=torch.bool))
    assert torch.allclose(corrected, torch.full((1, H), 7.0, dtype=torch.float64), rtol=1e-6)
    with pytest.raises(ValueError, match="base"):
        outcome.step(outcome.initial_state(1), origin._replace(base=torch.zeros(1, H + 1)), torch.zeros(1), torch.ones(1).bool())
    with pytest.raises(ConfigError, match="window"):
        dataclasses.replace(outcome.config, forget=(1.0,))
    with pytest.raises(ValueError, match="fit"):
        outcome.fit(torch.zeros(3, outcome.config.features), torch.zeros(3, H), torch.zeros(outcome.config.features, H))
