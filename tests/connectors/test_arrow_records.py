"""Arrow IPC streams as messages: a record a row, in the same batches from wherever reading goes on, and dead letters with a reason."""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from connectors.streams import open_source
from connectors.streams.base import ARROW_ROWS, DeadLetter, Decoder, Record
from tests import servers
from tests.connectors.brokers import broker


def arrow(columns: dict, compression: str | None = None) -> bytes:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def rows(first: int, count: int) -> dict:
    times = [datetime(2024, 1, 1) + timedelta(minutes=first + i) for i in range(count)]
    values = [float(first + i) for i in range(count)]
    return {"unique_id": [f"s{i % 3}" for i in range(count)], "ds": pa.array(times, pa.timestamp("ms")), "y": values}


def test_every_row_is_a_record_or_a_dead_letter() -> None:
    decoder = Decoder("json")
    columns = {
        "unique_id": ["a", "", "b", "c"],
        "ds": pa.array([datetime(2024, 1, 1), datetime(2024, 1, 1), None, datetime(2024, 1, 2)], pa.timestamp("ns", "UTC")),
        "y": [1.5, 2.0, 3.0, None],
        "event_id": [7, None, None, None],
    }
    first, no_name, no_time, missing = decoder.decode_message(arrow(columns, "zstd"), "t[0]", 5)
    assert first == Record("a", 1_704_067_200_000_000, 1.5, "7", "t[0]", 5)
    assert no_name == DeadLetter("malformed", "row 1 of the message: 'unique_id' is not a name", "t[0]", 5, no_name.raw)
    assert json.loads(no_name.raw) == {"unique_id": "", "ds": 1_704_067_200_000_000, "y": 2.0, "event_id": None}
    assert no_time.detail == "row 2 of the message: no time" and math.isnan(missing.y)
    text = {"unique_id": ["a", "b"], "ds": ["2024-01-01", "soon"], "y": ["1", "x"]}
    good, bad = decoder.decode_message(arrow(text), "p", 1)
    assert good.ds == first.ds and good.y == 1.0 and bad.reason == "malformed"
    assert decoder.decode_message(b'{"unique_id": "a", "ds": 0, "y": 1}', "p", 1)[0].unique_id == "a"


@pytest.mark.parametrize(
    ("payload", "reason", "detail"),
    [
        (arrow({"unique_id": ["a"], "y": [1.0]}), "malformed", "no column ['ds']; it has ['unique_id', 'y']"),
        (arrow(rows(0, 5))[:150], "malformed", "no Arrow stream of records: "),
        (arrow(rows(0, ARROW_ROWS + 1)), "oversize", "more than 4096 rows in one message"),
        (arrow({**rows(0, 10), "more": ["x" * 120_000] * 10}), "oversize", "bytes, at most 1048576"),
    ],
)
def test_a_message_that_cannot_be_taken_is_one_dead_letter(payload: bytes, reason: str, detail: str) -> None:
    (letter,) = Decoder("json").decode_message(payload, "t[1]", 9)
    assert (letter.reason, letter.partition, letter.offset) == (reason, "t[1]", 9) and detail in letter.detail


MESSAGES = [
    arrow(rows(0, 100)),
    b'{"unique_id": "s0", "ds": "2024-01-01T01:40:00", "y": 100}',
    arrow(rows(101, 100)),
    b"\xff\xff\xff\xffnonsense",
    arrow(rows(201, 50)),
]


@contextmanager
def kafka(folder: Path) -> Iterator[str]:
    client = pytest.importorskip("confluent_kafka")
    with broker("noida", folder) as server:
        server.create("events", 1)
        producer = client.Producer({"bootstrap.servers": server.address})
        for message in MESSAGES:
            producer.produce("events", message)
        assert producer.flush(10) == 0
        yield f"kafka://{server.address}/events"


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    client = pytest.importorskip("redis")
    with servers.broker("redis", folder) as server:
        for message in MESSAGES:
            client.Redis(port=server.port).xadd("events", {"value": message})
        yield f"redis://{server.place}/events"


@contextmanager
def nats(folder: Path) -> Iterator[str]:
    client = pytest.importorskip("nats")
    with servers.broker("nats", folder) as server:

        async def fill() -> None:
            connection = await client.connect(f"nats://{server.place}")
            await connection.jetstream().add_stream(name="events", subjects=["events"])
            for message in MESSAGES:
                await connection.jetstream().publish("events", message)
            await connection.close()

        asyncio.run(fill())
        yield f"nats://{server.place}/events"


@pytest.mark.parametrize("server", [kafka, redis, nats])
def test_batches_end_with_messages_and_go_on_anywhere(tmp_path: Path, server: Callable) -> None:
    with server(tmp_path) as address:
        source = open_source(address)
        batches, places = [], [source.positions()]
        while len(batches) < 10 and not source.ended:
            batch = source.poll(64, 5.0)
            if len(batch):
                batches.append(batch)
                places.append(json.loads(json.dumps(source.positions())))
        assert [len(batch) for batch in batches] == [100, 101, 51]
        assert [record.y for batch in batches for record in batch.records] == [float(i) for i in range(251)]
        assert [letter.reason for batch in batches for letter in batch.dead] == ["malformed"]
        source.seek(places[1])
        assert [len(source.poll(64, 5.0)) for _ in range(2)] == [101, 51]
        source.close()
