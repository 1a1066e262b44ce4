"""The smallest model that learns on streams: an exponential running mean and spread. For tests of the engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipelines.streaming.engine import StreamModel


class ToyState(NamedTuple):
    mean: Tensor
    spread: Tensor
    count: Tensor
    noise: Tensor
    """(n, 8, 8): makes the state as large as to spill, and every bit depend on the order of the rows."""


class ToyMemory:
    horizon = 3
    rate = 0.1

    def initial_state(self, n: int) -> ToyState:
        return ToyState(torch.zeros(n), torch.ones(n), torch.zeros(n, dtype=torch.int64), torch.zeros(n, 8, 8))

    def observe(self, state: ToyState, y: Tensor, observed: Tensor, phase: Tensor) -> ToyState:
        mean, spread, count, noise = state
        for t in range(y.shape[1]):
            value, seen = y[:, t].float(), observed[:, t]
            error = value - mean
            moved = torch.where(count == 0, value, mean + self.rate * error)
            mean = torch.where(seen, moved, mean)
            spread = torch.where(seen, spread + self.rate * (error.abs() - spread), spread)
            noise = 0.9 * noise + torch.where(seen, error, 0.0)[:, None, None] * torch.sin(torch.arange(64.0)).view(
                8, 8
            )
            count = count + 1
        return ToyState(mean, spread, count, noise)

    def forecast(self, state: ToyState, future_phase: Tensor) -> Tensor:
        steps = torch.arange(1, future_phase.shape[1] + 1)
        width = state.spread[:, None] * steps.sqrt()
        middle = state.mean[:, None] + 0.0 * future_phase[:, :, 0] + state.noise.mean((1, 2))[:, None] * 1e-3
        return torch.stack([middle - width, middle, middle + width], dim=-1)


def toy_model(frequency: str = "1m", version: str = "toy/1") -> StreamModel:
    def phase(ds: np.ndarray) -> np.ndarray:
        return np.stack([np.sin(ds / 3.6e9), np.cos(ds / 3.6e9)], axis=-1).astype(np.float32)

    return StreamModel(ToyMemory(), version, frequency, ToyMemory.horizon, (0.1, 0.5, 0.9), phase)
