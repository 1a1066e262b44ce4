"""One source for several workers: which partitions it has, and a reader for some of them.

The partitions of Kafka are the broker's own. What is read in one order (a file, a stream of Redis or NATS, a table) has
`PARTS` virtual ones, told apart by a hash of the stream's name: every worker reads all lines and keeps its own. What
cannot be read twice cannot be shared.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from connectors.errors import UserError
from connectors.streams import open_source
from connectors.streams.address import with_option
from connectors.streams.base import Batch, Positions, Record, Records, Source

# More workers than this cannot share a stream; stands in checkpoints, so it never changes.
PARTS = 64
# Lines of others are passed over for so long at once before the worker has its turn again.
PASS_SECONDS = 0.2
READ_ONCE = ("mqtt://", "mqtts://", "-")


def part_of(unique_id: str) -> int:
    """The virtual partition of a stream: the same on every machine, in every version."""
    return zlib.crc32(unique_id.encode()) % PARTS


def by_broker(address: str) -> bool:
    """Whether the partitions of this source are the broker's own. Raises UserError for a source that workers cannot share."""
    if address.startswith(READ_ONCE):
        raise UserError(
            f"several workers cannot share '{address}', which can be read once only: run one worker, or bring the events into a file or Kafka first"
        )
    return address.startswith("kafka://")


class PartSource:
    """The lines of some virtual partitions, out of a source that hands out the same lines in the same order to every reader.

    Positions: `PART,PART,...` -> how far these were read: `place`, a number that grows with every line, and the position of the source
    `at` it. Partitions that came from different workers may stand at different places: reading goes on from the first of them, and what
    a partition has had is passed over. Lines without a readable name belong to partition 0.

    start: where the run began, as in one of its positions.
    """

    def __init__(self, source: Source, parts: Iterable[int], start: Mapping[str, Any]):
        self.source, self.parts, self.start = source, sorted(parts), dict(start)
        self._mine = frozenset(self.parts)
        self._ahead: dict[int, dict[str, Any]] = {}
        self._part: dict[str, int] = {}
        self._place = 0
        self.ended = False
        self.seek({})

    def poll(self, max_records: int, timeout: float) -> Batch:
        taken: list[Records] = []
        batch = Batch([], [])
        deadline, count = time.monotonic() + timeout, 0
        while count < max_records:
            # Line by line as long as a partition is ahead: the place at which it takes part again must not fall within a poll.
            found = self.source.poll(1 if self._ahead else max_records - count, 0.0 if count else max(0.0, deadline - time.monotonic()))
            if not len(found):
                break
            self._place = place_of(self.source, self._place + len(found))
            records = Records.of(found.records)
            mine = np.fromiter((self._wants(name) for name in records.unique_id), dtype=bool, count=len(records))
            taken.append(records.at(mine))
            batch.sent += [found.sent[i] for i in np.flatnonzero(mine).tolist()] if found.sent else []
            batch.dead += found.dead if 0 in self._mine and 0 not in self._ahead else []
            count = sum(map(len, taken)) + len(batch.dead)
            if self._ahead:
                self._ahead = {part: stands for part, stands in self._ahead.items() if stands["place"] > self._place}
            if not count and time.monotonic() >= deadline + PASS_SECONDS:
                break
        self.ended = self.source.ended
        if taken:
            batch.records = cast(list[Record], Records.join(taken))
        return batch

    def _wants(self, name: str) -> bool:
        part = self._part.get(name)
        if part is None:
            part = self._part[name] = part_of(name)
        return part in self._mine and part not in self._ahead

    def positions(self) -> Positions:
        now = {"place": self._place, "at": self.source.positions()}
        found = {str(part): stands for part, stands in self._ahead.items()}
        return {",".join(str(part) for part in self.parts if part not in self._ahead): now, **found} if len(found) < len(self.parts) else found

    def seek(self, positions: Positions) -> None:
        stands = {int(part): where for key, where in positions.items() for part in key.split(",")}
        unknown = sorted(set(stands) - self._mine)
        if unknown:
            raise UserError(f"the checkpoint knows partitions {unknown}, which are not this worker's: use another checkpoint")
        places = {part: stands.get(part, self.start) for part in self.parts}
        first = min(places.values(), key=lambda where: int(where["place"]))
        self.source.seek(first["at"])
        self._place = first["place"]
        self._ahead = {part: where for part, where in places.items() if where["place"] > self._place}

    def commit(self, positions: Positions) -> None:
        return None  # none of these sources is told anything

    def lag(self) -> int | None:
        return self.source.lag()

    def close(self) -> None:
        self.source.close()


def place_of(source: Source, lines: int) -> int:
    """The place of the last line handed out: what the source says, where lines can be deleted; elsewhere how many there were."""
    reached = getattr(source, "reached", None)
    return lines if reached is None else int(reached())


def open_parts(address: str, parts: Iterable[str], start: Mapping[str, Any] | None, **options: Any) -> Source:
    """A reader for some partitions of the source at `address`. start: of virtual partitions; None: they are the broker's own, and named as
    in its positions (`TOPIC[3]`)."""
    if start is None:
        numbers = (part.rpartition("[")[2].removesuffix("]") for part in parts)
        return open_source(with_option(address, "partitions", ",".join(numbers)), **options)
    return PartSource(open_source(address, **options), map(int, parts), start)
