"""The live core: one thread that owns the engine, and group commits of what waits.

Requests hand in events and wait; the thread takes all that wait as one batch, steps the engine once, and answers when the batch is durable: the
history first, then the checkpoint, as a stream worker does with its sinks. While one batch is being committed the next one gathers, so the
cost of a commit is shared by all who wait. Between batches the thread looks after what needs the memories to stand still: export, import,
reset, and the handover to another version of the model.

A batch that was not acknowledged may be sent again: repeats are recognised by time and value, or by event id.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import polars as pl
import torch
from torch import Tensor

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams.base import Record
from pipelines.serving.history import PARTITION, History, HistoryRow
from pipelines.streaming.engine import Engine, Outcome, StreamModel, StreamState
from pipelines.streaming.event_time import VERDICTS, Clock, EventTime
from pipelines.streaming.journal import Arrivals, pack_arrivals, pack_rows
from pipelines.streaming.slots import open_snapshot
from pipelines.streaming.worker import BATCH_ROWS, SNAPSHOT_SHARE
from titans_core.state import StateError, count, from_bytes, leaves, read_metadata, to_bytes

# Events that may wait for their batch; beyond this a push is refused, and the client slows down.
MAX_WAITING = 16 * BATCH_ROWS

T = TypeVar("T")


class Busy(UserError):
    """Too many events wait; send again later."""


class Unknown(UserError):
    """There is no such stream."""


class Stopped(UserError):
    """The service is draining, or its engine has failed."""


class Unfit(UserError):
    """The bytes are no memory of the model that is live."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of one stream after its last row. H steps, Q quantiles."""

    unique_id: str
    origin: int
    """Time of the last row."""
    ds: np.ndarray
    """(H,) int64."""
    quantiles: np.ndarray
    """(H, Q) float64."""
    low: np.ndarray
    high: np.ndarray
    """(H,) float64: the interval that keeps its coverage on this stream."""
    model: str


@dataclass
class Summary:
    """What the page and `/v1/streams` show of a stream without touching its memory."""

    last: HistoryRow
    rows: int
    """Kept in the history."""
    alarms: int
    """Rows with alarms among them."""
    seen: float
    """When the last row came, seconds since 1970; 0: before this start of the service."""


@dataclass(frozen=True)
class Pushed:
    """What became of the events of one push."""

    verdicts: list[str]
    forecasts: list[Forecast]
    """Of each stream that learnt a row, after its last one; empty when not asked for."""


@dataclass(frozen=True)
class Committed:
    """One durable batch, for those who watch: the page's streams and the metrics."""

    rows: list[HistoryRow]
    counters: Counter[str]
    seconds: float
    """From taking the batch to its commit."""
    latencies_ms: np.ndarray
    """Of each event: handed in -> durable."""

    @property
    def surprise(self) -> float:
        """Mean of the batch; NaN where nothing was judged."""
        known = [row.surprise for row in self.rows if row.surprise is not None and row.surprise == row.surprise]
        return sum(known) / len(known) if known else math.nan


@dataclass
class _Push:
    records: Sequence[Record]
    wanted: bool
    future: Future[Pushed]
    since: float = field(default_factory=time.monotonic)


@dataclass
class _Order(Generic[T]):
    """Something to be done by the thread between batches; `writes`: it is part of the next batch and answered after its commit."""

    do: Callable[[], T]
    writes: bool
    future: Future[T]


class Live:
    """Start it, push, stop it. `listen` is called on the thread after every commit."""

    def __init__(
        self,
        model: StreamModel,
        policy: EventTime,
        checkpoint: str | Path,
        history: History,
        *,
        max_resident: int = 16_384,
        listen: Callable[[Committed], None] | None = None,
    ):
        self.history, self._policy, self._max_resident = history, policy, max_resident
        self._listen = listen or (lambda committed: None)
        self._pushes: deque[_Push] = deque()
        self._orders: deque[_Order[Any]] = deque()
        self._waiting = 0
        self._in_hand: list[_Push | _Order[Any]] = []
        """Taken, and not answered yet."""
        self._wake = threading.Condition()
        self._stopping = False
        self.failed: BaseException | None = None
        self.counters: Counter[str] = Counter()
        self.latest: dict[str, Forecast] = {}
        self.summaries: dict[str, Summary] = {row.unique_id: Summary(row, rows, alarms, 0.0) for row, rows, alarms in history.newest()}
        self._forced: set[str] = set()
        """Streams whose memory was replaced: their snapshot goes with this batch's commit."""
        self._forgotten: set[str] = set()
        self._checkpoint, self.model = checkpoint, model
        self.known: set[str] = set()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    def _open(self, model: StreamModel, checkpoint: str | Path) -> None:
        """Take over a run: claim it, cut the history back to its receipt, replay; finish the batch that was cut short."""
        store = CheckpointStore(checkpoint)
        engine = Engine(model, self._policy, store, max_resident=self._max_resident)
        progress = store.claim({"model": model.version, **self._policy.settings(), "state": engine.slots.layout.signature})
        self.history.resume(progress.receipts.get(PARTITION))
        self.model, self.engine, self.store = model, engine, store
        self.counters = Counter(progress.counters)
        self._batch = progress.done + 1
        self._unfinished = engine.restore()
        self.known = set(engine.names())
        self.begun = time.time()

    # For other threads.

    def start(self) -> None:
        """Returns when every memory stands where it stood. Raises what went wrong (UserError: another version's checkpoint, a full disk)."""
        self._thread.start()
        self._opened.wait()
        if self.failed is not None:
            raise self.failed

    def stop(self, timeout: float = 60.0) -> None:
        """Finish what waits, write every changed memory, close the checkpoint."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def well(self) -> bool:
        return self._thread.is_alive() and not self._stopping and self.failed is None

    @property
    def waiting(self) -> int:
        """Events that wait for their batch: the lag of the service."""
        return self._waiting

    def push(self, records: Sequence[Record], *, forecast: bool) -> Future[Pushed]:
        """Hand in events of at most one batch; the future answers when they are durable. Raises Busy, Stopped."""
        future: Future[Pushed] = Future()
        with self._wake:
            self._check()
            if self._waiting + len(records) > MAX_WAITING:
                raise Busy(f"{self._waiting} events wait already: send again in a moment")
            self._pushes.append(_Push(records, forecast, future))
            self._waiting += len(records)
            self._wake.notify()
        return future

    def order(self, do: Callable[[], T], *, writes: bool = False) -> Future[T]:
        future: Future[T] = Future()
        with self._wake:
            self._check()
            self._orders.append(_Order(do, writes, future))
            self._wake.notify()
        return future

    def _check(self) -> None:
        if self.failed is not None:
            raise Stopped(f"the engine has failed ({type(self.failed).__name__}); the service must be started again")
        if self._stopping:
            raise Stopped("the service is stopping; send again to the one that comes after it")

    def forecast(self, name: str) -> Future[Forecast]:
        """What is expected of a stream now; Unknown."""
        return self.order(lambda: self._forecast(name))

    def export(self, name: str) -> Future[bytes]:
        """The memory of a stream as safetensors bytes, with its clock; Unknown."""
        return self.order(lambda: self._export(name))

    def load(self, name: str, data: bytes) -> Future[None]:
        """Replace (or begin) a stream's memory by what `export` gave; Unfit. Its history here begins anew."""
        return self.order(lambda: self._import(name, data), writes=True)

    def reset(self, name: str) -> Future[None]:
        """A stream's memory begins anew with its next event; Unknown."""
        return self.order(lambda: self._reset(name), writes=True)

    # The thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._open(self.model, self._checkpoint)
                self._opened.set()
                if self._unfinished is not None:
                    arrivals, self._batch = self._unfinished
                    self._work(arrivals, [], [])
                self._loop()
                final, _ = self.engine.slots.snapshots(self._batch - 1, share=1)
                self.store.settle(final)
                self.engine.slots.committed(final)
        except Exception as error:
            self.failed = error
            if self._opened.is_set():
                raise  # the thread's traceback is for whoever mends the program
        finally:
            with self._wake:
                self._stopping = True
                for waiting in (*self._in_hand, *self._pushes, *self._orders):
                    _tell(waiting.future, error=Stopped("the service stopped before this was done: send it again"))
                self._pushes.clear()
                self._orders.clear()
            if hasattr(self, "store"):
                self.store.close()
            self._opened.set()

    def _loop(self) -> None:
        following: tuple[Arrivals, list[_Push]] | None = None
        while True:
            orders = self._take_orders(wait=following is None)
            if following is None:
                pushes = self._gather()
                if not pushes and not orders:
                    if self._stopping:
                        return
                    continue
                arrivals = _arrivals(pushes)
                self.store.accept(self._batch, pack_arrivals(arrivals), {PARTITION: self.history.last})
            else:
                arrivals, pushes = following
            following = self._work(arrivals, pushes, orders)

    def _take_orders(self, wait: bool) -> list[_Order[Any]]:
        """Do the orders that only look; return those that are part of a batch."""
        with self._wake:
            while wait and not (self._pushes or self._orders or self._stopping):
                self._wake.wait()
            taken = list(self._orders)
            self._orders.clear()
        writes = [order for order in taken if order.writes]
        self._in_hand.extend(writes)
        for order in taken:
            if not order.writes:
                _tell(order.future, *_try(order.do))
        return writes

    def _gather(self) -> list[_Push]:
        """The pushes that wait, up to a batch of events."""
        taken: list[_Push] = []
        events = 0
        with self._wake:
            while self._pushes and (not taken or events + len(self._pushes[0].records) <= BATCH_ROWS):
                push = self._pushes.popleft()
                taken.append(push)
                events += len(push.records)
            self._waiting -= events
        self._in_hand.extend(taken)
        return taken

    def _work(self, arrivals: Arrivals, pushes: list[_Push], orders: list[_Order[Any]]) -> tuple[Arrivals, list[_Push]] | None:
        """One batch, from the engine to the answers; returns the next one, which is journalled already."""
        began, batch, slots = time.monotonic(), self._batch, self.engine.slots
        outcome = self.engine.step(arrivals, batch)
        done = [(order, *_try(order.do)) for order in orders]
        forecasts, rows = self._read(outcome)
        receipt = self.history.append(rows, forget=self._forgotten)
        self.counters.update(outcome.counters)
        gathered = self._gather()
        following = (_arrivals(gathered), gathered) if gathered else None
        snapshots, keep_from = slots.snapshots(batch, share=SNAPSHOT_SHARE)
        snapshots.update((name, (batch, slots.snapshot(name) or b"")) for name in self._forced)
        self.store.commit(
            batch,
            learnt=pack_rows(outcome.learnt, arrivals),
            receipts={PARTITION: receipt},
            counters=self.counters,
            snapshots=snapshots,
            keep_from=keep_from,
            following=None if following is None else (pack_arrivals(following[0]), {PARTITION: receipt}),
        )
        slots.committed(snapshots)
        self._batch += 1
        self._publish(arrivals, forecasts, rows)
        at = 0
        for push in pushes:
            n = len(push.records)
            verdicts = [VERDICTS[code] for code in outcome.verdicts[at : at + n].tolist()]
            at += n
            named = dict.fromkeys(record.unique_id for record in push.records) if push.wanted else ()
            _tell(push.future, Pushed(verdicts, [forecasts[name] for name in named if name in forecasts]))
        for order, value, error in done:
            _tell(order.future, value, error)
        self._in_hand = [] if following is None else list(following[1])
        now = time.monotonic()
        waited = np.repeat([1e3 * (now - push.since) for push in pushes], [len(push.records) for push in pushes])
        self._listen(Committed(rows, outcome.counters, now - began, waited))
        return following

    def _publish(self, arrivals: Arrivals, forecasts: Mapping[str, Forecast], rows: Sequence[HistoryRow]) -> None:
        """What readers see, once it is durable."""
        self.known.update(arrivals.records.unique_id)
        for name in self._forgotten:
            self.latest.pop(name, None)
            self.summaries.pop(name, None)
        self._forced.clear()
        self._forgotten.clear()
        self.latest.update(forecasts)
        now = time.time()
        for row in rows:
            before = self.summaries.get(row.unique_id)
            alarms = (before.alarms if before else 0) + (row.alarms is not None)
            self.summaries[row.unique_id] = Summary(row, self.history.size(row.unique_id), alarms, now)

    def _read(self, outcome: Outcome) -> tuple[dict[str, Forecast], list[HistoryRow]]:
        """The frames of a batch as values: the last forecast of each stream, and a row of history for every event learnt."""
        frame = outcome.forecasts
        if frame.height == 0:
            return {}, []
        each = self._forecasts(frame)
        surprise, anomaly = (frame[c].to_list() for c in ("surprise", "anomaly"))
        alarms: dict[tuple[str, int], list[str]] = {}
        for name, ds, cause in zip(outcome.alarms["unique_id"], outcome.alarms["ds"].to_physical(), outcome.alarms["cause"], strict=True):
            alarms.setdefault((name, ds), []).append(cause)
        learnt = outcome.learnt
        values = dict(zip(zip(learnt.unique_id, learnt.ds.tolist(), strict=True), learnt.y.tolist(), strict=True))
        norm = self._norms(one.unique_id for one in each)
        rows = []
        middle = len(self.model.quantiles) // 2
        for i, one in enumerate(each):
            name, ds = one.unique_id, one.origin
            y = values[name, ds]
            rows.append(
                HistoryRow(
                    unique_id=name,
                    ds=ds,
                    y=None if math.isnan(y) else y,
                    surprise=surprise[i],
                    anomaly=anomaly[i],
                    norm=norm[name],
                    alarms=",".join(alarms.get((name, ds), ())) or None,
                    model=self.model.version,
                    next_ds=int(one.ds[0]),
                    next_low=float(one.low[0]),
                    next_mid=float(one.quantiles[0, middle]),
                    next_high=float(one.high[0]),
                )
            )
        return {one.unique_id: one for one in each}, rows

    def _forecasts(self, frame: pl.DataFrame) -> list[Forecast]:
        """A value for each row of forecasts as the engine gives them."""
        origins, ahead = frame["origin"].to_physical().to_list(), frame["ds"].to_numpy().astype(np.int64)
        low, high = (frame[c].to_numpy() for c in ("low", "high"))
        quantiles = np.stack([frame[f"q{q:g}"].to_numpy() for q in self.model.quantiles], axis=-1)
        parts = zip(frame["unique_id"], origins, ahead, quantiles, low, high, strict=True)
        return [Forecast(name, origin, ds, q, below, above, self.model.version) for name, origin, ds, q, below, above in parts]

    def _norms(self, names: Iterable[str]) -> dict[str, float]:
        """The size of each stream's memory: the root of the sum of squares of the numbers that were written into it."""
        each = list(dict.fromkeys(names))
        state = self.engine.slots.gather(torch.from_numpy(self.engine.slots.find(each))).model
        written = getattr(state, "memory", state)
        # How often a slot was visited is kept beside what was written into it, and only grows.
        held = [leaf for path, leaf in leaves(written) if leaf.is_floating_point() and not path.endswith("visits")]
        squares = [leaf.reshape(len(each), -1).double().square().sum(1) for leaf in held]
        found: list[float] = torch.stack(squares).sum(0).sqrt().tolist() if squares else [math.nan] * len(each)
        return dict(zip(each, found, strict=True))

    # Orders.

    def _one(self, name: str) -> tuple[Clock, StreamState]:
        data = self.engine.slots.snapshot(name) if name in self.known else None
        if data is None:
            raise Unknown(f"there is no stream '{name}'")
        clock, row = open_snapshot(data)
        return clock, self.engine.slots.layout.state([row])

    def _forecast(self, name: str) -> Forecast:
        """From the state: after a restart the same as was answered before it, to rounding."""
        held = self.latest.get(name)
        if held is not None:
            return held
        if self._one(name)[0].last is None:
            raise Unknown(f"the stream '{name}' has learnt no row yet")
        self.latest[name] = found = self._forecasts(self.engine.ask([name], self._batch))[0]
        return found

    def _export(self, name: str) -> bytes:
        clock, state = self._one(name)
        return to_bytes(state, unique_id=name, model=self.model.version, clock=json.dumps(clock.dump()))

    def _import(self, name: str, data: bytes) -> None:
        try:
            about = read_metadata(data)
            if about.get("model") != self.model.version:
                raise Unfit(f"the memory is one of '{about.get('model')}', live is '{self.model.version}': a memory fits its own version only")
            state = from_bytes(data, StreamState(self.model.memory.initial_state(1), self.engine.monitors.initial(1)))
            clock = _clock(about.get("clock", ""))
            if count(state) != 1:
                raise Unfit(f"the bytes hold {count(state)} streams, not one")
            wrong = [path for path, leaf in leaves(state.model) if leaf.is_floating_point() and not leaf.isfinite().all()]
            if wrong:
                raise Unfit(f"the memory holds numbers that are not finite: {', '.join(wrong)}")
            self._tried(state, clock)
        except StateError as error:
            raise Unfit(str(error)) from None
        self._replace(name, clock, state)

    def _tried(self, state: StreamState, clock: Clock) -> None:
        """A memory that cannot take one step must not come near the others."""
        try:
            at = np.array([clock.last or 0])

            def known(ds: np.ndarray) -> Tensor:
                """(1, n) times -> (1, n, F); covariates that are not known are ordinary."""
                phase = torch.from_numpy(self.model.phase(ds.reshape(-1))).unsqueeze(0)
                if self.model.beside is None:
                    return phase
                return torch.cat([phase, torch.from_numpy(self.model.beside([""], ds)).nan_to_num(0.0)], 2)

            value = torch.ones(1, dtype=torch.float64)
            model = self.model.memory.observe(state.model, value.unsqueeze(1), torch.ones(1, 1, dtype=torch.bool), known(at[None]))
            forecast = self.model.memory.forecast(model, known(self._policy.frequency.after(at, self.model.horizon)))
            self.engine.monitors.expect(self.engine.monitors.judge(state.monitors, value)[0], forecast)
        except (RuntimeError, IndexError, ValueError, OverflowError) as error:
            raise Unfit(f"the memory cannot take a step ({type(error).__name__}): it is damaged") from None
        if not forecast.isfinite().all():
            raise Unfit("the memory forecasts numbers that are not finite: it is damaged")

    def _reset(self, name: str) -> None:
        if name not in self.known:
            raise Unknown(f"there is no stream '{name}'")
        self._replace(name, Clock(), StreamState(self.model.memory.initial_state(1), self.engine.monitors.initial(1)))

    def _replace(self, name: str, clock: Clock, state: StreamState) -> None:
        """Within a batch, after its step: the stream's snapshot goes with the commit."""
        slots = self.engine.slots
        at = slots.admit([name], self._batch + 1)
        slots.put(torch.from_numpy(at), state)
        slots.clocks.put(int(at[0]), clock)
        slots.changed(at, self._batch + 1)
        self.known.add(name)
        self._forced.add(name)
        self._forgotten.add(name)

    # Another version.

    def hand_over(self, model: StreamModel, checkpoint: str | Path, caught_up: Callable[[int], bool], version: int, why: str) -> Future[None]:
        """Go on with another version, whose memories have read the same rows in a run of their own at `checkpoint`.

        `caught_up(seq)` is called on the thread, with the number of the last row: it returns True when that run has read it and has ended.
        Events wait meanwhile; none is lost. Where anything goes wrong the present version goes on.
        """
        return self.order(lambda: self._hand_over(model, checkpoint, caught_up, version, why))

    def _hand_over(self, model: StreamModel, checkpoint: str | Path, caught_up: Callable[[int], bool], version: int, why: str) -> None:
        if not caught_up(self.history.last):
            raise UserError(f"'{model.version}' did not catch up with the streams; '{self.model.version}' stays")
        store = CheckpointStore(checkpoint)
        try:
            engine = Engine(model, self._policy, store, max_resident=self._max_resident)
            progress = store.claim({"model": model.version, **self._policy.settings(), "state": engine.slots.layout.signature})
            if engine.restore() is not None or int(progress.positions.get(PARTITION, 0)) != self.history.last:
                raise UserError(f"'{model.version}' stands at another row than the streams; '{self.model.version}' stays")
            batch = self._take_clocks(engine, store, progress.done + 1, Counter(progress.counters))
            self._close_run()
            self.history.crown(version, why)
        except BaseException:
            store.close()
            raise
        self.store.close()
        self.model, self.engine, self.store, self._batch = model, engine, store, batch
        self.known = set(engine.names())
        self.latest.clear()
        self.begun = time.time()

    def _take_clocks(self, engine: Engine, store: CheckpointStore, batch: int, counters: Counter[str]) -> int:
        """The clocks of all streams go over, with the events that wait in them; returns the number of the next batch."""
        names = sorted(self.known)
        for first in range(0, len(names), BATCH_ROWS):
            some = names[first : first + BATCH_ROWS]
            # Rows that the new clocks hold back have been learnt here: they are let through before the clocks change.
            arrivals = Arrivals(flush=engine.waiting(some, batch))
            store.accept(batch, pack_arrivals(arrivals), {PARTITION: self.history.last})
            outcome = engine.step(arrivals, batch)
            at = engine.slots.admit(some, batch + 1)
            for name, slot in zip(some, at.tolist(), strict=True):
                engine.slots.clocks.put(slot, open_snapshot(self.engine.slots.snapshot(name) or b"")[0])
            engine.slots.changed(at, batch + 1)
            snapshots, keep_from = engine.slots.snapshots(batch, share=SNAPSHOT_SHARE)
            snapshots.update((name, (batch, engine.slots.snapshot(name) or b"")) for name in some)
            store.commit(
                batch, learnt=pack_rows(outcome.learnt, arrivals), receipts={PARTITION: self.history.last}, counters=counters,
                snapshots=snapshots, keep_from=keep_from,
            )  # fmt: skip
            engine.slots.committed(snapshots)
            batch += 1
        return batch

    def _close_run(self) -> None:
        """The present version's run ends whole, at the last row: a rollback goes on from there."""
        empty = Arrivals()
        self.store.accept(self._batch, pack_arrivals(empty), {PARTITION: self.history.last})
        outcome = self.engine.step(empty, self._batch)
        final, _ = self.engine.slots.snapshots(self._batch, share=1)
        self.store.commit(
            self._batch, learnt=pack_rows(outcome.learnt, empty), receipts={PARTITION: self.history.last}, counters=self.counters,
            snapshots=final, keep_from=self._batch + 1,
        )  # fmt: skip
        self.engine.slots.committed(final)
        self._batch += 1


def _arrivals(pushes: Sequence[_Push]) -> Arrivals:
    return Arrivals([record for push in pushes for record in push.records])


def _try(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """A person's mistake is the answer to that person; anything else is a fault of the engine and ends the thread."""
    try:
        return do(), None
    except UserError as error:
        return None, error


def _tell(future: Future[T], value: T | None = None, error: Exception | None = None) -> None:
    """Answer, where the asker is still there: a client that has gone has cancelled the future."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]


def _clock(text: str) -> Clock:
    """What `export` wrote of a clock; Unfit for anything else."""
    try:
        clock = Clock.load(json.loads(text))
        times = [clock.last, clock.newest, *(clock.ahead or ()), *(ds for ds, _, _ in (*clock.buffer, *clock.recent))]
        values = [y for _, y, _ in (*clock.buffer, *clock.recent)]
        events = [event for _, _, event in (*clock.buffer, *clock.recent)]
        plain = (
            all(t is None or (isinstance(t, int) and abs(t) < 2**62) for t in times)
            and all(isinstance(y, float | int) and not math.isinf(y) for y in values)
            and all(event is None or isinstance(event, str) for event in events)
            and (clock.newest is None) == (clock.last is None and not clock.buffer)
        )
    except (ValueError, TypeError, IndexError, KeyError, RecursionError):
        plain = False
    if not plain:
        raise Unfit("the memory carries no clock of a stream: it is damaged")
    return clock
