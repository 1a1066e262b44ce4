"""The service over HTTP: routes, their documents, the page and its events. No state of its own: all of it is in `Service`."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
import prometheus_client as prometheus
import pydantic
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from connectors.errors import UserError
from connectors.streams.base import LARGEST_VALUE, Record, parse_time
from pipelines.language import completion
from pipelines.serving.guard import Guard
from pipelines.serving.history import HistoryRow
from pipelines.serving.live import Busy, Committed, Forecast, Stopped, Unfit, Unknown
from pipelines.serving.sequences import Completer, SequenceClassifier
from pipelines.serving.service import Service, Settings
from pipelines.streaming.worker import BATCH_ROWS

log = logging.getLogger("tethys.serve")

PAGE = Path(__file__).parent / "page"
ASSETS = {"page.js": "text/javascript", "chart.js": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}
# The page runs its own files only, and nothing on it can be framed or sent elsewhere.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# Years in which a stream may live; beyond them calendars and clocks overflow.
EARLIEST, LATEST = -2_208_988_800_000_000, 7_258_118_400_000_000
NAME_CHARACTERS = 256
# The page draws ten times a second at most.
TELL_SECONDS = 0.1
# A silent line is cut by proxies; a comment keeps it open, and finds out that the other side has gone.
KEEP_ALIVE_SECONDS = 15.0

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS, pattern=r"^[^\x00-\x1f\x7f]+$", examples=["site-0"])]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Event(_Body):
    """One value of one stream."""

    unique_id: Name
    ds: Annotated[
        str | int,
        Field(description="ISO 8601 text (UTC where no offset stands); a whole number where the model counts steps.",
              examples=["2026-01-31T13:00:00Z"]),
    ]  # fmt: skip
    y: Annotated[float | None, Field(description="The value; null: known to be missing.", examples=[61.5])] = None
    event_id: Annotated[str | None, Field(max_length=NAME_CHARACTERS, description="Makes repeats recognisable.")] = None


class Events(_Body):
    events: Annotated[list[Event], Field(min_length=1, max_length=BATCH_ROWS)]
    forecast: Annotated[bool, Field(description="Answer with the forecast of each stream that learnt a row.")] = True
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"events": [{"unique_id": "site-0", "ds": "2026-01-31T13:00:00Z", "y": 61.5, "event_id": "a-17"}]}]}
    )


class ForecastOut(BaseModel):
    unique_id: str
    origin: str | int
    model: str
    ds: list[str] | list[int]
    quantiles: dict[str, list[float | None]]
    low: Annotated[list[float | None], Field(description="The interval that keeps its coverage on this stream, lower end.")]
    high: list[float | None]


class PushedOut(BaseModel):
    verdicts: Annotated[list[str], Field(description="accepted, missing, late, duplicate, corrected, conflict, quarantined or off_grid")]
    forecasts: list[ForecastOut]
    durable: Literal[True] = True


class Split(BaseModel):
    columns: list[str]
    data: Annotated[list[list[Any]], Field(min_length=1)]
    index: list[Any] | None = None


class ScoreParams(_Body):
    h: int | None = None
    quantiles: list[float] | None = None


class Score(BaseModel):
    """The question of `mlflow models serve`: a long frame with unique_id, ds and y (null: missing); other columns are not looked at."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "dataframe_split": {
                        "columns": ["unique_id", "ds", "y"],
                        "data": [["a", "2026-01-31T00:00:00Z", 1.0], ["a", "2026-01-31T01:00:00Z", None], ["a", "2026-01-31T02:00:00Z", 3.0]],
                    },
                    "params": {"h": 3},
                }
            ]
        },
    )
    dataframe_split: Split | None = None
    dataframe_records: list[dict[str, Any]] | None = None
    params: ScoreParams = Field(default_factory=ScoreParams)


class Predictions(BaseModel):
    predictions: list[dict[str, Any]]


class Completion(_Body):
    prompt: Annotated[str, Field(min_length=1, max_length=completion.PROMPT_CHARACTERS)]
    max_tokens: Annotated[int, Field(ge=1, le=completion.MOST_TOKENS)] = 128
    temperature: Annotated[float, Field(description="0: the most likely token each time.")] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: Annotated[int, Field(ge=-(2**53), le=2**53, description="The same request with the same seed has the same answer.")] = 0
    stop: Annotated[list[str], Field(max_length=completion.STOPS, description="The text ends before the first of them.")] = []
    stream: Annotated[bool, Field(description="Answer with server-sent events: `text` pieces, then `done`.")] = False
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.8}]})


class Completed(BaseModel):
    text: str
    tokens: int
    reason: Literal["end", "stop", "limit", "time"]


class Sequences(_Body):
    sequences: Annotated[list[Annotated[str, Field(min_length=1, max_length=100_000)]], Field(min_length=1, max_length=1024)]
    model_config = ConfigDict(json_schema_extra={"examples": [{"sequences": ["ACGTACGTACGT"]}]})


class Failure(BaseModel):
    error: Annotated[str, Field(examples=["there is no stream 'site-9'"])]


FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": text}
    for status, text in {
        400: "The request is wrong; `error` says what and where.",
        401: "No token, or an unknown one.",
        403: "The token may not do this.",
        404: "No such stream.",
        405: "Not with this method.",
        408: "The body did not arrive in time.",
        409: "The memory belongs to another version or is damaged.",
        413: "Too large.",
        415: "Another content type is wanted.",
        429: "Too many requests, or too many events wait.",
        503: "Starting, draining, or no answer in time; send again.",
    }.items()
}


class Hub:
    """Tells what was committed to those who watch. `tell` is called on the live thread, everything else on the loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchers: set[Watcher] = set()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def tell(self, committed: Committed) -> None:
        if self._watchers and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, committed)

    def _spread(self, committed: Committed) -> None:
        for watcher in self._watchers:
            watcher.rows.extend(row for row in committed.rows if row.unique_id == watcher.stream)
            del watcher.rows[:-512]
            watcher.wake.set()

    def watch(self, stream: str) -> Watcher:
        watcher = Watcher(stream)
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.ended = True
            watcher.wake.set()


class Watcher:
    def __init__(self, stream: str):
        self.stream = stream
        self.rows: list[HistoryRow] = []
        self.wake = asyncio.Event()
        self.ended = False


class Dials:
    """What `/metrics` says."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        metric = partial(prometheus.Counter, registry=self.registry)
        self._events = metric("tethys_events", "Events by what became of them", ["verdict"])
        self._alarms = metric("tethys_alarms", "Anomalies and drifts")
        self._batches = metric("tethys_batches", "Durable batches")
        self._answers = metric("tethys_answers", "Answers by route and status", ["route", "status"])
        buckets = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
        self._batch = prometheus.Histogram("tethys_batch_seconds", "From taking a batch to its commit", buckets=buckets, registry=self.registry)
        self._request = prometheus.Histogram(
            "tethys_request_seconds", "From a request to its answer", ["route"], buckets=buckets, registry=self.registry
        )
        gauge = partial(prometheus.Gauge, registry=self.registry)
        self._streams, self._waiting = gauge("tethys_streams", "Streams with a memory"), gauge("tethys_waiting", "Events that wait")
        self._version = gauge("tethys_live_version", "Version of the model that is live")
        self._surprise = gauge("tethys_surprise", "Mean surprise of the last batch")
        self._coverage = gauge("tethys_coverage", "Share of values in the interval issued one row before")

    def tell(self, committed: Committed) -> None:
        self._batches.inc()
        self._batch.observe(committed.seconds)
        for verdict in ("accepted", "missing", "late", "duplicate", "corrected", "conflict", "quarantined", "off_grid"):
            if committed.counters[verdict]:
                self._events.labels(verdict).inc(committed.counters[verdict])
        self._alarms.inc(committed.counters["alarms"])
        if committed.surprise == committed.surprise:
            self._surprise.set(committed.surprise)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._answers.labels(route, str(status)).inc()
        self._request.labels(route).observe(seconds)

    def text(self, service: Service) -> bytes:
        self._streams.set(len(service.live.known))
        self._waiting.set(service.live.waiting)
        self._version.set(service.files.number)
        counters = service.live.counters
        if counters["judged"]:
            self._coverage.set(counters["covered"] / counters["judged"])
        return prometheus.generate_latest(self.registry)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def _fail(status: int, error: str, **headers: str) -> Response:
    return Response(orjson.dumps({"error": error}), status, media_type="application/json", headers=headers)


def _document(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of a route that reads it by itself (validated in one pass, without copies)."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}}}


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise UserError(_told(error.errors(include_url=False, include_context=False, include_input=False))) from None


def _told(errors: Any) -> str:
    """The first mistakes, with their places: `events.3.ds: Field required`."""
    lines = [f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in errors[:3]]
    return "; ".join(lines) + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")


def create(settings: Settings) -> tuple[FastAPI, Service]:
    """The application and the service behind it; the service starts and stops with the application."""
    hub, dials = Hub(), Dials()

    def committed(batch: Committed) -> None:
        dials.tell(batch)
        hub.tell(batch)

    service = Service(settings, committed)
    counts = service.policy.frequency.counts
    classifier = completer = None
    if settings.classifier is not None:
        classifier = SequenceClassifier(settings.classifier, settings.tracking_uri)
    if settings.language_model is not None:
        completer = Completer(settings.language_model, settings.tracking_uri)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        hub.attach(loop)
        await loop.run_in_executor(None, service.start)
        app.state.ready = True
        yield
        app.state.ready = False
        if completer is not None:
            completer.stop()
        await loop.run_in_executor(None, service.stop)

    app = FastAPI(
        title="Tethys", version="1", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="Forecasts from memories that keep learning. An answer to a push means: learnt, and durable.",
    )  # fmt: skip
    app.state.ready, app.state.hub = False, hub

    # Time.

    def stamp(ds: int) -> str | int:
        return ds if counts else str(stamps(np.array([ds]))[0])

    def stamps(ds: np.ndarray) -> list[Any]:
        if counts:
            return list(ds.tolist())
        unit: Literal["s", "us"] = "us" if (ds % 1_000_000).any() else "s"
        return [f"{text}Z" for text in np.datetime_as_string(ds.astype("datetime64[us]"), unit=unit)]

    def time_of(event: Event, place: int) -> int:
        try:
            if counts:
                if not isinstance(event.ds, int) or abs(event.ds) >= 2**53:
                    raise ValueError("the model counts steps: send a whole number")
                return event.ds
            if not isinstance(event.ds, str):  # 1970 and a few seconds is never what is meant
                raise ValueError(f"{event.ds} is no date: send ISO 8601 text, as 2026-01-31T13:00:00Z or 2026-01-31T14:00:00+01:00 (no offset: UTC)")
            ds = parse_time(event.ds)
            if not EARLIEST <= ds <= LATEST:
                raise ValueError("beyond the years 1900 to 2200")
            return ds
        except (ValueError, OverflowError) as error:
            raise UserError(f"events.{place}.ds: {str(error)[:150]}") from None

    def shown(one: Forecast) -> dict[str, Any]:
        return {
            "unique_id": one.unique_id,
            "origin": stamp(one.origin),
            "model": one.model,
            "ds": stamps(one.ds),
            "quantiles": {f"{q:g}": np.ascontiguousarray(one.quantiles[:, i]) for i, q in enumerate(service.live.model.quantiles)},
            "low": np.ascontiguousarray(one.low),
            "high": np.ascontiguousarray(one.high),
        }

    def told(row: HistoryRow) -> dict[str, Any]:
        return {**row._asdict(), "ds": stamp(row.ds), "next_ds": stamp(row.next_ds), "alarms": row.alarms.split(",") if row.alarms else []}

    # Faults: one JSON line each.

    @app.exception_handler(UserError)
    async def mistake(request: Request, error: UserError) -> Response:
        kinds: list[tuple[type, int]] = [(Unknown, 404), (Busy, 429), (Stopped, 503), (Unfit, 409)]
        status = next((status for kind, status in kinds if isinstance(error, kind)), 400)
        return _fail(status, str(error), **({"retry-after": "1"} if status in (429, 503) else {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _fail(400, _told(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return _fail(error.status_code, str(error.detail), **(error.headers or {}))

    async def off_loop(do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, do)

    def known(name: str) -> None:
        if name not in service.live.known:
            raise Unknown(f"there is no stream {name[:NAME_CHARACTERS]!r}")

    # Streams.

    @app.post("/v1/events", responses={200: {"model": PushedOut}, **FAILURES}, openapi_extra=_document(Events), tags=["streams"])
    async def push(request: Request) -> Response:
        """Push events. The answer comes when they are learnt and durable: a crash after it loses nothing of them."""
        asked = _parse(Events, await request.body())
        records = []
        for i, event in enumerate(asked.events):
            if event.y is not None and not abs(event.y) <= LARGEST_VALUE:
                raise UserError(f"events.{i}.y: not a number within {LARGEST_VALUE:g}; send null for a missing value")
            y = float("nan") if event.y is None else event.y
            records.append(Record(event.unique_id, time_of(event, i), y, event.event_id, "http", i))
        done = await asyncio.wrap_future(service.live.push(records, forecast=asked.forecast))
        return _json({"verdicts": done.verdicts, "forecasts": [shown(one) for one in done.forecasts], "durable": True})

    @app.get("/v1/streams", responses=FAILURES, tags=["streams"])
    async def streams(
        limit: Annotated[int, Query(ge=1, le=1000)] = 200, after: Annotated[str, Query(max_length=NAME_CHARACTERS)] = ""
    ) -> Response:
        """Streams and their health, by name; `after` names the last one of the page before."""
        live = service.live
        names = sorted(name for name in live.known if name > after)
        rows = []
        for name in names[:limit]:
            found = live.summaries.get(name)
            if found is None:
                rows.append({"unique_id": name, "rows": 0})
                continue
            last = found.last
            rows.append(
                {
                    "unique_id": name, "last": stamp(last.ds), "y": last.y, "rows": found.rows, "alarms": found.alarms, "surprise": last.surprise,
                    "anomaly": last.anomaly, "norm": last.norm, "model": last.model, "seen": found.seen or None,
                }
            )  # fmt: skip
        return _json({"streams": rows, "more": len(names) > limit})

    @app.get("/v1/streams/{name:path}/forecast", responses={200: {"model": ForecastOut}, **FAILURES}, tags=["streams"])
    async def forecast(name: str) -> Response:
        """What is expected of a stream after its last row, with quantiles and the interval that keeps its coverage."""
        held = service.live.latest.get(name)
        return _json(shown(held if held is not None else await asyncio.wrap_future(service.live.forecast(name))))

    @app.get("/v1/streams/{name:path}/history", responses=FAILURES, tags=["streams"])
    async def history(name: str, limit: Annotated[int, Query(ge=1, le=10_000)] = 200) -> Response:
        """The newest rows of a stream, oldest first: value, surprise, alarms, memory norm, and what was expected of the next row."""
        known(name)
        rows = await off_loop(lambda: service.read(lambda h: h.rows(name, limit)))
        return _json({"unique_id": name, "rows": [told(row) for row in rows]})

    @app.get("/v1/streams/{name:path}/anomalies", responses=FAILURES, tags=["streams"])
    async def anomalies(name: str, limit: Annotated[int, Query(ge=1, le=10_000)] = 200) -> Response:
        """The newest rows of a stream with an alarm, oldest first."""
        known(name)
        rows = await off_loop(lambda: service.read(lambda h: h.rows(name, limit, alarms_only=True)))
        return _json({"unique_id": name, "rows": [told(row) for row in rows]})

    memory_bytes = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}

    @app.get("/v1/streams/{name:path}/memory", responses={200: memory_bytes, **FAILURES}, tags=["memory"], response_class=Response)
    async def export(name: str) -> Response:
        """The stream's memory as safetensors bytes, with its clock."""
        data = await asyncio.wrap_future(service.live.export(name))
        return Response(data, media_type="application/octet-stream")

    @app.put(
        "/v1/streams/{name:path}/memory", responses=FAILURES, tags=["memory"], openapi_extra={"requestBody": {"required": True, **memory_bytes}}
    )
    async def load(name: str, request: Request) -> Response:
        """Replace, or begin, a stream with a memory that `GET .../memory` gave, of the version that is live."""
        try:
            pydantic.TypeAdapter(Name).validate_python(name)
        except pydantic.ValidationError as error:
            raise UserError(f"the name of the stream: {error.errors()[0]['msg']}") from None
        await asyncio.wrap_future(service.live.load(name, await request.body()))
        await off_loop(service.memory_replaced)
        return _json({"unique_id": name, "model": service.live.model.version})

    @app.delete("/v1/streams/{name:path}/memory", responses=FAILURES, tags=["memory"])
    async def reset(name: str) -> Response:
        """Forget: the stream begins anew with its next event."""
        await asyncio.wrap_future(service.live.reset(name))
        await off_loop(service.memory_replaced)
        return _json({"unique_id": name, "reset": True})

    # Stateless.

    async def score(request: Request) -> Response:
        """Forecast series from the rows in the request, with fresh memories; nothing changes. As `mlflow models serve` answers."""
        asked = _parse(Score, await request.body())
        if (asked.dataframe_split is None) == (asked.dataframe_records is None):
            raise UserError("send either dataframe_split or dataframe_records")
        if asked.dataframe_split is not None:
            names, data = asked.dataframe_split.columns, asked.dataframe_split.data
            wrong = next((i for i, row in enumerate(data) if len(row) != len(names)), None)
            if wrong is not None:
                raise UserError(f"dataframe_split.data.{wrong}: {len(data[wrong])} values for {len(names)} columns")
            columns = dict(zip(names, zip(*data, strict=True), strict=True))
        else:
            records = asked.dataframe_records or []
            wanted = ("unique_id", "ds", "y", *service.scorer.covariates)
            wrong = next((i for i, record in enumerate(records) if not all(name in record for name in wanted)), None)
            if wrong is not None:
                raise UserError(f"dataframe_records.{wrong}: every record needs {', '.join(wanted)}")
            columns = {name: tuple(record[name] for record in records) for name in wanted}
        do = partial(service.scorer.score, columns, asked.params.h, asked.params.quantiles)
        found = do() if service.scorer.quick(len(columns.get("ds", ()))) else await off_loop(do)
        found["ds"] = stamps(np.array(found["ds"], dtype=np.int64))
        names = list(found)
        return _json({"predictions": [dict(zip(names, row, strict=True)) for row in zip(*found.values(), strict=True)]})

    documented: dict[str, Any] = {
        "responses": {200: {"model": Predictions}, **FAILURES}, "openapi_extra": _document(Score), "tags": ["stateless"]
    }  # fmt: skip
    app.post("/v1/score", **documented)(score)
    app.post("/invocations", operation_id="invocations", **documented)(score)

    if classifier is not None:
        labels = classifier

        @app.post("/v1/classify", responses={200: {"model": Predictions}, **FAILURES}, openapi_extra=_document(Sequences), tags=["stateless"])
        async def classify(request: Request) -> Response:
            """Prediction and probability of each class for DNA sequences. As `mlflow models serve` answers."""
            asked = _parse(Sequences, await request.body())
            return _json({"predictions": await off_loop(lambda: labels.classify(asked.sequences))})

    if completer is not None:
        writer = completer

        @app.post("/v1/complete", responses={200: {"model": Completed}, **FAILURES}, openapi_extra=_document(Completion), tags=["stateless"])
        async def complete(request: Request) -> Response:
            """Continue a text. What is read is learnt for this answer, and forgotten after it."""
            asked = _parse(Completion, await request.body())
            given = asked.model_dump(exclude={"prompt", "stop", "stream"})
            pieces = writer.complete(asked.prompt, completion.wanted(given, asked.stop))
            await anext(pieces)  # refusals come before the answer begins
            if not asked.stream:
                found = [piece async for piece in pieces]
                return _json({"text": "".join(piece["text"] for piece in found[:-1]), **found[-1]})

            async def events() -> AsyncIterator[bytes]:
                async with aclosing(pieces):
                    async for piece in pieces:
                        yield b"event: %s\ndata: %s\n\n" % (b"text" if "text" in piece else b"done", orjson.dumps(piece))

            return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    # The service itself.

    @app.get("/v1/service", responses=FAILURES, tags=["service"])
    async def about() -> Response:
        """Model, champions, shadow, counters."""
        return _json({**await off_loop(service.about), "ready": app.state.ready and service.live.well})

    @app.get("/v1/live", tags=["service"], responses=FAILURES, response_class=StreamingResponse)
    async def watch(stream: Annotated[str, Query(max_length=NAME_CHARACTERS)] = "") -> Response:
        """Server-sent events: `rows` of one stream with its newest forecast as they are committed, and `beat` at every commit."""

        async def events() -> AsyncIterator[bytes]:
            watcher = hub.watch(stream)
            try:
                yield b"retry: 1000\n\n"
                while not watcher.ended:
                    try:
                        async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                            await watcher.wake.wait()
                    except TimeoutError:
                        yield b": still here\n\n"
                        continue
                    watcher.wake.clear()
                    rows, watcher.rows = watcher.rows, []
                    data: dict[str, Any] = {"waiting": service.live.waiting, "received": service.live.counters["received"]}
                    held = service.live.latest.get(stream)
                    if rows and held is not None:
                        data |= {"rows": [told(row) for row in rows], "forecast": shown(held)}
                    yield b"event: %s\ndata: %s\n\n" % (b"rows" if rows else b"beat", orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY))
                    await asyncio.sleep(TELL_SECONDS)
            finally:
                hub.leave(watcher)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    @app.get("/healthz", tags=["service"], responses={503: {"model": Failure}})
    async def healthz() -> Response:
        """The process lives and its engine has not failed."""
        return _json({"alive": True}) if service.live.failed is None else _fail(503, "the engine has failed: start the service again")

    @app.get("/readyz", tags=["service"], responses={503: {"model": Failure}})
    async def readyz() -> Response:
        """Events are taken."""
        return _json({"ready": True}) if app.state.ready and service.live.well else _fail(503, "starting or stopping")

    @app.get("/metrics", tags=["service"], responses=FAILURES, response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(dials.text(service), media_type=prometheus.CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            return _fail(404, "there is no such file")
        return Response((PAGE / name).read_bytes(), media_type=ASSETS[name], headers=PAGE_HEADERS)

    _complete_document(app)
    app.add_middleware(Guard, tokens=settings.tokens, limits=settings.limits, answered=dials.answered)
    return app, service


def _complete_document(app: FastAPI) -> None:
    """FastAPI does not see the models that the routes parse by themselves."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            parts = document.setdefault("components", {}).setdefault("schemas", {})
            for model in (Events, Score, Sequences, Completion):
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                parts.update(schema.pop("$defs", {}))
                parts[model.__name__] = schema
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{}, {"token": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


class Server(uvicorn.Server):
    """At the first signal: not ready any more, and the watchers' endless answers end, so that the drain can."""

    def __init__(self, config: uvicorn.Config, app: FastAPI):
        super().__init__(config)
        self._draining = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What was imported stays: looking through it again would hold every request up for tenths of a second.
        gc.collect()
        gc.freeze()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._draining.state.ready = False
        self._draining.state.hub.close()
        # Not uvicorn's own: it would raise the signal again at the end, and a drain that went well ends with status 0.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def run(settings: Settings, announce: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or SIGINT; then drain: what was taken is answered and durable. Raises UserError."""
    app, service = create(settings)
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_level="warning", access_log=False, server_header=False, date_header=False,
        limit_concurrency=1024, timeout_keep_alive=75, timeout_graceful_shutdown=20, h11_max_incomplete_event_size=64 << 10, lifespan="on",
    )  # fmt: skip
    try:
        sock = config.bind_socket()
    except SystemExit:
        raise UserError(f"cannot listen on {settings.host}, port {settings.port}: choose another port") from None
    host, port = sock.getsockname()[:2]
    announce(f"http://{host if ':' not in host else f'[{host}]'}:{port}/  {service.live.model.version}, {len(service.live.summaries)} streams")
    Server(config, app).run(sockets=[sock])
    if service.live.failed is not None:
        raise UserError(f"the engine failed ({service.live.failed}): what was acknowledged is safe; start the service again")
