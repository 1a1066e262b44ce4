"""The deep memory against the per-token oracle, and the closed-form gradient against autograd (papers' tests T1-T9, T12-T14)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cases import DEEP, Case, alone, build, cases
from torch import Tensor

from kernels.linear import MatrixState, linear_exact, linear_stale
from kernels.mlp import DeepState, deep, deep_state
from kernels.network import MATRIX, Network, inputs_and_deltas, output
from kernels.reference import OracleState, memory_loss, memory_output, oracle_state, titans

L2 = tuple(form for form in DEEP if form != "negative dot product")


def close(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def assert_same_state(state: DeepState, end: OracleState, stream: int | None = None) -> None:
    at = slice(None) if stream is None else slice(stream, stream + 1)
    for got, want in zip((*state.W, *state.S, *state.anchor), (*end.W, *end.S, *end.anchor), strict=True):
        close(got[at], want)
    assert (state.phase[at] == end.phase).all()


def fixed_case(form: str, T: int = 9, chunk: int = 4, **changes: int) -> Case:
    return build(
        **{"seed": 3, "B": 1, "H": 1, "T": T, "d": 3, "chunk": chunk, "cuts": [], "form": form, "lags": 1, "matrix": False, **changes}
    )  # type: ignore[arg-type]


@given(cases(window=False))
def test_closed_form_gradient_is_autograd(case: Case) -> None:  # T1
    W = [w.clone().requires_grad_() for w in case.W]
    affine = None if case.affine is None else (case.affine[0].unsqueeze(1), case.affine[1].unsqueeze(1))
    inputs, deltas = inputs_and_deltas(case.W, case.k, case.v, case.network, affine)
    loss = torch.zeros((), dtype=torch.float64)
    for t in range(case.T):
        loss = loss + memory_loss(W, case.k[:, :, t], case.v[:, :, t], case.network, case.affine).sum()
    for w, x, delta in zip(torch.autograd.grad(loss, W), inputs, deltas, strict=True):
        close(delta.mT @ x, w)
    close(output(case.W, case.q, case.network, affine)[:, :, 0], memory_output(case.W, case.q[:, :, 0], case.network, case.affine))


@given(cases(), st.sampled_from(["after", "before", "anchor"]), st.booleans(), st.booleans(), st.booleans())
def test_dual_form_is_the_loop_that_takes_gradients_at_the_anchor(  # T3, T4 (chunk = 1)
    case: Case, read: str, momentum: bool, decay: bool, to_init: bool
) -> None:
    q, k, v, theta, eta, alpha = case.tokens
    gates = (theta, eta if momentum else None, alpha if decay else None)
    options = {"network": case.network, "affine": case.affine, "init": case.init if to_init else None, "read": read, "gamma": case.gamma}
    want, end = titans(q, k, v, *gates, oracle_state(case.W, case.S), anchor_every=case.chunk, **options)
    got, state = deep(q, k, v, *gates, case.deep_state(), chunk=case.chunk, **options)
    close(got, want)
    assert_same_state(state, end)


@given(cases(forms=("two layers, unit hidden", "two layers, plain", "matrix"), window=False), st.booleans())
def test_hybrid_takes_the_last_layer_at_its_true_weights(case: Case, to_init: bool) -> None:
    options = {"network": case.network, "init": case.init if to_init else None, "exact_last": True}
    want, end = titans(*case.tokens, oracle_state(case.W, case.S), anchor_every=case.chunk, **options)
    got, state = deep(*case.tokens, case.deep_state(), chunk=case.chunk, **options)
    close(got, want)
    assert_same_state(state, end)


@given(cases())
def test_any_split_of_calls_is_one_call(case: Case) -> None:  # T6
    options = {"init": case.init, "chunk": case.chunk, "network": case.network, "affine": case.affine}
    whole, end = deep(*case.tokens, case.deep_state(), gamma=case.gamma, **options)
    state, pieces = case.deep_state(), []
    for part in case.parts():
        gamma = None if case.gamma is None else case.gamma[:, :, part]
        y, state = deep(*(x[:, :, part] for x in case.tokens), state, gamma=gamma, **options)
        pieces.append(y)
    close(torch.cat(pieces, 2), whole)
    assert_same_state(state, end)  # type: ignore[arg-type]
    close(state.keys, end.keys)
    close(state.values, end.values)


@pytest.mark.parametrize("form", list(DEEP))
@pytest.mark.parametrize("lags", [1, 3])
def test_token_by_token_is_one_call(form: str, lags: int) -> None:  # T6, the direct step of a live stream
    case = fixed_case(form, T=9, chunk=4, B=2, lags=lags)
    for hybrid in {False, lags == 1 and not case.network.norm}:
        options = {"chunk": 4, "network": case.network, "affine": case.affine, "exact_last": hybrid}
        for init in (case.init, None):
            whole, end = deep(*case.tokens, case.deep_state(), init=init, gamma=case.gamma, **options)
            state, pieces = case.deep_state(), []
            for t in range(case.T):
                gamma = None if case.gamma is None else case.gamma[:, :, t : t + 1]
                y, state = deep(*(x[:, :, t : t + 1] for x in case.tokens), state, init=init, gamma=gamma, **options)
                pieces.append(y)
            close(torch.cat(pieces, 2), whole)
            assert_same_state(state, end)  # type: ignore[arg-type]
            close(state.keys, end.keys)


@settings(max_examples=10)
@given(cases(max_T=12), st.integers(0, 2**16), st.lists(st.integers(0, 63), min_size=3, max_size=3))
def test_streams_write_or_not_and_stand_anywhere_in_their_chunks(case: Case, seed: int, phases: list[int]) -> None:  # T12
    B = case.q.shape[0]
    write = torch.rand(B, case.T, generator=torch.Generator().manual_seed(seed)) < 0.6
    options = {"network": case.network, "affine": case.affine, "init": case.init}
    phase = torch.tensor(phases[:B]) % case.chunk
    anchor = tuple(0.5 * w for w in case.W)
    state = case.deep_state()._replace(phase=phase, anchor=anchor)
    got, end = deep(*case.tokens, state, chunk=case.chunk, gamma=case.gamma, write=write, **options)
    dense, _ = deep(*case.tokens, state, chunk=case.chunk, gamma=case.gamma, **options)
    zero = [(torch.zeros_like(case.k[:1, :, 0]), torch.zeros_like(case.v[:1, :, 0]))] * state.keys.shape[2]
    for i in range(B):
        at = slice(i, i + 1)
        start = OracleState(
            tuple(w[at] for w in case.W), tuple(s[at] for s in case.S), tuple(a[at] for a in anchor), int(phase[i]), tuple(zero)
        )
        tokens = [x[at] for x in case.tokens]
        want, want_end = titans(*tokens, start, anchor_every=case.chunk, gamma=alone(case.gamma, i), write=write[at], **options)
        close(got[at], want)
        assert_same_state(end, want_end, i)
        close(dense[at], titans(*tokens, start, anchor_every=case.chunk, gamma=alone(case.gamma, i), **options)[0])


@given(cases(), st.data())
def test_a_token_changes_nothing_before_it(case: Case, data: st.DataObject) -> None:  # T7
    j = data.draw(st.integers(0, case.T - 1))
    changed = [x.clone() for x in case.tokens]
    for x in changed:
        x[:, :, j] *= 0.5

    def run(tokens: list[Tensor]) -> Tensor:
        state = case.deep_state()
        return deep(*tokens, state, init=case.init, chunk=case.chunk, network=case.network, affine=case.affine, gamma=case.gamma)[0]

    assert torch.equal(run(list(case.tokens))[:, :, :j], run(changed)[:, :, :j])


@given(cases(forms=("matrix",)))
def test_a_deep_memory_of_one_plain_layer_is_the_matrix_memory(case: Case) -> None:  # T8
    q, k, v = case.tokens[:3]
    gates = [g[..., 0] for g in case.tokens[3:]]
    got, _ = deep(q, k, v, *gates, case.deep_state(), init=None, chunk=case.chunk, network=MATRIX, gamma=case.gamma)
    want, _ = linear_stale(q, k, v, *gates, case.stale_state(), chunk=case.chunk, gamma=case.gamma)
    close(got, want)
    if case.gamma is None:
        hybrid, _ = deep(q, k, v, *gates, case.deep_state(), init=None, chunk=case.chunk, network=MATRIX, exact_last=True)
        close(hybrid, linear_exact(q, k, v, *gates, MatrixState(case.W[0], case.S[0]))[0])


def test_decay_to_the_initial_weights_returns_there_and_decay_to_zero_dies() -> None:  # T9
    case = fixed_case("two layers, norm, residual", T=6)
    zero, one = torch.zeros_like(case.theta), torch.ones_like(case.theta)
    start = case.deep_state()._replace(S=tuple(torch.zeros_like(s) for s in case.S))
    options = {"network": case.network, "affine": case.affine}
    _, home = deep(case.q, case.k, case.v, zero, case.eta, one, start, init=case.init, **options)
    _, dead = deep(case.q, case.k, case.v, zero, case.eta, one, start, init=None, **options)
    for w, target, gone in zip(home.W, case.init, dead.W, strict=True):
        close(w, target.unsqueeze(0), 1e-5)
        assert gone.abs().max() < 1e-5


@pytest.mark.parametrize("form", list(DEEP))
@pytest.mark.parametrize("read", ["after", "anchor"])
def test_gradients(form: str, read: str) -> None:  # T13
    # Mutants tried and caught here: the carried gradient of S dropped at chunk boundaries; the anchor's gradient of the first chunk
    # dropped; deltas detached from the weights (no second-order terms).
    case = fixed_case(form, T=4, chunk=2, d=3)  # at d = 2 a LayerNorm can only return +-1 and hides what lies below it
    n = len(case.W)
    inputs = [*case.tokens, *case.W, *case.S, *case.init, *(case.affine or ())]
    hybrid = not case.network.norm and read == "after"

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        W, S, init, affine = x[6 : 6 + n], x[6 + n : 6 + 2 * n], x[6 + 2 * n : 6 + 3 * n], x[6 + 3 * n :]
        start = case.deep_state()._replace(W=W, S=S, anchor=tuple(0.5 * w for w in W), phase=torch.ones(1, dtype=torch.long))
        y, state = deep(
            *x[:6],
            start,
            init=init,
            chunk=2,
            network=case.network,
            affine=affine or None,
            read=read,
            exact_last=hybrid,  # type: ignore[arg-type]
        )
        return y, *state.W, *state.S, *state.anchor

    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_under_an_omega_window_or_with_gaps(masked: bool) -> None:  # T13
    case = fixed_case("two layers, norm, residual", T=5, chunk=2, lags=1 if masked else 3)
    write = torch.tensor([[True, False, True, True, False]]) if masked else None
    assert masked or case.gamma is not None

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        gamma = None if masked else x[6]
        y, state = deep(
            *x[:6], case.deep_state(), init=case.init, chunk=2, network=case.network, affine=case.affine, gamma=gamma, write=write
        )
        return y, *state.W, *state.S

    inputs = [x.clone().requires_grad_() for x in (*case.tokens, *(() if masked else (case.gamma,)))]  # type: ignore[union-attr]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_gradients_pass_through_the_inner_gradient() -> None:  # T13
    case = fixed_case("two layers, norm, residual", T=12, chunk=3)
    want = [x.clone().requires_grad_() for x in (*case.tokens, *case.W)]
    got = [x.clone().requires_grad_() for x in (*case.tokens, *case.W)]
    options = {"network": case.network, "affine": case.affine, "init": case.init}
    titans(*want[:6], oracle_state(want[6:]), anchor_every=3, **options)[0].square().sum().backward()
    start = case.deep_state()._replace(S=tuple(torch.zeros_like(s) for s in case.S))
    deep(*got[:6], start._replace(W=tuple(got[6:]), anchor=tuple(got[6:])), chunk=3, **options)[0].square().sum().backward()
    for a, b in zip(got, want, strict=True):
        close(a.grad, b.grad)  # type: ignore[arg-type]
    first_order = [x.clone().requires_grad_() for x in (*case.tokens, *case.W)]
    with torch.no_grad():
        inputs, deltas = inputs_and_deltas(case.W, case.k[:, :, :3], case.v[:, :, :3], case.network, None)
    W, step = first_order[6:], first_order[3]  # one chunk, inner gradient held constant: a different, weaker method
    moved = [w - (d * step[:, :, :3, i : i + 1]).mT @ x for i, (w, x, d) in enumerate(zip(W, inputs, deltas, strict=True))]
    output(moved, first_order[0][:, :, :3], case.network).square().sum().backward()
    assert first_order[1].grad is None
    assert (first_order[6].grad - want[6].grad).abs().max() > 1e-3  # type: ignore[operator]


def test_memory_learns_the_same_without_autograd() -> None:  # T14
    case = fixed_case("two layers, norm, residual", T=90)
    options = {"network": case.network, "affine": case.affine, "init": case.init, "chunk": 2}
    y, end = deep(*(x.clone().requires_grad_() for x in case.tokens), case.deep_state(), **options)
    with torch.inference_mode():
        served, served_end = deep(*case.tokens, case.deep_state(), **options)
    close(served, y.detach())
    for a, b in zip(served_end.W, end.W, strict=True):
        close(a, b.detach())


def test_float32_stays_near_float64_over_2048_tokens() -> None:  # T15
    g = torch.Generator().manual_seed(0)
    d, h, T = 8, 16, 2048
    tokens = [torch.nn.functional.normalize(torch.randn(1, 1, T, d, generator=g, dtype=torch.float64), dim=-1) for _ in range(3)]
    tokens[0], tokens[1] = tokens[0] * d**0.5, tokens[1] * d**0.5
    eta = torch.full((1, 1, T, 2), 0.7, dtype=torch.float64)
    gates = [(1 - eta) * 0.5 / 16 / d, eta, torch.full_like(eta, 0.02)]
    init = [
        torch.randn(1, h, d, generator=g, dtype=torch.float64) / d**0.5,
        torch.randn(1, d, h, generator=g, dtype=torch.float64) / h**0.5,
    ]
    want, _ = deep(*tokens, *gates, deep_state(init, 1), init=init)
    small = [w.float() for w in init]
    got, state = deep(*(x.float() for x in (*tokens, *gates)), deep_state(small, 1), init=small)
    assert (got - want).norm() / want.norm() < 1e-3
    assert all(w.isfinite().all() for w in state.W)


def test_wrong_use_is_named() -> None:
    case = fixed_case("two layers, norm, residual")
    with pytest.raises(ValueError, match="theta has shape"):
        deep(*case.tokens[:3], case.theta[..., :1], case.eta, case.alpha, case.deep_state(), init=case.init)
    with pytest.raises(ValueError, match="exact_last"):
        deep(*case.tokens, case.deep_state(), init=case.init, network=case.network, exact_last=True)
    with pytest.raises(ValueError, match="gated memory has 3"):
        deep(*case.tokens, case.deep_state(), init=case.init, network=Network(gated=True))
