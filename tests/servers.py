"""Servers for tests: PostgreSQL, Redis, NATS and Mosquitto from Debian's packages, an S3-compatible store from PyPI (moto).

Each is started on a free port of 127.0.0.1, in folders of its own, and stopped by its process. PostgreSQL refuses to run
as root, so there it runs as an unprivileged account. Where a program is absent a test skips and says which package has it;
with TETHYS_REQUIRE_SERVERS=1, which .ci/run sets, it fails.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

ACCOUNTS = ("postgres", "nobody")
# A crash of a server process must not lose commits, and does not without fsync: only a crash of the machine would.
SETTINGS = {"fsync": "off", "wal_level": "logical", "max_replication_slots": "16", "max_wal_senders": "16"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def absent(what: str, package: str) -> None:
    reason = f"{what} is not installed ({package})"
    assert os.environ.get("TETHYS_REQUIRE_SERVERS") != "1", reason
    pytest.skip(reason)


class Postgres:
    """One PostgreSQL server. `database()` makes an empty database and returns its address; `stop(SIGKILL)` and `start()` are a crash."""

    def __init__(self) -> None:
        self._programs = self._find()
        self._run_as: dict[str, Any] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="tethys-postgres-"))
        if os.geteuid() == 0:
            known = {entry.pw_name: entry for entry in pwd.getpwall()}
            account = next(known[name] for name in ACCOUNTS if name in known)
            self._run_as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(self._folder, account.pw_uid, account.pw_gid)
        self.port, self._names = free_port(), count(1)
        self.data, self.log = self._folder / "data", self._folder / "log"
        flags = ["--username=tethys", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        made = subprocess.run(
            [self._programs / "initdb", "--pgdata", self.data, *flags],
            cwd=self._folder, capture_output=True, text=True, timeout=120, **self._run_as,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        self.start()

    @staticmethod
    def _find() -> Path:
        # Debian keeps the programs of each release in a folder off the PATH.
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True)
        on_path = shutil.which("postgres")
        for folder in [*folders, *([Path(on_path).resolve().parent] if on_path else [])]:
            if (folder / "postgres").exists() and (folder / "initdb").exists():
                return folder
        absent("PostgreSQL", "apt-get install postgresql")
        raise AssertionError

    def address(self, database: str) -> str:
        return f"postgresql://tethys@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        name = f"test{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}", self.address("postgres"))
        return self.address(name)

    def execute(self, statement: str, address: str) -> list[tuple[Any, ...]]:
        """Statements outside any transaction; rows of the last one, if it has some."""
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(address, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        settings = {**SETTINGS, "listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": str(self._folder)}
        flags = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [self._programs / "postgres", "-D", self.data, *flags],
                cwd=self._folder, stdout=log, stderr=log, start_new_session=True, **self._run_as,
            )  # fmt: skip
        until = time.monotonic() + 30
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.execute("SELECT 1", self.address("postgres"))
                return
            except Exception:
                assert time.monotonic() < until, self.log.read_text()
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends it in order. SIGKILL, sent to every process of it, is a crash."""
        if self.process.poll() is None:
            if how == signal.SIGKILL:
                os.killpg(self.process.pid, how)
            else:
                self.process.send_signal(how)
            self.process.wait(30)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class ObjectStore:
    """An S3-compatible store in memory. `environment` is what a user would set to reach it; `bucket()` makes an empty bucket."""

    def __init__(self) -> None:
        program = Path(sys.executable).with_name("moto_server")
        if not program.exists():
            absent("moto's server", "pip install 'moto[s3]' flask flask-cors")
        self.port, self._names = free_port(), count(1)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "the-key-id",
            "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-test",
        }
        # Nothing of the caller's own account may reach the tests.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        self.process = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(self.port)],
            env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + 30
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", self.port)):
                assert self.process.poll() is None and time.monotonic() < until, "moto's server did not start"
                time.sleep(0.05)

    def bucket(self) -> str:
        name = f"bucket-{next(self._names)}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name=self.environment["AWS_REGION"],
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"], aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip

    def remove(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@contextmanager
def running(server: type[Postgres] | type[ObjectStore]) -> Iterator[Any]:
    started = server()
    try:
        yield started
    finally:
        started.remove()


def _program(name: str) -> str:
    # Debian keeps some programs where only root looks.
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        absent(f"'{name}'", f"apt-get install {name}")
    assert found is not None
    return found


def _redis(port: int, folder: Path) -> list[str]:
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    return [_program("redis-server"), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), *durable]


def _nats(port: int, folder: Path) -> list[str]:
    return [_program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]


def _mosquitto(port: int, folder: Path) -> list[str]:
    settings = folder / "mosquitto.conf"
    lines = [f"listener {port} 127.0.0.1", "allow_anonymous true", "persistence true", f"persistence_location {folder}/"]
    lines += ["autosave_interval 1", "autosave_on_changes true", "max_queued_messages 0"]
    # Started by root it would give that up for an account that cannot write in a test's folder.
    settings.write_text("\n".join([*lines, f"user {pwd.getpwuid(os.geteuid()).pw_name}", ""]))
    return [_program("mosquitto"), "-c", str(settings)]


COMMANDS: dict[str, Callable[[int, Path], list[str]]] = {"redis": _redis, "nats": _nats, "mqtt": _mosquitto}


class Broker:
    """One Redis, NATS or Mosquitto server that keeps what it has in `folder`. `kill()` and `start()` are a crash."""

    def __init__(self, kind: str, folder: Path):
        self.kind, self.folder, self.port = kind, folder, free_port()
        self.place = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(COMMANDS[self.kind](self.port, self.folder), stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 30
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", self.port)):
                assert self.process.poll() is None and time.monotonic() < until, (self.folder / "server.log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


@contextmanager
def broker(kind: str, folder: Path) -> Iterator[Broker]:
    started = Broker(kind, folder)
    try:
        yield started
    finally:
        started.kill()
