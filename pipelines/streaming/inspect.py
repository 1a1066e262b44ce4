"""Looking into a checkpoint and mending it, while no worker runs: list, show, reset, export."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from connectors.checkpoints import CheckpointStore, Progress
from connectors.errors import UserError
from pipelines.streaming.event_time import EPOCH, Clock
from pipelines.streaming.slots import open_snapshot
from pipelines.streaming.workers import checkpoints


@dataclass(frozen=True)
class Listing:
    """A run and its streams."""

    model: str
    batches: int
    counters: dict[str, int]
    positions: dict[str, Any]
    leaderboard: list[dict[str, Any]]
    """A row for each stream: unique_id, last row, waiting events, bytes of its memory."""


def streams(checkpoint: str | Path) -> Listing:
    """Every stream of a run, as of its snapshot."""
    rows: dict[str, dict[str, Any]] = {}
    counters: Counter[str] = Counter()
    positions: dict[str, Any] = {}
    batches = 0
    with _opened(checkpoint) as stores:
        for store, progress in stores:
            counters.update(progress.counters)
            positions.update(progress.positions)
            batches += progress.done
            for name, _, _ in store.streams():
                row = _row(store, name, progress.settings)
                # One that has read a history stands with all workers until its first event comes to one of them.
                if name not in rows or str(row["last"]) > str(rows[name]["last"]):
                    rows[name] = row
        model = str(stores[0][1].settings.get("model"))
    return Listing(model, batches, dict(counters), positions, [rows[name] for name in sorted(rows)])


def show(checkpoint: str | Path, unique_id: str) -> dict[str, Any]:
    """One stream: its clock, and the size of every tensor of its memory."""
    with _holding(checkpoint, unique_id) as (store, progress):
        row = _row(store, unique_id, progress.settings)
        clock, _ = open_snapshot(_read(store, unique_id)[1])
        counts = str(progress.settings.get("freq", "")).endswith("i")
        return {
            **row,
            "newest": _time(clock.newest, counts),
            "waiting_events": [{"ds": _time(ds, counts), "y": y, "event_id": event} for ds, y, event in clock.buffer],
            "remembered": len(clock.recent),
            "memory": {path: f"{dtype} {shape}" for path, dtype, shape in progress.settings["state"]},
        }


def reset(checkpoint: str | Path, unique_ids: Sequence[str]) -> int:
    """Forget streams: each begins anew with its next event. Returns how many; UserError for a name that is not there."""
    with _opened(checkpoint) as stores:
        holding = [store for name in unique_ids for store, _ in _check(stores, checkpoint, name)]
        for store in dict.fromkeys(holding):
            store.forget(unique_ids)
    return len(set(unique_ids))


def export(checkpoint: str | Path, unique_id: str, path: str | Path) -> Path:
    """One stream's memory as a safetensors file (tensors by their path in the state, one row each)."""
    import numpy as np
    import safetensors.numpy

    with _holding(checkpoint, unique_id) as (store, progress):
        batch, data = _read(store, unique_id)
    clock, row = open_snapshot(data)
    tensors, at = {}, 0
    for name, dtype, shape in progress.settings["state"]:
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        tensors[name] = np.frombuffer(row[at : at + size], dtype=kind).reshape(1, *shape)
        at += size
    about = {"unique_id": unique_id, "model": progress.settings["model"], "batch": batch, "clock": clock.dump()}
    target = Path(path)
    if not target.parent.is_dir():
        raise UserError(f"cannot write '{target}': the folder '{target.parent}' does not exist")
    if target.is_dir():
        raise UserError(f"cannot write '{target}': it is a folder, name a file")
    temporary = target.with_name(f".{target.name}.part")
    temporary.write_bytes(safetensors.numpy.save(tensors, metadata={"tethys_stream": json.dumps(about)}))
    os.replace(temporary, target)
    return target


@contextmanager
def _opened(checkpoint: str | Path) -> Iterator[list[tuple[CheckpointStore, Progress]]]:
    """The store of one worker, or those of several."""
    paths = [path for path in checkpoints(checkpoint) if path.is_file()]
    if not paths:
        raise UserError(f"there is no checkpoint '{checkpoint}': name the file given to `tethys stream --checkpoint`")
    with ExitStack() as stack:
        found = []
        for path in paths:
            store = CheckpointStore(path)
            stack.callback(store.close)
            progress = store.progress()
            if progress is not None:
                found.append((store, progress))
        if not found:
            raise UserError(f"the checkpoint '{checkpoint}' is empty: no worker has used it yet")
        yield found


@contextmanager
def _holding(checkpoint: str | Path, unique_id: str) -> Iterator[tuple[CheckpointStore, Progress]]:
    """The store that has the stream; the one where it got furthest, should several have it."""
    with _opened(checkpoint) as stores:
        yield max(_check(stores, checkpoint, unique_id), key=lambda one: open_snapshot(_read(one[0], unique_id)[1])[0].last or 0)


def _check(stores: Sequence[tuple[CheckpointStore, Progress]], checkpoint: str | Path, unique_id: str) -> list[tuple[CheckpointStore, Progress]]:
    """Those that hold the stream; UserError when none does."""
    found = [one for one in stores if one[0].read(unique_id) is not None]
    if not found:
        names = sorted({name for store, _ in stores for name, _, _ in store.streams()})
        some = ", ".join(f"'{name}'" for name in names[:5]) + (" ..." if len(names) > 5 else "")
        raise UserError(f"'{checkpoint}' holds no stream '{unique_id}'; it holds {len(names)}: {some}")
    return found


def _read(store: CheckpointStore, unique_id: str) -> tuple[int, bytes]:
    found = store.read(unique_id)
    assert found is not None
    return found


def _row(store: CheckpointStore, unique_id: str, settings: dict[str, Any]) -> dict[str, Any]:
    batch, data = _read(store, unique_id)
    clock: Clock = open_snapshot(data)[0]
    counts = str(settings.get("freq", "")).endswith("i")
    return {
        "unique_id": unique_id,
        "last": _time(clock.last, counts),
        "waiting": len(clock.buffer),
        "as_of_batch": batch,
        "bytes": len(data),
    }


def _time(ds: int | None, counts: bool) -> str | int | None:
    if ds is None or counts:
        return ds
    moment: datetime = EPOCH + timedelta(microseconds=ds)
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
