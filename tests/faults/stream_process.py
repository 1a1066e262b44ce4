"""A worker on the toy model as a process of its own, to be killed."""

import multiprocessing
import os
import resource
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from pipelines.streaming.dials import Step
from pipelines.streaming.event_time import EventTime, Frequency, parse_duration
from pipelines.streaming.worker import Stop, work
from tests.pipelines.toy_memory import toy_model


def start(source: str | Path, folder: Path, *, pause: float = 0.0, largest_file: int = 0) -> BaseProcess:
    """A new process, ready in milliseconds: it is forked from one that has imported everything and done nothing."""
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=main, args=(str(source), folder, pause, largest_file), daemon=True)
    process.start()
    return process


def main(source: str, folder: Path, pause: float, largest_file: int) -> None:
    # What a person would see goes to a file; how the worker ended is the last line.
    sys.stdout = sys.stderr = open(folder / "said.txt", "w", buffering=1)
    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead of the process dying
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    try:
        print(run(source, folder, pause))
    except UserError as error:
        print(error)
        os._exit(2)


def run(source: str, folder: Path, pause: float = 0.0) -> str:
    stop = Stop()

    def report(step: Step) -> None:
        time.sleep(pause)

    with stop.on_signals():
        return work(
            toy_model(),
            EventTime(Frequency.parse("1m"), grace=parse_duration("2m")),
            open_source(source, follow=source.startswith("mqtt://")),
            CheckpointStore(folder / "c.db"),
            open_sink(str(folder / "out.csv")),
            open_sink(str(folder / "alarms.ndjson")),
            open_sink(str(folder / "dead.ndjson")),
            batch_rows=16,
            snapshot_share=5,
            max_resident=20,
            stop=stop,
            report=report,
        ).stopped
