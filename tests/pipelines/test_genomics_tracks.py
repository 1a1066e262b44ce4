"""Tracks of a class along a genome equal the mean over intervals, base by base."""

import random

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from typer.testing import CliRunner

from connectors.errors import UserError
from pipelines.genomics.commands import app
from pipelines.genomics.job import classify, read_job
from pipelines.genomics.tracks import write_track
from titans_core.classifier import ClassifierConfig, SequenceClassifier, save

LENGTHS = {"chr2": 300, "chr10": 120, "chr1": 200}


@pytest.fixture(params=["parquet", "tsv"])
def scored(request, tmp_path):
    """A finished job over overlapping intervals, and the mean of class b over each base (NaN: none covers it)."""
    choose = random.Random(4)
    torch.manual_seed(1)
    save(SequenceClassifier(ClassifierConfig(classes=("a", "b"), length=30, motifs=8, dim=8, heads=2, kmer=0)).eval(), tmp_path / "m")
    (tmp_path / "g.fa").write_text("".join(f">{name}\n{''.join(choose.choices('ACGT', k=size))}\n" for name, size in LENGTHS.items()))
    lines = []
    for i in range(60):
        contig = choose.choice(["chr1", "chr2"])
        start = choose.randrange(LENGTHS[contig] - 31)
        lines.append(f"{contig}\t{start}\t{start + choose.randrange(1, 31)}\tn{i}\t0\t{choose.choice('+-.')}")
    (tmp_path / "r.bed").write_text("\n".join(lines) + "\n")
    job = {"model": "m", "inputs": "r.bed", "output": "o", "genome": "g.fa", "format": request.param, "shard_records": 25}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    classify(read_job(tmp_path / "job.yaml"))
    read = pl.read_parquet if request.param == "parquet" else lambda path: pl.read_csv(path, separator="\t")
    rows = pl.concat([read(path) for path in sorted((tmp_path / "o").glob("part-*"))])
    sums = {name: np.zeros((2, size)) for name, size in LENGTHS.items()}
    for contig, start, end, value in rows.select("contig", "start", "end", "prob_b").iter_rows():
        sums[contig][0, start:end] += value
        sums[contig][1, start:end] += 1
    with np.errstate(invalid="ignore"):
        return tmp_path, {name: total / count for name, (total, count) in sums.items()}


def test_bedgraph_is_the_mean_of_the_intervals_over_each_base(scored):
    folder, expected = scored
    count = write_track(folder / "o", folder / "g.fa", "b", folder / "b.bedgraph")
    found = {name: np.full(size, np.nan) for name, size in LENGTHS.items()}
    lines = [line.split("\t") for line in (folder / "b.bedgraph").read_text().splitlines()]
    assert count == len(lines) and [line[0] for line in lines] == sorted(line[0] for line in lines)
    for contig, start, end, value in lines:
        assert np.isnan(found[contig][int(start) : int(end)]).all()
        found[contig][int(start) : int(end)] = float(value)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def test_bigwig_holds_the_same_values(scored):
    pybigtools = pytest.importorskip("pybigtools")
    folder, expected = scored
    done = CliRunner().invoke(
        app, ["track", str(folder / "o"), "--genome", str(folder / "g.fa"), "--label", "b", "--output", str(folder / "b.bw")]
    )
    assert done.exit_code == 0, done.output
    with pybigtools.open(str(folder / "b.bw")) as track:
        assert track.chroms() == {"chr1": 200, "chr2": 300}
        for name in track.chroms():
            values = np.full(LENGTHS[name], np.nan)
            for start, end, value in track.records(name):
                values[start:end] = value
            np.testing.assert_allclose(values, expected[name], rtol=1e-5)
    assert not list(folder.glob(".b.bw*"))


def test_mistakes_are_named(scored, tmp_path):
    folder, _ = scored
    with pytest.raises(UserError, match="'c' is none of the job's classes \\(a, b\\)"):
        write_track(folder / "o", folder / "g.fa", "c", folder / "b.bw")
    with pytest.raises(UserError, match="a track is written to"):
        write_track(folder / "o", folder / "g.fa", "b", folder / "b.wig")
    with pytest.raises(UserError, match="holds no finished classification job"):
        write_track(folder, folder / "g.fa", "b", folder / "b.bw")
    (folder / "other.fa").write_text(">chrX\nACGT\n")
    with pytest.raises(UserError, match="the contig chr1 not in .*other.fa"):
        write_track(folder / "o", folder / "other.fa", "b", folder / "b.bw")
    (folder / "plain.fa").write_text((folder / "g.fa").read_text().replace(">chr", ">"))
    write_track(folder / "o", folder / "plain.fa", "b", folder / "b.bedgraph")
    assert (folder / "b.bedgraph").read_text().startswith("1\t")
