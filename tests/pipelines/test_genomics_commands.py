"""`tethys genomics` from the command line."""

import json
import random

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from connectors.errors import UserError
from connectors.sequences import SequenceError
from pipelines.genomics.commands import app
from titans_core.classifier import ClassifierConfig, SequenceClassifier, load, save

runner = CliRunner()


def write_table(path, count, seed, repeat=None):
    choose = random.Random(seed)
    rows = [("".join(choose.choices("ACGT" if label else "AACGT", k=30)), label) for label in choose.choices((0, 1), k=count)]
    rows = repeat or rows
    path.write_text("sequence\tlabel\n" + "".join(f"{sequence}\t{'yn'[label]}\n" for sequence, label in rows))
    return rows


@pytest.fixture
def tables(tmp_path):
    for name, count, seed in (("train", 200, 1), ("dev", 60, 2), ("test", 60, 3)):
        write_table(tmp_path / f"{name}.tsv", count, seed)
    return tmp_path


def splits(folder):
    return [str(folder / "train.tsv"), "--dev", str(folder / "dev.tsv"), "--test", str(folder / "test.tsv")]


def test_audit_prints_findings_and_refuses_with_status_3(tables):
    passed = runner.invoke(app, ["audit", *splits(tables)])
    assert passed.exit_code == 0 and "verdict: pass" in passed.stdout
    rows = write_table(tables / "train.tsv", 200, 1)
    write_table(tables / "test.tsv", 0, 0, repeat=rows[:50])
    refused = runner.invoke(app, ["audit", *splits(tables), "--json"])
    assert refused.exit_code == 3
    found = json.loads(refused.stdout)
    assert found["verdict"] == "refuse"
    assert any(each["kind"] == "rows that are in train" and each["count"] == 50 for each in found["findings"])


def test_audit_refuses_what_holds_no_rows_or_is_no_dataset(tables):
    (tables / "header.tsv").write_text("sequence\tlabel\n")
    for source, message in (("header.tsv", "holds no row"), (".", "has no folder 'train'")):
        with pytest.raises(SequenceError, match=message):
            runner.invoke(app, ["audit", str(tables / source)], catch_exceptions=False)


def test_explain_wants_a_folder(tmp_path):
    save(SequenceClassifier(ClassifierConfig(classes=("n", "y"), length=30)), tmp_path / "m.safetensors")
    (tmp_path / "s.fa").write_text(">a\nACGT\n")
    words = ["explain", str(tmp_path / "m.safetensors"), str(tmp_path / "s.fa"), "--label", "y", "--output", str(tmp_path / "s.fa")]
    with pytest.raises(UserError, match="cannot make the folder"):
        runner.invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize(("option", "value"), [("--model-name", "a/b"), ("--alias", "v1")])
def test_names_are_looked_at_before_the_work(tmp_path, option, value):
    with pytest.raises(UserError, match=f"'{value}' is no"):
        runner.invoke(app, ["train", str(tmp_path / "no.tsv"), option, value], catch_exceptions=False)


def test_a_job_that_is_no_text_is_told(tmp_path):
    (tmp_path / "job.yaml").write_bytes(b"\xe9\x00")
    with pytest.raises(UserError, match="is no YAML"):
        runner.invoke(app, ["classify", str(tmp_path / "job.yaml")], catch_exceptions=False)


def test_train_writes_weights_with_scores_and_classes(tables):
    output = tables / "m.safetensors"
    store = f"sqlite:///{tables}/t.db"
    done = runner.invoke(app, ["train", *splits(tables), "--output", str(output), "--row-passes", "400", "--tracking-uri", store, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["classes"] == ["n", "y"]
    assert set(report["scores"]) == {"tethys", "kmer"}
    model, card = load(output)
    assert model.config.classes == ("n", "y")
    assert "tethys.all.mcc" in card.scores and set(card.data) == {"train", "dev", "test"}


def test_classify_ends_with_3_when_a_record_was_bad(tmp_path):
    save(SequenceClassifier(ClassifierConfig(classes=("n", "y"), length=30, kmer=0)).eval(), tmp_path / "m.safetensors")
    (tmp_path / "a.fa").write_text(">a\nACGT\n>b\nAC!T\n>c\nGG\n")
    job = {"model": "m.safetensors", "inputs": "a.fa", "output": "o", "format": "tsv"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = runner.invoke(app, ["classify", str(tmp_path / "job.yaml")])
    assert done.exit_code == 3
    assert "classified 2 records" in done.stdout and "1 bad" in done.stdout
    table = pl.read_csv(tmp_path / "o/part-0000-000000.tsv", separator="\t")
    assert table["id"].to_list() == ["a", "c"]
    (tmp_path / "a.fa").write_text(">a\nACGT\n")
    assert runner.invoke(app, ["classify", str(tmp_path / "job.yaml")]).exit_code == 0


def test_pretrain_and_embed(tmp_path):
    choose = random.Random(1)
    for name, length in (("g", 4000), ("t", 900)):
        (tmp_path / f"{name}.fa").write_text(f">{name}\n{''.join(choose.choices('AACGT', k=length))}\n")
    model = str(tmp_path / "m.safetensors")
    arguments = ["pretrain", str(tmp_path / "g.fa"), "--output", model, "--steps", "2", "--measure", str(tmp_path / "t.fa"), "--json"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"bases", "train_bits_per_base", "carried_bits_per_base", "frozen_bits_per_base"}
    done = runner.invoke(app, ["embed", model, str(tmp_path / "t.fa"), "--output", str(tmp_path / "v.parquet")])
    assert done.exit_code == 0, done.output
    table = pl.read_parquet(tmp_path / "v.parquet")
    assert (table["id"].to_list(), table["length"].to_list(), table["vector"].dtype.shape) == (["t"], [900], (48,))
