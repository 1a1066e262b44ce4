"""Forecasts that every model has to beat: last value, seasonal naive, ETS, and a closed-form line with and without carried state.

All share one interface, so that a leaderboard is a loop:

    fit(series)                     series: a sequence of 1-D float arrays on a regular grid, NaN where a value is missing
    forecast(y, origins)            y (T,), origins (n,) row counts -> (n, horizon); origin t has seen rows 0..t-1 and nothing later

`RidgeCarried` is an associative memory in its plainest form: key = phase of the season, value = what was seen there, written
with a forgetting rate, and **read with the keys of the future**. A neural memory that does not beat it has learnt nothing.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float32]
ROWS_AT_ONCE = 16384  # windows turned into features at a time: 16,384 x 1,000 float32 features are 64 MB
ETS_ROWS = 1_000  # rows an ETS model is chosen on: it forgets what lies further back, and its search takes 0.5 ms a row


def filled(y: NDArray[Any]) -> Array:
    """The last observed value wherever one is missing (zero before the first); looks only backwards. (T,) -> (T,) float32."""
    y = np.asarray(y, dtype=np.float32)
    seen = np.where(np.isfinite(y), np.arange(len(y)), -1)
    last = np.maximum.accumulate(seen) if len(y) else seen
    return np.where(last >= 0, y[np.maximum(last, 0)], np.float32(0.0)).astype(np.float32)


def profile(y: Array, season: int, rate: float) -> Array:
    """What a memory with one-hot phase keys holds for the phase of row t once row t is written. (T,) -> (T,).

    `W[phase] += max(rate, 1 / visits) * (y - W[phase])`, the delta rule with a plain average at first: 12 per cent better on ETTh2-720
    than to begin with the first value alone. `season=1` is a running mean, which begins with the first value.
    """
    out = np.empty_like(y)
    held = y[:season].copy()
    for visit, start in enumerate(range(0, len(y), season), start=1):
        rows = y[start : start + season]
        if visit > 1:
            theta = rate if season == 1 else max(rate, 1 / visit)
            held[: len(rows)] += np.float32(theta) * (rows - held[: len(rows)])
        out[start : start + season] = held[: len(rows)]
    return out


def windows_before(y: Array, origins: NDArray[np.int64], length: int) -> Array:
    """Rows origin-length .. origin-1 of every origin. (T,), (n,) -> (n, length)."""
    return sliding_window_view(y, length)[origins - length]


def windows_after(y: NDArray[Any], origins: NDArray[np.int64], length: int) -> NDArray[Any]:
    """Rows origin .. origin+length-1 of every origin. (T,), (n,) -> (n, length)."""
    return sliding_window_view(y, length)[origins]


@dataclass
class LastValue:
    """Repeats the last observed value."""

    horizon: int

    def fit(self, series: Sequence[NDArray[Any]]) -> LastValue:
        return self

    def forecast(self, y: NDArray[Any], origins: NDArray[np.int64]) -> Array:
        return np.repeat(filled(y)[origins - 1, None], self.horizon, axis=1)


@dataclass
class SeasonalNaive:
    """Repeats the last whole season (the last value where less than one season has been seen)."""

    horizon: int
    season: int

    def fit(self, series: Sequence[NDArray[Any]]) -> SeasonalNaive:
        return self

    def forecast(self, y: NDArray[Any], origins: NDArray[np.int64]) -> Array:
        rows = origins[:, None] - self.season + np.arange(self.horizon)[None] % self.season
        return filled(y)[np.where(rows >= 0, rows, origins[:, None] - 1)]


@dataclass
class Ets:
    """Exponential smoothing, a model a series, by the AutoETS of statsforecast (Hyndman et al., "A state space framework for automatic
    forecasting using exponential smoothing methods", IJF 2002).

    Error and trend are chosen by AICc, the season (none, added, multiplied) by the error at the horizon on rows before `known`: AICc looks
    one step ahead, and there the last value of an hourly series beats its day. Fitted on the last `ETS_ROWS` rows before `known`; later
    rows move the state and change no parameter. Rows come in their own units, because a season that multiplies needs their sign.
    """

    horizon: int
    season: int
    known: int

    def fit(self, series: Sequence[NDArray[Any]]) -> Ets:
        """Raises ValueError where statsforecast is not installed."""
        if importlib.util.find_spec("statsforecast") is None:
            raise ValueError("it needs statsforecast: pip install 'tethys-streams[ets]'")
        return self

    def forecast(self, y: NDArray[Any], origins: NDArray[np.int64]) -> NDArray[np.float64]:
        """NaN where the series has too few rows for any ETS model."""
        out = np.full((len(origins), self.horizon), np.nan)
        seen = np.flatnonzero(np.isfinite(y[: self.known]))
        if not len(seen):
            return out
        first = max(int(seen[0]), self.known - ETS_ROWS)
        at = np.maximum.accumulate(np.where(np.isfinite(y), np.arange(len(y)), -1))
        rows = np.asarray(y, dtype=np.float64)[at[first:]]  # a missing value is the last one before it
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # of models that are tried and not chosen
            model = self._chosen(rows[: self.known - first])
            if model is not None:
                for i, origin in enumerate(origins):
                    out[i] = model.forward(rows[: origin - first], h=self.horizon)["mean"]
        return out

    def _chosen(self, past: NDArray[np.float64]) -> Any:
        """The best fitted model; None where none can be fitted."""
        from statsforecast.models import AutoETS

        steps = max(1, min(self.horizon, len(past) // 4))
        judged = np.unique(np.linspace(len(past) // 2, len(past) - steps, 8).astype(int))
        found, least = None, np.inf
        for season in "NAM" if self.season > 1 else "N":
            try:
                model = AutoETS(season_length=self.season, model=f"ZZ{season}").fit(past)
            except Exception:  # bare ones, for a series that is too short, or has values that no season can multiply
                continue
            error = np.mean([np.abs(model.forward(past[:o], h=steps)["mean"] - past[o : o + steps]).mean() for o in judged if o])
            if error < least:
                found, least = model, error
        return found


@dataclass
class Ridge:
    """One closed-form linear map from the look-back to the horizon, shared by all series, relative to the last value of the window.

    Minimises `||X w - Y||^2 + penalty ||w||^2` over all windows of all series; X is (window - last, 1), Y is (future - last).
    """

    horizon: int
    look_back: int = 96
    penalty: float = 1e3
    weights: Array | None = field(default=None, repr=False)

    def state_features(self, y: Array) -> list[tuple[Array, int]]:
        """Series whose last few rows are features beside the look-back: (values (T,), how many rows)."""
        return []

    def features(self, y: Array, origins: NDArray[np.int64]) -> tuple[Array, Array]:
        """(n, d) features relative to the last value, and that last value (n, 1)."""
        last = y[origins - 1, None]
        parts = [windows_before(y, origins, self.look_back) - last]
        for values, rows in self.state_features(y):
            width = max(rows, 0)
            padded = np.concatenate(
                [np.full(width, values[0], np.float32), values]
            )  # a young state knows only its first value
            parts.append(windows_before(padded, origins + width, width) - last)
        parts.append(np.ones_like(last))
        return np.concatenate(parts, axis=1), last

    def blocks(self, y: Array, origins: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        for start in range(0, len(origins), ROWS_AT_ONCE):
            yield origins[start : start + ROWS_AT_ONCE]

    def fit(self, series: Sequence[NDArray[Any]]) -> Ridge:
        """Least squares over every window whose future is wholly observed. Raises ValueError when there is none."""
        gram: NDArray[np.float64] | float = 0.0
        cross: NDArray[np.float64] | float = 0.0
        count = 0
        for y in series:
            origins = np.arange(self.look_back, len(y) - self.horizon + 1)
            if not len(origins):
                continue
            past = filled(y)
            origins = origins[np.isfinite(windows_after(np.asarray(y, np.float32), origins, self.horizon)).all(axis=1)]
            for block in self.blocks(past, origins):
                x, last = self.features(past, block)
                gram = gram + (x.T @ x).astype(np.float64)
                cross = cross + (x.T @ (windows_after(past, block, self.horizon) - last)).astype(np.float64)
                count += len(block)
        if not count:
            raise ValueError(
                f"ridge: no series has a whole window of {self.look_back} + {self.horizon} observed rows; shorten look_back or horizon"
            )
        assert isinstance(gram, np.ndarray)
        self.weights = np.linalg.solve(gram + self.penalty * np.eye(len(gram)), cross).astype(np.float32)
        return self

    def forecast(self, y: NDArray[Any], origins: NDArray[np.int64]) -> Array:
        if self.weights is None:
            raise ValueError("ridge: call fit before forecast")
        past = filled(y)
        out = np.empty((len(origins), self.horizon), np.float32)
        done = 0
        for block in self.blocks(past, origins):
            x, last = self.features(past, block)
            out[done : done + len(block)] = x @ self.weights + last
            done += len(block)
        return out


@dataclass
class RidgeCarried(Ridge):
    """`Ridge` plus a small state carried along the stream: running means and running profiles, read at the phases of the horizon.

    `profiles` holds (season, rates) in rows; the state of a season is read at the phases of the next `min(season, horizon)` rows.
    """

    mean_rates: tuple[float, ...] = (0.003, 0.0005)
    profiles: tuple[tuple[int, tuple[float, ...]], ...] = ((24, (0.1, 0.02)), (168, (0.2,)))

    def state_features(self, y: Array) -> list[tuple[Array, int]]:
        out = [(profile(y, 1, rate), 1) for rate in self.mean_rates]
        for season, rates in self.profiles:
            for rate in rates:
                # Row t of `profile` holds phase(t) and is next read at t+season, so the last `season` rows, in order, are the
                # reads at the next `season` phases.
                held = profile(y, season, rate)
                out.append((held, season))
        return out

    def features(self, y: Array, origins: NDArray[np.int64]) -> tuple[Array, Array]:
        x, last = super().features(y, origins)
        keep = np.ones(x.shape[1], bool)
        at = self.look_back + len(self.mean_rates)
        for season, rates in self.profiles:
            for _ in rates:
                keep[at + min(season, self.horizon) : at + season] = False
                at += season
        return x[:, keep], last
