"""How a running worker is watched and asked: Prometheus metrics, health and readiness, forecasts on demand, and a line of progress for
people."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import polars as pl

from connectors.errors import UserError
from connectors.streams.base import long_rows
from connectors.streams.files import TIME_FORMAT

# A worker that has not committed for so long is not ready: its source is silent or it hangs.
READY_SECONDS = 60.0
ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Step:
    """What one committed batch tells the outside."""

    counters: Counter[str]
    streams: int
    """Resident streams."""
    latencies_ms: np.ndarray
    """Of each event of the batch: given to the broker, or taken from the source -> forecasts durable."""
    surprise: float
    """Mean over the batch; NaN when nothing was judged."""
    lag: int | None
    """Records that wait in the source; None where it cannot tell."""
    checkpoint_bytes: int
    steps_ms: np.ndarray
    """Of each batch: clocks, memories, monitors and rows, without source and sinks."""
    lags: dict[str, int] = field(default_factory=dict)
    """Partition, or worker -> records that wait there; empty where one worker reads all."""
    silent: float = 0.0
    """Seconds since the last commit; of several workers, of the one that has been silent for longest."""
    restarts: int = 0
    """Workers that were lost and started again."""


class Dials:
    """Called with every `Step`. `port`: serve `/metrics`, `/healthz` (the process lives), `/readyz` (it committed within the last minute) and
    `/forecast?unique_id=NAME` (NDJSON; repeat the name for more streams) on 127.0.0.1; 0 takes a free port (`address` says which)."""

    def __init__(self, port: int | None = None, progress: bool = False):
        self._port, self._progress = port, progress
        self._server: ThreadingHTTPServer | None = None
        self._last = 0.0
        self._before: Counter[str] = Counter()
        self._started, self._shown = time.monotonic(), 0.0
        self.address: str | None = None
        self._asked: queue.SimpleQueue[tuple[list[str], Future[pl.DataFrame]]] = queue.SimpleQueue()

    def __enter__(self) -> Dials:
        if self._port is not None:
            self._serve(self._port)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._progress and self._shown:
            print(file=sys.stderr)

    def __call__(self, step: Step) -> None:
        now = time.monotonic()
        self._last = now - step.silent
        if self._server is not None:
            self._set(step)
        if self._progress and now - self._shown > 0.5:
            self._shown = now
            done, seconds = step.counters["received"], now - self._started
            lag = "" if step.lag is None else f", {step.lag} waiting"
            print(
                f"\r{done} events, {step.streams} streams, {done / seconds:.0f} a second, {step.counters['alarms']} alarms{lag}   ",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def answer(self, forecasts: Callable[[list[str]], pl.DataFrame]) -> None:
        """Called by the worker between two batches: whoever asked since gets the present forecasts."""
        while not self._asked.empty():
            names, future = self._asked.get()
            try:
                future.set_result(forecasts(names))
            except UserError as error:
                future.set_exception(error)

    def ask(self, unique_ids: list[str]) -> pl.DataFrame:
        """From any thread: what `answer` gives to these streams. Raises UserError as it does, and TimeoutError when nobody calls it."""
        future: Future[pl.DataFrame] = Future()
        self._asked.put((unique_ids, future))
        return future.result(ANSWER_SECONDS)

    def _respond(self, query: str) -> tuple[int, str, bytes]:
        names = parse_qs(query).get("unique_id", [])
        if not names:
            return 400, "text/plain", b"name a stream: /forecast?unique_id=NAME\n"
        try:
            rows = long_rows(self.ask(names))
        except UserError as error:
            return 404, "text/plain", f"{error}\n".encode()
        except TimeoutError:
            return 503, "text/plain", b"the worker is busy or stopped; ask again\n"
        times = [name for name, kind in rows.schema.items() if kind == pl.Datetime]
        return 200, "application/x-ndjson", rows.with_columns(pl.col(times).dt.strftime(TIME_FORMAT)).write_ndjson().encode()

    def _serve(self, port: int) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise UserError("metrics need prometheus-client: pip install 'tethys-streams[metrics]'") from error
        registry = prometheus.CollectorRegistry()
        self._events = prometheus.Counter("tethys_events", "Lines by what became of them", ["verdict"], registry=registry)
        self._forecast = prometheus.Counter("tethys_forecasts", "Rows of forecasts", registry=registry)
        self._without = prometheus.Counter("tethys_without_covariates", "Rows that lacked a covariate", registry=registry)
        self._alarms = prometheus.Counter("tethys_alarms", "Anomalies and drifts", registry=registry)
        self._bytes = prometheus.Gauge("tethys_checkpoint_bytes", "Bytes written to the checkpoint", registry=registry)
        self._lag = prometheus.Gauge("tethys_lag", "Records waiting in the source", registry=registry)
        self._lags = prometheus.Gauge("tethys_partition_lag", "Records waiting in one partition, or for one worker", ["partition"], registry=registry)
        self._restarts = prometheus.Gauge("tethys_worker_restarts", "Workers that were lost and started again", registry=registry)
        self._streams = prometheus.Gauge("tethys_streams", "Streams resident in memory", registry=registry)
        self._surprise = prometheus.Gauge("tethys_surprise", "Mean surprise of the last batch", registry=registry)
        self._coverage = prometheus.Gauge("tethys_coverage", "Share of values in the interval issued one row before", registry=registry)
        self._step = prometheus.Histogram("tethys_step_seconds", "One batch through the memories", registry=registry)
        self._latency = prometheus.Histogram(
            "tethys_latency_seconds",
            "From an event to its durable forecasts",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
            registry=registry,
        )
        dials = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                ready = time.monotonic() - dials._last < READY_SECONDS
                if self.path == "/metrics":
                    status, kind, body = 200, prometheus.CONTENT_TYPE_LATEST, prometheus.generate_latest(registry)
                elif self.path == "/healthz":
                    status, kind, body = 200, "text/plain", b"alive\n"
                elif self.path == "/readyz":
                    status, kind, body = (200, "text/plain", b"ready\n") if ready else (503, "text/plain", b"no commit\n")
                elif self.path.partition("?")[0] == "/forecast":
                    status, kind, body = dials._respond(self.path.partition("?")[2])
                else:
                    status, kind, body = 404, "text/plain", b"/metrics, /healthz, /readyz, /forecast?unique_id=NAME\n"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return None  # a scrape every few seconds is no news

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(f"cannot serve metrics on port {port}: {error.strerror}: choose another port") from error
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _set(self, step: Step) -> None:
        new = step.counters - self._before
        self._before = Counter(step.counters)
        for verdict in (
            "accepted",
            "missing",
            "late",
            "duplicate",
            "corrected",
            "conflict",
            "quarantined",
            "off_grid",
            "malformed",
            "oversize",
        ):
            self._events.labels(verdict).inc(new[verdict])
        self._forecast.inc(new["forecasts"])
        self._without.inc(new["without_covariates"])
        self._alarms.inc(new["alarms"])
        self._bytes.set(step.checkpoint_bytes)
        self._streams.set(step.streams)
        for took in step.steps_ms.tolist():
            self._step.observe(took / 1e3)
        for latency in step.latencies_ms.tolist():
            self._latency.observe(latency / 1e3)
        if step.lag is not None:
            self._lag.set(step.lag)
        for partition, waiting in step.lags.items():
            self._lags.labels(partition).set(waiting)
        self._restarts.set(step.restarts)
        if step.surprise == step.surprise:
            self._surprise.set(step.surprise)
        if step.counters["judged"]:
            self._coverage.set(step.counters["covered"] / step.counters["judged"])
