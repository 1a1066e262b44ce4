"""`tethys serve`: thin; everything happens in `pipelines.serving.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines import DEFAULT_TRACKING_URI


def serve(
    model_name: Annotated[str, typer.Option(help="Name of the model in the registry.")] = "forecaster",
    version: Annotated[str, typer.Option(help="An alias, which is followed when it moves, or a version's number, which stays.")] = "champion",
    tracking_uri: Annotated[
        str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store: a SQLite file, or the address of a tracking server.")
    ] = DEFAULT_TRACKING_URI,
    state: Annotated[Path, typer.Option(help="Folder of memories, history and weights; a second start goes on from it.")] = Path("runs/serve"),
    host: Annotated[str, typer.Option(help="Address to listen on; any but the loopback one needs tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one, which is printed.")] = 8080,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File of lines `read TOKEN` or `write TOKEN`; also TETHYS_READ_TOKENS and TETHYS_WRITE_TOKENS."),
    ] = None,
    shadow: Annotated[str | None, typer.Option(help="Alias of a version that runs beside the live one, for instance challenger.")] = None,
    covariates: Annotated[
        str | None, typer.Option(help="Table of the streams' covariates, a row a stream and step, past and to come; read again when it changes.")
    ] = None,
    classifier: Annotated[str | None, typer.Option(help="Sequence classifier at /v1/classify: models:/NAME@ALIAS, or a file of weights.")] = None,
    language_model: Annotated[str | None, typer.Option(help="Language model at /v1/complete: models:/NAME@ALIAS, or a file of weights.")] = None,
    grace: Annotated[str, typer.Option(help="How far an event may come behind the newest of its stream: 30s, 5m, 1h.")] = "0s",
    conflict: Annotated[
        str, typer.Option(help="Another value for a known time: reject it, or let the last one win while it waits.")
    ] = "reject",
    keep: Annotated[int, typer.Option(min=64, help="Rows of each stream that are kept: for the page, and for a new champion to replay.")] = 2048,
    watch_seconds: Annotated[float, typer.Option(min=0.1, help="How often the registry is asked for the champion.")] = 5.0,
) -> None:
    """Serve live streams over HTTP: push events, read forecasts; every answer is durable. The page is at /."""
    import torch

    from pipelines.serving import app
    from pipelines.serving.guard import Tokens
    from pipelines.serving.service import Settings

    # The batches are small: a second thread costs more than it brings, and one thread gives the same bits on every machine.
    torch.set_num_threads(1)
    settings = Settings(
        model=model_name, version=version, tracking_uri=tracking_uri, state=state, host=host, port=port, tokens=Tokens.load(tokens),
        shadow=shadow, covariates=covariates, classifier=classifier, language_model=language_model,
        grace=grace, conflict=conflict, keep=keep, watch_seconds=watch_seconds,
    )  # fmt: skip
    app.run(settings, announce=lambda line: typer.echo(line))
