"""The parts of a block around its mixer, float32 on the CPU, with their gradients: linear maps by the native products, and the gated
feed-forward, RMSNorm and rotary positions in one pass each. `kernels.dispatch` has the twins' names and chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.native import _empty_rows, _ops, _rows

SET = 0  # the product's mode


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T: x (..., K), weight (N, K) -> (..., N)."""
    y: Tensor = _Project.apply(x, _rows(weight))  # type: ignore[no-untyped-call]
    return y


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) up of h (..., 2 n) = [gate | up] -> (..., n)."""
    y: Tensor = _SwiGlu.apply(h.contiguous())  # type: ignore[no-untyped-call]
    return y


def rms_norm(x: Tensor, weight: Tensor, floor: float) -> Tensor:
    """x / sqrt(mean x^2 + floor) weight over the last axis."""
    y: Tensor = _RmsNorm.apply(x.contiguous(), weight.contiguous(), floor)  # type: ignore[no-untyped-call]
    return y


def rope(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The pairs (x_j, x_{j + d/2}) of x (B, H, T, d) turned by angles (1 or B, T, d / 2)."""
    y: Tensor = _Rope.apply(_rows(x), cosine.contiguous(), sine.contiguous())  # type: ignore[no-untyped-call]
    return y


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x.new_empty(*x.shape[:-1], len(weight))
        _ops().matmul(_rows(x.reshape(-1, x.shape[-1])), False, weight, True, y.view(-1, len(weight)), SET, False)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        up, dx, dw = _rows(dy.reshape(-1, dy.shape[-1])), None, None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            _ops().matmul(up, False, weight, False, dx.view(-1, x.shape[-1]), SET, False)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
            _ops().matmul(up, True, _rows(x.reshape(-1, x.shape[-1])), False, dw, SET, False)
        return dx, dw


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        y = h.new_empty(*h.shape[:-1], h.shape[-1] // 2)
        _ops().swiglu_forward(h, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        dh = torch.empty_like(h)
        _ops().swiglu_backward(h, dy.contiguous(), dh)
        return dh


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, floor: float) -> Tensor:
        y, scale = torch.empty_like(x), x.new_empty(x.shape[:-1])
        _ops().norm_forward(x, weight, y, scale, floor)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        dx, dw = torch.empty_like(x), weight.new_empty(_ops().norm_units(scale.numel()), len(weight))
        _ops().norm_backward(x, weight, scale, dy.contiguous(), dx, dw)
        return dx, dw.sum(0), None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        y = _empty_rows(x, x.shape[-1])
        _ops().rope(x, cosine, sine, y, False)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        dx = _empty_rows(dy, dy.shape[-1])
        _ops().rope(_rows(dy), cosine, sine, dx, True)
        return dx, None, None
