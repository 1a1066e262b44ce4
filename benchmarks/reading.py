"""How fast the front door reads, beside needletail (FASTA) and dnaio (FASTQ) on the same files in the same run.

    python benchmarks/reading.py [--data DIR] [--repeats 7]

Both sides touch every record's id and sequence. Rates are MB of uncompressed file per CPU second, the
best of the repeats, taken in turns; a ratio is the smaller of two files: one genome in a single record and many short
records, made from the E. coli and Illumina files (or from a seed when they are absent). The front door checks every
letter and counts IUPAC codes while it reads; the libraries do not.
"""

from __future__ import annotations

import gzip
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402

report.limit_threads(1)

import dnaio  # noqa: E402
import needletail  # noqa: E402

from connectors import sequences  # noqa: E402


def tethys(path: str) -> int:
    bases = 0
    for record in sequences.read(path):
        bases += len(record.sequence) + len(record.name) * 0
    return bases


def with_needletail(path: str) -> int:
    bases = 0
    for record in needletail.parse_fastx_file(path):
        bases += len(record.seq) + len(record.id) * 0
    return bases


def with_dnaio(path: str) -> int:
    bases = 0
    with dnaio.open(path) as reader:
        for record in reader:
            bases += len(record.sequence) + len(record.name) * 0
    return bases


def rates(path: Path, ours: Callable[[str], int], theirs: Callable[[str], int], repeats: int) -> tuple[float, float]:
    """MB per CPU second of both sides, in turns."""
    best = [float("inf"), float("inf")]
    totals = set()
    for _ in range(repeats):
        for side, function in enumerate((ours, theirs)):
            start = time.process_time()
            totals.add(function(str(path)))
            best[side] = min(best[side], time.process_time() - start)
    if len(totals) != 1:
        raise SystemExit(f"{path}: the two sides counted {totals} bases")
    size = path.stat().st_size / 1e6
    return size / best[0], size / best[1]


def files(data: Path, folder: Path) -> dict[str, Path]:
    """Four plain files of 5 to 40 MB."""
    paths = {name: folder / name for name in ("genome.fa", "short.fa", "short.fq", "long.fq")}
    genome, short, long = (data / name for name in ("genomes/ecoli_MG1655.fasta.gz", "reads/illumina18.fq.gz", "reads/nanopore.fq.gz"))
    if genome.exists():
        paths["genome.fa"].write_bytes(gzip.decompress(genome.read_bytes()) * 4)
        paths["short.fq"].write_bytes(gzip.decompress(short.read_bytes()) * 12)
        paths["long.fq"].write_bytes(gzip.decompress(long.read_bytes()) * 6)
        bases = "".join(record.sequence for record in sequences.read(genome))
    else:
        choose = random.Random(7)
        bases = "".join(choose.choices("ACGT", k=4_600_000))
        lines = "\n".join(bases[i : i + 70] for i in range(0, len(bases), 70))
        paths["genome.fa"].write_text(f">made\n{lines}\n" * 4)
        for name, length in (("short.fq", 150), ("long.fq", 2000)):
            reads = [bases[i : i + length] for i in range(0, len(bases) - length, length)]
            qualities = ["".join(choose.choices("ABCDEFGHI#", k=length)) for _ in range(50)]
            paths[name].write_text("".join(f"@r{i}\n{r}\n+\n{qualities[i % 50]}\n" for i, r in enumerate(reads)))
    windows = (bases[i : i + 101] for i in range(0, len(bases) - 101, 32))
    paths["short.fa"].write_text("".join(f">window_{i}\n{window}\n" for i, window in enumerate(windows)))
    return paths


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0], data="folder with genomes/ and reads/")
    parser.set_defaults(data=ROOT / "../shared/data/sequences")
    parser.add_argument("--repeats", type=int, default=9, help="turns, of which the best counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {}
        for name, path in files(options.data, Path(folder)).items():
            peer = "needletail" if name.endswith(".fa") else "dnaio"
            other = with_needletail if peer == "needletail" else with_dnaio
            ours, theirs = rates(path, tethys, other, options.repeats)
            rows[name] = {"tethys_mb_s": round(ours, 1), f"{peer}_mb_s": round(theirs, 1), "ratio": ours / theirs}
            report.progress(f"{name} {rows[name]}")
    figures = {
        "fasta_vs_needletail": min(rows["genome.fa"]["ratio"], rows["short.fa"]["ratio"]),
        "fastq_vs_dnaio": min(rows["short.fq"]["ratio"], rows["long.fq"]["ratio"]),
        "files": rows,
    }
    report.finish("reading", figures, libraries=("dnaio", "needletail", "isal"))


if __name__ == "__main__":
    main()
