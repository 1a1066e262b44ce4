"""Sequencing reads as a live source: a FASTQ file (whole, or followed while it grows), a pipe, or standard input.

The protocol is `Source`'s, with reads in the place of rows. Memory is one block of the file, the reads in it, and one batch.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from connectors.errors import UserError
from connectors.sequences import BLOCK, AnyRecord, Bytes, FastqPlace, Report, SequenceError, after_lines, detect, fastq_stream
from connectors.streams.base import DeadLetter, Positions, dead_letter
from connectors.streams.files import HEAD_BYTES, digest_of_head

# What a batch may hold beside its number of reads: long reads make short batches.
MAX_BATCH_BASES = 1 << 22
# No sequencer makes a longer read; text that goes on without one is no FASTQ, and must not fill the memory.
MAX_READ_BYTES = 1 << 26


@dataclass
class ReadBatch:
    records: list[AnyRecord]
    dead: list[DeadLetter]

    def __len__(self) -> int:
        return len(self.records) + len(self.dead)


class ReadSource:
    """Reads in the order of the file. Position: the line at which a block of reads began, and how many of them were handed out.

    A file is known again by the hash of its first bytes. A pipe and standard input cannot be rewound: reading goes on with what comes
    next, and only what was handed out and journalled before is safe.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        self.path, self.follow, self.ended = path, follow, False
        self.partition = "stdin" if path == "-" else Path(path).name
        self._pipe = path == "-" or (os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode))
        self.report = Report("standard input" if path == "-" else path, "fastq")
        self._fd = -1 if not self._pipe else sys.stdin.buffer.fileno() if path == "-" else os.open(path, os.O_RDONLY)
        self._bytes: Bytes | None = None
        self._head = (0, "")
        self._begin(FastqPlace())

    def _begin(self, place: FastqPlace) -> None:
        """Read on from a place; the reads before it are passed over."""
        self._place, self._start, self._taken = place, replace(place), [0, 0]
        self._skip = [0, 0]  # good and bad reads still to be passed over
        self._records: deque[AnyRecord] = deque()
        self._dead: deque[DeadLetter] = deque()
        self._idle, self._waiting = False, 0
        if self._pipe:
            blocks = self._from_pipe()
        else:
            if self._bytes is not None:
                self._bytes.close()
            self._bytes = Bytes(self.path)
            if self.follow and self._bytes.compressed:
                raise UserError(f"cannot follow '{self.path}': a compressed file does not grow by lines")
            self._refuse_other(self._bytes.peek(BLOCK))
            blocks = after_lines(self._from_file(self._bytes), place.line - 1)
        self._batches = fastq_stream(blocks, self.report, place, self._bad)

    def _refuse_other(self, head: bytes) -> None:
        kind = detect(head, self.report.file)
        if kind not in ("fastq", None):
            raise SequenceError(self.report.file, f"looks like {kind.upper()}, expected FASTQ", line=1)

    def _from_file(self, stream: Bytes) -> Iterator[bytes]:
        while True:
            data = stream.read()
            self._idle = not data
            if data or self.follow:
                yield data
            else:
                return

    def _from_pipe(self) -> Iterator[bytes]:
        first = True
        while True:
            if not select.select([self._fd], [], [], 0)[0]:
                self._idle = True
                yield b""
                continue
            data = os.read(self._fd, BLOCK)
            if not data:
                return
            if first:
                self._refuse_other(data)
            first = self._idle = False
            yield data

    def _bad(self, reason: str, *, record: int, id: str, line: int, text: bytes) -> None:
        self._dead.append(dead_letter("malformed", f"record {record} (`{id}`): {reason}", self.partition, line, text))

    def _next_block(self) -> None:
        """The reads of the next block become those at hand."""
        self._start, self._taken = replace(self._place), [0, 0]
        before = self._place.line
        self._records.extend(next(self._batches))
        self._waiting = 0 if self._place.line != before else self._waiting + BLOCK * (not self._idle)
        if self._waiting > MAX_READ_BYTES:
            reason = f"no read ends within {MAX_READ_BYTES >> 20} MiB: this is no FASTQ, or it is damaged here"
            raise SequenceError(self.report.file, reason, record=self._place.number + 1, line=self._place.line)
        queues: tuple[deque[Any], deque[Any]] = (self._records, self._dead)
        for which, queue in enumerate(queues):
            while self._skip[which] and queue:
                queue.popleft()
                self._skip[which] -= 1
                self._taken[which] += 1

    def poll(self, max_records: int, timeout: float) -> ReadBatch:
        """At most `max_records` reads and about four million bases; waits up to `timeout` seconds for the first."""
        batch, bases = ReadBatch([], []), 0
        deadline = time.monotonic() + timeout
        while len(batch) < max_records and bases < MAX_BATCH_BASES:
            if self._records:
                batch.records.append(self._records.popleft())
                bases += len(batch.records[-1].sequence)
                self._taken[0] += 1
            elif self._dead:
                batch.dead.append(self._dead.popleft())
                self._taken[1] += 1
            else:
                try:
                    self._next_block()
                except StopIteration:
                    self.ended = True
                    break
                if not self._records and not self._dead and self._idle:
                    if len(batch) or time.monotonic() >= deadline:
                        break
                    time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
        return batch

    def positions(self) -> Positions:
        place = self._start
        # What was passed over in blocks before this one has been handed out, too; what is still to be, has not been read.
        good, bad = (taken + skip for taken, skip in zip(self._taken, self._skip, strict=True))
        found: dict[str, Any] = {"line": place.line, "record": place.number, "lost": place.lost, "good": good, "bad": bad}
        if self._bytes is not None:
            found["bytes"] = 0 if self._bytes.compressed else self._bytes.done
            if self._head[0] < HEAD_BYTES:
                self._head = digest_of_head(Path(self.path))
            found["head"] = list(self._head)
        return {self.partition: found}

    def seek(self, positions: Positions) -> None:
        place = positions.get(self.partition)
        if place is None:
            raise UserError(f"the checkpoint belongs to {sorted(positions)}, not to '{self.partition}': use another checkpoint")
        if self._pipe:
            self._place.number, self._place.line = place["record"] + place["good"] + place["bad"], place["line"]
            return
        length, digest = place["head"]
        if digest_of_head(Path(self.path), length) != (length, digest) or os.stat(self.path).st_size < place["bytes"]:
            raise UserError(
                f"'{self.path}' is not the file the checkpoint was made with (it stopped at line {place['line']}): "
                "put that file back, or start with a new checkpoint"
            )
        self._begin(FastqPlace(place["record"], place["line"], place["lost"]))
        self._skip = [place["good"], place["bad"]]
        self.ended = False

    def commit(self, positions: Positions) -> None:
        return None

    def lag(self) -> int | None:
        return None

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes.close()
        if self._pipe and self.path != "-":
            os.close(self._fd)
