"""Audit, train, score: the numbers that belong to a classifier, on all rows and on the clean ones, beside the floor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connectors.errors import UserError
from pipelines.genomics.audit import Audit, audit
from pipelines.genomics.baselines import KmerRegression, fit_kmer_regression
from pipelines.genomics.datasets import Labelled
from pipelines.genomics.metrics import Score, scores
from pipelines.genomics.training import Rows, Settings, describe, fit_length, predict, train_classifier
from titans_core.classifier import ClassifierConfig, SequenceClassifier


@dataclass(frozen=True)
class Trained:
    """A classifier with its audit and its scores: scores[model][rows][metric], rows "all" or "clean"."""

    model: SequenceClassifier
    audit: Audit
    scores: dict[str, dict[str, dict[str, Score]]]
    digests: dict[str, str]

    def text(self) -> str:
        """A table for people."""
        lines = [f"{'model':8s} {'rows':6s} " + " ".join(f"{name:>21s}" for name in _metrics(self.scores))]
        for model, parts in self.scores.items():
            for rows, found in parts.items():
                cells = " ".join(f"{s.value:7.3f} [{s.low:.3f}, {s.high:.3f}]" for s in found.values())
                lines.append(f"{model:8s} {rows:6s} {cells}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "classes": list(self.model.config.classes),
            "model": describe(self.model),
            "audit": {"verdict": self.audit.verdict, "findings": [asdict(each) for each in self.audit.findings]},
            "scores": {
                model: {rows: {name: asdict(score) for name, score in found.items()} for rows, found in parts.items()}
                for model, parts in self.scores.items()
            },
            "data": self.digests,
        }


def _metrics(found: dict[str, dict[str, dict[str, Score]]]) -> list[str]:
    return list(next(iter(next(iter(found.values())).values())))


def digest(rows: Labelled) -> str:
    """SHA-256 of sequences and labels, in order."""
    state = hashlib.sha256()
    for sequence, label in zip(rows.sequences, rows.labels, strict=True):
        state.update(f"{sequence}\t{label}\n".encode())
    return state.hexdigest()


def train_and_report(
    train: Labelled,
    dev: Labelled,
    test: Labelled,
    *,
    strands: str = "forward",
    settings: Settings | None = None,
    accept_leaks: bool = False,
    draws: int = 500,
    progress: Callable[[int, int, float], None] | None = None,
    **shape: Any,
) -> Trained:
    """Audit the splits, train, and score on test; `shape` goes to ClassifierConfig, `draws` resample for the intervals.

    Raises UserError where the audit refuses and accept_leaks is not set. Dev rows that train holds are left out.
    """
    found = audit({"train": train, "dev": dev, "test": test})
    if found.verdict == "refuse" and not accept_leaks:
        raise UserError(f"the data give their answers away; fix the splits or accept it (--accept-leaks)\n{found.text()}")
    classes = tuple(sorted(set(train.labels)))
    for name, rows in (("dev", dev), ("test", test)):
        if new := sorted(set(rows.labels) - set(classes)):
            raise UserError(f"{name} rows have the classes {new}; those of train are {list(classes)}")
    known = set(train.sequences)
    dev = dev.take([i for i, sequence in enumerate(dev.sequences) if sequence not in known])
    if not len(dev):
        raise UserError("no dev row is left once those that train holds are taken out")
    length = max(map(len, train.sequences))
    place = {name: i for i, name in enumerate(classes)}

    def encode(rows: Labelled) -> Rows:
        return fit_length(rows.sequences, length).codes, np.array([place[label] for label in rows.labels], np.int64)

    parts = {"train": encode(train), "dev": encode(dev), "test": encode(test)}
    kmer: KmerRegression = fit_kmer_regression(parts["train"], parts["dev"], len(classes), strands=(strands,))
    config = ClassifierConfig(classes=classes, length=length, strands=strands, **shape)  # type: ignore[arg-type]
    model = train_classifier(config, parts["train"], parts["dev"], settings, composition=kmer, progress=progress)
    codes, target = parts["test"]
    probabilities: dict[str, NDArray[np.float64]] = {"tethys": predict(model, codes), "kmer": kmer.probabilities(codes)}
    clean = found.clean["test"]
    table: dict[str, dict[str, dict[str, Score]]] = {}
    for name, values in probabilities.items():
        table[name] = {"all": scores(target.tolist(), values, draws=draws)}
        if 0 < len(clean) < len(target):
            table[name]["clean"] = scores(target.tolist(), values, rows=clean, draws=draws)
    digests = {name: digest(rows) for name, rows in (("train", train), ("dev", dev), ("test", test))}
    return Trained(model, found, table, digests)
