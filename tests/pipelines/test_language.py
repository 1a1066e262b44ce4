"""Language models as jobs: corpora, rows, exact resume, workers, evaluation, and the commands."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from connectors.errors import UserError
from pipelines import cli
from pipelines.language import training
from pipelines.language.data import GRAIN, IGNORED, Lanes, documents, open_corpus, pack, text_files
from pipelines.language.evaluation import evaluate, gates, score
from pipelines.language.training import Training, newest, train, train_on_ray
from pipelines.windows import ray_cluster
from titans_core.generation import END, START, encode_prompt
from titans_core.language_model import LanguageModel, configure, load
from titans_core.tokenizers import BpeTokenizer, ByteTokenizer

ROOT = Path(__file__).resolve().parents[2]
BYTES = ByteTokenizer([START, END])
# Documents of very different lengths: single letters to several contexts of 64.
TEXTS = [("abc " * 90)[: 1 + 37 * i % 340] + f"<{i}>" for i in range(24)]


@pytest.fixture
def files(tmp_path):
    """The same kind of text in every form: plain, JSONL compressed, Parquet."""
    (tmp_path / "one.txt").write_text(TEXTS[0])
    with gzip.open(tmp_path / "some.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({"text": text, "n": 1}) for text in TEXTS[1:10]) + "\n\n")
    pl.DataFrame({"text": TEXTS[10:]}).write_parquet(tmp_path / "more.parquet")
    return [tmp_path / name for name in ("one.txt", "some.jsonl.gz", "more.parquet")]


@pytest.fixture
def corpus(files, tmp_path):
    return pack(files, tmp_path / "corpus", BYTES)


def test_every_form_gives_its_documents(files, corpus, tmp_path):
    assert [text for path in files for text in documents(path)] == TEXTS
    assert [BYTES.decode(corpus.document(i)) for i in range(len(corpus))] == TEXTS
    assert corpus.sizes.tolist() == [len(text.encode()) for text in TEXTS]
    assert corpus.document(3)[0] == BYTES.specials[START] and corpus.document(3)[-1] == BYTES.specials[END]
    assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.dtype == np.uint16
    bpe = BpeTokenizer.train(TEXTS, 270, specials=[START, END])
    again = pack(files, tmp_path / "corpus", bpe)  # replaced, as a whole
    assert [again.tokenizer.decode(again.document(i)) for i in range(len(again))] == TEXTS
    assert again.digest != corpus.digest and sorted(p.name for p in tmp_path.iterdir()) == sorted([*(p.name for p in files), "corpus"])


@pytest.mark.ray
def test_ray_packs_the_same_corpus_and_tells_mistakes(files, corpus, tmp_path):
    ray_cluster(2)
    there = pack(files, tmp_path / "there", BYTES, executor="ray")
    assert there.digest == corpus.digest and (tmp_path / "there/tokens.bin").read_bytes() == (tmp_path / "corpus/tokens.bin").read_bytes()
    with pytest.raises(UserError, match=r"more\.parquet' has no column 'body'; it has text"):
        pack(files[2:], tmp_path / "wrong", BYTES, column="body", executor="ray")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("name, content, message", [
    ("x.csv", b"a", r"text files end in \.txt"),
    ("x.txt", b"good \xff bad", "is not UTF-8: byte 5 is 0xff"),
    ("x.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"line 2 has no text in 'text' \(it has text\)"),
    ("x.jsonl", b'{"text": "a"}\nnonsense\n', "line 2 is no JSON document"),
    ("x.parquet", b"PAR1", "cannot read '.*x.parquet'"),
    ("x.txt.gz", b"not gzip", "cannot read '.*x.txt.gz'"),
    ("x.txt", b"", "no document in"),
])  # fmt: skip
def test_mistakes_in_files_are_told_and_leave_nothing(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        pack([tmp_path / name], tmp_path / "corpus", BYTES)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_folder_is_its_text_files(tmp_path):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no text file"):
        text_files([str(tmp_path / "texts")])
    names = ["b.txt", "a.jsonl.gz", "deep/c.md", "picture.png"]
    for name in names:
        (tmp_path / "texts" / name).write_bytes(b"")
    inside = [str(tmp_path / "texts" / name) for name in ("a.jsonl.gz", "b.txt", "deep/c.md")]
    assert text_files([str(tmp_path / "texts"), "other.txt"]) == [*inside, "other.txt"]


def test_a_broken_corpus_is_told(corpus, tmp_path):
    with open(tmp_path / "corpus/tokens.bin", "ab") as file:
        file.write(b"12")
    with pytest.raises(UserError, match="should hold"):
        open_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match="holds no corpus"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("stretch", [1, 4])
def test_rows_hold_every_pair_once_an_epoch_and_begin_documents_afresh(corpus, stretch):
    lanes = Lanes(corpus, context=64, rows=2, seed=3, stretch=stretch)
    pairs = int((np.diff(corpus.offsets) - 1).sum())
    steps = next(step for step in range(1000) if lanes.epoch(step)[0] == 1)
    seen, going = 0, [0, 0]
    texts = "|".join(TEXTS)
    for step in range(steps):
        batch = lanes.batch(step)
        seen += int((batch.targets != IGNORED).sum())
        assert (batch.tokens.shape, batch.starts.shape) == ((2, 64), (2, 64))
        assert not batch.starts[:, np.arange(64) % GRAIN != 0].any()
        for row in range(2):
            places = [0, *np.flatnonzero(batch.starts[row]), 64]
            going[row] = 0 if batch.starts[row, 0] else going[row] + 1
            assert going[row] < stretch or going[row] == 0
            for a, b in zip(places, places[1:], strict=False):
                real = batch.targets[row, a:b] != IGNORED
                assert real.tolist() == sorted(real.tolist(), reverse=True)  # padding comes last
                text = BYTES.decode(batch.targets[row, a:b][real])
                assert text in texts  # never two documents in one piece
                held = batch.tokens[row, a:b][real]
                assert (held[1:] == batch.targets[row, a:b][real][:-1]).all()
    assert pairs - 2 * 64 * stretch <= seen <= pairs
    again = Lanes(corpus, context=64, rows=2, seed=3, stretch=stretch)
    for step in (steps + 1, 2, steps - 1):  # a step's rows do not depend on what was asked before
        assert all((a == b).all() for a, b in zip(again.batch(step), lanes.batch(step), strict=True))
    assert (lanes.batch(0).tokens != Lanes(corpus, context=64, rows=2, seed=4, stretch=stretch).batch(0).tokens).any()


def test_too_little_text_is_told(corpus):
    with pytest.raises(UserError, match="do not fill 500 rows of 64"):
        Lanes(corpus, context=64, rows=500, seed=0)
    with pytest.raises(UserError, match=f"context 50 must be a multiple of {GRAIN}"):
        Lanes(corpus, context=50, rows=1, seed=0)


SMALL = {"chunk": 16, "attention_window": 16, "segment": 16, "persistent": 2}
SETTINGS = Training(steps=7, rows=4, context=64, stretch=4, accumulate=2, rate=1e-2, save_every=3, seed=1)


def tiny(layers: str = "mag"):
    return configure("tiny", BYTES.size, layers=layers, **SMALL)


class Killed(Exception):
    pass


@pytest.mark.parametrize("layers, changes", [
    ("mag", {}), ("mac", {"schedule": "wsd"}), ("lmm+attention", {"stretch": 1}), ("lmm+window", {"precision": "bfloat16"}),
])  # fmt: skip
def test_a_killed_training_goes_on_to_the_same_bits(corpus, tmp_path, layers, changes):
    settings, config = replace(SETTINGS, **changes), tiny(layers)
    whole = train(config, corpus, settings, tmp_path / "whole")

    def kill(step: int, loss: float) -> None:
        if step == 5:
            raise Killed

    with pytest.raises(Killed):
        train(config, corpus, settings, tmp_path / "parts", progress=kill)
    assert newest(tmp_path / "parts").name == "checkpoint-00000003"
    told = []
    parts = train(config, corpus, settings, tmp_path / "parts", progress=lambda step, loss: told.append(step))
    assert parts == whole and told == [4, 5, 6, 7]
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert whole[-1] < whole[0] - 0.5


def test_a_checkpoint_half_written_is_not_seen(corpus, tmp_path, monkeypatch):
    """A kill while a checkpoint is written leaves the one before it."""
    real = training.save_file

    def dies(tensors, path, *rest):
        if "00000006" in str(path):
            raise Killed
        real(tensors, path, *rest)

    whole = train(tiny(), corpus, SETTINGS, tmp_path / "whole")
    monkeypatch.setattr(training, "save_file", dies)
    with pytest.raises(Killed):
        train(tiny(), corpus, SETTINGS, tmp_path / "parts")
    assert newest(tmp_path / "parts").name == "checkpoint-00000003"
    monkeypatch.setattr(training, "save_file", real)
    assert train(tiny(), corpus, SETTINGS, tmp_path / "parts") == whole
    assert newest(tmp_path / "parts").name == "checkpoint-00000006"


def test_a_killed_process_goes_on_to_the_same_bits(corpus, tmp_path):
    """SIGKILL in the middle of a step, and another process after it."""
    script = (
        "import os, signal, sys; from tests.pipelines.test_language import *\n"
        f"corpus, folder = open_corpus({str(tmp_path / 'corpus')!r}), {str(tmp_path / 'killed')!r}\n"
        "kill = lambda step, loss: os.kill(os.getpid(), signal.SIGKILL) if step == int(sys.argv[1]) else None\n"
        "print(json.dumps(train(tiny(), corpus, SETTINGS, folder, progress=kill)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(kill_at: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", script, str(kill_at)], capture_output=True, text=True, env=environment, cwd=ROOT)

    assert run(5).returncode == -9
    rest = run(0)
    assert rest.returncode == 0, rest.stderr
    assert json.loads(rest.stdout) == train(tiny(), corpus, SETTINGS, tmp_path / "whole")


def test_another_model_corpus_or_setting_does_not_go_on(corpus, files, tmp_path):
    train(tiny(), corpus, SETTINGS, tmp_path / "run")
    for config, other, settings, message in [
        (tiny("mac"), corpus, SETTINGS, "trained with another model"),
        (tiny(), pack(files[:2], tmp_path / "less", BYTES), SETTINGS, "trained with another corpus"),
        (tiny(), corpus, replace(SETTINGS, rate=2e-2), "trained with rate 0.01, not 0.02"),
    ]:
        with pytest.raises(UserError, match=message):
            train(config, other, settings, tmp_path / "run")
    for wrong, message in [({"rows": 3}, "3 rows do not divide"), ({"steps": 0}, "steps 0 must be at least 1")]:
        with pytest.raises(UserError, match=message):
            train(tiny(), corpus, replace(SETTINGS, **wrong), tmp_path / "new")
    with pytest.raises(UserError, match="cannot be carried from step to step"):
        train(tiny("attention"), corpus, SETTINGS, tmp_path / "new")
    with pytest.raises(UserError, match=r"the loss is \w+ at step \d: lower the rate"):
        train(tiny(), corpus, replace(SETTINGS, rate=1e30, clip=1e30), tmp_path / "new")


def test_accumulation_changes_nothing_but_rounding(corpus, tmp_path):
    once = train(tiny(), corpus, replace(SETTINGS, accumulate=1), tmp_path / "once")
    np.testing.assert_allclose(train(tiny(), corpus, replace(SETTINGS, accumulate=4), tmp_path / "four"), once, rtol=2e-4)


@pytest.mark.ray
def test_two_workers_are_one(corpus, tmp_path):
    """One process up to its checkpoint, then two joined by gloo, then one again: the losses and the weights are those of one, to rounding."""
    settings = replace(SETTINGS, accumulate=1)
    one = train(tiny(), corpus, settings, tmp_path / "one")

    def kill(step: int, loss: float) -> None:
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        train(tiny(), corpus, settings, tmp_path / "two", progress=kill)
    ray_cluster(2)
    told = []
    two = train_on_ray(tiny(), tmp_path / "corpus", settings, tmp_path / "two", workers=2, progress=lambda step, loss: told.append(step))
    assert two[:3] == one[:3] and told == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(two, one, rtol=2e-4)
    a, b = (load(tmp_path / name / "model.safetensors")[0].state_dict() for name in ("one", "two"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=5e-3, rtol=5e-3, msg=name)
    saved = newest(tmp_path / "two")
    assert saved.name == "checkpoint-00000006" and len(list(saved.glob("memories-*"))) == 2
    np.testing.assert_allclose(train(tiny(), corpus, settings, tmp_path / "two"), one, rtol=2e-4)


def test_schedules():
    cosine = Training(steps=100, rate=1.0, warmup=0.1)
    assert [round(cosine.rate_at(step), 3) for step in (0, 4, 9, 10, 55)] == [0.1, 0.5, 1.0, 1.0, 0.55]
    assert 0.1 <= cosine.rate_at(99) < 0.102
    wsd = Training(steps=100, rate=1.0, warmup=0.1, schedule="wsd", cooldown=0.2)
    assert [round(wsd.rate_at(step), 3) for step in (0, 50, 80, 90, 99)] == [0.1, 1.0, 1.0, 0.5, 0.05]
    with pytest.raises(UserError, match="schedule 'linear' is none of"):
        Training(steps=1, schedule="linear")


@pytest.mark.parametrize("layers", ["mag", "attention"])
def test_scores_are_those_of_each_document_alone(corpus, layers):
    torch.manual_seed(0)
    model = LanguageModel(tiny(layers)).eval()
    for carried in (False, True)[: 1 if layers == "attention" else 2]:
        nats, tokens = 0.0, 0
        with torch.inference_mode():
            for text in TEXTS:
                ids = torch.tensor(encode_prompt(BYTES, text))[None]
                width = ids.shape[1] if carried else 64
                for at in range(0, ids.shape[1] - 1, width):
                    part = ids[:, at : at + width + 1]
                    p = model(part[:, :-1], model.initial_state(1))[0].double().log_softmax(-1)
                    nats -= float(p[0, torch.arange(part.shape[1] - 1), part[0, 1:]].sum())
                    tokens += part.shape[1] - 1
        found = score(model, corpus, context=64, carried=carried, rows=5)
        assert (found.tokens, found.bytes) == (tokens, sum(map(len, TEXTS)))
        assert found.nats == pytest.approx(nats, rel=1e-5)
        assert found.bits_per_byte == pytest.approx(nats / tokens / np.log(2), rel=1e-5)
        assert found.perplexity == pytest.approx(np.exp(nats / tokens), rel=1e-5)
    if layers == "attention":
        with pytest.raises(UserError, match="grows with the text"):
            score(model, corpus, context=64, carried=True)


def test_the_table_has_every_mode_and_gates_are_told(corpus, tmp_path):
    train(tiny(), corpus, SETTINGS, tmp_path / "run")
    model, _ = load(tmp_path / "run/model.safetensors")
    table = evaluate(model, corpus, context=64)
    assert [(row["memory"], row["state"]) for row in table] == [(m, s) for s in ("fresh", "carried") for m in ("on", "frozen", "zeroed")]
    assert len({round(row["bits_per_byte"], 6) for row in table}) >= 4
    found = gates(model, corpus, context=64)
    assert {name.split(".")[2] for name in found} == {"forget", "momentum", "step", "branch", "branch_sd"}


@pytest.fixture
def tethys(tmp_path, monkeypatch, capsys):
    """The command, in this process: exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(*words, text=""):
        monkeypatch.setattr(sys, "argv", ["tethys", "lm", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_the_commands(files, tmp_path, tethys):
    """Train, evaluate, generate, and a conversation kept in a file."""
    small = ["--size", "tiny", "--layers", "mag", "--chunk", "16", "--attention-window", "16", "--persistent", "2"]
    words = ["train", *files, "--valid", files[0], "--output", "run", *small, "--steps", "4", "--rows", "2", "--context", "64", "--rate", "0.01"]
    words += ["--save-every", "3", "--tracking-uri", "sqlite:///runs.db", "--json"]
    status, out, err = tethys(*words)
    assert status == 0, err
    trained = json.loads(out)
    assert trained["steps"] == 4 and trained["parameters"] > 0 and trained["valid"]["bits_per_byte"] > 0
    assert (tmp_path / trained["model"]).is_file() and trained["tracking"] and "training loss" in err
    again = json.loads(tethys(*words)[1])  # from the checkpoint of step 3
    assert again["loss"] == trained["loss"] and again["valid"] == trained["valid"]
    from mlflow.tracking import MlflowClient

    client = MlflowClient("sqlite:///runs.db")
    newer, older = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert older.data.metrics["valid_bits_per_byte"] == trained["valid"]["bits_per_byte"] and older.data.params["layers"] == "mag"
    assert [m.step for m in client.get_metric_history(older.info.run_id, "loss")] == [1, 2, 3, 4]

    status, out, err = tethys("evaluate", "run/model.safetensors", files[0], "--context", "64", "--json")
    table = json.loads(out)
    assert status == 0 and len(table["scores"]) == 6 and table["gates"]
    assert "bits per byte" in tethys("evaluate", "run/model.safetensors", files[0], "--context", "64")[1]

    words = ["generate", "run/model.safetensors", "--prompt", "abc", "--prompt", "x", "--limit", "8", "--seed", "3"]
    texts = json.loads(tethys(*words, "--json")[1])
    assert [each["prompt"] for each in texts] == ["abc", "x"] and all(len(each["ids"]) <= 8 for each in texts)
    assert tethys(*words[:4], "--limit", "8", "--seed", "3")[1] == f"abc{texts[0]['text']}\n"

    talk = ["chat", "run/model.safetensors", "--limit", "6"]
    first, second = (tethys(*talk, "--session", "talk", text=line)[1] for line in ("hello\n", "abc\n"))
    assert (tmp_path / "talk").is_file()
    assert first + second == tethys(*talk, text="hello\nabc\n")[1]


@pytest.mark.parametrize("words, message", [
    (["generate", "none.safetensors", "--prompt", "a"], "is no language model"),
    (["train", "absent.txt", "--output", "o"], "there is no file 'absent.txt'"),
    (["train", "one.txt", "--output", "o", "--memory", "mamba"], "memory 'mamba' is none of"),
    (["train", "one.txt", "--output", "o", "--rows", "99"], "do not fill 99 rows"),
    (["train", "one.txt", "--output", "o", "--rate", "-3"], "rate -3.0 must be a number above 0"),
    (["generate", "x", "--prompt", "a", "--top-p", "3"], "top_p 3.0 must lie in"),
])  # fmt: skip
def test_a_mistake_is_one_line(files, tethys, words, message):
    status, out, err = tethys(*words)
    lines = err.strip().splitlines()
    assert (status, out) == (2, "") and message in lines[-1] and lines[-1].startswith("tethys: ") and len(lines) == 1


def test_help_tells_examples(tethys):
    for command in ("train", "evaluate", "generate", "chat"):
        assert f"Example: tethys lm {command}" in " ".join(tethys(command, "--help")[1].split())
