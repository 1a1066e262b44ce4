import json
import logging
import time
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("paho.mqtt")

from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from tests.servers import Broker, broker


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with broker("mqtt", tmp_path_factory.mktemp("mqtt")) as started:
        yield started


def publish(place: Broker, topic: str, values: list[int]) -> None:
    sink = open_sink(f"mqtt://{place.place}/{topic}")
    sink.write(pl.DataFrame({"unique_id": "a", "ds": [f"2024-01-01T00:{n:02d}:00Z" for n in values], "y": [float(n) for n in values]}))
    assert sink.flush() == len(values)
    sink.close()


def read(source, count: int, seconds: float = 20.0) -> list[float]:
    found: list[float] = []
    until = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        found += [r.y for r in source.poll(count - len(found), 0.2).records]
    return found


def test_what_was_not_committed_comes_again(place: Broker) -> None:
    address = f"mqtt://{place.place}/plant/+/value?client=one"
    source = open_source(address, follow=True)
    publish(place, "plant/1/value", list(range(10)))
    assert read(source, 6) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    source.commit(source.positions())
    kept = json.loads(json.dumps(source.positions()))
    assert read(source, 2) == [6.0, 7.0]  # taken, never committed
    source.close()
    publish(place, "plant/2/value", [10, 11])  # nobody is connected
    again = open_source(address, follow=True)
    again.seek(kept)
    assert read(again, 6) == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    assert again.positions() == {"plant/+/value": {"taken": 12}}
    again.commit(again.positions())
    again.close()
    last = open_source(address, follow=True)
    assert read(last, 1, 0.5) == []
    last.close()


def test_a_topic_is_the_name_of_its_stream(place: Broker) -> None:
    source = open_source(f"mqtt://{place.place}/room/+/temp?client=three&id=topic", follow=True)
    publish(place, "room/1/temp", [1])
    publish(place, "room/2/temp", [2])
    found = []
    until = time.monotonic() + 20
    while len(found) < 2 and time.monotonic() < until:
        found += source.poll(5, 0.2).records
    assert [(record.unique_id, record.y) for record in found] == [("room/1/temp", 1.0), ("room/2/temp", 2.0)]
    source.close()
    with pytest.raises(UserError, match="id=field names no stream: write id=topic"):
        open_source(f"mqtt://{place.place}/room/+/temp?id=field", follow=True)


def test_a_bad_message_is_a_dead_letter(place: Broker) -> None:
    source = open_source(f"mqtt://{place.place}/loose/#?client=two", follow=True)
    publish(place, "loose/x", [1])
    source.connection.client.publish("loose/y", b"23.5", qos=1)
    batch = source.poll(1, 5)
    dead = source.poll(1, 5).dead
    assert [r.y for r in batch.records] == [1.0] and [d.detail for d in dead] == ["not a JSON object"]
    source.close()


def test_a_session_that_is_gone_is_said(place: Broker, caplog: pytest.LogCaptureFixture) -> None:
    source = open_source(f"mqtt://{place.place}/t?client=never-seen", follow=True)
    with caplog.at_level(logging.WARNING):
        source.seek({"t": {"taken": 3}})
    assert "no session of client 'never-seen'" in caplog.text
    source.close()


def test_a_broker_that_dies_and_comes_back(tmp_path: Path) -> None:
    with broker("mqtt", tmp_path) as own:
        source = open_source(f"mqtt://{own.place}/t?client=three", follow=True)
        publish(own, "t", list(range(6)))
        assert read(source, 4) == [0.0, 1.0, 2.0, 3.0]
        source.commit(source.positions())
        time.sleep(1.5)  # Mosquitto writes its store every second here
        own.kill()
        own.start()
        publish(own, "t", [6])
        # What it did not know to be acknowledged comes twice; none is missing.
        found: set[float] = set()
        until = time.monotonic() + 20
        while not found >= {4.0, 5.0, 6.0} and time.monotonic() < until:
            found |= {r.y for r in source.poll(100, 0.2).records}
        assert found >= {4.0, 5.0, 6.0}
        source.close()


def test_mistakes_are_one_clear_line(place: Broker) -> None:
    with pytest.raises(UserError, match="has no end"):
        open_source(f"mqtt://{place.place}/t")
    with pytest.raises(UserError, match="must not hold"):
        open_source(f"mqtt://user:hunter2@{place.place}/t", follow=True)
    with pytest.raises(UserError, match="cannot reach the MQTT broker"):
        open_source("mqtt://127.0.0.1:1/t", follow=True)
