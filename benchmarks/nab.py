"""Anomalies on the Numenta Anomaly Benchmark: standard profile, thresholds chosen without the labels.

    python benchmarks/nab.py --data NAB

NAB holds `data/*/*.csv` (timestamp, value) and `labels/combined_windows.json`. Detectors see one stream after another from its first row
and give every row a score; the rows of the probation (15 per cent, at most 750) are not scored. One rule, the same for all detectors and
blind to the labels, makes alarms of scores: an alarm is a score above the highest 1 in 1,000 of all scores of the stream so far, the
probation included, and none follows another within half a probation.

Scoring (Lavin and Ahmad 2015): the first alarm in a window earns up to 1, the sooner the more; a window without one costs 1; an alarm
outside costs up to 0.11, less just behind a window. 0 is a detector that never speaks, 100 one that is right at the first row of every
window.

zscore: residual from a running daily profile, in its own running deviations. river: HalfSpaceTrees, GaussianScorer and
StandardAbsoluteDeviation, each by itself; `river` is the best of them. tethys: a forecaster fitted on the probations (no labels, nothing
later), each stream with an outcome memory; the score is the surprise of its daily memory at the row (how far the value lies from what the
memory held for this time of day) plus the residual of the corrected forecast made one row before, each in its own running deviations.

Keys: figures.MODEL.{score,detected,windows,alarms}, MODEL among zscore, river, river_*, tethys.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOP_SHARE = 0.001
FALSE_ALARM = 0.11
LOOK_BACK, HORIZON = 96, 12
WARM_UP = 32  # residuals before any is called large


@dataclass(frozen=True)
class Stream:
    name: str
    seconds: NDArray[np.int64]
    y: NDArray[np.float64]
    windows: list[tuple[int, int]]
    """First and last row of each."""

    @property
    def probation(self) -> int:
        return int(min(0.15 * len(self.y), 0.15 * 5000))

    @property
    def step(self) -> int:
        """The usual seconds between rows."""
        import numpy as np

        return int(np.median(np.diff(self.seconds)))


def read(folder: Path) -> list[Stream]:
    import numpy as np
    import polars as pl

    labels = folder / "labels" / "combined_windows.json"
    if not labels.is_file():
        raise SystemExit(f"nab: {labels} is missing: --data names the folder that holds NAB's data/ and labels/")
    streams = []
    for name, windows in sorted(json.loads(labels.read_text()).items()):
        path = folder / "data" / name
        if not path.is_file():
            continue
        frame = pl.read_csv(path).with_columns(pl.col("timestamp").str.to_datetime())
        seconds = frame["timestamp"].dt.epoch("s").to_numpy()
        rows = []
        for start, end in windows:
            edges = pl.Series([start, end]).str.to_datetime("%Y-%m-%d %H:%M:%S%.f").dt.epoch("s").to_numpy()
            inside = np.flatnonzero((seconds >= edges[0]) & (seconds <= edges[1]))
            rows.append((int(inside[0]), int(inside[-1])))
        streams.append(Stream(name, seconds, frame["value"].to_numpy().astype(np.float64), rows))
    return streams


# Scores to alarms, alarms to a score.


def alarms(score: NDArray[np.float64], probation: int) -> list[int]:
    """Rows of the alarms. score (T,): only its order matters."""
    import bisect

    past: list[float] = sorted(float(s) for s in score[:probation])
    rows: list[int] = []
    for t in range(probation, len(score)):
        s = float(score[t])
        rank = bisect.bisect_right(past, s)
        if rank >= (1 - TOP_SHARE) * len(past) and s > past[len(past) // 2] and past[min(rank, len(past)) - 1] < s:
            if not rows or t - rows[-1] > probation // 2:
                rows.append(t)
        bisect.insort(past, s)
    return rows


def scaled_sigmoid(position: float) -> float:
    return -1.0 if position > 3.0 else 2.0 / (1.0 + math.exp(5.0 * position)) - 1.0


def nab_score(stream: Stream, rows: Sequence[int]) -> tuple[float, int]:
    """Raw score of the standard profile, and the windows found. Windows inside the probation do not count."""
    total, found = 0.0, 0
    windows = counted(stream)
    for left, right in windows:
        hits = [t for t in rows if left <= t <= right]
        if hits:
            width = right - left + 1
            total += scaled_sigmoid(-(right - hits[0] + 1) / width) / scaled_sigmoid(-1.0)
            found += 1
        else:
            total -= 1.0
    for t in rows:
        if any(left <= t <= right for left, right in windows):
            continue
        before = [(left, right) for left, right in windows if right < t]
        if not before:
            total -= FALSE_ALARM
        else:
            left, right = before[-1]
            total += FALSE_ALARM * scaled_sigmoid((t - right) / max(right - left, 1))
    return total, found


def counted(stream: Stream) -> list[tuple[int, int]]:
    return [(max(left, stream.probation), right) for left, right in stream.windows if right >= stream.probation]


# Detectors.


def deviations(residual: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
    """Absolute residuals in running deviations of those before, over about `rows` rows."""
    import numpy as np

    out = np.zeros(len(residual))
    scale = count = 0.0
    for t, r in enumerate(np.abs(residual).tolist()):
        if not math.isfinite(r):
            continue
        if count >= WARM_UP:
            out[t] = r / max(scale, 1e-12 + 1e-3 * r)
        count = min(count + 1, rows)
        scale += (min(r, 10 * scale if count >= WARM_UP else r) - scale) / count
    return out


def day_rows(stream: Stream) -> int:
    return max(1, round(86400 / stream.step))


def zscore(stream: Stream) -> NDArray[np.float64]:
    import numpy as np

    held: dict[int, float] = {}
    residual = np.zeros(len(stream.y))
    for t, (second, y) in enumerate(zip(stream.seconds.tolist(), stream.y.tolist(), strict=True)):
        slot = second % 86400 // stream.step
        expected = held.get(slot)
        residual[t] = math.nan if expected is None else y - expected
        held[slot] = y if expected is None else expected + 0.2 * (y - expected)
    return deviations(residual, stream.probation)


def river_detectors(seed: int) -> dict[str, Callable[[Stream], NDArray[np.float64]]]:
    import numpy as np
    from river import anomaly, compose, preprocessing

    def run(make: Callable[[], Any], supervised: bool) -> Callable[[Stream], NDArray[np.float64]]:
        def scores(stream: Stream) -> NDArray[np.float64]:
            model = make()
            out = np.zeros(len(stream.y))
            for t, y in enumerate(stream.y.tolist()):
                if supervised:
                    out[t] = model.score_one({}, y) or 0.0
                    model.learn_one({}, y)
                else:
                    x = {"y": y}
                    out[t] = model.score_one(x)
                    model.learn_one(x)
            return out

        return scores

    return {
        "river_half_space_trees": run(
            lambda: compose.Pipeline(preprocessing.MinMaxScaler(), anomaly.HalfSpaceTrees(n_trees=10, window_size=250, seed=seed)), False
        ),
        "river_gaussian": run(lambda: anomaly.GaussianScorer(window_size=None, grace_period=100), True),
        "river_absolute_deviation": run(lambda: anomaly.StandardAbsoluteDeviation(), True),
    }


def tethys(streams: Sequence[Stream], seed: int) -> list[NDArray[np.float64]]:
    """Streams with one step of time go together; each keeps its own state."""
    out: dict[str, NDArray[np.float64]] = {}
    by_step: dict[int, list[Stream]] = {}
    for stream in streams:
        by_step.setdefault(stream.step, []).append(stream)
    for step, group in sorted(by_step.items()):
        report.progress(f"tethys: {len(group)} streams of {step} s")
        out.update(tethys_group(group, step, seed))
    return [out[s.name] for s in streams]


def tethys_group(group: Sequence[Stream], step: int, seed: int) -> dict[str, NDArray[np.float64]]:
    import numpy as np
    import torch

    from titans_core.forecaster import Forecaster, ForecasterConfig, Season
    from titans_core.outcome import Origin, OutcomeConfig, OutcomeMemory
    from titans_core.training import Rows, Windows, fit_line, replay

    day = max(1, round(86400 / step))
    slots = max(s for s in range(1, min(day, 96) + 1) if day % s == 0)
    seasons = [Season(rows=1, slots=1, rates=(0.02, 0.003))]
    if day > 1:
        seasons.append(Season(rows=day, slots=slots, rates=(0.2 * slots / day,)))
    torch.manual_seed(seed)
    model = Forecaster(ForecasterConfig(look_back=LOOK_BACK, horizon=HORIZON, seasons=tuple(seasons), hidden=0, level_rows=2000))
    length = max(len(s.y) for s in group)
    y = torch.zeros(len(group), length, dtype=torch.float64)
    observed = torch.zeros(len(group), length, dtype=torch.bool)
    phase = torch.zeros(len(group), length + HORIZON, len(seasons), dtype=torch.int16)
    for i, s in enumerate(group):
        y[i, : len(s.y)] = torch.from_numpy(s.y)
        observed[i, : len(s.y)] = True
        rest = s.seconds[-1] + step * np.arange(1, length + HORIZON - len(s.y) + 1)
        clock = torch.from_numpy(np.concatenate([s.seconds, rest]) // step)
        phase[i] = torch.stack([clock // c.stride % c.slots for c in seasons], -1).to(torch.int16)
    blocks = torch.arange(LOOK_BACK, length - HORIZON + 1).split(2048)
    windows, _ = replay(model, model.initial_state(len(group)), Rows(y, observed, phase), blocks)
    # Fit on windows whose whole future lies in the probation of their stream.
    known = []
    for block, w in zip(blocks, windows, strict=True):
        row = block.repeat_interleave(len(group)) + HORIZON
        within = row <= torch.tensor([s.probation for s in group]).repeat(len(block))
        known.append(Windows(w.x[within], w.y[within], w.level[within], w.unit[within]))
    fit = Windows(*(torch.cat([getattr(w, f) for w in known]) for f in ("x", "y", "level", "unit")))
    outcome: OutcomeMemory | None = None
    if len(fit.x) > model.config.features:
        fit_line(model, fit, Windows(fit.x[:0], fit.y[:0], fit.level[:0], fit.unit[:0]))
        config = OutcomeConfig.daily(model, 24, outcomes=4, inputs=12, forget=(500.0, 3000.0))
        outcome = OutcomeMemory(config).fit(fit.x, fit.y, model.line)
    n = len(group)
    state = None if outcome is None else outcome.initial_state(n)
    expected = np.full((length + 1, n), np.nan)  # of row t, after t rows
    held = np.full((length + 1, n), np.nan)  # what the last season holds for row t, after t rows
    column = LOOK_BACK + (len(seasons[0].rates) if len(seasons) > 1 else 0)
    with torch.inference_mode():
        for block, w in zip(blocks, windows, strict=True):
            base = model.centre_of(w.x)
            for i, t in enumerate(block.tolist()):
                part = slice(i * n, (i + 1) * n)
                origin = Origin(w.x[part], base[part], w.level[part], w.unit[part])
                held[t] = (origin.level + origin.unit * origin.x[:, column]).numpy()
                if outcome is None or state is None:
                    expected[t] = (origin.level + origin.unit * origin.base[:, 0]).numpy()
                else:
                    state, corrected = outcome.step(state, origin, y[:, t - 1], observed[:, t - 1])
                    expected[t] = corrected[:, 0].numpy()
    scores = {}
    for i, s in enumerate(group):
        residual = deviations(s.y - expected[: len(s.y), i], s.probation)
        scores[s.name] = residual + deviations(s.y - held[: len(s.y), i], s.probation)
    return scores


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__.splitlines()[0], data="folder of NAB, with data/ and labels/")
    args = parser.parse_args(argv)
    if args.data is None:
        parser.error("--data is needed")
    report.limit_threads(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    streams = read(args.data)
    report.progress(f"{len(streams)} streams, {sum(len(s.y) for s in streams)} rows, {sum(len(counted(s)) for s in streams)} windows")
    scores = {"zscore": [zscore(s) for s in streams]}
    for name, detector in river_detectors(args.seed).items():
        scores[name] = [detector(s) for s in streams]
        report.progress(f"{name} done")
    scores["tethys"] = tethys(streams, args.seed)
    figures: dict[str, Any] = {}
    windows = sum(len(counted(s)) for s in streams)
    for model, each in scores.items():
        raw = found = spoken = 0.0
        for stream, score in zip(streams, each, strict=True):
            rows = alarms(score, stream.probation)
            points, hits = nab_score(stream, rows)
            raw, found, spoken = raw + points, found + hits, spoken + len(rows)
        figures[model] = {"score": 100 * (raw + windows) / (2 * windows), "detected": int(found), "windows": windows, "alarms": int(spoken)}
        report.progress(f"{model}: {figures[model]}")
    figures["river"] = max((f for m, f in figures.items() if m.startswith("river_")), key=lambda f: f["score"])
    figures["streams"] = len(streams)
    report.finish("nab", figures, libraries=("torch", "numpy", "river"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
