"""A whole chromosome through the DNA language model in one pass: time a base and resident memory stay flat.

    python benchmarks/long_dna.py [--bases 4641652] [--steps 20]

The model is trained for a few steps on the first tenth (its bits are not the point here) and then reads E. coli MG1655 from
the first base to the last with its memory carried.
figures.time_ratio: time a base over the last fifth of the pass, divided by that over the second fifth (the first warms up).
figures.rss_growth: resident memory at the end divided by that after the first fifth.
split_difference: largest difference of bits per base between pieces of 8,192 bases and of 1,000 over the first 100,000.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from connectors.sequences import pieces  # noqa: E402
from titans_core.dna_model import ContextCounts, DnaModel, DnaModelConfig, Training, bits_per_base, train  # noqa: E402
from titans_core.tokenizers import encode_bases  # noqa: E402

PIECE = 8192


def resident() -> float:
    """Megabytes held by this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0], data="folder of the genomes")
    parser.set_defaults(data=ROOT / "../shared/data/sequences/genomes")
    parser.add_argument("--bases", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.data / "ecoli_MG1655.fasta.gz"
    orders = (2, 4, 8, 11)  # short contexts: what is measured is the pass, and the tables stay small
    sample = encode_bases(next(bases for _, _, bases in pieces(file, 460_000)))
    counts = ContextCounts.of([sample], orders)
    torch.manual_seed(0)
    model = DnaModel(DnaModelConfig(orders=orders, dim=32))
    train(model, counts, [sample], Training(steps=options.steps, window=256, batch=16))
    short = [bits_per_base(model, counts, sample[:100_000], piece=piece)[0] for piece in (PIECE, 1000)]

    # A piece is looked up with the bases that its first contexts reach back to, so that pieces equal one pass.
    reach, held, state = max(orders), b"", model.initial_state(1)
    marks: list[tuple[int, float, float]] = []
    bits, done = 0.0, 0
    for _, _, bases in pieces(file, PIECE):
        codes = encode_bases(held + bases)
        found, state = bits_per_base(model, counts, codes, len(held), piece=PIECE, state=state)
        bits += found * len(bases)
        done += len(bases)
        held = (held + bases)[-reach:]
        marks.append((done, time.process_time(), resident()))
        if done >= options.bases:
            break

    def pace(low: float, high: float) -> float:
        part = [mark for mark in marks if low * done <= mark[0] <= high * done]
        return (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0])

    after_first = next(mark for mark in marks if mark[0] >= 0.2 * done)
    figures = {"time_ratio": pace(0.8, 1.0) / pace(0.2, 0.4), "rss_growth": marks[-1][2] / after_first[2]}
    details = {
        "bases": done,
        "microseconds_a_base": 1e6 * pace(0.2, 1.0),
        "resident_mb": marks[-1][2],
        "bits_per_base": bits / done,
        "split_difference": abs(short[0] - short[1]),
    }
    report.finish("long_dna", {**figures, "details": details}, libraries=("torch",))


if __name__ == "__main__":
    main()
