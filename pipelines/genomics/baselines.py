"""The models that stand beside every classifier: k-mer logistic regression, and a small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import sparse  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import matthews_corrcoef
from torch import Tensor, nn

from titans_core.classifier import reverse_complement
from titans_core.tokenizers import N, complement


def word_counts(codes: NDArray[np.uint8], k: int, strands: str) -> sparse.csr_matrix:
    """Counts of the clean k-mers of encoded rows (R, L) -> sparse (R, 4^k), rows of length one."""
    both = (codes, complement(codes)) if strands == "both" else (codes,)
    total: Any = 0
    for strand in both:
        rows, length = strand.shape
        places = max(length - k + 1, 0)
        words, clean = np.zeros((rows, places), np.int64), np.ones((rows, places), bool)
        for i in range(k):
            part = strand[:, i : i + places]
            words, clean = words * 4 + np.minimum(part, 3), clean & (part < N)
        row = np.repeat(np.arange(rows), places).reshape(rows, places)
        counts = sparse.csr_matrix((np.ones(int(clean.sum())), (row[clean], words[clean])), shape=(rows, 4**k))
        total = total + counts if not isinstance(total, int) else counts
    norm = np.sqrt(np.asarray(total.multiply(total).sum(1)).ravel())
    return sparse.csr_matrix(sparse.diags(1 / np.maximum(norm, 1e-12)) @ total)


@dataclass(frozen=True)
class KmerRegression:
    """Logistic regression on k-mer counts; weight (C, 4^k) and bias (C,), logits of the classes in order."""

    k: int
    strands: str
    strength: float
    weight: NDArray[np.float64]
    bias: NDArray[np.float64]

    def logits(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = word_counts(codes, self.k, self.strands) @ self.weight.T + self.bias
        return found

    def probabilities(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        return torch.from_numpy(self.logits(codes)).softmax(-1).numpy()


def fit_kmer_regression(
    train: tuple[NDArray[np.uint8], NDArray[np.int64]],
    dev: tuple[NDArray[np.uint8], NDArray[np.int64]],
    classes: int,
    *,
    strands: Sequence[str] = ("forward", "both"),
    ks: Sequence[int] = (4, 5, 6),
    strengths: Sequence[float] = (10.0,),
) -> KmerRegression:
    """The best by MCC on dev over k, strands and inverse penalty."""
    best: tuple[float, KmerRegression] | None = None
    for k in ks:
        for strand in strands:
            counts, held = word_counts(train[0], k, strand), word_counts(dev[0], k, strand)
            for strength in strengths:
                fitted = LogisticRegression(C=strength, max_iter=300).fit(counts, train[1])
                weight, bias = np.zeros((classes, 4**k)), np.full(classes, -30.0)
                if classes == 2 and len(fitted.classes_) == 2:
                    weight[1], bias[:] = fitted.coef_[0], (0.0, fitted.intercept_[0])
                else:
                    weight[fitted.classes_], bias[fitted.classes_] = fitted.coef_, fitted.intercept_
                model = KmerRegression(k, strand, strength, weight, bias)
                score = matthews_corrcoef(dev[1], (held @ weight.T + bias).argmax(1))
                if best is None or score > best[0]:
                    best = score, model
    if best is None:
        raise ValueError("no k, strands or strengths to choose from")
    return best[1]


class SmallCnn(nn.Module):
    """Motif network: one-hot -> 64 motifs of 15 -> max-pool 4 -> 64 x 7 -> maximum and mean -> classes."""

    rows: Tensor

    def __init__(self, classes: int, strands: str = "forward", width: int = 64) -> None:
        super().__init__()
        self.strands = strands
        self.motifs = nn.Conv1d(4, width, 15, padding=7)
        self.norm = nn.BatchNorm1d(width)
        self.grammar = nn.Conv1d(width, width, 7, padding=3)
        self.grammar_norm = nn.BatchNorm1d(width)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(2 * width, classes))
        self.register_buffer("rows", torch.cat((torch.eye(4), torch.full((1, 4), 0.25))), persistent=False)

    def network(self, codes: Tensor) -> Tensor:
        tokens = F.max_pool1d(F.relu(self.norm(self.motifs(self.rows[codes].transpose(1, 2)))), 4, ceil_mode=True)
        tokens = F.relu(self.grammar_norm(self.grammar(tokens)))
        logits: Tensor = self.head(torch.cat((tokens.amax(2), tokens.mean(2)), dim=1))
        return logits

    def forward(self, codes: Tensor) -> Tensor:
        """Encoded bases (B, L) -> logits (B, C), averaged over both strands where asked."""
        logits = self.network(codes)
        return (logits + self.network(reverse_complement(codes))) / 2 if self.strands == "both" else logits
