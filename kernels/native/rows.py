"""Whole histories of a forecaster (`rows.cpp`): many rows written into a stacked state in one call, and the forecast made from it.

Twins, to rounding, of `titans_core.forecaster` (`observe`; `expected` and `forecast`). A stream is one unit of work: its numbers are the
same bits whichever others share the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.native import _ops


def forecaster_history(
    state: Sequence[Tensor], rates: Sequence[Tensor], level_rows: int, y: Tensor, observed: Tensor, phase: Tensor, which: Tensor
) -> None:
    """Write T rows into each of the N streams of `state`, which is changed in place.

    state: centre, count, mean, variance, last, window, phases, then W and visits of each season; rates: of each season. y (N, T) float64,
    observed (N, T) bool; phase (U, T, G) float32: the slots at U runs of times, which (N,) long: the run of each stream. Raises RuntimeError
    for shapes, dtypes and slots that do not fit.
    """
    _ops().forecaster_history(list(state), list(rates), float(level_rows), y, observed, phase, which)


def forecaster_ahead(
    state: Sequence[Tensor],
    strides: Sequence[int],
    reads: Sequence[int],
    weights: Sequence[Tensor],
    spread: float,
    quietest: float,
    ahead: Tensor,
    which: Tensor,
) -> tuple[Tensor, Tensor]:
    """Expected values (N, H) and quantiles (N, H, Q), float64, of the N streams of `state`; NaN for a stream that has seen nothing.

    strides, reads: of each season. weights: line (d, H), feature_mean (d), feature_scale (d), offsets (H, Q) and, where there is a network,
    its two layers, each (in, out) and bias. ahead (U, H, G) float32: the slots of the horizon at U times, which (N,) long: of each stream.
    """
    horizon, levels = weights[3].shape
    mean = torch.empty(len(which), horizon, dtype=torch.float64)
    quantiles = torch.empty(len(which), horizon, levels, dtype=torch.float64)
    _ops().forecaster_ahead(list(state), list(strides), list(reads), list(weights), spread, quietest, ahead, which, mean, quantiles)
    return mean, quantiles
