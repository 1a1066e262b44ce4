"""Variant effects: antisymmetric, in order, every allele answered for."""

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from connectors.sequences import Genome, reverse_complement
from pipelines.genomics.commands import app
from pipelines.genomics.variants import logits, mutagenesis, score_variants
from titans_core.classifier import ClassifierConfig, SequenceClassifier, save
from titans_core.tokenizers import encode_bases

REFERENCE = "ACGTTGCAACCGGTTATGCATGCCCGATTAGACCAGTATTTGACCATGACG"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    found = SequenceClassifier(ClassifierConfig(classes=("a", "b"), length=20, motifs=8, dim=8, heads=2, kmer=2)).eval()
    found.composition_scale.fill_(1.0)
    return found


def write(folder, bases, lines):
    (folder / "g.fa").write_text(f">chr1\n{bases}\n")
    head = "##fileformat=VCFv4.2\n#CHROM\tPOS\tID\tREF\tALT\n"
    (folder / "v.vcf").write_text(head + "".join("\t".join(map(str, line)) + "\n" for line in lines))
    return str(folder / "v.vcf"), folder / "g.fa"


def test_every_allele_has_a_row_and_a_status(tmp_path, model):
    lines = [
        ("chr1", 21, "snv", REFERENCE[20], "A,T" if REFERENCE[20] not in "AT" else "C,G"),
        ("1", 22, "name", REFERENCE[21], "A" if REFERENCE[21] != "A" else "C"),
        ("chr1", 23, "swapped", "A" if REFERENCE[22] != "A" else "C", REFERENCE[22]),
        ("chr1", 25, "insertion", REFERENCE[24], REFERENCE[24] + "GG"),
        ("chr1", 25, "deletion", REFERENCE[24:27], REFERENCE[24]),
        ("chr1", 30, "symbolic", REFERENCE[29], "<DEL>"),
        ("chr9", 1, "contig", "A", "C"),
    ]
    frame = pl.concat(list(score_variants(model, *write(tmp_path, REFERENCE, lines), batch=3)))
    assert frame["id"].to_list() == ["snv", "snv", "name", "swapped", "insertion", "deletion", "symbolic", "contig"]
    status = ["ok", "ok", "ok", "ref_mismatch", "ok", "ok", "symbolic", "no_contig"]
    assert frame["status"].to_list() == status
    assert frame["effect_a"].is_null().to_list() == [each != "ok" for each in status]
    assert frame["found"].to_list()[3] == REFERENCE[22]
    assert frame["position"].to_list()[:2] == [21, 21]
    assert (frame["effect_a"] + frame["effect_b"]).drop_nulls().abs().max() < 1e-6


def test_exchanged_alleles_change_the_sign(tmp_path, model):
    at, ref = 24, REFERENCE[24]
    alt = "A" if ref != "A" else "G"
    changed = REFERENCE[:at] + alt + REFERENCE[at + 1 :]
    forward = pl.concat(list(score_variants(model, *write(tmp_path, REFERENCE, [("chr1", at + 1, "x", ref, alt)]))))
    backward = pl.concat(list(score_variants(model, *write(tmp_path, changed, [("chr1", at + 1, "x", alt, ref)]))))
    assert forward["effect_a"][0] == pytest.approx(-backward["effect_a"][0], abs=1e-6)
    assert forward["effect_a"][0] != 0


def test_both_strands_are_seen(model):
    codes = encode_bases(REFERENCE[:20])[None]
    other = encode_bases(reverse_complement(REFERENCE[:20].encode()))[None]
    assert np.allclose(logits(model, codes), logits(model, other), atol=1e-6)


def test_mutagenesis_equals_scoring_each_change(tmp_path, model):
    sequence = REFERENCE[10:30]
    effects = mutagenesis(model, sequence, "b")
    assert effects.shape == (20, 4)
    genome = write(tmp_path, REFERENCE, [("chr1", 21, "x", REFERENCE[20], "ACGT"[(("ACGT".index(REFERENCE[20])) + 1) % 4])])
    frame = pl.concat(list(score_variants(model, genome[0], Genome(genome[1]))))
    column = ("ACGT".index(REFERENCE[20]) + 1) % 4
    assert effects[10, column] == pytest.approx(frame["effect_b"][0], abs=1e-6)
    assert all(effects[i, "ACGT".index(base)] == 0 for i, base in enumerate(sequence))
    with pytest.raises(ValueError, match="none of the classes"):
        mutagenesis(model, sequence, "c")


def test_the_command_writes_every_allele(tmp_path, model):
    save(model, tmp_path / "m.safetensors")
    alt = "A" if REFERENCE[20] != "A" else "C"
    vcf, genome = write(tmp_path, REFERENCE, [("chr1", 21, "x", REFERENCE[20], alt), ("chr1", 500, "y", "A", "C")])
    arguments = ["score-variants", str(tmp_path / "m.safetensors"), vcf, "--genome", str(genome), "--output", str(tmp_path / "o.tsv")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 3 and "ok 1, out_of_contig 1" in done.stdout
    assert pl.read_csv(tmp_path / "o.tsv", separator="\t")["status"].to_list() == ["ok", "out_of_contig"]
