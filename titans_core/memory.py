"""NeuralMemory: a layer whose memory keeps learning, as a pure function of (tokens, state).

Projections, short convolutions and gates are trained; what learns at test time is the state that goes in and comes
out. Nothing here needs autograd to write, so the layer gives the same numbers under `torch.inference_mode()`.

Axis letters: B streams, T tokens, D model width, H heads, d = D / H.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import dispatch, linear, native
from kernels.features import polynomial, taylor_coefficients
from kernels.heads import convolve, next_tail, split_heads, unit
from kernels.kernel_memory import KernelState, deep_transformer, dot, swdt
from kernels.linear import MatrixState, StaleState
from kernels.mlp import DeepState, deep_state
from kernels.muon import AtlasState, atlas_state
from kernels.native import training
from kernels.network import Network, output
from kernels.omega import OmegaState, omega_state
from titans_core.config import MemoryConfig
from titans_core.state import leaves

MUON_STEP = 0.02  # bound of theta for Muon, whose writes have a spectral norm of about theta whatever the surprise (papers B.4)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return dispatch.rms_norm(x, self.weight)


class Linear(nn.Linear):
    """A linear map without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return dispatch.project(x, self.weight)


class CausalConv(nn.Module):
    """Depthwise causal convolution; the last size - 1 inputs are carried from call to call (B, size - 1, channels)."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, channels))
        with torch.no_grad():
            self.weight[-1] = 1.0  # starts as the identity
            self.weight.add_(torch.randn(size, channels) * 0.02)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, channels), tail -> (y, next tail)."""
        return convolve(x, tail, self.weight), next_tail(x, tail)


Memory = MatrixState | OmegaState | StaleState | DeepState | AtlasState


@dataclass(frozen=True)
class MemoryState:
    """All that a NeuralMemory learns at test time: the memory itself and the convolution's last inputs."""

    memory: Memory
    conv: Tensor  # (B, conv - 1, 3 D)


def _lags(config: MemoryConfig) -> nn.Linear:
    """The window's gates: one a head and lag, the newest token's open, older ones less and less (papers B.2)."""
    lags = nn.Linear(config.dim, config.heads * config.window)
    nn.init.zeros_(lags.weight)
    with torch.no_grad():
        lags.bias.copy_(torch.linspace(2.0, -2.0, config.window).repeat(config.heads))
    return lags


def _window(lags: nn.Linear, x: Tensor, config: MemoryConfig) -> Tensor:
    """gamma (B, H, T, window) of tokens x (B, T, D)."""
    return torch.sigmoid(lags(x)).unflatten(-1, (config.heads, config.window)).transpose(1, 2)


def _window_bound(gamma: Tensor) -> Tensor:
    """(B, H, T): a write descends the sum of its window's losses; undivided, the step of one token's would diverge on equal keys."""
    return gamma.sum(-1).clamp(min=1.0)


class NeuralMemory(nn.Module):
    """Long-term memory layer (Titans section 3.1; defaults of papers A.1, A.8 and E.2).

    Keys and queries: linear, convolution, SiLU, unit length, polynomial features if any (times the root of their number for an
    MLP memory, which unit keys would keep in its linear zone). Values: linear, convolution, SiLU. Gates per token, head and memory
    layer: alpha = sigmoid (forget; one for each channel of a head if asked), eta = sigmoid (momentum decay),
    theta = (1 - eta) * sigmoid, the bound inside which the exact form stays finite for unit keys, divided by the chunk where the gradient
    is taken at the chunk's start, by the squared length of longer keys, and by the sum of the window's gates.
    Muon writes the direction of the momentum alone: its theta is sigmoid * min(0.02, 1 / chunk).
    Output: per-head RMSNorm, gate SiLU(x W_g), projection.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        dim, heads, width = config.dim, config.heads, config.width
        self.qkv = Linear(dim, 3 * dim)
        self.conv = CausalConv(3 * dim, config.conv)
        self.matrix, gated = config.matrix, config.rule in ("gated", "atlas++")
        if gated:
            shapes = [(config.expansion * width, config.features)] * 2 + [(width, config.expansion * width)]
        else:
            hidden = 0 if self.matrix else config.depth - 1
            sizes = [config.features, *[config.expansion * width] * hidden, width]
            shapes = list(zip(sizes[1:], sizes[:-1], strict=True))
        self.init = nn.ParameterList(
            torch.zeros(heads, *shape) if self.matrix else torch.randn(heads, *shape) / math.sqrt(shape[1]) for shape in shapes
        )
        hybrid = config.rule == "hybrid"
        # Features have another width than values: the residual then goes around them, from the key itself (papers B.3).
        residual = config.degree == 1 and not self.matrix
        norm = not (hybrid or self.matrix)
        self.network = Network(norm=norm, residual=residual, gated=gated, loss=config.loss, unit_hidden=hybrid)
        self.outer_residual = not self.matrix and config.degree > 1
        self.length = 1.0 if self.matrix or config.degree > 1 else math.sqrt(width)  # of a key and a query
        if config.degree > 1:
            self.coefficients = nn.Parameter(taylor_coefficients(config.degree).repeat(heads, 1))
        self.layers = len(shapes)
        self.forgets = width if config.forget == "channel" else self.layers  # alphas a head
        counts = [heads * self.forgets, heads * self.layers, heads * self.layers]
        self.gates = nn.Linear(dim, sum(counts))
        nn.init.zeros_(self.gates.weight)
        with torch.no_grad():  # alpha 0.02, eta 0.5, sigmoid of theta 0.5
            self.gates.bias.copy_(torch.cat([torch.full((n,), x) for n, x in zip(counts, (math.log(0.02 / 0.98), 0.0, 0.0), strict=True)]))
        if config.window > 1:
            self.lags = _lags(config)
        self.gate = Linear(dim, dim)
        self.norm = RMSNorm(width)
        self.out = Linear(dim, dim)

    def initial_state(self, batch: int) -> MemoryState:
        """Streams that have seen nothing: the learned initial memory, no momentum, an empty convolution."""
        config, init = self.config, tuple(self.init)
        tail = init[0].new_zeros(batch, config.conv - 1, 3 * config.dim)
        if config.muon:
            return MemoryState(atlas_state(init, batch, config.window), tail)
        if not self.matrix:
            return MemoryState(deep_state(init, batch, config.window), tail)
        start = torch.zeros_like(init[0]) if config.decay_to_init else init[0]
        if config.rule == "exact" and config.window > 1:
            return MemoryState(omega_state(start, batch, config.window), tail)
        if config.rule == "exact":
            return MemoryState(linear.matrix_state(start, batch), tail)
        return MemoryState(linear.stale_state(start, batch, config.window), tail)

    def _features(self, rows: Tensor) -> Tensor:
        """What the memory sees of keys or queries (B, H, T, d): (B, H, T, features)."""
        if self.config.degree == 1:
            return rows
        rows = polynomial(rows, self.coefficients)
        return rows if self.matrix else rows * math.sqrt(self.config.features)

    def _residual(self, rows: Tensor) -> Tensor:
        """What an MLP over features adds to unit queries' reads, and regresses beside for unit keys (B, H, T, d)."""
        return rows * math.sqrt(self.config.width)

    def _output(self, y: Tensor, gate: Tensor) -> Tensor:
        """Reads (B, H, T, d) and the output gate (B, T, D) -> layer output (B, T, D)."""
        out: Tensor = self.out(dispatch.gated_norm(y, gate, self.norm.weight))
        return out

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """theta, eta, alpha: (B, H, T), or (B, H, T, layers) for an MLP; alpha (B, H, T, d) channel-wise; in float32 or finer (papers E.6.4)."""
        config = self.config
        gates = self.gates(x)
        gates = torch.sigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        alpha, eta, theta = (
            part.unflatten(-1, (config.heads, -1)).transpose(1, 2)  # (B, H, T, gates a head)
            for part in gates.split([config.heads * n for n in (self.forgets, self.layers, self.layers)], -1)
        )
        if self.matrix:
            eta, theta, alpha = eta.squeeze(-1), theta.squeeze(-1), alpha if config.forget == "channel" else alpha.squeeze(-1)
        if config.muon:  # S is not scaled by theta, so momentum does not lengthen a write; a chunk moves no weight by more than one
            theta = theta * min(MUON_STEP, 1 / config.chunk)
        else:
            theta = (1 - eta) * theta if config.momentum else theta
            # E.2: a gradient taken at the chunk's start serves up to `chunk` tokens, so its step has to be that much smaller.
            # The gradient of the dot product on a matrix is the same everywhere.
            anchored = config.rule != "exact" and not (self.matrix and config.loss == "dot")
            theta = theta / ((config.chunk if anchored else 1) * (1 if self.matrix else config.features))
        return theta, eta if config.momentum else None, alpha if config.decay else None

    def forward(self, x: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Write T tokens and read at each. x (B, T, D) -> y (B, T, D) and the state after the last token."""
        config = self.config
        if x.shape[1] > 1 and (form := self.native_form(x, state)):  # one token costs less part by part, and least in `in_place`
            return self._whole(x, state, form)
        u = self.qkv(x)
        q_rows, k_rows, v = dispatch.conv_heads(u, state.conv, self.conv.weight, config.heads, self.length)
        q, k, tail = self._features(q_rows), self._features(k_rows), next_tail(u, state.conv)
        theta, eta, alpha = self._gates(x)
        gamma = None
        if config.window > 1:
            gamma = _window(self.lags, x, config)
            if not config.muon:
                total = _window_bound(gamma)
                theta = theta / (total if self.matrix else total.unsqueeze(-1))
        old, memory = state.memory, state.memory
        init = tuple(self.init) if config.decay_to_init else None
        if self.outer_residual and config.loss == "l2":
            v = v - self._residual(k_rows)
        # A matrix memory with gradients holds its deviation D = W - W_0, which is what forgetting shrinks: D k - (v - W_0 k) = W k - v.
        deviation = init is not None and not isinstance(old, DeepState | AtlasState)
        if deviation and config.loss == "l2":
            v = v - k @ self.init[0].mT
        if isinstance(old, AtlasState):
            y, memory = dispatch.atlas(
                q, k, v, theta, eta, alpha, old, init=init, chunk=config.chunk, every=config.muon_every,
                network=self.network, read=config.read, gamma=gamma,
            )  # fmt: skip
            # Until its first write a chunk's weights are its anchor, one tensor: a state that is saved or moved holds each by itself.
            memory = memory._replace(anchor=tuple(a.clone() for a in memory.anchor))
        elif isinstance(old, DeepState):
            y, memory = dispatch.deep(
                q, k, v, theta, eta, alpha, old, init=init, chunk=config.chunk,
                network=self.network, read=config.read, gamma=gamma, exact_last=config.rule == "hybrid",
                precision=config.precision,
            )  # fmt: skip
        elif isinstance(old, StaleState):
            y, memory = dispatch.linear_stale(
                q, k, v, theta, eta, alpha, old, chunk=config.chunk, read=config.read, gamma=gamma, loss=config.loss
            )  # fmt: skip
        elif isinstance(old, OmegaState):
            assert gamma is not None
            chunk = max(1, config.chunk // config.window)  # a chunk solves a row for each token and lag; the result is the same
            y, memory = dispatch.omega_exact(q, k, v, theta, eta, alpha, gamma, old, chunk=chunk, read=config.read)
        else:
            y, memory = dispatch.linear_exact(
                q, k, v, theta, eta, alpha, old, chunk=config.chunk, read=config.read, decayed_error=config.decayed_error,
                precision=config.precision,
            )  # fmt: skip
        if deviation:
            y = y + q @ self.init[0].mT
        if self.outer_residual:
            y = y + self._residual(q_rows)
        return self._output(y, self.gate(x)), MemoryState(memory, tail)

    def _whole(self, x: Tensor, state: MemoryState, form: native.Form) -> tuple[Tensor, MemoryState]:
        """`forward` as one native function, gradients included."""
        assert isinstance(state.memory, MatrixState | DeepState)
        y, memory, tail = training.layer(x, state.conv, state.memory, self.native_weights(), self.native_init(), form)
        return y, MemoryState(memory, tail)

    def in_place(self) -> Callable[[Tensor, MemoryState], Tensor]:
        """A function (x, state) -> y that overwrites the tensors of the state, for a service that owns its states; no autograd.

        The numbers are those of `forward`, to rounding. Where the native kernels take the rule, the whole layer is one call; elsewhere it
        is `forward`, copied over the state. The weights are those of now: make it anew when they change.
        """
        form = self.native_form(self.qkv.weight[None], self.initial_state(1))
        layer = None if form is None else native.Layer(self.native_weights(), self.native_init(), form)

        @torch.inference_mode()
        def step(x: Tensor, state: MemoryState) -> Tensor:
            if layer is not None:
                assert isinstance(state.memory, MatrixState | DeepState)
                return layer(x.contiguous(), state.conv, state.memory)
            y, after = self.forward(x, state)
            moved = [leaf.clone() for _, leaf in leaves(after)]  # parts of the new state may still be tensors of the old one
            for (_, old), new in zip(leaves(state), moved, strict=True):
                old.copy_(new)
            return y

        return step

    def native_form(self, x: Tensor, state: MemoryState) -> native.Form | None:
        """This layer as the native kernels see it, or None where they do not run, are not asked for, or do not know the rule or the tensors."""
        config = self.config
        plain = config.window == 1 and config.degree == 1 and config.loss == "l2" and not config.decayed_error and config.forget == "head"
        matrix = config.rule == "exact"
        deep = config.rule == "deep" and config.depth == 2
        tensors = (x, state.conv, *self.parameters(), *(leaf for _, leaf in leaves(state) if leaf.is_floating_point()))
        if not (plain and (matrix or deep)) or config.conv > dispatch.NATIVE_TAPS or x.numel() == 0:
            return None
        if dispatch.forced() not in (None, "native") or native.supports(*tensors):
            return None
        return native.Form(
            heads=config.heads, scale=self.length, divisor=1.0 if matrix else config.chunk * config.features, chunk=config.chunk,
            network=self.network, read=config.read, momentum=config.momentum, decay=config.decay, precision=config.precision,
        )  # fmt: skip

    def native_weights(self) -> tuple[Tensor, ...]:
        """The weights as the native kernels take them."""
        return (
            self.qkv.weight, self.gate.weight, self.gates.weight, self.gates.bias, self.conv.weight, self.norm.weight, self.out.weight
        )  # fmt: skip

    def native_init(self) -> tuple[Tensor, ...] | None:
        """What the memory decays towards, None: zero."""
        return tuple(self.init) if self.config.decay_to_init else None

    def queries(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `read` needs of x (B, T, D): rows (B, H, T, d), the output gate (B, T, D), and the tail after x.

        tail is the convolution's tail of the reading sequence, which the caller carries (B, conv - 1, D): queries alone are made.
        """
        dim = self.config.dim
        u = dispatch.project(x, self.qkv.weight[:dim])
        mixed = convolve(u, tail, self.conv.weight[:, :dim])
        return unit(split_heads(F.silu(mixed), self.config.heads)) * self.length, self.gate(x), next_tail(u, tail)

    def read(self, rows: Tensor, gate: Tensor, memory: Memory) -> Tensor:
        """Read without a write: `queries` against one fixed memory -> (B, T, D)."""
        q = self._features(rows)
        if isinstance(memory, DeepState | AtlasState):
            y = output(memory.W, q, self.network)
        else:
            y = q @ (memory.W + self.init[0] if self.config.decay_to_init else memory.W).mT
        if self.outer_residual:
            y = y + self._residual(rows)
        return self._output(y, gate)


@dataclass(frozen=True)
class KernelMemoryState:
    """A row for each token so far, and the convolution's last inputs."""

    memory: KernelState
    conv: Tensor  # (B, conv - 1, 3 D)


class KernelMemory(nn.Module):
    """A matrix memory over the infinite features of exp: DeepTransformer, SWDT or Dot (ATLAS section 4; papers B.6), in exact form.

    Projections, convolution and output are those of NeuralMemory. Keys and queries have unit length, and tau, learned by head, scales
    their product: the kernel is exp(tau q.k). Gates of Dot, per token and head: alpha = sigmoid (forget), theta = sigmoid / exp(tau),
    divided by the sum of the window's gates: the bound of unit keys, for keys whose squared length is exp(tau).
    The state holds a key, a row and a value of every token, as full attention's does; so does SWDT's, whose window says how often
    a token is written and not how long it is kept.
    """

    def __init__(self, kind: str, config: MemoryConfig) -> None:
        super().__init__()
        self.kind, self.config = kind, config
        dim, heads = config.dim, config.heads
        self.qkv = Linear(dim, 3 * dim)
        self.conv = CausalConv(3 * dim, config.conv)
        self.log_tau = nn.Parameter(torch.zeros(heads))
        if kind == "dot":
            self.gates = nn.Linear(dim, (1 + config.decay) * heads)
            nn.init.zeros_(self.gates.weight)
            with torch.no_grad():  # sigmoid of theta 0.5, alpha 0.02
                self.gates.bias.copy_(torch.tensor([0.0, math.log(0.02 / 0.98)])[: 1 + config.decay].repeat_interleave(heads))
        if kind == "swdt" or (kind == "dot" and config.window > 1):
            self.lags = _lags(config)
        self.gate = Linear(dim, dim)
        self.norm = RMSNorm(config.width)
        self.out = Linear(dim, dim)

    def initial_state(self, batch: int) -> KernelMemoryState:
        """Streams that have seen nothing."""
        config = self.config
        keys, rows, values = (self.log_tau.new_zeros(batch, config.heads, 0, config.width) for _ in range(3))
        return KernelMemoryState(KernelState(keys, rows, values), keys.new_zeros(batch, config.conv - 1, 3 * config.dim))

    def forward(self, x: Tensor, state: KernelMemoryState) -> tuple[Tensor, KernelMemoryState]:
        """Write T tokens and read at each. x (B, T, D) -> y (B, T, D) and the state after the last token."""
        config, u = self.config, self.qkv(x)
        q, k, v = dispatch.conv_heads(u, state.conv, self.conv.weight, config.heads, 1.0)
        tau = self.log_tau.exp()[:, None, None]
        q, k = q * tau.sqrt(), k * tau.sqrt()
        gamma = None
        if hasattr(self, "lags"):
            gamma = _window(self.lags, x, config)
        if self.kind == "dot":
            gates = self.gates(x)
            gates = torch.sigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
            theta, *forget = gates.unflatten(-1, (-1, config.heads)).permute(2, 0, 3, 1)  # each (B, H, T)
            theta = theta / tau.squeeze(-1).exp()
            if gamma is not None:
                theta = theta / _window_bound(gamma)
            y, memory = dot(q, k, v, theta, forget[0] if forget else None, state.memory, gamma=gamma)
        elif gamma is not None:
            y, memory = swdt(q, k, v, gamma, state.memory)
        else:
            y, memory = deep_transformer(q, k, v, state.memory)
        out = self.out(dispatch.gated_norm(y, self.gate(x), self.norm.weight))
        return out, KernelMemoryState(memory, next_tail(u, state.conv))
