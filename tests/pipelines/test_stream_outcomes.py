"""The outcome memory inside the product: in tables, in live streams, in files."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from pipelines.forecasting.estimator import TitansForecaster, save_weights
from pipelines.streaming.engine import Engine
from pipelines.streaming.event_time import EventTime, Frequency
from pipelines.streaming.worker import stream_model, work
from titans_core.learner import Learner
from titans_core.state import leaves, select

HORIZON = 4
START = datetime(2024, 1, 1)
OUTPUTS = ("out.csv", "alarms.ndjson", "dead.ndjson")


def table(rows: int, streams: int = 3, *, first: int = 0) -> pl.DataFrame:
    """Noise with an echo that changes its sign after 250 rows: what was learnt from the rows before is wrong from there on."""
    random = np.random.default_rng(5)
    t = np.arange(700)
    parts = []
    for i in range(streams):
        noise = random.normal(0, 1, len(t))
        echo = np.concatenate([np.zeros(HORIZON), noise[:-HORIZON]]) * np.where(t < 250, -1.5, 1.5)
        y = 1000 * i + np.sin(t * np.pi / 12) + noise + echo
        parts.append(pl.DataFrame({"unique_id": f"s{i}", "ds": [START + timedelta(hours=int(h)) for h in t], "y": y})[first:rows])
    return pl.concat(parts)


@pytest.fixture(scope="module")
def fitted() -> TitansForecaster:
    model = TitansForecaster(horizon=HORIZON, look_back=24, hidden=0, outcomes=True, valid_share=0.5).fit(table(600))
    assert isinstance(model.memory_, Learner) and model.outcome_gain_ < 1.0
    return model


def close(a: object, b: object) -> None:
    for (path, left), (_, right) in zip(leaves(a), leaves(b), strict=True):
        assert torch.allclose(left.double(), right.double(), rtol=1e-3, atol=1e-3), path


def test_update_holds_the_memories_of_one_pass(fitted: TitansForecaster, tmp_path: Path) -> None:
    gappy = table(320, first=200).filter(~pl.col("ds").is_between(START + timedelta(hours=280), START + timedelta(hours=285)))
    whole = fitted.predict(gappy)
    save_weights(fitted.forecaster_, tmp_path / "w.safetensors", fitted.outcome_)
    twin = TitansForecaster.from_weights(tmp_path / "w.safetensors", json.loads(json.dumps(fitted.describe())))
    twin.update(gappy.filter(pl.col("ds") < START + timedelta(hours=240)))
    twin.update(gappy.filter(pl.col("ds").is_between(START + timedelta(hours=240), START + timedelta(hours=279))))
    twin.update(gappy.filter(pl.col("ds") > START + timedelta(hours=285)))
    parts = twin.predict()
    assert parts["unique_id"].to_list() == whole["unique_id"].to_list()
    assert np.allclose(parts["mean"], whole["mean"], atol=1e-3) and np.allclose(parts["q0.9"], whole["q0.9"], atol=1e-3)
    twin.outcome_ = None
    twin.state_ = twin.state_.forecaster
    assert not np.allclose(twin.predict()["mean"], parts["mean"], atol=1e-2), "the outcome memory says something"


def test_saved_and_loaded_it_goes_on_to_the_same_bits(fitted: TitansForecaster, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    again = TitansForecaster.load(tmp_path)
    assert again.predict().equals(fitted.predict())
    later = table(640, first=600)
    assert again.update(later).predict().equals(TitansForecaster.load(tmp_path).update(later).predict())


def events(path: Path, rows: int) -> Path:
    """The rows of `table` in time order, some missing, some absent."""
    random = np.random.default_rng(2)
    with path.open("w") as file:
        for one in table(rows).sort("ds", maintain_order=True).iter_rows(named=True):
            if random.random() < 0.04:
                continue
            y = None if random.random() < 0.04 else one["y"]
            file.write(json.dumps({"unique_id": one["unique_id"], "ds": one["ds"].isoformat(), "y": y}) + "\n")
    return path


def run(model: TitansForecaster, source: Path, folder: Path, **options: object) -> None:
    folder.mkdir(exist_ok=True)
    store = CheckpointStore(folder / "c.db")
    sinks = [open_sink(str(folder / name)) for name in OUTPUTS]
    try:
        work(stream_model(model, "m/1"), EventTime(Frequency.parse("1h")), open_source(str(source)), store, *sinks, **options)
    finally:
        for thing in (*sinks, store):
            thing.close()


def engine(model: TitansForecaster, folder: Path) -> Engine:
    return Engine(stream_model(model, "m/1"), EventTime(Frequency.parse("1h")), CheckpointStore(folder / "c.db"))


def test_a_stream_learns_what_its_table_does(fitted: TitansForecaster, tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 120)
    run(fitted, source, tmp_path / "a", batch_rows=7)
    seen = pl.read_ndjson(source, schema={"unique_id": pl.String, "ds": pl.String, "y": pl.Float64})
    seen = seen.with_columns(pl.col("ds").str.to_datetime())
    expected = fitted.predict(seen)
    last = pl.read_csv(tmp_path / "a/out.csv", try_parse_dates=True)
    last = last.filter(pl.col("origin") == pl.col("origin").max().over("unique_id")).sort("unique_id", "step")
    assert np.allclose(last["q0.5"], expected.sort("unique_id", "ds")["q0.5"], atol=1e-3)
    live, (ids, _, state) = engine(fitted, tmp_path / "a"), fitted.read(str(table_file(seen, tmp_path)))
    places = live.slots.admit(ids, 10**6)
    close(select(live.slots.state.model, places), state)


def table_file(frame: pl.DataFrame, folder: Path) -> Path:
    frame.write_parquet(folder / "seen.parquet")
    return folder / "seen.parquet"


def test_stopped_and_resumed_it_ends_at_the_same_bits(fitted: TitansForecaster, tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 60)
    run(fitted, source, tmp_path / "a", batch_rows=1)
    for more in (50, 60, 10_000):
        run(fitted, source, tmp_path / "b", batch_rows=1, max_events=more, max_resident=2, snapshot_share=3)
    for name in OUTPUTS:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert engine(fitted, tmp_path / "a").digest() == engine(fitted, tmp_path / "b").digest()


def test_a_model_that_gains_nothing_goes_without(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    noise = pl.DataFrame({"unique_id": "a", "ds": list(range(400)), "y": random.normal(size=400)})
    model = TitansForecaster(horizon=HORIZON, look_back=24, hidden=0, outcomes=True, frequency="1i").fit(noise)
    assert (model.outcome_ is None) == (model.outcome_gain_ >= 1.0)
    model = TitansForecaster(horizon=HORIZON, look_back=24, hidden=0, outcomes=True, memory="frozen")
    with pytest.raises(UserError, match="outcomes"):
        model.fit(table(600))
