"""Stateless scoring: the same numbers as a table run and as MLflow's own server, whoever else asks; clear refusals from both."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest

from connectors.errors import UserError
from pipelines import tracking
from pipelines.forecasting.job import forecast_frame
from pipelines.serving.scoring import Scorer
from tests.pipelines.serving.conftest import HORIZON, World


@pytest.fixture(scope="module")
def scorer(world: World) -> Any:
    made = Scorer(world.model(2), "load/2")
    yield made
    made.stop()


def frame(seed: int, series: int, rows: int) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    stamps = [datetime(2026, 1, 1) + timedelta(hours=i) for i in range(rows)]
    parts = [pl.DataFrame({"unique_id": f"s{i}", "ds": stamps, "y": rng.normal(50, 5, rows)}) for i in range(series)]
    return pl.concat(parts).with_columns(y=pl.when(pl.int_range(pl.len()) % 11 == 5).then(None).otherwise("y"))


def columns(table: pl.DataFrame) -> dict[str, list[Any]]:
    return {"unique_id": table["unique_id"].to_list(), "ds": table["ds"].dt.strftime("%Y-%m-%dT%H:%M:%SZ").to_list(), "y": table["y"].to_list()}


def close(answer: dict[str, list[Any]], expected: pl.DataFrame) -> None:
    assert answer["unique_id"] == expected["unique_id"].to_list()
    assert answer["ds"] == expected["ds"].to_physical().to_list()
    for name in [c for c in expected.columns if c not in ("unique_id", "ds")]:
        np.testing.assert_allclose(answer[name], expected[name].to_numpy(), rtol=1e-5)


def test_many_at_once_are_answered_as_each_alone(world: World, scorer: Scorer) -> None:
    asked = [frame(seed, series=1 + seed % 3, rows=20 + 7 * (seed % 4)) for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda table: scorer.score(columns(table), 3, [0.1, 0.5]).result(60), asked))
    for table, answer in zip(asked, answers, strict=True):
        assert list(answer) == ["unique_id", "ds", "mean", "q0.1", "q0.5"] and len(answer["mean"]) == 3 * table["unique_id"].n_unique()
        close(answer, forecast_frame(world.model(2), table, horizon=3, quantiles=[0.1, 0.5]))


def test_rows_in_disorder_and_with_holes_go_through_the_door_of_tables(world: World, scorer: Scorer) -> None:
    table = frame(1, 2, 60).filter(pl.int_range(pl.len()) % 13 != 4)
    shuffled = table.sample(fraction=1.0, shuffle=True, seed=1)
    close(scorer.score(columns(shuffled), None, None).result(60), forecast_frame(world.model(2), table))


def test_the_scorer_outlives_a_fault(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scorer, "_pass", lambda asked: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scorer.score(columns(frame(0, 1, 30)), None, None).result(60)
    assert len(scorer.score(columns(frame(0, 1, 30)), None, None).result(60)["mean"]) == HORIZON
    with pytest.raises(UserError, match="has no observed value"):
        scorer.score({"unique_id": ["a"], "ds": ["2026-01-01"], "y": [None]}, None, None)


def test_mlflow_serves_the_same_numbers_and_clear_refusals(world: World, scorer: Scorer) -> None:
    """`mlflow models serve` is this application in a process of its own."""
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server

    logging.getLogger("mlflow.pyfunc.scoring_server").setLevel(logging.ERROR)
    mlflow.set_tracking_uri(tracking.open_store(world.store).uri)
    client = TestClient(scoring_server.init(mlflow.pyfunc.load_model("models:/load/2")))
    table = frame(5, 2, 40)
    asked = columns(table)
    rows = [list(row) for row in zip(*asked.values(), strict=True)]

    def post(data: list[list[Any]], **params: Any) -> tuple[int, Any]:
        answer = client.post("/invocations", json={"dataframe_split": {"columns": ["unique_id", "ds", "y"], "data": data}, "params": params})
        return answer.status_code, json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    before = post(rows, h=4, quantiles=[0.5])
    assert before[0] == 200
    mine = scorer.score(asked, 4, [0.5]).result(60)
    np.testing.assert_allclose([row["q0.5"] for row in before[1]["predictions"]], mine["q0.5"], rtol=1e-5)
    assert [row["unique_id"] for row in before[1]["predictions"]] == mine["unique_id"]
    for data, params, message in (
        (rows, {"h": HORIZON + 1}, "forecasts up to"),
        (rows, {"quantiles": [0.33]}, "calibrated for"),
        ([["a", "yesterday", 1.0]], {}, "parse dates"),
        ([["a", "2026-01-01T00:00:00Z", None]], {}, "no observed value"),
        ([["a", "2026-01-01T00:00:00Z", "x"]], {}, "column y"),
        ([["a", "2026-01-01T00:00:00Z", 1.0], ["a", "2026-01-01T00:00:00Z", 2.0]], {}, "2026-01-01"),
    ):
        status, answer = post(data, **params)
        assert status == 400 and message in answer["message"] and "stack_trace" not in answer, (message, answer)
    assert post(rows, h=4, quantiles=[0.5]) == before, "no call leaves anything behind"
    # A missing value and a column too many are allowed; a column too few is named.
    data = [["a", "2024-01-01T00:00:00Z", 1.0, "x"], ["a", "2024-01-01T01:00:00Z", None, "x"]]
    asked_for = {"dataframe_split": {"columns": ["unique_id", "ds", "y", "note"], "data": data}, "params": {"h": 3}}
    answer = client.post("/invocations", json=asked_for)
    assert [row["ds"][:16].replace("T", " ") for row in answer.json()["predictions"]] == [f"2024-01-01 0{hour}:00" for hour in (2, 3, 4)]
    refused = client.post("/invocations", json={"dataframe_split": {"columns": ["unique_id", "ds"], "data": [r[:2] for r in data]}})
    assert refused.status_code == 400 and "'y'" in refused.json()["message"]
