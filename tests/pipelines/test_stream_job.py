"""From a registered model to the command line: train, stream, look in, resume; streaming equals the batch run."""

import json
import os
import pickle
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import safetensors.numpy
from ray import cloudpickle

from connectors.errors import UserError
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.sample import hourly_load
from pipelines.streaming import inspect, job
from pipelines.streaming.worker import Stop, StreamSummary, run
from pipelines.streaming.workers import Workers, work_share

ROOT = Path(__file__).parents[2]
POINTS: list[tuple[int, dict[str, float]]] = []


@pytest.fixture(scope="module")
def fitted() -> TitansForecaster:
    return TitansForecaster(horizon=6, look_back=24, hidden=8, epochs=1).fit(hourly_load(series=2, days=20))


@pytest.fixture
def registered(fitted: TitansForecaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The registry's answer without MLflow; the store itself has its own tests."""
    from pipelines import tracking

    fitted.save(tmp_path / "model")

    def load_model(name: str, version: str, uri: str) -> tracking.RegisteredForecaster:
        config = json.loads((tmp_path / "model/config.json").read_text())
        return tracking.RegisteredForecaster(name, 3, (version,), "run", tmp_path / "model/weights.safetensors", config)

    @contextmanager
    def live_run(uri, name, *, params):
        yield SimpleNamespace(log=lambda metrics, step: POINTS.append((step, metrics)))

    monkeypatch.setattr(tracking, "load_model", load_model)
    monkeypatch.setattr(tracking, "LiveRun", live_run)
    POINTS.clear()
    return tmp_path


def stream(folder: Path, source: Path, **options) -> StreamSummary:
    return run(str(source), checkpoint=folder / "c.db", output=str(folder / "out.csv"), **options)


def test_streaming_equals_the_batch_run_wherever_it_stops(fitted: TitansForecaster, registered: Path) -> None:
    frame = hourly_load(series=2, days=12, seed=5)
    source = registered / "rows.csv"
    frame.sort("ds", "unique_id").write_csv(source)
    first = stream(registered / "a", source, max_events=333)
    summary = stream(registered / "a", source)
    assert first.events == 333 and summary.resumed and summary.counters["accepted"] == frame.height
    assert summary.model == "forecaster/3" and Path(summary.alarms or "").exists()
    out = pl.read_csv(registered / "a/out.csv", try_parse_dates=True)
    quantiles = [c for c in out.columns if c.startswith("q")]
    for rows in (150, 288):
        part = frame.group_by("unique_id", maintain_order=True).head(rows)
        expected = fitted.predict(part).sort("unique_id", "ds")
        found = (
            out.filter(pl.col("origin").dt.replace_time_zone(None) == part["ds"].max()).sort("unique_id", "step")
        )
        assert found.height == expected.height
        np.testing.assert_allclose(found.select(quantiles), expected.select(quantiles), rtol=1e-5)


def test_looking_in(registered: Path) -> None:
    source = registered / "rows.csv"
    hourly_load(series=2, days=3).write_csv(source)
    stream(registered / "a", source)
    checkpoint = registered / "a/c.db"
    listing = inspect.streams(checkpoint)
    assert [row["unique_id"] for row in listing.leaderboard] == ["site-0", "site-1"]
    assert [step for step, _ in POINTS] == [144] and POINTS[0][1]["streams"] == 2
    assert listing.leaderboard[0]["last"] == "2024-01-03T23:00:00Z" and listing.counters["received"] == 144
    shown = inspect.show(checkpoint, "site-1")
    assert shown["waiting_events"] == [] and "model.centre" in shown["memory"]
    path = inspect.export(checkpoint, "site-1", registered / "s.safetensors")
    tensors = safetensors.numpy.load_file(path)
    (registered / "folder").mkdir()
    with pytest.raises(UserError, match="it is a folder"):
        inspect.export(checkpoint, "site-1", registered / "folder")
    assert float(tensors["model.count"][0]) == 72
    assert inspect.reset(checkpoint, ["site-0"]) == 1
    assert [row["unique_id"] for row in inspect.streams(checkpoint).leaderboard] == ["site-1"]
    with pytest.raises(UserError, match=r"holds no stream 'site-0'; it holds 1: 'site-1'"):
        inspect.show(checkpoint, "site-0")
    with pytest.raises(UserError, match="no checkpoint"):
        inspect.streams(registered / "nothing.db")


def test_a_stream_file(registered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process and two workers of one file: the same rows. The workers run here, from what would travel to their actors."""
    example = job.read(ROOT / "docs/examples/stream.yaml")
    assert example.workers == 2 and example.follow and example.columns.unique_id == "sensor"
    for text, message in (
        ("source: a.csv\n", "model: Field required"),
        ("source: a.csv\nmodel: {name: m}\nworkers: 0\n", "workers: Input should be greater"),
        ("source: a.csv\nmodel: {name: m}\nwokers: 2\n", "wokers: Extra inputs .*see docs/examples/stream.yaml"),
        ("[]", "holds no settings: see docs/examples/stream.yaml"),
    ):
        (registered / "stream.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            job.read(registered / "stream.yaml")

    (registered / "stream.yaml").write_text("source: a.csv\nmodel: {name: m, version: 3}\n")
    assert job.read(registered / "stream.yaml").model.version == "3"

    def in_turn(self: Workers, *, stop: Stop, report, answer) -> StreamSummary:
        made = (pickle.loads(cloudpickle.dumps((self._job, share, self._make))) for share in self._shares)
        return self._together([work_share(what, share, make(), past=self._past, stop=stop, report=report) for what, share, make in made], [], 1.0)

    monkeypatch.setattr("pipelines.windows.ray_cluster", lambda _: None)
    monkeypatch.setattr(Workers, "run", in_turn)
    monkeypatch.chdir(registered)
    frame = hourly_load(series=5, days=6)
    frame.filter(pl.col("ds") < pl.col("ds").min() + pl.duration(days=3)).write_csv("past.csv")
    frame.filter(pl.col("ds") >= pl.col("ds").min() + pl.duration(days=3)).sort("ds").write_csv("rows.csv")
    for workers in (1, 2):
        text = f"source: rows.csv\nmodel: {{name: m}}\nhistory: past.csv\noutput: {workers}/out.csv\ncheckpoint: {workers}/c.db\nworkers: {workers}\n"
        Path("stream.yaml").write_text(text)
        summary = job.run(job.read("stream.yaml"))
        assert summary.counters["accepted"] == 5 * 72 and summary.streams == 5 and summary.workers == (None if workers == 1 else 2)
    assert summary.output == "2/out.0.csv, 2/out.1.csv" and summary.hint is None
    one, *two = (pl.read_csv(path) for path in ("1/out.csv", "2/out.0.csv", "2/out.1.csv"))
    assert all(len(part) for part in two)
    keys = ["unique_id", "origin", "step"]
    one, two = one.sort(keys), pl.concat(two).sort(keys)
    assert one.select(keys).equals(two.select(keys))
    for name in ("q0.5", "low", "high"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-6)
    listed = [inspect.streams(f"{workers}/c.db") for workers in (1, 2)]
    assert listed[0].counters == listed[1].counters
    assert [(row["unique_id"], row["last"]) for row in listed[0].leaderboard] == [(row["unique_id"], row["last"]) for row in listed[1].leaderboard]
    assert inspect.show("2/c.db", "site-3")["newest"] == inspect.show("1/c.db", "site-3")["newest"]
    assert inspect.reset("2/c.db", ["site-3", "site-4"]) == 2
    assert {row["unique_id"] for row in inspect.streams("2/c.db").leaderboard} == {"site-0", "site-1", "site-2"}
    with pytest.raises(UserError, match="holds no stream 'site-3'; it holds 3: 'site-0'"):
        inspect.export("2/c.db", "site-3", "s.safetensors")
    assert inspect.export("2/c.db", "site-0", "s.safetensors").exists()
    with pytest.raises(UserError, match="--max-events counts the lines of one worker"):
        run("rows.csv", checkpoint="2/c.db", output="2/out.csv", max_events=3)


def test_a_run_that_teaches_nothing_says_why(registered: Path) -> None:
    source = registered / "rows.ndjson"
    source.write_text("")
    assert stream(registered / "empty", source).hint == "the source held no rows"
    row = '{"unique_id": "a", "ds": "2024-01-01T%s", "y": %s}\n'
    source.write_text("not json\n" + row % ("00:00:00", "null"))
    lost = stream(registered / "lost", source)
    assert lost.hint == f"nothing was learnt from 2 rows: 1 could not be read, 1 had no value; see {lost.dead_letters}"
    past = hourly_load(series=1, days=2)
    past.write_csv(registered / "past.csv")
    past.write_ndjson(source)
    late = stream(registered / "late", source, history=str(registered / "past.csv"))
    assert late.hint.startswith("nothing was learnt from 48 rows: 48 came late (a longer --grace waits for such rows); see ")
    source.write_text(row % ("00:00:00", 1) + row % ("00:30:00", 2) + "not json\n")
    assert stream(registered / "most", source).hint.startswith("of 3 rows most taught nothing: 1 could not be read, 1 stood between two steps of")
    source.write_text('{"unique_id": "a", "ds": "2024-01-01T00:00:00", "y": 1}\n')
    assert "no forecast was judged yet" in stream(registered / "one", source).hint
    assert "nothing new" in stream(registered / "one", source).hint
    hourly_load(series=1, days=2).write_ndjson(source)
    assert stream(registered / "good", source).hint is None


def test_one_series_without_a_name_column(registered: Path) -> None:
    source = registered / "rows.csv"
    hourly_load(series=1, days=2).select(pl.col("ds").alias("date"), pl.col("y").alias("load")).write_csv(source)
    stream(registered / "a", source, id_column=None, time_column="date", target_column="load")
    assert pl.read_csv(registered / "a/out.csv")["unique_id"].unique().to_list() == ["load"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grace": "soon"}, "no duration"),
        ({"conflict": "first"}, "conflict policy"),
        ({"target_column": "z"}, "no column"),
    ],
)
def test_wrong_use_is_one_clear_line(registered: Path, options: dict[str, str], message: str) -> None:
    source = registered / "rows.csv"
    hourly_load(series=1, days=2).write_csv(source)
    with pytest.raises(UserError, match=message) as caught:
        stream(registered / "a", source, **options)
    assert "\n" not in str(caught.value)


def test_the_command_line_says_it_too(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipelines.cli", "streams", "list", "--checkpoint", str(tmp_path / "no.db")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("tethys: there is no checkpoint") and done.stderr.count("\n") == 1
