"""The demonstration: the whole path on the made sample, from a table to a memory that goes on learning from new rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from connectors import tables
from pipelines.forecasting import job
from pipelines.forecasting.sample import hourly_load

LIVE_DAYS = 14
MODEL = "demo"


@dataclass(frozen=True)
class DemoResult:
    """Where everything lies, and what the memory brought on the live rows."""

    leaderboard: list[dict[str, Any]] = field(repr=False)
    model: str
    run: str
    plot: str
    forecasts: str
    live_forecasts: str
    live_rows: int
    live_error: str
    seconds: float


def run(output: str | Path, seed: int = 0) -> DemoResult:
    """Make the sample, train and register a forecaster, then stream two more weeks of rows through it one by one."""
    from pipelines.streaming import worker

    began, folder = time.monotonic(), Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    sample = hourly_load(seed=seed)
    is_live = pl.col("ds") > pl.col("ds").max() - pl.duration(days=LIVE_DAYS)
    past, live = folder / "past.csv", folder / "live.csv"
    tables.write(sample.filter(~is_live), str(past))
    tables.write(sample.filter(is_live).sort("ds", "unique_id"), str(live))
    store = f"sqlite:///{(folder / 'tethys.db').absolute()}"
    trained = job.train(str(past), horizon=24, tracking_uri=store, model_name=MODEL, alias="champion", seed=seed, output=folder)
    # The demonstration starts afresh each time: a stream's checkpoint belongs to one model version.
    ndjson = folder / "live-forecasts.ndjson"
    for stale in folder.glob("live-forecasts*"):
        stale.unlink()
    for stale in folder.glob("stream.db*"):
        stale.unlink()
    summary = worker.run(
        str(live), history=str(past), checkpoint=folder / "stream.db", output=str(ndjson), model_name=MODEL, version="champion",
        tracking_uri=store,
    )  # fmt: skip
    return DemoResult(
        leaderboard=trained.leaderboard,
        model=f"{MODEL}/{trained.version}@champion",
        run=trained.run,
        plot=trained.plot,
        forecasts=trained.forecasts,
        live_forecasts=str(ndjson),
        live_rows=summary.events,
        live_error=_errors(ndjson, live),
        seconds=round(time.monotonic() - began, 1),
    )


def _errors(forecasts: Path, live: Path) -> str:
    """Mean absolute error one step ahead of the streamed forecasts, in the first and in the last half of the live rows."""
    ahead = pl.read_ndjson(forecasts, infer_schema_length=None).filter(pl.col("step") == 1)
    ahead = ahead.with_columns(pl.col("ds").str.to_datetime(time_zone="UTC"))
    truth = pl.read_csv(live, try_parse_dates=True).with_columns(pl.col("ds").dt.replace_time_zone("UTC"))
    both = ahead.join(truth, on=["unique_id", "ds"]).sort("ds")
    error = (both["q0.5"] - both["y"]).abs().to_numpy()
    half = len(error) // 2
    return f"one step ahead, {error[:half].mean():.2f} in the first week and {error[half:].mean():.2f} in the second"
