"""The recent past of every stream and who was champion, in one SQLite file beside the checkpoints.

Each row that a memory learnt stands here with what had been expected of it. It feeds the page, it is what a new champion's memories replay
(`HistorySource`), and it outlives checkpoints, which belong to one version of a model each. The service writes a batch here before it commits
the batch to the checkpoint, with the last row's number as the receipt; a restart cuts off what lies beyond the receipt, so that the two agree.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from connectors.errors import UserError
from connectors.streams.base import Batch, Positions, Record

KEEP_ROWS = 2048
# Rows over the bound are cut off a quarter of it at a time, not one by one.
SLACK = 4
PARTITION = "history"

SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    seq INTEGER PRIMARY KEY, unique_id TEXT NOT NULL, ds INTEGER NOT NULL, y REAL, surprise REAL, anomaly REAL, norm REAL, alarms TEXT,
    model TEXT NOT NULL, next_ds INTEGER NOT NULL, next_low REAL, next_mid REAL, next_high REAL);
CREATE INDEX IF NOT EXISTS rows_of ON rows (unique_id, seq);
CREATE TABLE IF NOT EXISTS champions (
    id INTEGER PRIMARY KEY, version INTEGER NOT NULL, since REAL NOT NULL, seq INTEGER NOT NULL, why TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class HistoryRow(NamedTuple):
    """One row as it was learnt. Times are int64 as the stream counts them; NaN and None both say: unknown."""

    unique_id: str
    ds: int
    y: float | None
    surprise: float | None
    anomaly: float | None
    norm: float | None
    """Norm of the stream's memory after the batch of the row."""
    alarms: str | None
    """Causes of the alarms at this row, joined by commas."""
    model: str
    """`NAME/VERSION` that made the forecast."""
    next_ds: int
    next_low: float | None
    next_mid: float | None
    next_high: float | None
    """What was expected, after this row, of the next one."""


@dataclass(frozen=True)
class Reign:
    """A version that was live from `since` (seconds since 1970)."""

    version: int
    since: float
    seq: int
    """The last row before it."""
    why: str


class History:
    """Use one object from one thread; any number of them may read while one writes."""

    def __init__(self, path: str | Path, *, keep: int = KEEP_ROWS):
        self.path = Path(path)
        self._keep = keep
        try:
            self._db = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise UserError(f"'{path}' cannot be used as the history of the streams: {error}") from error
        self._counts: dict[str, int] = dict(self._db.execute("SELECT unique_id, count(*) FROM rows GROUP BY unique_id"))
        self.last = self._last()

    def _last(self) -> int:
        return max(self._db.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0], int(self._fact("cut") or 0))

    # Writing.

    def resume(self, receipt: int | None) -> None:
        """Cut off what was written after `receipt`, the last row of the last committed batch."""
        if receipt is not None and receipt < self.last:
            gone = self._db.execute("SELECT unique_id, count(*) FROM rows WHERE seq > ? GROUP BY unique_id", (receipt,)).fetchall()
            self._db.execute("DELETE FROM rows WHERE seq > ?", (receipt,))
            for name, count in gone:
                self._counts[name] -= count
            self.last = receipt

    def append(self, rows: Sequence[HistoryRow], forget: Iterable[str] = ()) -> int:
        """The rows of one batch, durable when this returns; streams in `forget` lose theirs first. Returns the receipt."""
        forget = list(forget)
        if not rows and not forget:
            return self.last
        first = self.last + 1
        with self._transaction():
            for name in forget:
                self._db.execute("DELETE FROM rows WHERE unique_id = ?", (name,))
                self._counts.pop(name, None)
            self._db.executemany(f"INSERT INTO rows VALUES ({', '.join('?' * 13)})", ((first + i, *row) for i, row in enumerate(rows)))
            self.last += len(rows)
            for row in rows:
                self._counts[row.unique_id] = self._counts.get(row.unique_id, 0) + 1
            for name in {row.unique_id for row in rows}:
                if self._counts[name] > self._keep + self._keep // SLACK:
                    self._cut(name)
            if not self._counts:  # numbers never go back, even when every row is gone
                self._remember("cut", self.last)
        return self.last

    def _cut(self, name: str) -> None:
        query = "SELECT seq FROM rows WHERE unique_id = ? ORDER BY seq DESC LIMIT 1 OFFSET ?"
        (border,) = self._db.execute(query, (name, self._keep)).fetchone()
        self._counts[name] -= self._db.execute("DELETE FROM rows WHERE unique_id = ? AND seq <= ?", (name, border)).rowcount
        if border > int(self._fact("cut") or 0):
            self._remember("cut", border)

    def crown(self, version: int, why: str) -> None:
        self._db.execute("INSERT INTO champions (version, since, seq, why) VALUES (?, ?, ?, ?)", (version, time.time(), self.last, why))

    def _remember(self, name: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def _transaction(self) -> sqlite3.Connection:
        self._db.execute("BEGIN IMMEDIATE")
        return self._db  # commits at the end of the block, or rolls back

    # Reading.

    def _fact(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    @property
    def cut(self) -> int:
        """Some row up to this number is gone: a memory that stands before it cannot catch up, it must be made anew."""
        return int(self._fact("cut") or 0)

    def champions(self) -> list[Reign]:
        return [Reign(*row) for row in self._db.execute("SELECT version, since, seq, why FROM champions ORDER BY id")]

    def rows(self, unique_id: str, limit: int, *, alarms_only: bool = False) -> list[HistoryRow]:
        """The newest rows of a stream, oldest first."""
        where = "AND alarms IS NOT NULL" if alarms_only else ""
        query = f"SELECT * FROM rows WHERE unique_id = ? {where} ORDER BY seq DESC LIMIT ?"
        return [HistoryRow(*row[1:]) for row in reversed(self._db.execute(query, (unique_id, limit)).fetchall())]

    def newest(self) -> list[tuple[HistoryRow, int, int]]:
        """The last row of every stream, how many rows are kept of it, and how many of them have alarms."""
        query = (
            "SELECT r.*, s.count, s.alarmed FROM rows r JOIN (SELECT unique_id, max(seq) AS seq, count(*) AS count, count(alarms) AS alarmed "
            "FROM rows GROUP BY unique_id) s ON r.seq = s.seq ORDER BY r.unique_id"
        )
        return [(HistoryRow(*row[1:13]), row[13], row[14]) for row in self._db.execute(query)]

    def after(self, seq: int, limit: int) -> list[tuple[int, HistoryRow]]:
        """Rows with higher numbers, in order."""
        query = "SELECT * FROM rows WHERE seq > ? ORDER BY seq LIMIT ?"
        return [(row[0], HistoryRow(*row[1:])) for row in self._db.execute(query, (seq, limit))]

    def size(self, unique_id: str) -> int:
        return self._counts.get(unique_id, 0)

    def close(self) -> None:
        self._db.close()


class HistorySource:
    """The rows of a history, for a stream worker: from any position, and then as the service appends them."""

    ended = False

    def __init__(self, path: str | Path):
        self._history = History(path)
        self._seq = 0
        self.taken: list[HistoryRow] = []
        """The rows of the last poll, with what the service had expected."""

    def poll(self, max_records: int, timeout: float) -> Batch:
        deadline = time.monotonic() + timeout
        while True:
            rows = self._history.after(self._seq, max_records)
            if rows or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        self.taken = [row for _, row in rows]
        if rows:
            self._seq = rows[-1][0]
        return Batch([Record(row.unique_id, row.ds, math.nan if row.y is None else row.y, None, PARTITION, seq) for seq, row in rows], [])

    def positions(self) -> Positions:
        return {PARTITION: self._seq}

    def seek(self, positions: Positions) -> None:
        self._seq = int(positions.get(PARTITION, 0))

    def commit(self, positions: Positions) -> None:
        return None

    def lag(self) -> int | None:
        return self._history._last() - self._seq

    def close(self) -> None:
        self._history.close()
