"""Batch tables on real servers: PostgreSQL and an S3-compatible object store."""

from __future__ import annotations

import signal
from datetime import UTC, datetime

import polars as pl
import pytest

from connectors import tables
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


def test_parquet_on_an_object_store(s3: str) -> None:
    tables.write(FRAME, f"{s3}/sales.parquet")
    assert tables.read(f"{s3}/sales.parquet").equals(FRAME)
