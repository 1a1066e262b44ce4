"""What must never harm the service: every hostile request gets a 4xx with one line, and the next honest one is answered as ever."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.errors import UserError
from pipelines.serving.guard import Tokens
from pipelines.serving.service import Settings
from pipelines.streaming.worker import BATCH_ROWS
from tests.pipelines.serving.conftest import World
from tests.pipelines.serving.served import Client, Served

READ, WRITE = "r" * 24, "w" * 24
DEEP = b"[" * 100_000
EVENT = '{"unique_id": "site-0", "ds": "2024-02-10T00:00:00Z", "y": %s}'


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("hostile") / "state"
    with Served(state, world.store, "--version", "1", TETHYS_READ_TOKENS=READ, TETHYS_WRITE_TOKENS=WRITE) as running:
        client = running.client(WRITE)
        client.push(*world.events(0, 60))
        client.close()
        yield running
        assert running.stop() == 0
        said = running.log.read_text()
        assert READ not in said and WRITE not in said and "Traceback" not in said


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """A client with the right to write; when the test is over the service must be as well as before."""
    mine = Client(served.address, WRITE)
    before = mine.get("/v1/streams/site-0/forecast")
    yield mine
    fresh = Client(served.address, WRITE)
    assert fresh.get("/v1/streams/site-0/forecast") == before
    assert fresh.get("/v1/service")["ready"] is True
    fresh.close()
    mine.close()


def events(*values: str) -> bytes:
    return ('{"events": [' + ", ".join(EVENT % v for v in values) + "]}").encode()


BODIES = {
    "nothing": b"",
    "no json": b"hello",
    "half a document": b'{"events": [',
    "deep lists": DEEP,
    "deep objects": b'{"events":' * 50_000,
    "deep inside a field": b'{"events": [{"unique_id": ' + DEEP + b"}]}",
    "a list": b"[]",
    "no events": b'{"events": []}',
    "a text for a number": events('"1.0"'),
    "true for a number": events("true"),
    "NaN": events("NaN"),
    "infinity": events("1e999"),
    "a huge value": events("1e300"),
    "an unknown field": b'{"events": [{"unique_id": "a", "ds": "2024-02-10", "y": 1, "extra": 1}]}',
    "no time": b'{"events": [{"unique_id": "a", "y": 1}]}',
    "not a time": b'{"events": [{"unique_id": "a", "ds": "yesterday", "y": 1}]}',
    "a count where dates are": b'{"events": [{"unique_id": "a", "ds": 7, "y": 1}]}',
    "seconds since 1970": b'{"events": [{"unique_id": "a", "ds": 1717200000, "y": 1}]}',
    "year 9999": b'{"events": [{"unique_id": "a", "ds": "9999-12-31T23:59:59Z", "y": 1}]}',
    "time beyond int64": b'{"events": [{"unique_id": "a", "ds": 1e300, "y": 1}]}',
    "a number for a name": b'{"events": [{"unique_id": 7, "ds": "2024-02-10", "y": 1}]}',
    "an empty name": b'{"events": [{"unique_id": "", "ds": "2024-02-10", "y": 1}]}',
    "a name with a line break": b'{"events": [{"unique_id": "a\\nb", "ds": "2024-02-10", "y": 1}]}',
    "a name of a megabyte": b'{"events": [{"unique_id": "' + b"a" * 900_000 + b'", "ds": "2024-02-10", "y": 1}]}',
    "half a surrogate": b'{"events": [{"unique_id": "\\ud800", "ds": "2024-02-10", "y": 1}]}',
    "bytes that are no UTF-8": b'{"events": [{"unique_id": "\xff\xfe", "ds": "2024-02-10", "y": 1}]}',
    "too many events": events(*["1"] * (BATCH_ROWS + 1)),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(client: Client, name: str) -> None:
    status, body, headers = client.raw("POST", "/v1/events", BODIES[name], **{"Content-Type": "application/json"})
    assert status == 400 and headers["content-type"] == "application/json"
    assert set(json.loads(body)) == {"error"} and len(body) < 1000 and b"\n" not in body


def test_a_number_where_dates_are_is_told_what_a_date_is(client: Client) -> None:
    status, answer = client.call("POST", "/v1/events", {"events": [{"unique_id": "site-0", "ds": 17, "y": 1.0}]})
    assert status == 400 and answer["error"].startswith("events.0.ds: 17 is no date: send ISO 8601 text, as 2026-01-31T13:00:00Z")


SCORES = {
    "no rows": {"dataframe_split": {"columns": ["unique_id", "ds", "y"], "data": []}},
    "a column is missing": {"dataframe_split": {"columns": ["unique_id", "ds"], "data": [["a", "2024-01-01"]]}},
    "rows of other lengths": {"dataframe_split": {"columns": ["unique_id", "ds", "y"], "data": [["a", "2024-01-01"]]}},
    "both forms": {"dataframe_split": {"columns": ["a"], "data": [[1]]}, "dataframe_records": [{"a": 1}]},
    "neither form": {},
    "a text for a value": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": "1"}]},
    "a list for a value": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": [1]}]},
    "a number for a time": {"dataframe_records": [{"unique_id": "a", "ds": 7, "y": 1}]},
    "nothing observed": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": None}]},
    "too far": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": 1}], "params": {"h": 7}},
    "backwards": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": 1}], "params": {"h": -1}},
    "an unknown quantile": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": 1}], "params": {"quantiles": [0.33]}},
    "an unknown parameter": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": 1}], "params": {"horizon": 3}},
    "one time twice": {"dataframe_records": [{"unique_id": "a", "ds": "2024-01-01", "y": 1}, {"unique_id": "a", "ds": "2024-01-01", "y": 2}]},
    "a table of millennia": {"dataframe_records": [{"unique_id": "a", "ds": d, "y": 1} for d in ("0001-01-01", "9998-12-31")]},
    "between two steps": {"dataframe_records": [{"unique_id": "a", "ds": f"2024-01-01T00:{m:02}:00", "y": 1} for m in (0, 7, 31)]},
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(client: Client, name: str) -> None:
    for path in ("/v1/score", "/invocations"):
        status, answer = client.call("POST", path, SCORES[name])
        assert status == 400 and set(answer) == {"error"} and len(answer["error"]) < 500


@pytest.mark.parametrize(
    "path",
    [
        "/v1/streams/../../etc/passwd/history", "/v1/streams/..%2f..%2fetc%2fpasswd/forecast", "/assets/..%2f..%2fservice.py",
        "/assets/%2e%2e/app.py", "/assets/page.css%00", "/v1/streams/nobody/forecast", "/v1/streams/%00/history", "/v1/streams//forecast",
        "/v1/streams/" + "a" * 4000 + "/history", "//etc/passwd", "/v1", "/docs", "/v1/streams/%ff/memory", "/v1/streams/site-0/memory/x",
    ],
)  # fmt: skip
def test_paths_lead_nowhere(client: Client, path: str) -> None:
    status, body, _ = client.raw("GET", path)
    assert status == 404 and b"root:" not in body and b"import" not in body


@pytest.mark.parametrize("query", ["limit=0", "limit=-1", "limit=1e9", "limit=x", "limit=99999999999999999999"])
def test_queries(client: Client, query: str) -> None:
    assert client.call("GET", f"/v1/streams/site-0/history?{query}")[0] == 400
    assert client.call("GET", f"/v1/streams?{query}")[0] == 400


def test_methods(client: Client) -> None:
    assert client.raw("PUT", "/v1/events", b"{}", **{"Content-Type": "application/json"})[0] == 405
    assert client.raw("DELETE", "/v1/streams/site-0/forecast")[0] == 405
    assert client.raw("BREW", "/v1/events")[0] in (400, 405)


def test_sizes(served: Served, client: Client) -> None:
    big = b'{"events": "' + b"a" * (2 << 20) + b'"}'
    other = Client(served.address, WRITE)
    assert other.raw("POST", "/v1/events", big, **{"Content-Type": "application/json"})[0] == 413
    with socket.create_connection((other.host, other.port), timeout=20) as line:  # says nothing of its length, and never ends
        line.sendall(
            f"POST /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {WRITE}\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
        try:
            for _ in range(64):
                line.sendall(chunk)
        except OSError:
            pass
        assert b" 413 " in line.recv(200)
    assert client.raw("POST", "/v1/events", b"{}", **{"Content-Type": "application/json", "Content-Length": "-5"})[0] == 400


def test_content_types(client: Client) -> None:
    """A form of another site's page cannot reach it: what a browser sends without asking is not JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert client.raw("POST", "/v1/events", events("1"), **{"Content-Type": kind})[0] == 415
    assert client.raw("PUT", "/v1/streams/a/memory", b"x", **{"Content-Type": "application/json"})[0] == 415


@pytest.mark.parametrize("token", [None, "x" * 24, READ[:-1], READ + "r", "r\x00", "é" * 24])
def test_tokens_that_are_none(served: Served, client: Client, token: str | None) -> None:
    other = Client(served.address)
    headers = {} if token is None else {"Authorization": b"Bearer " + token.encode("utf-8").replace(b"\x00", b"%00")}
    for method, path in (("GET", "/v1/streams"), ("GET", "/metrics"), ("POST", "/v1/events"), ("GET", "/v1/live"), ("GET", "/nowhere")):
        status, body, answer = other.raw(method, path, **headers)  # type: ignore[arg-type]
        assert status == 401 and answer["www-authenticate"].startswith("Bearer")
    assert other.raw("GET", "/healthz")[0] == other.raw("GET", "/readyz")[0] == other.raw("GET", "/")[0] == 200


def test_a_reader_cannot_write(served: Served, client: Client) -> None:
    reader = Client(served.address, READ)
    assert reader.call("POST", "/v1/events", json.loads(events("1")))[0] == 403
    assert reader.raw("DELETE", "/v1/streams/site-0/memory")[0] == 403
    assert reader.raw("PUT", "/v1/streams/site-0/memory", b"x", **{"Content-Type": "application/octet-stream"})[0] == 403
    assert reader.call("GET", "/v1/streams")[0] == 200
    score = {"dataframe_records": [{"unique_id": "a", "ds": f"2024-01-01T{h:02}:00:00", "y": float(h)} for h in range(8)]}
    assert reader.call("POST", "/v1/score", score)[0] == 200


def test_slow_clients_wait_alone(served: Served, client: Client) -> None:
    """Many that never finish their request: the others are answered at once, and the slow ones are told."""
    lines = []
    for _ in range(50):
        line = socket.create_connection((client.host, client.port), timeout=30)
        line.sendall(
            f"POST /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {WRITE}\r\nContent-Type: application/json\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
        lines.append(line)
    began = time.monotonic()
    client.get("/v1/streams/site-0/forecast")
    assert time.monotonic() - began < 5
    assert b" 408 " in lines[0].recv(200)
    for line in lines:
        line.close()


def damaged(data: bytes) -> dict[str, bytes]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["tethys_state"])

    def again(**changes: str) -> bytes:
        said = {**about, "metadata": {**about["metadata"], **changes}}
        text = json.dumps({**header, "__metadata__": {"tethys_state": json.dumps(said)}}).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    flooded = bytearray(data)
    flooded[8 + length :] = b"\xff" * (len(data) - 8 - length)  # every float is NaN, every count -1
    return {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
        "a header of exabytes": (2**62).to_bytes(8, "little") + data[8:],
        "another version": again(model="load/2"),
        "no clock": again(clock="null"),
        "a clock of texts": again(clock='["a", "b", [], [], null]'),
        "a clock beyond time": again(clock=f"[{2**70}, {2**70}, [], [], null]"),
        "flooded": bytes(flooded),
    }


def test_memories_that_are_none(client: Client) -> None:
    data = client.raw("GET", "/v1/streams/site-0/memory")[1]
    for what, bad in damaged(data).items():
        status, body, _ = client.raw("PUT", "/v1/streams/site-0/memory", bad, **{"Content-Type": "application/octet-stream"})
        assert status == 409 and set(json.loads(body)) == {"error"}, (what, status, body)
    status, _, _ = client.raw("PUT", "/v1/streams/copy/memory", data, **{"Content-Type": "application/octet-stream"})
    assert status == 200
    left, right = (client.get(f"/v1/streams/{name}/forecast") for name in ("site-0", "copy"))
    assert left["quantiles"] == right["quantiles"] and left["low"] == pytest.approx(right["low"], rel=1e-5), "a memory moves whole"
    assert client.raw("GET", "/v1/streams/copy/memory")[1] != data  # the name is in it
    assert client.call("DELETE", "/v1/streams/copy/memory") == (200, {"unique_id": "copy", "reset": True})
    assert client.call("GET", "/v1/streams/copy/forecast")[0] == 404
    assert client.call("DELETE", "/v1/streams/never/memory")[0] == 404


def test_without_tokens_only_the_loopback_names_are_served(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not listen on 0.0.0.0 without tokens"):
        Settings(host="0.0.0.0")
    with pytest.raises(UserError, match="has 3 characters"):
        Tokens(["abc"], [])
    (tmp_path / "tokens").write_text("# who\nread " + READ + "\nwrite " + WRITE + " too\n")
    with pytest.raises(UserError, match="line 3: write") as told:
        Tokens.load(tmp_path / "tokens")
    assert WRITE not in str(told.value)
    with Served(tmp_path / "state", world.store) as open_service:
        client = open_service.client()
        assert client.raw("GET", "/v1/streams", Host="evil.example")[0] == 403
        assert client.raw("GET", "/v1/streams", Host="localhost:8080")[0] == 200
