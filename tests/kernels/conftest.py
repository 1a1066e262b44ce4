"""Uninitialised memory is poisoned: a kernel that reads a buffer before writing it shows NaN instead of a lucky zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.utils import _device

torch.set_num_threads(1)  # small products: on a busy machine a second thread waits far longer than it works

settings.register_profile("kernels", deadline=None, max_examples=20)
settings.load_profile("kernels")


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    yield
    # torch keeps a set of its constructors, made at first use; one made from the poisoned ones would break `torch.device` elsewhere.
    _device._device_constructors.cache_clear()


@pytest.fixture
def flushed_denormals() -> Iterator[None]:
    """As every entry point sets it: decayed products underflow, and denormals cost ten times the time."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
