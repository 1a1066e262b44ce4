"""What stands between the network and the service: tokens, and limits of size, rate and time.

Everything is decided before a request reaches a route: who may (401, 403), how large (413), how often (429), how long a body may take to
arrive (408) and an answer to be made (503). A refusal is one JSON line that says what to do. Tokens are kept as digests, compared in
constant time, and never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from connectors.errors import UserError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

Right = Literal["read", "write"]

# The page itself holds no data; health is for whatever starts and stops the service.
OPEN = ("/", "/healthz", "/readyz", "/openapi.json")
# They are sent by POST and change nothing.
READING = ("/v1/score", "/v1/classify", "/v1/complete", "/invocations")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHORTEST_TOKEN = 16
CLIENTS_KEPT = 10_000
SWALLOW_BYTES, SWALLOW_SECONDS = 16 << 20, 1.0


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 1 << 20
    memory_bytes: int = 64 << 20
    """Of an imported memory."""
    body_seconds: float = 10.0
    """In which a body must have arrived."""
    answer_seconds: float = 30.0
    """In which an answer must begin; streams of events excepted."""
    requests_per_second: float = 10_000.0
    """Of one client (its token, or its address), over some seconds; more than one process answers on two cores."""
    burst: int = 20_000


class Tokens:
    """Who may read, who may write; writing includes reading. Empty: anyone may do anything (loopback only)."""

    def __init__(self, read: list[str], write: list[str]):
        for token in (*read, *write):
            if len(token) < SHORTEST_TOKEN:
                raise UserError(f"a token has {len(token)} characters: use at least {SHORTEST_TOKEN}, for instance of `openssl rand -hex 24`")
        self._digests = [(_digest(t), "read") for t in read] + [(_digest(t), "write") for t in write]

    @classmethod
    def load(cls, path: Path | None) -> Tokens:
        """From TETHYS_READ_TOKENS and TETHYS_WRITE_TOKENS (separated by commas), and a file of lines `read TOKEN` or `write TOKEN`."""
        found: dict[str, list[str]] = {
            right: [t.strip() for t in os.environ.get(f"TETHYS_{right.upper()}_TOKENS", "").split(",") if t.strip()] for right in ("read", "write")
        }
        if path is not None:
            try:
                lines = path.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read the tokens of '{path}': {error}") from None
            for number, line in enumerate(lines, 1):
                words = line.split()
                if not words or line.startswith("#"):
                    continue
                if len(words) != 2 or words[0] not in found:
                    raise UserError(f"'{path}', line {number}: write `read TOKEN` or `write TOKEN`")  # the line itself is never shown
                found[words[0]].append(words[1])
        return cls(found["read"], found["write"])

    def __bool__(self) -> bool:
        return bool(self._digests)

    def rights(self, token: str) -> set[Right]:
        """Compared with every token, whichever matches: the time tells nothing."""
        given = _digest(token)
        rights: set[Right] = set()
        for digest, right in self._digests:
            if hmac.compare_digest(given, digest):
                rights |= {"read", "write"} if right == "write" else {"read"}
        return rights


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Refusal(Exception):
    def __init__(self, status: int, error: str, **headers: str):
        self.status, self.error, self.headers = status, error, headers


class Guard:
    """ASGI middleware around the service."""

    def __init__(self, app: App, *, tokens: Tokens, limits: Limits, answered: Callable[[str, int, float], None]):
        self._app, self._tokens, self._limits = app, tokens, limits
        self._answered = answered
        """Told of every answer: the route, the status, and the seconds to its first byte."""
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> requests it may still make, and when that was reckoned."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, began = False, time.monotonic()

        async def begin(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self._answered(getattr(scope.get("route"), "path", "none"), message["status"], time.monotonic() - began)
            await send(message)

        try:
            headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
            self._admit(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                receive = _replay(await self._body(scope, headers, receive), receive)
            if scope["path"] == "/v1/live":
                await self._app(scope, receive, begin)
                return
            async with asyncio.timeout(self._limits.answer_seconds):
                await self._app(scope, receive, begin)
        except Refusal as refusal:
            await _refuse(begin, refusal)
        except TimeoutError:
            if not started:
                await _refuse(begin, Refusal(503, "no answer in time: what was sent may have been taken; send it again with the same event ids"))

    def _admit(self, scope: Scope, headers: dict[str, str]) -> None:
        path, method = scope["path"], scope["method"]
        client = (scope.get("client") or ("?",))[0]
        if path in OPEN or path.startswith("/assets/"):
            self._count(client)
            return
        if not self._tokens:
            # A page of another site, open in a browser on this machine, must not reach an open service by a name of its own.
            host = headers.get("host", "")
            name = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
            if name not in LOOPBACK:
                raise Refusal(403, "without tokens this service answers to the names of the loopback interface only")
            self._count(client)
        else:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not token:
                self._count(client)
                raise Refusal(401, "send a token: Authorization: Bearer TOKEN", **{"www-authenticate": "Bearer"})
            rights = self._tokens.rights(token.strip())
            if not rights:
                self._count(client)
                raise Refusal(401, "this token is not known here", **{"www-authenticate": 'Bearer error="invalid_token"'})
            self._count(_digest(token).hex()[:16])
            needed: Right = "read" if method in ("GET", "HEAD", "OPTIONS") or path in READING else "write"
            if needed not in rights:
                raise Refusal(403, f"this token may not {needed}", **{"www-authenticate": 'Bearer error="insufficient_scope"'})
        if method in ("POST", "PUT", "PATCH"):
            wanted = "application/octet-stream" if path.endswith("/memory") else "application/json"
            if headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
                raise Refusal(415, f"send it as Content-Type: {wanted}")

    def _count(self, client: str) -> None:
        """A bucket of `burst` requests that fills again at the allowed rate."""
        now, limits = time.monotonic(), self._limits
        left, then = self._buckets.pop(client, (float(limits.burst), now))
        left = min(float(limits.burst), left + (now - then) * limits.requests_per_second)
        self._buckets[client] = (max(0.0, left - 1.0), now)
        if len(self._buckets) > CLIENTS_KEPT:
            self._buckets.popitem(last=False)
        if left < 1.0:
            raise Refusal(429, f"more than {limits.requests_per_second:g} requests a second: slow down", **{"retry-after": "1"})

    async def _body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> bytes:
        most = self._limits.memory_bytes if scope["path"].endswith("/memory") else self._limits.body_bytes
        too_large = Refusal(413, f"the body has more than {most} bytes: send less at a time", connection="close")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > most:
            await _swallow(receive)
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "the body was cut off", connection="close")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        await _swallow(receive)
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive in {self._limits.body_seconds:g} s", connection="close") from None


async def _swallow(receive: Receive) -> None:
    """Some more of a body that is too large: a client that is cut off while it still sends never reads why."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWALLOW_SECONDS):
            while size < SWALLOW_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(send: Send, refusal: Refusal) -> None:
    body = orjson.dumps({"error": refusal.error})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(k.encode(), v.encode()) for k, v in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
