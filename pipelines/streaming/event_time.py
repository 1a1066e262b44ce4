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
"""

from __future__ import annotations

import calendar
import math
import re
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from connectors.errors import UserError
from connectors.streams.base import Record
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
