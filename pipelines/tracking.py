"""Runs, figures and registered models in MLflow. The only module that imports MLflow.

A store is named by its URI: a SQLite file by default, a tracking server's address in production. A registered
forecaster is code that MLflow executes when it loads the model (`mlflow/models/forecaster.py`), safetensors weights
and a JSON configuration: nothing is pickled, and loading pickles is switched off for the whole process. A version's
architecture is chosen by its configuration and not by code copied into the version, because two versions with copied
code in one process would both run the first one's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI

# `import mlflow` cannot tell: in the project's root it finds an empty namespace where MLflow is not installed.
try:
    importlib.metadata.version("mlflow")
except importlib.metadata.PackageNotFoundError:
    raise UserError("MLflow is not installed in this environment: run pip install 'mlflow>=3.17,<4'") from None

os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# A server that does not answer is said so in seconds; MLflow's own default is many minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault(
    "MLFLOW_MODEL_CATALOG_URI", ""
)  # MLflow would fetch a catalogue of language models from the network

import mlflow
import mlflow.db
from mlflow.data.polars_dataset import from_polars
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

if TYPE_CHECKING:
    import matplotlib.figure
    import polars as pl

EXPERIMENT = "tethys"
# MLflow refuses larger batches.
_METRICS_A_BATCH = 1000
# Long enough for a server at work, short enough for a person who waits.
_REACH_SECONDS = 3.0
# Metrics of a live stream that wait for a store that is away; beyond this the oldest go.
_METRICS_KEPT = 100_000
_SQLITE = "sqlite:///"
# A column of the registry's tables holds no more.
_DESCRIPTION_CHARACTERS = 5000
TRAINED_UNTIL = "trained_until"

# They announce every table and every check that they make.
for _chatty in ("alembic", "mlflow.store.db.utils", "mlflow.pyfunc"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)


@dataclass(frozen=True)
class Store:
    """A tracking store that is ready: its schema is current and the experiment exists."""

    uri: str
    experiment_id: str
    """Of the experiment `tethys`; runs on other machines (Ray workers) are begun with both, never with a global setting."""

    @property
    def client(self) -> MlflowClient:
        return _client(self.uri)


@dataclass(frozen=True)
class Run:
    """An active run. Metrics and parameters are numbers and short texts; files and figures are artifacts."""

    store: Store
    id: str
    experiment_id: str

    @property
    def link(self) -> str:
        """A page of the tracking server, or the command that shows a local store, then the page."""
        page = f"#/experiments/{self.experiment_id}/runs/{self.id}"
        if _is_sqlite(self.store.uri):
            return f"mlflow ui --backend-store-uri {self.store.uri}  ->  http://127.0.0.1:5000/{page}"
        return f"{self.store.uri.rstrip('/')}/{page}"

    def log_params(self, params: Mapping[str, Any]) -> None:
        mlflow.log_params({key: value for key, value in params.items() if value is not None}, run_id=self.id)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """All metrics of one step in one write (one write a metric is a hundred times slower)."""
        self.log_history([(step, metrics)])

    def log_history(self, history: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Metrics of many steps: pairs of step and metrics."""
        now = int(time.time() * 1000)
        entries = [Metric(key, float(value), now, step) for step, metrics in history for key, value in metrics.items()]
        for first in range(0, len(entries), _METRICS_A_BATCH):
            self.store.client.log_batch(self.id, metrics=entries[first : first + _METRICS_A_BATCH])

    def log_dataset(self, frame: pl.DataFrame, *, name: str, source: str, context: str = "training") -> str:
        """Names the data with a digest of its rows; returns the digest."""
        with warnings.catch_warnings():  # MLflow warns that a local path might be two kinds of local source
            warnings.simplefilter("ignore", UserWarning)
            dataset = from_polars(frame, source=source, name=name)
        mlflow.log_input(dataset, context=context)
        return str(dataset.digest)

    def log_figure(self, figure: matplotlib.figure.Figure, name: str) -> None:
        mlflow.log_figure(figure, name)

    def log_file(self, path: str | Path, folder: str | None = None) -> None:
        self.store.client.log_artifact(self.id, str(path), folder)

    def log_json(self, value: Any, name: str) -> None:
        mlflow.log_dict(value, name)


@dataclass(frozen=True)
class Version:
    """A version of a registered model as the registry knows it."""

    name: str
    number: int
    aliases: tuple[str, ...]
    run_id: str
    created_ms: int
    tags: dict[str, str]
    metrics: dict[str, float]


@dataclass(frozen=True)
class RegisteredForecaster:
    """A version of a model in the registry, with its files on this machine."""

    name: str
    version: int
    aliases: tuple[str, ...]
    run_id: str
    weights: Path
    config: dict[str, Any]


def open_store(uri: str = DEFAULT_TRACKING_URI, experiment: str = EXPERIMENT) -> Store:
    """Opens a tracking store, and makes it where it is a SQLite file that does not exist yet.

    Any number of processes may do so at once: the first one makes the schema in a file beside the store and renames
    it into place, under a lock, so that a store either exists whole or not at all (two processes that migrate one
    fresh SQLite file destroy it). An existing store is never migrated: UserError names the command where its schema
    belongs to another release.
    """
    if not _is_sqlite(uri):
        _reach(uri)
        with _said_in_a_line(uri):
            return Store(uri, _experiment(_client(uri), experiment, None))
    path = _sqlite_path(uri)
    uri = f"{_SQLITE}{path}"
    if not path.parent.parent.is_dir():  # one folder is made, as `runs` is; more than one is a slip of the pen
        raise UserError(f"the folder {path.parent.parent} of the tracking store {uri} does not exist: make it, or correct the address")
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path.parent} of the tracking store ({error.strerror}): name another --tracking-uri") from None
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _make_schema(path)
        experiment_id = _experiment(_client(uri), experiment, (path.parent / "artifacts").as_uri())
    return Store(uri, experiment_id)


def check_names(name: str, alias: str | None) -> None:
    """Raises UserError for names that the registry would refuse, or where they would mean something else; ask before the work."""
    if not name or "/" in name or ":" in name:
        raise UserError(f"{name!r} is no name of a model: write one without '/' and ':', as sales")
    if alias is not None and (re.fullmatch(r"v?\d+|latest", alias, re.IGNORECASE) or not re.fullmatch(r"[\w-]+", alias, re.ASCII)):
        raise UserError(f"{alias!r} is no alias: write letters, digits, '_' and '-', as challenger; numbers, 'v1' and 'latest' mean versions")


@contextmanager
def run(
    store: Store,
    name: str,
    *,
    params: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    parent: Run | None = None,
) -> Iterator[Run]:
    """A run that ends with the block: FINISHED, or FAILED where the block raises. With `parent` it is a child of that run.

    It carries the version of the code as tags and, unless it is a child, the environment as an artifact. Under `mlflow run` (which sets
    MLFLOW_RUN_ID) it is the run that MLflow began for the project. Raises UserError where the store does not answer.
    """
    _reach(store.uri)
    mlflow.set_tracking_uri(store.uri)
    mlflow.set_registry_uri(store.uri)
    with (
        _said_in_a_line(store.uri),
        mlflow.start_run(
            experiment_id=store.experiment_id,
            run_name=name,
            tags={**_code_version(), **(tags or {})},
            nested=parent is not None,
            parent_run_id=None if parent is None else parent.id,
        ) as active,
    ):
        started = Run(store, active.info.run_id, active.info.experiment_id)
        if params:
            started.log_params(params)
        if parent is None:
            started.log_json(environment(), "environment.json")
        yield started


def begin(
    store: Store,
    name: str,
    *,
    params: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    parent: Run | None = None,
) -> Run:
    """A run that stays open beside others until `end`: for work that overlaps. With `parent` it is a child of that run."""
    marks = {**dict(tags or {}), **({} if parent is None else {"mlflow.parentRunId": parent.id})}
    made = store.client.create_run(store.experiment_id, run_name=name, tags=marks)
    store.client.log_batch(made.info.run_id, params=[Param(k, str(v)) for k, v in (params or {}).items() if v is not None])
    return Run(store, made.info.run_id, made.info.experiment_id)


def end(run: Run, status: str = "FINISHED", tags: Mapping[str, str] | None = None) -> None:
    """FINISHED, FAILED or KILLED."""
    for key, value in (tags or {}).items():
        run.store.client.set_tag(run.id, key, value)
    run.store.client.set_terminated(run.id, status)


def reopen(store: Store, run_id: str) -> Run | None:
    """A run that `begin` made, open again; its children that never ended are KILLED. None where the store does not hold it."""
    client = store.client
    try:
        found = client.get_run(run_id)
    except MlflowException:
        return None
    left = client.search_runs([store.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}' and attributes.status = 'RUNNING'")
    for child in left:
        client.set_terminated(child.info.run_id, "KILLED")
    client.update_run(run_id, "RUNNING")
    return Run(store, run_id, found.info.experiment_id)


class LiveRun:
    """The run of a job that must go on while the store is away: metrics wait here and are sent in the background.

    Nothing here blocks the job or raises into it. A store that cannot be reached is said once on standard error; what waits arrives when it
    is back, with the times at which it was measured. At most 100,000 figures wait.
    """

    def __init__(self, uri: str, name: str, *, params: Mapping[str, Any], every: float = 10.0):
        self._uri, self._name, self._params, self._every = uri, name, params, every
        self._waiting: deque[Metric] = deque(maxlen=_METRICS_KEPT)
        self._run: Run | None = None
        self._away = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)

    def __enter__(self) -> LiveRun:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for at most half a minute; what could not be sent by then is lost, and said."""
        self._stop.set()
        self._thread.join(30.0)
        if self._waiting:
            print(f"{len(self._waiting)} figures were not sent: the tracking store {self._uri} is away", file=sys.stderr)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._waiting.extend(Metric(key, float(value), now, step) for key, value in metrics.items())

    def _work(self) -> None:
        while not self._stop.wait(self._every):
            self._send()
        self._send()
        if self._run is not None and not self._away:
            with contextlib.suppress(MlflowException):
                self._run.store.client.set_terminated(self._run.id, "FINISHED")

    def _send(self) -> None:
        batch: list[Metric] = []
        try:
            _reach(self._uri)
            if self._run is None:
                self._run = self._begin()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _METRICS_A_BATCH))]
                self._run.store.client.log_batch(self._run.id, metrics=batch)
                batch = []
            self._away = False
        except (MlflowException, UserError, OSError) as error:
            self._waiting.extendleft(reversed(batch))
            if not self._away:
                print(f"tracking: {' '.join(str(error).split())[:300]}; the job goes on, figures are sent later", file=sys.stderr)
            self._away = True

    def _begin(self) -> Run:
        store = open_store(self._uri)
        tags = {**_code_version(), "mlflow.runName": self._name}
        begun = store.client.create_run(store.experiment_id, tags=tags)
        run = Run(store, begun.info.run_id, store.experiment_id)
        params = [Param(key, str(value)) for key, value in self._params.items() if value is not None]
        store.client.log_batch(run.id, params=params)
        store.client.log_dict(run.id, environment(), "environment.json")
        return run


def environment() -> dict[str, Any]:
    """What a figure may depend on beside the code: Python, machine, and the versions of the numeric libraries."""
    names = ("tethys-streams", "torch", "numpy", "polars", "pyarrow", "ray", "mlflow", "scikit-learn", "safetensors")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "packages": versions,
    }


@functools.cache
def _code_version() -> dict[str, str]:
    """Tags: the commit of a checkout (`+`: with changes), else the version of the installed package."""
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        words = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10)
            return {"code_version": found.stdout.strip()}
    return {"code_version": _requirement()}


def register_forecaster(
    run: Run,
    weights: str | Path,
    config: Mapping[str, Any],
    *,
    name: str,
    alias: str | None,
    input_example: pl.DataFrame,
    output_example: pl.DataFrame,
    params: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    card: str | None = None,
    trained_until: str | None = None,
) -> RegisteredForecaster:
    """Logs the weights (safetensors) and the configuration as a model of the run, registers it as a new version and
    moves the alias to it.

    The two examples are a long frame as it goes in (`unique_id, ds, y`; `ds` in ISO 8601, UTC where no offset stands) and the
    forecast of it; with `params` (`h`, `quantiles`: the defaults at prediction) they make the signature. `card`: the model card in
    Markdown, kept beside the weights and shown as the description. `trained_until`: the stamp of the last row that training or selection
    saw; the promotion gate judges on later rows only.
    """
    import polars.selectors as cs

    entry = project_file("models/forecaster.py")
    # Stamps go in as text: MLflow's own datetime type refuses a zone, and JSON has text only.
    inputs = input_example.with_columns(cs.datetime().dt.strftime("%Y-%m-%dT%H:%M:%SZ")).to_pandas()
    signature = mlflow.models.infer_signature(inputs, output_example.to_pandas(), params=dict(params))
    with tempfile.TemporaryDirectory() as folder:
        config_path = Path(folder) / "config.json"
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        artifacts = {"weights": str(weights), "config": str(config_path)}
        if card is not None:
            card_path = Path(folder) / "model_card.md"
            card_path.write_text(card)
            artifacts["card"] = str(card_path)
        info = mlflow.pyfunc.log_model(
            name="forecaster",
            python_model=str(entry),
            artifacts=artifacts,
            signature=signature,
            input_example=(inputs, dict(params)),
            # The project itself, in the environment that loads the model: no code is copied into the version.
            pip_requirements=[_requirement()],
        )
    client = run.store.client
    if metrics:
        mlflow.log_metrics(dict(metrics), run_id=run.id, model_id=info.model_id)
    tags = {} if trained_until is None else {TRAINED_UNTIL: trained_until}
    version = mlflow.register_model(f"models:/{info.model_id}", name, tags=tags)
    if card is not None:
        client.update_model_version(name, version.version, description=card[:_DESCRIPTION_CHARACTERS])
    if alias is not None:
        client.set_registered_model_alias(name, alias, version.version)
    return load_model(name, version.version, run.store.uri)


def load_model(
    name: str, version: str | int, tracking_uri: str = DEFAULT_TRACKING_URI, *, kind: str = "forecaster"
) -> RegisteredForecaster:
    """The files of a registered version; `version` is its number or an alias, `kind` what it must be.

    Raises UserError, naming what exists, for an unknown store, model, version or alias, and for a model of another kind.
    """
    client = _existing(tracking_uri)
    found = _find_version(client, name, str(version), tracking_uri)
    folder = Path(
        mlflow.artifacts.download_artifacts(f"models:/{name}/{found.version}", tracking_uri=_absolute(tracking_uri))
    )
    artifacts = folder / "artifacts"
    config = json.loads((artifacts / "config.json").read_text())
    if (found_kind := config.get("kind", "forecaster")) != kind:
        raise UserError(f"model {name!r} is a {found_kind}, and a {kind} is asked for: name one of those (tethys models list)")
    weights = sorted(artifacts.glob("*.safetensors"))
    if len(weights) != 1:
        raise UserError(
            f"version {found.version} of model {name!r} holds {len(weights)} safetensors files: it is no forecaster "
            "of this project"
        )
    return RegisteredForecaster(
        name, int(found.version), tuple(sorted(found.aliases)), found.run_id, weights[0], config
    )


def register_classifier(
    run: Run,
    weights: str | Path,
    config: Mapping[str, Any],
    *,
    name: str,
    alias: str | None,
    card: str,
    input_example: pl.DataFrame,
    output_example: pl.DataFrame,
    metrics: Mapping[str, float],
) -> int:
    """Logs a sequence classifier (safetensors, configuration with the class names in order, model card in Markdown) as a model
    of the run, registers it as a new version, moves the alias to it; returns the version.

    The two examples, a column `sequence` and the answer to it, make the signature.
    """
    tags = {"classes": ",".join(config["classes"])}
    return _register_sequences(
        run, "classifier", weights, config, input_example, output_example, None, name=name, alias=alias, card=card, metrics=metrics, tags=tags
    )


def register_language_model(
    run: Run,
    weights: str | Path,
    config: Mapping[str, Any],
    *,
    name: str,
    alias: str | None,
    card: str,
    input_example: pl.DataFrame,
    output_example: pl.DataFrame,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> int:
    """As `register_classifier`, of a language model: a column `prompt`, and the parameters of the completion with what holds without them."""
    return _register_sequences(
        run, "language_model", weights, config, input_example, output_example, dict(params),
        name=name, alias=alias, card=card, metrics=metrics, tags={},
    )  # fmt: skip


def _register_sequences(
    run: Run, kind: str, weights: str | Path, config: Mapping[str, Any], input_example: pl.DataFrame, output_example: pl.DataFrame,
    params: dict[str, Any] | None, *, name: str, alias: str | None, card: str, metrics: Mapping[str, float], tags: Mapping[str, str],
) -> int:  # fmt: skip
    inputs = input_example.to_pandas()
    with warnings.catch_warnings():  # MLflow warns that whole numbers cannot be missing: a length, or a count of tokens, never is
        warnings.simplefilter("ignore", UserWarning)
        signature = mlflow.models.infer_signature(inputs, output_example.to_pandas(), params=params)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"config": Path(folder) / "config.json", "card": Path(folder) / "model_card.md"}
        paths["config"].write_text(json.dumps({"kind": kind, **config}, indent=2, sort_keys=True) + "\n")
        paths["card"].write_text(card)
        info = mlflow.pyfunc.log_model(
            name=kind,
            python_model=str(project_file(f"models/{kind}.py")),
            artifacts={"weights": str(weights), **{key: str(path) for key, path in paths.items()}},
            signature=signature,
            input_example=inputs if params is None else (inputs, params),
            pip_requirements=[_requirement()],
        )
    if metrics:
        mlflow.log_metrics(dict(metrics), run_id=run.id, model_id=info.model_id)
    client = run.store.client
    version = mlflow.register_model(f"models:/{info.model_id}", name, tags=dict(tags))
    client.update_model_version(name, version.version, description=card[:_DESCRIPTION_CHARACTERS])
    if alias is not None:
        client.set_registered_model_alias(name, alias, version.version)
    return int(version.version)


def list_models(tracking_uri: str = DEFAULT_TRACKING_URI) -> list[dict[str, Any]]:
    """One entry a registered model: name, latest version, aliases with their versions."""
    client = _existing(tracking_uri)
    models = sorted(client.search_registered_models(), key=lambda m: m.name)
    return [
        {"name": m.name, "latest": _latest(client, m.name), "aliases": dict(sorted(_aliases(client, m.name).items()))}
        for m in models
    ]


def show_model(name: str, tracking_uri: str = DEFAULT_TRACKING_URI) -> list[Version]:
    """Every version of a model, newest first."""
    client = _existing(tracking_uri)
    _require_model(client, name, tracking_uri)
    aliases = _aliases(client, name)
    versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda v: -int(v.version))
    return [_version(client, v, aliases) for v in versions]


def find_version(name: str, version: str | int, tracking_uri: str = DEFAULT_TRACKING_URI) -> Version | None:
    """A version by number or alias; None for an alias that nothing has. UserError for an unknown store, model or number."""
    client = _existing(tracking_uri)
    _require_model(client, name, tracking_uri)
    aliases = _aliases(client, name)
    if not str(version).isdigit() and version not in aliases:
        return None
    return _version(client, _find_version(client, name, str(version), tracking_uri), aliases)


def tag_version(name: str, version: int, tags: Mapping[str, Any], tracking_uri: str = DEFAULT_TRACKING_URI) -> None:
    client = _existing(tracking_uri)
    for key, value in tags.items():
        client.set_model_version_tag(name, str(version), key, str(value))


def move_alias(
    name: str, alias: str, version: int, entry: Mapping[str, Any], tracking_uri: str = DEFAULT_TRACKING_URI
) -> None:
    """Point an alias at a version and write `entry` (who, when, why) into the model's history of that alias, newest last.

    MLflow keeps no history of aliases. As many entries are kept as fit into one tag of the registry.
    """
    client = _existing(tracking_uri)
    client.set_registered_model_alias(name, alias, str(version))
    entries = [*alias_history(name, alias, tracking_uri), {"version": version, **entry}]
    while len(json.dumps(entries)) > _DESCRIPTION_CHARACTERS:
        entries.pop(0)
    client.set_registered_model_tag(name, f"{alias}.history", json.dumps(entries))


def alias_history(name: str, alias: str, tracking_uri: str = DEFAULT_TRACKING_URI) -> list[dict[str, Any]]:
    """What `move_alias` wrote, oldest first."""
    tags = _existing(tracking_uri).get_registered_model(name).tags
    found: list[dict[str, Any]] = json.loads(tags.get(f"{alias}.history", "[]"))
    return found


def _version(client: MlflowClient, found: Any, aliases: Mapping[str, int]) -> Version:
    number = int(found.version)
    return Version(
        name=found.name,
        number=number,
        aliases=tuple(sorted(alias for alias, version in aliases.items() if version == number)),
        run_id=found.run_id or "",
        created_ms=found.creation_timestamp,
        tags=dict(found.tags or {}),
        metrics={m.key: m.value for m in client.get_logged_model(_model_id(found)).metrics or []},
    )


def _make_schema(path: Path) -> None:
    """The current schema in a new SQLite file, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        mlflow.db.upgrade.main([f"{_SQLITE}{unfinished}"], standalone_mode=False)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _client(uri: str) -> MlflowClient:
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        if "out-of-date database schema" not in str(error):
            raise UserError(
                f"cannot open the tracking store {uri!r}: write a SQLite file as sqlite:///FILE, or the address of a "
                f"tracking server as http://HOST:PORT (MLflow says: {str(error).split('. ')[0]})"
            ) from None
        raise UserError(
            f"the tracking store {uri} was made by another release of MLflow than {mlflow.__version__}: keep a copy "
            "of the file and run "
            f"mlflow db upgrade {uri}"
        ) from None


def _reach(uri: str) -> None:
    """Raises UserError where the server of a store does not answer within seconds; says nothing of files and unknown schemes."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme in ("http", "https"):
        try:
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_REACH_SECONDS):
                return
        except urllib.error.HTTPError:
            return  # it answers; what it says of the request that matters is told by that request
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
    elif parts.scheme.startswith(("postgresql", "mysql", "mssql")) and parts.hostname:
        try:
            socket.create_connection((parts.hostname, parts.port or 5432), _REACH_SECONDS).close()
            return
        except OSError as error:
            reason = error
    else:
        return
    raise UserError(
        f"the tracking store {_without_password(parts)} does not answer ({reason}): start it, or name another with --tracking-uri"
    )


def _without_password(parts: urllib.parse.SplitResult) -> str:
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=place).geturl()


@contextmanager
def _said_in_a_line(uri: str) -> Iterator[None]:
    """A store that stops answering, or refuses, is a line for a person and not a traceback."""
    try:
        yield
    except MlflowException as error:
        if not _is_sqlite(uri):
            text = " ".join(str(error).split())[:300]
            raise UserError(f"the tracking store {_without_password(urllib.parse.urlsplit(uri))} failed: {text}") from error
        raise


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    existing = client.get_experiment_by_name(name)
    if existing is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:  # another process has just made it
            existing = client.get_experiment_by_name(name)
            if existing is None:
                raise
    if existing.lifecycle_stage != "active":
        raise UserError(
            f"the experiment {name!r} was deleted in the tracking store: restore it with mlflow experiments restore"
        )
    return str(existing.experiment_id)


def project_file(name: str) -> Path:
    """A file of the folder `mlflow/` (`models/forecaster.py`): in the checkout, or where the wheel put it."""
    here = Path(__file__).resolve().parent
    for path in (here.parent / "mlflow" / name, here / "mlflow_files" / name):
        if path.is_file():
            return path
    raise UserError(f"mlflow/{name} is missing beside {here}: install the project again")


def _requirement() -> str:
    try:
        return f"tethys-streams=={importlib.metadata.version('tethys-streams')}"
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is on the path but not installed
        return "tethys-streams"


def _existing(tracking_uri: str) -> MlflowClient:
    if _is_sqlite(tracking_uri) and not _sqlite_path(tracking_uri).exists():
        raise UserError(
            f"there is no tracking store at {_sqlite_path(tracking_uri)}: train a model first, or say --tracking-uri"
        )
    uri = _absolute(tracking_uri)
    _reach(uri)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    return _client(uri)


def _require_model(client: MlflowClient, name: str, tracking_uri: str) -> None:
    known = sorted(m.name for m in client.search_registered_models())
    if name not in known:
        holds = f"it holds {', '.join(map(repr, known))}" if known else "it holds none"
        raise UserError(
            f"no model {name!r} is registered in {tracking_uri}: {holds}; tethys train --model-name {name} registers "
            "one"
        )


def _find_version(client: MlflowClient, name: str, version: str, tracking_uri: str) -> Any:
    _require_model(client, name, tracking_uri)
    aliases = _aliases(client, name)
    number = version if version.isdigit() else aliases.get(version)
    versions = sorted(int(v.version) for v in client.search_model_versions(f"name = '{name}'"))
    if number is None or int(number) not in versions:
        named = ", ".join(f"{alias} (version {v})" for alias, v in sorted(aliases.items())) or "none"
        what = "version" if version.isdigit() else "alias"
        raise UserError(
            f"model {name!r} has no {what} {version!r}: its versions are {', '.join(map(str, versions))}, its "
            f"aliases {named}"
        )
    return client.get_model_version(name, str(number))


def _model_id(version: Any) -> str:
    # A SQLite store leaves the field empty, but the source is the model's address.
    return str(version.model_id or version.source.removeprefix("models:/"))


def _aliases(client: MlflowClient, name: str) -> dict[str, int]:
    return {alias: int(version) for alias, version in client.get_registered_model(name).aliases.items()}


def _latest(client: MlflowClient, name: str) -> int | None:
    return max((int(v.version) for v in client.search_model_versions(f"name = '{name}'")), default=None)


def _is_sqlite(uri: str) -> bool:
    return uri.startswith("sqlite:")


def _sqlite_path(uri: str) -> Path:
    path = uri.removeprefix(_SQLITE)
    if not uri.startswith(_SQLITE) or path in ("", ":memory:"):
        raise UserError(
            f"{uri!r} names no SQLite file: write sqlite:///runs/tethys.db (an absolute path has four slashes)"
        )
    return Path(path).absolute()


def _absolute(uri: str) -> str:
    return f"{_SQLITE}{_sqlite_path(uri)}" if _is_sqlite(uri) else uri
