"""A classifier through the registry: trained and registered by the command, found by alias, loaded in another process without
pickles, and served with a clear answer to a bad request."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from connectors.errors import UserError
from pipelines import tracking
from pipelines.genomics.answers import answer, checked, load_classifier
from pipelines.genomics.commands import app
from pipelines.genomics.job import classify, read_job

runner = CliRunner()
ROOT = Path(__file__).resolve().parents[2]


def write_table(path, count, seed):
    choose = random.Random(seed)
    labels = choose.choices(("none", "site"), k=count)
    rows = ["".join(choose.choices("ACGT" if label == "site" else "AACGT", k=30)) for label in labels]
    path.write_text("sequence\tlabel\n" + "".join(f"{row}\t{label}\n" for row, label in zip(rows, labels, strict=True)))


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """A folder with a store in which the command has registered the classifier `sites`."""
    folder = tmp_path_factory.mktemp("registry")
    for name, count, seed in (("train", 200, 1), ("dev", 60, 2), ("test", 60, 3)):
        write_table(folder / f"{name}.tsv", count, seed)
    uri = f"sqlite:///{folder}/tethys.db"
    arguments = ["train", f"{folder}/train.tsv", "--dev", f"{folder}/dev.tsv", "--test", f"{folder}/test.tsv", "--row-passes", "400"]
    arguments += ["--model-name", "sites", "--alias", "champion", "--tracking-uri", uri, "--output", f"{folder}/m.safetensors", "--json"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder, uri, json.loads(done.stdout)


def test_training_registers_weights_card_signature_classes_and_the_digests_of_the_data(registered):
    folder, uri, report = registered
    assert (report["version"], report["classes"]) == ("sites/1", ["none", "site"])
    client = tracking.open_store(uri).client
    version = client.get_model_version("sites", "1")
    assert version.tags["classes"] == "none,site"
    assert "k-mer logistic regression" in version.description and report["data"]["train"] in version.description
    run = client.get_run(version.run_id)
    assert run.data.params["classes"] == "none,site"
    assert {each.dataset.name for each in run.inputs.dataset_inputs} == {"train", "dev", "test"}
    files = Path(tracking.load_model("sites", "champion", uri, kind="classifier").weights).parents[1]
    names = {file.relative_to(files).as_posix() for file in files.rglob("*") if file.is_file()}
    assert {"artifacts/weights.safetensors", "artifacts/config.json", "artifacts/model_card.md", "classifier.py"} <= names
    assert not any(name.endswith(".pkl") for name in names)
    signature = yaml.safe_load((files / "MLmodel").read_text())["signature"]
    assert [each["name"] for each in json.loads(signature["inputs"])] == ["sequence"]
    assert [each["name"] for each in json.loads(signature["outputs"])] == ["length", "prediction", "prob_none", "prob_site"]


def test_a_job_names_its_model_by_alias(registered, tmp_path):
    folder, uri, _ = registered
    (tmp_path / "a.fa").write_text(">a\nACGT\n>b\nGGGGTTTT\n")
    job = {"model": {"name": "sites", "version": "champion"}, "tracking_uri": uri, "inputs": "a.fa", "output": "o"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = runner.invoke(app, ["classify", str(tmp_path / "job.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == "sites/1"
    expected = answer(load_classifier(folder / "m.safetensors"), ["ACGT", "GGGGTTTT"])
    assert pl.read_parquet(tmp_path / "o/part-0000-000000.parquet").drop("file", "id").equals(expected)
    runs = tracking.open_store(uri).client.search_runs(["1"], "params.model = 'sites/1'")
    assert len(runs) == 1 and runs[0].data.metrics["records"] == 2
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "model": "models:/sites@best"}))
    with pytest.raises(UserError, match=r"no alias 'best': its versions are 1, its aliases champion"):
        classify(read_job(tmp_path / "job.yaml"))
    with pytest.raises(UserError, match="'sites' is a classifier, and a forecaster is asked for"):
        tracking.load_model("sites", "champion", uri)


def test_a_clean_process_loads_it_without_pickles_and_answers_the_same(registered):
    folder, uri, _ = registered
    code = (
        "import json, os\n"
        "os.environ['MLFLOW_ALLOW_PICKLE_DESERIALIZATION'] = 'false'\n"
        f"import mlflow, pandas; mlflow.set_tracking_uri({uri!r})\n"
        "model = mlflow.pyfunc.load_model('models:/sites@champion')\n"
        "rows = model.predict(pandas.DataFrame({'sequence': ['ACGT', 'ggggtttn']}))\n"
        "print(json.dumps(rows.to_dict('list')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = answer(load_classifier(folder / "m.safetensors"), ["ACGT", "ggggtttn"])
    found = pl.DataFrame(json.loads(done.stdout.splitlines()[-1]))
    assert found["prediction"].to_list() == expected["prediction"].to_list()
    assert found["prob_site"].to_list() == pytest.approx(expected["prob_site"].to_list(), abs=1e-6)


def test_the_scoring_server_answers_and_names_the_row_of_a_bad_request(registered, monkeypatch):
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server

    folder, uri, _ = registered
    monkeypatch.setenv("_MLFLOW_IS_IN_SERVING_ENVIRONMENT", "true")  # the server sets it: put back after the test
    mlflow.set_tracking_uri(uri)
    client = TestClient(scoring_server.init(mlflow.pyfunc.load_model("models:/sites@champion")))

    def ask(rows):
        return client.post("/invocations", json={"dataframe_split": {"columns": ["sequence"], "data": [[row] for row in rows]}})

    first, again = ask(["ACGT", "GGGGTTTT"]), ask(["ACGT", "GGGGTTTT"])
    assert first.status_code == 200 and first.json() == again.json()
    rows = first.json()["predictions"]
    assert [row["length"] for row in rows] == [4, 8]
    assert all(row["prob_none"] + row["prob_site"] == pytest.approx(1) for row in rows)
    for bad, said in ((["ACGT", "AC!T"], "row 2: '!' at base 3"), ([""], "row 1: the sequence is empty"), (["ACGT", None], "row 2")):
        refused = ask(bad)
        assert refused.status_code == 400 and said in refused.json()["message"], refused.text
    assert client.post("/invocations", json={"dataframe_split": {"columns": ["dna"], "data": [["ACGT"]]}}).status_code == 400


def test_rows_of_a_request_are_checked():
    assert checked(["ACGTN", "acgu-"]) == ["ACGTN", "acgu-"]
    with pytest.raises(UserError, match="row 1: 3.5 is no sequence"):
        checked([3.5])
    with pytest.raises(UserError, match="row 1: ' ' at base 3 is no nucleotide code"):
        checked(["AC GT"])


def test_a_file_that_holds_no_classifier_is_named(tmp_path, registered):
    folder, *_ = registered
    (tmp_path / "m.safetensors").write_bytes(b"not at all")
    with pytest.raises(UserError, match=r"m.safetensors is no safetensors file"):
        load_classifier(tmp_path / "m.safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        load_classifier(tmp_path / "none.safetensors")
    refused = runner.invoke(app, ["score-variants", "models:/sites", "x.vcf", "--genome", "g.fa", "--output", str(tmp_path / "o.tsv")])
    assert isinstance(refused.exception, UserError) and "names no version" in str(refused.exception)
