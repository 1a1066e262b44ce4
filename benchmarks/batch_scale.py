"""The nightly job at 100,000 series: rows a second and memory beside statsforecast, and Ray with two workers beside one.

    python benchmarks/batch_scale.py [--series 100000] [--rows 200] [--ets 500]

The job is the product's own (`pipelines.forecasting.batch.run_shards`): it reads one Parquet table of daily series, checks
every row, lets a fresh memory read each series, forecasts 14 days with five quantiles, keeps the shards and writes the
table. The model is trained on 500 of the series before. Beside it, over series that are already arrays in memory and
without checks, parts or a table: statsforecast's SeasonalNaive on all series (in batches), and AutoETS, both with season 7
and the same two intervals, AutoETS on a random sample and extrapolated by series. Compilation is paid before the clock
starts. Both sides use one core, but in `ray2_over_ray1`, which compares clusters of two workers and of one on the same
shards after a warm-up of each worker.

`rss_gb` is the highest sum of the resident memory of the process and all its children (shared pages count in each, so it
is an upper bound) while the job runs on one core; `ray_rss_gb` the same with two Ray workers, Ray's own processes included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from datetime import datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

HORIZON, LOOK_BACK, SEASON = 14, 28, 7
AS_OF = "2026-01-01"
TRAINED_ON = 500


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0])
    parser.add_argument("--series", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=200, help="rows of each series")
    parser.add_argument("--ets", type=int, default=500, help="series of the AutoETS sample")
    parser.add_argument("--ray-series", type=int, default=100_000, help="series of the comparison of Ray workers")
    parser.add_argument("--shard", type=int, default=5_000, help="series of a shard")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        report.finish("batch_scale", measure(Path(folder), options), libraries=("polars", "torch", "statsforecast", "ray"))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import polars as pl

    make(folder / "table.parquet", options)
    weights, config = trained(folder)
    spawn = multiprocessing.get_context("spawn")
    done: dict[str, Any] = {}
    # A process of its own: what making the data and training took must not count as memory of the job.
    for name, executor, workers, series in (
        ("local", "local", 1, options.series),
        ("ray1", "ray", 1, options.ray_series),
        ("ray2", "ray", 2, options.ray_series),
    ):
        here, there = spawn.Pipe()
        process = spawn.Process(target=job, args=(folder, weights, config, name, executor, workers, series, options, there))
        process.start()
        with Memory(process.pid) as memory:
            done[name] = here.recv()
            process.join()
        done[name]["rss_gb"] = memory.most / 1e9
        report.progress(f"{name}: {done[name]}")
    naive, ets = statsforecast(folder / "table.parquet", options)
    report.progress(f"seasonal naive {naive:.1f} s for all, AutoETS {ets * 1000:.0f} ms a series")
    ours = done["local"]
    rows = options.series * options.rows
    forecasts = pl.read_parquet(folder / f"local-{AS_OF}.parquet", columns=["unique_id", "q0.5"])
    return {
        "series": options.series,
        "rows": rows,
        "horizon": HORIZON,
        "forecast_rows": forecasts.height,
        "failed": ours["failed"],
        "seconds": ours["seconds"],
        "rows_per_s": rows / ours["seconds"],
        "seasonal_naive_rows_per_s": rows / naive,
        "auto_ets_rows_per_s": options.rows / ets,
        "vs_seasonal_naive": naive / ours["seconds"],
        "vs_auto_ets": ets * options.series / ours["seconds"],
        "rss_gb": ours["rss_gb"],
        "again_seconds": ours["again_seconds"],
        "again_equal": ours["again_equal"],
        "ray1_seconds": done["ray1"]["seconds"],
        "ray2_seconds": done["ray2"]["seconds"],
        "ray2_over_ray1": done["ray1"]["seconds"] / done["ray2"]["seconds"],
        "ray_rss_gb": done["ray2"]["rss_gb"],
    }


def make(path: Path, options: argparse.Namespace) -> None:
    """Daily series: a level, a week, a walk and noise; sorted by id, written in row groups so that shards read their own."""
    import numpy as np
    import polars as pl
    import pyarrow.parquet as pq

    random = np.random.default_rng(options.seed)
    days = [datetime(2026, 1, 1) - timedelta(days=options.rows - i) for i in range(options.rows)]
    weekday = np.arange(options.rows) % SEASON
    writer = None
    for first in range(0, options.series, 5000):
        count = min(5000, options.series - first)
        week = random.normal(size=(count, SEASON)) * random.gamma(2.0, 5.0, (count, 1))
        walk = random.normal(size=(count, options.rows)).cumsum(axis=1)
        y = 100 + 50 * random.normal(size=(count, 1)) + week[:, weekday] + walk + 3 * random.normal(size=(count, options.rows))
        names = pl.Series([f"item-{first + i:06}" for i in range(count)])
        table = pl.DataFrame(
            {
                "unique_id": names.gather(np.repeat(np.arange(count), options.rows)),
                "ds": pl.Series(days).gather(np.tile(np.arange(options.rows), count)),
                "y": y.reshape(-1),
            }
        ).to_arrow()
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def trained(folder: Path) -> tuple[Path, dict[str, Any]]:
    import polars as pl

    from pipelines.forecasting.estimator import TitansForecaster, save_weights

    frame = pl.scan_parquet(folder / "table.parquet").filter(pl.col("unique_id") < f"item-{TRAINED_ON:06}").collect()
    model = TitansForecaster(horizon=HORIZON, look_back=LOOK_BACK, hidden=32, frequency="1d").fit(frame)
    save_weights(model.forecaster_, folder / "model.safetensors")
    return folder / "model.safetensors", json.loads(json.dumps(model.describe()))


def job(
    folder: Path,
    weights: Path,
    config: dict[str, Any],
    name: str,
    executor: str,
    workers: int,
    series: int,
    options: argparse.Namespace,
    connection: Connection,
) -> None:
    """Runs the job in this process (on Ray after one small run that starts the workers) and sends what it took."""
    import polars as pl

    from pipelines.forecasting.batch import Job, Loaded, run_shards

    def settings(label: str, table: str, shard: int) -> Job:
        return Job.model_validate(
            {
                "name": label, "input": {"uri": table}, "output": {"uri": str(folder / f"{label}-{{as_of}}.parquet")},
                "model": {"name": "scale"}, "executor": executor, "workers": workers, "series_per_shard": shard,
                "work": folder / "work",
            }
        )  # fmt: skip

    model = Loaded("scale/1", weights, config)
    table = folder / "table.parquet"
    if series < options.series:
        table = folder / f"{name}.parquet"
        pl.scan_parquet(folder / "table.parquet").filter(pl.col("unique_id") < f"item-{series:06}").sink_parquet(
            table, row_group_size=5000 * options.rows
        )
    warm = folder / f"{name}-warm.parquet"
    pl.scan_parquet(folder / "table.parquet").filter(pl.col("unique_id") < "item-000064").sink_parquet(warm)
    run_shards(settings(f"{name}-warm", str(warm), 64 // (4 * workers)), model, AS_OF)
    this = settings(name, str(table), options.shard)
    began = time.perf_counter()
    first = run_shards(this, model, AS_OF)
    seconds = time.perf_counter() - began
    out = {"seconds": seconds, "series": first.series, "failed": first.failed, "shards": first.shards}
    if executor == "local":
        made = Path(first.output).read_bytes()
        began = time.perf_counter()
        run_shards(this, model, AS_OF)
        out["again_seconds"] = time.perf_counter() - began
        out["again_equal"] = int(Path(first.output).read_bytes() == made)
    connection.send(out)


class Memory:
    """The highest resident memory of a process and all its children, looked at ten times a second."""

    def __init__(self, pid: int | None) -> None:
        self.most, self._pid, self._end = 0, pid, threading.Event()

    def __enter__(self) -> Memory:
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._watcher.join()

    def _watch(self) -> None:
        import psutil

        while not self._end.wait(0.1):
            total = 0
            try:
                process = psutil.Process(self._pid)
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                return
            for member in family:
                try:
                    total += member.memory_info().rss
                except psutil.Error:
                    continue
            self.most = max(self.most, total)


def statsforecast(table: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of SeasonalNaive for all series, and of AutoETS for one."""
    import numpy as np
    import polars as pl
    from statsforecast.models import AutoETS, SeasonalNaive

    naive, ets = SeasonalNaive(season_length=SEASON), AutoETS(season_length=SEASON)
    everything = pl.read_parquet(table, columns=["y"])["y"].to_numpy().reshape(options.series, options.rows)
    for model in (naive, ets):
        model.forecast(y=everything[0], h=HORIZON, level=[80, 95])
    began = time.perf_counter()
    for y in everything:
        naive.forecast(y=y, h=HORIZON, level=[80, 95])
    all_naive = time.perf_counter() - began
    sample = np.random.default_rng(options.seed).choice(options.series, min(options.ets, options.series), replace=False)
    began = time.perf_counter()
    for number, i in enumerate(sample):
        ets.forecast(y=everything[i], h=HORIZON, level=[80, 95])
        if number % 100 == 99:
            report.progress(f"AutoETS: {number + 1} of {len(sample)} series")
    return all_naive, (time.perf_counter() - began) / len(sample)


if __name__ == "__main__":
    main()
