"""The native kernels against the torch form in float64, for every vector width the processor has: outputs, states, every gradient, steps.

The torch forms are themselves tested equal to the per-token oracle; here one token loop of the oracle is kept as an anchor of its own.
Mutants tried and caught: the carried anchor taken at the current weights; the backward of a chunk that forgets GS's last row; gelu'' left
out; a scratch row not padded with zeros (shapes 5, 7, 9 are there for that).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kernels.native as native
from kernels import linear, mlp
from kernels.linear import MatrixState
from kernels.mlp import DeepState
from kernels.network import MATRIX, Network
from kernels.reference import oracle_state, titans

built = native.status()
needs_library = pytest.mark.skipif(not built.available, reason=built.reason)


def widths() -> list[int]:
    return [w for w in (16, 8, 4) if native.select_width(w) == w] if built.available else [0]


@pytest.fixture(params=widths(), ids=lambda w: f"{w} floats")
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    native.select_width(request.param)
    yield request.param
    native.select_width(0)


class LinearCase(NamedTuple):
    B: int
    H: int
    T: int
    dk: int
    dv: int
    chunk: int
    read: str = "after"
    mask: bool = False
    eta: bool = True
    alpha: bool = True


LINEAR = [
    LinearCase(2, 2, 37, 16, 16, 16),
    LinearCase(1, 2, 70, 32, 32, 64),
    LinearCase(2, 1, 53, 20, 13, 24, "before"),
    LinearCase(1, 1, 5, 3, 7, 2),
    LinearCase(2, 2, 40, 16, 24, 16, "after", mask=True),
    LinearCase(2, 1, 33, 8, 8, 33, "before", mask=True),
    LinearCase(1, 2, 30, 17, 33, 16, eta=False),
    LinearCase(1, 2, 30, 4, 4, 7, alpha=False),
]


def error(got: Tensor, want: Tensor) -> float:
    scale = want.detach().norm().clamp_min(1e-6)
    return float((got.detach().double() - want.detach()).norm() / scale)


def linear_problem(c: LinearCase, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
    torch.manual_seed(seed)
    q, k, v = torch.randn(c.B, c.H, c.T, c.dk), torch.randn(c.B, c.H, c.T, c.dk), torch.randn(c.B, c.H, c.T, c.dv)
    eta = torch.rand(c.B, c.H, c.T) * 0.9
    theta, alpha = (1 - eta) * torch.rand(c.B, c.H, c.T), torch.rand(c.B, c.H, c.T) * 0.2
    state = [0.3 * torch.randn(c.B, c.H, c.dv, c.dk), 0.1 * torch.randn(c.B, c.H, c.dv, c.dk)]
    write = torch.rand(c.B, c.T) > 0.3 if c.mask else None
    return [x.double() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, theta, eta, alpha, *state)], write


def linear_run(form: Any, c: LinearCase, x: list[Tensor], write: Tensor | None) -> tuple[Tensor, MatrixState]:
    eta, alpha = x[4] if c.eta else None, x[5] if c.alpha else None
    return form(*x[:4], eta, alpha, MatrixState(*x[6:]), chunk=c.chunk, read=c.read, write=write)  # type: ignore[no-any-return]


@needs_library
@pytest.mark.parametrize("c", LINEAR, ids=str)
def test_matrix_memory_and_its_gradients(c: LinearCase, width: int) -> None:
    x, write = linear_problem(c)
    results = []
    for form, dtype in ((linear.linear_exact, torch.float64), (native.linear_exact, torch.float32)):
        leaves = [t.to(dtype).clone().requires_grad_() for t in x]
        y, state = linear_run(form, c, leaves, write)
        torch.manual_seed(1)
        seeds = [torch.randn(o.shape).to(dtype) for o in (y, *state)]
        results.append(([y, *state], torch.autograd.grad([y, *state], leaves, seeds, materialize_grads=True)))
    (want, want_grads), (got, got_grads) = results
    assert max(map(error, got, want)) < 1e-6
    assert max(map(error, got_grads, want_grads)) < 5e-6


@needs_library
@pytest.mark.parametrize("c", LINEAR, ids=str)
def test_matrix_steps_are_one_call(c: LinearCase, width: int) -> None:
    x, write = linear_problem(c)
    want, end = linear_run(linear.linear_exact, c, x, write)
    small = [t.float() for t in x]
    state, outputs = MatrixState(*small[6:]), []
    with torch.inference_mode():
        for t in range(c.T):
            one = [*(s[:, :, t : t + 1] for s in small[:6]), *state]
            y, state = linear_run(native.linear_exact, c, one, None if write is None else write[:, t : t + 1])
            outputs.append(y)
    assert error(torch.cat(outputs, 2), want) < 1e-6
    assert error(state.W, end.W) < 1e-6 and error(state.S, end.S) < 1e-6


@needs_library
def test_matrix_step_in_place_is_the_step(width: int) -> None:
    x, _ = linear_problem(LinearCase(3, 2, 1, 20, 13, 1))
    small = [t.float() for t in x]
    want, end = native.linear_exact(*small[:6], MatrixState(*small[6:]))
    state, y = MatrixState(*(s.clone() for s in small[6:])), torch.empty_like(small[2])
    native.linear_step_(*small[:6], state, y)
    assert torch.equal(y, want) and torch.equal(state.W, end.W) and torch.equal(state.S, end.S)


@needs_library
@pytest.mark.parametrize("M,N,K", [(1, 1, 1), (8, 32, 16), (13, 20, 7), (300, 24, 33), (19, 130, 600)])
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_products_of_any_size(M: int, N: int, K: int, ta: bool, tb: bool, half: bool, width: int) -> None:
    torch.manual_seed(0)
    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    room = torch.full((M, N + 3), torch.nan)  # c is a part of it: what lies behind its rows stays as it was
    room[:, :N] = c
    given = [x.mT.contiguous() if flip else x for x, flip in ((a, ta), (b, tb))]
    for add in (False, True):
        torch.ops.tethys_native.matmul(given[0], ta, given[1], tb, room[:, :N], int(add), half)
        rounded = [x.bfloat16().double() if half else x.double() for x in (a, b)]
        assert error(room[:, :N], rounded[0] @ rounded[1] * (2 if add else 1)) < 1e-6
        assert room[:, N:].isnan().all()


class DeepCase(NamedTuple):
    B: int
    H: int
    T: int
    d_in: int
    d_out: int
    h: int
    chunk: int
    read: str
    phase: int = 0  # of stream 0; each next stream stands 3 tokens further
    norm: bool = True
    affine: bool = True
    init: bool = True
    mask: bool = False
    shared: bool = False
    eta: bool = True
    alpha: bool = True


DEEP = [
    DeepCase(1, 2, 32, 16, 16, 32, 16, "anchor"),
    DeepCase(1, 1, 32, 16, 16, 32, 16, "after"),
    DeepCase(2, 2, 37, 16, 16, 32, 16, "anchor", phase=3),
    DeepCase(2, 2, 41, 20, 20, 45, 16, "after", phase=5),
    DeepCase(1, 1, 20, 5, 7, 9, 4, "before", phase=1, affine=False),
    DeepCase(2, 1, 40, 8, 8, 16, 16, "after", phase=2, norm=False, init=False),
    DeepCase(2, 1, 40, 8, 8, 16, 16, "anchor", phase=2, norm=False, init=False, shared=True),
    DeepCase(2, 2, 50, 16, 16, 32, 16, "after", mask=True, shared=True),
    DeepCase(2, 2, 50, 16, 16, 32, 16, "anchor", phase=2, mask=True),
    DeepCase(1, 1, 30, 16, 16, 32, 32, "after", affine=False, eta=False),
    DeepCase(1, 1, 30, 16, 16, 32, 1, "before", alpha=False),
    DeepCase(1, 1, 70, 32, 32, 128, 64, "after"),
]


def deep_problem(c: DeepCase) -> tuple[list[Tensor], Tensor, Tensor | None]:
    torch.manual_seed(0)
    q, k, v = torch.randn(c.B, c.H, c.T, c.d_in), 0.7 * torch.randn(c.B, c.H, c.T, c.d_in), torch.randn(c.B, c.H, c.T, c.d_out)
    gate = (c.B, c.H, c.T) if c.shared else (c.B, c.H, c.T, 2)
    eta = torch.rand(gate) * 0.9
    theta, alpha = (1 - eta) * torch.rand(gate) * 0.1, torch.rand(gate) * 0.2
    shapes = [(c.h, c.d_in), (c.d_out, c.h)]
    W = [0.3 * torch.randn(c.B, c.H, *s) for s in shapes]
    S = [0.05 * torch.randn(c.B, c.H, *s) for s in shapes]
    A = [w + 0.1 * torch.randn(w.shape) for w in W]
    init = [0.3 * torch.randn(c.H, *s) for s in shapes]
    affine = [1 + 0.1 * torch.randn(c.H, c.d_out), 0.1 * torch.randn(c.H, c.d_out)]
    phase = torch.tensor([(c.phase + 3 * b) % c.chunk if c.phase else 0 for b in range(c.B)])
    write = torch.rand(c.B, c.T) > 0.3 if c.mask else None
    return [x.double() for x in (q, k, v, theta, eta, alpha, *W, *S, *A, *init, *affine)], phase, write


def deep_run(form: Any, c: DeepCase, x: list[Tensor], phase: Tensor, write: Tensor | None) -> tuple[Tensor, DeepState]:
    none = x[6].new_zeros(c.B, c.H, 0, c.d_in)
    state = DeepState(tuple(x[6:8]), tuple(x[8:10]), tuple(x[10:12]), phase, none, x[6].new_zeros(c.B, c.H, 0, c.d_out))
    return form(  # type: ignore[no-any-return]
        *x[:4],
        x[4] if c.eta else None,
        x[5] if c.alpha else None,
        state,
        init=tuple(x[12:14]) if c.init else None,
        chunk=c.chunk,
        network=Network(norm=c.norm, residual=c.d_in == c.d_out),
        affine=tuple(x[14:16]) if c.affine and c.norm else None,
        read=c.read,
        write=write,
    )


@needs_library
@pytest.mark.parametrize("c", DEEP, ids=str)
def test_deep_memory_and_its_gradients(c: DeepCase, width: int) -> None:
    x, phase, write = deep_problem(c)
    results = []
    for form, dtype in ((mlp.deep, torch.float64), (native.deep, torch.float32)):
        leaves = [t.to(dtype).clone().requires_grad_() for t in x]
        y, state = deep_run(form, c, leaves, phase, write)
        outputs = [y, *state.W, *state.S, *state.anchor]
        torch.manual_seed(1)
        seeds = [torch.randn(o.shape).to(dtype) for o in outputs]
        grads = torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)
        results.append((outputs, grads, state.phase))
    (want, want_grads, want_phase), (got, got_grads, got_phase) = results
    assert torch.equal(got_phase, want_phase)
    assert max(map(error, got, want)) < 5e-6
    assert max(map(error, got_grads, want_grads)) < 1e-5


@needs_library
@pytest.mark.parametrize("c", [LINEAR[1], LINEAR[2], DEEP[0], DEEP[3], DEEP[7], DEEP[11]], ids=str)
def test_products_in_bfloat16_stay_near(c: LinearCase | DeepCase, width: int) -> None:
    """Operands have 8 bits: relative errors of a few 1e-3, twice that through the second derivatives; float32 is 1e-6."""
    forms = (linear.linear_exact, native.linear_exact) if isinstance(c, LinearCase) else (mlp.deep, native.deep)
    results = []
    for form, dtype in zip((*forms, partial(forms[1], precision="bfloat16")), (torch.float64, torch.float32, torch.float32), strict=False):
        if isinstance(c, LinearCase):
            x, write = linear_problem(c)
            leaves = [t.to(dtype).clone().requires_grad_() for t in x]
            y, state = linear_run(form, c, leaves, write)
            outputs = [y, *state]
        else:
            x, phase, write = deep_problem(c)
            leaves = [t.to(dtype).clone().requires_grad_() for t in x]
            y, end = deep_run(form, c, leaves, phase, write)
            outputs = [y, *end.W, *end.S]
        torch.manual_seed(1)
        seeds = [torch.randn(o.shape).to(dtype) for o in outputs]
        results.append((outputs, torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)))
    (want, want_grads), (single, _), (got, got_grads) = results
    assert 1e-4 < max(map(error, got, want)) < 1e-2  # rounded, and no more than that
    assert max(map(error, single, want)) < 5e-6
    assert max(map(error, got_grads, want_grads)) < 3e-2


@needs_library
@pytest.mark.parametrize("c", DEEP, ids=str)
def test_deep_calls_split_anywhere_are_one_call(c: DeepCase, width: int) -> None:
    x, phase, write = deep_problem(c)
    want, end = deep_run(mlp.deep, c, x, phase, write)
    for cuts in (range(c.T + 1), [0, 1, 3, c.T // 2, c.T]):
        small = [t.float() for t in x]
        outputs, at = [], phase
        with torch.inference_mode():
            for a, b in zip(list(cuts), list(cuts)[1:], strict=False):
                part = [*(s[:, :, a:b] for s in small[:6]), *small[6:]]
                y, state = deep_run(native.deep, c, part, at, None if write is None else write[:, a:b])
                small[6:12], at = [*state.W, *state.S, *state.anchor], state.phase
                outputs.append(y)
        assert error(torch.cat(outputs, 2), want) < 5e-6
        for got, expected in zip(small[6:10], (*end.W, *end.S), strict=True):
            assert error(got, expected) < 5e-6
        assert torch.equal(at, end.phase)


@needs_library
@pytest.mark.parametrize("read", ["after", "before", "anchor"])
def test_deep_step_in_place_is_the_step(read: str, width: int) -> None:
    c = DeepCase(4, 2, 1, 20, 20, 45, 4, read, phase=2)
    x, phase, _ = deep_problem(c)
    small = [t.float() for t in x]
    want, end = deep_run(native.deep, c, small, phase, None)
    W, S, A = (tuple(t.clone() for t in small[i : i + 2]) for i in (6, 8, 10))
    none = small[0].new_zeros(4, 2, 0, 20)
    state, y = DeepState(W, S, A, phase.clone(), none, none), torch.empty_like(small[2])
    native.deep_step_(*small[:6], state, y, init=small[12:14], chunk=4, affine=(small[14], small[15]), read=read)
    assert torch.equal(y, want) and torch.equal(state.phase, end.phase)
    for a, b in zip((*W, *S, *A), (*end.W, *end.S, *end.anchor), strict=True):
        assert torch.equal(a, b)


def around(u: Tensor, tail: Tensor, weight: Tensor, y: Tensor, g: Tensor, norm: Tensor, scale: float) -> tuple[Tensor, ...]:
    """conv_heads and gated_norm in plain torch."""
    (_, heads, T, d), silu = y.shape, torch.nn.functional.silu
    padded = torch.cat((tail, u), 1)
    mixed = sum(padded[:, lag : lag + T] * weight[lag] for lag in range(weight.shape[0]))
    q, k, v = (z.unflatten(-1, (heads, d)).transpose(1, 2) for z in silu(mixed).chunk(3, -1))  # type: ignore[arg-type]
    q, k = (z * torch.rsqrt(z.square().sum(-1, keepdim=True) + 1e-6) * scale for z in (q, k))
    out = torch.nn.functional.rms_norm(y, (d,), norm, 1e-6).transpose(1, 2).flatten(-2) * silu(g)
    return q, k, v, out


@needs_library
@pytest.mark.parametrize(
    "B,H,T,d,taps", [(2, 4, 50, 32, 4), (1, 2, 3, 5, 4), (2, 3, 20, 20, 1), (1, 1, 2, 16, 8), (2, 2, 1, 64, 4), (1, 2, 300, 16, 3)]
)
def test_the_parts_around_a_memory_and_their_gradients(B: int, H: int, T: int, d: int, taps: int, width: int) -> None:
    torch.manual_seed(0)
    D = H * d
    shapes = [(B, T, 3 * D), (B, taps - 1, 3 * D), (taps, 3 * D), (B, H, T, d), (B, T, D), (d,)]
    given = [torch.randn(s) for s in shapes]
    double, single = ([x.to(t).requires_grad_() for x in given] for t in (torch.float64, torch.float32))
    want = around(*double, 2.5)  # type: ignore[call-arg]
    got = (*native.conv_heads(*single[:3], H, 2.5), native.gated_norm(*single[3:]))  # type: ignore[call-arg]
    seeds = [torch.randn(x.shape) for x in want]
    want_grads = torch.autograd.grad(want, double, [x.double() for x in seeds])
    got_grads = torch.autograd.grad(got, single, seeds)
    assert max(map(error, got, want)) < 1e-6
    assert max(error(a, b) for a, b in zip(got_grads, want_grads, strict=True) if b.numel()) < 2e-6


@needs_library
@pytest.mark.parametrize("matrix", [True, False], ids=["matrix", "deep"])
@pytest.mark.parametrize("dim,heads,chunk,read", [(64, 2, 16, "after"), (40, 2, 7, "before"), (32, 1, 100, "after"), (64, 4, 16, "anchor")])
def test_a_whole_layer_in_one_call(matrix: bool, dim: int, heads: int, chunk: int, read: str, width: int) -> None:
    if matrix and read == "anchor":
        read = "before"
    torch.manual_seed(0)
    B, T, d, L, taps = 3, 150, dim // heads, 1 if matrix else 2, 4
    qkv, gate, out = torch.randn(3 * dim, dim) / 6, torch.randn(dim, dim) / 6, torch.randn(dim, dim) / 6
    gates, bias, conv, norm = torch.randn(3 * heads * L, dim) / 9, torch.randn(3 * heads * L), torch.randn(taps, 3 * dim), torch.randn(d)
    init = [torch.randn(heads, 2 * d, d) / d**0.5, torch.randn(heads, d, 2 * d) / (2 * d) ** 0.5]
    divisor = 1.0 if matrix else 50.0 * d
    x = torch.randn(B, T, dim)

    def fresh() -> tuple[Tensor, Any]:
        tail = torch.randn(B, taps - 1, 3 * dim, generator=torch.Generator().manual_seed(1))
        if matrix:
            return tail, MatrixState(torch.zeros(B, heads, d, d), torch.zeros(B, heads, d, d))
        return tail, mlp.deep_state(init, B)._replace(phase=torch.tensor([0, 3, 5]))

    tail, memory = fresh()
    u = x @ qkv.mT
    q, k, v, _ = around(u, tail, conv, x.new_zeros(B, heads, T, d), x @ gate.mT, norm, 1.5)
    alpha, eta, theta = torch.sigmoid(x @ gates.mT + bias).unflatten(-1, (3, heads, L)).permute(2, 0, 3, 1, 4)
    theta = (1 - eta) * theta / divisor
    if matrix:
        y, end = linear.linear_exact(q, k, v, theta[..., 0], eta[..., 0], alpha[..., 0], memory, read=read)
        expected = [*end]
    else:
        y, end = mlp.deep(q, k, v, theta, eta, alpha, memory, init=init, chunk=chunk, read=read)
        expected = [*end.W, *end.S, *end.anchor, end.phase]
    want = around(u, tail, conv, y, x @ gate.mT, norm, 1.5)[3] @ out.mT
    form = native.Form(heads=heads, scale=1.5, divisor=divisor, chunk=chunk, read=read)
    layer = native.Layer((qkv, gate, gates, bias, conv, norm, out), None if matrix else init, form)
    for cuts in ([0, T], [0, 1, 2, 30, 31, T], range(T + 1)):
        tail, memory = fresh()
        with torch.inference_mode():
            got = torch.cat([layer(x[:, a:b].contiguous(), tail, memory) for a, b in zip(list(cuts), list(cuts)[1:], strict=False)], 1)
        assert error(got, want.double()) < 1e-5
        assert error(tail, u[:, 1 - taps :].double()) < 1e-6
        state = [*memory] if matrix else [*memory.W, *memory.S, *memory.anchor, memory.phase]
        assert max(error(a, b.double()) for a, b in zip(state, expected, strict=True)) < 1e-5


@needs_library
def test_token_loop_of_the_oracle(width: int) -> None:
    x, _ = linear_problem(LinearCase(1, 2, 40, 8, 6, 16))
    want, _ = titans(*x[:6], oracle_state([x[6]], [x[7]]), network=MATRIX)
    got, _ = native.linear_exact(*(t.float() for t in x[:6]), MatrixState(x[6].float(), x[7].float()), chunk=16)
    assert error(got, want) < 1e-6


@needs_library
@pytest.mark.parametrize("T", [1, 40])
def test_a_stream_is_the_same_bits_alone_and_in_any_batch(T: int, width: int) -> None:
    x, phase, _ = deep_problem(DeepCase(5, 2, T, 16, 16, 32, 16, "after", phase=1))
    small = [t.float() for t in x]
    together, end = deep_run(native.deep, DeepCase(5, 2, T, 16, 16, 32, 16, "after"), small, phase, None)
    for stream in range(5):
        mine = [t[stream : stream + 1] for t in small[:12]] + small[12:]
        alone, last = deep_run(native.deep, DeepCase(1, 2, T, 16, 16, 32, 16, "after"), mine, phase[stream : stream + 1], None)
        assert torch.equal(alone[0], together[stream])
        assert all(torch.equal(a[0], b[stream]) for a, b in zip((*last.W, *last.S), (*end.W, *end.S), strict=True))


@needs_library
def test_later_tokens_do_not_move_earlier_reads(width: int) -> None:
    x, write = linear_problem(LinearCase(1, 2, 50, 16, 16, 16))
    small = [t.float() for t in x]
    before, _ = linear_run(native.linear_exact, LinearCase(1, 2, 50, 16, 16, 16), small, write)
    for t in small[:6]:
        t[:, :, 27:] = 0.5
    after, _ = linear_run(native.linear_exact, LinearCase(1, 2, 50, 16, 16, 16), small, write)
    assert torch.equal(before[:, :, :27], after[:, :, :27]) and not torch.equal(before[:, :, 27:], after[:, :, 27:])


@needs_library
def test_strided_inputs_are_the_same_bits_as_contiguous_ones(width: int) -> None:
    c = LinearCase(2, 2, 33, 16, 16, 16)
    x, _ = linear_problem(c)
    small = [t.float() for t in x]
    want, _ = linear_run(native.linear_exact, c, small, None)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in small[:6]]
    columns = [t.mT.contiguous().mT for t in strided[:3]]  # stride 1 in the wrong dimension
    for view in (strided, [*columns, *strided[3:]]):
        got, _ = linear_run(native.linear_exact, c, [*view, *small[6:]], None)
        assert torch.equal(got, want)


@needs_library
def test_denormals_are_flushed_inside_and_the_callers_mode_is_kept(width: int) -> None:
    tiny = torch.full((1,), 1e-30) * 1e-10  # a denormal; zero where the mode is flushed
    assert tiny.item() > 0
    x, _ = linear_problem(LinearCase(1, 1, 40, 8, 8, 16))
    native.linear_exact(*(t.float() for t in x[:6]), MatrixState(x[6].float(), x[7].float() * 1e-41))
    assert (torch.full((1,), 1e-30) * 1e-10).item() > 0


@needs_library
def test_extreme_gates_stay_finite(width: int) -> None:
    for eta, alpha in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1e-30, 1 - 1e-9)):
        q = torch.randn(1, 1, 4096, 8)
        k = torch.nn.functional.normalize(q, dim=-1)
        gates = [torch.full((1, 1, 4096), g) for g in (0.3 * (1 - eta), eta, alpha)]
        y, state = native.linear_exact(q, k, q, *gates, MatrixState(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8)))
        assert y.isfinite().all() and state.W.isfinite().all()


@needs_library
def test_wrong_shapes_are_named() -> None:
    x, _ = linear_problem(LinearCase(1, 1, 8, 4, 4, 4))
    small = [t.float() for t in x]
    with pytest.raises(RuntimeError, match="q must be"):
        native.linear_exact(small[0][:, :, :7], *small[1:6], MatrixState(*small[6:]))
    with pytest.raises(RuntimeError, match="W must be contiguous"):
        native.linear_exact(*small[:6], MatrixState(small[6][..., :3], small[7]))


def test_status_says_why_and_never_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "absent.so")
    found = native.status.__wrapped__()
    assert not found.available and "kernels.native.build" in found.reason and found.cost
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "broken.so")
    (tmp_path / "broken.so").write_bytes(b"not a library")
    found = native.status.__wrapped__()
    assert not found.available and "does not load" in found.reason
