"""Drawn memories for the kernel tests: shapes, gates, weights and splits, in float64, from a seed that hypothesis shrinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear import MatrixState, StaleState
from kernels.mlp import DeepState
from kernels.network import MATRIX, Network

DEEP = {
    "two layers, norm, residual": Network(),
    "two layers, plain": Network(norm=False, residual=False),
    "two layers, unit hidden": Network(norm=False, unit_hidden=True),
    "three layers": Network(),
    "gated": Network(gated=True),
    "matrix": MATRIX,
    "negative dot product": Network(loss="dot"),
}


@dataclass
class Case:
    """One drawn problem. gates (B, H, T) for a matrix memory, (B, H, T, L) for a deep one."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor
    eta: Tensor
    alpha: Tensor
    W: tuple[Tensor, ...]
    S: tuple[Tensor, ...]
    init: tuple[Tensor, ...]
    network: Network
    affine: tuple[Tensor, Tensor] | None
    gamma: Tensor | None
    chunk: int
    cuts: list[int]

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.theta, self.eta, self.alpha

    @property
    def T(self) -> int:
        return self.q.shape[2]

    def parts(self) -> list[slice]:
        edges = [0, *self.cuts, self.T]
        return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]

    def matrix_state(self) -> MatrixState:
        return MatrixState(self.W[0], self.S[0])

    def stale_state(self) -> StaleState:
        return StaleState(self.W[0], self.S[0], self.W[0].clone(), self._phase(), *self._tail())

    def deep_state(self) -> DeepState:
        return DeepState(self.W, self.S, tuple(w.clone() for w in self.W), self._phase(), *self._tail())

    def _phase(self) -> Tensor:
        return torch.zeros(self.q.shape[0], dtype=torch.long)

    def _tail(self) -> tuple[Tensor, Tensor]:
        c = 1 if self.gamma is None else self.gamma.shape[-1]
        return self.k.new_zeros(*self.k.shape[:2], c - 1, self.k.shape[-1]), self.v.new_zeros(*self.v.shape[:2], c - 1, self.v.shape[-1])


def build(seed: int, B: int, H: int, T: int, d: int, chunk: int, cuts: list[int], form: str, lags: int, matrix: bool) -> Case:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    network = MATRIX if matrix else DEEP[form]
    h = d + 2
    shapes = {"three layers": [(h, d), (h, h), (d, h)], "gated": [(h, d), (h, d), (d, h)], "matrix": [(d, d)]}.get(form, [(h, d), (d, h)])
    if matrix:
        shapes = [(d + 1, d)]
    L, width = len(shapes), shapes[-1][0]
    gate = (B, H, T) if matrix else (B, H, T, L)
    return Case(
        q=draw(B, H, T, d),
        k=torch.nn.functional.normalize(draw(B, H, T, d), dim=-1),
        v=draw(B, H, T, width),
        # small enough that a deep memory does not amplify rounding from token to token
        theta=torch.sigmoid(draw(*gate)) * (0.3 if matrix else 0.05),
        eta=torch.sigmoid(draw(*gate)),
        alpha=torch.sigmoid(draw(*gate)) * 0.4,
        W=tuple(draw(B, H, *s) for s in shapes),
        S=tuple(0.1 * draw(B, H, *s) for s in shapes),
        init=tuple(draw(H, *s) for s in shapes),
        network=network,
        affine=(1 + 0.3 * draw(H, d), 0.1 * draw(H, d)) if network.norm else None,
        gamma=torch.sigmoid(draw(B, H, T, lags)) if lags > 1 else None,
        chunk=chunk,
        cuts=cuts,
    )


@st.composite
def cases(draw: st.DrawFn, matrix: bool = False, forms: tuple[str, ...] = tuple(DEEP), window: bool = True, max_T: int = 24) -> Case:
    T = draw(st.integers(1, max_T))
    return build(
        seed=draw(st.integers(0, 2**16)),
        B=draw(st.integers(1, 3)),
        H=draw(st.integers(1, 2)),
        T=T,
        d=draw(st.integers(1 if matrix else 3, 5)),  # a LayerNorm over 2 channels can only return +-1
        chunk=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64])),
        cuts=sorted(draw(st.lists(st.integers(0, T), max_size=4))),
        form=draw(st.sampled_from(forms)),
        lags=draw(st.sampled_from([1, 2, 3, 6])) if window else 1,
        matrix=matrix,
    )


def alone(case_tensor: Tensor | None, stream: int) -> Tensor | None:
    return None if case_tensor is None else case_tensor[stream : stream + 1]
