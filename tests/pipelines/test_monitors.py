import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from kernels.native import streams
from pipelines.streaming.monitors import LEVEL, OUTLIER, SCALE, UNUSUAL_BIT, Monitors, tracked_steps
from tests.pipelines.toy_memory import ToyMemory
from titans_core.state import select, write_

SHARED = next((p / "shared" for p in Path(__file__).parents if (p / "shared/cases").is_dir()), Path("shared"))


def watch(values: np.ndarray, horizon: int = 3, levels: tuple[float, ...] = (0.1, 0.5, 0.9), seen=None):
    """The toy memory over (n, T) series; returns verdicts and (T, n, 4) intervals: of step 1 and of the last step."""
    memory, monitors = ToyMemory(), Monitors(levels, horizon)
    n = len(values)
    model, state = memory.initial_state(n), monitors.initial(n)
    verdicts, intervals = [], []
    for value in torch.from_numpy(values).unbind(1):
        observed = ~value.isnan()
        model = memory.observe(model, value.nan_to_num()[:, None], observed[:, None], torch.zeros(n, 1, 2))
        forecast = memory.forecast(model, torch.zeros(n, horizon, 2))
        state, verdict = monitors.judge(state, value)
        low, high = monitors.interval(state, forecast)
        state = monitors.expect(state, forecast)
        verdicts.append(verdict)
        intervals.append(torch.stack([low[:, 0], high[:, 0], low[:, -1], high[:, -1]], 1).numpy())
        if seen is not None:
            seen.append(state)
    return verdicts, np.array(intervals)


def alarms(verdicts, bit: int) -> list[list[int]]:
    """Rows with an alarm, a list a stream."""
    raised = torch.stack([v.alarm for v in verdicts], 1) & bit
    return [row.nonzero().squeeze(1).tolist() for row in raised]


def test_tracked_steps() -> None:
    assert tracked_steps(1) == [1] and tracked_steps(2) == [1, 2] and tracked_steps(24) == [1, 2, 4, 8, 16, 24]


def test_a_forecast_is_judged_by_the_row_it_was_made_for() -> None:
    monitors = Monitors((0.1, 0.5, 0.9), 4)
    state = monitors.initial(1)
    for t in range(20):
        # The forecast made at row t for row t+h is exactly t+h: every residual is zero, at every step.
        state, verdict = monitors.judge(state, torch.tensor([float(t)], dtype=torch.float64))
        if t >= 1:
            assert float(verdict.surprise[0]) == 0.0
        if t >= 4:
            assert float(state.scale.sum()) == 0.0 and state.seen.tolist()[0] == [t, t - 3]
        middle = torch.arange(t + 1.0, t + 5.0)
        state = monitors.expect(state, torch.stack([middle - 1, middle, middle + 1], -1)[None])


def test_a_gap_drops_what_was_forecast_for_it_and_no_more() -> None:
    monitors = Monitors((0.1, 0.5, 0.9), 4)
    state = monitors.initial(1)
    t = 0
    forecast_at: set[int] = set()
    judged = [0, 0]
    for gap in (0, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 5, 0, 0):
        state = monitors.skip(state, torch.tensor([gap]))
        t += gap
        state, _ = monitors.judge(state, torch.tensor([float(t)], dtype=torch.float64))
        judged = [judged[i] + (t - h in forecast_at) for i, h in enumerate((1, 4))]
        assert state.seen.tolist()[0] == judged and float(state.scale.sum()) == 0.0
        middle = torch.arange(t + 1.0, t + 5.0)
        state = monitors.expect(state, torch.stack([middle - 1, middle, middle + 1], -1)[None])
        forecast_at.add(t)
        t += 1


@pytest.mark.parametrize("noise", ["normal", "heavy", "wrong model"])
def test_intervals_keep_their_coverage(noise: str) -> None:
    random = np.random.default_rng(0)
    values = random.standard_t(2.5, (16, 1500)) if noise == "heavy" else random.normal(size=(16, 1500))
    if noise == "wrong model":  # the scale moves up and down by 8: the model's own spread cannot follow
        values *= np.where(np.arange(1500) // 300 % 2, 8.0, 1.0)
    _, intervals = watch(values)
    for step, (low, high) in ((1, (0, 1)), (3, (2, 3))):
        later = values.T[step:]
        inside = (later >= intervals[:-step, :, low]) & (later <= intervals[:-step, :, high])
        by_stream = inside[200:].mean(0)
        assert abs(by_stream.mean() - 0.8) < 0.01 and np.abs(by_stream - 0.8).max() < 0.03, step


def test_intervals_of_a_cold_memory_are_soon_wide_enough() -> None:
    random = np.random.default_rng(6)
    values = 100 + 10 * random.normal(size=(200, 60))  # ten times what the new memory says
    _, intervals = watch(values)
    inside = (values.T[1:] >= intervals[:-1, :, 0]) & (values.T[1:] <= intervals[:-1, :, 1])
    assert inside[10:30].mean() > 0.7


def test_white_noise_raises_next_to_no_alarm() -> None:
    verdicts, _ = watch(np.random.default_rng(1).normal(size=(40, 1500)))
    for bit in (LEVEL, SCALE, OUTLIER):
        assert sum(map(len, alarms(verdicts, bit))) <= 3, "at most one in 20,000 rows"


def test_heavy_tails_raise_their_own_limit() -> None:
    values = np.random.default_rng(5).standard_t(1.5, (20, 3000))
    raised = alarms(watch(values)[0], OUTLIER)
    late = [[t for t in row if t >= 1500] for row in raised]
    assert sum(map(len, late)) / (20 * 1500) < 0.003


def test_a_disturbance_is_unusual_once() -> None:
    values = np.random.default_rng(3).normal(size=(20, 800))
    values[:, 500:520] += 5 * np.random.default_rng(4).normal(size=(20, 20))
    raised = alarms(watch(values)[0], UNUSUAL_BIT)
    found = [[t for t in row if 500 <= t < 530] for row in raised]
    assert sum(len(row) == 1 for row in found) >= 19, "one alarm for one disturbance"
    assert sum(len(row) for row in raised) - sum(len(row) for row in found) <= 4


def test_autocorrelated_noise_raises_next_to_no_level_drift() -> None:
    noise = np.random.default_rng(2).normal(size=(40, 1500))
    values = np.zeros_like(noise)
    for t in range(1, 1500):
        values[:, t] = 0.7 * values[:, t - 1] + noise[:, t]
    verdicts, _ = watch(values)
    assert sum(map(len, alarms(verdicts, LEVEL))) <= 12, "at most one in 5,000 rows"


def test_case_drift() -> None:
    path = SHARED / "cases/series/17_drift/stream.csv"
    if not path.exists():
        assert os.environ.get("TETHYS_REQUIRE_DATA") != "1", f"{path} is missing"
        pytest.skip("shared case 17_drift is absent")
    values = pl.read_csv(path)["y"].to_numpy()[None].copy()
    states: list = []
    verdicts, _ = watch(values, seen=states)
    level, scale, outliers = (alarms(verdicts, bit)[0] for bit in (LEVEL, SCALE, OUTLIER))
    assert all(t >= 500 for t in level + scale), "no drift alarm before the first drift, the outlier included"
    assert any(501 <= t <= 560 for t in level)
    assert any(801 <= t <= 900 for t in scale)
    assert 250 in outliers and len(outliers) <= 5
    assert float(states[250].scale[0, 0] / states[249].scale[0, 0]) < 1.1


@pytest.mark.skipif(bool(streams.supports()), reason=f"native kernels: {streams.supports()}")
@torch.inference_mode()
def test_a_row_in_place_is_judge_interval_and_expect() -> None:
    """Thirty streams of all kinds: noise, a level that moves, growing noise, missing values, outliers, forecasts that are NaN."""
    torch.manual_seed(0)
    watch, horizon, n = Monitors((0.1, 0.5, 0.9), 6), 6, 30
    native, pure = watch.initial(n), watch.initial(n)
    assert watch.native
    alarms = 0
    for turn in range(400):
        slots = torch.randperm(n)[: n if turn % 3 else n // 2]
        y = torch.randn(len(slots), dtype=torch.float64) * (1 + 4 * (slots % 3 == 1) * (turn > 200)) + 3.0 * (slots % 3 == 2) * (turn > 250)
        y[torch.rand(len(slots)) < 0.05] = torch.nan
        y[torch.rand(len(slots)) < 0.01] *= 100
        middle = 0.1 * torch.randn(len(slots), horizon, dtype=torch.float64)
        forecast = torch.stack([middle - 1.2, middle, middle + 1.3], -1)
        forecast[torch.rand(len(slots)) < 0.02] = torch.nan
        verdict, low, high = watch.row_(native, slots, y, forecast)
        part, expected = watch.judge(select(pure, slots), y)
        wanted = (*vars(expected).values(), *watch.interval(part, forecast))
        write_(pure, slots, watch.expect(part, forecast))
        for name, a, b in zip([*vars(expected), "low", "high"], (*vars(verdict).values(), low, high), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text, at=(turn, name): f"{at}: {text}")
        alarms += int((verdict.alarm > 0).sum())
    for name, leaf in vars(pure).items():
        torch.testing.assert_close(getattr(native, name), leaf, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert alarms > 20


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.skipif(bool(streams.supports()), reason=streams.supports()))])
def test_a_forecast_without_width_names_no_unit_of_surprise(native: bool) -> None:
    monitors = Monitors((0.1, 0.5, 0.9), 2)
    monitors.native = native
    # Four streams are told 5, each with another width; then 7 comes, and at last 5 to one that said just that.
    middle, half = torch.full((5,), 5.0, dtype=torch.float64), torch.tensor([0.0, 1e-16, 0.5, torch.nan, 0.0], dtype=torch.float64)
    forecast = torch.stack([middle - half, middle, middle + half], -1).unsqueeze(1).expand(5, 2, 3).contiguous()
    state, slots = monitors.initial(5), torch.arange(5)
    monitors.row_(state, slots, torch.full((5,), torch.nan, dtype=torch.float64), forecast)
    verdict, _, _ = monitors.row_(state, slots, torch.tensor([7.0, 7.0, 7.0, 7.0, 5.0], dtype=torch.float64), forecast)
    expected = torch.tensor([torch.nan, torch.nan, 2.0 * monitors._normal_width, torch.nan, 0.0], dtype=torch.float64)
    torch.testing.assert_close(verdict.surprise, expected, equal_nan=True)
    assert not verdict.covered[:2].any() and bool(verdict.covered[4])
