"""A table as a job reads it: checked by rules, on the clock of its grid, with its covariates and their future beside it.

Every job goes through this door, so that all refuse the same tables: strict where no rule says otherwise.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.covariates import split_future
from pipelines.forecasting.validation import Report, Rules, check
from pipelines.windows import Executor, Panel, panel, partitions, ray_cluster


@dataclass(frozen=True, kw_only=True)
class Reading:
    """rules: what happens to what is wrong; their `zone` is that of stamps without one. csv: how CSV files are written. wide: a column a
    series, and the column of the stamps. future: table of the covariates known ahead, for the rows that are to be forecast."""

    rules: Rules = dataclasses.field(default_factory=Rules)
    csv: tables.CsvForm | None = None
    wide: bool = False
    future: str | None = None


STRICT = Reading()
"""What jobs read by unless they are told otherwise."""


@dataclass(frozen=True)
class Table:
    """panel: the series. future: `unique_id, ds` and covariates known ahead, on the same clock. zone: of the stamps, where one is known.
    report: what the rules found."""

    panel: Panel
    future: pl.DataFrame | None
    zone: str | None
    report: Report


def read_table(
    uri: str,
    reading: Reading = STRICT,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    frequency: str | None = None,
    covariates: Sequence[str] = (),
    ahead: Sequence[str] = (),
    executor: Executor = "local",
) -> Table:
    """The series of a table; `ahead` names those of the covariates that the rows after the last must have.

    Where no table of the future is named, rows after a series' last value are its future, if there are covariates to be known ahead.
    Warnings go to standard error, and which series are shorter than a training window, where the rules say how long that is. Raises
    UserError with everything that the rules refuse.
    """
    if twice := sorted({name for name in covariates if covariates.count(name) > 1}):
        raise UserError(f"covariate {', '.join(map(repr, twice))} is named twice: it is either future, historic or static")
    if reading.future is not None and not ahead:
        raise UserError(f"no covariate is to be known ahead here, and {reading.future} is given as the table of the future: leave it out, or name "
                        "the covariates (--future-covariate)")
    if taken := [name for name in covariates if name in (id_column, time_column, target_column)]:
        raise UserError(f"column {', '.join(map(repr, taken))} is the id, the time or the target, and no covariate: leave it out")
    rules = dataclasses.replace(reading.rules, frequency=frequency)
    frame = _frame(uri, reading.csv, executor)
    if reading.wide:
        if covariates:
            raise UserError(f"a wide table has no room for the covariates {', '.join(map(repr, covariates))}: bring it into the long format")
        frame, id_column, target_column = long(frame, time_column, uri), "unique_id", "y"
    columns: dict[str, Any] = {"id_column": id_column, "time_column": time_column, "target_column": target_column}
    future = None
    if ahead and reading.future is None and {time_column, target_column, *([id_column] if id_column else [])} <= set(frame.columns):
        frame, future = split_future(frame, id_column, time_column, target_column)
    checked = check(frame, rules, source=uri, **columns)
    for finding in checked.report.findings:
        if finding.level == "warning" or (finding.level, finding.kind) == ("note", "short"):
            print(f"{finding.level}: {finding.kind}: {finding.message}: {finding.remedy}", file=sys.stderr)
    checked.report.require()
    steps = list(checked.report.frequencies)
    step = frequency or (steps[0] if len(steps) == 1 else None)
    found = panel(with_empty(checked.frame, covariates, frame), frequency=step, covariates=covariates, source=uri)
    if ahead and reading.future is not None:
        future = _frame(reading.future, reading.csv, "local")
    if future is not None:
        future, report = clocked(future, rules, found.frequency, ahead, reading.future or uri, **columns)
        report.require()
    return Table(found, future, checked.report.zone, checked.report)


def clocked(
    future: pl.DataFrame, rules: Rules, frequency: str, ahead: Sequence[str], source: str, *, id_column: str | None, time_column: str,
    target_column: str,
) -> tuple[pl.DataFrame, Report]:  # fmt: skip
    """Rows of a table of the future as `unique_id, ds, covariates` on the clock of the series, and what is wrong with them."""
    absent = [c for c in (id_column, time_column) if c is not None and c not in future.columns]
    if absent:
        raise UserError(f"{source} has no column {', '.join(map(repr, absent))}: a table of the future has the ids and stamps of the other")
    kept = [c for c in ahead if c in future.columns]
    names = {f"covariate {i}": c for i, c in enumerate(kept)}  # a covariate may be called as the target is
    rows = future.select(
        *(pl.col(c) for c in (id_column, time_column) if c is not None), *(pl.col(c).alias(a) for a, c in names.items())
    ).with_columns(pl.lit(0.0).alias(target_column))
    if rows.height == 0:
        nothing = pl.DataFrame(schema={"unique_id": pl.String, "ds": pl.Datetime("us"), **{c: future.schema[c] for c in kept}})
        return nothing, Report(source, 0, 0, None, {}, ())
    easy = dataclasses.replace(rules, frequency=frequency, gaps="mask", look_back=None, horizon=None)
    checked = check(rows, easy, id_column=id_column, time_column=time_column, target_column=target_column, source=source)
    found = with_empty(checked.frame, list(names), rows)
    return found.select("unique_id", "ds", *(pl.col(a).alias(c) for a, c in names.items())), checked.report


def with_empty(frame: pl.DataFrame, names: Sequence[str], before: pl.DataFrame) -> pl.DataFrame:
    """A checked frame with the columns that `check` left out because they hold no value: here they are covariates that lack."""
    lost = [name for name in names if name not in frame.columns and name in before.columns]
    return frame.with_columns(pl.lit(None, dtype=before.schema[name]).alias(name) for name in lost)


def long(frame: pl.DataFrame, time_column: str, source: str) -> pl.DataFrame:
    """A column a series -> `unique_id, ds, y`, where the column of the stamps keeps its name."""
    if time_column not in frame.columns:
        raise UserError(f"{source} has no column {time_column!r}; it has {', '.join(map(repr, frame.columns[:20]))}: name the time column")
    series = [c for c in frame.columns if c != time_column and frame.schema[c] != pl.Null]
    texts = [c for c in series if not frame.schema[c].is_numeric()]
    if texts or not series:
        named = f"column {', '.join(map(repr, texts[:5]))} is no number" if texts else "it has no other column"
        raise UserError(f"{source} is read as a wide table, a column a series, and {named}: leave it out, or read a long table")
    return frame.unpivot(series, index=time_column, variable_name="unique_id", value_name="y")


def _frame(uri: str, csv: tables.CsvForm | None, executor: Executor) -> pl.DataFrame:
    if executor == "local":
        return tables.read(uri, csv=csv)
    ray_cluster()
    import ray

    # One worker is one core: polars would otherwise start as many threads in each worker as the machine has cores.
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": {"POLARS_MAX_THREADS": "1"}})(_frame_or_mistake)
    parts = ray.get([task.remote(part, csv) for part in partitions(uri)])
    for mistake in (part for part in parts if isinstance(part, str)):
        raise UserError(mistake)
    return pl.concat([part for part in parts if isinstance(part, pl.DataFrame)], how="vertical_relaxed")


def _frame_or_mistake(uri: str, csv: tables.CsvForm | None) -> pl.DataFrame | str:
    """A mistake comes back as its message: of exceptions Ray logs tracebacks, and raises whichever came first."""
    try:
        return tables.read(uri, csv=csv)
    except UserError as mistake:
        return str(mistake)
