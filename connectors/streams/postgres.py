"""PostgreSQL tables as streams (ADBC): a table that grows is tailed, rows go out in the transaction of a flush.

Numbers from a sequence become visible out of order: a slow transaction may commit number 5 after number 6 was read. So
rows are read by the transaction that wrote them, and only up to the oldest transaction that still runs: what is behind
that line is complete and stays so. For this the table carries the transaction in a column (`PREPARE`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from uuid import uuid4

import polars as pl

from connectors.errors import UserError
from connectors.streams.base import Batch, Decoder, Positions, Record, long_rows

FORM = "postgresql://USER@HOST:PORT/DATABASE?table=NAME"
PREPARE = (
    'ALTER TABLE {table} ADD COLUMN IF NOT EXISTS "tethys_transaction" xid8 NOT NULL DEFAULT pg_current_xact_id(), '
    'ADD COLUMN IF NOT EXISTS "tethys_number" bigserial; CREATE INDEX ON {table} ("tethys_transaction", "tethys_number")'
)
POLL_SECONDS = 0.05
OPEN_SECONDS = 10


def _split(address: str) -> tuple[str, str, str]:
    """The address for the driver, what may be shown of it, and the table as SQL."""
    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query))
    table = options.pop("table", "")
    if not parts.hostname or not parts.path.strip("/") or not table:
        raise UserError(f"'{parts.scheme}://{parts.hostname or ''}...' is not {FORM}")
    if parts.password is not None:
        raise UserError("an address must not hold a password (it ends in logs and process lists): set PGPASSWORD, or use a password file")
    options.setdefault("connect_timeout", str(OPEN_SECONDS))
    place = f"{parts.hostname}:{parts.port or 5432}{parts.path}"
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table.split("."))
    return urlunsplit(parts._replace(query=urlencode(options))), place, quoted


def _connect(address: str, place: str) -> Any:
    try:
        from adbc_driver_postgresql import dbapi
    except ImportError as error:
        raise UserError("PostgreSQL needs the extra 'postgres': pip install 'tethys-streams[postgres]'") from error
    try:
        return dbapi.connect(address)
    except dbapi.Error as error:
        raise UserError(f"cannot reach PostgreSQL at {place}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class PostgresSource:
    """The rows of one table in the order of their transactions. Position: transaction and number of the last row.

    Every column takes part in the record under its name; times come as ISO 8601 in UTC.
    """

    def __init__(self, address: str, *, columns: Mapping[str, str | None] | None = None, count_steps: bool = False, follow: bool = True):
        self.address, self.place, self.table = _split(address)
        self.decoder = Decoder("json", columns, count_steps=count_steps)
        self.follow, self.ended = follow, False
        self.away = False
        self.last = (0, 0)
        self.taken = 0
        self.connection = _connect(self.address, self.place)
        try:
            self.identity = int(self._ask("SELECT $1::regclass::oid::bigint", self.table)[0][0])
            self.horizon = self._horizon()
            self._rows(1)
        except Exception as error:
            self.connection.close()
            reason = _first_line(error)
            if "tethys_" in reason:
                raise UserError(f"the table {self.table} has no order that a reader can follow: {PREPARE.format(table=self.table)}") from error
            raise UserError(f"cannot read the table {self.table} at {self.place}: {reason}") from error

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        self.connection.rollback()  # no transaction stays open between reads: it would hold everybody's line back
        return rows

    def _horizon(self) -> int:
        """The oldest transaction that still runs: everything before it is visible or will never be."""
        return int(self._ask("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")[0][0])

    def _rows(self, count: int) -> list[tuple[Any, ...]]:
        return self._ask(
            f'SELECT "tethys_transaction"::text::bigint, "tethys_number", '
            "(to_jsonb(t) - 'tethys_transaction' - 'tethys_number')::text "
            f"FROM {self.table} AS t "
            'WHERE ("tethys_transaction", "tethys_number") > ($1::text::xid8, $2) '
            'AND "tethys_transaction" < LEAST(pg_snapshot_xmin(pg_current_snapshot()), $3::text::xid8) '
            'ORDER BY "tethys_transaction", "tethys_number" LIMIT $4',
            str(self.last[0]), self.last[1], str(self.horizon if not self.follow else 2**62), count,
        )  # fmt: skip

    def poll(self, max_records: int, timeout: float) -> Batch:
        batch = Batch([], [])
        deadline = time.monotonic() + timeout
        while len(batch) < max_records:
            rows = self._lasting(max_records - len(batch))
            for transaction, number, text in rows:
                self.last, self.taken = (transaction, number), self.taken + 1
                outcome = self.decoder.decode(text.encode(), self.table, number)
                if isinstance(outcome, Record):
                    batch.records.append(outcome)
                else:
                    batch.dead.append(outcome)
            if rows:
                continue
            if not self.follow and not self.away:
                self.ended = True
                break
            left = deadline - time.monotonic()
            if len(batch) or left <= 0:
                break
            time.sleep(min(POLL_SECONDS, left))
        return batch

    def _lasting(self, count: int) -> list[tuple[Any, ...]]:
        """A server that is away is waited for: nothing is handed out, and reading goes on where it stood."""
        from adbc_driver_postgresql import dbapi

        try:
            rows = self._rows(count)
            self.away = False
            return rows
        except dbapi.ProgrammingError as error:
            raise UserError(f"cannot read the table {self.table} at {self.place}: {_first_line(error)}") from error
        except dbapi.Error:
            self.away = True
            time.sleep(POLL_SECONDS)
            try:
                fresh = dbapi.connect(self.address)
            except dbapi.Error:
                return []
            self.connection.close()
            self.connection = fresh
            return []

    def positions(self) -> Positions:
        return {self.table: {"transaction": self.last[0], "number": self.last[1], "table": self.identity}}

    def seek(self, positions: Positions) -> None:
        place = positions.get(self.table)
        if place is None or len(positions) > 1:
            raise UserError(f"the checkpoint belongs to {sorted(positions)}, not to {self.table}: use another checkpoint")
        if place["table"] != self.identity:
            raise UserError(f"the table {self.table} was made anew since the checkpoint: start with a new checkpoint")
        self.last, self.ended = (int(place["transaction"]), int(place["number"])), False

    def reached(self) -> int:
        """Of the last row, in the order of transactions and then of numbers."""
        return (self.last[0] << 64) + self.last[1]

    def commit(self, positions: Positions) -> None:
        return None

    def lag(self) -> int | None:
        return None  # counting rows costs as much as reading them

    def close(self) -> None:
        self.connection.close()




class PostgresSink:
    """Rows appended to one table, made when it is absent. All rows of a flush appear at once, or none.

    Each row carries the writer's name and its number. Receipt: both. On `resume` the rows after the receipt are taken
    back, so every row is there once.
    """

    def __init__(self, address: str):
        self.address, self.place, self.table = _split(address)
        self.connection = _connect(self.address, self.place)
        self.writer, self.rows = uuid4().hex, 0
        self.frames: list[pl.DataFrame] = []

    def resume(self, receipt: Any | None) -> None:
        if receipt is None:
            return
        self.writer, self.rows = receipt["writer"], int(receipt["rows"])
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT to_regclass($1)::text", (self.table,))
            if cursor.fetchall()[0][0] is not None:
                cursor.execute(f"DELETE FROM {self.table} WHERE writer = $1 AND row_number > $2", (self.writer, self.rows))
        self.connection.commit()

    def write(self, rows: pl.DataFrame) -> None:
        rows = long_rows(rows)
        if rows.height:
            numbers = pl.int_range(self.rows + 1, self.rows + rows.height + 1, dtype=pl.Int64).alias("row_number")
            self.frames.append(rows.with_columns(numbers, writer=pl.lit(self.writer)))
            self.rows += rows.height

    def flush(self) -> Any:
        from adbc_driver_postgresql import dbapi

        if self.frames:
            schema, _, table = self.table.rpartition(".")
            try:
                with self.connection.cursor() as cursor:
                    cursor.adbc_ingest(
                        _unquoted(table), pl.concat(self.frames).to_arrow(), mode="create_append", db_schema_name=_unquoted(schema) or None
                    )
                self.connection.commit()
            except dbapi.Error as error:
                raise UserError(f"PostgreSQL did not take the rows for {self.table}: {_first_line(error)}; nothing is committed") from error
            self.frames = []
        return {"writer": self.writer, "rows": self.rows}

    def close(self) -> None:
        self.connection.close()


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"')
