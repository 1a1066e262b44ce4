"""Runs, figures and registered models in MLflow. The only module that imports MLflow.

A store is named by its URI: a SQLite file by default, a tracking server's address in production. A registered
forecaster is code that MLflow executes when it loads the model (`mlflow/models/forecaster.py`), safetensors weights
and a JSON configuration: nothing is pickled, and loading pickles is switched off for the whole process. A version's
architecture is chosen by its configuration and not by code copied into the version, because two versions with copied
code in one process would both run the first one's.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import tempfile
import time
import warnings
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
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault(
    "MLFLOW_MODEL_CATALOG_URI", ""
)  # MLflow would fetch a catalogue of language models from the network

import mlflow
import mlflow.db
from mlflow.data.polars_dataset import from_polars
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

if TYPE_CHECKING:
    import matplotlib.figure
    import polars as pl

EXPERIMENT = "tethys"
# MLflow refuses larger batches.
_METRICS_A_BATCH = 1000
_SQLITE = "sqlite:///"

# They announce every table and every check that they make.
for _chatty in ("alembic", "mlflow.store.db.utils", "mlflow.pyfunc"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)


@dataclass(frozen=True)
class Store:
    """A tracking store that is ready: its schema is current and the experiment exists."""

    uri: str
    experiment_id: str

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
        return Store(uri, _experiment(_client(uri), experiment, None))
    path = _sqlite_path(uri)
    uri = f"{_SQLITE}{path}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _make_schema(path)
        experiment_id = _experiment(_client(uri), experiment, (path.parent / "artifacts").as_uri())
    return Store(uri, experiment_id)


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

    Under `mlflow run` (which sets MLFLOW_RUN_ID) it is the run that MLflow began for the project.
    """
    mlflow.set_tracking_uri(store.uri)
    mlflow.set_registry_uri(store.uri)
    with mlflow.start_run(
        experiment_id=store.experiment_id,
        run_name=name,
        tags=dict(tags or {}),
        nested=parent is not None,
        parent_run_id=None if parent is None else parent.id,
    ) as active:
        started = Run(store, active.info.run_id, active.info.experiment_id)
        if params:
            started.log_params(params)
        yield started


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
) -> RegisteredForecaster:
    """Logs the weights (safetensors) and the configuration as a model of the run, registers it as a new version and
    moves the alias to it.

    The two examples are a long frame as it goes in (`unique_id, ds, y`; `ds` in ISO 8601, UTC where no offset stands) and the
    forecast of it; with `params` (`h`, `quantiles`: the defaults at prediction) they make the signature.
    """
    import polars.selectors as cs

    entry = project_file("models/forecaster.py")
    # Stamps go in as text: MLflow's own datetime type refuses a zone, and JSON has text only.
    inputs = input_example.with_columns(cs.datetime().dt.strftime("%Y-%m-%dT%H:%M:%SZ")).to_pandas()
    signature = mlflow.models.infer_signature(inputs, output_example.to_pandas(), params=dict(params))
    with tempfile.TemporaryDirectory() as folder:
        config_path = Path(folder) / "config.json"
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        info = mlflow.pyfunc.log_model(
            name="forecaster",
            python_model=str(entry),
            artifacts={"weights": str(weights), "config": str(config_path)},
            signature=signature,
            input_example=(inputs, dict(params)),
            # The project itself, in the environment that loads the model: no code is copied into the version.
            pip_requirements=[_requirement()],
        )
    client = run.store.client
    if metrics:
        mlflow.log_metrics(dict(metrics), run_id=run.id, model_id=info.model_id)
    version = mlflow.register_model(f"models:/{info.model_id}", name)
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
    inputs = input_example.to_pandas()
    with warnings.catch_warnings():  # MLflow warns that whole numbers cannot be missing: a length never is
        warnings.simplefilter("ignore", UserWarning)
        signature = mlflow.models.infer_signature(inputs, output_example.to_pandas())
    with tempfile.TemporaryDirectory() as folder:
        paths = {"config": Path(folder) / "config.json", "card": Path(folder) / "model_card.md"}
        paths["config"].write_text(json.dumps({"kind": "classifier", **config}, indent=2, sort_keys=True) + "\n")
        paths["card"].write_text(card)
        info = mlflow.pyfunc.log_model(
            name="classifier",
            python_model=str(project_file("models/classifier.py")),
            artifacts={"weights": str(weights), **{key: str(path) for key, path in paths.items()}},
            signature=signature,
            input_example=inputs,
            pip_requirements=[_requirement()],
        )
    mlflow.log_metrics(dict(metrics), run_id=run.id, model_id=info.model_id)
    client = run.store.client
    version = mlflow.register_model(f"models:/{info.model_id}", name, tags={"classes": ",".join(config["classes"])})
    client.update_model_version(name, version.version, description=card[:5000])  # a column of the registry holds no more
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


def show_model(name: str, tracking_uri: str = DEFAULT_TRACKING_URI) -> list[dict[str, Any]]:
    """One entry a version of a model, newest first: version, aliases, run, time and the metrics of the model."""
    client = _existing(tracking_uri)
    _require_model(client, name, tracking_uri)
    versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda v: -int(v.version))
    aliases = _aliases(client, name)
    return [
        {
            "version": int(v.version),
            "aliases": sorted(alias for alias, version in aliases.items() if version == int(v.version)),
            "run_id": v.run_id,
            "created_ms": v.creation_timestamp,
            "metrics": {m.key: m.value for m in client.get_logged_model(_model_id(v)).metrics or []},
        }
        for v in versions
    ]


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


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    existing = client.get_experiment_by_name(name)
    if existing is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
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
