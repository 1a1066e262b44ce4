"""A forecaster and its outcome memory as one memory: what is written to either is one value a stream, and forecasts are the corrected ones.

The sequence memory learns from what a row is, the outcome memory from what the forecasts that were made for it were wrong by. To be
corrected later a forecast must have been made, so writing a row needs the slots of the rows it will be forecast for: the horizon after it.

Axis letters: B streams, T rows, H horizon, G seasons, Q quantiles, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from titans_core.forecaster import Forecaster, ForecasterState
from titans_core.forecaster_row import ForecasterRow, unsupported
from titans_core.outcome import Origin, OutcomeMemory, OutcomeState, origin_of
from titans_core.state import select, write_


@dataclass(frozen=True)
class LearnerState:
    """All that a stream has learnt."""

    forecaster: ForecasterState
    outcome: OutcomeState


class Learner:
    """The contract of a forecaster, `observe` and `forecast`, for the two together; only without covariates and with carried memory."""

    def __init__(self, forecaster: Forecaster, outcome: OutcomeMemory) -> None:
        c = forecaster.config
        if c.covariates is not None or c.memory != "carried":
            raise ValueError("an outcome memory goes beside a carried memory without covariates")
        self.forecaster, self.outcome, self.config = forecaster, outcome, c
        self._in_place = None if unsupported(forecaster) else ForecasterRow(forecaster)

    def initial_state(self, n: int) -> LearnerState:
        """n streams that have seen nothing."""
        return LearnerState(self.forecaster.initial_state(n), self.outcome.initial_state(n))

    def observe(self, state: LearnerState, y: Tensor, observed: Tensor, phase: Tensor) -> LearnerState:
        """Write T rows: y (B, T), observed (B, T) bool, phase (B, T + H, G): the slots of the rows and of the horizon after the last.

        Rows that no stream has observed, as in a gap, need no horizon: phase (B, T, G). Any split of the rows over calls gives the same
        state (to rounding). Raises ValueError for shapes that do not fit.
        """
        T, H = y.shape[1], self.config.horizon
        if not bool(observed.any()):
            moved = self.forecaster.observe(state.forecaster, y, observed, phase[:, :T])
            passed = torch.full((len(y),), T, dtype=torch.int64, device=y.device)
            return LearnerState(moved, self.outcome.skip(state.outcome, passed))
        if phase.shape[1] != T + H:
            raise ValueError(f"observe: phase {tuple(phase.shape)} must hold {T} rows and the {H} of the horizon after them")
        moved, learnt = state.forecaster, state.outcome
        for t in range(T):
            now = slice(t, t + 1)
            moved = self.forecaster.observe(moved, y[:, now], observed[:, now], phase[:, now])
            origin = origin_of(self.forecaster, moved, phase[:, t + 1 : t + 1 + H])
            learnt, _ = self.outcome.step(learnt, origin, y[:, t], observed[:, t])
        return LearnerState(moved, learnt)

    def expected(self, state: LearnerState, future_phase: Tensor) -> Tensor:
        """Corrected expected values (B, H) float64 of the next H rows; changes no state. future_phase (B, H, G)."""
        corrected = self.outcome.correct(state.outcome, origin_of(self.forecaster, state.forecaster, future_phase))
        return torch.where(state.forecaster.count.unsqueeze(1) > 0, corrected, math.nan)

    def forecast(self, state: LearnerState, future_phase: Tensor) -> Tensor:
        """Quantiles (B, H, Q) float64 about the corrected expected values; changes no state. future_phase (B, H, G)."""
        shift = self.expected(state, future_phase) - self.forecaster.expected(state.forecaster, future_phase)
        return self.forecaster.forecast(state.forecaster, future_phase) + shift.unsqueeze(2)

    def row(
        self, state: LearnerState, slots: Tensor, y: Tensor, observed: Tensor, which: Tensor, now: Tensor, ahead: Tensor
    ) -> Tensor:
        """`observe` and `forecast` for one row of the streams at `slots` (n,) of a state of many, which moves in place.

        y (n,) float64, observed (n,) bool; which (n,) long: the time of each row, whose slots are now (U, G), those of the horizon
        ahead (U, H, G). Returns quantiles (n, H, Q) float64.
        """
        f = self.forecaster
        if self._in_place is None:
            moved = f.observe(select(state.forecaster, slots), y.unsqueeze(1), observed.unsqueeze(1), now[which].unsqueeze(1))
            write_(state.forecaster, slots, moved)
            origin = origin_of(f, moved, ahead[which])
            rough = f.roughness(origin.x).squeeze(1)
        else:
            x, level, unit, rough = self._in_place.move(state.forecaster, slots, y, observed, which, now, ahead)
            origin = Origin(x, f.centre_of(x), level, unit)
        learnt, corrected = self.outcome.step(select(state.outcome, slots), origin, y, observed)
        write_(state.outcome, slots, learnt)
        corrected = torch.where(state.forecaster.count[slots].unsqueeze(1) > 0, corrected, math.nan)
        around = (rough**f.config.spread).view(-1, 1, 1) * f.offsets
        return corrected.unsqueeze(2) + origin.unit.view(-1, 1, 1) * around


def gain_on(learner: Learner, y: Tensor, observed: Tensor, phase: Tensor, first: int) -> float:
    """What the outcome memory brings on rows from `first` on: the mean squared error with it over that without, NaN where none is known.

    y (S, T), observed (S, T) bool, phase (S, T + H, G); both sides see the rows in turn, errors are in units of each stream.
    """
    H, T = learner.config.horizon, y.shape[1]
    state = learner.initial_state(len(y))
    truth = torch.where(observed, y, math.nan)
    wrong = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for t in range(T - H):
            now = slice(t, t + 1)
            moved = learner.forecaster.observe(state.forecaster, y[:, now], observed[:, now], phase[:, now])
            origin = origin_of(learner.forecaster, moved, phase[:, t + 1 : t + 1 + H])
            learnt, corrected = learner.outcome.step(state.outcome, origin, y[:, t], observed[:, t])
            state = LearnerState(moved, learnt)
            if t + 1 >= first:
                unit = origin.unit.unsqueeze(1)
                frozen = origin.level.unsqueeze(1) + unit * origin.base
                off = (torch.stack([corrected, frozen]) - truth[:, t + 1 : t + 1 + H]) / torch.where(unit > 0, unit, math.nan)
                wrong += off.square().nansum((1, 2))
    return float(wrong[0] / wrong[1])
