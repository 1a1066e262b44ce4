"""Rolling origins: every model forecasts the same windows from the same past, and nothing later than an origin is ever seen before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from connectors.errors import UserError
from pipelines.windows import Panel, continue_grid

Floats = NDArray[np.float64]


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
            f"the series span {total}: "
            + (f"ask for at most {most} origins" if most > 0 else "shorten the look-back or the horizon")
        )
    return origins.astype(np.int64)


def truth(table: Panel, origins: NDArray[np.int64], horizon: int, season: int, known: int) -> Truth:
    """The targets, and the mean absolute seasonal difference of the first `known` rows, which MASE divides by."""
    _, y, _ = table.aligned()
    future = sliding_window_view(y, horizon, axis=1)[:, origins]
    past = y[:, :known]
    lag = season if known > 2 * season else 1
    with np.errstate(invalid="ignore"):
        difference = np.abs(past[:, lag:] - past[:, :-lag])
        counts = np.isfinite(difference).sum(axis=1)
        scale = np.where(counts > 0, np.nansum(difference, axis=1) / np.maximum(counts, 1), np.nan)
    return Truth(future, np.where(scale > 0, scale, np.nan))


def accuracy(point: Floats, real: Truth) -> dict[str, float]:
    """mse and mae over all observed cells; mase, the mean over series of their mean absolute error over their scale."""
    error = np.abs(point - real.y)
    seen = np.isfinite(error)
    if not seen.any():
        return {"mase": float("nan"), "mae": float("nan"), "mse": float("nan")}
    each = np.where(seen, error, 0.0).sum(axis=(1, 2)) / np.maximum(seen.sum(axis=(1, 2)), 1)
    usable = seen.any(axis=(1, 2)) & np.isfinite(real.scale)
    return {
        "mase": float((each[usable] / real.scale[usable]).mean()) if usable.any() else float("nan"),
        "mae": float(error[seen].mean()),
        "mse": float((error[seen] ** 2).mean()),
    }


def calibration(quantile: Floats, levels: Sequence[float], real: Truth) -> dict[str, float]:
    """coverage of the central intervals (`coverage80` from q0.1 and q0.9), and wql: twice the mean pinball loss over the mean |y|."""
    seen = np.isfinite(real.y) & np.isfinite(quantile).all(axis=3)
    out: dict[str, float] = {}
    if not seen.any():
        return out
    y = real.y[seen]
    for i, low in enumerate(levels):
        high = round(1.0 - low, 6)
        match = [j for j, q in enumerate(levels) if abs(q - high) < 1e-6]
        if low < 0.5 and match:
            inside = (y >= quantile[..., i][seen]) & (y <= quantile[..., match[0]][seen])
            out[f"coverage{100 * (high - low):g}"] = float(inside.mean())
    total = 0.0
    for i, level in enumerate(levels):
        gap = y - quantile[..., i][seen]
        total += 2 * float(np.maximum(level * gap, (level - 1) * gap).mean())
    out["wql"] = total / len(levels) / max(float(np.abs(y).mean()), 1e-12)
    return out


def leaderboard(
    points: Mapping[str, Floats], real: Truth, extra: Mapping[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """A row a model, best MASE first."""
    rows: list[dict[str, Any]] = [
        {"model": name, **accuracy(p, real), **extra.get(name, {})} for name, p in points.items()
    ]
    return sorted(rows, key=lambda row: (np.isnan(row["mase"]), row["mase"], row["mae"]))


def tidy(
    table: Panel, origins: NDArray[np.int64], point: Floats, quantile: Floats, levels: Sequence[float]
) -> pl.DataFrame:
    """One row a series, origin and step: unique_id, origin (stamp of the last known row), ds, step, y, mean, and the quantiles."""
    grid, y, _ = table.aligned()
    series, count, horizon = point.shape
    future = sliding_window_view(y, horizon, axis=1)[:, origins]
    whole = np.concatenate([grid, continue_grid(grid[-1], table.frequency, horizon)])
    stamps = np.broadcast_to(sliding_window_view(whole, horizon)[origins], (series, count, horizon))
    began = np.broadcast_to(grid[origins - 1][:, None], (series, count, horizon))
    names = np.repeat(np.array(table.ids, dtype=object), count * horizon).tolist()
    columns: dict[str, Any] = {
        "unique_id": names,
        "origin": began.reshape(-1),
        "ds": stamps.reshape(-1),
        "step": np.tile(np.arange(1, horizon + 1), series * count),
        "y": pl.Series(future.reshape(-1)).fill_nan(None),
        "mean": point.reshape(-1),
    }
    for i, q in enumerate(levels):
        columns[f"q{q:g}"] = quantile[..., i].reshape(-1)
    return pl.DataFrame(columns)
