"""The gate: measured on the same later windows, its decision and numbers on record, a refusal with status 1; and the way back."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from connectors.errors import UserError
from pipelines import tracking
from pipelines.cli import app
from pipelines.forecasting.estimator import TitansForecaster, save_weights
from pipelines.forecasting.sample import hourly_load
from pipelines.registry import gate
from pipelines.registry.card import forecaster_card

BORDER = datetime(2024, 1, 26)


def register(store: tracking.Store, folder: Path, frame: pl.DataFrame, name: str, alias: str | None, **options: Any) -> int:
    known = frame.filter(pl.col("ds") < BORDER)
    model = TitansForecaster(**{"horizon": 6, "look_back": 24, "hidden": 0, "epochs": 1, **options}).fit(known)
    save_weights(model.forecaster_, folder / "w.safetensors")
    with tracking.run(store, "train") as run:
        return tracking.register_forecaster(
            run, folder / "w.safetensors", model.describe(), name=name, alias=alias, input_example=known.head(24),
            output_example=model.predict().head(6), params={"h": 6}, metrics={"mase": 1.0},
            card=forecaster_card(name, data={"frequency": "1h"}, model={"horizon": 6}, leaderboard=[{"model": "tethys", "mase": 1.0}]),
            trained_until=known["ds"].max().isoformat(),
        ).version  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("registry")
    store = tracking.open_store(f"sqlite:///{folder}/tethys.db")
    frame = hourly_load(series=2, days=40, seed=2)
    frame.write_csv(folder / "all.csv")
    bad = register(store, folder, frame, "load", None, memory="frozen", look_back=2)
    good = register(store, folder, frame, "load", "challenger")
    return {"folder": folder, "store": store, "data": str(folder / "all.csv"), "bad": bad, "good": good, "frame": frame}


def tethys(world: dict[str, Any], *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", *words, "--tracking-uri", world["store"].uri])
    return done.exit_code, done.output


def test_the_path_of_a_champion(world: dict[str, Any]) -> None:
    """First against a baseline; a worse one is refused with status 1 and its numbers; a rollback goes to the one before."""
    bad, good, data, uri = world["bad"], world["good"], world["data"], world["store"].uri
    gatefile = world["folder"] / "gate.yaml"
    gatefile.write_text("margin: 0.02\ncoverage: {interval: 80, least: 0.5, most: 1.0}\nslices: {worst: 1.5}\n")

    code, out = tethys(world, "promote", "load", "--data", data, "--gate", str(gatefile), "--by", "ana", "--json")
    first = json.loads(out)
    assert code == 0 and first["champion"] == good and first["before"] is None and first["by"] == "ana"
    assert first["comparison"]["champion"] == "seasonal_naive" and first["comparison"]["ratio"] < 0.98
    assert first["comparison"]["since"] >= "2024-01-26", "nothing is judged on rows of the training"
    tags = tracking.find_version("load", good, uri).tags
    assert tags["gate.decision"] == "promoted" and tags["gate.by"] == "ana" and float(tags["gate.ratio"]) == first["comparison"]["ratio"]

    code, out = tethys(world, "promote", "load", "--data", data, "--challenger", str(bad), "--gate", str(gatefile))
    assert code == 1 and "refused: mase" in out and f"load/{good}" in out
    assert tracking.find_version("load", "champion", uri).number == good
    tags = tracking.find_version("load", bad, uri).tags
    assert tags["gate.decision"] == "refused" and "mase" in tags["gate.reasons"] and float(tags["gate.ratio"]) > 1

    generous = world["folder"] / "generous.yaml"
    generous.write_text("slices: {worst: 100}\ncoverage: {interval: 80, least: 0, most: 1}\n")
    better = register(world["store"], world["folder"], world["frame"], "load", "challenger", hidden=8)
    rules = gate.read_rules(generous)
    compared = gate.compare("load", data, rules=rules, tracking_uri=uri)
    board = {row["model"]: row for row in compared.leaderboard}
    assert compared.ratio == pytest.approx(board[f"load/{better}"]["mase"] / board[f"load/{good}"]["mase"])
    assert gate.promote("load", data, rules=rules, tracking_uri=uri).promoted is (not compared.refused)
    if compared.refused:
        tracking.move_alias("load", "champion", better, {"by": "test"}, uri)
    code, out = tethys(world, "rollback", "load", "--by", "bo", "--json")
    assert code == 0 and json.loads(out)["champion"] == good
    with pytest.raises(UserError, match="the only champion"):
        gate.rollback("load", tracking_uri=uri)
    with pytest.raises(UserError, match="never champion"):
        gate.rollback("load", to=bad, tracking_uri=uri)
    assert [e["version"] for e in tracking.alias_history("load", "champion", uri)] == [good, better, good]

    code, out = tethys(world, "show", "load")
    assert code == 0 and "gate.decision" in out and "by bo: rollback" in out
    code, out = tethys(world, "list")
    assert code == 0 and f"champion -> {good}" in out


def test_the_same_side_by_side_is_equal(world: dict[str, Any]) -> None:
    """A version against its own twin: ratio one, and not refused with margin 0."""
    uri = world["store"].uri
    twin = register(world["store"], world["folder"], world["frame"], "twin", "champion")
    again = register(world["store"], world["folder"], world["frame"], "twin", "challenger")
    found = gate.compare("twin", world["data"], tracking_uri=uri)
    assert (twin, again) == (1, 2) and found.ratio == 1.0 and found.worst_ratio == 1.0 and found.metric == "mase"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metric: rmse", "metric"),
        ("margins: 0.1", "margins: Extra inputs"),
        ("windows: {most: 0}", "windows.most"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_gate_file_with_a_mistake_names_it(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        gate.read_rules(tmp_path / "gate.yaml")


def test_the_file_and_the_defaults_say_the_same() -> None:
    assert gate.read_rules() == gate.Rules()


def test_no_later_rows_no_judgement(world: dict[str, Any]) -> None:
    old = world["folder"] / "old.csv"
    world["frame"].filter(pl.col("ds") < BORDER).write_csv(old)
    with pytest.raises(UserError, match="bring newer rows"):
        gate.compare("load", str(old), challenger=str(world["bad"]), tracking_uri=world["store"].uri)


def test_a_version_carries_its_card_and_loads_without_pickle(world: dict[str, Any]) -> None:
    import mlflow

    found = tracking.load_model("load", world["good"], world["store"].uri)
    card = (found.weights.parent / "model_card.md").read_text()
    assert "## Intended use" in card and "| tethys | 1 |" in card
    described = world["store"].client.get_model_version("load", str(world["good"])).description
    assert described.startswith("# load")
    assert not [p for p in found.weights.parent.parent.rglob("*") if p.suffix in (".pkl", ".pickle", ".cloudpickle")]
    model = mlflow.pyfunc.load_model(f"models:/load/{world['good']}")
    assert {p.name for p in model.metadata.signature.params} == {"h"} and model.input_example is not None
