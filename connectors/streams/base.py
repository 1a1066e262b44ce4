"""The protocol of live sources and sinks, and how a line of text becomes a record.

A source hands out records in order together with the position after them; it can be put back to any position it
once reported. A sink takes bytes or rows, makes them durable on `flush`, and says with a receipt how far it got, so
that a restarted worker can cut off what was written after the last commit. Nothing here knows about models.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import orjson
import polars as pl

from connectors.errors import UserError

# Larger than any sensible event; a runaway producer must not fill the memory of the worker.
MAX_RECORD_BYTES = 1 << 20
# No measured quantity is larger; sentinels such as 1e308 would overflow every sum of squares of a memory.
LARGEST_VALUE = 1e30
# Only the head of a refused record is kept with its dead letter.
DEAD_LETTER_BYTES = 4096


class Record(NamedTuple):
    """One event of one stream."""

    unique_id: str
    ds: int
    """Event time, microseconds since 1970 in UTC."""
    y: float
    """Value; NaN says that the value is missing."""
    event_id: str | None
    partition: str
    offset: int
    """Place in the partition for people: line number or broker offset."""


class DeadLetter(NamedTuple):
    """A record that was refused: why, where it stood, and the head of its text."""

    reason: str
    detail: str
    partition: str
    offset: int
    raw: str


Positions = dict[str, Any]
"""Partition -> JSON value that `seek` understands; always the position after the last record handed out."""


@dataclass(slots=True)
class Batch:
    records: list[Record]
    dead: list[DeadLetter]
    sent: list[float] = field(default_factory=list)
    """When each record was handed to the broker (seconds since 1970), where the source knows."""

    def __len__(self) -> int:
        return len(self.records) + len(self.dead)


class Source(Protocol):
    """Where events come from."""

    ended: bool
    """True once a finite source has handed out everything; a live one never ends."""

    def poll(self, max_records: int, timeout: float) -> Batch:
        """At most `max_records` lines (good and dead together), in order; waits up to `timeout` seconds for the first.

        A source that has enough records returns exactly `max_records`: batches are cut by position, not by time.
        """

    def positions(self) -> Positions:
        """Where reading goes on after the last poll. JSON only."""

    def seek(self, positions: Positions) -> None:
        """Go on at `positions`. Sources that cannot rewind (standard input) go on with what comes next: the journal of
        the worker already holds what they handed out."""

    def commit(self, positions: Positions) -> None:
        """Tell the outside, for lag displays and retention; correctness never depends on it."""

    def lag(self) -> int | None:
        """Records that wait, where the source can tell cheaply."""

    def close(self) -> None: ...


class Sink(Protocol):
    """Where rows go."""

    def resume(self, receipt: Any | None) -> None:
        """Take back whatever was written after `receipt`; None: nothing was ever committed."""

    def write(self, rows: pl.DataFrame) -> None: ...

    def flush(self) -> Any:
        """Make all written rows durable and return the receipt (JSON) that stands for exactly these rows."""

    def close(self) -> None: ...


def parse_time(value: Any) -> int:
    """Microseconds since 1970 (UTC). ISO 8601 text (no offset: UTC) or a number: seconds, milliseconds or microseconds
    since 1970, told apart by size (below 1e11, 1e14; that is right for the years 1973 to 5138)."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1e6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("not a time")
    size = abs(value)
    return round(value * 1e6) if size < 1e11 else round(value * 1e3) if size < 1e14 else round(value)


def parse_value(value: Any) -> float:
    """A finite number, or NaN for a missing one: null, an empty cell, or the text NaN, NA, null, None."""
    if value is None:
        return math.nan
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in ("", "nan", "na", "null", "none"):
            return math.nan
    number = float(value)
    if abs(number) > LARGEST_VALUE:
        raise ValueError(f"value {number} is beyond {LARGEST_VALUE:g}")
    return number


def _parse_json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line.decode("utf-8"))  # also takes the bare NaN that many programs write


COLUMNS = {"unique_id": "unique_id", "ds": "ds", "y": "y", "event_id": "event_id"}


class Decoder:
    """Turns the lines of one partition into records or dead letters. `columns` maps our names to the source's.

    JSON lines are objects; CSV lines follow `header`. `event_id` is optional. A `unique_id` column of None makes all
    lines one stream, named by its value column. `count_steps`: times are whole numbers that count steps.
    """

    def __init__(self, form: str, columns: Mapping[str, str | None] | None = None, *, count_steps: bool = False):
        self.form = form
        self.columns: dict[str, str | None] = {**COLUMNS, **(columns or {})}
        self.count_steps = count_steps
        unknown = sorted(set(self.columns) - set(COLUMNS))
        if unknown:
            raise UserError(f"cannot map {unknown}: a stream record has {sorted(COLUMNS)}")
        self.header: list[str] | None = None

    def set_header(self, header: Sequence[str]) -> None:
        self.header = list(header)
        missing = [c for n, c in self.columns.items() if n != "event_id" and c is not None and c not in self.header]
        if missing:
            raise UserError(f"the stream has no column {missing}; it has {self.header}")

    def decode(self, line: bytes, partition: str, offset: int) -> Record | DeadLetter:
        if len(line) > MAX_RECORD_BYTES:
            return dead_letter("oversize", f"{len(line)} bytes, at most {MAX_RECORD_BYTES}", partition, offset, line)
        try:
            if self.form == "json":
                fields = _parse_json(line)
                if not isinstance(fields, dict):
                    raise ValueError("not a JSON object")
            else:
                assert self.header is not None
                cells = next(csv.reader([line.decode("utf-8")], strict=True))
                if len(cells) != len(self.header):
                    raise ValueError(f"{len(cells)} cells, the header has {len(self.header)}")
                fields = dict(zip(self.header, cells, strict=True))
            columns = self.columns
            name = columns["y"] if columns["unique_id"] is None else fields[columns["unique_id"]]
            if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
                raise ValueError(f"'{columns['unique_id']}' is not a name")
            event = fields.get(columns["event_id"])
            return Record(
                str(name),
                int(fields[columns["ds"]]) if self.count_steps else parse_time(fields[columns["ds"]]),
                parse_value(fields[columns["y"]]),
                None if event is None else str(event),
                partition,
                offset,
            )
        except KeyError as error:
            return dead_letter("malformed", f"no field {error}", partition, offset, line)
        except (ValueError, TypeError, OverflowError, csv.Error, StopIteration, RecursionError) as error:
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            return dead_letter("malformed", detail, partition, offset, line)


def dead_letter(reason: str, detail: str, partition: str, offset: int, raw: bytes) -> DeadLetter:
    return DeadLetter(reason, detail, partition, offset, raw[:DEAD_LETTER_BYTES].decode("utf-8", "replace"))


TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%.fZ"


def to_json_lines(rows: pl.DataFrame) -> list[bytes]:
    """A JSON object a row, times in ISO 8601 UTC."""
    times = [name for name, kind in rows.schema.items() if kind == pl.Datetime]
    return rows.with_columns(pl.col(times).dt.strftime(TIME_FORMAT)).write_ndjson().encode().splitlines()


DEAD_LETTER_SCHEMA = {
    "reason": pl.String,
    "detail": pl.String,
    "partition": pl.String,
    "offset": pl.Int64,
    "raw": pl.String,
}


def dead_letter_frame(letters: Sequence[DeadLetter]) -> pl.DataFrame:
    return pl.DataFrame(letters, schema=DEAD_LETTER_SCHEMA, orient="row")
