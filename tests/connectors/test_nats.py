import asyncio
import json
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("nats")

import nats

from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from tests.servers import Broker, broker


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with broker("nats", tmp_path_factory.mktemp("nats")) as started:
        yield started


def line(n: int) -> str:
    return json.dumps({"unique_id": f"s{n % 3}", "ds": f"2024-01-01T00:{n:02d}:00Z", "y": float(n)})


def ask(place: Broker, *steps) -> list:
    """Runs `await step(jetstream)` for each step on a connection of its own."""

    async def run() -> list:
        client = await nats.connect(f"nats://{place.place}")
        try:
            return [await step(client.jetstream()) for step in steps]
        finally:
            await client.close()

    return asyncio.run(run())


def make(name: str, **settings):
    return lambda stream: stream.add_stream(name=name, subjects=[f"{name}.*"], **settings)


def send(name: str, lines: list[str], subject: str = "a"):
    async def run(stream):
        for text in lines:
            await stream.publish(f"{name}.{subject}", text.encode())

    return run


def test_read_stop_and_go_on_at_a_position(place: Broker) -> None:
    ask(place, make("events"), send("events", [line(n) for n in range(20)]))
    source = open_source(f"nats://{place.place}/events", follow=True)
    first = source.poll(7, 5).records
    kept = json.loads(json.dumps(source.positions()))
    assert source.lag() == 13
    source.close()
    again = open_source(f"nats://{place.place}/events", follow=True)
    again.seek(kept)
    rest = again.poll(100, 1).records
    assert [r.y for r in first + rest] == [float(n) for n in range(20)]
    assert [r.offset for r in first + rest] == list(range(1, 21))
    assert not again.poll(10, 0.05).records and not again.ended
    ask(place, send("events", [line(20)]))
    assert [r.y for r in again.poll(10, 5).records] == [20.0]
    again.close()


def test_one_subject_ends_where_the_stream_ended(place: Broker) -> None:
    ask(place, make("mixed"), send("mixed", [line(1), "no JSON"], "x"), send("mixed", [line(2)] * 3, "y"))
    source = open_source(f"nats://{place.place}/mixed?subject=mixed.x", follow=False)
    batch = source.poll(10, 1)
    assert [r.y for r in batch.records] == [1.0] and [d.reason for d in batch.dead] == ["malformed"]
    source.poll(10, 0.1)
    assert source.ended
    source.close()
    whole = open_source(f"nats://{place.place}/mixed", follow=False)
    assert len(whole.poll(10, 1)) == 5 and not whole.poll(1, 0.1).records and whole.ended
    whole.close()


def test_messages_dropped_before_they_were_read_are_said(place: Broker) -> None:
    ask(place, make("short", max_msgs=5), send("short", [line(n) for n in range(5)]))
    source = open_source(f"nats://{place.place}/short", follow=True)
    source.poll(2, 1)
    kept = source.positions()
    source.close()
    ask(place, send("short", [line(n) for n in range(5, 12)]))
    again = open_source(f"nats://{place.place}/short", follow=True)
    with pytest.raises(UserError, match="does not hold message 3"):
        again.seek(kept)
    again.close()
    ask(place, lambda stream: stream.delete_stream("short"), make("short"), send("short", [line(1)]))
    again = open_source(f"nats://{place.place}/short", follow=True)
    with pytest.raises(UserError, match="made anew"):
        again.seek(kept)
    again.close()


def test_rows_stand_once_after_a_crash_before_the_commit(place: Broker) -> None:
    ask(place, lambda stream: stream.add_stream(name="forecasts", subjects=["forecasts"]))
    rows = pl.DataFrame({"unique_id": ["a", "b"], "yhat": [1.0, 2.0]})
    sink = open_sink(f"nats://{place.place}/forecasts")
    sink.resume(None)
    sink.write(rows)
    receipt = json.loads(json.dumps(sink.flush()))
    sink.write(rows)
    sink.flush()  # never committed
    sink.close()
    again = open_sink(f"nats://{place.place}/forecasts")
    again.resume(receipt)
    again.write(rows)
    again.write(rows)
    again.flush()
    again.close()
    source = open_source(f"nats://{place.place}/forecasts", follow=False, columns={"ds": "none"})
    assert len(source.poll(100, 1)) == 6
    source.close()


def test_mistakes_are_one_clear_line(place: Broker) -> None:
    with pytest.raises(UserError, match="no stream 'none'"):
        open_source(f"nats://{place.place}/none")
    with pytest.raises(UserError, match="must not hold"):
        open_source(f"nats://user:hunter2@{place.place}/events")
    with pytest.raises(UserError, match="cannot reach the NATS server"):
        open_source("nats://127.0.0.1:1/events")
    ask(place, make("wide"))
    with pytest.raises(UserError, match="name one"):
        open_sink(f"nats://{place.place}/wide")


def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with broker("nats", tmp_path) as own:
        ask(own, make("events"), send("events", [line(n) for n in range(10)]))
        source = open_source(f"nats://{own.place}/events", follow=True)
        assert len(source.poll(4, 2).records) == 4
        own.kill()
        assert source.poll(4, 0.2).records == []
        own.start()
        found: list[float] = []
        while len(found) < 6:
            found += [r.y for r in source.poll(100, 5).records]
        assert found == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
        source.close()
