"""The engine: batches of events in, forecasts out, every memory one step further.

A batch goes through the clocks of its streams, which put events in order; what they let through is cut into rounds
with at most one row a stream, and each round is one batched step for all its streams:

    gather states -> observe(y) -> forecast -> put states back

The engine touches neither source nor sink. `step` is a pure function of the states, the batch and its number, so that
replaying journalled batches (`restore`) brings every state back to the same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from connectors.checkpoints import CheckpointStore
from connectors.streams.base import DeadLetter, Record, dead_letter_frame
from pipelines.streaming.event_time import EventTime, Row
from pipelines.streaming.journal import Arrivals, unpack_arrivals, unpack_rows
from pipelines.streaming.monitors import LEVEL, OUTLIER, SCALE, UNUSUAL, UNUSUAL_BIT, Monitors, MonitorState, Verdict
from pipelines.streaming.slots import Slots
from titans_core.state import replace, select

ALARMS = {
    "unique_id": pl.String,
    "ds": pl.Int64,
    "y": pl.Float64,
    "kind": pl.String,
    "cause": pl.String,
    "statistic": pl.Float64,
    "limit": pl.Float64,
    "model_version": pl.String,
}
REFUSED = ("late", "conflict", "quarantined", "off_grid")


class Memory(Protocol):
    """The contract of a model that learns on streams; all tensors have the streams first. Both calls that step or read
    run under `inference_mode`; the numbers of one stream must not depend on which others share the call."""

    def initial_state(self, n: int) -> Any: ...

    def observe(self, state: Any, y: Tensor, observed: Tensor, phase: Tensor) -> Any:
        """y (B, T) float64, observed (B, T) bool (False: missing, no write), phase (B, T, F)."""

    def forecast(self, state: Any, future_phase: Tensor) -> Tensor:
        """future_phase (B, horizon, F) -> (B, horizon, Q); changes no state."""


@dataclass(frozen=True)
class StreamModel:
    """A memory with what the engine must know about it."""

    memory: Memory
    version: str
    """Name and version; part of every forecast row and of the checkpoint."""
    frequency: str
    horizon: int
    quantiles: tuple[float, ...]
    phase: Callable[[np.ndarray], np.ndarray]
    """(n,) int64 times -> (n, F) what the memory knows of the calendar at each."""


@dataclass(frozen=True)
class StreamState:
    """All that learns, for many streams: the model's state and the monitors'."""

    model: Any
    monitors: MonitorState


@dataclass(frozen=True)
class Outcome:
    """What one batch brought."""

    forecasts: pl.DataFrame
    """A row for each event and step: unique_id, origin, ds, step, q..., low, high, surprise, anomaly, model_version."""
    alarms: pl.DataFrame
    """A row for each alarm: unique_id, ds, y, kind, cause, statistic, limit, model_version."""
    dead: pl.DataFrame
    learnt: list[Row]
    counters: Counter[str]
    mean_surprise: float
    """Over the values of the batch that could be judged; NaN when there are none."""
    verdicts: list[str]
    """What became of each record of the batch, in their order."""


@dataclass(frozen=True)
class Round:
    """What one batched step gave, a stream each."""

    names: list[str]
    ds: np.ndarray
    """(n,) int64."""
    value: Tensor
    """(n,) float64, NaN: missing."""
    future: np.ndarray
    """(n, horizon) int64."""
    forecast: Tensor
    """(n, horizon, Q)."""
    low: Tensor
    high: Tensor
    verdict: Verdict


class Engine:
    def __init__(self, model: StreamModel, policy: EventTime, store: CheckpointStore, *, max_resident: int = 16_384):
        self.model = model
        self.policy = policy
        self.store = store
        self.monitors = Monitors(model.quantiles, model.horizon)
        self.slots = Slots(self._fresh, store, max_resident)

    def _fresh(self, n: int) -> StreamState:
        with torch.inference_mode():
            return StreamState(self.model.memory.initial_state(n), self.monitors.initial(n))

    def seed(self, unique_ids: Sequence[str], last: Sequence[int], state: Any) -> None:
        """Begin streams with memories that have read a history up to the times `last`; events up to these count as late.

        Only before the first batch; written to the checkpoint at once, so a restart finds the same beginning.
        """
        monitored = self.monitors.initial(len(unique_ids))
        self.store.settle(self.slots.seed(unique_ids, last, StreamState(state, monitored)))

    # One batch.

    def step(self, arrivals: Arrivals, batch: int) -> Outcome:
        """Work on one batch: states move, forecasts come out. Distinct streams in a batch <= `max_resident`."""
        records = arrivals.records
        self.slots.admit(dict.fromkeys([r.unique_id for r in records] + list(arrivals.flush)), batch)
        rows: list[Row] = []
        counters: Counter[str] = Counter(received=len(records) + len(arrivals.dead), parsed=len(records))
        counters.update(letter.reason for letter in arrivals.dead)
        dead = list(arrivals.dead)
        verdicts = []
        for record, verdict in self._feed(arrivals, rows):
            verdicts.append(verdict)
            counters[verdict] += 1
            if verdict in REFUSED:
                dead.append(_refused(record, verdict))
        counters["gap_steps"] += sum(row.gap for row in rows)
        rounds = self._learn(rows)
        self.slots.changed(dict.fromkeys([r.unique_id for r in records] + list(arrivals.flush)), batch)
        whole = self._merge(rounds)
        surprise = whole.verdict.surprise
        alarms, forecasts = self._alarms(whole), self._forecasts(whole)
        counters.update(
            judged=int((~surprise.isnan()).sum()),
            covered=int(whole.verdict.covered.sum()),
            alarms=alarms.height,
            forecasts=len(rows) * self.model.horizon,
        )
        return Outcome(forecasts, alarms, dead_letter_frame(dead), rows, counters, surprise.nanmean().item(), verdicts)

    def _feed(self, arrivals: Arrivals, rows: list[Row]) -> Iterable[tuple[Record, str]]:
        slots, policy = self.slots, self.policy
        for record in arrivals.records:
            yield record, slots.clock(record.unique_id).feed(record, policy, rows)
        for name in arrivals.flush:
            slots.clock(name).flush(name, policy, rows)

    def _learn(self, rows: Sequence[Row]) -> list[Round]:
        """Rounds of at most one row a stream, in order; each round is one batched step."""
        seen: Counter[str] = Counter()
        rounds: list[list[Row]] = []
        for row in rows:
            turn = seen[row.unique_id]
            seen[row.unique_id] += 1
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append(row)
        with torch.inference_mode():
            return [self._round(one) for one in rounds]

    def _round(self, rows: Sequence[Row]) -> Round:
        memory, watch = self.model.memory, self.monitors
        slots = torch.tensor([self.slots.slot(row.unique_id) for row in rows])
        ds = np.array([row.ds for row in rows], dtype=np.int64)
        # float64: a level of a billion must not swallow the movement around it.
        value = torch.tensor([row.y for row in rows], dtype=torch.float64)
        observed = ~value.isnan()
        state: StreamState = self.slots.gather(slots)
        model, monitored = state.model, state.monitors
        gaps = torch.tensor([row.gap for row in rows])
        if gaps.any():
            model = self._pass_gaps(model, gaps, ds)
            monitored = watch.skip(monitored, gaps)
        y = torch.where(observed, value, 0.0)
        # Most streams stand at the same time: the calendar is worked out once for each distinct one.
        times, which = np.unique(ds, return_inverse=True)
        now, ahead = self._phase(times), self.policy.frequency.after(times, self.model.horizon)
        model = memory.observe(model, y.unsqueeze(1), observed.unsqueeze(1), now[which].unsqueeze(1))
        future = ahead[which]
        forecast = memory.forecast(model, self._phase(ahead)[which])
        monitored, verdict = watch.judge(monitored, value)
        low, high = watch.interval(monitored, forecast)
        self.slots.put(slots, StreamState(model, watch.expect(monitored, forecast)))
        return Round([row.unique_id for row in rows], ds, value, future, forecast, low, high, verdict)

    def _pass_gaps(self, model: Any, gaps: Tensor, ds: np.ndarray) -> Any:
        """Let the streams that skipped steps of the grid pass them as missing rows: one call for each length of gap."""
        for gap in gaps[gaps > 0].unique().tolist():
            index = (gaps == gap).nonzero().squeeze(1)
            phase = self._phase(self.policy.frequency.before(ds[index.numpy()], gap))
            empty = torch.zeros(len(index), gap, dtype=torch.float64)
            unseen = torch.zeros_like(empty, dtype=torch.bool)
            model = replace(model, index, self.model.memory.observe(select(model, index), empty, unseen, phase))
        return model

    def _phase(self, ds: np.ndarray) -> Tensor:
        """(...) times -> (..., F)."""
        return torch.from_numpy(self.model.phase(ds.reshape(-1))).unflatten(0, ds.shape)

    # Rows.

    def _merge(self, rounds: Sequence[Round]) -> Round:
        """The rounds of a batch, one after another."""
        if not rounds:
            horizon = self.model.horizon
            none, empty = np.empty(0, dtype=np.int64), torch.empty(0, horizon)
            _, verdict = self.monitors.judge(self.monitors.initial(0), torch.empty(0, dtype=torch.float64))
            forecast = torch.empty(0, horizon, len(self.model.quantiles))
            return Round([], none, torch.empty(0), none.reshape(0, horizon), forecast, empty, empty, verdict)
        if len(rounds) == 1:
            return rounds[0]
        return Round(
            names=[name for one in rounds for name in one.names],
            ds=np.concatenate([one.ds for one in rounds]),
            value=torch.cat([one.value for one in rounds]),
            future=np.concatenate([one.future for one in rounds]),
            forecast=torch.cat([one.forecast for one in rounds]),
            low=torch.cat([one.low for one in rounds]),
            high=torch.cat([one.high for one in rounds]),
            verdict=Verdict(*(torch.cat([getattr(one.verdict, f.name) for one in rounds]) for f in fields(Verdict))),
        )

    def _time(self, name: str, ds: np.ndarray) -> pl.Series:
        return pl.Series(name, ds).cast(pl.Int64 if self.policy.frequency.counts else pl.Datetime("us"))

    def _forecasts(self, one: Round) -> pl.DataFrame:
        """Long rows: for each event the steps of its forecast."""
        horizon = self.model.horizon
        each = np.repeat(np.arange(len(one.names)), horizon)
        values = one.forecast.double().numpy().reshape(-1, len(self.model.quantiles))
        return pl.DataFrame(
            [
                pl.Series("unique_id", one.names, dtype=pl.String).gather(each),
                self._time("origin", np.repeat(one.ds, horizon)),
                self._time("ds", one.future.reshape(-1)),
                pl.Series("step", np.tile(np.arange(1, horizon + 1, dtype=np.int32), len(one.names))),
                *(_number(f"q{q:g}", values[:, i]) for i, q in enumerate(self.model.quantiles)),
                _number("low", one.low.double().numpy().reshape(-1)),
                _number("high", one.high.double().numpy().reshape(-1)),
                _number("surprise", np.repeat(one.verdict.surprise.numpy(), horizon)),
                _number("anomaly", np.repeat(one.verdict.anomaly.numpy(), horizon)),
                pl.Series("model_version", [self.model.version], dtype=pl.String).gather(np.zeros_like(each)),
            ]
        )

    def _alarms(self, one: Round) -> pl.DataFrame:
        """A row for each alarm: when, of what kind and cause, and the statistic with its limit."""
        verdict = one.verdict
        rows: list[tuple[object, ...]] = []
        for i in verdict.alarm.nonzero().squeeze(1).tolist():
            alarm, name, ds, y = int(verdict.alarm[i]), one.names[i], int(one.ds[i]), float(one.value[i])
            level, scale = verdict.statistic[i].tolist()
            for bit, kind, cause, statistic, limit in (
                (OUTLIER, "anomaly", "outlier", float(verdict.anomaly[i]), float(verdict.limit[i])),
                (UNUSUAL_BIT, "anomaly", "unusual", float(verdict.unusual[i]), UNUSUAL),
                (LEVEL, "drift", "level", level, 1.0),
                (SCALE, "drift", "scale", scale, 1.0),
            ):
                if alarm & bit:
                    rows.append((name, ds, y, kind, cause, statistic, limit, self.model.version))
        frame = pl.DataFrame(rows, schema=ALARMS, orient="row")
        return frame if self.policy.frequency.counts else frame.with_columns(pl.col("ds").cast(pl.Datetime("us")))

    # Restart.

    def restore(self) -> tuple[Arrivals, int] | None:
        """Replay the journal onto the snapshots. Afterwards every stream stands where it stood after the last finished
        batch; a batch that was accepted but not finished is returned with its number."""
        unfinished = None
        for entry in self.store.journal():
            arrivals = unpack_arrivals(entry.arrivals)
            if entry.learnt is None:
                unfinished = (arrivals, entry.batch)
                break
            rows = unpack_rows(entry.learnt, arrivals)
            touched = dict.fromkeys([r.unique_id for r in arrivals.records] + list(arrivals.flush))
            self.slots.admit(touched, entry.batch)
            known = Arrivals(
                [r for r in arrivals.records if not self.slots.stands_in(r.unique_id)],
                flush=[name for name in arrivals.flush if not self.slots.stands_in(name)],
            )
            again: list[Row] = []
            for _ in self._feed(known, again):
                pass
            self._learn(rows)
            self.slots.changed(touched, entry.batch)
        self.slots.drop_stand_ins()
        return unfinished

    # Looking in.

    def names(self) -> list[str]:
        """Every stream that was ever seen, sorted."""
        return self.slots.names()

    def waiting(self, unique_ids: Sequence[str], batch: int) -> list[str]:
        """Those of the streams that have events waiting for their watermark; they become resident."""
        self.slots.admit(unique_ids, batch)
        return [name for name in unique_ids if self.slots.clock(name).buffer]

    def digest(self) -> str:
        """SHA-256 over the states of all streams, by name: equal digests are equal states, bit for bit."""
        total = hashlib.sha256()
        for name in self.names():
            total.update(json.dumps(name).encode() + hashlib.sha256(self.slots.snapshot(name) or b"").digest())
        return total.hexdigest()


def _number(name: str, values: np.ndarray) -> pl.Series:
    """A column in which NaN becomes null: no file format agrees on NaN."""
    return pl.Series(name, np.ascontiguousarray(values)).fill_nan(None)


def _refused(record: Record, verdict: str) -> DeadLetter:
    raw = json.dumps({"unique_id": record.unique_id, "ds": record.ds, "y": record.y, "event_id": record.event_id}, allow_nan=True)
    return DeadLetter(verdict, "", record.partition, record.offset, raw)
