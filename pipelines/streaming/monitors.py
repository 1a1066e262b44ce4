"""What is watched beside the model, a stream each: how surprising the newest value was.

All functions are pure and step many streams at once; the state is a data class of tensors with the streams first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MonitorState:
    expected: Tensor
    """(n, Q) float32: quantiles of the next value as forecast at the last row; NaN before the first forecast."""


def initial(n: int, quantiles: int) -> MonitorState:
    return MonitorState(torch.full((n, quantiles), torch.nan))


def surprise(state: MonitorState, y: Tensor, levels: Tensor) -> Tensor:
    """(n,) how far `y` (n,) lies from the median that was forecast for it, in standard deviations of that forecast.

    The forecast's outer quantiles are read as those of a normal distribution; NaN where nothing was forecast or
    `y` is missing.
    """
    low, middle, high = state.expected[:, 0], state.expected[:, levels.numel() // 2], state.expected[:, -1]
    width = torch.special.ndtri(levels[-1]) - torch.special.ndtri(levels[0])
    spread = ((high - low) / width).clamp_min(torch.finfo(torch.float32).tiny)
    return (y - middle).abs() / spread


def update(state: MonitorState, forecast: Tensor) -> MonitorState:
    """Remember what `forecast` (n, horizon, Q) expects of the next row."""
    return MonitorState(forecast[:, 0, :].to(torch.float32))
