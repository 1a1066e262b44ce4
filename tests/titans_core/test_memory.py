"""The memory layer as a service runs it: in place, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
