"""Does anything know the future? A random walk, and targets that change after an origin.

    python benchmarks/leak_probe.py [--rows 1500]

On a random walk nothing can beat the last value, so an error below it means that targets were used before their time
(white noise would not show it). Forecasters in every memory mode are trained on other walks and streamed through the
live engine, with delayed feedback only; `best_over_naive` is the lowest mean squared error of them all over that of
the last value, at any of the steps 1, 12 and 24. `control_over_naive` is the same for a forecaster that is fed each value
one row early: the probe must catch it (well below 1).

Then rows after an origin become missing, or 1e6, and the stream is run again: `changed_forecasts` counts forecast rows
issued at or before the origin that differ in any bit, `changed_states` streams whose state at the origin does. Changed
and unchanged rows lie in the same batches, with a grace period, so that nothing may leak through the batch either.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

if TYPE_CHECKING:
    import polars as pl

    from pipelines.streaming.engine import StreamModel

HORIZON, STEPS = 24, (1, 12, 24)
OUTPUTS = ("forecasts.parquet", "alarms.ndjson", "dead.ndjson")


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1500, help="rows of each walk that is streamed")
    parser.add_argument("--streams", type=int, default=40, help="walks that are streamed")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    report.finish("leak_probe", measure(options), libraries=("torch", "numpy"))


def walks(streams: int, rows: int, seed: int) -> pl.DataFrame:
    """Gaussian random walks, hourly, as a long frame in order of time."""
    from datetime import datetime, timedelta

    import numpy as np
    import polars as pl

    y = np.random.default_rng(seed).normal(size=(streams, rows)).cumsum(1)
    times = pl.datetime_range(datetime(2024, 1, 1), datetime(2024, 1, 1) + timedelta(hours=rows - 1), "1h", time_unit="us", eager=True)
    names = [f"w{s:03d}" for s in range(streams)]
    frame = pl.DataFrame(
        {
            "unique_id": [name for _ in range(rows) for name in names],
            "ds": times.gather(np.repeat(np.arange(rows), streams)),
            "y": y.T.reshape(-1),
        }
    )
    return frame


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from pipelines.forecasting.estimator import TitansForecaster
    from pipelines.streaming.worker import stream_model

    torch.set_num_threads(options.threads)
    train, live = walks(30, 2000, options.seed), walks(options.streams, options.rows, options.seed + 1)
    over_naive: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for memory in ("carried", "window", "frozen"):
            fitted = TitansForecaster(horizon=HORIZON, look_back=96, memory=memory, frequency="1h", seed=options.seed, epochs=3)
            model = stream_model(fitted.fit(train), f"{memory}/1")
            out = stream(model, live, Path(folder) / memory)
            over_naive[f"tethys_{memory}"] = errors(out, live)
            if memory == "carried":
                early = live.sort("unique_id", "ds").with_columns(pl_shift("y")).drop_nulls("y").sort("ds", "unique_id")
                control = errors(stream(model, early, Path(folder) / "control"), live)
                changed = perturbed(model, live, Path(folder))
            report.progress(f"{memory}: {over_naive[f'tethys_{memory}']}")
    return {
        "best_over_naive": min(min(steps.values()) for steps in over_naive.values()),
        "control_over_naive": min(control.values()),
        **changed,
        "over_naive": over_naive,
        "streams": options.streams,
        "rows": options.rows,
    }


def pl_shift(column: str) -> Any:
    """Each value one row early."""
    import polars as pl

    return pl.col(column).shift(-1).over("unique_id")


def stream(model: StreamModel, frame: pl.DataFrame, folder: Path, *, grace: int = 0, max_events: int | None = None) -> Any:
    """Through the engine as a live stream; the forecasts as a frame."""
    import polars as pl

    from connectors.checkpoints import CheckpointStore
    from connectors.streams import open_sink, open_source
    from pipelines.streaming.event_time import EventTime, Frequency
    from pipelines.streaming.worker import work

    folder.mkdir()
    frame.write_csv(folder / "rows.csv")
    store = CheckpointStore(folder / "c.db")
    sinks = [open_sink(str(folder / name)) for name in OUTPUTS]
    policy = EventTime(Frequency.parse(model.frequency), grace=grace)
    source = open_source(str(folder / "rows.csv"))
    work(model, policy, source, store, *sinks, batch_rows=333, max_events=max_events)
    for thing in (source, store, *sinks):
        thing.close()
    return pl.read_parquet(folder / OUTPUTS[0])


def errors(out: pl.DataFrame, live: pl.DataFrame) -> dict[str, float]:
    """Mean squared error of the median over that of the last value, by step; the first 200 rows warm the memories up."""
    import polars as pl

    begin = live["ds"].unique().sort()[200]
    truth = live.select("unique_id", "ds", pl.col("y").alias("truth"))
    last = live.select("unique_id", pl.col("ds").alias("origin"), pl.col("y").alias("last"))
    rows = out.filter(pl.col("step").is_in(STEPS) & (pl.col("origin") >= begin))
    rows = rows.join(truth, on=["unique_id", "ds"]).join(last, on=["unique_id", "origin"])
    by_step = rows.group_by("step").agg(
        ((pl.col("q0.5") - pl.col("truth")) ** 2).mean().alias("model"),
        ((pl.col("last") - pl.col("truth")) ** 2).mean().alias("naive"),
    )
    return {str(step): model / naive for step, model, naive in by_step.sort("step").iter_rows()}


def perturbed(model: StreamModel, live: pl.DataFrame, folder: Path) -> dict[str, int]:
    """Forecasts and states at or before an origin that changed when the rows after it did."""
    import polars as pl

    from connectors.checkpoints import CheckpointStore

    live = live.filter(pl.col("ds") < live["ds"].unique().sort()[400])
    streams = live["unique_id"].n_unique()
    grace = 3 * 3_600_000_000

    def states(path: Path) -> dict[str, bytes]:
        store = CheckpointStore(path / "c.db")
        found = {name: (store.read(name) or (0, b""))[1] for name, _, _ in store.streams()}
        store.close()
        return found

    counts = {"changed_forecasts": 0, "changed_states": 0, "compared_forecasts": 0, "compared_states": 0}
    whole = stream(model, live, folder / "whole", grace=grace)
    for origin_row in (150, 233, 301):
        origin = live["ds"].unique().sort()[origin_row]
        events = (origin_row + 1) * streams
        stream(model, live, folder / f"at-{origin_row}", grace=grace, max_events=events)
        before = states(folder / f"at-{origin_row}")
        for name, value in (("nan", None), ("big", 1e6)):
            changed = live.with_columns(pl.when(pl.col("ds") > origin).then(pl.lit(value)).otherwise(pl.col("y")).alias("y"))
            path = folder / f"{name}-{origin_row}"
            out = stream(model, changed, path, grace=grace)
            ours, theirs = (f.filter(pl.col("origin") <= origin).sort("unique_id", "origin", "step") for f in (whole, out))
            assert ours.height == theirs.height == (origin_row + 1) * streams * HORIZON
            same = pl.select(pl.all_horizontal(ours[c].eq_missing(theirs[c]) for c in ours.columns)).to_series()
            counts["changed_forecasts"] += int((~same).sum())
            counts["compared_forecasts"] += ours.height
            stream(model, changed, folder / f"{name}-at-{origin_row}", grace=grace, max_events=events)
            after = states(folder / f"{name}-at-{origin_row}")
            counts["changed_states"] += sum(before[n] != after[n] for n in before)
            counts["compared_states"] += len(before)
    return counts


if __name__ == "__main__":
    main()
