"""Live sources and sinks by address."""

from __future__ import annotations

from collections.abc import Mapping

from connectors.errors import UserError
from connectors.streams.base import Sink, Source
from connectors.streams.files import FileSink, FileSource, ParquetSink, StdinSource


def open_source(
    address: str, *, columns: Mapping[str, str | None] | None = None, count_steps: bool = False, follow: bool = False
) -> Source:
    """`path.csv`, `path.ndjson` (also `.gz`), `-` or `-.csv` (standard input), `kafka://HOST:PORT/TOPIC`.

    `follow`: go on when the present end is reached (files); a broker's topic is always followed unless it is False,
    then reading ends at the offsets that were last when the source was opened.
    """
    if address.startswith("kafka://"):
        from connectors.streams.kafka import KafkaSource

        return KafkaSource(address, columns=columns, count_steps=count_steps, follow=follow)
    if "://" in address:
        raise UserError(f"cannot read a stream from '{address}': use a file, '-', or kafka://HOST:PORT/TOPIC")
    if address in ("-", "-.csv", "-.ndjson"):
        return StdinSource("csv" if address.endswith(".csv") else "json", columns=columns, count_steps=count_steps)
    return FileSource(address, columns=columns, count_steps=count_steps, follow=follow)


def open_sink(address: str) -> Sink:
    """`path.csv`, `path.ndjson`, a folder `path.parquet`, or `kafka://HOST:PORT/TOPIC`."""
    if address.startswith("kafka://"):
        from connectors.streams.kafka import KafkaSink

        return KafkaSink(address)
    if "://" in address:
        raise UserError(f"cannot write a stream to '{address}': use a file or kafka://HOST:PORT/TOPIC")
    return ParquetSink(address) if address.endswith(".parquet") else FileSink(address)
