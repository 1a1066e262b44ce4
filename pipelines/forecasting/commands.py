"""Commands of the forecasting jobs that need more than options: the report on a table, and the run of a job file.

`pipelines.cli` mounts them. Exit statuses are for schedulers: 0 all is well, 1 a fault of the program, 2 a mistake that
a person puts right (a file, a rule, an option), 3 some series failed and all others were delivered.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI

if TYPE_CHECKING:
    from pipelines.forecasting.reading import Reading

SOME_SERIES_FAILED = 3


class CalendarName(StrEnum):
    hour = "hour"
    weekday = "weekday"
    monthday = "monthday"
    month = "month"
    year = "year"


Data = Annotated[
    str, typer.Argument(help="Table of the series: .csv, .csv.gz, .parquet, a folder or a glob of Parquet files, or a URI.")
]
IdColumn = Annotated[str, typer.Option(help="Column that names the series; an empty name takes the table as one series.")]
TimeColumn = Annotated[str, typer.Option(help="Column of the time stamps, or of whole numbers that count steps.")]
TargetColumn = Annotated[str, typer.Option(help="Column to forecast.")]
Frequency = Annotated[str | None, typer.Option(help="Step of the series: 15m, 1h, 1d, 1w, 1mo ...; inferred when not given.")]
Horizon = Annotated[int, typer.Option(min=1, help="Steps to forecast.")]
LookBack = Annotated[int, typer.Option(min=1, help="Steps that a forecast is made from, beside the memory.")]
FutureCovariate = Annotated[list[str] | None, typer.Option(help="Column that is known ahead (price, promotion); repeatable.")]
HistoricCovariate = Annotated[list[str] | None, typer.Option(help="Column that is known once it happened; repeatable.")]
StaticCovariate = Annotated[list[str] | None, typer.Option(help="Column with one value a series; repeatable.")]
CalendarFeature = Annotated[
    list[CalendarName] | None, typer.Option(help="Feature of the stamp on the wall clock of the zone; repeatable.")
]
EtsSeries = Annotated[
    int | None,
    typer.Option(min=0, help="Series that the baseline ETS is fitted to, drawn at random; as many as ten seconds allow when not given."),
]
ModelName = Annotated[str, typer.Option(help="Name of the model in the registry.")]
Version = Annotated[str, typer.Option(help="Version of the model: a number or an alias.")]
TrackingUri = Annotated[
    str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store: a SQLite file, or the address of a tracking server.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


class TableByDefault(TyperGroup):
    """`tethys forecast run JOB` runs a job file; `tethys forecast TABLE` is the forecast of one table."""

    default = "table"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = [self.default, *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Options before the table belong to the default command too.
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


forecasts = typer.Typer(
    cls=TableByDefault,
    no_args_is_help=True,
    help="Forecast a table, or run a scheduled job.",
    epilog="Example: tethys forecast sales.parquet --model-name sales, or tethys forecast run job.yaml --as-of 2018-01-01",
)


class Missing(StrEnum):
    error = "error"
    mask = "mask"
    fill = "fill"


class Duplicates(StrEnum):
    error = "error"
    first = "first"
    last = "last"
    mean = "mean"
    sum = "sum"


class Infinite(StrEnum):
    error = "error"
    mask = "mask"


class Stray(StrEnum):
    error = "error"
    drop = "drop"


class Empty(StrEnum):
    error = "error"
    skip = "skip"


class Ambiguous(StrEnum):
    error = "error"
    order = "order"
    earliest = "earliest"
    latest = "latest"


def _reading(
    zone: Annotated[str | None, typer.Option(help="Zone of stamps without one, and of days and weeks: an IANA name.")] = None,
    missing: Annotated[Missing, typer.Option(help="What happens to empty targets.")] = Missing.error,
    gaps: Annotated[Missing, typer.Option(help="What happens to absent rows.")] = Missing.error,
    duplicates: Annotated[Duplicates, typer.Option(help="What happens to rows of one stamp.")] = Duplicates.error,
    infinite: Annotated[Infinite, typer.Option(help="What happens to targets that are infinite or beyond 1e30.")] = Infinite.error,
    empty: Annotated[Empty, typer.Option(help="What happens to series without any value.")] = Empty.error,
    off_grid: Annotated[Stray, typer.Option(help="What happens to rows between the steps of the frequency.")] = Stray.error,
    ambiguous: Annotated[Ambiguous, typer.Option(help="Wall-clock times that happened twice, in autumn.")] = Ambiguous.error,
    nonexistent: Annotated[Stray, typer.Option(help="Wall-clock times that never happened, in spring.")] = Stray.error,
    na_value: Annotated[list[float] | None, typer.Option(help="Number that stands for a missing value; repeatable.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="A column a series, beside the column of the stamps.")] = False,
    future_table: Annotated[str | None, typer.Option(help="Table of the covariates known ahead, for the rows to be forecast.")] = None,
    separator: Annotated[str | None, typer.Option(help="Between the cells of CSV files; a comma when not given.")] = None,
    decimal_comma: Annotated[bool, typer.Option("--decimal-comma", help="Numbers in CSV files are written 1.234,5.")] = False,
    missing_text: Annotated[list[str] | None, typer.Option(help="Text that stands for a missing value in CSV files; repeatable.")] = None,
    encoding: Annotated[str | None, typer.Option(help="Of CSV files, as latin-1; UTF-8 when not given.")] = None,
    time_format: Annotated[str | None, typer.Option(help="Of stamps in CSV files, as %d/%m/%Y %H:%M; ISO when not given.")] = None,
) -> Reading:
    from connectors.tables import CsvForm
    from pipelines.forecasting.reading import Reading
    from pipelines.forecasting.validation import Rules

    csv = None
    if separator is not None or decimal_comma or missing_text or time_format is not None or encoding is not None:
        standard = CsvForm()
        csv = CsvForm(
            separator=standard.separator if separator is None else separator.replace("\\t", "\t"), decimal_comma=decimal_comma,
            missing=(*standard.missing, *(missing_text or ())), time_format=time_format, encoding=encoding or standard.encoding,
        )  # fmt: skip
    rules = Rules(
        zone=zone, missing=missing.value, gaps=gaps.value, duplicates=duplicates.value, infinite=infinite.value, empty=empty.value,
        off_grid=off_grid.value, ambiguous=ambiguous.value, nonexistent=nonexistent.value, na_values=tuple(na_value or ()),
    )  # fmt: skip
    return Reading(rules=rules, csv=csv, wide=wide, future=future_table)


def reads_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say how its table is read; it takes them as one argument, `reading`."""
    own, options = inspect.signature(command), inspect.signature(_reading)
    hints = {k: v for k, v in get_type_hints(command, include_extras=True).items() if k != "reading"}
    # `Reading` itself is not imported here: it would bring polars along.
    given = {k: v for k, v in get_type_hints(_reading, None, {"Reading": object}, include_extras=True).items() if k != "return"}
    for option in given.values():
        option.__metadata__[0].rich_help_panel = "How the table is read"

    @functools.wraps(command)
    def told(**values: Any) -> None:
        command(**{k: v for k, v in values.items() if k not in given}, reading=_reading(**{k: values[k] for k in given}))

    kept = [p for name, p in own.parameters.items() if name != "reading"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*kept, *options.parameters.values())]
    types = {**hints, **given}
    told.__signature__ = inspect.Signature([p.replace(annotation=types[p.name]) for p in parameters])  # type: ignore[attr-defined]
    told.__annotations__ = types
    return told


@reads_a_table
def validate(
    data: Data,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    frequency: Annotated[str | None, typer.Option(help="Step of all series; each series' own when not given.")] = None,
    look_back: Annotated[int | None, typer.Option(min=1, help="Look-back of the model that is to be trained.")] = None,
    horizon: Annotated[int | None, typer.Option(min=1, help="Horizon of the model that is to be trained.")] = None,
    as_json: Json = False,
    reading: Any = None,
) -> None:
    """Look a table over before training: gaps, duplicates, missing values, clocks, calendars. Status 2 when it has errors."""
    import dataclasses

    from connectors import tables
    from pipelines.forecasting import validation
    from pipelines.forecasting.reading import long

    if reading.future is not None:
        raise UserError("one table is looked at here: leave --future-table out, tethys forecast missing-future looks at that one")
    rules = dataclasses.replace(reading.rules, frequency=frequency, look_back=look_back, horizon=horizon)
    frame = tables.read(data, csv=reading.csv)
    if reading.wide:
        frame, id_column, target_column = long(frame, time_column, data), "unique_id", "y"
    report = validation.validate(
        frame,
        rules,
        id_column=id_column or None,
        time_column=time_column,
        target_column=target_column,
        source=data,
    )
    typer.echo(json.dumps(report.to_json()) if as_json else report.text())
    if not report.ok:
        raise typer.Exit(2)


@reads_a_table
def tune(
    data: Data,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    frequency: Frequency = None,
    horizon: Horizon = 24,
    trials: Annotated[int, typer.Option(min=1, help="Points of the space to try at most.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="Trials at a time, one core each.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of a training that is not stopped early.")] = 8,
    seed: Seed = 0,
    space: Annotated[Path | None, typer.Option(help="YAML file: for each parameter the values to try, as look_back: [48, 96].")] = None,
    future_covariate: FutureCovariate = None,
    historic_covariate: HistoricCovariate = None,
    static_covariate: StaticCovariate = None,
    calendar: CalendarFeature = None,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    model_name: ModelName = "forecaster",
    output: Annotated[Path, typer.Option(help="Folder of the study; the same command goes on with what lies there.")] = Path("runs/tune"),
    as_json: Json = False,
    reading: Any = None,
) -> None:
    """Search for good parameters on validation rows, hopeless trials stopped early; tethys train --params takes the file it writes."""
    from pipelines import cli
    from pipelines.forecasting import tune as search

    result = search.tune(
        data, id_column=id_column or None, time_column=time_column, target_column=target_column, frequency=frequency, horizon=horizon,
        trials=trials, workers=workers, epochs=epochs, seed=seed, space=space, tracking_uri=tracking_uri, model_name=model_name, output=output,
        reading=reading, future=tuple(future_covariate or ()), historic=tuple(historic_covariate or ()), static=tuple(static_covariate or ()),
        calendar=tuple(feature.value for feature in calendar or ()),
    )  # fmt: skip
    cli._show(result, as_json)


def read_params(path: Path) -> dict[str, Any]:
    from pipelines.forecasting import tune as search

    return search.read_params(path)


@forecasts.command("run", epilog="Example: tethys forecast run job.yaml --as-of 2018-01-01")
def run(
    job: Annotated[Path, typer.Argument(help="Job file, YAML.")],
    as_of: Annotated[
        str, typer.Option(help="Rows up to this moment are known (a date means its first instant); part of the run key.")
    ],
    as_json: Json = False,
) -> None:
    """Forecast every series of a job's table, as of a date. Running it again replaces the result or changes nothing."""
    from pipelines.forecasting import batch

    summary = batch.run(batch.read_job(job), as_of)
    typer.echo(json.dumps(summary.to_json()) if as_json else summary.line())
    if summary.failed:
        raise typer.Exit(SOME_SERIES_FAILED)
