"""The long-running worker: source -> engine -> sinks, committed exactly once, stopped and started at will.

A batch is journalled before any of its rows goes out; under load that write rides in the commit of the batch before,
and both run in a thread of their own, while the next batch is worked on. After a crash the worker takes back what the
sinks hold beyond the last commit, rebuilds every memory, and works on the journalled batch again in the same
composition: the same rows come out, bit for bit.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from connectors.streams.base import Positions, Sink, Source
from pipelines import DEFAULT_TRACKING_URI, DEFAULT_VERSION
from pipelines.streaming.dials import Dials, Step
from pipelines.streaming.engine import Engine, Outcome, StreamModel
from pipelines.streaming.event_time import EVERY, EventTime, Frequency, Schedule, parse_duration
from pipelines.streaming.figures import Figures, hint
from pipelines.streaming.journal import Arrivals, pack_arrivals, pack_rows

if TYPE_CHECKING:
    from pipelines.forecasting.estimator import TitansForecaster

LOGGER = logging.getLogger("tethys.stream")
# Large enough that one step costs little an event, small enough that a batch is done well within 250 ms (it takes about 40).
BATCH_ROWS = 4096
# Changed streams are written in turns over so many commits; a restart replays about as many batches.
SNAPSHOT_SHARE = 128
# Half of what a batch costs is the same for one event as for a thousand (SQL, a file, some hundred calls): events gather so long before the
# next one, unless the last was full.
GATHER_SECONDS = 0.04
POLL_SECONDS = 0.2
LATENCIES_KEPT = 100_000
# Millions of small, acyclic objects pass through; at Python's own threshold its cycle collector takes a sixth of the time.
COLLECT_AFTER = (50_000, 20, 100)
TRIM_SECONDS = 10.0
# Numbers of glibc's malloc.h, and the memory below which nothing is given back between two trims.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 32 << 20


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
    """Event given to the broker, or taken from the source -> its forecasts durable in the sink; the median and the
    99th percentile over the last 100,000 events."""
    p99_ms: float | None
    checkpoint_bytes_per_s: float
    restart_s: float
    """Time to load the snapshots and replay the journal."""
    spilled: int
    stopped: str
    """`end of the source`, `signal`, or `max_events`."""
    output: str | None = None
    alarms: str | None = None
    dead_letters: str | None = None
    checkpoint: str | None = None
    workers: int | None = None
    """None: one, in this process."""
    restarts: int | None = None
    """Workers that were lost and started again."""
    hint: str | None = None
    """Why nothing, or less than a person would expect, was learnt."""


def run(
    source: str,
    *,
    checkpoint: str | Path,
    output: str,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    event_column: str = "event_id",
    model_name: str = "forecaster",
    version: str = DEFAULT_VERSION,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    follow: bool = False,
    grace: str = "0s",
    conflict: str = "reject",
    max_events: int | None = None,
    progress: bool = False,
    metrics_port: int | None = None,
    history: str | None = None,
    covariates: str | None = None,
    forecast: str = "every",
    workers: int = 1,
) -> StreamSummary:
    """The job behind `tethys stream`: a registered forecaster on a live source, until it ends or a signal comes.

    history: a table whose rows every memory reads before the first event, when the checkpoint is new. covariates: a table with a row for
    every stream and step, past and to come, where the model was trained with covariates; it is read again when it has changed.
    forecast: which rows are answered: `every`, the first of each span of event time (`1h`), or `demand`; with a `metrics_port`,
    `/forecast?unique_id=NAME` answers at any time.

    workers: so many Ray actors share the partitions of the source, each with outputs of its own (`NAME.0.ndjson`, ...); see
    `pipelines.streaming.workers`. A checkpoint that has had several workers takes any number again.

    Alarms and dead letters go to NDJSON files beside the output (`NAME.alarms.ndjson`, `NAME.dead.ndjson`), beside the checkpoint when the
    output is a topic. The run's figures go to the tracking store, when and as soon as it answers. `progress` shows a line on standard
    error. `metrics_port` serves Prometheus metrics, `/healthz`, `/readyz` and `/forecast` on the loopback interface. Raises UserError.
    """
    # Only here: a worker on a model in hand needs neither MLflow nor the training code.
    from pipelines import tracking
    from pipelines.forecasting.estimator import TitansForecaster
    from pipelines.streaming.workers import Job, Workers, absolute, numbered, read_layout

    registered = tracking.load_model(model_name, version, tracking_uri)
    fitted = TitansForecaster.from_weights(registered.weights, registered.config)
    named = f"{registered.name}/{registered.version}"
    names: dict[str, Any] = {"id_column": id_column, "time_column": time_column, "target_column": target_column}
    model = stream_model(fitted, named, covariates, **names)
    policy = EventTime(Frequency.parse(model.frequency), grace=parse_duration(grace), conflict=conflict)
    schedule = Schedule.parse(forecast)
    past = None if history is None else fitted.read(history, **names)
    columns = {"unique_id": id_column, "ds": time_column, "y": target_column, "event_id": event_column}
    base = Path(checkpoint if "://" in output else output).with_suffix("")
    for folder in (Path(checkpoint).parent, base.parent):
        folder.mkdir(parents=True, exist_ok=True)
    places = {
        "output": output,
        "alarms": str(base.with_suffix(".alarms.ndjson")),
        "dead_letters": str(base.with_suffix(".dead.ndjson")),
    }
    stop = Stop()
    with ExitStack() as stack:
        several = None
        if workers > 1 or read_layout(checkpoint) is not None:
            if max_events is not None:
                raise UserError("--max-events counts the lines of one worker: leave it out where several share a source")
            # A worker's folder is not ours.
            job = Job(absolute(source), columns, follow, policy, schedule, {name: absolute(place) for name, place in places.items()})
            table = None if covariates is None else absolute(covariates)
            make = partial(_registered_model, registered.weights.read_bytes(), registered.config, named, table, names)
            several = stack.enter_context(Workers(job, Path(checkpoint).absolute(), workers, make, past))
        stack.enter_context(stop.on_signals())  # after Ray, which takes SIGTERM for itself
        if several is None:
            live = open_source(source, columns=columns, follow=follow, count_steps=policy.frequency.counts)
            stack.callback(live.close)
            sinks = {}
            for name, place in places.items():
                sinks[name] = open_sink(place)
                stack.callback(sinks[name].close)
            store = CheckpointStore(checkpoint)
            stack.callback(store.close)
        dials = stack.enter_context(Dials(metrics_port, progress))
        about = {"source": source, "model": model.version, "checkpoint": str(checkpoint), "forecast": forecast, **policy.settings()}
        live_run = stack.enter_context(tracking.LiveRun(tracking_uri, f"stream {model_name}", params=about))
        figures = stack.enter_context(Figures(live_run.log))

        said = threading.Event()

        def tell(step: Step) -> None:
            dials(step)
            figures(step)
            if step.counters["without_covariates"] and not said.is_set():  # at once: a live run has no end to say it at
                said.set()
                LOGGER.warning("rows lack covariates: '%s' has no such rows; write them before they come", covariates)

        if several is not None:
            summary = several.run(stop=stop, report=tell, answer=dials.answer)
            places = {name: ", ".join(dict.fromkeys(numbered(place, i) for i in range(several.count))) for name, place in places.items()}
        else:
            summary = work(
                model, policy, live, store, sinks["output"], sinks["alarms"], sinks["dead_letters"], max_events=max_events, stop=stop,
                report=tell, answer=dials.answer, past=past, schedule=schedule,
            )  # fmt: skip
    return replace(
        summary,
        checkpoint=str(checkpoint),
        output=places["output"],
        alarms=places["alarms"],
        dead_letters=places["dead_letters"],
        hint=hint(summary.counters, summary.events, places["dead_letters"]),
    )


def _registered_model(
    weights: bytes, config: Mapping[str, Any], version: str, covariates: str | None, columns: Mapping[str, Any]
) -> StreamModel:
    """`stream_model` in another process, perhaps on another machine, which has not got the registry's files."""
    from tempfile import NamedTemporaryFile

    from pipelines.forecasting.estimator import TitansForecaster

    with NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(weights)
        file.flush()
        return stream_model(TitansForecaster.from_weights(file.name, dict(config)), version, covariates, **columns)


def stream_model(fitted: TitansForecaster, version: str, covariates: str | None = None, **columns: Any) -> StreamModel:
    """A fitted forecaster as the engine takes it: its weights; every stream begins with a memory of its own.

    covariates: table of those that the model was trained with; columns: names of its columns, as `CovariateTable` takes them.
    """
    from pipelines.forecasting.calendar import phases
    from pipelines.forecasting.covariates import CovariateTable
    from titans_core import forecaster_row
    from titans_core.learner import Learner

    config = fitted.forecaster_.config
    if covariates is not None and not fitted.encoder_.names:
        raise UserError(f"the model {version} was trained without covariates, and a table of them is given: leave {covariates} out")
    beside = None if config.covariates is None else CovariateTable(fitted.encoder_, covariates, **columns).at
    memory = fitted.memory_
    row: Any = None
    if isinstance(memory, Learner):
        row = memory.row
    elif beside is None and not forecaster_row.unsupported(memory):
        row = forecaster_row.ForecasterRow(memory)
    return StreamModel(
        memory=memory,
        version=version,
        frequency=fitted.frequency_,
        horizon=config.horizon,
        quantiles=config.quantiles,
        phase=phases(fitted.frequency_, config.seasons, fitted.zone),
        beside=beside,
        row=row,
    )


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
    report: Callable[[Step], None] | None = None,
    answer: Callable[[Callable[[list[str]], pl.DataFrame]], None] | None = None,
    schedule: Schedule = EVERY,
    past: tuple[Sequence[str], Sequence[int], Any] | None = None,
) -> StreamSummary:
    """Run until the source ends, `max_events` lines were taken in this run, or `stop` is set.

    `report` is called after every commit; `answer`, between two batches, with a function from names of streams to their
    present forecasts. Raises UserError for what a person must put right
    (another model than the checkpoint's, a moved output, a full disk); whatever was committed stays.
    """
    batch_rows = min(batch_rows, max_resident)
    stop = Stop() if stop is None else stop
    begun = time.monotonic()
    engine = Engine(model, policy, store, max_resident=max_resident, schedule=schedule)
    progress = store.claim({"model": model.version, **policy.settings(), "state": engine.slots.layout.signature})
    sinks = {"output": output, "alarms": alarms, "dead_letters": dead_letters}
    for name, sink in sinks.items():
        sink.resume(progress.receipts.get(name))
    if not progress.receipts:
        store.begin({name: sink.flush() for name, sink in sinks.items()})
    if past is not None and not progress.done and not progress.positions:
        engine.seed(*past)
    pending = engine.restore()
    restart = time.monotonic() - begun
    if progress.positions:
        source.seek(progress.positions)
    counters: Counter[str] = Counter(progress.counters)
    intake = _Intake(source, engine, batch_rows, max_resident, max_events, stop, counters["received"])
    latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
    batch, batches = progress.done + 1, 0
    accepted = pending is not None
    taken = None
    if pending is not None:
        taken = Taken(pending[0], np.full(len(pending[0].records), time.time()), source.positions())
        intake.received += len(pending[0].records) + len(pending[0].dead)

    trim = _Trim()

    def finish(job: Finishing, accepted: bool) -> np.ndarray:
        """The part of a batch that waits for disks: in a thread of its own, while the next batch is worked on.
        Returns how long each event waited, in milliseconds."""
        if not accepted:
            store.accept(job.batch, pack_arrivals(job.taken.arrivals), job.taken.positions)
        output.write(job.outcome.forecasts)
        alarms.write(job.outcome.alarms)
        dead_letters.write(job.outcome.dead)
        receipts = {name: sink.flush() for name, sink in sinks.items()}
        waited: np.ndarray = 1e3 * (time.time() - job.taken.sent)
        following = job.following
        trim()
        store.commit(
            job.batch,
            learnt=pack_rows(job.outcome.learnt, job.taken.arrivals),
            receipts=receipts,
            counters=job.counters,
            snapshots=job.snapshots,
            keep_from=job.keep_from,
            following=None if following is None else (pack_arrivals(following.arrivals), following.positions),
        )
        return waited

    def tell(job: Finishing, waited: np.ndarray) -> None:
        latencies.extend(waited.tolist())
        engine.slots.committed(job.snapshots)
        source.commit(job.taken.positions)
        if report is not None:
            told = (waited, job.outcome.mean_surprise, source.lag(), store.bytes_written, np.array([job.step_ms]))
            report(Step(job.counters, len(engine.slots), *told))

    with _seldom_collected(), ThreadPoolExecutor(1, "finish") as thread:
        running: tuple[Finishing, Future[np.ndarray]] | None = None
        while True:
            if answer is not None:
                answer(partial(engine.ask, batch=batch))
            if taken is None:
                taken = intake.take(batch, POLL_SECONDS)
                if taken is None:
                    if intake.finished:
                        break
                    continue
                accepted = False
            stepped = time.monotonic()
            outcome = engine.step(taken.arrivals, batch)
            step_ms = 1e3 * (time.monotonic() - stepped)
            counters.update(outcome.counters)
            if running is not None:
                tell(running[0], running[1].result())
            following = intake.take(batch + 1, 0.0)
            kept = engine.slots.snapshots(batch, share=snapshot_share)
            job = Finishing(batch, taken, outcome, step_ms, Counter(counters), *kept, following)
            running = job, thread.submit(finish, job, accepted)
            if following is None:
                tell(job, running[1].result())
                running = None
            taken, accepted, batch, batches = following, True, batch + 1, batches + 1
    final, _ = engine.slots.snapshots(batch - 1, share=1)
    store.settle(final)
    engine.slots.committed(final)
    seconds = time.monotonic() - begun
    p50, p99 = np.percentile(latencies, [50, 99]).tolist() if latencies else (None, None)
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


@dataclass(frozen=True)
class Taken:
    """A batch from the source."""

    arrivals: Arrivals
    sent: np.ndarray
    """When each record was handed to the broker, or was taken from the source; seconds since 1970."""
    positions: Positions
    """Of the source after it."""


@dataclass(frozen=True)
class Finishing:
    """A batch that was worked on and is to be written and committed."""

    batch: int
    taken: Taken
    outcome: Outcome
    step_ms: float
    counters: Counter[str]
    """Of the stream up to and with this batch."""
    snapshots: dict[str, tuple[int, bytes]]
    keep_from: int
    following: Taken | None
    """The next batch, which this one's commit accepts."""


@contextmanager
def _seldom_collected() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what was imported stays; no pause to look through it again
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _Trim:
    """Gives freed memory back to the system now and then: batches of all sizes leave holes in the heap, which would grow for as long
    as the worker runs; and only then: mapped anew for every batch, its megabytes cost a fifth of a step. Only glibc can and needs to."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
                library.mallopt(threshold, KEPT_BYTES)
        self._last = time.monotonic()

    def __call__(self) -> None:
        if self._trim is not None and time.monotonic() - self._last > TRIM_SECONDS:
            self._trim(0)
            self._last = time.monotonic()


class _Intake:
    """Cuts the source into batches; at its end lets the events through that still wait for a watermark."""

    def __init__(
        self, source: Source, engine: Engine, batch_rows: int, most: int, max_events: int | None, stop: Stop, received: int
    ):  # fmt: skip
        self._source, self._engine, self._stop = source, engine, stop
        self._batch_rows, self._most = batch_rows, most
        self._last = None if max_events is None else received + max_events
        self.received = received
        self.finished = False
        self.reason = "end of the source"
        self._next = 0.0
        """Until then (on the monotonic clock) events gather."""

    def take(self, batch: int, timeout: float) -> Taken | None:
        """What arrived for `batch`, or None: nothing yet, or (`finished`) nothing any more. Waits up to `timeout` seconds for the first
        event; without a timeout not for more to gather, either."""
        if self._stop or (self._last is not None and self.received >= self._last):
            self.finished = True
            self.reason = "signal" if self._stop else "max_events"
            return None
        early = self._next - time.monotonic()
        if early > 0:
            if not timeout:
                return None
            time.sleep(early)
        # Batches end at multiples of their size, whatever was polled before: cut by position, not by time. What is left of one when it was
        # begun in its second half goes with the next: a few rows cost as much as many.
        room = self._batch_rows - self.received % self._batch_rows
        if 2 * room < self._batch_rows and room + self._batch_rows <= self._most:
            room += self._batch_rows
        if self._last is not None:
            room = min(room, self._last - self.received)
        polled = self._source.poll(room, timeout)
        if len(polled):
            self.received += len(polled)
            self._next = 0.0 if len(polled) >= room else time.monotonic() + GATHER_SECONDS
            sent = np.array(polled.sent) if polled.sent else np.full(len(polled.records), time.time())
            return Taken(Arrivals(polled.records, polled.dead), sent, self._source.positions())
        if not self._source.ended:
            return None
        if self._engine.policy.grace:
            names = self._engine.names()
            for at in range(0, len(names), self._batch_rows):
                waiting = self._engine.waiting(names[at : at + self._batch_rows], batch)
                if waiting:
                    return Taken(Arrivals(flush=waiting), np.empty(0), self._source.positions())
        self.finished = True
        return None
