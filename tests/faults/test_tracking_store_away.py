"""The tracking store away or hanging: the stream goes on at its pace, and the figures arrive when the store is back."""

import logging
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from connectors.checkpoints import CheckpointStore
from connectors.streams import open_sink, open_source
from pipelines import tracking
from pipelines.streaming.event_time import EventTime, Frequency
from pipelines.streaming.tracked import Tracked
from pipelines.streaming.worker import StreamSummary, work
from tests.pipelines.test_streaming import OUTPUTS, digest, events
from tests.pipelines.toy_memory import toy_model


def run(source: Path, folder: Path, report=None) -> StreamSummary:
    folder.mkdir()
    store = CheckpointStore(folder / "c.db")
    sinks = [open_sink(str(folder / name)) for name in OUTPUTS]
    policy = EventTime(Frequency.parse("1m"))
    summary = work(toy_model(), policy, open_source(str(source)), store, *sinks, batch_rows=16, report=report)
    for thing in (*sinks, store):
        thing.close()
    return summary


def equal(a: Path, b: Path) -> bool:
    return digest(a) == digest(b) and all((a / name).read_bytes() == (b / name).read_bytes() for name in OUTPUTS)


class Away:
    """A store that refuses connections and points for as long as it is told to."""

    def __init__(self) -> None:
        self.away, self.points, self.opened = True, [], 0

    @contextmanager
    def connect(self):
        self._answer()
        self.opened += 1
        yield self
        self._answer()

    def log_points(self, points) -> None:
        self._answer()
        self.points += points

    def _answer(self) -> None:
        if self.away:
            raise ConnectionError("refused")


def test_figures_of_the_time_without_the_store_arrive_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = events(tmp_path / "e.ndjson", 20, 800)
    run(source, tmp_path / "a")
    store = Away()
    with caplog.at_level(logging.WARNING), Tracked(store.connect, every=0.0, retry=0.01) as tracked:

        def report(step) -> None:
            received = step.counters["received"]
            if received == 160:
                store.away = False
            if received == 400:
                wait_for(lambda: len(store.points) > 5)
                store.away = True
            if received == 640:
                store.away = False
            tracked(step)

        run(source, tmp_path / "b", report)
    assert equal(tmp_path / "a", tmp_path / "b")
    assert [point.step for point in store.points] == list(range(16, 801, 16)), "each once, in order"
    assert [point.milliseconds for point in store.points] == sorted(point.milliseconds for point in store.points)
    assert store.opened == 1 and "lost" not in caplog.text and caplog.text.count("does not answer") == 2


def wait_for(condition, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_store_that_never_answers_is_left_alone_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that takes connections and never says a word: MLflow's own client would wait for most of a minute."""
    source = events(tmp_path / "e.ndjson", 20, 800)
    run(source, tmp_path / "a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with caplog.at_level(logging.WARNING), Tracked(
            lambda: tracking.run(tracking.open_store(uri), "stream"), every=0.0, leave=0.5
        ) as tracked:
            summary = run(source, tmp_path / "b", tracked)
            assert summary.stopped == "end of the source"
            worked = time.monotonic() - began
        assert time.monotonic() - began < worked + 5
    assert equal(tmp_path / "a", tmp_path / "b")
    assert "points of this run's figures are lost" in caplog.text


def test_figures_reach_mlflow_with_their_own_times(tmp_path: Path) -> None:
    store = tracking.open_store(f"sqlite:///{tmp_path}/store/tethys.db")
    source = events(tmp_path / "e.ndjson", 20, 400)
    with Tracked(lambda: tracking.run(store, "stream", tags={"kind": "stream"}), every=0.2, leave=60.0) as tracked:
        run(source, tmp_path / "a", tracked)
    found = store.client.search_runs([store.experiment_id])
    assert [one.info.status for one in found] == ["FINISHED"] and found[0].data.tags["kind"] == "stream"
    history = store.client.get_metric_history(found[0].info.run_id, "events_per_s")
    assert history[-1].step == 400 and all(point.value > 0 for point in history)
    assert found[0].data.metrics["streams"] > 10
