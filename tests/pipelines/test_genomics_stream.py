"""A stream of reads is classified in order, each read exactly once, wherever the worker dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from connectors.checkpoints import CheckpointError, CheckpointStore
from connectors.streams import open_sink
from connectors.streams.reads import ReadSource
from pipelines.genomics import stream
from pipelines.genomics.answers import answer
from pipelines.genomics.commands import app
from titans_core.classifier import ClassifierConfig, SequenceClassifier, save


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return SequenceClassifier(ClassifierConfig(classes=("a", "b"), length=20, motifs=8, dim=8, heads=2, kmer=0)).eval()


def write(path, count, start=0, bad=()):
    lines = []
    for i in range(start, start + count):
        bases = f"{i:b}".replace("0", "GA").replace("1", "CT")
        lines.append(f"@r{i} x\n{bases}\n+\n{'I' * (len(bases) - (i in bad))}\n")
    with open(path, "a") as file:
        file.write("".join(lines))


class Crash(Exception):
    pass


def once(folder, model, name, *, source="r.fq", batch_reads=16, settings=None, committed=None):
    """One run of a worker over a folder, with sinks and store of their own."""
    sinks = {key: open_sink(str(folder / f"{name}.{key}.ndjson")) for key in ("output", "dead_letters")}
    store, reads = CheckpointStore(folder / f"{name}.db"), ReadSource(str(folder / source))
    try:
        return stream.work(model, "m/1", settings or {"weights": "w"}, reads, store, sinks, batch_reads=batch_reads, committed=committed)
    finally:
        for each in (*sinks.values(), store, reads):
            each.close()


def test_rows_come_in_order_with_dead_letters_beside(tmp_path, model):
    write(tmp_path / "r.fq", 70, bad=(5, 40))
    summary = once(tmp_path, model, "whole")
    rows = pl.read_ndjson(tmp_path / "whole.output.ndjson")
    good = [i for i in range(70) if i not in (5, 40)]
    assert rows["id"].to_list() == [f"r{i}" for i in good] and rows["read"].to_list() == list(range(1, 69))
    expected = answer(model, [f"{i:b}".replace("0", "GA").replace("1", "CT") for i in good])
    assert rows.select(expected.columns).equals(expected)
    assert (summary.reads, summary.dead, sum(summary.classes.values())) == (68, 2, 68)
    assert [each["offset"] for each in map(json.loads, open(tmp_path / "whole.dead_letters.ndjson"))] == [24, 164]


def test_a_read_of_no_base_has_a_row_and_no_answer(tmp_path, model):
    (tmp_path / "r.fq").write_text("@a\nACGT\n+\nIIII\n@b\n\n+\n\n@c\nGGG\n+\nIII\n")
    summary = once(tmp_path, model, "x")
    rows = pl.read_ndjson(tmp_path / "x.output.ndjson")
    assert rows["id"].to_list() == ["a", "b", "c"]
    for name in ("prediction", "prob_a", "prob_b"):
        assert rows[name].is_null().to_list() == [False, True, False]
    assert (summary.reads, sum(summary.classes.values())) == (3, 2)


@pytest.mark.parametrize("where", ["classify", "write", "flush", "commit"])
def test_wherever_it_dies_each_read_is_answered_once(tmp_path, model, monkeypatch, where):
    write(tmp_path / "r.fq", 90, bad=(5, 40))
    once(tmp_path, model, "whole")
    dies = {"after": 0}

    def dying(real):
        def call(*arguments, **options):
            dies["after"] -= 1
            if dies["after"] == 0 and where != "commit":
                raise Crash
            result = real(*arguments, **options)
            if dies["after"] == 0:
                raise Crash  # committed, and nobody was told
            return result

        return call

    target = {
        "classify": (stream, "answer"),
        "write": (stream, "dead_letter_frame"),
        "flush": (CheckpointStore, "commit"),
        "commit": (CheckpointStore, "commit"),
    }[where]
    monkeypatch.setattr(*target, dying(getattr(*target)))
    crashes = 0
    for attempt in range(12):
        dies["after"] = 1 + attempt % 3
        try:
            summary = once(tmp_path, model, "often", batch_reads=8 + attempt)
            break
        except Crash:
            crashes += 1
    assert crashes >= 3 and summary.resumed
    for name in ("output", "dead_letters"):
        assert (tmp_path / f"often.{name}.ndjson").read_bytes() == (tmp_path / f"whole.{name}.ndjson").read_bytes()
    assert (summary.reads, summary.dead) == (88, 2)


def test_another_model_needs_another_checkpoint(tmp_path, model):
    write(tmp_path / "r.fq", 20)
    once(tmp_path, model, "a")
    with pytest.raises(CheckpointError, match="was made with weights = w, now it is v"):
        once(tmp_path, model, "a", settings={"weights": "v"})


def test_what_was_added_to_a_finished_file_is_answered_next_time(tmp_path, model):
    write(tmp_path / "r.fq", 20)
    once(tmp_path, model, "a")
    write(tmp_path / "r.fq", 10, start=20)
    summary = once(tmp_path, model, "a")
    assert (summary.reads, summary.batches) == (30, 1)
    assert pl.read_ndjson(tmp_path / "a.output.ndjson")["id"].to_list() == [f"r{i}" for i in range(30)]


def test_killed_while_it_follows_a_growing_file(tmp_path, model):
    save(model, tmp_path / "m.safetensors")
    write(tmp_path / "r.fq", 300)
    command = [sys.executable, "-m", "pipelines.cli", "genomics", "stream", "r.fq", "--follow", "--model", "m.safetensors"]
    command += ["--output", "rows.ndjson", "--checkpoint", "c.db", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def started():
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def rows():
        path = tmp_path / "rows.ndjson"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(count, process):
        deadline = time.monotonic() + 120
        while rows() < count:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, rows()
            time.sleep(0.01)

    first = started()
    wait_for(300, first)
    write(tmp_path / "r.fq", 2000, start=300)
    wait_for(600, first)
    first.kill()
    first.communicate()
    second = started()
    wait_for(2300, second)
    second.send_signal(signal.SIGTERM)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert json.loads(out)["stopped"] == "signal" and json.loads(out)["reads"] == 2300
    assert pl.read_ndjson(tmp_path / "rows.ndjson")["id"].to_list() == [f"r{i}" for i in range(2300)]


def test_the_command_ends_with_3_when_a_read_was_refused(tmp_path, model):
    save(model, tmp_path / "m.safetensors")
    write(tmp_path / "r.fq", 20, bad=(3,))
    arguments = ["stream", str(tmp_path / "r.fq"), "--model", str(tmp_path / "m.safetensors"), "--output", str(tmp_path / "o.csv")]
    done = CliRunner().invoke(app, [*arguments, "--checkpoint", str(tmp_path / "c.db")])
    assert done.exit_code == 3 and "classified 19 reads" in done.stdout, done.output
    assert len(pl.read_csv(tmp_path / "o.csv")) == 19
