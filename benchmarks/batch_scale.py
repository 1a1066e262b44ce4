"""The nightly job at 100,000 series: rows a second and memory beside statsforecast, and Ray with two workers beside one.

    python benchmarks/batch_scale.py [--series 100000] [--rows 200] [--ets 500]

The job is the product's own (`pipelines.forecasting.batch.run_shards`): it reads one Parquet table of daily series, checks
every row, lets a fresh memory read each series, forecasts 14 days with five quantiles, keeps the shards and writes the
table. The model is trained on 500 of the series before. Beside it, over series that are already arrays in memory and
without checks, parts or a table: statsforecast's SeasonalNaive on all series, and AutoETS, both with season 7 and the same
two intervals, AutoETS on a random sample and extrapolated by series. Compilation is paid before the clock starts. Both
sides use one core.

`ray2_over_ray1`: the same job on a Ray cluster of two cores, two shards at a time and one at a time, in turns. The
cluster is started and warmed before; what that takes, and a user of `executor: ray` waits for once a run, is `ray_start_s`.
`ray1_cpu_s` and `ray2_cpu_s` are the processor seconds of all its processes: their ratio is what the second worker costs in
memory traffic. `plain2_over_plain1` is what the machine gives in the same rounds to two processes that only add numbers: on a
machine that is busy with other work it is below 2, and no job can have more.
In a last run one of the two workers is killed while it works on a shard: `killed_equal` says that the table came out to the
byte, `killed_extra_s` what it cost.

`rss_gb` is the highest sum of the resident memory of a whole process tree, Ray's own processes included, over all these
runs. Shared pages count in each process, so it is an upper bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import threading
import time
from datetime import datetime, timedelta
from functools import partial
from itertools import count
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
    parser.add_argument("--rounds", type=int, default=3, help="rounds of Ray workers that are counted")
    parser.add_argument("--shard", type=int, default=5_000, help="series of a shard")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        report.finish("batch_scale", measure(Path(folder), options), libraries=("polars", "torch", "statsforecast", "ray"))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import polars as pl

    make(folder / "table.parquet", options)
    weights, config = trained(folder)
    # Processes of their own: what making the data and training took must not count as memory of the job.
    local, local_memory = apart(on_one_core, folder, weights, config, options)
    report.progress(f"local: {local}")
    on_ray, ray_memory = apart(on_ray_workers, folder, weights, config, options)
    two_over_one = report.ratio(on_ray["1 worker"], on_ray["2 workers"])
    report.progress(f"Ray: {on_ray}")
    naive, ets = statsforecast(folder / "table.parquet", options)
    report.progress(f"seasonal naive {naive:.1f} s for all, AutoETS {ets * 1000:.0f} ms a series")
    rows = options.series * options.rows
    forecasts = pl.scan_parquet(folder / f"local-{AS_OF}.parquet").select(pl.len()).collect().item()
    return {
        "series": options.series,
        "rows": rows,
        "horizon": HORIZON,
        "forecast_rows": forecasts,
        "failed": local["failed"],
        "seconds": local["seconds"],
        "rows_per_s": rows / local["seconds"],
        "seasonal_naive_rows_per_s": rows / naive,
        "auto_ets_rows_per_s": options.rows / ets,
        "auto_ets_sample": min(options.ets, options.series),
        "vs_seasonal_naive": naive / local["seconds"],
        "vs_auto_ets": ets * options.series / local["seconds"],
        "rss_gb": max(local_memory, ray_memory) / 1e9,
        "local_rss_gb": local_memory / 1e9,
        "ray_rss_gb": ray_memory / 1e9,
        "again_seconds": local["again_seconds"],
        "again_equal": local["again_equal"],
        "ray_start_s": on_ray["start_s"],
        "ray1_seconds": statistics.median(on_ray["1 worker"]),
        "ray2_seconds": statistics.median(on_ray["2 workers"]),
        "ray2_over_ray1": two_over_one["median"],
        "ray2_over_ray1_range": two_over_one,
        "ray1_cpu_s": statistics.median(on_ray["cpu"][1]),
        "ray2_cpu_s": statistics.median(on_ray["cpu"][2]),
        "plain2_over_plain1": report.ratio(on_ray["1 adder"], on_ray["2 adders"])["median"],
        "ray_equal": on_ray["equal"],
        "killed_equal": on_ray["killed_equal"],
        "killed_extra_s": on_ray["killed_s"] - statistics.median(on_ray["2 workers"]),
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


def apart(work: Any, *arguments: Any) -> tuple[dict[str, Any], int]:
    """`work(*arguments)` in a process of its own, and the most memory that it and its children held."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(there, work, arguments))
    process.start()
    there.close()
    with Memory(process.pid) as memory:
        try:
            result = here.recv()
        except EOFError:
            raise SystemExit("a process of the benchmark died; what it said stands above") from None
    process.join()
    return result, memory.most


def _answer(connection: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    connection.send(work(*arguments))


def one_job(folder: Path, options: argparse.Namespace, name: str, **settings: Any) -> Any:
    from pipelines.forecasting.batch import Job

    given = {
        "name": name, "input": {"uri": str(folder / "table.parquet")}, "output": {"uri": str(folder / f"{name}-{{as_of}}.parquet")},
        "model": {"name": "scale"}, "series_per_shard": options.shard, "work": folder / "work", **settings,
    }  # fmt: skip
    return Job.model_validate(given)


def a_few(folder: Path, options: argparse.Namespace, series: int) -> dict[str, str]:
    """The first series of the table as a table: what a warm-up works on."""
    import polars as pl

    path = folder / f"first-{series}.parquet"
    pl.scan_parquet(folder / "table.parquet").filter(pl.col("unique_id") < f"item-{series:06}").sink_parquet(path)
    return {"uri": str(path)}


def on_one_core(folder: Path, weights: Path, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the job, then of the job that finds everything done."""
    from pipelines.forecasting.batch import Loaded, run_shards

    model = Loaded("scale/1", weights, config)
    run_shards(one_job(folder, options, "warm", input=a_few(folder, options, 64)), model, AS_OF)
    job = one_job(folder, options, "local")
    seconds, done = clocked(lambda: run_shards(job, model, AS_OF))
    made = Path(done.output).read_bytes()
    again, _ = clocked(lambda: run_shards(job, model, AS_OF))
    return {
        "seconds": seconds, "failed": done.failed, "again_seconds": again,
        "again_equal": int(Path(done.output).read_bytes() == made),
    }  # fmt: skip


def on_ray_workers(folder: Path, weights: Path, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the job with one worker and with two, in turns; then with two of which one is killed at work."""
    from pipelines.forecasting.batch import Loaded, run_shards
    from pipelines.windows import ray_cluster

    model = Loaded("scale/1", weights, config)
    expected = (folder / f"local-{AS_OF}.parquet").read_bytes()
    equal, turn = [], count()
    cpu: dict[int, list[float]] = {1: [], 2: []}

    def run(workers: int, tell: Any = lambda part: None) -> None:
        # Another name is another run key: no shard is there from the turn before.
        job = one_job(folder, options, f"ray-{next(turn)}", executor="ray", workers=workers)
        before = cpu_seconds()
        done = run_shards(job, model, AS_OF, tell)
        cpu[workers].append(cpu_seconds() - before)
        equal.append(Path(done.output).read_bytes() == expected)
        Path(done.output).unlink()
        shutil.rmtree(job.work / job.name)

    def start() -> None:
        ray_cluster(2)
        few = one_job(folder, options, "ray-warm", executor="ray", workers=2, input=a_few(folder, options, 64), series_per_shard=4)
        run_shards(few, model, AS_OF)

    start_s, _ = clocked(start)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(2) as adders:
        sides = {"1 worker": partial(run, 1), "2 workers": partial(run, 2)}
        sides |= {"1 adder": partial(adders.map, add, [2], 1), "2 adders": partial(adders.map, add, [1, 1], 1)}
        seconds: dict[str, Any] = report.in_turns(sides, options.rounds)
    counted = {workers: each[1:] for workers, each in cpu.items()}
    killed_s, _ = clocked(lambda: run(2, kill_a_worker()))
    return {**seconds, "cpu": counted, "start_s": start_s, "killed_s": killed_s, "equal": int(all(equal)), "killed_equal": int(equal[-1])}


def add(parts: int) -> int:
    return sum(range(parts * 40_000_000))


def cpu_seconds() -> float:
    """Of this process and all that it has started and that still run."""
    import psutil

    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def kill_a_worker() -> Any:
    """To be called after each shard: the first time it kills a worker that is in the middle of another shard."""
    killed: list[int] = []

    def tell(part: Any) -> None:
        import psutil

        if killed:
            return
        for process in psutil.Process().children(recursive=True):
            if "_shard_or_mistake" in " ".join(process.cmdline()):
                process.kill()
                killed.append(process.pid)
                report.progress(f"killed worker {process.pid} after shard {part.index}")
                return

    return tell


def clocked(work: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


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
