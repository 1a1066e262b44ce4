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
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from connectors.checkpoints import CheckpointStore
from connectors.streams.base import DeadLetter, Record, dead_letter_frame
from pipelines.streaming import monitors
from pipelines.streaming.event_time import EventTime, Row
from pipelines.streaming.journal import Arrivals, unpack_arrivals, unpack_rows
from pipelines.streaming.slots import Slots
from titans_core.state import replace, select

REFUSED = ("late", "conflict", "quarantined", "off_grid")


class Memory(Protocol):
    """The contract of a model that learns on streams; all tensors have the streams first. Both calls that step or read
    run under `inference_mode`; the numbers of one stream must not depend on which others share the call."""

    def initial_state(self, n: int) -> Any: ...

    def observe(self, state: Any, y: Tensor, observed: Tensor, phase: Tensor) -> Any:
        """y (B, T) float32, observed (B, T) bool (False: missing, no write), phase (B, T, F)."""

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
    """(n,) int64 microseconds UTC -> (n, F) float32 calendar features."""


@dataclass(frozen=True)
class StreamState:
    """All that learns, for many streams: the model's state and the monitors'."""

    model: Any
    monitors: monitors.MonitorState


@dataclass(frozen=True)
class Outcome:
    """What one batch brought."""

    forecasts: pl.DataFrame
    """A row for each event and step: unique_id, origin, ds, step, q..., surprise, model_version."""
    dead: pl.DataFrame
    learnt: list[Row]
    counters: Counter[str]


class Engine:
    def __init__(self, model: StreamModel, policy: EventTime, store: CheckpointStore, *, max_resident: int = 16_384):
        self.model = model
        self.policy = policy
        self.store = store
        self.slots = Slots(self._fresh, store, max_resident)
        self._levels = torch.tensor(model.quantiles, dtype=torch.float32)
        none = np.empty(0, dtype=np.int64)
        self._empty = self._frame(
            [],
            none,
            none.reshape(0, model.horizon),
            torch.empty(0, model.horizon, len(model.quantiles)),
            torch.empty(0),
        )

    def _fresh(self, n: int) -> StreamState:
        with torch.inference_mode():
            return StreamState(self.model.memory.initial_state(n), monitors.initial(n, len(self.model.quantiles)))

    # One batch.

    def step(self, arrivals: Arrivals, batch: int) -> Outcome:
        """Work on one batch: states move, forecasts come out. Distinct streams in a batch <= `max_resident`."""
        records = arrivals.records
        self.slots.admit(dict.fromkeys([r.unique_id for r in records] + list(arrivals.flush)), batch)
        rows: list[Row] = []
        counters: Counter[str] = Counter(received=len(records) + len(arrivals.dead), parsed=len(records))
        counters.update(letter.reason for letter in arrivals.dead)
        dead = list(arrivals.dead)
        for record, verdict in self._feed(arrivals, rows):
            counters[verdict] += 1
            if verdict in REFUSED:
                dead.append(_refused(record, verdict))
        counters["gap_steps"] += sum(row.gap for row in rows)
        forecasts = self._learn(rows)
        self.slots.changed(dict.fromkeys([r.unique_id for r in records] + list(arrivals.flush)), batch)
        counters["forecasts"] += forecasts.height
        return Outcome(forecasts, dead_letter_frame(dead), rows, counters)

    def _feed(self, arrivals: Arrivals, rows: list[Row]) -> Iterable[tuple[Record, str]]:
        slots, policy = self.slots, self.policy
        for record in arrivals.records:
            yield record, slots.clock(record.unique_id).feed(record, policy, rows)
        for name in arrivals.flush:
            slots.clock(name).flush(name, policy, rows)

    def _learn(self, rows: Sequence[Row]) -> pl.DataFrame:
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
            frames = [self._round(one) for one in rounds]
        return pl.concat(frames) if frames else self._empty

    def _round(self, rows: Sequence[Row]) -> pl.DataFrame:
        memory = self.model.memory
        slots = torch.tensor([self.slots.slot(row.unique_id) for row in rows])
        ds = np.array([row.ds for row in rows], dtype=np.int64)
        value = torch.tensor([row.y for row in rows], dtype=torch.float32)
        observed = ~value.isnan()
        state: StreamState = self.slots.gather(slots)
        model = self._pass_gaps(state.model, rows, ds)
        phase = self._phase(ds).unsqueeze(1)
        y = torch.where(observed, value, 0.0)
        model = memory.observe(model, y.unsqueeze(1), observed.unsqueeze(1), phase)
        future = self.policy.frequency.after(ds, self.model.horizon)
        forecast = memory.forecast(model, self._phase(future))
        # After a gap the forecast at hand was made for another step than this one.
        expected = torch.where(torch.tensor([row.gap == 0 for row in rows]), value, torch.nan)
        surprise = monitors.surprise(state.monitors, expected, self._levels)
        self.slots.put(slots, StreamState(model, monitors.update(state.monitors, forecast)))
        return self._frame([row.unique_id for row in rows], ds, future, forecast, surprise)

    def _pass_gaps(self, model: Any, rows: Sequence[Row], ds: np.ndarray) -> Any:
        """Let the streams that skipped steps of the grid pass them as missing rows: one call for each length of gap."""
        gaps = np.array([row.gap for row in rows])
        for gap in np.unique(gaps[gaps > 0]):
            where = np.flatnonzero(gaps == gap)
            index = torch.from_numpy(where)
            times = self.policy.frequency.before(ds[where], int(gap))
            empty = torch.zeros(len(where), int(gap))
            passed = self.model.memory.observe(
                select(model, index), empty, torch.zeros_like(empty, dtype=torch.bool), self._phase(times)
            )
            model = replace(model, index, passed)
        return model

    def _phase(self, ds: np.ndarray) -> Tensor:
        """(...) times -> (..., F); each distinct time is worked out once."""
        times, which = np.unique(ds, return_inverse=True)
        features = self.model.phase(times).astype(np.float32, copy=False)
        return torch.from_numpy(features[which.reshape(ds.shape)])

    def _frame(
        self, names: list[str], ds: np.ndarray, future: np.ndarray, forecast: Tensor, surprise: Tensor
    ) -> pl.DataFrame:
        """Long rows: for each event the steps of its forecast."""
        horizon = self.model.horizon
        values = forecast.to(torch.float32).numpy().reshape(-1, len(self.model.quantiles))
        time = pl.Int64 if self.policy.frequency.counts else pl.Datetime("us")
        each = np.repeat(np.arange(len(names)), horizon)
        return pl.DataFrame(
            [
                pl.Series("unique_id", names, dtype=pl.String).gather(each),
                pl.Series("origin", np.repeat(ds, horizon)).cast(time),
                pl.Series("ds", future.reshape(-1)).cast(time),
                pl.Series("step", np.tile(np.arange(1, horizon + 1, dtype=np.int32), len(names))),
                *(pl.Series(f"q{q:g}", np.ascontiguousarray(values[:, i])) for i, q in enumerate(self.model.quantiles)),
                pl.Series("surprise", np.repeat(surprise.to(torch.float32).numpy(), horizon)).fill_nan(None),
                pl.Series("model_version", [self.model.version], dtype=pl.String).gather(np.zeros_like(each)),
            ]
        )

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
            rows = unpack_rows(entry.learnt)
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
            total.update(json.dumps(name).encode() + hashlib.sha256(self.slots.export(name) or b"").digest())
        return total.hexdigest()


def _refused(record: Record, verdict: str) -> DeadLetter:
    raw = json.dumps(
        {"unique_id": record.unique_id, "ds": record.ds, "y": record.y, "event_id": record.event_id}, allow_nan=True
    )
    return DeadLetter(verdict, "", record.partition, record.offset, raw)
