"""Commands of the forecasting jobs that need more than options: the report on a table, and the run of a job file.

`pipelines.cli` mounts them. Exit statuses are for schedulers: 0 all is well, 1 a fault of the program, 2 a mistake that
a person puts right (a file, a rule, an option), 3 some series failed and all others were delivered.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pipelines import DEFAULT_TRACKING_URI

SOME_SERIES_FAILED = 3


class TableByDefault(TyperGroup):
    """`tethys forecast run JOB` runs a job file; `tethys forecast TABLE` is the forecast of one table."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["table", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Options before the table belong to the default command too.
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["table", *args]
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


def validate(
    data: Annotated[str, typer.Argument(help="Table of the series: a file, a folder or glob of Parquet files, a URI.")],
    id_column: Annotated[str, typer.Option(help="Column that names the series; empty: one series.")] = "unique_id",
    time_column: Annotated[str, typer.Option(help="Column of the time stamps.")] = "ds",
    target_column: Annotated[str, typer.Option(help="Column to forecast.")] = "y",
    frequency: Annotated[str | None, typer.Option(help="Step of all series; each series' own when not given.")] = None,
    zone: Annotated[str | None, typer.Option(help="Zone of stamps without one: an IANA name.")] = None,
    look_back: Annotated[int | None, typer.Option(min=1, help="Look-back of the model that is to be trained.")] = None,
    horizon: Annotated[int | None, typer.Option(min=1, help="Horizon of the model that is to be trained.")] = None,
    missing: Annotated[Missing, typer.Option(help="What happens to empty targets.")] = Missing.error,
    gaps: Annotated[Missing, typer.Option(help="What happens to absent rows.")] = Missing.error,
    duplicates: Annotated[Duplicates, typer.Option(help="What happens to rows of one stamp.")] = Duplicates.error,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
) -> None:
    """Look a table over before training: gaps, duplicates, missing values, clocks, calendars. Status 2 when it has errors."""
    from connectors import tables
    from pipelines.forecasting import validation

    rules = validation.Rules(
        frequency=frequency,
        zone=zone,
        look_back=look_back,
        horizon=horizon,
        missing=missing.value,
        gaps=gaps.value,
        duplicates=duplicates.value,
    )
    report = validation.validate(
        tables.read(data),
        rules,
        id_column=id_column or None,
        time_column=time_column,
        target_column=target_column,
        source=data,
    )
    typer.echo(json.dumps(report.to_json()) if as_json else report.text())
    if not report.ok:
        raise typer.Exit(2)


def tune(
    data: Annotated[str, typer.Argument(help="Table of the series: a file, a folder or glob of Parquet files, a URI.")],
    id_column: Annotated[str, typer.Option(help="Column that names the series; empty: one series.")] = "unique_id",
    time_column: Annotated[str, typer.Option(help="Column of the time stamps.")] = "ds",
    target_column: Annotated[str, typer.Option(help="Column to forecast.")] = "y",
    frequency: Annotated[str | None, typer.Option(help="Step of the series; inferred when not given.")] = None,
    horizon: Annotated[int, typer.Option(min=1, help="Steps to forecast.")] = 24,
    trials: Annotated[int, typer.Option(min=1, help="Points of the space to try at most.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="Trials at a time, one core each.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of a training that is not stopped early.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    space: Annotated[Path | None, typer.Option(help="YAML file: for each parameter the values to try, as look_back: [48, 96].")] = None,
    tracking_uri: Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store.")] = DEFAULT_TRACKING_URI,
    model_name: Annotated[str, typer.Option(help="Name of the model that is to be trained.")] = "forecaster",
    output: Annotated[Path, typer.Option(help="Folder of the study; the same command goes on with what lies there.")] = Path("runs/tune"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Search for good parameters on validation rows, hopeless trials stopped early; tethys train --params takes the file it writes."""
    from pipelines import cli
    from pipelines.forecasting import tune as search

    result = search.tune(
        data, id_column=id_column or None, time_column=time_column, target_column=target_column, frequency=frequency, horizon=horizon,
        trials=trials, workers=workers, epochs=epochs, seed=seed, space=space, tracking_uri=tracking_uri, model_name=model_name, output=output,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Forecast every series of a job's table, as of a date. Running it again replaces the result or changes nothing."""
    from pipelines.forecasting import batch

    summary = batch.run(batch.read_job(job), as_of)
    typer.echo(json.dumps(summary.to_json()) if as_json else summary.line())
    if summary.failed:
        raise typer.Exit(SOME_SERIES_FAILED)
