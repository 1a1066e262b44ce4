"""Stateless scoring: context in, forecast out, with the registered weights and memories that are fresh for every call.

The same question and the same numbers as `mlflow models serve` of the same model. Requests that wait are worked on together, series of one
length in one pass, so that many clients cost little more than one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch

from connectors.errors import UserError
from pipelines.forecasting.calendar import phases
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.job import forecast_frame
from pipelines.streaming.event_time import Frequency
from titans_core import forecaster_row
from titans_core.state import select, stack

# Rows of one request, and of one pass over many requests.
MOST_ROWS = 100_000
PASS_ROWS = 1 << 17
# Up to so many rows the memories are written row by row in place, beyond it in chunks.
SHORT_ROWS = 512


@dataclass(frozen=True)
class Series:
    """One series of a request on its grid: times (T,) int64, values (T,) float64 with NaN for missing."""

    unique_id: str
    ds: np.ndarray
    y: np.ndarray


@dataclass
class _Waiting:
    series: list[Series]
    steps: int
    levels: tuple[float, ...]
    future: Future[dict[str, list[Any]]]


class Scorer:
    """Start it with a fitted forecaster; `score` from any thread."""

    def __init__(self, model: TitansForecaster, version: str):
        self.model, self.version = model, version
        config = model.forecaster_.config
        self.horizon, self.levels = config.horizon, config.quantiles
        self._frequency = Frequency.parse(model.frequency_)
        self._phase = phases(model.frequency_, config.seasons, model.zone)
        if config.covariates is not None:
            raise UserError("this model wants covariates, which the service does not take: tethys stream --covariates does")
        self._memory: Any = model.memory_
        alone = self._memory is model.forecaster_ and not forecaster_row.unsupported(model.forecaster_)
        self._row = forecaster_row.ForecasterRow(model.forecaster_) if alone else None
        self._queue: deque[_Waiting] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    def score(self, columns: Mapping[str, Sequence[Any]], h: int | None, quantiles: Sequence[float] | None) -> Future[dict[str, list[Any]]]:
        """Columns unique_id, ds, y of a long frame -> columns of the forecast, as the registered model answers.

        Raises UserError for what the caller must put right: columns, times, horizon, quantiles.
        """
        steps = self.horizon if h is None else h
        if not 1 <= steps <= self.horizon:
            raise UserError(f"h must be 1 to {self.horizon}: the model forecasts no further, not {steps}")
        levels = self.levels if quantiles is None else tuple(float(q) for q in quantiles)
        if unknown := [q for q in levels if q not in self.levels]:
            raise UserError(f"the model was calibrated for the quantiles {', '.join(f'{q:g}' for q in self.levels)}, not for {unknown[:5]}")
        future: Future[dict[str, list[Any]]] = Future()
        series = self._series(columns)
        if series is None:
            future.set_result(self._irregular(columns, steps, levels))
            return future
        with self._wake:
            if self._stopping:
                raise UserError("the service is stopping")
            self._queue.append(_Waiting(series, steps, levels, future))
            self._wake.notify()
        return future

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(10.0)

    def _series(self, columns: Mapping[str, Sequence[Any]]) -> list[Series] | None:
        """The series, each by itself and in order; None where a table has to be sorted and put on its grid first."""
        missing = [name for name in ("unique_id", "ds", "y") if name not in columns]
        if missing:
            raise UserError(f"the request has no column {', '.join(missing)}; it has {', '.join(map(str, columns)) or 'none'}")
        ids, ds, y = (columns[name] for name in ("unique_id", "ds", "y"))
        if not len(ids) == len(ds) == len(y):
            raise UserError(f"the columns differ in length: unique_id {len(ids)}, ds {len(ds)}, y {len(y)}")
        if not 1 <= len(ids) <= MOST_ROWS:
            raise UserError(f"the request has {len(ids)} rows: 1 to {MOST_ROWS} can be scored at once")
        times, values = times_of(ds, self._frequency.counts), values_of(y)
        bad = next((name for name in ids if not isinstance(name, str | int) or isinstance(name, bool)), None)
        if bad is not None or any(name == "" for name in ids):
            raise UserError("unique_id must be a text (or a whole number) in every row")
        names = [str(name) for name in ids]
        borders = [0, *(i for i in range(1, len(names)) if names[i] != names[i - 1]), len(names)]
        parts = list(zip(borders[:-1], borders[1:], strict=True))
        if len({names[a] for a, _ in parts}) < len(parts) or self._frequency.months:
            return None
        if any((np.diff(times[a:b]) != self._frequency.length).any() for a, b in parts):
            return None
        found = [Series(names[a], times[a:b], values[a:b]) for a, b in parts]
        if unseen := [one.unique_id for one in found if np.isnan(one.y).all()]:
            raise UserError(f"series {unseen[0]!r} has no observed value: there is nothing to forecast from")
        return found

    def _irregular(self, columns: Mapping[str, Sequence[Any]], steps: int, levels: tuple[float, ...]) -> dict[str, list[Any]]:
        """Through the door that tables take: sorted, checked, missing rows of the grid put in."""
        times = pl.Series("ds", times_of(columns["ds"], self._frequency.counts))
        frame = pl.DataFrame(
            {
                "unique_id": [str(name) for name in columns["unique_id"]],
                "ds": times if self._frequency.counts else times.cast(pl.Datetime("us")),
                "y": pl.Series(values_of(columns["y"])).fill_nan(None),
            }
        )
        out = forecast_frame(self.model, frame, horizon=steps, quantiles=list(levels))
        return {name: out[name].to_physical().to_list() for name in out.columns}

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    for one in self._queue:
                        one.future.set_exception(UserError("the service is stopping"))
                    return
                taken = [self._queue.popleft()]
                rows = sum(len(s.y) for s in taken[0].series)
                while self._queue and rows < PASS_ROWS:
                    taken.append(self._queue.popleft())
                    rows += sum(len(s.y) for s in taken[-1].series)
            alive = [one for one in taken if one.future.set_running_or_notify_cancel()]
            if not alive:
                continue
            try:
                answers = self._pass(alive)
            except Exception as error:  # told to those who asked; the thread lives on for the others
                for one in alive:
                    one.future.set_exception(error)
                continue
            for one, answer in zip(alive, answers, strict=True):
                one.future.set_result(answer)

    def _read(self, y: torch.Tensor, seen: torch.Tensor, phase: torch.Tensor) -> Any:
        """Fresh memories that have read the rows y (n, T)."""
        state = self._memory.initial_state(len(y))
        if self._row is None or y.shape[1] > SHORT_ROWS:
            return self._memory.observe(state, y, seen, phase)
        self._row.observe(state, y, seen, phase)
        return state

    def _pass(self, asked: Sequence[_Waiting]) -> list[dict[str, list[Any]]]:
        every = [series for one in asked for series in one.series]
        lengths = np.array([len(series.y) for series in every])
        parts, order = [], []
        with torch.inference_mode():
            for length in np.unique(lengths):
                which = np.flatnonzero(lengths == length)
                y = np.stack([every[i].y for i in which])
                ds = np.stack([every[i].ds for i in which])
                phase = torch.from_numpy(self._phase(ds.reshape(-1))).unflatten(0, ds.shape)
                seen = ~np.isnan(y)
                parts.append(self._read(torch.from_numpy(np.where(seen, y, 0.0)), torch.from_numpy(seen), phase))
                order.append(which)
            state = select(stack(parts), torch.from_numpy(np.argsort(np.concatenate(order))))
            ahead = self._frequency.after(np.array([series.ds[-1] for series in every]), self.horizon)
            future = torch.from_numpy(self._phase(ahead.reshape(-1))).unflatten(0, ahead.shape)
            mean, quantiles = self._memory.expected(state, future).numpy(), self._memory.forecast(state, future).numpy()
        out, at = [], 0
        for one in asked:
            mine = slice(at, at + len(one.series))
            at += len(one.series)
            answer: dict[str, list[Any]] = {
                "unique_id": [series.unique_id for series in one.series for _ in range(one.steps)],
                "ds": ahead[mine, : one.steps].reshape(-1).tolist(),
                "mean": mean[mine, : one.steps].reshape(-1).tolist(),
            }
            for level in one.levels:
                answer[f"q{level:g}"] = quantiles[mine, : one.steps, self.levels.index(level)].reshape(-1).tolist()
            out.append(answer)
        return out


def times_of(ds: Sequence[Any], counts: bool) -> np.ndarray:
    """(T,) int64: microseconds since 1970 of ISO 8601 text (UTC where no offset stands), or whole numbers that count steps."""
    if counts:
        if not all(isinstance(d, int) and not isinstance(d, bool) and abs(d) < 2**53 for d in ds):
            raise UserError("ds must be whole numbers: the model was trained on rows that count steps")
        return np.array(ds, dtype=np.int64)
    if not all(isinstance(d, str) for d in ds):
        raise UserError("ds must be ISO 8601 texts, such as 2026-01-31T13:00:00Z")
    from connectors.streams.base import parse_time

    try:
        return np.array([parse_time(d) for d in ds], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise UserError(f"ds holds no ISO 8601 time: {str(error)[:80]}") from None


def values_of(y: Sequence[Any]) -> np.ndarray:
    """(T,) float64, NaN for null."""
    from connectors.streams.base import LARGEST_VALUE

    if not all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in y):
        raise UserError("y must be numbers or null")
    try:
        values = np.array(y, dtype=np.float64)
    except OverflowError:
        values = np.array([np.inf])
    if (np.abs(values[~np.isnan(values)]) > LARGEST_VALUE).any():
        raise UserError(f"y holds a value beyond {LARGEST_VALUE:g}")
    return values
