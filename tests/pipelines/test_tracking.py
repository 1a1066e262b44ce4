"""The MLflow store: made once however many begin at once, runs that read back, models found by alias, clear errors."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file

from connectors.errors import UserError
from pipelines import tracking


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tracking.open_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/tethys.db")


@pytest.fixture
def frame():
    stamps = [datetime(2026, 1, 1) + timedelta(hours=i) for i in range(6)]
    return pl.DataFrame({"unique_id": "a", "ds": stamps, "y": [1.0, None, 3.0, 4.0, 5.0, 6.0]})


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": np.arange(4, dtype=np.float32)}, path)
    return path


def register(store, weights, frame, *, name, alias, level=1):
    with tracking.run(store, "train", params={"look_back": 4}) as run:
        return tracking.register_forecaster(
            run,
            weights,
            {"level": level},
            name=name,
            alias=alias,
            input_example=frame,
            output_example=pl.DataFrame({"unique_id": "a", "ds": frame["ds"][:2], "q0.5": [1.0, 2.0]}),
            params={"horizon": 2, "quantiles": [0.1, 0.5, 0.9]},
            metrics={"mae": 0.5},
        )


def test_processes_that_begin_at_once_on_a_fresh_store_all_work(tmp_path):
    code = (
        "from pipelines import tracking\n"
        f"store = tracking.open_store('sqlite:///{tmp_path}/fresh/tethys.db')\n"
        "with tracking.run(store, 'r') as run: run.log_metrics({'a': 1.0})\n"
        "print(store.experiment_id)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in started]
    assert [code for *_, code in ended] == [0, 0], ended
    assert len({out for out, *_ in ended}) == 1
    with sqlite3.connect(tmp_path / "fresh" / "tethys.db") as db:
        assert db.execute("select count(*) from runs where status = 'FINISHED'").fetchone() == (2,)
        assert db.execute("select count(*) from experiments where name = 'tethys'").fetchone() == (1,)
    assert sorted(p.name for p in (tmp_path / "fresh").iterdir() if p.suffix != ".lock") == ["artifacts", "tethys.db"]


def test_a_run_reads_back(store, frame, tmp_path):
    figure = Figure()
    table = tmp_path / "forecast.csv"
    table.write_text("a,b\n")
    with tracking.run(store, "train", params={"horizon": 24, "nothing": None}) as run:
        run.log_history([(step, {"loss": 1.0 / (step + 1), "mae": float(step)}) for step in range(1200)])
        digest = run.log_dataset(frame, name="sample", source="sample.csv")
        run.log_figure(figure, "forecast.png")
        run.log_file(table)
    read = store.client.get_run(run.id)
    assert read.info.status == "FINISHED"
    assert read.data.params == {"horizon": "24"}
    assert read.data.metrics["mae"] == 1199
    assert [m.value for m in store.client.get_metric_history(run.id, "loss")][:2] == [1.0, 0.5]
    assert read.inputs.dataset_inputs[0].dataset.digest == digest
    assert {f.path for f in store.client.list_artifacts(run.id)} == {"forecast.png", "forecast.csv", "environment.json"}
    assert read.data.tags["code_version"] and tracking.environment()["packages"]["torch"]
    assert run.id in run.link and store.uri in run.link


def test_a_run_that_raises_has_failed(store):
    with pytest.raises(ZeroDivisionError), tracking.run(store, "train") as run:
        raise ZeroDivisionError
    assert store.client.get_run(run.id).info.status == "FAILED"


def test_a_forecaster_is_found_by_alias_in_another_process(store, weights, frame):
    first = register(store, weights, frame, name="sales", alias="champion")
    second = register(store, weights, frame, name="sales", alias="challenger", level=2)
    assert (first.version, second.version, second.aliases) == (1, 2, ("challenger",))
    code = (
        "import json; from pipelines import tracking\n"
        f"model = tracking.load_model('sales', 'champion', {store.uri!r})\n"
        "print(json.dumps([model.version, model.config, str(model.weights), list(model.aliases)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    version, config, path, aliases = json.loads(done.stdout)
    assert (version, config, aliases) == (1, {"level": 1}, ["champion"])
    np.testing.assert_array_equal(load_file(path)["w"], np.arange(4))
    listed = tracking.list_models(store.uri)
    assert listed == [{"name": "sales", "latest": 2, "aliases": {"challenger": 2, "champion": 1}}]
    shown = tracking.show_model("sales", store.uri)
    assert [(v.number, v.aliases, v.metrics) for v in shown] == [
        (2, ("challenger",), {"mae": 0.5}),
        (1, ("champion",), {"mae": 0.5}),
    ]


def test_an_unknown_model_version_or_alias_is_told_what_exists(store, weights, frame):
    register(store, weights, frame, name="load", alias="champion")
    with pytest.raises(UserError, match="no model 'lod' is registered in .*: it holds .*'load'"):
        tracking.load_model("lod", "champion", store.uri)
    with pytest.raises(UserError, match=r"no alias 'best': its versions are 1, its aliases champion \(version 1\)"):
        tracking.load_model("load", "best", store.uri)
    with pytest.raises(UserError, match="no version '7'"):
        tracking.load_model("load", 7, store.uri)


@pytest.mark.parametrize(("name", "alias"), [("", None), ("a/b", None), ("a:b", None), *(("m", a) for a in ("5", "v1", "Latest", "", "a b", "ü"))])
def test_names_that_the_registry_refuses_or_mistakes_are_a_mistake(name, alias):
    with pytest.raises(UserError, match="no name of a model" if alias is None else "no alias"):
        tracking.check_names(name, alias)
    tracking.check_names("sales büro-2", "challenger_2")


def test_a_store_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no tracking store at"):
        tracking.load_model("a", "b", f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(UserError, match="names no SQLite file"):
        tracking.open_store("sqlite:///:memory:")


def test_one_folder_is_made_for_a_store_and_no_tree(tmp_path):
    tracking.open_store(f"sqlite:///{tmp_path}/runs/t.db")
    with pytest.raises(UserError, match=f"the folder {tmp_path}/new of the tracking store .* does not exist"):
        tracking.open_store(f"sqlite:///{tmp_path}/new/folder/t.db")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make the folder .*file of the tracking store"):
        tracking.open_store(f"sqlite:///{tmp_path}/file/t.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs"]


@pytest.mark.parametrize("uri", ["runs/tethys.db", "mysterious://x"])
def test_an_address_that_names_no_store_is_told_what_to_write(uri):
    with pytest.raises(UserError, match="cannot open the tracking store .*sqlite:///FILE"):
        tracking.load_model("a", "b", uri)


def test_a_store_of_another_release_is_not_migrated_behind_the_back(store, tmp_path):
    old = tmp_path / "old.db"
    with sqlite3.connect(store.uri.removeprefix("sqlite:///")) as source, sqlite3.connect(old) as copy:
        source.backup(copy)
        copy.execute("update alembic_version set version_num = '451aebb31d03'")
    with pytest.raises(UserError, match="made by another release of MLflow .* mlflow db upgrade sqlite:///"):
        tracking.open_store(f"sqlite:///{old}")


def test_pickles_are_refused_in_this_process():
    assert os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_a_server_that_hangs_or_is_away_is_one_line_within_seconds():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(UserError, match=r"does not answer \(timed out\): start it"):
            tracking.open_store(hanging)
        with pytest.raises(UserError, match="does not answer"):
            tracking.load_model("a", "champion", hanging)
    with pytest.raises(UserError, match="does not answer .*refused"):
        tracking.list_models(hanging)
    with pytest.raises(UserError, match=r"store postgresql://127.0.0.1:\d+/db does not answer") as refused:
        tracking.open_store(hanging.replace("http://", "postgresql://someone:secret@") + "/db")
    assert "secret" not in str(refused.value)
    assert time.monotonic() - began < 12


def test_a_live_run_goes_on_while_the_store_is_away_and_its_figures_arrive_later(tmp_path, monkeypatch, capsys):
    away = threading.Event()
    away.set()
    asked = []

    def reach(uri):
        asked.append(uri)
        if away.is_set():
            raise UserError("the tracking store does not answer")

    monkeypatch.setattr(tracking, "_reach", reach)
    uri = f"sqlite:///{tmp_path}/tethys.db"
    with tracking.LiveRun(uri, "stream", params={"model": "m/1"}, every=0.02) as live:
        began = time.monotonic()
        for step in range(2500):
            live.log({"surprise": float(step)}, step)
        assert time.monotonic() - began < 1.0, "logging never waits for the store"
        while len(asked) < 3:
            time.sleep(0.01)
        assert live.waiting == 2500 and not (tmp_path / "tethys.db").exists()
        away.clear()
        while live.waiting:
            time.sleep(0.01)
        live.log({"surprise": -1.0}, 2500)
    assert capsys.readouterr().err.count("the job goes on") == 1
    store = tracking.open_store(uri)
    (run,) = store.client.search_runs([store.experiment_id])
    history = store.client.get_metric_history(run.info.run_id, "surprise")
    assert sorted(m.step for m in history) == list(range(2501)) and run.info.status == "FINISHED"
    assert run.data.params == {"model": "m/1"} and run.data.tags["code_version"]
