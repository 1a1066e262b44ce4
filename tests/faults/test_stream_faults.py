"""Kill -9, a locked store, a full disk, duplicates: the outputs and the final state equal the undisturbed run's.

`TETHYS_KILLS` sets how often the worker is killed (10 unless given).
"""

import os
import random
import signal
import sqlite3
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from connectors.checkpoints import CheckpointStore
from pipelines.streaming.engine import Engine
from pipelines.streaming.event_time import EventTime, Frequency
from tests.connectors.brokers import broker
from tests.faults.stream_process import start
from tests.pipelines.test_streaming import events
from tests.pipelines.toy_memory import toy_model

KILLS = int(os.environ.get("TETHYS_KILLS", "10"))


def end(process: BaseProcess, folder: Path, code: int = 0) -> str:
    """Wait for the process; returns what it said."""
    process.join(60)
    said = (folder / "said.txt").read_text()
    assert process.exitcode == code, said
    return said


def finish(source: str | Path, folder: Path) -> None:
    assert end(start(source, folder), folder) == "end of the source\n"


def done(folder: Path) -> int:
    """Batches committed so far."""
    try:
        row = sqlite3.connect(f"file:{folder / 'c.db'}?mode=ro", uri=True).execute("SELECT done FROM run").fetchone()
    except sqlite3.Error:
        return 0
    return 0 if row is None else row[0]


def wait_for(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the worker did not get that far"
        time.sleep(0.005)


def result(folder: Path) -> tuple[bytes, bytes, str]:
    store = CheckpointStore(folder / "c.db")
    digest = Engine(toy_model(), EventTime(Frequency.parse("1m")), store).digest()
    assert store.journal() == []
    store.close()
    return (folder / "out.csv").read_bytes(), (folder / "dead.ndjson").read_bytes(), digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[bytes, bytes, str]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    source = events(folder / "e.ndjson", 40, 40 * KILLS + 300)
    with open(source, "a") as file:
        file.write("not json\n")
    finish(source, folder / "run")
    return source, result(folder / "run")


def test_kill_nine_at_random_points(tmp_path: Path, undisturbed) -> None:
    source, expected = undisturbed
    chance = random.Random(0)
    kills = 0
    for _ in range(KILLS):
        before = done(tmp_path)
        process = start(source, tmp_path, pause=0.01)
        # Past the start-up, then anywhere: inside a step, a write, a commit, a replay.
        wait_for(lambda before=before, process=process: done(tmp_path) > before or not process.is_alive())
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills == KILLS
    finish(source, tmp_path)
    assert result(tmp_path) == expected


def test_sigterm_is_graceful(tmp_path: Path, undisturbed) -> None:
    source, expected = undisturbed
    process = start(source, tmp_path, pause=0.02)
    wait_for(lambda: done(tmp_path) > 3)
    process.terminate()
    assert end(process, tmp_path) == "signal\n"
    store = CheckpointStore(tmp_path / "c.db")
    assert store.journal() == []
    store.close()
    finish(source, tmp_path)
    assert result(tmp_path) == expected


def test_a_store_that_is_locked_for_a_while(tmp_path: Path, undisturbed) -> None:
    source, expected = undisturbed
    process = start(source, tmp_path, pause=0.02)
    wait_for(lambda: done(tmp_path) > 3)
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None, timeout=10)
    other.execute("BEGIN IMMEDIATE")
    stood = done(tmp_path)
    time.sleep(0.5)
    assert done(tmp_path) == stood and process.is_alive(), "it waits"
    other.execute("ROLLBACK")
    end(process, tmp_path)
    assert result(tmp_path) == expected


def test_a_full_disk(tmp_path: Path, undisturbed) -> None:
    """No file may grow beyond a limit, as on a full disk: one clear line, nothing lost once there is room again."""
    source, expected = undisturbed

    said = end(start(source, tmp_path, largest_file=60_000), tmp_path, code=2)
    assert said.count("\n") == 1 and "make room" in said
    finish(source, tmp_path)
    assert result(tmp_path) == expected


def test_a_second_worker_is_refused_while_the_first_lives(tmp_path: Path, undisturbed) -> None:
    source, expected = undisturbed
    first = start(source, tmp_path, pause=0.02)
    wait_for(lambda: done(tmp_path) > 1)
    said = end(start(source, tmp_path), tmp_path, code=2)
    assert "another worker" in said
    first.join(60)
    assert first.exitcode == 0
    assert result(tmp_path) == expected


def test_events_sent_twice_are_learnt_once(tmp_path: Path, undisturbed) -> None:
    source, _ = undisturbed
    twice = tmp_path / "twice.ndjson"
    # Each line again a few lines later, as after a producer's retry.
    lines = source.read_text().splitlines(keepends=True)[:300]
    once = tmp_path / "once.ndjson"
    once.write_text("".join(lines))
    out = []
    for at, line in enumerate(lines):
        out.append(line)
        if at >= 3:
            out.append(lines[at - 3])
    twice.write_text("".join(out))
    finish(once, tmp_path / "a")
    finish(twice, tmp_path / "b")
    rows = [sorted((tmp_path / f"{name}/out.csv").read_text().splitlines()) for name in "ab"]
    assert rows[0] == rows[1]
    assert result(tmp_path / "a")[2] == result(tmp_path / "b")[2]


def test_a_broker_that_dies_and_comes_back(tmp_path: Path, undisturbed) -> None:
    pytest.importorskip("confluent_kafka")
    source, _ = undisturbed
    lines = source.read_text().splitlines()[:500]
    once = tmp_path / "once.ndjson"
    once.write_text("\n".join(lines) + "\n")
    finish(once, tmp_path / "a")
    (tmp_path / "broker").mkdir()
    with broker("noida", tmp_path / "broker") as kafka:
        kafka.create("events", 1)
        kafka.send("events", lines, 1)
        address = f"kafka://{kafka.address}/events"
        process = start(address, tmp_path / "b", pause=0.02)
        wait_for(lambda: done(tmp_path / "b") > 3)
        kafka.kill()
        time.sleep(0.3)
        kafka.start()
        assert end(process, tmp_path / "b").splitlines()[-1] == "end of the source"
    rows = [sorted((tmp_path / f"{name}/out.csv").read_text().splitlines()) for name in "ab"]
    assert rows[0] == rows[1]
    assert result(tmp_path / "a")[2] == result(tmp_path / "b")[2]
