"""What a classifier says of sequences, in the one form that jobs, live streams and the served model share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connectors.errors import UserError
from pipelines.genomics.training import fit_length, predict
from titans_core import dna_model
from titans_core.classifier import Classifier, load
from titans_core.config import ConfigError
from titans_core.dna_model import ContextCounts, DnaModel
from titans_core.tokenizers import TokenError, encode_bases

AND = ";"  # between the classes of a multi-label prediction


def load_classifier(path: Path) -> Classifier:
    """The classifier of a weights file; UserError where there is none."""
    try:
        return load(path)[0]
    except OSError as error:
        raise UserError(f"the model {path} cannot be read ({error.strerror or error})") from None
    except ConfigError as error:
        raise UserError(f"{error}: name a file that tethys genomics train --output wrote, or a registered model") from None


def load_language_model(path: Path) -> tuple[DnaModel, ContextCounts]:
    """The DNA language model of a file that `pretrain` wrote; UserError where there is none."""
    try:
        return dna_model.load(path)
    except OSError as error:
        raise UserError(f"the model {path} cannot be read ({error.strerror or error})") from None
    except ConfigError as error:
        raise UserError(f"{error}: name a file that tethys genomics pretrain wrote") from None


def answer(model: Classifier, sequences: Sequence[str]) -> pl.DataFrame:
    """One row a sequence: length, prediction, prob_CLASS for every class in the model's order.

    The prediction is the most probable class; of a multi-label model, all classes from one half on, joined by ";". A sequence of no
    base has no answer: its prediction and probabilities are null.
    """
    probabilities = predict(model, fit_length(sequences, model.config.length).codes)
    columns: dict[str, Any] = {"length": [len(sequence) for sequence in sequences], "prediction": named(model, probabilities)}
    columns |= {f"prob_{name}": probabilities[:, i] for i, name in enumerate(model.config.classes)}
    frame = pl.DataFrame(columns, schema_overrides={"length": pl.Int64, "prediction": pl.String})
    if all(sequences):
        return frame
    return frame.with_columns(pl.when(pl.col("length") > 0).then(pl.all().exclude("length")))


def named(model: Classifier, probabilities: NDArray[np.float64]) -> list[str]:
    """The predictions that probabilities (R, C) amount to."""
    classes = model.config.classes
    if model.config.task == "multi":
        return [AND.join(name for name, value in zip(classes, row, strict=True) if value >= 0.5) for row in probabilities]
    return [classes[i] for i in probabilities.argmax(1)]


def checked(rows: Iterable[Any]) -> list[str]:
    """Rows of an untrusted request as sequences; UserError names the first row (from 1) that is none."""
    found: list[str] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, str):
            raise UserError(f"row {number}: {row!r} is no sequence: send text of the letters A, C, G, T and the IUPAC codes")
        if not row:
            raise UserError(f"row {number}: the sequence is empty: send at least one base")
        try:
            encode_bases(row)
        except TokenError as error:
            raise UserError(f"row {number}: {error}: send the letters A, C, G, T and the IUPAC codes, without blanks or headers") from None
        found.append(row)
    return found
