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
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipelines.forecasting.baselines import LastValue, Ridge, RidgeCarried, SeasonalNaive  # noqa: E402

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
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)

    figures: dict[str, Any] = {}
    for path in args.data:
        data = read(path)
        table = figures.setdefault(data.name, {"channels": data.values.shape[1], "day": data.day})
        for model in args.models:
            rows: dict[str, Any] = table.setdefault(model, {})
            for horizon in args.horizon:
                began = time.perf_counter()
                if model in BASELINES:
                    fitted = [baseline(model, data, args.look_back, horizon).fit(data.series(data.train))]
                else:
                    fitted = trained(model, data, args, horizon)
                scores = np.array([score(one, data, "test", horizon) for one in fitted])
                valid = np.array([score(one, data, "valid", horizon)[0] for one in fitted])
                mse, mae, count = scores.mean(axis=0)
                sd = float(scores[:, 0].std(ddof=1)) if len(scores) > 1 else 0.0
                rows[str(horizon)] = {"mse": mse, "mae": mae, "mse_sd": sd, "valid_mse": float(valid.mean()), "windows": int(count)}
                rows[str(horizon)] |= {"seconds": time.perf_counter() - began, "each_seed": scores[:, 0].tolist()}
                print(f"{data.name} {model} {horizon}: mse {mse:.4f} +- {sd:.4f}  mae {mae:.4f}  ({int(count)} windows, "
                      f"{time.perf_counter() - began:.1f} s)", file=sys.stderr, flush=True)
            each = np.array([rows[str(h)].pop("each_seed") for h in args.horizon])
            rows["mean"] = {key: float(np.mean([rows[str(h)][key] for h in args.horizon])) for key in ("mse", "mae", "valid_mse")}
            rows["mean"]["mse_sd"] = float(each.mean(axis=0).std(ddof=1)) if each.shape[1] > 1 else 0.0
    machine = {"cpus": os.cpu_count(), "threads": args.threads, "platform": platform.platform(), "python": platform.python_version()}
    options = {"look_back": args.look_back, "horizons": args.horizon, "seeds": args.seeds, "first_seed": args.seed}
    print(json.dumps({"benchmark": "ltsf", "commit": commit(), "machine": machine, "parameters": options, "figures": figures}))
    return 0


def trained(model: str, data: Dataset, args: argparse.Namespace, horizon: int) -> list[Any]:
    """One fitted forecaster a seed."""
    raise SystemExit(f"ltsf: {model} is not available")


if __name__ == "__main__":
    raise SystemExit(main())
