"""The long-running worker: source -> engine -> sinks, committed exactly once, stopped and started at will.

A batch is journalled before it is worked on; under load that write rides in the commit of the batch before, so it
costs no extra wait. After a crash the worker takes back what the sinks hold beyond the last commit, rebuilds every
memory, and works on the journalled batch again in the same composition: the same rows come out, bit for bit.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from connectors.checkpoints import CheckpointStore
from connectors.streams.base import Sink, Source
from pipelines.streaming.engine import Engine, StreamModel
from pipelines.streaming.event_time import EventTime
from pipelines.streaming.journal import Arrivals, pack_arrivals, pack_rows

# Large enough that one step costs little an event, small enough that a batch is done well within 250 ms.
BATCH_ROWS = 1024
# Changed streams are written in turns over so many commits; a restart replays about as many batches.
SNAPSHOT_SHARE = 64
POLL_SECONDS = 0.2
LATENCIES_KEPT = 100_000


@dataclass(frozen=True)
class StreamSummary:
    """How a run of the worker went. Counters are of the whole stream, times of this run."""

    model: str
    resumed: bool
    events: int
    """Lines taken from the source in this run."""
    streams: int
    batches: int
    counters: dict[str, int]
    seconds: float
    events_per_s: float
    p50_ms: float | None
    """Event handed out by the source -> its forecasts durable in the sink; median and 99th percentile over events."""
    p99_ms: float | None
    checkpoint_bytes_per_s: float
    restart_s: float
    """Time to load the snapshots and replay the journal."""
    spilled: int
    stopped: str
    """`end of the source`, `signal`, or `max_events`."""


class Stop:
    """Asked for by a signal or another thread; the worker finishes and commits the batch in hand first."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop gracefully; a second SIGINT interrupts at once."""

        def ask(number: int, _frame: Any) -> None:
            if self and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.set()

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def work(
    model: StreamModel,
    policy: EventTime,
    source: Source,
    store: CheckpointStore,
    output: Sink,
    alarms: Sink,
    dead_letters: Sink,
    *,
    batch_rows: int = BATCH_ROWS,
    snapshot_share: int = SNAPSHOT_SHARE,
    max_resident: int = 16_384,
    max_events: int | None = None,
    stop: Stop | None = None,
    report: Callable[[Counter[str], int], None] | None = None,
) -> StreamSummary:
    """Run until the source ends, `max_events` lines were taken in this run, or `stop` is set.

    `report(counters, streams)` is called after every commit. Raises UserError for what a person must put right
    (another model than the checkpoint's, a moved output, a full disk); whatever was committed stays.
    """
    batch_rows = min(batch_rows, max_resident)
    stop = Stop() if stop is None else stop
    begun = time.monotonic()
    engine = Engine(model, policy, store, max_resident=max_resident)
    progress = store.claim({"model": model.version, **policy.settings(), "state": engine.slots.layout.signature})
    sinks = {"output": output, "alarms": alarms, "dead_letters": dead_letters}
    for name, sink in sinks.items():
        sink.resume(progress.receipts.get(name))
    pending = engine.restore()
    restart = time.monotonic() - begun
    if progress.positions:
        source.seek(progress.positions)
    counters: Counter[str] = Counter(progress.counters)
    intake = _Intake(source, engine, batch_rows, max_events, stop, counters["received"])
    latencies: deque[tuple[float, int]] = deque(maxlen=LATENCIES_KEPT)
    batch, batches = progress.done + 1, 0
    arrivals, arrived = (pending[0], time.monotonic()) if pending else (None, 0.0)
    if arrivals is not None:
        intake.received += len(arrivals.records) + len(arrivals.dead)
    while True:
        if arrivals is None:
            arrivals = intake.take(batch, POLL_SECONDS)
            if arrivals is None:
                if intake.finished:
                    break
                continue
            arrived = time.monotonic()
            store.accept(batch, pack_arrivals(arrivals), source.positions())
        outcome = engine.step(arrivals, batch)
        output.write(outcome.forecasts)
        alarms.write(outcome.alarms)
        dead_letters.write(outcome.dead)
        receipts = {name: sink.flush() for name, sink in sinks.items()}
        latencies.append((1e3 * (time.monotonic() - arrived), len(arrivals.records)))
        counters.update(outcome.counters)
        following = intake.take(batch + 1, 0.0)
        arrived = time.monotonic()
        snapshots = engine.slots.snapshots(batch, share=snapshot_share)
        store.commit(
            batch,
            learnt=pack_rows(outcome.learnt),
            receipts=receipts,
            counters=counters,
            snapshots=snapshots,
            keep_from=engine.slots.keep_from(batch, snapshots),
            following=None if following is None else (pack_arrivals(following), source.positions()),
        )
        engine.slots.committed(snapshots)
        source.commit(source.positions())
        if report is not None:
            report(counters, len(engine.slots))
        arrivals, batch, batches = following, batch + 1, batches + 1
    final = engine.slots.snapshots(batch - 1, share=1)
    store.settle(final)
    engine.slots.committed(final)
    seconds = time.monotonic() - begun
    p50, p99 = _percentiles(latencies)
    return StreamSummary(
        model=model.version,
        resumed=progress.done > 0 or pending is not None,
        events=intake.received - progress.counters.get("received", 0),
        streams=len(engine.names()),
        batches=batches,
        counters=dict(counters),
        seconds=seconds,
        events_per_s=(intake.received - progress.counters.get("received", 0)) / seconds,
        p50_ms=p50,
        p99_ms=p99,
        checkpoint_bytes_per_s=store.bytes_written / seconds,
        restart_s=restart,
        spilled=engine.slots.spills,
        stopped=intake.reason,
    )


class _Intake:
    """Cuts the source into batches; at its end lets the events through that still wait for a watermark."""

    def __init__(self, source: Source, engine: Engine, batch_rows: int, max_events: int | None, stop: Stop, received: int):
        self._source, self._engine, self._stop = source, engine, stop
        self._batch_rows = batch_rows
        self._last = None if max_events is None else received + max_events
        self.received = received
        self.finished = False
        self.reason = "end of the source"

    def take(self, batch: int, timeout: float) -> Arrivals | None:
        """The arrivals of `batch`, or None: nothing yet, or (`finished`) nothing any more."""
        if self._stop or (self._last is not None and self.received >= self._last):
            self.finished = True
            self.reason = "signal" if self._stop else "max_events"
            return None
        # Batches end at multiples of their size, whatever was polled before: cut by position, not by time.
        room = self._batch_rows - self.received % self._batch_rows
        if self._last is not None:
            room = min(room, self._last - self.received)
        polled = self._source.poll(room, timeout)
        if len(polled):
            self.received += len(polled)
            return Arrivals(polled.records, polled.dead)
        if not self._source.ended:
            return None
        if self._engine.policy.grace:
            names = self._engine.names()
            for at in range(0, len(names), self._batch_rows):
                waiting = self._engine.waiting(names[at : at + self._batch_rows], batch)
                if waiting:
                    return Arrivals(flush=waiting)
        self.finished = True
        return None


def _percentiles(latencies: deque[tuple[float, int]]) -> tuple[float | None, float | None]:
    times = np.array([ms for ms, count in latencies for _ in range(min(count, 1))])
    weights = np.array([count for _, count in latencies if count])
    if not len(times):
        return None, None
    order = np.argsort(times)
    share = np.cumsum(weights[order]) / weights.sum()
    return tuple(float(times[order][np.searchsorted(share, q)]) for q in (0.5, 0.99))  # type: ignore[return-value]
