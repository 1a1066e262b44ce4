"""A forecaster's `observe` and `forecast` in place on the stacked state of many streams: one row of live ones, or their whole past.

The pure pair copies the state of every stream of a batch out and in again and walks it once for each operation; here a stream's rows are
written and read in one pass over its memory. Natively, for a forecaster with carried memory and neither blocks nor covariates; `unsupported`
says why another goes by the pure pair. The numbers are the same to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernels.native import rows, streams
from titans_core.forecaster import QUIETEST, Forecaster, ForecasterState
from titans_core.state import leaves


def unsupported(forecaster: Forecaster) -> str:
    """Empty if `ForecasterRow` takes this forecaster, else why not."""
    c = forecaster.config
    if c.memory != "carried" or c.patches is not None or c.covariates is not None:
        return "only a carried memory without blocks and covariates is written in place"
    if forecaster.line.device.type != "cpu":
        return f"the forecaster is on {forecaster.line.device}"
    return streams.supports()


class ForecasterRow:
    """Called with a state of N streams (changed in place), one row of n of them and the calendar."""

    def __init__(self, forecaster: Forecaster) -> None:
        reason = unsupported(forecaster)
        if reason:
            raise ValueError(f"this forecaster's rows are not written in place: {reason}")
        self.forecaster = forecaster
        seasons = forecaster.config.seasons
        self._rates = [torch.tensor(season.rates) for season in seasons]
        self._strides = [season.stride for season in seasons]
        self._reads = [season.reads(forecaster.config.horizon) for season in seasons]
        self._weights = [forecaster.line, forecaster.feature_mean, forecaster.feature_scale, forecaster.offsets]
        if forecaster.net is not None:
            for layer in (part for part in forecaster.net if isinstance(part, nn.Linear)):
                self._weights += [layer.weight.detach().T.contiguous(), layer.bias.detach()]

    def __call__(
        self, state: ForecasterState, slots: Tensor, y: Tensor, observed: Tensor, which: Tensor, now: Tensor, ahead: Tensor
    ) -> Tensor:
        """slots (n,) long: the streams, each at most once; y (n,) float64, observed (n,) bool: a row of each; which (n,) long: the time of
        each, whose slots are now (U, G), those of the horizon ahead (U, H, G). Returns quantiles (n, H, Q) float64, as `forecast` does.
        """
        f, c = self.forecaster, self.forecaster.config
        x, level, unit, rough = self.move(state, slots, y, observed, which, now, ahead)
        spread = rough**c.spread
        # (Q, n, H): a quantile is one piece of memory. Megabytes for a batch of live streams, so each sum is taken in place.
        around = spread.view(1, -1, 1) * f.offsets.T.unsqueeze(1)
        around += f.centre_of(x)
        quantiles = unit.view(1, -1, 1) * around
        quantiles += level.view(1, -1, 1)
        unknown = state.count[slots] == 0
        if unknown.any():
            quantiles[:, unknown] = math.nan
        return quantiles.permute(1, 2, 0)

    def move(
        self, state: ForecasterState, slots: Tensor, y: Tensor, observed: Tensor, which: Tensor, now: Tensor, ahead: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As a call, but what a forecast is made from: features (n, F), level (n,) and unit (n,) float64, roughness (n,)."""
        tensors = [leaf for _, leaf in leaves(state)]
        level_rows = self.forecaster.config.level_rows
        return streams.forecaster_row(
            tensors, self._rates, self._strides, self._reads, level_rows, QUIETEST, slots, y, observed, which, now, ahead
        )

    def observe(self, state: ForecasterState, y: Tensor, observed: Tensor, phase: Tensor, which: Tensor) -> None:
        """Write T rows of all N streams of `state`, which is changed: y (N, T) float64, observed (N, T) bool.

        phase (U, T, G) float32: the slots at U runs of times; which (N,) long: the run of each stream.
        """
        rows.forecaster_history([leaf for _, leaf in leaves(state)], self._rates, self.forecaster.config.level_rows, y, observed, phase, which)

    def ahead(self, state: ForecasterState, future: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """What `expected` and `forecast` give for all N streams: (N, H) and (N, H, Q) float64.

        future (U, H, G) float32: the slots of the horizon at U times; which (N,) long: the time of each stream.
        """
        tensors = [leaf.contiguous() for _, leaf in leaves(state)]
        return rows.forecaster_ahead(tensors, self._strides, self._reads, self._weights, self.forecaster.config.spread, QUIETEST, future, which)
