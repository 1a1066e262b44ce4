"""The scheduled job: every series of a table, forecast as of a date, and nothing lost or doubled whatever happens.

A job is a YAML file (`Job`); `run(job, as_of)` does it. The series, sorted by id, are cut into shards; a shard is read,
checked, forecast, and kept as a Parquet part in the folder of the run. The run key names everything that decides the
result but the data: job, date, model version, settings. A part is named by its shard and by a digest of the rows that it
was made from. So a run that was killed goes on where it stopped, a run that was finished makes the same table again, and
a table that has changed since is forecast anew where it changed. The output is put together from all parts at the end and
replaced as a whole.

A series that cannot be forecast costs only itself: it is reported and the others are delivered.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pydantic
import torch
import yaml
from filelock import FileLock, Timeout

from connectors import tables
from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI
from pipelines.forecasting.calendar import on_wall_clock, to_zone
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.job import forecast_panel, load_forecaster
from pipelines.forecasting.reading import clocked, with_empty
from pipelines.forecasting.validation import Rules, check, check_future
from pipelines.windows import Panel, panel, parse_frequency, ray_cluster

KEPT_RUNS = 7
"""Folders of parts that stay after a run: a week of nights, for a look at what was delivered."""
FAILURES = {"unique_id": pl.String, "reason": pl.String}
NOTHING = pl.DataFrame(schema={"unique_id": pl.String})
_DIGEST = 16


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Settings)


def _without_secrets(uri: str) -> str:
    try:
        tables.refuse_secrets(uri)
    except UserError as error:
        raise ValueError(str(error)) from None
    return uri


Uri = Annotated[str, pydantic.AfterValidator(_without_secrets)]


class Input(Settings):
    uri: Uri
    id_column: str | None = "unique_id"
    time_column: str = "ds"
    target_column: str = "y"
    csv: tables.CsvForm | None = None


class Future(Settings):
    """A table of the covariates known ahead, with the ids and stamps of the input under the same names."""

    uri: str
    csv: tables.CsvForm | None = None


class Output(Settings):
    """uri: the table to write; `{as_of}` in it becomes the date. keep_other_dates: one table for all dates; a run
    replaces the rows of its own date and leaves the others."""

    uri: Uri
    keep_other_dates: bool = False


class Model(Settings):
    name: str
    version: str = pydantic.Field("champion", coerce_numbers_to_str=True)  # YAML reads 3 as a number


class Job(Settings):
    """What a job file holds.

    future: covariates known ahead; where absent the input's own rows from the date on hold them. zone: of stamps without one, and of
    `--as-of`. history: rows a series is read back from the date (all where absent).
    horizon: steps (the model's own where absent). rules: see `pipelines.forecasting.validation.Rules`; strict by default.
    stale_after: steps after which a series without new rows is reported and not forecast. series_per_shard bounds memory.
    executor: `ray` works on `workers` shards at a time. work: folder of the parts.
    """

    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9._-]+$")
    input: Input
    future: Future | None = None
    output: Output
    model: Model
    tracking_uri: str = DEFAULT_TRACKING_URI
    zone: str | None = None
    history: int | None = pydantic.Field(default=None, ge=1)
    horizon: int | None = pydantic.Field(default=None, ge=1)
    stale_after: int | None = pydantic.Field(default=None, ge=0)
    rules: Rules = Rules()
    series_per_shard: int = pydantic.Field(default=2000, ge=1)
    executor: Literal["local", "ray"] = "local"
    workers: int = pydantic.Field(default=2, ge=1)
    work: Path = Path("runs/batch")

    @pydantic.field_validator("rules", mode="before")
    @classmethod
    def _only_rules(cls, value: Any) -> Any:
        if isinstance(value, dict):
            # The step and the windows are the model's, the zone is the job's.
            allowed = {f.name for f in dataclasses.fields(Rules)} - {"frequency", "look_back", "horizon", "zone"}
            if unknown := sorted(set(value) - allowed):
                raise ValueError(f"unknown {', '.join(unknown)}; there are {', '.join(sorted(allowed))}")
        return value


@dataclass(frozen=True)
class Loaded:
    """A model to forecast with. name: `NAME/VERSION`, part of every row. weights, config: where a worker loads it from."""

    name: str
    weights: Path
    config: dict[str, Any]

    @property
    def estimator(self) -> TitansForecaster:
        return _estimator(str(self.weights), json.dumps(self.config, sort_keys=True))


@dataclass(frozen=True)
class Shard:
    """One part of the work, complete in itself, so that it can be sent to a worker: the series from `first` to `last`."""

    index: int
    first: str
    last: str
    source: str
    job: Job
    model: Loaded
    as_of: str
    folder: Path
    future: str | None = None
    """Where the covariates known ahead are read from; None: from the source itself."""


@dataclass(frozen=True)
class Part:
    """A finished shard: its files, how many series were forecast and failed, and what it took. resumed: it lay there already."""

    index: int
    forecasts: Path
    failures: Path
    series: int
    failed: int
    rows: int
    seconds: float
    resumed: bool


@dataclass(frozen=True)
class Summary:
    """The outcome of a run; `failures` maps the first failed series to their reasons (`failures_file` holds all)."""

    job: str
    as_of: str
    model: str
    run_key: str
    series: int
    failed: int
    rows: int
    shards: int
    resumed: int
    seconds: float
    output: str
    failures_file: str
    failures: dict[str, str]
    tracking_run: str | None = None

    def line(self) -> str:
        told = "; ".join(f"{name or 'rows without id'}: {reason}" for name, reason in self.failures.items())
        bad = f", {self.failed} failed ({told}; all in {self.failures_file})" if self.failed else ""
        again = f", {self.resumed} of {self.shards} shards from before" if self.resumed else ""
        return (
            f"{self.job} as of {self.as_of}: {self.series} series forecast by {self.model}{bad}; {self.rows} rows in "
            f"{self.output} ({self.seconds:.1f} s{again}, run {self.run_key})"
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_job(path: str | Path) -> Job:
    """A job file. Raises UserError that names the file and each field at fault."""
    return read_settings(path, Job, "docs/examples/job.yaml")


def read_settings(path: str | Path, kind: type[S], example: str) -> S:
    """The settings of a YAML file. Raises UserError that names the file, each field at fault, and an example."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the job file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no settings: see {example}")
    try:
        return kind.model_validate(data)
    except pydantic.ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path}: {faults}; see {example}") from None


def run(job: Job, as_of: str) -> Summary:
    """Do the job with the registered model, inside an MLflow run with a child run for each shard that was worked on."""
    from pipelines import tracking

    found = tracking.load_model(job.model.name, job.model.version, job.tracking_uri)
    model = Loaded(f"{found.name}/{found.version}", found.weights, found.config)
    store = tracking.open_store(job.tracking_uri)
    key = run_key(job, model, as_of)
    params = {
        "job": job.name, "as_of": as_of, "run_key": key, "input": job.input.uri,
        "output": job.output.uri, "model": model.name, "executor": job.executor, "series_per_shard": job.series_per_shard,
    }  # fmt: skip
    with tracking.run(store, f"{job.name} {as_of}", params=params, tags={"run_key": key}) as parent:

        def tell(part: Part) -> None:
            if not part.resumed:
                with tracking.run(store, f"shard {part.index}", parent=parent) as child:
                    child.log_metrics(
                        {"series": part.series, "failed": part.failed, "rows": part.rows, "seconds": part.seconds}
                    )

        summary = run_shards(job, model, as_of, tell)
        parent.log_metrics(
            {
                "series": summary.series, "failed": summary.failed, "rows": summary.rows, "shards": summary.shards,
                "resumed": summary.resumed, "seconds": summary.seconds,
            }
        )  # fmt: skip
        parent.log_file(summary.failures_file)
    return dataclasses.replace(summary, tracking_run=parent.id)


def run_key(job: Job, model: Loaded, as_of: str) -> str:
    """Names everything that decides the result but the rows of the table: 16 hexadecimal digits."""
    settings = job.model_dump(mode="json", exclude={"executor", "workers", "work", "tracking_uri"})
    weights = hashlib.sha256(model.weights.read_bytes()).hexdigest()
    try:
        program = importlib.metadata.version("tethys-streams")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is on the path but not installed
        program = "checkout"
    document = [settings, model.name, weights, model.config, as_of, program]
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:_DIGEST]


def run_shards(job: Job, model: Loaded, as_of: str, tell: Any = lambda part: None) -> Summary:
    """The job itself, without a registry or tracking. `tell(part)` is called after each shard.

    Raises UserError for what a person must put right, or where no series at all could be forecast.
    """
    began = time.monotonic()
    _moment(as_of, job.zone, model.estimator.frequency_)  # a mistake here must not wait for the first shard
    key = run_key(job, model, as_of)
    folder = job.work / job.name / key
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        source = _staged(job.input, job.input.id_column, folder / "input.parquet")
        if job.future is not None and not model.estimator.encoder_.ahead:
            # No mistake that may stop a night: the next version of the model may want them again.
            print(f"warning: {model.name} knows no covariate ahead, and reads nothing of the future {job.future.uri}", file=sys.stderr)
        future = None if job.future is None else _staged(job.future, job.input.id_column, folder / "future.parquet")
        shards, no_id = _shards(job, model, as_of, source, folder)
        parts = []
        shards = [dataclasses.replace(shard, future=future) for shard in shards]
        for part in _local(shards) if job.executor == "local" else _on_ray(shards, job.workers):
            parts.append(part)
            tell(part)
        parts.sort(key=lambda p: p.index)
        failures = pl.concat([pl.read_parquet(p.failures) for p in parts])
        if no_id:
            reason = f"{no_id} rows have no value in column {job.input.id_column!r}"
            failures = pl.concat([pl.DataFrame({"unique_id": [""], "reason": [reason]}, schema=FAILURES), failures])
        failures_file = folder / "failures.csv"
        tables.write(failures, failures_file)
        first = dict(failures.head(3).iter_rows())
        made = [p.forecasts for p in parts if p.rows]
        rows = sum(p.rows for p in parts)
        if not made:
            told = "; ".join(f"{name}: {reason}" for name, reason in first.items()) or "no row is older"
            raise UserError(f"no series of {job.input.uri} could be forecast as of {as_of}: {told}")
        output = _deliver(made, job, as_of)
        _tidy(folder, parts)
    return Summary(
        job.name, as_of, model.name, key, sum(p.series for p in parts), failures.height, rows,
        len(parts), sum(p.resumed for p in parts), round(time.monotonic() - began, 2), output, str(failures_file), first,
    )  # fmt: skip


def forecast_shard(shard: Shard) -> Part:
    """Read, check, forecast and keep one shard, unless it lies there already, made from the same rows."""
    began = time.monotonic()
    rows, future = _read(shard)
    made_from = _bytes(rows) if future is None else _bytes(rows) + _bytes(future)
    digest = hashlib.blake2b(made_from, digest_size=_DIGEST // 2).hexdigest()
    stem = shard.folder / f"shard-{shard.index:05d}-{digest}"
    forecasts, failures = stem.with_suffix(".parquet"), stem.with_suffix(".failed.parquet")
    resumed = forecasts.exists() and failures.exists()
    if not resumed:
        with _one_thread():
            made, lost = forecast_rows(rows, shard.job, shard.model, shard.as_of, future)
        # The forecasts come last: where they lie the shard is whole.
        tables.write(lost, failures)
        tables.write(made, forecasts)
    series, count = pl.scan_parquet(forecasts).select(pl.col("unique_id").n_unique(), pl.len()).collect().row(0)
    failed = pl.scan_parquet(failures).select(pl.len()).collect().item()
    return Part(shard.index, forecasts, failures, series, failed, count, time.monotonic() - began, resumed)


def forecast_rows(
    rows: pl.DataFrame, job: Job, model: Loaded, as_of: str, future: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Forecasts of the series of a long frame that ends before `as_of`, and the series that failed with their reasons.

    future: rows that hold the covariates known ahead, named as in the input.

    Forecasts: unique_id, ds (in the zone), mean, the quantiles, as_of, model, short_history (fewer rows than the
    look-back, so that the forecast rests on little). Both frames are sorted by id.
    """
    estimator = model.estimator
    if rows.height == 0:  # series that begin later than the date
        return NOTHING, pl.DataFrame(schema=FAILURES)
    rules = dataclasses.replace(job.rules, frequency=estimator.frequency_, zone=job.zone)
    reasons: dict[str, str] = {}
    source = job.input
    checked = check(
        rows, rules, id_column=source.id_column, time_column=source.time_column, target_column=source.target_column,
        source=source.uri,
    )  # fmt: skip
    for finding in checked.report.of_level("error"):
        for name, count, stamp in zip(finding.series, finding.counts, finding.stamps, strict=True):
            at = f" (first {stamp})" if stamp else ""
            reasons.setdefault(name, f"{finding.kind}: {count} rows{at}; {finding.remedy}")
        if not finding.series:
            reasons.setdefault("", f"{finding.kind}: {finding.message}")
    good = checked.frame.filter(~pl.col("unique_id").is_in(list(checked.report.failed)))
    present = set(good.get_column("unique_id").unique())
    for name in set(checked.steps.get_column("unique_id")) - present:
        reasons.setdefault(name, "empty_series: no value to forecast from")
    if job.history is not None:
        good = good.group_by("unique_id", maintain_order=True).tail(job.history)
    parts = []
    if good.height:
        names = estimator.encoder_.names
        known = with_empty(good, names, rows).select("unique_id", "ds", "y", *names)
        table = panel(known, frequency=estimator.frequency_, covariates=names, source=source.uri)
        nothing = [name for name, seen in zip(table.ids, np.add.reduceat(table.observed, table.offsets[:-1]), strict=True) if not seen]
        stale = _stale(table, job, as_of)
        reasons.update({name: "empty_series: no value to forecast from" for name in nothing})
        reasons.update(stale)
        if estimator.encoder_.ahead:
            future, lacking = _future(table, estimator, job, rules, future)
            reasons = {**lacking, **reasons}
        else:
            future = None
        keep = [i for i, name in enumerate(table.ids) if name not in reasons]
        for part, failed in _forecasts(estimator, _subset(table, keep), job.horizon, future):
            parts.append(part)
            reasons.update(failed)
    failures = pl.DataFrame({"unique_id": list(reasons), "reason": list(reasons.values())}, schema=FAILURES).sort("unique_id")
    if not any(part.height for part in parts):
        return NOTHING, failures
    made = pl.concat(parts, how="diagonal")
    length = dict(zip(table.ids, table.lengths.tolist(), strict=True))
    short = [name for name, rows_ in length.items() if rows_ < estimator.look_back]
    made = made.with_columns(
        to_zone(made.get_column("ds"), estimator.frequency_, checked.report.zone),
        pl.lit(as_of).alias("as_of"),
        pl.lit(model.name).alias("model"),
        pl.col("unique_id").is_in(short).alias("short_history"),
    )
    return made.sort("unique_id", "ds"), failures


def _future(
    table: Panel, estimator: TitansForecaster, job: Job, rules: Rules, rows: pl.DataFrame | None
) -> tuple[pl.DataFrame, dict[str, str]]:
    """Covariates known ahead, on the clock of the series, and the series that lack some with the reason."""
    source, ahead = job.input, estimator.encoder_.ahead
    address = source.uri if job.future is None else job.future.uri
    if rows is None:
        raise UserError(f"the model needs {', '.join(map(repr, ahead))} at the rows of the horizon: give them with the job")
    if source.id_column is not None:
        rows = rows.filter(pl.col(source.id_column).cast(pl.String).is_in(list(table.ids)))
    known, checked = clocked(
        rows, rules, estimator.frequency_, ahead, address, id_column=source.id_column,
        time_column=source.time_column, target_column=source.target_column,
    )  # fmt: skip
    ends = pl.DataFrame({"unique_id": list(table.ids), "ds": table.ds[table.offsets[1:] - 1]})
    _, report = check_future(ends, known, ahead, frequency=estimator.frequency_, horizon=estimator.horizon)
    reasons: dict[str, str] = {}
    for finding in (*checked.of_level("error"), *report.of_level("error")):
        if not finding.series:
            raise UserError(f"{address}: {finding.message}: {finding.remedy}")
        for name, count, stamp in zip(finding.series, finding.counts, finding.stamps, strict=True):
            reasons.setdefault(name, f"future, {finding.kind}: {count} rows (first {stamp}); {finding.remedy}")
    return known, reasons


def _forecasts(
    estimator: TitansForecaster, table: Panel, horizon: int | None, future: pl.DataFrame | None = None
) -> Iterator[tuple[pl.DataFrame, dict[str, str]]]:
    """All series at once; where that fails, one by one, so that only the culprits are lost."""
    if not len(table):
        return
    try:
        mine = None if future is None else future.filter(pl.col("unique_id").is_in(list(table.ids)))
        made = forecast_panel(estimator, table, horizon, future=mine)
    except UserError:
        raise
    except Exception as error:
        if len(table) == 1:
            yield NOTHING, {table.ids[0]: f"{type(error).__name__}: {error}"}
            return
        made = None
    if made is None:
        for i in range(len(table)):
            yield from _forecasts(estimator, _subset(table, [i]), horizon, future)
        return
    numbers = [c for c in made.columns if made.schema[c].is_float()]
    wrong = made.filter(~pl.all_horizontal(pl.col(c).is_finite() for c in numbers))
    names = wrong.get_column("unique_id").unique().to_list()
    good = made.filter(~pl.col("unique_id").is_in(names))
    yield good, {name: "the forecast is not finite" for name in names}


def _subset(table: Panel, keep: Sequence[int]) -> Panel:
    if len(keep) == len(table):
        return table
    return table.take([np.arange(table.offsets[i], table.offsets[i + 1]) for i in keep], [table.ids[i] for i in keep])


def _stale(table: Panel, job: Job, as_of: str) -> dict[str, str]:
    if job.stale_after is None:
        return {}
    from pipelines.windows import position

    until = _moment(as_of, job.zone, table.frequency)
    last = table.ds[table.offsets[1:] - 1]
    ahead, _ = position(np.full(len(last), until, dtype=last.dtype), last, table.frequency)
    return {
        name: f"stale: no row since {str(stamp)[:19]}, {steps - 1} steps before {as_of}"
        for name, stamp, steps in zip(table.ids, last, ahead, strict=True)
        if steps - 1 > job.stale_after
    }


def _moment(as_of: str, zone: str | None, frequency: str) -> Any:
    """The date of the run on the clock of the grid: rows before it are known."""
    try:
        if parse_frequency(frequency)[1] == "i":
            return np.int64(int(as_of))
        given = datetime.fromisoformat(as_of) if len(as_of) > 10 else datetime.combine(date.fromisoformat(as_of), datetime.min.time())
    except ValueError:
        raise UserError(f"--as-of {as_of!r} is no date: write 2018-01-01 or 2018-01-01T06:00") from None
    if given.tzinfo is None:
        if zone is None or on_wall_clock(frequency):
            return np.datetime64(given, "us")
        given = given.replace(tzinfo=ZoneInfo(zone))
    if on_wall_clock(frequency):
        return np.datetime64(given.astimezone(ZoneInfo(zone or "UTC")).replace(tzinfo=None), "us")
    return np.datetime64(given.astimezone(UTC).replace(tzinfo=None), "us")


def _read(shard: Shard) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """The rows of a shard that are known on the date, sorted by id and in the order of the table; and those of its covariates ahead."""
    source, encoder = shard.job.input, shard.model.estimator.encoder_
    keys = [c for c in (source.id_column, source.time_column) if c is not None]
    rows = _of_shard(shard, shard.source, [*keys, source.target_column, *(n for n in encoder.names if n != source.target_column)])
    ds = rows.get_column(source.time_column)
    frequency = shard.model.estimator.frequency_
    until = _moment(shard.as_of, shard.job.zone, frequency)
    known = _before(ds, until, shard.job.zone, frequency, source.uri)
    future = None
    if encoder.ahead:
        # A series may have ended before the date: the rows after its last one are future to it.
        future = rows.select(*keys, *encoder.ahead) if shard.future is None else _of_shard(shard, shard.future, [*keys, *encoder.ahead])
    return rows.filter(known), future


def _of_shard(shard: Shard, address: str, columns: list[str]) -> pl.DataFrame:
    """Some columns of a table for the ids of a shard, sorted by id."""
    id_column = shard.job.input.id_column
    scan = pl.scan_parquet(address, hive_partitioning=True)
    if id_column is not None:
        text = scan.collect_schema()[id_column] == pl.String
        key = pl.col(id_column) if text else pl.col(id_column).cast(pl.String)
        scan = scan.filter(key.is_between(pl.lit(shard.first), pl.lit(shard.last)))
    rows = scan.select(columns).collect(engine="in-memory")
    return rows if id_column is None else rows.sort(id_column, maintain_order=True)


def _before(ds: pl.Series, until: Any, zone: str | None, frequency: str, source: str) -> pl.Series:
    from pipelines.windows import stamps

    if ds.dtype.is_integer():
        return ds < int(until)
    aware = isinstance(ds.dtype, pl.Datetime) and ds.dtype.time_zone is not None
    if not aware and ds.dtype == pl.String and ds.str.contains(r"\d\d:?\d\d\s*([+-]\d\d:?\d\d|Z)$").any():
        from pipelines.forecasting.validation import instants

        ds, aware = instants(ds, source), True
    limit = until
    if zone is not None and aware and on_wall_clock(frequency):
        limit = _shift(until, zone, to_utc=True)
    elif zone is not None and not aware and not on_wall_clock(frequency):
        limit = _shift(until, zone, to_utc=False)
    return stamps(ds, source) < limit.astype("datetime64[us]").item()


def _shift(moment: np.datetime64, zone: str, *, to_utc: bool) -> np.datetime64:
    given = moment.astype("datetime64[us]").item()
    if to_utc:
        return np.datetime64(given.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC).replace(tzinfo=None), "us")
    return np.datetime64(given.replace(tzinfo=UTC).astimezone(ZoneInfo(zone)).replace(tzinfo=None), "us")


def _staged(table: Input | Future, id_column: str | None, copy: Path) -> str:
    """Where shards read from: Parquet files of their own accord, any other table from a copy sorted by id.

    Every shard looks at the whole of an unsorted Parquet file; of one sorted by id it reads its own row groups only.
    """
    uri = table.uri
    path = Path(uri)
    if uri.endswith(".parquet") and "://" not in uri:
        if not path.exists() and not any(c in uri for c in "*?["):
            raise UserError(f"'{uri}' does not exist")
        return uri
    if path.is_dir() and not (path / "_delta_log").is_dir():
        return f"{uri.rstrip('/')}/**/*.parquet"
    frame = tables.read(uri, csv=table.csv)
    if id_column is not None and id_column in frame.columns:
        frame = frame.sort(id_column, maintain_order=True)
    tables.write(frame, copy)
    return str(copy)


def _shards(job: Job, model: Loaded, as_of: str, source: str, folder: Path) -> tuple[list[Shard], int]:
    """The series in order of their ids, so many a shard; and how many rows have no id."""
    columns = pl.scan_parquet(source, hive_partitioning=True).collect_schema().names()
    wanted = [c for c in (job.input.id_column, job.input.time_column, job.input.target_column) if c is not None]
    wanted += model.estimator.encoder_.names
    if absent := [c for c in wanted if c not in columns]:
        raise UserError(
            f"{job.input.uri} has no column {', '.join(map(repr, absent))}; it has {', '.join(map(repr, columns[:20]))}"
        )
    if job.input.id_column is None:
        return [Shard(0, "", "", source, job, model, as_of, folder)], 0
    ids = pl.scan_parquet(source, hive_partitioning=True).select(pl.col(job.input.id_column).cast(pl.String))
    no_id = ids.select(pl.first().null_count()).collect().item()
    names = ids.unique().collect().to_series().drop_nulls().sort()
    if not len(names):
        raise UserError(f"{job.input.uri} holds no rows: nothing to forecast")
    size = job.series_per_shard
    groups = [names[at : at + size] for at in range(0, len(names), size)]
    return [Shard(i, g[0], g[-1], source, job, model, as_of, folder) for i, g in enumerate(groups)], no_id


def _local(shards: Sequence[Shard]) -> Iterator[Part]:
    for shard in shards:
        yield forecast_shard(shard)


def _on_ray(shards: Sequence[Shard], workers: int) -> Iterator[Part]:
    """At most `workers` shards at a time; one whose worker died is done again by another."""
    ray_cluster(workers)
    import ray

    settings = {
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "POLARS_MAX_THREADS": "1",
        # Polars' allocator gives memory back within half a second and faults it in again for the next step: a sixth of a shard's time,
        # and memory traffic that workers side by side share. A worker may keep what its largest shard took.
        "_RJEM_MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1",
    }  # fmt: skip
    task = ray.remote(num_cpus=1, max_retries=5, runtime_env={"env_vars": settings})(_shard_or_mistake)
    waiting = list(reversed(shards))
    running: list[Any] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(task.remote(waiting.pop()))
            done, running = ray.wait(running, num_returns=1)
            outcome = ray.get(done[0])
            if isinstance(outcome, str):
                raise UserError(outcome)
            yield outcome
    finally:
        for left in running:
            ray.cancel(left, force=True)


def _shard_or_mistake(shard: Shard) -> Part | str:
    """A mistake comes back as its message: Ray would wrap it in a kind of its own."""
    try:
        return forecast_shard(shard)
    except UserError as mistake:
        return str(mistake)


def _deliver(parts: Sequence[Path], job: Job, as_of: str) -> str:
    """Replace the table, or the rows of this date in it. The parts are read one at a time."""
    uri = job.output.uri.replace("{as_of}", as_of.replace(":", ""))
    if "://" not in uri:
        Path(uri).parent.mkdir(parents=True, exist_ok=True)
    forecasts = (pl.read_parquet(part) for part in parts)
    tables.write(forecasts, uri, replacing={"as_of": as_of} if job.output.keep_other_dates else None)
    return uri


def _tidy(folder: Path, parts: Sequence[Part]) -> None:
    """Leave what this run delivered, and the newest runs of the job."""
    kept = {p.forecasts for p in parts} | {p.failures for p in parts}
    for file in folder.glob("shard-*"):
        if file not in kept:
            file.unlink()
    for copy in ("input.parquet", "future.parquet"):
        (folder / copy).unlink(missing_ok=True)
    runs = sorted((p for p in folder.parent.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in runs[KEPT_RUNS:]:
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = FileLock(f"{folder}.lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(lock.acquire(timeout=0))
        except Timeout:
            raise UserError(f"this run is going on already ({folder}.lock is held): wait for it") from None
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: sums come out the same on a machine with more cores, so that a resumed run equals an undisturbed one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=2)
def _estimator(weights: str, config: str) -> TitansForecaster:
    return load_forecaster(weights, json.loads(config))


def _bytes(rows: pl.DataFrame) -> bytes:
    """The rows as bytes that are the same whenever the rows are."""
    buffer = io.BytesIO()
    rows.rechunk().write_ipc(buffer)
    return buffer.getvalue()


