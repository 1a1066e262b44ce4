"""The protocol of live sources and sinks, and how a line of text becomes a record.

A source hands out records in order together with the position after them; it can be put back to any position it
once reported. A sink takes bytes or rows, makes them durable on `flush`, and says with a receipt how far it got, so
that a restarted worker can cut off what was written after the last commit. Nothing here knows about models.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import orjson
import polars as pl

from connectors.errors import UserError

# Larger than any sensible event; a runaway producer must not fill the memory of the worker.
MAX_RECORD_BYTES = 1 << 20
# No measured quantity is larger; sentinels such as 1e308 would overflow every sum of squares of a memory.
LARGEST_VALUE = 1e30
# Microseconds (or steps) from 1970 to a time that is surely none; differences of two times fit 64 bits.
LATEST = 1 << 61
# Types of a value that need no parsing.
PLAIN = {int, float, type(None)}
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


class Records(Sequence[Record]):
    """Many events with a column each, so that thousands are handled without an object for every one. As a sequence it
    hands out `Record`s."""

    __slots__ = ("ds", "event_id", "offset", "partition", "partitions", "unique_id", "y")

    def __init__(
        self,
        unique_id: list[str],
        ds: np.ndarray,
        y: np.ndarray,
        event_id: list[str | None] | None,
        partitions: list[str],
        partition: np.ndarray,
        offset: np.ndarray,
    ):
        self.unique_id = unique_id
        self.ds = ds
        """(n,) int64, as `Record.ds`."""
        self.y = y
        """(n,) float64, NaN: missing."""
        self.event_id = event_id
        """None: no event has one."""
        self.partitions = partitions
        """Names of the partitions."""
        self.partition = partition
        """(n,) int32: which of them each event came from."""
        self.offset = offset
        """(n,) int64."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> Records:
        """The same events as columns; `Records` pass unchanged."""
        if isinstance(records, Records):
            return records
        names, ds, y, events, partitions, offsets = (list(c) for c in zip(*records, strict=True)) if records else ([] for _ in range(6))
        known = list(dict.fromkeys(partitions))
        place = {name: i for i, name in enumerate(known)}
        return cls(
            names,
            np.array(ds, dtype=np.int64),
            np.array(y, dtype=np.float64),
            events if any(e is not None for e in events) else None,
            known,
            np.array([place[p] for p in partitions], dtype=np.int32),
            np.array(offsets, dtype=np.int64),
        )

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """All of them, one after another."""
        if len(parts) == 1:
            return parts[0]
        known = list(dict.fromkeys(name for part in parts for name in part.partitions))
        place = {name: i for i, name in enumerate(known)}
        where = [np.array([place[name] for name in part.partitions], dtype=np.int32)[part.partition] for part in parts if len(part)]
        events = [part.event_id or [None] * len(part) for part in parts] if any(part.event_id is not None for part in parts) else None
        return cls(
            [name for part in parts for name in part.unique_id],
            np.concatenate([part.ds for part in parts]),
            np.concatenate([part.y for part in parts]),
            None if events is None else [event for part in events for event in part],
            known,
            np.concatenate(where) if where else np.empty(0, dtype=np.int32),
            np.concatenate([part.offset for part in parts]),
        )

    def at(self, mask: np.ndarray) -> Records:
        """Those where `mask` (n,) bool is true."""
        if mask.all():
            return self
        places = np.flatnonzero(mask).tolist()
        events = None if self.event_id is None else [self.event_id[i] for i in places]
        names = [self.unique_id[i] for i in places]
        return Records(names, self.ds[mask], self.y[mask], events, self.partitions, self.partition[mask], self.offset[mask])

    def __len__(self) -> int:
        return len(self.unique_id)

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> list[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | list[Record]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return Record(
            self.unique_id[at],
            int(self.ds[at]),
            float(self.y[at]),
            None if self.event_id is None else self.event_id[at],
            self.partitions[self.partition[at]],
            int(self.offset[at]),
        )

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(len(self)))


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
    """From a source that decodes many lines at once: `Records`, which read the same."""
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

        A source that has enough records returns exactly `max_records`: batches are cut by position, not by time. A message of many
        records (Arrow) is one position and comes whole, so that a batch may be longer by all but one of its records.
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

    def write(self, rows: pl.DataFrame) -> None:
        """Array columns hold the steps of one forecast; where the outside knows no arrays they go out as `long_rows`."""

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


# How an Arrow IPC stream begins; no JSON does.
ARROW = b"\xff\xff\xff\xff"
# A message is one position and so never cut; a batch may be longer than asked for by so many records.
ARROW_ROWS = 4096
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

    def set_header(self, line: bytes) -> None:
        """Take the column names from the first line of a CSV stream."""
        try:
            self.header = next(csv.reader([line.decode("utf-8-sig")]))
        except (ValueError, csv.Error) as error:
            raise UserError(f"the first line of the stream is no header of CSV in UTF-8 ({error}): it names the columns") from None
        missing = [c for n, c in self.columns.items() if n != "event_id" and c is not None and c not in self.header]
        if missing:
            raise UserError(f"the stream has no column {missing}; it has {self.header}")

    def decode_message(self, payload: bytes, partition: str, offset: int, name: str | None = None) -> list[Record | DeadLetter]:
        """A broker's message: one JSON record, or an Arrow IPC stream, a record a row (a dead letter for each that is none)."""
        if payload[:4] == ARROW:
            return self._rows(payload, partition, offset, name)
        return [self.decode(payload, partition, offset, name)]

    def _rows(self, payload: bytes, partition: str, offset: int, name: str | None) -> list[Record | DeadLetter]:
        import pyarrow as pa

        def refused(reason: str, detail: str) -> list[Record | DeadLetter]:
            return [DeadLetter(reason, detail, partition, offset, f"Arrow stream of {len(payload)} bytes")]

        if len(payload) > MAX_RECORD_BYTES:
            return refused("oversize", f"{len(payload)} bytes, at most {MAX_RECORD_BYTES}")
        ours = {n: c for n, c in self.columns.items() if c is not None and not (n == "unique_id" and name is not None)}
        try:
            with pa.ipc.open_stream(payload) as reader:
                batches, count = [], 0
                for batch in reader:
                    batches.append(batch)
                    count += batch.num_rows
                    if count > ARROW_ROWS:
                        return refused("oversize", f"more than {ARROW_ROWS} rows in one message")
                table = pa.Table.from_batches(batches, reader.schema)
            missing = [c for n, c in ours.items() if n != "event_id" and c not in table.column_names]
            if missing:
                return refused("malformed", f"no column {missing}; it has {table.column_names}")
            columns = {n: table[c] for n, c in ours.items() if c in table.column_names}
            if not self.count_steps and (pa.types.is_timestamp(columns["ds"].type) or pa.types.is_date(columns["ds"].type)):
                columns["ds"] = columns["ds"].cast(pa.timestamp("us"), safe=False).cast(pa.int64())
                as_time: Callable[[Any], int] = int
            else:
                as_time = self._time
            fields = {n: column.to_pylist() for n, column in columns.items()}
        except (pa.ArrowException, ValueError, KeyError) as error:
            return refused("malformed", f"no Arrow stream of records: {(str(error) or type(error).__name__).splitlines()[0]}")
        nothing = [None] * table.num_rows
        names = [name] * table.num_rows if name is not None else fields.get("unique_id", [self.columns["y"]] * table.num_rows)
        out: list[Record | DeadLetter] = []
        for row, (stream, ds, y, event) in enumerate(zip(names, fields["ds"], fields["y"], fields.get("event_id", nothing), strict=True)):
            try:
                if ds is None:
                    raise ValueError("no time")
                out.append(Record(self._name(stream), as_time(ds), parse_value(y), None if event is None else str(event), partition, offset))
            except (ValueError, TypeError, OverflowError) as error:
                raw = json.dumps({"unique_id": stream, "ds": ds, "y": y, "event_id": event}, default=str)
                out.append(DeadLetter("malformed", f"row {row} of the message: {error}", partition, offset, raw[:DEAD_LETTER_BYTES]))
        return out

    def _name(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise ValueError(f"'{self.columns['unique_id']}' is not a name")
        return str(value)

    def decode(self, line: bytes, partition: str, offset: int, name: str | None = None) -> Record | DeadLetter:
        """name: of the stream, where the record does not hold it."""
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
            if name is None:
                name = self._name(columns["y"] if columns["unique_id"] is None else fields[columns["unique_id"]])
            event = fields.get(columns["event_id"])
            return Record(
                name,
                self._time(fields[columns["ds"]]),
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

    def _time(self, value: Any) -> int:
        ds = int(value) if self.count_steps else parse_time(value)
        if abs(ds) > LATEST:
            raise ValueError("not a time")
        return ds

    def decode_all(
        self, lines: Sequence[bytes], partitions: list[str], partition: np.ndarray, offset: np.ndarray
    ) -> tuple[Records, list[DeadLetter], np.ndarray]:
        """`decode_message` for many at once: the good records as columns, the others, and which line each good one came from, (k,) int64.

        partition (n,) int32: which of `partitions` each line came from; offset (n,) int64.
        """
        columns = self._columns(lines) if lines else None
        if columns is not None:
            return Records(*columns, partitions, partition, offset), [], np.arange(len(lines))
        # Something is unusual: line by line, so that each gets its own verdict.
        records, dead, source = [], [], []
        for i, (line, p, o) in enumerate(zip(lines, partition, offset, strict=True)):
            for one in self.decode_message(line, partitions[p], int(o)):
                if isinstance(one, Record):
                    records.append(one)
                    source.append(i)
                else:
                    dead.append(one)
        return Records.of(records), dead, np.array(source, dtype=np.int64)

    def _columns(self, lines: Sequence[bytes]) -> tuple[list[str], np.ndarray, np.ndarray, list[str | None] | None] | None:
        """unique_id, ds, y, event_id of JSON lines that are all plain; None when one of them needs a closer look."""
        id_column, event_column = self.columns["unique_id"], self.columns["event_id"]
        if self.form != "json" or id_column is None or max(map(len, lines)) > MAX_RECORD_BYTES:
            return None
        try:
            fields = list(map(orjson.loads, lines))
            names, times, values = ([f[name] for f in fields] for name in (id_column, self.columns["ds"], self.columns["y"]))
            events = [f.get(event_column) for f in fields]
            if set(map(type, names)) != {str} or not set(map(type, times)) <= {int, float, str} or not set(map(type, values)) <= PLAIN:
                return None
            # Most streams stand at the same time.
            known = {time: self._time(time) for time in set(times)}
            ds = np.array([known[time] for time in times], dtype=np.int64)
            y = np.array(values, dtype=np.float64)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return None
        if "" in names or (np.abs(y) > LARGEST_VALUE).any():
            return None
        return names, ds, y, [None if e is None else str(e) for e in events] if any(e is not None for e in events) else None


def dead_letter(reason: str, detail: str, partition: str, offset: int, raw: bytes) -> DeadLetter:
    return DeadLetter(reason, detail, partition, offset, raw[:DEAD_LETTER_BYTES].decode("utf-8", "replace"))


def long_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Array columns as rows: the form of files and topics that know no arrays. All arrays of a row are equally long."""
    arrays = [name for name, kind in rows.schema.items() if isinstance(kind, pl.Array)]
    return rows.explode(arrays) if arrays else rows


TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%.fZ"


def to_ndjson(rows: pl.DataFrame) -> bytes:
    """A JSON object a line for each row, and a row a step of a forecast; times in ISO 8601 UTC."""
    rows = long_rows(rows)
    times = [name for name, kind in rows.schema.items() if kind == pl.Datetime]
    return rows.with_columns(pl.col(times).dt.strftime(TIME_FORMAT)).write_ndjson().encode()


DEAD_LETTER_SCHEMA = {
    "reason": pl.String,
    "detail": pl.String,
    "partition": pl.String,
    "offset": pl.Int64,
    "raw": pl.String,
}


def dead_letter_frame(letters: Sequence[DeadLetter]) -> pl.DataFrame:
    return pl.DataFrame(letters, schema=DEAD_LETTER_SCHEMA, orient="row")
