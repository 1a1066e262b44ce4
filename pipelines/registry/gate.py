"""The gate: a challenger becomes champion only by being measured against it, on the same windows, and found no worse.

The windows are rolling origins on rows that neither model was trained on. What decides stands in `mlflow/registry/promotion.yaml`; the
decision, its numbers and who asked for it become tags of the version, whether it passed or not.
"""

from __future__ import annotations

import getpass
import hashlib
import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import yaml
from numpy.typing import NDArray

from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI
from pipelines.forecasting import backtest as rolling
from pipelines.forecasting.baselines import LastValue, SeasonalNaive
from pipelines.forecasting.calendar import natural_cycles
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.job import load_forecaster
from pipelines.forecasting.reading import Reading, read_table
from pipelines.windows import Panel

CHAMPION, CHALLENGER = "champion", "challenger"

Metric = Literal["mase", "mae", "mse", "wql"]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class WindowRule(_Strict):
    most: int = pydantic.Field(default=200, ge=1)
    least: int = pydantic.Field(default=20, ge=1)


class CoverageRule(_Strict):
    interval: float = pydantic.Field(default=80, gt=0, lt=100)
    least: float = pydantic.Field(default=0.70, ge=0, le=1)
    most: float = pydantic.Field(default=0.90, ge=0, le=1)


class SliceRule(_Strict):
    by: tuple[Literal["series", "step"], ...] = ("series", "step")
    worst: float = pydantic.Field(default=1.15, gt=0)
    least_values: int = pydantic.Field(default=100, ge=1)


class Rules(_Strict):
    """What the gate asks for; the file `promotion.yaml` in words."""

    metric: Metric = "mase"
    margin: float = pydantic.Field(default=0.0, ge=0, lt=1)
    windows: WindowRule = WindowRule()
    coverage: CoverageRule = CoverageRule()
    slices: SliceRule = SliceRule()
    first: Literal["seasonal_naive", "last_value"] = "seasonal_naive"


@dataclass(frozen=True)
class Comparison:
    """Two sides on the same windows. Metrics: lower is better."""

    model: str
    challenger: str
    """`NAME/VERSION`."""
    champion: str
    """`NAME/VERSION`, or the baseline that stands in where the model has no champion yet."""
    leaderboard: list[dict[str, Any]] = field(repr=False)
    """A row a side: model, mase, mae, mse, wql and coverages."""
    metric: str
    ratio: float
    """The challenger's metric over the champion's."""
    coverage: float
    worst_slice: str
    worst_ratio: float
    windows: int
    """Rolling origins of each series."""
    since: str
    """The stamp of the first row that was forecast."""
    data: str
    """Digest of the rows of the table."""
    refused: list[str]
    """Why the challenger does not pass; empty: it passes."""


@dataclass(frozen=True)
class Decision:
    """What `promote` or `rollback` did."""

    model: str
    champion: int | None
    """The version that is champion now."""
    before: int | None
    promoted: bool
    by: str
    reasons: list[str]
    comparison: Comparison | None = None


def read_rules(path: str | Path | None = None) -> Rules:
    """The rules of a file, or those the project comes with. Raises UserError naming the field that is wrong."""
    from pipelines import tracking

    place = tracking.project_file("registry/promotion.yaml") if path is None else Path(path)
    if not place.is_file():
        raise UserError(f"there is no gate file {place}: mlflow/registry/promotion.yaml shows one")
    try:
        return Rules.model_validate(yaml.safe_load(place.read_text()) or {})
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{place} is no YAML: {' '.join(str(error).split())}") from None
    except pydantic.ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"{place}: {faults}") from None


def compare(
    name: str,
    data: str,
    *,
    challenger: str = CHALLENGER,
    champion: str = CHAMPION,
    rules: Rules | None = None,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
) -> Comparison:
    """Measure the challenger against the champion (a baseline where there is none) on the rows that neither was trained on.

    Raises UserError where the two cannot be compared: other frequencies, no rows later than the training, unknown versions.
    """
    from pipelines import tracking

    rules = Rules() if rules is None else rules
    new = tracking.find_version(name, challenger, tracking_uri)
    if new is None:
        raise UserError(f"model {name!r} has no {challenger!r}: tethys train --model-name {name} registers one")
    old = tracking.find_version(name, champion, tracking_uri)
    if old is not None and old.number == new.number:
        raise UserError(f"version {new.number} of model {name!r} is {champion} already: there is nothing to compare")
    sides = {v.number: _load(name, v.number, tracking_uri) for v in (new, old) if v is not None}
    model = sides[new.number]
    covariates = dict.fromkeys(n for side in sides.values() for n in side.encoder_.names)
    table = read_table(
        data, Reading(), frequency=model.frequency_, id_column=id_column, time_column=time_column, target_column=target_column,
        covariates=tuple(covariates),
    ).panel  # fmt: skip
    before = None if old is None else sides[old.number]
    if before is not None and before.frequency_ != model.frequency_:
        raise UserError(
            f"version {new.number} forecasts steps of {model.frequency_}, the champion (version {old.number if old else ''}) of "
            f"{before.frequency_}: they cannot stand in for each other"
        )
    horizon = model.horizon if before is None else min(model.horizon, before.horizon)
    look_back = model.look_back if before is None else max(model.look_back, before.look_back)
    known = _known_rows(table, [v.tags.get(tracking.TRAINED_UNTIL) for v in (new, old) if v is not None], look_back)
    origins = _origins(table, known, horizon, rules.windows.most)
    cycles = natural_cycles(table.frequency)
    real = rolling.truth(table.aligned()[1], origins, horizon, rolling.season(table.frequency), known)

    point, quantile = (a[:, :, :horizon] for a in model.quantiles_at(table, origins))
    levels = model.forecaster_.config.quantiles
    calibration = _figures(point, quantile, levels, real)
    names = {"challenger": f"{name}/{new.number}"}
    rows: list[dict[str, Any]] = [{"model": names["challenger"], **calibration}]
    if before is not None and old is not None:
        names["champion"] = f"{name}/{old.number}"
        other, other_quantile = (a[:, :, :horizon] for a in before.quantiles_at(table, origins))
        other_levels = before.forecaster_.config.quantiles
        rows.append({"model": names["champion"], **_figures(other, other_quantile, other_levels, real)})
        sharp: tuple[Any, Any] = ((quantile, levels), (other_quantile, other_levels))
    else:
        names["champion"] = rules.first
        other = _baseline(rules.first, table, origins, horizon, cycles)
        # A baseline has one value: its distribution is that value.
        sharp = ((quantile, levels), (np.repeat(other[..., None], len(levels), 3), levels))
        rows.append({"model": rules.first, **_figures(other, *sharp[1], real)})

    score = _scorer(rules.metric, point, other, sharp, real)
    mine, theirs = score(np.s_[:], np.s_[:])
    slices = {
        label: (a / b if b > 0 else math.inf)
        for label, series, steps in _slices(rules.slices, table, real)
        for a, b in [score(series, steps)]
        if math.isfinite(a) and math.isfinite(b)
    }
    worst = max(slices, key=lambda label: slices[label], default="")
    inside = calibration.get(f"coverage{rules.coverage.interval:g}", math.nan)
    found = Comparison(
        model=name,
        challenger=names["challenger"],
        champion=names["champion"],
        leaderboard=rows,
        metric=rules.metric,
        ratio=mine / theirs if theirs > 0 else math.inf,
        coverage=inside,
        worst_slice=worst,
        worst_ratio=slices.get(worst, math.nan),
        windows=len(origins),
        since=str(table.aligned()[0][origins[0]]),
        data=hashlib.sha256(table.frame().write_csv().encode()).hexdigest()[:16],
        refused=[],
    )
    found.refused.extend(_refusals(found, rules, mine, theirs))
    return found


def promote(
    name: str, data: str, *, rules: Rules | None = None, by: str | None = None, tracking_uri: str = DEFAULT_TRACKING_URI, **where: Any
) -> Decision:
    """Compare; where the challenger passes it becomes champion. The decision, its numbers and who asked are tags of the version.

    `where`: challenger, champion and the columns of the table, as `compare` takes them.
    """
    from pipelines import tracking

    found = compare(name, data, rules=rules, tracking_uri=tracking_uri, **where)
    asked = by or whoami()
    number = int(found.challenger.rpartition("/")[2])
    before = tracking.find_version(name, CHAMPION, tracking_uri)
    passed = not found.refused
    now = _now()
    tags = {
        "gate.decision": "promoted" if passed else "refused",
        "gate.reasons": "; ".join(found.refused) or "none",
        "gate.by": asked,
        "gate.at": now,
        **{f"gate.{key}": value for key, value in asdict(found).items() if key not in ("model", "leaderboard", "refused", "challenger")},
        **{f"gate.{row['model'].replace('/', '.')}.{found.metric}": row.get(found.metric) for row in found.leaderboard},
    }
    tracking.tag_version(name, number, tags, tracking_uri)
    if passed:
        entry = {"by": asked, "at": now, "why": f"gate: {found.metric} x {found.ratio:.4g} of {found.champion}"}
        tracking.move_alias(name, CHAMPION, number, entry, tracking_uri)
    held = None if before is None else before.number
    return Decision(name, number if passed else held, held, passed, asked, found.refused, found)


def rollback(name: str, *, to: int | None = None, by: str | None = None, tracking_uri: str = DEFAULT_TRACKING_URI) -> Decision:
    """Make the champion before the present one champion again (or version `to`, which must have been champion).

    No gate: it was champion, and going back must not need data. Raises UserError where there is none to go back to.
    """
    from pipelines import tracking

    present = tracking.find_version(name, CHAMPION, tracking_uri)
    if present is None:
        raise UserError(f"model {name!r} has no champion: there is nothing to roll back")
    entries = tracking.alias_history(name, CHAMPION, tracking_uri)
    been = [entry["version"] for entry in entries]
    # Each rollback takes one step back along the promotions, so that two of them do not swap two versions for ever.
    stack: list[int] = []
    for entry in entries:
        if entry["version"] in stack:
            del stack[stack.index(entry["version"]) :]
        stack.append(entry["version"])
    earlier = [version for version in stack if version != present.number]
    if to is None:
        if not earlier:
            raise UserError(f"version {present.number} is the only champion that {name!r} ever had: there is nothing to go back to")
        target = earlier[-1]
    elif to == present.number:
        raise UserError(f"version {to} of {name!r} is champion already")
    elif to not in been:
        raise UserError(f"version {to} of {name!r} was never champion: promote it through the gate (tethys models promote {name})")
    else:
        target = to
    asked, now = by or whoami(), _now()
    tracking.tag_version(name, present.number, {"rolled_back.by": asked, "rolled_back.at": now}, tracking_uri)
    tracking.move_alias(name, CHAMPION, target, {"by": asked, "at": now, "why": f"rollback of version {present.number}"}, tracking_uri)
    return Decision(name, target, present.number, True, asked, [f"rollback of version {present.number}"])


def whoami() -> str:
    """`user@host`; a scheduler says who asked with --by."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _load(name: str, version: int, tracking_uri: str) -> TitansForecaster:
    from pipelines import tracking

    found = tracking.load_model(name, version, tracking_uri)
    return load_forecaster(found.weights, found.config)


def _known_rows(table: Panel, trained_until: list[str | None], look_back: int) -> int:
    """Rows of the common grid that must not be judged: what either model was trained on, and a look-back at least."""
    grid, _, _ = table.aligned()
    known = look_back
    for stamp in trained_until:
        if stamp is not None:
            end = int(stamp) if grid.dtype.kind != "M" else np.datetime64(stamp.removesuffix("Z"))
            known = max(known, int(np.searchsorted(grid, end, side="right")))
    return known


def _origins(table: Panel, known: int, horizon: int, most: int) -> NDArray[np.int64]:
    grid, _, _ = table.aligned()
    every = np.arange(known, len(grid) - horizon + 1)
    if not len(every):
        raise UserError(
            f"the table ends at {grid[-1]}, and {known} of its {len(grid)} rows were seen in training (or are look-back): a horizon of "
            f"{horizon} later rows is needed; bring newer rows"
        )
    return every[np.unique(np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int))]


def _baseline(kind: str, table: Panel, origins: NDArray[np.int64], horizon: int, cycles: Any) -> NDArray[np.float64]:
    _, y, _ = table.aligned()
    model = SeasonalNaive(horizon, cycles[0]) if kind == "seasonal_naive" and cycles else LastValue(horizon)
    return np.stack([model.forecast(row, origins) for row in y]).astype(np.float64)


def _figures(point: Any, quantile: Any, levels: Any, real: rolling.Truth) -> dict[str, float]:
    """mase, mae, mse, coverage and wql of forecasts point (S, n, H) and quantile (S, n, H, Q)."""
    series, origins, horizon = point.shape
    scores = rolling.Scores((rolling.MODEL,), levels, origins, horizon)
    scores.add([str(i) for i in range(series)], {rolling.MODEL: point}, quantile, real)
    return {figure: value for figure, value in scores.leaderboard()[0].items() if figure != "model"}


def _scorer(metric: str, mine: Any, theirs: Any, sharp: Any, real: rolling.Truth) -> Callable[[Any, Any], tuple[float, float]]:
    """score(series, steps) -> the metric of both sides over those series and steps."""

    def score(series: Any, steps: Any) -> tuple[float, float]:
        part = rolling.Truth(real.y[series][:, :, steps], real.scale[series])
        a, b = (
            _figures(point[series][:, :, steps], quantile[series][:, :, steps], levels, part).get(metric, math.nan)
            for point, (quantile, levels) in ((mine, sharp[0]), (theirs, sharp[1]))
        )
        return a, b

    return score


def _slices(rule: SliceRule, table: Panel, real: rolling.Truth) -> Iterator[tuple[str, Any, Any]]:
    """(label, series, steps) of each slice that holds enough values."""
    horizon = real.y.shape[2]
    if "series" in rule.by:
        for i, name in enumerate(table.ids):
            if np.isfinite(real.y[i]).sum() >= rule.least_values:
                yield f"series {name}", np.s_[i : i + 1], np.s_[:]
    if "step" in rule.by and horizon > 1:
        quarter = max(1, horizon // 4)
        for label, steps in (("near steps", np.s_[:quarter]), ("far steps", np.s_[horizon - quarter :])):
            if np.isfinite(real.y[:, :, steps]).sum() >= rule.least_values:
                yield label, np.s_[:], steps


def _refusals(found: Comparison, rules: Rules, mine: float, theirs: float) -> list[str]:
    out = []
    if found.windows < rules.windows.least:
        out.append(f"{found.windows} windows later than the training, at least {rules.windows.least} decide")
    if not mine <= (1 - rules.margin) * theirs:
        out.append(f"{rules.metric} {mine:.4g} is not below {1 - rules.margin:g} x {theirs:.4g} of {found.champion}")
    if math.isnan(found.coverage):
        out.append(f"the challenger has no {rules.coverage.interval:g} % interval")
    elif not rules.coverage.least <= found.coverage <= rules.coverage.most:
        out.append(
            f"coverage of the {rules.coverage.interval:g} % interval is {found.coverage:.3f}, not within {rules.coverage.least:g} to "
            f"{rules.coverage.most:g}"
        )
    if found.worst_ratio > rules.slices.worst:
        out.append(f"{found.worst_slice}: {rules.metric} x {found.worst_ratio:.3f} of {found.champion}, at most {rules.slices.worst:g}")
    return out
