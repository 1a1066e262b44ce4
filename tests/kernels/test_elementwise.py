"""The native parts of a block against their torch forms in float64, values and gradients, for every vector width the processor has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import attention, dispatch, native
from kernels.native import elementwise

built = native.status()
pytestmark = pytest.mark.skipif(not built.available, reason=built.reason)
WIDTHS = [w for w in (16, 8, 4) if native.select_width(w) == w] if built.available else [0]


@pytest.fixture(params=WIDTHS, ids=lambda w: f"{w} floats", autouse=True)
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    native.select_width(request.param)
    yield request.param
    native.select_width(0)


def turned(x: Tensor, position: Tensor) -> Tensor:
    return elementwise.rope(x, *attention.rotation(position, x.shape[-1], x.dtype))


def gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "project": (elementwise.project, F.linear, ((3, 50, 24), (17, 24))),
    "project, odd": (elementwise.project, F.linear, ((130, 5), (7, 5))),
    "swiglu": (elementwise.swiglu, gated, ((2, 70, 64),)),
    "swiglu, odd": (elementwise.swiglu, gated, ((3, 14),)),
    "rms_norm": (lambda x, w: elementwise.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), ((3, 70, 48), (48,))),
    "rms_norm, odd": (lambda x, w: elementwise.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), ((5, 9), (9,))),
    "rope": (lambda x: turned(x, POSITIONS), lambda x: attention.rope(x, POSITIONS), ((2, 3, 9, 32),)),
    "rope, odd": (lambda x: turned(x, POSITIONS[:1]), lambda x: attention.rope(x, POSITIONS[:1]), ((2, 3, 9, 10),)),
}
POSITIONS = torch.stack((torch.arange(9), torch.arange(9) + 1000))


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_torch(case):
    torch.manual_seed(0)
    mine, theirs, shapes = CASES[case]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    double = [each.detach().double().requires_grad_() for each in inputs]
    y, expected = mine(*inputs), theirs(*double)
    torch.testing.assert_close(y, expected.float(), atol=2e-6, rtol=2e-5)
    up = torch.randn(y.shape)
    y.backward(up)
    expected.backward(up.double())
    for a, b in zip(inputs, double, strict=True):
        torch.testing.assert_close(a.grad, b.grad.float(), atol=5e-6, rtol=1e-4)


def test_strided_rows_and_a_part_of_a_weight():
    x, w = torch.randn(40, 60, requires_grad=True), torch.randn(30, 20, requires_grad=True)
    dispatch.project(x[:, 20:40], w[10:]).square().sum().backward()
    a, b = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    F.linear(a[:, 20:40], b[10:]).square().sum().backward()
    torch.testing.assert_close(x.grad, a.grad, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(w.grad, b.grad, atol=1e-3, rtol=1e-4)


def test_autocast_is_left_to_torch():
    x, w = torch.randn(16, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.project(x, w).dtype is torch.bfloat16
    assert dispatch.project(x, w).dtype is torch.float32
