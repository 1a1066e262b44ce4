"""Atlas, Newton-Schulz, polynomial features, the associative scan and the named relatives (papers' tests T3, T4, T6, T8, T10, T11)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cases import Case, alone, build, cases
from torch import Tensor

from kernels import family
from kernels.coefficients import coefficients
from kernels.features import feature_width, polynomial, taylor_coefficients
from kernels.linear import MatrixState, linear_exact
from kernels.mlp import deep
from kernels.muon import AtlasState, atlas
from kernels.newton_schulz import LACT, newton_schulz
from kernels.reference import OracleState, oracle_state, titans
from kernels.scan import momentum_and_decay


def close(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def fixed_case(form: str = "matrix", matrix: bool = True, T: int = 17) -> Case:
    return build(seed=5, B=2, H=2, T=T, d=4, chunk=4, cuts=[], form=form, lags=3, matrix=matrix)


def start_of(case: Case) -> AtlasState:
    pending = torch.zeros(*case.q.shape[:2], len(case.W), dtype=torch.float64)
    return AtlasState(*case.deep_state(), keep=pending + 1, step=pending)


@settings(max_examples=20)
@given(cases(max_T=14), st.sampled_from(["after", "before"]), st.booleans(), st.integers(1, 3))
def test_atlas_is_its_recurrence_in_any_split(case: Case, read: str, to_init: bool, blocks: int) -> None:  # T3, T4, T6
    every = next(s for s in (case.chunk // blocks, case.chunk) if s and case.chunk % s == 0)
    options = {"network": case.network, "affine": case.affine, "init": case.init if to_init else None, "read": read}
    want, end = titans(*case.tokens, oracle_state(case.W, case.S), anchor_every=case.chunk, muon_every=every, gamma=case.gamma, **options)
    whole, state = atlas(*case.tokens, start_of(case), chunk=case.chunk, every=every, gamma=case.gamma, **options)
    close(whole, want, 1e-8)
    for got, expected in zip((*state.W, *state.S), (*end.W, *end.S), strict=True):
        close(got, expected, 1e-8)
    pieces, state = [], start_of(case)
    for part in case.parts():
        gamma = None if case.gamma is None else case.gamma[:, :, part]
        y, state = atlas(*(x[:, :, part] for x in case.tokens), state, chunk=case.chunk, every=every, gamma=gamma, **options)
        pieces.append(y)
    close(torch.cat(pieces, 2), want, 1e-8)


@settings(max_examples=10)
@given(cases(max_T=8), st.integers(0, 2**16), st.sampled_from([1, 2, 4]))
def test_atlas_streams_may_skip_tokens(case: Case, seed: int, every: int) -> None:
    write = torch.rand(case.q.shape[0], case.T, generator=torch.Generator().manual_seed(seed)) < 0.6
    options = {"network": case.network, "affine": case.affine, "init": case.init}
    got, _ = atlas(*case.tokens, start_of(case), chunk=4, every=every, gamma=case.gamma, write=write, **options)
    for i in range(write.shape[0]):
        at = slice(i, i + 1)
        start = OracleState(*(tuple(w[at] for w in x) for x in (case.W, case.S, case.W)))
        want, _ = titans(
            *(x[at] for x in case.tokens), start, anchor_every=4, muon_every=every, gamma=alone(case.gamma, i), write=write[at], **options
        )
        close(got[at], want, 1e-8)


def test_atlas_gradient() -> None:  # T13
    case = build(seed=5, B=1, H=1, T=3, d=3, chunk=2, cuts=[], form="two layers, norm, residual", lags=1, matrix=False)
    n = len(case.W)

    def run(*x: Tensor) -> Tensor:
        state = start_of(case)._replace(W=x[6 : 6 + n], S=x[6 + n :], anchor=x[6 : 6 + n])
        return atlas(*x[:6], state, init=case.init, chunk=2, network=case.network, affine=case.affine)[0]  # type: ignore[arg-type]

    inputs = [x.clone().requires_grad_() for x in (*case.tokens, *case.W, *case.S)]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, atol=1e-4)


def test_newton_schulz() -> None:  # T10
    g = torch.Generator().manual_seed(0)
    S = torch.randn(3, 12, 20, dtype=torch.float64, generator=g)
    close(newton_schulz(S.mT), newton_schulz(S).mT)
    close(newton_schulz(1e3 * S), newton_schulz(S), 1e-6)
    singular = torch.linalg.svdvals(newton_schulz(S))
    assert singular.min() > 0.675 and singular.max() < 1.135  # [0.68, 1.13] to the digits it is quoted with
    singular = torch.linalg.svdvals(newton_schulz(S, LACT))
    assert singular.min() > 0.8 and singular.max() < 1.2
    U, s, Vh = torch.linalg.svd(S, full_matrices=False)
    s = s / torch.linalg.matrix_norm(S).unsqueeze(-1)
    for _ in range(5):  # the polynomial acts on the singular values alone
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    close(newton_schulz(S), U @ torch.diag_embed(s) @ Vh, 1e-6)
    zero = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)
    newton_schulz(zero).sum().backward()
    assert not newton_schulz(zero).any() and zero.grad is not None and zero.grad.isfinite().all()


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**16))
def test_polynomial_features_are_their_kernel(d: int, degree: int, seed: int) -> None:  # T11
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 5, d, dtype=torch.float64, generator=g).unbind(0)
    c = taylor_coefficients(degree, torch.float64)
    assert polynomial(x, c).shape[-1] == feature_width(d, degree) == math.comb(d + degree, degree)
    want = sum((x @ y.mT) ** i / math.factorial(i) for i in range(degree + 1))
    close(polynomial(x, c, normalise=False) @ polynomial(y, c, normalise=False).mT, torch.as_tensor(want).expand(5, 5))
    unit = torch.nn.functional.normalize(x, dim=-1)
    close(polynomial(unit, c).norm(dim=-1), torch.ones(5, dtype=torch.float64))
    learnt = torch.randn(degree + 1, dtype=torch.float64, generator=g)  # any sign: the kernel's coefficients are squares
    want = sum(learnt[i] ** 2 * (x @ y.mT) ** i for i in range(degree + 1))
    close(polynomial(x, learnt, normalise=False) @ polynomial(y, learnt, normalise=False).mT, torch.as_tensor(want).expand(5, 5))


def test_degree_two_stores_exactly_its_width() -> None:  # T11
    g = torch.Generator().manual_seed(2)
    d = 5
    width = feature_width(d, 2)
    keys = torch.randn(width + 1, d, dtype=torch.float64, generator=g)
    c = taylor_coefficients(2, torch.float64)

    def rank(x: Tensor) -> int:
        return int(torch.linalg.matrix_rank(polynomial(x, c)))

    assert rank(keys[:width]) == width and rank(keys) == width
    on_the_sphere = torch.nn.functional.normalize(keys, dim=-1)  # there sum x_i^2 = 1 makes one monomial redundant
    assert rank(on_the_sphere[: width - 1]) == width - 1 and rank(on_the_sphere) == width - 1


@given(cases(matrix=True, window=False))
def test_associative_scan_is_the_coefficient_block(case: Case) -> None:
    u = torch.einsum("bhti,bhtj->bhtij", case.v, case.k)
    W, S = momentum_and_decay(u, case.theta, case.eta, case.alpha, case.W[0], case.S[0])
    block = coefficients(case.theta, case.eta, case.alpha)

    def solved(start_W: Tensor, start_S: Tensor, G: Tensor) -> Tensor:
        old = start_W[..., None, None] * case.W[0].unsqueeze(2) + start_S[..., None, None] * case.S[0].unsqueeze(2)
        return old - torch.einsum("bhti,bhixy->bhtxy", G, u)

    close(solved(block.b, block.f, block.G), W)
    close(solved(torch.zeros_like(block.m), block.m, block.GS), S)


def test_special_cases_by_their_own_recurrences() -> None:  # T8
    case = fixed_case()
    q, k, v, theta, _, alpha = case.tokens
    start = case.matrix_state()

    def loop(write) -> Tensor:  # type: ignore[no-untyped-def]
        W, outputs = case.W[0], []
        for t in range(case.T):
            W = write(W, k[:, :, t], v[:, :, t], theta[:, :, t, None, None], alpha[:, :, t, None, None], t)
            outputs.append(torch.einsum("bhvk,bhk->bhv", W, q[:, :, t]))
        return torch.stack(outputs, 2)

    def outer(a: Tensor, b: Tensor) -> Tensor:
        return a.unsqueeze(-1) * b.unsqueeze(-2)

    def seen(W: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("bhvk,bhk->bhv", W, key)

    def past(x: Tensor, t: int, lag: int) -> Tensor:
        return x[:, :, t - lag] if t >= lag else torch.zeros_like(x[:, :, 0])

    still = MatrixState(start.W, torch.zeros_like(start.S))
    close(family.delta_net(q, k, v, theta, still)[0], loop(lambda W, a, b, s, f, t: W - s * outer(seen(W, a) - b, a)))
    gated = loop(lambda W, a, b, s, f, t: (1 - f) * (W - s * outer(seen(W, a), a)) + s * outer(b, a))
    close(family.gated_delta_net(q, k, v, theta, alpha, still)[0], gated)
    decayed = loop(lambda W, a, b, s, f, t: (1 - f) * W - s * outer(seen(W, a) - b, a))
    close(linear_exact(q, k, v, theta, None, alpha, still)[0], decayed)
    assert (gated - decayed).abs().max() > 1e-3  # the equivalence Titans appendix C claims does not hold
    zero = case.stale_state()._replace(S=torch.zeros_like(start.S))
    plain = zero._replace(keys=zero.keys[:, :, :0], values=zero.values[:, :, :0])
    linear = loop(lambda W, a, b, s, f, t: (1 - f) * W + s * outer(b, a))
    close(family.decayed_linear_attention(q, k, v, theta, alpha, plain, chunk=5)[0], linear)
    gamma = case.gamma
    assert gamma is not None

    def windowed(W: Tensor, a: Tensor, b: Tensor, s: Tensor, f: Tensor, t: int) -> Tensor:
        return (1 - f) * W + s * sum(gamma[:, :, t, r, None, None] * outer(past(v, t, r), past(k, t, r)) for r in range(3))

    close(family.swla(q, k, v, theta, alpha, gamma, zero, chunk=5)[0], loop(windowed))


def test_deep_relatives_are_settings_of_the_oracle() -> None:  # T8
    case = fixed_case("two layers, norm, residual", matrix=False)
    q, k, v, theta, _, alpha = case.tokens
    still = case.deep_state()._replace(S=tuple(torch.zeros_like(s) for s in case.S))
    plain = still._replace(keys=still.keys[:, :, :0], values=still.values[:, :, :0])
    options = {"network": case.network, "affine": case.affine}
    start = oracle_state(case.W)
    dot = type(case.network)(loss="dot")
    want, _ = titans(q, k, v, theta, None, alpha, start, network=dot, affine=case.affine, anchor_every=4, init=case.init)
    close(family.dla(q, k, v, theta, alpha, plain, init=case.init, chunk=4, **options)[0], want)
    want, _ = titans(q, k, v, theta, None, alpha, start, anchor_every=4, init=case.init, gamma=case.gamma, **options)
    assert case.gamma is not None
    close(family.omega_net(q, k, v, theta, alpha, case.gamma, still, init=case.init, chunk=4, **options)[0], want)
    want, _ = titans(q, k, v, theta, None, None, start, anchor_every=4, **options)
    close(family.ttt(q, k, v, theta, plain, chunk=4, **options)[0], want)
    one = torch.ones_like(case.gamma[..., :1])
    close(
        deep(*case.tokens, plain, init=None, chunk=4, gamma=one, **options)[0], deep(*case.tokens, plain, init=None, chunk=4, **options)[0]
    )


def test_wrong_blocks_are_named() -> None:
    case = fixed_case("two layers, norm, residual", matrix=False)
    with pytest.raises(ValueError, match="must divide chunk"):
        atlas(*case.tokens, start_of(case), init=None, chunk=4, every=3, network=case.network, gamma=case.gamma)
