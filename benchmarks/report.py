"""What every benchmark shares: its arguments, the facts about machine and commit, and the one line that it ends with.

A benchmark shows progress on standard error and prints one JSON line on standard output: `{"benchmark": ...,
"commit": ..., "machine": {...}, "figures": {...}}`. Both sides of a ratio are measured in one run, in turns.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def arguments(description: str, *, data: str | None = None) -> argparse.ArgumentParser:
    """A parser with --seed and --threads, and --data where the benchmark reads data (`data` says which)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--threads", type=int, default=1, help="threads of the numeric libraries")
    if data is not None:
        parser.add_argument("--data", type=Path, metavar="FILE_OR_FOLDER", help=data)
    return parser


def limit_threads(threads: int) -> None:
    """Before torch, numpy or polars are imported: how many threads they may use; idle ones sleep and do not spin."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ[name] = str(threads)


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def in_turns(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round; every round runs all sides, every other round in the opposite order.

    One round before the first is not counted: it pays for imports, caches and the page cache of files.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in sides if turn % 2 == 0 else reversed(sides):
            began = time.perf_counter()
            sides[name]()
            took = time.perf_counter() - began
            if turn:
                seconds[name].append(took)
            progress(f"round {turn}/{rounds}  {name:<12} {took:8.3f} s{'' if turn else '  (not counted)'}")
    return seconds


class Runs:
    """The finished runs of a benchmark that takes hours, a JSON line each in a file that grows: called again, it goes on where it ended.

    path: None keeps nothing. settings: what all runs have in common; a file of other settings is refused. seconds: no run begins so long after
    this object was made, by the clock, and those left out are None.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], seconds: float = float("inf")) -> None:
        self.path, self.settings, self.end = path, dict(settings), time.monotonic() + seconds
        self.kept: dict[tuple[Any, ...], dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in map(json.loads, lines):
            if line["settings"] != self.settings:
                sys.exit(f"{path} holds runs of other settings ({line['settings']}, asked for {self.settings}): name another file")
            self.kept[tuple(line["key"])] = line["run"]

    def __call__(self, key: tuple[Any, ...], work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The run of that key: the one in the file, or a new one that is then added to it."""
        if key in self.kept:
            return self.kept[key]
        if time.monotonic() > self.end:
            return None
        self.kept[key] = run = work()
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps({"key": key, "settings": self.settings, "commit": _commit(), "run": run}) + "\n")
        return run


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """How many times faster `fast` is, from rounds run in turns: the median over rounds, the lowest, the highest."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return {"median": statistics.median(each), "low": min(each), "high": max(each), "rounds": len(each)}


def finish(benchmark: str, figures: Mapping[str, Any], *, libraries: tuple[str, ...] = ()) -> None:
    """Prints the JSON line. `libraries` are those whose versions matter for the figures."""
    document = {"benchmark": benchmark, "commit": _commit(), "machine": _machine(libraries), "figures": figures}
    print(json.dumps(document), flush=True)


def _commit() -> str:
    """The commit of the checkout, with `+` where files differ from it; "unknown" outside a checkout."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _machine(libraries: tuple[str, ...]) -> dict[str, Any]:
    import psutil

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "libraries": {name: importlib.metadata.version(name) for name in libraries},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
