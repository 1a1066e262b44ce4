"""Search for the parameters of a forecaster: trials side by side on Ray Tune, hopeless ones stopped early, all of them kept.

A trial trains a `TitansForecaster` on the rows before the test rows of `tethys train` and is judged by its validation error: the mean
squared error on validation windows in units of each stream's running deviation, which no parameter of the space changes. Test rows are
not read. Epoch by epoch it reports the error that the training judges itself by, and ASHA (Li et al., "A System for Massively Parallel
Hyperparameter Tuning", MLSys 2020) goes on with the better third at epochs 2, 6 and 18.

A study is a folder: `study.json` names what decides the result, `trial-NNN.json` is a finished trial. A search that was killed and is
started again with the same words goes on with the trials that are not there. Nothing is unpickled from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from connectors import tables
from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI
from pipelines.forecasting import job
from pipelines.forecasting.calendar import natural_cycles
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.reading import STRICT, Reading, read_table
from pipelines.windows import Panel, ray_cluster

PARAMETERS = frozenset({"look_back", "memory", "hidden", "epochs", "seed", "blocks", "patch_rows", "rule"})
"""What may stand in a space, and beside the horizon in a file of parameters: none of them changes what the error is measured on."""
COVARIATES = ("future", "historic", "static", "calendar")
GRACE, FACTOR = 2, 3
"""Epochs that every trial has, and the share that goes on: one of so many."""


@dataclass(frozen=True)
class Trial:
    """One point of the space. state: "finished", "stopped" (early), "failed" or "open" (not done yet). error: of validation, where finished."""

    number: int
    parameters: dict[str, Any]
    state: str = "open"
    error: float | None = None
    epochs: int = 0
    seconds: float = 0.0
    reason: str = ""
    run: str = ""


@dataclass(frozen=True)
class TuneResult:
    """The best trials first, and where the parameters of the best one lie."""

    leaderboard: list[dict[str, Any]] = field(repr=False)
    best: dict[str, Any]
    error: float
    trials: int
    stopped: int
    failed: int
    resumed: int
    params: str
    run: str
    seconds: float
    next: str


def tune(
    data: str,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    frequency: str | None = None,
    horizon: int = 24,
    trials: int = 20,
    workers: int = 2,
    epochs: int = 8,
    seed: int = 0,
    space: str | Path | None = None,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    model_name: str = "forecaster",
    output: str | Path = "runs/tune",
    reading: Reading = STRICT,
    future: tuple[str, ...] = (),
    historic: tuple[str, ...] = (),
    static: tuple[str, ...] = (),
    calendar: tuple[str, ...] = (),
) -> TuneResult:
    """Up to `trials` points of the space, `workers` at a time; writes `params.yaml`, which `tethys train --params` takes.

    space: YAML file, a list of values for each parameter; without one, look-backs of whole cycles and sizes of the network.
    Raises UserError for a space that names what cannot be searched, and where no trial could be finished.
    """
    from pipelines import tracking

    began = time.monotonic()
    read = read_table(
        data, reading, frequency=frequency, id_column=id_column, time_column=time_column, target_column=target_column,
        covariates=(*future, *historic, *static), ahead=future,
    )  # fmt: skip
    table = read.panel
    past = job._until(table, job._border(table, 1, horizon))
    beside = {"zone": read.zone, "future": future, "historic": historic, "static": static, "calendar": calendar}
    fixed: dict[str, Any] = {"horizon": horizon, "epochs": epochs, "seed": seed, "frequency": table.frequency, **beside}
    points = draw(read_space(space) if space is not None else default_space(past, horizon), trials, seed, fixed)
    folder = Path(output)
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    study = {"data": job.digest(past), "fixed": fixed, "points": points}
    key = hashlib.sha256(json.dumps(study, sort_keys=True).encode()).hexdigest()[:16]
    store = tracking.open_store(tracking_uri)
    run = _parent(folder, key, store, f"tune {model_name}", {
        "data": data, "series": len(past), "frequency": table.frequency, "horizon": horizon, "trials": len(points), "epochs": epochs,
        "seed": seed, "space": "default" if space is None else str(space), "study": key,
    })  # fmt: skip
    found = _kept(folder, points)
    resumed = len(found)
    waiting = [Trial(n, point) for n, point in enumerate(points) if n not in {t.number for t in found}]
    try:
        with job._bar("tuning", len(points), "{task.completed}/{task.total} trials, {task.fields[error]}") as bar:

            def over(trial: Trial) -> None:
                tables.write_text(json.dumps(dataclasses.asdict(trial), indent=2) + "\n", folder / "trials" / f"trial-{trial.number:03d}.json")
                found.append(trial)
                bar.told(len(found), _best_so_far(found))

            bar.told(len(found), _best_so_far(found))
            if waiting:
                _search(past, fixed, waiting, workers, folder / "ray", run, over)
        if len(found) < len(points):
            raise UserError(f"the search ended after {len(found)} of {len(points)} trials: the same command goes on with the others")
        best = min((t for t in found if t.error is not None), key=lambda t: (t.error, t.number), default=None)
        if best is None or best.error is None:
            raise UserError(f"no trial could be finished: {'; '.join(sorted({t.reason for t in found if t.reason}))}")
        params, board = folder / "params.yaml", _leaderboard(found)
        tables.write_text(_written(best, fixed, len(found), run.id), params)
        tables.write_text(json.dumps(board, indent=2) + "\n", folder / "leaderboard.json")
        stopped, failed = _count(found, "stopped"), _count(found, "failed")
        run.log_metrics({"error": best.error, "trials": len(found), "stopped": stopped, "failed": failed})
        for path in (params, folder / "leaderboard.json"):
            run.log_file(path)
    except BaseException:
        tracking.end(run, "FAILED")
        raise
    tracking.end(run)
    return TuneResult(
        board, best.parameters, best.error, len(found), stopped, failed, resumed, str(params), run.link,
        round(time.monotonic() - began, 1), f"tethys train {data} --params {params} --model-name {model_name}",
    )  # fmt: skip


def default_space(table: Panel, horizon: int) -> dict[str, list[Any]]:
    """Look-backs of one to fourteen cycles of the calendar (multiples of the horizon where it has none) that the rows allow; network sizes."""
    rows = len(table.aligned()[0])
    held_out = max(horizon, -(-rows // 5))
    most = (rows - held_out - horizon - 1) // 2  # at least as many rows to train on as a window has
    cycles = natural_cycles(table.frequency)
    unit = cycles[0] if cycles else max(horizon // 2, 4)
    look_backs = sorted({unit * k for k in (1, 2, 4, 7, 14) if unit * k <= most} or {max(4, min(unit, most))})
    return {"look_back": look_backs, "hidden": [0, 16, 64, 128]}


def read_space(path: str | Path) -> dict[str, list[Any]]:
    """A space from a YAML file: `look_back: [48, 96]`. Raises UserError that names each parameter at fault."""
    data = _yaml(path)
    _only_parameters(path, data, PARAMETERS)
    for name, values in data.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: {name} must be a list of the values to try, as [{values}]")
    return data


def read_params(path: str | Path) -> dict[str, Any]:
    """Parameters of a forecaster from a YAML file, as `tune` writes it. Raises UserError that names each one at fault."""
    data = _yaml(path)
    _only_parameters(path, data, PARAMETERS | {"horizon", *COVARIATES})
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def draw(space: Mapping[str, Sequence[Any]], trials: int, seed: int, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """At most `trials` different points of the space, in random order; all of them where it has no more."""
    if both := sorted(set(space) & set(fixed)):
        raise UserError(f"{', '.join(both)} is fixed by an option of the command: leave it out of the space")
    names = sorted(space)
    sizes = [len(space[name]) for name in names]
    total = int(np.prod(sizes, dtype=np.int64))
    chosen = np.random.default_rng(seed).permutation(total)[:trials] if total <= 1_000_000 else np.random.default_rng(seed).integers(0, total, trials)
    points = (np.unravel_index(int(i), sizes) for i in dict.fromkeys(chosen.tolist()))
    return [{name: space[name][int(at)] for name, at in zip(names, point, strict=True)} for point in points]


def _search(
    table: Panel, fixed: Mapping[str, Any], waiting: Sequence[Trial], workers: int, scratch: Path, parent: Any, over: Callable[[Trial], None]
) -> None:
    """Run the trials, `workers` at a time, each a child run of `parent`; over(trial) is called when one has come to its end."""
    ray_cluster(workers)
    # MLflow has every result, and this module shows how far the search is: Tune's own files and tables say it again, and worse.
    os.environ.update(TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1", RAY_AIR_NEW_OUTPUT="0")
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    from ray import tune as ray_tune
    from ray.tune.schedulers import ASHAScheduler

    from pipelines import tracking

    points = {trial.number: trial for trial in waiting}
    runs: dict[int, Any] = {}

    class Follow(ray_tune.Callback):
        """Runs in this process, so that one writer talks to the tracking store."""

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            number = trial.config["number"]
            if number not in runs:  # a trial whose worker died starts again
                runs[number] = tracking.begin(parent.store, f"trial {number}", params=points[number].parameters, parent=parent)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            if np.isfinite(result["error"]):
                name = "error" if result["state"] == "finished" else "error_of_epoch"
                runs[trial.config["number"]].log_metrics({name: result["error"]}, step=result["epochs"])

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            last = trial.last_result or {}
            self._over(trial, last.get("state", "open"), last, last.get("reason", ""))

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._over(trial, "failed", trial.last_result or {}, "its worker died")

        def _over(self, trial: Any, state: str, last: Mapping[str, Any], reason: str) -> None:
            number = trial.config["number"]
            state = "stopped" if state == "open" else state
            error = float(last["error"]) if state == "finished" else None
            run = runs[number]
            run.log_metrics({"seconds": last.get("time_total_s", 0.0)})
            tracking.end(run, "FAILED" if state == "failed" else "FINISHED", {"state": state, **({"reason": reason} if reason else {})})
            done = Trial(
                number, points[number].parameters, state, error, int(last.get("epochs", 0)), round(float(last.get("time_total_s", 0.0)), 2),
                reason, run.id,
            )  # fmt: skip
            over(done)

        def __reduce__(self) -> Any:
            # Tune writes its set-up to the disk; this half of it belongs to this process and is never read back.
            return dict, ()

    most = 2 * int(fixed["epochs"])
    given = {number: trial.parameters for number, trial in points.items()}
    work = ray_tune.with_parameters(_train, table=table, fixed=dict(fixed), points=given)
    tuner = ray_tune.Tuner(
        ray_tune.with_resources(work, {"cpu": 1}),
        param_space={"number": ray_tune.grid_search(sorted(points))},
        tune_config=ray_tune.TuneConfig(
            metric="error", mode="min", max_concurrent_trials=workers, reuse_actors=True,
            scheduler=ASHAScheduler(time_attr="epoch", max_t=most + 1, grace_period=GRACE, reduction_factor=FACTOR),
        ),
        run_config=ray_tune.RunConfig(
            name="study", storage_path=str(scratch.absolute()), callbacks=[Follow()], verbose=0,
            failure_config=ray_tune.FailureConfig(max_failures=2),
        ),
    )  # fmt: skip
    try:
        tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _train(config: Mapping[str, Any], table: Panel, fixed: Mapping[str, Any], points: Mapping[int, Mapping[str, Any]]) -> None:
    """One trial, in a worker. A mistake comes back as its message: of exceptions Ray writes tracebacks."""
    import torch
    from ray import tune as ray_tune

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in points[config["number"]].items()}
    epochs = 0

    def tell(epoch: int, of: int, error: float) -> None:
        nonlocal epochs
        epochs = epoch + 1
        ray_tune.report({"epoch": epochs, "epochs": epochs, "error": error, "state": "open"})

    # A last report says no epoch: it is not the error of one, and the scheduler is to compare it with none.
    try:
        # Arrays from Ray's store cannot be written to, and torch wants to be able to.
        mine = dataclasses.replace(table, **{name: getattr(table, name).copy() for name in ("ds", "y", "observed", "offsets")})
        model = TitansForecaster(**{**fixed, **given}).fit(mine, tell)
    except (UserError, ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(f"{'' if isinstance(error, UserError) else type(error).__name__ + ': '}{error}".split())
        ray_tune.report({"epochs": epochs, "error": float("inf"), "state": "failed", "reason": reason})
        return
    ray_tune.report({"epochs": epochs, "error": model.valid_error_, "state": "finished"})


def _parent(folder: Path, key: str, store: Any, name: str, params: dict[str, Any]) -> Any:
    """The run of the study: the one that it began with, where the folder holds this study already."""
    from pipelines import tracking

    path = folder / "study.json"
    if path.exists():
        try:
            study = json.loads(path.read_text())
            before, run_id = study["study"], study["run"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is no study of this program: name another folder") from None
        if before != key:
            raise UserError(
                f"{folder} holds the study of other data or other settings ({before}, not {key}): name another folder with --output, or "
                "remove that one"
            )
        if (run := tracking.reopen(store, run_id)) is not None:
            return run
    run = tracking.begin(store, name, params=params, tags={"study": key})
    tables.write_text(json.dumps({"study": key, "run": run.id}) + "\n", path)
    return run


def _kept(folder: Path, points: Sequence[dict[str, Any]]) -> list[Trial]:
    """Trials that came to their end before."""
    found = []
    for path in sorted(folder.glob("trials/trial-*.json")):
        try:
            trial = Trial(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise UserError(f"{path} is no trial of this program: remove it, and it is done again") from None
        if trial.number < len(points) and points[trial.number] == trial.parameters:
            found.append(trial)
    return found


def _yaml(path: str | Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not data:
        raise UserError(f"{path} holds no parameters: write one a line, as look_back: 96")
    return data


def _only_parameters(path: str | Path, data: Mapping[str, Any], allowed: frozenset[str]) -> None:
    if unknown := sorted(set(map(str, data)) - allowed):
        raise UserError(f"{path}: unknown {', '.join(unknown)}; there are {', '.join(sorted(allowed))}")


def _written(best: Trial, fixed: Mapping[str, Any], count: int, run: str) -> str:
    head = (
        f"# The best of {count} trials on validation: error {best.error:.6g}, the mean squared error in units of each\n"
        f"# stream's running deviation (trial {best.number}, MLflow run {run}). tethys train DATA --params THIS_FILE\n"
    )
    chosen = {"horizon": fixed["horizon"], "epochs": fixed["epochs"], "seed": fixed["seed"], **best.parameters}
    chosen |= {kind: list(fixed[kind]) for kind in COVARIATES if fixed.get(kind)}
    return head + yaml.safe_dump(chosen, sort_keys=False, default_flow_style=None)


def _leaderboard(found: Sequence[Trial]) -> list[dict[str, Any]]:
    """Finished trials by error, then the others."""
    order = sorted(found, key=lambda t: (t.error is None, t.error or 0.0, t.number))
    return [{"trial": t.number, **t.parameters, "error": t.error, "epochs": t.epochs, "seconds": t.seconds, "state": t.state} for t in order]


def _best_so_far(found: Sequence[Trial]) -> str:
    best = min((t.error for t in found if t.error is not None), default=None)
    return "no error yet" if best is None else f"best error {best:.4f}"


def _count(found: Sequence[Trial], state: str) -> int:
    return sum(t.state == state for t in found)
