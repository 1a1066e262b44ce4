"""Thousands of streams in one stacked state: a slot each, the least recently used ones spilled to the checkpoint.

All tensors of the state have the slots on their first axis. A round of the engine gathers the rows of its streams,
steps them together and puts them back, in place. A stream that is not resident is read from its snapshot.

During a replay a stream may be met before the batch its snapshot was taken after. It then gets a fresh state as a
stand-in: the batch keeps its composition, so the numbers of all other streams come out as they did, and the stand-in
gives way to the snapshot as soon as the replay has passed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from connectors.checkpoints import CheckpointStore
from pipelines.streaming.event_time import Clock, Clocks
from titans_core.state import leaves, map_state, select, stack, write_

FIRST_SLOTS = 64


class Layout:
    """One stream's state as a fixed row of bytes: its tensors one after another, in the order of `leaves`.

    Thousands of snapshots a second are taken from the stack at once this way. The layout itself (`signature`: paths,
    types, shapes) stands once in the checkpoint; a run goes on only with the same.
    """

    def __init__(self, one: Any):
        self._one = one
        self._parts = [(path, leaf.dtype, leaf.shape[1:]) for path, leaf in leaves(one)]
        self._bytes = [leaf.numel() * leaf.element_size() for _, leaf in leaves(one)]
        self.signature = [[path, str(dtype).removeprefix("torch."), list(shape)] for path, dtype, shape in self._parts]

    def rows(self, state: Any) -> list[bytes]:
        """One row of bytes for each stream of `state`."""
        flat = [leaf.reshape(leaf.shape[0], -1).contiguous().view(torch.uint8) for _, leaf in leaves(state)]
        return [row.tobytes() for row in torch.cat(flat, 1).numpy()]

    def state(self, rows: Sequence[bytes]) -> Any:
        """The streams of `rows`, stacked."""
        flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), sum(self._bytes))
        parts = iter(
            # torch cannot view rows of no bytes (a model without covariates of one kind) as another type
            (part.clone(memory_format=torch.contiguous_format).view(dtype) if part.numel() else part.new_empty(0, dtype=dtype)).view(
                len(rows), *shape
            )
            for part, (_, dtype, shape) in zip(flat.split(self._bytes, 1), self._parts, strict=True)
        )
        return map_state(lambda _: next(parts), self._one)


class Slots:
    """`fresh(n)` makes the state of n new streams; at most `limit` streams are resident. `remember`: of each clock."""

    def __init__(self, fresh: Callable[[int], Any], store: CheckpointStore, limit: int, remember: int):
        self._fresh = fresh
        self._new = fresh(1)
        self.layout = Layout(self._new)
        self._store = store
        self.limit = limit
        self._size = min(FIRST_SLOTS, limit)
        self.state = fresh(self._size)
        self.clocks = Clocks(self._size, remember)
        self._free = list(range(self._size - 1, -1, -1))
        self._slot: dict[str, int] = {}
        self._names = np.full(self._size, None, dtype=object)
        self._used = np.zeros(self._size, dtype=np.int64)
        """When the stream of each slot was last met, in calls of `admit`."""
        self._calls = 0
        self._since = np.zeros(self._size, dtype=np.int64)
        """The first batch the snapshot of each slot's stream lacks; 0: none."""
        self._stand_in: dict[str, int] = {}
        """Streams met before their snapshot -> the batch of that snapshot."""
        self._spilled: dict[str, tuple[int, bytes, int]] = {}
        """Streams that left their slot and are not durable yet: batch, snapshot, first batch the store lacks."""
        self.loads = self.spills = 0

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, unique_id: str) -> bool:
        return unique_id in self._slot

    def names(self) -> list[str]:
        """Every stream that was ever seen, sorted."""
        return sorted({name for name, _, _ in self._store.streams()} | set(self._slot) | set(self._spilled))

    def knows(self, unique_id: str) -> bool:
        """Whether the stream was ever seen."""
        return unique_id in self._slot or unique_id in self._spilled or self._store.read(unique_id) is not None

    def names_at(self, slots: np.ndarray) -> list[str]:
        return list(self._names[slots])

    def stands_in(self, unique_ids: Sequence[str]) -> np.ndarray:
        """(n,) bool: met before their snapshot, for the sake of the others."""
        return np.array([name in self._stand_in for name in unique_ids], dtype=bool)

    def admit(self, unique_ids: Sequence[str], batch: int) -> np.ndarray:
        """Make all these streams resident for `batch`; there must be no more different ones than `limit`. Returns the
        slot of each, (n,) int64."""
        self._calls += 1
        slots = self.find(unique_ids)
        known = slots[slots >= 0]
        self._used[known] = self._calls
        # The replay has passed the snapshot of these.
        load = [name for name in dict.fromkeys(unique_ids) if self._stand_in.get(name, batch) < batch] if self._stand_in else []
        missing = [] if len(known) == len(slots) else list(dict.fromkeys(unique_ids[i] for i in np.flatnonzero(slots < 0).tolist()))
        if missing:
            self._make_room(len(missing), batch)
            for name in missing:
                self._slot[name] = slot = self._free.pop()
                self._names[slot] = name
                self._used[slot] = self._calls
            slots = self.find(unique_ids)
        if load or missing:
            self._load(load + missing, batch)
        return slots

    def find(self, unique_ids: Sequence[str]) -> np.ndarray:
        """The slots of streams, (n,) int64; -1: not resident."""
        return np.fromiter(map(self._slot.get, unique_ids, repeat(-1)), dtype=np.int64, count=len(unique_ids))

    def _make_room(self, count: int, batch: int) -> None:
        while len(self._free) < count and self._size < self.limit:
            self._grow()
        short = count - len(self._free)
        if short <= 0:
            return
        # Streams of this call stay; of the others those that were not met for the longest time go.
        idle = np.fromiter((s for s in self._slot.values() if self._used[s] < self._calls), dtype=np.int64)
        if short > len(idle):
            raise ValueError(f"a batch has more than {self.limit} streams, the slots there are")
        idle = idle[np.argsort(self._used[idle], kind="stable")[:short]]
        changed = idle[self._since[idle] > 0]
        for slot, name, data in zip(changed.tolist(), self._names[changed], self._pack(changed), strict=True):
            self._spilled[name] = (batch - 1, data, int(self._since[slot]))
        self.spills += len(changed)
        for name in self.names_at(idle):
            self._drop(name)

    def _grow(self) -> None:
        before, size = self._size, min(self.limit, 2 * self._size)
        self.state = stack([self.state, self._fresh(size - before)])
        self.clocks.grow(size)
        self._free = list(range(size - 1, before - 1, -1)) + self._free
        self._names = np.concatenate([self._names, np.full(size - before, None, dtype=object)])
        self._used = np.concatenate([self._used, np.zeros(size - before, dtype=np.int64)])
        self._since = np.concatenate([self._since, np.zeros(size - before, dtype=np.int64)])
        self._size = size

    def _load(self, names: Sequence[str], batch: int) -> None:
        """Fill the slots of `names`: from their snapshots, or anew."""
        new, known, rows = [], [], []
        kept = self._store.read_many([name for name in names if name not in self._spilled])
        for name in names:
            slot = self._slot[name]
            self._stand_in.pop(name, None)
            spilled = self._spilled.pop(name, None)
            if spilled is not None:
                self._since[slot] = spilled[2]
            found = spilled or kept.get(name)
            if found is not None and found[0] < batch:
                clock, row = open_snapshot(found[1])
                known.append(slot)
                rows.append(row)
            else:
                clock = Clock()
                new.append(slot)
                if found is not None:
                    self._stand_in[name] = found[0]
            self.clocks.put(slot, clock)
        if known:
            self.put(torch.tensor(known), self.layout.state(rows))
            self.loads += len(known)
        if new:
            self.put(torch.tensor(new), map_state(lambda leaf: leaf.expand(len(new), *leaf.shape[1:]), self._new))

    def _drop(self, name: str) -> None:
        slot = self._slot.pop(name)
        self._free.append(slot)
        self._names[slot] = None
        self._since[slot] = 0
        self.clocks.put(slot, Clock())
        self._stand_in.pop(name, None)

    def drop_stand_ins(self) -> None:
        for name in list(self._stand_in):
            self._drop(name)

    def seed(self, unique_ids: Sequence[str], last: Sequence[int], state: Any) -> dict[str, tuple[int, bytes]]:
        """Snapshots, as of before the first batch, of streams whose memories were made elsewhere from rows up to `last`."""
        out = {}
        for name, ds, row in zip(unique_ids, last, self.layout.rows(state), strict=True):
            clock = Clock()
            clock.last = clock.newest = int(ds)
            out[name] = (0, _close(clock, row))
        return out

    # State in and out.

    def gather(self, slots: Tensor) -> Any:
        """The states at `slots` (n,), as a new state of n streams."""
        return select(self.state, slots)

    def put(self, slots: Tensor, part: Any) -> None:
        """Write the states of `part` into `slots`, in place."""
        write_(self.state, slots, part)

    def _pack(self, slots: np.ndarray) -> list[bytes]:
        if not len(slots):
            return []
        rows = self.layout.rows(self.gather(torch.from_numpy(slots)))
        return [_close(self.clocks.get(slot), row) for slot, row in zip(slots.tolist(), rows, strict=True)]

    # Snapshots.

    def changed(self, slots: np.ndarray, batch: int) -> None:
        fresh = slots[self._since[slots] == 0]
        self._since[fresh] = batch
        for name in self._stand_in:
            self._since[self._slot[name]] = 0

    def snapshots(self, batch: int, *, share: int) -> tuple[dict[str, tuple[int, bytes]], int]:
        """Snapshots to commit with `batch`: all spilled streams and 1/`share` of the changed ones, longest waiting
        first, so that each commit writes about equally much and the journal stays about `share` batches long. And the
        first batch the journal must keep once they are committed."""
        out = {name: (at, data) for name, (at, data, _) in self._spilled.items()}
        waiting = np.flatnonzero(self._since)
        waiting = waiting[np.argsort(self._since[waiting], kind="stable")]
        now = waiting[: -(-len(waiting) // share)]
        out.update((name, (batch, data)) for name, data in zip(self.names_at(now), self._pack(now), strict=True))
        self._since[now] = 0
        left = waiting[len(now) :]
        return out, int(self._since[left[0]]) if len(left) else batch + 1

    def committed(self, snapshots: Mapping[str, tuple[int, bytes]]) -> None:
        """The snapshots are durable now."""
        for name, (at, _) in snapshots.items():
            if name in self._spilled and self._spilled[name][0] == at:
                del self._spilled[name]

    def snapshot(self, unique_id: str) -> bytes | None:
        """The present state of a stream as it is kept; None for a stream that was never seen."""
        if unique_id in self._slot:
            return self._pack(np.array([self._slot[unique_id]]))[0]
        found = self._spilled.get(unique_id) or self._store.read(unique_id)
        return None if found is None else found[1]


def _close(clock: Clock, row: bytes) -> bytes:
    """A snapshot: the length of the clock, the clock (JSON), the row of the state."""
    text = orjson.dumps(clock.dump())
    return len(text).to_bytes(4, "little") + text + row


def open_snapshot(data: bytes) -> tuple[Clock, bytes]:
    """The clock of a snapshot and the row of its state."""
    end = 4 + int.from_bytes(data[:4], "little")
    return Clock.load(orjson.loads(data[4:end])), data[end:]
