import json
import time
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("confluent_kafka")

from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from connectors.streams.address import with_option
from connectors.streams.kafka import parse_address
from tests.connectors.brokers import Broker, broker


@pytest.fixture(scope="module", params=["noida", "tansu"])
def kafka(request, tmp_path_factory):
    with broker(request.param, tmp_path_factory.mktemp(request.param)) as started:
        yield started


def now_lines(count: int, streams: int = 4) -> list[str]:
    # One broker drops records older than seven days: event times are of today.
    start = int(time.time()) // 60 * 60 - count * 60
    return [
        json.dumps({"unique_id": f"s{n % streams}", "ds": start + n // streams * 60, "y": float(n)})
        for n in range(count)
    ]


def drain(source, size: int = 37) -> list:
    records = []
    until = time.monotonic() + 20
    while not source.ended and time.monotonic() < until:
        records += source.poll(size, 0.5).records
    return records


def test_read_seek_and_dead_letters(kafka: Broker) -> None:
    kafka.create("events", 2)
    kafka.send("events", [*now_lines(100), "not json"], 2)
    source = open_source(f"kafka://{kafka.address}/events", follow=True)
    batch = source.poll(40, 10)
    place = json.loads(json.dumps(source.positions()))
    first = [(r.partition, r.offset) for r in batch.records]
    rest = []
    until = time.monotonic() + 20
    while len(first) + len(rest) < 100 and time.monotonic() < until:
        more = source.poll(1000, 0.5)
        rest += [(r.partition, r.offset) for r in more.records]
    assert len(set(first + rest)) == 100
    for partition in ("events[0]", "events[1]"):
        offsets = [o for p, o in first + rest if p == partition]
        assert offsets == sorted(offsets)
    source.commit(source.positions())
    source.close()
    again = open_source(f"kafka://{kafka.address}/events", follow=True)
    again.seek(place)
    found: list = []
    dead: list = []
    until = time.monotonic() + 20
    while len(found) + len(dead) < 61 - len(batch.dead) and time.monotonic() < until:
        more = again.poll(1000, 0.5)
        found += [(r.partition, r.offset) for r in more.records]
        dead += more.dead
    again.close()
    assert sorted(found) == sorted(rest)
    assert [d.reason for d in [*batch.dead, *dead]] == ["malformed"]


def test_two_workers_share_a_topic(kafka: Broker) -> None:
    kafka.create("shared", 3)
    kafka.send("shared", now_lines(90, streams=6), 3)
    found = []
    for partitions in ("0,2", "1"):
        source = open_source(f"kafka://{kafka.address}/shared?partitions={partitions}", follow=True)
        until = time.monotonic() + 5
        while time.monotonic() < until and len(found) < 90:
            batch = source.poll(1000, 0.5)
            assert {r.partition[-2] for r in batch.records} <= set(partitions)
            found += [(r.partition, r.offset) for r in batch.records]
            if not batch.records and found:
                break
        source.close()
    assert len(set(found)) == len(found) == 90
    with pytest.raises(UserError, match=r"the topic 'shared' has \[0, 1, 2\]"):
        open_source(f"kafka://{kafka.address}/shared?partitions=7")


def test_a_position_that_is_gone_is_said(tmp_path: Path) -> None:
    # Tansu answers such a position with silence.
    with broker("noida", tmp_path) as kafka:
        kafka.create("short", 1)
        kafka.send("short", now_lines(3), 1)
        source = open_source(f"kafka://{kafka.address}/short", follow=True)
        source.seek({"short[0]": 500})
        with pytest.raises(UserError, match="does not hold offset 500"):
            for _ in range(20):
                source.poll(10, 0.5)
        source.close()


def test_rows_go_out_with_their_stream_as_key(kafka: Broker) -> None:
    kafka.create("forecasts", 1)
    sink = open_sink(f"kafka://{kafka.address}/forecasts")
    sink.resume(None)
    rows = pl.DataFrame({"unique_id": ["a", "b"], "ds": [1, 2], "y": [1.5, None]})
    sink.write(rows)
    assert sink.flush() == 2
    sink.close()
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": "t", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("forecasts", 0, 0)])
    messages = consumer.consume(2, timeout=20)
    consumer.close()
    assert [(m.key(), json.loads(m.value())) for m in messages] == [
        (b"a", {"unique_id": "a", "ds": 1, "y": 1.5}),
        (b"b", {"unique_id": "b", "ds": 2, "y": None}),
    ]


def test_mistakes_are_one_clear_line(kafka: Broker) -> None:
    with pytest.raises(UserError, match="has no topic 'nothing'"):
        open_source(f"kafka://{kafka.address}/nothing")


def test_an_absent_broker_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.streams.kafka.OPEN_SECONDS", 0.5)
    with pytest.raises(UserError, match="cannot reach the broker at 127.0.0.1:1"):
        open_source("kafka://127.0.0.1:1/events")


def test_addresses() -> None:
    found = parse_address("kafka://a:1,b/t?group=g&partitions=0,2")
    assert (found.place, found.name, found.options) == ("a:1,b:9092", "t", {"group": "g", "partitions": "0,2"})
    assert with_option("kafka://a:1,b/t?group=g&partitions=0,2", "partitions", "1,3") == "kafka://a:1,b/t?group=g&partitions=1,3"
    for bad in ("kafka://a:1", "kafka:///t", "kafka://a:1/t/u", "kafka://a:x/t", "kafka://me:hunter2@a:1/t", "kafka://a:1,/t", "kafka://a:1/t?gruop=g"):
        with pytest.raises(UserError):
            parse_address(bad)


def test_a_finite_read_ends_at_the_offsets_of_its_start(tmp_path: Path) -> None:
    # Only with a broker that reports end offsets rightly.
    with broker("noida", tmp_path) as kafka:
        kafka.create("events", 3)
        kafka.send("events", now_lines(200), 3)
        source = open_source(f"kafka://{kafka.address}/events", follow=False)
        kafka.send("events", now_lines(10), 3)
        assert len(drain(source)) == 200 and source.ended
        place = source.positions()
        source.close()
        source = open_source(f"kafka://{kafka.address}/events", follow=False)
        source.seek(place)
        assert len(drain(source)) == 10
        with pytest.raises(UserError, match="does not hold offset 999"):
            source.seek({"events[0]": 999})
        source.close()
