"""NeuralMemory: a layer whose memory keeps learning, as a pure function of (tokens, state).

Projections, short convolutions and gates are trained; what learns at test time is the state that goes in and comes
out. Nothing here needs autograd to write, so the layer gives the same numbers under `torch.inference_mode()`.

Axis letters: B streams, T tokens, D model width, H heads, d = D / H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import linear
from kernels.linear import MatrixState, StaleState
from titans_core.config import MemoryConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


def unit(x: Tensor) -> Tensor:
    """Rows of length one; a zero row stays zero, with a finite gradient (papers E.6.5)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class CausalConv(nn.Module):
    """Depthwise causal convolution; the last size - 1 inputs are carried from call to call (B, size - 1, channels)."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.zeros(size, channels))
        with torch.no_grad():
            self.weight[-1] = 1.0  # starts as the identity
            self.weight.add_(torch.randn(size, channels) * 0.02)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, channels), tail -> (y, next tail)."""
        if self.size == 1:
            return x * self.weight[0], tail
        padded = torch.cat((tail, x), dim=1)
        length = x.shape[1]
        y = padded[:, :length] * self.weight[0]
        for lag in range(1, self.size):
            y = y + padded[:, lag : lag + length] * self.weight[lag]
        return y, padded[:, length:]


Memory = MatrixState | StaleState


@dataclass(frozen=True)
class MemoryState:
    """All that a NeuralMemory learns at test time: the memory itself and the convolution's last inputs."""

    memory: Memory
    conv: Tensor  # (B, conv - 1, 3 D)


class NeuralMemory(nn.Module):
    """Long-term memory layer (Titans section 3.1; defaults of papers A.1, A.8 and E.2).

    Keys and queries: linear, convolution, SiLU, unit length. Values: linear, convolution, SiLU.
    Gates per token and head: alpha = sigmoid (forget), eta = sigmoid (momentum decay) and
    theta = (1 - eta) * sigmoid, the bound inside which the exact form stays finite for unit keys.
    Output: per-head RMSNorm, gate SiLU(x W_g), projection.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        dim, heads, width = config.dim, config.heads, config.width
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = CausalConv(3 * dim, config.conv)
        self.gates = nn.Linear(dim, 3 * heads)
        self.gate = nn.Linear(dim, dim, bias=False)
        self.norm = RMSNorm(width)
        self.out = nn.Linear(dim, dim, bias=False)
        self.init = nn.Parameter(torch.zeros(heads, width, width))
        nn.init.zeros_(self.gates.weight)
        with torch.no_grad():  # alpha 0.02, eta 0.5, sigmoid of theta 0.5
            bias = torch.tensor([math.log(0.02 / 0.98), 0.0, 0.0])
            self.gates.bias.copy_(bias.repeat_interleave(heads))

    def initial_state(self, batch: int) -> MemoryState:
        """Streams that have seen nothing: the learned initial memory, no momentum, an empty convolution."""
        start = torch.zeros_like(self.init) if self.config.decay_to_init else self.init
        tail = self.init.new_zeros(batch, self.config.conv - 1, 3 * self.config.dim)
        fresh = linear.matrix_state if self.config.rule == "exact" else linear.stale_state
        return MemoryState(fresh(start, batch), tail)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, d)."""
        return x.unflatten(-1, (self.config.heads, self.config.width)).transpose(1, 2)

    def _output(self, y: Tensor, x: Tensor) -> Tensor:
        """Reads (B, H, T, d) and layer input (B, T, D) -> layer output (B, T, D)."""
        normed: Tensor = self.norm(y).transpose(1, 2).flatten(-2)
        out: Tensor = self.out(normed * F.silu(self.gate(x)))
        return out

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """theta, eta, alpha (B, H, T), in float32 or finer whatever the layer's type is (papers E.6.4)."""
        gates = self.gates(x)
        gates = torch.sigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        alpha, eta, theta = gates.transpose(1, 2).chunk(3, dim=1)
        eta = eta if self.config.momentum else torch.zeros_like(eta)
        alpha = alpha if self.config.decay else torch.zeros_like(alpha)
        # E.2: a gradient taken at the chunk's start is used for up to `chunk` tokens, so its step has to be that much smaller.
        theta = (1 - eta) * theta / (1 if self.config.rule == "exact" else self.config.chunk)
        return theta, eta, alpha

    def forward(self, x: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Write T tokens and read after each write. x (B, T, D) -> y (B, T, D) and the state after the last token."""
        mixed, tail = self.conv(self.qkv(x), state.conv)
        q, k, v = (self._heads(part) for part in F.silu(mixed).chunk(3, dim=-1))
        q, k = unit(q), unit(k)
        theta, eta, alpha = self._gates(x)
        if self.config.decay_to_init:
            # The memory holds the deviation D = W - W_0, which is what forgetting shrinks: D k - (v - W_0 k) = W k - v.
            v = v - k @ self.init.mT
        memory: Memory
        if isinstance(state.memory, StaleState):
            y, memory = linear.linear_stale(q, k, v, theta, eta, alpha, state.memory, chunk=self.config.chunk)
        else:
            y, memory = linear.linear_exact(q, k, v, theta, eta, alpha, state.memory, chunk=self.config.chunk)
        if self.config.decay_to_init:
            y = y + q @ self.init.mT
        return self._output(y, x), MemoryState(memory, tail)

    def read(self, x: Tensor, memory: Memory, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Read without a write: queries of x (B, T, D) against one fixed memory.

        tail is the convolution's tail of the reading sequence, which the caller carries (B, conv - 1, 3 D).
        """
        mixed, tail = self.conv(self.qkv(x), tail)
        q = unit(self._heads(F.silu(mixed).chunk(3, dim=-1)[0]))
        weights = memory.W + self.init if self.config.decay_to_init else memory.W
        return self._output(q @ weights.mT, x), tail
