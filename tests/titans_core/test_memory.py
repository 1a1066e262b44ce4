"""The memory layer as a service runs it: in place, and the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kernels import native
from titans_core.config import MemoryConfig
from titans_core.memory import NeuralMemory
from titans_core.state import leaves, map_state

FORMS: dict[str, dict[str, Any]] = {
    "exact": {"rule": "exact", "decay_to_init": False},
    "exact, before": {"rule": "exact", "decay_to_init": False, "read": "before"},
    "exact, to init": {"rule": "exact"},
    "deep": {"rule": "deep", "chunk": 4},
    "deep, anchor, no momentum": {"rule": "deep", "chunk": 4, "read": "anchor", "momentum": False},
    "deep, no decay": {"rule": "deep", "chunk": 4, "decay": False},
    "deep, three layers": {"rule": "deep", "chunk": 4, "depth": 3},
    "stale": {"rule": "stale", "chunk": 4},
    "omega": {"rule": "deep", "chunk": 4, "window": 3},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("kernels", ["", "torch"])
def test_in_place_gives_the_numbers_of_forward(form: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHYS_KERNELS", kernels)
    torch.manual_seed(0)
    layer = NeuralMemory(MemoryConfig(dim=32, heads=2, **form))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    step, x = layer.in_place(), torch.randn(3, 11, 32)
    with torch.inference_mode():
        state = layer.initial_state(3)
        owned = map_state(torch.clone, state)
        for part in x.split([1, 5, 1, 1, 3], dim=1):
            y, state = layer(part, state)
            torch.testing.assert_close(step(part, owned), y, atol=2e-5, rtol=1e-4)
    for (name, a), (_, b) in zip(leaves(owned), leaves(state), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4, msg=name)


WHOLE = {
    "exact, to init": {"rule": "exact"},
    "exact": {"rule": "exact", "decay_to_init": False},
    "exact, before, no decay": {"rule": "exact", "decay_to_init": False, "read": "before", "decay": False},
    "deep": {"rule": "deep", "chunk": 8},
    "deep, anchor, no momentum": {"rule": "deep", "chunk": 8, "read": "anchor", "momentum": False},
    "deep, to zero, no convolution": {"rule": "deep", "chunk": 8, "decay_to_init": False, "conv": 1},
}


@pytest.mark.skipif(not native.status().available, reason=native.status().reason)
@pytest.mark.parametrize("form", WHOLE.values(), ids=WHOLE.keys())
@pytest.mark.parametrize("precision,tolerance", [("float32", 1e-5), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("cuts", [[21], [2, 18, 1]])
def test_the_whole_layer_and_its_gradients(
    form: dict[str, Any], precision: str, tolerance: float, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One native function against the torch form in float64: outputs, state, and the gradient of everything, through the carried state too."""
    torch.manual_seed(0)
    layer = NeuralMemory(MemoryConfig(dim=40, heads=2, precision=precision, **form))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    x, found = torch.randn(2, 21, 40), []
    for dtype, kernels in ((torch.float64, "torch"), (torch.float32, "native")):
        monkeypatch.setenv("TETHYS_KERNELS", kernels)
        model = copy.deepcopy(layer).to(dtype)
        inputs = x.to(dtype).requires_grad_()
        state, outputs = model.initial_state(2), []
        for part in inputs.split(cuts, dim=1):
            y, state = model(part, state)
            outputs.append(y)
        ends = [leaf for _, leaf in leaves(state) if leaf.is_floating_point()]
        results = [torch.cat(outputs, 1), *(end for end in ends if end.numel())]
        torch.manual_seed(1)
        total = sum((r * torch.randn(r.shape).to(dtype)).sum() for r in results)
        assert isinstance(total, torch.Tensor)
        total.backward()
        found.append([*results, inputs.grad, *(p.grad for p in model.parameters())])
    worst = max(float((b.double() - a).detach().norm() / a.detach().norm()) for a, b in zip(*found, strict=True))
    assert worst < tolerance and (precision == "float32" or worst > 1e-4)


@pytest.mark.skipif(not native.status().available, reason=native.status().reason)
@pytest.mark.parametrize("rule", ["exact", "deep"])
def test_gradients_and_inputs_of_any_layout(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum's gradient is one number with strides of zero, and a transposed input has its channels apart."""
    torch.manual_seed(0)
    layer = NeuralMemory(MemoryConfig(dim=32, heads=2, chunk=4, rule=rule))  # type: ignore[arg-type]
    found = []
    for kernels in ("torch", "native"):
        monkeypatch.setenv("TETHYS_KERNELS", kernels)
        x = torch.linspace(-1, 1, 2 * 32 * 9).view(2, 32, 9).sin().requires_grad_()
        y, state = layer(x.mT, layer.initial_state(2))
        total = y.sum() + sum(leaf.sum() for _, leaf in leaves(state) if leaf.is_floating_point())
        found.append([y, *torch.autograd.grad(total, [x, *layer.parameters()])])
        with pytest.raises(RuntimeError, match="second time"):  # what was kept is gone with the graph
            torch.autograd.grad(total, x)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
