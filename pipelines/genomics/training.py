"""From labelled sequences to a calibrated classifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from connectors.errors import UserError
from pipelines.genomics.baselines import KmerRegression, fit_kmer_regression
from titans_core.classifier import Classifier, ClassifierConfig, SequenceClassifier, reverse_complement
from titans_core.dna_classifier import from_language_model
from titans_core.dna_model import ContextCounts, DnaModel
from titans_core.tokenizers import N, encode_bases

Rows = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True)
class Fitted:
    """Encoded rows of one length, and how many had to be padded or cut."""

    codes: NDArray[np.uint8]
    padded: int
    cropped: int


def fit_length(sequences: Sequence[str], length: int) -> Fitted:
    """Encode sequences to (R, length): N on the right of shorter ones, longer ones cut about their middle."""
    codes = np.full((len(sequences), length), N, np.uint8)
    padded = cropped = 0
    for row, sequence in enumerate(sequences):
        start = max(len(sequence) - length, 0) // 2
        part = encode_bases(sequence[start : start + length])
        codes[row, : len(part)] = part
        padded += len(sequence) < length
        cropped += len(sequence) > length
    return Fitted(codes, padded, cropped)


@dataclass(frozen=True)
class Settings:
    """How a network is trained: row_passes rows are shown in all, in one cycle of the learning rate.

    weights: "balanced" gives every class the same weight in the loss, whatever its share of the rows.
    average: decay of the running mean of the weights, which is what is kept.
    """

    row_passes: int = 100_000
    batch: int = 128
    rate: float = 3e-3
    weight_decay: float = 1e-2
    smoothing: float = 0.05
    average: float = 0.99
    weights: str | None = None
    seed: int = 0


def train_network(
    network: nn.Module,
    logits: Callable[[Tensor], Tensor],
    rows: Rows,
    settings: Settings,
    *,
    strands: str,
    multi: bool = False,
    progress: Callable[[int, int, float], None] | None = None,
) -> None:
    """Train in place. `logits` maps codes (B, L) to (B, C) for one strand; "both" shows either strand at random."""
    torch.manual_seed(settings.seed)
    codes, target = torch.from_numpy(rows[0]).long(), torch.from_numpy(rows[1])
    count = len(codes)
    batch = min(settings.batch, count)
    epochs = max(1, round(settings.row_passes / count))
    steps = epochs * (count // batch)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=steps + 1, pct_start=0.15)
    mean = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(settings.average), use_buffers=True)
    weight = None
    if settings.weights == "balanced" and not multi:
        share = torch.bincount(target).clamp(min=1)
        weight = count / (len(share) * share)
    network.train()
    step = 0
    for _ in range(epochs):
        order = torch.randperm(count)
        for part in order[: count // batch * batch].split(batch):
            x, y = codes[part], target[part]
            if strands == "both":
                x = torch.where(torch.rand(len(x), 1) < 0.5, reverse_complement(x), x)
            if multi:
                loss = F.binary_cross_entropy_with_logits(logits(x), y.float())
            else:
                loss = F.cross_entropy(logits(x), y, weight=weight, label_smoothing=settings.smoothing)
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"the loss is {loss.item()} at step {step}: lower the rate ({settings.rate})")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            mean.update_parameters(network)
            step += 1
            if progress is not None:
                progress(step, steps, loss.item())
    network.load_state_dict(mean.module.state_dict())
    network.eval()


def train_classifier(
    config: ClassifierConfig,
    train: Rows,
    dev: Rows,
    settings: Settings | None = None,
    *,
    composition: KmerRegression | None = None,
    pretrained: tuple[DnaModel, ContextCounts] | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Classifier:
    """Composition branch (convex), then the network, then both weighed on dev.

    Args:
        train, dev: encoded rows (R, length) and classes (R,), or (R, C) zeros and ones for a multi-label model.
        composition: a k-mer regression fitted before on the same rows; fitted here when it is not given.
        pretrained: a DNA language model that is fine-tuned with a head, instead of the motif network.
    """
    settings = settings or Settings()
    multi = config.task == "multi"
    if config.kmer and not multi:
        strands = words_of(config.strands)
        if composition is None:
            composition = fit_kmer_regression(train, dev, len(config.classes), strands=(strands,), ks=(config.kmer,))
        if composition.strands != strands:
            raise ValueError(f"composition reads {composition.strands} strands, the model {config.strands}")
        config = replace(config, kmer=composition.k)
    else:
        config = replace(config, kmer=0)
    torch.manual_seed(settings.seed)
    if pretrained is not None and config.strands == "equivariant":
        raise UserError("a language model reads one strand at a time: fine-tune with strands forward or both")
    model: Classifier = SequenceClassifier(config) if pretrained is None else from_language_model(config, *pretrained)
    if model.composition is not None and composition is not None:
        with torch.no_grad():
            model.composition.weight.copy_(torch.from_numpy(composition.weight))
            model.composition.bias.copy_(torch.from_numpy(composition.bias))
        model.composition.requires_grad_(False)
    train_network(model, model.network, train, settings, strands=config.strands, multi=multi, progress=progress)
    with torch.inference_mode():
        parts = [model.both(part) for part in torch.from_numpy(dev[0]).long().split(512)]
    model.calibrate(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), torch.from_numpy(dev[1]))
    return model


def words_of(strands: str) -> str:
    """Which strands' words are counted beside a network that reads these."""
    return "forward" if strands == "forward" else "both"


def predict(model: Classifier, codes: NDArray[np.uint8], batch: int = 512) -> NDArray[np.float64]:
    """Probabilities (R, C) of encoded rows."""
    with torch.inference_mode():
        parts = [model.probabilities(part) for part in torch.from_numpy(codes).long().split(batch)]
    if not parts:
        return np.zeros((0, len(model.config.classes)))
    return torch.cat(parts).double().numpy()


def describe(model: Classifier) -> dict[str, Any]:
    """Numbers for a report."""
    return {
        "parameters": model.parameters_count,
        "network_scale": float(model.network_scale),
        "composition_scale": float(model.composition_scale),
    }
