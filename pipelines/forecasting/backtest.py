"""Rolling origins: every model forecasts the same windows from the same past, and nothing later than an origin is ever seen before it.

The forecasts are made a block of series at a time, scored, and passed on as rows, so that memory does not grow with the number of
series, origins and steps; what stays are the sums of `Scores` and one line a series.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from connectors.errors import UserError
from pipelines.forecasting.baselines import ETS_ROWS, Ets, LastValue, Ridge, RidgeCarried, SeasonalNaive
from pipelines.forecasting.calendar import natural_cycles
from pipelines.forecasting.estimator import MAX_SERIES
from pipelines.windows import Panel, continue_grid, position

if TYPE_CHECKING:
    from pipelines.forecasting.estimator import TitansForecaster

Floats = NDArray[np.float64]

MODEL = "tethys"
"""What the leaderboard calls the model that is tested; the others are the baselines."""
CELLS_AT_ONCE = 1 << 19
"""Series x origins x steps of a block. A cell is some 30 numbers while it is worked on (windows, quantiles, rows): 130 MB."""
ROWS_AT_ONCE = 1 << 17
"""Series x rows of a block. A row is some 5 KB while the memories replay it: 650 MB."""

ETS_BUDGET = 20_000
"""Rows that ETS models are chosen on, over all series: some ten seconds. Where that is not all series, it is a random sample of them."""


@dataclass(frozen=True)
class Truth:
    """What happened after each origin: y (S, n, H), NaN where nothing was observed, and the MASE scale of each series (S,)."""

    y: Floats
    scale: Floats


def rolling_origins(table: Panel, horizon: int, count: int, look_back: int) -> NDArray[np.int64]:
    """The last `count` row counts of the common grid, one horizon apart, the last with its horizon inside the table."""
    _, y, _ = table.aligned()
    total = y.shape[1]
    origins = total - horizon * np.arange(count, 0, -1)
    if origins[0] < look_back:
        most = (total - look_back) // horizon
        raise UserError(
            f"{count} origins of horizon {horizon} after a look-back of {look_back} need {look_back + count * horizon} rows, "
            f"the series span {total}: " + (f"ask for at most {most} origins" if most > 0 else "shorten the look-back or the horizon")
        )
    return origins.astype(np.int64)


def season(frequency: str) -> int:
    """Steps of the shortest cycle of the calendar (24 for hours, 7 for days), 1 where it has none."""
    cycles = natural_cycles(frequency)
    return cycles[0] if cycles else 1


def truth(y: Floats, origins: NDArray[np.int64], horizon: int, season: int, known: int) -> Truth:
    """The targets of series y (S, T), and the mean absolute seasonal difference of their first `known` rows, which MASE divides by."""
    future = sliding_window_view(y, horizon, axis=1)[:, origins]
    past = y[:, :known]
    lag = season if known > 2 * season else 1
    with np.errstate(invalid="ignore"):
        difference = np.abs(past[:, lag:] - past[:, :-lag])
        counts = np.isfinite(difference).sum(axis=1)
        scale = np.where(counts > 0, np.nansum(difference, axis=1) / np.maximum(counts, 1), np.nan)
    return Truth(future, np.where(scale > 0, scale, np.nan))


class Scores:
    """Sums from which all figures of a backtest follow; `add` takes the forecasts a block of series at a time.

    Only cells count in which something was observed and the model gave a number; `unforecast` counts the others of the first model.

    count, absolute, squared: (M, n, H) cells and errors by model, origin and step. scaled, scaled_count: the same, over the MASE scale
    of the series. below, pinball: (Q, H), how often the truth lay at or below a quantile, and the loss. inside: (P, H), how often it
    lay in a central interval. banded, size: (H,), cells with quantiles and the sum of |y| in them.
    """

    def __init__(self, models: Sequence[str], levels: Sequence[float], origins: int, horizon: int) -> None:
        self.models, self.levels = tuple(models), tuple(levels)
        self.intervals = central_intervals(levels)
        shape = (len(self.models), origins, horizon)
        self.count, self.absolute, self.squared, self.scaled, self.scaled_count = (np.zeros(shape) for _ in range(5))
        self.below, self.pinball = np.zeros((len(levels), horizon)), np.zeros((len(levels), horizon))
        self.inside = np.zeros((len(self.intervals), horizon))
        self.banded, self.size = np.zeros(horizon), np.zeros(horizon)
        self.unforecast = 0
        self._series: list[pl.DataFrame] = []

    def add(self, ids: Sequence[str], points: Mapping[str, Floats], quantile: Floats, real: Truth) -> None:
        """points[model] (S, n, H); quantile (S, n, H, Q) of the first model."""
        columns: dict[str, Any] = {"unique_id": list(ids)}
        for m, name in enumerate(self.models):
            error = np.abs(points[name] - real.y)
            seen = np.isfinite(error)
            error = np.where(seen, error, 0.0)
            if m == 0:
                self.unforecast += int((np.isfinite(real.y) & ~seen).sum())
            self.count[m] += seen.sum(axis=0)
            self.absolute[m] += error.sum(axis=0)
            self.squared[m] += (error**2).sum(axis=0)
            usable = seen & np.isfinite(real.scale)[:, None, None]
            self.scaled[m] += np.where(usable, error / real.scale[:, None, None], 0.0).sum(axis=0)
            self.scaled_count[m] += usable.sum(axis=0)
            cells = seen.sum(axis=(1, 2))
            mae = np.where(cells > 0, error.sum(axis=(1, 2)) / np.maximum(cells, 1), np.nan)
            columns[f"{name}.mae"], columns[f"{name}.mase"] = mae, mae / real.scale
        self._series.append(pl.DataFrame(columns).fill_nan(None))
        seen = np.isfinite(real.y) & np.isfinite(quantile).all(axis=3)
        y = np.where(seen, real.y, 0.0)
        for q, level in enumerate(self.levels):
            gap = np.where(seen, y - quantile[..., q], 0.0)
            self.below[q] += (seen & (gap <= 0)).sum(axis=(0, 1))
            self.pinball[q] += np.maximum(level * gap, (level - 1) * gap).sum(axis=(0, 1))
        for p, (low, high, _) in enumerate(self.intervals):
            self.inside[p] += (seen & (y >= quantile[..., low]) & (y <= quantile[..., high])).sum(axis=(0, 1))
        self.banded += seen.sum(axis=(0, 1))
        self.size += np.abs(y).sum(axis=(0, 1))

    @cached_property
    def series(self) -> pl.DataFrame:
        """A row a series: unique_id, and MODEL.mae and MODEL.mase of each model (null where nothing could be measured)."""
        return pl.concat(self._series)

    def leaderboard(self) -> list[dict[str, Any]]:
        """A row a model, best MASE first. mse and mae over all cells; mase is the mean over the series of theirs; for the tested model
        the coverage of its central intervals (`coverage80`) and wql, twice the mean pinball loss over the mean |y|. A baseline that
        forecast fewer series than the model has `series`, how many, and `tethys_mase`, the model's on the same ones.
        """
        rows: list[dict[str, Any]] = []
        for m, name in enumerate(self.models):
            cells = self.count[m].sum()
            mase = self.series[f"{name}.mase"].mean()
            rows.append(
                {
                    "model": name,
                    "mase": float("nan") if mase is None else float(mase),  # type: ignore[arg-type]
                    "mae": float(self.absolute[m].sum() / cells) if cells else float("nan"),
                    "mse": float(self.squared[m].sum() / cells) if cells else float("nan"),
                    **(self.calibration() if m == 0 else {}),
                    **(self._on_a_sample(name) if name in self.sampled else {}),
                }
            )
        return sorted(rows, key=lambda row: (np.isnan(row["mase"]), row["mase"], row["mae"]))

    @cached_property
    def sampled(self) -> frozenset[str]:
        """Baselines that forecast fewer series than the model: no figure of theirs stands beside those of all series."""
        whole = self.series[f"{self.models[0]}.mae"].count()
        return frozenset(name for name in self.models[1:] if self.series[f"{name}.mae"].count() < whole)

    def _on_a_sample(self, name: str) -> dict[str, Any]:
        there = self.series.drop_nulls(f"{name}.mae")
        mase = there[f"{self.models[0]}.mase"].mean()
        return {"series": there.height, f"{self.models[0]}_mase": float("nan") if mase is None else float(mase)}  # type: ignore[arg-type]

    def calibration(self) -> dict[str, float]:
        cells = self.banded.sum()
        if not cells:
            return {}
        out = {f"coverage{100 * share:g}": float(self.inside[p].sum() / cells) for p, (_, _, share) in enumerate(self.intervals)}
        out["wql"] = float(2 * self.pinball.sum() / cells / len(self.levels) / max(self.size.sum() / cells, 1e-12))
        return out

    @property
    def in_scale(self) -> bool:
        """Whether errors can be told as multiples of the seasonal difference; they cannot where every series was constant."""
        return bool(self.scaled_count.sum())

    def error_by_step(self) -> Floats:
        """(M, H) mean absolute error, in scale where that is possible; NaN where nothing was observed."""
        return self._mean_error((1,))

    def error_by_origin(self) -> Floats:
        """(M, n), as `error_by_step`."""
        return self._mean_error((2,))

    def coverage_by_step(self) -> Floats:
        """(P, H) share of what came that lay in each central interval; NaN where nothing was observed."""
        with np.errstate(invalid="ignore"):
            return self.inside / self.banded

    def reliability(self) -> Floats:
        """(Q,) how often what came lay at or below each quantile."""
        with np.errstate(invalid="ignore"):
            return self.below.sum(axis=1) / self.banded.sum()

    def _mean_error(self, axes: tuple[int, ...]) -> Floats:
        total, count = (self.scaled, self.scaled_count) if self.in_scale else (self.absolute, self.count)
        with np.errstate(invalid="ignore"):
            return np.asarray(total.sum(axis=axes) / count.sum(axis=axes))


def central_intervals(levels: Sequence[float]) -> tuple[tuple[int, int, float], ...]:
    """Places of the lower and the upper quantile, and the share of the truth between them, narrowest first."""
    found = []
    for i, low in enumerate(levels):
        for j, high in enumerate(levels):
            if low < 0.5 and abs(low + high - 1.0) < 1e-6:
                found.append((i, j, round(high - low, 6)))
    return tuple(sorted(found, key=lambda interval: interval[2]))


class Backtest:
    """The contest of a fitted model and the baselines at row counts `origins` of a table's common grid.

    The baselines are fitted on the first `known` rows, the lines on as many series as a training looks at. `rows()` makes the forecasts,
    and fills `scores` while it is read.
    ets: series that ETS is fitted to, drawn at random; 0 leaves it out, None takes as many as ETS_BUDGET allows.
    grid (T,): the stamps that all series share. y, observed (S, T): the series on it.
    """

    def __init__(self, model: TitansForecaster, table: Panel, origins: NDArray[np.int64], known: int, ets: int | None = None) -> None:
        self.model, self.table, self.origins, self.known = model, table, origins, known
        self.grid, self.y, self.observed = table.aligned()
        self.levels = tuple(model.forecaster_.config.quantiles)
        # The ridge penalty was chosen for scaled series, so every baseline sees them scaled by the rows before the first origin.
        past = np.where(np.isfinite(self.y[:, :known]), self.y[:, :known], np.nan)
        with np.errstate(all="ignore"):
            counts = np.maximum(np.isfinite(past).sum(axis=1), 1)
            self._mean = np.nansum(past, axis=1) / counts
            self._deviation = np.sqrt(np.nansum((past - self._mean[:, None]) ** 2, axis=1) / counts)
        self._deviation = np.where(self._deviation > 0, self._deviation, 1.0)
        most = max(1, ETS_BUDGET // min(known, ETS_ROWS)) if ets is None else ets
        drawn = np.random.default_rng(0).permutation(len(table))
        self._ets = np.zeros(len(table), dtype=bool)
        self._ets[drawn[:most]] = True
        self._baselines = self._fitted(np.sort(drawn[:MAX_SERIES]))
        self.scores = Scores((MODEL, *self._baselines), self.levels, len(origins), model.horizon)

    def rows(self, tell: Callable[[int, int], None] = lambda done, of: None) -> Iterator[pl.DataFrame]:
        """All forecasts, a frame for each block of series (see `tidy`); tell(series done, of how many)."""
        size = max(1, min(CELLS_AT_ONCE // (len(self.origins) * self.model.horizon), ROWS_AT_ONCE // len(self.grid)))
        for first in range(0, len(self.table), size):
            yield self._block(slice(first, min(first + size, len(self.table))))
            tell(min(first + size, len(self.table)), len(self.table))

    def _block(self, which: slice) -> pl.DataFrame:
        y, ids = self.y[which], self.table.ids[which]
        # Every series of a block spans the whole common grid, so that origins mean the same rows in every block.
        block = Panel(
            ids,
            np.tile(self.grid, len(ids)),
            y.reshape(-1),
            self.observed[which].reshape(-1),
            np.arange(len(ids) + 1, dtype=np.int64) * len(self.grid),
            self.table.frequency,
            self._covariates(which),
        )
        point, quantile = self.model.quantiles_at(block, self.origins)
        points = {MODEL: point}
        mean, deviation = self._mean[which], self._deviation[which]
        for name, baseline in self._baselines.items():
            if isinstance(baseline, Ets):
                points[name] = np.full(point.shape, np.nan)
                for i in np.flatnonzero(self._ets[which]):
                    points[name][i] = baseline.forecast(y[i], self.origins)
                continue
            points[name] = np.stack(
                [m + d * baseline.forecast((row - m) / d, self.origins) for row, m, d in zip(y, mean, deviation, strict=True)]
            ).astype(np.float64)
        real = truth(y, self.origins, self.model.horizon, season(self.table.frequency), self.known)
        self.scores.add(ids, points, quantile, real)
        return tidy(block, self.origins, points, quantile, self.levels)

    def _covariates(self, which: slice) -> pl.DataFrame | None:
        """Those of a block, null where a series has no row."""
        table = self.table
        if table.covariates is None:
            return None
        first, last = table.offsets[which.start], table.offsets[which.stop]
        begins, _ = position(table.ds[table.offsets[:-1]][which], self.grid[0], table.frequency)
        rows = np.full((which.stop - which.start, len(self.grid)), -1)
        for place, (i, at) in enumerate(zip(range(which.start, which.stop), begins, strict=True)):
            rows[place, at : at + table.lengths[i]] = np.arange(table.offsets[i], table.offsets[i + 1]) - first
        index = pl.Series(rows.reshape(-1), dtype=pl.Int64).replace(-1, None)
        return table.covariates[first:last].select(pl.all().gather(index))

    def _fitted(self, which: NDArray[np.int64]) -> dict[str, Any]:
        """The baselines, the lines of them fitted on the series `which`."""
        horizon, look_back = self.model.horizon, self.model.look_back
        cycles = natural_cycles(self.table.frequency)
        rates = {0: (0.1, 0.02), 1: (0.2,)}
        profiles = tuple((c, rates[i]) for i, c in enumerate(cycles) if 3 * c <= self.known)
        offered: dict[str, Any] = {"last_value": LastValue(horizon)}
        if cycles:
            offered["seasonal_naive"] = SeasonalNaive(horizon, cycles[0])
        offered["ridge"] = Ridge(horizon, look_back)
        offered["ridge_carried"] = RidgeCarried(horizon, look_back, profiles=profiles)
        if self._ets.any():
            offered["ets"] = Ets(horizon, season(self.table.frequency), self.known)
        scaled = (self.y[which, : self.known] - self._mean[which, None]) / self._deviation[which, None]
        fitted = {}
        for name, baseline in offered.items():
            try:
                fitted[name] = baseline.fit(list(scaled))
            except ValueError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
        return fitted


def tidy(table: Panel, origins: NDArray[np.int64], points: Mapping[str, Floats], quantile: Floats, levels: Sequence[float]) -> pl.DataFrame:
    """One row a series, origin and step: unique_id, origin (stamp of the last known row), ds, step, y, the model's mean and quantiles,
    and the forecast of each baseline under its name."""
    grid, y, _ = table.aligned()
    series, count, horizon = points[MODEL].shape
    future = sliding_window_view(y, horizon, axis=1)[:, origins]
    whole = np.concatenate([grid, continue_grid(grid[-1], table.frequency, horizon)])
    stamps = np.broadcast_to(sliding_window_view(whole, horizon)[origins], (series, count, horizon))
    began = np.broadcast_to(grid[origins - 1][:, None], (series, count, horizon))
    columns: dict[str, Any] = {
        "unique_id": pl.Series(table.ids, dtype=pl.String).gather(np.repeat(np.arange(series), count * horizon)),
        "origin": began.reshape(-1),
        "ds": stamps.reshape(-1),
        "step": np.tile(np.arange(1, horizon + 1), series * count),
        "y": pl.Series(future.reshape(-1)).fill_nan(None),
        "mean": points[MODEL].reshape(-1),
    }
    for i, q in enumerate(levels):
        columns[f"q{q:g}"] = quantile[..., i].reshape(-1)
    for name, point in points.items():
        if name != MODEL:
            columns[name] = pl.Series(point.reshape(-1)).fill_nan(None)
    return pl.DataFrame(columns)
