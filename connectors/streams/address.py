"""How the address of a broker reads: `scheme://HOST[:PORT]/NAME?option=value`. Secrets never stand in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from connectors.errors import UserError


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    name: str
    """What is read or written there: a stream, a topic, a database."""
    options: Mapping[str, str]
    encrypted: bool

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


def parse(address: str, schemes: tuple[str, str], port: int, form: str, options: tuple[str, ...] = ()) -> Address:
    """`schemes`: the plain and the encrypted one. Raises UserError, which shows no more of `address` than its start."""
    parts = urlsplit(address, allow_fragments=False)  # "#" is a wildcard of MQTT
    try:
        host, at = parts.hostname, parts.port or port
    except ValueError as error:
        raise UserError(f"'{parts.scheme}://...' has no valid port; write {form}") from error
    if parts.password is not None or parts.username is not None:
        raise UserError(f"an address must not hold a name or password (it ends in logs and process lists); write {form} and set the environment")
    name = unquote(parts.path.strip("/"))
    if parts.scheme not in schemes or not host or not name:
        raise UserError(f"'{address}' is not {form}")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(given) - set(options))
    if unknown:
        raise UserError(f"'{address}' has unknown options {unknown}; it may have {sorted(options)}")
    return Address(host, at, name, given, parts.scheme == schemes[1])


def secret(name: str) -> str | None:
    """A user name, password or token from the environment."""
    return os.environ.get(name) or None
