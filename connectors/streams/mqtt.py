"""MQTT 5 (paho-mqtt): a subscription that the broker keeps for us, acknowledged only once the worker has the records.

A broker of MQTT has no positions and cannot rewind. Nothing is lost all the same: the worker writes what it takes into
its journal, and only the commit after that acknowledges it; until then the broker sends it again. What comes twice (a
crash between journal and acknowledgement, a broker that restarted) has the same stream, time and value, and event time
counts it as a duplicate.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from connectors.errors import UserError
from connectors.streams.address import parse, secret
from connectors.streams.base import Batch, Decoder, Positions, Record, to_ndjson

LOGGER = logging.getLogger("tethys.mqtt")
OPEN_SECONDS = 10.0
UNACKNOWLEDGED = 20_000
"""Messages that the broker may send ahead of the commit: back-pressure (a broker may allow fewer, Mosquitto 20)."""
FOREVER = 0xFFFFFFFF
FORM = "mqtt://HOST:PORT/TOPIC?client=NAME&id=topic"


class _Connection:
    """A client without a thread of its own: with one, acknowledgements from another thread get lost on the way.

    It talks to the broker in `turn`, and connects again there when the connection was lost.
    """

    def __init__(self, address: str, default_client: str, *, on_message: Any = None):
        try:
            import paho.mqtt.client as mqtt
            from paho.mqtt.packettypes import PacketTypes
            from paho.mqtt.properties import Properties
            from paho.mqtt.subscribeoptions import SubscribeOptions
        except ImportError as error:
            raise UserError("MQTT needs the extra 'mqtt': pip install 'tethys-streams[mqtt]'") from error
        found = parse(address, ("mqtt", "mqtts"), 8883 if address.startswith("mqtts") else 1883, FORM, ("client", "id"))
        self.topic, self.place = found.name, found.place
        self.named_by_topic = "id" in found.options
        if found.options.get("id", "topic") != "topic":
            raise UserError(f"id={found.options['id']} names no stream: write id=topic, or leave it out where the records hold their stream's name")
        self.client_name = found.options.get("client", default_client)
        self.refused: str | None = None
        """Why the broker refused; empty: it did not; None: it has not answered yet."""
        self.client: Any = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, client_id=self.client_name, protocol=mqtt.MQTTv5, manual_ack=on_message is not None
        )
        user = secret("MQTT_USERNAME")
        if user is not None:
            self.client.username_pw_set(user, secret("MQTT_PASSWORD"))
        if found.encrypted:
            self.client.tls_set()
        self.client.on_message = on_message
        self.client.on_connect = self._connected
        self.client.on_subscribe = self._subscribed
        self.subscribe = on_message is not None
        self.first = SubscribeOptions(qos=1)
        self.again = SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_DO_NOT_SEND)
        self.kept_session: bool | None = None
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = FOREVER if self.subscribe else 0
        properties.ReceiveMaximum = UNACKNOWLEDGED
        try:
            self.client.connect(found.host, found.port, clean_start=not self.subscribe, properties=properties)
        except OSError as error:
            raise UserError(f"cannot reach the MQTT broker at {found.place}: {error}") from error
        if not self.turn_until(lambda: self.refused is not None, OPEN_SECONDS) or self.refused:
            reason = self.refused or f"no answer in {OPEN_SECONDS:.0f} s"
            raise UserError(f"the MQTT broker at {found.place} refused: {reason} (MQTT_USERNAME and MQTT_PASSWORD are read)")

    def _connected(self, client: Any, _data: Any, flags: Any, reason: Any, _properties: Any) -> None:
        if self.kept_session is None:
            self.kept_session = bool(flags.session_present)
        if reason.is_failure or not self.subscribe:
            self.refused = str(reason) if reason.is_failure else ""
        else:
            client.subscribe(self.topic, options=self.again if self.kept_session else self.first)

    def _subscribed(self, _client: Any, _data: Any, _message: int, reasons: Any, _properties: Any) -> None:
        self.refused = f"{reasons[0]} for '{self.topic}'" if reasons[0].is_failure else ""

    def turn(self, seconds: float) -> None:
        """Send what waits and take what comes, for at most `seconds`."""
        if self.client.loop(max(0.0, seconds)) != 0:
            LOGGER.warning("connection to %s lost", self.place)
            try:
                time.sleep(min(0.05, max(0.0, seconds)))
                self.client.reconnect()
            except OSError:
                return  # still away: the next turn tries again

    def turn_until(self, done: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            self.turn(0.05)
        return done()

    def close(self) -> None:
        if self.subscribe and self.client.is_connected():
            # Mosquitto forgets acknowledgements that it has not handled when the farewell comes: an answer to something
            # asked after them says that it has.
            self.refused = None
            self.client.subscribe(self.topic, options=self.again)
            self.turn_until(lambda: self.refused is not None, 2.0)
        self.client.disconnect()
        self.turn_until(lambda: not self.client.is_connected(), 2.0)


class MqttSource:
    """The messages of one topic or filter (`sensors/+/value`, `sensors/#`), JSON or Arrow. Position: how many were taken.

    `?id=topic` in the address: each topic is one stream, of its name; the records need not hold one.
    """

    def __init__(self, address: str, *, columns: Mapping[str, str | None] | None = None, count_steps: bool = False, follow: bool = True):
        if not follow:
            raise UserError(f"a topic of MQTT has no end to read up to: follow it ({FORM} with --follow)")
        self.ended = False
        self.decoder = Decoder("json", columns, count_steps=count_steps)
        self.messages: deque[tuple[Any, float]] = deque()
        self.connection = _Connection(address, "tethys", on_message=self._arrived)
        self.topic, self.taken = self.connection.topic, 0
        self.unacknowledged: deque[tuple[int, int, int]] = deque()
        """Number, message and quality of service of what was handed out and not committed."""

    def _arrived(self, _client: Any, _data: Any, message: Any) -> None:
        self.messages.append((message, time.time()))

    def poll(self, max_records: int, timeout: float) -> Batch:
        batch = Batch([], [])
        deadline = time.monotonic() + timeout
        while len(batch) < max_records:
            if not self.messages:
                left = deadline - time.monotonic()
                self.connection.turn(0.0 if len(batch) else min(left, 0.05))
                if self.messages:
                    continue
                if len(batch) or left <= 0:
                    break
                continue
            message, arrived = self.messages.popleft()
            self.taken += 1
            if message.qos:
                self.unacknowledged.append((self.taken, message.mid, message.qos))
            name = message.topic if self.connection.named_by_topic else None
            for outcome in self.decoder.decode_message(message.payload, self.topic, self.taken, name):
                if isinstance(outcome, Record):
                    batch.records.append(outcome)
                    batch.sent.append(arrived)
                else:
                    batch.dead.append(outcome)
        return batch

    def positions(self) -> Positions:
        return {self.topic: {"taken": self.taken}}

    def seek(self, positions: Positions) -> None:
        if set(positions) != {self.topic}:
            raise UserError(f"the checkpoint belongs to {sorted(positions)}, not to '{self.topic}': use another checkpoint")
        self.taken = int(positions[self.topic]["taken"])
        if not self.connection.kept_session:
            LOGGER.warning(
                "the broker at %s has no session of client '%s' any more: what was sent while nobody was connected is lost",
                self.connection.place,
                self.connection.client_name,
            )

    def commit(self, positions: Positions) -> None:
        """Acknowledges what was handed out up to `positions`: the worker has committed it."""
        while self.unacknowledged and self.unacknowledged[0][0] <= positions[self.topic]["taken"]:
            _, message, quality = self.unacknowledged.popleft()
            self.connection.client.ack(message, quality)
        self.connection.turn(0.0)

    def lag(self) -> int | None:
        return None  # the broker does not tell

    def close(self) -> None:
        self.connection.close()


class MqttSink:
    """Rows as JSON messages to one topic, each acknowledged by the broker (QoS 1). Receipt: rows sent in all.

    A broker cannot take messages back: after a crash the rows since the last commit are sent again with equal bytes.
    """

    def __init__(self, address: str):
        self.connection = _Connection(address, "")
        self.rows = 0
        self.pending: list[Any] = []

    def resume(self, receipt: Any | None) -> None:
        self.rows = 0 if receipt is None else int(receipt)

    def write(self, rows: pl.DataFrame) -> None:
        lines = to_ndjson(rows).splitlines()
        self.pending += [self.connection.client.publish(self.connection.topic, line, qos=1) for line in lines]
        self.rows += len(lines)

    def flush(self) -> Any:
        deadline = time.monotonic() + 30.0
        for message in self.pending:
            if not self.connection.turn_until(message.is_published, deadline - time.monotonic()):
                raise UserError(f"the MQTT broker did not take the rows for '{self.connection.topic}' in 30 s; nothing is committed")
        self.pending = []
        return self.rows

    def close(self) -> None:
        self.connection.close()
