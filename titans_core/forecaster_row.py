"""A forecaster's `observe` and `forecast` for one row of many live streams, in place on their stacked state.

The pure pair copies the state of every stream of a batch out and in again and walks it once for each operation; here a stream's row is
written and read in one pass over its memory. Natively, for a forecaster with carried memory and neither blocks nor covariates; `unsupported`
says why another goes by the pure pair. The numbers are the same to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.native import streams
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
        rows, quietest = self.forecaster.config.level_rows, QUIETEST
        return streams.forecaster_row(
            tensors, self._rates, self._strides, self._reads, rows, quietest, slots, y, observed, which, now, ahead
        )

    def observe(self, state: ForecasterState, y: Tensor, observed: Tensor, phase: Tensor) -> None:
        """Write T rows of all N streams of `state`, which is changed. Shapes as of `Forecaster.observe`: y, observed (N, T), phase (N, T, G).

        For short histories, where the chunks of the pure form cost more to set up than the rows to write.
        """
        every = torch.arange(len(y))
        values, seen, times = y.T.contiguous(), observed.T.contiguous(), phase.transpose(0, 1).contiguous()
        ahead = times[-1].unsqueeze(1).expand(-1, self.forecaster.config.horizon, -1).contiguous()  # what would be read is not looked at
        for row, was_seen, now in zip(values, seen, times, strict=True):
            self.move(state, every, row, was_seen, every, now, ahead)
