"""The service as a whole: which version is live, who watches the registry, and how it starts and ends.

Everything lies in one folder: `history.db`, a checkpoint `v3.db` for each version that was live or in the shadow, and a copy of their weights,
so that a restart needs no registry. The champion of the registry goes live: its memories first replay the recent past of every stream in a
process of their own, then take over between two batches. A rollback is the same.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.job import load_forecaster
from pipelines.serving.guard import LOOPBACK, Limits, Tokens
from pipelines.serving.history import KEEP_ROWS, History
from pipelines.serving.live import Committed, Live
from pipelines.serving.scoring import Scorer
from pipelines.serving.shadow import Settings as ShadowSettings
from pipelines.serving.shadow import Shadow, discard
from pipelines.streaming.dials import Step
from pipelines.streaming.engine import StreamModel
from pipelines.streaming.event_time import EventTime, Frequency, parse_duration
from pipelines.streaming.figures import Figures
from pipelines.streaming.worker import stream_model

log = logging.getLogger("tethys.serve")

WATCH_SECONDS = 5.0
# A shadow this close to the live version catches up within a batch or two.
CLOSE_ROWS = 256


@dataclass(frozen=True)
class Settings:
    model: str = "forecaster"
    version: str = "champion"
    """An alias, which is followed, or a number, which stays."""
    tracking_uri: str = DEFAULT_TRACKING_URI
    state: Path = Path("runs/serve")
    shadow: str | None = None
    """An alias (`challenger`) that runs in the shadow of the live version."""
    grace: str = "0s"
    conflict: str = "reject"
    keep: int = KEEP_ROWS
    watch_seconds: float = WATCH_SECONDS
    covariates: str | None = None
    """Table of the covariates of the streams, past and to come, where the model has any; read again when it changes."""
    classifier: str | None = None
    language_model: str | None = None
    """`models:/NAME@ALIAS`, or a file of weights."""
    host: str = "127.0.0.1"
    port: int = 8080
    tokens: Tokens = field(default_factory=lambda: Tokens([], []))
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.tokens:
            raise UserError(
                f"the service does not listen on {self.host} without tokens: put `write TOKEN` into a file and say --tokens FILE, or set "
                "TETHYS_WRITE_TOKENS"
            )


@dataclass(frozen=True)
class Files:
    """A registered version on this machine."""

    number: int
    weights: Path
    config: Path

    def load(self) -> TitansForecaster:
        return load_forecaster(self.weights, self.config)


class Service:
    """`start`, then serve; `stop` ends it whole. `listen` is called after every commit, on the live thread."""

    def __init__(self, settings: Settings, listen: Callable[[Committed], None] | None = None):
        self.settings = settings
        self._listen = listen or (lambda committed: None)
        self.folder = settings.state
        try:
            (self.folder / "models").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot keep the state of the service in '{self.folder}': {error.strerror}") from None
        self.history_path = self.folder / "history.db"
        history = History(self.history_path, keep=settings.keep)
        reigns = history.champions()
        self._pinned = settings.version if settings.version.isdigit() else None
        number = reigns[-1].version if reigns and self._pinned is None else self._look_up(settings.version)
        self.files = self._fetch(number)
        fitted = self.files.load()
        model = self._stream_model(fitted, number)
        self.policy = EventTime(Frequency.parse(model.frequency), grace=parse_duration(settings.grace), conflict=settings.conflict)
        self.scorer = Scorer(fitted, model.version)
        self.live = Live(model, self.policy, self._checkpoint(number), history, listen=self._committed)
        self._reader = History(self.history_path)
        self._reader_lock = threading.Lock()
        if not reigns:
            history.crown(number, "first start")
        elif reigns[-1].version != number:  # pinned to another version: its memories are made by the promoter as for any other
            raise UserError(
                f"'{self.folder}' is live with version {reigns[-1].version}: start with --version {reigns[-1].version}, or follow an alias"
            )
        self.shadow: Shadow | None = None
        self.promoting: int | None = None
        self.trouble: str | None = None
        """What the promoter last failed at, for the page and `/v1/service`."""
        self.started = time.time()
        self._stop = threading.Event()
        self._turn = threading.Lock()
        """Held by whoever starts, ends or hands over a shadow."""
        self._promoter = threading.Thread(target=self._watch, name="promoter", daemon=True)
        self._run: Any = None
        self._figures: Figures | None = None

    def start(self) -> None:
        from pipelines import tracking

        self.live.start()
        params = {"model": self.live.model.version, "state": str(self.folder)}
        self._run = tracking.LiveRun(self.settings.tracking_uri, f"serve {self.settings.model}", params=params)
        self._run.__enter__()
        self._figures = Figures(self._run.log)
        self._promoter.start()

    def stop(self) -> None:
        """Drain: what waits is done and durable, every memory is written, the shadow ends."""
        self._stop.set()
        if self._promoter.is_alive():
            self._promoter.join(30.0)
        if self.shadow is not None:
            self.shadow.stop()
        self.live.stop()
        self.live.history.close()
        self._reader.close()
        if self._run is not None and self._figures is not None:
            self._figures.__exit__()
            self._run.__exit__(None, None, None)

    def read(self, ask: Callable[[History], Any]) -> Any:
        """Ask the durable history; from any thread but the live one."""
        with self._reader_lock:
            return ask(self._reader)

    def memory_replaced(self) -> None:
        """After an import or a reset: a shadow has read rows that are no longer the stream's past, so it begins anew."""
        with self._turn:
            if self.shadow is not None:
                settings = self.shadow.settings
                self.shadow.stop()
                discard(Path(settings.checkpoint))
                self.shadow = Shadow(settings, self.folder / "shadow.log")

    # Versions.

    def _name(self, number: int) -> str:
        return f"{self.settings.model}/{number}"

    def _stream_model(self, fitted: TitansForecaster, number: int) -> StreamModel:
        if fitted.encoder_.names and self.settings.covariates is None:
            raise UserError(
                f"{self._name(number)} was trained with {', '.join(map(repr, fitted.encoder_.names))}: say --covariates TABLE, a row a stream and "
                "step, past and to come (events carry none; scoring takes them in its rows)"
            )
        return stream_model(fitted, self._name(number), self.settings.covariates)

    def _checkpoint(self, number: int) -> Path:
        return self.folder / f"v{number}.db"

    def _look_up(self, version: str) -> int:
        from pipelines import tracking

        found = tracking.find_version(self.settings.model, version, self.settings.tracking_uri)
        if found is None:
            raise UserError(
                f"model {self.settings.model!r} has no {version!r}: tethys models promote {self.settings.model} --data TABLE makes one"
            )
        return found.number

    def _fetch(self, number: int) -> Files:
        """The files of a version, from the folder or from the registry; a copy stays in the folder."""
        place = self.folder / "models" / f"v{number}"
        if not place.is_dir():
            from pipelines import tracking

            found = tracking.load_model(self.settings.model, number, self.settings.tracking_uri)
            part = place.with_name(f".v{number}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            shutil.copyfile(found.weights, part / "weights.safetensors")
            (part / "config.json").write_text(json.dumps(found.config))
            os.replace(part, place)
        return Files(number, place / "weights.safetensors", place / "config.json")

    def _watch(self) -> None:
        """The promoter: follows the aliases for as long as the service lives."""
        while not self._stop.wait(self.settings.watch_seconds):
            try:
                self._follow()
                self.trouble = None
            except Exception as error:  # the registry is away, or a version does not work: what is live goes on
                text = " ".join(str(error).split())[:300] or type(error).__name__
                if text != self.trouble:
                    log.warning("promotion: %s", text)
                self.trouble = text
            finally:
                self.promoting = None

    def _follow(self) -> None:
        from pipelines import tracking

        name, uri = self.settings.model, self.settings.tracking_uri
        if self._pinned is None:
            wanted = tracking.find_version(name, self.settings.version, uri)
            if wanted is not None and wanted.number != self.files.number:
                self._promote(wanted.number, self._reason(wanted.number))
        if self.settings.shadow is not None:
            self._keep_shadow(tracking.find_version(name, self.settings.shadow, uri))

    def _reason(self, number: int) -> str:
        from pipelines import tracking

        entries = tracking.alias_history(self.settings.model, self.settings.version, self.settings.tracking_uri)
        mine = [entry for entry in entries if entry["version"] == number]
        return f"{mine[-1].get('why', 'moved')}, by {mine[-1].get('by', '?')}" if mine else "the alias was moved by hand"

    def _keep_shadow(self, wanted: Any) -> None:
        number = None if wanted is None or wanted.number == self.files.number else wanted.number
        with self._turn:
            if self.shadow is not None and (number is None or self.shadow.settings.model != self._name(number) or not self.shadow.alive):
                self.shadow.stop()
                self.shadow = None
            if self.shadow is None and number is not None:
                self.shadow = self._start_shadow(number)

    def _start_shadow(self, number: int) -> Shadow:
        files = self._fetch(number)
        if files.load().frequency_ != self.policy.frequency.text:
            raise UserError(f"version {number} forecasts steps of {files.load().frequency_}, the streams have {self.policy.frequency.text}")
        settings = ShadowSettings(
            self._name(number), str(files.weights), str(files.config), str(self.history_path), str(self._checkpoint(number)),
            str(self.folder / f"v{number}.tally.json"), self.policy.grace, self.policy.conflict, self.settings.covariates,
        )  # fmt: skip
        return Shadow(settings, self.folder / "shadow.log")

    def _promote(self, number: int, why: str) -> None:
        """Warm the version up beside the live one, hand over, and score with it as well."""
        self.promoting = number
        began = time.monotonic()
        with self._turn:
            if self.shadow is None or self.shadow.settings.model != self._name(number) or not self.shadow.alive:
                if self.shadow is not None:
                    self.shadow.stop()
                self.shadow = self._start_shadow(number)
            shadow, self.shadow = self.shadow, None
            try:
                while shadow.position() < max(0, self.live.history.last - CLOSE_ROWS):
                    if self._stop.wait(0.05) or not shadow.alive:
                        raise UserError(f"version {number} stopped before it had caught up: see {self.folder / 'shadow.log'}")
                fitted = self._fetch(number).load()
                model = self._stream_model(fitted, number)
                self.live.hand_over(model, self._checkpoint(number), shadow.end_at, number, why).result(120.0)
            finally:
                shadow.stop()
        before, self.files = self.files, self._fetch(number)
        self.scorer = Scorer(fitted, model.version)
        log.warning("live: version %d instead of %d after %.1f s of warming (%s)", number, before.number, time.monotonic() - began, why)

    # What is told.

    def about(self) -> dict[str, Any]:
        shadow = self.shadow
        tally = None if shadow is None else shadow.tally()
        return {
            "model": self.settings.model,
            "version": self.files.number,
            "frequency": self.live.model.frequency,
            "horizon": self.live.model.horizon,
            "quantiles": list(self.live.model.quantiles),
            "streams": len(self.live.known),
            "waiting": self.live.waiting,
            "counters": dict(self.live.counters),
            "promoting": self.promoting,
            "trouble": self.trouble,
            "shadow": None if tally is None else asdict(tally),
            "champions": [asdict(reign) for reign in self.read(lambda history: history.champions())],
            "started": self.started,
        }

    def _committed(self, committed: Committed) -> None:
        self._listen(committed)
        if self._figures is not None:
            self._figures(
                Step(
                    Counter(self.live.counters), len(self.live.known), committed.latencies_ms, committed.surprise, self.live.waiting,
                    self.live.store.bytes_written, committed.latencies_ms[:0],  # the step alone is not timed here
                )
            )  # fmt: skip
