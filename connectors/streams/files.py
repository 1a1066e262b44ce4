"""Files and standard input as sources (NDJSON, CSV; whole or followed like `tail -F`), files as sinks."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import os
import select
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import polars as pl

from connectors.errors import UserError
from connectors.streams.base import MAX_RECORD_BYTES, TIME_FORMAT, Batch, DeadLetter, Decoder, Positions, Record, Records, long_rows, to_ndjson
from connectors.tables import sync_folder

READ_BYTES = 1 << 18
HEAD_BYTES = 256
FORMS = {".ndjson": "json", ".jsonl": "json", ".json": "json", ".csv": "csv"}


class LineBuffer:
    """Bytes in, whole lines out. Of an overlong line only a head is kept, one byte longer than a record may be."""

    def __init__(self) -> None:
        self.lines: deque[tuple[bytes, int]] = deque()
        self.rest = b""
        self.dropped = 0

    def add(self, chunk: bytes) -> None:
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        for line in whole:
            self.lines.append((line, len(line) + 1 + self.dropped))
            self.dropped = 0
        if len(self.rest) > MAX_RECORD_BYTES + 1:
            self.dropped += len(self.rest) - MAX_RECORD_BYTES - 1
            self.rest = self.rest[: MAX_RECORD_BYTES + 1]

    def take(self) -> tuple[bytes, int] | None:
        """A line and the number of bytes it took in the input, its end included."""
        return self.lines.popleft() if self.lines else None

    def take_rest(self) -> tuple[bytes, int] | None:
        """What stands after the last line end, once no more will come."""
        if not self.rest:
            return None
        rest, length = self.rest, len(self.rest) + self.dropped
        self.rest, self.dropped = b"", 0
        return rest, length


def _digest(head: bytes) -> tuple[int, str]:
    return len(head), hashlib.sha256(head).hexdigest()[:16]


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"'{path}' is no whole gzip file ({error}): write it again, or decompress it and stream what is whole")


def digest_of_head(path: Path, length: int = HEAD_BYTES) -> tuple[int, str]:
    """Length and hash of the first bytes of a file: they tell it from another one at the same path."""
    with open(path, "rb") as file:
        return _digest(file.read(length))


class FileSource:
    """Lines of one file, in order. With `follow` it waits for more, and goes on in the new file after a rotation.

    Position: `{"byte": ..., "line": ..., "inode": ..., "head": hash of the first bytes}`. The identity of a file is
    its inode, or, when a copy was moved here, the hash of its head; a file renamed beside the path (`x.log.1`) is
    found again after a restart and read to its end first.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Mapping[str, str | None] | None = None,
        count_steps: bool = False,
        follow: bool = False,
    ):
        self.path = Path(path)
        self.follow = follow
        self.ended = False
        suffixes = [s for s in self.path.suffixes if s != ".gz"]
        form = FORMS.get(suffixes[-1]) if suffixes else None
        if form is None:
            raise UserError(f"cannot tell the form of '{self.path}': use .csv, .ndjson or .jsonl (or these with .gz)")
        if not self.path.exists():
            raise UserError(f"'{self.path}' does not exist")
        if self.path.is_dir():
            raise UserError(f"'{self.path}' is a folder: name a file")
        if follow and self.path.suffix == ".gz":
            raise UserError(f"cannot follow '{self.path}': a compressed file does not grow by lines")
        self.decoder = Decoder(form, columns, count_steps=count_steps)
        self.partition = self.path.name
        self._open(self.path)

    # One open file: handle, identity, and the lines read but not yet handed out.

    def _open(self, path: Path) -> None:
        self.handle: BinaryIO = cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")
        self.inode = os.fstat(self.handle.fileno()).st_ino
        self.byte = self.line = 0
        self.lines = LineBuffer()
        self.head = (0, "")
        self._refresh_head()
        if self.decoder.form == "csv":
            self.decoder.header = None
            self._try_header()

    def _refresh_head(self) -> None:
        """Length and hash of the first bytes: they tell this file from another one at the same path."""
        if self.head[0] == HEAD_BYTES:
            return
        if isinstance(self.handle, gzip.GzipFile):
            if self.byte == 0:  # going back would decompress everything again
                try:
                    self.head = _digest(self.handle.read(HEAD_BYTES))
                    self.handle.seek(0)
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise _damaged(self.path, error) from None
        else:
            self.head = _digest(os.pread(self.handle.fileno(), HEAD_BYTES, 0))

    def _try_header(self) -> bool:
        if self.decoder.header is not None or self.decoder.form != "csv":
            return True
        line = self._next_line()
        if line is None:
            if not self.follow:
                raise UserError(f"'{self.path}' is empty: a CSV stream needs a header line")
            return False
        self.decoder.set_header(line)
        return True

    def _next_line(self) -> bytes | None:
        """The next whole line without its end; None when there is none yet. The last line of a file that is not
        followed counts even without a line end."""
        while True:
            found = self.lines.take()
            if found is None:
                try:
                    chunk = self.handle.read(READ_BYTES)
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise _damaged(self.path, error) from None
                if chunk:
                    self.lines.add(chunk)
                    continue
                if self.follow or (found := self.lines.take_rest()) is None:
                    return None
            line, length = found
            self.byte += length
            self.line += 1
            return line.removesuffix(b"\r")

    def _rotated(self) -> bool:
        """True after moving to a new file at the path (renamed away, or truncated in place)."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return False  # between rename and re-creation
        if now.st_ino != self.inode or now.st_size < self.byte:
            self.handle.close()
            self._open(self.path)
            return True
        return False

    def poll(self, max_records: int, timeout: float) -> Batch:
        taken: list[Records] = []
        dead: list[DeadLetter] = []
        lines: list[tuple[bytes, int]] = []
        count = 0
        deadline = time.monotonic() + timeout
        while count < max_records:
            line = self._next_line() if self._try_header() else None
            if line is not None:
                if line.strip():
                    lines.append((line, self.line))
                    count += 1
                continue
            if not self.follow:
                self.ended = True
                break
            self._decode(lines, taken, dead)  # before a new file with another header comes
            if self._rotated():
                continue
            if count or time.monotonic() >= deadline:
                break
            time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
        self._decode(lines, taken, dead)
        return Batch(cast(list[Record], Records.join(taken)) if taken else [], dead)

    def _decode(self, lines: list[tuple[bytes, int]], taken: list[Records], dead: list[DeadLetter]) -> None:
        if lines:
            numbers = np.array([number for _, number in lines], dtype=np.int64)
            partition = np.zeros(len(lines), dtype=np.int32)
            good, bad, _ = self.decoder.decode_all([line for line, _ in lines], [self.partition], partition, numbers)
            taken.append(good)
            dead += bad
            lines.clear()

    def positions(self) -> Positions:
        self._refresh_head()
        return {self.partition: {"byte": self.byte, "line": self.line, "inode": self.inode, "head": list(self.head)}}

    def seek(self, positions: Positions) -> None:
        place = positions.get(self.partition)
        if place is None:
            raise UserError(f"the checkpoint belongs to {sorted(positions)}, not to '{self.partition}': use another checkpoint")
        candidates = [self.path, *sorted(p for p in self.path.parent.glob(self.path.name + ".*") if p.is_file())]
        for wanted in ("inode", "head"):
            for path in candidates:
                if self._matches(path, place, wanted):
                    self.handle.close()
                    self._open(path)
                    self.handle.seek(place["byte"])
                    self.byte, self.line = place["byte"], place["line"]
                    self.lines = LineBuffer()
                    self.ended = False
                    return
        raise UserError(
            f"'{self.path}' is not the file the checkpoint was made with (it stopped at byte {place['byte']}, "
            f"line {place['line']}): put that file back, or start with a new checkpoint"
        )

    def _matches(self, path: Path, place: dict[str, Any], by: str) -> bool:
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
                length, digest = place["head"]
                same_head = _digest(file.read(length)) == (length, digest)
                whole = path.suffix == ".gz" or os.stat(path).st_size >= place["byte"]
                return same_head and whole and (by == "head" or os.stat(path).st_ino == place["inode"])
        except OSError:
            return False

    def commit(self, positions: Positions) -> None:
        return None

    def lag(self) -> int | None:
        return None

    def close(self) -> None:
        self.handle.close()


class StdinSource:
    """Lines of standard input (NDJSON, or CSV with a header). It cannot be rewound; it ends with its input."""

    def __init__(
        self,
        form: str = "json",
        *,
        columns: Mapping[str, str | None] | None = None,
        count_steps: bool = False,
        handle: Any = None,
    ):
        self.ended = False
        self.decoder = Decoder(form, columns, count_steps=count_steps)
        self.handle = sys.stdin.buffer if handle is None else handle
        self.lines = LineBuffer()
        self.line = 0
        self.closed_input = False

    def _next_line(self, deadline: float) -> bytes | None:
        while (found := self.lines.take()) is None:
            if self.closed_input:
                found = self.lines.take_rest()
                if found is None:
                    self.ended = True
                    return None
                break
            ready, _, _ = select.select([self.handle], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self.handle.fileno(), READ_BYTES)
            self.closed_input = not chunk
            self.lines.add(chunk)
        self.line += 1
        return found[0].removesuffix(b"\r")

    def poll(self, max_records: int, timeout: float) -> Batch:
        batch = Batch([], [])
        deadline = time.monotonic() + timeout
        while len(batch) < max_records:
            line = self._next_line(time.monotonic() if len(batch) else deadline)
            if line is None:
                break
            if not line.strip():
                continue
            if self.decoder.form == "csv" and self.decoder.header is None:
                self.decoder.set_header(line)
                continue
            outcome = self.decoder.decode(line, "stdin", self.line)
            if isinstance(outcome, Record):
                batch.records.append(outcome)
            else:
                batch.dead.append(outcome)
        return batch

    def positions(self) -> Positions:
        return {"stdin": {"line": self.line}}

    def seek(self, positions: Positions) -> None:
        # What was handed out before is in the journal; line numbers go on counting.
        self.line = int(positions.get("stdin", {"line": 0})["line"])

    def commit(self, positions: Positions) -> None:
        return None

    def lag(self) -> int | None:
        return None

    def close(self) -> None:
        return None


@contextmanager
def _space_for(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write '{path}' ({error.strerror or error}): make room or mend the disk and start again; nothing committed is lost"
        ) from error


class FileSink:
    """Rows appended to one `.csv` or `.ndjson` file. Receipt: the length of the file.

    On `resume` everything after the receipt is cut off, so rows written just before a crash appear once. The file is
    locked: two workers never write to one output.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.form = FORMS.get(self.path.suffix)
        if self.form is None:
            raise UserError(f"cannot write a stream to '{self.path}': use .csv, .ndjson or a folder ending in .parquet")
        if not self.path.parent.is_dir():
            raise UserError(f"cannot write '{self.path}': the folder '{self.path.parent}' does not exist")
        new = not self.path.exists()
        self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.handle)
            raise UserError(f"'{self.path}' is being written by another worker: stop it first") from error
        if new:
            sync_folder(self.path.parent)
        self.length = 0
        self.written = False

    def resume(self, receipt: Any | None) -> None:
        length = 0 if receipt is None else int(receipt)
        size = os.fstat(self.handle).st_size
        if size < length:
            raise UserError(
                f"'{self.path}' has {size} bytes, the checkpoint has committed {length}: "
                "put the file back, name the output that this checkpoint belongs to, or start with a new checkpoint and output"
            )
        if receipt is None and size:
            raise UserError(f"'{self.path}' already holds {size} bytes of another run: choose another output, or use its checkpoint")
        os.ftruncate(self.handle, length)
        os.lseek(self.handle, length, os.SEEK_SET)
        self.length = length

    def write(self, rows: pl.DataFrame) -> None:
        if rows.height == 0:
            return
        rows = long_rows(rows)
        if self.form == "csv":
            data = io.BytesIO()
            rows.write_csv(data, include_header=self.length == 0, datetime_format=TIME_FORMAT)
            text = data.getvalue()
        else:
            text = to_ndjson(rows)
        view = memoryview(text)
        with _space_for(self.path):
            while view:
                view = view[os.write(self.handle, view) :]
        self.length += len(text)
        self.written = True

    def flush(self) -> Any:
        if self.written:
            with _space_for(self.path):
                os.fsync(self.handle)
            self.written = False
        return self.length

    def close(self) -> None:
        os.close(self.handle)


class ParquetSink:
    """Rows as numbered Parquet files in a folder, one a flush; arrays stay arrays. Receipt: the number of the next file.

    A file appears under its name only when whole; on `resume` files from the receipt on are removed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if self.path.is_file():
            raise UserError(f"'{self.path}' is a file: a stream is written to a folder of Parquet files")
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.lock)
            raise UserError(f"'{self.path}' is being written by another worker: stop it first") from error
        self.next = 0
        self.rows: list[pl.DataFrame] = []

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("part-*.parquet"))

    def resume(self, receipt: Any | None) -> None:
        self.next = 0 if receipt is None else int(receipt)
        files = self._files()
        if receipt is None and files:
            raise UserError(f"'{self.path}' already holds {len(files)} files of another run: choose another output, or use its checkpoint")
        numbers = [int(p.stem.removeprefix("part-")) for p in files]
        if sorted(n for n in numbers if n < self.next) != list(range(self.next)):
            raise UserError(
                f"'{self.path}' lacks some of the {self.next} files the checkpoint has committed: "
                "put them back, or start with a new checkpoint and output"
            )
        for number, path in zip(numbers, files, strict=True):
            if number >= self.next:
                path.unlink()
        for path in self.path.glob(".part-*"):
            path.unlink()

    def write(self, rows: pl.DataFrame) -> None:
        if rows.height:
            self.rows.append(rows)

    def flush(self) -> Any:
        if self.rows:
            name = f"part-{self.next:010d}.parquet"
            temporary = self.path / f".{name}"
            with _space_for(self.path):
                # Statistics and strong compression cost more time than they save on short files; so do the threads with which polars
                # writes a file itself.
                whole = io.BytesIO()
                pl.concat(self.rows).write_parquet(whole, compression="lz4", statistics=False)
                with open(temporary, "wb") as file:
                    file.write(whole.getbuffer())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path / name)
                sync_folder(self.path)
            self.rows = []
            self.next += 1
        return self.next

    def close(self) -> None:
        os.close(self.lock)
