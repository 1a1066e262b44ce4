"""The exact Omega rule of a matrix memory against the per-token oracle (papers' tests T2, T6, T7, T8, T13)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_cases import Case, alone, build, cases
from torch import Tensor

from kernels.linear import linear_exact, linear_stale, stale_state
from kernels.network import MATRIX
from kernels.omega import OmegaState, omega_exact, omega_state
from kernels.reference import oracle_state, titans


def close(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def start_of(case: Case) -> OmegaState:
    stale = case.stale_state()
    return OmegaState(stale.W, stale.S, stale.keys, stale.values)


def lags_of(case: Case) -> Tensor:
    return torch.ones(*case.theta.shape, 1, dtype=torch.float64) if case.gamma is None else case.gamma


@given(cases(matrix=True), st.sampled_from(["after", "before"]), st.booleans(), st.booleans())
def test_exact_omega_is_the_recurrence_for_every_chunk_and_split(case: Case, read: str, momentum: bool, decay: bool) -> None:
    q, k, v, theta, eta, alpha = case.tokens
    gates = (theta, eta if momentum else None, alpha if decay else None)
    gamma = lags_of(case)
    want, end = titans(q, k, v, *gates, oracle_state(case.W, case.S), network=MATRIX, read=read, gamma=gamma)
    got, state = omega_exact(q, k, v, *gates, gamma, start_of(case), chunk=case.chunk, read=read)
    close(got, want)
    close(state.W, end.W[0])
    close(state.S, end.S[0])
    state, pieces = start_of(case), []
    for part in case.parts():
        tokens = [None if x is None else x[:, :, part] for x in (q, k, v, *gates, gamma)]
        y, state = omega_exact(*tokens, state, chunk=case.chunk, read=read)  # type: ignore[arg-type]
        pieces.append(y)
    close(torch.cat(pieces, 2), want)
    close(state.W, end.W[0])


@given(cases(matrix=True, max_T=10))
def test_channelwise_forgetting_is_one_gate_an_output_row(case: Case) -> None:
    alpha, gamma = torch.sigmoid(case.v) * 0.5, lags_of(case)
    want, end = titans(*case.tokens[:5], alpha.unsqueeze(3), oracle_state(case.W, case.S), network=MATRIX, gamma=gamma)
    state, pieces = start_of(case), []
    for part in case.parts():
        y, state = omega_exact(*(x[:, :, part] for x in (*case.tokens[:5], alpha, gamma)), state, chunk=case.chunk)
        pieces.append(y)
    close(torch.cat(pieces, 2), want)
    close(state.W, end.W[0])
    close(state.S, end.S[0])


@given(cases(matrix=True, max_T=10), st.integers(0, 2**16))
def test_unwritten_tokens_stay_out_of_memory_and_window(case: Case, seed: int) -> None:
    write = torch.rand(case.q.shape[0], case.T, generator=torch.Generator().manual_seed(seed)) < 0.6
    got, state = omega_exact(*case.tokens, lags_of(case), start_of(case), chunk=case.chunk, write=write)
    for i in range(write.shape[0]):
        at = slice(i, i + 1)
        start = oracle_state([case.W[0][at]], [case.S[0][at]])
        tokens = [x[at] for x in case.tokens]
        want, end = titans(*tokens, start, network=MATRIX, gamma=alone(case.gamma, i), write=write[at])
        close(got[at], want)
        close(state.W[at], end.W[0])


def fixed_case(lags: int) -> Case:
    return build(seed=9, B=1, H=1, T=6, d=3, chunk=4, cuts=[], form="matrix", lags=lags, matrix=True)


def test_a_window_of_one_is_titans_and_the_chunk_start_form_is_not() -> None:
    case = fixed_case(1)
    close(omega_exact(*case.tokens, lags_of(case), start_of(case), chunk=4)[0], linear_exact(*case.tokens, case.matrix_state())[0])
    case = fixed_case(3)
    exact = omega_exact(*case.tokens, lags_of(case), start_of(case), chunk=4)[0]
    assert (exact - linear_stale(*case.tokens, case.stale_state(), chunk=4, gamma=case.gamma)[0]).abs().max() > 1e-3
    close(exact, linear_stale(*case.tokens, case.stale_state(), chunk=1, gamma=case.gamma)[0])


def test_gradients() -> None:
    case = fixed_case(3)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        y, state = omega_exact(*x[:7], OmegaState(*x[7:]), chunk=4)
        return y, *state

    inputs = (*case.tokens, lags_of(case), *start_of(case))
    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in inputs], fast_mode=True)


def test_large_steps_on_equal_keys_explode_only_at_the_chunk_start() -> None:
    key = torch.nn.functional.normalize(torch.ones(1, 1, 512, 8), dim=-1)
    value = torch.ones(1, 1, 512, 8)
    theta, gamma = torch.full((1, 1, 512), 0.2), torch.ones(1, 1, 512, 4)  # theta * c = 0.8 < 2, but 16 times that
    y, exact = omega_exact(key, key, value, theta, None, None, gamma, omega_state(torch.zeros(1, 8, 8), 1, 4))
    assert (y[:, :, -1] - 1).abs().max() < 1e-3 and exact.W.abs().max() < 2
    start = stale_state(torch.zeros(1, 8, 8), 1, window=4)
    y, _ = linear_stale(key, key, value, theta, None, None, start, chunk=16, gamma=gamma)
    assert not (y.abs().max() < 1e6)
