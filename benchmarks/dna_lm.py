"""Bits per base of the DNA language model, beside static Markov chains on the same split.

    python benchmarks/dna_lm.py [--sets ecoli ecoli_sister saureus lambda] [--steps 120]

    ecoli         E. coli MG1655: trained on the first 90 %, measured on the last 10 %   (same genome, another part)
    ecoli_sister  trained on MG1655, measured on the last 10 % of E. coli 536            (same species)
    saureus       S. aureus N315: first 90 %, last 10 %                                  (same genome, another part)
    lambda        trained on MG1655, measured on phage lambda                            (host and phage)

figures.SET.{markov,tethys_frozen,tethys_carried}: the best order of an interpolated chain (both strands counted); the model
with its memory's writes switched off; the model with its memory carried from the first base measured to the last.
tethys_windows (in figures.details) starts with fresh memory every 512 bases, as in training. Uniform is 2.0.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from connectors.sequences import read  # noqa: E402
from titans_core.dna_model import (  # noqa: E402
    Codes,
    ContextCounts,
    DnaModel,
    DnaModelConfig,
    Training,
    bits_per_base,
    train,
    without_writes,
)
from titans_core.tokenizers import encode_bases  # noqa: E402

FILES = {
    "MG1655": "ecoli_MG1655.fasta.gz",
    "536": "ecoli536_NC_008253.fna.gz",
    "N315": "saureus_N315.fasta.gz",
    "lambda": "lambda_NC_001416.fa.gz",
}
SETS = {
    "ecoli": ("MG1655", 0.9, "MG1655", 0.9),
    "ecoli_sister": ("MG1655", 1.0, "536", 0.9),
    "saureus": ("N315", 0.9, "N315", 0.9),
    "lambda": ("MG1655", 1.0, "lambda", 0.0),
}
WINDOW = 512


def genome(folder: Path, name: str) -> Codes:
    """Every contig of a genome in one row, an N between them."""
    parts = []
    for record in read(folder / FILES[name]):
        parts += [encode_bases(record.sequence), np.array([4], np.uint8)]
    return np.concatenate(parts[:-1])


def markov(counts: ContextCounts, codes: Codes, start: int, piece: int = 1 << 16) -> dict[int, float]:
    """Bits per base of every order's chain."""
    totals: dict[int, float] = dict.fromkeys(counts.orders, 0.0)
    bases = 0
    for at in range(start, len(codes), piece):
        stop = min(at + piece, len(codes))
        known = codes[at:stop] < 4
        rows = np.flatnonzero(known)
        for k, table in counts.back_off(codes, at, stop).items():
            totals[k] -= float(np.log2(table[rows, codes[at:stop][known]]).sum())
        bases += len(rows)
    return {k: total / bases for k, total in totals.items()}


def in_windows(model: DnaModel, counts: ContextCounts, codes: Codes, start: int, batch: int = 64) -> float:
    """Fresh memory every WINDOW bases; a rest shorter than a window is left out."""
    total, bases = 0.0, 0
    places = range(start, len(codes) - WINDOW + 1, WINDOW)
    with torch.inference_mode():
        for first in range(0, len(places), batch):
            spans = places[first : first + batch]
            rows = np.stack([counts.look_up(codes, at, at + WINDOW) for at in spans])
            target = torch.from_numpy(np.stack([codes[at : at + WINDOW] for at in spans])).long()
            answer, _ = model(torch.from_numpy(rows), target, model.initial_state(len(spans)))
            known = target < 4
            total -= float(answer.gather(-1, target.clamp(max=3)[..., None]).squeeze(-1)[known].double().sum())
            bases += int(known.sum())
    return total / bases / np.log(2)


def measure(folder: Path, name: str, steps: int, seed: int) -> dict[str, Any]:
    trained, share, measured, start_share = SETS[name]
    whole = genome(folder, trained)
    part = whole[: int(len(whole) * share)]
    codes = whole if measured == trained else genome(folder, measured)
    start = int(len(codes) * start_share)
    began = time.process_time()
    config = DnaModelConfig()
    counts = ContextCounts.of([part], config.orders)
    torch.manual_seed(seed)
    model = DnaModel(config)
    history = train(model, counts, [part], Training(steps=steps, window=WINDOW, seed=seed))
    chains = markov(counts, codes, start)
    carried, _ = bits_per_base(model, counts, codes, start)
    with without_writes(model):
        frozen, _ = bits_per_base(model, counts, codes, start)
    best = min(chains, key=lambda k: chains[k])
    return {
        "figures": {"markov": chains[best], "tethys_frozen": frozen, "tethys_carried": carried},
        "details": {
            "markov_order": best,
            "markov_by_order": chains,
            "tethys_windows": in_windows(model, counts, codes, start),
            "train_bits_last_steps": float(np.mean(history[-20:])),
            "train_bases": len(part),
            "test_bases": len(codes) - start,
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": round(time.process_time() - began, 1),
        },
    }


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0], data="folder of the genomes")
    parser.set_defaults(data=ROOT / "../shared/data/sequences/genomes")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS), help="sets to measure")
    parser.add_argument("--steps", type=int, default=120, help="training steps of 16,384 bases")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name in options.sets:
        found = measure(options.data, name, options.steps, options.seed)
        report.progress(json.dumps({name: found}))
        figures[name], details[name] = found["figures"], found["details"]
    report.finish("dna_lm", {**figures, "details": details}, libraries=("torch", "numpy"))


if __name__ == "__main__":
    main()
