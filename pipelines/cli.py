"""The `tethys` command: thin, one function a job.

Starting it costs nothing: torch, Ray and MLflow are imported inside the command that needs them. Results go to
standard output (a table for people, one JSON document with --json), everything else to standard error. A mistake of
the user is one line and exit status 2.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from connectors.errors import UserError
from pipelines import DEFAULT_ALIAS, DEFAULT_TRACKING_URI, DEFAULT_VERSION
from pipelines.forecasting import commands as forecasting
from pipelines.forecasting.commands import (
    CalendarFeature,
    Data,
    EtsSeries,
    Frequency,
    FutureCovariate,
    HistoricCovariate,
    Horizon,
    IdColumn,
    Json,
    LookBack,
    ModelName,
    Seed,
    StaticCovariate,
    TargetColumn,
    TimeColumn,
    TrackingUri,
    Version,
)
from pipelines.genomics import commands as genomics
from pipelines.language import commands as language
from pipelines.registry import commands as registry
from pipelines.serving import commands as serving
from pipelines.streaming import commands as streaming

app = typer.Typer(
    name="tethys",
    help="Forecasting with memories that keep learning on live streams.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(registry.models, name="models")
app.command(epilog="Example: tethys serve --model-name sales --port 8080")(serving.serve)
app.add_typer(forecasting.forecasts, name="forecast")
app.command("validate", epilog="Example: tethys validate sales.parquet --frequency 1d --gaps mask")(forecasting.validate)
app.command("tune", epilog="Example: tethys tune sales.parquet --frequency 1d --horizon 28 --trials 30 --workers 4")(forecasting.tune)
streams = typer.Typer(help="The streams of a checkpoint and their memories.", no_args_is_help=True)
app.add_typer(streaming.live, name="stream")
app.add_typer(streams, name="streams")
app.add_typer(genomics.app, name="genomics")
app.add_typer(language.app, name="lm")


class Executor(StrEnum):
    local = "local"
    ray = "ray"


class Block(StrEnum):
    lmm = "lmm"
    mac = "mac"
    mag = "mag"
    mal = "mal"


@app.command(epilog="Example: tethys demo")
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the store, the plot and the tables.")] = Path("runs/demo"),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train, compare, register and stream on an embedded sample: no server, no broker."""
    from pipelines.forecasting import demo as job

    _show(job.run(output=output, seed=seed), as_json)


@app.command(epilog="Example: tethys train sales.parquet --frequency 1d --look-back 56 --horizon 28 --model-name sales")
@forecasting.reads_a_table
def train(
    data: Data,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    frequency: Frequency = None,
    look_back: LookBack = 96,
    horizon: Horizon = 24,
    model_name: ModelName = "forecaster",
    alias: Annotated[str, typer.Option(help="Alias that the new version gets.")] = DEFAULT_ALIAS,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    executor: Annotated[
        Executor, typer.Option(help="Where tables are read: in this process, or a Ray task for each.")
    ] = Executor.local,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="Folder for the plot, the leaderboard and the forecast table.")] = Path(
        "runs/train"
    ),
    blocks: Annotated[
        list[Block] | None, typer.Option(help="Titans blocks over patches of rows, kept only where they help on validation; repeatable.")
    ] = None,
    outcomes: Annotated[
        bool, typer.Option("--outcomes", help="An outcome memory: streams correct themselves from past errors. Kept only where it helps.")
    ] = False,
    future_covariate: FutureCovariate = None,
    historic_covariate: HistoricCovariate = None,
    static_covariate: StaticCovariate = None,
    calendar: CalendarFeature = None,
    params: Annotated[
        Path | None, typer.Option(help="YAML file of parameters, as tethys tune writes it; they come before the options.")
    ] = None,
    ets_series: EtsSeries = None,
    as_json: Json = False,
    reading: Any = None,
) -> None:
    """Train a forecaster, compare it with baselines on rolling origins, log the run and register the model."""
    from pipelines.forecasting import job

    result = job.train(
        data,
        id_column=id_column or None,
        time_column=time_column,
        target_column=target_column,
        frequency=frequency,
        look_back=look_back,
        horizon=horizon,
        tracking_uri=tracking_uri,
        model_name=model_name,
        alias=alias,
        executor=executor.value,
        seed=seed,
        output=output,
        blocks=tuple(block.value for block in blocks or ()),
        outcomes=outcomes,
        reading=reading,
        future=tuple(future_covariate or ()),
        historic=tuple(historic_covariate or ()),
        static=tuple(static_covariate or ()),
        calendar=tuple(feature.value for feature in calendar or ()),
        parameters=None if params is None else forecasting.read_params(params),
        ets=ets_series,
    )
    _show(result, as_json)


@app.command(epilog="Example: tethys backtest sales.parquet --frequency 1d --model-name sales --origins 8 --report out.html")
@forecasting.reads_a_table
def backtest(
    data: Data,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    frequency: Frequency = None,
    model_name: ModelName = "forecaster",
    version: Version = DEFAULT_VERSION,
    origins: Annotated[
        int, typer.Option(min=1, help="Forecasts of each series, one horizon apart, the last one at its end.")
    ] = 4,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    output: Annotated[Path, typer.Option(help="Folder for the leaderboard and the forecasts.")] = Path("runs/backtest"),
    report: Annotated[Path | None, typer.Option(help="HTML page to write; report.html in the folder when not given.")] = None,
    ets_series: EtsSeries = None,
    as_json: Json = False,
    reading: Any = None,
) -> None:
    """Compare a registered forecaster with the baselines on rolling origins of a table."""
    from pipelines.forecasting import job

    result = job.backtest(
        data,
        id_column=id_column or None,
        time_column=time_column,
        target_column=target_column,
        frequency=frequency,
        model_name=model_name,
        version=version,
        origins=origins,
        tracking_uri=tracking_uri,
        output=output,
        report=report,
        reading=reading,
        ets=ets_series,
    )
    _show(result, as_json)


@forecasting.forecasts.command(
    "table", epilog="Example: tethys forecast sales.parquet --model-name sales --output forecast.parquet"
)
@forecasting.reads_a_table
def forecast(
    data: Data,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    frequency: Frequency = None,
    horizon: Annotated[
        int | None, typer.Option(min=1, help="Steps to forecast; the model's own horizon when not given.")
    ] = None,
    model_name: ModelName = "forecaster",
    version: Version = DEFAULT_VERSION,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    output: Annotated[
        str, typer.Option(help="Table to write: .parquet, .csv or a URI; replaced as a whole.")
    ] = "runs/forecast.parquet",
    as_json: Json = False,
    reading: Any = None,
) -> None:
    """Forecast every series of a table with a registered model."""
    from pipelines.forecasting import job

    result = job.forecast(
        data,
        id_column=id_column or None,
        time_column=time_column,
        target_column=target_column,
        frequency=frequency,
        horizon=horizon,
        model_name=model_name,
        version=version,
        tracking_uri=tracking_uri,
        output=output,
        reading=reading,
    )
    _show(result, as_json)


@forecasting.forecasts.command(
    "missing-future", epilog="Example: tethys forecast missing-future sales.parquet --future-table prices.csv --model-name sales"
)
@forecasting.reads_a_table
def missing_future(
    data: Data,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    model_name: ModelName = "forecaster",
    version: Version = DEFAULT_VERSION,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    output: Annotated[str | None, typer.Option(help="Table to write the rows to, to be filled in; shown when not given.")] = None,
    as_json: Json = False,
    reading: Any = None,
) -> None:
    """List the rows of the horizon whose covariates are not known yet, for every series of a table."""
    from connectors import tables
    from pipelines.forecasting import job

    lacking = job.missing_future(
        data,
        id_column=id_column or None,
        time_column=time_column,
        target_column=target_column,
        model_name=model_name,
        version=version,
        tracking_uri=tracking_uri,
        reading=reading,
    )
    if output is not None:
        tables.write(lacking, output)
    if as_json:
        _print_json({"missing": lacking.height, "rows": [] if output else lacking.to_dicts(), "output": output})
        return
    if output is None:
        _print_table([{"unique_id": name, "ds": str(ds)} for name, ds in lacking.select("unique_id", "ds").iter_rows()])
    typer.echo(f"{lacking.height} rows missing" + (f", written to {output}" if output else ""))


@streaming.live.command("source", epilog="Example: tethys stream readings.ndjson --model-name sales --output forecasts.ndjson")
def stream(
    source: Annotated[
        str,
        typer.Argument(
            help="Rows to read: a .csv or .ndjson file, - for standard input, kafka://HOST:PORT/TOPIC, redis://HOST:PORT/STREAM, "
            "nats://HOST:PORT/STREAM, mqtt://HOST:PORT/TOPIC, or postgresql://USER@HOST:PORT/DATABASE?table=NAME."
        ),
    ],
    checkpoint: Annotated[
        Path, typer.Option(help="SQLite file of positions and memories; a second start continues from it.")
    ] = Path("runs/stream.db"),
    output: Annotated[
        str,
        typer.Option(help="Where forecasts are appended: .ndjson, .csv, a folder ending in .parquet, or a broker as for the source."),
    ] = "runs/forecasts.ndjson",
    history: Annotated[
        str | None, typer.Option(help="Table that every memory reads before the first row, when the checkpoint is new.")
    ] = None,
    covariates: Annotated[
        str | None, typer.Option(help="Table of covariates, a row a stream and step, past and to come; read again when it changes.")
    ] = None,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    event_column: Annotated[
        str, typer.Option(help="Column of event ids, where there is one; repeats are dropped.")
    ] = "event_id",
    model_name: ModelName = "forecaster",
    version: Version = DEFAULT_VERSION,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    follow: Annotated[bool, typer.Option("--follow", help="Go on when the present end is reached, until a signal.")] = False,
    grace: Annotated[
        str, typer.Option(help="How far an event may come behind the newest of its stream: 30s, 5m, 1h.")
    ] = "0s",
    conflict: Annotated[
        str, typer.Option(help="Another value for a known time: reject it, or let the last one win while it waits.")
    ] = "reject",
    max_events: Annotated[int | None, typer.Option(min=1, help="Stop after so many lines.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve /metrics, /healthz, /readyz and /forecast?unique_id=NAME on this port of 127.0.0.1.")
    ] = None,
    forecast: Annotated[
        str, typer.Option(help="Rows that are answered: every one, the first of each span of event time (1h), or on demand only.")
    ] = "every",
    workers: streaming.WorkerCount = 1,
    as_json: Json = False,
) -> None:
    """Forecast and learn row by row, each stream with its own memory; a restart loses nothing, learns nothing twice."""
    from pipelines.streaming import worker

    result = worker.run(
        source,
        checkpoint=checkpoint,
        output=output,
        id_column=id_column or None,
        time_column=time_column,
        target_column=target_column,
        event_column=event_column,
        model_name=model_name,
        version=version,
        tracking_uri=tracking_uri,
        follow=follow,
        grace=grace,
        conflict=conflict,
        max_events=max_events,
        metrics_port=metrics_port,
        progress=sys.stderr.isatty(),
        history=history,
        forecast=forecast,
        covariates=covariates,
        workers=workers,
    )
    _show(result, as_json)


@streaming.live.command("run", epilog="Example: tethys stream run stream.yaml --workers 4")
def stream_run(
    job: Annotated[Path, typer.Argument(help="Stream file, YAML (docs/examples/stream.yaml).")],
    workers: Annotated[int | None, typer.Option(min=1, help="So many workers instead of the number in the file.")] = None,
    as_json: Json = False,
) -> None:
    """Run the stream of a file: forecast and learn row by row, until its source ends or a signal comes."""
    from pipelines.streaming import job as stream_job

    _show(stream_job.run(stream_job.read(job), workers, progress=sys.stderr.isatty()), as_json)


Checkpoint = Annotated[Path, typer.Option(help="The checkpoint given to `tethys stream`.")]
StreamName = Annotated[str, typer.Argument(help="Name of the stream (its unique_id).")]


@streams.command("list", epilog="Example: tethys streams list --checkpoint runs/stream.db")
def streams_list(checkpoint: Checkpoint = Path("runs/stream.db"), as_json: Json = False) -> None:
    """Every stream of a run, with its last row and the size of its memory."""
    from pipelines.streaming import inspect

    _show(inspect.streams(checkpoint), as_json)


@streams.command("show", epilog="Example: tethys streams show sensor-7")
def streams_show(name: StreamName, checkpoint: Checkpoint = Path("runs/stream.db"), as_json: Json = False) -> None:
    """One stream: its clock, its waiting events, its memory."""
    from pipelines.streaming import inspect

    found = inspect.show(checkpoint, name)
    if as_json:
        _print_json(found)
        return
    for key, value in found.items():
        typer.echo(f"{key:<16} {value}")


@streams.command("reset", epilog="Example: tethys streams reset sensor-7 sensor-8")
def streams_reset(
    names: Annotated[list[str], typer.Argument(help="Streams to forget; each begins anew with its next event.")],
    checkpoint: Checkpoint = Path("runs/stream.db"),
) -> None:
    """Forget the memories of some streams, while no worker runs."""
    from pipelines.streaming import inspect

    typer.echo(f"{inspect.reset(checkpoint, names)} streams forgotten")


@streams.command("export", epilog="Example: tethys streams export sensor-7 --output sensor-7.safetensors")
def streams_export(
    name: StreamName,
    output: Annotated[Path, typer.Option(help="safetensors file to write.")],
    checkpoint: Checkpoint = Path("runs/stream.db"),
) -> None:
    """Write the memory of one stream to a file."""
    from pipelines.streaming import inspect

    typer.echo(str(inspect.export(checkpoint, name, output)))


@app.command(epilog="Example: tethys doctor")
def doctor(as_json: Json = False) -> None:
    """Versions, cores, and which implementation of the kernels runs here."""
    facts = _facts()
    if as_json:
        _print_json(facts)
        return
    for key, value in facts.items():
        typer.echo(f"{key:<12} {', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}")


def main() -> None:
    """Entry point of the `tethys` command."""
    try:
        app()
    except UserError as error:
        typer.echo(f"tethys: {' '.join(str(error).split())}", err=True)
        sys.exit(2)


def _facts() -> dict[str, Any]:
    import importlib.metadata
    import platform

    import torch

    from kernels import dispatch

    versions = {}
    for name in ("tethys-streams", "torch", "triton", "polars", "ray", "mlflow"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": versions,
        "kernels": dispatch.available(),
    }


def _show(result: Any, as_json: bool) -> None:
    """A job's result, a data class: its `leaderboard` (rows) becomes a table, its other fields become lines."""
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    if as_json:
        _print_json(fields)
        return
    _print_table(fields.pop("leaderboard", []))
    for name, value in fields.items():
        if value is not None:
            typer.echo(f"{name.replace('_', ' '):<12} {value}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, default=str))


def _print_table(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(box=None, pad_edge=False)
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    # No column is cut off at the width of a terminal, nor at the default one where there is none.
    Console(width=max(200, Console().width)).print(table, crop=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
