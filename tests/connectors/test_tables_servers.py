"""Batch tables on real servers: PostgreSQL and an S3-compatible object store."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from connectors import tables
from connectors.errors import UserError
from tests.servers import ObjectStore, Postgres

FRAME = pl.DataFrame(
    {
        "unique_id": ["a", "a", "b"],
        "ds": [datetime(2024, 1, 1, h, tzinfo=UTC) for h in (0, 1, 0)],
        "y": [1.0, 2.5, None],
    }
)


@pytest.fixture
def s3(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty bucket, reached as a user reaches it: by the environment."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_store.bucket()}"


def test_a_postgresql_table_is_written_replaced_and_read(postgres: Postgres) -> None:
    address = postgres.database()
    tables.write(FRAME, f"{address}#sales")
    tables.write(FRAME.head(2), f"{address}#sales")
    assert tables.read(f"{address}#sales").equals(FRAME.head(2))


def test_what_postgresql_committed_survives_a_crash_of_the_server(postgres: Postgres) -> None:
    address = postgres.database()
    tables.write(FRAME, f"{address}#sales")
    postgres.stop(signal.SIGKILL)
    postgres.start()
    assert tables.read(f"{address}#sales").equals(FRAME)


def dated(as_of: str, value: float = 1.0) -> pl.DataFrame:
    return FRAME.with_columns(y=pl.lit(value), as_of=pl.lit(as_of))


def test_a_postgresql_table_keeps_its_indexes_and_is_replaced_in_one_transaction(postgres: Postgres) -> None:
    address = postgres.database()
    tables.write(FRAME, f"{address}#sales")
    postgres.execute('CREATE INDEX by_id ON sales (unique_id)', address)
    tables.write(iter([FRAME[:1], FRAME[1:]]), f"{address}#sales")
    assert tables.read(f"{address}#sales").equals(FRAME)
    assert postgres.execute("SELECT count(*) FROM pg_indexes WHERE indexname = 'by_id'", address) == [(1,)]

    def torn() -> Iterator[pl.DataFrame]:
        yield FRAME[:1]
        raise RuntimeError("torn")

    with pytest.raises(UserError, match="cannot write 'postgresql://.*': torn"):
        tables.write(torn(), f"{address}#sales")
    with pytest.raises(UserError, match="cannot write 'postgresql"):
        tables.write(FRAME.with_columns(y=pl.lit("text")), f"{address}#sales")
    assert tables.read(f"{address}#sales").equals(FRAME), "a write that fails changes nothing"
    with pytest.raises(UserError, match=r"table sales has other columns \(it has 'y' beside; it lacks 'z'\)"):
        tables.write(FRAME.rename({"y": "z"}), f"{address}#sales")


def test_a_run_that_is_repeated_replaces_its_own_rows_in_postgresql(postgres: Postgres) -> None:
    uri = f"{postgres.database()}#forecasts"
    for as_of, value in (("2024-01-01", 1.0), ("2024-01-02", 2.0), ("2024-01-01", 3.0), ("it's", 4.0), ("it's", 5.0)):
        tables.write(dated(as_of, value), uri, replacing={"as_of": as_of})
    found = tables.read(uri)
    assert found.height == 3 * FRAME.height
    assert dict(found.select("as_of", "y").unique().iter_rows()) == {"2024-01-01": 3.0, "2024-01-02": 2.0, "it's": 5.0}


def test_two_runs_at_once_leave_the_rows_of_one(postgres: Postgres) -> None:
    uri = f"{postgres.database()}#forecasts"
    tables.write(dated("2024-01-01", 0.0), uri, replacing={"as_of": "2024-01-01"})
    writers = [
        threading.Thread(target=tables.write, args=(dated("2024-01-01", float(i)), uri), kwargs={"replacing": {"as_of": "2024-01-01"}})
        for i in range(1, 5)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = tables.read(uri)
    assert found.height == FRAME.height and found["y"].n_unique() == 1 and found["y"][0] > 0


def test_a_query_is_read_and_not_written(postgres: Postgres) -> None:
    address = postgres.database()
    postgres.execute('CREATE SCHEMA "Shop"', address)
    tables.write(FRAME, f"{address}#Shop.sales")
    assert tables.read(f"{address}#Shop.sales").equals(FRAME)
    query = """#SELECT unique_id AS id, sum(y) AS y FROM "Shop".sales WHERE y IS NOT NULL GROUP BY 1"""
    assert tables.read(address + query).rows() == [("a", 3.5)]
    with pytest.raises(UserError, match="a query can be read, not written"):
        tables.write(FRAME, address + query)
    with pytest.raises(UserError, match="cannot read .*: .*nowhere"):
        tables.read(f"{address}#nowhere")


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://me:hunter2@127.0.0.1:1/db#t", "postgresql://127.0.0.1:1/db?password=hunter2#t", "s3://key:hunter2@bucket/t.parquet",
        "mysql://me:hunter2@127.0.0.1/t", "delta+s3://key:hunter2@bucket/t",
    ],
)  # fmt: skip
def test_a_password_in_an_address_is_refused_and_not_shown(uri: str) -> None:
    for act in (lambda: tables.read(uri), lambda: tables.write(FRAME, uri)):
        with pytest.raises(UserError, match="must not hold a password") as caught:
            act()
        assert "hunter2" not in str(caught.value)


def test_parquet_and_csv_on_an_object_store(s3: str) -> None:
    tables.write(FRAME, f"{s3}/sales.parquet")
    assert tables.read(f"{s3}/sales.parquet").equals(FRAME)
    tables.write(FRAME.head(1), f"{s3}/sales.parquet")
    assert tables.read(f"{s3}/sales.parquet").height == 1
    tables.write(iter([FRAME[:2], FRAME[2:]]), f"{s3}/sales.csv")
    assert tables.read(f"{s3}/sales.csv").with_columns(pl.col("ds").dt.replace_time_zone("UTC")).equals(FRAME)
    with pytest.raises(UserError, match="is one object, of which no part can be replaced"):
        tables.write(dated("2024-01-01"), f"{s3}/sales.parquet", replacing={"as_of": "2024-01-01"})


def test_globs_and_partitioned_folders_on_an_object_store(s3: str) -> None:
    for shop in ("a", "b"):
        tables.write(FRAME.filter(unique_id=shop).drop("unique_id"), f"{s3}/sales/unique_id={shop}/part.parquet")
    assert tables.read(f"{s3}/sales/").select(FRAME.columns).sort("unique_id", "ds").equals(FRAME)
    assert tables.read(f"{s3}/sales/*/*.parquet").height == 3


def test_what_an_object_store_refuses_is_one_line_without_the_secret(s3: str, object_store: ObjectStore) -> None:
    for act in (lambda: tables.read(f"{s3}/nothing.parquet"), lambda: tables.write(FRAME, "s3://no-such-bucket-here/t.parquet")):
        with pytest.raises(UserError, match=r"cannot (read|write) 's3://") as caught:
            act()
        assert "\n" not in str(caught.value)
        assert object_store.environment["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


@pytest.mark.parametrize("where", ["folder", "object store"])
def test_a_delta_table_has_versions_and_replaces_a_part(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    place = f"delta://{tmp_path}/table" if where == "folder" else f"delta+{request.getfixturevalue('s3')}/table"
    for as_of, value in (("2024-01-01", 1.0), ("2024-01-02", 2.0), ("2024-01-01", 3.0), ("it's", 4.0), ("it's", 5.0)):
        tables.write(dated(as_of, value), place, replacing={"as_of": as_of})
    found = tables.read(place)
    assert found.height == 3 * FRAME.height
    assert dict(found.select("as_of", "y").unique().iter_rows()) == {"2024-01-01": 3.0, "2024-01-02": 2.0, "it's": 5.0}
    assert tables.read(f"{place}?version=0").sort("unique_id", "ds").equals(dated("2024-01-01", 1.0))
    tables.write(dated("2024-01-09"), place)
    assert tables.read(place).height == FRAME.height
    with pytest.raises(UserError, match="an older version of a table stays as it is"):
        tables.write(FRAME, f"{place}?version=0")
    with pytest.raises(UserError, match=r"\?version=N"):
        tables.read(f"{place}?as_of=yesterday")
