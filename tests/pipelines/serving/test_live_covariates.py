"""A model with covariates: live streams take them from a table, scoring from the rows of the request."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from connectors.errors import UserError
from connectors.streams.base import Record
from pipelines import tracking
from pipelines.forecasting import job
from pipelines.forecasting.job import forecast_frame, load_forecaster
from pipelines.serving.service import Service, Settings

ROWS, HORIZON = 400, 6


def test_live_streams_know_their_covariates(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hours = [datetime(2026, 1, 1) + timedelta(hours=i) for i in range(ROWS + 60)]
    promo = (rng.random(len(hours)) < 0.3).astype(float)
    table = pl.DataFrame({"unique_id": "shop", "ds": hours, "y": 20 + 8 * promo + rng.normal(0, 0.3, len(hours)), "promo": promo})
    table.head(ROWS).write_parquet(tmp_path / "past.parquet")
    table.drop("y").write_parquet(tmp_path / "promo.parquet")
    store = f"sqlite:///{tmp_path}/tethys.db"
    job.train(
        str(tmp_path / "past.parquet"), horizon=HORIZON, look_back=24, tracking_uri=store, model_name="shop", alias="champion",
        output=tmp_path / "train", epochs=1, future=("promo",),
    )  # fmt: skip
    with pytest.raises(UserError, match="was trained with 'promo': say --covariates TABLE"):
        Service(Settings(model="shop", tracking_uri=store, state=tmp_path / "none"))
    service = Service(Settings(model="shop", tracking_uri=store, state=tmp_path / "state", covariates=str(tmp_path / "promo.parquet")))
    service.start()
    try:
        records = [Record("shop", int(ds.replace(tzinfo=UTC).timestamp() * 1e6), y, None, "test", i) for i, (ds, y) in
                   enumerate(table.head(48).select("ds", "y").iter_rows())]  # fmt: skip
        done = [service.live.push(records[i : i + 12], forecast=True).result(60) for i in range(0, 48, 12)]
        found = tracking.load_model("shop", "champion", store)
        model = load_forecaster(found.weights, found.config)
        asked = table.head(48 + HORIZON).with_columns(y=pl.when(pl.int_range(pl.len()) < 48).then("y"))
        expected = forecast_frame(model, asked)
        middle = service.live.model.quantiles.index(0.5)
        np.testing.assert_allclose(done[-1].forecasts[0].quantiles[:, middle], expected["q0.5"].to_numpy(), rtol=1e-5)
        given = {"unique_id": asked["unique_id"].to_list(), "ds": [f"{ds.isoformat()}Z" for ds in asked["ds"]], "y": asked["y"].to_list()}
        assert service.scorer.score({**given, "promo": asked["promo"].to_list()}, None, None)["mean"] == expected["mean"].to_list()
        service.live.load("copy", service.live.export("shop").result(60)).result(60)
    finally:
        service.stop()
