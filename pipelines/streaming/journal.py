"""What came in and what was learnt, as bytes: Arrow tables, so that nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from connectors.streams.base import DeadLetter, Record
from pipelines.streaming.event_time import Row

RECORDS = pa.schema(
    [
        ("unique_id", pa.string()),
        ("ds", pa.int64()),
        ("y", pa.float64()),
        ("event_id", pa.string()),
        ("partition", pa.dictionary(pa.int32(), pa.string())),
        ("offset", pa.int64()),
    ]
)
ROWS = pa.schema([("unique_id", pa.string()), ("ds", pa.int64()), ("y", pa.float64()), ("gap", pa.int64())])


@dataclass(frozen=True, slots=True)
class Arrivals:
    """One batch as it came: records in order, refused lines, and streams whose waiting events are let through now."""

    records: Sequence[Record] = ()
    dead: Sequence[DeadLetter] = ()
    flush: Sequence[str] = field(default=())


def pack_arrivals(arrivals: Arrivals) -> bytes:
    rest = json.dumps([list(arrivals.dead), list(arrivals.flush)])
    return _pack(arrivals.records, RECORDS.with_metadata({"rest": rest}))


def unpack_arrivals(data: bytes) -> Arrivals:
    table = _unpack(data)
    dead, flush = json.loads(table.schema.metadata[b"rest"])
    records = [Record(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]
    return Arrivals(records, [DeadLetter(*letter) for letter in dead], flush)


def pack_rows(rows: Sequence[Row], arrivals: Arrivals) -> bytes:
    """What a batch taught. The usual case, that every record was taken at once and in order, takes no bytes."""
    records = arrivals.records
    if len(rows) == len(records) and all(
        row.gap == 0 and row.ds == record.ds and row.unique_id == record.unique_id for row, record in zip(rows, records, strict=True)
    ):
        return b""
    return _pack(rows, ROWS)


def unpack_rows(data: bytes, arrivals: Arrivals) -> list[Row]:
    if not data:
        return [Row(record.unique_id, record.ds, record.y, 0) for record in arrivals.records]
    return [Row(*row) for row in zip(*(column.to_pylist() for column in _unpack(data).columns), strict=True)]


def _pack(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> bytes:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return sink.getvalue().to_pybytes()


def _unpack(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
