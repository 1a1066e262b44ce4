"""The search for parameters: on validation rows alone, one MLflow run a trial, and a study that goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import yaml

from connectors.errors import UserError
from pipelines import tracking
from pipelines.forecasting import job, tune
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.sample import hourly_load
from pipelines.windows import panel

HORIZON = 12


def test_a_space_is_drawn_without_repeats_and_by_its_seed() -> None:
    space = {"look_back": [24, 48], "hidden": [0, 16, 64]}
    every = tune.draw(space, 100, 0, {})
    assert len(every) == 6 and len({json.dumps(p, sort_keys=True) for p in every}) == 6
    assert tune.draw(space, 4, 1, {}) == tune.draw(space, 4, 1, {}) != tune.draw(space, 4, 2, {})
    huge = {name: list(range(1000)) for name in ("look_back", "hidden", "patch_rows")}
    assert len(tune.draw(huge, 5, 0, {})) == 5
    with pytest.raises(UserError, match="epochs is fixed by an option"):
        tune.draw({"epochs": [1]}, 1, 0, {"epochs": 8})


def test_the_default_space_fits_the_rows() -> None:
    short, long = (panel(hourly_load(series=1, days=days)) for days in (10, 60))
    assert tune.default_space(short, 12)["look_back"] == [24, 48]
    assert tune.default_space(long, 12)["look_back"] == [24, 48, 96, 168, 336]
    for look_back in tune.default_space(short, 12)["look_back"]:
        TitansForecaster(horizon=12, look_back=look_back, hidden=0).fit(short)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("look_back: 48", "look_back must be a list of the values to try"),
        ("look_bak: [48]", "unknown look_bak; there are blocks, epochs, hidden, look_back"),
        ("horizon: [12]", "unknown horizon"),
        ("valid_share: [0.1]", "unknown valid_share"),
        ("[1, 2]", "holds no parameters"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_space_at_fault_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        tune.read_space(tmp_path / "space.yaml")
    with pytest.raises(UserError, match="cannot read"):
        tune.read_params(tmp_path / "nowhere.yaml")


def test_parameters_of_a_file_reach_the_model(tmp_path: Path) -> None:
    data, store = tmp_path / "load.csv", f"sqlite:///{tmp_path}/t.db"
    hourly_load(series=2, days=30).write_csv(data)
    best = tune.Trial(3, {"look_back": 30, "hidden": 0, "blocks": []}, "finished", 0.5)
    (tmp_path / "params.yaml").write_text(tune._written(best, {"horizon": HORIZON, "epochs": 1, "seed": 7}, 4, "abc"))
    given = tune.read_params(tmp_path / "params.yaml")
    assert given == {"horizon": HORIZON, "epochs": 1, "seed": 7, "look_back": 30, "hidden": 0, "blocks": ()}
    result = job.train(str(data), tracking_uri=store, model_name="load", output=tmp_path / "out", parameters=given)
    found = tracking.load_model("load", result.version, store).config["parameters"]
    assert {name: found[name] for name in ("horizon", "look_back", "hidden", "epochs", "seed")} == {
        "horizon": HORIZON, "look_back": 30, "hidden": 0, "epochs": 1, "seed": 7
    }  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """The searches of this file share the cluster that the first of them starts."""
    yield
    import ray  # its settings are read at import, and the search makes them

    ray.shutdown()


@pytest.mark.ray
def test_a_search_from_table_to_parameters_and_on_from_where_it_was_killed(cluster: None, tmp_path: Path) -> None:
    frame, store = hourly_load(series=2, days=30), f"sqlite:///{tmp_path}/t.db"
    (tmp_path / "space.yaml").write_text("look_back: [24, 48]\nhidden: [0, 8]\nmemory: [carried, nonsense]\n")
    settings = {"horizon": HORIZON, "trials": 5, "epochs": 2, "space": tmp_path / "space.yaml", "tracking_uri": store, "output": tmp_path / "study"}

    def search(rows: pl.DataFrame) -> tune.TuneResult:
        rows.write_parquet(tmp_path / "load.parquet")
        return tune.tune(str(tmp_path / "load.parquet"), **settings)  # type: ignore[arg-type]

    first = search(frame)
    points = tune.draw(tune.read_space(tmp_path / "space.yaml"), 5, 0, {})
    nonsense = sum(p["memory"] == "nonsense" for p in points)
    assert first.trials == 5 and first.failed == nonsense > 0 and first.resumed == 0
    # The errors are those of trainings by hand on the rows before the test rows.
    table = panel(frame)
    past = job._until(table, job._border(table, 1, HORIZON))
    for row in first.leaderboard:
        if row["state"] == "finished":
            by_hand = TitansForecaster(horizon=HORIZON, look_back=row["look_back"], hidden=row["hidden"], epochs=2, frequency="1h").fit(past)
            assert row["error"] == pytest.approx(by_hand.valid_error_, rel=1e-4)
    written = yaml.safe_load(Path(first.params).read_text())
    assert {name: written[name] for name in first.best} == first.best and written["horizon"] == HORIZON

    # One run a trial, under the run of the study.
    opened = tracking.open_store(store)
    (parent,) = opened.client.search_runs([opened.experiment_id], "attributes.run_name = 'tune forecaster'")
    under = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    children = {c.info.run_name: c for c in opened.client.search_runs([opened.experiment_id], under)}
    assert set(children) == {f"trial {i}" for i in range(5)} and parent.info.status == "FINISHED"
    assert sum(c.info.status == "FAILED" for c in children.values()) == nonsense
    for row in first.leaderboard:
        if row["error"] is not None:
            assert children[f"trial {row['trial']}"].data.metrics["error"] == pytest.approx(row["error"])

    # Killed: two trials are lost, and the run of one is still open. Test rows that came since change nothing.
    for lost in (1, 3):
        (tmp_path / "study" / "trials" / f"trial-{lost:03d}.json").unlink()
    Path(first.params).unlink()
    left = tracking.begin(opened, "trial 3", parent=tracking.Run(opened, parent.info.run_id, opened.experiment_id))
    spoilt = frame.with_columns(y=pl.when(pl.col("ds") >= table.ds[job._border(table, 1, HORIZON)]).then(1e6).otherwise("y"))
    second = search(spoilt)
    assert second.resumed == 3 and second.best == first.best and second.error == first.error
    assert opened.client.get_run(left.id).info.status == "KILLED"
    assert opened.client.get_run(parent.info.run_id).info.status == "FINISHED" and len(list((tmp_path / "study/trials").iterdir())) == 5
    with pytest.raises(UserError, match="holds the study of other data or other settings"):
        search(frame.with_columns(pl.col("y") + 1))


@pytest.mark.ray
def test_a_trial_that_falls_behind_is_stopped_before_its_last_epoch(cluster: None, tmp_path: Path) -> None:
    """One at a time, the better first: at epoch 2 of 6 the other one is measured against it."""
    frame, store = hourly_load(series=2, days=30), f"sqlite:///{tmp_path}/t.db"
    (tmp_path / "space.yaml").write_text("memory: [carried, frozen]\nhidden: [16]\nlook_back: [24]\n")
    frame.write_parquet(tmp_path / "load.parquet")
    assert [p["memory"] for p in tune.draw(tune.read_space(tmp_path / "space.yaml"), 2, 0, {})] == ["carried", "frozen"]
    found = tune.tune(
        str(tmp_path / "load.parquet"), horizon=HORIZON, trials=2, workers=1, epochs=3, space=tmp_path / "space.yaml", tracking_uri=store,
        output=tmp_path / "study",
    )  # fmt: skip
    good, bad = found.leaderboard
    assert (good["memory"], good["state"], good["epochs"]) == ("carried", "finished", 6)
    assert (bad["memory"], bad["state"], bad["epochs"], bad["error"]) == ("frozen", "stopped", tune.GRACE, None)
    assert found.stopped == 1 and found.failed == 0 and found.best["memory"] == "carried"
    # It was behind there, by the errors that it told, and would have been at the end.
    opened = tracking.open_store(store)
    runs = {run.info.run_name: run.info.run_id for run in opened.client.search_runs([opened.experiment_id], "attributes.run_name LIKE 'trial %'")}
    told = {name: {m.step: m.value for m in opened.client.get_metric_history(run, "error_of_epoch")} for name, run in runs.items()}
    assert sorted(told["trial 1"]) == [1, 2] and sorted(told["trial 0"]) == [1, 2, 3, 4, 5, 6]
    assert told["trial 1"][2] > 1.2 * told["trial 0"][2]
    table = panel(frame)
    whole = TitansForecaster(horizon=HORIZON, look_back=24, hidden=16, epochs=3, memory="frozen", frequency="1h")
    assert whole.fit(job._until(table, job._border(table, 1, HORIZON))).valid_error_ > 1.2 * good["error"]


def test_a_trial_of_another_study_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    points = [{"look_back": 24}, {"look_back": 48}]
    for number, look_back in ((0, 24), (1, 96), (2, 48)):
        trial = tune.Trial(number, {"look_back": look_back}, "finished", 0.1)
        (tmp_path / "trials" / f"trial-{number:03d}.json").write_text(json.dumps(dataclasses.asdict(trial)))
    assert [t.number for t in tune._kept(tmp_path, points)] == [0]
    (tmp_path / "trials" / "trial-001.json").write_text('{"number": 1')
    with pytest.raises(UserError, match=r"trial-001\.json is no trial of this program"):
        tune._kept(tmp_path, points)
    assert tune._best_so_far([]) == "no error yet" and tune._best_so_far([tune.Trial(0, {}, error=0.25)]) == "best error 0.2500"
