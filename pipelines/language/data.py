"""Text files become a corpus: every document's tokens one after another in a memory-mapped file, and rows for training cut from it.

A document is `<start>`, its tokens, `<end>`. Training rows hold whole documents, or parts of long ones, and every document begins with a fresh
memory; its beginning lies on a multiple of GRAIN tokens, so that rows with different boundaries still share their calls (the places between
are padding that nothing learns from). What a row holds is a pure function of corpus, settings and step: the position in the data is a number.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from connectors.errors import UserError
from titans_core import tokenizers
from titans_core.generation import END, START
from titans_core.tokenizers import TokenError, Tokenizer

FORMAT = 1
GRAIN = 32  # tokens; half of it is lost to padding at each document on average
IGNORED = -100  # target of a place that has none
_SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")
Executor = Literal["local", "ray"]


def text_files(paths: Sequence[str]) -> list[str]:
    """`paths` with each folder replaced by the text files in it, sorted; a folder without any is a UserError."""
    found = []
    for path in paths:
        if not os.path.isdir(path):
            found.append(path)
            continue
        inside = sorted(str(file) for file in Path(path).rglob("*") if file.is_file() and file.name.removesuffix(".gz").endswith(_SUFFIXES))
        if not inside:
            raise UserError(f"the folder '{path}' holds no text file: they end in {', '.join(_SUFFIXES)} (or the same and .gz)")
        found += inside
    return found


def documents(path: str | os.PathLike[str], column: str = "text") -> Iterator[str]:
    """The documents of a file, in order: a .txt or .md file is one, .jsonl and .parquet hold one a row in `column`; .gz is read through.

    Raises UserError naming the file, and the line or row, for an unknown form, a missing column and text that is not UTF-8.
    """
    path = Path(path)
    name = path.name.removesuffix(".gz")
    if not path.is_file():
        raise UserError(f"there is no file '{path}'")
    if not name.endswith(_SUFFIXES):
        raise UserError(f"cannot read '{path}': text files end in {', '.join(_SUFFIXES)} (or the same and .gz)")
    if name.endswith(".parquet"):
        yield from _parquet(path, column)
        return
    with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as file:
        try:
            if name.endswith((".txt", ".md")):
                yield file.read().decode()
                return
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"'{path}' line {number} is no JSON document: {error}") from None
                if not isinstance(row, dict) or not isinstance(row.get(column), str):
                    held = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                    raise UserError(f"'{path}' line {number} has no text in '{column}' (it has {held}): say --column")
                yield row[column]
        except UnicodeDecodeError as error:
            raise UserError(f"'{path}' is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
        except (OSError, EOFError) as error:
            raise UserError(f"cannot read '{path}': {error}") from None


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"cannot read '{path}': {str(error).splitlines()[0]}") from None
    with file:
        if column not in file.schema_arrow.names:
            raise UserError(f"'{path}' has no column '{column}'; it has {', '.join(file.schema_arrow.names)}")
        row = 0
        for batch in file.iter_batches(columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                if not isinstance(text, str):
                    raise UserError(f"'{path}' row {row} has no text in '{column}'")
                yield text


@dataclass(frozen=True)
class Corpus:
    """Packed documents: document i is tokens[offsets[i]:offsets[i + 1]], <start> and <end> included.

    sizes: (n,) bytes of each document's text; digest: SHA-256 of tokens and offsets, 16 hexadecimal digits.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tokenizer: Tokenizer
    digest: str

    def __len__(self) -> int:
        return len(self.sizes)

    def document(self, index: int) -> NDArray[np.int64]:
        return np.asarray(self.tokens[self.offsets[index] : self.offsets[index + 1]], np.int64)


def pack(
    inputs: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str], tokenizer: Tokenizer, *,
    column: str = "text", executor: Executor = "local",
) -> Corpus:  # fmt: skip
    """Tokenise files into a corpus in `folder`, in this process or on Ray (a task a file; the result is the same to the bit).

    An existing corpus in the folder is replaced, as a whole. Empty documents are left out. Raises UserError where no document is left.
    """
    if not inputs:
        raise UserError("no text file is named")
    for special in (START, END):
        if special not in tokenizer.specials:
            raise UserError(f"the tokeniser has no {special} token")
    folder = Path(folder)
    new = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        parts = [(os.fspath(path), str(new / f"part-{i:05d}"), tokenizer.to_json(), column) for i, path in enumerate(inputs)]
        counts = list(_on_ray(parts) if executor == "ray" else (_encode(*part) for part in parts))
        lengths = np.concatenate([np.asarray(each[0], np.int64) for each in counts])
        sizes = np.concatenate([np.asarray(each[1], np.int64) for each in counts])
        if len(lengths) == 0:
            raise UserError(f"no document in {', '.join(os.fspath(path) for path in inputs)}")
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        digest = hashlib.sha256(offsets.tobytes())
        with open(new / "tokens.bin", "wb") as out:
            for _, part, _, _ in parts:
                with open(part, "rb") as file:
                    while block := file.read(1 << 22):
                        digest.update(block)
                        out.write(block)
                os.unlink(part)
            out.flush()
            os.fsync(out.fileno())
        np.save(new / "documents.npy", np.stack([offsets[:-1], offsets[1:], sizes]))
        facts = {"format": FORMAT, "digest": digest.hexdigest()[:16], "type": _type(tokenizer).name, "tokenizer": tokenizer.to_json()}
        (new / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
        if (folder / "corpus.json").exists():
            shutil.rmtree(folder)
        elif folder.exists():
            folder.rmdir()  # an empty folder of the caller; one that holds other things is not ours to remove
        os.replace(new, folder)
    except OSError as error:
        raise UserError(f"cannot write the corpus to '{folder}': {error.strerror}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return open_corpus(folder)


def open_corpus(folder: str | os.PathLike[str]) -> Corpus:
    """The corpus that `pack` wrote: tokens stay on disk. Raises UserError where there is none."""
    folder = Path(folder)
    try:
        facts = json.loads((folder / "corpus.json").read_text())
        if facts["format"] != FORMAT:
            raise UserError(f"the corpus in '{folder}' has format {facts['format']}, this program reads {FORMAT}: pack it again")
        starts, ends, sizes = np.load(folder / "documents.npy", allow_pickle=False)
        tokens = np.memmap(folder / "tokens.bin", np.dtype(facts["type"]), mode="r")
    except (OSError, KeyError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"'{folder}' holds no corpus: {error}") from None
    if len(tokens) != ends[-1]:
        raise UserError(f"the corpus in '{folder}' holds {len(tokens)} tokens and should hold {ends[-1]}: pack it again")
    tokenizer = tokenizers.from_json(facts["tokenizer"])
    return Corpus(tokens, np.concatenate((starts[:1], ends)), sizes, tokenizer, facts["digest"])


def _type(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)


def _encode(path: str, part: str, tokenizer: str, column: str) -> tuple[list[int], list[int]]:
    """One file's documents as tokens in a file of their own; the numbers of tokens and of bytes of each."""
    encoder = tokenizers.from_json(tokenizer)
    kind = _type(encoder)
    start, end = (np.array([encoder.specials[name]], kind) for name in (START, END))
    lengths, sizes = [], []
    with open(part, "wb") as out:
        for number, text in enumerate(documents(path, column), 1):
            try:
                ids = encoder.encode(text)
            except TokenError as error:
                raise UserError(f"'{path}' document {number}: {error}") from None
            if len(ids) == 0:
                continue
            for piece in (start, ids.astype(kind), end):
                out.write(piece.tobytes())
            lengths.append(len(ids) + 2)
            sizes.append(len(text.encode()))
    return lengths, sizes


def _on_ray(parts: Sequence[tuple[str, str, str, str]]) -> list[tuple[list[int], list[int]]]:
    """One task a file; the folder must be one that all nodes see."""
    from pipelines.windows import ray_cluster

    ray_cluster()
    import ray

    task = ray.remote(num_cpus=1)(_encode)
    try:
        return list(ray.get([task.remote(*part) for part in parts]))
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None


class Batch(NamedTuple):
    """Rows for one step, all (B, T): tokens int64; targets int64, IGNORED where there is none; starts, true at a document's beginning."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    starts: NDArray[np.bool_]


class _Part(NamedTuple):
    """`length` pairs of token and next token from `at` on, at column `column` of a row."""

    at: int
    length: int
    column: int
    begins: bool


class Lanes:
    """Rows of `context` tokens, `rows` at a step, that go through the corpus again and again, each epoch in another order.

    Documents are cut into stretches of at most `stretch` contexts. A stretch longer than a context fills consecutive rows of one lane, so that
    a memory carried from step to step reads it through; every stretch begins afresh. Shorter ones share rows. With a stretch of 1 nothing
    is carried.
    """

    def __init__(self, corpus: Corpus, *, context: int, rows: int, seed: int, stretch: int = 1) -> None:
        if context % GRAIN:
            raise UserError(f"context {context} must be a multiple of {GRAIN}")
        self.corpus, self.context, self.rows, self.seed = corpus, context, rows, seed
        pairs = np.diff(corpus.offsets) - 1
        most = stretch * context
        self._stretches = [
            (int(start) + at, min(most, int(count) - at))
            for start, count in zip(corpus.offsets[:-1], pairs, strict=True)
            for at in range(0, int(count), most)
        ]
        self._ends = [0]
        self._layout = lru_cache(maxsize=2)(self._lay_out)  # an epoch and, around its end, the next
        if len(self._layout(0)) == 0:
            raise UserError(
                f"{int(pairs.sum())} tokens do not fill {rows} rows of {context}: give more text, or lower --rows or --context"
            )

    def epoch(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the step within it."""
        while self._ends[-1] <= step:
            self._ends.append(self._ends[-1] + max(len(self._layout(len(self._ends) - 1)), 1))
        epoch = int(np.searchsorted(self._ends, step, side="right")) - 1
        return epoch, step - self._ends[epoch]

    def batch(self, step: int) -> Batch:
        """The rows of a step."""
        epoch, within = self.epoch(step)
        layout = self._layout(epoch)
        shape = (self.rows, self.context)
        tokens, targets, starts = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64), np.zeros(shape, bool)
        for lane, row in enumerate(layout[within] if within < len(layout) else []):
            for part in row:
                held = self.corpus.tokens[part.at : part.at + part.length + 1].astype(np.int64)
                columns = slice(part.column, part.column + part.length)
                tokens[lane, columns], targets[lane, columns] = held[:-1], held[1:]
                starts[lane, part.column] = part.begins
        return Batch(tokens, targets, starts)

    def _lay_out(self, epoch: int) -> list[list[list[_Part]]]:
        """The rows of every step of an epoch; what does not fill all lanes to the end is left for another epoch."""
        choose, width = np.random.default_rng((self.seed, epoch)), self.context
        order = [self._stretches[i] for i in choose.permutation(len(self._stretches))]
        short = deque(each for each in order if each[1] < width)

        def fill(row: list[_Part]) -> list[_Part]:
            used = row[-1].column + row[-1].length if row else 0
            used = -(-used // GRAIN) * GRAIN
            while short and used + short[0][1] <= width:
                at, length = short.popleft()
                row.append(_Part(at, length, used, True))
                used = -(-(used + length) // GRAIN) * GRAIN
            return row

        chains = [
            [fill([_Part(at + i, min(width, length - i), 0, i == 0)]) for i in range(0, length, width)] for at, length in order if length >= width
        ]
        while short:
            chains.append([fill([])])
        lanes: list[list[list[_Part]]] = [[] for _ in range(self.rows)]
        shortest = [(0, lane) for lane in range(self.rows)]
        for index in choose.permutation(len(chains)):
            filled, lane = heapq.heappop(shortest)
            lanes[lane] += chains[index]
            heapq.heappush(shortest, (filled + len(chains[index]), lane))
        return [list(rows) for rows in zip(*lanes, strict=False)]
