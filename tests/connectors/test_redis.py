import json
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("redis")

import redis

from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from tests.servers import Broker, broker


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with broker("redis", tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def client(place: Broker):
    connection = redis.Redis(port=place.port, decode_responses=True)
    connection.flushall()
    return connection


def line(n: int) -> str:
    return json.dumps({"unique_id": f"s{n % 3}", "ds": f"2024-01-01T00:{n:02d}:00Z", "y": float(n)})


def test_read_stop_and_go_on_at_a_position(client, place: Broker) -> None:
    for n in range(20):
        client.xadd("events", {"value": line(n)})
    source = open_source(f"redis://{place.place}/events", follow=True)
    first = source.poll(7, 5).records
    kept = json.loads(json.dumps(source.positions()))
    assert source.lag() == 13
    source.close()
    again = open_source(f"redis://{place.place}/events", follow=True)
    again.seek(kept)
    rest = again.poll(100, 0.2).records
    assert [r.y for r in first + rest] == [float(n) for n in range(20)]
    assert [r.offset for r in first + rest] == list(range(1, 21))
    assert not again.poll(10, 0.05).records and not again.ended
    client.xadd("events", {"value": line(20)})
    assert [r.y for r in again.poll(10, 5).records] == [20.0]


def test_entries_may_be_fields_and_bad_ones_are_dead_letters(client, place: Broker) -> None:
    client.xadd("events", {"unique_id": "a", "ds": "2024-01-01T00:00:00Z", "y": "1.5"})
    client.xadd("events", {"value": "no JSON"})
    client.xadd("events", {"unique_id": "a", "ds": "never", "y": "1"})
    source = open_source(f"redis://{place.place}/events", follow=False)
    batch = source.poll(10, 1)
    assert [(r.unique_id, r.y) for r in batch.records] == [("a", 1.5)]
    assert [(d.reason, d.offset) for d in batch.dead] == [("malformed", 2), ("malformed", 3)]
    source.poll(10, 0.1)
    assert source.ended


def test_events_trimmed_before_they_were_read_are_said(client, place: Broker) -> None:
    for n in range(20):
        client.xadd("events", {"value": line(n)})
    source = open_source(f"redis://{place.place}/events", follow=True)
    source.poll(5, 1)
    kept = source.positions()
    client.xtrim("events", maxlen=15, approximate=False)  # exactly what was read
    assert len(source.poll(5, 1).records) == 5
    client.xtrim("events", maxlen=4, approximate=False)
    with pytest.raises(UserError, match="lost events"):
        source.poll(5, 1)
    with pytest.raises(UserError, match="lost events"):
        open_source(f"redis://{place.place}/events", follow=True).seek(kept)
    client.delete("events")
    client.xadd("events", {"value": line(0)})
    with pytest.raises(UserError, match="made anew"):
        open_source(f"redis://{place.place}/events", follow=True).seek(kept)


def test_rows_stand_once_after_a_crash_before_the_commit(client, place: Broker) -> None:
    rows = pl.DataFrame({"unique_id": ["a", "b"], "yhat": [1.0, 2.0]})
    sink = open_sink(f"redis://{place.place}/forecasts")
    sink.resume(None)
    receipt = sink.flush()
    sink.write(rows)
    receipt = json.loads(json.dumps(sink.flush()))
    sink.write(rows)
    sink.flush()  # never committed
    sink.close()
    again = open_sink(f"redis://{place.place}/forecasts")
    again.resume(receipt)
    again.write(rows)
    again.write(rows)
    again.flush()
    found = client.xrange("forecasts")
    assert [int(fields["row"]) for _, fields in found] == [1, 2, 3, 4, 5, 6]
    assert [json.loads(fields["value"])["yhat"] for _, fields in found] == [1.0, 2.0] * 3


def test_mistakes_are_one_clear_line(client, place: Broker, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no stream 'none'"):
        open_source(f"redis://{place.place}/none")
    client.set("text", "x")
    with pytest.raises(UserError, match="no Redis stream"):
        open_source(f"redis://{place.place}/text")
    with pytest.raises(UserError, match="must not hold") as error:
        open_source(f"redis://:hunter2@{place.place}/events")
    assert "hunter2" not in str(error.value)
    with pytest.raises(UserError, match="unknown options"):
        open_source(f"redis://{place.place}/events?group=x")
    with pytest.raises(UserError, match="cannot use the Redis server"):
        open_source("redis://127.0.0.1:1/events")


def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with broker("redis", tmp_path) as own:
        client = redis.Redis(port=own.port)
        for n in range(10):
            client.xadd("events", {"value": line(n)})
        source = open_source(f"redis://{own.place}/events", follow=True)
        assert len(source.poll(4, 2).records) == 4
        own.kill()
        assert source.poll(4, 0.2).records == []
        own.start()
        found: list[float] = []
        while len(found) < 6:
            found += [r.y for r in source.poll(100, 5).records]
        assert found == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
