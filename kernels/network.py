"""The memory network: what a memory computes from a key, and the closed form of its inner gradient.

A memory is a small network whose weights move at test time. Its weights are a tuple of matrices, each (..., out, in), that act on
rows as `x @ W.mT`. Two shapes exist:

    MLP, L layers      z_1 = W_1 x ; a_l = gelu(z_l) ; z_{l+1} = W_{l+1} a_l ; out = z_L                 Titans section 3.3, ATLAS Eq. 42
    gated MLP          out = W_3 (gelu(W_1 x) * (W_2 x))                                                   Atlas++ (ATLAS section 6)

followed by a LayerNorm (`norm`) and a residual x + out (`residual`). One layer without either is the matrix memory.
The loss of one token is 1/2 ||M(k) - v||^2, so that every fast gradient is the outer product of a "delta" and an "input".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SQRT_HALF = math.sqrt(0.5)
INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True)
class Network:
    """The form of a memory network; the number of layers follows from the number of weights.

    norm      LayerNorm after the last layer (Titans: M(x) = x + LN(W_2 gelu(W_1 x)))
    residual  add the input to the output; the network then regresses onto v - k
    gated     three weights, out = W_3 (gelu(W_1 x) * (W_2 x)) (Atlas++)
    loss      "l2": 1/2 ||M(k) - v||^2 ; "dot": -<M(k), v> (linear attention, DLA, SWLA)
    eps       of the LayerNorm; at least 1e-5, because the gradient grows like 1 / ||z|| as the last weight shrinks
    unit_hidden  scale the last layer's input to unit length, as keys are: it bounds the last layer's step (MLP only)
    """

    norm: bool = True
    residual: bool = True
    gated: bool = False
    loss: str = "l2"
    eps: float = 1e-5
    unit_hidden: bool = False

    def __post_init__(self) -> None:
        if self.loss not in ("l2", "dot"):
            raise ValueError(f"Network.loss is 'l2' or 'dot', not {self.loss!r}")
        if self.gated and self.unit_hidden:
            raise ValueError("Network.unit_hidden is defined for the MLP only, not for the gated memory")


DEFAULT = Network()  # Titans NeurIPS section 3.3: M(x) = x + LN(W_2 gelu(W_1 x))
MATRIX = Network(norm=False, residual=False)


def gelu(z: Tensor) -> Tensor:
    """z Phi(z), the exact (erf) form."""
    return torch.nn.functional.gelu(z)


def gelu_slope(z: Tensor) -> Tensor:
    """d gelu(z) / dz = Phi(z) + z phi(z)."""
    return 0.5 * (1.0 + torch.erf(z * SQRT_HALF)) + z * torch.exp(-0.5 * z * z) * INV_SQRT_2PI


def normalise(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) over the last dimension, and 1 / sqrt(var + eps)."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * inverse, inverse


def unit_length(a: Tensor) -> tuple[Tensor, Tensor]:
    """a / sqrt(||a||^2 + 1e-12), safe at zero with its gradient, and the inverse length."""
    inverse = torch.rsqrt(a.square().sum(-1, keepdim=True) + 1e-12)
    return a * inverse, inverse


def affine_norm(z: Tensor, network: Network, affine: tuple[Tensor, Tensor] | None) -> Tensor:
    """LN(z) with the trained scale and shift, if the network has a norm; else z."""
    if not network.norm:
        return z
    unit, _ = normalise(z, network.eps)
    return unit if affine is None else unit * affine[0] + affine[1]


def inputs_and_deltas(
    weights: Sequence[Tensor], k: Tensor, v: Tensor, network: Network, affine: tuple[Tensor, Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The factors of every fast gradient at `weights`: dloss/dW_l of row i is outer(delta_l[i], input_l[i]).

    k (..., n, d_in), v (..., n, d_out), weights[l] (..., out, in) -> inputs[l] (..., n, in), deltas[l] (..., n, out).
    Titans appendix F: delta_{l-1} = (W_l^T delta_l) * gelu'(z_{l-1}), with the LayerNorm's backward at the top.
    """
    target = v - k if network.residual and network.loss == "l2" else v
    if network.gated:
        z1, z2 = k @ weights[0].mT, k @ weights[1].mT
        a1 = gelu(z1)
        hidden = a1 * z2
        top = _output_delta(hidden @ weights[2].mT, target, network, affine)
        back = top @ weights[2]
        return [k, k, hidden], [back * z2 * gelu_slope(z1), back * a1, top]
    inputs, pre = [k], []
    inverse: Tensor | None = None
    for w in weights[:-1]:
        z = inputs[-1] @ w.mT
        pre.append(z)
        inputs.append(gelu(z))
    if network.unit_hidden and pre:
        inputs[-1], inverse = unit_length(inputs[-1])
    deltas = [_output_delta(inputs[-1] @ weights[-1].mT, target, network, affine)]
    for w, z in zip(reversed(weights[1:]), reversed(pre), strict=True):
        back = deltas[-1] @ w
        if inverse is not None:  # through a / ||a||, once, at the last hidden layer
            unit = inputs[-1]
            back = (back - unit * (back * unit).sum(-1, keepdim=True)) * inverse
            inverse = None
        deltas.append(back * gelu_slope(z))
    return inputs, deltas[::-1]


def output(weights: Sequence[Tensor], x: Tensor, network: Network, affine: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """M_W(x): x (..., n, d_in), weights[l] (..., out, in) -> (..., n, d_out)."""

    def layer(index: int, a: Tensor) -> Tensor:
        return a @ weights[index].mT

    return forward(layer, len(weights), x, network, affine)


def forward(
    layer: Callable[[int, Tensor], Tensor],
    depth: int,
    x: Tensor,
    network: Network,
    affine: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The network on rows x, where layer(l, a) applies weight l: plain weights, or weights that differ by row without being formed."""
    if network.gated:
        z = layer(2, gelu(layer(0, x)) * layer(1, x))
    else:
        a = x
        for index in range(depth - 1):
            a = gelu(layer(index, a))
        if network.unit_hidden and depth > 1:
            a, _ = unit_length(a)
        z = layer(depth - 1, a)
    z = affine_norm(z, network, affine)
    return x + z if network.residual else z


def _output_delta(z: Tensor, target: Tensor, network: Network, affine: tuple[Tensor, Tensor] | None) -> Tensor:
    """dloss/dz at the last layer's output z."""
    if not network.norm:
        return -target if network.loss == "dot" else z - target
    unit, inverse = normalise(z, network.eps)
    out = unit if affine is None else unit * affine[0] + affine[1]
    g = -target if network.loss == "dot" else out - target
    if affine is not None:
        g = g * affine[0]
    return (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True)) * inverse
