"""Live sources and sinks by address: a broker's client is imported only when its scheme is named."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from connectors.errors import UserError
from connectors.streams.base import Sink, Source
from connectors.streams.files import FileSink, FileSource, ParquetSink, StdinSource

BROKERS = {
    "kafka": ("kafka", "Kafka"),
    "redis": ("redis", "Redis"),
    "rediss": ("redis", "Redis"),
    "nats": ("nats", "Nats"),
    "natss": ("nats", "Nats"),
    "mqtt": ("mqtt", "Mqtt"),
    "mqtts": ("mqtt", "Mqtt"),
    "postgresql": ("postgres", "Postgres"),
}
"""Scheme -> module of this package, and what its classes are called."""
FORMS = "a file, '-', kafka://HOST:PORT/TOPIC, redis://HOST:PORT/STREAM, nats://HOST:PORT/STREAM, mqtt://HOST:PORT/TOPIC, or postgresql://HOST:PORT/DATABASE?table=NAME"


def _broker(address: str, kind: str) -> type | None:
    scheme, separator, _ = address.partition("://")
    if not separator:
        return None
    if scheme not in BROKERS:
        raise UserError(f"no stream has an address like '{scheme}://': use {FORMS}")
    module, name = BROKERS[scheme]
    found: type = getattr(import_module(f"connectors.streams.{module}"), name + kind)
    return found


def open_source(
    address: str, *, columns: Mapping[str, str | None] | None = None, count_steps: bool = False, follow: bool = False
) -> Source:
    """`path.csv`, `path.ndjson` (also `.gz`), `-` or `-.csv` (standard input), or a broker: `FORMS`.

    `follow`: go on when the present end is reached. False: reading ends at what was last when the source was opened.
    """
    broker = _broker(address, "Source")
    if broker is not None:
        source: Source = broker(address, columns=columns, count_steps=count_steps, follow=follow)
        return source
    if address in ("-", "-.csv", "-.ndjson"):
        return StdinSource("csv" if address.endswith(".csv") else "json", columns=columns, count_steps=count_steps)
    return FileSource(address, columns=columns, count_steps=count_steps, follow=follow)


def open_sink(address: str) -> Sink:
    """`path.csv`, `path.ndjson`, a folder `path.parquet`, or a broker as in `open_source`."""
    broker = _broker(address, "Sink")
    if broker is not None:
        sink: Sink = broker(address)
        return sink
    return ParquetSink(address) if address.endswith(".parquet") else FileSink(address)
