"""Stateless scoring: context in, forecast out, with the registered weights and memories that are fresh for every call.

The same question as to `mlflow models serve` of the same model, and the same numbers to the bit: both end in one call that reads a history and
one that forecasts from it (`titans_core.forecaster_row`), or, where the model has none of these or the table has to be put in order first, in
`forecast_frame`. What is left out here on the way are the tables: columns of the request become the arrays of the model at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from connectors.errors import UserError
from pipelines.forecasting.calendar import phases
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.job import forecast_frame
from pipelines.streaming.event_time import Frequency
from titans_core.state import select, stack

# Rows of one request.
MOST_ROWS = 100_000
# Rows that are scored within about a millisecond, so that a thread of their own would cost more than it frees.
FEW_ROWS = 1024


class Scorer:
    """`score` from any thread: nothing is kept between calls."""

    def __init__(self, model: TitansForecaster, version: str):
        self.model, self.version = model, version
        config = model.forecaster_.config
        self.horizon, self.levels, self.covariates = config.horizon, config.quantiles, model.encoder_.names
        self._frequency = Frequency.parse(model.frequency_)
        self._phase = phases(model.frequency_, config.seasons, model.zone)
        self._in_place = model.in_place
        # A step of business days or months has no length.
        self._regular = not self._frequency.months and not self._frequency.text.endswith("b")

    def quick(self, rows: int) -> bool:
        """Whether so many rows are scored in about the time that handing them to another thread takes."""
        return self._in_place is not None and rows <= FEW_ROWS

    def score(self, columns: Mapping[str, Sequence[Any]], h: int | None, quantiles: Sequence[float] | None) -> dict[str, list[Any]]:
        """Columns unique_id, ds, y of a long frame, and the covariates of the model -> columns of the forecast, as the registered model answers.

        Covariates known ahead stand in rows after a series' last value. Raises UserError for what the caller must put right: columns, times,
        horizon, quantiles.
        """
        steps = self.horizon if h is None else h
        if not 1 <= steps <= self.horizon:
            raise UserError(f"h must be 1 to {self.horizon}: the model forecasts no further, not {steps}")
        levels = self.levels if quantiles is None else tuple(float(q) for q in quantiles)
        if unknown := [q for q in levels if q not in self.levels]:
            raise UserError(f"the model was calibrated for the quantiles {', '.join(f'{q:g}' for q in self.levels)}, not for {unknown[:5]}")
        ids, times, values = self._checked(columns)
        borders = None if self._in_place is None else self._borders(ids, times)
        if borders is None:
            return self._by_table(ids, times, values, columns, steps, levels)
        return self._direct(ids, times, values, borders, steps, levels)

    def _checked(self, columns: Mapping[str, Sequence[Any]]) -> tuple[list[str], np.ndarray, np.ndarray]:
        missing = [name for name in ("unique_id", "ds", "y", *self.covariates) if name not in columns]
        if missing:
            raise UserError(f"the request has no column {', '.join(missing)}; it has {', '.join(map(str, columns)) or 'none'}")
        ids, ds, y = (columns[name] for name in ("unique_id", "ds", "y"))
        sizes = {name: len(columns[name]) for name in ("unique_id", "ds", "y", *self.covariates)}
        if len(set(sizes.values())) > 1:
            raise UserError(f"the columns differ in length: {', '.join(f'{name} {size}' for name, size in sizes.items())}")
        if not 1 <= len(ids) <= MOST_ROWS:
            raise UserError(f"the request has {len(ids)} rows: 1 to {MOST_ROWS} can be scored at once")
        if not set(map(type, ids)) <= {str, int} or "" in ids:
            raise UserError("unique_id must be a text (or a whole number) in every row")
        return list(map(str, ids)), times_of(ds, self._frequency.counts), values_of(y)

    def _borders(self, ids: list[str], times: np.ndarray) -> list[int] | None:
        """Where series begin and the last one ends; None where a table has to be sorted and put on its grid first."""
        if not self._regular:
            return None
        borders = [0, *(i for i, (a, b) in enumerate(zip(ids, ids[1:], strict=False), 1) if a != b), len(ids)]
        if len(borders) - 1 > len(set(ids)):
            return None
        regular = np.diff(times) == self._frequency.length
        regular[np.array(borders[1:-1], np.int64) - 1] = True
        return borders if regular.all() else None

    def _direct(
        self, ids: list[str], times: np.ndarray, values: np.ndarray, borders: list[int], steps: int, levels: tuple[float, ...]
    ) -> dict[str, list[Any]]:
        assert self._in_place is not None
        # Tables are worked on and answered in the order of their series' names.
        order = sorted(range(len(borders) - 1), key=lambda i: ids[borders[i]])
        starts, stops = np.array(borders[:-1])[order], np.array(borders[1:])[order]
        names, ends, lengths = [ids[a] for a in starts], times[stops - 1], stops - starts
        seen, phase = ~np.isnan(values), self._phase(times)
        if len(unseen := np.flatnonzero(~np.logical_or.reduceat(seen, borders[:-1]))):
            raise UserError(f"series {ids[borders[unseen[0]]]!r} has no observed value: there is nothing to forecast from")
        ahead = self._frequency.after(ends, self.horizon)
        future = self._phase(ahead.reshape(-1)).reshape(*ahead.shape, -1)
        with torch.inference_mode():
            parts, place = [], []
            for length in np.unique(lengths):
                which = np.flatnonzero(lengths == length)
                rows = starts[which][:, None] + np.arange(length)
                state = self.model.forecaster_.initial_state(len(which))
                y, observed, times_of_rows = (torch.from_numpy(part[rows]) for part in (values, seen, phase))
                self._in_place.observe(state, y, observed, times_of_rows, torch.arange(len(which)))
                parts.append(state)
                place.append(which)
            if len(parts) > 1:
                state = select(stack(parts), torch.from_numpy(np.argsort(np.concatenate(place))))
            mean, around = (part.numpy() for part in self._in_place.ahead(state, torch.from_numpy(future), torch.arange(len(names))))
        answer: dict[str, list[Any]] = {
            "unique_id": [name for name in names for _ in range(steps)],
            "ds": ahead[:, :steps].reshape(-1).tolist(),
            "mean": mean[:, :steps].reshape(-1).tolist(),
        }
        for level in levels:
            answer[f"q{level:g}"] = around[:, :steps, self.levels.index(level)].reshape(-1).tolist()
        return answer

    def _by_table(
        self, ids: list[str], times: np.ndarray, values: np.ndarray, columns: Mapping[str, Sequence[Any]], steps: int, levels: tuple[float, ...]
    ) -> dict[str, list[Any]]:
        """Through the door that tables take: sorted, checked, missing rows of the grid put in."""
        ds = pl.Series("ds", times)
        frame = pl.DataFrame(
            {
                "unique_id": ids,
                "ds": ds if self._frequency.counts else ds.cast(pl.Datetime("us")),
                "y": pl.Series(values).fill_nan(None),
                **{name: _covariate(name, columns[name]) for name in self.covariates},
            }
        )
        out = forecast_frame(self.model, frame, horizon=steps, quantiles=list(levels))
        if unseen := out.filter(pl.col("mean").is_nan())["unique_id"].to_list():
            raise UserError(f"series {unseen[0]!r} has no observed value: there is nothing to forecast from")
        return {name: out[name].to_physical().to_list() for name in out.columns}


def _covariate(name: str, values: Sequence[Any]) -> pl.Series:
    kinds = set(map(type, values)) - {type(None)}
    try:
        if kinds <= {str}:
            return pl.Series(name, values, dtype=pl.String)
        if kinds <= {int, float, bool}:
            return pl.Series(name, [None if value is None else float(value) for value in values], dtype=pl.Float64)
    except OverflowError:
        pass
    raise UserError(f"{name} must be numbers, or texts, in every row, or null")


def times_of(ds: Sequence[Any], counts: bool) -> np.ndarray:
    """(T,) int64: microseconds since 1970 of ISO 8601 text (UTC where no offset stands), or whole numbers that count steps."""
    if counts:
        if set(map(type, ds)) - {int} or not all(-(2**53) < d < 2**53 for d in ds):
            raise UserError("ds must be whole numbers: the model was trained on rows that count steps")
        return np.array(ds, dtype=np.int64)
    if set(map(type, ds)) - {str}:
        raise UserError("ds must be ISO 8601 texts, such as 2026-01-31T13:00:00Z")
    from connectors.streams.base import parse_time

    try:
        return np.array([parse_time(d) for d in ds], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise UserError(f"ds holds no ISO 8601 time: {str(error)[:80]}") from None


def values_of(y: Sequence[Any]) -> np.ndarray:
    """(T,) float64, NaN for null."""
    from connectors.streams.base import LARGEST_VALUE

    if set(map(type, y)) - {float, int, type(None)}:
        raise UserError("y must be numbers or null")
    try:
        values = np.array(y, dtype=np.float64)
    except OverflowError:
        values = np.array([np.inf])
    if (np.abs(values) > LARGEST_VALUE).any():
        raise UserError(f"y holds a value beyond {LARGEST_VALUE:g}")
    return values
