"""Kafka-protocol brokers (confluent-kafka): manual assignment, positions kept by us and not by a consumer group."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import polars as pl

from connectors.errors import UserError
from connectors.streams.address import Address, parse
from connectors.streams.base import ARROW, TIME_FORMAT, Batch, Decoder, Positions, Record, long_rows

LOGGER = logging.getLogger("tethys.kafka")
OPEN_SECONDS = 10.0
FORM = "kafka://HOST:PORT[,HOST:PORT]/TOPIC?group=NAME&partitions=0,2"


def _client() -> Any:
    try:
        import confluent_kafka
    except ImportError as error:
        raise UserError("Kafka needs the extra 'kafka': pip install 'tethys-streams[kafka]'") from error
    return confluent_kafka


def parse_address(address: str) -> Address:
    found = parse(address, ("kafka", None), 9092, FORM, ("group", "partitions"), cluster=True)
    if "/" in found.name:
        raise UserError(f"'{address}' is not {FORM}")
    return found


def _chosen(text: str | None, existing: list[int], topic: str) -> list[int]:
    if text is None:
        return existing
    parts = text.split(",")
    if not all(part.isdigit() and int(part) in existing for part in parts):
        raise UserError(f"partitions '{text}' do not fit: the topic '{topic}' has {existing}")
    return sorted({int(part) for part in parts})


class KafkaSource:
    """The partitions of one topic, JSON or Arrow. Positions: `TOPIC[PARTITION]` -> next offset.

    `?partitions=0,2` in the address takes only these: several workers, each with its own checkpoint, share a topic so.

    The broker's consumer group is only told how far the worker got, for lag displays; the checkpoint decides where
    reading goes on, so a group rebalance can neither lose nor repeat an event.
    """

    def __init__(
        self,
        address: str,
        *,
        columns: Mapping[str, str | None] | None = None,
        count_steps: bool = False,
        follow: bool = True,
    ):
        kafka = _client()
        self._kafka = kafka
        found = parse_address(address)
        servers, self.topic, options = found.place, found.name, found.options
        self.ended = False
        self.follow = follow
        self.consumer = kafka.Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": options.get("group", "tethys"),
                "enable.auto.commit": False,
                # A position the broker no longer has is an error, never a silent jump.
                "auto.offset.reset": "error",
                "enable.partition.eof": False,
                # Events wait no longer at the end of a topic. Pausing an idle consumer instead would cost them half a second.
                "fetch.wait.max.ms": 20,
                # The next fetch of a partition waits until all that is here is taken, and so long. A broker that answers an empty fetch
                # at once instead of holding it back would otherwise be asked fifty thousand times a second, a core's worth on either side.
                "queued.min.messages": 1,
                "fetch.queue.backoff.ms": 10,
            },
            logger=LOGGER,
        )
        try:
            topic = self.consumer.list_topics(self.topic, timeout=OPEN_SECONDS).topics[self.topic]
        except kafka.KafkaException as error:
            raise UserError(f"cannot reach the broker at {servers}: {error.args[0].str()}") from error
        if topic.error is not None or not topic.partitions:
            raise UserError(f"the broker at {servers} has no topic '{self.topic}'")
        chosen = _chosen(options.get("partitions"), sorted(topic.partitions), self.topic)
        self.next = dict.fromkeys(chosen, 0)
        self.ends: dict[int, int] = {}
        for number in self.next:
            low, high = self._watermarks(number)
            self.next[number] = low
            self.ends[number] = high
        self.partition_names = [f"{self.topic}[{number}]" for number in range(max(topic.partitions) + 1)]
        self.decoder = Decoder("json", columns, count_steps=count_steps)
        self.rest: list[Any] = []
        """Messages that were fetched and not taken yet."""
        self._assign()

    def _watermarks(self, number: int) -> tuple[int, int]:
        low, high = self.consumer.get_watermark_offsets(self._kafka.TopicPartition(self.topic, number), timeout=OPEN_SECONDS, cached=False)
        return int(low), int(high)

    def _assign(self) -> None:
        kafka = self._kafka
        self.consumer.assign([kafka.TopicPartition(self.topic, p, offset) for p, offset in self.next.items()])

    def poll(self, max_records: int, timeout: float) -> Batch:
        if not self.follow and all(self.next[p] >= self.ends[p] for p in self.next):
            self.ended = True
            return Batch([], [])
        messages, self.rest = self.rest, []
        deadline = time.monotonic() + timeout
        while len(messages) < max_records:
            # With a first record in hand only what has already arrived is added; latency comes before batch size.
            wait = 0.0 if messages else max(0.0, deadline - time.monotonic())
            # Asked for more than one, the client waits out the whole timeout unless there are so many.
            found = self.consumer.consume(max_records - len(messages) if messages else 1, timeout=wait)
            messages += found if self._error_free(found) else self._checked(found)
            if not found and (messages or time.monotonic() >= deadline):
                break
        if len(messages) > 1 and any((message.value() or b"").startswith(ARROW) for message in messages):
            return self._some(messages, max_records)
        return self._decode(messages)

    def _some(self, messages: list[Any], max_records: int) -> Batch:
        """Messages of many records, taken until there are enough; the others wait."""
        batch = Batch([], [])
        for at, message in enumerate(messages):
            if len(batch) >= max_records:
                self.rest = messages[at:]
                break
            one = self._decode([message])
            batch = Batch([*batch.records, *one.records], batch.dead + one.dead, batch.sent + one.sent)
        return batch

    @staticmethod
    def _error_free(messages: list[Any]) -> bool:
        return not any(message.error() is not None for message in messages)

    def _checked(self, messages: list[Any]) -> list[Any]:
        kafka = self._kafka
        for message in messages:
            error = message.error()
            if error is None:
                continue  # and of the others, transient ones pass: the client reconnects by itself
            if error.code() == kafka.KafkaError._AUTO_OFFSET_RESET:
                raise self._gone(message.partition())
            if error.fatal():
                raise kafka.KafkaException(error)
        return [message for message in messages if message.error() is None]

    def _decode(self, messages: list[Any]) -> Batch:
        if not messages:
            return Batch([], [])
        partition = np.array([message.partition() for message in messages], dtype=np.int32)
        offset = np.array([message.offset() for message in messages], dtype=np.int64)
        wanted = np.zeros(len(messages), dtype=bool)
        for number, following in self.next.items():
            mine = (partition == number) & (offset >= following)
            if not self.follow:
                mine &= offset < self.ends[number]
            wanted |= mine
            if mine.any():
                self.next[number] = int(offset[mine].max()) + 1
        if not wanted.all():  # of before a seek, or beyond the end
            messages = [message for message, use in zip(messages, wanted, strict=True) if use]
            partition, offset = partition[wanted], offset[wanted]
        lines = [message.value() or b"" for message in messages]
        records, dead, which = self.decoder.decode_all(lines, self.partition_names, partition, offset)
        sent = np.array([message.timestamp()[1] for message in messages]) / 1e3
        return Batch(cast(list[Record], records), dead, sent[which].tolist())

    def positions(self) -> Positions:
        return {f"{self.topic}[{number}]": offset for number, offset in self.next.items()}

    def seek(self, positions: Positions) -> None:
        known = {f"{self.topic}[{number}]": number for number in self.next}
        unknown = sorted(set(positions) - set(known))
        if unknown:
            raise UserError(f"the checkpoint knows {unknown}, the topic '{self.topic}' has not: use another checkpoint")
        for name, offset in positions.items():
            self.next[known[name]] = int(offset)
            # Some brokers report a wrong end; where reading is to stop at that end it must be right anyhow.
            if not self.follow and offset > self.ends[known[name]]:
                raise self._gone(known[name])
        self.ended = False
        self.rest = []
        self._assign()

    def _gone(self, number: int) -> UserError:
        return UserError(
            f"'{self.topic}[{number}]' does not hold offset {self.next[number]} any more: events were deleted, or the "
            "topic was made anew; lengthen its retention, and start with a new checkpoint"
        )

    def commit(self, positions: Positions) -> None:
        kafka = self._kafka
        known = {f"{self.topic}[{number}]": number for number in self.next}
        offsets = [kafka.TopicPartition(self.topic, known[n], int(o)) for n, o in positions.items() if n in known]
        try:
            self.consumer.commit(offsets=offsets, asynchronous=True)
        except kafka.KafkaException:
            return  # only the lag display is behind; the checkpoint holds the truth

    def lags(self) -> dict[str, int]:
        """What waits in each partition: up to the ends that came with the last fetched messages; asking would cost a round trip a batch."""
        waiting = {}
        for number, offset in self.next.items():
            _, high = self.consumer.get_watermark_offsets(self._kafka.TopicPartition(self.topic, number), cached=True)
            waiting[f"{self.topic}[{number}]"] = max(0, high - offset)
        return waiting

    def lag(self) -> int | None:
        return sum(self.lags().values())

    def close(self) -> None:
        self.consumer.close()


class KafkaSink:
    """Rows as JSON messages keyed by `unique_id`, with an idempotent producer. Receipt: rows sent in all.

    A broker cannot take messages back: after a crash the rows since the last commit are sent again with equal bytes.
    Readers that need each row once drop repeats by (unique_id, origin, ds, model_version).
    """

    def __init__(self, address: str):
        kafka = _client()
        found = parse_address(address)
        servers, self.topic = found.place, found.name
        self.producer = kafka.Producer(
            {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5, "compression.type": "lz4"},
            logger=LOGGER,
        )
        self.sent = 0
        self.failed: list[str] = []

    def resume(self, receipt: Any | None) -> None:
        self.sent = 0 if receipt is None else int(receipt)

    def write(self, rows: pl.DataFrame) -> None:
        rows = long_rows(rows)
        times = [name for name, kind in rows.schema.items() if kind == pl.Datetime]
        for row in rows.with_columns(pl.col(times).dt.strftime(TIME_FORMAT)).iter_rows(named=True):
            value = json.dumps(row).encode()
            while True:
                try:
                    key = str(row.get("unique_id", ""))
                    self.producer.produce(self.topic, value, key=key, on_delivery=self._delivered)
                    break
                except BufferError:  # the local queue is full: back-pressure
                    self.producer.poll(0.1)
            self.sent += 1
        self.producer.poll(0)

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None:
            self.failed.append(str(error))

    def flush(self) -> Any:
        left = self.producer.flush(30.0)
        if left or self.failed:
            reason = self.failed[0] if self.failed else f"{left} rows unsent after 30 s"
            raise UserError(f"the broker did not take the forecasts for '{self.topic}': {reason}; nothing is committed")
        return self.sent

    def close(self) -> None:
        self.producer.flush(5.0)
