"""`tethys models ...`: what is registered, and who is champion. Exit status 1: the gate refused; 2: a mistake of the user."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines import DEFAULT_TRACKING_URI

REFUSED = 1

models = typer.Typer(help="The registered models, and which of them is champion.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the model.")]
Data = Annotated[str, typer.Option(help="Table to measure on, with rows later than either version was trained on: a file, a glob, a URI.")]
TrackingUri = Annotated[
    str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store: a SQLite file, or the address of a tracking server.")
]
Gate = Annotated[Path | None, typer.Option(help="YAML of the gate; mlflow/registry/promotion.yaml when not given.")]
Challenger = Annotated[str, typer.Option(help="Version to measure: a number or an alias.")]
Champion = Annotated[str, typer.Option(help="Version to measure it against.")]
IdColumn = Annotated[str, typer.Option(help="Column that names the series; an empty name takes the table as one series.")]
TimeColumn = Annotated[str, typer.Option(help="Column of the time stamps, or of whole numbers that count steps.")]
TargetColumn = Annotated[str, typer.Option(help="Column that is forecast.")]
By = Annotated[str | None, typer.Option(help="Who asks, for the record; user@host when not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


@models.command("list", epilog="Example: tethys models list --json")
def list_models(tracking_uri: TrackingUri = DEFAULT_TRACKING_URI, as_json: Json = False) -> None:
    """Every registered model, its latest version and its aliases."""
    from pipelines import tracking

    found = tracking.list_models(tracking_uri)
    if as_json:
        typer.echo(json.dumps(found))
        return
    _table([{**m, "aliases": ", ".join(f"{alias} -> {version}" for alias, version in m["aliases"].items())} for m in found])


@models.command("show", epilog="Example: tethys models show sales")
def show(name: Name, tracking_uri: TrackingUri = DEFAULT_TRACKING_URI, as_json: Json = False) -> None:
    """Every version of a model, newest first, with its metrics, what the gate said of it, and the history of the champion."""
    from pipelines import tracking

    versions = tracking.show_model(name, tracking_uri)
    history = tracking.alias_history(name, "champion", tracking_uri)
    if as_json:
        rows = [{**dataclasses.asdict(v), "version": v.number} for v in versions]
        typer.echo(json.dumps({"model": name, "versions": rows, "champions": history}))
        return
    for v in versions:
        created = datetime.fromtimestamp(v.created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        aliases = f"  {', '.join(v.aliases)}" if v.aliases else ""
        typer.echo(f"version {v.number}{aliases}  {created}  run {v.run_id}")
        for metric, value in v.metrics.items():
            typer.echo(f"    {metric:<12} {value:.4g}")
        for tag, said in sorted(v.tags.items()):
            typer.echo(f"    {tag:<24} {said}")
    for entry in history:
        typer.echo(f"champion {entry['version']}  {entry.get('at', '')}  by {entry.get('by', '?')}: {entry.get('why', '')}")


@models.command("compare", epilog="Example: tethys models compare sales --data recent.parquet")
def compare(
    name: Name,
    data: Data,
    challenger: Challenger = "challenger",
    champion: Champion = "champion",
    gate: Gate = None,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Measure a challenger against the champion on the same windows; changes nothing."""
    from pipelines.registry import gate as rules

    found = rules.compare(
        name, data, challenger=challenger, champion=champion, rules=rules.read_rules(gate), tracking_uri=tracking_uri,
        id_column=id_column or None, time_column=time_column, target_column=target_column,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
        return
    _comparison(found)
    typer.echo("the gate would refuse: " + "; ".join(found.refused) if found.refused else "the gate would promote it")


@models.command("promote", epilog="Example: tethys models promote sales --data recent.parquet")
def promote(
    name: Name,
    data: Data,
    challenger: Challenger = "challenger",
    gate: Gate = None,
    by: By = None,
    id_column: IdColumn = "unique_id",
    time_column: TimeColumn = "ds",
    target_column: TargetColumn = "y",
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Make the challenger champion if it passes the gate; a refusal is exit status 1, with the numbers."""
    from pipelines.registry import gate as rules

    done = rules.promote(
        name, data, challenger=challenger, rules=rules.read_rules(gate), by=by, tracking_uri=tracking_uri,
        id_column=id_column or None, time_column=time_column, target_column=target_column,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
    else:
        assert done.comparison is not None
        _comparison(done.comparison)
        if done.promoted:
            typer.echo(f"{done.comparison.challenger} is champion now{f', before it was version {done.before}' if done.before else ''}")
        else:
            typer.echo(f"refused: {'; '.join(done.reasons)}")
    if not done.promoted:
        raise typer.Exit(REFUSED)


@models.command("rollback", epilog="Example: tethys models rollback sales")
def rollback(
    name: Name,
    to: Annotated[int | None, typer.Option(help="Version to go back to; the champion before the present one when not given.")] = None,
    by: By = None,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Make an earlier champion champion again; a live service goes back to it as well."""
    from pipelines.registry import gate as rules

    done = rules.rollback(name, to=to, by=by, tracking_uri=tracking_uri)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
    else:
        typer.echo(f"{name}/{done.champion} is champion again, before it was version {done.before}")


def _comparison(found: Any) -> None:
    _table(found.leaderboard)
    typer.echo(f"{found.challenger} against {found.champion}: {found.metric} x {found.ratio:.4g}, on {found.windows} windows since {found.since}")
    if found.worst_slice:
        typer.echo(f"worst slice: {found.worst_slice}, x {found.worst_ratio:.4g}")


def _table(rows: list[dict[str, Any]]) -> None:
    from pipelines.cli import _print_table

    _print_table(rows)
