"""Redis Streams (redis-py): one stream, read by position; the server's consumer groups are not used.

Redis can trim what nobody has read. So every read asks, in the same transaction, how many entries were ever added and
how many are left: a gap is an error, never a silent jump.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import orjson
import polars as pl

from connectors.errors import UserError
from connectors.streams.address import parse, secret
from connectors.streams.base import Batch, Decoder, Positions, Record, to_ndjson

OPEN_SECONDS = 10.0
FORM = "redis://HOST:PORT/STREAM?db=0"
VALUE = b"value"
"""The field that holds a record as JSON, or many as an Arrow stream; an entry without it is a record itself, field by field."""
START = "0-0"


def _connect(address: str) -> tuple[Any, str]:
    try:
        import redis
    except ImportError as error:
        raise UserError("Redis needs the extra 'redis': pip install 'tethys-streams[redis]'") from error
    found = parse(address, ("redis", "rediss"), 6379, FORM, ("db",))
    database = found.options.get("db", "0")
    if not database.isdigit():
        raise UserError(f"db={database} is not the number of a database; write {FORM}")
    client = redis.Redis(
        found.host,
        found.port,
        db=int(database),
        username=secret("REDIS_USERNAME"),
        password=secret("REDIS_PASSWORD"),
        ssl=found.encrypted,
        protocol=2,
        socket_connect_timeout=OPEN_SECONDS,
        socket_timeout=OPEN_SECONDS,
    )
    try:
        client.ping()
        version = client.info("server")["redis_version"]
    except redis.RedisError as error:
        raise UserError(f"cannot use the Redis server at {found.place}: {error} (REDIS_USERNAME and REDIS_PASSWORD are read)") from error
    if int(version.split(".")[0]) < 7:
        raise UserError(f"the Redis server at {found.place} is {version}: version 7 or newer tells whether entries were lost")
    return client, found.name


def _sent(identity: bytes) -> float:
    """Seconds since 1970 at which the server took an entry."""
    return int(identity.split(b"-")[0]) / 1e3


class RedisSource:
    """The entries of one stream. Position: the id of the last entry, and how many were added up to it."""

    def __init__(self, address: str, *, columns: Mapping[str, str | None] | None = None, count_steps: bool = False, follow: bool = True):
        import redis

        self._errors = redis.RedisError
        self.client, self.stream = _connect(address)
        self.decoder = Decoder("json", columns, count_steps=count_steps)
        self.follow, self.ended = follow, False
        if not self.client.exists(self.stream):
            raise UserError(f"the Redis server has no stream '{self.stream}'")
        about = self._about()
        self.last, self.seen = START, about["entries-added"] - about["length"]
        self.end = about["entries-added"]

    def _about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = self.client.xinfo_stream(self.stream)
        except self._errors as error:
            raise UserError(f"'{self.stream}' is no Redis stream: {error}") from error
        return about

    def poll(self, max_records: int, timeout: float) -> Batch:
        batch = Batch([], [])
        deadline = time.monotonic() + timeout
        while len(batch) < max_records:
            wanted = max_records - len(batch)
            if not self.follow:
                wanted = min(wanted, self.end - self.seen)
                if wanted <= 0:
                    self.ended = True
                    break
            entries = self._read(wanted)
            for identity, fields in entries:
                self.last, self.seen = identity.decode(), self.seen + 1
                line = fields.get(VALUE) if fields else b""
                if line is None:
                    line = orjson.dumps({name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in fields.items()})
                for outcome in self.decoder.decode_message(line, self.stream, self.seen):
                    if isinstance(outcome, Record):
                        batch.records.append(outcome)
                        batch.sent.append(_sent(identity))
                    else:
                        batch.dead.append(outcome)
                if len(batch) >= max_records:
                    break  # entries of many records: the others are read again
            if entries:
                continue
            wait = deadline - time.monotonic()
            if len(batch) or wait <= 0:
                break
            self._lasting(lambda left=wait: self.client.xread({self.stream: self.last}, count=1, block=max(1, round(1e3 * min(left, 1.0)))))
        return batch

    def _read(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """The next entries; that none is missing before them is known from the same transaction."""

        def ask() -> Any:
            together = self.client.pipeline(transaction=True)
            together.xinfo_stream(self.stream)
            together.xread({self.stream: self.last}, count=count)
            return together.execute()

        answer = self._lasting(ask)
        if answer is None:
            return []
        about, found = answer
        if not self.seen <= about["entries-added"] or about["entries-added"] - about["length"] > self.seen:
            raise UserError(
                f"the Redis stream '{self.stream}' lost events after entry {self.last}: it was trimmed before they were read, or made anew; "
                "keep more of it (MAXLEN), and start with a new checkpoint"
            )
        return found[0][1] if found else []

    def _lasting(self, ask: Any) -> Any:
        """A server that is away is waited for: nothing is handed out, and reading goes on where it stood."""
        import redis

        try:
            return ask()
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(0.05)
            return None
        except redis.RedisError as error:
            raise UserError(f"cannot read the Redis stream '{self.stream}' after entry {self.last}: {error}") from error

    def positions(self) -> Positions:
        return {self.stream: {"last": self.last, "seen": self.seen}}

    def seek(self, positions: Positions) -> None:
        if set(positions) != {self.stream}:
            raise UserError(f"the checkpoint belongs to {sorted(positions)}, not to '{self.stream}': use another checkpoint")
        self.last, self.seen = positions[self.stream]["last"], int(positions[self.stream]["seen"])
        self.ended = False
        self._read(1)  # says at once whether events were lost

    def reached(self) -> int:
        """Of the last entry, in the order of their ids."""
        milliseconds, number = self.last.split("-")
        return (int(milliseconds) << 64) + int(number)

    def commit(self, positions: Positions) -> None:
        return None

    def lag(self) -> int | None:
        about = self._lasting(lambda: self.client.xinfo_stream(self.stream))
        return None if about is None else int(about["entries-added"]) - self.seen

    def close(self) -> None:
        self.client.close()


class RedisSink:
    """Rows as entries of one stream, each JSON in the field `value`, with the writer's name and the row's number.

    Receipt: writer, rows, id of the last entry. After a crash the rows that already stand behind that entry are
    counted and not written again, so every row is there once.
    """

    def __init__(self, address: str):
        import redis

        self._errors = redis.RedisError
        self.client, self.stream = _connect(address)
        self.writer, self.rows, self.last = uuid4().hex, 0, START
        self.there = 0
        self.lines: list[bytes] = []

    def resume(self, receipt: Any | None) -> None:
        if receipt is None:
            return
        self.writer, self.rows, self.last = receipt["writer"], int(receipt["rows"]), receipt["last"]
        self.there = self.rows
        place = self.last
        try:
            while entries := self.client.xrange(self.stream, min=f"({place}", count=10_000):
                for identity, fields in entries:
                    if fields.get(b"writer") == self.writer.encode():
                        self.there, self.last = int(fields[b"row"]), identity.decode()
                place = entries[-1][0].decode()
        except self._errors as error:
            raise UserError(f"cannot read back the Redis stream '{self.stream}': {error}") from error

    def write(self, rows: pl.DataFrame) -> None:
        self.lines += to_ndjson(rows).splitlines()

    def flush(self) -> Any:
        first = self.rows + 1
        self.rows += len(self.lines)
        together = self.client.pipeline(transaction=True)
        for number, line in enumerate(self.lines, first):
            if number > self.there:
                together.xadd(self.stream, {VALUE: line, b"writer": self.writer, b"row": number})
        self.lines = []
        if len(together):
            try:
                self.last = together.execute()[-1].decode()
            except self._errors as error:
                raise UserError(f"the Redis server did not take the rows for '{self.stream}': {error}; nothing is committed") from error
        return {"writer": self.writer, "rows": self.rows, "last": self.last}

    def close(self) -> None:
        self.client.close()
