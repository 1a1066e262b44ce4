"""A stream as a file: all that `tethys stream` takes, checked before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from pipelines import DEFAULT_TRACKING_URI
from pipelines.forecasting.batch import Model, Settings, Uri, read_settings
from pipelines.streaming import worker


class Columns(Settings):
    """What the source calls its fields. unique_id: null where all rows are one stream."""

    unique_id: str | None = "unique_id"
    ds: str = "ds"
    y: str = "y"
    event_id: str = "event_id"


class Stream(Settings):
    """What a stream file holds; see `worker.run` for what each means.

    workers: 1 works in one process; more share the partitions of the source as Ray actors (on the cluster of RAY_ADDRESS, where it is
    set), and may be more or fewer at the next start.
    """

    source: str
    columns: Columns = Columns()
    follow: bool = False
    model: Model
    history: Uri | None = None
    covariates: Uri | None = None
    output: str = "runs/forecasts.ndjson"
    checkpoint: Path = Path("runs/stream.db")
    grace: str = "0s"
    conflict: Literal["reject", "last"] = "reject"
    forecast: str = "every"
    metrics_port: int | None = pydantic.Field(default=None, ge=0, le=65535)
    workers: int = pydantic.Field(default=1, ge=1)
    tracking_uri: str = DEFAULT_TRACKING_URI


def read(path: str | Path) -> Stream:
    """A stream file. Raises UserError that names the file and each field at fault."""
    return read_settings(path, Stream, "docs/examples/stream.yaml")


def run(stream: Stream, workers: int | None = None, *, progress: bool = False) -> worker.StreamSummary:
    """Until the source ends or a signal comes. workers: instead of the number in the file."""
    return worker.run(
        stream.source,
        checkpoint=stream.checkpoint,
        output=stream.output,
        id_column=stream.columns.unique_id,
        time_column=stream.columns.ds,
        target_column=stream.columns.y,
        event_column=stream.columns.event_id,
        model_name=stream.model.name,
        version=stream.model.version,
        tracking_uri=stream.tracking_uri,
        follow=stream.follow,
        grace=stream.grace,
        conflict=stream.conflict,
        progress=progress,
        metrics_port=stream.metrics_port,
        history=stream.history,
        covariates=stream.covariates,
        forecast=stream.forecast,
        workers=stream.workers if workers is None else workers,
    )
