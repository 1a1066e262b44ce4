"""Learning along the stream: forecasts at every origin, each truth used when it is there and not before.

    python benchmarks/online.py --data ETTh2.csv ETTh1.csv ETTm1.csv.gz weather.csv.gz

The protocol of DSOF (ICLR 2025): ETT 4 months of training, 1 of validation, 15 of test (a month is 30 days); any other file 20/5/75 per
cent. Channels are scaled with the mean and sd (ddof 0) of the training rows; look-back 96, horizons 1, 24 and 48; every origin from the
first whose targets are all test rows; errors are means over origins, steps and channels, on scaled values. At row t nothing but rows up
to t has been seen by any weight or state (`benchmarks/leak_probe.py` proves it).

last_value; ridge: one closed-form map for all channels, relative to the last value; ridge_carried: with running means and profiles beside
the window. frozen: fitted on training and validation rows. online: recursive least squares at every row, forgetting 0.999, penalty 1e3,
each window learnt once its whole target is there. tethys_frozen: the forecaster, chosen on validation rows, its
line then solved on training and validation rows. tethys_online: the same weights with an outcome memory for every channel by itself.

Keys: figures.DATASET.MODEL.HORIZON.{mse,mae}; figures.DATASET.HORIZON.best_online_ridge, and under `summary` the ratios of tethys_online.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.forecasting.baselines import Ridge
    from titans_core.forecaster import Forecaster
    from titans_core.training import Rows, Windows

LOOK_BACK = 96
FORGETTING = 0.999
MODELS = (
    "last_value",
    "ridge_frozen",
    "ridge_online",
    "ridge_carried_frozen",
    "ridge_carried_online",
    "tethys_frozen",
    "tethys_online",
)


@dataclass(frozen=True)
class Dataset:
    """values (T, C) float32 scaled with rows [0, train); [train, valid) validate, the rest are the test; `day` rows a day."""

    name: str
    values: NDArray[np.float32]
    train: int
    valid: int
    day: int


def read(path: Path) -> Dataset:
    """A CSV with a `date` column first and one column a channel."""
    import numpy as np
    import polars as pl

    if not path.is_file():
        raise SystemExit(f"online: no such file: {path}")
    frame = pl.read_csv(path, encoding="utf8-lossy")
    values = frame.drop(frame.columns[0]).to_numpy().astype(np.float64)
    name = path.name.split(".")[0]
    stamps = frame[frame.columns[0]].head(1000).str.to_datetime(strict=False).drop_nulls()
    step = stamps.diff().drop_nulls().dt.total_seconds().median()
    if not step:
        raise SystemExit(f"online: {path.name}: cannot read the time stamps in column `{frame.columns[0]}`")
    day = max(1, round(86400 / float(step)))  # type: ignore[arg-type]
    if name.startswith("ETT"):
        train, valid, test = 120 * day, 150 * day, 600 * day
    else:
        train, test = int(len(values) * 0.2), len(values)
        valid = test - int(test * 0.75)
    values = values[:test]
    scaled = (values - values[:train].mean(axis=0)) / np.maximum(values[:train].std(axis=0), 1e-8)
    return Dataset(name, np.ascontiguousarray(scaled, np.float32), train, valid, day)


class Score:
    """Sums of errors over the origins of a split."""

    def __init__(self) -> None:
        self.squared = self.absolute = 0.0
        self.cells = 0

    def add(self, forecast: Any, truth: Any) -> None:
        error = forecast - truth
        self.squared += float((error**2).sum(dtype="float64"))
        self.absolute += float(abs(error).sum(dtype="float64"))
        self.cells += error.size

    def figures(self) -> dict[str, float]:
        return {"mse": self.squared / self.cells, "mae": self.absolute / self.cells}


Scorer = Callable[[str, int, Any], None]
"""(model, first origin, forecasts (n, C, H) of the origins from there on); an origin t has seen rows 0..t-1."""


def naive(data: Dataset, horizon: int, first: int, score: Scorer) -> None:
    import numpy as np

    origins = np.arange(first, len(data.values) - horizon + 1)
    score("last_value", first, np.repeat(data.values[origins - 1][:, :, None], horizon, axis=2))


def ridges(data: Dataset, horizon: int, first: int, score: Scorer) -> None:
    """Frozen and online, with and without carried state. One map for all channels."""
    from pipelines.forecasting.baselines import Ridge, RidgeCarried

    profiles = ((data.day, (0.1, 0.02)), (7 * data.day, (0.2,)))
    rates = (0.003 * 24 / data.day, 0.0005 * 24 / data.day)
    score_ridge("ridge", Ridge(horizon, LOOK_BACK), data, horizon, first, score)
    score_ridge(
        "ridge_carried", RidgeCarried(horizon, LOOK_BACK, mean_rates=rates, profiles=profiles), data, horizon, first, score
    )


def score_ridge(name: str, ridge: Ridge, data: Dataset, horizon: int, first: int, score: Scorer) -> None:
    import numpy as np

    T, C = data.values.shape
    origins = np.arange(LOOK_BACK, T - horizon + 1)
    series = [np.ascontiguousarray(data.values[:, c]) for c in range(C)]
    x = np.stack([ridge.features(y, origins)[0] for y in series], axis=1)  # (n, C, d)
    last = data.values[origins - 1][:, :, None]
    y = np.lib.stride_tricks.sliding_window_view(data.values, horizon, axis=0)[origins] - last
    d = x.shape[2]
    gram, cross = np.zeros((d, d)), np.zeros((d, horizon))
    learnt = 0  # windows so far

    def learn(until: int, forgetting: float) -> None:
        """Windows whose last target is a row before `until`."""
        nonlocal gram, cross, learnt
        stop = until - horizon - LOOK_BACK + 1
        for a in range(learnt, stop, 2048):
            b = min(stop, a + 2048)
            weight = forgetting ** np.arange(b - a - 1, -1, -1)
            left = (x[a:b] * weight[:, None, None].astype(np.float32)).reshape(-1, d)
            gram = gram * forgetting ** (b - a) + left.T @ x[a:b].reshape(-1, d)
            cross = cross * forgetting ** (b - a) + left.T @ y[a:b].reshape(-1, horizon)
            learnt = b

    def forecast(a: int, b: int, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        return x[a - LOOK_BACK : b - LOOK_BACK] @ weights + last[a - LOOK_BACK : b - LOOK_BACK]

    end = T - horizon + 1
    learn(first, 1.0)
    frozen = np.linalg.solve(gram + ridge.penalty * np.eye(d), cross).astype(np.float32)
    for a in range(first, end, 4096):
        score(f"{name}_frozen", a, forecast(a, min(end, a + 4096), frozen))
    gram, cross, learnt = ridge.penalty * np.eye(d), np.zeros((d, horizon)), 0
    for a in range(first, end, data.day):
        # Solved anew once a day, so that rounding cannot add up; from row to row by Woodbury's identity, which is the same solution.
        learn(a, FORGETTING)
        inverse = np.linalg.inv(gram + 1e-6 * np.eye(d))
        weights = inverse @ cross
        for t in range(a, min(end, a + data.day)):
            score(f"{name}_online", t, forecast(t, t + 1, weights.astype(np.float32)))
            row = x[t - horizon - LOOK_BACK + 1].astype(np.float64)  # (C, d), the window whose last target is row t
            held = row @ inverse
            gain = np.linalg.solve(FORGETTING * np.eye(C) + held @ row.T, held)  # (C, d)
            weights += gain.T @ (y[t - horizon - LOOK_BACK + 1] - row @ weights)
            inverse = (inverse - gain.T @ held) / FORGETTING


def rows_of(data: Dataset, model: Forecaster) -> Rows:
    import torch

    from titans_core.training import Rows

    T, C = data.values.shape
    t = torch.arange(T + model.config.horizon)
    phase = torch.stack([t // s.stride % s.slots for s in model.config.seasons], -1).to(torch.int16)
    y = torch.from_numpy(data.values.T.copy()).double()
    return Rows(y.nan_to_num(), y.isfinite(), phase.expand(C, -1, -1))


def trained(data: Dataset, horizon: int, seed: int) -> tuple[Forecaster, Windows]:
    """A forecaster chosen on the validation rows, and the windows of training and validation; it has seen no later row.

    The network stays where it helps on validation; what stays is learnt once more from training and validation rows together.
    """
    import torch

    from pipelines.forecasting.calendar import default_seasons
    from titans_core.forecaster import Forecaster, ForecasterConfig
    from titans_core.training import Training, Windows, fit_line, fit_network, refit_network, replay

    known = dataclasses.replace(data, values=data.values[: data.valid])
    frequency = f"{1440 // data.day}m"
    config = ForecasterConfig(look_back=LOOK_BACK, horizon=horizon, seasons=default_seasons(frequency, data.train))
    torch.manual_seed(seed)
    model = Forecaster(config)
    rows = rows_of(known, model)
    train = torch.arange(LOOK_BACK, data.train - horizon + 1)
    valid = torch.arange(data.train, data.valid - horizon + 1)
    between = torch.arange(data.train - horizon + 1, data.train)
    groups, _ = replay(model, model.initial_state(len(rows.y)), rows, [train, between, valid])
    learnt, _, judged = groups
    line = fit_line(model, learnt, judged)
    error = fit_network(model, line, learnt, judged, Training(seed=seed))
    helps = error < 0.99 * line.error
    report.progress(f"{data.name} {horizon}: validation error {line.error:.4f} line, {error:.4f} with the network ({line})")
    together = Windows(*(torch.cat([getattr(g, part) for g in groups]) for part in ("x", "y", "level", "unit")))
    if not helps:
        model = Forecaster(dataclasses.replace(config, hidden=0))
    fit_line(model, together, Windows(together.x[:0], together.y[:0], together.level[:0], together.unit[:0]))
    if helps:
        refit_network(model, together, Training(seed=seed))
    return model, together


def origins_in_order(model: Forecaster, data: Dataset) -> Iterator[tuple[int, Windows]]:
    """All origins from the first with a whole look-back, in blocks: the first of each, and its windows."""
    import torch

    from titans_core.training import replay

    rows = rows_of(data, model)
    end = len(data.values) - model.config.horizon + 1
    blocks = torch.arange(LOOK_BACK, end).split(4096)
    groups, _ = replay(model, model.initial_state(len(rows.y)), rows, blocks)
    for block, windows in zip(blocks, groups, strict=True):
        yield int(block[0]), windows


def tethys(data: Dataset, horizon: int, first: int, score: Scorer, *, seed: int) -> dict[str, float]:
    """The forecaster, frozen; and with the outcome memory. Both see the same rows in the same order."""
    import numpy as np
    import torch

    from titans_core.outcome import Origin, OutcomeConfig, OutcomeMemory

    model, known = trained(data, horizon, seed)
    config = OutcomeConfig.daily(model, data.day)
    outcome = OutcomeMemory(config).fit(known.x, known.y, model.line)
    C = data.values.shape[1]
    state = outcome.initial_state(C)
    values = torch.from_numpy(data.values).double()
    steps, began = 0, time.perf_counter()
    with torch.inference_mode():
        for at, windows in origins_in_order(model, data):
            base = torch.cat([model.centre_of(part) for part in windows.x.split(4096)])
            frozen = windows.level.unsqueeze(1) + windows.unit.unsqueeze(1) * base
            online = []
            for i in range(len(base) // C):
                part = slice(i * C, (i + 1) * C)
                origin = Origin(windows.x[part], base[part], windows.level[part], windows.unit[part])
                state, corrected = outcome.step(state, origin, values[at + i - 1], values[at + i - 1].isfinite())
                online.append(corrected)
                steps += C
            shown = max(first - at, 0)
            if shown < len(online):
                score("tethys_frozen", at + shown, frozen.unflatten(0, (-1, C))[shown:].numpy())
                score("tethys_online", at + shown, torch.stack(online[shown:]).numpy())
    bytes_a_stream = sum(np.prod(leaf.shape[1:]) * leaf.element_size() for leaf in vars(state).values())
    return {"steps_per_s": steps / (time.perf_counter() - began), "state_bytes": float(bytes_a_stream)}


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="CSV", help="ETTh2, ETTh1, ETTm1, weather; plain or .gz")
    parser.add_argument("--horizon", type=int, nargs="+", default=[1, 24, 48])
    parser.add_argument("--split", choices=("test", "valid"), default="test", help="valid: choose designs here, never on the test")
    args = parser.parse_args(argv)
    report.limit_threads(args.threads)
    import numpy as np
    import torch

    torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {"best_online_ridge": [], "ridge_frozen": [], "tethys_frozen": []}
    for path in args.data:
        data = read(path)
        first = data.valid
        if args.split == "valid":
            first = data.train
            data = dataclasses.replace(data, values=data.values[: data.valid], valid=data.train, train=data.train * 3 // 4)
        table = figures.setdefault(data.name, {model: {} for model in MODELS})
        for horizon in args.horizon:
            scores = {model: Score() for model in MODELS}
            truth = np.lib.stride_tricks.sliding_window_view(data.values, horizon, axis=0)

            def score(model: str, at: int, forecasts: Any, truth: Any = truth, scores: dict[str, Score] = scores) -> None:
                scores[model].add(forecasts, truth[at : at + len(forecasts)])

            naive(data, horizon, first, score)
            ridges(data, horizon, first, score)
            speed = tethys(data, horizon, first, score, seed=args.seed)
            for model in MODELS:
                table[model][str(horizon)] = scores[model].figures()
            mse = {model: table[model][str(horizon)]["mse"] for model in MODELS}
            best = min(mse["ridge_online"], mse["ridge_carried_online"])
            ours = mse["tethys_online"]
            table["tethys_online"][str(horizon)] |= {"vs_best_online_ridge": ours / best, **speed}
            ratios["best_online_ridge"].append(ours / best)
            for name in ("ridge_frozen", "tethys_frozen"):
                ratios[name].append(ours / mse[name])
            shown = "  ".join(f"{model} {mse[model]:.4f}" for model in MODELS)
            report.progress(f"{data.name} {horizon}: {shown}  x{ours / best:.4f}  ({speed['steps_per_s']:.0f} steps/s)")
    figures["summary"] = {f"vs_{name}": {"mean": float(np.mean(r)), "worst": max(r)} for name, r in ratios.items()}
    figures["summary"]["split"] = args.split
    report.finish("online", figures, libraries=("torch", "numpy"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
