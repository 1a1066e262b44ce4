"""The standard long-horizon protocol, exact: fixed borders, all test windows, train-only scaling, selection on validation only.

    python benchmarks/ltsf.py --data ETTh1.csv --look-back 96 --horizon 96 192 336 720 --seeds 3

ETTh: 8,640 / 2,880 / 2,880 rows, ETTm four times that; any other file 70/10/20 per cent by int(). Validation and test start one
look-back early, so the first target of a split is its first row. Every channel is scaled with the mean and sd (ddof 0) of the
training rows; errors are means over all windows (stride 1, none dropped), steps and channels, on scaled values.
Models with carried state have seen every row before a window's first target, and no row from there on.
Keys: figures.DATASET.MODEL.HORIZON.{mse,mae,mse_sd}, HORIZON a number or `mean`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipelines.forecasting.baselines import LastValue, Ridge, RidgeCarried, SeasonalNaive  # noqa: E402
from titans_core.forecaster import Forecaster, ForecasterConfig, Memory, Season  # noqa: E402
from titans_core.training import (  # noqa: E402
    Rows,
    Training,
    Windows,
    fit_line,
    fit_network,
    initial_memory,
    replay,
)

SPLITS = {"ETTh": (8640, 11520, 14400), "ETTm": (34560, 46080, 57600)}
BASELINES = ("last_value", "seasonal_naive", "ridge", "ridge_carried")
OURS = ("tethys_window", "tethys_frozen", "tethys_carried")


@dataclass(frozen=True)
class Dataset:
    """Scaled values (T, C) float32; rows [0, train) train, [train, valid) validate, [valid, test) test; day and week in rows."""

    name: str
    values: NDArray[np.float32]
    train: int
    valid: int
    test: int
    day: int

    @property
    def week(self) -> int:
        return 7 * self.day

    def origins(self, split: str, horizon: int) -> NDArray[np.int64]:
        first, end = {"valid": (self.train, self.valid), "test": (self.valid, self.test)}[split]
        return np.arange(first, end - horizon + 1)

    def series(self, end: int) -> list[NDArray[np.float32]]:
        return [np.ascontiguousarray(self.values[:end, c]) for c in range(self.values.shape[1])]


def read(path: Path) -> Dataset:
    """A CSV with a `date` column first and one column a channel (the layout of ETT, ECL, Traffic and Weather)."""
    if not path.is_file():
        raise SystemExit(f"ltsf: no such file: {path}")
    frame = pl.read_csv(path, encoding="utf8-lossy")
    if frame.columns[0].lower() != "date":
        raise SystemExit(f"ltsf: {path.name}: the first column must be `date`, found `{frame.columns[0]}`")
    values = frame.drop(frame.columns[0]).to_numpy().astype(np.float64)
    name = path.name.split(".")[0]
    rows = len(values)
    train, valid, test = SPLITS.get(name[:4], (int(rows * 0.7), rows - int(rows * 0.2), rows))
    values = values[:test]
    scaled = (values - values[:train].mean(axis=0)) / np.maximum(values[:train].std(axis=0), 1e-8)
    stamps = frame[frame.columns[0]].head(1000).str.to_datetime(strict=False).drop_nulls()
    step = stamps.diff().drop_nulls().dt.total_seconds().median()
    if not step:
        raise SystemExit(f"ltsf: {path.name}: cannot read the time stamps in column `{frame.columns[0]}`")
    day = max(1, round(86400 / float(step)))  # type: ignore[arg-type]
    return Dataset(name, scaled.astype(np.float32), train, valid, test, day)


def baseline(model: str, data: Dataset, look_back: int, horizon: int) -> LastValue | SeasonalNaive | Ridge:
    if model == "last_value":
        return LastValue(horizon)
    if model == "seasonal_naive":
        return SeasonalNaive(horizon, data.day)
    if model == "ridge":
        return Ridge(horizon, look_back)
    return RidgeCarried(horizon, look_back, profiles=((data.day, (0.1, 0.02)), (data.week, (0.2,))))


@dataclass(frozen=True)
class Scores:
    """Errors over all test windows, steps and channels; the error on validation; the number of test windows."""

    mse: float
    mae: float
    valid_mse: float
    windows: int


def score(model: Any, data: Dataset, split: str, horizon: int) -> tuple[float, float, int]:
    """Mean squared and mean absolute error over all windows, steps and channels of a split, and the number of windows."""
    origins = data.origins(split, horizon)
    squared = absolute = 0.0
    for y in data.series(data.test):
        future = np.lib.stride_tricks.sliding_window_view(y, horizon)[origins]
        error = (model.forecast(y, origins) - future).astype(np.float64)
        squared += float((error**2).sum())
        absolute += float(np.abs(error).sum())
    cells = len(origins) * horizon * data.values.shape[1]
    return squared / cells, absolute / cells, len(origins)


def spread(values: list[float]) -> float:
    """Standard deviation over seeds (ddof 1); 0 for what has no seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def commit() -> str:
    got = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return got.stdout.strip() or "unknown"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="CSV file(s), plain or .gz")
    parser.add_argument("--look-back", type=int, default=96)
    parser.add_argument("--horizon", type=int, nargs="+", default=[96])
    parser.add_argument("--models", nargs="+", choices=BASELINES + OURS, default=BASELINES + OURS)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds each trained model gets")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="width of the network beside the line; 0: the line alone, which is quick")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    figures: dict[str, Any] = {}
    for path in args.data:
        data = read(path)
        table = figures.setdefault(data.name, {"channels": data.values.shape[1], "day": data.day})
        for model in args.models:
            rows: dict[str, Any] = table.setdefault(model, {})
            replayed: dict[int, Tethys] = {}
            each = []
            for horizon in args.horizon:
                began, chosen = time.perf_counter(), {}
                if model not in MODES:
                    fitted = baseline(model, data, args.look_back, horizon).fit(data.series(data.train))
                    mse, mae, count = score(fitted, data, "test", horizon)
                    scores = [Scores(mse, mae, score(fitted, data, "valid", horizon)[0], count)]
                else:
                    # Horizons of a day and more read the same features and share one replay; a shorter one has its own.
                    reach = min(horizon, data.day)
                    if reach not in replayed:
                        together = [h for h in args.horizon if min(h, data.day) == reach]
                        replayed = {reach: Tethys(data, MODES[model], args.look_back, together, args.hidden)}
                    scores, chosen = replayed[reach].train(horizon, range(args.seed, args.seed + args.seeds))
                each.append([one.mse for one in scores])
                seconds = time.perf_counter() - began
                mean = {k: float(np.mean([getattr(one, k) for one in scores])) for k in ("mse", "mae", "valid_mse")}
                rows[str(horizon)] = {
                    **mean,
                    "mse_sd": spread(each[-1]),
                    "windows": scores[0].windows,
                    **chosen,
                    "seconds": seconds,
                }
                print(
                    f"{data.name} {model} {horizon}: mse {mean['mse']:.4f} +- {spread(each[-1]):.4f}  mae {mean['mae']:.4f}  "
                    f"({scores[0].windows} windows, {seconds:.1f} s)", file=sys.stderr, flush=True,
                )  # fmt: skip
            keys = ("mse", "mae", "valid_mse")
            rows["mean"] = {key: float(np.mean([rows[str(h)][key] for h in args.horizon])) for key in keys}
            rows["mean"]["mse_sd"] = spread(np.mean(each, axis=0).tolist())
    machine = {
        "cpus": os.cpu_count(),
        "threads": args.threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    options = {"look_back": args.look_back, "horizons": args.horizon, "seeds": args.seeds, "first_seed": args.seed, "hidden": args.hidden}
    print(
        json.dumps(
            {"benchmark": "ltsf", "commit": commit(), "machine": machine, "parameters": options, "figures": figures}
        )
    )
    return 0


# Chosen on the validation folds of ETTh1, ETTh2 and ETTm1 (docs/decisions): rates an hour for the level, a day for the profile.
LEVEL_RATES, PROFILE_RATES, HIDDEN, EPOCHS = (0.003, 0.0005), (0.2, 0.05), 128, 8
MODES: dict[str, Memory] = {"tethys_window": "window", "tethys_frozen": "frozen", "tethys_carried": "carried"}


class Tethys:
    """One mode of the forecaster on one data set: the past is replayed once for several horizons and all seeds."""

    def __init__(self, data: Dataset, mode: Memory, look_back: int, horizons: list[int], hidden: int = HIDDEN) -> None:
        self.data, self.hidden = data, hidden
        hour = data.day / 24
        seasons = (
            Season(rows=1, slots=1, rates=tuple(r / hour for r in LEVEL_RATES)),
            Season(rows=data.day, slots=data.day, rates=PROFILE_RATES),
        )
        self.config = ForecasterConfig(
            look_back=look_back, horizon=max(horizons), seasons=seasons, memory=mode, hidden=0, level_rows=data.train
        )
        values = torch.from_numpy(data.values.T.copy()).double()
        at = torch.arange(data.test + max(horizons))
        phase = torch.stack([at // s.stride % s.slots for s in seasons], -1).to(torch.int16)
        rows = Rows(values, torch.ones_like(values, dtype=torch.bool), phase.expand(len(values), -1, -1))
        model = Forecaster(self.config)
        # The protocol scales with the training rows, so mean 0 and deviation 1 are known from the start.
        state = model.initial_state(len(values), torch.zeros(len(values)), torch.ones(len(values)), data.train)
        if mode != "carried":
            state = initial_memory(
                model, state, Rows(values[:, : data.train], rows.observed[:, : data.train], rows.phase)
            )
        shortest = min(horizons)
        # Every quarter of an hour adds little to every hour: training windows are an hour apart, test windows one row.
        self.stride = max(1, round(hour))
        self.origins = [
            torch.arange(look_back, data.train - shortest + 1, self.stride),
            torch.from_numpy(data.origins("valid", shortest))[:: self.stride],
            torch.from_numpy(data.origins("test", shortest)),
        ]
        self.windows, _ = replay(model, state, rows, self.origins)

    def at(self, horizon: int) -> list[Windows]:
        """Training, validation and test windows of one horizon: no target lies past the end of its split."""
        ends = (self.data.train, self.data.valid, self.data.test)
        found = []
        for windows, origins, end in zip(self.windows, self.origins, ends, strict=True):
            n = int((origins <= end - horizon).sum()) * self.data.values.shape[1]
            found.append(Windows(windows.x[:n], windows.y[:n, :horizon], windows.level[:n], windows.unit[:n]))
        return found

    def train(self, horizon: int, seeds: range) -> tuple[list[Scores], dict[str, Any]]:
        """Fit the line once and the network once a seed; scores on all test windows, and what was chosen."""
        train, valid, test = self.at(horizon)
        config = dataclasses.replace(self.config, horizon=horizon, hidden=self.hidden)
        model = Forecaster(config)
        line = fit_line(model, train, valid)
        chosen = {
            "penalty": line.penalty,
            "line_valid_mse": line.error,
            "weights": sum(p.numel() for p in model.state_dict().values()),
        }
        if np.isfinite(line.gap_penalty):
            chosen["gap_penalty"] = line.gap_penalty
        scores = []
        for seed in seeds:
            best = fit_network(model, line, train, valid, Training(epochs=EPOCHS, seed=seed))
            scores.append(self.score(model, test, best))
        return scores, chosen

    def score(self, model: Forecaster, test: Windows, valid_mse: float) -> Scores:
        squared = absolute = 0.0
        with torch.inference_mode():
            for at in range(0, len(test.x), 4096):
                part = slice(at, at + 4096)
                error = test.unit[part, None] * (model.centre_of(test.x[part]) - test.y[part])
                squared += float((error**2).sum())
                absolute += float(error.abs().sum())
        cells = test.y.numel()
        return Scores(squared / cells, absolute / cells, valid_mse, len(test.x) // self.data.values.shape[1])


if __name__ == "__main__":
    raise SystemExit(main())
