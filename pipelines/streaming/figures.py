"""What is worth keeping of a live run: a point every so often, of everything since the last one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from pipelines.streaming.dials import Step

EVERY_SECONDS = 15.0
# What became of lines that taught nothing, as a person would say it.
LOST = {
    "malformed": "could not be read",
    "oversize": "were too long",
    "late": "came late (a longer --grace waits for such rows)",
    "quarantined": "were too far ahead of their stream",
    "off_grid": "stood between two steps of the model's frequency",
    "conflict": "had another value for a known time",
    "duplicate": "were repeats",
    "missing": "had no value",
}
TROUBLE = ("late", "conflict", "quarantined", "off_grid", "malformed", "oversize", "duplicate")


def hint(counters: Mapping[str, int], events: int, dead_letters: str) -> str | None:
    """Why a run that taught or told nothing did so; None: there is nothing to say. counters: of the stream; events: of the run."""
    count = Counter(counters)
    lacking = count["without_covariates"]
    if not count["received"]:
        return "the source held no rows"
    if not events:
        return "there was nothing new since the last run"
    lost = {words: count[verdict] for verdict, words in LOST.items() if count[verdict]}
    why = ", ".join(f"{many} {words}" for words, many in lost.items())
    if not count["accepted"] + count["corrected"]:
        return f"nothing was learnt from {count['received']} rows: {why or 'they have no value, or wait for later ones'}; see {dead_letters}"
    if 2 * sum(lost.values()) > count["received"]:
        return f"of {count['received']} rows most taught nothing: {why}; see {dead_letters}"
    if lacking:
        return f"{lacking} of {count['parsed']} rows lacked a covariate: the table of --covariates has no such rows; write them before they come"
    if not count["forecasts"]:
        return "no row was due for a forecast: --forecast says which rows are answered"
    if not count["judged"]:
        return "no forecast was judged yet: that takes two rows of one stream, one after the other"
    return None


class Figures:
    """Called with every `Step`; `log(metrics, step)` takes a point, `step` being the lines received up to then. Leaving logs the last one."""

    def __init__(self, log: Callable[[dict[str, float], int], None], *, every: float = EVERY_SECONDS):
        self._log, self._every = log, every
        self._before: Counter[str] = Counter()
        self._latencies: list[np.ndarray] = []
        self._surprise: list[float] = []
        self._newest: Step | None = None
        self._last = time.monotonic()

    def __enter__(self) -> Figures:
        return self

    def __exit__(self, *_: object) -> None:
        if self._newest is not None and self._latencies:
            self._gather(self._newest, time.monotonic())

    def __call__(self, step: Step) -> None:
        self._latencies.append(step.latencies_ms)
        self._surprise.append(step.surprise)
        self._newest = step
        now = time.monotonic()
        if now - self._last >= self._every:
            self._gather(step, now)

    def _gather(self, step: Step, now: float) -> None:
        new = step.counters - self._before
        metrics: dict[str, float] = {
            "events_per_s": new["received"] / (now - self._last),
            "alarms": new["alarms"],
            "refused": sum(new[name] for name in TROUBLE),
            "streams": step.streams,
            "checkpoint_bytes": step.checkpoint_bytes,
        }
        waited = np.concatenate(self._latencies)
        if len(waited):
            metrics |= dict(zip(("latency_p50_ms", "latency_p99_ms"), np.percentile(waited, [50, 99]).tolist(), strict=True))
        known = [value for value in self._surprise if value == value]
        if known:
            metrics["surprise"] = sum(known) / len(known)
        if new["judged"]:
            metrics["coverage"] = new["covered"] / new["judged"]
        if step.lag is not None:
            metrics["lag"] = step.lag
        self._before, self._last = Counter(step.counters), now
        self._latencies, self._surprise = [], []
        self._log(metrics, step.counters["received"])
