"""One door for sequence files: FASTA, FASTQ, GenBank, EMBL, BED or VCF with a genome, TSV and CSV.

    for record in read("reads.fq.gz"):        # path, "-" for standard input, or an open binary file
        record.id, record.sequence, record.quality

What a file is, is decided by its content (after gzip, bgzip, bzip2, xz or zstd, found by their magic bytes), never by
its name alone. Records stream: memory is one block and one record, whatever the length of the file.

Rules that every format shares
    Coordinates are 0-based and half-open, as in BED. Only a region string ("chr1:1-4") is 1-based and closed, as in
    samtools; it is converted at once.
    Bases come out in upper case unless `keep_case` asks otherwise: case means soft masking in one file, nothing in the
    next and the label in a third.
    IUPAC codes (RYSWKMBDHVN), U and the gaps "-" and "." are let through and counted in the report; any other letter
    makes the record bad.
    A bad record stops the reading with a SequenceError that names file, record, line and the last good id. With
    on_bad_record="skip" it is counted, written to the dead-letter file (JSON lines) and the next one is read.
    Ids are data. Nothing here turns one into a file name.

Four-line FASTQ goes through dnaio and annotated records through Biopython; FASTA, wrapped FASTQ and everything that
dnaio refuses are read here, because no library at hand keeps these rules (needletail refuses wrapped FASTQ, pyfastx
ends silently at a truncated read, pysam pads nothing and says nothing). benchmarks/reading.py holds the rates.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import io
import json
import logging
import lzma
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from dnaio import FastqFormatError, SequenceRecord
from dnaio._core import FastqIter
from isal import igzip

from connectors.errors import UserError

log = logging.getLogger(__name__)

Format = Literal["fasta", "fastq", "genbank", "embl", "bed", "vcf", "table"]
Source = str | Path | IO[bytes]

BLOCK = 1 << 16  # bytes a read: what the parsers hold beside one record; fits the second-level cache
# Reads checked at a time: still in the cache when they are handed out, and fewer than make Python collect garbage.
READS = 448
CODES = b"ACGTURYSWKMBDHVN-."  # IUPAC nucleotide codes, U for T in RNA, two ways to write a gap
_UPPER = bytes(range(256)).upper()
_SAME = bytes(range(256))
_BLANK = b"\r\n\t "
_PRINTABLE = bytes(range(33, 127))  # the Phred+33 range
_COMPLEMENT = bytes.maketrans(b"ACGTURYSWKMBDHVNacgturyswkmbdhvn", b"TGCAAYRSWMKVHDBNtgcaayrswmkvhdbn")

_SUFFIXES: dict[str, Format] = {
    **dict.fromkeys(("fa", "fasta", "fna", "ffn", "frn", "mpfa"), "fasta"),
    **dict.fromkeys(("fq", "fastq"), "fastq"),
    **dict.fromkeys(("gb", "gbk", "gbff", "genbank"), "genbank"),
    "embl": "embl",
    "bed": "bed",
    "vcf": "vcf",
    **dict.fromkeys(("tsv", "csv"), "table"),
}
_FOREIGN = {
    b"BAM\x01": "BAM",
    b"CRAM": "CRAM",
    b"@HD\tVN": "SAM",
    b"@SQ\tSN": "SAM",
    b"\x1a\x41\x27\x43": "2bit",
    b"\x43\x27\x41\x1a": "2bit",
    b"BCF\x02": "BCF",
    b"PAR1": "Parquet",
    b"##gff-": "GFF",
    b"%PDF": "PDF",
}


class SequenceError(UserError):
    """A sequence file that cannot be read as asked: file, record (1-based), its id, line (1-based), the last good id."""

    def __init__(self, file: str, reason: str, *, record: int = 0, id: str = "", line: int = 0, last_good: str = "") -> None:
        self.file, self.reason, self.record, self.id, self.line, self.last_good = (
            file,
            reason,
            record,
            id,
            line,
            last_good,
        )
        where = file
        if record:
            where += f": record {record}" + (f" (`{id}`)" if id else "")
        if line:
            where += f", line {line}" if record else f": line {line}"
        tail = f"; last good record: `{last_good}`" if last_good else ("; no good record before it" if record else "")
        super().__init__(f"{where}: {reason}{tail}")


@dataclass(slots=True)
class Record:
    """One sequence. name is the whole header without its mark; qualities (Phred+33) are as long as sequence.

    Regular FASTA and FASTQ come as dnaio.SequenceRecord, made in C, with the same name, id, comment, sequence and
    qualities; only records of tables have labels, and only those of BED files a place.
    """

    name: str
    sequence: str
    qualities: str | None = None
    label: str | None = None
    place: tuple[str, int, int, str] | None = None  # of a BED interval: contig, start, end, strand

    @property
    def id(self) -> str:
        """The header's first word."""
        return (self.name.split(None, 1) or [""])[0]

    @property
    def comment(self) -> str | None:
        """What follows the id."""
        words = self.name.split(None, 1)
        return words[1] if len(words) > 1 else None


AnyRecord = Record | SequenceRecord


@dataclass
class Report:
    """What a reading met: kept up to date while records are drawn.

    ambiguous counts every letter that is none of A, C, G, T; empty counts records of no base at all.
    """

    file: str
    format: str = ""
    records: int = 0
    bases: int = 0
    empty: int = 0
    bad_records: int = 0
    ambiguous: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    last_good: str = ""

    def warn(self, message: str) -> None:
        """Note a warning once, in the report and in the log."""
        if message not in self.warnings:
            self.warnings.append(message)
            log.warning("%s: %s", self.file, message)


class _Policy:
    """What happens to a bad record: an exception, or a line of the dead-letter file."""

    def __init__(self, report: Report, skip: bool, dead_letter: IO[str] | None) -> None:
        self.report, self.skip, self.dead_letter = report, skip, dead_letter

    def bad(self, reason: str, *, record: int, id: bytes | str = "", line: int = 0, text: bytes = b"") -> None:
        name = id.decode("utf-8", "replace") if isinstance(id, bytes) else id
        error = SequenceError(self.report.file, reason, record=record, id=name, line=line, last_good=self.report.last_good)
        if not self.skip:
            raise error
        self.report.bad_records += 1
        log.warning("%s", error)
        if self.dead_letter is not None:
            entry = {"file": self.report.file, "record": record, "id": name, "line": line, "reason": reason}
            entry["text"] = text[:100_000].decode("utf-8", "replace")
            print(json.dumps(entry, ensure_ascii=False), file=self.dead_letter, flush=True)

    def good(self, batch: list[AnyRecord], sequences: list[str] | None = None, bases: int = -1) -> list[AnyRecord]:
        """Count a batch of records that passed (its sequences and their bases, where they are at hand)."""
        if batch:
            sequences = [record.sequence for record in batch] if sequences is None else sequences
            self.report.records += len(batch)
            self.report.bases += sum(map(len, sequences)) if bases < 0 else bases
            if not all(sequences):
                self.report.empty += sequences.count("")
            self.report.last_good = batch[-1].id or ""
        return batch

    def letters(self, rest: bytes) -> bytes:
        """Count letters (upper case) that are none of ACGT; the ones that no policy allows come back."""
        wrong = rest.translate(None, CODES)
        if rest and not wrong:
            self.report.ambiguous.update({chr(code): rest.count(code) for code in set(rest)})
        return wrong


# Bytes ----------------------------------------------------------------------------------------------------------------


class _Raw(io.RawIOBase):
    """Anything with read(size) as a raw stream, so that a buffer can look ahead in it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


def _inflate(raw: IO[bytes], name: str) -> IO[bytes]:
    """Undo one layer of compression, found by its magic bytes; two layers are an error that says so."""
    buffered = raw if hasattr(raw, "peek") else io.BufferedReader(_Raw(raw), BLOCK)
    head = buffered.peek(6)[:6]
    if not head.startswith(_MAGIC):
        return buffered
    if head.startswith(_MAGIC[0]):
        plain: Any = igzip.GzipFile(fileobj=buffered, mode="rb")  # type: ignore[no-untyped-call]
    elif head.startswith(_MAGIC[1]):
        plain = bz2.BZ2File(buffered)
    elif head.startswith(_MAGIC[2]):
        plain = lzma.LZMAFile(buffered)
    else:
        try:
            from backports.zstd import ZstdFile
        except ImportError as missing:
            raise SequenceError(name, "is compressed with zstd; install backports.zstd to read it") from missing
        plain = ZstdFile(buffered)
    return plain  # type: ignore[no-any-return]


def _name(source: Source) -> str:
    if isinstance(source, str | Path):
        return "standard input" if str(source) == "-" else str(source)
    return str(getattr(source, "name", "stream"))


class Bytes:
    """The decompressed bytes of a source, with a look ahead and errors that say where the compression breaks."""

    def __init__(self, source: Source) -> None:
        self.name = _name(source)
        if isinstance(source, str | Path):
            if str(source) == "-":
                self._raw: IO[bytes] = sys.stdin.buffer
            else:
                try:
                    self._raw = open(source, "rb")
                except OSError as error:
                    raise SequenceError(self.name, f"cannot be opened ({error.strerror})") from error
        else:
            self._raw = source
        self._stream = _inflate(self._raw, self.name)
        self.compressed = self._stream is not self._raw and not isinstance(self._stream, io.BufferedReader)
        self._ahead = b""
        self.done = 0  # decompressed bytes handed out
        head = self.peek(6)
        if head.startswith(_MAGIC):
            raise SequenceError(self.name, "is compressed twice; undo one layer first")
        if head.startswith(codecs.BOM_UTF8):
            self.read(3)

    def read(self, size: int = BLOCK) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            try:
                data = self._stream.read(size)
            except (EOFError, OSError, ValueError, lzma.LZMAError) as error:
                reason = f"the compressed data break off or are damaged after {self.done} decompressed bytes ({error})"
                raise SequenceError(self.name, reason) from error
        self.done += len(data)
        return data

    def peek(self, size: int) -> bytes:
        """The next `size` bytes (fewer at the end), still to be read."""
        while len(self._ahead) < size:
            more = self._stream_read(size - len(self._ahead))
            if not more:
                break
            self._ahead += more
        return self._ahead[:size]

    def _stream_read(self, size: int) -> bytes:
        ahead, self._ahead, done = self._ahead, b"", self.done
        data = self.read(size)
        self._ahead, self.done = ahead, done
        return data

    def close(self) -> None:
        if self._raw is not sys.stdin.buffer:
            self._stream.close()
            self._raw.close()

    def blocks(self) -> Iterator[bytes]:
        """Blocks cut anywhere."""
        while data := self.read():
            yield data

    def line_blocks(self) -> Iterator[bytes]:
        """Blocks that end at a line's end (the last one maybe not)."""
        pieces: list[bytes] = []
        while data := self.read():
            cut = data.rfind(b"\n") + 1
            if cut:
                pieces.append(data[:cut])
                yield b"".join(pieces)
                pieces = [data[cut:]] if cut < len(data) else []
            else:
                pieces.append(data)
        if pieces:
            yield b"".join(pieces)

    def lines(self) -> Iterator[str]:
        """Text lines without their ends."""
        for block in self.line_blocks():
            yield from block.decode("utf-8", "replace").splitlines()


def detect(head: bytes, name: str) -> Format | None:
    """What the first bytes say; None for an empty file."""
    text = head.lstrip()
    if not text:
        return None
    for magic, what in _FOREIGN.items():
        if text.startswith(magic) or head.startswith(magic):
            raise SequenceError(name, f"is {what}, which this door does not read")
    if text.startswith(b">"):
        return "fasta"
    if text.startswith(b"@"):
        return "fastq"
    if text.startswith(b"LOCUS"):
        return "genbank"
    if text.startswith(b"ID   "):
        return "embl"
    if text.startswith((b"##fileformat=VCF", b"#CHROM")):
        return "vcf"
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    rows = [line for line in lines if not line.startswith(("#", "track", "browser"))]
    if rows:
        fields = rows[0].split("\t") if "\t" in rows[0] else rows[0].split()
        if len(fields) >= 3 and fields[1].isdigit() and fields[2].isdigit():
            return "bed"
        if "\t" in rows[0] or "," in rows[0]:
            return "table"
    line = head[: head.find(text[:1])].count(b"\n") + 1
    start = text[:40].split(b"\n")[0].decode("utf-8", "replace")
    raise SequenceError(name, f"is no sequence file this door knows: it starts with {start!r}", line=line)


def _expected(name: str) -> Format | None:
    parts = name.lower().split(".")
    while len(parts) > 1 and parts[-1] in ("gz", "bgz", "bz2", "xz", "zst"):
        parts.pop()
    return _SUFFIXES.get(parts[-1]) if len(parts) > 1 else None


# FASTA ----------------------------------------------------------------------------------------------------------------


def _clean(text: bytes, upper: bool) -> tuple[bytes, bytes]:
    """Sequence lines -> (bases, those of them that are none of ACGT)."""
    bases = text.replace(b"\n", b"")
    rest = bases.translate(None, b"ACGT")
    if rest:
        if rest.translate(None, _BLANK) != rest:
            bases, rest = bases.translate(None, _BLANK), rest.translate(None, _BLANK)
        if upper and rest.upper() != rest:
            bases = bases.upper()
        rest = rest.upper().translate(None, b"ACGT")
    return bases, rest


def _records(names: list[bytes], bases: list[bytes]) -> list[AnyRecord]:
    texts = [sequence.decode("ascii") for sequence in bases]
    try:
        return list(map(SequenceRecord, [name.decode("ascii") for name in names], texts))
    except ValueError:  # a header that is not ASCII
        return list(map(Record, [name.decode("utf-8", "replace") for name in names], texts))


def _starts(text: bytes) -> Iterator[int]:
    """Where header lines start in a text that starts with one. (A search for the one byte '>' is 100 times faster
    than for the two of a line's end and '>'.)"""
    at = 0
    while at >= 0:
        if at == 0 or text[at - 1] == 10:
            yield at
        at = text.find(b">", at + 1)


def _cut(text: bytes) -> tuple[list[bytes], list[bytes]]:
    """A text that starts with a header -> names and bodies."""
    starts = [*_starts(text), len(text)]
    parts = [text[a + 1 : b].partition(b"\n") for a, b in pairwise(starts)]
    return [part[0] for part in parts], [part[2] for part in parts]


def _pairs(text: bytes, policy: _Policy, upper: bool) -> tuple[list[AnyRecord], int] | None:
    """All but the last record of a text in two-line layout, and where that last one starts; None: another layout."""
    second = text.find(b"\n", text.find(b"\n") + 1) + 1
    last = text.rfind(b"\n>") + 1
    if not second or not last or not text.startswith(b">", second):
        return None
    try:
        lines = text[: last - 1].decode("ascii").split("\n")
    except UnicodeDecodeError:
        return None
    names, sequences = lines[0::2], lines[1::2]
    if len(lines) % 2 or min(names)[:1] != ">" or max(names)[:1] != ">" or "" in names:
        return None
    joined = "".join(sequences).encode()
    rest = _others(joined)
    if rest:
        if upper and rest.upper() != rest:
            sequences = [sequence.upper() for sequence in sequences]
        rest = rest.upper().translate(None, b"ACGT")
        if rest.translate(None, CODES):  # ">" and "\r" among others
            return None
        policy.letters(rest)
    batch: list[AnyRecord] = list(map(SequenceRecord, [name[1:] for name in names], sequences))
    return policy.good(batch, sequences, len(joined)), last


def _fasta(blocks: Iterable[bytes], policy: _Policy, upper: bool) -> Iterator[list[AnyRecord]]:
    """Batches of records. A record longer than a block is cleaned as it grows, so it is held twice at most."""
    number, line = 0, 1  # records closed; line of the first byte at hand
    name: bytes | None = None  # of the record still open
    grown: list[bytes] = []
    opened, wrong_line, wrong = 0, 0, b""

    def grow(body: bytes) -> None:
        nonlocal wrong_line, wrong
        bases, rest = _clean(body, upper)
        grown.append(bases)
        bad = policy.letters(rest)
        if bad and not wrong:
            wrong, wrong_line = bad, line + body.count(b"\n", 0, _first(body, bad))

    def close() -> list[AnyRecord]:
        """The open record, whole now."""
        nonlocal number, wrong
        assert name is not None
        number += 1
        bases = b"".join(grown)
        grown.clear()
        found, wrong = wrong, b""
        if found or not name.strip():
            policy.bad(_why(found), record=number, id=_id(name), line=wrong_line if found else opened, text=bases)
            return []
        return policy.good(_records([name.rstrip(b"\r")], [bases]))

    for block in blocks:
        at = 0
        if name is None:
            blank = len(block) - len(block.lstrip())
            line += block.count(b"\n", 0, blank)
            if blank == len(block):
                continue
            at = blank
            if not block.startswith(b">", at):
                start = block[at : at + 40].split(b"\n")[0].decode("utf-8", "replace")
                reason = f"not FASTA: text before the first '>' (starts with {start!r})"
                raise SequenceError(policy.report.file, reason, line=line)
        elif not block.startswith(b">"):
            at = next((place for place in _starts(block) if place), len(block))
            body = block[:at] if at < len(block) else block
            grow(body)
            line += body.count(b"\n")
            if at == len(block):
                continue
        if name is not None:
            yield close()
        rest = block[at:] if at else block
        pairs = _pairs(rest, policy, upper)
        if pairs is not None:
            yield pairs[0]
            number += len(pairs[0])
            line += 2 * len(pairs[0])
            rest = rest[pairs[1] :]
        names, bodies = _cut(rest)
        name, body = names.pop(), bodies.pop()  # the last one may go on in the next block
        if names:
            yield _fasta_batch(names, bodies, policy, upper, number + 1, line)
            number += len(names)
            line += len(names) + sum(each.count(b"\n") for each in bodies)
        opened = line
        line += 1
        grow(body)
        line += body.count(b"\n")
    if name is not None:
        yield close()


def _first(body: bytes, letters: bytes) -> int:
    """Where the first of some (upper-case) letters stands."""
    text = body.upper()
    return min(place for code in set(letters) if (place := text.find(bytes((code,)))) >= 0)


def _id(name: bytes) -> str:
    return (name.split(None, 1) or [b""])[0].decode("utf-8", "replace")


def _why(wrong: bytes) -> str:
    if not wrong:
        return "the header has no id"
    return f"{', '.join(repr(chr(code)) for code in sorted(set(wrong)))}: no nucleotide code ({CODES.decode()})"


def _fasta_batch(names: list[bytes], bodies: list[bytes], policy: _Policy, upper: bool, number: int, line: int) -> list[AnyRecord]:
    """Check a batch at once; only when that fails is each record looked at."""
    if b"" not in names:
        pairs = [_clean(body, upper) for body in bodies]
        bases, rest = [pair[0] for pair in pairs], b"".join([pair[1] for pair in pairs])
        if not rest.translate(None, CODES):
            policy.letters(rest)
            if b"\r" in names[0]:
                names = [name.rstrip(b"\r") for name in names]
            return policy.good(_records(names, bases))
    batch = []
    for name, body in zip(names, bodies, strict=True):
        bases_of, rest = _clean(body, upper)
        wrong = policy.letters(rest)
        if wrong or not name.strip():
            where = line + 1 + body.count(b"\n", 0, _first(body, wrong)) if wrong else line
            text = b">" + name + b"\n" + body
            policy.bad(_why(wrong), record=number, id=_id(name), line=where, text=text)
        else:
            batch += _records([name.rstrip(b"\r")], [bases_of])
            policy.report.last_good = batch[-1].id
        number += 1
        line += 1 + body.count(b"\n")
    return policy.good(batch)


# FASTQ ----------------------------------------------------------------------------------------------------------------


class _NeedMore(Exception):
    """The record at hand may go on in the next block."""


def _fastq_file(path: str | Path, stream: Bytes, policy: _Policy, upper: bool) -> Iterator[list[AnyRecord]]:
    """Batches of reads of a file that can be opened twice: through dnaio while its rules hold, which spares a copy of
    every block; from the first batch on that dnaio or a check refuses, as `_fastq` reads."""
    state = FastqPlace()
    try:
        with open(path, "rb") as raw:
            reads = FastqIter(_inflate(raw, stream.name), SequenceRecord, 2 * BLOCK)  # type: ignore[arg-type]
            next(reads, None)  # tells whether '+' lines repeat the header
            size = 16
            while batch := list(islice(reads, size)):
                bases = policy.report.bases
                if _checked(batch, policy, upper) is None:
                    break
                state.number += len(batch)
                size = max(1, min(READS, 100_000 * len(batch) // (policy.report.bases - bases + 1)))
                yield batch  # type: ignore[misc]
                del batch
            else:
                return
    except (FastqFormatError, EOFError, OSError, ValueError, lzma.LZMAError):
        pass  # `_fastq` meets the same thing and says where
    state.line = 4 * state.number + 1
    yield from _fastq(after_lines(stream.blocks(), 4 * state.number), policy, upper, state)


def after_lines(blocks: Iterable[bytes], lines: int) -> Iterator[bytes]:
    """Blocks without their first lines; an empty block (nothing there yet) is passed on."""
    for block in blocks:
        if not block:
            yield block
            continue
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) if lines else ()
        if lines and len(ends) < lines:
            lines -= len(ends)
            continue
        yield block[int(ends[lines - 1]) + 1 :] if lines else block
        lines = 0


def _fastq(blocks: Iterable[bytes], policy: _Policy, upper: bool, state: FastqPlace | None = None) -> Iterator[list[AnyRecord]]:
    """Batches of reads: four-line reads through dnaio, a block at a time; what dnaio refuses, one read at a time."""
    state = state or FastqPlace()
    carry = b""
    for block in blocks:
        text = carry + block
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        cut = _whole_reads(text)
        # Eight lines hold a whole four-line read: where none is seen, the reads are wrapped or damaged.
        regular = not state.lost and (cut or text.count(b"\n") < 8)
        batch = _fastq_regular(text, cut, policy, upper) if regular else None
        if batch is not None:
            state.number += len(batch)
            state.line += 4 * len(batch)
            carry = text[cut:]
        else:
            *whole, tail = text.split(b"\n")
            batch, lines = _fastq_irregular(whole, policy, upper, state, final=False)
            carry = b"".join([each + b"\n" for each in lines]) + tail
        yield batch
        if state.error:
            raise state.error
    carry = carry.removesuffix(b"\r")
    batch, _ = _fastq_irregular(carry.removesuffix(b"\n").split(b"\n"), policy, upper, state, final=True)
    yield batch
    if state.error:
        raise state.error


def _whole_reads(text: bytes) -> int:
    """Where the last whole four-line read of a text ends; 0 when none is seen.

    Looked for from the end, so that nothing is counted; a wrong guess only makes dnaio refuse the block.
    """
    ends = [text.rfind(b"\n")]
    while len(ends) < 8 and ends[-1] >= 0:
        ends.append(text.rfind(b"\n", 0, ends[-1]))
    for last, quality, mark, bases, head in zip(ends, ends[1:], ends[2:], ends[3:], ends[4:], strict=False):
        if text.startswith(b"@", head + 1) and text.startswith(b"+", mark + 1) and last - quality == mark - bases:
            return last + 1
    return 0


def _others(bases: bytes) -> bytes:
    """The letters of ASCII text that are none of ACGT; text of ACGT and N alone is never walked letter by letter.

    (7 x XOR 34) * 142 modulo 256 is 0 for N, 2, 4, 6 and 10 for C, T, A and G, and above 10 for every other ASCII letter x
    but 18: found by search, tested for each letter. Three vector operations cost half of five comparisons and their union.
    """
    if not bases:
        return b""
    folded = np.frombuffer(bases, np.uint8) * np.uint8(7)
    folded ^= np.uint8(34)
    folded *= np.uint8(142)
    if np.maximum.reduce(folded) > 10 or b"\x12" in bases:
        return bases.translate(None, b"ACGT")
    return b"N" * (len(bases) - np.count_nonzero(folded)) if b"N" in bases else b""


def _fastq_regular(text: bytes, cut: int, policy: _Policy, upper: bool) -> list[AnyRecord] | None:
    """The whole four-line reads of text[:cut]; None when a rule is broken somewhere in them."""
    try:
        reads = FastqIter(io.BytesIO(text[:cut]), SequenceRecord, cut + 1)
        next(reads, None)  # tells whether '+' lines repeat the header
        batch = list(reads)
    except FastqFormatError:
        return None
    return _checked(batch, policy, upper)


def _checked(batch: list[SequenceRecord], policy: _Policy, upper: bool) -> list[AnyRecord] | None:
    """Letters and qualities of a batch, all at once; None when a rule is broken somewhere in it."""
    sequences = [record.sequence for record in batch]
    joined = "".join(sequences).encode()
    qualities = "".join([record.qualities for record in batch]).encode()  # type: ignore[misc]
    if qualities and (np.minimum.reduce(np.frombuffer(qualities, np.uint8)) < 33 or b"\x7f" in qualities):
        return None
    rest = _others(joined)
    if rest:
        if upper and rest.upper() != rest:
            for record in batch:
                record.sequence = record.sequence.upper()
            rest = rest.upper().translate(None, b"ACGT")
        if rest.upper().translate(None, CODES + b"ACGT"):
            return None
        policy.letters(rest.upper().translate(None, b"ACGT"))
    return policy.good(batch, sequences, len(joined))  # type: ignore[arg-type]


@dataclass
class FastqPlace:
    """Where a reading of FASTQ stands: reads met, the line (from 1) of what comes next, whether a bad read was left open there.

    error: what ended the reading, raised once the reads before it have been handed out.
    """

    number: int = 0
    line: int = 1
    lost: bool = False
    error: SequenceError | None = None


class _Told(_Policy):
    """A policy under which somebody else keeps the bad records."""

    def __init__(self, report: Report, told: Callable[..., None]) -> None:
        super().__init__(report, True, None)
        self._told = told

    def bad(self, reason: str, *, record: int, id: bytes | str = "", line: int = 0, text: bytes = b"") -> None:
        self.report.bad_records += 1
        self._told(reason, record=record, id=id.decode("utf-8", "replace") if isinstance(id, bytes) else id, line=line, text=text)


def fastq_stream(blocks: Iterable[bytes], report: Report, place: FastqPlace, bad: Callable[..., None]) -> Iterator[list[AnyRecord]]:
    """Reads of FASTQ that comes in blocks cut anywhere, a batch a block (empty where none is whole yet), bases in upper case.

    `place` says where the first block begins, and moves on with every batch: a reading that is begun again at any place it has had
    gives the same reads. Bad reads go to `bad(reason, record=, id=, line=, text=)`.
    """
    return _fastq(blocks, _Told(report, bad), True, place)


def _fastq_irregular(
    lines: list[bytes], policy: _Policy, upper: bool, state: FastqPlace, final: bool
) -> tuple[list[AnyRecord], list[bytes]]:
    """Reads of any layout -> the whole ones, and the lines that may go on in the next block."""
    batch: list[AnyRecord] = []
    at = 0
    try:
        while True:
            if state.lost:
                at = _resume(lines, at, final)
                state.lost = False
            while at < len(lines) and not lines[at].strip():
                at += 1
            if at >= len(lines):
                break
            record, stop, problem = _fastq_read(lines, at, final)
            if record is not None:
                if upper:
                    record.sequence = record.sequence.upper()
                wrong = policy.letters(record.sequence.upper().encode().translate(None, b"ACGT"))
                if wrong:
                    record, problem = None, (at + 1, _why(wrong))
            state.number += 1
            if record is None:
                where, reason = problem or (at, "")
                id = _id(lines[at][1:]) if lines[at].startswith(b"@") else ""
                stop = max(stop, at + 1)
                text = b"\n".join(lines[at:stop])
                policy.bad(reason, record=state.number, id=id, line=state.line + where, text=text)
                state.lost = stop >= len(lines) or not lines[stop].startswith(b"@")
                at = stop
                continue
            policy.report.last_good = record.id
            batch.append(record)
            at = stop
    except _NeedMore:
        pass
    except SequenceError as error:
        state.error = error
    state.line += at
    return policy.good(batch), lines[at:]


def _fastq_read(lines: list[bytes], at: int, final: bool) -> tuple[Record | None, int, tuple[int, str] | None]:
    """One read from line `at`: (record, next line, None), or (None, where to look on, (line, reason))."""

    def line(i: int) -> bytes | None:
        if i < len(lines):
            return lines[i]
        if final:
            return None
        raise _NeedMore

    head = lines[at]
    if not head.startswith(b"@"):
        return None, at + 1, (at, f"expected '@', found {head[:1].decode('utf-8', 'replace')!r}")
    i, parts = at + 1, []
    while (text := line(i)) is not None and not text.startswith(b"+"):
        if text.startswith((b"@", b">")):
            return None, i, (i, f"a new record starts before the '+' of `{head[1:].decode('utf-8', 'replace')}`")
        parts.append(text.strip())
        i += 1
    if text is None:
        return None, i, (i - 1, "the file ends within this read's sequence")
    bases = b"".join(parts)
    repeated = text[1:].strip()
    if repeated and repeated != head[1:].strip():
        return None, i + 1, (i, f"the '+' line names `{repeated.decode('utf-8', 'replace')}`, the read is another")
    i += 1
    quality = b""
    first = i
    while (i == first or len(quality) < len(bases)) and (text := line(i)) is not None:
        if not bases and text.startswith(b"@"):
            break
        if not text and bases:
            break
        if i > first and len(parts) == 1 and text.startswith(b"@"):
            after = line(i + 2)  # in four-line layout, "@" here and "+" two lines on is the next read
            if after is not None and after.startswith(b"+"):
                break
        quality += text
        i += 1
    if len(quality) != len(bases):
        reason = f"quality has {len(quality)} characters, sequence has {len(bases)}"
        stop = first if len(quality) > len(bases) and i - first > 1 else i
        return None, stop, (max(i - 1, first), reason)
    if quality.translate(None, _PRINTABLE):
        return None, i, (i - 1, "quality holds characters outside '!' to '~'")
    return Record(head[1:].decode("utf-8", "replace"), bases.decode("ascii", "replace"), quality.decode()), i, None


def _resume(lines: list[bytes], at: int, final: bool) -> int:
    """The next line that starts a four-line read, after a bad one."""
    for i in range(at, len(lines)):
        if lines[i].startswith(b"@"):
            if i + 2 >= len(lines) and not final:
                raise _NeedMore
            if i + 2 < len(lines) and lines[i + 2].startswith(b"+"):
                return i
    if final:
        return len(lines)
    raise _NeedMore


# Annotated records ----------------------------------------------------------------------------------------------------


class Feature(NamedTuple):
    """A feature in biological order: bases are those of its parts joined and, on the minus strand, complemented.

    parts are 0-based half-open intervals in the order in which they are joined, strand +1, -1 or 0;
    partial tells a fuzzy end ("<1", ">37").
    """

    record: str
    kind: str
    name: str
    parts: tuple[tuple[int, int], ...]
    strand: int
    partial: bool
    bases: bytes


def _annotated(stream: Bytes, kind: str, report: Report) -> Iterator[tuple[int, Any]]:
    """Numbered Biopython records; a record that Biopython cannot read ends the file, by name."""
    from Bio import SeqIO

    text = io.TextIOWrapper(io.BufferedReader(_Raw(stream)), encoding="utf-8", errors="replace")
    parser = SeqIO.parse(text, kind)  # type: ignore[no-untyped-call]
    for number in count(1):
        try:
            yield number, next(parser)
        except StopIteration:
            return
        except SequenceError:
            raise
        except Exception as error:  # Biopython raises whatever its scanner meets
            raise SequenceError(report.file, f"not readable as {kind}: {error}", record=number, last_good=report.last_good) from error


def _genbank(stream: Bytes, kind: str, policy: _Policy) -> Iterator[list[AnyRecord]]:
    for number, entry in _annotated(stream, kind, policy.report):
        try:
            bases = bytes(entry.seq)
        except Exception:  # Bio.Seq.UndefinedSequenceError: an entry that states a length and no bases
            policy.bad("the entry holds no bases", record=number, id=entry.id)
            continue
        # ORIGIN is lower case by convention, which is no soft mask: it is upper case here whatever was asked.
        bases = bases.upper()
        wrong = policy.letters(bases.translate(None, b"ACGT"))
        if wrong:
            policy.bad(_why(wrong), record=number, id=entry.id, text=bases)
            continue
        yield policy.good([Record(f"{entry.id} {entry.description}", bases.decode("ascii"))])


def features(source: Source, kinds: Sequence[str] | None = None) -> Iterator[Feature]:
    """Features of a GenBank or EMBL file, one after another; kinds keeps some ("CDS", "gene")."""
    from Bio.SeqFeature import BeforePosition, ExactPosition

    stream = Bytes(source)
    report = Report(stream.name)
    kind = detect(stream.peek(4096), stream.name)
    if kind not in ("genbank", "embl"):
        raise SequenceError(stream.name, f"has no features: it looks like {kind or 'an empty file'}")
    try:
        for _, entry in _annotated(stream, kind, report):
            for feature in entry.features:
                if kinds is not None and feature.type not in kinds:
                    continue
                location = feature.location
                if location is None:
                    report.warn(f"`{entry.id}`: a {feature.type} whose location cannot be read is left out")
                    continue
                qualifiers = feature.qualifiers
                names = [qualifiers[key][0] for key in ("gene", "locus_tag", "label") if key in qualifiers]
                ends = [end for part in location.parts for end in (part.start, part.end)]
                fuzzy = any(not isinstance(end, ExactPosition) or isinstance(end, BeforePosition) for end in ends)
                parts = tuple((int(part.start), int(part.end)) for part in location.parts)
                bases = bytes(feature.extract(entry.seq)).upper()
                name = names[0] if names else ""
                yield Feature(entry.id, feature.type, name, parts, location.strand or 0, fuzzy, bases)
    finally:
        stream.close()


# Genomes, intervals, variants -----------------------------------------------------------------------------------------


def reverse_complement(bases: bytes) -> bytes:
    """The other strand, 5' to 3', over the whole IUPAC table (U complements to A; gaps stay)."""
    return bases.translate(_COMPLEMENT)[::-1]


def parse_region(text: str) -> tuple[str, int, int | None]:
    """'chr1:1-4' (1-based, closed, as samtools writes it) -> ('chr1', 0, 4); a bare name is the whole contig."""
    contig, colon, span = text.rpartition(":")
    if not colon:
        return text, 0, None
    first, _, last = span.replace(",", "").partition("-")
    if not first.isdigit() or (last and not last.isdigit()) or int(first) < 1 or (last and int(last) < int(first)):
        raise ValueError(f"region '{text}': expected CONTIG:FIRST-LAST with 1 <= FIRST <= LAST (1-based, closed)")
    return contig, int(first) - 1, int(last) if last else None


class Genome:
    """Random access to the contigs of a FASTA file, 0-based half-open.

    A plain file with even lines is indexed in one pass and read from disc; a compressed or ragged one is held in
    memory, a byte a base. Each process must open its own. Names with and without "chr" are one contig, said once in
    `report.warnings`.
    """

    def __init__(self, source: Source, *, keep_case: bool = False) -> None:
        self.report = Report(_name(source), "fasta")
        self._table = _SAME if keep_case else _UPPER
        self._held: dict[str, bytes] = {}
        self._index: dict[str, tuple[int, int, int, int]] = {}  # offset, bases, bases a line, bytes a line
        self._file: IO[bytes] | None = None
        if not (isinstance(source, str | Path) and str(source) != "-" and self._build(Path(source))):
            for record in read(source, format="fasta", keep_case=keep_case):
                if record.id in self._held:
                    number = len(self._held) + 1
                    raise SequenceError(self.report.file, f"two contigs are named `{record.id}`", record=number)
                self._held[record.id] = record.sequence.encode()
        self.lengths: dict[str, int] = (
            {name: entry[1] for name, entry in self._index.items()}
            if self._file is not None
            else {name: len(bases) for name, bases in self._held.items()}
        )

    def _build(self, path: Path) -> bool:
        """Index a plain file; False when it is compressed or its lines are uneven."""
        try:
            file = open(path, "rb")
        except OSError as error:
            raise SequenceError(self.report.file, f"cannot be opened ({error.strerror})") from error
        if file.read(1) != b">":
            file.close()
            return False
        file.seek(0)
        name, start, bases, width, step, short = "", 0, 0, 0, 0, False
        offset = 0

        def close() -> None:
            if name in self._index:
                raise SequenceError(self.report.file, f"two contigs are named `{name}`", record=len(self._index) + 1)
            if name:
                self._index[name] = (start, bases, max(width, 1), max(step, 1))

        for text in file:
            if text.startswith(b">"):
                close()
                words = text[1:].split(None, 1)
                name = words[0].decode("utf-8", "replace") if words else ""
                if not name:
                    file.close()
                    return False
                start, bases, width, step, short = offset + len(text), 0, 0, 0, False
            else:
                held = len(text.rstrip(b"\r\n"))
                if width == 0:
                    width, step = held, len(text)
                elif short or held > width or (text.endswith(b"\n") and held == width and len(text) != step):
                    file.close()
                    self._index.clear()
                    return False
                short = held < width
                bases += held
            offset += len(text)
        close()
        self._file = file
        return True

    def contig(self, name: str) -> str:
        """The file's own name for a contig; "chr1" and "1" are the same."""
        if name in self.lengths:
            return name
        other = name.removeprefix("chr") if name.startswith("chr") else f"chr{name}"
        if other in self.lengths:
            self.report.warn(f"'{name}' is read as '{other}'")
            return other
        have = list(self.lengths)
        shown = ", ".join(have[:10]) + (", ..." if len(have) > 10 else "")
        raise KeyError(f"{name} not in {self.report.file} (has: {shown})")

    def fetch(self, contig: str, start: int, end: int, strand: str = "+", *, pad: bool = False) -> bytes:
        """Bases of [start, end), complemented for strand "-". Past the contig's ends: ValueError, or N with `pad`."""
        contig = self.contig(contig)
        length = self.lengths[contig]
        if end <= start:
            raise ValueError(f"{contig}:{start}-{end} holds no base")
        if not pad and (start < 0 or end > length):
            raise ValueError(f"{contig}:{start}-{end} runs past the contig (0-{length})")
        low, high = min(max(start, 0), length), min(max(end, 0), length)
        bases = b"N" * (min(end, 0) - min(start, 0)) + self._slice(contig, low, high)
        bases += b"N" * (end - start - len(bases))
        return reverse_complement(bases) if strand == "-" else bases

    def region(self, text: str, strand: str = "+") -> bytes:
        """Bases of a 1-based closed region string."""
        contig, start, end = parse_region(text)
        return self.fetch(contig, start, self.lengths[self.contig(contig)] if end is None else end, strand)

    def _slice(self, contig: str, low: int, high: int) -> bytes:
        if self._file is None:
            return self._held[contig][low:high]
        if low >= high:
            return b""
        offset, _, width, step = self._index[contig]
        first = offset + low // width * step + low % width
        last = offset + (high - 1) // width * step + (high - 1) % width + 1
        self._file.seek(first)
        return self._file.read(last - first).translate(self._table, _BLANK)


class Interval(NamedTuple):
    """A stretch of a contig, 0-based half-open; line is where it stands in its file."""

    contig: str
    start: int
    end: int
    name: str
    strand: str
    line: int


def intervals(source: Source, bad: Callable[..., None] | None = None) -> Iterator[Interval]:
    """Intervals of a BED file, or of a CSV or TSV with columns region (or chrom), start, end, [id, strand].

    A line that holds none raises SequenceError, or goes to `bad(reason, record=, line=, text=)` and is passed over.
    """
    stream = Bytes(source)
    report = Report(stream.name)
    last, names, record = "", None, 0
    try:
        for number, line in enumerate(stream.lines(), 1):
            if not line.strip() or line.startswith(("#", "track", "browser")):
                continue
            if "\t" in line or "," not in line:
                fields = line.split("\t")
            else:
                fields = next(csv.reader([line])) if '"' in line else line.split(",")
            if len(fields) == 1:
                fields = line.split()
            if names is None:
                lowered = [text.strip().lower() for text in fields]
                names = {"contig": 0, "start": 1, "end": 2, "name": 3, "strand": 5}
                if "start" in lowered and "end" in lowered:
                    known = {"region": "contig", "chrom": "contig", "chr": "contig", "contig": "contig", "id": "name"}
                    names = {known.get(text, text): place for place, text in enumerate(lowered)}
                    if "contig" not in names:
                        raise SequenceError(report.file, "has start and end but no region column", line=number)
                    continue
            record += 1
            try:
                start, end = int(fields[names["start"]]), int(fields[names["end"]])
                contig = fields[names["contig"]]
            except (IndexError, ValueError) as error:
                reason = f"no interval in '{line[:80]}' ({error})"
                if bad is None:
                    raise SequenceError(report.file, reason, line=number, last_good=last) from error
                bad(reason, record=record, line=number, text=line.encode())
                continue

            def of(key: str, default: str, fields: list[str] = fields, names: dict[str, int] = names) -> str:
                at = names.get(key)
                return fields[at] if at is not None and at < len(fields) and fields[at] else default

            last = of("name", f"{contig}:{start}-{end}")
            yield Interval(contig, start, end, last, of("strand", "."), number)
    finally:
        stream.close()


def _bed(stream: Bytes, policy: _Policy, genome: Genome, pad: bool) -> Iterator[list[AnyRecord]]:
    for number, interval in enumerate(intervals(_as_file(stream), policy.bad), 1):
        if interval.strand == ".":
            policy.report.warn('strand "." is read as "+"')
        try:
            bases = genome.fetch(*interval[:3], interval.strand, pad=pad)
        except (KeyError, ValueError) as error:
            text = "\t".join(map(str, interval[:5])).encode()
            policy.bad(str(error.args[0]), record=number, id=interval.name, line=interval.line, text=text)
            continue
        for warning in genome.report.warnings:
            policy.report.warn(warning)
        policy.letters(bases.upper().translate(None, b"ACGT"))
        place = (interval.contig, interval.start, interval.end, interval.strand)
        yield policy.good([Record(interval.name, bases.decode("ascii"), place=place)])


def _as_file(stream: Bytes) -> IO[bytes]:
    raw = io.BufferedReader(_Raw(stream))
    raw.raw.name = stream.name  # type: ignore[attr-defined]
    return raw


class Variant(NamedTuple):
    """One ALT allele of one VCF line. position is 0-based, of the first base of ref.

    status: "ok"; "ref_mismatch" (the genome holds something else: `found`); "no_contig"; "out_of_contig";
    "symbolic" (an ALT that spells no bases: <DEL>, *, a breakend); "ambiguous" (REF or ALT holds N or another letter that stands for
    several bases: what changes is not known). Only "ok" has windows: equal in length, both with
    the variant at index `offset`; an insertion pushes bases out at the right, a deletion draws them in.
    """

    contig: str
    position: int
    name: str
    ref: str
    alt: str
    status: str
    found: str
    offset: int
    reference: bytes
    alternative: bytes
    line: int


def variants(source: Source, genome: Genome, window: int, bad: Callable[..., None] | None = None) -> Iterator[Variant]:
    """Every allele of a VCF with its reference and alternative windows of `window` bases, padded with N at ends.

    A line that holds no variant raises SequenceError, or goes to `bad(reason, record=, line=, text=)` and is passed over.
    """
    stream = Bytes(source)
    last, record = "", 0
    try:
        for number, line in enumerate(stream.lines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            fields = line.split("\t")
            record += 1
            if len(fields) < 5 or not fields[1].isdigit() or not fields[3] or not fields[4]:
                reason = f"no variant in '{line[:80]}' (CHROM POS ID REF ALT)"
                if bad is None:
                    raise SequenceError(stream.name, reason, line=number, last_good=last)
                bad(reason, record=record, line=number, text=line.encode())
                continue
            contig, position, name = fields[0], int(fields[1]) - 1, fields[2]
            ref = fields[3].upper()
            for alt in fields[4].upper().split(","):
                yield _variant(genome, contig, position, name, ref, alt, window, number)
            last = name if name != "." else f"{contig}:{position + 1}"
    finally:
        stream.close()


def _variant(genome: Genome, contig: str, position: int, name: str, ref: str, alt: str, window: int, line: int) -> Variant:
    left = window // 2

    def failed(status: str, found: str = "") -> Variant:
        return Variant(contig, position, name, ref, alt, status, found, left, b"", b"", line)

    try:
        own = genome.contig(contig)
    except KeyError:
        return failed("no_contig")
    if position < 0 or position + len(ref) > genome.lengths[own]:
        return failed("out_of_contig")
    found = genome.fetch(own, position, position + len(ref)).decode()
    if found.upper() != ref:
        return failed("ref_mismatch", found)
    if not alt or alt.encode().translate(None, CODES[:-2]):
        return failed("symbolic")
    if (ref + alt).encode().translate(None, b"ACGTU"):
        return failed("ambiguous")
    reference = genome.fetch(own, position - left, position - left + window, pad=True)
    after = genome.fetch(own, position + len(ref), position + len(ref) + window, pad=True)
    alternative = (reference[:left] + alt.encode() + after)[:window]
    return Variant(contig, position, name, ref, alt, "ok", found, left, reference, alternative, line)


def _vcf(stream: Bytes, policy: _Policy, genome: Genome, window: int) -> Iterator[list[AnyRecord]]:
    """The alternative window of every allele, as records: what a classifier would be shown."""
    for number, variant in enumerate(variants(_as_file(stream), genome, window, policy.bad), 1):
        id = f"{variant.contig}:{variant.position + 1}:{variant.ref}>{variant.alt}"
        if variant.status != "ok":
            detail = f", the genome has {variant.found}" if variant.found else ""
            policy.bad(f"{variant.status}{detail}", record=number, id=id, line=variant.line)
            continue
        policy.letters(variant.alternative.upper().translate(None, b"ACGT"))
        yield policy.good([Record(id, variant.alternative.decode("ascii"))])


# Tables ---------------------------------------------------------------------------------------------------------------

_SEQUENCE_COLUMNS = ("sequence", "seq", "dna")
_LABEL_COLUMNS = ("label", "class", "target")
_ID_COLUMNS = ("id", "name")


def _table(stream: Bytes, policy: _Policy, upper: bool, columns: Sequence[str] | None) -> Iterator[list[AnyRecord]]:
    """Rows with a sequence column and, when there is one, label and id columns; fields are stripped of blanks."""
    head = stream.peek(65536).split(b"\n")[0]
    delimiter = "\t" if b"\t" in head else ","
    csv.field_size_limit(sys.maxsize)  # a field may be a chromosome
    rows = csv.reader(stream.lines(), delimiter=delimiter)
    names = [name.strip().lower() for name in (columns if columns is not None else next(rows, []))]

    def column(options: Sequence[str]) -> int | None:
        return next((names.index(option) for option in options if option in names), None)

    at, label_at, id_at = column(_SEQUENCE_COLUMNS), column(_LABEL_COLUMNS), column(_ID_COLUMNS)
    if at is None:
        raise SequenceError(
            policy.report.file,
            f"no column is named {' or '.join(_SEQUENCE_COLUMNS)} (has: {', '.join(names)}); name them with `columns`",
            line=1,
        )
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            policy.bad(f"not readable as a row ({error})", record=number, line=rows.line_num)
            continue
        if not row or not any(field.strip() for field in row):
            continue
        number += 1
        fields = [text.strip() for text in row]
        text = delimiter.join(row).encode()
        id = fields[id_at] if id_at is not None and id_at < len(fields) else str(number)
        if len(fields) != len(names):
            reason = f"{len(fields)} fields, the header names {len(names)}"
            policy.bad(reason, record=number, id=id, line=rows.line_num, text=text)
            continue
        bases, rest = _clean(fields[at].encode(), upper)
        wrong = policy.letters(rest)
        if wrong or not bases:
            reason = _why(wrong) if wrong else "the sequence is empty"
            policy.bad(reason, record=number, id=id, line=rows.line_num, text=text)
            continue
        label = fields[label_at] if label_at is not None else None
        yield policy.good([Record(id, bases.decode("ascii"), None, label)])


# The door -------------------------------------------------------------------------------------------------------------


class Reader:
    """Records of one source, drawn once; `report` grows with them. Use it as a context manager or run it to its end."""

    def __init__(self, batches: Iterator[list[AnyRecord]], report: Report, close: Any) -> None:
        self.report = report
        self._batches, self._close = batches, close

    def batches(self) -> Iterator[list[AnyRecord]]:
        """The same records in lists as large as a block holds: the fast way through short reads."""
        try:
            yield from self._batches
            if not self.report.records and not self.report.bad_records:
                self.report.warn("holds no record")
        except SequenceError as error:
            if self.report.last_good and not error.last_good:
                raise SequenceError(
                    error.file,
                    error.reason,
                    record=error.record,
                    id=error.id,
                    line=error.line,
                    last_good=self.report.last_good,
                ) from error
            raise
        finally:
            self._close()

    def __iter__(self) -> Iterator[AnyRecord]:
        return chain.from_iterable(self.batches())  # a generator in between would cost as much as the parsing

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def read(
    source: Source,
    *,
    format: Format | None = None,
    genome: Genome | Source | None = None,
    window: int = 0,
    pad: bool = False,
    columns: Sequence[str] | None = None,
    keep_case: bool = False,
    on_bad_record: Literal["stop", "skip"] = "stop",
    dead_letter: str | Path | None = None,
) -> Reader:
    """Open any sequence source.

    Args:
        source: a path, "-" for standard input, or an open binary file.
        format: what the file must be; content that is something else is then an error. Without it the content
            decides, and a file name that promises something else is a warning.
        genome: the FASTA that BED intervals and VCF positions lie on.
        window: bases a VCF allele is shown in.
        pad: N for what an interval asks beyond its contig; otherwise that is a bad record.
        columns: names of the columns of a table that has no header line.
        keep_case: hand the letters out in their own case.
        on_bad_record: "stop" raises SequenceError; "skip" counts, logs and writes to dead_letter.
        dead_letter: file that bad records are appended to, a JSON object a line.

    Raises:
        SequenceError: the source cannot be opened, is no format this door reads, or holds a bad record.
    """
    stream = Bytes(source)
    report = Report(stream.name)
    if on_bad_record not in ("stop", "skip"):
        raise ValueError(f"on_bad_record '{on_bad_record}' is neither stop nor skip")
    try:
        found: Format | None = "table" if columns is not None else detect(stream.peek(65536), stream.name)
        if format is not None and found is not None and found != format:
            raise SequenceError(stream.name, f"looks like {found.upper()}, expected {format.upper()}", line=1)
        promised = _expected(stream.name)
        if format is None and found is not None and promised is not None and found != promised:
            report.warn(f"looks like {found.upper()} although its name promises {promised.upper()}; read as {found}")
        kind = format or found or promised or "fasta"
        report.format = kind
        letters: IO[str] | None = open(dead_letter, "a", encoding="utf-8") if dead_letter is not None else None
    except BaseException:
        stream.close()
        raise
    policy = _Policy(report, on_bad_record == "skip", letters)

    def close() -> None:
        stream.close()
        if letters is not None:
            letters.close()

    upper = not keep_case
    batches: Iterator[list[AnyRecord]]
    if kind == "fasta":
        batches = _fasta(stream.line_blocks(), policy, upper)
    elif kind == "fastq":
        if isinstance(source, str | Path) and Path(source).is_file():
            batches = _fastq_file(source, stream, policy, upper)
        else:
            batches = _fastq(stream.blocks(), policy, upper)
    elif kind in ("genbank", "embl"):
        batches = _genbank(stream, kind, policy)
    elif kind == "table":
        batches = _table(stream, policy, upper, columns)
    else:
        if genome is None:
            close()
            raise SequenceError(stream.name, f"is {kind.upper()}: name the genome its positions lie on")
        contigs = genome if isinstance(genome, Genome) else Genome(genome, keep_case=keep_case)
        if kind == "bed":
            batches = _bed(stream, policy, contigs, pad)
        else:
            if window < 1:
                close()
                raise SequenceError(stream.name, "is VCF: say how many bases around each allele (window)")
            batches = _vcf(stream, policy, contigs, window)
    return Reader(batches, report, close)


def pieces(source: Source, size: int) -> Iterator[tuple[str, int, bytes]]:
    """A FASTA source as pieces (id, start, bases) of `size` bases, the last of a record shorter: constant memory.

    The bases are upper case. For records that are longer than memory should hold at once.
    """
    stream = Bytes(source)
    policy = _Policy(Report(stream.name, "fasta"), False, None)
    id, start, held, line = "", 0, bytearray(), 1
    number = 0
    try:
        if detect(stream.peek(4096), stream.name) not in ("fasta", None):
            raise SequenceError(stream.name, "pieces are cut from FASTA only", line=1)
        for block in stream.line_blocks():
            for part in _at_headers(block):
                if part.startswith(b">"):
                    if number and held:
                        yield id, start, bytes(held)
                    header, _, part = part.partition(b"\n")
                    policy.report.last_good = id
                    number += 1
                    id, start, held = (header[1:].split(None, 1) or [b""])[0].decode("utf-8", "replace"), 0, bytearray()
                    line += 1
                bases, rest = _clean(part, True)
                if wrong := policy.letters(rest):
                    policy.bad(_why(wrong), record=number, id=id, line=line + part.count(b"\n", 0, _first(part, wrong)))
                line += part.count(b"\n")
                held += bases
                while len(held) >= size:
                    yield id, start, bytes(held[:size])
                    del held[:size]
                    start += size
        if held:
            yield id, start, bytes(held)
    finally:
        stream.close()


def _at_headers(block: bytes) -> Iterator[bytes]:
    """A block cut before each header line."""
    starts = [0, *(place for place in _starts(block) if place), len(block)]
    yield from (block[a:b] for a, b in pairwise(starts))
