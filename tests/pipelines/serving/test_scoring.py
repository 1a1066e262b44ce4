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
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.job import forecast_frame
from pipelines.serving.scoring import Scorer
from tests.pipelines.serving.conftest import HORIZON, World


@pytest.fixture(scope="module")
def scorer(world: World) -> Scorer:
    return Scorer(world.model(2), "load/2")


def frame(seed: int, series: int, rows: int) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    stamps = [datetime(2026, 1, 1) + timedelta(hours=i) for i in range(rows)]
    parts = [pl.DataFrame({"unique_id": f"s{i}", "ds": stamps, "y": rng.normal(50, 5, rows)}) for i in range(series)]
    return pl.concat(parts).with_columns(y=pl.when(pl.int_range(pl.len()) % 11 == 5).then(None).otherwise("y"))


def columns(table: pl.DataFrame) -> dict[str, list[Any]]:
    return {"unique_id": table["unique_id"].to_list(), "ds": table["ds"].dt.strftime("%Y-%m-%dT%H:%M:%SZ").to_list(), "y": table["y"].to_list()}


def equal(answer: dict[str, list[Any]], expected: pl.DataFrame) -> None:
    """To the bit."""
    assert list(answer) == expected.columns
    for name in expected.columns:
        assert answer[name] == expected[name].to_physical().to_list(), name


def test_many_at_once_are_answered_as_a_table_alone(world: World, scorer: Scorer) -> None:
    asked = [frame(seed, series=1 + seed % 3, rows=20 + 7 * (seed % 4)) for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda table: scorer.score(columns(table), 3, [0.1, 0.5]), asked))
    for table, answer in zip(asked, answers, strict=True):
        assert list(answer) == ["unique_id", "ds", "mean", "q0.1", "q0.5"] and len(answer["mean"]) == 3 * table["unique_id"].n_unique()
        equal(answer, forecast_frame(world.model(2), table, horizon=3, quantiles=[0.1, 0.5]))


def test_series_of_any_order_and_length_are_answered_as_a_table(world: World, scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they go the short way, or, in disorder or with holes, through the door of tables."""
    names = ("b", "é", "a", "10", "9", "b2")
    table = pl.concat([frame(i, 1, 30 + 11 * (i % 3)).with_columns(unique_id=pl.lit(name)) for i, name in enumerate(names)])
    expected = forecast_frame(world.model(2), table)
    holes = table.filter(pl.int_range(pl.len()) % 13 != 4)
    with monkeypatch.context() as patch:
        if scorer.quick(1):  # with the native kernels
            patch.setattr(scorer, "_by_table", lambda *asked: pytest.fail("these rows need no table"))
        equal(scorer.score(columns(table), None, None), expected)
    equal(scorer.score(columns(table.sample(fraction=1.0, shuffle=True, seed=1)), None, None), expected)
    equal(scorer.score(columns(holes), None, None), forecast_frame(world.model(2), holes))


def test_without_the_native_kernels_the_numbers_are_the_same_to_rounding(world: World, scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    table = frame(3, 2, 60)
    before = scorer.score(columns(table), None, None)
    monkeypatch.setenv("TETHYS_KERNELS", "torch")
    other = Scorer(world.model(2), "load/2")
    assert not other.quick(1)
    after = other.score(columns(table), None, None)
    for name in before:
        if name not in ("unique_id", "ds"):
            np.testing.assert_allclose(after[name], before[name], rtol=1e-5)


def test_covariates_come_with_the_rows_and_known_ahead_after_them() -> None:
    hours = pl.datetime_range(datetime(2026, 1, 1), datetime(2026, 1, 1) + timedelta(hours=311), "1h", eager=True)
    rng = np.random.default_rng(0)
    promo = (rng.random(312) < 0.2).astype(float)
    table = pl.DataFrame({"unique_id": "shop", "ds": hours, "y": 20 + 8 * promo + rng.normal(0, 0.5, 312), "promo": promo})
    model = TitansForecaster(horizon=6, look_back=24, hidden=0, epochs=1, future=("promo",)).fit(table.head(300))
    scorer = Scorer(model, "shop/1")
    asked = table.head(306).with_columns(y=pl.when(pl.int_range(pl.len()) < 300).then("y"))
    given = {**columns(asked), "promo": asked["promo"].to_list()}
    answer = scorer.score(given, None, None)
    equal(answer, forecast_frame(model, asked))
    other = scorer.score({**given, "promo": [*given["promo"][:300], *(1.0 - p for p in given["promo"][300:])]}, None, None)
    assert answer["mean"] != other["mean"], "what is known ahead counts"
    for bad, message in (
        ({name: values for name, values in given.items() if name != "promo"}, "no column promo"),
        ({name: values[:303] for name, values in given.items()}, "3 rows of the next 6 steps"),
        ({**given, "promo": given["promo"][:5]}, "differ in length"),
        ({**given, "promo": [[1.0], *given["promo"][1:]]}, "promo"),
        ({**given, "promo": [[1.0]] * 306}, "promo"),
        ({**given, "promo": [{"a": 1}] * 306}, "promo"),
        ({**given, "promo": ["yes"] * 306}, "promo"),
    ):
        with pytest.raises(UserError, match=message):
            scorer.score(bad, None, None)


def test_nothing_observed_is_refused(scorer: Scorer) -> None:
    for rows in (["2026-01-01T00:00:00", "2026-01-01T01:00:00"], ["2026-01-01T00:00:00", "2026-01-01T05:00:00"]):
        with pytest.raises(UserError, match="has no observed value"):
            scorer.score({"unique_id": ["a", "a"], "ds": rows, "y": [None, None]}, None, None)


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
    mine = scorer.score(asked, 4, [0.5])
    for name in ("unique_id", "mean", "q0.5"):
        assert [row[name] for row in before[1]["predictions"]] == mine[name], "to the bit"
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
