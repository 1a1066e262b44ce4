"""What a labelled dataset gives away before any model is trained.

    report = audit({"train": train, "dev": dev, "test": test})
    report.verdict        # "pass", "warn" or "refuse"
    print(report.text())  # every finding with its numbers
    report.clean["test"]  # rows of the test split that share nothing with train

Three of the best-known genomic benchmarks can be "solved" without reading a base: by row order, by length, or by
looking the row's coordinates up in the training set. The audit finds such things by itself: rows shared between splits
(equal, on the other strand, or near: half of their 16-mers), one sequence with two labels, sorted labels, and what a
rule that sees only the length, only the case, or only a table of the training rows would score.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from connectors.sequences import reverse_complement
from pipelines.genomics.datasets import Labelled, LabelledIntervals

Verdict = Literal["pass", "warn", "refuse"]

WORD = 16  # bases of a word for near duplicates: 4^16 words, so a shared one is rarely chance
NEAR = 0.5  # share of a row's words that the other split holds, from which it counts as nearly the same


@dataclass(frozen=True)
class Limits:
    """From which share of rows a leak warns and refuses, and from which gain over the majority a shortcut does."""

    warn_leak: float = 0.001
    refuse_leak: float = 0.05
    warn_gain: float = 0.05
    refuse_gain: float = 0.25


@dataclass(frozen=True)
class Finding:
    """One thing found: what, where, how many rows of how many, how grave; score is an accuracy, for shortcuts."""

    kind: str
    split: str
    count: int
    total: int
    verdict: Verdict
    detail: str = ""
    score: float | None = None

    @property
    def share(self) -> float:
        return self.count / max(self.total, 1)

    def __str__(self) -> str:
        figure = f"{self.count} of {self.total} rows" if self.score is None else f"accuracy {100 * self.score:.1f} %"
        return f"{self.verdict:6s} {self.split:12s} {self.kind}: {figure}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Audit:
    """Findings, the verdict they add up to, and the clean rows of every split but the first."""

    findings: list[Finding] = field(default_factory=list)
    clean: dict[str, list[int]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        grades = {finding.verdict for finding in self.findings}
        return "refuse" if "refuse" in grades else "warn" if "warn" in grades else "pass"

    def find(self, kind: str, split: str) -> Finding:
        """The finding of this kind; KeyError when it was not looked for."""
        for finding in self.findings:
            if (finding.kind, finding.split) == (kind, split):
                return finding
        raise KeyError(f"no finding '{kind}' for split '{split}'")

    def text(self) -> str:
        """One line a finding, the grave ones first."""
        order = ("refuse", "warn", "pass")
        lines = [str(finding) for finding in sorted(self.findings, key=lambda finding: order.index(finding.verdict))]
        return "\n".join([f"verdict: {self.verdict}", *lines])


def audit(splits: Mapping[str, Labelled], limits: Limits | None = None) -> Audit:
    """Audit sequences; the first split is the one that a model would be trained on."""
    limits = limits or Limits()
    report = Audit()
    names = list(splits)
    upper = {name: [sequence.upper().replace("U", "T") for sequence in rows.sequences] for name, rows in splits.items()}
    for name, rows in splits.items():
        _within(report, name, upper[name], rows, limits)
    train = names[0]
    known = defaultdict(set)
    for sequence, label in zip(upper[train], splits[train].labels, strict=True):
        known[sequence].add(label)
    words = _Words(upper[train]) if len(names) > 1 else None
    for name in names[1:]:
        rows, sequences = splits[name], upper[name]
        equal = np.array([sequence in known for sequence in sequences])
        other = np.array([_reverse(sequence) in known for sequence in sequences]) & ~equal
        assert words is not None
        near = (words.containment(sequences) >= NEAR) & ~equal & ~other
        conflicts = sum(label not in known.get(s, {label}) for s, label in zip(sequences, rows.labels, strict=True))
        _leak(report, f"rows that are in {train}", name, equal, limits, f"{conflicts} with another label")
        _leak(report, f"rows whose other strand is in {train}", name, other, limits)
        by_class = Counter(label for label, hit in zip(rows.labels, near, strict=True) if hit)
        share = ", ".join(f"{label}: {n}" for label, n in sorted(by_class.items()))
        _leak(report, f"rows with half of their {WORD}-mers in {train}", name, near, limits, share)
        report.clean[name] = np.flatnonzero(~(equal | other | near)).tolist()
        _shortcuts(report, train, splits[train], name, rows, limits)
        lookup = (upper[train], sequences)
        _shortcut(report, f"look-up of {train} rows", name, *lookup, splits[train].labels, rows.labels, limits)
    return report


def audit_intervals(splits: Mapping[str, LabelledIntervals], limits: Limits | None = None) -> Audit:
    """Audit intervals: equal and overlapping coordinates between splits, and what length or a look-up would score."""
    limits = limits or Limits()
    report = Audit()
    names = list(splits)
    train = names[0]
    for name, rows in splits.items():
        places = [interval[:3] for interval in rows.intervals]
        repeats = len(places) - len(set(places))
        report.findings.append(_graded("repeated coordinates", name, repeats, len(rows), limits))
    for name in names[1:]:
        rows = splits[name]
        held = {interval[:3] for interval in splits[train].intervals}
        equal = np.array([interval[:3] in held for interval in rows.intervals])
        overlap = overlapping(splits[train], rows)
        _leak(report, f"rows with the coordinates of a {train} row", name, equal, limits)
        _leak(report, f"rows that overlap a {train} row", name, overlap, limits)
        report.clean[name] = np.flatnonzero(~overlap).tolist()
        lengths = [[interval.end - interval.start for interval in each.intervals] for each in (splits[train], rows)]
        _shortcut(report, "length alone", name, lengths[0], lengths[1], splits[train].labels, rows.labels, limits)
        places = [[interval[:3] for interval in each.intervals] for each in (splits[train], rows)]  # type: ignore[misc]
        key = f"look-up of {train} coordinates"
        _shortcut(report, key, name, places[0], places[1], splits[train].labels, rows.labels, limits)
    return report


def overlapping(train: LabelledIntervals, other: LabelledIntervals) -> NDArray[np.bool_]:
    """Which rows of `other` share at least one base with an interval of `train`."""
    contigs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for interval in train.intervals:
        contigs[interval.contig].append((interval.start, interval.end))
    index = {}
    for contig, spans in contigs.items():
        ordered = np.array(sorted(spans))
        index[contig] = ordered[:, 0], np.maximum.accumulate(ordered[:, 1])
    found = np.zeros(len(other), bool)
    for row, interval in enumerate(other.intervals):
        if interval.contig in index:
            starts, furthest = index[interval.contig]
            before = int(np.searchsorted(starts, interval.end)) - 1  # the last that starts before this one ends
            found[row] = before >= 0 and furthest[before] > interval.start
    return found


def split_by(groups: Sequence[Hashable], shares: Mapping[str, float], seed: int = 0) -> dict[str, list[int]]:
    """Rows to splits so that no group (a contig, a cluster) is in two: the largest groups first, to where most is due."""
    choose = np.random.default_rng(seed)
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    order = list(rows)
    choose.shuffle(order)
    total = sum(shares.values())
    due = {name: share / total * len(groups) for name, share in shares.items()}
    found: dict[str, list[int]] = {name: [] for name in shares}
    for group in sorted(order, key=lambda each: -len(rows[each])):
        name = max(due, key=lambda each: due[each])
        found[name] += rows[group]
        due[name] -= len(rows[group])
    return {name: sorted(each) for name, each in found.items()}


def clusters(sequences: Sequence[str], near: float = NEAR) -> list[int]:
    """A cluster number a row: rows are linked when one holds at least `near` of the other's 16-mers, on any strand."""
    owner = list(range(len(sequences)))

    def root(row: int) -> int:
        while owner[row] != row:
            owner[row] = owner[owner[row]]
            row = owner[row]
        return row

    codes, rows = _words([sequence.upper() for sequence in sequences])
    sizes = np.bincount(rows, minlength=len(sequences))
    order = np.lexsort((rows, codes))
    codes, rows = codes[order], rows[order]
    fresh = np.ones(len(codes), bool)
    fresh[1:] = (codes[1:] != codes[:-1]) | (rows[1:] != rows[:-1])  # a row holds a word once
    codes, rows = codes[fresh], rows[fresh]
    starts = np.ones(len(codes), bool)
    starts[1:] = codes[1:] != codes[:-1]
    # A word links each of its rows to the first one only, which keeps repeats linear.
    first = rows[np.maximum.accumulate(np.where(starts, np.arange(len(rows)), 0))]
    pairs, shared = np.unique(first[~starts] * len(sequences) + rows[~starts], return_counts=True)
    for pair, count in zip(pairs.tolist(), shared.tolist(), strict=True):
        one, other = divmod(pair, len(sequences))
        if count >= near * max(min(sizes[one], sizes[other]), 1):
            owner[root(other)] = root(one)
    return [root(row) for row in range(len(sequences))]


# Parts ----------------------------------------------------------------------------------------------------------------


def _reverse(sequence: str) -> str:
    return reverse_complement(sequence.encode()).decode()


def _graded(kind: str, split: str, count: int, total: int, limits: Limits, detail: str = "") -> Finding:
    share = count / max(total, 1)
    verdict: Verdict = "refuse" if share >= limits.refuse_leak else "warn" if share >= limits.warn_leak else "pass"
    return Finding(kind, split, count, total, verdict, detail)


def _leak(report: Audit, kind: str, split: str, hits: NDArray[np.bool_], limits: Limits, detail: str = "") -> None:
    report.findings.append(_graded(kind, split, int(hits.sum()), len(hits), limits, detail))


def _within(report: Audit, name: str, sequences: list[str], rows: Labelled, limits: Limits) -> None:
    """Repeats, conflicts, colliding ids and row order inside one split."""
    labels_of = defaultdict(set)
    for sequence, label in zip(sequences, rows.labels, strict=True):
        labels_of[sequence].add(label)
    repeats = len(sequences) - len(labels_of)
    conflicts = sum(len(labels) > 1 for labels in labels_of.values())
    total = len(rows)
    # Repeats inside a split flatter nobody by themselves: they never refuse.
    verdict: Verdict = "warn" if repeats > limits.warn_leak * total else "pass"
    report.findings.append(Finding("repeated sequences", name, repeats, total, verdict))
    verdict = "warn" if conflicts else "pass"
    report.findings.append(Finding("sequences with two labels", name, conflicts, total, verdict))
    changes = sum(a != b for a, b in zip(rows.labels, rows.labels[1:], strict=False))
    ordered = len(set(rows.labels)) > 1 and changes == len(set(rows.labels)) - 1
    detail = "shuffle before cutting" if ordered else ""
    report.findings.append(Finding("rows sorted by label", name, total if ordered else 0, total, "warn" if ordered else "pass", detail))
    if len(set(rows.ids)) > 1:
        collisions = len(rows.ids) - len(set(rows.ids))
        report.findings.append(Finding("ids that collide", name, collisions, total, "warn" if collisions else "pass"))


def _shortcuts(report: Audit, train: str, known: Labelled, name: str, rows: Labelled, limits: Limits) -> None:
    lengths = [list(map(len, each.sequences)) for each in (known, rows)]
    _shortcut(report, "length alone", name, lengths[0], lengths[1], known.labels, rows.labels, limits)
    cases = [[(s != s.upper(), s != s.lower()) for s in each.sequences] for each in (known, rows)]
    _shortcut(report, "case alone", name, cases[0], cases[1], known.labels, rows.labels, limits)


def _shortcut(
    report: Audit,
    kind: str,
    split: str,
    known: Sequence[Hashable],
    asked: Sequence[Hashable],
    known_labels: Sequence[str],
    labels: Sequence[str],
    limits: Limits,
) -> None:
    """What a table from one property to the label that it mostly has in training scores; the majority where it is new."""
    majority = Counter(known_labels).most_common(1)[0][0]
    votes: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for key, label in zip(known, known_labels, strict=True):
        votes[key][label] += 1
    table = {key: each.most_common(1)[0][0] for key, each in votes.items()}
    right = sum(table.get(key, majority) == label for key, label in zip(asked, labels, strict=True))
    base = sum(label == majority for label in labels)
    total = len(labels)
    gain = (right - base) / max(total, 1)
    verdict: Verdict = "refuse" if gain >= limits.refuse_gain else "warn" if gain >= limits.warn_gain else "pass"
    detail = f"majority {100 * base / max(total, 1):.1f} %"
    report.findings.append(Finding(kind, split, right, total, verdict, detail, score=right / max(total, 1)))


_CODE = np.full(256, 255, np.uint8)
_CODE[np.frombuffer(b"ACGT", np.uint8)] = range(4)


def _words(sequences: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Canonical 16-mers (the smaller of both strands, as numbers) of clean ACGT, and the row of each."""
    lengths = np.array([len(sequence) for sequence in sequences])
    text = np.frombuffer("".join(sequences).encode(), np.uint8)
    if len(text) < WORD:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    codes = _CODE[text]
    places = len(codes) - WORD + 1
    forward, backward = np.zeros(places, np.uint64), np.zeros(places, np.uint64)
    clean = np.ones(places, bool)
    for i in range(WORD):
        part = codes[i : i + places].astype(np.uint64)
        clean &= part < 4
        forward = (forward << np.uint64(2)) | (part & np.uint64(3))
        backward |= (np.uint64(3) - (part & np.uint64(3))) << np.uint64(2 * i)
    row = np.repeat(np.arange(len(sequences)), lengths)
    clean &= row[:places] == row[WORD - 1 :]  # a word lies in one sequence
    return np.minimum(forward, backward)[clean], row[:places][clean]


class _Words:
    """The 16-mers of one split, to ask how much of a row it holds."""

    def __init__(self, sequences: Sequence[str]) -> None:
        self._known = np.unique(_words(sequences)[0])

    def containment(self, sequences: Sequence[str]) -> NDArray[np.float64]:
        """For each sequence the share of its 16-mers that are known (0 when it has none)."""
        codes, rows = _words(sequences)
        at = np.minimum(np.searchsorted(self._known, codes), max(len(self._known) - 1, 0))
        held = self._known[at] == codes if len(self._known) else np.zeros(len(codes), bool)
        size = np.bincount(rows, minlength=len(sequences))
        return np.bincount(rows, weights=held, minlength=len(sequences)) / np.maximum(size, 1)
