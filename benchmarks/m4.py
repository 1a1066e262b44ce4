"""M4 hourly and weekly: accuracy and honest intervals beside seasonal naive and ETS.

    python benchmarks/m4.py --data ../shared/data/series/m4 [--sets hourly weekly] [--models tethys seasonal_naive ets]

The competition's own measures (Makridakis et al. 2020): for each series the mean absolute error over its horizon (48
hours, 13 weeks), divided by the in-sample mean absolute seasonal difference (m = 24 and 1): MASE; sMAPE in per cent; OWA,
the mean of both relative to Naive 2 (naive on the seasonally adjusted series, where the seasonality test at 90 % asks
for it). Coverage is the share of the test values inside the central 80 % and 95 % intervals. M4's files have no time
stamps; all series are laid so that they end at the same made-up hour or week.

One forecaster is trained on the training parts of all series of a set. Its quantiles are conformal for each step of the
horizon, calibrated on the end of the training parts, which its weights have not seen; the test parts are read once, for
the score. ETS is AutoETS of statsforecast; its season is 24 hours and, for weeks, none, as in the competition.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

if TYPE_CHECKING:
    import numpy as np

LEVELS = (0.025, 0.1, 0.5, 0.9, 0.975)
MOST_WINDOWS = 60_000
MODELS = ("tethys", "seasonal_naive", "ets")


@dataclass(frozen=True)
class Set:
    """season: of MASE and ETS (the competition's); cycle: of the seasonal naive. look_back: of the forecaster."""

    name: str
    horizon: int
    season: int
    cycle: int
    frequency: str
    look_back: int


SETS = {
    "hourly": Set("Hourly", 48, 24, 168, "1h", 168),
    "weekly": Set("Weekly", 13, 1, 52, "1w", 26),
}


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0], data="folder of Hourly-train.csv(.gz), Hourly-test.csv and so on")
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), default=list(SETS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--series", type=int, help="the first so many series of a set only, for a quick look")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    if options.data is None:
        parser.error("--data is needed: the folder of the M4 files")
    figures = {name: measure(SETS[name], options) for name in options.sets}
    report.finish("m4", figures, libraries=("torch", "statsforecast"))


def measure(which: Set, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    import numpy as np

    ids, train = read(options.data, f"{which.name}-train", options.series)
    test_ids, test = read(options.data, f"{which.name}-test", options.series)
    if ids != test_ids:
        raise SystemExit(f"m4: {which.name}-train and {which.name}-test name different series")
    truth = np.stack([y[: which.horizon] for y in test])
    reference = np.stack([naive2(y, which.season, which.horizon) for y in train])
    naive = smape(reference, truth), mase(reference, truth, train, which.season)
    report.progress(f"{which.name}: {len(ids)} series, Naive 2 sMAPE {naive[0]:.3f}, MASE {naive[1]:.3f}")
    figures: dict[str, dict[str, float]] = {}
    for model in options.models:
        began = time.perf_counter()
        quantiles = FORECASTS[model](which, ids, train, options.seed)
        point = quantiles[:, :, LEVELS.index(0.5)]
        error = mase(point, truth, train, which.season)
        figures[model] = {
            "mase": error,
            "smape": smape(point, truth),
            "owa": (smape(point, truth) / naive[0] + error / naive[1]) / 2,
            "coverage80": covered(truth, quantiles[:, :, 1], quantiles[:, :, 3]),
            "coverage95": covered(truth, quantiles[:, :, 0], quantiles[:, :, 4]),
            "seconds": round(time.perf_counter() - began, 1),
        }
        report.progress(f"{which.name} {model}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures[model].items()))
    return figures


def read(folder: Path, stem: str, limit: int | None) -> tuple[list[str], list[np.ndarray]]:
    """Ragged rows `id,V2,V3,...`: ids and values (T_i,) float64."""
    import csv

    import numpy as np

    for path in (folder / f"{stem}.csv", folder / f"{stem}.csv.gz"):
        if path.is_file():
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            rows = list(csv.reader(io.StringIO(raw.decode())))[1:]
            rows = rows[:limit]
            return [r[0] for r in rows], [np.array([float(v) for v in r[1:] if v not in ("", "NA")]) for r in rows]
    raise SystemExit(f"m4: there is no {stem}.csv or {stem}.csv.gz in {folder}")


def mase(point: np.ndarray, truth: np.ndarray, train: Sequence[np.ndarray], season: int) -> float:
    import numpy as np

    scale = np.array([seasonal_difference(y, season) for y in train])
    return float((np.abs(point - truth).mean(axis=1) / scale).mean())


def smape(point: np.ndarray, truth: np.ndarray) -> float:
    import numpy as np

    return float((200 * np.abs(point - truth) / (np.abs(point) + np.abs(truth))).mean(axis=1).mean())


def covered(truth: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    return float(((truth >= low) & (truth <= high)).mean())


def naive2(y: np.ndarray, season: int, horizon: int) -> np.ndarray:
    """The competition's benchmark: last value of the multiplicatively adjusted series, times the seasonal indices. (H,)."""
    import numpy as np

    if season == 1 or not seasonal(y, season):
        return np.repeat(y[-1], horizon)
    half = season // 2
    weights = np.concatenate([[0.5], np.ones(season - 1), [0.5]]) / season if season % 2 == 0 else np.ones(season) / season
    trend = np.convolve(y, weights, mode="valid")
    ratio = y[half : half + len(trend)] / trend
    phase = (np.arange(len(ratio)) + half) % season
    index = np.array([ratio[phase == p].mean() for p in range(season)])
    index *= season / index.sum()
    adjusted = y / index[np.arange(len(y)) % season]
    return np.repeat(adjusted[-1], horizon) * index[(len(y) + np.arange(horizon)) % season]


def seasonal(y: np.ndarray, season: int) -> bool:
    """Autocorrelation at the season, beyond Bartlett's limits at 90 %."""
    import numpy as np

    if len(y) < 3 * season:
        return False
    centred = y - y.mean()
    acf = np.array([(centred[lag:] * centred[: len(y) - lag]).sum() for lag in range(season + 1)]) / (centred**2).sum()
    limit = 1.645 * np.sqrt((1 + 2 * (acf[1:season] ** 2).sum()) / len(y))
    return bool(abs(acf[season]) > limit)


def tethys(which: Set, ids: list[str], train: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """(S, H, Q) of one forecaster for all series of the set, trained for what MASE asks for: errors in seasonal differences.

    Whether forecasts stay above the lowest value that a series ever had is decided on validation.
    """
    import numpy as np
    import polars as pl
    import torch

    from pipelines.forecasting.estimator import TitansForecaster
    from pipelines.windows import panel

    total = max(map(len, train))
    border = total - max(which.horizon, total // 5)
    step = np.timedelta64(1, which.frequency[-1].replace("w", "W"))
    stamps = np.datetime64("2018-01-01", "us") + np.arange(total) * step.astype("timedelta64[us]")
    # All end together: the last fifth is everybody's validation. The names keep the order of the files.
    names = [f"{i:05d}" for i in range(len(ids))]
    frame = pl.concat(pl.DataFrame({"unique_id": n, "ds": stamps[total - len(y) :], "y": y}) for n, y in zip(names, train, strict=True))
    table = panel(frame, frequency=which.frequency)
    model = TitansForecaster(
        horizon=which.horizon, look_back=which.look_back, hidden=0, quantiles=LEVELS, seed=seed, frequency=which.frequency,
        scale_lag=which.season,
    ).fit(table)  # fmt: skip
    line = model.line_
    report.progress(f"line: penalty {line.penalty:g}, pull {line.gap_penalty:g}, validation {line.error:.4f}")
    made = model.predict()
    quantiles = made.select(f"q{q:g}" for q in LEVELS).to_numpy().reshape(len(ids), which.horizon, len(LEVELS))
    origins = np.arange(border, total - which.horizon + 1, max(1, len(ids) * (total - border) // MOST_WINDOWS))
    valid, _ = model.windows(table, origins)
    low = torch.tensor([y[: len(y) - total + border].min(initial=np.inf) for y in train]).repeat(len(origins))
    scale = torch.tensor([seasonal_difference(y[: len(y) - total + border], which.season) for y in train]).repeat(len(origins))
    begun = torch.tensor([total - len(y) for y in train]).repeat(len(origins))
    use = (torch.from_numpy(origins).repeat_interleave(len(ids)) - begun >= which.look_back) & (scale > 0)
    if floor_helps(model.forecaster_, *(part[use] for part in (valid.x, valid.y, valid.level, valid.unit, low, scale))):
        report.progress("forecasts stay above the lowest value of their series")
        quantiles = np.maximum(quantiles, np.array([y.min() for y in train])[:, None, None])
    return quantiles


def floor_helps(model: Any, x: Any, y: Any, level: Any, unit: Any, lowest: Any, scale: Any) -> bool:
    """Whether the mean of relative MASE and relative sMAPE on validation windows falls when medians stay above `lowest` (N,)."""
    import torch

    around = model.roughness(x) ** model.config.spread * model.offsets[:, LEVELS.index(0.5)]
    truth, point = level[:, None] + unit[:, None] * y, level[:, None] + unit[:, None] * (model.centre_of(x) + around)

    def errors(p: Any) -> tuple[float, float]:
        error = (p - truth).abs()
        return float((error / scale[:, None]).mean()), float((error / (p.abs() + truth.abs())).mean())

    free, above = errors(point), errors(torch.maximum(point, lowest[:, None]))
    return above[0] / free[0] + above[1] / free[1] < 2


def seasonal_difference(y: np.ndarray, season: int) -> float:
    import numpy as np

    return float(np.abs(y[season:] - y[:-season]).mean()) if len(y) > season else 0.0


def seasonal_naive(which: Set, ids: list[str], train: Sequence[np.ndarray], seed: int) -> np.ndarray:
    from statsforecast.models import Naive, SeasonalNaive

    model = SeasonalNaive(season_length=which.season) if which.season > 1 else Naive()
    return intervals(model, which, train)


def ets(which: Set, ids: list[str], train: Sequence[np.ndarray], seed: int) -> np.ndarray:
    from statsforecast.models import AutoETS

    return intervals(AutoETS(season_length=which.season), which, train)


def intervals(model: Any, which: Set, train: Sequence[np.ndarray]) -> np.ndarray:
    """(S, H, 5): the 95 % and 80 % intervals around the forecast of a model of statsforecast, in the order of LEVELS."""
    import numpy as np

    out = []
    for number, y in enumerate(train):
        made = model.forecast(y=y, h=which.horizon, level=[80, 95])
        out.append(np.stack([made["lo-95"], made["lo-80"], made["mean"], made["hi-80"], made["hi-95"]], axis=1))
        if number % 50 == 49:
            report.progress(f"{type(model).__name__}: {number + 1} of {len(train)} series")
    return np.stack(out)


FORECASTS = {"tethys": tethys, "seasonal_naive": seasonal_naive, "ets": ets}

if __name__ == "__main__":
    main()
