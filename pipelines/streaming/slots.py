"""Thousands of streams in one stacked state: a slot each, the least recently used ones spilled to the checkpoint.

All tensors of the state have the slots on their first axis. A round of the engine gathers the rows of its streams,
steps them together and puts them back, in place. A stream that is not resident is read from its snapshot.

During a replay a stream may be met before the batch its snapshot was taken after. It then gets a fresh state as a
stand-in: the batch keeps its composition, so the numbers of all other streams come out as they did, and the stand-in
gives way to the snapshot as soon as the replay has passed it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson
import torch
from torch import Tensor

from connectors.checkpoints import CheckpointStore
from pipelines.streaming.event_time import Clock
from titans_core.state import leaves, map_state, select, stack

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
            part.clone(memory_format=torch.contiguous_format).view(dtype).view(len(rows), *shape)
            for part, (_, dtype, shape) in zip(flat.split(self._bytes, 1), self._parts, strict=True)
        )
        return map_state(lambda _: next(parts), self._one)


class Slots:
    """`fresh(n)` makes the state of n new streams; at most `limit` streams are resident."""

    def __init__(self, fresh: Callable[[int], Any], store: CheckpointStore, limit: int):
        self._fresh = fresh
        self._new = fresh(1)
        self.layout = Layout(self._new)
        self._store = store
        self.limit = limit
        self._size = min(FIRST_SLOTS, limit)
        self.state = fresh(self._size)
        self._free = list(range(self._size - 1, -1, -1))
        self._slot: OrderedDict[str, int] = OrderedDict()
        self._clocks: dict[str, Clock] = {}
        self._since: OrderedDict[str, int] = OrderedDict()
        """Changed streams -> the first batch their snapshot lacks, oldest first."""
        self._stand_in: dict[str, int] = {}
        """Streams met before their snapshot -> the batch of that snapshot."""
        self._spilled: dict[str, tuple[int, bytes, int]] = {}
        """Streams that left their slot and are not committed yet: batch, snapshot, first batch the store lacks."""
        self.loads = self.spills = 0

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, unique_id: str) -> bool:
        return unique_id in self._slot

    def names(self) -> list[str]:
        """Every stream that was ever seen, sorted."""
        return sorted({name for name, _, _ in self._store.streams()} | set(self._slot) | set(self._spilled))

    def slot(self, unique_id: str) -> int:
        return self._slot[unique_id]

    def clock(self, unique_id: str) -> Clock:
        return self._clocks[unique_id]

    def stands_in(self, unique_id: str) -> bool:
        return unique_id in self._stand_in

    def admit(self, unique_ids: Iterable[str], batch: int) -> None:
        """Make all these streams resident for `batch`; there must be no more of them than `limit`."""
        missing, load = [], []
        for name in unique_ids:
            if name in self._slot:
                self._slot.move_to_end(name)
                if self._stand_in.get(name, batch) < batch:  # the replay has passed the snapshot
                    load.append(name)
            else:
                missing.append(name)
        for name in missing:
            self._slot[name] = self._take(batch)
        self._load(load + missing, batch)

    def _take(self, batch: int) -> int:
        if not self._free and self._size < self.limit:
            self._grow()
        if not self._free:
            oldest = next(iter(self._slot))
            if oldest in self._since:
                self._spilled[oldest] = (batch - 1, self._pack([oldest])[0], self._since[oldest])
                self.spills += 1
            self._drop(oldest)
        return self._free.pop()

    def _grow(self) -> None:
        size = min(self.limit, 2 * self._size)
        self.state = stack([self.state, self._fresh(size - self._size)])
        self._free = list(range(size - 1, self._size - 1, -1))
        self._size = size

    def _load(self, names: Sequence[str], batch: int) -> None:
        """Fill the slots of `names`: from their snapshots, or anew."""
        new, known, rows = [], [], []
        for name in names:
            self._stand_in.pop(name, None)
            spilled = self._spilled.pop(name, None)
            if spilled is not None:
                self._since[name] = spilled[2]
                self._since.move_to_end(name, last=False)
            found = spilled or self._store.read(name)
            if found is not None and found[0] < batch:
                clock, row = open_snapshot(found[1])
                known.append(self._slot[name])
                rows.append(row)
            else:
                clock = Clock()
                new.append(self._slot[name])
                if found is not None:
                    self._stand_in[name] = found[0]
            self._clocks[name] = clock
        if known:
            self.put(torch.tensor(known), self.layout.state(rows))
            self.loads += len(known)
        if new:
            self.put(torch.tensor(new), map_state(lambda leaf: leaf.expand(len(new), *leaf.shape[1:]), self._new))

    def _drop(self, name: str) -> None:
        self._free.append(self._slot.pop(name))
        del self._clocks[name]
        self._since.pop(name, None)
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
        with torch.inference_mode():
            for (_, leaf), (_, new) in zip(leaves(self.state), leaves(part), strict=True):
                leaf.index_copy_(0, slots, new.to(leaf.dtype))

    def _pack(self, names: Sequence[str]) -> list[bytes]:
        if not names:
            return []
        rows = self.layout.rows(self.gather(torch.tensor([self._slot[name] for name in names])))
        return [_close(self._clocks[name], row) for name, row in zip(names, rows, strict=True)]

    # Snapshots.

    def changed(self, unique_ids: Iterable[str], batch: int) -> None:
        for name in unique_ids:
            if name not in self._stand_in:
                self._since.setdefault(name, batch)

    def snapshots(self, batch: int, *, share: int) -> dict[str, tuple[int, bytes]]:
        """Snapshots to commit with `batch`: all spilled streams and 1/`share` of the changed ones, longest waiting
        first, so that each commit writes about equally much and the journal stays about `share` batches long."""
        out = {name: (at, data) for name, (at, data, _) in self._spilled.items()}
        count = -(-len(self._since) // share)
        names = list(islice(self._since, count))
        out.update((name, (batch, data)) for name, data in zip(names, self._pack(names), strict=True))
        return out

    def committed(self, snapshots: Mapping[str, tuple[int, bytes]]) -> None:
        """The snapshots are durable now."""
        for name in snapshots:
            self._spilled.pop(name, None)
            self._since.pop(name, None)

    def keep_from(self, batch: int, snapshots: Mapping[str, Any]) -> int:
        """First batch the journal must keep once `snapshots` are committed with `batch`."""
        return min((since for name, since in self._since.items() if name not in snapshots), default=batch + 1)

    def snapshot(self, unique_id: str) -> bytes | None:
        """The present state of a stream as it is kept; None for a stream that was never seen."""
        if unique_id in self._slot:
            return self._pack([unique_id])[0]
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
