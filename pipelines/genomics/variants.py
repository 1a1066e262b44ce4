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
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from connectors.errors import UserError
from connectors.sequences import Genome, Source, Variant, variants
from pipelines.genomics.training import fit_length
from titans_core.classifier import Classifier, SequenceClassifier, reverse_complement
from titans_core.tokenizers import encode_bases


def logits(model: Classifier, codes: NDArray[np.uint8], batch: int = 256) -> NDArray[np.float64]:
    """Centred logits (R, C) of encoded rows, averaged over both strands whatever the model was trained on."""
    found = []
    with torch.inference_mode():
        for part in torch.from_numpy(codes).long().split(batch):
            both = model(part)
            if model.config.strands == "forward":
                both = (both + model(reverse_complement(part))) / 2
            found.append(both - both.mean(-1, keepdim=True))
    return torch.cat(found).double().numpy() if found else np.zeros((0, len(model.config.classes)))


def score_variants(model: Classifier, vcf: Source, genome: Genome | str | Path, *, batch: int = 256) -> Iterator[pl.DataFrame]:
    """Frames of up to `batch` alleles, in the order of the file, one row an ALT allele; nothing is left out.

    Columns: contig, position (as in the VCF, 1-based), id, ref, alt, status, and effect_CLASS for every class (null unless
    status is "ok"; the others are explained at `connectors.sequences.Variant`). found holds the genome's bases where they
    are not REF.
    """
    contigs = genome if isinstance(genome, Genome) else Genome(genome)
    alleles = variants(vcf, contigs, model.config.length)
    while rows := list(islice(alleles, batch)):
        yield _frame(model, rows)


def _frame(model: Classifier, rows: list[Variant]) -> pl.DataFrame:
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


def mutagenesis(model: Classifier, sequence: str, label: str, *, batch: int = 256) -> NDArray[np.float64]:
    """Effect on a class of every single substitution: (bases, 4), columns A, C, G, T; 0 where the base is the sequence's.

    3 L + 1 answers, `batch` at a time: memory does not grow with the number of substitutions.
    """
    codes, place = _window(model, sequence, label)
    bases = len(sequence)
    changes = [(at, base) for at in range(bases) for base in range(4) if codes[at] != base]
    before = logits(model, codes[None])[0, place]
    effects = np.zeros((bases, 4))
    for start in range(0, len(changes), batch):
        part = changes[start : start + batch]
        rows = np.repeat(codes[None], len(part), 0)
        for row, (at, base) in zip(rows, part, strict=True):
            row[at] = base
        answers = logits(model, rows)[:, place] - before
        for (at, base), effect in zip(part, answers, strict=True):
            effects[at, base] = effect
    return effects


def saliency(model: SequenceClassifier, sequence: str, label: str) -> NDArray[np.float64]:
    """Gradient of a class's centred logit by the one-hot rows of a sequence: (bases, 4), averaged over both strands.

    The mean over the four bases is taken away, because one-hot rows never move along it (Majdandzic et al. 2023, "Correcting
    gradient-based interpretations of deep neural networks for genomics"). The row of the sequence's own base is its importance.
    Only the network has a gradient: what the composition branch adds is seen by `mutagenesis` alone.
    """
    codes, place = _window(model, sequence, label)
    with torch.inference_mode(False), torch.enable_grad():
        rows = model.rows[torch.from_numpy(codes).long()[None]].clone().requires_grad_(True)
        answers = model.network_of(rows)
        if model.config.strands == "forward":
            answers = (answers + model.network_of(rows.flip(1, 2))) / 2
        (found,) = torch.autograd.grad(model.network_scale * (answers[0, place] - answers[0].mean()), rows)
    gradient: NDArray[np.float64] = found[0, : len(sequence)].double().numpy()
    return gradient - gradient.mean(1, keepdims=True)


def _window(model: Classifier, sequence: str, label: str) -> tuple[NDArray[np.uint8], int]:
    """A sequence as the model's padded codes, and the place of a class."""
    if len(sequence) > model.config.length:
        raise UserError(f"{len(sequence)} bases are more than the {model.config.length} that the model looks at: cut a window out")
    if label not in model.config.classes:
        raise UserError(f"'{label}' is none of the classes {', '.join(model.config.classes)}")
    return fit_length([sequence], model.config.length).codes[0], model.config.classes.index(label)


def explain(model: Classifier, sequence: str, label: str) -> pl.DataFrame:
    """One row a base: position (0-based), base, saliency, and effect_A, effect_C, effect_G, effect_T of substituting it.

    A fine-tuned language model reads counts of words, which have no gradient: its saliency is 0.
    """
    effects, codes = mutagenesis(model, sequence, label), encode_bases(sequence)
    own = np.zeros(len(codes))
    if isinstance(model, SequenceClassifier):
        own = np.where(codes < 4, saliency(model, sequence, label)[np.arange(len(codes)), np.minimum(codes, 3)], 0.0)
    columns = {f"effect_{base}": effects[:, i] for i, base in enumerate("ACGT")}
    return pl.DataFrame({"position": np.arange(len(codes)), "base": list(sequence.upper()), "saliency": own, **columns})


def plot(table: pl.DataFrame, title: str) -> Figure:
    """A logo of the sequence by the importance of its bases, the saliency, and the effect of every substitution."""
    effects = table.select("effect_A", "effect_C", "effect_G", "effect_T").to_numpy()
    importance = -effects.sum(1) / 3  # what the class loses on average when the base is another one
    bases = table["base"].to_list()
    figure = Figure(figsize=(min(4 + 0.13 * len(bases), 40), 5), layout="constrained")
    logo, line, heat = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1.4))
    for at, (base, height) in enumerate(zip(bases, importance, strict=True)):
        if base in _COLOURS and height != 0:
            logo.add_patch(_letter(base, at, float(height)))
    logo.set(xlim=(-0.5, len(bases) - 0.5), title=title, ylabel="importance")
    logo.set_ylim(min(0.0, float(importance.min())) * 1.1 - 1e-9, max(0.0, float(importance.max())) * 1.1 + 1e-9)
    logo.axhline(0, color="black", linewidth=0.5)
    line.bar(np.arange(len(bases)), table["saliency"].to_numpy(), color="0.4")
    line.set_ylabel("saliency")
    reach = float(np.abs(effects).max()) or 1.0
    shown = heat.imshow(effects.T, aspect="auto", cmap="RdBu_r", vmin=-reach, vmax=reach, interpolation="nearest")
    heat.set(yticks=range(4), yticklabels=list("ACGT"), xlabel="position", ylabel="changed to")
    figure.colorbar(shown, ax=heat, label="effect")
    return figure


_COLOURS = {"A": "#2f8f3a", "C": "#2b5fb4", "G": "#e0a030", "T": "#c8372d", "U": "#c8372d"}


def _letter(base: str, at: int, height: float) -> PathPatch:
    """A letter that fills the column of a position from 0 to `height`."""
    glyph = TextPath((0, 0), base, size=1)
    box = glyph.get_extents()
    fill = Affine2D().translate(-box.x0, -box.y0).scale(0.9 / box.width, height / box.height).translate(at - 0.45, 0)
    return PathPatch(glyph.transformed(fill), facecolor=_COLOURS[base], linewidth=0)
