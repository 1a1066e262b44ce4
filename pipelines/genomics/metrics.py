"""Scores of a classifier with bootstrap intervals, on all rows or on some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, matthews_corrcoef, roc_auc_score

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """A value with its 95 % interval over resampled rows."""

    value: float
    low: float
    high: float


def accuracy(target: NDArray[np.int64], probabilities: Array) -> float:
    """Share of rows whose most probable class is theirs."""
    return float((probabilities.argmax(1) == target).mean())


def mcc(target: NDArray[np.int64], probabilities: Array) -> float:
    """Matthews' correlation coefficient (Gorodkin's R_K for more than two classes)."""
    return float(matthews_corrcoef(target, probabilities.argmax(1)))


def auroc(target: NDArray[np.int64], probabilities: Array) -> float:
    """Area under the ROC curve, one class against the rest, averaged over classes."""
    return _each(target, probabilities, roc_auc_score)


def auprc(target: NDArray[np.int64], probabilities: Array) -> float:
    """Average precision: of the last class for two classes, averaged over classes for more."""
    return _each(target, probabilities, average_precision_score)


def brier(target: NDArray[np.int64], probabilities: Array) -> float:
    """Mean squared distance of the probabilities to the truth, summed over classes and halved (0 best, 1 worst)."""
    return float(((probabilities - np.eye(probabilities.shape[1])[target]) ** 2).sum(1).mean() / 2)


def ece(target: NDArray[np.int64], probabilities: Array, bins: int = 15) -> float:
    """Expected calibration error: |confidence - accuracy| over equal-width bins of confidence."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == target
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    size = np.bincount(which, minlength=bins)
    gap = np.abs(np.bincount(which, confidence, bins) - np.bincount(which, right, bins))
    return float(gap[size > 0].sum() / len(target))


METRICS: dict[str, Callable[[NDArray[np.int64], Array], float]] = {
    "accuracy": accuracy,
    "mcc": mcc,
    "auroc": auroc,
    "auprc": auprc,
    "brier": brier,
    "ece": ece,
}


def _each(target: NDArray[np.int64], probabilities: Array, measure: Callable[..., float]) -> float:
    classes = range(1, 2) if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    values = [measure(target == c, probabilities[:, c]) for c in classes if 0 < (target == c).sum() < len(target)]
    return float(np.mean(values)) if values else float("nan")


def scores(
    target: Sequence[int], probabilities: Array, *, rows: Sequence[int] | None = None, draws: int = 500, seed: int = 0
) -> dict[str, Score]:
    """Every metric of METRICS with its interval; rows restricts to some (the clean ones of an audit)."""
    truth = np.asarray(target, np.int64)
    if rows is not None:
        truth, probabilities = truth[list(rows)], probabilities[list(rows)]
    if not len(truth):
        raise ValueError("no rows to score")
    choose = np.random.default_rng(seed)
    samples = [choose.integers(0, len(truth), len(truth)) for _ in range(draws)]
    found = {}
    for name, measure in METRICS.items():
        drawn = np.array([measure(truth[sample], probabilities[sample]) for sample in samples])
        low, high = np.nanquantile(drawn, (0.025, 0.975))
        found[name] = Score(measure(truth, probabilities), float(low), float(high))
    return found
