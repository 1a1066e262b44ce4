"""A worker on Redis, NATS, MQTT and PostgreSQL, both killed on the way: the rows equal the undisturbed run's on a file."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import polars as pl
import pytest

from connectors.streams.postgres import PREPARE
from tests import servers
from tests.faults.stream_process import start
from tests.faults.test_stream_faults import done, end, finish, wait_for
from tests.pipelines.test_streaming import events

KILLS = 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """The events, and the rows that come of them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = events(folder / "e.ndjson", 10, 500)
    finish(source, folder / "run")
    return source.read_text().splitlines(), rows(folder / "run")


def rows(folder: Path) -> list[str]:
    path = folder / "out.csv"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def disturb(address: str, folder: Path, crash: Callable[[], None], come_back: Callable[[], None]) -> list[str]:
    """Kills the worker, then the server under it, then the worker again, until everything was read."""
    for _ in range(KILLS):
        before = done(folder)
        process = start(address, folder, pause=0.01)
        wait_for(lambda before=before, process=process: done(folder) > before + 1 or not process.is_alive())
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = start(address, folder, pause=0.02)
    before = done(folder)
    wait_for(lambda: done(folder) > before)
    crash()
    time.sleep(0.3)
    come_back()
    if address.startswith("mqtt://"):
        return stop(process, folder)
    assert end(process, folder).splitlines()[-1] == "end of the source"
    return rows(folder)


def stop(process: BaseProcess, folder: Path) -> list[str]:
    """A source without an end: stopped when nothing came any more for a while."""
    wait_for(lambda: rows(folder))
    count = -1
    while len(rows(folder)) > count:
        count = len(rows(folder))
        time.sleep(2.0)
    process.terminate()
    assert end(process, folder).splitlines()[-1] == "signal"
    return rows(folder)


def test_redis(tmp_path: Path, undisturbed) -> None:
    redis = pytest.importorskip("redis")
    lines, expected = undisturbed
    (tmp_path / "server").mkdir()
    with servers.broker("redis", tmp_path / "server") as server:
        together = redis.Redis(port=server.port).pipeline()
        for line in lines:
            together.xadd("events", {"value": line})
        together.execute()
        assert disturb(f"redis://{server.place}/events", tmp_path / "run", server.kill, server.start) == expected


def test_nats(tmp_path: Path, undisturbed) -> None:
    nats = pytest.importorskip("nats")
    lines, expected = undisturbed
    (tmp_path / "server").mkdir()
    with servers.broker("nats", tmp_path / "server") as server:

        async def fill() -> None:
            client = await nats.connect(f"nats://{server.place}")
            stream = client.jetstream()
            await stream.add_stream(name="events", subjects=["events"])
            for line in lines:
                await stream.publish("events", line.encode())
            await client.close()

        asyncio.run(fill())
        assert disturb(f"nats://{server.place}/events", tmp_path / "run", server.kill, server.start) == expected


def test_postgresql(tmp_path: Path, undisturbed) -> None:
    dbapi = pytest.importorskip("adbc_driver_postgresql.dbapi")
    lines, expected = undisturbed
    with servers.running(servers.Postgres) as server:
        address = server.database()
        with dbapi.connect(address) as connection, connection.cursor() as cursor:
            cursor.adbc_ingest("events", pl.DataFrame([json.loads(line) for line in lines]).to_arrow())
            connection.commit()
        for statement in PREPARE.format(table="events").split("; "):
            server.execute(statement, address)
        crash = partial(server.stop, signal.SIGKILL)
        assert disturb(f"{address}?table=events", tmp_path / "run", crash, server.start) == expected


def test_mqtt(tmp_path: Path, undisturbed) -> None:
    pytest.importorskip("paho.mqtt")
    from connectors.streams import open_sink, open_source

    lines, _ = undisturbed
    (tmp_path / "server").mkdir()
    with servers.broker("mqtt", tmp_path / "server") as server:
        calm, shaken = (f"mqtt://{server.place}/events?client={name}" for name in ("calm", "shaken"))
        for address in (calm, shaken):
            open_source(address, follow=True).close()  # from here on the broker keeps what comes for this client
        sink = open_sink(f"mqtt://{server.place}/events")
        sink.write(pl.DataFrame([json.loads(line) for line in lines]))
        sink.flush()
        sink.close()
        expected = stop(start(calm, tmp_path / "calm"), tmp_path / "calm")
        # What waits for its watermark at the end stays out here, where a file's end lets it through.
        assert set(expected) < set(undisturbed[1]) and len(expected) > 0.9 * len(undisturbed[1])
        time.sleep(1.5)  # Mosquitto writes its store every second
        assert disturb(shaken, tmp_path / "run", server.kill, server.start) == expected
