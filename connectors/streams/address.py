"""How the address of a broker reads: `scheme://HOST[:PORT]/NAME?option=value`. Secrets never stand in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from connectors.errors import UserError


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    name: str
    """What is read or written there: a stream, a topic, a database."""
    options: Mapping[str, str]
    encrypted: bool
    others: tuple[str, ...] = ()
    """More servers of the same cluster, `HOST:PORT` each."""

    @property
    def place(self) -> str:
        return ",".join((f"{self.host}:{self.port}", *self.others))


def parse(
    address: str, schemes: tuple[str, str | None], port: int, form: str, options: tuple[str, ...] = (), *, cluster: bool = False
) -> Address:
    """`schemes`: the plain and the encrypted one. `cluster`: several `HOST:PORT`, with commas between, may be named. Raises UserError,
    which shows no more of `address` than its start."""
    parts = urlsplit(address, allow_fragments=False)  # "#" is a wildcard of MQTT
    servers = parts.netloc.split(",") if cluster else [parts.netloc]
    found = []
    for server in servers:
        one = urlsplit(f"//{server}")
        try:
            found.append((one.hostname, one.port or port))
        except ValueError as error:
            raise UserError(f"'{parts.scheme}://...' has no valid port; write {form}") from error
        if one.password is not None or one.username is not None:
            raise UserError(f"an address must not hold a name or password (it ends in logs and process lists); write {form} and set the environment")
    name = unquote(parts.path.strip("/"))
    if parts.scheme not in schemes or not all(host for host, _ in found) or not name:
        raise UserError(f"'{address}' is not {form}")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(given) - set(options))
    if unknown:
        raise UserError(f"'{address}' has unknown options {unknown}; it may have {sorted(options)}")
    (host, at), *others = found
    return Address(host or "", at, name, given, parts.scheme == schemes[1], tuple(f"{host}:{at}" for host, at in others))


def with_option(address: str, name: str, value: str) -> str:
    """The address with an option put in, or replaced."""
    parts = urlsplit(address, allow_fragments=False)
    return urlunsplit(parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), name: value}, safe=",/")))


def secret(name: str) -> str | None:
    """A user name, password or token from the environment."""
    return os.environ.get(name) or None
