"""One token in place is the forward pass: every mixer and memory, batches of streams at different places, native or not."""

from __future__ import annotations

import pytest
import torch

from kernels import native
from titans_core import decoding
from titans_core import state as value
from titans_core.blocks import MacState
from titans_core.language_model import LanguageModel, configure
from titans_core.state import leaves, owned

NATIVE = [(layers, memory) for layers in ("lmm", "window", "mag", "mal", "mac") for memory in ("exact", "titans")]
OTHERS = [("attention", "exact"), ("mag", "omega_net"), ("dot", "exact")]
SHAPES = {  # widths of heads, windows, and what is left out
    "plain": {"chunk": 8, "attention_window": 8, "segment": 8, "persistent": 2},
    "odd": {"heads": 4, "chunk": 4, "attention_window": 1, "segment": 3, "persistent": 0, "conv": 1, "momentum": False, "decay": False},
    "to zero": {"chunk": 8, "attention_window": 70, "segment": 70, "persistent": 1, "decay_to_init": False, "read": "before"},
}


def build(layers: str, memory: str, **settings: object) -> LanguageModel:
    torch.manual_seed(1)
    model = LanguageModel(configure("tiny", 70, layers=layers, memory=memory, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def held(state: tuple[object, ...]) -> dict[str, torch.Tensor]:
    """What a state says: the slots of an open segment behind its last token hold nothing."""
    found = dict(leaves(state))
    for number, part in enumerate(state):
        if isinstance(part, MacState):
            for row, place in enumerate(part.place.tolist()):
                for name in ("segment", "context"):
                    for which in ("keys", "values"):
                        found[f"{number}.{name}.{which}"] = found[f"{number}.{name}.{which}"].clone()
                        found[f"{number}.{name}.{which}"][row, :, place:] = 0
    return found


@pytest.mark.parametrize("layers, memory, shape, kernels", [
    *[(layers, memory, "plain", "") for layers, memory in NATIVE + OTHERS],
    *[(layers, memory, shape, "") for layers, memory in NATIVE for shape in ("odd", "to zero")],
    ("mac", "exact", "plain", "torch"),
])  # fmt: skip
def test_one_token_in_place_is_the_forward_pass(layers, memory, shape, kernels, monkeypatch):
    """Streams that stand at different places go on together, past segments, windows and chunks, to the same logits and the same state."""
    monkeypatch.setenv("TETHYS_KERNELS", kernels)
    model = build(layers, memory, **SHAPES[shape])
    tokens = torch.randint(70, (3, 25))
    with torch.inference_mode():
        step = model.in_place()
        starts = (3, 3, 3) if model.config.grows else (1, 3, 6)
        streams = [model(tokens[row : row + 1, :start], model.initial_state(1))[1] for row, start in enumerate(starts)]
        state = owned(value.stack(streams))
        for offset in range(11):
            now = torch.stack([tokens[row, start + offset] for row, start in enumerate(starts)])
            logits, state = step(now, state)
            for row, start in enumerate(starts):
                at = start + offset
                expected, streams[row] = model(tokens[row : row + 1, at : at + 1], streams[row])
                torch.testing.assert_close(logits[row], expected[0, 0], atol=3e-5, rtol=1e-4)
        for (name, mine), theirs in zip(held(state).items(), held(value.stack(streams)).values(), strict=True):
            torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=1e-4, msg=name)


@pytest.mark.skipif(not native.status().available, reason=native.status().reason)
@pytest.mark.parametrize("layers, memory", NATIVE)
def test_these_blocks_are_one_native_call(layers, memory):
    model = build(layers, memory, **SHAPES["plain"])
    assert all(decoding._native(block) is not None for block in model.backbone.blocks)


@pytest.mark.skipif(not native.status().available, reason=native.status().reason)
def test_a_stream_has_the_same_bits_alone_and_among_others():
    model = build("mac", "exact", **SHAPES["plain"])
    tokens = torch.randint(70, (5, 12))
    with torch.inference_mode():
        step, together = model.in_place(), owned(model.initial_state(5))
        alone = owned(model.initial_state(1))
        for at in range(12):
            many, together = step(tokens[:, at], together)
            one, alone = step(tokens[2:3, at], alone)
            assert torch.equal(many[2:3], one)


@pytest.mark.skipif(not native.status().available, reason=native.status().reason)
def test_a_state_of_another_model_is_refused_and_nothing_is_written():
    model, other = build("mac", "exact", **SHAPES["plain"]), build("mac", "exact", **(SHAPES["plain"] | {"segment": 4}))
    with torch.inference_mode():
        state = owned(model.initial_state(1))
        state = (state[0].__class__(**(vars(state[0]) | {"context": other.initial_state(1)[0].context})), *state[1:])
        before = owned(state)
        with pytest.raises(RuntimeError, match="context keys"):
            model.in_place()(torch.tensor([1]), state)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(state), leaves(before), strict=True))
