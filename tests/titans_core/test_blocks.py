"""Every block: causal, the same in any split into calls, streams apart, live under inference mode (D.7 T6, T7, T12, T14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titans_core import state as value
from titans_core.blocks import Backbone
from titans_core.config import BackboneConfig, ConfigError, MemoryConfig
from titans_core.memory import NeuralMemory

# name -> mixer, settings of its memory
MEMORIES: dict[str, dict[str, Any]] = {
    "exact": {},
    "stale": {"rule": "stale"},
    "deep": {"rule": "deep"},
    "gated": {"rule": "gated"},
    "hybrid": {"rule": "hybrid"},
    "omega": {"rule": "deep", "window": 3},
    "omega_exact": {"window": 3},
    "omega_stale": {"rule": "stale", "window": 3},
    "atlas": {"rule": "atlas", "window": 3},
    "atlas_block": {"rule": "atlas", "window": 3, "muon_every": 2},
    "atlas_chunk": {"rule": "atlas", "muon_every": 4, "read": "before"},
    "atlas_matrix": {"rule": "atlas", "depth": 1, "window": 3, "muon_every": 2},
    "atlas++": {"rule": "atlas++", "window": 3, "muon_every": 4},
    "poly": {"degree": 2},
    "poly_deep": {"rule": "deep", "degree": 2},
    "poly_atlas": {"rule": "atlas", "degree": 2, "window": 3, "muon_every": 4},
}
MIXERS = ["lmm", "mac", "mag", "mal", "window", "attention"]
MIXERS += ["mac-stale", "mac-deep", "mag-deep", "mac-omega_exact", "mac-poly_deep", "mac-atlas_block"]
MIXERS += [f"lmm-{memory}" for memory in MEMORIES if memory != "exact"]
MIXERS += ["deep_transformer", "swdt-omega_exact", "dot", "dot-omega_exact"]
GROWING = ("attention", "deep_transformer", "swdt", "dot")  # their states grow: streams of different lengths do not stack


def model(mixer: str) -> Backbone:
    """`mixer` or `mixer-memory`."""
    torch.manual_seed(7)
    mixer, _, name = mixer.partition("-")
    memory = MemoryConfig(dim=16, heads=2, **{"chunk": 4, "expansion": 2} | MEMORIES[name or "exact"])
    config = BackboneConfig(memory=memory, layers=(mixer, mixer), window=5, segment=6, persistent=2)  # type: ignore[arg-type]
    backbone = Backbone(config).double()
    with torch.no_grad():  # a memory that matters: every parameter away from its symmetric start
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return backbone


def run(backbone: Backbone, x: Tensor, cuts: list[int]) -> tuple[Tensor, Any]:
    state, pieces = backbone.initial_state(x.shape[0]), []
    for a, b in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        y, state = backbone(x[:, a:b], state)
        pieces.append(y)
    return torch.cat(pieces, dim=1), state


@pytest.mark.parametrize("mixer", MIXERS)
@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(1, 20), max_size=5, unique=True).map(sorted))
def test_any_split_into_calls_equals_one_call(mixer: str, cuts: list[int]) -> None:
    backbone, x = model(mixer), torch.randn(2, 21, 16, dtype=torch.float64)
    whole, state = run(backbone, x, [])
    parts, state_of_parts = run(backbone, x, cuts)
    torch.testing.assert_close(parts, whole, atol=1e-9, rtol=1e-9)
    if not mixer.startswith("mac"):  # slots of a MAC segment that are not filled yet hold leftovers that the mask hides
        for (name, a), (_, b) in zip(value.leaves(state_of_parts), value.leaves(state), strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9, msg=name)
    after, _ = backbone(x[:, :3], state)
    after_parts, _ = backbone(x[:, :3], state_of_parts)
    torch.testing.assert_close(after_parts, after, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("changed", [0, 5, 6, 9, 19])
def test_a_changed_token_changes_nothing_before_it(mixer: str, changed: int) -> None:
    backbone, x = model(mixer), torch.randn(1, 20, 16, dtype=torch.float64)
    other = x.clone()
    other[:, changed] += 1.0
    before, after = run(backbone, x, [])[0], run(backbone, other, [])[0]
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.allclose(before[:, changed], after[:, changed])


@pytest.mark.parametrize("mixer", [mixer for mixer in MIXERS if mixer not in ("window", "attention")])
def test_the_memory_carries_what_no_window_holds(mixer: str) -> None:
    """A token further back than every window and segment still changes the output: the memory is alive."""
    backbone, x = model(mixer), torch.randn(1, 30, 16, dtype=torch.float64)
    other = x.clone()
    other[:, 2] += 1.0
    assert (run(backbone, x, [])[0][:, -1] - run(backbone, other, [])[0][:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("mixer", MIXERS)
def test_streams_never_touch(mixer: str) -> None:
    backbone, x = model(mixer), torch.randn(3, 9, 16, dtype=torch.float64)
    together = run(backbone, x, [])[0]
    alone = torch.cat([run(backbone, x[i : i + 1], [])[0] for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(run(backbone, x[[2, 0, 1]], [])[0], together[[2, 0, 1]], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("mixer", [mixer for mixer in MIXERS if not mixer.startswith(GROWING)])
def test_streams_at_different_places_advance_together(mixer: str) -> None:
    """Two streams that have had 4 and 9 tokens, stacked, go on as each would alone."""
    backbone = model(mixer)
    a, b, rest = (torch.randn(n, t, 16, dtype=torch.float64) for n, t in [(1, 4), (1, 9), (2, 8)])
    state_a, state_b = run(backbone, a, [])[1], run(backbone, b, [])[1]
    together, _ = backbone(rest, value.stack([state_a, state_b]))
    torch.testing.assert_close(together[:1], backbone(rest[:1], state_a)[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(together[1:], backbone(rest[1:], state_b)[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("mixer", MIXERS)
def test_inference_mode_writes_and_gives_the_same_numbers(mixer: str) -> None:
    backbone, x = model(mixer), torch.randn(2, 13, 16, dtype=torch.float64)
    trained, state = run(backbone.train(), x, [4])
    with torch.inference_mode():
        served, served_state = run(backbone.eval(), x, [4])
    assert torch.equal(trained, served)
    for (_, a), (_, b) in zip(value.leaves(state), value.leaves(served_state), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mixer", MIXERS)
def test_saved_state_goes_on_as_if_nothing_had_happened(mixer: str) -> None:
    backbone, x = model(mixer).float(), torch.randn(2, 17, 16)
    with torch.inference_mode():
        _, state = backbone(x[:, :9], backbone.initial_state(2))
        saved = value.from_bytes(value.to_bytes(state), like=state)
        assert torch.equal(backbone(x[:, 9:], saved)[0], backbone(x[:, 9:], state)[0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_learns(mixer: str) -> None:
    backbone, x = model(mixer), torch.randn(2, 13, 16, dtype=torch.float64)
    run(backbone, x, [])[0].square().sum().backward()
    still = [name for name, p in backbone.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert still == []


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("momentum", [-20.0, 1.0])
def test_a_repeated_token_at_the_largest_step_stays_bounded(memory: str, momentum: float) -> None:
    """E.2's worst case: one key again and again, nothing forgotten, every gate of the step and of the window open.

    Without the division by the window's gates the Omega window of a matrix memory fails (1e22).
    """
    torch.manual_seed(7)
    layer = NeuralMemory(MemoryConfig(dim=16, heads=2, **{"chunk": 8} | MEMORIES[memory]))
    with torch.no_grad():
        alpha, eta, theta = layer.gates.bias.view(3, -1)
        alpha.fill_(-20.0), eta.fill_(momentum), theta.fill_(20.0)
        if hasattr(layer, "lags"):
            layer.lags.bias.fill_(20.0)
    with torch.inference_mode():
        _, state = layer(torch.randn(1, 1, 16).expand(1, 600, 16), layer.initial_state(1))
    largest = max(float(leaf.abs().max()) for name, leaf in value.leaves(state) if name.startswith("memory.W"))
    assert largest < 10.0


def test_a_wrong_configuration_names_the_field() -> None:
    with pytest.raises(ConfigError, match="dim 10 must be a multiple of heads 4"):
        MemoryConfig(dim=10)
    with pytest.raises(ConfigError, match="layer 'gru' is none of"):
        BackboneConfig(memory=MemoryConfig(dim=16), layers=("gru",))  # type: ignore[arg-type]
