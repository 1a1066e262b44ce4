"""TitansForecaster: a forecaster for tables, with scikit-learn's conventions, whose memory goes on learning after `fit`.

Many series share one set of weights; each has a memory of its own. `fit` trains on a long frame and leaves every series' memory at its
last row; `update` moves the memories on with new rows and trains nothing; `predict` reads them. Save and load keep weights and memories.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import safetensors.torch
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.calendar import default_seasons, natural_cycles, phases
from pipelines.forecasting.covariates import Calendar, Encoder
from pipelines.windows import Panel, continue_grid, panel
from titans_core.config import Mixer, Rule
from titans_core.forecaster import Forecaster, ForecasterConfig, ForecasterState, Memory
from titans_core.forecaster_row import ForecasterRow, unsupported
from titans_core.learner import Learner, LearnerState, gain_on
from titans_core.outcome import OutcomeConfig, OutcomeMemory
from titans_core.patches import PatchConfig
from titans_core.state import from_bytes, replace, select, stack, to_bytes
from titans_core.training import (
    Line,
    Rows,
    Training,
    Windows,
    calibrate,
    fit_effect,
    fit_line,
    fit_network,
    initial_memory,
    learn_patches,
    replay,
    validation_error,
    weigh,
)

# Enough windows for a few hundred weights a step; more cost time and memory and change little.
MAX_WINDOWS = 60_000
MAX_SERIES = 2_000  # series that training looks at; all get a memory
CELLS_AT_ONCE = 1 << 17  # series x rows that one call of `observe` works on
CONFIG_VERSION = 1
JUDGED_SERIES = 16  # series on which an outcome memory is judged: it is written row by row


class TitansForecaster(BaseEstimator):
    """Parameters: horizon and look_back in rows; memory `carried`, `window` or `frozen`; hidden units of the network (0: a line only);
    quantiles in rising order; valid_share of the rows, at the end, choose the settings and calibrate the quantiles; epochs and seed of
    the network; frequency of the series (inferred where None). blocks: Titans blocks (`lmm`, `mac`, `mag`, `mal` ...) over patches of
    patch_rows rows, with memories of the given rule; they are kept only where they help on validation. zone: IANA name of the wall clock
    that days and weeks follow (UTC where None). scale_lag: training errors are measured in each series' mean absolute difference over so
    many rows, what MASE divides by (None: in its running deviation). future, historic, static: columns known ahead, known once they
    happened, and of the series itself; calendar: features of the stamp (`pipelines.forecasting.covariates`). outcomes: an outcome memory
    beside the sequence memory, kept only where it helps on validation; each row is then read by itself, which takes far longer.

    After fit: `forecaster_`, `state_` (one stream a series), `ids_`, `last_ds_`, `frequency_`, `line_`, `valid_error_`, and `trained_on_`
    (the series that training looked at).
    """

    def __init__(
        self,
        horizon: int = 24,
        look_back: int = 96,
        memory: Memory = "carried",
        hidden: int = 64,
        quantiles: tuple[float, ...] = (0.025, 0.1, 0.5, 0.9, 0.975),
        valid_share: float = 0.2,
        epochs: int = 8,
        seed: int = 0,
        frequency: str | None = None,
        blocks: tuple[Mixer, ...] = (),
        patch_rows: int = 8,
        rule: Rule = "exact",
        zone: str | None = None,
        scale_lag: int | None = None,
        future: tuple[str, ...] = (),
        historic: tuple[str, ...] = (),
        static: tuple[str, ...] = (),
        calendar: tuple[Calendar, ...] = (),
        outcomes: bool = False,
    ) -> None:
        self.horizon = horizon
        self.look_back = look_back
        self.memory = memory
        self.hidden = hidden
        self.quantiles = quantiles
        self.valid_share = valid_share
        self.epochs = epochs
        self.seed = seed
        self.frequency = frequency
        self.blocks = blocks
        self.patch_rows = patch_rows
        self.rule = rule
        self.zone = zone
        self.scale_lag = scale_lag
        self.future = future
        self.historic = historic
        self.static = static
        self.calendar = calendar
        self.outcomes = outcomes

    def fit(
        self, frame: pl.DataFrame | Panel, progress: Callable[[int, int, float], None] | None = None
    ) -> TitansForecaster:
        """Train on a long frame (`unique_id, ds, y`, covariates) or a panel. progress(epoch, epochs, error) is called after each epoch.

        Raises UserError where the series are too short for one training window, naming what would fit.
        """
        table = frame if isinstance(frame, Panel) else panel(frame, frequency=self.frequency, covariates=self._columns)
        grid, y, observed = table.aligned()
        total = y.shape[1]
        held_out = max(self.horizon, math.ceil(self.valid_share * total))
        border = total - held_out
        if border < self.look_back + self.horizon + 1:
            raise UserError(
                f"the series span {total} rows; with look-back {self.look_back}, horizon {self.horizon} and {held_out} rows of "
                f"validation at least {self.look_back + self.horizon + 1 + held_out} are needed: shorten the look-back or the horizon"
            )
        self.encoder_ = Encoder.fit(
            table, grid[border - 1], future=self.future, historic=self.historic, static=self.static, calendar=self.calendar, zone=self.zone
        )
        seasons = default_seasons(table.frequency, border)
        config = ForecasterConfig(
            look_back=self.look_back,
            horizon=self.horizon,
            seasons=seasons,
            memory=self.memory,
            hidden=self.hidden,
            quantiles=tuple(self.quantiles),
            patches=PatchConfig(rows=self.patch_rows, layers=tuple(self.blocks), rule=self.rule) if self.blocks else None,
            covariates=self.encoder_.config(),
        )
        self.frequency_, self.ids_ = table.frequency, table.ids
        chosen = np.random.default_rng(self.seed).permutation(len(y))[:MAX_SERIES]
        chosen.sort()
        self.trained_on_ = tuple(table.ids[i] for i in chosen)
        rows = self._rows(table, grid, y, observed, seasons, chosen)
        torch.manual_seed(self.seed)
        model = Forecaster(config)
        start = self._fresh(model, rows, border)
        stride = max(1, math.ceil(len(chosen) * border / MAX_WINDOWS))
        train = torch.arange(self.look_back, border - self.horizon + 1, stride)
        valid = torch.arange(border, total - self.horizon + 1, stride)
        try:
            self.line_, train_windows, valid_windows = self._solved(model, start, rows, border, train, valid)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(
                f"{error}: too many values are missing, or no series is as long as look-back and horizon"
            ) from error
        self.forecaster_ = model
        settings = Training(epochs=self.epochs, seed=self.seed)
        tell = None if progress is None else (lambda epoch, error: progress(epoch, 2 * self.epochs, error))
        self.valid_error_ = fit_network(self.forecaster_, self.line_, train_windows, valid_windows, settings, tell)
        if self.blocks and learn_patches(model, start, rows, train, valid, epochs=2 * self.epochs, seed=self.seed):
            (valid_windows,) = self._windows(model, start, rows, border, [valid])
            self.valid_error_ = validation_error(model, valid_windows.x, valid_windows.y)
        calibrate(self.forecaster_, valid_windows)
        self.outcome_ = self._learn_outcomes(rows, train_windows, valid_windows, border) if self.outcomes else None
        return self.remember(table)

    def _learn_outcomes(self, rows: Rows, train: Windows, valid: Windows, border: int) -> OutcomeMemory | None:
        """An outcome memory that makes the validation rows better; None where it does not, or cannot go beside this forecaster."""
        model = self.forecaster_
        if model.config.covariates is not None or model.config.memory != "carried":
            raise UserError("outcomes are learnt beside a carried memory without covariates: leave one of them out")
        both = torch.cat([train.x, valid.x]), torch.cat([train.y, valid.y])
        # What it forgets by is counted in the shortest cycle, and in no fewer rows than hourly series have.
        config = OutcomeConfig.daily(model, max((24, *natural_cycles(self.frequency_)[:1])))
        few = slice(0, JUDGED_SERIES)
        try:
            learner = Learner(model, _fitted(config, model, train.x, train.y))
            self.outcome_gain_ = gain_on(learner, rows.y[few], rows.observed[few], rows.phase[few], border)
            return _fitted(config, model, *both) if self.outcome_gain_ < 1.0 else None
        except ValueError:  # fewer windows than features: nothing to learn a context from
            return None

    @property
    def memory_(self) -> Forecaster | Learner:
        """What reads and forecasts a stream: the forecaster, with its outcome memory where it has one."""
        return self.forecaster_ if self.outcome_ is None else Learner(self.forecaster_, self.outcome_)

    @property
    def in_place(self) -> ForecasterRow | None:
        """The native form of `memory_`, where it has one."""
        return None if self.outcome_ is not None or unsupported(self.forecaster_) else ForecasterRow(self.forecaster_)

    def remember(self, table: Panel) -> TitansForecaster:
        """Forget all series; fresh memories read those of a panel from first row to last. Trains nothing."""
        self.ids_ = table.ids
        self.state_, self.last_ds_, self.static_ = self._read(self.memory_, table)
        return self

    @property
    def _columns(self) -> tuple[str, ...]:
        """Covariates that a table must have."""
        return (*self.future, *self.historic, *self.static)

    def predict(
        self, frame: pl.DataFrame | None = None, quantiles: tuple[float, ...] | None = None, future: pl.DataFrame | None = None
    ) -> pl.DataFrame:
        """The next `horizon` rows of every series: unique_id, ds, `mean`, and a column `qLEVEL` a quantile.

        Without a frame the series known from fit and update are continued; with one, fresh memories read it from its first row to its
        last and this estimator stays as it was. future: `unique_id, ds` and the covariates known ahead, for every row of the horizon. Raises
        UserError for a level that the model was not calibrated for, and for rows that the future lacks.
        """
        self._check_fitted()
        if frame is None:
            return self._forecast(self.state_, self.ids_, self.last_ds_, self.static_, quantiles, future)
        table = panel(frame, frequency=self.frequency_, covariates=self._columns)
        state, last, static = self._read(self.memory_, table)
        return self._forecast(state, table.ids, last, static, quantiles, future)

    def update(self, frame: pl.DataFrame | Panel) -> TitansForecaster:
        """Write new rows into the memories; weights stay. Rows between a series' last and the new first count as missing.

        fit(rows[:n]).update(rows[n:]) holds the memories of one pass over all rows. Series not met before begin with a fresh memory.
        Raises UserError for rows that are not later than what a memory has already read.
        """
        self._check_fitted()
        table = frame if isinstance(frame, Panel) else panel(frame, frequency=self.frequency_, covariates=self._columns)
        given, its_static = self.encoder_.of_panel(table)
        known = {name: i for i, name in enumerate(self.ids_)}
        new = [name for name in table.ids if name not in known]
        phase = phases(self.frequency_, self.forecaster_.config.seasons, self.zone)
        ids, states, last_ds, static = list(self.ids_), [self.state_], list(self.last_ds_), list(self.static_)
        for name in new:
            known[name] = len(ids)
            ids.append(name)
            last_ds.append(None)
            static.append(its_static[table.ids.index(name)])
        if new:
            states.append(self.memory_.initial_state(len(new)))
        state = stack(states)
        for i, name in enumerate(table.ids):
            part, at = table.rows(i), known[name]
            ds, y, seen, beside = table.ds[part], table.y[part], table.observed[part], given[part]
            before = last_ds[at]
            if before is not None:
                if ds[0] <= before:
                    raise UserError(
                        f"series {name!r}: the update begins at {ds[0]}, but its memory has read up to {before}: send only later rows"
                    )
                gap = int(_steps_between(before, ds[0], self.frequency_)) - 1
                if gap:
                    ds = np.concatenate([continue_grid(before, self.frequency_, gap), ds])
                    y = np.concatenate([np.full(gap, np.nan), y])
                    seen = np.concatenate([np.zeros(gap, bool), seen])
                    beside = np.concatenate([np.zeros((gap, beside.shape[1]), np.float32), beside])
            one: Any = select(state, [at])
            with torch.inference_mode():
                calendar = self._slots(phase, ds)
                slots = calendar if self.outcome_ is not None else np.concatenate([calendar, beside], axis=1)
                one = self.memory_.observe(one, torch.tensor(y)[None], torch.tensor(seen)[None], torch.from_numpy(slots)[None])
            state = replace(state, [at], one)
            last_ds[at] = ds[-1]
        self.state_, self.ids_, self.last_ds_, self.static_ = state, tuple(ids), np.array(last_ds), np.array(static)
        return self

    def windows(self, table: Panel, origins: NDArray[np.int64]) -> tuple[Windows, NDArray[Any]]:
        """Windows of this model at row counts `origins` of the panel's common grid, for every series, origin by origin; and the grid.

        Memories are fresh at the first row of the panel, and an origin knows nothing later than the row before it.
        """
        self._check_fitted()
        grid, y, observed = table.aligned()
        rows = self._rows(table, grid, y, observed, self.forecaster_.config.seasons, np.arange(len(y)))
        (found,), _ = replay(
            self.forecaster_,
            self.forecaster_.initial_state(len(y)),
            rows,
            [torch.from_numpy(np.asarray(origins, np.int64))],
        )
        return found, grid

    def quantiles_at(self, table: Panel, origins: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rolling-origin forecasts: expected values (S, n, H) and quantiles (S, n, H, Q), all windows through the model in batches."""
        found, _ = self.windows(table, origins)
        model = self.forecaster_
        points, around = [], []
        with torch.inference_mode():
            for part, base, unit in zip(
                found.x.split(4096), found.level.split(4096), found.unit.split(4096), strict=True
            ):
                middle = model.centre_of(part)
                spread = model.roughness(part) ** model.config.spread
                points.append(base[:, None] + unit[:, None] * middle)
                wide = middle.unsqueeze(2) + spread.unsqueeze(2) * model.offsets
                around.append(base[:, None, None] + unit[:, None, None] * wide)
        shape = (len(origins), len(table))
        point = torch.cat(points).unflatten(0, shape).transpose(0, 1)
        quantile = torch.cat(around).unflatten(0, shape).transpose(0, 1)
        return point.numpy(), quantile.numpy()

    def backtest(self, frame: pl.DataFrame | Panel, origins: int = 4) -> pl.DataFrame:
        """Forecasts at the last `origins` rolling origins, one horizon apart: unique_id, origin, ds, y, mean and the quantiles."""
        from pipelines.forecasting.backtest import MODEL, rolling_origins, tidy

        self._check_fitted()
        table = frame if isinstance(frame, Panel) else panel(frame, frequency=self.frequency_, covariates=self._columns)
        at = rolling_origins(table, self.horizon, origins, self.look_back)
        point, quantile = self.quantiles_at(table, at)
        return tidy(table, at, {MODEL: point}, quantile, self.forecaster_.config.quantiles)

    def save(self, folder: str | Path) -> None:
        """weights.safetensors, config.json and the memories of the known series (state.safetensors) into a folder."""
        self._check_fitted()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(self.forecaster_, folder / "weights.safetensors", self.outcome_)
        (folder / "config.json").write_text(json.dumps(self.describe(), indent=2, sort_keys=True) + "\n")
        known = {"ids": list(self.ids_), "last_ds": [int(np.int64(_as_int(d))) for d in self.last_ds_], "static": np.asarray(self.static_).tolist()}
        (folder / "state.safetensors").write_bytes(to_bytes(self.state_, series=json.dumps(known)))

    @classmethod
    def load(cls, folder: str | Path) -> TitansForecaster:
        """What `save` wrote. Raises UserError for a folder that holds no saved forecaster."""
        from titans_core.state import read_metadata

        folder = Path(folder)
        for name in ("weights.safetensors", "config.json", "state.safetensors"):
            if not (folder / name).is_file():
                raise UserError(f"{folder} holds no saved forecaster: {name} is missing")
        loaded = cls.from_weights(folder / "weights.safetensors", json.loads((folder / "config.json").read_text()))
        data = (folder / "state.safetensors").read_bytes()
        known = json.loads(read_metadata(data)["series"])
        loaded.state_ = from_bytes(data, loaded.memory_.initial_state(1))
        loaded.ids_ = tuple(known["ids"])
        loaded.static_ = np.array(known["static"], dtype=np.float32).reshape(len(loaded.ids_), -1)
        stamps = np.array(known["last_ds"], dtype=np.int64)
        loaded.last_ds_ = stamps if loaded.frequency_.endswith("i") else stamps.view("datetime64[us]")
        return loaded

    def describe(self) -> dict[str, Any]:
        """The configuration as plain data: what config.json holds beside the weights."""
        self._check_fitted()
        return {
            "format_version": CONFIG_VERSION,
            "model": "forecaster",
            "frequency": self.frequency_,
            "parameters": {k: list(v) if isinstance(v, tuple) else v for k, v in self.get_params().items()},
            "covariates": self.encoder_.to_json(),
            "forecaster": self.forecaster_.config.to_json(),
            "line": {k: v for k, v in dataclasses.asdict(self.line_).items() if math.isfinite(v)},
            "valid_error": self.valid_error_,
            "outcome": None if self.outcome_ is None else self.outcome_.config.to_json(),
        }

    @classmethod
    def from_weights(cls, weights: str | Path, config: dict[str, Any]) -> TitansForecaster:
        """A fitted estimator without memories of its own, from a safetensors file and what `describe` gave."""
        if config.get("model") != "forecaster" or config.get("format_version") != CONFIG_VERSION:
            raise UserError(
                f"{weights}: the configuration beside it is of model {config.get('model')!r}, format {config.get('format_version')!r}; "
                f"this program reads model 'forecaster', format {CONFIG_VERSION}"
            )
        try:
            given = config["parameters"]
            parameters: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
            loaded = cls(**parameters)
            # Models of before there were covariates say nothing of them.
            none: dict[str, Any] = {"frequency": config["frequency"], "zone": loaded.zone, "calendar": [], "future": [], "historic": [], "static": []}
            loaded.encoder_ = Encoder.from_json(config.get("covariates", none))
            learns = config.get("outcome")
            loaded.forecaster_, loaded.outcome_ = load_weights(
                weights, ForecasterConfig.from_json(config["forecaster"]), None if learns is None else OutcomeConfig.from_json(learns)
            )
            loaded.frequency_, loaded.line_, loaded.valid_error_ = config["frequency"], Line(**config["line"]), config["valid_error"]
        except (KeyError, TypeError, RuntimeError) as error:
            raise UserError(f"{weights}: weights and configuration do not fit this program ({error}): train the model anew") from error
        loaded.ids_, loaded.last_ds_, loaded.static_ = (), np.array([]), loaded._no_static
        loaded.state_ = loaded.memory_.initial_state(0)
        return loaded

    def _check_fitted(self) -> None:
        if not hasattr(self, "forecaster_"):
            raise UserError("this forecaster is not fitted: call fit, or load a saved one")

    def _solved(
        self, model: Forecaster, start: ForecasterState, rows: Rows, border: int, train: torch.Tensor, valid: torch.Tensor
    ) -> tuple[Line, Windows, Windows]:
        """The line, and the windows of training and validation; the effect of covariates stays where it makes the line better over all folds."""
        plain, plain_valid = self._windows(model, start, rows, border, [train, valid])
        line = fit_line(model, plain, plain_valid)
        covariates = model.config.covariates
        if covariates is None or not covariates.future:
            return line, plain, plain_valid
        fit_effect(model, start, rows.first(border), train)
        found, found_valid = self._windows(model, start, rows, border, [train, valid])
        if (better := fit_line(model, found, found_valid)).score < line.score:
            return better, found, found_valid
        model.effect.zero_()
        return fit_line(model, plain, plain_valid), plain, plain_valid

    def _windows(
        self, model: Forecaster, start: ForecasterState, rows: Rows, border: int, groups: list[torch.Tensor]
    ) -> list[Windows]:
        """The windows at the origins of each group, with their weights. Where most series are older than a look-back, younger ones teach nothing."""
        found, _ = replay(model, start, rows, groups)
        for windows in found:
            if len(bad := torch.nonzero(~windows.x.isfinite().all(1) | windows.y.isinf().any(1)).flatten()):
                names = [self.trained_on_[i] for i in sorted(set((bad % len(rows.y)).tolist()))]
                told = ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
                raise UserError(
                    f"{len(bad)} training windows of {len(names)} series are no numbers in float32 ({told}): their values jump by more than "
                    "1e38 times what they moved before; leave these series out"
                )
        scale = None
        if self.scale_lag is not None:
            known = torch.where(rows.observed, rows.y, torch.nan)[:, :border]
            difference = (known[:, self.scale_lag :] - known[:, : -self.scale_lag]).abs()
            scale = difference.nanmean(1).nan_to_num(0.0)
        age = rows.observed.cumsum(1)
        old = [(age[:, origins - 1] >= self.look_back).T.flatten() for origins in groups]
        seen = [torch.isfinite(windows.y).any(1) for windows in found]
        if 2 * sum(int((o & s).sum()) for o, s in zip(old, seen, strict=True)) >= sum(int(s.sum()) for s in seen):
            found = [
                dataclasses.replace(windows, y=torch.where(o.unsqueeze(1), windows.y, torch.nan)) for windows, o in zip(found, old, strict=True)
            ]
        scales = [None if scale is None else scale.repeat(len(origins)) for origins in groups]
        return [weigh(windows, one) for windows, one in zip(found, scales, strict=True)]

    @property
    def _no_static(self) -> NDArray[np.float32]:
        return np.empty((0, sum(c.width for c in self.encoder_.static)), np.float32)

    def _rows(
        self, table: Panel, grid: NDArray[Any], y: NDArray[np.float64], observed: NDArray[np.bool_], seasons: Any, which: NDArray[np.int64]
    ) -> Rows:
        """The series `which` of a panel and of its common grid."""
        stamps = np.concatenate([grid, continue_grid(grid[-1], self.frequency_, self.horizon)])
        slots = torch.from_numpy(phases(self.frequency_, seasons, self.zone)(stamps)).to(torch.int16)
        covariates = None
        if self.encoder_.config() is not None:
            given = table.on_common_grid(self.encoder_.of_panel(table)[0], which)
            covariates = torch.from_numpy(np.pad(given, ((0, 0), (0, self.horizon), (0, 0))))
        seen = torch.from_numpy(observed[which])
        return Rows(torch.from_numpy(y[which]), seen, slots.expand(len(which), -1, -1), covariates)

    def _fresh(self, model: Forecaster, rows: Rows, border: int) -> ForecasterState:
        start = model.initial_state(len(rows.y))
        if model.config.memory == "carried":
            return start
        return initial_memory(model, start, rows.first(border))

    def _slots(self, phase: Callable[[NDArray[Any]], NDArray[Any]], ds: NDArray[Any]) -> NDArray[Any]:
        """(T, G) slots of rows; with an outcome memory (T + H, G), those of the horizon after the last row too."""
        return phase(ds if self.outcome_ is None else np.concatenate([ds, continue_grid(ds[-1], self.frequency_, self.horizon)]))

    def _read(self, model: Forecaster | Learner, table: Panel) -> tuple[ForecasterState | LearnerState, NDArray[Any], NDArray[np.float32]]:
        """Fresh memories that have read every series from its first row to its last; the stamps of the last rows; static covariates."""
        phase = phases(self.frequency_, model.config.seasons, self.zone)
        given, static = self.encoder_.of_panel(table)
        lengths, parts, order = table.lengths, [], []
        in_place = self.in_place
        with torch.inference_mode():
            # Series of one length together: no padding, and equal numbers however many share a call.
            for length in np.unique(lengths):
                which = np.flatnonzero(lengths == length)
                size = max(1, CELLS_AT_ONCE // int(length))
                for first in range(0, len(which), size):
                    some = which[first : first + size]
                    y, seen, ds, beside = (
                        np.stack([a[table.rows(int(i))] for i in some]) for a in (table.y, table.observed, table.ds, given)
                    )
                    # Most series of a table stand at the same stamps: their calendar is worked out once.
                    alike = (ds == ds[0]).all()
                    calendar = np.stack([self._slots(phase, row) for row in (ds[:1] if alike else ds)])
                    which_run = np.zeros(len(ds), np.int64) if alike else np.arange(len(ds))
                    state: Any = model.initial_state(len(some))
                    if in_place is not None:
                        in_place.observe(state, *map(torch.from_numpy, (y, seen, calendar, which_run)))
                    else:
                        slots = calendar[which_run] if self.outcome_ is not None else np.concatenate([calendar[which_run], beside], axis=2)
                        state = model.observe(state, torch.from_numpy(y), torch.from_numpy(seen), torch.from_numpy(slots))
                    parts.append(state)
                    order.append(some)
            place = np.argsort(np.concatenate(order))
            return select(stack(parts), torch.from_numpy(place)), table.ds[table.offsets[1:] - 1], static

    def read(
        self, data: str, *, id_column: str | None = "unique_id", time_column: str = "ds", target_column: str = "y"
    ) -> tuple[tuple[str, ...], list[int], ForecasterState | LearnerState]:
        """A table's series, the times of their last rows (microseconds, or whole numbers) and memories that have read them."""
        table = panel(
            tables.read(data), frequency=self.frequency_, id_column=id_column, time_column=time_column, target_column=target_column,
            covariates=self.encoder_.names, source=data,
        )  # fmt: skip
        state, last, _ = self._read(self.memory_, table)
        return table.ids, [_as_int(ds) for ds in last], state

    def _forecast(
        self,
        state: Any,
        ids: tuple[str, ...],
        last_ds: NDArray[Any],
        static: NDArray[np.float32],
        quantiles: tuple[float, ...] | None,
        future: pl.DataFrame | None,
    ) -> pl.DataFrame:
        model: Any = self.memory_
        config = model.config
        levels = config.quantiles if quantiles is None else tuple(quantiles)
        if unknown := [q for q in levels if q not in config.quantiles]:
            raise UserError(f"the model was calibrated for quantiles {config.quantiles}, not for {unknown}")
        if not len(ids):
            raise UserError("nothing to forecast: this forecaster knows no series; give it a frame")
        phase = phases(self.frequency_, config.seasons, self.zone)
        ends, which = np.unique(last_ds, return_inverse=True)
        grid = np.stack([continue_grid(d, self.frequency_, config.horizon) for d in ends])
        stamps = grid[which]
        beside = self.encoder_.of_future(ids, last_ds, static, future, config.horizon)
        calendar = np.stack([phase(row) for row in grid])
        in_place = self.in_place
        with torch.inference_mode():
            if in_place is not None:
                mean, around = (part.numpy() for part in in_place.ahead(state, torch.from_numpy(calendar), torch.from_numpy(which)))
            else:
                ahead = torch.from_numpy(np.concatenate([calendar[which], beside], axis=2))
                mean, around = model.expected(state, ahead).numpy(), model.forecast(state, ahead).numpy()
        columns: dict[str, Any] = {
            "unique_id": np.repeat(np.array(ids, dtype=object), config.horizon).tolist(),
            "ds": stamps.reshape(-1),
            "mean": mean.reshape(-1),
        }
        for q in levels:
            columns[f"q{q:g}"] = around[:, :, config.quantiles.index(q)].reshape(-1)
        return pl.DataFrame(columns)


def _fitted(config: OutcomeConfig, model: Forecaster, x: torch.Tensor, y: torch.Tensor) -> OutcomeMemory:
    known = x.isfinite().all(1)
    return OutcomeMemory(config).fit(x[known], y[known], model.line)


def save_weights(model: Forecaster, path: str | Path, outcome: OutcomeMemory | None = None) -> None:
    """The trained weights as safetensors; those of an outcome memory under `outcome.`."""
    weights = model.state_dict()
    if outcome is not None:
        weights |= {f"outcome.{name}": part for name, part in outcome.state_dict().items()}
    safetensors.torch.save_file({k: v.contiguous() for k, v in weights.items()}, str(path))


def load_weights(
    path: str | Path, config: ForecasterConfig, outcome: OutcomeConfig | None = None
) -> tuple[Forecaster, OutcomeMemory | None]:
    """The forecaster, and the outcome memory, of configurations with the weights of a safetensors file; on the CPU, wherever trained."""
    weights = safetensors.torch.load_file(str(path))
    model = Forecaster(config)
    model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("outcome.")})
    if outcome is None:
        return model.eval(), None
    learns = OutcomeMemory(outcome)
    learns.load_state_dict({k.removeprefix("outcome."): v for k, v in weights.items() if k.startswith("outcome.")})
    return model.eval(), learns


def _as_int(stamp: Any) -> int:
    value = np.asarray(stamp)
    return int(value.astype("datetime64[us]").astype(np.int64)) if value.dtype.kind == "M" else int(value)


def _steps_between(first: Any, second: Any, frequency: str) -> int:
    from pipelines.forecasting.calendar import steps

    a, b = (steps(np.array([d]), frequency)[0] for d in (first, second))
    return int(b - a)
