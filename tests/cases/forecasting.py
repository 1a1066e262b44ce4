"""A case's table through the job's own path: checked by rules, then forecast by a small model that was trained on it."""

import polars as pl

from pipelines.forecasting.batch import Job, Loaded, forecast_rows
from pipelines.forecasting.validation import Rules, check
from tests.pipelines import trained

MASKED = {"missing": "mask", "gaps": "mask", "empty": "skip"}


def model(folder, frame: pl.DataFrame, look_back=36, horizon=12) -> Loaded:
    """Trained on what the rules leave of the frame."""
    kept = check(frame, Rules(**MASKED)).frame.select("unique_id", "ds", "y")
    return trained.loaded(folder, kept, look_back=look_back, horizon=horizon)


def forecast(frame: pl.DataFrame, loaded: Loaded, **rules) -> tuple[pl.DataFrame, pl.DataFrame]:
    job = Job.model_validate(
        {
            "name": "case", "input": {"uri": "the case"}, "output": {"uri": "nowhere.parquet"}, "model": {"name": "case"},
            "rules": rules,
        }
    )  # fmt: skip
    return forecast_rows(frame, job, loaded, "2030-01-01")


def quantiles(frame: pl.DataFrame):
    return frame.select(pl.col("^q.*$")).to_numpy()
