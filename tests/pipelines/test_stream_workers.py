"""Several workers: the rows and the states are those of one worker, whoever is killed and however many there are next time."""

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import polars as pl
import psutil
import pytest
import torch

from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams import open_source
from connectors.streams.parts import PARTS, PartSource, by_broker, part_of
from connectors.streams.postgres import PREPARE
from pipelines.streaming.dials import Dials, Step
from pipelines.streaming.event_time import EVERY, EventTime, Frequency, parse_duration
from pipelines.streaming.slots import open_snapshot
from pipelines.streaming.worker import Stop, StreamSummary
from pipelines.streaming.workers import Job, StreamWorker, Workers, arrange, checkpoints, numbered, read_layout, work_share
from tests import servers
from tests.connectors.brokers import broker
from tests.pipelines.test_streaming import MINUTE, OUTPUTS, START, events, run
from tests.pipelines.toy_memory import ToyMemory, toy_model


def job(source: Path | str, folder: Path, **options) -> Job:
    columns = {"unique_id": "unique_id", "ds": "ds", "y": "y", "event_id": "event_id"}
    places = dict(zip(("output", "alarms", "dead_letters"), (str(folder / name) for name in OUTPUTS), strict=True))
    policy = EventTime(Frequency.parse("1m"), grace=parse_duration("2m"))
    return Job(str(source), columns, False, policy, EVERY, places, {"batch_rows": 32, "snapshot_share": 5, "max_resident": 200, **options})


def one_by_one(source: Path | str, folder: Path, workers: int) -> list[StreamSummary]:
    """The workers' shares, here and one after another: each only ever sees its own checkpoint and outputs."""
    what = job(source, folder)
    return [work_share(what, share, toy_model(), stop=Stop()) for share in arrange(what, folder / "c.db", workers, toy_model)]


def states(folder: Path, history: Set[str] = frozenset()) -> dict[str, tuple[dict, bytes]]:
    """Stream -> its clock and its memory; each must stand in one checkpoint only, but for those with a history."""
    found: dict[str, tuple[dict, bytes]] = {}
    for path in checkpoints(folder / "c.db"):
        store = CheckpointStore(path)
        assert store.journal() == [], "a graceful stop leaves no journal"
        for name, _, _ in store.streams():
            clock, row = open_snapshot(store.read(name)[1])
            assert name not in found or name in history
            if name not in found or clock.last > found[name][0][0]:
                found[name] = (clock.dump(), row)
        store.close()
    return found


def rows(folder: Path) -> list[list[str]]:
    """Each output's lines, those of all workers together, in order of their text."""
    found = []
    for name in OUTPUTS:
        files = [folder / name, *(path for i in range(5) if (path := Path(numbered(str(folder / name), i))).exists())]
        lines = [line for path in files if path.exists() for line in path.read_text().splitlines() if not line.startswith("unique_id,")]
        found.append(sorted(lines))
    return found


def grow(source: Path, lines: list[str], to: float) -> None:
    source.write_text("".join(lines[: int(to * len(lines))]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The lines of a source with two that are no events, and the folder of one worker that read it in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = events(folder / "e.ndjson", 60, 700)
    lines = source.read_text().splitlines(keepends=True)
    lines[100:100], lines[500:500] = ["not json\n"], ['{"unique_id": "s1"}\n']
    source.write_text("".join(lines))
    run(source, folder, grace="2m", batch_rows=32)
    assert len(states(folder)) > 30
    return lines, folder


def some_of_it(source: Path | str, folder: Path, workers: int, **options) -> None:
    """Each worker in turn, stopped at another place of a source that goes on."""
    what = replace(job(source, folder, batch_rows=8), follow=True)
    shares = arrange(what, folder / "c.db", workers, toy_model)
    assert len(shares) == workers
    for share in shares:
        stop, seen = Stop(), []

        def report(step: Step, stop: Stop = stop, seen: list = seen, last: int = 2 + 3 * share.index) -> None:
            seen.append(step)
            if len(seen) == last:
                stop.set()

        out_of_lines = threading.Timer(0.4, stop.set)
        out_of_lines.start()
        work_share(what, share, toy_model(), stop=stop, report=report, **options)
        out_of_lines.cancel()


def test_any_number_of_workers_over_restarts_is_one_worker(tmp_path: Path, undisturbed) -> None:
    """2 -> 3 -> 1 -> 4, while the source grows; each time every worker stops at another place of it."""
    lines, expected = undisturbed
    source = tmp_path / "e.ndjson"
    for workers, to in ((2, 0.4), (3, 0.7), (1, 0.9)):
        grow(source, lines, to)
        some_of_it(source, tmp_path, workers)
    grow(source, lines, 1.0)
    one_by_one(source, tmp_path, 4)
    assert states(tmp_path) == states(expected)
    assert rows(tmp_path) == rows(expected)
    assert read_layout(tmp_path / "c.db").generation == 4
    assert sorted(p.name for p in (tmp_path / "c.db.workers").glob("*.db")) == [f"4-{i}.db" for i in range(4)]


def test_partitions_of_kafka(tmp_path: Path, undisturbed) -> None:
    """Streams move with the partition they come in, those that have only read a history, too."""
    pytest.importorskip("confluent_kafka")
    lines = [line.strip() for line in undisturbed[0][:400] if "ds" in line]
    past = (["s1", "s2", "never"], [START - MINUTE] * 3, ToyMemory().initial_state(3)._replace(mean=torch.tensor([5.0, 6.0, 7.0])))
    (tmp_path / "e.ndjson").write_text("\n".join(lines))
    (tmp_path / "one").mkdir()
    run(tmp_path / "e.ndjson", tmp_path / "one", grace="2m", past=past)
    (tmp_path / "broker").mkdir()
    with broker("noida", tmp_path / "broker") as kafka:
        kafka.create("events", 5)
        kafka.send("events", lines, 5)
        address = f"kafka://{kafka.address}/events"
        for workers in (2, 3, 1):
            some_of_it(address, tmp_path, workers, past=past)
        one_by_one(address, tmp_path, 2)
        assert states(tmp_path, history={"s1", "s2", "never"}) == states(tmp_path / "one")
        assert rows(tmp_path)[:2] == rows(tmp_path / "one")[:2]
        with pytest.raises(UserError, match="6 workers cannot share the 5 partitions"):
            one_by_one(address, tmp_path, 6)
        from confluent_kafka import Producer

        kafka.create("wild", 2)
        for partition in range(2):
            producer = Producer({"bootstrap.servers": kafka.address})
            producer.produce("wild", lines[0].encode(), partition=partition)
            producer.flush(10)
        with pytest.raises(UserError, match=r"comes in partitions wild\[\d\] and wild\[\d\]"):
            one_by_one(f"kafka://{kafka.address}/wild", tmp_path / "wild", 1)
        with pytest.raises(UserError, match="does not keep in which partition"):
            arrange(job(address, tmp_path / "one"), tmp_path / "one/c.db", 2, toy_model)


def redis_of(lines: list[str], folder: Path) -> Iterator[str]:
    redis = pytest.importorskip("redis")
    with servers.broker("redis", folder) as server:
        together = redis.Redis(port=server.port).pipeline()
        for line in lines:
            together.xadd("events", {"value": line})
        together.execute()
        yield f"redis://{server.place}/events"


def nats_of(lines: list[str], folder: Path) -> Iterator[str]:
    nats = pytest.importorskip("nats")
    with servers.broker("nats", folder) as server:

        async def fill() -> None:
            client = await nats.connect(f"nats://{server.place}")
            stream = client.jetstream()
            await stream.add_stream(name="events", subjects=["events"])
            for number, line in enumerate(lines):
                await stream.publish("events", line.encode())
                if number == 50:  # a message deleted by hand must not shift the places of those after it
                    await stream.publish("events", b"to be deleted")
                    await stream.delete_msg("events", 52)
            await client.close()

        asyncio.run(fill())
        yield f"nats://{server.place}/events"


def postgres_of(lines: list[str], folder: Path) -> Iterator[str]:
    dbapi = pytest.importorskip("adbc_driver_postgresql.dbapi")
    with servers.running(servers.Postgres) as server:
        address = server.database()
        with dbapi.connect(address) as connection, connection.cursor() as cursor:
            cursor.adbc_ingest("events", pl.DataFrame([json.loads(line) for line in lines]).to_arrow())
            connection.commit()
        for statement in PREPARE.format(table="events").split("; "):
            server.execute(statement, address)
        yield f"{address}?table=events"


@pytest.mark.parametrize("fill", [redis_of, nats_of, postgres_of])
def test_brokers_of_one_order(tmp_path: Path, undisturbed, fill: Callable[[list[str], Path], Iterator[str]]) -> None:
    lines = [line.strip() for line in undisturbed[0][:300] if "ds" in line]
    (tmp_path / "e.ndjson").write_text("\n".join(lines))
    (tmp_path / "one").mkdir()
    run(tmp_path / "e.ndjson", tmp_path / "one", grace="2m")
    (tmp_path / "server").mkdir()
    with contextlib.contextmanager(fill)(lines, tmp_path / "server") as address:
        some_of_it(address, tmp_path, 2)
        one_by_one(address, tmp_path, 3)
    assert states(tmp_path) == states(tmp_path / "one")
    assert rows(tmp_path)[:2] == rows(tmp_path / "one")[:2]


def test_one_worker_becomes_several(tmp_path: Path, undisturbed) -> None:
    lines, expected = undisturbed
    source = tmp_path / "e.ndjson"
    source.write_text("".join(lines))
    run(source, tmp_path, grace="2m", batch_rows=32, max_events=300)
    summaries = one_by_one(source, tmp_path, 3)
    assert sum(one.counters["received"] for one in summaries) == len(lines)
    assert states(tmp_path) == states(expected) and rows(tmp_path) == rows(expected)
    assert not (tmp_path / "c.db").exists()


def test_what_is_refused(tmp_path: Path, undisturbed) -> None:
    lines, _ = undisturbed
    source = tmp_path / "e.ndjson"
    source.write_text("".join(lines))
    for address in ("-", "mqtt://127.0.0.1/sensors"):
        with pytest.raises(UserError, match="cannot share .*read once only"):
            by_broker(address)
    with pytest.raises(UserError, match="65 workers cannot share the 64 partitions"):
        arrange(job(source, tmp_path), tmp_path / "c.db", PARTS + 1, toy_model)
    with (
        Workers(job(source, tmp_path), tmp_path / "c.db", 1, toy_model),
        pytest.raises(UserError, match="running already"),
        Workers(job(source, tmp_path), tmp_path / "c.db", 1, toy_model),
    ):
        pass
    with pytest.raises(UserError, match="belongs to another source"):
        arrange(replace(job(source, tmp_path), source="kafka://h/t"), tmp_path / "c.db", 1, toy_model)


def test_partitions_that_stand_at_different_places(tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 200, 300)
    whole = open_source(str(source)).poll(1000, 0).records
    assert {part_of(f"s{i}") for i in range(2000)} == set(range(PARTS))

    def reader(parts: range, positions: dict) -> PartSource:
        inner = open_source(str(source))
        made = PartSource(inner, parts, {"place": 0, "at": inner.positions()})
        made.seek(positions)
        return made

    first, second = reader(range(32), {}), reader(range(32, 64), {})
    a, b = first.poll(40, 0).records, second.poll(90, 0).records
    assert len(a) == 40 and len(b) == 90 and {part_of(r.unique_id) < 32 for r in a} == {True}
    both = json.loads(json.dumps({**first.positions(), **second.positions()}))
    third = reader(range(64), both)
    behind = ",".join(map(str, range(32)))
    assert third.positions()[behind] == both[behind] and third.positions()["63"] == both[",".join(map(str, range(32, 64)))]
    rest = third.poll(1000, 0).records
    assert sorted(r.offset for r in [*a, *b, *rest]) == [r.offset for r in whole] and not third.poll(10, 0).records and third.ended
    assert list(third.positions()) == [",".join(map(str, range(64)))]


# On Ray.


@pytest.fixture(scope="module")
def ray_of_three() -> Iterator[None]:
    from pipelines.windows import ray_cluster

    ray_cluster(3)
    import ray

    if ray.cluster_resources().get("CPU", 0) < 3:  # another test's cluster
        ray.shutdown()
        ray_cluster(3)
    yield
    ray.shutdown()


def actors() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "StreamWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the workers did not get that far"
        time.sleep(0.02)


def supervised(source: Path, folder: Path, workers: int, disturb: Callable[[list[Step], str], None]) -> StreamSummary:
    """Real actors on a source that is followed, until `disturb` (the steps told so far, the address of the dials) has returned."""
    stop, told, failed = Stop(), [], []
    with Dials(0) as dials, Workers(replace(job(source, folder, batch_rows=8), follow=True), folder / "c.db", workers, toy_model) as several:

        def report(step: Step) -> None:
            dials(step)
            told.append(step)

        def disturber() -> None:
            try:
                disturb(told, dials.address)
            except BaseException as error:
                failed.append(error)
            finally:
                stop.set()

        thread = threading.Thread(target=disturber, daemon=True)
        thread.start()
        summary = several.run(stop=stop, report=report, answer=dials.answer)
        thread.join()
    if failed:
        raise failed[0]
    return summary


def test_actors_killed_then_more_then_one(tmp_path: Path, undisturbed, ray_of_three: None) -> None:
    """Two actors, one of them killed in the middle; then three; then one, in this process."""
    lines, expected = undisturbed
    source = tmp_path / "e.ndjson"
    grow(source, lines, 0.4)

    def received(told: list[Step]) -> int:
        return told[-1].counters["received"] if told else 0

    def kill_one(told: list[Step], address: str) -> None:
        wait_for(lambda: received(told) > 0.2 * len(lines))
        victim = actors()[0]
        victim.send_signal(signal.SIGKILL)
        grow(source, lines, 0.6)
        wait_for(lambda: told[-1].restarts == 1 and received(told) == int(0.6 * len(lines)))
        assert victim.pid not in {process.pid for process in actors()}
        answer = [json.loads(line) for line in urlopen(f"{address}/forecast?unique_id=s1&unique_id=s2").read().splitlines()]
        assert {row["unique_id"] for row in answer} == {"s1", "s2"}
        metrics = urlopen(f"{address}/metrics").read().decode()
        assert "tethys_worker_restarts 1.0" in metrics and f"tethys_streams {float(told[-1].streams)}" in metrics
        assert urlopen(f"{address}/readyz").status == 200

    summary = supervised(source, tmp_path, 2, kill_one)
    assert summary.workers == 2 and summary.restarts == 1 and summary.stopped == "signal"
    assert summary.counters["received"] == int(0.6 * len(lines))

    def all_of_it(told: list[Step], address: str) -> None:
        grow(source, lines, 0.9)
        wait_for(lambda: received(told) == int(0.9 * len(lines)))

    assert supervised(source, tmp_path, 3, all_of_it).workers == 3
    grow(source, lines, 1.0)
    with Workers(job(source, tmp_path), tmp_path / "c.db", 1, toy_model) as several:
        assert several.run(stop=Stop()).workers is None
    assert states(tmp_path) == states(expected)
    assert rows(tmp_path) == rows(expected)


def test_a_mistake_in_a_worker_comes_back_as_a_line(tmp_path: Path, undisturbed) -> None:
    lines, _ = undisturbed
    source = tmp_path / "e.ndjson"
    source.write_text("".join(lines))
    (tmp_path / "out.1.csv").write_text("of another run\n")
    what = job(source, tmp_path)
    said = StreamWorker(what, arrange(what, tmp_path / "c.db", 2, toy_model)[1]).run(toy_model, None)
    assert "out.1.csv' already holds" in said and "\n" not in said
