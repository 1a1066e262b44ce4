"""Labelled sequences and intervals, read from the layouts in which benchmarks come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from connectors.sequences import Interval, SequenceError, Source, intervals, read


@dataclass(frozen=True)
class Labelled:
    """Sequences with the names of their classes, and ids where the source had them. Case is as in the source."""

    sequences: list[str]
    labels: list[str]
    ids: list[str]

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: Sequence[int]) -> Labelled:
        """The rows of these indices, in that order."""
        return Labelled([self.sequences[i] for i in rows], [self.labels[i] for i in rows], [self.ids[i] for i in rows])


@dataclass(frozen=True)
class LabelledIntervals:
    """Intervals with the names of their classes."""

    intervals: list[Interval]
    labels: list[str]

    def __len__(self) -> int:
        return len(self.intervals)


def read_labelled(source: Source, *, columns: Sequence[str] | None = None) -> Labelled:
    """A table with sequence and label columns; a row without a label is an error."""
    found = Labelled([], [], [])
    for record in read(source, format="table", columns=columns, keep_case=True):
        label = getattr(record, "label", None)
        if not label:
            raise SequenceError(str(source), "has no label", record=len(found) + 1, id=record.id or "")
        found.sequences.append(record.sequence)
        found.labels.append(label)
        found.ids.append(record.id or "")
    if not len(found):
        raise SequenceError(str(source), "holds no row: give a table with a header and rows of sequence and label")
    return found


def read_folder(root: Path, *, splits: Sequence[str] = ("train", "test")) -> dict[str, Labelled]:
    """GenomicBenchmarks' layout of sequences: root/SPLIT/CLASS/*.txt, one sequence a file, or CLASS.fa."""
    found = {}
    for split in splits:
        if not (root / split).is_dir():
            raise SequenceError(str(root), f"has no folder '{split}': give a table, or a folder SPLIT/CLASS/*.txt with {' and '.join(splits)}")
        rows = Labelled([], [], [])
        for entry in sorted((root / split).iterdir()):
            if entry.is_dir():
                for file in sorted(entry.iterdir()):
                    rows.sequences.append(file.read_text().strip())
                    rows.labels.append(entry.name)
                    rows.ids.append(file.stem)
            else:
                for record in read(entry, keep_case=True):
                    rows.sequences.append(record.sequence)
                    rows.labels.append(entry.name.split(".")[0])
                    rows.ids.append(record.id or "")
        if not len(rows):
            raise SequenceError(str(root / split), "holds no class folder with sequences")
        found[split] = rows
    return found


def read_splits(table: Path, dev: Path | None, test: Path | None, *, seed: int = 0) -> dict[str, tuple[str, Labelled]]:
    """Source and rows of train, dev and test: three tables, or a folder in GenomicBenchmarks' layout, which holds train and test.

    Without dev rows a tenth of train is held out, near copies (half of their 16-mers shared) on one side.
    """
    from pipelines.genomics.audit import clusters, split_by

    if table.is_dir():
        if test is not None:
            raise SequenceError(str(table), "holds its own test rows: leave --test away")
        found = read_folder(table)
        train, held = found["train"], found["test"]
        sources = {"train": str(table / "train"), "test": str(table / "test")}
    elif test is None:
        raise SequenceError(str(table), "is a table of training rows: name those that are scored at the end with --test")
    else:
        train, held = read_labelled(table), read_labelled(test)
        sources = {"train": str(table), "test": str(test)}
    if dev is not None:
        middle, sources["dev"] = read_labelled(dev), str(dev)
    else:
        parts = split_by(clusters(train.sequences), {"train": 0.9, "dev": 0.1}, seed)
        train, middle, sources["dev"] = train.take(parts["train"]), train.take(parts["dev"]), sources["train"]
    return {split: (sources[split], rows) for split, rows in (("train", train), ("dev", middle), ("test", held))}


def read_interval_folder(root: Path, *, splits: Sequence[str] = ("train", "test")) -> dict[str, LabelledIntervals]:
    """GenomicBenchmarks' layout of intervals: root/SPLIT/CLASS.csv.gz with id, region, start, end, strand."""
    found = {}
    for split in splits:
        rows = LabelledIntervals([], [])
        for entry in sorted((root / split).glob("*.csv*")):
            for interval in intervals(entry):
                rows.intervals.append(interval)
                rows.labels.append(entry.name.split(".")[0])
        if not len(rows):
            raise SequenceError(str(root / split), "holds no CLASS.csv or CLASS.csv.gz with intervals")
        found[split] = rows
    return found
