"""Redis, NATS and Mosquitto from Debian's packages, started for a test on a free loopback port."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.connectors.brokers import free_port

PACKAGES = {"redis-server": "redis-server", "nats-server": "nats-server", "mosquitto": "mosquitto"}


def program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        assert os.environ.get("TETHYS_REQUIRE_DATA") != "1", f"'{name}' is not installed"
        pytest.skip(f"'{name}' is not installed (apt-get install {PACKAGES[name]})")
    return found


def redis_command(port: int, folder: Path) -> list[str]:
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    return [program("redis-server"), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), *durable]


def nats_command(port: int, folder: Path) -> list[str]:
    return [program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]


def mosquitto_command(port: int, folder: Path) -> list[str]:
    settings = folder / "mosquitto.conf"
    # The broker gives up root for a user who must be able to write here.
    settings.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence true\npersistence_location {folder}/\n"
        "autosave_interval 1\nautosave_on_changes true\nmax_queued_messages 0\nuser root\n"
    )
    return [program("mosquitto"), "-c", str(settings)]


COMMANDS: dict[str, Callable[[int, Path], list[str]]] = {"redis": redis_command, "nats": nats_command, "mqtt": mosquitto_command}


class Server:
    def __init__(self, kind: str, folder: Path):
        self.kind, self.folder, self.port = kind, folder, free_port()
        self.place = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        log = open(self.folder / "server.log", "ab")
        self.process = subprocess.Popen(COMMANDS[self.kind](self.port, self.folder), stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the server did not listen")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def server(kind: str, folder: Path) -> Iterator[Server]:
    started = Server(kind, folder)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()
