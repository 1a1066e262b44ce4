"""Newton-Schulz in Triton against the same steps in float64; run by test_triton.py with TRITON_INTERPRET=1."""

import pytest
import torch
from triton_linear import close, poison  # noqa: F401

from kernels.triton import newton_schulz
from kernels.triton.orthogonalise import MUON


def oracle(S, eps):
    X = S / (S.square().sum((-2, -1), keepdim=True) + eps * eps).sqrt()
    for a, b, c in MUON:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


@pytest.mark.parametrize("shape", [(2, 3, 16, 40), (2, 20, 12), (1, 24, 24)])
def test_newton_schulz(shape):
    rng = torch.Generator().manual_seed(2)
    S = torch.randn(*shape, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(*shape, generator=rng, dtype=torch.float64)
    tall = shape[-2] > shape[-1]
    want = oracle(S.mT, 1e-4).mT if tall else oracle(S, 1e-4)
    single = S.detach().float().requires_grad_()
    got = newton_schulz(single)
    close(got, want.detach(), 2e-5)
    (want * weight).sum().backward()
    (got * weight.float()).sum().backward()
    close(single.grad, S.grad, 2e-4)
    with torch.no_grad():
        assert torch.equal(newton_schulz(single), got)


def test_zero_stays_zero_with_a_finite_gradient():
    S = torch.zeros(1, 8, 8, requires_grad=True)
    X = newton_schulz(S)
    X.sum().backward()
    assert not X.any() and S.grad.isfinite().all()
