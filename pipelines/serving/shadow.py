"""Another version beside the live one: the same rows, in a process of its own, with its own memories.

It is an ordinary stream worker whose source is the service's history. A challenger runs so for as long as one likes, and its one-step errors
stand beside the champion's on the same rows (`Tally`). A version that is to go live runs so until it has read the last row; then its run
ends, and the service opens its checkpoint: a handover is the end of one worker and the beginning of the next.

Two versions are never in one process: two registered models with code of their own would run the first one's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from connectors.checkpoints import CheckpointStore
from pipelines.serving.history import PARTITION, History, HistoryRow, HistorySource
from pipelines.streaming.dials import Step
from pipelines.streaming.event_time import EventTime, Frequency
from pipelines.streaming.worker import Stop, stream_model, work

# The smaller the batches, the sooner a shadow has ended when it is asked to; large enough to catch up quickly.
SHADOW_ROWS = 512


@dataclass(frozen=True)
class Settings:
    """What the process is started with."""

    model: str
    """`NAME/VERSION`."""
    weights: str
    config: str
    history: str
    checkpoint: str
    tally: str
    grace: int
    conflict: str
    covariates: str | None


@dataclass
class Tally:
    """One step ahead, on the rows that came since the shadow had caught up: what both versions expected, and what came."""

    model: str
    rows: int = 0
    error: float = 0.0
    """Sum of absolute errors of the shadow."""
    live_error: float = 0.0
    """Of the live version, on the same rows."""
    covered: int = 0
    live_covered: int = 0
    behind: int = 0
    """Rows of the history that it has not read yet."""


class _Watch:
    """The shadow's sink: nothing is published, the forecasts are held against the rows that follow."""

    def __init__(self, source: HistorySource, tally: Tally, path: Path, middle: str, warm: int):
        self._source, self._tally, self._path, self._middle, self._warm = source, tally, path, middle, warm
        self._mine: dict[tuple[str, int], tuple[float, float, float]] = {}
        self._theirs: dict[tuple[str, int], tuple[float, float, float]] = {}
        self._polled: deque[tuple[list[HistoryRow], int]] = deque()
        self._saved = 0.0
        self._untold = False

    def rows(self, taken: list[HistoryRow], last: int) -> None:
        """A batch of rows as it was polled; it is judged when this version's forecasts of it are there (`write`)."""
        if taken:
            self._polled.append((taken, last))
        if len(self._theirs) > 1_000_000:  # streams that fell silent
            self._theirs.clear()
            self._mine.clear()

    def _judge(self, forecasts: dict[tuple[str, int], tuple[int, float, float, float]], taken: list[HistoryRow], last: int) -> None:
        for row in taken:
            at = (row.unique_id, row.ds)
            mine, theirs = self._mine.pop(at, None), self._theirs.pop(at, None)
            if mine and theirs and row.y is not None and last > self._warm:
                self._tally.rows += 1
                self._tally.error += abs(row.y - mine[1])
                self._tally.live_error += abs(row.y - theirs[1])
                self._tally.covered += mine[0] <= row.y <= mine[2]
                self._tally.live_covered += theirs[0] <= row.y <= theirs[2]
            if row.next_low is not None and row.next_mid is not None and row.next_high is not None:
                self._theirs[row.unique_id, row.next_ds] = (row.next_low, row.next_mid, row.next_high)
            if at in forecasts:
                ahead, *expected = forecasts[at]
                self._mine[row.unique_id, ahead] = (expected[0], expected[1], expected[2])

    def resume(self, receipt: Any | None) -> None:
        return None

    def write(self, rows: pl.DataFrame) -> None:
        next_row = [rows[c].arr.first() for c in ("ds", "low", self._middle, "high")]
        next_row[0] = next_row[0].to_physical()
        each = zip(rows["unique_id"], rows["origin"].to_physical(), zip(*next_row, strict=True), strict=True)
        forecasts = {(name, origin): expected for name, origin, expected in each if None not in expected}
        if self._polled:  # a batch that a restart works on again was polled by the run before
            self._judge(forecasts, *self._polled.popleft())

    def flush(self) -> Any:
        return None

    def close(self) -> None:
        return None

    def rest(self) -> None:
        """Nothing more has come: what was not told for haste is told now."""
        if self._untold:
            self.save()

    def save(self, step: Step | None = None) -> None:
        now = time.monotonic()
        self._untold = step is not None and now - self._saved < 0.5
        if self._untold:
            return
        self._saved = now
        self._tally.behind = self._source.lag() or 0
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self._tally)))
        os.replace(part, self._path)


class _Nothing:
    def resume(self, receipt: Any | None) -> None:
        return None

    def write(self, rows: pl.DataFrame) -> None:
        return None

    def flush(self) -> Any:
        return None

    def close(self) -> None:
        return None


class _Told(HistorySource):
    """The source, telling the watch of every row before the engine sees it."""

    watch: _Watch

    def poll(self, max_records: int, timeout: float) -> Any:
        batch = super().poll(max_records, timeout)
        self.watch.rows(self.taken, self._seq)
        if not self.taken:
            self.watch.rest()
        return batch


def run(settings: Settings) -> None:
    """Until a signal comes; then every memory is written and the process ends with status 0."""
    from pipelines.forecasting.job import load_forecaster

    model = stream_model(load_forecaster(settings.weights, settings.config), settings.model, settings.covariates)
    policy = EventTime(Frequency.parse(model.frequency), grace=settings.grace, conflict=settings.conflict)
    source = _Told(settings.history)
    middle = f"q{model.quantiles[len(model.quantiles) // 2]:g}"
    source.watch = _Watch(source, Tally(settings.model), Path(settings.tally), middle, warm=source.lag() or 0)
    stop = Stop()
    nothing = _Nothing()
    with stop.on_signals():
        store = CheckpointStore(settings.checkpoint)
        source.watch.save()  # says that the process is up
        try:
            work(
                model, policy, source, store, source.watch, nothing, nothing, batch_rows=SHADOW_ROWS, stop=stop, report=source.watch.save,
            )  # fmt: skip
        finally:
            store.close()
            source.close()


class Shadow:
    """The process, as the service sees it."""

    def __init__(self, settings: Settings, log: Path):
        self.settings = settings
        discard_if_stale(Path(settings.checkpoint), Path(settings.history))
        Path(settings.tally).unlink(missing_ok=True)
        words = [sys.executable, "-m", "pipelines.serving.shadow", json.dumps(asdict(settings))]
        # It must never take the processor from the live version.
        with log.open("ab") as said:
            self._process = subprocess.Popen(words, stdout=said, stderr=said, preexec_fn=lambda: os.nice(10))
        self._store: CheckpointStore | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def position(self) -> int:
        """The last row of the history that its memories have read, or are about to; -1: the process is not up yet."""
        found = _position(Path(self.settings.checkpoint)) if Path(self.settings.tally).exists() else None
        return -1 if found is None else found

    def tally(self) -> Tally | None:
        try:
            return Tally(**json.loads(Path(self.settings.tally).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def end_at(self, seq: int, timeout: float = 20.0) -> bool:
        """Wait until it has taken row `seq`, and end it; True when its checkpoint stands there, whole."""
        deadline = time.monotonic() + timeout
        while self.position() < seq and self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.stop() == 0 and self.position() == seq

    def stop(self, timeout: float = 20.0) -> int:
        """Ask it to end, and wait; returns its exit status."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def discard_if_stale(checkpoint: Path, history: Path) -> None:
    """A run that stands before rows which are gone cannot catch up: its memories are made anew from the rows that are kept."""
    position = _position(checkpoint)
    past = History(history)
    try:
        stale = position is not None and (0 < past.cut >= position or position > past.last)
    finally:
        past.close()
    if stale:
        discard(checkpoint)


def discard(checkpoint: Path) -> None:
    for path in (checkpoint, checkpoint.with_name(checkpoint.name + "-wal"), checkpoint.with_name(checkpoint.name + "-shm")):
        path.unlink(missing_ok=True)


def _position(checkpoint: Path) -> int | None:
    if not checkpoint.is_file():
        return None
    store = CheckpointStore(checkpoint)
    try:
        progress = store.progress()
        return None if progress is None else int(progress.positions.get(PARTITION, 0))
    finally:
        store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A version in the shadow of the live one; started by the service.")
    parser.add_argument("settings", help="JSON")
    run(Settings(**json.loads(parser.parse_args().settings)))
