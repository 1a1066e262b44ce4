"""One row of many live streams, in place on a stacked state (`streams.cpp`): a forecaster's write and features, and what is watched beside it.

Twins, to rounding, of `titans_core.forecaster` (`observe`, then `features`) and of `pipelines.streaming.monitors` (`judge`, `interval`,
`expect`). A stream is one unit of work: its numbers do not depend on which others share the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import forced
from kernels.native import _ops, status


def supports() -> str:
    """Empty if the native form runs here, else why not."""
    if forced() not in (None, "native"):
        return f"'{forced()}' is forced"
    return "" if status().available else status().reason


def forecaster_row(
    state: Sequence[Tensor],
    rates: Sequence[Tensor],
    strides: Sequence[int],
    reads: Sequence[int],
    level_rows: int,
    quietest: float,
    slots: Tensor,
    y: Tensor,
    observed: Tensor,
    which: Tensor,
    now: Tensor,
    ahead: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write one row into each of the n streams `slots` of `state` and read what a forecast is made from.

    state: centre, count, mean, variance, last, window, phases, then W and visits of each season, N streams each, changed in place. rates,
    strides, reads: of each season. y (n,) float64, observed (n,) bool, which (n,) long: the time of each row, whose slots are now (U, G) and
    ahead (U, H, G), float32. Returns features (n, d), level (n,) and unit (n,) float64, roughness (n,).
    """
    n, d = len(slots), state[5].shape[1] + sum(len(rate) * count for rate, count in zip(rates, reads, strict=True)) + 2
    x, rough = torch.empty(n, d), torch.empty(n)
    level, unit = torch.empty(n, dtype=torch.float64), torch.empty(n, dtype=torch.float64)
    _ops().forecaster_row(
        list(state), list(rates), list(strides), list(reads), float(level_rows), quietest, slots, y, observed, which, now, ahead,
        x, level, unit, rough,
    )  # fmt: skip
    return x, level, unit, rough


def watch_row(
    state: Sequence[Tensor],
    rules: Sequence[float],
    step: Tensor,
    first: Tensor,
    rate: Tensor,
    between: Tensor,
    slots: Tensor,
    y: Tensor,
    forecast: Tensor,
) -> tuple[Tensor, ...]:
    """Judge one row of each of the n streams `slots` and hold its forecast back; `state` (the tensors of a MonitorState) moves in place.

    rules: the constants, in the order of `Rules` in the source. y (n,) float64, NaN: missing; forecast (Q, n, H) float64. Returns surprise,
    anomaly, limit, unusual, alarm, statistic, covered and the lower and upper ends of the interval (n, H).
    """
    n, horizon = len(slots), between.shape[1]

    def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    surprise, anomaly, unusual, low, high = numbers(n), numbers(n), numbers(n), numbers(n, horizon), numbers(n, horizon)
    limit, statistic = numbers(n, dtype=torch.float32), numbers(n, 2, dtype=torch.float32)
    alarm, covered = numbers(n, dtype=torch.int64), numbers(n, dtype=torch.bool)
    out = (surprise, anomaly, limit, unusual, alarm, statistic, covered, low, high)
    _ops().watch_row(list(state), list(rules), step, first, rate, between, slots, y, forecast, list(out))
    return out
