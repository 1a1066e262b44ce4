"""The engine: batches of events in, forecasts out, every memory one step further.

A batch goes through the clocks of its streams, which put events in order; what they let through is cut into rounds
with at most one row a stream, and each round is one batched step for all its streams:

    observe(y) -> forecast -> judge y by the forecasts before it -> hold this forecast back

in place on the stacked state: natively in one pass over each stream's memory, or gathered and put back around pure functions.

The engine touches neither source nor sink. `step` is a pure function of the states, the batch and its number, so that
replaying journalled batches (`restore`) brings every state back to the same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams.base import DeadLetter, Record, dead_letter_frame
from pipelines.streaming.event_time import CODE, EVERY, VERDICTS, EventTime, Released, Schedule, turns
from pipelines.streaming.journal import Arrivals, Rows, unpack_arrivals, unpack_rows
from pipelines.streaming.monitors import LEVEL, OUTLIER, SCALE, UNUSUAL, UNUSUAL_BIT, Monitors, MonitorState, Verdict
from pipelines.streaming.slots import Slots
from titans_core.state import select, write_

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
WHY = {
    "late": "its stream has moved on past this time: a longer --grace waits for such rows",
    "conflict": "another value came for this time before",
    "quarantined": "further ahead than a clock may jump at once; rows that follow in order confirm it",
    "off_grid": "between two steps of the model's frequency",
}


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
    """(n,) int64 times -> (n, G) what the memory knows of the calendar at each."""
    beside: Callable[[Sequence[str], np.ndarray], np.ndarray] | None = None
    """n names, (n, m) int64 times -> (n, m, K) the covariates of these streams' rows, NaN where they are not known; F = G + K."""
    row: Callable[[Any, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """`observe` and `forecast` for one row of many streams, in place (`titans_core.forecaster_row`); None: by the memory's pure pair."""


@dataclass(frozen=True)
class StreamState:
    """All that learns, for many streams: the model's state and the monitors'."""

    model: Any
    monitors: MonitorState


@dataclass(frozen=True)
class Outcome:
    """What one batch brought."""

    forecasts: pl.DataFrame
    """A row for each event that is answered: unique_id, origin, ds, step, q..., low, high, surprise, anomaly, model_version; those of
    the horizon's steps (ds, step, q..., low, high) are arrays, and `explode` makes long rows of them."""
    alarms: pl.DataFrame
    """A row for each alarm: unique_id, ds, y, kind, cause, statistic, limit, model_version."""
    dead: pl.DataFrame
    learnt: Rows
    counters: Counter[str]
    mean_surprise: float
    """Over the values of the batch that could be judged; NaN when there are none."""
    verdicts: np.ndarray
    """What became of each record of the batch, in their order: places in `event_time.VERDICTS`."""


@dataclass(frozen=True)
class Round:
    """What one batched step gave, a stream each."""

    names: list[str]
    ds: np.ndarray
    """(n,) int64."""
    due: np.ndarray
    """(n,) bool: answered with a forecast."""
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
    def __init__(
        self, model: StreamModel, policy: EventTime, store: CheckpointStore, *, max_resident: int = 16_384, schedule: Schedule = EVERY
    ):
        self.model = model
        self.policy = policy
        self.schedule = schedule
        self.store = store
        self.monitors = Monitors(model.quantiles, model.horizon)
        self.slots = Slots(self._fresh, store, max_resident, policy.remember)
        self._without = 0
        """Rows of the batch in hand that lack a covariate."""

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
        slots = self.slots.admit(arrivals.streams(), batch)
        verdicts, released = self.slots.clocks.feed(slots[: len(records)], records, self.policy)
        if arrivals.flush:
            ended = self.slots.clocks.flush(slots[len(records) :].tolist(), self.policy)
            released = Released(*(np.concatenate(pair) for pair in zip(released, ended, strict=True)))
        rows = Rows(self.slots.names_at(released.slot), released.ds, released.y, released.gap)
        counters: Counter[str] = Counter(received=len(records) + len(arrivals.dead), parsed=len(records))
        counters.update(letter.reason for letter in arrivals.dead)
        counters.update({VERDICTS[code]: count for code, count in enumerate(np.bincount(verdicts).tolist()) if count})
        dead = list(arrivals.dead)
        if any(counters[verdict] for verdict in WHY):
            refused = np.flatnonzero(np.isin(verdicts, [CODE[verdict] for verdict in WHY])).tolist()
            dead += [_refused(records[i], VERDICTS[verdicts[i]]) for i in refused]
        self._without = 0
        rounds = self._learn(rows, released.slot)
        if self._without:
            counters.update(without_covariates=self._without)
        self.slots.changed(slots, batch)
        whole = self._merge(rounds)
        surprise = whole.verdict.surprise
        alarms, forecasts = self._alarms(whole), self._forecasts(whole)
        counters.update(
            gap_steps=int(rows.gap.sum()),
            judged=int((~surprise.isnan()).sum()),
            covered=int(whole.verdict.covered.sum()),
            alarms=alarms.height,
            forecasts=forecasts.height * self.model.horizon,
        )
        return Outcome(forecasts, alarms, dead_letter_frame(dead), rows, counters, surprise.nanmean().item(), verdicts)

    def _learn(self, rows: Rows, slots: np.ndarray) -> list[Round]:
        """Rounds of at most one row a stream, in order; each round is one batched step. slots (n,): of each row."""
        if not len(rows):
            return []
        order, turn, _ = turns(slots)
        turn_of = np.empty_like(turn)
        turn_of[order] = turn
        with torch.inference_mode():
            if not turn.any():
                return [self._round(rows, slots)]
            out = []
            for one in range(int(turn.max()) + 1):
                at = np.flatnonzero(turn_of == one)
                part = Rows([rows.unique_id[i] for i in at.tolist()], rows.ds[at], rows.y[at], rows.gap[at])
                out.append(self._round(part, slots[at]))
            return out

    def _round(self, rows: Rows, places: np.ndarray) -> Round:
        ds, slots = rows.ds, torch.from_numpy(places)
        # float64: a level of a billion must not swallow the movement around it.
        value = torch.from_numpy(rows.y)
        observed = ~value.isnan()
        if rows.gap.any():
            self._pass_gaps(rows, places)
        y = torch.where(observed, value, 0.0)
        # Most streams stand at the same time: the calendar is worked out once for each distinct one.
        times, inverse = np.unique(ds, return_inverse=True)
        ahead, which = self.policy.frequency.after(times, self.model.horizon), torch.from_numpy(inverse)
        now, future = self._phase(times), ahead[inverse]
        state: StreamState = self.slots.state
        if self.model.row is not None:
            forecast = self.model.row(state.model, slots, y, observed, which, now, self._phase(ahead))
        else:
            memory = self.model.memory
            here = self._with_covariates(now[which].unsqueeze(1), rows.unique_id, ds[:, None])
            self._without += int(here.isnan().any(2).sum())
            model = memory.observe(select(state.model, slots), y.unsqueeze(1), observed.unsqueeze(1), here)
            forecast = memory.forecast(model, self._with_covariates(self._phase(ahead)[which], rows.unique_id, future))
            write_(state.model, slots, model)
        verdict, low, high = self.monitors.row_(state.monitors, slots, value, forecast)
        due = self.schedule.due(ds, rows.gap, self.policy.frequency)
        return Round(rows.unique_id, ds, due, value, future, forecast, low, high, verdict)

    def _pass_gaps(self, rows: Rows, places: np.ndarray) -> None:
        """Let the streams that skipped steps of the grid pass them as missing rows: one call for each length of gap."""
        state: StreamState = self.slots.state
        for gap in np.unique(rows.gap[rows.gap > 0]).tolist():
            here = np.flatnonzero(rows.gap == gap)
            slots = torch.from_numpy(places[here])
            passed = self.policy.frequency.before(rows.ds[here], gap)
            phase = self._with_covariates(self._phase(passed), [rows.unique_id[i] for i in here.tolist()], passed)
            empty = torch.zeros(len(here), gap, dtype=torch.float64)
            unseen = torch.zeros_like(empty, dtype=torch.bool)
            write_(state.model, slots, self.model.memory.observe(select(state.model, slots), empty, unseen, phase))
            skipped = self.monitors.skip(select(state.monitors, slots), torch.full((len(here),), gap))
            write_(state.monitors, slots, skipped)

    def _phase(self, ds: np.ndarray) -> Tensor:
        """(...) times -> (..., F)."""
        return torch.from_numpy(self.model.phase(ds.reshape(-1))).unflatten(0, ds.shape)

    def _with_covariates(self, phase: Tensor, names: Sequence[str], ds: np.ndarray) -> Tensor:
        """(n, m, G), n names and times (n, m) -> (n, m, F)."""
        if self.model.beside is None:
            return phase
        return torch.cat([phase, torch.from_numpy(self.model.beside(names, ds))], 2)

    # Rows.

    def _merge(self, rounds: Sequence[Round]) -> Round:
        """The rounds of a batch, one after another."""
        if not rounds:
            horizon = self.model.horizon
            none, empty = np.empty(0, dtype=np.int64), torch.empty(0, horizon)
            _, verdict = self.monitors.judge(self.monitors.initial(0), torch.empty(0, dtype=torch.float64))
            forecast = torch.empty(0, horizon, len(self.model.quantiles))
            return Round([], none, none > 0, torch.empty(0), none.reshape(0, horizon), forecast, empty, empty, verdict)
        if len(rounds) == 1:
            return rounds[0]
        return Round(
            names=[name for one in rounds for name in one.names],
            ds=np.concatenate([one.ds for one in rounds]),
            due=np.concatenate([one.due for one in rounds]),
            value=torch.cat([one.value for one in rounds]),
            future=np.concatenate([one.future for one in rounds]),
            forecast=torch.cat([one.forecast for one in rounds]),
            low=torch.cat([one.low for one in rounds]),
            high=torch.cat([one.high for one in rounds]),
            verdict=Verdict(*(torch.cat([getattr(one.verdict, f.name) for one in rounds]) for f in fields(Verdict))),
        )

    def _time(self, name: str, ds: np.ndarray) -> pl.Series:
        """A column of times, or of arrays of them."""
        kind: pl.DataType = pl.Int64() if self.policy.frequency.counts else pl.Datetime("us")
        return pl.Series(name, np.ascontiguousarray(ds)).cast(kind if ds.ndim == 1 else pl.Array(kind, ds.shape[1]))

    def _forecasts(self, one: Round) -> pl.DataFrame:
        """A row for each event that is answered, the steps of its forecast in arrays."""
        if one.due.all():
            watched = (one.verdict.surprise, one.verdict.anomaly)
            return self._frame(one.names, one.ds, one.future, one.forecast, one.low, one.high, *watched)
        at = np.flatnonzero(one.due)
        tensors = (one.forecast, one.low, one.high, one.verdict.surprise, one.verdict.anomaly)
        return self._frame([one.names[i] for i in at.tolist()], one.ds[at], one.future[at], *(whole[at] for whole in tensors))

    def _frame(
        self, names: list[str], origin: np.ndarray, future: np.ndarray, forecast: Tensor, low: Tensor, high: Tensor, surprise: Tensor, anomaly: Tensor
    ) -> pl.DataFrame:  # fmt: skip
        n, horizon = len(names), self.model.horizon
        steps = np.tile(np.arange(1, horizon + 1, dtype=np.int32), (n, 1))
        return pl.DataFrame(
            [
                pl.Series("unique_id", names, dtype=pl.String),
                self._time("origin", origin),
                self._time("ds", future),
                pl.Series("step", steps),
                *(_number(f"q{q:g}", forecast[:, :, i]) for i, q in enumerate(self.model.quantiles)),
                _number("low", low),
                _number("high", high),
                _number("surprise", surprise),
                _number("anomaly", anomaly),
                pl.Series("model_version", [self.model.version] * n, dtype=pl.String),
            ]
        )

    def ask(self, unique_ids: Sequence[str], batch: int) -> pl.DataFrame:
        """The present forecasts of streams that were seen before, in the form of `Outcome.forecasts` (surprise and anomaly null); no
        state changes. `batch`: the next one. Raises UserError for a name that was never seen."""
        for name in unique_ids:
            if not self.slots.knows(name):
                raise UserError(f"there is no stream '{name}'")
        places = self.slots.admit(unique_ids, batch)
        state, slots = self.slots.state, torch.from_numpy(places)
        origin = np.array([self.slots.clocks.get(slot).last or 0 for slot in places.tolist()], dtype=np.int64)
        future = self.policy.frequency.after(origin, self.model.horizon)
        with torch.inference_mode():
            ahead = self._with_covariates(self._phase(future), unique_ids, future)
            forecast = self.model.memory.forecast(select(state.model, slots), ahead)
            low, high = self.monitors.interval(select(state.monitors, slots), forecast)
        unknown = torch.full((len(unique_ids),), torch.nan)
        return self._frame(list(unique_ids), origin, future, forecast, low, high, unknown, unknown)

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
        return frame if self.policy.frequency.counts or not rows else frame.with_columns(pl.col("ds").cast(pl.Datetime("us")))

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
            names = arrivals.streams()
            slots = self.slots.admit(names, entry.batch)
            known, n = ~self.slots.stands_in(names), len(arrivals.records)
            self.slots.clocks.feed(slots[:n][known[:n]], arrivals.records.at(known[:n]), self.policy)
            self.slots.clocks.flush(slots[n:][known[n:]].tolist(), self.policy)
            self._learn(rows, self.slots.find(rows.unique_id))
            self.slots.changed(slots, entry.batch)
        self.slots.drop_stand_ins()
        return unfinished

    # Looking in.

    def names(self) -> list[str]:
        """Every stream that was ever seen, sorted."""
        return self.slots.names()

    def waiting(self, unique_ids: Sequence[str], batch: int) -> list[str]:
        """Those of the streams that have events waiting for their watermark; they become resident."""
        slots = self.slots.admit(unique_ids, batch)
        return [name for name, slot in zip(unique_ids, slots.tolist(), strict=True) if self.slots.clocks.get(slot).buffer]

    def digest(self) -> str:
        """SHA-256 over the states of all streams, by name: equal digests are equal states, bit for bit."""
        total = hashlib.sha256()
        for name in self.names():
            total.update(json.dumps(name).encode() + hashlib.sha256(self.slots.snapshot(name) or b"").digest())
        return total.hexdigest()


def _number(name: str, values: Tensor) -> pl.Series:
    """A column, of numbers or of arrays of them, in which NaN becomes null: no file format agrees on NaN."""
    numbers = np.ascontiguousarray(values.double().numpy())
    if not np.isnan(numbers).any():  # as nearly always; each step of polars takes a tenth of a millisecond
        return pl.Series(name, numbers)
    flat = pl.Series(name, numbers.reshape(-1)).fill_nan(None)
    return flat if numbers.ndim == 1 else flat.reshape(numbers.shape)


def _refused(record: Record, verdict: str) -> DeadLetter:
    raw = json.dumps({"unique_id": record.unique_id, "ds": record.ds, "y": record.y, "event_id": record.event_id}, allow_nan=True)
    return DeadLetter(verdict, WHY[verdict], record.partition, record.offset, raw)
