"""One report on a table before anything is trained on it: what is wrong, in which series, when, how often, what to do.

`check` is a pure function of a long frame and `Rules`. The rules say for every kind of trouble what happens to it;
they are strict by default, so that nothing is repaired that the user did not ask for. What comes back is the frame
as the rules leave it, in UTC and sorted by id and stamp, ready for `pipelines.windows.panel`, and the `Report`.
Every series is looked at, none sampled; the cost is a sort and a few passes over arrays.

Missing values are masked in the model and never guessed, unless a rule says `fill`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connectors.errors import UserError
from pipelines.forecasting.calendar import on_wall_clock, to_zone
from pipelines.windows import LARGEST, continue_grid, frequency_of, name_step, parse_frequency, position, stamps

Level = Literal["error", "warning", "note"]

NAMED_SERIES = 10
"""A message names so many series; the finding itself holds all of them."""
FAR_FROM_MEDIAN = 40.0
"""Robust deviations (1.4826 * median absolute deviation) beyond which a value is asked about."""
ROWS_FOR_A_WEEK = 140
"""Daily rows before the shape of the week is judged: twenty weeks."""
WALL_CLOCKS = ("Europe/Berlin", "Europe/London", "America/New_York", "America/Los_Angeles", "Australia/Sydney")
"""Zones that stamps without a zone are tried on, where gaps and duplicates look like changes of the clock."""
_HOUR_US = 3_600_000_000
_DAY_US = 24 * _HOUR_US


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What to expect of a table, and what to do where it is not so.

    frequency: step of all series; where None each series' own is inferred. zone: IANA name; stamps without a zone are
    wall-clock times of it. na_values: numbers that stand for a missing value. look_back, horizon: rows that a training
    window needs.

    unsorted: older rows after newer ones are sorted, or an error.
    duplicates: rows with the same id and stamp; `first` and `last` go by the order of the table.
    missing: empty targets: kept and masked, or filled with the last value before them (none before: masked).
    empty: series without any value: left out, or an error.
    gaps: absent rows, as `missing`.
    infinite: targets that are infinite or beyond LARGEST, masked or an error.
    off_grid: rows that lie between the steps of the frequency, dropped or an error.
    frequencies: series of different steps in one table: an error, or each at its own.
    ambiguous: wall-clock times that happened twice (autumn): by the order of the table, all the first, all the second.
    nonexistent: wall-clock times that never happened (spring), dropped or an error.
    """

    frequency: str | None = None
    zone: str | None = None
    na_values: tuple[float, ...] = ()
    look_back: int | None = None
    horizon: int | None = None
    unsorted: Literal["sort", "error"] = "sort"
    duplicates: Literal["error", "first", "last", "mean", "sum"] = "error"
    missing: Literal["error", "mask", "fill"] = "error"
    empty: Literal["error", "skip"] = "error"
    gaps: Literal["error", "mask", "fill"] = "error"
    infinite: Literal["error", "mask"] = "error"
    off_grid: Literal["error", "drop"] = "error"
    frequencies: Literal["error", "split"] = "error"
    ambiguous: Literal["error", "order", "earliest", "latest"] = "error"
    nonexistent: Literal["error", "drop"] = "error"


@dataclass(frozen=True)
class Finding:
    """One kind of trouble. `series`, `counts` (rows) and `stamps` (first such stamp, as the user writes it) go together."""

    kind: str
    level: Level
    series: tuple[str, ...]
    counts: tuple[int, ...]
    stamps: tuple[str, ...]
    message: str
    remedy: str

    @property
    def total(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Report:
    """All findings, errors first. `frequencies` counts the series of each step."""

    source: str
    rows: int
    series: int
    zone: str | None
    frequencies: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.of_level("error")

    @property
    def failed(self) -> frozenset[str]:
        """Series that an error names."""
        return frozenset(name for finding in self.of_level("error") for name in finding.series)

    def of_level(self, level: Level) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == level)

    def of_kind(self, kind: str) -> Finding | None:
        return next((f for f in self.findings if f.kind == kind), None)

    def require(self) -> None:
        """Raises UserError with every error and its remedy; warnings and notes pass."""
        if not self.ok:
            told = "; ".join(f"{f.message}: {f.remedy}" for f in self.of_level("error"))
            raise UserError(f"{self.source}: {told}")

    def text(self) -> str:
        """The report for people, a line a finding."""
        steps = ", ".join(f"{count} at {step}" for step, count in self.frequencies.items()) or "none"
        head = f"{self.source}: {self.rows} rows, {self.series} series ({steps}), zone {self.zone or 'not stated'}"
        return "\n".join([head, *(f"{f.level:<8} {f.kind:<12} {f.message}: {f.remedy}" for f in self.findings)])

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Checked:
    """frame: `unique_id, ds, y` and the other columns, sorted, `ds` without a zone (UTC; the zone's own clock for whole
    days and longer); rows of series that an error names are as they came. steps: the frequency of each series."""

    frame: pl.DataFrame
    steps: pl.DataFrame
    report: Report

    def split(self) -> dict[str, pl.DataFrame]:
        """The frame by frequency."""
        joined = self.frame.join(self.steps, on="unique_id", how="inner", maintain_order="left")
        return {
            str(step): joined.filter(pl.col("frequency") == step).drop("frequency")
            for step in self.steps.get_column("frequency").drop_nulls().unique().sort()
        }


def validate(frame: pl.DataFrame, rules: Rules = Rules(), **columns: Any) -> Report:
    """The report alone; see `check`."""
    return check(frame, rules, **columns).report


def check(
    frame: pl.DataFrame,
    rules: Rules = Rules(),
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    source: str = "the table",
) -> Checked:
    """Look at every row of a long frame; the caller's frame is not changed.

    `id_column=None` takes the table as one series named by its target column. Raises UserError only for what cannot be
    looked at: a missing column, a target that is no number, stamps that are none; everything else is a finding.
    """
    findings: list[Finding] = []
    rows, zone = _rows(frame, rules, id_column, time_column, target_column, source, findings)
    rows, steps = _on_the_clock(rows, rules, zone, findings)
    names = rows.get_column("unique_id").unique().sort()
    code = rows.get_column("unique_id").replace_strict(names, np.arange(len(names)), return_dtype=pl.Int64)
    rows = rows.with_columns(code.alias("_code"))
    seen = _Series(names.to_list(), steps, zone)
    older = rows.select(pl.col("ds").cast(pl.Int64).diff().over("_code") < 0).to_series().fill_null(False).to_numpy()
    strict = rules.unsorted == "error"
    _add(
        findings,
        _finding(
            "unsorted", "error" if strict else "note", rows, older, seen, "rows older than the row before them",
            "sort the table by id and stamp, or say unsorted: sort" if strict else "sorted",
        ),
    )  # fmt: skip
    rows = rows.sort("_code", "ds", maintain_order=True)
    rows = _values(rows, rules, seen, findings)
    rows = _duplicates(rows, rules, seen, findings)
    rows = _missing(rows, rules, seen, findings)
    rows = _grid(rows, rules, seen, findings)
    _lengths(rows, rules, seen, findings)
    _suspicions(rows, seen, findings)
    order = {"error": 0, "warning": 1, "note": 2}
    counted = steps.drop_nulls().group_by("frequency").len().sort("frequency")
    report = Report(
        source,
        frame.height,
        len(names),
        zone,
        dict(counted.iter_rows()),
        tuple(sorted(findings, key=lambda f: order[f.level])),
    )
    return Checked(rows.drop("_code"), steps, report)


@dataclass(frozen=True)
class _Series:
    """The names of the series in the order of their codes, the step of each, and how their stamps are shown."""

    names: list[str]
    steps: pl.DataFrame
    zone: str | None

    def frequency(self, code: int) -> str | None:
        found = self.steps.filter(pl.col("unique_id") == self.names[code]).get_column("frequency")
        return found[0] if len(found) else None

    def show(self, stamp: Any, code: int) -> str:
        """A stamp as the user writes it: in the zone, to the second that matters."""
        if stamp is None:
            return "no stamp"
        if isinstance(stamp, int | np.integer):
            return str(int(stamp))
        value = pl.Series([stamp], dtype=pl.Datetime("us"))
        frequency = self.frequency(code) or "1h"
        if self.zone is not None and not on_wall_clock(frequency):
            text = to_zone(value, frequency, self.zone).dt.strftime("%Y-%m-%d %H:%M:%S%z")[0]
            return str(text).replace(":00+", ":00 +").replace(":00-", ":00 -")
        return str(value.dt.strftime("%Y-%m-%d %H:%M:%S")[0])


def _finding(
    kind: str,
    level: Level,
    rows: pl.DataFrame,
    mask: NDArray[np.bool_],
    seen: _Series,
    what: str,
    remedy: str,
    weight: NDArray[np.int64] | None = None,
    detail: Callable[[int], str] | None = None,
) -> Finding | None:
    """The rows of `mask`, summed up by series; `weight` counts a row as more than one; `detail(code)` adds to the text."""
    if not mask.any():
        return None
    at = np.flatnonzero(mask)
    codes = rows.get_column("_code").to_numpy()[at]
    order = np.argsort(codes, kind="stable")  # the rows of a series need not lie together yet
    at, codes = at[order], codes[order]
    which, first, counts = np.unique(codes, return_index=True, return_counts=True)
    if weight is not None:
        counts = np.add.reduceat(weight[at], first)
    stamps = rows.get_column("ds")[at[first[:NAMED_SERIES]].tolist()].to_list()
    texts = [seen.show(stamp, int(code)) for stamp, code in zip(stamps, which, strict=False)]
    if len(which) > NAMED_SERIES:
        rest = rows.get_column("ds")[at[first[NAMED_SERIES:]].tolist()].cast(pl.String).to_list()
    else:
        rest = []
    named = [
        f"'{seen.names[code]}' {count} (first {text}{detail(int(code)) if detail else ''})"
        for code, count, text in zip(which, counts, texts, strict=False)
    ]
    more = f" and {len(which) - NAMED_SERIES} more series" if len(which) > NAMED_SERIES else ""
    message = f"{int(counts.sum())} {what} in {len(which)} of {len(seen.names)} series: {', '.join(named)}{more}"
    return Finding(
        kind, level, tuple(seen.names[c] for c in which), tuple(counts.tolist()), (*texts, *rest), message, remedy
    )


def _add(findings: list[Finding], finding: Finding | None) -> None:
    if finding is not None:
        findings.append(finding)


def _rows(
    frame: pl.DataFrame,
    rules: Rules,
    id_column: str | None,
    time_column: str,
    target_column: str,
    source: str,
    findings: list[Finding],
) -> tuple[pl.DataFrame, str | None]:
    """`unique_id, ds, y` and the other columns, in the table's order; the zone that the stamps belong to."""
    absent = [c for c in (id_column, time_column, target_column) if c is not None and c not in frame.columns]
    if absent:
        raise UserError(
            f"{source} has no column {', '.join(map(repr, absent))}; it has "
            f"{', '.join(map(repr, frame.columns[:20]))}: name the columns for id, time and target"
        )
    keys = [c for c in (id_column, time_column, target_column) if c is not None]
    empty_columns = [c for c in frame.columns if c not in keys and frame.height and not frame.get_column(c).count()]
    frame = frame.drop(empty_columns)
    before = frame.height
    frame = frame.filter(~pl.all_horizontal(pl.all().is_null()))
    for kind, count, thing in (
        ("empty_rows", before - frame.height, "rows without any value"),
        ("empty_columns", len(empty_columns), "columns without any value"),
    ):
        if count:
            findings.append(Finding(kind, "note", (), (count,), (), f"{count} {thing}", "they were left out"))
    if frame.height == 0:
        raise UserError(f"{source} holds no rows: nothing to forecast")
    target = frame.get_column(target_column)
    if target.dtype == pl.Null:
        target = target.cast(pl.Float64)
    if not target.dtype.is_numeric():
        bad = target.filter(target.cast(pl.Float64, strict=False).is_null() & target.is_not_null())
        shown = ", ".join(map(repr, bad.unique(maintain_order=True)[:5].to_list()))
        raise UserError(
            f"column {target_column!r} of {source} is {target.dtype}, not a number ({len(bad)} of {len(target)} values, "
            f"as {shown}): name the texts that stand for missing values, the separator and the decimal comma, or "
            "another target"
        )
    zone = rules.zone
    column = frame.get_column(time_column)
    if isinstance(column.dtype, pl.Datetime) and column.dtype.time_zone is not None:
        # A fixed UTC is how most tables are stored and no statement about where the series live.
        zone = rules.zone or column.dtype.time_zone
        aware = True
    else:
        aware = False
        if column.dtype == pl.String and column.str.contains(r"\d\d:?\d\d\s*([+-]\d\d:?\d\d|Z)$").any():
            column = instants(column, source)
            zone, aware = rules.zone or "UTC", True
    ids = pl.lit(target_column) if id_column is None else pl.col(id_column).cast(pl.String)
    others = [c for c in frame.columns if c not in (*keys, "unique_id", "ds", "y")]
    rows = frame.select(
        ids.alias("unique_id"),
        stamps(column, source).alias("ds"),
        target.cast(pl.Float64).fill_nan(None).alias("y"),
        *others,
    )
    if zone is not None:
        _known_zone(zone)
    for name, column_name in (("unique_id", id_column), ("ds", time_column)):
        if count := rows.get_column(name).null_count():
            message = f"{count} of {rows.height} rows have no value in column {column_name!r}"
            findings.append(Finding("no_key", "error", (), (count,), (), message, "fill or drop these rows"))
    rows = rows.drop_nulls(["unique_id", "ds"])
    if rows.height == 0:
        raise UserError(f"{source} holds no row with an id and a stamp")
    return rows.with_columns(pl.lit(aware).alias("_aware")), zone


def instants(column: pl.Series, source: str) -> pl.Series:
    """ISO texts with offsets (mixed ones too: summer and winter of one zone) as UTC."""
    parsed = column.str.strip_chars().str.replace(r"Z$", "+0000").str.replace(r"([+-]\d\d):(\d\d)$", "${1}${2}")
    parsed = parsed.str.replace("T", " ", literal=True).str.replace(r"^(\S+ \d\d:\d\d)([ +-])", "${1}:00${2}")
    out = parsed.str.replace(" +", "+", literal=True).str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", strict=False, time_unit="us")
    bad = column.filter(out.is_null() & column.is_not_null())
    if len(bad):
        raise UserError(
            f"column {column.name!r} of {source} holds {bad[0]!r} beside stamps with an offset ({len(bad)} of "
            f"{len(column)} rows): write all stamps with an offset, or none and state the zone"
        )
    return out


def _known_zone(zone: str) -> None:
    import zoneinfo

    try:
        zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError):
        raise UserError(f"unknown zone {zone!r}: write an IANA name, as Europe/Berlin or UTC") from None


def _on_the_clock(
    rows: pl.DataFrame, rules: Rules, zone: str | None, findings: list[Finding]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Stamps on the clock of their grid, and the step of each series (unique_id, frequency)."""
    aware = bool(rows.get_column("_aware")[0])
    rows = rows.drop("_aware")
    integer = rows.schema["ds"].is_integer()
    if zone is not None and aware and not integer:
        local = rows.get_column("ds").dt.replace_time_zone("UTC").dt.convert_time_zone(zone).dt.replace_time_zone(None)
    else:
        local = rows.get_column("ds")
    steps = _steps(rows.select("unique_id", local.alias("ds")), rules.frequency)
    if integer or zone is None:
        return rows, steps
    wall = {name for name, step in steps.iter_rows() if step is not None and on_wall_clock(step)}
    on_wall = rows.get_column("unique_id").is_in(list(wall)) if wall else pl.Series([False] * rows.height)
    if aware:
        return rows.with_columns(pl.when(on_wall).then(local).otherwise(pl.col("ds")).alias("ds")), steps
    return _localised(rows, on_wall, rules, zone, steps, findings), steps


def _localised(
    rows: pl.DataFrame, on_wall: pl.Series, rules: Rules, zone: str, steps: pl.DataFrame, findings: list[Finding]
) -> pl.DataFrame:
    """Wall-clock stamps of sub-daily series as UTC, with the hour that comes twice and the hour that never comes."""
    local = rows.get_column("ds")
    first = local.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    second = local.dt.replace_time_zone(zone, ambiguous="latest", non_existent="null")
    gone = (first.is_null() & ~on_wall).to_numpy()
    twice = ((first != second).fill_null(False) & ~on_wall).to_numpy()
    names = rows.get_column("unique_id").unique().sort()
    code = rows.get_column("unique_id").replace_strict(names, np.arange(len(names)), return_dtype=pl.Int64)
    coded = rows.with_columns(code.alias("_code"))
    seen = _Series(names.to_list(), steps, None)
    _add(
        findings,
        _finding(
            "ambiguous", "error" if rules.ambiguous == "error" else "note", coded, twice, seen,
            f"wall-clock stamps that happened twice in {zone}",
            "write stamps with an offset, or say ambiguous: order, earliest or latest"
            if rules.ambiguous == "error" else f"taken as {rules.ambiguous}",
        ),
    )  # fmt: skip
    _add(
        findings,
        _finding(
            "nonexistent", "error" if rules.nonexistent == "error" else "note", coded, gone, seen,
            f"wall-clock stamps that never happened in {zone}",
            "correct the zone or the stamps, or say nonexistent: drop" if rules.nonexistent == "error" else "dropped",
        ),
    )  # fmt: skip
    if rules.ambiguous == "latest":
        chosen = second
    elif rules.ambiguous == "earliest":
        chosen = first
    else:  # by order; strict runs go on this way too, so that the report tells what else there is
        nth = rows.select(pl.int_range(pl.len()).over("unique_id", "ds").alias("nth")).get_column("nth")
        chosen = pl.select(pl.when(nth == 0).then(first).otherwise(second)).to_series()
    utc = chosen.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
    ds = pl.select(pl.when(on_wall).then(local).otherwise(utc).alias("ds")).to_series()
    return rows.with_columns(ds).filter(~pl.Series(gone))


def _steps(rows: pl.DataFrame, stated: str | None) -> pl.DataFrame:
    """(unique_id, frequency): as stated, else each series' own most common step; null for a single row."""
    names = rows.select("unique_id").unique().sort("unique_id")
    if stated is not None:
        count, unit = parse_frequency(stated)
        return names.with_columns(pl.lit(f"{count}{unit}").alias("frequency"))
    ordered = rows.unique().sort("unique_id", "ds")
    modes = (
        ordered.with_columns(pl.col("ds").cast(pl.Int64).diff().over("unique_id").alias("step"))
        .drop_nulls("step")
        .group_by("unique_id", "step")
        .len()
        .sort("unique_id", "len", "step", descending=[False, True, False])
        .unique("unique_id", keep="first", maintain_order=True)
    )
    integer = rows.schema["ds"].is_integer()
    weekdays: set[str] = set()
    if not integer:
        # Two whole weeks without a Saturday or Sunday are a calendar of business days, not daily rows with gaps.
        facts = ordered.group_by("unique_id").agg(pl.len(), pl.col("ds").dt.weekday().max().alias("latest"))
        weekdays = set(facts.filter((pl.col("len") >= 10) & (pl.col("latest") <= 5)).get_column("unique_id"))
    found: dict[str, str | None] = {}
    calendar: list[str] = []
    for name, step, _ in modes.iter_rows():
        if integer:
            found[name] = f"{step}i"
        elif step == _DAY_US:
            found[name] = "1b" if name in weekdays else "1d"
        elif step >= 28 * _DAY_US:
            calendar.append(name)  # months, quarters, years: told by all the stamps
        else:
            found[name] = name_step(step)
    if calendar:
        for part in ordered.filter(pl.col("unique_id").is_in(calendar)).partition_by("unique_id", maintain_order=True):
            found[part.get_column("unique_id")[0]] = frequency_of(part.get_column("ds").to_numpy())
    values = [found.get(name) for name in names.get_column("unique_id")]
    return names.with_columns(pl.Series("frequency", values, dtype=pl.String))


def _values(rows: pl.DataFrame, rules: Rules, seen: _Series, findings: list[Finding]) -> pl.DataFrame:
    """Codes for missing values, infinite values."""
    if rules.na_values:
        coded = rows.get_column("y").is_in([float(v) for v in rules.na_values]).fill_null(False).to_numpy()
        listed = ", ".join(f"{v:g}" for v in rules.na_values)
        _add(findings, _finding("na_values", "note", rows, coded, seen, f"values out of {listed}", "taken as missing"))
        rows = rows.with_columns(pl.when(pl.Series(coded)).then(None).otherwise(pl.col("y")).alias("y"))
    infinite = rows.get_column("y").is_infinite().fill_null(False).to_numpy()
    huge = (rows.get_column("y").abs() > LARGEST).fill_null(False).to_numpy() & ~infinite
    masked = rules.infinite == "mask"
    _add(
        findings,
        _finding(
            "infinite", "note" if masked else "error", rows, infinite, seen, "infinite values",
            "taken as missing" if masked else "leave the value empty where nothing was observed, or say infinite: mask",
        ),
    )  # fmt: skip
    _add(
        findings,
        _finding(
            "out_of_range", "note" if masked else "error", rows, huge, seen, f"values beyond {LARGEST:g}, more than the model can count,",
            "taken as missing" if masked else "correct them or use a larger unit; if they stand for missing values, say na_values or infinite: mask",
        ),
    )  # fmt: skip
    unusable = infinite | huge
    if not unusable.any():
        return rows
    # They are told here and not once more as missing.
    return rows.with_columns(pl.when(pl.Series(unusable)).then(None).otherwise(pl.col("y")).alias("y"), pl.Series("_told", unusable))


def _duplicates(rows: pl.DataFrame, rules: Rules, seen: _Series, findings: list[Finding]) -> pl.DataFrame:
    code, ds = rows.get_column("_code").to_numpy(), rows.get_column("ds").cast(pl.Int64).to_numpy()
    again = np.zeros(rows.height, dtype=bool)
    again[1:] = (code[1:] == code[:-1]) & (ds[1:] == ds[:-1])
    if not again.any():
        return rows
    groups = rows.filter(pl.Series(again | np.append(again[1:], False))).group_by("_code", "ds", maintain_order=True)
    spread = groups.agg((pl.col("y").n_unique() > 1).alias("conflict"))
    stamps = spread.group_by("_code").agg(pl.len(), pl.col("conflict").sum(), pl.col("ds").filter("conflict").first())
    told = {c: (n, conflicts, first) for c, n, conflicts, first in stamps.iter_rows()}

    def detail(c: int) -> str:
        n, conflicts, first = told[c]
        at = f" ({seen.show(first, c)})" if conflicts else ""
        return f", at {n} timestamps, {conflicts} of them with conflicting values{at}"

    strict = rules.duplicates == "error"
    remedy = "keep one row for each id and stamp, or say duplicates: first, last, mean or sum"
    _add(
        findings,
        _finding(
            "duplicates", "error" if strict else "note", rows, again, seen, "duplicate rows",
            remedy if strict else f"each stamp keeps the {rules.duplicates}", detail=detail,
        ),
    )  # fmt: skip
    if rules.duplicates == "last":
        return rows.filter(~pl.Series(np.append(again[1:], False)))
    kept = rows.filter(~pl.Series(again))
    if rules.duplicates in ("mean", "sum"):
        # A sum of nothing is nothing, not zero.
        total = pl.col("y").mean() if rules.duplicates == "mean" else pl.when(pl.col("y").count() > 0).then(pl.col("y").sum())
        merged = rows.group_by("_code", "ds", maintain_order=True).agg(total.alias("y"))
        return kept.with_columns(merged.get_column("y"))
    return kept


def _missing(rows: pl.DataFrame, rules: Rules, seen: _Series, findings: list[Finding]) -> pl.DataFrame:
    empty_row = rows.get_column("y").is_null().to_numpy()
    told = rows.get_column("_told").to_numpy() if "_told" in rows.columns else np.zeros(rows.height, dtype=bool)
    rows = rows.drop("_told", strict=False)
    if not empty_row.any():
        return rows
    code = rows.get_column("_code").to_numpy()
    length = np.bincount(code, minlength=len(seen.names))
    held = np.bincount(code, weights=~empty_row, minlength=len(seen.names))
    last_seen = np.full(len(seen.names), -1)
    np.maximum.at(last_seen, code[~empty_row], np.flatnonzero(~empty_row))
    tail = np.cumsum(length) - 1 - last_seen
    strict = rules.missing == "error"
    done = {"mask": "masked: they teach the model nothing", "fill": "filled with the last value before them"}
    _add(
        findings,
        _finding(
            "missing", "error" if strict else "note", rows, empty_row & ~told, seen, "missing values in y",
            "say missing: mask (the model skips them) or fill (the last value)" if strict else done[rules.missing],
            detail=lambda c: f", the last {tail[c]} rows" if 0 < tail[c] < length[c] else "",
        ),
    )  # fmt: skip
    nothing = held == 0
    if nothing.any():
        skip = rules.empty == "skip"
        first = np.zeros(rows.height, dtype=bool)
        first[np.concatenate([[0], np.cumsum(length)[:-1]])[nothing & (length > 0)]] = True
        _add(
            findings,
            _finding(
                "empty_series", "warning" if skip else "error", rows, first, seen, "series without any value",
                "left out: nothing is forecast for them" if skip else "drop these series, or say empty: skip",
            ),
        )  # fmt: skip
        if skip:
            rows = rows.filter(~pl.Series(nothing[code]))
    if rules.missing == "fill":
        rows = rows.with_columns(pl.col("y").forward_fill().over("_code"))
    return rows


def _grid(rows: pl.DataFrame, rules: Rules, seen: _Series, findings: list[Finding]) -> pl.DataFrame:
    """Steps: one for all or one each; rows off the grid; absent rows."""
    known = seen.steps.drop_nulls()
    kinds = known.group_by("frequency").agg(pl.col("unique_id")).sort("frequency")
    if kinds.height > 1:
        common = known.group_by("frequency").len().sort("len", "frequency", descending=[True, False])["frequency"][0]
        odd = known.filter(pl.col("frequency") != common).get_column("unique_id").to_list()
        told = "; ".join(
            f"{step}: {', '.join(map(repr, ids[:NAMED_SERIES]))}" + (" ..." if len(ids) > NAMED_SERIES else "")
            for step, ids in kinds.iter_rows()
        )
        split = rules.frequencies == "split"
        findings.append(
            Finding(
                "frequencies", "note" if split else "error", tuple(odd), (1,) * len(odd), ("",) * len(odd),
                f"{kinds.height} different steps in one table ({told})",
                "each series keeps its own" if split else "state the frequency, or say frequencies: split",
            )
        )  # fmt: skip
    code, ds = rows.get_column("_code").to_numpy(), rows.get_column("ds").to_numpy()
    by_name = dict(known.iter_rows())
    step_of = [by_name.get(name) for name in seen.names]
    at, fits = np.zeros(len(ds), dtype=np.int64), np.ones(len(ds), dtype=bool)
    starts = np.flatnonzero(np.append(True, code[1:] != code[:-1]))
    first = np.repeat(ds[starts], np.diff(np.append(starts, len(ds))))
    for step in kinds.get_column("frequency"):
        mine = np.array([s == step for s in step_of])[code]
        at[mine], fits[mine] = position(ds[mine], first[mine], step)
    drop = rules.off_grid == "drop"
    _add(
        findings,
        _finding(
            "off_grid", "note" if drop else "error", rows, ~fits, seen, "rows between the steps of the frequency",
            "dropped" if drop else "state the right frequency, round the stamps, or say off_grid: drop",
            detail=lambda c: f", step {step_of[c]}",
        ),
    )  # fmt: skip
    if not fits.all():
        keep = fits if drop else np.isin(code, np.unique(code[~fits]), invert=True)
        # Steps between rows that do not fit their grid are no gaps.
        code, at, looked = code[keep], at[keep], rows.filter(pl.Series(keep))
        rows = looked if drop else rows
    else:
        looked = rows
    absent = np.zeros(len(code), dtype=np.int64)
    same = code[1:] == code[:-1]
    absent[1:] = np.where(same, np.diff(at) - 1, 0).clip(min=0)
    if not (absent > 0).any():
        return rows
    # A gap is told by the first stamp that is absent: one step after the row before it.
    before = np.flatnonzero(absent > 0) - 1
    stamp = [continue_grid(looked.get_column("ds").to_numpy()[i], str(step_of[code[i]]), 1)[0] for i in before[:1000]]
    moved = looked.get_column("ds").to_numpy().copy()
    moved[before[:1000] + 1] = stamp
    shown = looked.with_columns(pl.Series("ds", moved))
    runs = np.bincount(code, weights=absent > 0, minlength=len(seen.names)).astype(int)
    longest = np.zeros(len(seen.names), dtype=np.int64)
    np.maximum.at(longest, code, absent)
    present = np.bincount(code, minlength=len(seen.names))
    total = np.bincount(code, weights=absent, minlength=len(seen.names)).astype(int)

    def detail(c: int) -> str:
        share = 100 * present[c] / (present[c] + total[c])
        return f", {runs[c]} runs, longest {longest[c]}, freq {step_of[c]}, {share:.4g} % present"

    strict = rules.gaps == "error"
    done = {"mask": "masked: they teach the model nothing", "fill": "filled with the last value before them"}
    _add(
        findings,
        _finding(
            "gaps", "error" if strict else "note", shown, absent > 0, seen, "missing steps",
            "say gaps: mask (the model skips them) or fill (the last value)" if strict else done[rules.gaps],
            weight=absent, detail=detail,
        ),
    )  # fmt: skip
    _wall_clock_hint(looked, code, absent, seen, findings)
    _coarser(looked.filter(pl.Series(np.isin(code, np.unique(code[absent > 0])))), rules, seen, findings)
    return _filled(looked, code, absent, step_of) if rules.gaps == "fill" else rows


def _filled(rows: pl.DataFrame, code: NDArray[Any], absent: NDArray[np.int64], step_of: Sequence[str | None]) -> pl.DataFrame:
    ds = rows.get_column("ds").to_numpy()
    parts, codes = [], []
    for i in np.flatnonzero(absent):
        parts.append(continue_grid(ds[i - 1], str(step_of[code[i]]), int(absent[i])))
        codes.append(np.full(absent[i], code[i]))
    new = pl.DataFrame({"_code": np.concatenate(codes), "ds": np.concatenate(parts)}).cast({"_code": pl.Int64, "ds": rows.schema["ds"]})
    names = rows.select("_code", "unique_id").unique()
    grown = pl.concat([rows, new.join(names, on="_code")], how="diagonal").sort("_code", "ds")
    return grown.with_columns(pl.col("y").forward_fill().over("_code"))


def _coarser(rows: pl.DataFrame, rules: Rules, seen: _Series, findings: list[Finding]) -> None:
    """Where the step is stated: series that never move by it (daily rows in an hourly table are no hourly series)."""
    if rules.frequency is None or rows.height == 0:
        return
    own = _steps(rows.select("unique_id", "ds"), None).join(seen.steps, on="unique_id", suffix="_stated")
    # A step that does not divide into the stated one is told as rows off the grid.
    odd = own.filter((pl.col("frequency") != pl.col("frequency_stated")).fill_null(False))
    named = {f.series for f in findings if f.kind == "off_grid"}
    names = [(n, s) for n, s, _ in odd.iter_rows() if not any(n in series for series in named)]
    names = [(n, s) for n, s in names if not (s == "1b" and rules.frequency == "1d")]
    if names:
        told = ", ".join(f"'{n}' {s}" for n, s in names[:NAMED_SERIES])
        more = f" and {len(names) - NAMED_SERIES} more" if len(names) > NAMED_SERIES else ""
        findings.append(
            Finding(
                "frequencies", "error", tuple(n for n, _ in names), (1,) * len(names), ("",) * len(names),
                f"{len(names)} of {len(seen.names)} series move by another step than {rules.frequency}: {told}{more}",
                "put them in a table of their own, or state their frequency",
            )
        )  # fmt: skip


def _wall_clock_hint(
    rows: pl.DataFrame, code: NDArray[Any], absent: NDArray[np.int64], seen: _Series, findings: list[Finding]
) -> None:
    """Gaps of an hour at every change of some zone's clock: the stamps are that zone's, and nobody said so."""
    if seen.zone is not None or rows.schema["ds"].is_integer():
        return
    ds = rows.get_column("ds").cast(pl.Int64).to_numpy()
    jump = np.flatnonzero(absent > 0)
    hour = jump[(ds[jump] - ds[jump - 1] - _HOUR_US > 0) & (ds[jump] - ds[jump - 1] <= 2 * _HOUR_US)]
    if not len(hour):
        return
    # The stamp an hour before the row after the gap is the first one that the clock skips.
    skipped = pl.Series(ds[hour] - _HOUR_US).cast(pl.Datetime("us"))
    for zone in WALL_CLOCKS:
        never = skipped.dt.replace_time_zone(zone, non_existent="null", ambiguous="earliest").is_null().sum()
        if never >= max(1, len(hour) // 2):
            names = sorted({seen.names[c] for c in code[hour]})
            findings.append(
                Finding(
                    "calendar", "warning", tuple(names), (1,) * len(names), ("",) * len(names),
                    f"{never} of {len(hour)} gaps of an hour lie where the clock of {zone} skips one: the stamps are "
                    "wall-clock times",
                    f"state the zone (zone: {zone})",
                )
            )  # fmt: skip
            return


def _lengths(rows: pl.DataFrame, rules: Rules, seen: _Series, findings: list[Finding]) -> None:
    facts = rows.group_by("_code", maintain_order=True).agg(
        pl.len().alias("rows"),
        pl.col("y").count().alias("seen"),
        (pl.col("y").min() == pl.col("y").max()).alias("constant"),
    )
    # Rows of the grid, not of the table: steps that are absent count as rows of a window.
    first_last = rows.group_by("_code", maintain_order=True).agg(
        pl.col("ds").first().alias("first"), pl.col("ds").last().alias("last")
    )
    facts = facts.join(first_last, on="_code", maintain_order="left")
    start = rows.select(pl.col("_code").is_first_distinct()).to_series().to_numpy()
    constant = facts.filter(pl.col("constant") & (pl.col("seen") > 1)).get_column("_code").to_numpy()
    codes = rows.get_column("_code").to_numpy()
    _add(
        findings,
        _finding(
            "constant", "note", rows, start & np.isin(codes, constant), seen, "series of one single value",
            "the forecast is that value",
        ),
    )  # fmt: skip
    if rules.look_back is None or rules.horizon is None:
        return
    need = rules.look_back + rules.horizon
    by_name = dict(seen.steps.drop_nulls().iter_rows())
    long = np.ones(facts.height, dtype=np.int64)
    kinds = [by_name.get(seen.names[c]) for c in facts.get_column("_code")]
    for step in {k for k in kinds if k is not None}:
        mine = np.array([k == step for k in kinds])
        last, first = facts.get_column("last").to_numpy()[mine], facts.get_column("first").to_numpy()[mine]
        long[mine] = position(last, first, step)[0] + 1
    short = long < need
    if not short.any():
        return
    longest = int(np.argmax(long))
    length = dict(zip(facts.get_column("_code").to_list(), long.tolist(), strict=True))
    none_left = bool(short.all())
    where = start & np.isin(codes, facts.get_column("_code").to_numpy()[short])
    _add(
        findings,
        _finding(
            "short", "error" if none_left else "note", rows, where, seen,
            f"series shorter than the {need} rows of a training window (look-back {rules.look_back} + horizon "
            f"{rules.horizon})" + (f"; the longest, '{seen.names[facts.get_column('_code')[longest]]}', has "
            f"{long[longest]}" if none_left else ""),
            "shorten the look-back or the horizon" if none_left
            else "they give no training window; they are forecast all the same",
            detail=lambda c: f", {length[c]} rows",
        ),
    )  # fmt: skip


def _suspicions(rows: pl.DataFrame, seen: _Series, findings: list[Finding]) -> None:
    """What only a person can judge: codes for missing values that nobody listed, and calendars that are not the real one."""
    middle = pl.col("y").median().over("_code")
    far = rows.select(
        ((pl.col("y") - middle).abs() / (1.4826 * (pl.col("y") - middle).abs().median().over("_code"))).alias("far"),
        middle.alias("median"),
    )
    distance = far.get_column("far").fill_null(0.0).fill_nan(0.0)
    mask = (distance.is_finite() & (distance > FAR_FROM_MEDIAN)).to_numpy()
    y = rows.get_column("y").to_numpy()
    whole = mask & (np.where(mask, y, 0.5) % 1 == 0)
    for kind, which, remedy in (
        ("sentinel", whole, "if it stands for a missing value, list it in na_values"),
        ("outlier", mask & ~whole, "if it is a mistake, correct it or leave it empty"),
    ):
        if which.any():
            worst = int(np.flatnonzero(which)[np.argmax(distance.to_numpy()[which])])
            values = ", ".join(f"{v:g}" for v in np.unique(y[which])[:5])
            what = (
                f"values more than {FAR_FROM_MEDIAN:g} sd from the median (value {y[worst]:g} is {distance[worst]:.0f} sd "
                f"away; {values})"
            )
            _add(findings, _finding(kind, "warning", rows, which, seen, what, remedy))
    _false_week(rows, seen, findings)


def _false_week(rows: pl.DataFrame, seen: _Series, findings: list[Finding]) -> None:
    """Daily rows whose shape repeats every 5 rows and not every 7: business days, numbered as if every day were one."""
    daily = seen.steps.filter(pl.col("frequency") == "1d").get_column("unique_id")
    part = rows.filter(pl.col("unique_id").is_in(daily.implode()) & pl.col("y").is_not_null()) if len(daily) else rows[:0]
    if part.height == 0:
        return
    code, y = part.get_column("_code").to_numpy(), part.get_column("y").to_numpy()
    new = np.append(True, code[1:] != code[:-1])
    starts = np.flatnonzero(new)
    series = np.cumsum(new) - 1
    place = np.arange(len(code)) - starts[series]
    change = np.diff(y, prepend=0.0)
    inside = ~new  # the first row of a series changed from nothing
    series, place, change = series[inside], place[inside] - 1, change[inside]
    count = np.bincount(series, minlength=len(starts))
    enough = count + 1 >= ROWS_FOR_A_WEEK
    change = change - (np.bincount(series, weights=change, minlength=len(starts)) / np.maximum(count, 1))[series]
    five, seven = (_explained(series, place, change, count, period) for period in (5, 7))
    false = enough & (five > 0.2) & (five > 4 * seven)
    first = np.zeros(part.height, dtype=bool)
    first[starts[false]] = True
    what = "series with a row for every day of the week and a pattern of five days (business days under false dates)"
    _add(findings, _finding("calendar", "warning", part, first, seen, what, "give each row its real date"))


def _explained(
    series: NDArray[np.int64], place: NDArray[np.int64], change: NDArray[np.float64], count: NDArray[np.int64], period: int
) -> NDArray[np.float64]:
    """Share of each series' variance that the mean of each phase explains, beyond what chance would. (S,)."""
    cell = series * period + place % period
    size = len(count) * period
    sums, counts = np.bincount(cell, weights=change, minlength=size), np.bincount(cell, minlength=size)
    between = (sums**2 / np.maximum(counts, 1)).reshape(-1, period).sum(axis=1)
    total = np.bincount(series, weights=change**2, minlength=len(count))
    chance = (period - 1) / np.maximum(count - 1, period)
    share = np.divide(between, total, out=np.zeros(len(count)), where=total > 0)
    return np.maximum(0.0, (share - chance) / (1 - chance))


def missing_future(panel_end: pl.DataFrame, future: pl.DataFrame, frequency: str, horizon: int) -> pl.DataFrame:
    """The rows (`unique_id, ds`) that a frame of known-future covariates lacks.

    panel_end: `unique_id, ds` of the last row of each series.
    """
    parts = []
    for name, end in panel_end.select("unique_id", "ds").iter_rows():
        last = end if isinstance(end, int) else np.datetime64(end)
        parts.append(pl.DataFrame({"unique_id": [name] * horizon, "ds": continue_grid(last, frequency, horizon)}))
    needed = pl.concat(parts).with_columns(pl.col("ds").cast(panel_end.schema["ds"]))
    given = future.select(pl.col("unique_id").cast(pl.String), pl.col("ds").cast(panel_end.schema["ds"]))
    return needed.join(given, on=["unique_id", "ds"], how="anti", maintain_order="left")


def check_future(
    history: pl.DataFrame, future: pl.DataFrame, covariates: Sequence[str], *, frequency: str, horizon: int
) -> tuple[pl.DataFrame, Report]:
    """Known-future covariates, aligned to the `horizon` rows after each series' last one, and what is wrong with them.

    Rows are matched by id and stamp and never by position. Both frames have `unique_id` and `ds`; `history` as `check`
    gives it. The returned frame is sorted and holds exactly the needed rows.
    """
    ends = history.group_by("unique_id").agg(pl.col("ds").max()).sort("unique_id")
    findings: list[Finding] = []
    absent = [c for c in covariates if c not in future.columns]
    extra = [c for c in future.columns if c not in ("unique_id", "ds", *history.columns)]
    if absent:
        message = f"the future frame lacks the covariates {', '.join(map(repr, absent))}"
        message += f" and has the unexpected {', '.join(map(repr, extra))}" if extra else ""
        findings.append(Finding("covariates", "error", (), (len(absent),), (), message, "rename or add the columns"))
        return future, Report("the future frame", future.height, ends.height, None, {frequency: ends.height}, tuple(findings))
    rows = future.select(
        pl.col("unique_id").cast(pl.String), stamps(future.get_column("ds"), "the future frame").alias("ds"), *covariates
    )
    known = rows.get_column("unique_id").is_in(ends.get_column("unique_id").to_list())
    strangers = rows.filter(~known).get_column("unique_id").unique().sort().to_list()
    if strangers:
        message = f"{len(strangers)} series of the future frame have no history: {', '.join(map(repr, strangers[:NAMED_SERIES]))}"
        findings.append(
            Finding("unknown_series", "warning", tuple(strangers), (1,) * len(strangers), ("",) * len(strangers), message, "ignored")
        )
    rows = rows.filter(known)
    twice = rows.select(pl.struct("unique_id", "ds").is_duplicated()).to_series()
    lacking = missing_future(ends, rows, frequency, horizon)
    for kind, bad, what in (
        ("duplicates", rows.filter(twice), "rows of the future frame share id and stamp"),
        ("missing_rows", lacking, f"rows of the next {horizon} steps are not in the future frame"),
        *(
            ("missing", rows.filter(pl.col(c).is_null() | (pl.col(c).is_nan() if rows.schema[c].is_float() else pl.lit(False))),
             f"values of covariate {c!r} are missing in the future frame")
            for c in covariates
        ),
    ):  # fmt: skip
        if bad.height:
            groups = bad.group_by("unique_id", maintain_order=True).agg(pl.len(), pl.col("ds").first())
            told = ", ".join(f"'{n}' {k} (first {ds})" for n, k, ds in groups.head(NAMED_SERIES).iter_rows())
            findings.append(
                Finding(
                    kind, "error", tuple(groups["unique_id"]), tuple(groups["len"]), tuple(map(str, groups["ds"])),
                    f"{bad.height} {what}: {told}", "give one value for every id and step of the horizon",
                )
            )  # fmt: skip
    aligned = rows.unique(["unique_id", "ds"], keep="first").sort("unique_id", "ds")
    grid = pl.concat([aligned.select("unique_id", "ds"), lacking]).sort("unique_id", "ds") if lacking.height else aligned
    wanted = grid.join(ends.rename({"ds": "_end"}), on="unique_id").filter(pl.col("ds") > pl.col("_end"))
    wanted = wanted.group_by("unique_id", maintain_order=True).head(horizon).select("unique_id", "ds")
    report = Report("the future frame", future.height, ends.height, None, {frequency: ends.height}, tuple(findings))
    return wanted.join(aligned, on=["unique_id", "ds"], how="left").sort("unique_id", "ds"), report


@dataclass(frozen=True)
class Vocabulary:
    """Levels of a categorical column, sorted, so that no order of rows changes a code.

    Code 0 is reserved for levels never seen, code 1 for a missing value; the levels follow.
    """

    levels: tuple[str, ...]

    @classmethod
    def of(cls, values: Iterable[Any]) -> Vocabulary:
        return cls(tuple(sorted({str(v) for v in values if v is not None})))

    def __len__(self) -> int:
        return len(self.levels) + 2

    def encode(self, values: pl.Series) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Codes (n,), and the levels that are not known, each once."""
        place = {level: i + 2 for i, level in enumerate(self.levels)}
        texts = values.cast(pl.String).to_list()
        unknown = sorted({t for t in texts if t is not None and t not in place})
        return np.array([1 if t is None else place.get(t, 0) for t in texts], dtype=np.int64), tuple(unknown)

    def to_json(self) -> dict[str, Any]:
        return {"levels": list(self.levels)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Vocabulary:
        return cls(tuple(data["levels"]))
