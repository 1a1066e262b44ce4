"""Every block: causal, the same in any split into calls, streams apart, live under inference mode (D.7 T6, T7, T12, T14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import family as kernels_family
from kernels.features import polynomial
from kernels.heads import conv_heads
from kernels.linear import linear_exact
from kernels.mlp import deep
from kernels.network import Network
from titans_core import state as value
from titans_core.blocks import Backbone
from titans_core.config import FAMILY, RULES, BackboneConfig, ConfigError, MemoryConfig, family
from titans_core.memory import KernelMemory, NeuralMemory

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
    "channel": {"forget": "channel"},
    "channel_omega": {"forget": "channel", "window": 3},
    "channel_stale": {"forget": "channel", "rule": "stale"},
    "poly": {"degree": 2},
    "poly_deep": {"rule": "deep", "degree": 2},
    "poly_atlas": {"rule": "atlas", "degree": 2, "window": 3, "muon_every": 4},
}
MEMORIES |= {name: FAMILY[name] for name in ("delta_net", "gated_delta_net", "ttt_linear", "dla", "swla")}
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


@pytest.mark.parametrize("memory", [name for name, memory in MEMORIES.items() if memory.get("loss") != "dot"])
@pytest.mark.parametrize("momentum", [-20.0, 1.0])
def test_a_repeated_token_at_the_largest_step_stays_bounded(memory: str, momentum: float) -> None:
    """E.2's worst case: one key again and again, nothing forgotten, every gate of the step and of the window open.

    Without the division by the window's gates the Omega window of a matrix memory fails (1e22).
    """
    torch.manual_seed(7)
    layer = NeuralMemory(MemoryConfig(dim=16, heads=2, **{"chunk": 8} | MEMORIES[memory]))
    with torch.no_grad():
        alpha, eta, theta = layer.gates.bias.split([2 * layer.forgets, 2 * layer.layers, 2 * layer.layers])
        alpha.fill_(-20.0), eta.fill_(momentum), theta.fill_(20.0)
        if hasattr(layer, "lags"):
            layer.lags.bias.fill_(20.0)
    with torch.inference_mode():
        _, state = layer(torch.randn(1, 1, 16).expand(1, 600, 16), layer.initial_state(1))
    largest = max(float(leaf.abs().max()) for name, leaf in value.leaves(state) if name.startswith("memory.W"))
    assert largest < 10.0


@pytest.mark.parametrize("window", [1, 3])
def test_a_repeated_token_at_the_largest_step_of_dot_stays_bounded(window: int) -> None:
    torch.manual_seed(7)
    layer = KernelMemory("dot", MemoryConfig(dim=16, heads=2, window=window, decay=False))
    with torch.no_grad():
        layer.gates.bias.fill_(20.0)
        layer.log_tau.fill_(1.0)
        if window > 1:
            layer.lags.bias.fill_(20.0)
    with torch.inference_mode():
        y, state = layer(torch.randn(1, 1, 16).expand(1, 200, 16), layer.initial_state(1))
    assert torch.isfinite(y).all() and float(state.memory.rows.abs().max()) < 10.0


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net", "swla", "dla", "omega_net", "ttt_linear", "ttt_mlp"])
def test_a_named_memory_is_the_kernels_rule_of_that_name(name: str) -> None:
    """The layer's output is that of `kernels.family` between the same projections."""
    torch.manual_seed(7)
    layer = NeuralMemory(family(name, dim=16, heads=2, chunk=4, expansion=2, conv=1, degree=1)).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    x, start = torch.randn(2, 11, 16, dtype=torch.float64), layer.initial_state(2)
    y, _ = layer(x, start)
    q, k, v = conv_heads(layer.qkv(x), start.conv, layer.conv.weight, 2, layer.length)
    theta, eta, alpha = layer._gates(x)
    assert eta is None
    chosen: dict[str, Any] = {"chunk": 4}
    gates = [theta] if alpha is None else [theta, alpha]
    if layer.config.window > 1:
        gamma = torch.sigmoid(layer.lags(x)).unflatten(-1, (2, layer.config.window)).transpose(1, 2)
        total = gamma.sum(-1).clamp(min=1.0)
        gates = [theta / (total if layer.matrix else total.unsqueeze(-1)), *gates[1:], gamma]
    if not layer.matrix:
        chosen |= {"network": layer.network} if name.startswith("ttt") else {"network": layer.network, "init": tuple(layer.init)}
    rule = getattr(kernels_family, "ttt" if name.startswith("ttt") else name)
    state = start.memory
    if layer.config.decay_to_init and layer.matrix:  # the state is a deviation from W_0, here a shift of the targets or of the reads
        shifted = v if layer.config.loss == "dot" else v - k @ layer.init[0].mT
        read = rule(q, k, shifted, *gates, state, **chosen)[0] + q @ layer.init[0].mT
    else:
        read = rule(q, k, v, *gates, state, **chosen)[0]
    torch.testing.assert_close(layer._output(read, layer.gate(x)), y, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rule", ["exact", "deep"])
def test_polynomial_features_take_the_place_of_keys_and_queries(rule: str) -> None:
    """The residual of an MLP goes around the features: it regresses v - k and reads q beside (papers B.3)."""
    torch.manual_seed(7)
    chosen: dict[str, Any] = {"rule": rule, "degree": 2, "conv": 1, "decay_to_init": False, "chunk": 4}
    layer = NeuralMemory(MemoryConfig(dim=16, heads=2, **chosen)).double()
    x, start = torch.randn(2, 11, 16, dtype=torch.float64), layer.initial_state(2)
    y, _ = layer(x, start)
    q, k, v = conv_heads(layer.qkv(x), start.conv, layer.conv.weight, 2, 1.0)
    phi_q, phi_k = polynomial(q, layer.coefficients), polynomial(k, layer.coefficients)
    assert phi_k.shape[-1] == 45
    gates = layer._gates(x)
    if rule == "exact":
        read = linear_exact(phi_q, phi_k, v, *gates, start.memory)[0]
    else:
        long, network = 45**0.5, Network(residual=False)
        read = deep(long * phi_q, long * phi_k, v - 8**0.5 * k, *gates, start.memory, init=None, chunk=4, network=network)[0] + 8**0.5 * q
    torch.testing.assert_close(layer._output(read, layer.gate(x)), y, atol=1e-9, rtol=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    chosen=st.fixed_dictionaries(
        {
            "rule": st.sampled_from(RULES),
            "read": st.sampled_from(["after", "before", "anchor"]),
            "window": st.sampled_from([1, 3]),
            "degree": st.sampled_from([1, 2]),
            "depth": st.sampled_from([1, 2, 3]),
            "muon_every": st.sampled_from([1, 1, 2, 3]),
            "loss": st.sampled_from(["l2", "l2", "dot"]),
            "decayed_error": st.sampled_from([False, False, True]),
            "momentum": st.booleans(),
            "decay": st.booleans(),
            "forget": st.sampled_from(["head", "head", "channel"]),
            "decay_to_init": st.booleans(),
            "conv": st.sampled_from([1, 4]),
        }
    )
)
def test_every_configuration_is_refused_or_runs(chosen: dict[str, Any]) -> None:
    try:
        config = MemoryConfig(dim=8, heads=2, chunk=4, expansion=2, **chosen)
    except ConfigError:
        return
    layer, x = NeuralMemory(config), torch.randn(1, 7, 8)
    state = layer.initial_state(1)
    for part in (x[:, :5], x[:, 5:]):
        y, state = layer(part, state)
        assert torch.isfinite(y).all()
    rows, gate, _ = layer.queries(x, state.conv[..., : config.dim])
    assert torch.isfinite(layer.read(rows, gate, state.memory)).all()


def test_a_wrong_configuration_names_the_field() -> None:
    with pytest.raises(ConfigError, match="dim 10 must be a multiple of heads 4"):
        MemoryConfig(dim=10)
    with pytest.raises(ConfigError, match="layer 'gru' is none of"):
        BackboneConfig(memory=MemoryConfig(dim=16), layers=("gru",))  # type: ignore[arg-type]
    for refused, message in [
        ({"rule": "hybrid", "window": 4}, "rule 'hybrid' has no Omega window"),
        ({"rule": "atlas", "read": "anchor"}, "rule 'atlas' reads 'after' or 'before'"),
        ({"rule": "atlas", "chunk": 8, "muon_every": 3}, "muon_every 3 must divide chunk 8"),
        ({"rule": "deep", "muon_every": 2}, "belongs to rules 'atlas' and 'atlas"),
        ({"degree": 3}, "degree 3 gives a head of width 64 47905 features"),
        ({"loss": "dot"}, "with loss 'dot' take 'stale'"),
        ({"rule": "stale", "decayed_error": True}, "decayed_error needs rule 'exact'"),
        ({"rule": "deep", "forget": "channel"}, "forget 'channel' needs rule 'exact' or 'stale' and decay, found 'deep'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            MemoryConfig(**({"dim": 256} | refused))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="memory 'mamba' is none of titans, delta_net"):
        family("mamba", dim=16)
    with pytest.raises(ConfigError, match="layer 'swdt' writes a window of tokens"):
        BackboneConfig(memory=MemoryConfig(dim=16), layers=("swdt",))
