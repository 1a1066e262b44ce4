"""Looking into a checkpoint and mending it, while no worker runs: list, show, reset, export."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from pipelines.streaming.event_time import EPOCH, Clock
from pipelines.streaming.slots import open_snapshot


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
    store = _open(checkpoint)
    try:
        progress = store.progress()
        assert progress is not None
        rows = [_row(store, name, progress.settings) for name, _, _ in store.streams()]
        return Listing(str(progress.settings.get("model")), progress.done, progress.counters, progress.positions, rows)
    finally:
        store.close()


def show(checkpoint: str | Path, unique_id: str) -> dict[str, Any]:
    """One stream: its clock, and the size of every tensor of its memory."""
    store = _open(checkpoint)
    try:
        progress = store.progress()
        assert progress is not None
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
    finally:
        store.close()


def reset(checkpoint: str | Path, unique_ids: Sequence[str]) -> int:
    """Forget streams: each begins anew with its next event. Returns how many; UserError for a name that is not there."""
    store = _open(checkpoint)
    try:
        for name in unique_ids:
            _read(store, name)
        return store.forget(unique_ids)
    finally:
        store.close()


def export(checkpoint: str | Path, unique_id: str, path: str | Path) -> Path:
    """One stream's memory as a safetensors file (tensors by their path in the state, one row each)."""
    import numpy as np
    import safetensors.numpy

    store = _open(checkpoint)
    try:
        progress = store.progress()
        assert progress is not None
        batch, data = _read(store, unique_id)
    finally:
        store.close()
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


def _open(checkpoint: str | Path) -> CheckpointStore:
    if not Path(checkpoint).is_file():
        raise UserError(f"there is no checkpoint '{checkpoint}': name the file given to `tethys stream --checkpoint`")
    store = CheckpointStore(checkpoint)
    if store.progress() is None:
        store.close()
        raise UserError(f"the checkpoint '{checkpoint}' is empty: no worker has used it yet")
    return store


def _read(store: CheckpointStore, unique_id: str) -> tuple[int, bytes]:
    found = store.read(unique_id)
    if found is None:
        names = [name for name, _, _ in store.streams()]
        some = ", ".join(f"'{name}'" for name in names[:5]) + (" ..." if len(names) > 5 else "")
        raise UserError(f"'{store.path}' holds no stream '{unique_id}'; it holds {len(names)}: {some}")
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
