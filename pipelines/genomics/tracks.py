"""Tracks for genome browsers: the probability of a class along a genome, from a finished classification job over intervals.

Where intervals overlap (tiled windows), a base has the mean of theirs. bigWig (`.bw`, `.bigwig`) or bedGraph (`.bedgraph`, `.bg`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connectors.errors import UserError
from connectors.sequences import Genome

Segment = tuple[str, int, int, float]
_BIGWIG, _BEDGRAPH = (".bw", ".bigwig"), (".bedgraph", ".bg")


def write_track(scores: Path, genome: Path, label: str, output: Path) -> int:
    """Write the track of a class; returns how many stretches it has. The file appears when it is whole."""
    if output.suffix.lower() not in _BIGWIG + _BEDGRAPH:
        raise UserError(f"{output}: a track is written to .bw, .bigwig, .bedgraph or .bg")
    held = Genome(genome)
    rows = _intervals(scores, label)
    try:
        names = {name: held.contig(name) for name in rows["contig"].unique().sort()}  # "chr1" and "1" are one contig
    except KeyError as error:
        raise UserError(f"{scores}: the contig {error.args[0]}: name the genome that the job was given") from None
    rows = rows.with_columns(pl.col("contig").replace_strict(names))
    lengths = held.lengths
    part = output.with_name("." + output.name)
    count = _bigwig(part, lengths, _segments(rows)) if output.suffix.lower() in _BIGWIG else _bedgraph(part, _segments(rows))
    part.replace(output)
    return count


def _intervals(scores: Path, label: str) -> pl.DataFrame:
    """contig, start, end and value of every interval that a job scored."""
    if not (scores / "run.json").exists():
        raise UserError(f"{scores}: holds no finished classification job (no run.json): run tethys genomics classify first")
    column = f"prob_{label}"
    frames = []
    for file in sorted(scores.glob("part-*")):
        if file.suffix not in (".parquet", ".tsv"):
            raise UserError(f"{scores}: a track is made from a job with format parquet or tsv, not {file.suffix[1:]}")
        if file.suffix == ".parquet":
            frame = pl.read_parquet(file)
        else:
            frame = pl.read_csv(file, separator="\t", schema_overrides={"contig": pl.String, "id": pl.String, "prediction": pl.String})
        if column not in frame.columns:
            has = ", ".join(name.removeprefix("prob_") for name in frame.columns if name.startswith("prob_"))
            raise UserError(f"{scores}: '{label}' is none of the job's classes ({has})")
        if "contig" in frame.columns:
            frames.append(frame.select("contig", pl.col("start", "end").cast(pl.Int64), pl.col(column).alias("value")).drop_nulls("contig"))
    if not frames or not sum(map(len, frames)):
        raise UserError(f"{scores}: no row lies on a genome: a track needs a job over BED inputs")
    return pl.concat(frames)


def _segments(rows: pl.DataFrame) -> Iterator[Segment]:
    """Stretches of equal mean, contigs by name and in order of their bases; stretches that no interval covers are left out."""
    for (contig,), part in sorted(rows.group_by("contig"), key=lambda pair: str(pair[0][0])):
        starts, ends, values = (part[name].to_numpy() for name in ("start", "end", "value"))
        edges = np.unique(np.concatenate([starts, ends]))
        begin, stop = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
        depth = _cover(begin, stop, np.ones(len(values)), len(edges))
        total = _cover(begin, stop, values, len(edges))
        for at in np.flatnonzero(depth > 0.5):
            yield str(contig), int(edges[at]), int(edges[at + 1]), float(total[at] / depth[at])


def _cover(begin: NDArray[np.int64], stop: NDArray[np.int64], values: NDArray[np.float64], edges: int) -> NDArray[np.float64]:
    """Sum of the values of the intervals over each stretch between two edges."""
    steps = np.zeros(edges)
    np.add.at(steps, begin, values)
    np.add.at(steps, stop, -values)
    return np.cumsum(steps)


def _bedgraph(path: Path, segments: Iterator[Segment]) -> int:
    count = 0
    with open(path, "w") as file:
        for contig, start, end, value in segments:
            file.write(f"{contig}\t{start}\t{end}\t{value:.6g}\n")
            count += 1
    return count


def _bigwig(path: Path, lengths: dict[str, int], segments: Iterator[Segment]) -> int:
    try:
        import pybigtools
    except ImportError:
        raise UserError("a bigWig needs pybigtools: run pip install 'tethys-streams[tracks]', or write .bedgraph") from None
    given = 0

    def counted() -> Iterator[Segment]:
        nonlocal given
        for segment in segments:
            given += 1
            yield segment

    pybigtools.open(str(path), "w").write(lengths, counted())
    # The library prints what it refuses and goes on: so what it wrote is counted.
    with pybigtools.open(str(path)) as written:
        kept = sum(1 for contig in written.chroms() for _ in written.records(contig))
    if kept != given:
        path.unlink()
        raise UserError(f"{path}: only {kept} of {given} stretches could be written: write .bedgraph instead")
    return given
