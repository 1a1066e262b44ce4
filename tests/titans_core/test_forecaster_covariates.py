"""Covariates in the forecaster: a stream with effects is forecast as the stream without them, plus the effects."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from titans_core import state as value
from titans_core.config import ConfigError
from titans_core.forecaster import CovariateConfig, Forecaster, ForecasterConfig, Season
from titans_core.training import Rows, fit_effect, fit_line, replay

SEASONS = (Season(rows=1, slots=1, rates=(0.05,)), Season(rows=6, slots=6, rates=(0.3, 0.1)))
COUNTS = CovariateConfig(future=2, historic=1, static=1)
ROWS, HORIZON = 90, 9


def model(memory: str = "carried", covariates: CovariateConfig | None = COUNTS) -> Forecaster:
    torch.manual_seed(0)
    made = Forecaster(
        ForecasterConfig(look_back=10, horizon=HORIZON, seasons=SEASONS, memory=memory, hidden=0, covariates=covariates)  # type: ignore[arg-type]
    )
    made.line.normal_(std=0.1)
    made.line[made.config.lift] = torch.eye(HORIZON)[: made.config.lift.stop - made.config.lift.start]
    if covariates is not None:
        made.effect.copy_(torch.tensor([0.7, -0.4]))
    return made


def stream(series: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, observed (S, T), slots and covariates (S, T + 20, ...)."""
    generator = torch.Generator().manual_seed(1)
    t = torch.arange(ROWS + 20)
    y = 50 + torch.sin(t[:ROWS] * math.tau / 6) * 3 + torch.randn(series, ROWS, generator=generator, dtype=torch.float64)
    observed = torch.rand(series, ROWS, generator=generator) >= 0.2
    slots = torch.stack([t // s.stride % s.slots for s in SEASONS], -1).expand(series, -1, -1).float()
    given = torch.randn(series, ROWS + 20, COUNTS.total, generator=generator)
    given[:, :, 3:] = given[:, :1, 3:]  # static
    return y, observed, slots, given


@pytest.mark.parametrize("memory", ["carried", "window", "frozen"])
@pytest.mark.parametrize("series", [3, 20], ids=["chunks", "in turn"])
def test_any_split_gives_the_same_state_and_replay_the_same_features(memory: str, series: int) -> None:
    m, (y, observed, slots, given) = model(memory), stream(series)
    known = torch.cat([slots, given], 2)
    with torch.inference_mode():
        whole = m.observe(m.initial_state(series), y, observed, known[:, :ROWS])
        state, at = m.initial_state(series), 0
        for n in (1, 40, 0, 49):
            part = slice(at, at + n)
            state, at = m.observe(state, y[:, part], observed[:, part], known[:, part]), at + n
        for (path, a), (_, b) in zip(value.leaves(state), value.leaves(whole), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=path)
        x, level, _ = m.features(state, known[:, ROWS : ROWS + HORIZON])
        rows = Rows(y, observed, slots[:, : ROWS + HORIZON].to(torch.int16), given[:, : ROWS + HORIZON])
        (found,), after = replay(m, m.initial_state(series), rows, [torch.tensor([ROWS])])
    torch.testing.assert_close(found.x, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.level, level.squeeze(1))
    torch.testing.assert_close(after.historic, state.historic)
    again = value.from_bytes(value.to_bytes(state), m.initial_state(1))
    torch.testing.assert_close(m.forecast(again, known[:, ROWS : ROWS + HORIZON]), m.forecast(state, known[:, ROWS : ROWS + HORIZON]))


def test_features_are_those_of_the_stream_without_its_effects() -> None:
    """In units of the stream at the origin; the deviation itself is that of the values as they are."""
    m, bare, (y, observed, slots, given) = model(), model(covariates=None), stream()
    with torch.inference_mode():
        state = m.observe(m.initial_state(3), y, observed, torch.cat([slots, given], 2)[:, :ROWS])
        x, _, unit = m.features(state, torch.cat([slots, given], 2)[:, ROWS : ROWS + HORIZON])
        without = y - unit * m.effect_of(given[:, :ROWS])
        plain = bare.observe(bare.initial_state(3), without, observed, slots[:, :ROWS])
        clean, _, its_unit = bare.features(plain, slots[:, ROWS : ROWS + HORIZON])
    own = m.config.own_features
    torch.testing.assert_close(x[:, :own] * unit, clean[:, :own] * its_unit, rtol=1e-4, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(x[:, -2:-1] * unit, clean[:, -2:-1] * its_unit, rtol=1e-4, atol=1e-4, check_dtype=False)
    effects = m.effect_of(given)
    last = torch.where(observed, torch.arange(ROWS), -1).amax(1)
    lift = effects[:, ROWS : ROWS + HORIZON] - effects.gather(1, last.unsqueeze(1))
    torch.testing.assert_close(x[:, m.config.lift], lift.float(), rtol=1e-5, atol=1e-5)


def test_an_unknown_future_gives_no_number_and_a_missing_past_counts_as_the_mean() -> None:
    m, (y, observed, slots, given) = model(), stream()
    known = torch.cat([slots, given], 2)
    holes = known.clone()
    holes[:, 5:8, len(SEASONS) :] = torch.nan
    mean = known.clone()
    mean[:, 5:8, len(SEASONS) :] = 0.0
    a, b = (m.observe(m.initial_state(3), y, observed, k[:, :ROWS]) for k in (holes, mean))
    for (path, left), (_, right) in zip(value.leaves(a), value.leaves(b), strict=True):
        assert torch.equal(left, right), path
    ahead = known[:, ROWS : ROWS + HORIZON].clone()
    ahead[1, 4, len(SEASONS)] = torch.nan
    finite = m.forecast(a, ahead).isfinite().all((1, 2))
    assert finite.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="slots and covariates"):
        m.observe(a, y, observed, slots[:, :ROWS])
    with pytest.raises(ConfigError):
        CovariateConfig(future=-1)


def test_the_effect_is_found_and_noise_is_not() -> None:
    """A step up at random rows of a seasonal stream: found to a few per cent, and the line needs no other column for it."""
    generator = torch.Generator().manual_seed(0)
    series, rows = 4, 700
    t = torch.arange(rows + HORIZON)
    given = torch.zeros(series, rows + HORIZON, 2)
    given[:, :, 0] = (torch.rand(series, rows + HORIZON, generator=generator) < 0.2).float()
    given[:, :, 1] = torch.randn(series, rows + HORIZON, generator=generator)
    noise = torch.randn(series, rows, generator=generator, dtype=torch.float64)
    y = 10 + torch.sin(t[:rows] * math.tau / 6) + 5 * given[:, :rows, 0].double() + 0.3 * noise
    slots = torch.stack([t // s.stride % s.slots for s in SEASONS], -1).expand(series, -1, -1).to(torch.int16)
    data = Rows(y, torch.ones_like(y, dtype=torch.bool), slots, given)
    m = model(covariates=CovariateConfig(future=2))
    start, train, valid = m.initial_state(series), torch.arange(10, 500 - HORIZON), torch.arange(500, rows - HORIZON)
    fit_effect(m, start, data.first(500), train)
    unit = float(y.std())
    assert float(m.effect[0]) * unit == pytest.approx(5, rel=0.05) and abs(float(m.effect[1])) * unit < 0.1
    (a, b), _ = replay(m, start, data, [train, valid])
    line = fit_line(m, a, b)
    assert line.error * unit**2 < 1.5 * 0.3**2, "nothing but the noise is left"
