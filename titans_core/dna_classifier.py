"""PretrainedClassifier: a DNA language model (`dna_model`) with a head, fine-tuned to tell classes of sequences apart.

    counts, bases -> language model -> what it reads at each base, and how well each context foretold the base
    mean and maximum over the bases that are known -> head -> logits

All weights of the language model go on learning; its counts of the training genome stay. Strands, the composition branch and the
calibration are those of `classifier.Classifier`.

Axis letters: B sequences, L bases, K context lengths, D width of the language model, C classes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titans_core.classifier import Classifier, ClassifierConfig, reverse_complement
from titans_core.dna_model import ContextCounts, DnaModel, DnaModelConfig
from titans_core.tokenizers import N


class PretrainedClassifier(Classifier):
    """Logits of encoded sequences. `strands` is "forward" or "both"; the fields of the config that shape the motif network are unused."""

    kind = "pretrained"

    def __init__(self, config: ClassifierConfig, pretrained: DnaModelConfig, counts: ContextCounts) -> None:
        super().__init__(config)
        self.counts = counts
        self.model = DnaModel(pretrained)
        width = 2 * pretrained.dim + len(pretrained.orders)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(
            nn.Dropout(config.dropout), nn.Linear(width, 64), nn.GELU(), nn.Dropout(config.dropout), nn.Linear(64, len(config.classes))
        )

    def network(self, codes: Tensor) -> Tensor:
        """Encoded bases (B, L) -> logits (B, C); in evaluation the average over both strands where the config says so."""
        found: Tensor = self.head(self.norm(self._features(codes)))
        if self.config.strands == "both" and not self.training:
            found = (found + self.head(self.norm(self._features(reverse_complement(codes))))) / 2
        return found

    def _features(self, codes: Tensor) -> Tensor:
        """(B, L) -> (B, 2 D + K): mean and maximum of what is read, and the mean log-probability that each context gave."""
        rows, bases = codes.shape
        # A column of N between the rows, so that no context reaches from one sequence into the next.
        apart = np.full((rows, bases + 1), N, np.uint8)
        apart[:, 1:] = codes.cpu().numpy()
        counts = self.counts.look_up(apart.ravel(), 0, apart.size).reshape(rows, bases + 1, -1, 4)[:, 1:]
        says, read, _ = self.model.read(torch.from_numpy(np.ascontiguousarray(counts)), codes, self.model.initial_state(rows))
        known = (codes < N)[..., None]
        total = known.sum(1).clamp(min=1)
        own = says.gather(-1, codes.clamp(max=3)[..., None, None].expand(-1, -1, says.shape[2], 1)).squeeze(-1)
        mean = (read * known).sum(1) / total
        most = read.masked_fill(~known, -torch.inf).amax(1).nan_to_num(neginf=0.0)
        return torch.cat((mean, most, (own * known).sum(1) / total), dim=1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "pretrained": asdict(self.model.config)}

    def tensors(self) -> dict[str, Tensor]:
        counts = {f"counts.{name}": torch.from_numpy(table) for name, table in self.counts.tensors().items()}
        return {**super().tensors(), **counts}

    @classmethod
    def restore(cls, settings: dict[str, Any], tensors: dict[str, Tensor]) -> PretrainedClassifier:
        said = settings.pop("pretrained")
        pretrained = DnaModelConfig(**{**said, "orders": tuple(said["orders"])})
        tables = {name.removeprefix("counts."): each.numpy() for name, each in tensors.items() if name.startswith("counts.")}
        model = cls(ClassifierConfig.from_settings(settings), pretrained, ContextCounts.from_tensors(pretrained.orders, tables))
        model.load_state_dict({name: each for name, each in tensors.items() if not name.startswith("counts.")})
        return model


def from_language_model(config: ClassifierConfig, model: DnaModel, counts: ContextCounts) -> PretrainedClassifier:
    """A classifier that starts from a language model's weights; the model itself stays as it was."""
    found = PretrainedClassifier(config, model.config, counts)
    found.model.load_state_dict(model.state_dict())
    return found
