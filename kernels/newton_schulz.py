"""Newton-Schulz orthogonalisation: the direction of a momentum matrix without its size (Muon; ATLAS Eqs. 32-33)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Triple = tuple[float, float, float]

MUON: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5
# LaCT's five different triples pull the singular values closer to one than Muon's single one.
LACT: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def newton_schulz(S: Tensor, steps: Sequence[Triple] = MUON, eps: float = 1e-4) -> Tensor:
    """S (..., m, n) -> about U V^T of its singular value decomposition: singular values of a well-conditioned S land in [0.68, 1.13].

    X = S / sqrt(||S||_F^2 + eps^2); then X <- a X + (b A + c A^2) X with A = X X^T, five times. The work is done on the smaller side.
    The size of S is erased, so the gradient grows like 1 / ||S||; eps bounds it where momentum starts from zero (it reaches 5e9 at
    eps = 1e-7), and makes the map of a zero matrix zero.
    """
    if S.shape[-2] > S.shape[-1]:
        return newton_schulz(S.mT, steps, eps).mT
    X = S * torch.rsqrt(S.square().sum((-2, -1), keepdim=True) + eps * eps)
    for a, b, c in steps:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X
