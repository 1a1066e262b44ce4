"""Models of sequences beside the streams: registered by the project's own commands, answered over HTTP as the registered model answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from connectors.errors import UserError
from pipelines import cli, tracking
from pipelines.genomics.answers import answer, load_classifier
from pipelines.language import completion
from pipelines.language.completion import wanted
from tests.pipelines.serving.conftest import World
from tests.pipelines.serving.served import Client, Served
from titans_core.language_model import load


@dataclass(frozen=True)
class Models:
    classifier: Path
    language_model: Path
    served: Served


def run(*words: str) -> None:
    done = CliRunner().invoke(cli.app, list(words))
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("sequences")
    choose = random.Random(0)
    for name, count in (("train", 120), ("dev", 40), ("test", 40)):
        labels = choose.choices(("none", "site"), k=count)
        rows = ["".join(choose.choices("ACGT" if label == "site" else "AACGT", k=30)) for label in labels]
        (folder / f"{name}.tsv").write_text("sequence\tlabel\n" + "".join(f"{r}\t{label}\n" for r, label in zip(rows, labels, strict=True)))
    run(
        "genomics", "train", f"{folder}/train.tsv", "--dev", f"{folder}/dev.tsv", "--test", f"{folder}/test.tsv", "--row-passes", "200",
        "--model-name", "sites", "--alias", "champion", "--tracking-uri", world.store, "--output", f"{folder}/sites.safetensors",
    )  # fmt: skip
    (folder / "text.txt").write_text("the sea and the land, " * 200)
    run(
        "lm", "train", f"{folder}/text.txt", "--valid", f"{folder}/text.txt", "--output", f"{folder}/lm", "--size", "tiny", "--steps", "2",
        "--rows", "2", "--context", "32", "--model-name", "tales", "--alias", "champion", "--tracking-uri", world.store,
    )  # fmt: skip
    words = ("--classifier", "models:/sites@champion", "--language-model", "models:/tales@champion")
    with Served(folder / "state", world.store, *words) as served:
        served.client()
        yield Models(folder / "sites.safetensors", folder / "lm" / "model.safetensors", served)
        assert served.stop() == 0
        assert "Traceback" not in served.log.read_text()


def events(body: bytes) -> list[tuple[str, Any]]:
    parts = [part.split("\n") for part in body.decode().split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_sequences_are_classified_as_the_registered_model_does(models: Models) -> None:
    client, asked = Client(models.served.address), ["ACGT", "GGGGTTTTACGACG", "aaaan"]
    status, found = client.call("POST", "/v1/classify", {"sequences": asked})
    assert status == 200
    expected = answer(load_classifier(models.classifier), asked).to_dicts()
    assert [row["prediction"] for row in found["predictions"]] == [row["prediction"] for row in expected]
    for row, other in zip(found["predictions"], expected, strict=True):
        assert list(row) == ["length", "prediction", "prob_none", "prob_site"] and row["prob_site"] == pytest.approx(other["prob_site"], rel=1e-6)
    refusals = ((["ACGT", "AC!T"], "row 2: '!' at base 3"), ([""], "sequences.0"), ([], "sequences"), ([7], "sequences.0"), ("ACGT", "sequences"))
    for bad, said in refusals:
        status, refused = client.call("POST", "/v1/classify", {"sequences": bad})
        assert status == 400 and said in refused["error"], refused


def test_texts_are_completed_whole_or_piece_by_piece(models: Models) -> None:
    client = Client(models.served.address)
    model, tokenizer = load(models.language_model)
    asked = {"prompt": "the sea", "max_tokens": 24, "temperature": 0.7, "seed": 3}
    given = {name: value for name, value in asked.items() if name != "prompt"}
    [expected] = completion.rows(completion.complete(model, tokenizer, ["the sea"], wanted(given)))
    assert client.call("POST", "/v1/complete", asked) == (200, expected) and expected["tokens"] > 0
    status, body, headers = client.raw("POST", "/v1/complete", json.dumps({**asked, "stream": True}).encode(), **{"Content-Type": "application/json"})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(body)
    assert "".join(said["text"] for name, said in pieces if name == "text") == expected["text"]
    assert last == ("done", {"tokens": expected["tokens"], "reason": expected["reason"]})
    stop = expected["text"][3:5]
    status, cut = client.call("POST", "/v1/complete", {**asked, "stop": [stop]})
    assert status == 200 and cut["reason"] == "stop" and cut["text"] == expected["text"][: expected["text"].index(stop)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ""}, {"prompt": 7}, {}, {"prompt": "a" * 40_000}, {"max_tokens": 0}, {"max_tokens": 100_000}, {"temperature": -1},
        {"temperature": 1e-300}, {"top_p": 0}, {"min_p": 2}, {"repetition_penalty": 0}, {"stop": [""]}, {"stop": ["a"] * 9},
        {"stop": ["a" * 1000]}, {"seed": 2**60}, {"top_k": -1}, {"unknown": 1}, {"temperature": float("nan")}, {"stream": "yes"},
    ],
)  # fmt: skip
def test_completions_that_are_refused(models: Models, wrong: dict[str, Any]) -> None:
    asked = {**({"prompt": "the", "max_tokens": 2} if wrong else {}), **wrong}
    for streamed in ({}, {"stream": True}):
        status, refused = Client(models.served.address).call("POST", "/v1/complete", {**streamed, **asked})
        assert status == 400 and set(refused) == {"error"} and len(refused["error"]) < 500


def test_mlflow_serves_the_same_completion(models: Models, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server

    monkeypatch.setenv("_MLFLOW_IS_IN_SERVING_ENVIRONMENT", "true")
    mlflow.set_tracking_uri(tracking.open_store(world.store).uri)
    client = TestClient(scoring_server.init(mlflow.pyfunc.load_model("models:/tales@champion")))

    def ask(prompts: list[Any], **params: Any) -> Any:
        return client.post("/invocations", json={"dataframe_split": {"columns": ["prompt"], "data": [[p] for p in prompts]}, "params": params})

    first = ask(["the sea", "and"], max_tokens=12, seed=5)
    mine = [
        Client(models.served.address).call("POST", "/v1/complete", {"prompt": prompt, "max_tokens": 12, "seed": 5 + i})[1]
        for i, prompt in enumerate(("the sea", "and"))
    ]
    assert first.status_code == 200 and first.json()["predictions"] == mine
    for prompts, params, said in (([""], {}, "row 1"), (["a"], {"max_tokens": 0}, "max_tokens"), (["a"], {"temperature": -1.0}, "temperature")):
        refused = ask(prompts, **params)
        assert refused.status_code == 400 and said in refused.json()["message"]
    card = tracking.show_model("tales", world.store)[0]
    assert card.aliases == ("champion",) and card.metrics["bits_per_byte"] > 0


def test_a_model_of_another_kind_is_named(world: World, models: Models, tmp_path: Path) -> None:
    from pipelines.serving.sequences import Completer, SequenceClassifier

    with pytest.raises(UserError, match="'load' is a forecaster, and a classifier is asked for"):
        SequenceClassifier("models:/load@champion", world.store)
    with pytest.raises(UserError, match="of a language model"):
        Completer(str(models.classifier), world.store)
    with pytest.raises(UserError, match="none"):
        Completer(str(tmp_path / "none.safetensors"), world.store)
