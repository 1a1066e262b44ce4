"""A live run's figures in MLflow, gathered beside the worker and sent by a thread of their own.

Nothing that the tracking store does, being away, hanging or refusing, holds the stream up: figures are kept with their times and arrive
when the store is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np

from pipelines.streaming.dials import Step

LOGGER = logging.getLogger("tethys.stream")
# One point so often; those of a day without the store are kept.
EVERY_SECONDS = 15.0
POINTS_KEPT = 5760
RETRY_SECONDS = 5.0
# How long a worker that ends waits for the store to take what is left.
LEAVE_SECONDS = 10.0
TROUBLE = ("late", "conflict", "quarantined", "off_grid", "malformed", "oversize", "duplicate")


class Point(NamedTuple):
    """Figures of one stretch of a run."""

    milliseconds: int
    """Since 1970: when they were true."""
    step: int
    """Lines received up to then."""
    metrics: dict[str, float]


class Receiver(Protocol):
    def log_points(self, points: Sequence[Point]) -> None: ...


class Tracked:
    """Called with every `Step`. `connect` opens the run at the store; it is called, and the run is used, in the thread only."""

    def __init__(
        self, connect: Callable[[], AbstractContextManager[Receiver]], *, every: float = EVERY_SECONDS, retry: float = RETRY_SECONDS,
        leave: float = LEAVE_SECONDS,
    ):  # fmt: skip
        self._connect = connect
        self._every, self._retry, self._leave = every, retry, leave
        self._points: deque[Point] = deque(maxlen=POINTS_KEPT)
        self._changed = threading.Condition()
        self._closing = False
        self._told = False
        self._before: Counter[str] = Counter()
        self._latencies: list[np.ndarray] = []
        self._surprise: list[float] = []
        self._newest: Step | None = None
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._deliver, name="tracked", daemon=True)

    def __enter__(self) -> Tracked:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._newest is not None and self._latencies:
            self._gather(self._newest, time.monotonic())
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(self._leave)
        if self._points:
            LOGGER.warning("the tracking store did not answer: %d points of this run's figures are lost", len(self._points))

    def __call__(self, step: Step) -> None:
        self._latencies.append(step.latencies_ms)
        self._surprise.append(step.surprise)
        self._newest = step
        now = time.monotonic()
        if now - self._last >= self._every:
            self._gather(step, now)

    def _gather(self, step: Step, now: float) -> None:
        """A point of everything since the last one."""
        new = step.counters - self._before
        metrics: dict[str, float] = {
            "events_per_s": new["received"] / (now - self._last),
            "alarms": new["alarms"],
            "refused": sum(new[name] for name in TROUBLE),
            "streams": step.streams,
            "checkpoint_bytes": step.checkpoint_bytes,
        }
        waited = np.concatenate(self._latencies)
        if len(waited):
            metrics |= dict(zip(("latency_p50_ms", "latency_p99_ms"), np.percentile(waited, [50, 99]).tolist(), strict=True))
        known = [value for value in self._surprise if value == value]
        if known:
            metrics["surprise"] = sum(known) / len(known)
        if new["judged"]:
            metrics["coverage"] = new["covered"] / new["judged"]
        if step.lag is not None:
            metrics["lag"] = step.lag
        self._before, self._last = Counter(step.counters), now
        self._latencies, self._surprise = [], []
        with self._changed:
            self._points.append(Point(int(time.time() * 1000), step.counters["received"], metrics))
            self._changed.notify()

    def _deliver(self) -> None:
        while True:
            try:
                with self._connect() as run:
                    self._send(run)
                return
            except Exception as error:  # whatever a store and its client may raise must not reach the stream
                self._tell(error)
                if self._rest():
                    return

    def _send(self, run: Receiver) -> None:
        """Until the worker ends and all is delivered."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._points or self._closing)
                points = list(self._points)
            if not points:
                return
            try:
                run.log_points(points)
            except Exception as error:
                self._tell(error)
                if self._rest():
                    return
                continue
            self._told = False
            with self._changed:
                while self._points and self._points[0] in points[:1]:
                    self._points.popleft()
                    points.pop(0)

    def _rest(self) -> bool:
        """Wait before the next try; true when the worker has ended, which does not wait for long."""
        with self._changed:
            if self._closing:
                return True
            self._changed.wait_for(lambda: self._closing, self._retry)
            return False

    def _tell(self, error: Exception) -> None:
        if not self._told:
            first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            LOGGER.warning("the tracking store does not answer (%s): figures are kept and sent when it does", first)
            self._told = True
