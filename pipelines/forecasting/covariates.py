"""Covariates as the numbers that a forecaster reads behind the slots of a row.

Four kinds: **future** ones are known ahead (prices, promotions, holidays), **historic** ones only once they happened (a measured
temperature), **static** ones belong to the series (its region), and those of the **calendar** are worked out from the stamp on the wall clock
of the zone. Numbers are scaled by mean and deviation of the rows of training, and a missing one is 0, the mean. A category has a level for
every text that training saw and one for a missing value, each less its share, so that a level that training never saw, which is all zeros,
does what the average row does. Whoever encodes later rows uses what training knew: nothing after its last row is looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.calendar import wall_clock
from pipelines.forecasting.validation import Vocabulary, check_future
from pipelines.windows import Panel, continue_grid, stamps
from titans_core.forecaster import CovariateConfig

MOST_LEVELS = 32
"""A category keeps so many levels, the most frequent; the others are unknown ones. Each is a column for every step of the horizon."""
CALENDAR = ("hour", "weekday", "monthday", "month", "year")
Calendar = Literal["hour", "weekday", "monthday", "month", "year"]
_SIZES = {"hour": 24, "weekday": 7, "monthday": 31, "month": 12}
_YEAR_DAYS = 365.2425


@dataclass(frozen=True)
class Column:
    """One covariate. mean, scale: of a number; levels, shares: of a category (`shares` has one more, of missing values, in front)."""

    name: str
    mean: float = 0.0
    scale: float = 1.0
    levels: tuple[str, ...] | None = None
    shares: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: pl.Series) -> Column:
        """What training rows show. Raises UserError for a column that is neither a number nor a category, and for infinite numbers."""
        kind = values.dtype
        if kind.is_numeric() or kind == pl.Boolean:
            numbers = _numbers(values, values.name)
            seen = numbers[np.isfinite(numbers)]
            scale = float(seen.std()) if len(seen) else 0.0
            return cls(values.name, float(seen.mean()) if len(seen) else 0.0, scale if scale > 0 else 1.0)
        if kind not in (pl.String, pl.Categorical, pl.Enum, pl.Null):
            raise UserError(f"covariate {values.name!r} is {kind}, neither a number nor a text: leave it out, or make it one of them")
        texts = values.cast(pl.String)
        most = texts.drop_nulls().value_counts().sort(["count", values.name], descending=[True, False]).head(MOST_LEVELS)
        words = Vocabulary.of(most.get_column(values.name).to_list())
        codes, _ = words.encode(texts)
        shares = np.bincount(codes, minlength=len(words))[1:] / max(len(codes), 1)
        return cls(values.name, levels=words.levels, shares=tuple(shares.tolist()))

    @property
    def width(self) -> int:
        return 1 if self.levels is None else len(self.levels) + 1

    def encode(self, values: pl.Series) -> NDArray[np.float32]:
        """(n, width) numbers. Raises UserError where a number of training is now a text."""
        if self.levels is None:
            numbers = (_numbers(values, self.name) - self.mean) / self.scale
            return np.nan_to_num(numbers, nan=0.0).astype(np.float32)[:, None]
        codes, _ = Vocabulary(self.levels).encode(values)
        known = np.zeros((len(codes), self.width + 1), dtype=np.float32)
        known[np.arange(len(codes)), codes] = 1.0
        return np.where(codes[:, None] > 0, known[:, 1:] - np.asarray(self.shares, dtype=np.float32), np.float32(0.0))

    def unknown(self, values: pl.Series) -> tuple[str, ...]:
        """Levels that training did not see."""
        return () if self.levels is None else Vocabulary(self.levels).encode(values)[1]


@dataclass(frozen=True)
class Encoder:
    """What training knew of every covariate, and how a row of them becomes numbers (K), in the order future, calendar, historic, static."""

    frequency: str
    zone: str | None
    calendar: tuple[str, ...]
    future: tuple[Column, ...]
    historic: tuple[Column, ...]
    static: tuple[Column, ...]

    @classmethod
    def fit(
        cls, table: Panel, until: Any, *, future: Sequence[str], historic: Sequence[str], static: Sequence[str], calendar: Sequence[str],
        zone: str | None,
    ) -> Encoder:  # fmt: skip
        """From the rows of a panel up to the stamp `until`. Raises UserError for names that are unknown or said twice."""
        names = [*future, *historic, *static]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise UserError(f"covariate {', '.join(map(repr, twice))} is named twice: it is either future, historic or static")
        if odd := [n for n in calendar if n not in CALENDAR]:
            raise UserError(f"unknown calendar feature {', '.join(map(repr, odd))}: there are {', '.join(CALENDAR)}")
        if calendar and table.ds.dtype.kind != "M":
            raise UserError("calendar features need dates in the time column, and this table counts steps")
        seen = table.ds <= until
        columns = {}
        for name in names:
            values = _given(table.covariates, name, "the table")
            if name in static:
                values = _constant(table, name)
            else:
                # Rows that the grid adds for gaps hold no covariate: they are no missing category.
                values = values.filter(pl.Series(seen & (table.observed | values.is_not_null().to_numpy())))
            columns[name] = Column.of(values)
        pick = lambda chosen: tuple(columns[n] for n in chosen)  # noqa: E731
        return cls(table.frequency, zone, tuple(calendar), pick(future), pick(historic), pick(static))

    @property
    def names(self) -> tuple[str, ...]:
        """Columns that a table must have."""
        return tuple(c.name for c in (*self.future, *self.historic, *self.static))

    @property
    def ahead(self) -> tuple[str, ...]:
        """Columns that must be known at the rows of the horizon."""
        return tuple(c.name for c in self.future)

    def config(self) -> CovariateConfig | None:
        ahead = sum(c.width for c in self.future) + sum(_SIZES.get(name, 4) for name in self.calendar)
        made = CovariateConfig(future=ahead, historic=sum(c.width for c in self.historic), static=sum(c.width for c in self.static))
        return made if made.total else None

    def of_panel(self, table: Panel) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(R, K) of all rows of a panel, and the static part of each series (S, static)."""
        given = table.covariates
        static = np.concatenate(
            [c.encode(_constant(table, c.name)) for c in self.static] or [np.empty((len(table), 0), np.float32)], axis=1
        )
        parts = [self._known(given, table.ds), *(c.encode(_given(given, c.name, "the table")) for c in self.historic)]
        return np.concatenate([*parts, np.repeat(static, table.lengths, axis=0)], axis=1), static

    def of_future(
        self, ids: Sequence[str], last: NDArray[Any], static: NDArray[np.float32], future: pl.DataFrame | None, horizon: int
    ) -> NDArray[np.float32]:
        """(n, horizon, K) of the rows after the last one of each series; historic covariates are 0 there.

        future: `unique_id, ds` and the covariates known ahead, in any order. Raises UserError that names the rows and values that lack.
        """
        ends, which = np.unique(last, return_inverse=True)
        ahead = np.stack([continue_grid(d, self.frequency, horizon) for d in ends])[which]
        rows = None
        if self.future:
            if future is None:
                raise UserError(
                    f"the model needs {', '.join(map(repr, self.ahead))} at the {horizon} rows of the horizon: give a table of the future "
                    "(unique_id, ds, covariates)"
                )
            known = pl.DataFrame({"unique_id": list(ids), "ds": last})
            rows, report = check_future(known, future, self.ahead, frequency=self.frequency, horizon=horizon)
            report.require()
            order = pl.DataFrame({"unique_id": np.repeat(np.array(ids, dtype=object), horizon).tolist(), "ds": ahead.reshape(-1)})
            rows = order.join(rows.with_columns(pl.col("ds").cast(order.schema["ds"])), on=["unique_id", "ds"], how="left", maintain_order="left")
        given = self._known(rows, ahead.reshape(-1)).reshape(len(ahead), horizon, -1)
        historic = np.zeros((len(ahead), horizon, sum(c.width for c in self.historic)), dtype=np.float32)
        return np.concatenate([given, historic, np.repeat(static[:, None], horizon, axis=1)], axis=2)

    def unknown(self, table: pl.DataFrame | None) -> dict[str, tuple[str, ...]]:
        """Levels of each category that training did not see."""
        if table is None:
            return {}
        told = {c.name: c.unknown(table.get_column(c.name)) for c in (*self.future, *self.historic, *self.static) if c.name in table.columns}
        return {name: levels for name, levels in told.items() if levels}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Encoder:
        """Raises KeyError or TypeError for data of another shape."""

        def column(c: dict[str, Any]) -> Column:
            return Column(**{**c, "levels": None if c["levels"] is None else tuple(c["levels"]), "shares": tuple(c["shares"])})

        kinds = {kind: tuple(column(c) for c in data[kind]) for kind in ("future", "historic", "static")}
        return cls(data["frequency"], data["zone"], tuple(data["calendar"]), **kinds)

    def _known(self, given: pl.DataFrame | None, ds: NDArray[Any]) -> NDArray[np.float32]:
        """(n, known ahead): the future covariates, and the calendar at the stamps."""
        parts = [c.encode(_given(given, c.name, "the table")) for c in self.future]
        if self.calendar:
            parts.append(self.of_calendar(ds))
        return np.concatenate(parts, axis=1) if parts else np.empty((len(ds), 0), np.float32)

    def of_calendar(self, ds: NDArray[Any]) -> NDArray[np.float32]:
        """(n, calendar) of stamps as `datetime64` or int64 microseconds, on the wall clock of the zone."""
        given = np.asarray(ds)
        given = given if given.dtype.kind == "M" else given.astype(np.int64).view("datetime64[us]")
        local = pl.Series(wall_clock(given, self.frequency, self.zone).astype("datetime64[us]"))
        parts = []
        for name in self.calendar:
            if name == "year":
                share = (local.dt.ordinal_day().to_numpy() - 1 + local.dt.hour().to_numpy() / 24) / _YEAR_DAYS * 2 * np.pi
                parts.append(np.stack([f(k * share) for k in (1, 2) for f in (np.sin, np.cos)], axis=1))
                continue
            size = _SIZES[name]
            number = {
                "hour": local.dt.hour(), "weekday": local.dt.weekday() - 1, "monthday": local.dt.day() - 1, "month": local.dt.month() - 1,
            }[name]  # fmt: skip
            parts.append((number.to_numpy()[:, None] == np.arange(size)) - 1.0 / size)
        return np.concatenate(parts, axis=1).astype(np.float32)


class CovariateTable:
    """Covariates by name and time, for streams: those of a record's row and of the rows that its forecast is for.

    `unique_id, ds` and the encoder's columns, a row for every step; read from `address`, and again when that file has changed. A row that
    lacks a covariate known ahead is taken as not there: what it would have done is not known (NaN).
    """

    RELOAD_SECONDS = 5.0

    def __init__(
        self, encoder: Encoder, address: str | None, *, id_column: str | None = "unique_id", time_column: str = "ds", target_column: str = "y",
        csv: tables.CsvForm | None = None,
    ) -> None:  # fmt: skip
        if address is None and encoder.names:
            raise UserError(f"the model was trained with {', '.join(map(repr, encoder.names))}: give a table of these covariates")
        self._encoder, self._address, self._csv = encoder, address, csv
        self._columns = (id_column, time_column, target_column)
        self._seen: tuple[float, int] | None = None
        self._looked = -math.inf
        self._code: dict[str, int] = {}
        self._offsets = np.zeros(1, dtype=np.int64)
        self._ds = np.empty(0, dtype=np.int64)
        config = encoder.config()
        assert config is not None
        self._width = config.total
        self._calendar = sum(_SIZES.get(name, 4) for name in encoder.calendar)
        self._ahead = config.future - self._calendar
        self._values = np.empty((0, self._width - self._calendar), dtype=np.float32)
        self._refresh()

    def at(self, names: Sequence[str], ds: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n, m, K) of n streams at the times (n, m), int64; NaN where the table has no row."""
        self._refresh()
        code = np.array([self._code.get(name, -1) for name in names], dtype=np.int64)[:, None]
        low = np.broadcast_to(np.where(code >= 0, self._offsets[code], 0), ds.shape).copy()
        end = np.broadcast_to(np.where(code >= 0, self._offsets[code + 1], 0), ds.shape)
        high = end.copy()
        while (open_ := low < high).any():  # binary search, each in the rows of its own stream
            middle = (low + high) // 2
            less = open_ & (self._ds[np.minimum(middle, len(self._ds) - 1)] < ds)
            low, high = np.where(less, middle + 1, low), np.where(open_ & ~less, middle, high)
        found = np.full((*ds.shape, self._values.shape[1]), np.nan, dtype=np.float32)
        there = low < end
        there[there] = self._ds[low[there]] == ds[there]
        found[there] = self._values[low[there]]
        if not self._calendar:
            return found
        times, which = np.unique(ds, return_inverse=True)
        calendar = self._encoder.of_calendar(times)[which.reshape(ds.shape)]
        return np.concatenate([found[..., : self._ahead], calendar, found[..., self._ahead :]], axis=-1)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._address is None or not self._encoder.names or now - self._looked < self.RELOAD_SECONDS:
            return
        self._looked = now
        path = Path(self._address)
        stamp = (path.stat().st_mtime, path.stat().st_size) if path.is_file() else None
        if self._seen is not None and stamp in (self._seen, None):
            return
        self._seen = stamp or (0.0, 0)
        self._load(tables.read(self._address, csv=self._csv))

    def _load(self, frame: pl.DataFrame) -> None:
        encoder, (id_column, time_column, target_column) = self._encoder, self._columns
        source = str(self._address)
        absent = [c for c in (id_column, time_column, *encoder.names) if c is not None and c not in frame.columns]
        if absent:
            raise UserError(f"{source} has no column {', '.join(map(repr, absent))}; it has {', '.join(map(repr, frame.columns[:20]))}")
        frame = frame.drop_nulls(list(encoder.ahead)) if encoder.ahead else frame
        ids = pl.lit(target_column) if id_column is None else pl.col(id_column).cast(pl.String)
        frame = frame.with_columns(ids.alias("_id"), stamps(frame.get_column(time_column), source).cast(pl.Int64).alias("_ds"))
        frame = frame.unique(["_id", "_ds"], keep="last", maintain_order=True).sort("_id", "_ds")
        parts = [c.encode(frame.get_column(c.name)) for c in (*encoder.future, *encoder.historic, *encoder.static)]
        runs = frame.select(pl.col("_id").rle().struct.unnest())
        self._code = {name: i for i, name in enumerate(runs.get_column("value"))}
        self._offsets = np.concatenate([[0], np.cumsum(runs.get_column("len").to_numpy().astype(np.int64))])
        self._ds, self._values = frame.get_column("_ds").to_numpy(), np.concatenate(parts, axis=1)


def split_future(frame: pl.DataFrame, id_column: str | None, time_column: str, target_column: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """A table that holds its own future: the rows up to each series' last value, and the rows after it, whose target is empty."""
    value = pl.col(target_column)
    if frame.schema[target_column].is_float():
        value = value.fill_nan(None)
    last = pl.col(time_column).filter(value.is_not_null()).max()
    last = last if id_column is None else last.over(id_column)
    past = (pl.col(time_column) <= last).fill_null(True)
    return frame.filter(past), frame.filter(~past)


def _given(table: pl.DataFrame | None, name: str, source: str) -> pl.Series:
    if table is None or name not in table.columns:
        raise UserError(f"{source} has no covariate {name!r}, which the model was trained with: add the column")
    return table.get_column(name)


def _constant(table: Panel, name: str) -> pl.Series:
    """(S,) the one value of each series in a static column; null where it has none. Raises UserError where there are several."""
    given = _given(table.covariates, name, "the table").rename("value")
    series = np.repeat(np.arange(len(table)), table.lengths)
    facts = pl.DataFrame({"series": series, "value": given}).group_by("series", maintain_order=True).agg(
        pl.col("value").drop_nulls().first(), pl.col("value").drop_nulls().n_unique().alias("kinds")
    )  # fmt: skip
    several = facts.filter(pl.col("kinds") > 1)
    if several.height:
        named = ", ".join(repr(table.ids[i]) for i in several.get_column("series").head(5))
        raise UserError(f"static covariate {name!r} changes within {several.height} series ({named}): it is a historic or a future one")
    return facts.get_column("value").rename(name)


def _numbers(values: pl.Series, name: str) -> NDArray[np.float64]:
    """(n,) float64, NaN where missing."""
    try:
        numbers = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
    except pl.exceptions.PolarsError:
        bad = values.filter(values.cast(pl.Float64, strict=False).is_null() & values.is_not_null())
        raise UserError(f"covariate {name!r} was a number in training and now holds {bad[0]!r}: put numbers there") from None
    if np.isinf(numbers).any():
        raise UserError(f"covariate {name!r} holds {int(np.isinf(numbers).sum())} infinite values: leave them empty")
    return numbers
