"""Offsets, output receipts and recoverable state in one transaction (SQLite, WAL, synchronous=FULL).

What one commit holds, all or nothing:

- `done`: the last batch whose outputs stand in the sinks, with the sinks' receipts and the counters;
- snapshots: the state of some streams as it was after that batch;
- the journal: the arrivals of the next batch, written before that batch is worked on, and what each batch taught
  the memories, kept as far back as the oldest snapshot that needs it;
- the positions of the source after the journalled arrivals.

A restart loads the snapshots, replays the journal with the outputs switched off, and stands exactly at `done`; the
journalled next batch is then worked on with the same composition as before the crash.

Only the newest worker may commit: `claim` hands out a growing epoch and every commit checks it (fencing), so a worker
that was believed dead and wakes up again can change nothing. State and journal are opaque bytes to this module.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.errors import UserError

FORMAT_VERSION = 1
# A backup or another reader may hold the file for a moment; longer than this and something is wrong.
LOCK_SECONDS = 30.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    id INTEGER PRIMARY KEY CHECK (id = 1), format INTEGER NOT NULL, epoch INTEGER NOT NULL, done INTEGER NOT NULL,
    positions TEXT NOT NULL, receipts TEXT NOT NULL, counters TEXT NOT NULL, settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (
    unique_id TEXT PRIMARY KEY, batch INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS journal (batch INTEGER PRIMARY KEY, arrivals BLOB NOT NULL, learnt BLOB);
"""


class CheckpointError(UserError):
    """The store cannot be used: locked, full, another format, another run's, or taken over by a newer worker."""


class StaleWorker(CheckpointError):
    """A newer worker has claimed the run; this one must stop."""


@dataclass(frozen=True)
class Progress:
    """Where the run stands. `done` counts batches from 1; 0: nothing was worked on yet."""

    done: int = 0
    positions: dict[str, Any] = field(default_factory=dict)
    receipts: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JournalEntry:
    batch: int
    arrivals: bytes
    learnt: bytes | None
    """None: the batch was accepted but not finished."""


class CheckpointStore:
    """One file, one run. `accept`, `commit` and `settle` may come from any one thread at a time, `read` and `streams` from another one
    meanwhile."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise CheckpointError(f"cannot keep a checkpoint at '{path}': the folder does not exist")
        self.bytes_written = 0
        self.epoch = 0
        try:
            self._db, self._reader = (
                sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False) for _ in range(2)
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
            row = self._db.execute("SELECT format FROM run").fetchone()
        except sqlite3.DatabaseError as error:
            raise self._explain(error) from error
        if row is not None and row[0] != FORMAT_VERSION:
            raise CheckpointError(
                f"the checkpoint '{path}' has format version {row[0]}, this program reads {FORMAT_VERSION}: "
                "use the program that wrote it, or start with a new checkpoint"
            )

    def _explain(self, error: sqlite3.DatabaseError) -> CheckpointError:
        text, where = str(error), f"the checkpoint '{self.path}'"
        if "locked" in text or "busy" in text:
            return CheckpointError(f"{where} has been locked by another program for {LOCK_SECONDS:.0f} s: close it first")
        if "full" in text or "disk I/O" in text:
            return CheckpointError(f"cannot write {where} ({text}): make room or mend the disk and start again; nothing committed is lost")
        if "not a database" in text or "malformed" in text:
            return CheckpointError(f"'{self.path}' is not a checkpoint of this program ({text})")
        return CheckpointError(f"{where} cannot be used: {text}")

    def claim(self, settings: Mapping[str, Any]) -> Progress:
        """Become the one worker of this run; earlier ones are fenced off. Returns where the run stands.

        `settings` are what the state depends on (model version, event-time policy, batch size); a run goes on only
        with the settings it began with. Raises CheckpointError naming the one that differs.
        """
        wanted = json.loads(json.dumps(dict(settings)))
        with self._transaction():
            row = self._db.execute("SELECT epoch, done, positions, receipts, counters, settings FROM run").fetchone()
            if row is None:
                self._db.execute("INSERT INTO run VALUES (1, ?, 1, 0, '{}', '{}', '{}', ?)", (FORMAT_VERSION, json.dumps(wanted)))
                self.epoch = 1
                return Progress(settings=wanted)
            found = json.loads(row[5])
            for name in sorted(set(wanted) | set(found)):
                if wanted.get(name) != found.get(name):
                    before, now = (str(side.get(name)) for side in (found, wanted))
                    values = f"{name} = {before}, now it is {now}" if len(before + now) < 200 else f"another {name}"
                    raise CheckpointError(
                        f"the checkpoint '{self.path}' was made with {values}: use the same, or start with a new checkpoint"
                    )
            self.epoch = row[0] + 1
            self._db.execute("UPDATE run SET epoch = ?", (self.epoch,))
            return Progress(row[1], json.loads(row[2]), json.loads(row[3]), json.loads(row[4]), found)

    def adopt(self, progress: Progress, snapshots: Iterable[tuple[str, bytes]]) -> None:
        """Begin a run where others stopped: their settings, positions, receipts and counters, and streams (unique_id, state) as of before
        the first batch. The store must be new."""
        with self._transaction():
            told = (json.dumps(side) for side in (progress.positions, progress.receipts, progress.counters, progress.settings))
            self._db.execute("INSERT INTO run VALUES (1, ?, 0, 0, ?, ?, ?, ?)", (FORMAT_VERSION, *told))
            self._db.executemany("INSERT INTO snapshots VALUES (?, 0, ?)", snapshots)

    def progress(self) -> Progress | None:
        """Where the run stands, without claiming it; None before the first claim."""
        row = self._db.execute("SELECT done, positions, receipts, counters, settings FROM run").fetchone()
        return None if row is None else Progress(row[0], *(json.loads(text) for text in row[1:]))

    def begin(self, receipts: Mapping[str, Any]) -> None:
        """Where the sinks stood before the first batch: what a crash within that batch takes them back to."""
        with self._transaction():
            self._check_epoch()
            self._db.execute("UPDATE run SET receipts = ?", (json.dumps(dict(receipts)),))

    def accept(self, batch: int, arrivals: bytes, positions: Mapping[str, Any]) -> None:
        """Journal a batch before it is worked on, while no other commit is due."""
        with self._transaction():
            self._check_epoch()
            self._accept(batch, arrivals, positions)

    def commit(
        self,
        done: int,
        *,
        learnt: bytes,
        receipts: Mapping[str, Any],
        counters: Mapping[str, int],
        snapshots: Mapping[str, tuple[int, bytes]],
        keep_from: int,
        following: tuple[bytes, Mapping[str, Any]] | None = None,
    ) -> None:
        """Finish batch `done`; with `following` (arrivals, positions after them) the next batch is accepted as well.

        `snapshots`: unique_id -> (batch, state after that batch). Journal entries before `keep_from` are dropped.
        """
        with self._transaction():
            self._check_epoch()
            updated = self._db.execute("UPDATE journal SET learnt = ? WHERE batch = ?", (learnt, done)).rowcount
            if updated != 1:
                raise CheckpointError(f"batch {done} was never accepted into the journal of '{self.path}'")
            self._db.execute(
                "UPDATE run SET done = ?, receipts = ?, counters = ?",
                (done, json.dumps(dict(receipts)), json.dumps(dict(counters))),
            )
            self._snapshots(snapshots)
            self._db.execute("DELETE FROM journal WHERE batch < ?", (keep_from,))
            if following is not None:
                self._accept(done + 1, *following)
        self.bytes_written += len(learnt) + sum(len(state) for _, state in snapshots.values())

    def settle(self, snapshots: Mapping[str, tuple[int, bytes]]) -> None:
        """At a graceful stop: the snapshots of all changed streams, after which no journal is needed."""
        with self._transaction():
            self._check_epoch()
            self._snapshots(snapshots)
            self._db.execute("DELETE FROM journal WHERE learnt IS NOT NULL")
        self.bytes_written += sum(len(state) for _, state in snapshots.values())

    def _snapshots(self, snapshots: Mapping[str, tuple[int, bytes]]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)",
            ((unique_id, batch, state) for unique_id, (batch, state) in snapshots.items()),
        )

    def _accept(self, batch: int, arrivals: bytes, positions: Mapping[str, Any]) -> None:
        self._db.execute("INSERT INTO journal VALUES (?, ?, NULL)", (batch, arrivals))
        self._db.execute("UPDATE run SET positions = ?", (json.dumps(dict(positions)),))
        self.bytes_written += len(arrivals)

    def _check_epoch(self) -> None:
        row = self._db.execute("SELECT epoch FROM run").fetchone()
        if row is None or row[0] != self.epoch:
            newest = None if row is None else row[0]
            raise StaleWorker(f"a newer worker (epoch {newest}) has taken over '{self.path}'; this one is {self.epoch}")

    def journal(self) -> list[JournalEntry]:
        """All kept batches in order; the last may be unfinished."""
        rows = self._db.execute("SELECT batch, arrivals, learnt FROM journal ORDER BY batch")
        return [JournalEntry(*row) for row in rows]

    def read(self, unique_id: str) -> tuple[int, bytes] | None:
        """The snapshot of one stream: the batch after which it was taken, and its bytes."""
        row = self._reader.execute("SELECT batch, state FROM snapshots WHERE unique_id = ?", (unique_id,)).fetchone()
        return None if row is None else (row[0], row[1])

    def read_many(self, unique_ids: Sequence[str]) -> dict[str, tuple[int, bytes]]:
        """`read` for many streams at once; those without a snapshot are left out."""
        rows = self._reader.execute(
            "SELECT unique_id, batch, state FROM snapshots WHERE unique_id IN (SELECT value FROM json_each(?))", (json.dumps(list(unique_ids)),)
        )
        return {name: (batch, state) for name, batch, state in rows}

    def streams(self) -> Iterator[tuple[str, int, int]]:
        """(unique_id, batch of the snapshot, bytes) of every stream with a snapshot, by name."""
        yield from self._reader.execute("SELECT unique_id, batch, length(state) FROM snapshots ORDER BY unique_id")

    def forget(self, unique_ids: Sequence[str]) -> int:
        """Drop the snapshots of some streams, so that they begin anew; returns how many were there.

        Only between runs: the journal must be empty (as after a graceful stop), or a replay would bring them back.
        """
        with self._transaction():
            waiting = self._db.execute("SELECT count(*) FROM journal").fetchone()[0]
            if waiting:
                raise CheckpointError(
                    f"'{self.path}' holds {waiting} batches that are not yet part of the snapshots (the worker was "
                    "killed or still runs): let it run to a graceful stop first"
                )
            before = self._db.total_changes
            self._db.executemany("DELETE FROM snapshots WHERE unique_id = ?", ((name,) for name in unique_ids))
            # A worker that still runs holds these streams in memory; it must not write them back.
            dropped = self._db.total_changes - before
            self._db.execute("UPDATE run SET epoch = epoch + 1")
            return dropped

    def _transaction(self) -> _Transaction:
        return _Transaction(self)

    def close(self) -> None:
        self._reader.close()
        self._db.close()


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK on any error; SQLite's errors become lines a person can act on."""

    def __init__(self, store: CheckpointStore):
        self._store = store

    def __enter__(self) -> None:
        try:
            self._store._db.execute("BEGIN IMMEDIATE")
        except sqlite3.DatabaseError as error:
            raise self._store._explain(error) from error

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        db = self._store._db
        try:
            if error is None:
                db.execute("COMMIT")
                return
        except sqlite3.DatabaseError as failed:
            error = failed
        if db.in_transaction:
            db.execute("ROLLBACK")
        if isinstance(error, sqlite3.DatabaseError):
            raise self._store._explain(error) from error
