"""Proof that no forecast and no state knows a value before its time.

    python benchmarks/leak_probe.py

Two probes of every model of `benchmarks/online.py`, by the same code.

1. On random walks nothing can beat the last value. A learner that is updated with a target before it exists does, by a factor of three to
   eight. `best_over_naive` is the least mean squared error of any model at any horizon over that of the last value; honest learners stay
   at or above 1 but for the luck of a finite sample.
2. All values from some row on are made missing, and then 1,000,000. `changed_forecasts` counts the forecasts issued before that row, and
   `changed_states` the states of the forecaster and of its outcome memory after each row before it, that are not the same bits.

Keys: figures.{best_over_naive,changed_forecasts,changed_states,forecasts,states}, figures.over_naive.HORIZON.MODEL.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import online, report

DAY = 24
POISONS = (float("nan"), 1e6)


def walk(rows: int, channels: int, seed: int) -> online.Dataset:
    import numpy as np

    train, valid = rows // 3, rows // 3 + 10 * DAY
    steps = np.random.default_rng(seed).normal(size=(rows, channels))
    values = steps.cumsum(axis=0)
    values = (values - values[:train].mean(axis=0)) / values[:train].std(axis=0)
    return online.Dataset("random_walk", values.astype(np.float32), train, valid, DAY)


def poisoned(data: online.Dataset, row: int, value: float) -> online.Dataset:
    import dataclasses

    values = data.values.copy()
    values[row:] = value
    return dataclasses.replace(data, values=values)


def forecasts(data: online.Dataset, horizon: int, seed: int) -> dict[str, dict[int, Any]]:
    """Every model's forecasts, by origin."""
    issued: dict[str, dict[int, Any]] = {model: {} for model in online.MODELS}

    def keep(model: str, at: int, block: Any) -> None:
        issued[model].update({at + i: one for i, one in enumerate(block)})

    online.naive(data, horizon, data.valid, keep)
    online.ridges(data, horizon, data.valid, keep)
    online.tethys(data, horizon, data.valid, keep, seed=seed)
    return issued


def live_states(data: online.Dataset, horizon: int, stop: int, seed: int) -> list[str]:
    """Digests of all states after each row before `stop`, row by row as a live stream would go."""
    import torch

    from titans_core.outcome import OutcomeConfig, OutcomeMemory, origin_of
    from titans_core.state import to_bytes

    model, known = online.trained(data, horizon, seed)
    outcome = OutcomeMemory(OutcomeConfig.daily(model, data.day)).fit(known.x, known.y, model.line)
    rows = online.rows_of(data, model)
    state, learnt = model.initial_state(len(rows.y)), outcome.initial_state(len(rows.y))
    digests = []
    with torch.inference_mode():
        for t in range(stop):
            now = slice(t, t + 1)
            state = model.observe(state, rows.y[:, now], rows.observed[:, now], rows.phase[:, now])
            origin = origin_of(model, state, rows.phase[:, t + 1 : t + 1 + horizon])
            learnt, corrected = outcome.step(learnt, origin, rows.y[:, t], rows.observed[:, t])
            digests.append(hashlib.sha256(to_bytes(state) + to_bytes(learnt) + corrected.numpy().tobytes()).hexdigest())
    return digests


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=3600, help="rows of the random walks: a third trains, 10 days validate")
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--horizon", type=int, nargs="+", default=[1, 24])
    args = parser.parse_args(argv)
    report.limit_threads(args.threads)
    import numpy as np
    import torch

    torch.set_num_threads(args.threads)
    data = walk(args.rows, args.channels, args.seed)
    over: dict[str, dict[str, float]] = {}
    changed = {"forecasts": 0, "states": 0}
    compared = {"forecasts": 0, "states": 0}
    for horizon in args.horizon:
        issued = forecasts(data, horizon, args.seed)
        truth = np.lib.stride_tricks.sliding_window_view(data.values, horizon, axis=0)
        mse = {m: float(np.mean([(f - truth[t]) ** 2 for t, f in each.items()], dtype=np.float64)) for m, each in issued.items()}
        over[str(horizon)] = {model: mse[model] / mse["last_value"] for model in online.MODELS}
        report.progress(f"horizon {horizon}: over the last value " + "  ".join(f"{m} {r:.4f}" for m, r in over[str(horizon)].items()))
        row = data.valid + 3 * DAY + 5
        short = online.Dataset(data.name, data.values[: row + horizon + 40], data.train, data.valid, data.day)
        states = live_states(short, horizon, row, args.seed)
        for poison in POISONS:
            bad = poisoned(short, row, poison)
            again = forecasts(bad, horizon, args.seed)
            for model in online.MODELS:
                for t in range(data.valid, row + 1):
                    compared["forecasts"] += 1
                    changed["forecasts"] += not np.array_equal(issued[model][t], again[model][t])
            for one, other in zip(states, live_states(bad, horizon, row, args.seed), strict=True):
                compared["states"] += 1
                changed["states"] += one != other
        report.progress(f"horizon {horizon}: changed so far {changed} of {compared}")
    figures = {
        "best_over_naive": min(r for each in over.values() for m, r in each.items() if m != "last_value"),
        "changed_forecasts": changed["forecasts"],
        "changed_states": changed["states"],
        **compared,
        "over_naive": over,
    }
    report.finish("leak_probe", figures, libraries=("torch", "numpy"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
