"""One token of a language model's blocks, in place: what generating text runs, where a forward pass over one token is mostly overhead.

Blocks of the mixers lmm, window, mag, mal and mac with a memory that the native kernels know are one native call each; every other block
is its forward pass. The numbers are those of the forward pass, to rounding.

Axis letters: B streams, D model width, H heads, d = D / H, P persistent tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from kernels import attention, dispatch, native
from kernels.linear import MatrixState
from kernels.mlp import DeepState
from kernels.native.decoding import BlockStep, norm_times
from titans_core.blocks import Attention, Backbone, Block, Lmm, Mac, Mag, Mal
from titans_core.memory import Memory, MemoryState, NeuralMemory

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
Parts = tuple[list[Tensor], list[Tensor]]  # the numbers and the counters of a state, as BlockStep takes them


@torch.inference_mode()
def in_place(backbone: Backbone) -> Step:
    """A function (x (B, D), state) -> (what the head reads (B, D) before the last norm, state after the token).

    It overwrites x and the tensors of the state, which must not be used again: the caller owns them, each its own memory (`state.owned`).
    The weights are those of now: make it anew when they change.
    """
    steps = [_native(cast(Block, block)) or _forward(cast(Block, block)) for block in backbone.blocks]

    @torch.inference_mode()
    def run(x: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        after = []
        for step, part in zip(steps, state, strict=True):
            x, moved = step(x, part)
            after.append(moved)
        return x, tuple(after)

    return run


def head(x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm and the head: x (B, D) -> (B, V)."""
    if dispatch.forced() in (None, "native") and not native.supports(x, norm, weight):
        return norm_times(x, norm, weight)
    return torch.nn.functional.linear(torch.nn.functional.rms_norm(x, norm.shape, norm, 1e-6), weight)


def _forward(block: Block) -> Step:
    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = block(x[:, None], state)
        return y[:, 0], after

    return step


def _native(block: Block) -> Step | None:
    """The block as one native call, or None where its mixer, its memory or its tensors are not native."""
    mixer = block.mixer
    kinds = {Lmm: "lmm", Attention: "window", Mag: "mag", Mal: "mal", Mac: "mac"}
    kind, weights = kinds.get(type(mixer)), [*block.parameters()]
    if kind is None or dispatch.forced() not in (None, "native") or native.supports(*weights):
        return None
    memory = mixer.memory if isinstance(mixer, Lmm | Mac) else mixer.memory.memory if isinstance(mixer, Mag | Mal) else None
    if memory is not None and not isinstance(memory, NeuralMemory):
        return None
    form = None if memory is None else memory.native_form(block.mixer_norm.weight[None, None], memory.initial_state(1))
    if memory is not None and form is None:
        return None
    attend: Attention | Mac | None = mixer if isinstance(mixer, Attention | Mac) else mixer.attention if isinstance(mixer, Mag | Mal) else None
    given = [block.mixer_norm.weight, block.feed_forward_norm.weight, block.feed_forward.gate_up.weight, block.feed_forward.down.weight]
    heads = form.heads if form is not None else 1
    if attend is not None:
        heads, width = attend.heads, block.mixer_norm.weight.shape[0] // attend.heads
        fixed = attend.prefix() or attention.empty_past(1, heads, 0, width, attend.persistent)
        frequency = attention.frequencies(width, attend.persistent.device)
        given += [attend.qkv.weight, attend.out.weight, frequency, *(each.contiguous() for each in fixed)]
    if isinstance(mixer, Mag | Mac):
        given += [mixer.attention_norm.weight, mixer.memory_norm.weight]
    elif isinstance(mixer, Mal):
        given += [mixer.norm.weight]
    if memory is not None:
        given += [*memory.native_weights(), *(memory.native_init() or ())]
    call = BlockStep(kind, heads, given, form)
    parts = _PARTS[kind]

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        call(x, *parts(state))
        return x, state

    return step


def _memory(memory: Memory) -> Parts:
    if isinstance(memory, DeepState):
        return [*memory.W, *memory.S, *memory.anchor], [memory.phase]
    assert isinstance(memory, MatrixState)
    return [memory.W, memory.S], []


def _lmm(state: MemoryState) -> Parts:
    numbers, counts = _memory(state.memory)
    return [state.conv, *numbers], counts


def _window(state: Any) -> Parts:
    return [*state.past], [state.seen]


def _pair(state: Any) -> Parts:
    numbers, counts = _lmm(state.memory)
    return [*state.attention.past, *numbers], [state.attention.seen, *counts]


def _mac(state: Any) -> Parts:
    numbers, counts = _lmm(state.memory)
    anchor, phase = _memory(state.anchor)
    return [*state.segment, *state.context, state.reading, *numbers, *anchor], [state.place, *counts, *phase]


_PARTS: dict[str, Callable[[Any], Parts]] = {"lmm": _lmm, "window": _window, "mag": _pair, "mal": _pair, "mac": _mac}
