"""The one path through the project: CSV -> Ray windows -> train -> register -> load by alias in a new process -> stream row by row ->
kill -9 -> resume -> rows equal to the undisturbed run; and a memory that is not written forecasts worse."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from connectors import tables
from pipelines import tracking
from pipelines.forecasting.job import forecast_panel, load_forecaster
from pipelines.forecasting.sample import hourly_load
from pipelines.windows import panel, read_panel

HORIZON, SERIES, LIVE_ROWS = 12, 3, 40 * 24
ROOT = Path(__file__).resolve().parent.parent


def tethys(*words: str, kill_when: Any = None) -> str:
    """Run the command in a process of its own; `kill_when()` true: SIGKILL it. Returns standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    if kill_when is not None:
        while process.poll() is None and not kill_when():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the worker was to be killed at work, and had already ended"
        return ""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def rows(path: Path) -> pl.DataFrame:
    return pl.read_ndjson(path, infer_schema_length=None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A folder of CSV files, one a series, a registered model trained from it on Ray, and live rows."""
    folder = tmp_path_factory.mktemp("path")
    sample = hourly_load(series=SERIES, days=110, seed=3)
    border = sample["ds"].min() + pl.duration(hours=110 * 24 - LIVE_ROWS)
    (folder / "past").mkdir()
    for name, part in sample.filter(pl.col("ds") < border).group_by("unique_id"):
        tables.write(part.sort("ds"), str(folder / "past" / f"{name[0]}.csv"))
    live = sample.filter(pl.col("ds") >= border).sort("ds", "unique_id")
    tables.write(live, str(folder / "live.csv"))
    store = f"sqlite:///{folder / 'tethys.db'}"
    out = tethys(
        "train", str(folder / "past" / "*.csv"), "--horizon", str(HORIZON), "--look-back", "48", "--executor", "ray", "--json",
        "--model-name", "whole", "--alias", "champion", "--tracking-uri", store, "--output", str(folder / "train"),
    )  # fmt: skip
    return {"folder": folder, "store": store, "result": json.loads(out), "live": live, "sample": sample}


def stream(trained: dict[str, Any], name: str, *more: str, kill_when: Any = None) -> Path:
    folder = trained["folder"]
    output = folder / f"{name}.ndjson"
    tethys(
        "stream", str(folder / "live.csv"), "--history", str(folder / "past" / "*.csv"), "--model-name", "whole", "--version", "champion",
        "--tracking-uri", trained["store"], "--checkpoint", str(folder / f"{name}.db"), "--output", str(output), *more,
        kill_when=kill_when,
    )  # fmt: skip
    return output


def test_windows_on_ray_are_those_made_in_process(trained: dict[str, Any]) -> None:
    files = str(trained["folder"] / "past" / "*.csv")
    on_ray, local = read_panel([files], executor="ray"), read_panel([files], executor="local")
    assert on_ray.ids == local.ids and np.array_equal(on_ray.y, local.y) and np.array_equal(on_ray.ds, local.ds)


def test_the_leaderboard_has_the_model_and_honest_baselines(trained: dict[str, Any]) -> None:
    board = {row["model"]: row for row in trained["result"]["leaderboard"]}
    assert {"tethys", "last_value", "seasonal_naive", "ridge", "ridge_carried"} <= set(board)
    assert board["tethys"]["mae"] < board["seasonal_naive"]["mae"] < board["last_value"]["mae"]
    versions = tracking.show_model("whole", trained["store"])
    assert [v.number for v in versions] == [trained["result"]["version"]]


def test_a_killed_stream_resumes_to_the_rows_of_the_undisturbed_one(trained: dict[str, Any]) -> None:
    undisturbed = stream(trained, "undisturbed")
    killed = trained["folder"] / "killed.ndjson"
    stream(trained, "killed", kill_when=lambda: killed.exists() and killed.stat().st_size > 1_000_000)
    assert killed.stat().st_size < undisturbed.stat().st_size, "killed too late to show anything"
    assert stream(trained, "killed").read_bytes() == undisturbed.read_bytes()
    count = rows(undisturbed).select("unique_id", "origin", "step").n_unique()
    assert count == rows(undisturbed).height == LIVE_ROWS * SERIES * HORIZON, "every event forecast once, none lost"


def test_a_stream_is_a_table_that_has_not_ended(trained: dict[str, Any]) -> None:
    """The forecasts after the last row equal those of a batch run over the whole table (1e-5 relative)."""
    undisturbed = stream(trained, "again")
    found = tracking.load_model("whole", "champion", trained["store"])
    with torch.inference_mode():
        batch = forecast_panel(load_forecaster(found.weights, found.config), panel(trained["sample"]))
    live = rows(undisturbed).with_columns(pl.col("origin", "ds").str.to_datetime(time_zone="UTC"))
    last = live.filter(pl.col("origin") == pl.col("origin").max()).sort("unique_id", "step")
    for column in [c for c in batch.columns if c.startswith("q")]:
        np.testing.assert_allclose(last[column].to_numpy(), batch.sort("unique_id", "ds")[column].to_numpy(), rtol=1e-5)


def test_a_memory_that_is_not_written_forecasts_worse(trained: dict[str, Any]) -> None:
    found = tracking.load_model("whole", "champion", trained["store"])
    alive, dead = (load_forecaster(found.weights, found.config) for _ in range(2))
    dead.forecaster_.config = dataclasses.replace(dead.forecaster_.config, memory="frozen")
    table = panel(trained["sample"])
    _, y, _ = table.aligned()
    origins = np.arange(y.shape[1] - LIVE_ROWS, y.shape[1] - HORIZON, 5)
    truth = np.stack([[row[t : t + HORIZON] for t in origins] for row in y])
    error = {name: np.abs(m.quantiles_at(table, origins)[0] - truth).mean() for name, m in (("alive", alive), ("dead", dead))}
    assert error["dead"] > 1.05 * error["alive"], error


def test_the_registered_model_answers_through_mlflow_and_changes_nothing(trained: dict[str, Any]) -> None:
    """Long frames with ISO stamps, an extra column and a missing value; `h` rows come back, the same ones each time."""
    import mlflow
    import pandas as pd

    mlflow.set_tracking_uri(trained["store"])
    model = mlflow.pyfunc.load_model("models:/whole@champion")
    stamps = [f"2024-01-01T{hour:02}:00:00Z" for hour in range(4)]
    request = pd.DataFrame({"unique_id": "new", "ds": stamps, "y": [1.0, 2.0, 3.0, None], "extra": 7})
    first = model.predict(request, params={"h": 3})
    assert [str(ds)[11:16] for ds in first["ds"]] == ["04:00", "05:00", "06:00"]
    assert first["q0.5"].notna().all() and first.equals(model.predict(request, params={"h": 3}))
