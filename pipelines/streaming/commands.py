"""The commands of live streams that need more than options: `tethys stream run FILE` beside `tethys stream SOURCE`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.forecasting.commands import TableByDefault


class SourceByDefault(TableByDefault):
    """`tethys stream run FILE` runs a stream file; `tethys stream SOURCE` is a stream given by options."""

    default = "source"


live = typer.Typer(
    cls=SourceByDefault,
    no_args_is_help=True,
    help="Forecast and learn row by row from a live source, or run a stream file.",
    epilog="Example: tethys stream readings.ndjson --model-name sales, or tethys stream run stream.yaml --workers 4",
)
WorkerCount = Annotated[int, typer.Option(min=1, help="So many Ray actors share the source, each with outputs of its own.")]
