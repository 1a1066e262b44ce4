"""Ten thousand live streams from a broker, beside River on the same kind of events.

    python benchmarks/stream_load.py [--streams 10000] [--seconds 300] [--workers 2]

A Kafka-protocol broker (noida-db, from PyPI; not Apache Kafka), a producer and the workers share this machine; each
worker takes its share of the topic's partitions and has its own checkpoint. Every event is answered with 24 steps of
quantiles, interval, surprise and anomaly (`forecast`: every), written durably and committed exactly once; nothing is
sampled or left out. Three phases, the workers started again from their checkpoints for each:

1. a backlog is read as fast as they can: `peak_events_per_s`;
2. shorter trials look for a rate they can hold: shares of that peak from high to low, until the 99th percentile is
   within `--within` milliseconds (`trials`; `--rate` skips them);
3. events come at that rate (`offered_events_per_s`) for `--seconds`: all other figures are of this phase.

`p50_ms` and `p99_ms` run from the moment an event was given to the broker until its forecasts were durable; `step_p50_ms`
and `step_p99_ms` are of one batch through memories and monitors, without source and sinks. `dropped` counts events that
were sent and never taken. `rss_growth` is the resident memory of the workers at the end over that after the first quarter.

River's SNARIMAX(p=12, d=1) and HoltWinters (season 24) learn one value and forecast 24 steps, an event at a time, on
200 streams (fewer suit them better), before and after our run; they write nothing and commit nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

if TYPE_CHECKING:
    import numpy as np

HORIZON, PARTITIONS, TOPIC = 24, 4, "events"
START = 1_704_067_200  # event times begin here, an hour a row
# Spawned, not forked: the broker's client and polars keep threads.
CONTEXT = multiprocessing.get_context("spawn")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
PARTS_KEPT = 40  # files of forecasts that stay whole and are scored; older ones give their space back


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=10_000, help="live streams")
    parser.add_argument("--workers", type=int, default=2, choices=(1, 2, 4), help="worker processes")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the load is kept up")
    parser.add_argument("--rate", type=float, help="events a second that are offered; looked for when not given")
    parser.add_argument("--within", type=float, default=200.0, help="milliseconds that 99 of 100 events of a trial may take")
    parser.add_argument("--trial-seconds", type=float, default=15.0, help="how long each trial of a rate takes")
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
    rows = 24 * 42  # whole weeks: they come again and again
    # The rows that are streamed come from other sites than those it was trained on.
    sites = hourly_load(series=50, days=rows // 24, seed=options.seed + 1)["y"].to_numpy().reshape(50, rows)
    river = [river_rates(sites, options.river_seconds)]
    with tempfile.TemporaryDirectory() as temporary, Broker(Path(temporary)) as broker:
        load = Load(fitted, sites, broker.address, Path(temporary), options)
        peak = load.backlog()
        report.progress(f"peak {peak:.0f} events a second")
        rate, trials = (options.rate, []) if options.rate else load.find_rate(peak)
        report.progress(f"now {rate:.0f} events a second for {options.seconds:.0f} s")
        figures = load.sustained(rate, options.seconds)
    figures |= {"forecast": "every", "offered_events_per_s": rate, "trials": trials}
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


def produce(address: str, sites: np.ndarray, streams: int, first: int, count: int, rate: float) -> None:
    """Send events `first` ... `first + count`: row n // streams of stream n % streams; `rate` a second, 0: at once."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})
    values, length = sites.tolist(), sites.shape[1]
    begun, sent = time.monotonic(), 0
    while sent < count:
        due = min(count, sent + 10_000 if not rate else int((time.monotonic() - begun) * rate))
        batches: list[list[dict[str, bytes]]] = [[] for _ in range(PARTITIONS)]
        for n in range(first + sent, first + due):
            row, stream = divmod(n, streams)
            value = values[stream % len(values)][(row + stream // len(values)) % length]
            batches[stream % PARTITIONS].append({"value": b'{"unique_id": "s%d", "ds": %d, "y": %.4f}' % (stream, START + 3600 * row, value)})
        for partition, batch in enumerate(batches):
            if batch and producer.produce_batch(TOPIC, batch, partition=partition) != len(batch):
                raise SystemExit("the producer's queue is full: the broker cannot take so many events a second")
        sent = max(sent, due)
        producer.poll(0)
        if rate:
            time.sleep(0.01)
        while len(producer) > 500_000:
            producer.poll(0.1)
    producer.flush(60)


class Load:
    """The workers on the topic, as processes; they are started again between the phases, as they would be in service."""

    def __init__(self, fitted: Any, sites: np.ndarray, address: str, folder: Path, options: argparse.Namespace):
        self.sites, self.address, self.folder, self.options = sites, address, folder, options
        self.produced = 0
        self._emptied = [0] * options.workers
        fitted.save(folder / "model")

    def _run(self, count: int, rate: float) -> list[dict[str, Any]]:
        """Send `count` events and let the workers take them all; what each of them noted."""
        streams, workers = self.options.streams, self.options.workers
        first, self.produced = self.produced, self.produced + count
        sender = CONTEXT.Process(target=produce, args=(self.address, self.sites, streams, first, count, rate), daemon=True)
        if not rate:  # a backlog: all of it is there before anyone reads
            sender.start()
            sender.join()
        processes = []
        for worker in range(workers):
            partitions = list(range(worker, PARTITIONS, workers))
            share = sum(n % streams % PARTITIONS in partitions for n in range(first, first + count))
            where = self.folder / f"worker-{worker}"
            where.mkdir(exist_ok=True)
            (where / "ready").unlink(missing_ok=True)
            arguments = (self.address, partitions, self.folder / "model", where, share, self.options)
            processes.append(CONTEXT.Process(target=serve, args=arguments, daemon=True))
            processes[-1].start()
        if rate:
            for worker in range(workers):  # the clock starts when all of them listen
                while not (self.folder / f"worker-{worker}/ready").exists():
                    time.sleep(0.05)
            sender.start()
        for process in processes:
            while process.is_alive():
                process.join(1.0)
                if rate:
                    self._make_room()
            if process.exitcode:
                raise SystemExit(f"a worker ended with status {process.exitcode}")
        if rate:
            sender.join()
        return [json.loads((self.folder / f"worker-{w}/notes.json").read_text()) for w in range(workers)]

    def _make_room(self) -> None:
        """Older forecasts are emptied; their names stay, which the worker looks for at its restart."""
        for worker in range(self.options.workers):
            parts = self.folder / f"worker-{worker}/out.parquet"
            while (parts / f"part-{self._emptied[worker] + PARTS_KEPT:010d}.parquet").exists():
                os.truncate(parts / f"part-{self._emptied[worker]:010d}.parquet", 0)
                self._emptied[worker] += 1

    def backlog(self) -> float:
        """Events a second with all events waiting; the first row of every stream (their start) is not timed."""
        notes = self._run(6 * self.options.streams, 0.0)
        return sum(note["events_after_start"] / note["seconds_after_start"] for note in notes)

    def find_rate(self, peak: float) -> tuple[float, list[dict[str, float]]]:
        """The highest of some shares of the peak that is held within `--within`, and all that were tried."""
        trials: list[dict[str, float]] = []
        for share in SHARES:
            found = self.sustained(share * peak, self.options.trial_seconds)
            trials.append({"offered_events_per_s": share * peak} | {name: found[name] for name in ("events_per_s", "p50_ms", "p99_ms")})
            report.progress(f"{share:.0%} of the peak: " + ", ".join(f"{name} {value:.0f}" for name, value in trials[-1].items()))
            if found["p99_ms"] <= self.options.within and found["events_per_s"] >= 0.98 * share * peak:
                break
        return share * peak, trials

    def sustained(self, rate: float, seconds: float) -> dict[str, Any]:
        import numpy as np

        notes = self._run(int(rate * seconds), rate)
        latencies, steps = Latencies(), Latencies()
        latencies.counts = np.sum([note["latencies"] for note in notes], axis=0)
        steps.counts = np.sum([note["steps"] for note in notes], axis=0)
        events = sum(note["events"] for note in notes)
        took = max(note["ended"] for note in notes) - min(note["begun"] for note in notes)
        paths = [self.folder / f"worker-{w}/out.parquet" for w in range(self.options.workers)]
        return {
            "events_per_s": events / took,
            "p50_ms": latencies.percentile(0.5),
            "p99_ms": latencies.percentile(0.99),
            "step_p50_ms": steps.percentile(0.5),
            "step_p99_ms": steps.percentile(0.99),
            "batches": int(steps.counts.sum()),
            "rss_growth": sum(n["memory"][-1] for n in notes) / sum(n["memory"][len(n["memory"]) // 4] for n in notes),
            "rss_mib": sum(n["memory"][-1] for n in notes) / 2**20,
            "streams": sum(note["streams"] for note in notes),
            "workers": self.options.workers,
            "events": events,
            "seconds": took,
            "dropped": int(rate * seconds) - events,
            "largest_lag": max(note["largest_lag"] for note in notes),
            "checkpoint_bytes_per_s": sum(note["checkpoint_bytes_per_s"] for note in notes),
            "restart_s": max(note["restart_s"] for note in notes),
            "coverage": sum(note["covered"] for note in notes) / sum(note["judged"] for note in notes),
            **scores(paths, self.sites),
        }


def serve(address: str, partitions: list[int], model: Path, folder: Path, events: int, options: argparse.Namespace) -> None:
    """One worker: takes `events` events of its partitions and writes what it noted to `folder`/notes.json."""
    import psutil
    import torch

    from connectors.checkpoints import CheckpointStore
    from connectors.streams import FileSink, ParquetSink, open_source
    from pipelines.forecasting.estimator import TitansForecaster
    from pipelines.streaming.event_time import EventTime, Frequency
    from pipelines.streaming.worker import Stop, stream_model, work

    torch.set_num_threads(options.threads)
    numbers = ",".join(map(str, partitions))
    source = open_source(f"kafka://{address}/{TOPIC}?partitions={numbers}", follow=True)
    store = CheckpointStore(folder / "checkpoint.db")
    output = ParquetSink(folder / "out.parquet")
    alarms, dead = FileSink(folder / "alarms.ndjson"), FileSink(folder / "dead.ndjson")
    stop, this, latencies, steps = Stop(), psutil.Process(), Latencies(), Latencies()
    times: list[tuple[float, int]] = []
    memory: list[int] = []
    lags, told, listened = [0], [0.0], list[bool]()
    progress = store.progress()
    before = progress.counters["received"] if progress else 0

    def note(step: Any) -> None:
        now = time.monotonic()
        taken = step.counters["received"] - before
        times.append((now, taken))
        latencies.add(step.latencies_ms)
        steps.add(step.steps_ms)
        lags[0] = max(lags[0], step.lag or 0)
        if now - told[0] > 1.0:
            told[0] = now
            memory.append(this.memory_info().rss)
            if len(memory) % 20 == 0:
                report.progress(f"worker {partitions}: {taken} events, {step.lag} waiting, {memory[-1] >> 20} MiB")
        if taken >= events:
            stop.set()

    def listening(_: Any) -> None:
        """Called between batches, the first time when the worker is about to read."""
        if not listened:
            listened.append(True)
            (folder / "ready").touch()

    fitted = TitansForecaster.load(model)
    limit = max(16_384, options.streams)
    summary = work(
        stream_model(fitted, "load/1"),
        EventTime(Frequency.parse("1h")),
        source,
        store,
        output,
        alarms,
        dead,
        stop=stop,
        report=note,
        answer=listening,
        max_resident=limit,
    )
    for thing in (source, store, output, alarms, dead):
        thing.close()
    start = next(i for i, (_, taken) in enumerate(times) if taken >= min(events, summary.streams))
    notes = {
        "events": summary.events,
        "begun": times[0][0],
        "ended": times[-1][0],
        "events_after_start": times[-1][1] - times[start][1],
        "seconds_after_start": times[-1][0] - times[start][0],
        "latencies": latencies.counts.tolist(),
        "steps": steps.counts.tolist(),
        "memory": memory,
        "largest_lag": lags[0],
        "streams": summary.streams,
        "checkpoint_bytes_per_s": summary.checkpoint_bytes_per_s,
        "restart_s": summary.restart_s,
        "judged": summary.counters["judged"],
        "covered": summary.counters["covered"],
    }
    (folder / "notes.json").write_text(json.dumps(notes))


class Latencies:
    """A histogram with steps of 1.2 %: however long the run, its memory stays the same."""

    def __init__(self) -> None:
        import numpy as np

        self._edges = np.geomspace(0.1, 1e6, 1351)
        self.counts = np.zeros(1352, dtype=np.int64)

    def add(self, milliseconds: list[float]) -> None:
        import numpy as np

        np.add.at(self.counts, np.searchsorted(self._edges, milliseconds), 1)

    def percentile(self, share: float) -> float:
        import numpy as np

        place = int(np.searchsorted(np.cumsum(self.counts), share * self.counts.sum()))
        return float(self._edges[min(place, len(self._edges) - 1)])


def scores(paths: list[Path], sites: np.ndarray) -> dict[str, float]:
    """Mean absolute error of the median beside last value, over the forecasts in the newest files (the truth is known
    to the benchmark, never to the worker)."""
    import numpy as np
    import polars as pl

    rows = pl.read_parquet([part for path in paths for part in sorted(path.glob("part-*.parquet"))[-PARTS_KEPT:]])
    stream = rows["unique_id"].str.slice(1).cast(pl.Int64).to_numpy()
    first = (rows["origin"].cast(pl.Int64).to_numpy() // 1_000_000 - START) // 3600 + stream // len(sites)
    site, steps = (stream % len(sites))[:, None], rows["step"].to_numpy()
    last = sites[site, first[:, None] % sites.shape[1]]
    truth = sites[site, (first[:, None] + steps) % sites.shape[1]]
    ours, naive = np.abs(rows["q0.5"].to_numpy() - truth).mean(), np.abs(last - truth).mean()
    return {"mae": float(ours), "mae_last_value": float(naive), "mae_ratio": float(ours / naive), "scored": truth.size}


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
