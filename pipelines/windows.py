"""Tables become series, and series become windows.

A long frame has a row for each series and time stamp: the id of the series (`unique_id`), the stamp (`ds`) and the
target (`y`). `panel` puts every series on the regular grid of one frequency, with a mask that tells observed rows
from missing ones; `windows` cuts look-back and horizon pairs from a panel. Windows are views of the panel: nothing is
copied until a batch is taken.

`read_panel` does the reading, checking and sorting of many files in this process or on Ray, one task a file. The grid
and the windows are made in one place from the same sorted rows, so the two executors give equal numbers in equal
order: by id, then by time.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from connectors.errors import UserError

Executor = Literal["local", "ray"]

_UNITS_US = {
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_UNITS_MONTHS = {"mo": 1, "q": 3, "y": 12}
# Regular enough to name the frequency, few enough to cost nothing.
LARGEST = 1e30
"""Targets further from zero do not fit the float32 of the model (3.4e38) with room for their forecasts."""
_ROWS_TO_INFER_FROM = 10_000


@dataclass(frozen=True)
class Panel:
    """Series on one regular grid, one after another in flat arrays: series `i` is rows `offsets[i]:offsets[i + 1]`.

    ids: S names, sorted.
    ds: (R,) stamps: `datetime64[us]` in UTC without a zone, or `int64` where the table counts steps.
    y: (R,) float64 as in the table; NaN where nothing was observed (a gap in the stamps, or a null or NaN in the
        table).
    observed: (R,) bool.
    offsets: (S + 1,) int64.
    covariates: the other columns that were asked for, a row each (R of them), null where the table has no row; None: none.
    frequency: the step of the grid: a number and a unit out of ms, s, m, h, d, b (business days, Monday to Friday), w,
        mo, q, y, or i for whole numbers ("1h", "15m", "1i").
    """

    ids: tuple[str, ...]
    ds: NDArray[np.datetime64] | NDArray[np.int64]
    y: NDArray[np.float64]
    observed: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    frequency: str
    covariates: pl.DataFrame | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(S,) rows of each series, from its first observed stamp to its last."""
        return np.diff(self.offsets)

    def rows(self, series: int) -> slice:
        """Where a series lies in the flat arrays."""
        return slice(int(self.offsets[series]), int(self.offsets[series + 1]))

    def future(self, series: int, steps: int) -> NDArray[np.datetime64] | NDArray[np.int64]:
        """(steps,) stamps that follow the last one of a series."""
        return continue_grid(self.ds[self.rows(series)][-1], self.frequency, steps)

    def aligned(self) -> tuple[NDArray[Any], NDArray[np.float64], NDArray[np.bool_]]:
        """The series side by side on the grid from the earliest stamp to the latest.

        Returns ds (T,), y (S, T) and observed (S, T); rows before a series begins and after it ends are NaN and not
        observed. Raises UserError where two series share the frequency but not the grid (one on the hour, one on the
        half hour).
        """
        grid, where = self._common()
        y = np.full((len(self), len(grid)), np.nan)
        observed = np.zeros((len(self), len(grid)), dtype=bool)
        for i, at in enumerate(where):
            rows = self.rows(i)
            at = int(at)
            y[i, at : at + rows.stop - rows.start] = self.y[rows]
            observed[i, at : at + rows.stop - rows.start] = self.observed[rows]
        return grid, y, observed

    def on_common_grid(self, values: NDArray[np.float32], which: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows (R, K) of the flat arrays as `aligned` lays them, for the series `which`: (n, T, K), zero where a series has no row."""
        grid, where = self._common()
        out = np.zeros((len(which), len(grid), values.shape[1]), dtype=np.float32)
        for place, i in enumerate(which):
            rows, at = self.rows(int(i)), int(where[i])
            out[place, at : at + rows.stop - rows.start] = values[rows]
        return out

    def _common(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The grid from the earliest stamp to the latest, and where on it each series begins."""
        first, last = self.ds[self.offsets[:-1]], self.ds[self.offsets[1:] - 1]
        start = int(np.argmin(first))
        steps = int(position(np.array([last.max()]), first[start], self.frequency)[0][0]) + 1
        grid = np.concatenate([first[start : start + 1], continue_grid(first[start], self.frequency, steps - 1)])
        where, fits = position(first, first[start], self.frequency)
        if not fits.all():
            odd = int(np.flatnonzero(~fits)[0])
            raise UserError(
                f"series {self.ids[odd]!r} begins at {first[odd]}, off the {self.frequency} grid of series "
                f"{self.ids[start]!r} "
                f"({int((~fits).sum())} of {len(self)} series): run these series in a job of their own"
            )
        return grid, where

    def take(self, keep: Sequence[NDArray[np.int64]], ids: Sequence[str]) -> Panel:
        """The rows `keep` of each of the series `ids` as a panel; each must be a run of rows of one series."""
        index = np.concatenate([*keep, np.empty(0, dtype=np.int64)])
        offsets = np.concatenate([[0], np.cumsum([len(k) for k in keep])]).astype(np.int64)
        covariates = None if self.covariates is None else self.covariates[index]
        return Panel(tuple(ids), self.ds[index], self.y[index], self.observed[index], offsets, self.frequency, covariates)

    def frame(self) -> pl.DataFrame:
        """The long frame again (`unique_id, ds, y`, covariates), with a null `y` where nothing was observed."""
        ids = pl.Series("unique_id", np.repeat(np.arange(len(self)), self.lengths)).replace_strict(
            np.arange(len(self)), list(self.ids), return_dtype=pl.String
        )
        long = pl.DataFrame({"unique_id": ids, "ds": self.ds, "y": pl.Series(self.y).fill_nan(None)})
        return long if self.covariates is None else long.hstack(self.covariates)


@dataclass(frozen=True)
class Windows:
    """Pairs of look-back and horizon, cut from a panel with a stride; ordered by series, then by time.

    A window never crosses from one series into the next. It may contain missing rows: `observed_x` and
    `observed_target` tell.
    """

    panel: Panel
    look_back: int
    horizon: int
    start: NDArray[np.int64]
    """(N,) row of the panel at which each window begins."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def series(self) -> NDArray[np.int64]:
        """(N,) index into `panel.ids`."""
        return np.searchsorted(self.panel.offsets, self.start, side="right") - 1

    @property
    def origin(self) -> NDArray[np.datetime64] | NDArray[np.int64]:
        """(N,) stamp of the last look-back row: what was known when the forecast is made."""
        return self.panel.ds[self.start + self.look_back - 1]

    @property
    def x(self) -> NDArray[np.float64]:
        """(N, look_back) read-only; a view where the windows lie at one stride (a single series), else a copy."""
        return self._take(self.panel.y, slice(None))[:, : self.look_back]

    @property
    def target(self) -> NDArray[np.float64]:
        """(N, horizon), as `x`."""
        return self._take(self.panel.y, slice(None))[:, self.look_back :]

    @property
    def observed_x(self) -> NDArray[np.bool_]:
        """(N, look_back), as `x`."""
        return self._take(self.panel.observed, slice(None))[:, : self.look_back]

    @property
    def observed_target(self) -> NDArray[np.bool_]:
        """(N, horizon), as `x`."""
        return self._take(self.panel.observed, slice(None))[:, self.look_back :]

    def take(self, which: NDArray[np.int64] | slice) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """A batch: x (n, look_back) and target (n, horizon) of the windows `which`; neighbours are not copied."""
        both = self._take(self.panel.y, which)
        return both[:, : self.look_back], both[:, self.look_back :]

    def batches(self, size: int) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """All windows in order, `size` at a time."""
        for first in range(0, len(self), size):
            yield self.take(slice(first, first + size))

    def _take(self, flat: NDArray[Any], which: NDArray[np.int64] | slice) -> NDArray[Any]:
        span = sliding_window_view(flat, self.look_back + self.horizon)
        start = self.start[which]
        if len(start) == 0:
            return np.empty((0, span.shape[1]), dtype=flat.dtype)
        # Windows at one stride are a slice of the sliding view; others have to be gathered.
        step = int(start[1] - start[0]) if len(start) > 1 else 1
        if step > 0 and start[-1] - start[0] == step * (len(start) - 1) and (np.diff(start) == step).all():
            return span[start[0] : start[-1] + 1 : step]
        return span[start]


def panel(
    frame: pl.DataFrame,
    *,
    frequency: str | None = None,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    covariates: Sequence[str] = (),
    source: str = "the table",
) -> Panel:
    """A long frame on the regular grid of `frequency` (inferred where None: the most common step of the longest
    series).

    Rows may come in any order. Stamps are dates, datetimes (with a zone: taken to UTC), ISO strings, or whole numbers
    that count steps. `id_column=None` takes the whole table as one series named by its target column. A null or NaN
    target is a missing row. `covariates` are columns to keep. Raises UserError, naming series, stamp, count and remedy: no rows, a missing column, a
    null id or stamp, a target that is infinite or beyond LARGEST, two rows for one stamp, a frequency that does not fit. `source` is what
    messages call the table.
    """
    rows = _sorted_rows(frame, id_column, time_column, target_column, source, covariates)
    return _grid(_merge([rows]), frequency, source)


def read_panel(
    uris: str | Sequence[str],
    *,
    frequency: str | None = None,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    executor: Executor = "local",
) -> Panel:
    """The panel of many tables (files, partitions), each read once, in this process or in a Ray task of its own.

    A single address stands for its `partitions`. A series may lie in several tables. Both executors give equal numbers;
    "ray" uses the cluster that this process is in, else starts a local one. Raises UserError as `panel` does.
    """
    uris = partitions(uris) if isinstance(uris, str) else list(uris)
    if not uris:
        raise UserError("no table to read: name at least one file")
    columns = (id_column, time_column, target_column)
    if executor == "local":
        parts = [_read_rows(uri, *columns) for uri in uris]
    elif executor == "ray":
        parts = _read_on_ray(uris, columns)
    else:
        raise UserError(f"unknown executor {executor!r}: use 'local' or 'ray'")
    source = uris[0] if len(uris) == 1 else f"the {len(uris)} tables from {uris[0]} to {uris[-1]}"
    return _grid(_merge(parts), frequency, source)


def partitions(uri: str) -> list[str]:
    """The tables that one address stands for: the Parquet files of a folder, the files of a glob, or the address
    itself.

    Folders whose names carry values (`unique_id=a/`) and Delta tables are read as one table, for a file alone lacks a
    part of its row.
    """
    path = Path(uri)
    if glob.has_magic(uri) and not path.exists() and "://" not in uri:
        return sorted(glob.glob(uri, recursive=True)) or [uri]
    if path.is_dir() and not (path / "_delta_log").is_dir():
        files = sorted(str(p) for p in path.rglob("*.parquet"))
        if files and not any("=" in file.removeprefix(uri) for file in files):
            return files
    return [uri]


def windows(
    panel: Panel, look_back: int, horizon: int, *, stride: int = 1, max_gap: int | None = None
) -> Windows:
    """Every window of `look_back` rows and the `horizon` rows after them; within each series one every `stride` rows,
    from its first. With `max_gap`, windows that touch a longer run of rows without an observation are left out.

    Raises UserError where no series is long enough for one window.
    """
    for name, value in (("look-back", look_back), ("horizon", horizon), ("stride", stride)):
        if value < 1:
            raise UserError(f"{name} is {value}: it must be at least 1")
    counts = np.maximum(0, (panel.lengths - look_back - horizon) // stride + 1)
    total = int(counts.sum())
    if total == 0:
        longest = int(np.argmax(panel.lengths))
        raise UserError(
            f"no series is long enough: a window takes look-back {look_back} + horizon {horizon} = "
            f"{look_back + horizon} rows, the longest "
            f"series, {panel.ids[longest]!r}, has {int(panel.lengths[longest])}: shorten the look-back or the horizon"
        )
    nth = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(panel.offsets[:-1], counts) + nth * stride
    if max_gap is not None:
        inside = np.concatenate([[0], np.cumsum(_in_long_run(~panel.observed, panel.offsets, max_gap))])
        start = start[inside[start + look_back + horizon] == inside[start]]
    return Windows(panel, look_back, horizon, start)


def _in_long_run(flags: NDArray[np.bool_], offsets: NDArray[np.int64], longest: int) -> NDArray[np.bool_]:
    """(R,) whether a row lies in a run of more than `longest` set flags within one series."""
    breaks = np.zeros(len(flags) + 1, dtype=bool)
    breaks[1:-1] = flags[1:] != flags[:-1]
    breaks[offsets] = True
    edges = np.flatnonzero(breaks)
    length = np.diff(edges)
    return np.repeat(flags[edges[:-1]] & (length > longest), length)


def ray_cluster(workers: int | None = None) -> None:
    """Starts a local Ray cluster of `workers` cores (all where None) unless this process is in one already.

    Local means local: on the loopback address, without dashboard, usage reports or a token file in the home folder. A
    cluster named by RAY_ADDRESS is joined as it is, with its own authentication.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address is None:  # Ray reads these when it is imported
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # Without it Ray replaces the loopback address by the one of the network card.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    if ray.is_initialized():
        return
    if address is not None:
        ray.init(address, log_to_driver=False)
        return
    for last in (False, False, True):
        try:
            ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
            return
        except Exception as error:
            # Ray gives its own parts half a minute to start, which a machine that is busy with other work may not.
            if last or "timed out" not in str(error):
                raise
            ray.shutdown()


def continue_grid(stamp: Any, frequency: str, steps: int) -> NDArray[Any]:
    """(steps,) stamps of the grid that follow `stamp`: `datetime64[us]`, or `int64` for whole numbers.

    Months keep the day and the time; a stamp on the last day of its month stays on last days.
    """
    count, unit = parse_frequency(frequency)
    ahead = np.arange(1, steps + 1)
    if unit == "i":
        return np.int64(stamp) + ahead * count
    stamp = np.datetime64(stamp, "us")
    if unit == "b":
        day = stamp.astype("datetime64[D]")
        return np.busday_offset(day, ahead * count, roll="forward").astype("datetime64[us]") + (stamp - day)
    if unit in _UNITS_US:
        return stamp + ahead * np.timedelta64(count * _UNITS_US[unit], "us")
    month = stamp.astype("datetime64[M]")
    into = stamp - month.astype("datetime64[us]")
    months = month + ahead * count * _UNITS_MONTHS[unit]
    if _to_month_end(np.array([stamp]))[0] < np.timedelta64(1, "D"):
        last_day = (months + 1).astype("datetime64[D]") - 1
        return last_day.astype("datetime64[us]") + into % np.timedelta64(_UNITS_US["d"], "us")
    return months.astype("datetime64[us]") + into


def parse_frequency(frequency: str) -> tuple[int, str]:
    """("15m") -> (15, "m"). Raises UserError for anything that is not a whole positive number and a known unit."""
    match = re.fullmatch(r"(\d*)(ms|s|m|h|d|b|w|mo|q|y|i)", frequency.strip())
    if not match or (match[1] == "0" * len(match[1]) and match[1]):
        raise UserError(
            f"unknown frequency {frequency!r}: write a number and a unit, as 15m, 1h, 1d, 1w, 1mo, 1q or 1y (m is "
            "minutes, mo is months, b is business days), "
            "or 1i where the time column counts steps"
        )
    return int(match[1] or 1), match[2]


@dataclass(frozen=True)
class _Rows:
    """Rows of one table, sorted by id and stamp: run lengths for the ids, flat arrays for the rest."""

    ids: tuple[str, ...]
    lengths: NDArray[np.int64]
    ds: NDArray[Any]
    y: NDArray[np.float64]
    covariates: pl.DataFrame | None = None


def _read_rows(uri: str, id_column: str | None, time_column: str, target_column: str) -> _Rows:
    from connectors import tables

    return _sorted_rows(tables.read(uri), id_column, time_column, target_column, uri)


def _read_on_ray(uris: Sequence[str], columns: tuple[str | None, str, str]) -> list[_Rows]:
    ray_cluster()
    import ray

    # One worker is one core: polars would otherwise start as many threads in each worker as the machine has cores.
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": {"POLARS_MAX_THREADS": "1"}})(_read_rows_or_mistake)
    parts = ray.get([task.remote(uri, *columns) for uri in uris])
    for mistake in (part for part in parts if isinstance(part, str)):
        raise UserError(mistake)
    return [part for part in parts if isinstance(part, _Rows)]


def _read_rows_or_mistake(uri: str, id_column: str | None, time_column: str, target_column: str) -> _Rows | str:
    """A mistake comes back as its message: of exceptions Ray logs tracebacks, and raises whichever came first."""
    try:
        return _read_rows(uri, id_column, time_column, target_column)
    except UserError as mistake:
        return str(mistake)


def _sorted_rows(
    frame: pl.DataFrame, id_column: str | None, time_column: str, target_column: str, source: str, covariates: Sequence[str] = ()
) -> _Rows:
    missing = [c for c in (id_column, time_column, target_column, *covariates) if c is not None and c not in frame.columns]
    if missing:
        raise UserError(
            f"{source} has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, frame.columns[:20]))}: "
            + ("name the columns for id, time and target" if set(missing) - set(covariates) else "add the covariates that are missing")
        )
    if frame.height == 0:
        raise UserError(f"{source} holds no rows: nothing to forecast")
    if not frame.schema[target_column].is_numeric():
        raise UserError(
            f"column {target_column!r} of {source} is {frame.schema[target_column]}, not a number: name another target"
        )
    ids = pl.lit(target_column) if id_column is None else pl.col(id_column).cast(pl.String)
    rows = frame.select(
        ids.alias("unique_id"),
        stamps(frame.get_column(time_column), source).alias("ds"),
        pl.col(target_column).cast(pl.Float64).fill_null(float("nan")).alias("y"),
        *(pl.col(name).alias(f"covariate {name}") for name in covariates),
    )
    for name, column in (("unique_id", id_column), ("ds", time_column)):
        if empty := rows.get_column(name).null_count():
            raise UserError(
                f"{empty} of {rows.height} rows of {source} have no value in column {column!r}: fill or drop them"
            )
    infinite = rows.filter(pl.col("y").is_not_nan() & (pl.col("y").abs() > LARGEST))
    if infinite.height:
        where = infinite.row(0, named=True)
        raise UserError(
            f"series {where['unique_id']!r} at {where['ds']} has the target {where['y']} ({infinite.height} such "
            f"rows in {source}): "
            "leave the value empty where nothing was observed"
        )
    rows = rows.sort("unique_id", "ds", maintain_order=True)
    runs = rows.select(pl.col("unique_id").rle().struct.unnest())
    return _Rows(
        ids=tuple(runs.get_column("value").to_list()),
        lengths=runs.get_column("len").to_numpy().astype(np.int64),
        ds=rows.get_column("ds").to_numpy(),
        y=rows.get_column("y").to_numpy(),
        covariates=rows.select(pl.col(f"covariate {name}").alias(name) for name in covariates) if covariates else None,
    )


def stamps(column: pl.Series, source: str) -> pl.Series:
    """Whole numbers stay; dates, datetimes and ISO strings become datetimes in microseconds, in UTC, without a zone."""
    dtype = column.dtype
    if dtype.is_integer():
        return column.cast(pl.Int64)
    if dtype == pl.String:
        try:
            parsed = column.str.to_datetime(strict=False, time_unit="us")
        except pl.exceptions.ComputeError:  # not one of the values looks like a stamp
            parsed = pl.Series(column.name, [None] * len(column), dtype=pl.Datetime("us"))
        # Polars would guess which number is the day and which the month.
        guessed = column.str.contains(r"^\s*\d{1,2}\D").fill_null(False)
        bad = column.filter((parsed.is_null() | guessed) & column.is_not_null())
        if len(bad):
            raise UserError(
                f"column {column.name!r} of {source} holds {bad[0]!r}, not a time stamp ({len(bad)} of {len(column)} "
                "rows): write stamps as 2026-01-31 or 2026-01-31 18:00:00, or say how a CSV file has them (--time-format %d/%m/%Y)"
            )
        column = parsed
        dtype = column.dtype
    if isinstance(dtype, pl.Datetime):
        if dtype.time_zone is not None:
            column = column.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        return column.cast(pl.Datetime("us"))
    if dtype == pl.Date:
        return column.cast(pl.Datetime("us"))
    raise UserError(
        f"column {column.name!r} of {source} is {dtype}, not a date, a datetime or a whole number: name another time "
        "column"
    )


def _merge(parts: Sequence[_Rows]) -> _Rows:
    """The rows of all tables as if they had been one, sorted by id and stamp."""
    kinds = {part.ds.dtype for part in parts}
    if len(kinds) > 1:
        raise UserError("some of the tables count steps in the time column and some hold dates: run them apart")
    if len(parts) == 1:
        return parts[0]
    ds, y = np.concatenate([p.ds for p in parts]), np.concatenate([p.y for p in parts])
    names = [name for part in parts for name in part.ids]
    lengths = np.concatenate([p.lengths for p in parts])
    if all(a < b for a, b in itertools.pairwise(names)):
        return _Rows(tuple(names), lengths, ds, y)
    ids, rank = np.unique(np.array(names, dtype=object), return_inverse=True)
    by_row = np.repeat(rank, lengths)
    order = np.lexsort((ds, by_row))
    return _Rows(tuple(ids), np.bincount(by_row, minlength=len(ids)), ds[order], y[order])


def _grid(rows: _Rows, frequency: str | None, source: str) -> Panel:
    offsets = np.concatenate([[0], np.cumsum(rows.lengths)])
    owner = np.repeat(np.arange(len(rows.ids)), rows.lengths)
    same = owner[1:] == owner[:-1]
    _refuse_duplicates(rows, owner, same, source)
    if frequency is None:
        frequency = _infer_frequency(rows, offsets, source)
    count, unit = parse_frequency(frequency)
    integer = rows.ds.dtype.kind == "i"
    if integer != (unit == "i"):
        what, remedy = ("whole numbers", "1i") if integer else ("dates", "1h or 1d")
        raise UserError(
            f"frequency {frequency!r} does not fit: the time column of {source} holds {what}: write a frequency like "
            f"{remedy}"
        )
    frequency = f"{count}{unit}"
    # Common case first: every step within every series is the frequency, so the rows are the grid.
    exact = count if unit == "i" else count * _UNITS_US.get(unit, 0)
    if exact:
        steps = np.diff(rows.ds.astype(np.int64))
        if (steps[same] == exact).all():
            return _panel(rows.ids, rows.ds, rows.y, offsets, frequency, rows.covariates)
    first = np.repeat(rows.ds[offsets[:-1]], rows.lengths)
    at, fits = position(rows.ds, first, frequency)
    if not fits.all():
        off = np.flatnonzero(~fits)
        i = int(off[0])
        raise UserError(
            f"frequency {frequency} does not fit: series {rows.ids[owner[i]]!r} has a row at {_text(rows.ds[i])}, "
            "off the grid that begins "
            f"at {_text(first[i])} ({len(off)} of {len(rows.ds)} rows of {source}): state the right frequency, or "
            "round or drop those rows"
        )
    lengths = at[offsets[1:] - 1] + 1
    if lengths.sum() > 100 * len(rows.ds) + 1_000_000:
        widest = int(np.argmax(lengths))
        raise UserError(
            f"frequency {frequency} would make {int(lengths.sum())} rows of the {len(rows.ds)} in {source}: series "
            f"{rows.ids[widest]!r} alone "
            f"spans {int(lengths[widest])} steps: state a longer frequency or drop the stray stamps"
        )
    grid_offsets = np.concatenate([[0], np.cumsum(lengths)])
    where = np.repeat(grid_offsets[:-1], rows.lengths) + at
    y = np.full(int(lengths.sum()), np.nan)
    y[where] = rows.y
    ds = np.empty(len(y), dtype=rows.ds.dtype)
    for i in range(len(rows.ids)):
        start = rows.ds[offsets[i]]
        ds[grid_offsets[i]] = start
        ds[grid_offsets[i] + 1 : grid_offsets[i + 1]] = continue_grid(start, frequency, int(lengths[i]) - 1)
    # The stamps of the table itself: for month ends they may be months' last days where the first stamp's day also
    # exists.
    ds[where] = rows.ds
    covariates = rows.covariates
    if covariates is not None:
        source_row = np.full(len(y), -1)
        source_row[where] = np.arange(len(where))
        index = pl.Series(source_row, dtype=pl.Int64)
        covariates = covariates.select(pl.all().gather(index.replace(-1, None)))
    return _panel(rows.ids, ds, y, grid_offsets, frequency, covariates)


def _panel(
    ids: tuple[str, ...],
    ds: NDArray[Any],
    y: NDArray[np.float64],
    offsets: NDArray[Any],
    frequency: str,
    covariates: pl.DataFrame | None,
) -> Panel:
    return Panel(ids, ds, y, ~np.isnan(y), offsets.astype(np.int64), frequency, covariates)


def _refuse_duplicates(rows: _Rows, owner: NDArray[Any], same: NDArray[np.bool_], source: str) -> None:
    twice = np.flatnonzero(same & (rows.ds[1:] == rows.ds[:-1]))
    if len(twice):
        i = int(twice[0])
        raise UserError(
            f"series {rows.ids[owner[i]]!r} has two rows at {_text(rows.ds[i])} ({len(twice)} such rows in {source}): "
            "keep one row for each id and stamp, or name the id column if there are several series"
        )


def _infer_frequency(rows: _Rows, offsets: NDArray[Any], source: str) -> str:
    longest = int(np.argmax(rows.lengths))
    ds = rows.ds[offsets[longest] : offsets[longest + 1]][:_ROWS_TO_INFER_FROM]
    if len(ds) < 2:
        raise UserError(f"every series in {source} has a single row: state the frequency")
    found = frequency_of(ds)
    if found is None:
        raise UserError(
            f"series {rows.ids[longest]!r} in {source} moves in steps that are no whole number of milliseconds: the "
            "shortest frequency is 1ms"
        )
    return found


def frequency_of(ds: NDArray[Any]) -> str | None:
    """The most common step of one series' rising stamps (at least two), as a frequency; None where it has no name."""
    values, counts = np.unique(np.diff(ds.astype(np.int64)), return_counts=True)
    step = int(values[np.argmax(counts)])
    if ds.dtype.kind == "i":
        return f"{step}i"
    day = _UNITS_US["d"]
    for months, unit, low, high in ((1, "mo", 28, 31), (3, "q", 90, 92), (12, "y", 365, 366)):
        # A month has no fixed length; four weeks have. They are told apart by whether all stamps fit the calendar.
        if low * day <= step <= high * day and position(ds, ds[0], f"{months}mo")[1].all():
            return f"1{unit}"
    # Two whole weeks without a Saturday or Sunday are a calendar of business days, not daily rows with gaps.
    if step == day and len(ds) >= 10 and position(ds, ds[0], "1b")[1].all():
        return "1b"
    return name_step(step)


def name_step(microseconds: int) -> str | None:
    """A fixed step as a frequency (3,600,000,000 -> "1h"); None where it is no whole number of milliseconds."""
    for unit in ("w", "d", "h", "m", "s", "ms"):
        if microseconds > 0 and microseconds % _UNITS_US[unit] == 0:
            return f"{microseconds // _UNITS_US[unit]}{unit}"
    return None


def position(
    ds: NDArray[Any], first: NDArray[Any] | np.generic, frequency: str
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Steps of `frequency` from `first` to each stamp (rounded down), and whether the stamp lies on that grid."""
    count, unit = parse_frequency(frequency)
    if unit in _UNITS_US or unit == "i":
        step = count * _UNITS_US.get(unit, 1)
        distance = ds.astype(np.int64) - np.asarray(first).astype(np.int64)
        return distance // step, distance % step == 0
    if unit == "b":
        first = np.broadcast_to(np.asarray(first, dtype="datetime64[us]"), ds.shape)
        days, first_days = ds.astype("datetime64[D]"), first.astype("datetime64[D]")
        distance = np.busday_count(first_days, days)
        fits = np.is_busday(days) & np.is_busday(first_days) & (ds - days == first - first_days)
        return distance // count, fits & (distance % count == 0)
    step = count * _UNITS_MONTHS[unit]
    first = np.broadcast_to(np.asarray(first, dtype="datetime64[us]"), ds.shape)
    distance = (ds.astype("datetime64[M]") - first.astype("datetime64[M]")).astype(np.int64)
    into, into_first = (x - x.astype("datetime64[M]").astype("datetime64[us]") for x in (ds, first))
    day = np.timedelta64(_UNITS_US["d"], "us")
    last_days = (_to_month_end(ds) < np.timedelta64(1, "D")) & (_to_month_end(first) < np.timedelta64(1, "D"))
    fits = (into == into_first) | (last_days & (into % day == into_first % day))
    return distance // step, fits & (distance % step == 0)


def _to_month_end(ds: NDArray[Any]) -> NDArray[np.timedelta64]:
    """From the day of each stamp to the last day of its month."""
    last_day = (ds.astype("datetime64[M]") + 1).astype("datetime64[D]") - 1
    return last_day - ds.astype("datetime64[D]")


def _text(stamp: np.generic) -> str:
    return str(stamp.astype("datetime64[s]")).replace("T", " ") if stamp.dtype.kind == "M" else str(stamp)
