"""Polynomial features of keys and queries (ATLAS section 3.1): a matrix memory over them stores binom(d + p, p) pairs instead of d.

On unit-norm keys sum x_i^2 = 1 ties the degrees together, and binom(d + p - 2, p - 2) of these features are redundant: 44 pairs instead of
45 at d = 8, p = 2.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor


def feature_width(d: int, degree: int) -> int:
    """binom(d + degree, degree), the number of monomials of degree at most `degree`."""
    return math.comb(d + degree, degree)


def taylor_coefficients(degree: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(degree + 1,) c_i = 1 / sqrt(i!): with a_i = c_i^2 the kernel is the truncated series of exp (the papers' initial values)."""
    return torch.tensor([1.0 / math.sqrt(math.factorial(i)) for i in range(degree + 1)], dtype=dtype)


def polynomial(x: Tensor, c: Tensor, *, normalise: bool = True) -> Tensor:
    """x (..., d), c (degree + 1,) or (H, degree + 1) for x (B, H, T, d) -> (..., binom(d + degree, degree)), with

        phi(q) . phi(k) = sum_i c_i^2 (q . k)^i                          exactly: monomials carry their multinomial weights

    c is trained; learning c_i instead of a_i = c_i^2 keeps the kernel positive. normalise: divide by sqrt(sum a_i), which gives
    ||phi(x)|| = 1 for ||x|| = 1, so that the step bounds of unit keys still hold.
    """
    d, degree = x.shape[-1], c.shape[-1] - 1
    scale = c * torch.rsqrt(c.square().sum(-1, keepdim=True)) if normalise else c
    if scale.dim() == 2:
        scale = scale.unsqueeze(1)  # (H, 1, degree + 1)
    parts = [scale[..., :1].expand(*x.shape[:-1], 1)]
    for i in range(1, degree + 1):
        index, weight = _monomials(d, i)
        term = x[..., index[0]]
        for column in index[1:]:
            term = term * x[..., column]
        parts.append(term * weight.to(x) * scale[..., i : i + 1])
    return torch.cat([p.to(x.dtype) for p in parts], -1)


@lru_cache(maxsize=64)
def _monomials(d: int, i: int) -> tuple[tuple[list[int], ...], Tensor]:
    """The degree-i monomials of d variables as i columns of indices, and sqrt(i! / prod beta!) of each."""
    rows = list(combinations_with_replacement(range(d), i))
    weight = [math.sqrt(math.factorial(i) / math.prod(math.factorial(row.count(j)) for j in set(row))) for row in rows]
    return tuple(list(column) for column in zip(*rows, strict=True)), torch.tensor(weight, dtype=torch.float64)
