"""Reads classified while they come: a FASTQ stream in, one row a read out, in order, each exactly once.

A batch is journalled before it is worked on and committed with the place in the source and the ends of the outputs in one transaction
(`connectors.checkpoints`). After a crash the outputs are cut back to the last commit, the journalled batch is classified again, and
reading goes on behind it: no read is lost or answered twice. A model answers a read the same whatever came before it, so nothing else
has to be kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from connectors.checkpoints import CheckpointStore
from connectors.sequences import Record
from connectors.streams import open_sink
from connectors.streams.base import DeadLetter, Sink, dead_letter_frame
from connectors.streams.reads import ReadBatch, ReadSource
from pipelines.genomics.answers import AND, answer, load_classifier
from pipelines.genomics.job import model_at, weights_of
from pipelines.streaming.worker import Stop
from titans_core.classifier import Classifier

BATCH_READS = 512
POLL_SECONDS = 0.5


@dataclass
class ReadSummary:
    """What a run did. classes counts predictions; dead counts reads that were refused; all since the checkpoint was made."""

    model: str
    resumed: bool = False
    reads: int = 0
    dead: int = 0
    batches: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str = "end of the source"

    def line(self) -> str:
        found = ", ".join(f"{name} {count}" for name, count in self.classes.items())
        return f"classified {self.reads} reads ({found}); {self.dead} dead letters; {self.seconds:.1f} s; {self.stopped}"


def run(
    source: str, model: str, *, checkpoint: Path, output: str, follow: bool = False, tracking_uri: str | None = None, stop: Stop | None = None
) -> ReadSummary:
    """The job behind `tethys genomics stream`: until the source ends or a signal comes. Raises UserError.

    Dead letters go to NAME.dead.ndjson beside the output, beside the checkpoint when the output is a topic.
    """
    weights, name = weights_of(model_at(model), tracking_uri)
    network = load_classifier(weights)
    with open(weights, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    base = Path(checkpoint if "://" in output else output).with_suffix("")
    for folder in (checkpoint.parent, base.parent):
        folder.mkdir(parents=True, exist_ok=True)
    stop = Stop() if stop is None else stop
    with ExitStack() as stack:
        stack.enter_context(stop.on_signals())
        reads = ReadSource(source, follow=follow)
        stack.callback(reads.close)
        sinks = {"output": open_sink(output), "dead_letters": open_sink(str(base.with_suffix(".dead.ndjson")))}
        for sink in sinks.values():
            stack.callback(sink.close)
        store = CheckpointStore(checkpoint)
        stack.callback(store.close)
        return work(network, name, {"weights": digest, "job": "classify reads"}, reads, store, sinks, stop=stop)


def work(
    model: Classifier,
    name: str,
    settings: dict[str, Any],
    source: ReadSource,
    store: CheckpointStore,
    sinks: dict[str, Sink],
    *,
    batch_reads: int = BATCH_READS,
    stop: Stop | None = None,
    committed: Callable[[int], None] | None = None,
) -> ReadSummary:
    """Classify batch after batch; `committed` is called with the number of each finished batch."""
    begun = time.monotonic()
    stop = Stop() if stop is None else stop
    progress = store.claim(settings)
    for key, sink in sinks.items():
        sink.resume(progress.receipts.get(key))
    if not progress.receipts:
        store.begin({key: sink.flush() for key, sink in sinks.items()})
    waiting = [entry for entry in store.journal() if entry.learnt is None]
    counters: Counter[str] = Counter(progress.counters)
    if progress.positions:
        source.seek(progress.positions)
    summary = ReadSummary(name, resumed=bool(progress.done or waiting))
    number = progress.done + 1
    batch = _unpack(waiting[0].arrivals) if waiting else None
    while True:
        if batch is None:
            if stop:
                summary.stopped = "signal"
                break
            batch = source.poll(batch_reads, POLL_SECONDS)
            if not len(batch):
                if source.ended:
                    break
                batch = None
                continue
            store.accept(number, _pack(batch), source.positions())
        rows = answer(model, [record.sequence for record in batch.records])
        first = counters["reads"] + 1
        sinks["output"].write(
            rows.select(
                pl.int_range(first, first + pl.len(), dtype=pl.Int64).alias("read"),
                pl.Series("id", [record.id for record in batch.records], pl.String),
                pl.all(),
            )
        )
        sinks["dead_letters"].write(dead_letter_frame(batch.dead))
        counters["reads"] += len(batch.records)
        counters["dead"] += len(batch.dead)
        for said in rows["prediction"].drop_nulls():
            counters.update(f"class {each}" for each in (said.split(AND) if model.config.task == "multi" else (said,)) if each)
        receipts = {key: sink.flush() for key, sink in sinks.items()}
        store.commit(number, learnt=b"", receipts=receipts, counters=counters, snapshots={}, keep_from=number + 1)
        if committed is not None:
            committed(number)
        number, batch = number + 1, None
        summary.batches += 1
    summary.reads, summary.dead = counters["reads"], counters["dead"]
    summary.classes = {name: counters[f"class {name}"] for name in model.config.classes}
    summary.seconds = round(time.monotonic() - begun, 3)
    return summary


def _pack(batch: ReadBatch) -> bytes:
    return json.dumps({"reads": [(record.name, record.sequence) for record in batch.records], "dead": batch.dead}).encode()


def _unpack(arrivals: bytes) -> ReadBatch:
    held = json.loads(arrivals)
    return ReadBatch([Record(name, sequence) for name, sequence in held["reads"]], [DeadLetter(*each) for each in held["dead"]])
