"""The tracking store away or hanging: the stream goes on at its pace, and the figures arrive when the store is back."""

import socket
import time
from pathlib import Path

import pytest

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from pipelines import tracking
from pipelines.streaming.event_time import EventTime, Frequency
from pipelines.streaming.figures import Figures
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


def test_figures_of_the_time_without_the_store_arrive_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    source = events(tmp_path / "e.ndjson", 20, 800)
    run(source, tmp_path / "a")
    uri = f"sqlite:///{tmp_path}/store/tethys.db"
    away = [True]
    reach = tracking._reach

    def asked(uri: str) -> None:
        if away[0]:
            raise UserError("refused")
        reach(uri)

    monkeypatch.setattr(tracking, "_reach", asked)
    with tracking.LiveRun(uri, "stream", params={"grace": "0s"}, every=0.01) as live, Figures(live.log, every=0.0) as figures:

        def report(step) -> None:
            received = step.counters["received"]
            if received in (160, 640):
                away[0] = False
            if received == 400:
                wait_for(lambda: not live.waiting)
                away[0] = True
            figures(step)

        run(source, tmp_path / "b", report)
    assert equal(tmp_path / "a", tmp_path / "b")
    store = tracking.open_store(uri)
    found = store.client.search_runs([store.experiment_id])
    assert [one.info.status for one in found] == ["FINISHED"] and found[0].data.params == {"grace": "0s"}
    history = store.client.get_metric_history(found[0].info.run_id, "events_per_s")
    assert sorted(point.step for point in history) == list(range(16, 801, 16)), "each once"
    ordered = [point.timestamp for point in sorted(history, key=lambda point: point.step)]
    assert ordered == sorted(ordered) and ordered[-1] > ordered[0], "with the times at which they were true"
    assert capsys.readouterr().err.count("the job goes on") == 2


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_store_that_never_answers_is_left_alone_at_the_end(tmp_path: Path, capsys) -> None:
    """A server that takes connections and never says a word: MLflow's own client would wait for most of a minute."""
    source = events(tmp_path / "e.ndjson", 20, 800)
    run(source, tmp_path / "a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        with tracking.LiveRun(uri, "stream", params={}, every=0.01) as live, Figures(live.log, every=0.0) as figures:
            summary = run(source, tmp_path / "b", figures)
            assert summary.stopped == "end of the source"
            ended = time.monotonic()
        assert time.monotonic() - ended < 20
    assert equal(tmp_path / "a", tmp_path / "b")
    assert "figures were not sent" in capsys.readouterr().err
