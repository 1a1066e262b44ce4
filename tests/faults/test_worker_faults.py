"""Several workers: a node is lost with the worker on it, then a worker with its output. The rows and the final states are those of one
worker that nobody disturbed."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.errors import UserError
from pipelines.streaming.dials import Step
from pipelines.streaming.worker import Stop
from pipelines.streaming.workers import Workers
from tests.pipelines.test_stream_workers import actors, grow, job, rows, states, supervised, wait_for
from tests.pipelines.test_streaming import events, run
from tests.pipelines.toy_memory import toy_model


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    source = events(folder / "e.ndjson", 40, 700, seed=1)
    run(source, folder, grace="2m", batch_rows=32)
    return source.read_text().splitlines(keepends=True), folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine; the head has room for the workers of both."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # read at import, as the next one
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()  # another test's
    made = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def finish(source: Path, folder: Path) -> None:
    with Workers(job(source, folder), folder / "c.db", 1, toy_model) as one:
        one.run(stop=Stop())


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def received(told: list[Step]) -> int:
    return told[-1].counters["received"] if told else 0


def test_a_node_is_lost_then_a_worker_with_its_output(tmp_path: Path, undisturbed, cluster: Any) -> None:
    lines, expected = undisturbed
    source = tmp_path / "e.ndjson"
    grow(source, lines, 0.4)
    kept: dict[Path, bytes] = {}

    def disturb(told: list[Step], address: str) -> None:
        wait_for(lambda: received(told) > 0.2 * len(lines))
        before = actors()
        (node,) = cluster.worker_nodes
        assert sum(worker.ppid() == node.all_processes["raylet"][0].process.pid for worker in before) == 1, "workers spread over the nodes"
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: sum(map(alive, before)) == 1)  # the other node goes on
        grow(source, lines, 0.6)
        wait_for(lambda: told[-1].restarts == 1 and received(told) == int(0.6 * len(lines)))
        victim = next(filter(alive, before))
        for index in (0, 1):
            path = tmp_path / f"out.{index}.csv"
            if str(path) in {file.path for file in victim.open_files()}:
                victim.send_signal(signal.SIGKILL)
                kept[path] = path.read_bytes()
                os.truncate(path, 1000)
        threading.Event().wait(120)  # until the mistake ends the run, and this daemon with it

    with pytest.raises(UserError, match=r"^worker \d: .*has 1000 bytes, the checkpoint has committed \d+: put the file back"):
        supervised(source, tmp_path, 2, disturb)
    for path, data in kept.items():
        path.write_bytes(data)
    grow(source, lines, 1.0)
    finish(source, tmp_path)
    assert states(tmp_path) == states(expected)
    assert rows(tmp_path) == rows(expected)
