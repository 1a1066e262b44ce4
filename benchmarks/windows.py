"""From files to windows: `pipelines.windows` beside bare polars and numpy, and Ray with two workers beside one.

    python benchmarks/windows.py [--data FOLDER] [--rows 2000000] [--partitions 16]

The task of every side: read all files, put each series in order of time, cut a window of 96 rows and the 24 that
follow every 16 rows, and copy them out as float32 batches of 1,024 in order of series and time. The bare side does
just that and trusts the table. Ours also finds the frequency, checks every stamp against the grid and refuses
duplicates. Without --data the files are made from the seed: Parquet partitions, rows in order of time and not of
series, as exports come.

`ray2_over_ray1` compares the reading of the files into a panel, the part that Ray does, on a cluster of two workers
and one, one core each; the windows are views and are cut in the process that trains. `equal` is 1 when all windows of
all sides are the same numbers in the same order.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

Batch = tuple[Any, Any]

LOOK_BACK, HORIZON, STRIDE, BATCH = 96, 24, 16, 1024


def main() -> None:
    parser = report.arguments(
        __doc__.split("\n")[0], data="folder or file of long tables (unique_id, ds, y): .parquet, .csv, .csv.gz"
    )
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows to make when there is no --data")
    parser.add_argument("--partitions", type=int, default=16, help="files to make when there is no --data")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        paths = (
            files_of(options.data)
            if options.data
            else make(Path(folder), options.rows, options.partitions, options.seed)
        )
        report.finish("windows", measure(paths, options), libraries=("numpy", "polars", "ray"))


def measure(paths: list[str], options: argparse.Namespace) -> dict[str, object]:
    import numpy as np

    from pipelines.windows import read_panel, windows

    def ours() -> None:
        for x, target in windows(read_panel(paths), LOOK_BACK, HORIZON, stride=STRIDE).batches(BATCH):
            np.ascontiguousarray(x, dtype=np.float32), np.ascontiguousarray(target, dtype=np.float32)

    def bare() -> None:
        for x, target in bare_batches(paths):
            np.ascontiguousarray(x, dtype=np.float32), np.ascontiguousarray(target, dtype=np.float32)

    panel = read_panel(paths)
    cut = windows(panel, LOOK_BACK, HORIZON, stride=STRIDE)
    rows = int(panel.offsets[-1])
    report.progress(f"{len(paths)} files, {rows} rows, {len(panel)} series, {len(cut)} windows")
    equal = digest(cut.batches(BATCH)) == digest(bare_batches(paths))
    seconds = report.in_turns({"tethys": ours, "polars+numpy": bare}, options.rounds)
    beside = report.ratio(seconds["polars+numpy"], seconds["tethys"])
    ray_seconds, on_ray = on_one_and_two_workers(paths, options.rounds)
    two_over_one = report.ratio(ray_seconds["1 worker"], ray_seconds["2 workers"])
    equal &= on_ray == digest(cut.batches(BATCH))
    return {
        "rows": rows,
        "series": len(panel),
        "files": len(paths),
        "windows": len(cut),
        "look_back": LOOK_BACK,
        "horizon": HORIZON,
        "stride": STRIDE,
        "rows_per_s": rows / statistics.median(seconds["tethys"]),
        "windows_per_s": len(cut) / statistics.median(seconds["tethys"]),
        "polars_rows_per_s": rows / statistics.median(seconds["polars+numpy"]),
        "vs_polars": beside["median"],
        "vs_polars_range": beside,
        "ray1_rows_per_s": rows / statistics.median(ray_seconds["1 worker"]),
        "ray2_rows_per_s": rows / statistics.median(ray_seconds["2 workers"]),
        "ray2_over_ray1": two_over_one["median"],
        "ray2_over_ray1_range": two_over_one,
        "equal": int(equal),
    }


def bare_batches(paths: list[str]) -> Iterator[Batch]:
    """The same batches by polars and numpy alone. A series lies in one file, its rows are regular and whole."""
    import polars as pl
    from numpy.lib.stride_tricks import sliding_window_view

    frames = [
        pl.read_parquet(path) if path.endswith(".parquet") else pl.read_csv(path, try_parse_dates=True)
        for path in paths
    ]
    series = [
        part
        for frame in frames
        for part in frame.sort("unique_id", "ds").partition_by("unique_id", maintain_order=True)
    ]
    for part in sorted(series, key=lambda part: part["unique_id"][0]):
        if len(part) < LOOK_BACK + HORIZON:
            continue
        both = sliding_window_view(part["y"].to_numpy(), LOOK_BACK + HORIZON)[::STRIDE]
        for first in range(0, len(both), BATCH):
            yield both[first : first + BATCH, :LOOK_BACK], both[first : first + BATCH, LOOK_BACK:]


def on_one_and_two_workers(paths: list[str], rounds: int) -> tuple[dict[str, list[float]], tuple[str, str]]:
    """Seconds to read the panel on a cluster of one core and on one of two, in turns, and the digest of the latter's
    windows. Both clusters live side by side, each in a process of its own; only one works at a time.
    """
    spawn = multiprocessing.get_context("spawn")
    clusters = {}
    for workers in (1, 2):
        here, there = spawn.Pipe()
        process = spawn.Process(target=read_when_asked, args=(workers, paths, there))
        process.start()
        digest_there = here.recv()  # each cluster has started, warmed up and is idle before the next one starts
        clusters[f"{workers} worker{'s' * (workers - 1)}"] = (process, here)

    def ask(name: str) -> None:
        clusters[name][1].send("read")
        clusters[name][1].recv()

    seconds = report.in_turns({name: partial(ask, name) for name in clusters}, rounds)
    for process, here in clusters.values():
        here.send("end")
        process.join()
    return seconds, digest_there


def read_when_asked(workers: int, paths: list[str], connection: Connection) -> None:
    """A process with a Ray cluster of its own: sends the digest of the windows, then reads the panel on every word."""
    from pipelines.windows import ray_cluster, read_panel, windows

    ray_cluster(workers)
    for _ in range(2):
        panel = read_panel(paths, executor="ray")
    connection.send(digest(windows(panel, LOOK_BACK, HORIZON, stride=STRIDE).batches(BATCH)))
    while connection.recv() == "read":
        read_panel(paths, executor="ray")
        connection.send("done")


def digest(batches: Iterable[Batch]) -> tuple[str, str]:
    """Of all windows in order, however they are cut into batches; look-backs and targets."""
    x_digest, target_digest = hashlib.blake2b(), hashlib.blake2b()
    for x, target in batches:
        x_digest.update(x.tobytes())
        target_digest.update(target.tobytes())
    return x_digest.hexdigest(), target_digest.hexdigest()


def make(folder: Path, rows: int, files: int, seed: int) -> list[str]:
    """Parquet files with four hourly series each, rows in order of time."""
    import numpy as np
    import polars as pl

    random = np.random.default_rng(seed)
    length = rows // (files * 4)
    hours = pl.datetime_range(datetime(2020, 1, 1), datetime(2100, 1, 1), "1h", eager=True, time_unit="us")[:length]
    paths = []
    for file in range(files):
        names = [f"meter-{file * 4 + i:05}" for i in range(4)]
        table = pl.DataFrame(
            {
                "unique_id": names * length,
                "ds": hours.gather(np.repeat(np.arange(length), 4)),
                "y": random.normal(size=4 * length).cumsum(),
            }
        )
        paths.append(str(folder / f"part-{file:03}.parquet"))
        table.write_parquet(paths[-1])
    return paths


def files_of(data: Path) -> list[str]:
    """The tables in a folder, or the one file."""
    found = (
        sorted(str(p) for pattern in ("*.parquet", "*.csv", "*.csv.gz") for p in data.glob(pattern))
        if data.is_dir()
        else [str(data)]
    )
    if not found or not Path(found[0]).exists():
        raise SystemExit(f"windows: no .parquet, .csv or .csv.gz at {data}")
    return found


if __name__ == "__main__":
    main()
