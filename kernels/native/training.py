"""A whole memory layer with its gradients as one function: products of the native kernels, and no graph of small operations between them.

What `kernels.native.Layer` is to a service, this is to training. The stages are those of `kernels.native`, forward and backward, run by hand
in one autograd node; around them stand the projections, whose gradients accumulate in place.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.heads import next_tail
from kernels.linear import READS, MatrixState
from kernels.mlp import DeepState
from kernels.native import Form, _ConvHeads, _Deep, _GatedNorm, _half, _Linear, _ops, _rows, _wants_grad, deep, linear_exact


def layer(
    x: Tensor, tail: Tensor, memory: MatrixState | DeepState, weights: Sequence[Tensor], init: Sequence[Tensor] | None, form: Form
) -> tuple[Tensor, MatrixState | DeepState, Tensor]:
    """x (B, T, D), T >= 1, float32 on the CPU -> y (B, T, D), the memory and the convolution's tail (B, taps - 1, 3 D) after the last token.

    weights: qkv (3 D, D), gate (D, D), gates (3 H L, D), bias (3 H L) in the order alpha, eta, theta, conv (taps, 3 D), norm (D / H), out (D, D).
    init: what the memory decays towards, None: zero. Then a matrix memory's state is the difference from it.
    """
    given = [*(init or ()), None, None][:2]
    phase = memory.phase if isinstance(memory, DeepState) else None
    state = [*memory.W, *memory.S, *memory.anchor] if isinstance(memory, DeepState) else [*memory]
    keep = _wants_grad(x, tail, *weights, *given, *state)
    y, tail, *out = _Layer.apply(form, keep, phase, x, tail, *weights, *given, *state)  # type: ignore[no-untyped-call]
    if isinstance(memory, DeepState):
        assert phase is not None
        after = (phase + x.shape[1]) % form.chunk
        return y, DeepState(tuple(out[:2]), tuple(out[2:4]), tuple(out[4:]), after, memory.keys, memory.values), tail
    return y, MatrixState(*out), tail


class _Stage:
    """An autograd.Function that is run by hand, as a part of a larger one, and its context."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def give_up(self) -> tuple[Tensor, ...]:
        """What the function saved, for the larger one to save; only its number is kept here."""
        tensors, self.saved_tensors, self.count = self.saved_tensors, (), len(self.saved_tensors)
        return tensors

    def given_back(self, tensors: Iterator[Tensor]) -> _Stage:
        """A copy of this stage that holds its tensors again, the next of `tensors`."""
        stage = copy.copy(self)
        stage.saved_tensors = tuple(itertools.islice(tensors, self.count))
        return stage

    def forward(self, *inputs: Any) -> Any:
        return self.function.forward(self, *inputs)

    def backward(self, *grads: Any) -> Any:
        return self.function.backward(self, *grads)


SET, ADD, SUB = range(3)


def _product(a: Tensor, b: Tensor, out: Tensor, half: bool, *, ta: bool = False, tb: bool = False, mode: int = SET) -> Tensor:
    """out (=, +=, -=) a b of matrices, either given transposed; ta sums over rows of a and b."""
    _ops().matmul(a, ta, b, tb, out, mode, half)
    return out


def _head(x: Tensor, head: int) -> Tensor:
    """The rows (B T, d) of one head of x (B, H, T, d), where they lie: outputs of the stages keep their heads side by side."""
    return x[:, head].view(-1, x.shape[-1])  # never a copy: they are written to


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, form: Form, keep: bool, phase: Tensor | None, x: Tensor, tail: Tensor, qkv: Tensor, gate: Tensor, gates: Tensor,
        bias: Tensor, conv: Tensor, norm: Tensor, out: Tensor, init1: Tensor | None, init2: Tensor | None, *state: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        (B, T, D), half = x.shape, _half(form.precision)
        rows = _rows(x.reshape(B * T, D))
        u, g, z = (_product(rows, w, x.new_empty(B * T, len(w)), half, tb=True).view(B, T, -1) for w in (qkv, gate, gates))
        open_ = z.add_(bias).sigmoid_().view(B, T, 3, form.heads, -1)
        alpha, eta, theta = open_.permute(2, 0, 3, 1, 4) if phase is not None else open_.squeeze(-1).permute(2, 0, 3, 1)
        theta = ((1 - eta) * theta if form.momentum else theta) / form.divisor
        given = (theta, eta if form.momentum else None, alpha if form.decay else None)
        towards = None if phase is not None else init1
        convolved, remembered, normed = _Stage(_ConvHeads), _Stage(_Linear if phase is None else _Deep), _Stage(_GatedNorm)
        q, k, v = convolved.forward(u, tail.contiguous(), conv.contiguous(), form.heads, form.scale)
        for head, w in enumerate(() if towards is None else towards):  # W k - v = (W - W_0) k - (v - W_0 k)
            _product(_head(k, head), w, _head(v, head), half, tb=True, mode=SUB)
        if keep and phase is not None:
            network = form.network
            flags = (form.chunk, READS.index(form.read), network.norm, network.residual, network.eps, half)
            outer = (init1, init2, None, None)
            y, *new = remembered.forward(None, phase.contiguous(), flags, q, k, v, *given, *outer, *state)
        elif keep:
            y, *new = remembered.forward(q, k, v, *given, None, *state, form.chunk, form.read == "before", half)
        elif phase is not None:
            none = q.new_zeros(B, form.heads, 0, q.shape[-1])
            y, end = deep(
                q, k, v, *given, DeepState(state[:2], state[2:4], state[4:], phase, none, none), chunk=form.chunk, network=form.network,
                init=None if init1 is None or init2 is None else (init1, init2), read=form.read, precision=form.precision,
            )  # fmt: skip
            new = [*end.W, *end.S, *end.anchor]
        else:
            y, matrix = linear_exact(q, k, v, *given, MatrixState(*state), chunk=form.chunk, read=form.read, precision=form.precision)
            new = [*matrix]
        for head, w in enumerate(() if towards is None else towards):
            _product(_head(q, head), w, _head(y, head), half, tb=True, mode=ADD)
        o = normed.forward(y, g, norm.contiguous())
        result = _product(o.view(B * T, D), out, x.new_empty(B * T, D), half, tb=True).view(B, T, D)
        if keep:
            ctx.form, ctx.deep, ctx.stages = form, phase is not None, (convolved, remembered, normed)
            # all that is kept goes through autograd, which then frees it with the graph and sees it changed in place
            ctx.save_for_backward(x, qkv, gate, gates, out, towards, open_, o, *(t for stage in ctx.stages for t in stage.give_up()))
        return result, next_tail(u, tail), *new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dresult: Tensor, dnext: Tensor, *dstate: Any) -> tuple[Tensor | None, ...]:
        x, qkv, gate, gates, out, towards, open_, o, *rest = ctx.saved_tensors
        form, kept = ctx.form, iter(rest)
        convolved, remembered, normed = (stage.given_back(kept) for stage in ctx.stages)
        (B, T, D), half = x.shape, _half(form.precision)
        rows, up = _rows(x.reshape(B * T, D)), _rows(dresult.reshape(B * T, D))
        do = _product(up, out, x.new_empty(B * T, D), half)
        dout = _product(up, o.view(B * T, D), torch.empty_like(out), half, ta=True)
        dy, dg, dnorm = normed.backward(do.view(B, T, D))
        if ctx.deep:
            _, _, _, dq, dk, dv, *dgiven, dinit1, dinit2, _, _, dW1, dW2, dS1, dS2, dA1, dA2 = remembered.backward(dy, *dstate)
            dstate = (dW1, dW2, dS1, dS2, dA1, dA2)
        else:
            dq, dk, dv, *dgiven, _, dW, dS = remembered.backward(dy, *dstate)[:9]
            dinit1, dinit2, dstate = None, None, (dW, dS)
            if towards is not None:
                dinit1 = torch.empty_like(towards)
                for head, (w, dw) in enumerate(zip(towards, dinit1, strict=True)):
                    q, k = (_head(z, head) for z in remembered.saved_tensors[:2])
                    up_y, up_v = _head(dy, head), _head(dv, head)
                    _product(up_y, w, _head(dq, head), half, mode=ADD)
                    _product(up_v, w, _head(dk, head), half, mode=SUB)
                    _product(up_y, q, dw, half, ta=True)
                    _product(up_v, k, dw, half, ta=True, mode=SUB)
        du, dtail, dconv, _, _ = convolved.backward(dq, dk, dv)
        if behind := dtail.shape[1]:  # the next tail is the end of [tail; u]
            own = min(behind, T)
            du[:, T - own :] += dnext[:, behind - own :]
            dtail[:, T:] += dnext[:, : behind - own]
        dz = _gates_backward(open_, dgiven, form)
        du, dg, dz = (d.view(B * T, -1) for d in (du, dg, dz))
        dx = torch.empty_like(rows)
        for d, w, mode in ((du, qkv, SET), (dg, gate, ADD), (dz, gates, ADD)):
            _product(d, w, dx, half, mode=mode)
        dweights = (_product(d, rows, torch.empty_like(w), half, ta=True) for d, w in ((du, qkv), (dg, gate), (dz, gates)))
        return None, None, None, dx.view(B, T, D), dtail, *dweights, dz.sum(0), dconv, dnorm, dout, dinit1, dinit2, *dstate


def _gates_backward(open_: Tensor, given: Sequence[Tensor | None], form: Form) -> Tensor:
    """From the gradients of theta, eta and alpha (B, H, T[, L]) to those of the sigmoids' inputs (B, T, 3, H, L); open_: the sigmoids."""
    alpha, eta, theta = (part.transpose(1, 2) for part in open_.unbind(2))  # (B, H, T, L)
    dtheta, deta, dalpha = (None if g is None else g.view_as(alpha) for g in given)
    assert dtheta is not None
    dtheta = dtheta / form.divisor
    if deta is not None:
        deta, dtheta = deta - dtheta * theta, dtheta * (1 - eta)
    parts = (torch.zeros_like(alpha) if g is None else g for g in (dalpha, deta, dtheta))
    return torch.stack([g.transpose(1, 2) for g in parts], 2) * (open_ * (1 - open_))
