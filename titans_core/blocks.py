"""The blocks of Titans (section 4) and those they are compared with, each a pure function (x, state) -> (y, state).

LMM: the memory alone. MAC: memory as context of segment attention. MAG: memory and sliding window, gated together.
MAL: memory, then sliding window. Attention: full causal; window: sliding window alone. DeepTransformer, SWDT and Dot (ATLAS): a
memory with the exponential kernel as the only token mixer; their states grow with the sequence, as full attention's does.
Every mixer is strictly causal, and one call over T tokens equals any split of it into calls.

Axis letters: B streams, T tokens, D model width, H heads, d = D / H, P persistent tokens, N segment tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import attention, dispatch
from kernels.attention import KeyValues
from kernels.heads import split_heads
from titans_core import state as value
from titans_core.config import BackboneConfig
from titans_core.memory import KernelMemory, Linear, Memory, MemoryState, NeuralMemory, RMSNorm


class SwiGLU(nn.Module):
    """down(SiLU(gate x) * up x)."""

    def __init__(self, dim: int, expansion: float) -> None:
        super().__init__()
        hidden = 8 * round(dim * expansion / 8)
        self.gate_up = Linear(dim, 2 * hidden)
        self.down = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(dispatch.swiglu(self.gate_up(x)))
        return down


class Lmm(nn.Module):
    """A memory as the only token mixer; persistent tokens are written before the first token (papers A.4)."""

    def __init__(self, config: BackboneConfig, kind: str = "lmm") -> None:
        super().__init__()
        self.memory = NeuralMemory(config.memory) if kind == "lmm" else KernelMemory(kind, config.memory)
        self.persistent = nn.Parameter(torch.randn(config.persistent, config.dim) * 0.02)

    def initial_state(self, batch: int) -> Any:
        state = self.memory.initial_state(batch)
        if self.persistent.shape[0] == 0:
            return state
        return self.memory(self.persistent.expand(batch, -1, -1), state)[1]

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return cast("tuple[Tensor, Any]", self.memory(x, state))


def _turned(qkv: Tensor, heads: int, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3 D) -> queries and keys at their positions (1 or B, T), and values, each (B, H, T, d)."""
    width = qkv.shape[-1] // 3
    q, k = dispatch.rope(split_heads(qkv[..., : 2 * width], 2 * heads), position).chunk(2, dim=1)
    return q, k, split_heads(qkv[..., 2 * width :], heads)


def _keys_and_values(x: Tensor, weight: Tensor, heads: int) -> KeyValues:
    """x (B, T, D), weight (2 D, D) -> keys without positions and values (B, H, T, d)."""
    keys, values = dispatch.project(x, weight).chunk(2, dim=-1)
    return KeyValues(split_heads(keys, heads), split_heads(values, heads))


@dataclass(frozen=True)
class AttentionState:
    """Kept keys and values, and how many tokens each stream has had (B,)."""

    past: KeyValues
    seen: Tensor


class Attention(nn.Module):
    """Sliding-window attention over the last `window` tokens with rotary positions and a persistent prefix."""

    def __init__(self, config: BackboneConfig, window: int) -> None:
        super().__init__()
        self.heads, self.window = config.memory.heads, window
        self.qkv = Linear(config.dim, 3 * config.dim)
        self.out = Linear(config.dim, config.dim)
        self.persistent = nn.Parameter(torch.randn(config.persistent, config.dim) * 0.02)

    def initial_state(self, batch: int) -> AttentionState:
        width = self.persistent.shape[1] // self.heads
        past = attention.empty_past(batch, self.heads, self.window - 1, width, self.persistent)
        return AttentionState(past, torch.zeros(batch, dtype=torch.long, device=self.persistent.device))

    def prefix(self) -> KeyValues | None:
        """Keys and values of the persistent tokens (1, H, P, d), without positions."""
        count, dim = self.persistent.shape
        return _keys_and_values(self.persistent[None], self.qkv.weight[dim:], self.heads) if count else None

    def forward(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        position = state.seen[:, None] + torch.arange(x.shape[1], device=x.device)
        q, k, v = _turned(self.qkv(x), self.heads, position)
        y, past = attention.sliding_window(q, k, v, state.past, state.seen, self.prefix())
        return self.out(y.transpose(1, 2).flatten(-2)), AttentionState(past, state.seen + x.shape[1])


@dataclass(frozen=True)
class GrowingState:
    """Every key and value so far (B, H, N, d): the state of full attention grows with the sequence."""

    past: KeyValues


class FullAttention(Attention):
    """Causal attention over everything so far (the Transformer that Titans are compared with)."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config, window=1)

    def initial_state(self, batch: int) -> GrowingState:  # type: ignore[override]
        return GrowingState(super().initial_state(batch).past)

    def forward(self, x: Tensor, state: GrowingState) -> tuple[Tensor, GrowingState]:  # type: ignore[override]
        before, length = state.past.keys.shape[2], x.shape[1]
        q, k, v = _turned(self.qkv(x), self.heads, (before + torch.arange(length, device=x.device))[None])
        keys, values = torch.cat((state.past.keys, k), dim=2), torch.cat((state.past.values, v), dim=2)
        past, mask = KeyValues(keys, values), attention.causal_offsets(length, before, before + length, x.device)
        prefix = self.prefix()
        if prefix is not None:
            shape = (x.shape[0], self.heads, *prefix.keys.shape[2:])
            keys = torch.cat((prefix.keys.expand(shape), keys), dim=2)
            values = torch.cat((prefix.values.expand(shape), values), dim=2)
            mask = F.pad(mask, (shape[2], 0), value=True)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(-2)), GrowingState(past)


@dataclass(frozen=True)
class PairState:
    """The states of a memory branch and of an attention branch."""

    memory: MemoryState
    attention: AttentionState


class Mag(nn.Module):
    """Memory as a gate (Titans eqs 26-28): o = RMSNorm(attention) * sigmoid(RMSNorm(memory)) (papers A.6)."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.memory = Lmm(config)
        self.attention = Attention(config, config.window)
        self.attention_norm, self.memory_norm = RMSNorm(config.dim), RMSNorm(config.dim)

    def initial_state(self, batch: int) -> PairState:
        return PairState(self.memory.initial_state(batch), self.attention.initial_state(batch))

    def forward(self, x: Tensor, state: PairState) -> tuple[Tensor, PairState]:
        m, memory = self.memory(x, state.memory)
        y, window = self.attention(x, state.attention)
        return self.attention_norm(y) * torch.sigmoid(self.memory_norm(m)), PairState(memory, window)


class Mal(nn.Module):
    """Memory as a layer (papers A.7): the sliding window reads what the memory wrote, with a residual between them."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.memory = Lmm(config)
        self.attention = Attention(config, config.window)
        self.norm = RMSNorm(config.dim)

    def initial_state(self, batch: int) -> PairState:
        return PairState(self.memory.initial_state(batch), self.attention.initial_state(batch))

    def forward(self, x: Tensor, state: PairState) -> tuple[Tensor, PairState]:
        m, memory = self.memory(x, state.memory)
        y, window = self.attention(self.norm(x + m), state.attention)
        return m + y, PairState(memory, window)


@dataclass(frozen=True)
class MacState:
    """A MAC stream: its running memory, the memory frozen at the segment's start, and the open segment."""

    memory: MemoryState
    anchor: Memory
    reading: Tensor  # convolution tail of the retrieval queries (B, conv - 1, D)
    context: KeyValues  # keys and values of what was retrieved for each token of the open segment (B, H, N, d)
    segment: KeyValues  # keys and values of those tokens themselves (B, H, N, d)
    place: Tensor  # tokens in the open segment (B,)


class Mac(nn.Module):
    """Memory as context (Titans eqs 21-25), causal by masking (papers A.5, remedy 1).

    Token i of a segment attends to the persistent tokens, to what the memory of the segment's start returned for
    tokens j <= i, and to the tokens j <= i; the result is written token by token, and gated by the read after it.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.heads, self.length = config.memory.heads, config.segment
        self.memory = NeuralMemory(config.memory)
        self.qkv = Linear(config.dim, 3 * config.dim)
        self.out = Linear(config.dim, config.dim)
        self.persistent = nn.Parameter(torch.randn(config.persistent, config.dim) * 0.02)
        self.attention_norm, self.memory_norm = RMSNorm(config.dim), RMSNorm(config.dim)

    def initial_state(self, batch: int) -> MacState:
        memory = self.memory.initial_state(batch)
        width = self.persistent.shape[1] // self.heads

        def open_segment() -> KeyValues:
            return attention.empty_past(batch, self.heads, self.length, width, self.persistent)

        place = torch.zeros(batch, dtype=torch.long, device=self.persistent.device)
        return MacState(memory, memory.memory, memory.conv[..., : self.persistent.shape[1]].clone(), open_segment(), open_segment(), place)

    def forward(self, x: Tensor, state: MacState) -> tuple[Tensor, MacState]:
        places = state.place.unique() if len(x) > 1 else state.place
        if len(places) > 1:  # streams at different places of their segments: those in step go together
            return _in_step(self, x, state, state.place)
        place, outputs, length = int(places[0]), [], x.shape[1]
        # What does not depend on the memory is made for all tokens at once; what is retrieved comes segment by segment.
        position = ((place + torch.arange(length, device=x.device)) % self.length)[None]
        rows, gate, reading = self.memory.queries(x, state.reading)
        weight = self.qkv.weight[x.shape[-1] :]
        fixed = _keys_and_values(self.persistent[None], weight, self.heads)
        fixed = KeyValues(fixed.keys.expand(len(x), -1, -1, -1), fixed.values.expand(len(x), -1, -1, -1))
        first = min(self.length - place, length)
        sizes = [first, *[self.length] * ((length - first) // self.length)]
        sizes += [rest] if (rest := length - sum(sizes)) else []
        parts = [part.split(sizes, dim=2) for part in (*_turned(self.qkv(x), self.heads, position), rows)]
        for *own, gate_part, at in zip(*parts, gate.split(sizes, dim=1), position.split(sizes, dim=1), strict=True):
            retrieved = _keys_and_values(self.memory.read(own[3], gate_part, state.anchor), weight, self.heads)
            retrieved = KeyValues(dispatch.rope(retrieved.keys, at), retrieved.values)
            y, state = self._within(own[0], KeyValues(own[1], own[2]), retrieved, fixed, state, place)
            outputs.append(y)
            place = (place + at.shape[1]) % self.length
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], replace(state, reading=reading)

    def prefix(self) -> KeyValues:
        """Keys and values of the persistent tokens (1, H, P, d), without positions."""
        return _keys_and_values(self.persistent[None], self.qkv.weight[self.persistent.shape[1] :], self.heads)

    def _within(
        self, q: Tensor, own: KeyValues, retrieved: KeyValues, fixed: KeyValues, state: MacState, place: int
    ) -> tuple[Tensor, MacState]:
        """Queries (B, H, T, d) of tokens that all lie in the open segment, the first at `place`; their own keys and values, and those of what was
        retrieved for them."""
        (k, v), (k_read, v_read), length = own, retrieved, q.shape[2]
        end = place + length
        context, segment = state.context, state.segment
        if length < self.length:  # a whole segment at once leaves nothing to remember: the next one begins at slot 0
            context, segment = _fill(context, k_read, v_read, place), _fill(segment, k, v, place)
            k_read, v_read = context.keys[:, :, :end], context.values[:, :, :end]
            k, v = segment.keys[:, :, :end], segment.values[:, :, :end]
        keys = torch.cat((fixed.keys, k_read, k), dim=2)
        values = torch.cat((fixed.values, v_read, v), dim=2)
        mask = None  # one token sees all that is there
        if length > 1:
            causal = attention.causal_offsets(length, place, end, q.device)
            mask = torch.cat((causal.new_ones(length, fixed.keys.shape[2]), causal, causal), dim=1)
        y = self.out(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(1, 2).flatten(-2))
        m, memory = self.memory(y, state.memory)
        o = self.attention_norm(y) * torch.sigmoid(self.memory_norm(m))
        full = end == self.length
        anchor = memory.memory if full else state.anchor
        places = torch.full_like(state.place, 0 if full else end)
        return o, MacState(memory, anchor, state.reading, context, segment, places)


def _fill(cache: KeyValues, keys: Tensor, values: Tensor, place: int) -> KeyValues:
    """A cache with new entries from `place` on; later slots keep whatever they hold, the mask hides them."""
    filled = KeyValues(cache.keys.clone(), cache.values.clone())
    for held, new in zip(filled, (keys, values), strict=True):
        held[:, :, place : place + new.shape[2]] = new
    return filled


def _in_step(mixer: nn.Module, x: Tensor, state: Any, place: Tensor) -> tuple[Tensor, Any]:
    """Advance streams at different places of their segments: one call for each group of streams at the same place."""
    y, after = torch.empty_like(x), state
    for each in place.unique():
        index = (place == each).nonzero(as_tuple=True)[0]
        part, moved = mixer(x.index_select(0, index), value.select(state, index))
        y, after = y.index_copy(0, index, part), value.replace(after, index, moved)
    return y, after


def _mixer(kind: str, config: BackboneConfig) -> nn.Module:
    if kind == "window":
        return Attention(config, config.window)
    if kind in ("lmm", "deep_transformer", "swdt", "dot"):
        return Lmm(config, kind)
    return {"mac": Mac, "mag": Mag, "mal": Mal, "attention": FullAttention}[kind](config)


class Block(nn.Module):
    """x + mixer(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)) (papers A.8)."""

    def __init__(self, kind: str, config: BackboneConfig) -> None:
        super().__init__()
        self.mixer = _mixer(kind, config)
        self.feed_forward = SwiGLU(config.dim, config.feed_forward)
        self.mixer_norm, self.feed_forward_norm = RMSNorm(config.dim), RMSNorm(config.dim)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer(self.mixer_norm(x), state)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), state


class Backbone(nn.Module):
    """A stack of blocks over embedded tokens; the state is a tuple with one entry a block."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(kind, config) for kind in config.layers)
        self.norm = RMSNorm(config.dim)

    def initial_state(self, batch: int) -> tuple[Any, ...]:
        """Streams that have seen nothing but the persistent tokens."""
        return tuple(cast(Block, block).mixer.initial_state(batch) for block in self.blocks)  # type: ignore[operator]

    def forward(self, x: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """x (B, T, D) -> y (B, T, D) and the state after the last token."""
        after = []
        for block, part in zip(self.blocks, state, strict=True):
            x, moved = block(x, part)
            after.append(moved)
        return self.norm(x), tuple(after)
