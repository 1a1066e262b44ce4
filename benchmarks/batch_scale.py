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
import statistics
import sys
import tempfile
import threading
import time
from datetime import datetime, timedelta
from functools import partial
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
    parser.add_argument("--ray-series", type=int, default=50_000, help="series of the comparison of Ray workers")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of that comparison that are counted")
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
    # Processes of their own: what making the data and training took must not count as memory of the job.
    here, there = spawn.Pipe()
    process = spawn.Process(target=job, args=(folder, weights, config, "local", "local", 1, options, there))
    process.start()
    with Memory(process.pid) as memory:
        here.recv()
        here.send("go")
        ours = here.recv()
        here.send("end")
        process.join()
    report.progress(f"local: {ours}")
    on_ray, ray_memory = on_one_and_two_workers(folder, weights, config, options)
    two_over_one = report.ratio(on_ray["1 worker"], on_ray["2 workers"])
    naive, ets = statsforecast(folder / "table.parquet", options)
    report.progress(f"seasonal naive {naive:.1f} s for all, AutoETS {ets * 1000:.0f} ms a series")
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
        "rss_gb": memory.most / 1e9,
        "again_seconds": ours["again_seconds"],
        "again_equal": ours["again_equal"],
        "ray_series": options.ray_series,
        "ray1_seconds": statistics.median(on_ray["1 worker"]),
        "ray2_seconds": statistics.median(on_ray["2 workers"]),
        "ray2_over_ray1": two_over_one["median"],
        "ray2_over_ray1_range": two_over_one,
        "ray_rss_gb": ray_memory / 1e9,
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


def on_one_and_two_workers(
    folder: Path, weights: Path, config: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, list[float]], int]:
    """Seconds of the job on a cluster of one worker and on one of two, in turns, and the most memory of the latter. Both
    clusters live side by side, each in a process of its own; only one works at a time.
    """
    spawn = multiprocessing.get_context("spawn")
    clusters: dict[str, tuple[Any, Connection]] = {}
    for workers in (1, 2):
        here, there = spawn.Pipe()
        arguments = (folder, weights, config, f"ray{workers}", "ray", workers, options, there)
        process = spawn.Process(target=job, args=arguments)
        process.start()
        here.recv()  # started, warmed up and idle before the next one starts
        clusters[f"{workers} worker{'s' * (workers - 1)}"] = (process, here)

    def ask(name: str) -> None:
        clusters[name][1].send("go")
        clusters[name][1].recv()

    with Memory(clusters["2 workers"][0].pid) as memory:
        seconds = report.in_turns({name: partial(ask, name) for name in clusters}, options.rounds)
    for process, here in clusters.values():
        here.send("end")
        process.join()
    return seconds, memory.most


def job(
    folder: Path,
    weights: Path,
    config: dict[str, Any],
    name: str,
    executor: str,
    workers: int,
    options: argparse.Namespace,
    connection: Connection,
) -> None:
    """Warms up on a few series, then runs the job on every word and sends what it took."""
    import polars as pl

    from pipelines.forecasting.batch import Job, Loaded, run_shards

    def settings(label: str, table: Path, shard: int) -> Job:
        return Job.model_validate(
            {
                "name": label, "input": {"uri": str(table)}, "output": {"uri": str(folder / f"{label}-{{as_of}}.parquet")},
                "model": {"name": "scale"}, "executor": executor, "workers": workers, "series_per_shard": shard,
                "work": folder / "work",
            }
        )  # fmt: skip

    def first(series: int, path: Path) -> Path:
        rows = pl.scan_parquet(folder / "table.parquet").filter(pl.col("unique_id") < f"item-{series:06}")
        rows.sink_parquet(path, row_group_size=options.shard * options.rows)
        return path

    model = Loaded("scale/1", weights, config)
    table = folder / "table.parquet"
    if executor == "ray" and options.ray_series < options.series:
        table = first(options.ray_series, folder / f"{name}.parquet")
    run_shards(settings(f"{name}-warm", first(64, folder / f"{name}-warm.parquet"), 64 // (4 * workers)), model, AS_OF)
    connection.send("ready")
    turn = 0
    while connection.recv() == "go":
        # Another name is another run key: no shard is there from the turn before.
        this = settings(name if executor == "local" else f"{name}-{turn}", table, options.shard)
        began = time.perf_counter()
        done = run_shards(this, model, AS_OF)
        out: dict[str, Any] = {"seconds": time.perf_counter() - began, "series": done.series, "failed": done.failed}
        if executor == "local":
            made = Path(done.output).read_bytes()
            began = time.perf_counter()
            run_shards(this, model, AS_OF)
            out["again_seconds"] = time.perf_counter() - began
            out["again_equal"] = int(Path(done.output).read_bytes() == made)
        connection.send(out)
        turn += 1


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
