"""Variant effects: antisymmetric, in order, every allele answered for."""

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from connectors.errors import UserError
from connectors.sequences import Genome, reverse_complement
from pipelines.genomics.commands import app
from pipelines.genomics.training import fit_length
from pipelines.genomics.variants import logits, mutagenesis, saliency, score_variants
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
        ("chr1", 31, "any", REFERENCE[30], "N"),
    ]
    frame = pl.concat(list(score_variants(model, *write(tmp_path, REFERENCE, lines), batch=3)))
    assert frame["id"].to_list() == ["snv", "snv", "name", "swapped", "insertion", "deletion", "symbolic", "contig", "any"]
    status = ["ok", "ok", "ok", "ref_mismatch", "ok", "ok", "symbolic", "no_contig", "ambiguous"]
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
    np.testing.assert_allclose(mutagenesis(model, sequence, "b", batch=7), effects, atol=1e-6)
    with pytest.raises(UserError, match="none of the classes"):
        mutagenesis(model, sequence, "c")
    with pytest.raises(UserError, match="21 bases are more than the 20"):
        mutagenesis(model, REFERENCE[:21], "b")


@pytest.mark.parametrize("strands", ["forward", "both", "equivariant"])
def test_saliency_is_the_slope_of_the_network(strands):
    torch.manual_seed(4)
    model = SequenceClassifier(ClassifierConfig(classes=("a", "b"), length=20, motifs=8, dim=8, heads=2, kmer=0, strands=strands)).eval()
    sequence = REFERENCE[:12] + "N" + REFERENCE[13:18]
    found = saliency(model, sequence, "b")
    assert found.shape == (18, 4) and np.abs(found.mean(1)).max() < 1e-9
    rows = model.rows[torch.from_numpy(fit_length([sequence], 20).codes).long()]
    for at, base in ((3, 0), (12, 2), (17, 1)):
        step = torch.zeros_like(rows)
        step[0, at] = -0.25 * 0.02
        step[0, at, base] += 0.02  # along the plane on which one-hot rows lie

        def centred(rows):
            both = model.network_of(rows) + (model.network_of(rows.flip(1, 2)) if strands == "forward" else 0)
            return float((both[0, 1] - both[0].mean()) / (2 if strands == "forward" else 1))

        with torch.no_grad():
            slope = (centred(rows + step) - centred(rows - step)) / 0.04
        assert found[at, base] == pytest.approx(slope, abs=2e-3, rel=0.05)


def test_explain_writes_a_row_a_base_and_a_plot_a_record(tmp_path, model):
    save(model, tmp_path / "m.safetensors")
    (tmp_path / "s.fa").write_text(f">../a/b φ\n{REFERENCE[:20]}\n>empty\n>n\n{REFERENCE[20:32]}nn\n>late\nACGT\n")
    arguments = ["explain", str(tmp_path / "m.safetensors"), str(tmp_path / "s.fa"), "--label", "b", "--output", str(tmp_path / "o")]
    done = CliRunner().invoke(app, [*arguments, "--records", "2"])
    assert done.exit_code == 0, done.output
    table = pl.read_csv(tmp_path / "o/bases.tsv", separator="\t")
    assert table["id"].unique(maintain_order=True).to_list() == ["../a/b", "n"] and len(table) == 34
    assert "".join(table.filter(record=1)["base"]) == REFERENCE[20:32] + "NN"
    effects = table.filter(record=0).select("effect_A", "effect_C", "effect_G", "effect_T").to_numpy()
    np.testing.assert_allclose(effects, mutagenesis(model, REFERENCE[:20], "b"), atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["0000.png", "0001.png", "bases.tsv"]
    assert (tmp_path / "o/0000.png").read_bytes().startswith(b"\x89PNG")
    # Fewer records: no plot of the run before stays, and no other file goes.
    (tmp_path / "o/2024.png").touch()
    assert CliRunner().invoke(app, [*arguments, "--records", "1"]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["0000.png", "2024.png", "bases.tsv"]


def test_the_command_writes_every_allele(tmp_path, model):
    save(model, tmp_path / "m.safetensors")
    alt = "A" if REFERENCE[20] != "A" else "C"
    vcf, genome = write(tmp_path, REFERENCE, [("chr1", 21, "x", REFERENCE[20], alt), ("chr1", 500, "y", "A", "C")])
    arguments = ["score-variants", str(tmp_path / "m.safetensors"), vcf, "--genome", str(genome), "--output", str(tmp_path / "o.tsv")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 3 and "ok 1, out_of_contig 1" in done.stdout
    assert pl.read_csv(tmp_path / "o.tsv", separator="\t")["status"].to_list() == ["ok", "out_of_contig"]
