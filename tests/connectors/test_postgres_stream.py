import json
import signal

import polars as pl
import pytest

pytest.importorskip("adbc_driver_postgresql")

from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from connectors.streams.postgres import PREPARE
from tests import servers

TABLE = "CREATE TABLE events (unique_id text, ds timestamptz, y double precision)"


def prepare(postgres: servers.Postgres, address: str) -> None:
    postgres.execute(TABLE, address)
    for statement in PREPARE.format(table="events").split("; "):
        postgres.execute(statement, address)


@pytest.fixture
def address(postgres: servers.Postgres) -> str:
    made = postgres.database()
    prepare(postgres, made)
    return made


def insert(count: int, first: int = 0) -> str:
    numbers = f"generate_series({first}, {first + count - 1}) AS n"
    return f"INSERT INTO events SELECT 's' || n % 3, timestamptz '2024-01-01 00:00:00+02' + n * interval '1 hour', n FROM {numbers}"


def test_read_stop_and_go_on_at_a_position(postgres: servers.Postgres, address: str) -> None:
    postgres.execute(insert(20), address)
    source = open_source(f"{address}?table=events", follow=True)
    first = source.poll(7, 5).records
    kept = json.loads(json.dumps(source.positions()))
    source.close()
    again = open_source(f"{address}?table=public.events", follow=True)
    with pytest.raises(UserError, match="not to"):
        again.seek(kept)
    again.close()
    again = open_source(f"{address}?table=events", follow=True)
    again.seek(kept)
    rest = again.poll(100, 0.2).records
    assert [r.y for r in first + rest] == [float(n) for n in range(20)]
    assert first[0].ds == 1_704_060_000_000_000  # 2023-12-31 22:00 UTC
    assert not again.poll(10, 0.05).records and not again.ended
    postgres.execute(insert(1, 20), address)
    assert [r.y for r in again.poll(10, 5).records] == [20.0]
    again.close()


def test_a_transaction_that_commits_late_loses_nothing(postgres: servers.Postgres, address: str) -> None:
    from adbc_driver_postgresql import dbapi

    source = open_source(f"{address}?table=events", follow=True)
    with dbapi.connect(address) as slow, slow.cursor() as cursor:
        cursor.execute(insert(1, 5))
        postgres.execute(insert(1, 6), address)  # a later number, committed first
        assert source.poll(10, 0.2).records == []
        slow.commit()
    assert [r.y for r in source.poll(10, 5).records] == [5.0, 6.0]
    source.close()


def test_a_finite_read_bad_rows_and_a_missing_value(postgres: servers.Postgres, address: str) -> None:
    postgres.execute(insert(3), address)
    postgres.execute("INSERT INTO events VALUES (NULL, now(), 1), ('a', '2024-05-05T00:00:00Z', NULL)", address)
    source = open_source(f"{address}?table=events", follow=False)
    postgres.execute(insert(1, 50), address)  # after the end that counts
    batch = source.poll(100, 1)
    assert len(batch.records) == 4 and batch.records[-1].y != batch.records[-1].y and [d.reason for d in batch.dead] == ["malformed"]
    assert source.ended
    source.close()


def test_rows_stand_once_after_a_crash_before_the_commit(postgres: servers.Postgres, address: str) -> None:
    rows = pl.DataFrame({"unique_id": ["a", "b"], "yhat": [1.0, 2.0]})
    sink = open_sink(f"{address}?table=forecasts")
    sink.resume(None)
    sink.write(rows)
    receipt = json.loads(json.dumps(sink.flush()))
    sink.write(rows)
    sink.flush()  # never committed
    sink.close()
    again = open_sink(f"{address}?table=forecasts")
    again.resume(receipt)
    again.write(rows)
    again.write(rows)
    again.flush()
    again.close()
    found = postgres.execute("SELECT row_number, yhat FROM forecasts ORDER BY row_number", address)
    assert found == [(n, float(2 - n % 2)) for n in range(1, 7)]


def test_mistakes_are_one_clear_line(postgres: servers.Postgres, address: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_source(f"{address}?table=none")
    postgres.execute("CREATE TABLE bare (y int)", address)
    with pytest.raises(UserError, match="ALTER TABLE \"bare\" ADD COLUMN"):
        open_source(f"{address}?table=bare")
    with pytest.raises(UserError, match="must not hold a password") as error:
        open_source(address.replace("tethys@", "tethys:hunter2@") + "?table=events")
    assert "hunter2" not in str(error.value)
    with pytest.raises(UserError, match="is not postgresql://"):
        open_source(address)
    with pytest.raises(UserError, match="cannot reach PostgreSQL"):
        open_source("postgresql://tethys@127.0.0.1:1/x?table=events")


def test_a_server_that_crashes_and_comes_back() -> None:
    with servers.running(servers.Postgres) as own:
        address = own.database()
        prepare(own, address)
        own.execute(insert(10), address)
        source = open_source(f"{address}?table=events", follow=True)
        assert len(source.poll(4, 2).records) == 4
        own.stop(signal.SIGKILL)
        assert source.poll(4, 0.2).records == []
        own.start()
        found: list[float] = []
        while len(found) < 6:
            found += [r.y for r in source.poll(100, 5).records]
        assert found == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
        source.close()
