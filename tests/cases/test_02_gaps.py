import numpy as np
import polars as pl

from connectors import tables
from pipelines.forecasting.validation import Rules, check
from pipelines.windows import panel, windows


def test_the_gaps_are_reported_run_by_run(case):
    report = check(tables.read(case / "train.csv")).report
    gaps = report.of_kind("gaps")
    assert gaps.level == "error" and gaps.series == ("gap",) and gaps.counts == (81,)
    assert "3 runs, longest 77, freq 1h, 88.75 % present" in gaps.message


def test_windows_know_the_gap_and_avoid_a_long_one(case):
    p = panel(check(tables.read(case / "train.csv"), Rules(gaps="mask")).frame)
    gap = p.rows(p.ids.index("gap"))
    assert (np.diff(p.ds[gap][99:104]) == np.timedelta64(1, "h")).all()
    assert p.observed[gap][99:104].tolist() == [True, False, False, False, True]
    every, short = windows(p, 24, 12), windows(p, 24, 12, max_gap=76)
    rows = np.arange(36)
    lengths = [_longest_run(~p.observed[start + rows]) for start in short.start]
    assert len(short) < len(every) and max(lengths) <= 3
    crossing = (every.start < 300 + 77) & (every.start + 36 > 300) & (every.series == p.ids.index("gap"))
    assert len(every) - len(short) == crossing.sum()


def test_the_phase_is_right_after_the_gap(case):
    truth = tables.read(case / "truth_gap.csv")
    p = panel(check(tables.read(case / "train.csv"), Rules(gaps="mask")).frame)
    rows = p.rows(p.ids.index("gap"))
    y = p.y[rows]
    assert np.allclose(y[p.observed[rows]], truth.filter(pl.col("unique_id") == "gap")["y"].to_numpy()[p.observed[rows]])
    error = np.abs(y[24:] - y[:-24])
    assert np.nanmean(error[:276]) < 0.6 and np.nanmean(error[377 - 24 :]) < 0.6


def _longest_run(flags):
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest
