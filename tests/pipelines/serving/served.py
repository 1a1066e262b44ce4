"""A service as a process of its own, as people run it, and a client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

ROOT = Path(__file__).resolve().parents[3]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", **more}


class Client:
    """One connection that stays open."""

    def __init__(self, address: str, token: str | None = None, timeout: float = 60.0):
        self.host, self.port = urlsplit(address).hostname, urlsplit(address).port
        self._token, self._timeout = token, timeout
        self._connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def raw(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        if self._token:
            headers.setdefault("Authorization", f"Bearer {self._token}")
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
        except http.client.RemoteDisconnected:
            if method != "GET":
                raise
            self._connection.close()  # it was idle for too long
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}

    def call(self, method: str, path: str, value: Any = None) -> tuple[int, Any]:
        headers = {} if value is None else {"Content-Type": "application/json"}
        status, body, _ = self.raw(method, path, None if value is None else json.dumps(value).encode(), **headers)
        return status, json.loads(body)

    def get(self, path: str) -> Any:
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return answer

    def push(self, *events: dict[str, Any]) -> Any:
        status, answer = self.call("POST", "/v1/events", {"events": list(events)})
        assert status == 200, answer
        return answer

    def rows(self, name: str) -> list[dict[str, Any]]:
        return self.get(f"/v1/streams/{quote(name)}/history?limit=10000")["rows"]

    def close(self) -> None:
        self._connection.close()


class Served:
    """`tethys serve` until the block ends."""

    def __init__(self, state: Path, store: str, *more: str, name: str = "load", **variables: str):
        self.words = [
            sys.executable, "-m", "pipelines.cli", "serve", "--model-name", name, "--tracking-uri", store, "--state", str(state), "--port", "0",
            "--watch-seconds", "0.2", *more,
        ]  # fmt: skip
        self.variables, self.log = variables, state.with_suffix(".log")

    def __enter__(self) -> Served:
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(**self.variables))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("http://"), self.log.read_text()
        self.address = line.split()[0]
        return self

    def client(self, token: str | None = None) -> Client:
        deadline = time.monotonic() + 60
        while True:
            client = Client(self.address, token)
            try:
                if client.raw("GET", "/readyz")[0] == 200:
                    return client
            except OSError:
                pass
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            client.close()
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
