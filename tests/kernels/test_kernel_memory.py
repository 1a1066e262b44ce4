"""The exponential-kernel memories against explicit features (papers' tests T6, T16)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.features import polynomial, taylor_coefficients
from kernels.kernel_memory import deep_transformer, dot, dot_triangular, exponential, kernel_state, swdt, truncated_exponential
from kernels.linear import MatrixState, linear_exact, linear_stale, stale_state
from kernels.network import MATRIX
from kernels.reference import oracle_state, titans


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


T, D = 13, 3
KERNEL = partial(truncated_exponential, degree=2)


def features(x: Tensor) -> Tensor:
    return polynomial(x, taylor_coefficients(2, torch.float64), normalise=False)


def tokens() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    theta, alpha = torch.sigmoid(draw(3, 2, 1, T)) * 0.2, torch.sigmoid(draw(4, 2, 1, T)) * 0.3
    return draw(0, 2, 1, T, D), draw(1, 2, 1, T, D), draw(2, 2, 1, T, 2), theta, alpha, torch.sigmoid(draw(5, 2, 1, T, 3))


def test_dot_is_the_delta_rule_over_explicit_features() -> None:  # T16
    q, k, v, theta, alpha, gamma = tokens()
    zero = torch.zeros(2, 1, 2, features(k).shape[-1], dtype=torch.float64)
    want, _ = linear_exact(features(q), features(k), v, theta, None, None, MatrixState(zero, zero))
    empty = kernel_state(2, 1, D, 2, torch.float64)
    close(dot_triangular(q, k, v, theta, kernel=KERNEL), want)
    close(dot(q, k, v, theta, None, empty, kernel=KERNEL)[0], want)
    windowed, _ = titans(features(q), features(k), v, theta, None, alpha, oracle_state([zero]), network=MATRIX, gamma=gamma)
    close(dot(q, k, v, theta, alpha, empty, gamma=gamma, kernel=KERNEL)[0], windowed)
    close(dot(q, k, v, theta, None, empty)[0], dot_triangular(q, k, v, theta))


def test_deep_transformer_and_swdt_are_linear_attention_over_explicit_features() -> None:  # T16
    q, k, v, _, _, gamma = tokens()
    one = torch.ones(2, 1, T, dtype=torch.float64)
    phi = [features(x) for x in (q, k)]
    empty = kernel_state(2, 1, D, 2, torch.float64)
    init = torch.zeros(1, 2, phi[0].shape[-1], dtype=torch.float64)
    want, _ = linear_stale(*phi, v, one, None, None, stale_state(init, 2), loss="dot")
    close(deep_transformer(q, k, v, empty, kernel=KERNEL)[0], want)
    want, _ = linear_stale(*phi, v, one, None, None, stale_state(init, 2, window=3), loss="dot", gamma=gamma)
    close(swdt(q, k, v, gamma, empty, kernel=KERNEL)[0], want)
    close(deep_transformer(q, k, v, empty)[0], exponential(q, k).tril() @ v)


@pytest.mark.parametrize("cuts", [[1], [5], [1, 2, 12]])
def test_kernel_memories_in_any_split(cuts: list[int]) -> None:  # T6
    q, k, v, theta, alpha, gamma = tokens()
    edges = [0, *cuts, T]
    for run in (
        lambda part, s: deep_transformer(q[:, :, part], k[:, :, part], v[:, :, part], s),
        lambda part, s: swdt(q[:, :, part], k[:, :, part], v[:, :, part], gamma[:, :, part], s),
        lambda part, s: dot(
            q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], alpha[:, :, part], s, gamma=gamma[:, :, part], kernel=KERNEL
        ),
    ):
        whole, end = run(slice(0, T), kernel_state(2, 1, D, 2, torch.float64))
        state, pieces = kernel_state(2, 1, D, 2, torch.float64), []
        for a, b in zip(edges, edges[1:], strict=False):
            y, state = run(slice(a, b), state)
            pieces.append(y)
        close(torch.cat(pieces, 2), whole)
        close(state.rows, end.rows)
