"""What the live service bears on one machine, on the loopback interface: pushes that are durable before their reply, forecasts, scoring.

    python benchmarks/serve_load.py > benchmarks/results/serve_load.json

A forecaster (hourly steps, look-back 96, horizon 24) is trained and registered, then served by `tethys serve` in a process of its own. Clients
are connections that send their next request when the last one is answered, from one event loop in this process, at 1, 8 and 32 of them:

- `push`: one event of the client's own stream; the reply carries its forecast and comes when both the memory and the history are on disk;
- `forecast`: the present forecast of a stream;
- `score`: 96 rows in, 24 out, stateless, in the form of `mlflow models serve`; beside it the same bytes, from as many clients, to
  `mlflow models serve -w 1` of the same registered model, in turns. Both must answer the same numbers.

At the end the service is killed with SIGKILL and started again: every acknowledged event must be there, once. Bars: push p99 below 50 ms at 8
clients; scoring at least 5 times the requests a second of `mlflow models serve` (`vs_mlflow_serve`, at 8 clients; `vs_mlflow_serve_each` has
the others). It takes about three minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.report import ROOT, arguments, finish, limit_threads, progress

CLIENTS = (1, 8, 32)
# A server that hangs ends the measurement.
ANSWER_SECONDS = 30.0
BEGIN = datetime(2024, 6, 1, tzinfo=UTC)


@dataclass
class Load:
    """Answers of one run: seconds of each, how many were no 200, and how long it took."""

    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    seconds: float = 0.0

    def add(self, other: Load) -> None:
        self.latencies += other.latencies
        self.errors += other.errors
        self.seconds += other.seconds

    def figures(self) -> dict[str, float]:
        each = sorted(1e3 * s for s in self.latencies)
        return {
            "requests_per_s": round(len(each) / self.seconds, 1),
            "p50_ms": round(statistics.median(each), 2),
            "p99_ms": round(each[min(len(each) - 1, int(0.99 * len(each)))], 2),
            "requests": len(each),
            "errors": self.errors,
        }


async def _client(address: str, make: Callable[[], bytes], until: float, load: Load, answered: Callable[[bytes], None]) -> None:
    """One connection; `make` gives the bytes of the next request."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        while (began := time.perf_counter()) < until:
            writer.write(make())
            async with asyncio.timeout(ANSWER_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                body = await reader.readexactly(length)
            load.latencies.append(time.perf_counter() - began)
            if head.split(b" ", 2)[1] == b"200":
                answered(body)
            else:
                load.errors += 1
    finally:
        writer.close()


def drive(address: str, makers: list[Callable[[], bytes]], seconds: float, answered: Callable[[bytes], None] = lambda body: None) -> Load:
    load = Load()

    async def all_of_them() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(_client(address, make, until, load, answered) for make in makers))

    began = time.perf_counter()
    asyncio.run(all_of_them())
    load.seconds = time.perf_counter() - began
    return load


def request(method: str, path: str, value: Any = None) -> bytes:
    body = b"" if value is None else json.dumps(value, separators=(",", ":")).encode()
    kind = "Content-Type: application/json\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Streams:
    """Makes the pushes: each client has a stream, and every row is the next hour of it."""

    def __init__(self, rows: list[float]):
        self.rows, self.at = rows, {}
        self.acknowledged = 0

    def maker(self, name: str) -> Callable[[], bytes]:
        def make() -> bytes:
            at = self.at[name] = self.at.get(name, -1) + 1
            ds = (BEGIN + timedelta(hours=at)).isoformat()
            return request("POST", "/v1/events", {"events": [{"unique_id": name, "ds": ds, "y": self.rows[at % len(self.rows)]}]})

        return make

    def answered(self, body: bytes) -> None:
        said = json.loads(body)
        assert said["verdicts"] == ["accepted"] and len(said["forecasts"]) == 1, said
        self.acknowledged += 1


class Process:
    """A server as a process. `says`: its standard output is read by `line`; else it goes to the log, for a pipe that nobody reads fills up
    with lines of access, and then the server stands still."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str], *, says: bool = False):
        with log.open("ab") as said:
            out = subprocess.PIPE if says else said
            self._process = subprocess.Popen(words, stdout=out, stderr=said, text=True, env=environment, start_new_session=True)
        self._log = log

    def line(self) -> str:
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        if not found:
            raise SystemExit(f"the server did not start: see {self._log}")
        return found

    def wait_for(self, address: str, path: str, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(address + path, timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"{address} did not answer in {seconds:.0f} s: see {self._log}")

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process.poll() is None:
            # mlflow models serve is a shell around its server: the whole group that was started here.
            os.killpg(self._process.pid, how)
        self._process.wait(60)


def expected_values(address: str, asked: bytes) -> list[float]:
    """The column `mean` of an answer to a scoring request."""
    bodies: list[bytes] = []
    load = Load()
    asyncio.run(_client(address, lambda: asked, time.perf_counter() + 0.01, load, bodies.append))
    assert bodies and not load.errors, f"{address} refuses the request"
    return [row["mean"] for row in json.loads(bodies[0])["predictions"]]


def main() -> None:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of scoring on each side, in turns")
    parser.add_argument("--port", type=int, default=8765, help="of mlflow models serve")
    options = parser.parse_args()
    limit_threads(options.threads)

    started = time.monotonic()
    from pipelines.forecasting import job
    from pipelines.forecasting.sample import hourly_load

    folder = Path(tempfile.mkdtemp(prefix="serve_load"))
    store = f"sqlite:///{folder}/tethys.db"
    sample = hourly_load(series=4, days=150, seed=options.seed)
    sample.write_csv(folder / "sample.csv")
    job.train(str(folder / "sample.csv"), tracking_uri=store, model_name="load", alias="champion", output=folder / "train", seed=options.seed)
    values = sample["y"].head(24 * 150).to_list()
    context = [["a", (BEGIN + timedelta(hours=i)).strftime("%Y-%m-%dT%H:%M:%SZ"), values[i]] for i in range(96)]
    score = request("POST", "/invocations", {"dataframe_split": {"columns": ["unique_id", "ds", "y"], "data": context}})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": store, "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    serve = [sys.executable, "-m", "pipelines.cli", "serve", "--model-name", "load", "--state", str(folder / "state"), "--port", "0"]
    serve += ["--keep", "1000000", "--tracking-uri", store]

    figures: dict[str, Any] = {"push": {}, "forecast": {}, "score": {}, "mlflow_score": {}}
    tethys = Process(serve, folder / "tethys.log", environment, says=True)
    address = tethys.line().split()[0].rstrip("/")
    tethys.wait_for(address, "/readyz")
    streams = Streams(values)
    try:
        drive(address, [streams.maker(f"warm-{i}") for i in range(4)], 2.0, streams.answered)
        for clients in CLIENTS:
            found = drive(address, [streams.maker(f"{clients}-{i}") for i in range(clients)], options.seconds, streams.answered)
            figures["push"][clients] = found.figures()
            progress(f"push      {clients:>3} clients  {figures['push'][clients]}")
        for clients in CLIENTS:
            found = drive(address, [lambda i=i: request("GET", f"/v1/streams/32-{i}/forecast") for i in range(clients)], options.seconds)
            figures["forecast"][clients] = found.figures()
            progress(f"forecast  {clients:>3} clients  {figures['forecast'][clients]}")

        mlflow = str(Path(sys.executable).parent / "mlflow")
        words = [mlflow, "models", "serve", "-m", "models:/load@champion", "--env-manager", "local", "-w", "1", "-p", str(options.port)]
        other = Process(words, folder / "mlflow.log", environment)
        there = f"http://127.0.0.1:{options.port}"
        try:
            other.wait_for(there, "/ping")
            places = {"score": address, "mlflow_score": there}
            answers = {side: expected_values(place, score) for side, place in places.items()}
            assert answers["score"] == answers["mlflow_score"], "the two servers answer other numbers"
            loads = {side: {clients: Load() for clients in CLIENTS} for side in places}
            ratios: dict[int, list[float]] = {clients: [] for clients in CLIENTS}
            for turn in range(options.rounds + 1):
                for clients in CLIENTS:
                    rates = {}
                    for side in list(places)[:: 1 if turn % 2 else -1]:
                        found = drive(places[side], [lambda: score] * clients, options.seconds if turn else 1.0)
                        rates[side] = found.figures()["requests_per_s"]
                        if turn:
                            loads[side][clients].add(found)
                            progress(f"{side:<13} {clients:>3} clients  {found.figures()}")
                    if turn:
                        ratios[clients].append(rates["score"] / rates["mlflow_score"])
                        progress(f"score over mlflow_score, {clients:>3} clients: {ratios[clients][-1]:.2f}")
            for side, by_clients in loads.items():
                figures[side] = {clients: load.figures() for clients, load in by_clients.items()}
        finally:
            other.end()

        tethys.end(signal.SIGKILL)
        tethys = Process(serve, folder / "tethys.log", environment, says=True)
        address = tethys.line().split()[0].rstrip("/")
        tethys.wait_for(address, "/readyz")
        with urllib.request.urlopen(f"{address}/v1/streams?limit=1000") as answer:
            found_rows = sum(stream["rows"] for stream in json.load(answer)["streams"])
    finally:
        tethys.end()

    errors = sum(run["errors"] for kind in ("push", "forecast", "score") for run in figures[kind].values())
    figures |= {
        "push_p99_ms_8": figures["push"][8]["p99_ms"],
        "requests_per_s_8": figures["push"][8]["requests_per_s"],
        "vs_mlflow_serve": round(statistics.median(ratios[8]), 2),
        "vs_mlflow_serve_clients": 8,
        "vs_mlflow_serve_each": {clients: round(statistics.median(each), 2) for clients, each in ratios.items()},
        "vs_mlflow_serve_rounds": {clients: [round(r, 2) for r in each] for clients, each in ratios.items()},
        "errors": errors,
        "acknowledged": streams.acknowledged,
        "there_after_kill": found_rows,
        "lost": max(0, streams.acknowledged - found_rows),
        "seconds": round(time.monotonic() - started, 1),
    }
    finish("serve_load", figures, libraries=("mlflow", "fastapi", "uvicorn", "torch"))


if __name__ == "__main__":
    main()
