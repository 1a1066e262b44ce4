"""One registered model for all tests of the service: two versions of it, and rows that neither has seen."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipelines import tracking
from pipelines.forecasting import job
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.sample import hourly_load

SERIES, DAYS, LIVE_DAYS, HORIZON = 2, 60, 20, 6


@dataclass(frozen=True)
class World:
    folder: Path
    store: str
    past: str
    later: str
    """A table that goes on after the training, for the gate."""
    gate: str
    live: pl.DataFrame
    """Rows to push, by time."""

    def events(self, first: int, last: int) -> list[dict[str, Any]]:
        return [
            {"unique_id": name, "ds": ds.replace(tzinfo=UTC).isoformat(), "y": y}
            for name, ds, y in self.live.slice(first, last - first).select("unique_id", "ds", "y").iter_rows()
        ]

    def model(self, version: int | str) -> TitansForecaster:
        found = tracking.load_model("load", version, self.store)
        return job.load_forecaster(found.weights, found.config)

    def expected(self, version: int, rows: int) -> dict[str, list[float]]:
        """The medians that the version forecasts after the first `rows` live rows, from a table, all at once."""
        out = self.model(version).predict(self.live.head(rows).sort("unique_id", "ds")).sort("unique_id", "ds")
        return {name[0]: part["q0.5"].to_list() for name, part in out.group_by("unique_id", maintain_order=True)}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("service")
    sample = hourly_load(series=SERIES, days=DAYS, seed=4)
    border = sample["ds"].max() - pl.duration(days=LIVE_DAYS)
    sample.filter(pl.col("ds") <= border).write_csv(folder / "past.csv")
    sample.write_csv(folder / "later.csv")
    (folder / "gate.yaml").write_text("coverage: {interval: 80, least: 0.4, most: 1.0}\nslices: {worst: 1.5}\n")
    store = f"sqlite:///{folder}/tethys.db"
    for look_back in (4, 48):  # the second is better by far: it sees two days
        job.train(
            str(folder / "past.csv"), horizon=HORIZON, look_back=look_back, tracking_uri=store, model_name="load",
            alias="champion" if look_back == 4 else "challenger", output=folder / "train", epochs=1,
        )  # fmt: skip
    live = sample.filter(pl.col("ds") > border).sort("ds", "unique_id")
    return World(folder, store, str(folder / "past.csv"), str(folder / "later.csv"), str(folder / "gate.yaml"), live)
