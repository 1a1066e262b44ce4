"""Needle tasks: what a row holds, that training and tests share nothing, and how answers are scored."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import niah
from pipelines.language import needles
from titans_core.language_model import LanguageModel, configure

ROOT = Path(__file__).resolve().parents[2]
TEXT = niah.filler(None)
TOLD = re.compile(rb"The magic code of ([a-z]{6}) is: ([0-9a-f-]+)\. ")
ASKED = re.compile(rb"\nWhat was it\? The magic code of ([a-z]{6}) is: ")


@pytest.mark.parametrize("task", needles.TASKS)
@pytest.mark.parametrize(("part", "length", "count"), [("test", 1024, 1), ("test", 4096, 1), ("train", 1024, 3)])
def test_a_row_tells_every_needle_once_before_its_question_and_has_its_exact_length(task, part, length, count):
    rng = random.Random(1)
    for _ in range(20):
        row = needles.draw(task, length, count, TEXT[part], part, rng)
        whole = row.tokens.tobytes()
        assert len(whole) == len(row.answers) == length
        told, asked = {m[1]: m for m in TOLD.finditer(whole)}, {m[1]: m for m in ASKED.finditer(whole)}
        assert len(told) == len(asked) == count and set(told) == set(asked)
        assert len({m[2] for m in told.values()}) == count  # no two needles of a row have one value
        marked = torch.zeros(length, dtype=torch.bool)
        for key, question in asked.items():
            value = told[key][2]
            assert len(value) == needles.ANSWER[task]
            assert whole.count(key) == 2 and whole.count(value) == 2  # told and asked; told and answered
            assert told[key].end() <= question.start()
            assert whole[question.end() : question.end() + len(value)] == value
            marked[question.end() : question.end() + len(value)] = True
        assert torch.equal(marked, torch.tensor(row.answers))
        assert row.answers[-1]


def test_needles_lie_everywhere_and_filler_keeps_its_words_whole():
    rng = random.Random(2)
    places = []
    for _ in range(200):
        whole = needles.draw("number", 2048, 1, TEXT["test"], "test", rng).tokens.tobytes()
        at = TOLD.search(whole).start()
        assert at == 0 or whole[at - 1 : at] == b" "
        places.append(at / 2048)
    assert min(places) < 0.1 and max(places) > 0.85 and 0.4 < sum(places) / 200 < 0.55


def test_training_and_tests_share_no_key_and_no_filler():
    rng = random.Random(3)
    train, test = ({needles.draw_key(rng, part) for _ in range(5000)} for part in ("train", "test"))
    assert len(train) > 4000 and len(test) > 4000 and not train & test
    words = {part: set(text.lower().replace(b".", b"").split()) for part, text in TEXT.items()}
    assert not words["train"] & words["test"]


def test_books_are_cut_into_parts_that_do_not_meet(tmp_path):
    for book in niah.BOOKS:
        with gzip.open(tmp_path / book, "wb") as file:
            file.write("".join(f"{book[0]}{i:05d} " for i in range(1000)).encode())
    parts = niah.filler(tmp_path)
    train, test = (set(re.findall(rb"[kj]\d{5}", parts[part])) for part in ("train", "test"))
    assert len(train) >= 1590 and len(test) >= 190 and not train & test


def test_keys_and_values_that_stand_in_the_filler_are_not_taken():
    for seed in range(20):
        first = TOLD.search(needles.draw("number", 900, 1, b"quiet words only here " * 40, "test", random.Random(seed)).tokens.tobytes())
        text = b"quiet words only here " * 20 + first[1] + b" " + first[2] + b" words " * 40
        whole = needles.draw("number", 900 + len(first[0]), 1, text, "test", random.Random(seed)).tokens.tobytes()  # holds most of the text
        told = TOLD.search(whole)
        assert whole.count(told[1]) == 2 and whole.count(told[2]) == 2


def test_needles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="the row has 100"):
        needles.draw("word", 100, 1, TEXT["train"], "train", random.Random(0))


@pytest.mark.parametrize("layers", ["mac", "window"])
def test_scores_are_those_of_greedy_decoding_and_of_one_call(layers, monkeypatch):
    torch.manual_seed(0)
    model = LanguageModel(configure("tiny", 256, layers=layers))
    tokens, _ = needles.stack([needles.draw("pk", 300, 1, TEXT["test"], "test", random.Random(i)) for i in range(3)])
    with torch.inference_mode():
        best = model(tokens[:, :-1], model.initial_state(3))[0].argmax(-1)[:, -7:]
        greedy = tokens[0, :-7]
        for _ in range(7):
            greedy = torch.cat((greedy, model(greedy[None], model.initial_state(1))[0][:, -1].argmax(-1)))
    expected = best == tokens[:, -7:]
    monkeypatch.setattr(needles, "READ_AT_ONCE", 97)  # pieces that cut the answer in two
    assert torch.equal(needles.right(model, tokens, 7), expected)
    own = torch.cat((tokens[:1, :-7], greedy[None, -7:]), dim=1)
    assert needles.right(model, own, 7).all()  # what greedy decoding wrote is scored right
    other = own.clone()
    other[0, -4] = (other[0, -4] + 1) % 256
    assert not needles.right(model, other, 7).all()


def test_the_benchmark_goes_on_where_it_ended(tmp_path):
    words = [sys.executable, str(ROOT / "benchmarks/niah.py"), "--size", "tiny", "--steps", "2", "--samples", "2", "--lengths", "1"]
    words += ["--tasks", "pk", "word", "--runs", str(tmp_path / "runs.ndjson")]
    first = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert (tmp_path / "runs.ndjson").read_text().count("\n") == 6  # two tasks, three ways to hold the memory
    again = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    figures = [json.loads(each.stdout)["figures"] for each in (first, again)]
    assert figures[0] == figures[1]
    assert set(figures[0]["word"]) == {"mac", "mac_frozen", "mac_zeroed"} and set(figures[0]["word"]["mac"]) == {"1K"}


def test_a_training_that_was_broken_off_gives_the_same_weights(tmp_path, monkeypatch):
    options = argparse.Namespace(size="tiny", steps=4, tasks=["number"], data=None, seed=0)
    monkeypatch.setattr(niah, "STEP", 1024)
    monkeypatch.setattr(niah, "KEEP", 2)
    whole, facts = niah.learn("mac", options, TEXT["train"], tmp_path / "whole", float("inf"))
    calls = iter([0.0, 0.0, 1.0])  # by this clock the time is over before the third step
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(calls))
        assert niah.learn("mac", options, TEXT["train"], tmp_path / "part", 0.5) is None
    resumed, found = niah.learn("mac", options, TEXT["train"], tmp_path / "part", float("inf"))
    assert found["loss"] == facts["loss"] and found["steps"] == 4
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_training_whose_loss_is_no_number_ends_with_a_message(tmp_path, monkeypatch):
    options = argparse.Namespace(size="tiny", steps=60, tasks=["pk"], data=None, seed=0)
    monkeypatch.setattr(niah, "STEP", 256)
    monkeypatch.setattr(niah, "RATE", float("inf"))
    with pytest.raises(SystemExit, match="the training has failed"):
        niah.learn("mac", options, TEXT["train"], tmp_path / "part", float("inf"))
    assert not (tmp_path / "part").exists()
