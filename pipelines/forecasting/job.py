"""The forecasting jobs: train, backtest and forecast a table, with baselines beside the model and every run in MLflow."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from connectors import tables
from connectors.errors import UserError
from pipelines import DEFAULT_ALIAS, DEFAULT_TRACKING_URI, DEFAULT_VERSION
from pipelines.forecasting import backtest as rolling
from pipelines.forecasting import validation
from pipelines.forecasting.calendar import to_zone
from pipelines.forecasting.covariates import Calendar, split_future
from pipelines.forecasting.estimator import TitansForecaster, save_weights
from pipelines.forecasting.reading import STRICT, Reading, Table, read_table
from pipelines.registry.card import forecaster_card
from pipelines.windows import Executor, Panel, panel, ray_cluster
from titans_core.config import Mixer

if TYPE_CHECKING:
    import matplotlib.figure

TEST_SHARE = 0.2  # rows at the end that neither training nor selection sees
MOST_ORIGINS = 200  # rolling origins of the backtest, spread evenly over the test rows


@dataclass(frozen=True)
class TrainResult:
    """What `train` did and where its results lie."""

    leaderboard: list[dict[str, Any]] = field(repr=False)
    model: str
    version: int
    alias: str
    run: str
    forecasts: str
    plot: str
    backtest: str
    report: str
    seconds: float


@dataclass(frozen=True)
class BacktestResult:
    leaderboard: list[dict[str, Any]] = field(repr=False)
    model: str
    run: str
    forecasts: str
    report: str
    origins: int


@dataclass(frozen=True)
class ForecastResult:
    model: str
    series: int
    rows: int
    output: str


def train(
    data: str,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    frequency: str | None = None,
    look_back: int = 96,
    horizon: int = 24,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    model_name: str = "forecaster",
    alias: str = DEFAULT_ALIAS,
    executor: Executor = "local",
    seed: int = 0,
    output: str | Path = "runs/train",
    epochs: int = 8,
    blocks: tuple[Mixer, ...] = (),
    outcomes: bool = False,
    reading: Reading = STRICT,
    future: tuple[str, ...] = (),
    historic: tuple[str, ...] = (),
    static: tuple[str, ...] = (),
    calendar: tuple[Calendar, ...] = (),
    parameters: Mapping[str, Any] | None = None,
    ets: int | None = None,
) -> TrainResult:
    """Table -> training with a progress bar -> backtest beside baselines -> MLflow run and registered version -> forecasts and a plot.

    `parameters` of the forecaster, as a search leaves them (`pipelines.forecasting.tune.read_params`), come before those given one by one.
    `ets`: series that the baseline ETS is fitted to (`pipelines.forecasting.backtest.Backtest`).

    The last fifth of the rows is the backtest; the model is trained and chosen on the rows before it, and its memories then read on to the
    end. Where covariates must be known ahead and no future of them is given, the forecasts begin one horizon before the end. Raises
    UserError for whatever the user can put right.
    """
    from pipelines import tracking

    began = time.monotonic()
    given = dict(parameters or {})
    future, historic, static = (tuple(given.get(kind, names)) for kind, names in (("future", future), ("historic", historic), ("static", static)))
    tracking.check_names(model_name, alias)
    folder = _folder(output)
    torch.set_flush_denormal(True)
    if executor == "ray":
        ray_cluster()
    window = {name: given.get(name, value) for name, value in (("look_back", look_back), ("horizon", horizon))}
    found = read_table(
        data,
        replace(reading, rules=replace(reading.rules, **window)),
        frequency=frequency,
        id_column=id_column,
        time_column=time_column,
        target_column=target_column,
        covariates=(*future, *historic, *static),
        ahead=future,
        executor=executor,
    )
    table = found.panel
    store = tracking.open_store(tracking_uri)  # before the work, which a store that cannot be opened would waste
    one_by_one: dict[str, Any] = {
        "horizon": horizon, "look_back": look_back, "epochs": epochs, "seed": seed, "frequency": table.frequency,
        "blocks": blocks, "outcomes": outcomes,
        "zone": found.zone, "future": future, "historic": historic, "static": static, "calendar": calendar,
    }  # fmt: skip
    model = TitansForecaster(**{**one_by_one, **given})
    horizon, look_back, epochs, blocks = model.horizon, model.look_back, model.epochs, model.blocks
    known = _border(table, look_back, horizon)
    with _bar("training", 2 * epochs) as tell:
        model.fit(_until(table, known), tell)
    folder.mkdir(parents=True, exist_ok=True)
    contest = rolling.Backtest(model, table, _origins(table, known, horizon), known, ets)
    _forecast_all(contest, folder / "backtest.parquet")
    board = contest.scores.leaderboard()
    forecast, ahead, example = _last_forecast(model, found)
    paths = {
        name: folder / name
        for name in ("forecasts.parquet", "backtest.parquet", "leaderboard.json", "report.html", "plot.png", "model.safetensors")
    }
    shown = forecast.with_columns(to_zone(forecast["ds"], table.frequency, found.zone))
    tables.write(shown, str(paths["forecasts.parquet"]))
    paths["leaderboard.json"].write_text(json.dumps(board, indent=2) + "\n")
    figure = _plot(table, forecast, horizon, look_back)
    figure.savefig(paths["plot.png"], dpi=120)
    save_weights(model.forecaster_, paths["model.safetensors"], model.outcome_)

    params = {
        "data": data, "rows": len(table.y), "series": len(table), "frequency": table.frequency, "look_back": look_back,
        "horizon": horizon, "seed": model.seed, "epochs": epochs, "hidden": model.hidden, "penalty": model.line_.penalty,
        "gap_penalty": model.line_.gap_penalty, "backtest_origins": len(contest.origins),
        "blocks": " ".join(blocks), "outcomes": model.outcome_ is not None,
        "covariates": " ".join([*model.encoder_.names, *model.encoder_.calendar]),
        "covariate_penalty": model.line_.covariate_penalty, "zone": found.zone,
    }  # fmt: skip
    metrics = _metrics(board)
    with tracking.run(store, f"train {model_name}", params=params) as run:
        run.log_metrics(metrics)
        frame = table.frame()
        digest = run.log_dataset(frame, name=Path(data).name, source=data)
        run.log_figure(figure, "forecast.png")
        facts = [*_facts(contest, data, time.monotonic() - began), ("seed", str(model.seed)), ("run", run.id)]
        write_page(paths["report.html"], contest, paths["backtest.parquet"], f"{model_name}, just trained", data, found.report, facts)
        for name in ("leaderboard.json", "backtest.parquet", "forecasts.parquet", "report.html"):
            run.log_file(paths[name])
        name = example.ids[0]
        past = example.frame().filter(pl.col("unique_id") == name).tail(look_back)
        # A served model reads the future of its covariates from the rows after the last value.
        later = [] if ahead is None else [ahead.filter(pl.col("unique_id") == name)]
        last = table.aligned()[0][known - 1]
        trained_until = str(last) if last.dtype.kind != "M" else str(last.astype("datetime64[s]"))
        about = {"source": data, "digest": digest, "series": len(table), "rows": len(table.y), "frequency": table.frequency}
        levels = ", ".join(f"{q:g}" for q in contest.levels)
        shape = {"look_back": look_back, "horizon": horizon, "quantiles": levels, "blocks": " ".join(blocks) or "none"}
        registered = tracking.register_forecaster(
            run,
            paths["model.safetensors"],
            model.describe(),
            name=model_name,
            alias=alias,
            input_example=pl.concat([past, *later], how="diagonal"),
            output_example=forecast.filter(pl.col("unique_id") == name),
            params={"h": horizon, "quantiles": list(contest.levels)},
            metrics={k.removeprefix("tethys."): v for k, v in metrics.items() if k.startswith("tethys.")},
            card=forecaster_card(model_name, data={**about, "trained_until": trained_until}, model=shape, leaderboard=board),
            trained_until=trained_until,
        )
        link = run.link
    return TrainResult(
        board, model_name, registered.version, alias, link, str(paths["forecasts.parquet"]), str(paths["plot.png"]),
        str(paths["backtest.parquet"]), str(paths["report.html"]), round(time.monotonic() - began, 1),
    )  # fmt: skip


def backtest(
    data: str,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    frequency: str | None = None,
    model_name: str = "forecaster",
    version: str = DEFAULT_VERSION,
    origins: int = 4,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    output: str | Path = "runs/backtest",
    report: str | Path | None = None,
    reading: Reading = STRICT,
    ets: int | None = None,
) -> BacktestResult:
    """A registered model beside the baselines at the last rolling origins of a table; the baselines are fitted before the first origin.

    Writes forecasts (`backtest.parquet`), `series.parquet` (a row a series), `leaderboard.json` and the page `report` (in the folder of
    `output` where None), and logs them, but for the forecasts, to an MLflow run. `ets`: series that the baseline ETS is fitted to.
    """
    from pipelines import tracking

    began = time.monotonic()
    folder = _folder(output)
    model, name = _registered(model_name, version, tracking_uri)
    store = tracking.open_store(tracking_uri)
    found = read_table(
        data, reading, frequency=frequency or model.frequency_, id_column=id_column, time_column=time_column, target_column=target_column,
        covariates=model.encoder_.names,
    )  # fmt: skip
    table = found.panel
    _same_frequency(model, table, data)
    at = rolling.rolling_origins(table, model.horizon, origins, model.look_back)
    folder.mkdir(parents=True, exist_ok=True)
    contest = rolling.Backtest(model, table, at, int(at[0]), ets)
    paths = {part: folder / part for part in ("backtest.parquet", "series.parquet", "leaderboard.json")}
    page = folder / "report.html" if report is None else Path(report)
    _forecast_all(contest, paths["backtest.parquet"])
    board = contest.scores.leaderboard()
    tables.write(contest.scores.series, paths["series.parquet"])
    paths["leaderboard.json"].write_text(json.dumps(board, indent=2) + "\n")
    params = {
        "data": data, "rows": len(table.y), "series": len(table), "frequency": table.frequency, "model": name,
        "backtest_origins": len(at), "horizon": model.horizon, "forecasts": str(paths["backtest.parquet"]),
    }  # fmt: skip
    with tracking.run(store, f"backtest {name}", params=params) as run:
        run.log_metrics(_metrics(board))
        run.log_dataset(table.frame(), name=Path(data).name, source=data, context="backtest")
        facts = [*_facts(contest, data, time.monotonic() - began), ("run", run.id)]
        write_page(page, contest, paths["backtest.parquet"], name, data, found.report, facts)
        for path in (page, paths["leaderboard.json"], paths["series.parquet"]):
            run.log_file(path)
        link = run.link
    return BacktestResult(board, name, link, str(paths["backtest.parquet"]), str(page), len(at))


def forecast(
    data: str,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    frequency: str | None = None,
    horizon: int | None = None,
    model_name: str = "forecaster",
    version: str = DEFAULT_VERSION,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    output: str = "runs/forecast.parquet",
    reading: Reading = STRICT,
) -> ForecastResult:
    """Forecast every series of a table with a registered model, and write the table of forecasts (replaced as a whole)."""
    model, name = _registered(model_name, version, tracking_uri)
    found = read_table(
        data, reading, frequency=frequency or model.frequency_, id_column=id_column, time_column=time_column, target_column=target_column,
        covariates=model.encoder_.names, ahead=model.encoder_.ahead,
    )  # fmt: skip
    table = found.panel
    _same_frequency(model, table, data)
    _tell_unknown(model, found)
    result = forecast_panel(model, table, horizon, future=found.future)
    unknown = result.filter(pl.col("mean").is_nan())["unique_id"].unique(maintain_order=True).to_list()
    if unknown:
        print(f"no forecast for {len(unknown)} series without one observed value: {', '.join(unknown[:5])}", file=sys.stderr)
        result = result.filter(pl.col("mean").is_not_nan())
    result = result.with_columns(to_zone(result["ds"], table.frequency, found.zone))
    if "://" not in output:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
    tables.write(result, output)
    return ForecastResult(name, len(table) - len(unknown), result.height, output)


def load_forecaster(weights: str | Path, config: str | Path | dict[str, Any]) -> TitansForecaster:
    """A registered forecaster from its weights and its configuration (a JSON file or what was in it)."""
    data = config if isinstance(config, dict) else json.loads(Path(config).read_text())
    return TitansForecaster.from_weights(weights, data)


def forecast_frame(
    model: TitansForecaster, frame: pl.DataFrame, *, horizon: int | None = None, quantiles: list[float] | None = None
) -> pl.DataFrame:
    """Fresh memories read the long frame and continue each series; the model stays as it was.

    Where the model needs covariates ahead, rows after a series' last value hold them.
    """
    levels = None if quantiles is None else tuple(float(q) for q in quantiles)
    future = None
    if model.encoder_.ahead:
        frame, future = split_future(frame, "unique_id", "ds", "y")
    table = panel(frame, frequency=model.frequency_, covariates=model.encoder_.names)
    return forecast_panel(model, table, horizon, levels, future)


def forecast_panel(
    model: TitansForecaster,
    table: Panel,
    horizon: int | None = None,
    quantiles: tuple[float, ...] | None = None,
    future: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """The next `horizon` rows (the model's own where None; fewer, but never more) of every series of a panel.

    future: covariates known ahead, at every row of the model's own horizon.
    """
    steps = model.horizon if horizon is None else int(horizon)
    if not 1 <= steps <= model.horizon:
        raise UserError(
            f"the model forecasts up to {model.horizon} steps, not {steps}: train one with a horizon of {steps}"
        )
    state, last, static = model._read(model.memory_, table)
    result = model._forecast(state, table.ids, last, static, quantiles, future)
    if steps < model.horizon:
        result = result[np.tile(np.arange(model.horizon) < steps, len(table)).nonzero()[0]]
    return result


def missing_future(
    data: str,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    model_name: str = "forecaster",
    version: str = DEFAULT_VERSION,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    reading: Reading = STRICT,
) -> pl.DataFrame:
    """The rows (`unique_id, ds`) that the covariates known ahead lack before a registered model can forecast a table."""
    model, _ = _registered(model_name, version, tracking_uri)
    found = read_table(
        data, reading, frequency=model.frequency_, id_column=id_column, time_column=time_column, target_column=target_column,
        ahead=model.encoder_.ahead,
    )  # fmt: skip
    table = found.panel
    ends = pl.DataFrame({"unique_id": list(table.ids), "ds": table.ds[table.offsets[1:] - 1]})
    if not model.encoder_.ahead:
        return ends[:0]
    given = ends[:0] if found.future is None else found.future
    if absent := [c for c in model.encoder_.ahead if found.future is not None and c not in given.columns]:
        raise UserError(f"{reading.future or data} lacks the covariates {', '.join(map(repr, absent))}: rename or add the columns")
    lacking = validation.missing_future(ends, given.drop_nulls(), table.frequency, model.horizon)
    return lacking.with_columns(to_zone(lacking["ds"], table.frequency, found.zone))


def _last_forecast(model: TitansForecaster, found: Table) -> tuple[pl.DataFrame, pl.DataFrame | None, Panel]:
    """The forecast that training ends with, the future of the covariates that it rests on, and the series that it continues."""
    table, ahead = found.panel, found.future
    if not model.encoder_.ahead:
        return model.remember(table).predict(), None, table
    if ahead is None or not ahead.height:
        names = ", ".join(map(repr, model.encoder_.ahead))
        print(f"no future of {names} is given: the forecast continues the table without its last {model.horizon} rows", file=sys.stderr)
        long = table.frame()
        ahead = long.group_by("unique_id", maintain_order=True).tail(model.horizon).select("unique_id", "ds", *model.encoder_.ahead)
        keep = [np.arange(r.start, r.stop - model.horizon) for r in (table.rows(i) for i in range(len(table)))]
        whole = [i for i, k in enumerate(keep) if len(k)]
        table = table.take([keep[i] for i in whole], [table.ids[i] for i in whole])
    return model.remember(table).predict(future=ahead), ahead, table


def _tell_unknown(model: TitansForecaster, found: Table) -> None:
    """Each level of a category that training did not see, once, on standard error."""
    told: dict[str, set[str]] = {}
    for frame in (found.panel.covariates, found.future):
        for name, new in model.encoder_.unknown(frame).items():
            told.setdefault(name, set()).update(new)
    for name, levels in sorted(told.items()):
        some = ", ".join(map(repr, sorted(levels)[:5])) + (" ..." if len(levels) > 5 else "")
        print(f"covariate {name!r} holds {len(levels)} levels that the model does not know, taken as unknown: {some}", file=sys.stderr)


def _folder(output: str | Path) -> Path:
    if (folder := Path(output)).exists() and not folder.is_dir():
        raise UserError(f"{str(output)!r} is a file: name a folder for what is written")
    return folder


def _registered(name: str, version: str, tracking_uri: str) -> tuple[TitansForecaster, str]:
    from pipelines import tracking

    found = tracking.load_model(name, version, tracking_uri)
    return load_forecaster(found.weights, found.config), f"{found.name}/{found.version}"


def _same_frequency(model: TitansForecaster, table: Panel, data: str) -> None:
    if table.frequency != model.frequency_:
        raise UserError(
            f"the model was trained on steps of {model.frequency_}, the series of {data} have steps of {table.frequency}"
        )


def _border(table: Panel, look_back: int, horizon: int) -> int:
    """Rows of the common grid before the backtest."""
    _, y, _ = table.aligned()
    total = y.shape[1]
    test = max(horizon, int(TEST_SHARE * total))
    if total - test < look_back + 2 * horizon + 1:
        raise UserError(
            f"the series span {total} rows; look-back {look_back} and horizon {horizon} need at least "
            f"{look_back + 4 * horizon + 1} for training, validation and a backtest: shorten them or bring more rows"
        )
    return total - test


def _until(table: Panel, rows: int) -> Panel:
    """The panel up to row `rows` of its common grid; series that begin later are left out."""
    grid, _, _ = table.aligned()
    end = grid[rows - 1]
    keep = [np.arange(s.start, s.stop)[table.ds[s] <= end] for s in (table.rows(i) for i in range(len(table)))]
    ids = tuple(name for name, k in zip(table.ids, keep, strict=True) if len(k))
    return table.take([k for k in keep if len(k)], ids)


def _origins(table: Panel, known: int, horizon: int) -> NDArray[np.int64]:
    _, y, _ = table.aligned()
    every = np.arange(known, y.shape[1] - horizon + 1)
    return every[np.unique(np.linspace(0, len(every) - 1, min(MOST_ORIGINS, len(every))).round().astype(int))]


def _forecast_all(contest: rolling.Backtest, path: Path) -> None:
    """Every forecast of a backtest into a Parquet file, a block of series at a time; shows how far it is."""
    with _bar("backtest", len(contest.table), "{task.completed}/{task.total} series") as bar:
        tables.write(contest.rows(bar.reached), path)


def write_page(
    path: Path,
    contest: rolling.Backtest,
    forecasts: Path,
    title: str,
    data: str,
    findings: validation.Report | None,
    facts: list[tuple[str, str]],
) -> None:
    from pipelines.forecasting import report

    html = report.page(contest, forecasts, title=title, data=data, findings=findings, facts=facts)
    tables.write_text(html, path)


def _metrics(board: list[dict[str, Any]]) -> dict[str, float]:
    return {f"{row['model']}.{key}": v for row in board for key, v in row.items() if key != "model" and np.isfinite(v)}


def _facts(contest: rolling.Backtest, data: str, seconds: float) -> list[tuple[str, str]]:
    """What somebody needs to make the page again, or to doubt it."""
    from importlib import metadata

    table, model, scores = contest.table, contest.model, contest.scores
    config = model.forecaster_.config
    cells = f"{int(np.isfinite(contest.y).sum()):,} observed of {contest.y.size:,} rows, {len(table):,} series at {table.frequency}"
    facts = [
        ("data", data),
        ("rows", cells),
        ("digest of the rows", digest(table)),
        ("baselines fitted on", f"the first {contest.known:,} of {len(contest.grid):,} rows"),
        ("forecasts", f"{len(table) * len(contest.origins):,} of {model.horizon} steps, {int(scores.count[0].sum()):,} steps scored"),
        ("look-back, memory", f"{model.look_back} rows, {config.memory}"),
        ("hidden, blocks", f"{config.hidden}, {' '.join(model.blocks) or 'none'}"),
        ("validation error", f"{model.valid_error_:.6g} (scaled squared error, of the training)"),
        ("program", ", ".join(f"{name} {_version(name, metadata)}" for name in ("tethys-streams", "torch", "polars"))),
        ("seconds", f"{seconds:.1f}"),
    ]
    if scores.unforecast:
        told = f"{scores.unforecast:,} observed steps for which the model gave no number; no score counts them"
        facts.insert(5, ("steps without a forecast", told))
    return facts


def digest(table: Panel) -> str:
    """sha256 of ids, stamps, values and covariates: the same for the same rows, in whatever file they lie."""
    made = hashlib.sha256(json.dumps([table.frequency, *table.ids]).encode())
    for part in (table.offsets, table.ds, np.where(table.observed, table.y, np.nan)):
        made.update(np.ascontiguousarray(part).tobytes())
    if table.covariates is not None:
        made.update(table.covariates.write_csv().encode())
    return made.hexdigest()


def _version(name: str, metadata: Any) -> str:
    try:
        return str(metadata.version(name))
    except metadata.PackageNotFoundError:  # run from a checkout that is on the path but not installed
        return "from a checkout"


class _bar:
    """A progress bar on standard error; called after every epoch with epoch, epochs and validation error, or told what is `reached`."""

    def __init__(self, title: str, total: int, count: str = "{task.completed}/{task.total} epochs, error {task.fields[error]}") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn(count), TimeElapsedColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total, error="...")

    def __enter__(self) -> _bar:
        self._progress.start()
        return self

    def __call__(self, epoch: int, epochs: int, error: float) -> None:
        self._progress.update(self._task, completed=epoch + 1, error=f"{error:.4f}")

    def reached(self, done: int, of: int) -> None:
        self._progress.update(self._task, completed=done)

    def told(self, done: int, what: str) -> None:
        self._progress.update(self._task, completed=done, error=what)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _plot(table: Panel, forecast: pl.DataFrame, horizon: int, look_back: int) -> matplotlib.figure.Figure:
    """The last rows of up to four series, their forecast, and the widest interval."""
    from matplotlib.figure import Figure

    names = table.ids[:4]
    figure = Figure(figsize=(10, 2.4 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 1, squeeze=False)[:, 0]
    levels = [c for c in forecast.columns if c.startswith("q")]
    for axis, name in zip(axes, names, strict=True):
        rows = table.rows(table.ids.index(name))
        shown = slice(max(rows.start, rows.stop - max(look_back, 2 * horizon)), rows.stop)
        ahead = forecast.filter(pl.col("unique_id") == name)
        axis.plot(table.ds[shown], table.y[shown], color="0.2", linewidth=1, label="observed")
        axis.plot(ahead["ds"].to_numpy(), ahead["mean"].to_numpy(), color="C0", label="forecast")
        if len(levels) > 1:
            axis.fill_between(
                ahead["ds"].to_numpy(), ahead[levels[0]].to_numpy(), ahead[levels[-1]].to_numpy(), color="C0", alpha=0.2,
                linewidth=0, label=f"{levels[0]} to {levels[-1]}",
            )  # fmt: skip
        axis.set_title(_drawable(name), loc="left", fontsize=9)
    axes[0].legend(fontsize=8, loc="upper left")
    return figure


def _drawable(text: str) -> str:
    """A name without the letters that the font has no shape for; matplotlib would warn of each and draw a box."""
    from matplotlib.font_manager import fontManager, get_font

    shapes = get_font(fontManager.findfont("DejaVu Sans")).get_charmap()
    return "".join(letter if ord(letter) in shapes else "?" for letter in text)
