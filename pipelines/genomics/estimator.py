"""TitansSequenceClassifier: the classifier with scikit-learn's conventions.

model = TitansSequenceClassifier(strands="both").fit(sequences, labels)
model.predict(new), model.predict_proba(new), model.classes_
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from connectors.errors import UserError
from pipelines.genomics.audit import clusters, split_by
from pipelines.genomics.training import Rows, Settings, fit_length, predict, train_classifier
from titans_core.classifier import Card, Classifier, ClassifierConfig, load, save

SMALLEST = 8  # rows that a held-out part needs before its weighing of the branches means anything


class TitansSequenceClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """DNA sequences (strings) to class names.

    Args:
        strands: "both" or "equivariant" for what either strand tells (binding sites), "forward" for what has a direction
            (promoters); `titans_core.classifier.ClassifierConfig` says how they differ.
        length: bases the model looks at; None takes the longest training sequence.
        kmer: word length of the composition branch, 0 for none; multi-label models have none.
        layers, rule: the backbone's blocks and memory rule (`titans_core.config`).
        row_passes: rows shown in training, over all epochs.
        class_weight: "balanced" or None.
        held_out: share of the rows kept back to weigh the branches, where fit gets no `held_out_rows`; near copies
            (half of their 16-mers shared) stay on one side.
        seed: of everything random.
    """

    def __init__(
        self,
        *,
        strands: str = "forward",
        length: int | None = None,
        kmer: int = 6,
        layers: tuple[str, ...] = ("lmm",),
        rule: str = "exact",
        row_passes: int = 60_000,
        batch: int = 64,
        rate: float = 2e-3,
        class_weight: str | None = None,
        held_out: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.strands = strands
        self.length = length
        self.kmer = kmer
        self.layers = layers
        self.rule = rule
        self.row_passes = row_passes
        self.batch = batch
        self.rate = rate
        self.class_weight = class_weight
        self.held_out = held_out
        self.seed = seed

    def fit(
        self,
        X: Sequence[str],
        y: Sequence[Any],
        held_out_rows: tuple[Sequence[str], Sequence[Any]] | None = None,
    ) -> Self:
        """Train. y holds one label a sequence, or a list of labels a sequence for a multi-label model."""
        sequences, labels = _texts(X), list(y)
        if len(sequences) != len(labels):
            raise UserError(f"{len(sequences)} sequences but {len(labels)} labels")
        multi = bool(labels) and isinstance(labels[0], list | tuple | set | frozenset)
        names = {str(name) for label in labels for name in (label if multi else (label,))}
        if len(names) < 2:
            raise UserError(f"a classifier needs at least two classes, the rows have {sorted(names)}")
        classes = tuple(sorted(names))
        if held_out_rows is None:
            parts = split_by(clusters(sequences), {"train": 1 - self.held_out, "dev": self.held_out}, self.seed)
            pairs = [([sequences[i] for i in parts[p]], [labels[i] for i in parts[p]]) for p in ("train", "dev")]
        else:
            pairs = [(sequences, labels), (_texts(held_out_rows[0]), list(held_out_rows[1]))]
            new = {str(n) for label in pairs[1][1] for n in (label if multi else (label,))} - names
            if new:
                raise UserError(f"held-out rows have the classes {sorted(new)}, which no training row has")
        if len(pairs[1][0]) < SMALLEST:
            raise UserError(f"{len(pairs[1][0])} rows held out; at least {SMALLEST} are needed to weigh the branches")
        length = self.length or max(map(len, sequences))
        config = ClassifierConfig(
            classes=classes,
            length=length,
            strands=self.strands,  # type: ignore[arg-type]
            kmer=self.kmer,
            layers=tuple(self.layers),  # type: ignore[arg-type]
            rule=self.rule,  # type: ignore[arg-type]
            task="multi" if multi else "single",
        )
        settings = Settings(row_passes=self.row_passes, batch=self.batch, rate=self.rate, weights=self.class_weight, seed=self.seed)
        train, dev = (self._rows(part, classes, length, multi) for part in pairs)
        self._keep(train_classifier(config, train, dev, settings))
        return self

    def _rows(self, part: tuple[list[str], list[Any]], classes: tuple[str, ...], length: int, multi: bool) -> Rows:
        place = {name: i for i, name in enumerate(classes)}
        codes = fit_length(part[0], length).codes
        if not multi:
            return codes, np.array([place[str(label)] for label in part[1]], np.int64)
        target = np.zeros((len(part[1]), len(classes)), np.int64)
        for row, label in enumerate(part[1]):
            target[row, [place[str(name)] for name in label]] = 1
        return codes, target

    def _keep(self, model: Classifier) -> None:
        self.model_ = model
        self.classes_ = np.array(model.config.classes)

    def predict_proba(self, X: Sequence[str]) -> NDArray[np.float64]:
        """(rows, classes), in the order of classes_; calibrated on the held-out rows."""
        check_is_fitted(self, "model_")
        return predict(self.model_, fit_length(_texts(X), self.model_.config.length).codes)

    def predict(self, X: Sequence[str]) -> Any:
        """The most probable class of each row, or for a multi-label model the tuple of classes above one half."""
        found = self.predict_proba(X)
        if self.model_.config.task == "multi":
            return [tuple(self.classes_[row >= 0.5]) for row in found]
        return self.classes_[found.argmax(1)]

    def save(self, path: str | Path, card: Card | None = None) -> None:
        """Weights, class names and configuration in one safetensors file."""
        check_is_fitted(self, "model_")
        save(self.model_, path, card)

    @classmethod
    def load(cls, path: str | Path) -> TitansSequenceClassifier:
        """A fitted classifier from what `save` wrote."""
        model, _ = load(path)
        config = model.config
        found = cls(strands=config.strands, length=config.length, kmer=config.kmer, layers=config.layers, rule=config.rule)
        found._keep(model)
        return found


def _texts(sequences: Sequence[str]) -> list[str]:
    found = list(sequences)
    for row, text in enumerate(found):
        if not isinstance(text, str):
            raise UserError(f"row {row} is a {type(text).__name__}, not a sequence of letters")
    return found
