"""The forecasting jobs: train, backtest and forecast a table, with baselines beside the model and every run in MLflow."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from connectors import tables
from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI
from pipelines.forecasting import backtest as rolling
from pipelines.forecasting.baselines import LastValue, Ridge, RidgeCarried, SeasonalNaive
from pipelines.forecasting.calendar import natural_cycles
from pipelines.forecasting.estimator import TitansForecaster, save_weights
from pipelines.registry.card import forecaster_card
from pipelines.windows import Executor, Panel, panel, ray_cluster, read_panel
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
    seconds: float


@dataclass(frozen=True)
class BacktestResult:
    leaderboard: list[dict[str, Any]] = field(repr=False)
    model: str
    forecasts: str
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
    alias: str = "challenger",
    executor: Executor = "local",
    seed: int = 0,
    output: str | Path = "runs/train",
    epochs: int = 8,
    blocks: tuple[Mixer, ...] = (),
) -> TrainResult:
    """Table -> training with a progress bar -> backtest beside baselines -> MLflow run and registered version -> forecasts and a plot.

    The last fifth of the rows is the backtest; the model is trained and chosen on the rows before it, and its memories then read on to the
    end. Raises UserError for whatever the user can put right.
    """
    from pipelines import tracking

    began = time.monotonic()
    torch.set_flush_denormal(True)
    if executor == "ray":
        ray_cluster()
    table = read_panel(
        [data],
        frequency=frequency,
        id_column=id_column,
        time_column=time_column,
        target_column=target_column,
        executor=executor,
    )
    known = _border(table, look_back, horizon)
    store = tracking.open_store(tracking_uri)  # before the work, which a store that cannot be opened would waste
    model = TitansForecaster(horizon=horizon, look_back=look_back, epochs=epochs, seed=seed, frequency=table.frequency, blocks=blocks)
    with _bar("training", 2 * epochs) as tell:
        model.fit(_until(table, known), tell)
    origins = _origins(table, known, horizon)
    points, quantile = _all_forecasts(model, table, origins, known)
    real = rolling.truth(table, origins, horizon, _season(table.frequency), known)
    levels = model.forecaster_.config.quantiles
    board = rolling.leaderboard(points, real, {"tethys": rolling.calibration(quantile, levels, real)})

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    model.state_, model.last_ds_ = model._read(model.forecaster_, table)
    model.ids_ = table.ids
    forecast = model.predict()
    paths = {
        name: folder / name
        for name in ("forecasts.parquet", "backtest.parquet", "leaderboard.json", "plot.png", "model.safetensors")
    }
    tables.write(forecast, str(paths["forecasts.parquet"]))
    tidy = rolling.tidy(table, origins, points["tethys"], quantile, levels)
    tables.write(tidy, str(paths["backtest.parquet"]))
    paths["leaderboard.json"].write_text(json.dumps(board, indent=2) + "\n")
    figure = _plot(table, forecast, horizon, look_back)
    figure.savefig(paths["plot.png"], dpi=120)
    save_weights(model.forecaster_, paths["model.safetensors"])

    params = {
        "data": data, "rows": len(table.y), "series": len(table), "frequency": table.frequency, "look_back": look_back,
        "horizon": horizon, "seed": seed, "epochs": epochs, "penalty": model.line_.penalty,
        "gap_penalty": model.line_.gap_penalty, "backtest_origins": len(origins), "blocks": " ".join(blocks),
    }  # fmt: skip
    metrics = {
        f"{row['model']}.{key}": v for row in board for key, v in row.items() if key != "model" and np.isfinite(v)
    }
    with tracking.run(store, f"train {model_name}", params=params) as run:
        run.log_metrics(metrics)
        frame = table.frame()
        digest = run.log_dataset(frame, name=Path(data).name, source=data)
        run.log_figure(figure, "forecast.png")
        for name in ("leaderboard.json", "backtest.parquet", "forecasts.parquet"):
            run.log_file(paths[name])
        last = table.aligned()[0][known - 1]
        trained_until = str(last) if last.dtype.kind != "M" else str(last.astype("datetime64[s]"))
        about = {"source": data, "digest": digest, "series": len(table), "rows": len(table.y), "frequency": table.frequency}
        shape = {"look_back": look_back, "horizon": horizon, "quantiles": ", ".join(f"{q:g}" for q in levels), "blocks": " ".join(blocks) or "none"}
        example = frame.filter(pl.col("unique_id") == table.ids[0]).tail(look_back)
        registered = tracking.register_forecaster(
            run,
            paths["model.safetensors"],
            model.describe(),
            name=model_name,
            alias=alias,
            input_example=example,
            output_example=forecast.filter(pl.col("unique_id") == table.ids[0]),
            params={"h": horizon, "quantiles": list(levels)},
            metrics={k.removeprefix("tethys."): v for k, v in metrics.items() if k.startswith("tethys.")},
            card=forecaster_card(model_name, data={**about, "trained_until": trained_until}, model=shape, leaderboard=board),
            trained_until=trained_until,
        )
        link = run.link
    return TrainResult(
        board, model_name, registered.version, alias, link, str(paths["forecasts.parquet"]), str(paths["plot.png"]),
        str(paths["backtest.parquet"]), round(time.monotonic() - began, 1),
    )  # fmt: skip


def backtest(
    data: str,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    frequency: str | None = None,
    model_name: str = "forecaster",
    version: str = "champion",
    origins: int = 4,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    output: str | Path = "runs/backtest",
) -> BacktestResult:
    """A registered model beside the baselines at the last rolling origins of a table; the baselines are fitted before the first origin.
    An MLflow run keeps the figures."""
    from pipelines import tracking

    model, name = _registered(model_name, version, tracking_uri)
    table = read_panel(
        [data], frequency=frequency, id_column=id_column, time_column=time_column, target_column=target_column
    )
    _same_frequency(model, table, data)
    at = rolling.rolling_origins(table, model.horizon, origins, model.look_back)
    points, quantile = _all_forecasts(model, table, at, int(at[0]))
    real = rolling.truth(table, at, model.horizon, _season(table.frequency), int(at[0]))
    levels = model.forecaster_.config.quantiles
    board = rolling.leaderboard(points, real, {"tethys": rolling.calibration(quantile, levels, real)})
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "backtest.parquet"
    tables.write(rolling.tidy(table, at, points["tethys"], quantile, levels), str(path))
    (folder / "leaderboard.json").write_text(json.dumps(board, indent=2) + "\n")
    params = {"data": data, "model": name, "series": len(table), "rows": len(table.y), "frequency": table.frequency, "origins": len(at)}
    with tracking.run(tracking.open_store(tracking_uri), f"backtest {name}", params=params) as run:
        run.log_metrics({f"{row['model']}.{key}": v for row in board for key, v in row.items() if key != "model" and np.isfinite(v)})
        run.log_dataset(table.frame(), name=Path(data).name, source=data, context="backtest")
        run.log_file(folder / "leaderboard.json")
        run.log_file(path)
    return BacktestResult(board, name, str(path), len(at))


def forecast(
    data: str,
    *,
    id_column: str | None = "unique_id",
    time_column: str = "ds",
    target_column: str = "y",
    frequency: str | None = None,
    horizon: int | None = None,
    model_name: str = "forecaster",
    version: str = "champion",
    tracking_uri: str = DEFAULT_TRACKING_URI,
    output: str = "runs/forecast.parquet",
) -> ForecastResult:
    """Forecast every series of a table with a registered model, and write the table of forecasts (replaced as a whole)."""
    model, name = _registered(model_name, version, tracking_uri)
    table = read_panel(
        [data], frequency=frequency, id_column=id_column, time_column=time_column, target_column=target_column
    )
    _same_frequency(model, table, data)
    result = forecast_panel(model, table, horizon)
    unknown = result.filter(pl.col("mean").is_nan())["unique_id"].unique(maintain_order=True).to_list()
    if unknown:
        print(f"no forecast for {len(unknown)} series without one observed value: {', '.join(unknown[:5])}", file=sys.stderr)
        result = result.filter(pl.col("mean").is_not_nan())
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
    """Fresh memories read the long frame and continue each series; the model stays as it was."""
    levels = None if quantiles is None else tuple(float(q) for q in quantiles)
    return forecast_panel(model, panel(frame, frequency=model.frequency_), horizon, levels)


def forecast_panel(
    model: TitansForecaster, table: Panel, horizon: int | None = None, quantiles: tuple[float, ...] | None = None
) -> pl.DataFrame:
    """The next `horizon` rows (the model's own where None; fewer, but never more) of every series of a panel."""
    steps = model.horizon if horizon is None else int(horizon)
    if not 1 <= steps <= model.horizon:
        raise UserError(
            f"the model forecasts up to {model.horizon} steps, not {steps}: train one with a horizon of {steps}"
        )
    state, last = model._read(model.forecaster_, table)
    result = model._forecast(state, table.ids, last, quantiles)
    if steps < model.horizon:
        result = result[np.tile(np.arange(model.horizon) < steps, len(table)).nonzero()[0]]
    return result


def _registered(name: str, version: str, tracking_uri: str) -> tuple[TitansForecaster, str]:
    from pipelines import tracking

    found = tracking.load_model(name, version, tracking_uri)
    return load_forecaster(found.weights, found.config), f"{found.name}/{found.version}"


def _same_frequency(model: TitansForecaster, table: Panel, data: str) -> None:
    if table.frequency != model.frequency_:
        raise UserError(
            f"the model was trained on steps of {model.frequency_}, the series of {data} have steps of {table.frequency}"
        )


def _season(frequency: str) -> int:
    cycles = natural_cycles(frequency)
    return cycles[0] if cycles else 1


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
    kept = [k for k in keep if len(k)]
    index = np.concatenate(kept)
    offsets = np.concatenate([[0], np.cumsum([len(k) for k in kept])])
    return Panel(ids, table.ds[index], table.y[index], table.observed[index], offsets.astype(np.int64), table.frequency)


def _origins(table: Panel, known: int, horizon: int) -> NDArray[np.int64]:
    _, y, _ = table.aligned()
    every = np.arange(known, y.shape[1] - horizon + 1)
    return every[np.unique(np.linspace(0, len(every) - 1, min(MOST_ORIGINS, len(every))).round().astype(int))]


def _all_forecasts(
    model: TitansForecaster, table: Panel, origins: NDArray[np.int64], known: int
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """Expected values (S, n, H) of the model and of the baselines, fitted on the first `known` rows; and the model's quantiles."""
    _, y, _ = table.aligned()
    horizon, look_back = model.horizon, model.look_back
    point, quantile = model.quantiles_at(table, origins)
    cycles = natural_cycles(table.frequency)
    rates = {0: (0.1, 0.02), 1: (0.2,)}
    profiles = tuple((c, rates[i]) for i, c in enumerate(cycles) if 3 * c <= known)
    baselines: dict[str, Any] = {"last_value": LastValue(horizon)}
    if cycles:
        baselines["seasonal_naive"] = SeasonalNaive(horizon, cycles[0])
    baselines["ridge"] = Ridge(horizon, look_back)
    baselines["ridge_carried"] = RidgeCarried(horizon, look_back, profiles=profiles)
    # The ridge penalty was chosen for scaled series, so every baseline sees them scaled by the rows before the first origin.
    mean = np.nan_to_num(np.nanmean(np.where(np.isfinite(y[:, :known]), y[:, :known], np.nan), axis=1))
    deviation = np.nan_to_num(np.nanstd(y[:, :known], axis=1), nan=1.0)
    deviation = np.where(deviation > 0, deviation, 1.0)
    scaled = (y - mean[:, None]) / deviation[:, None]
    points: dict[str, NDArray[np.float64]] = {"tethys": point}
    for name, baseline in baselines.items():
        try:
            baseline.fit([row[:known] for row in scaled])
        except ValueError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        points[name] = np.stack(
            [m + d * baseline.forecast(row, origins) for row, m, d in zip(scaled, mean, deviation, strict=True)]
        ).astype(np.float64)
    return points, quantile


class _bar:
    """A progress bar on standard error; called after every epoch with epoch, epochs and validation error."""

    def __init__(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} epochs, error {task.fields[error]}"),
            TimeElapsedColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total, error="...")

    def __enter__(self) -> _bar:
        self._progress.start()
        return self

    def __call__(self, epoch: int, epochs: int, error: float) -> None:
        self._progress.update(self._task, completed=epoch + 1, error=f"{error:.4f}")

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
        axis.set_title(name, loc="left", fontsize=9)
    axes[0].legend(fontsize=8, loc="upper left")
    return figure
