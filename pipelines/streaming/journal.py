"""What came in and what was learnt, as bytes: Arrow tables, so that nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from connectors.streams.base import DeadLetter, Record, Records

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


class Arrivals:
    """One batch as it came: records in order, refused lines, and streams whose waiting events are let through now."""

    __slots__ = ("dead", "flush", "records")

    def __init__(self, records: Iterable[Record] = (), dead: Sequence[DeadLetter] = (), flush: Sequence[str] = ()):
        self.records = Records.of(records)
        self.dead = dead
        self.flush = flush

    def streams(self) -> list[str]:
        """Name of the stream of each record, then those to flush."""
        return [*self.records.unique_id, *self.flush]


@dataclass(frozen=True)
class Rows:
    """What a batch taught: rows in their order, a column each."""

    unique_id: list[str]
    ds: np.ndarray
    """(n,) int64."""
    y: np.ndarray
    """(n,) float64; NaN: missing, the memory takes the step without a write."""
    gap: np.ndarray
    """(n,) int64: steps of the grid between the row before and this one for which nothing came."""

    def __len__(self) -> int:
        return len(self.unique_id)


def pack_arrivals(arrivals: Arrivals) -> bytes:
    rest = json.dumps([list(arrivals.dead), list(arrivals.flush)])
    r = arrivals.records
    partition = pa.DictionaryArray.from_arrays(pa.array(r.partition, pa.int32()), pa.array(r.partitions, pa.string()))
    events = pa.nulls(len(r), pa.string()) if r.event_id is None else pa.array(r.event_id, pa.string())
    arrays = [pa.array(r.unique_id, pa.string()), pa.array(r.ds), pa.array(r.y), events, partition, pa.array(r.offset)]
    return _pack(arrays, RECORDS.with_metadata({"rest": rest}))


def unpack_arrivals(data: bytes) -> Arrivals:
    table = _unpack(data)
    dead, flush = json.loads(table.schema.metadata[b"rest"])
    name, ds, y, event, partition, offset = (column.combine_chunks() for column in table.columns)
    events = None if event.null_count == len(event) else event.to_pylist()
    places = partition.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    records = Records(
        name.to_pylist(), _numbers(ds), _numbers(y), events, partition.dictionary.to_pylist(), places, _numbers(offset)
    )
    return Arrivals(records, [DeadLetter(*letter) for letter in dead], flush)


def pack_rows(rows: Rows, arrivals: Arrivals) -> bytes:
    """What a batch taught. The usual case, that every record was taken at once and in order, takes no bytes."""
    records = arrivals.records
    if len(rows) == len(records) and not rows.gap.any() and (rows.ds == records.ds).all() and rows.unique_id == records.unique_id:
        return b""
    return _pack([pa.array(rows.unique_id, pa.string()), pa.array(rows.ds), pa.array(rows.y), pa.array(rows.gap)], ROWS)


def unpack_rows(data: bytes, arrivals: Arrivals) -> Rows:
    if not data:
        r = arrivals.records
        return Rows(r.unique_id, r.ds, r.y, np.zeros(len(r), dtype=np.int64))
    name, ds, y, gap = (column.combine_chunks() for column in _unpack(data).columns)
    return Rows(name.to_pylist(), _numbers(ds), _numbers(y), _numbers(gap))


def _numbers(column: pa.Array) -> np.ndarray:
    return np.array(column)


def _pack(arrays: list[pa.Array], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue().to_pybytes()


def _unpack(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
