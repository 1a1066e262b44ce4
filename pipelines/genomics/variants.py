"""What a variant does to a classifier's answer, and which bases the answer hangs on.

Every allele of a VCF is shown to the model in two windows, the genome's and the allele's, on both strands; its effect on a
class is the difference of the logits, alternative minus reference, each taken against the mean over classes. It is
antisymmetric by construction: exchanging the alleles changes its sign and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from connectors.sequences import Genome, Source, Variant, variants
from pipelines.genomics.training import fit_length
from titans_core.classifier import SequenceClassifier, reverse_complement
from titans_core.tokenizers import encode_bases


def logits(model: SequenceClassifier, codes: NDArray[np.uint8], batch: int = 256) -> NDArray[np.float64]:
    """Centred logits (R, C) of encoded rows, averaged over both strands whatever the model was trained on."""
    found = []
    with torch.inference_mode():
        for part in torch.from_numpy(codes).long().split(batch):
            both = model(part)
            if model.config.strands == "forward":
                both = (both + model(reverse_complement(part))) / 2
            found.append(both - both.mean(-1, keepdim=True))
    return torch.cat(found).double().numpy() if found else np.zeros((0, len(model.config.classes)))


def score_variants(model: SequenceClassifier, vcf: Source, genome: Genome | str | Path, *, batch: int = 256) -> Iterator[pl.DataFrame]:
    """Frames of up to `batch` alleles, in the order of the file, one row an ALT allele; nothing is left out.

    Columns: contig, position (as in the VCF, 1-based), id, ref, alt, status, and effect_CLASS for every class (null unless
    status is "ok"; the others are explained at `connectors.sequences.Variant`). found holds the genome's bases where they
    are not REF.
    """
    contigs = genome if isinstance(genome, Genome) else Genome(genome)
    alleles = variants(vcf, contigs, model.config.length)
    while rows := list(islice(alleles, batch)):
        yield _frame(model, rows)


def _frame(model: SequenceClassifier, rows: list[Variant]) -> pl.DataFrame:
    ok = [i for i, row in enumerate(rows) if row.status == "ok"]
    length = model.config.length
    shown = [rows[i].reference.decode() for i in ok] + [rows[i].alternative.decode() for i in ok]
    answers = logits(model, fit_length(shown, length).codes)
    effects = answers[len(ok) :] - answers[: len(ok)]
    columns: dict[str, list[object]] = {
        "contig": [row.contig for row in rows],
        "position": [row.position + 1 for row in rows],
        "id": [row.name for row in rows],
        "ref": [row.ref for row in rows],
        "alt": [row.alt for row in rows],
        "status": [row.status for row in rows],
        "found": [row.found if row.status == "ref_mismatch" else None for row in rows],
    }
    for place, name in enumerate(model.config.classes):
        values: list[object] = [None] * len(rows)
        for row, effect in zip(ok, effects[:, place], strict=True):
            values[row] = float(effect)
        columns[f"effect_{name}"] = values
    texts = dict.fromkeys(("contig", "id", "ref", "alt", "status", "found"), pl.String)
    numbers = {f"effect_{name}": pl.Float64 for name in model.config.classes}
    return pl.DataFrame(columns, schema_overrides={**texts, "position": pl.Int64, **numbers})


def mutagenesis(model: SequenceClassifier, sequence: str, label: str) -> NDArray[np.float64]:
    """Effect on a class of every single substitution: (bases, 4), columns A, C, G, T; 0 where the base is the sequence's."""
    if len(sequence) > model.config.length:
        raise ValueError(f"{len(sequence)} bases are more than the {model.config.length} that the model looks at")
    if label not in model.config.classes:
        raise ValueError(f"'{label}' is none of the classes {', '.join(model.config.classes)}")
    codes = encode_bases(sequence)
    rows = [codes]
    for at in range(len(codes)):
        for base in range(4):
            changed = codes.copy()
            changed[at] = base
            rows.append(changed)
    padded = np.full((len(rows), model.config.length), 4, np.uint8)
    padded[:, : len(codes)] = rows
    answers = logits(model, padded)[:, model.config.classes.index(label)]
    effects: NDArray[np.float64] = (answers[1:] - answers[0]).reshape(len(codes), 4)
    effects[np.arange(len(codes))[codes < 4], codes[codes < 4]] = 0.0
    return effects
