"""NATS JetStream (nats-py): one stream by sequence number, with a consumer that the server forgets when we are gone.

The client speaks asyncio; it runs on a loop of its own here, only while one of these calls waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any
from uuid import uuid4

import polars as pl

from connectors.errors import UserError
from connectors.streams.address import Address, parse, secret
from connectors.streams.base import Batch, Decoder, Positions, Record, to_ndjson

LOGGER = logging.getLogger("tethys.nats")
OPEN_SECONDS = 10.0
FORM = "nats://HOST:PORT/STREAM?subject=NAME"
WRITER, ROW = "Tethys-Writer", "Tethys-Row"


class _Connection:
    """A client and the loop it lives on."""

    def __init__(self, found: Address):
        try:
            import nats
        except ImportError as error:
            raise UserError("NATS needs the extra 'nats': pip install 'tethys-streams[nats]'") from error
        self.place = found.place
        self.loop = asyncio.new_event_loop()
        scheme = "tls" if found.encrypted else "nats"

        async def lost(error: Exception) -> None:
            LOGGER.warning("%s: %s", found.place, error or type(error).__name__)

        try:
            self.client: Any = self.wait(
                nats.connect(
                    f"{scheme}://{found.place}",
                    user=secret("NATS_USER"),
                    password=secret("NATS_PASSWORD"),
                    token=secret("NATS_TOKEN"),
                    connect_timeout=int(OPEN_SECONDS),
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    error_cb=lost,
                ),
                OPEN_SECONDS,
            )
            self.stream: Any = self.client.jetstream(timeout=OPEN_SECONDS)
        except Exception as error:  # the client raises many kinds, its own and the socket's
            self.loop.close()
            reason = str(error) or type(error).__name__
            raise UserError(f"cannot reach the NATS server at {found.place}: {reason} (NATS_USER, NATS_PASSWORD and NATS_TOKEN are read)") from error

    def wait(self, work: Coroutine[Any, Any, Any], seconds: float = OPEN_SECONDS) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, seconds))

    def about(self, name: str) -> Any:
        from nats.js.errors import NotFoundError

        try:
            return self.wait(self.stream.stream_info(name))
        except NotFoundError as error:
            raise UserError(f"the NATS server at {self.place} has no stream '{name}'") from error

    def close(self) -> None:
        try:
            self.wait(self.client.close(), 5.0)
        finally:
            self.loop.close()


class NatsSource:
    """The messages of one JetStream stream, JSON or Arrow, of one subject if the address names it.

    Position: the sequence number of the last message. A message that the stream dropped before it was read is an error.
    """

    def __init__(self, address: str, *, columns: Mapping[str, str | None] | None = None, count_steps: bool = False, follow: bool = True):
        found = parse(address, ("nats", "natss"), 4222, FORM, ("subject",))
        self.stream, self.subject = found.name, found.options.get("subject")
        self.connection = _Connection(found)
        self.decoder = Decoder("json", columns, count_steps=count_steps)
        self.follow, self.ended = follow, False
        try:
            state = self.connection.about(self.stream).state
        except UserError:
            self.connection.close()
            raise
        self.last = state.first_seq - 1 if state.messages else state.last_seq
        self.end = state.last_seq
        self.born = str(self.connection.about(self.stream).created)
        self.consumer: Any = None
        self.rest: deque[Any] = deque()
        """Messages that were fetched and not taken yet."""
        self.waiting: int | None = None

    def _open(self) -> Any:
        """A consumer that begins after the last message; the server drops it when nobody has asked for a minute."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        state = self.connection.about(self.stream).state
        if state.last_seq < self.last or state.first_seq > self.last + 1:
            raise UserError(
                f"the NATS stream '{self.stream}' does not hold message {self.last + 1} any more: it was deleted before it was read, or the "
                "stream was made anew; lengthen its retention, and start with a new checkpoint"
            )
        settings = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.last + 1,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=60.0,
        )
        return self.connection.wait(self.connection.stream.pull_subscribe(self.subject or ">", stream=self.stream, config=settings))

    def poll(self, max_records: int, timeout: float) -> Batch:
        import nats.errors

        batch = Batch([], [])
        deadline = time.monotonic() + timeout
        while len(batch) < max_records:
            if not self.follow and self.last >= self.end:
                self.ended = True
                break
            if self.rest:  # of messages of many records
                self._take(self.rest.popleft(), batch)
                continue
            wait = max(0.02, 0.02 if len(batch) else deadline - time.monotonic())
            try:
                if self.consumer is None:
                    self.consumer = self._open()
                messages = self.connection.wait(self.consumer.fetch(max_records - len(batch), timeout=wait), wait + OPEN_SECONDS)
            except (nats.errors.TimeoutError, TimeoutError):
                messages = []
                if not self.follow and self.waiting == 0:
                    self.ended = True  # what is left at the end of the stream has other subjects
                    break
            except nats.errors.Error as error:
                # The server was away, or has forgotten the consumer: a new one goes on after the last message.
                LOGGER.warning("%s: %s", self.stream, error)
                self.consumer, messages = None, []
                time.sleep(0.05)
            self.rest += messages
            if not messages and (len(batch) or time.monotonic() >= deadline):
                break
        return batch

    def _take(self, message: Any, batch: Batch) -> None:
        about = message.metadata
        number = about.sequence.stream
        if number <= self.last or (not self.follow and number > self.end):
            return
        if self.subject is None and number != self.last + 1 and self._dropped():
            raise UserError(f"the NATS stream '{self.stream}' dropped messages {self.last + 1} to {number - 1} before they were read")
        for outcome in self.decoder.decode_message(message.data, self.stream, number):
            if isinstance(outcome, Record):
                batch.records.append(outcome)
                batch.sent.append(about.timestamp.timestamp())
            else:
                batch.dead.append(outcome)
        self.last, self.waiting = number, about.num_pending

    def _dropped(self) -> bool:
        """Whether messages fell off the stream's front behind the last one read (single messages deleted by hand do not count)."""
        return bool(self.connection.about(self.stream).state.first_seq > self.last + 1)

    def positions(self) -> Positions:
        return {self.stream: {"last": self.last, "born": self.born}}

    def seek(self, positions: Positions) -> None:
        if set(positions) != {self.stream}:
            raise UserError(f"the checkpoint belongs to {sorted(positions)}, not to '{self.stream}': use another checkpoint")
        place = positions[self.stream]
        if place["born"] != self.born:
            raise UserError(f"the NATS stream '{self.stream}' was made anew since the checkpoint: start with a new checkpoint")
        self.last, self.ended = int(place["last"]), False
        self.rest.clear()
        self.consumer, self.waiting = self._open(), None

    def reached(self) -> int:
        return self.last

    def commit(self, positions: Positions) -> None:
        return None

    def lag(self) -> int | None:
        return self.waiting

    def close(self) -> None:
        self.connection.close()


class NatsSink:
    """Rows as JSON messages to one subject, each with the writer's name and the row's number in its headers.

    Receipt: writer, rows, sequence of the last message. After a crash the rows that already stand behind it are counted
    and not sent again, so every row is there once.
    """

    def __init__(self, address: str):
        found = parse(address, ("nats", "natss"), 4222, FORM, ("subject",))
        self.stream = found.name
        self.connection = _Connection(found)
        try:
            about = self.connection.about(self.stream)
            self.subject = found.options.get("subject") or about.config.subjects[0]
            if "*" in self.subject or ">" in self.subject:
                raise UserError(f"the stream '{self.stream}' takes subjects '{self.subject}': name one, nats://HOST:PORT/STREAM?subject=NAME")
        except UserError:
            self.connection.close()
            raise
        self.writer, self.rows, self.last = uuid4().hex, 0, about.state.last_seq
        self.there = 0
        self.lines: list[bytes] = []

    def resume(self, receipt: Any | None) -> None:
        if receipt is None:
            return
        self.writer, self.rows, self.last = receipt["writer"], int(receipt["rows"]), int(receipt["last"])
        self.there = self.rows
        end = self.connection.about(self.stream).state.last_seq
        from nats.js.errors import NotFoundError

        for number in range(self.last + 1, end + 1):
            try:
                message = self.connection.wait(self.connection.stream.get_msg(self.stream, number))
            except NotFoundError:
                continue
            headers = message.headers or {}
            if headers.get(WRITER) == self.writer:
                self.there, self.last = int(headers[ROW]), number

    def write(self, rows: pl.DataFrame) -> None:
        self.lines += to_ndjson(rows).splitlines()

    def flush(self) -> Any:
        first = self.rows + 1
        self.rows += len(self.lines)
        lines, self.lines = self.lines, []
        wanted = [(number, line) for number, line in enumerate(lines, first) if number > self.there]

        async def send() -> int:
            last = self.last
            for number, line in wanted:  # one by one: the order of the rows is part of the output
                headers = {WRITER: self.writer, ROW: str(number), "Nats-Msg-Id": f"{self.writer}-{number}"}
                last = (await self.connection.stream.publish(self.subject, line, stream=self.stream, headers=headers)).seq
            return last

        try:
            self.last = self.connection.wait(send(), 60.0 + len(wanted) / 100)
        except Exception as error:  # the client raises many kinds, its own and the socket's
            reason = str(error) or type(error).__name__
            raise UserError(f"the NATS server did not take the rows for '{self.subject}': {reason}; nothing is committed") from error
        return {"writer": self.writer, "rows": self.rows, "last": self.last}

    def close(self) -> None:
        self.connection.close()
