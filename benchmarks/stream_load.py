"""Ten thousand live streams from a broker through one worker, beside River on the same kind of events.

    python benchmarks/stream_load.py [--streams 10000] [--seconds 300]

A Kafka-protocol broker (noida-db, from PyPI; not Apache Kafka), a producer and the worker share this machine. Every
event is answered with 24 steps of quantiles, interval, surprise and anomaly, written durably and committed exactly once;
nothing is sampled or left out. First the worker reads a backlog as fast as it can (`peak_events_per_s`); then events
come at `--load` of that rate for `--seconds`. `p50_ms` and `p99_ms` run from the moment an event was given to the
broker until its forecasts were durable; `dropped` counts events that the producer sent and the worker never took.
`rss_growth` is the resident memory at the end over that after the first quarter.

River's SNARIMAX(p=12, d=1) and HoltWinters (season 24) learn one value and forecast 24 steps, an event at a time, on
200 streams (fewer suit them better), before and after our run; they write nothing and commit nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import Process
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

if TYPE_CHECKING:
    import numpy as np

HORIZON, PARTITIONS, TOPIC = 24, 4, "events"
START = 1_704_067_200  # event times begin here, an hour a row
PARTS_KEPT = 40  # files of forecasts that stay on the disk; older ones are scored and removed


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=10_000, help="live streams")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the load is kept up")
    parser.add_argument("--load", type=float, default=0.7, help="rate of the load as a share of the measured peak")
    parser.add_argument("--river-seconds", type=float, default=10.0, help="how long each River model is timed, twice")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    figures = measure(options)
    report.finish("stream_load", figures, libraries=("torch", "polars", "confluent-kafka", "river"))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from pipelines.forecasting.estimator import TitansForecaster
    from pipelines.forecasting.sample import hourly_load

    torch.set_num_threads(options.threads)
    report.progress("training the forecaster (look-back 96, horizon 24, width 64)")
    fitted = TitansForecaster(horizon=HORIZON, look_back=96, hidden=64, frequency="1h", seed=options.seed).fit(
        hourly_load(series=20, days=120, seed=options.seed)
    )
    rows = 24 * 40
    # The rows that are streamed come from other sites than those it was trained on.
    sites = hourly_load(series=50, days=rows // 24, seed=options.seed + 1)["y"].to_numpy().reshape(50, rows)
    river = [river_rates(sites, options.river_seconds)]
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder)) as broker:
        load = Load(fitted, sites, broker.address, Path(folder), options)
        peak = load.backlog()
        report.progress(f"peak {peak:.0f} events a second; now {options.load:.0%} of it for {options.seconds:.0f} s")
        figures = load.sustained(peak * options.load, options.seconds)
    river.append(river_rates(sites, options.river_seconds))
    figures["peak_events_per_s"] = peak
    for name in ("snarimax", "holtwinters"):
        rate = sum(turn[name] for turn in river) / len(river)
        figures[f"river_{name}_events_per_s"] = rate
        figures[f"vs_river_{name}"] = figures["events_per_s"] / rate
    figures["model"] = {
        "weights": sum(p.numel() for p in fitted.forecaster_.parameters()),
        "width": fitted.hidden,
        "look_back": fitted.look_back,
        "horizon": HORIZON,
    }
    return figures


class Broker:
    """noida-db on a free loopback port."""

    def __init__(self, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._folder = folder / "broker"
        self._folder.mkdir()
        program = Path(sys.executable).parent / "noida-db"
        self._command = [program, "start", "--data-dir", self._folder, "--only", "kafka", "--kafka-port", str(port)]

    def __enter__(self) -> Broker:
        from confluent_kafka.admin import AdminClient, NewTopic

        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet, start_new_session=True)
        host, port = self.address.split(":")
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    break
            time.sleep(0.1)
        admin = AdminClient({"bootstrap.servers": self.address})
        for future in admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
            future.result(30)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()


def produce(address: str, sites: np.ndarray, streams: int, first: int, count: int, rate: float, done: str) -> None:
    """Send events `first` ... `first + count`: row n // streams of stream n % streams; `rate` a second, 0: at once.
    When the time is up or all are sent, `done` holds how many were."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})
    begun, sent = time.monotonic(), 0
    while sent < count:
        due = count if not rate else min(count, int((time.monotonic() - begun) * rate))
        for n in range(first + sent, first + due):
            row, stream = divmod(n, streams)
            value = sites[stream % len(sites), (row + stream // len(sites)) % sites.shape[1]]
            producer.produce(
                TOPIC,
                b'{"unique_id": "s%d", "ds": %d, "y": %.4f}' % (stream, START + 3600 * row, value),
                partition=stream % PARTITIONS,
            )
            if not n % 2000:
                producer.poll(0)
        sent = max(sent, due)
        producer.poll(0)
        time.sleep(0.01)
    producer.flush(60)
    Path(done).write_text(str(sent))


class Load:
    """One worker on the topic; it is stopped and started again between the phases, as it would be in service."""

    def __init__(self, fitted: Any, sites: np.ndarray, address: str, folder: Path, options: argparse.Namespace):
        from pipelines.streaming.event_time import EventTime, Frequency
        from pipelines.streaming.worker import stream_model

        self.model = stream_model(fitted, "load/1")
        self.policy = EventTime(Frequency.parse("1h"))
        self.sites, self.address, self.folder, self.options = sites, address, folder, options
        self.produced = 0

    def _send(self, count: int, rate: float) -> tuple[Process, Path]:
        done = self.folder / f"sent-{self.produced}"
        arguments = (self.address, self.sites, self.options.streams, self.produced, count, rate, str(done))
        process = Process(target=produce, args=arguments, daemon=True)
        process.start()
        self.produced += count
        return process, done

    def _work(self, stop: Any, report_: Any, max_events: int | None) -> Any:
        from connectors.checkpoints import CheckpointStore
        from connectors.streams import FileSink, ParquetSink, open_source
        from pipelines.streaming.worker import work

        source = open_source(f"kafka://{self.address}/{TOPIC}", follow=True)
        store = CheckpointStore(self.folder / "checkpoint.db")
        output = ParquetSink(self.folder / "out.parquet")
        alarms, dead = FileSink(self.folder / "alarms.ndjson"), FileSink(self.folder / "dead.ndjson")
        try:
            limit = max(16_384, self.options.streams)
            return work(
                self.model,
                self.policy,
                source,
                store,
                output,
                alarms,
                dead,
                stop=stop,
                report=report_,
                max_events=max_events,
                max_resident=limit,
            )
        finally:
            for thing in (source, store, output, alarms, dead):
                thing.close()

    def backlog(self) -> float:
        """Events a second with all events waiting; the first row of every stream (their start) is not timed."""
        streams = self.options.streams
        count = 6 * streams
        process, _ = self._send(count, 0.0)
        process.join()
        times: list[tuple[float, int]] = []

        def note(step: Any) -> None:
            times.append((time.monotonic(), step.counters["received"]))

        self._work(None, note, count)
        begun = next(i for i, (_, received) in enumerate(times) if received >= streams)
        return (times[-1][1] - times[begun][1]) / (times[-1][0] - times[begun][0])

    def sustained(self, rate: float, seconds: float) -> dict[str, Any]:
        import psutil

        from pipelines.streaming.worker import Stop

        before, stop, this = self.produced, Stop(), psutil.Process()
        process, _ = self._send(int(rate * seconds), rate)
        memory: list[tuple[float, int]] = []
        times: list[tuple[float, int]] = []
        lags: list[int] = []
        latencies, path = Latencies(), self.folder / "out.parquet"

        def note(step: Any) -> None:
            now = time.monotonic()
            times.append((now, step.counters["received"]))
            lags.append(step.lag or 0)
            latencies.add(step.latencies_ms)
            for part in sorted(path.glob("part-*.parquet"))[:-PARTS_KEPT] if len(times) % 20 == 0 else ():
                part.unlink()
            if not memory or now - memory[-1][0] > 1.0:
                memory.append((now, this.memory_info().rss))
                if len(memory) % 20 == 0:
                    report.progress(f"{step.counters['received']} events, {lags[-1]} waiting, {memory[-1][1] >> 20} MiB")
            if step.counters["received"] >= self.produced:
                stop.set()

        summary = self._work(stop, note, None)
        process.join()
        quarter = memory[len(memory) // 4][1]
        took = times[-1][0] - times[0][0]
        return {
            "events_per_s": (times[-1][1] - times[0][1]) / took,
            "p50_ms": latencies.percentile(0.5),
            "p99_ms": latencies.percentile(0.99),
            "rss_growth": memory[-1][1] / quarter,
            "rss_mib": memory[-1][1] / 2**20,
            "streams": summary.streams,
            "events": summary.events,
            "seconds": took,
            "dropped": self.produced - before - summary.events,
            "largest_lag": max(lags),
            "checkpoint_bytes_per_s": summary.checkpoint_bytes_per_s,
            "restart_s": summary.restart_s,
            "coverage": summary.counters["covered"] / max(1, summary.counters["judged"]),
            **scores(path, self.sites),
        }


class Latencies:
    """A histogram with steps of 1.2 %: however long the run, its memory stays the same."""

    def __init__(self) -> None:
        import numpy as np

        self._edges = np.geomspace(0.1, 1e6, 1351)
        self._counts = np.zeros(1352, dtype=np.int64)

    def add(self, milliseconds: list[float]) -> None:
        import numpy as np

        np.add.at(self._counts, np.searchsorted(self._edges, milliseconds), 1)

    def percentile(self, share: float) -> float:
        import numpy as np

        place = int(np.searchsorted(np.cumsum(self._counts), share * self._counts.sum()))
        return float(self._edges[min(place, len(self._edges) - 1)])


def scores(path: Path, sites: np.ndarray) -> dict[str, float]:
    """Mean absolute error of the median beside last value, over the forecasts in the newest files (the truth is known
    to the benchmark, never to the worker)."""
    import numpy as np
    import polars as pl

    rows = pl.read_parquet(sorted(path.glob("part-*.parquet"))[-PARTS_KEPT:])
    stream = rows["unique_id"].str.slice(1).cast(pl.Int64).to_numpy()
    at = (rows["origin"].cast(pl.Int64).to_numpy() // 1_000_000 - START) // 3600 + stream // len(sites)
    last = sites[stream % len(sites), at]
    truth = sites[stream % len(sites), at + rows["step"].to_numpy()]
    ours, naive = np.abs(rows["q0.5"].to_numpy() - truth).mean(), np.abs(last - truth).mean()
    return {"mae": float(ours), "mae_last_value": float(naive), "mae_ratio": float(ours / naive), "scored": len(rows)}


def river_rates(sites: np.ndarray, seconds: float) -> dict[str, float]:
    """Events a second of River's models: learn one value, forecast 24 steps."""
    from river import time_series

    models = {
        "snarimax": lambda: time_series.SNARIMAX(p=12, d=1, q=0),
        "holtwinters": lambda: time_series.HoltWinters(alpha=0.3, beta=0.1, gamma=0.6, seasonality=24),
    }
    rates = {}
    streams, warm = 200, 48  # HoltWinters needs two seasons before it forecasts
    for name, make in models.items():
        each = [make() for _ in range(streams)]
        for row in range(warm):
            for s, model in enumerate(each):
                model.learn_one(float(sites[s % len(sites), row]))
        begun, count, row = time.monotonic(), 0, warm
        while time.monotonic() - begun < seconds:
            for s, model in enumerate(each):
                model.learn_one(float(sites[s % len(sites), row % sites.shape[1]]))
                model.forecast(horizon=HORIZON)
            count += streams
            row += 1
        rates[name] = count / (time.monotonic() - begun)
        report.progress(f"river {name}: {rates[name]:.0f} events a second")
    return rates


if __name__ == "__main__":
    main()
