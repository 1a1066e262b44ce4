"""The model card: what a person must know before using a version, kept beside its weights and shown in the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def forecaster_card(name: str, *, data: Mapping[str, Any], model: Mapping[str, Any], leaderboard: Sequence[Mapping[str, Any]]) -> str:
    """Markdown. `data`: facts about the table (source, digest, series, rows, frequency, trained_until); `model`: look_back, horizon,
    quantiles; `leaderboard`: a row a model on the same rolling origins, the forecaster as `tethys`."""
    lines = [
        f"# {name}",
        "",
        "A Titans forecaster: frozen weights shared by all series, and a memory for each that goes on learning while it reads.",
        "",
        "## Data",
        *(f"- {key.replace('_', ' ')}: {value}" for key, value in data.items()),
        "",
        "## Model",
        *(f"- {key.replace('_', ' ')}: {value}" for key, value in model.items()),
        "",
        "## Accuracy",
        "Rolling origins on rows that neither training nor selection saw; baselines on the same windows. Lower is better but for coverage.",
        "",
        *_table(leaderboard),
        "",
        "## Intended use",
        f"Forecasts of series like those it was trained on, with steps of {data.get('frequency')}, up to {model.get('horizon')} steps ahead.",
        "Intervals are calibrated on the training series; on a live stream the service adapts them to each stream.",
        "",
        "## Limits",
        "- A new series is forecast poorly until its memory has read a few seasons.",
        "- Values that were never observed are not invented: a missing row is passed without a write.",
        "- Nothing is known of events that leave no trace in the series; holidays and prices are not inputs.",
    ]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row.get(column) for column in columns)
        out.append("| " + " | ".join("" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |")
    return out
