"""Audit, train, score: the numbers that belong to a classifier, on all rows and on the clean ones, beside the floor."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connectors.errors import UserError
from pipelines.genomics.answers import answer
from pipelines.genomics.audit import Audit, audit
from pipelines.genomics.baselines import KmerRegression, fit_kmer_regression
from pipelines.genomics.datasets import Labelled
from pipelines.genomics.metrics import Score, scores
from pipelines.genomics.training import Rows, Settings, describe, fit_length, predict, train_classifier, words_of
from titans_core.classifier import Card, Classifier, ClassifierConfig, save
from titans_core.dna_model import ContextCounts, DnaModel


@dataclass(frozen=True)
class Trained:
    """A classifier with its audit and its scores: scores[model][rows][metric], rows "all" or "clean"."""

    model: Classifier
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
        lines += [f"without reading a base, {kind} scores {text}" for kind, text in self._shortcuts()]
        return "\n".join(lines)

    def _shortcuts(self) -> list[tuple[str, str]]:
        """What rules that read no base reach on test: the figures that a model has to beat to have learnt anything."""
        findings = [each for each in self.audit.findings if each.split == "test" and each.score is not None]
        return [(each.kind, f"accuracy {each.score:.3f} ({each.detail})") for each in findings]

    @property
    def flat(self) -> dict[str, float]:
        """Every score by the name MODEL.ROWS.METRIC."""
        return {
            f"{model}.{rows}.{name}": score.value
            for model, parts in self.scores.items()
            for rows, found in parts.items()
            for name, score in found.items()
        }

    def save(self, path: str | Path) -> None:
        """Weights, class names, configuration, digests of the data and scores in one safetensors file."""
        save(self.model, path, Card(data=self.digests, scores=self.flat))

    def card(self, name: str, rows: Mapping[str, int]) -> str:
        """The model card in Markdown; `rows` counts the rows of each split."""
        config = self.model.config
        metrics = _metrics(self.scores)
        lines = [f"# {name}", "", "A Titans sequence classifier of DNA.", "", "## Classes", *(f"- {each}" for each in config.classes)]
        lines += ["", "## Data", *(f"- {split}: {rows[split]} rows, sha256 {digest}" for split, digest in self.digests.items())]
        lines += [f"- audit: {self.audit.verdict}", *(f"- {each}" for each in self.audit.findings if each.verdict != "pass")]
        lines += ["", "## Scores on test", "With 95 % intervals over resampled rows, beside a k-mer logistic regression of the same rows.", ""]
        lines += ["| model | rows | " + " | ".join(metrics) + " |", "|---" * (2 + len(metrics)) + "|"]
        for model, parts in self.scores.items():
            for kind, found in parts.items():
                cells = (f"{score.value:.3f} [{score.low:.3f}, {score.high:.3f}]" for score in found.values())
                lines.append(f"| {model} | {kind} | " + " | ".join(cells) + " |")
        lines += ["", *(f"- Without reading a base, {kind} scores {text}." for kind, text in self._shortcuts())]
        lines += [
            "",
            "## Intended use",
            f"Sequences of {config.length} bases like those it was trained on, strands: {config.strands}. Shorter ones are padded with N,",
            "longer ones cut about their middle. Case is no information; the IUPAC ambiguity codes are read as N.",
            "",
            "## Limits",
            "- Probabilities are calibrated on the held-out rows and for their share of classes; another share needs another calibration.",
            "- Nothing is known of a class that was not in training: every sequence gets one of these classes.",
        ]
        return "\n".join(lines) + "\n"

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
    length: int | None = None,
    settings: Settings | None = None,
    accept_leaks: bool = False,
    pretrained: tuple[DnaModel, ContextCounts] | None = None,
    draws: int = 500,
    progress: Callable[[int, int, float], None] | None = None,
    **shape: Any,
) -> Trained:
    """Audit the splits, train, and score on test; `shape` goes to ClassifierConfig, `draws` resample for the intervals.

    `pretrained`: a DNA language model that is fine-tuned in place of the motif network.
    `length`: bases the model looks at, the longest training row where None; the shortest row's leaves it no length to learn from.

    Raises UserError where the audit refuses and accept_leaks is not set. Dev rows that train holds are left out.
    """
    for name, rows in (("train", train), ("dev", dev), ("test", test)):
        if not len(rows):
            raise UserError(f"there are no {name} rows: {'too few to hold a tenth of them out; ' if name == 'dev' else ''}bring some (--{name})")
    if len(set(train.labels)) < 2:
        raise UserError(f"a classifier needs at least two classes, the train rows have {sorted(set(train.labels))}")
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
    length = length or max(map(len, train.sequences))
    place = {name: i for i, name in enumerate(classes)}

    def encode(rows: Labelled) -> Rows:
        return fit_length(rows.sequences, length).codes, np.array([place[label] for label in rows.labels], np.int64)

    parts = {"train": encode(train), "dev": encode(dev), "test": encode(test)}
    kmer: KmerRegression = fit_kmer_regression(parts["train"], parts["dev"], len(classes), strands=(words_of(strands),))
    config = ClassifierConfig(classes=classes, length=length, strands=strands, **shape)  # type: ignore[arg-type]
    model = train_classifier(config, parts["train"], parts["dev"], settings, composition=kmer, pretrained=pretrained, progress=progress)
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


def register(
    trained: Trained,
    splits: Mapping[str, tuple[str, Labelled]],
    *,
    tracking_uri: str,
    name: str,
    alias: str | None,
    params: Mapping[str, Any],
) -> str:
    """Log a training as an MLflow run and register its model; returns NAME/VERSION. splits: source and rows by split."""
    from pipelines import tracking

    config = trained.model.config
    about = {**params, "strands": config.strands, "classes": ",".join(config.classes), "model_name": name}
    with tracking.run(tracking.open_store(tracking_uri), f"genomics train {name}", params=about) as run:
        for split, (source, rows) in splits.items():
            frame = pl.DataFrame({"sequence": rows.sequences, "label": rows.labels})
            run.log_dataset(frame, name=split, source=source, context=split)
        run.log_metrics(trained.flat)
        run.log_json(trained.to_json(), "report.json")
        example = splits["test"][1].sequences[:2]
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.safetensors"
            trained.save(weights)
            version = tracking.register_classifier(
                run,
                weights,
                trained.model.settings(),
                name=name,
                alias=alias,
                card=trained.card(name, {split: len(rows) for split, (_, rows) in splits.items()}),
                input_example=pl.DataFrame({"sequence": example}),
                output_example=answer(trained.model, example),
                metrics=trained.flat,
            )
    return f"{name}/{version}"
