"""A small forecaster on disk, as a job loads it."""

import json
from pathlib import Path

import polars as pl

from pipelines.forecasting.batch import Loaded
from pipelines.forecasting.estimator import TitansForecaster, save_weights
from pipelines.forecasting.sample import hourly_load


def loaded(folder: Path, frame: pl.DataFrame | None = None, **options) -> Loaded:
    settings = {"horizon": 12, "look_back": 24, "hidden": 0, "epochs": 1, **options}
    model = TitansForecaster(**settings).fit(hourly_load(series=3, days=30) if frame is None else frame)
    save_weights(model.forecaster_, folder / "model.safetensors")
    return Loaded("load/1", folder / "model.safetensors", json.loads(json.dumps(model.describe())))
