"""Event time: one clock a stream puts its events in order and says what becomes of each.

A clock's watermark is the newest event time seen minus the grace period. Events wait in a small buffer until the
watermark reaches them and leave it in order of event time; each stream has its own clock, so what happens to a
stream never depends on which others share its worker. Verdicts:

    accepted     a value, taken in its order (`missing`: taken as a missing value, nothing is learnt from it)
    late         its place in the order has passed; published forecasts do not change
    duplicate    the same event again (same time and value, or same event id)
    corrected    another value for a waiting event, which takes it (with the policy `last`)
    conflict     another value for a time, or another time for an event id, that is already known
    quarantined  further ahead than a clock may jump; the watermark does not move
    off_grid     between two steps of the stream's frequency

`Clock` is one of them, event by event; `Clocks` are those of thousands of streams, whose plain events (in order, none
waits) are told together and only the others by a `Clock` each.
"""

from __future__ import annotations

import calendar
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from connectors.errors import UserError
from connectors.streams.base import Record, Records
from pipelines.windows import continue_grid, parse_frequency

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = 1_000_000
DAY = 86_400 * SECOND
UNITS = {"ms": 1_000, "s": SECOND, "m": 60 * SECOND, "h": 3_600 * SECOND, "d": DAY, "w": 7 * DAY}
CALENDAR = {"mo": 1, "q": 3, "y": 12}


@dataclass(frozen=True)
class Frequency:
    """The step of a stream: a fixed length (`15m`, `1h`, `1d`, `1w`), calendar months (`1mo`, `1q`, `1y`), or whole
    numbers (`1i`: the time column counts steps). Times are int64 microseconds in UTC, or those whole numbers."""

    text: str
    length: int
    """In the unit of the times; for calendar steps the shortest such step."""
    months: int
    """0 unless the step is counted in months."""

    @classmethod
    def parse(cls, text: str) -> Frequency:
        count, unit = parse_frequency(text)
        months = count * CALENDAR.get(unit, 0)
        return cls(f"{count}{unit}", months * 28 * DAY if months else count * UNITS.get(unit, 1), months)

    @property
    def counts(self) -> bool:
        """The time column counts steps and holds no dates."""
        return self.text.endswith("i")

    def after(self, ds: np.ndarray, steps: int) -> np.ndarray:
        """(B,) times -> (B, steps): the grid that follows each of them."""
        if not self.months:
            return ds[:, None] + np.arange(1, steps + 1) * self.length
        times, which = np.unique(ds, return_inverse=True)
        grid = [continue_grid(np.datetime64(int(t), "us"), self.text, steps).astype(np.int64) for t in times]
        return np.array(grid).reshape(-1, steps)[which]

    def before(self, ds: np.ndarray, steps: int) -> np.ndarray:
        """(B,) times -> (B, steps): the grid that leads up to each of them, earliest first."""
        if not self.months:
            return ds[:, None] - np.arange(steps, 0, -1) * self.length
        starts = []
        for time in ds:
            moment = _moment(int(time))
            month = moment.year * 12 + moment.month - 1 - (steps + 1) * self.months
            # A month end leads back to month ends; the 29th to 31st of other months to the last day there is.
            last = calendar.monthrange(month // 12, month % 12 + 1)[1]
            day = last if _is_month_end(moment) else min(moment.day, last)
            start = moment.replace(year=month // 12, month=month % 12 + 1, day=day)
            starts.append((start - EPOCH) // timedelta(microseconds=1))
        return self.after(np.array(starts, dtype=np.int64), steps)

    def between(self, earlier: int, later: int) -> int | None:
        """Whole steps from `earlier` to `later`; None when `later` is not on the grid that `earlier` lies on."""
        if not self.months:
            steps, rest = divmod(later - earlier, self.length)
            return None if rest else steps
        a, b = _moment(earlier), _moment(later)
        steps, rest = divmod((b.year - a.year) * 12 + b.month - a.month, self.months)
        if rest:
            return None
        if _is_month_end(a) and _is_month_end(b):
            return steps if a.time() == b.time() else None
        return steps if (a.day, a.time()) == (b.day, b.time()) else None


def _moment(ds: int) -> datetime:
    return EPOCH + timedelta(microseconds=ds)


def _is_month_end(moment: datetime) -> bool:
    return (moment + timedelta(days=1)).day == 1


def parse_duration(text: str) -> int:
    """Microseconds of `5m`, `1h`, `0s`; steps of `3i` for times that count steps."""
    found = re.fullmatch(r"(\d+)(ms|[smhdwi])", text.strip())
    if not found:
        raise UserError(f"'{text}' is no duration: use for instance 30s, 5m, 1h, 1d")
    return int(found[1]) * UNITS.get(found[2], 1)


@dataclass(frozen=True)
class EventTime:
    """The policy of all clocks of a run."""

    frequency: Frequency
    grace: int = 0
    """Microseconds an event may come behind the newest one and still be put in its place."""
    max_jump: int | None = None
    """Microseconds a clock may jump ahead at once; None: a day, or 16 steps if that is more (1000 steps of `i`)."""
    conflict: str = "reject"
    """`reject`: the first value stays. `last`: a waiting event takes the newer value (a correction)."""
    remember: int = 16
    """Events already taken that are still recognised as duplicates or conflicts, a stream."""
    confirm: int = 10
    """So many events in a row beyond the jump bound, in order among themselves, show that time really moved on."""

    def __post_init__(self) -> None:
        if self.conflict not in ("reject", "last"):
            raise UserError(f"conflict policy '{self.conflict}' is unknown: use reject or last")

    @property
    def jump(self) -> int:
        if self.max_jump is not None:
            return self.max_jump
        return 1000 * self.frequency.length if self.frequency.counts else max(DAY, 16 * self.frequency.length)

    def settings(self) -> dict[str, Any]:
        return {
            "freq": self.frequency.text,
            "grace_us": self.grace,
            "max_jump_us": self.jump,
            "conflict": self.conflict,
        }


@dataclass(frozen=True)
class Schedule:
    """Which rows are answered with a forecast; every row is learnt and watched all the same."""

    every: int | None
    """None: each row. Microseconds (or steps): the first row of a stream in each such span of event time, counted from
    1970. 0: none, forecasts are made when somebody asks."""

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """`every`, `demand`, or a duration as 15m, 1h, 1d."""
        if text in ("every", "demand"):
            return cls(None if text == "every" else 0)
        try:
            span = parse_duration(text)
        except UserError as error:
            raise UserError(f"'{text}' is no schedule of forecasts: use every, demand, or a duration as 15m, 1h, 1d") from error
        if not span:
            raise UserError("forecasts every 0 microseconds make no sense: use every, demand, or a duration as 15m, 1h, 1d")
        return cls(span)

    def due(self, ds: np.ndarray, gap: np.ndarray, frequency: Frequency) -> np.ndarray:
        """(n,) bool for rows at `ds` that come `gap` steps of the grid late. Nothing but the row decides, so a replay
        answers the same rows."""
        if self.every is None:
            return np.ones(len(ds), dtype=bool)
        if not self.every:
            return np.zeros(len(ds), dtype=bool)
        before = ds - (gap + 1) * frequency.length
        return ds // self.every > before // self.every


EVERY = Schedule(None)


class Row(NamedTuple):
    """What a clock lets through to the memory of its stream."""

    unique_id: str
    ds: int
    y: float
    """NaN: missing; the memory takes the step without a write."""
    gap: int
    """Steps of the grid between the row before and this one for which nothing came."""


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


class Clock:
    """Order, lateness and repeats of one stream. Its state is small and JSON (`dump`, `load`; NaN becomes null)."""

    __slots__ = ("ahead", "buffer", "last", "newest", "recent")

    def __init__(self) -> None:
        self.last: int | None = None
        """Event time of the last row let through."""
        self.newest: int | None = None
        self.buffer: list[tuple[int, float, str | None]] = []
        """Waiting events, by time."""
        self.recent: deque[tuple[int, float, str | None]] = deque()
        self.ahead: tuple[int, int] | None = None
        """Newest time beyond the jump bound, and how many events stood there in order."""

    def feed(self, record: Record, policy: EventTime, out: list[Row]) -> str:
        """Take one event; rows whose time has come are appended to `out`. Returns the verdict."""
        ds, y, event = record.ds, record.y, record.event_id
        newest = self.newest
        if newest is not None:
            if ds <= newest or event is not None:
                verdict = self._known(ds, y, event, policy)
                if verdict is not None:
                    return verdict
            if self.last is not None and ds <= self.last:
                return "late"
            if policy.frequency.between(newest, ds) is None:
                return "off_grid"
            if ds > newest + policy.jump:
                far, count = self.ahead or (0, 0)
                in_order = count and far < ds <= far + policy.jump
                self.ahead = (ds, count + 1 if in_order else 1)
                if self.ahead[1] < policy.confirm:
                    return "quarantined"
        self.ahead = None
        if newest is None or ds > newest:
            self.newest = newest = ds
            self.buffer.append((ds, y, event))
        else:
            self.buffer.append((ds, y, event))
            self.buffer.sort(key=lambda item: item[0])
        self._release(newest - policy.grace, record.unique_id, policy, out)
        return "missing" if y != y else "accepted"

    def _known(self, ds: int, y: float, event: str | None, policy: EventTime) -> str | None:
        """Duplicate or conflict with a remembered event, or None."""
        for waiting in (self.buffer, self.recent):
            for place, (known_ds, known_y, known_event) in enumerate(waiting):
                if known_ds != ds and (event is None or known_event != event):
                    continue
                if known_ds == ds and _same(known_y, y):
                    return "duplicate"
                if policy.conflict == "last" and waiting is self.buffer and known_ds == ds:
                    self.buffer[place] = (ds, y, event)
                    return "corrected"
                return "conflict"
        return None

    def _release(self, watermark: int, unique_id: str, policy: EventTime, out: list[Row]) -> None:
        buffer, recent = self.buffer, self.recent
        count = 0
        for ds, y, event in buffer:
            if ds > watermark:
                break
            steps = 1 if self.last is None else policy.frequency.between(self.last, ds)
            out.append(Row(unique_id, ds, y, (steps or 1) - 1))
            self.last = ds
            recent.append((ds, y, event))
            if len(recent) > policy.remember:
                recent.popleft()
            count += 1
        if count:
            del buffer[:count]

    def flush(self, unique_id: str, policy: EventTime, out: list[Row]) -> None:
        """Let everything through: the stream has ended."""
        if self.buffer:
            self._release(self.buffer[-1][0], unique_id, policy, out)

    def dump(self) -> list[Any]:
        return [self.last, self.newest, self.buffer, list(self.recent), self.ahead]

    @classmethod
    def load(cls, data: list[Any]) -> Clock:
        clock = cls()
        clock.last, clock.newest = data[0], data[1]
        clock.buffer = [(ds, math.nan if y is None else y, event) for ds, y, event in data[2]]
        clock.recent = deque((ds, math.nan if y is None else y, event) for ds, y, event in data[3])
        clock.ahead = None if data[4] is None else (data[4][0], data[4][1])
        return clock


VERDICTS = ("accepted", "missing", "late", "duplicate", "corrected", "conflict", "quarantined", "off_grid")
CODE = {verdict: code for code, verdict in enumerate(VERDICTS)}
NEVER = np.iinfo(np.int64).min


class Released(NamedTuple):
    """What the clocks let through, in the order in which events let it: a column each, n rows."""

    slot: np.ndarray
    """int64: whose row it is."""
    ds: np.ndarray
    y: np.ndarray
    gap: np.ndarray


class Clocks:
    """The clocks of many slots. One in which nothing waits, of events without ids, is a row of arrays; any other is a
    `Clock` in `special`."""

    def __init__(self, size: int, remember: int):
        self._remember = remember
        self._last = np.full(size, NEVER)
        """Event time of the last row, which is the newest where nothing waits."""
        self._recent_ds = np.zeros((size, remember), dtype=np.int64)
        self._recent_y = np.zeros((size, remember))
        """Rings of the last rows: row r at r % remember."""
        self._rows = np.zeros(size, dtype=np.int64)
        self._is_special = np.zeros(size, dtype=bool)
        self.special: dict[int, Clock] = {}

    def grow(self, size: int) -> None:
        more = Clocks(size - len(self._last), self._remember)
        for name in ("_last", "_recent_ds", "_recent_y", "_rows", "_is_special"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(more, name)]))

    def get(self, slot: int) -> Clock:
        """The clock of a slot; `put` makes changes to it lasting."""
        if slot in self.special:
            return self.special[slot]
        clock, rows = Clock(), int(self._rows[slot])
        if self._last[slot] != NEVER:
            clock.last = clock.newest = int(self._last[slot])
        places = np.arange(max(0, rows - self._remember), rows) % self._remember
        recent = zip(self._recent_ds[slot, places].tolist(), self._recent_y[slot, places].tolist(), strict=True)
        clock.recent = deque((ds, y, None) for ds, y in recent)
        return clock

    def put(self, slot: int, clock: Clock) -> None:
        plain = not clock.buffer and clock.ahead is None and clock.last == clock.newest
        plain = plain and all(event is None for _, _, event in clock.recent)
        self._is_special[slot] = not plain
        if not plain:
            self.special[slot] = clock
            return
        self.special.pop(slot, None)
        self._last[slot] = NEVER if clock.last is None else clock.last
        self._rows[slot] = rows = len(clock.recent)
        if rows:
            self._recent_ds[slot, :rows] = [ds for ds, _, _ in clock.recent]
            self._recent_y[slot, :rows] = [y for _, y, _ in clock.recent]

    def feed(self, slots: np.ndarray, records: Records, policy: EventTime) -> tuple[np.ndarray, Released]:
        """Take events, the slot of each in `slots` (n,); returns the code of each verdict (n,) and the rows let through."""
        ds, y = records.ds, records.y
        quick, gap = self._plain(slots, records, policy)
        verdict = np.where(np.isnan(y), CODE["missing"], CODE["accepted"])
        if quick.all():
            self._take(slots, ds, y)
            return verdict, Released(slots, ds, y, gap)
        at = np.flatnonzero(quick)
        self._take(slots[at], ds[at], y[at])
        slow: list[tuple[int, int, float, int]] = []
        released_at: list[int] = []
        clocks: dict[int, Clock] = {}
        for i in np.flatnonzero(~quick).tolist():
            slot = int(slots[i])
            clock = clocks.get(slot) or clocks.setdefault(slot, self.get(slot))
            out: list[Row] = []
            verdict[i] = CODE[clock.feed(records[i], policy, out)]
            slow += [(slot, row.ds, row.y, row.gap) for row in out]
            released_at += [i] * len(out)
        for slot, clock in clocks.items():
            self.put(slot, clock)
        rows = _released(slow)
        order = np.argsort(np.concatenate([at, np.array(released_at, dtype=np.int64)]), kind="stable")
        fast = (slots[at], ds[at], y[at], gap[at])
        return verdict, Released(*(np.concatenate(pair)[order] for pair in zip(fast, rows, strict=True)))

    def _plain(self, slots: np.ndarray, records: Records, policy: EventTime) -> tuple[np.ndarray, np.ndarray]:
        """(n,) bool: all events of the stream in this batch come in order and leave at once; (n,) gap before each such."""
        n, length = len(slots), policy.frequency.length
        if policy.grace or policy.frequency.months or not n:
            return np.zeros(n, dtype=bool), np.zeros(n, dtype=np.int64)
        order = np.argsort(slots, kind="stable")
        mine, ds = slots[order], records.ds[order]
        first = np.ones(n, dtype=bool)
        first[1:] = mine[1:] != mine[:-1]
        before = np.empty(n, dtype=np.int64)
        before[1:] = ds[:-1]
        before[first] = self._last[mine[first]]
        begins = before == NEVER
        step = np.where(begins, length, ds - np.where(begins, 0, before))
        plain = (step > 0) & (step <= policy.jump) & (step % length == 0) | begins
        plain &= ~self._is_special[mine]
        if records.event_id is not None:
            plain &= np.array([event is None for event in records.event_id], dtype=bool)[order]
        starts = np.flatnonzero(first)
        whole = np.logical_and.reduceat(plain, starts)[np.cumsum(first) - 1]
        quick, gap = np.empty(n, dtype=bool), np.empty(n, dtype=np.int64)
        quick[order], gap[order] = whole, step // length - 1
        return quick, gap

    def _take(self, slots: np.ndarray, ds: np.ndarray, y: np.ndarray) -> None:
        order, turn, count = turns(slots)
        mine = slots[order]
        kept = turn >= count - self._remember  # of more rows than a ring holds, the last
        place = (self._rows[mine] + turn)[kept] % self._remember
        self._recent_ds[mine[kept], place] = ds[order][kept]
        self._recent_y[mine[kept], place] = y[order][kept]
        final = turn == count - 1
        self._last[mine[final]] = ds[order][final]
        self._rows[mine[final]] += count[final]

    def flush(self, slots: Sequence[int], policy: EventTime) -> Released:
        """Let everything through: these streams have ended."""
        out: list[tuple[int, int, float, int]] = []
        for slot in slots:
            clock, rows = self.get(slot), list[Row]()
            clock.flush("", policy, rows)
            out += [(slot, row.ds, row.y, row.gap) for row in rows]
            self.put(slot, clock)
        return _released(out)


def _released(rows: Sequence[tuple[int, int, float, int]]) -> Released:
    slot, ds, y, gap = zip(*rows, strict=True) if rows else ((), (), (), ())
    whole = (np.array(column, dtype=np.int64) for column in (slot, ds, gap))
    slots, times, gaps = whole
    return Released(slots, times, np.array(y, dtype=np.float64), gaps)


def turns(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An order that groups equal slots and keeps the order within; in it, each one's place within its group and the
    size of the group. Three (n,) int64."""
    order = np.argsort(slots, kind="stable")
    mine = slots[order]
    starts = np.flatnonzero(np.r_[True, mine[1:] != mine[:-1]]) if len(mine) else np.zeros(0, dtype=np.int64)
    sizes = np.diff(np.r_[starts, len(mine)])
    return order, np.arange(len(mine)) - np.repeat(starts, sizes), np.repeat(sizes, sizes)
