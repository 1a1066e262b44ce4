"""The matrix memory against the per-token oracle (papers' tests T2-T9, T12-T15)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_cases import Case, alone, build, cases
from torch import Tensor

from kernels.linear import MatrixState, StaleState, linear_exact, linear_stale, matrix_state, stale_state
from kernels.network import MATRIX, Network
from kernels.reference import oracle_state, titans

READ = st.sampled_from(["after", "before"])


def close(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def fixed_case(T: int = 40, chunk: int = 16, **changes: int) -> Case:
    return build(
        **{"seed": 7, "B": 2, "H": 2, "T": T, "d": 5, "chunk": chunk, "cuts": [], "form": "matrix", "lags": 1, "matrix": True, **changes}
    )  # type: ignore[arg-type]


@given(cases(matrix=True, window=False), READ, st.booleans(), st.booleans())
def test_exact_form_is_the_recurrence_for_every_chunk(case: Case, read: str, momentum: bool, decay: bool) -> None:  # T2
    q, k, v, theta, eta, alpha = case.tokens
    gates = (theta, eta if momentum else None, alpha if decay else None)
    want, end = titans(q, k, v, *gates, oracle_state(case.W, case.S), network=MATRIX, read=read)
    got, state = linear_exact(q, k, v, *gates, case.matrix_state(), chunk=case.chunk, read=read)
    close(got, want)
    close(state.W, end.W[0])
    close(state.S, end.S[0])


@given(cases(matrix=True), st.sampled_from(["after", "before", "anchor"]), st.sampled_from(["l2", "dot"]))
def test_stale_form_is_the_loop_that_takes_gradients_at_the_anchor(case: Case, read: str, loss: str) -> None:  # T3, T4 (chunk = 1)
    network = Network(norm=False, residual=False, loss=loss)
    want, end = titans(*case.tokens, oracle_state(case.W, case.S), network=network, anchor_every=case.chunk, read=read, gamma=case.gamma)
    got, state = linear_stale(*case.tokens, case.stale_state(), chunk=case.chunk, read=read, gamma=case.gamma, loss=loss)
    close(got, want)
    close(state.W, end.W[0])
    close(state.S, end.S[0])
    close(state.anchor, end.anchor[0])
    assert (state.phase == end.phase).all()


def test_stale_and_exact_differ_at_chunk_16() -> None:  # T5
    # Mutants tried and caught: linear_stale solving the triangular system (here: the difference is 0); the first chunk of a call anchored
    # at the current W instead of the carried anchor (test_any_split_of_calls_is_one_call); an anchor taken one token early, the
    # papers' printed index (test_stale_form_is_the_loop_that_takes_gradients_at_the_anchor).
    case = fixed_case()
    exact, _ = linear_exact(*case.tokens, case.matrix_state(), chunk=16)
    stale, _ = linear_stale(*case.tokens, case.stale_state(), chunk=16)
    assert (exact - stale).abs().max() > 1e-3
    again, _ = linear_stale(*case.tokens, case.stale_state(), chunk=1)
    close(again, exact)


@given(cases(matrix=True), READ)
def test_any_split_of_calls_is_one_call(case: Case, read: str) -> None:  # T6
    whole, end = linear_stale(*case.tokens, case.stale_state(), chunk=case.chunk, read=read, gamma=case.gamma)
    exact_whole, exact_end = linear_exact(*case.tokens, case.matrix_state(), chunk=case.chunk, read=read)
    state, exact_state = case.stale_state(), case.matrix_state()
    pieces, exact_pieces = [], []
    for part in case.parts():
        tokens = [x[:, :, part] for x in case.tokens]
        gamma = None if case.gamma is None else case.gamma[:, :, part]
        y, state = linear_stale(*tokens, state, chunk=case.chunk, read=read, gamma=gamma)
        pieces.append(y)
        y, exact_state = linear_exact(*tokens, exact_state, chunk=case.chunk, read=read)
        exact_pieces.append(y)
    close(torch.cat(pieces, 2), whole)
    close(torch.cat(exact_pieces, 2), exact_whole)
    for got, want in zip((*state, *exact_state), (*end, *exact_end), strict=True):
        close(got, want)


@pytest.mark.parametrize("lags", [1, 3])
@pytest.mark.parametrize("loss", ["l2", "dot"])
@pytest.mark.parametrize("read", ["after", "before", "anchor"])
def test_token_by_token_is_one_call(lags: int, loss: str, read: str) -> None:  # T6, the direct step of a live stream
    case = fixed_case(T=11, chunk=4, lags=lags)
    for masked in (False, True):
        write = torch.rand(2, case.T, generator=torch.Generator().manual_seed(3)) < (0.6 if masked else 2.0)
        options = {"chunk": 4, "read": read, "loss": loss}
        whole, end = linear_stale(*case.tokens, case.stale_state(), gamma=case.gamma, write=write if masked else None, **options)
        state, pieces = case.stale_state(), []
        for t in range(case.T):
            at = slice(t, t + 1)
            gamma = None if case.gamma is None else case.gamma[:, :, at]
            y, state = linear_stale(*(x[:, :, at] for x in case.tokens), state, gamma=gamma, write=write[:, at], **options)
            pieces.append(y)
        close(torch.cat(pieces, 2), whole)
        for a, b in zip(state, end, strict=True):
            close(a, b)


@given(cases(matrix=True), st.integers(0, 2**16))
def test_unwritten_tokens_leave_the_state_and_still_read(case: Case, seed: int) -> None:
    write = torch.rand(case.q.shape[0], case.T, generator=torch.Generator().manual_seed(seed)) < 0.6
    got, state = linear_stale(*case.tokens, case.stale_state(), chunk=case.chunk, gamma=case.gamma, write=write)
    exact, exact_state = linear_exact(*case.tokens, case.matrix_state(), chunk=case.chunk, write=write)
    for i in range(write.shape[0]):  # each stream alone, so that the oracle's single phase suffices
        tokens = [x[i : i + 1] for x in case.tokens]
        for y, end, chunk, gamma in ((got, state, case.chunk, alone(case.gamma, i)), (exact, exact_state, 1, None)):
            start = oracle_state([case.W[0][i : i + 1]], [case.S[0][i : i + 1]])
            want, want_end = titans(*tokens, start, network=MATRIX, anchor_every=chunk, gamma=gamma, write=write[i : i + 1])
            close(y[i : i + 1], want)
            close(end.W[i : i + 1], want_end.W[0])
            close(end.S[i : i + 1], want_end.S[0])
        assert int(state.phase[i]) == int(write[i].sum()) % case.chunk


@given(cases(matrix=True, max_T=12), st.lists(st.integers(0, 63), min_size=3, max_size=3))
def test_streams_at_different_places_of_their_chunks_do_not_meet(case: Case, phases: list[int]) -> None:  # T12
    B = case.q.shape[0]
    state = case.stale_state()._replace(phase=torch.tensor(phases[:B]) % case.chunk, anchor=0.5 * case.W[0])
    together, end = linear_stale(*case.tokens, state, chunk=case.chunk, gamma=case.gamma)
    for i in range(B):
        own = StaleState(*(x[i : i + 1] for x in state))
        y, own_end = linear_stale(*(x[i : i + 1] for x in case.tokens), own, chunk=case.chunk, gamma=alone(case.gamma, i))
        close(together[i : i + 1], y)
        for a, b in zip(end, own_end, strict=True):
            close(a[i : i + 1], b)
    order = torch.arange(B).flip(0)
    permuted, _ = linear_exact(*(x[order] for x in case.tokens), MatrixState(*(x[order] for x in case.matrix_state())), chunk=case.chunk)
    close(permuted, linear_exact(*case.tokens, case.matrix_state(), chunk=case.chunk)[0][order])


@given(cases(matrix=True), st.data())
def test_a_token_changes_nothing_before_it(case: Case, data: st.DataObject) -> None:  # T7
    j = data.draw(st.integers(0, case.T - 1))
    changed = [x.clone() for x in case.tokens]
    for x in changed:
        x[:, :, j] *= 0.5
    for run in (
        lambda t: linear_exact(*t, case.matrix_state(), chunk=case.chunk)[0],
        lambda t: linear_stale(*t, case.stale_state(), chunk=case.chunk, gamma=case.gamma)[0],
    ):
        assert torch.equal(run(case.tokens)[:, :, :j], run(changed)[:, :, :j])


@given(cases(matrix=True, window=False))
def test_channelwise_forgetting_is_one_gate_an_output_row(case: Case) -> None:
    alpha = torch.sigmoid(case.v) * 0.5
    want, end = titans(*case.tokens[:5], alpha.unsqueeze(3), oracle_state(case.W, case.S), network=MATRIX)
    got, state = linear_exact(*case.tokens[:5], alpha, case.matrix_state(), chunk=case.chunk)
    close(got, want)
    close(state.W, end.W[0])
    same = case.alpha.unsqueeze(-1).expand(alpha.shape)
    close(linear_exact(*case.tokens[:5], same, case.matrix_state())[0], linear_exact(*case.tokens, case.matrix_state())[0])


@given(cases(matrix=True), st.sampled_from(["after", "before", "anchor"]), st.sampled_from(["l2", "dot"]))
def test_channelwise_forgetting_at_the_chunks_start_in_any_split(case: Case, read: str, loss: str) -> None:
    alpha = torch.sigmoid(case.v) * 0.5
    network = replace(MATRIX, loss=loss)
    options = {"read": read, "gamma": case.gamma}
    want, end = titans(
        *case.tokens[:5], alpha.unsqueeze(3), oracle_state(case.W, case.S), network=network, anchor_every=case.chunk, **options
    )  # fmt: skip
    state, pieces = case.stale_state(), []
    for part in case.parts():
        tokens = [x[:, :, part] for x in (*case.tokens[:5], alpha)]
        gamma = None if case.gamma is None else case.gamma[:, :, part]
        y, state = linear_stale(*tokens, state, chunk=case.chunk, read=read, gamma=gamma, loss=loss)
        pieces.append(y)
    close(torch.cat(pieces, 2), want)
    close(state.W, end.W[0])
    close(state.S, end.S[0])
    close(state.keys, linear_stale(*case.tokens, case.stale_state(), chunk=case.chunk, gamma=case.gamma)[1].keys)
    close(state.values, linear_stale(*case.tokens, case.stale_state(), chunk=case.chunk, gamma=case.gamma)[1].values)


def test_omega_window_of_one_with_gate_one_is_titans() -> None:  # T8
    case = fixed_case()
    one, _ = linear_stale(*case.tokens, case.stale_state(), chunk=8)
    omega, _ = linear_stale(*case.tokens, case.stale_state(), chunk=8, gamma=torch.ones(*case.theta.shape, 1, dtype=torch.float64))
    close(omega, one)


def test_ttt_theorem_one_batch_gradient_descent_is_linear_attention() -> None:  # T8
    case = fixed_case(T=24)
    zero = MatrixState(torch.zeros_like(case.W[0]), torch.zeros_like(case.W[0]))
    start = StaleState(zero.W, zero.S, zero.W, torch.zeros(2, dtype=torch.long), *case.stale_state()[4:])
    step = torch.ones_like(case.theta)  # step 1/2 on ||.||^2 is step 1 on 1/2 ||.||^2
    got, _ = linear_stale(case.q, case.k, case.v, step, None, None, start, chunk=24)
    close(got, (case.q @ case.k.mT).tril() @ case.v)


def test_gates_at_their_limits() -> None:  # T9
    case = fixed_case(T=8)
    zero, one = torch.zeros_like(case.theta), torch.ones_like(case.theta)
    _, cleared = linear_exact(case.q, case.k, case.v, zero, None, one, case.matrix_state())
    assert cleared.W.abs().max() < 1e-5
    no_momentum = MatrixState(case.W[0], torch.zeros_like(case.S[0]))
    _, kept = linear_exact(case.q, case.k, case.v, zero, case.eta, zero, no_momentum)
    close(kept.W, case.W[0])
    a, _ = linear_exact(case.q, case.k, case.v, case.theta, zero, case.alpha, no_momentum)
    b, _ = linear_exact(case.q, case.k, case.v, case.theta, None, case.alpha, no_momentum)
    close(a, b, 1e-4)


@pytest.mark.usefixtures("flushed_denormals")
@pytest.mark.parametrize("alpha,eta", [(1.0, 0.5), (0.0, 0.0), (1.0, 0.0), (0.5, 1.0), (0.9999, 1e-8)])
def test_float32_stays_finite_at_the_limits_over_4096_tokens(alpha: float, eta: float) -> None:  # T9
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.nn.functional.normalize(torch.randn(1, 2, 4096, 8, generator=g), dim=-1) for _ in range(3))
    gates = [torch.full((1, 2, 4096), x) for x in (0.2 * (1 - min(eta, 0.99)), eta if eta < 1 else 0.999, alpha)]
    y, state = linear_exact(q, k, v, *gates, matrix_state(torch.zeros(2, 8, 8), 1))
    assert all(x.isfinite().all() for x in (y, *state))
    y, stale = linear_stale(q, k, v, gates[0] / 16, *gates[1:], stale_state(torch.zeros(2, 8, 8), 1))
    assert all(x.isfinite().all() for x in (y, *stale))


def leaves(case: Case) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in (*case.tokens, case.W[0], case.S[0])]


def test_gradients_of_both_forms() -> None:  # T13
    case = fixed_case(T=7, chunk=3, B=1, H=1, d=3)

    def exact(*x: Tensor) -> tuple[Tensor, ...]:
        y, state = linear_exact(*x[:6], MatrixState(x[6], x[7]), chunk=3)
        return y, *state

    def stale(*x: Tensor) -> tuple[Tensor, ...]:
        start = StaleState(x[6], x[7], 0.5 * x[6], torch.ones(1, dtype=torch.long), *case.stale_state()[4:])
        y, state = linear_stale(*x[:6], start, chunk=3)
        return y, state.W, state.S, state.anchor

    assert torch.autograd.gradcheck(exact, leaves(case), fast_mode=True)
    assert torch.autograd.gradcheck(stale, leaves(case), fast_mode=True)


@pytest.mark.parametrize("loss", ["l2", "dot"])
def test_gradients_under_an_omega_window_with_gaps_and_by_row(loss: str) -> None:  # T13
    case = fixed_case(T=5, chunk=2, B=1, H=1, d=3, lags=3)
    assert case.gamma is not None
    gaps = torch.tensor([[True, False, True, True, False]])
    alpha = torch.sigmoid(case.v)

    def omega(*x: Tensor) -> Tensor:
        return linear_stale(*x[:6], case.stale_state(), chunk=2, gamma=x[6], loss=loss)[0]

    def gappy(*x: Tensor) -> tuple[Tensor, ...]:
        plain = case.stale_state()._replace(keys=case.k[:, :, :0], values=case.v[:, :, :0])
        return linear_stale(*x, plain, chunk=2, write=gaps, loss=loss)[0], linear_exact(*x, case.matrix_state(), chunk=2, write=gaps)[0]

    def by_row(*x: Tensor) -> Tensor:
        return linear_exact(*x, case.matrix_state(), chunk=2)[0]

    for run, inputs in ((omega, (*case.tokens, case.gamma)), (gappy, case.tokens), (by_row, (*case.tokens[:5], alpha))):
        assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs], fast_mode=True)


def test_half_precision_tokens_meet_a_float32_memory() -> None:
    case = fixed_case(T=20)
    tokens = [x.bfloat16() for x in case.tokens[:3]]
    gates = [x.float() for x in case.tokens[3:]]
    state = MatrixState(*(x.float() for x in case.matrix_state()))
    y, end = linear_exact(*tokens, *gates, state)
    want, _ = linear_exact(*(x.float() for x in tokens), *gates, state)
    assert y.dtype == torch.bfloat16 and end.W.dtype == torch.float32
    close(y, want.bfloat16())


def test_gradients_pass_through_the_inner_gradient() -> None:  # T13
    # Mutants tried and caught: _Chunks.backward without the path through E to Z, and without the gradient of f (both
    # test_gradients_of_both_forms); the chunk's errors detached from the graph (this test).
    case = fixed_case(T=20, chunk=4)
    x = leaves(case)
    linear_exact(*x[:6], MatrixState(x[6], x[7]), chunk=4)[0].sum().backward()
    want = leaves(case)
    titans(*want[:6], oracle_state([want[6]], [want[7]]), network=MATRIX)[0].sum().backward()
    for a, b in zip(x, want, strict=True):
        close(a.grad, b.grad)  # type: ignore[arg-type]
    with torch.no_grad():  # the same outer read, the inner gradient held constant
        _, path = linear_exact(*case.tokens, case.matrix_state(), chunk=4)
    detached = leaves(case)
    W, S, outputs = detached[6], detached[7], []
    for t in range(case.T):
        q, k, v, theta, eta, alpha = (z[:, :, t] for z in detached[:6])
        error = (torch.einsum("bhvk,bhk->bhv", W, k) - v).detach()
        S = eta[..., None, None] * S - theta[..., None, None] * error.unsqueeze(-1) * k.detach().unsqueeze(-2)
        W = (1 - alpha[..., None, None]) * W + S
        outputs.append(torch.einsum("bhvk,bhk->bhv", W, q))
    torch.stack(outputs, 2).sum().backward()
    close(W, path.W)
    assert detached[1].grad is None or (detached[1].grad - x[1].grad).abs().max() > 1e-3  # type: ignore[operator]
    assert (detached[6].grad - x[6].grad).abs().max() > 1e-3  # type: ignore[operator]


def test_memory_learns_the_same_without_autograd() -> None:  # T14
    case = fixed_case(T=70)
    with_grad = linear_exact(*leaves(case)[:6], case.matrix_state(), chunk=16)
    with torch.inference_mode():
        without = linear_exact(*case.tokens, case.matrix_state(), chunk=16)
        stale = linear_stale(*case.tokens, case.stale_state(), chunk=2)
    close(with_grad[0].detach(), without[0])
    close(with_grad[1].W.detach(), without[1].W)
    close(stale[0], linear_stale(*leaves(case)[:6], case.stale_state(), chunk=2)[0].detach())


def test_float32_drifts_little_over_4096_tokens() -> None:  # T15
    g = torch.Generator().manual_seed(1)
    tokens = [torch.nn.functional.normalize(torch.randn(1, 2, 4096, 16, generator=g, dtype=torch.float64), dim=-1) for _ in range(3)]
    eta = torch.sigmoid(torch.randn(1, 2, 4096, generator=g, dtype=torch.float64))
    gates = [(1 - eta) * 0.5, eta, torch.full_like(eta, 0.02)]
    init = torch.zeros(2, 16, 16, dtype=torch.float64)
    want, _ = linear_exact(*tokens, *gates, matrix_state(init, 1))
    got, _ = linear_exact(*(x.float() for x in (*tokens, *gates)), matrix_state(init.float(), 1))
    assert (got - want).norm() / want.norm() < 1e-3


@pytest.mark.parametrize("cut", [(slice(0, 0), slice(None)), (slice(None), slice(0, 0))])
def test_no_stream_or_no_token_is_no_work(cut: tuple[slice, slice]) -> None:
    case = fixed_case(T=4)
    tokens = [x[cut[0], :, cut[1]] for x in case.tokens]
    for run, state in ((linear_exact, case.matrix_state()), (linear_stale, case.stale_state())):
        part = type(state)(*(x[cut[0]] for x in state))
        y, end = run(*tokens, part)  # type: ignore[operator]
        assert y.shape == tokens[2].shape
        for a, b in zip(end, part, strict=True):
            assert torch.equal(a, b)


def test_wrong_shapes_are_named() -> None:
    case = fixed_case(T=4)
    with pytest.raises(ValueError, match="theta has shape"):
        linear_exact(case.q, case.k, case.v, case.theta[..., :3], case.eta, case.alpha, case.matrix_state())
    with pytest.raises(ValueError, match="made with another chunk"):
        linear_stale(*case.tokens, case.stale_state()._replace(phase=torch.tensor([9, 0])), chunk=8)
    with pytest.raises(ValueError, match="lags"):
        linear_stale(*case.tokens, case.stale_state(), gamma=torch.ones(2, 2, 4, 3))
