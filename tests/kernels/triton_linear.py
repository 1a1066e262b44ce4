"""The matrix memory's kernels against a float64 token loop; run by test_triton.py with TRITON_INTERPRET=1.

Mutants tried, each caught here: the solve without its last product (blocks of 16 rows stay apart), the first chunk's error at W although
an earlier call opened the chunk, no gradient through the anchor, the anchor of the last chunk instead of the last written one, an unwritten
token that loses its momentum or moves W by it.
"""

import pytest
import torch

from kernels import dispatch, linear
from kernels.linear import MatrixState, StaleState
from kernels.triton import linear_exact, linear_stale
from kernels.triton.linear import EXACT_ROWS

B = 2


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Whatever a kernel does not write, or reads unmasked, becomes NaN."""
    empty, like = torch.empty, torch.empty_like

    def poisoned(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(like(*a, **k)))


def oracle(q, k, v, theta, eta, alpha, W, S, *, read="after", write=None, chunk=None, anchor=None, phase=None, gamma=None, tail=()):
    """Token loop; chunk None: the gradient at the true weights, else at those that the stream's open chunk began with."""
    T = q.shape[2]
    out = []
    written = torch.zeros(B, dtype=torch.long) if phase is None else phase.clone()
    tail = list(tail)
    for t in range(T):
        on = torch.ones(B, dtype=torch.bool) if write is None else write[:, t]
        mask = on.view(B, 1, 1, 1)
        at = W
        if chunk is not None:
            anchor = torch.where(mask & (written % chunk == 0).view(B, 1, 1, 1), W, anchor)
            at = anchor
        window = [(k[:, :, t], v[:, :, t]), *tail]
        u = torch.zeros_like(W)
        for lag, (key, value) in enumerate(window):
            error = torch.einsum("bhvk,bhk->bhv", at, key) - value
            weight = 1.0 if gamma is None else gamma[:, :, t, lag, None, None]
            u = u + weight * error.unsqueeze(-1) * key.unsqueeze(-2)
        tail = window[: -1 if gamma is None else gamma.shape[-1] - 1] if gamma is not None else []
        gate = [0.0 if g is None else g[:, :, t, None, None] for g in (eta, alpha)]
        new_S = gate[0] * S - theta[:, :, t, None, None] * u
        new_W = (1 - gate[1]) * W + new_S
        before = W
        W, S = torch.where(mask, new_W, W), torch.where(mask, new_S, S)
        written = written + on.long()
        seen = W if read == "after" else before
        out.append(torch.einsum("bhvk,bhk->bhv", seen, q[:, :, t]))
    return torch.stack(out, 2), W, S, anchor


def draw(T, dk, dv, window=0, H=1):
    rng = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(B, H, T, dk), dim=-1) for _ in range(2))
    eta = 0.3 + 0.6 * torch.rand(B, H, T, generator=rng, dtype=torch.float64)
    theta = (1 - eta) * torch.rand(B, H, T, generator=rng, dtype=torch.float64)
    alpha = 0.1 * torch.rand(B, H, T, generator=rng, dtype=torch.float64)
    x = {"q": q, "k": k, "v": normal(B, H, T, dv), "theta": theta, "eta": eta, "alpha": alpha}
    x |= {"W": 0.5 * normal(B, H, dv, dk), "S": 0.1 * normal(B, H, dv, dk), "anchor": 0.5 * normal(B, H, dv, dk)}
    if window:
        x["gamma"] = torch.rand(B, H, T, window, generator=rng, dtype=torch.float64)
        x["keys"], x["values"] = normal(B, H, window - 1, dk), normal(B, H, window - 1, dv)
    return {name: tensor.requires_grad_() for name, tensor in x.items()}


def close(got, want, tolerance=2e-6):
    scale = want.abs().max().clamp(min=1e-3)
    error = (got.double() - want).abs().max() / scale
    assert error < tolerance, f"relative error {error:.2e}"


def single(x):
    return {name: tensor.detach().float().requires_grad_() for name, tensor in x.items()}


def compare(x, y, wanted, results, tolerance):
    """Values, then gradients of a random projection of all results."""
    rng = torch.Generator().manual_seed(9)
    weights = [torch.randn(want.shape, generator=rng, dtype=torch.float64) for want in wanted]
    for got, want in zip(results, wanted, strict=True):
        close(got, want.detach())
    sum((want * weight).sum() for want, weight in zip(wanted, weights, strict=True)).backward()
    sum((got * weight.float()).sum() for got, weight in zip(results, weights, strict=True)).backward()
    for name in x:
        if x[name].grad is None:
            assert y[name].grad is None or not y[name].grad.any(), name
        else:
            error = (y[name].grad.double() - x[name].grad).abs().max() / x[name].grad.abs().max().clamp(min=1e-3)
            assert error < tolerance, f"gradient of {name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("T", "dk", "dv", "chunk", "read", "write", "none"),
    [(21, 20, 24, 16, "after", False, ()), (21, 16, 8, 16, "before", True, ()), (40, 8, 8, 24, "after", True, ("eta",)),
     (18, 32, 16, 32, "before", False, ("alpha",)), (5, 8, 8, 16, "after", False, ("eta", "alpha"))],
)  # fmt: skip
def test_exact(T, dk, dv, chunk, read, write, none):
    x = draw(T, dk, dv)
    for name in ("anchor", *none):
        del x[name]
    y = single(x)
    on = torch.rand(B, T, generator=torch.Generator().manual_seed(4)) < 0.7 if write else None
    names = ("q", "k", "v", "theta", "eta", "alpha")
    wanted = oracle(*(x.get(name) for name in names), x["W"], x["S"], read=read, write=on)[:3]
    out, state = linear_exact(*(y.get(name) for name in names), MatrixState(y["W"], y["S"]), chunk=chunk, read=read, write=on)
    compare(x, y, wanted, (out, *state), 2e-5)


def test_exact_of_repeated_keys(monkeypatch):
    """Powers of the system's matrix reach binom(63, 31) here: an inverse by doubling alone loses every digit."""
    monkeypatch.setitem(EXACT_ROWS, torch.float32, 64)
    x = draw(64, 8, 8)
    with torch.no_grad():
        x["k"][:] = x["k"][:, :, :1]
        x["theta"][:], x["eta"][:], x["alpha"][:] = 1.0, 0.0, 0.0
    names = ("q", "k", "v", "theta", "eta", "alpha")
    wanted = oracle(*(x[name] for name in names), x["W"], x["S"])
    y = single(x)
    out, state = linear_exact(*(y[name] for name in names), MatrixState(y["W"], y["S"]), chunk=64)
    close(out, wanted[0].detach(), 1e-5)
    close(state.W, wanted[1].detach(), 1e-5)


@pytest.mark.parametrize(
    ("T", "dk", "dv", "chunk", "read", "phase", "write"),
    [(37, 20, 24, 16, "after", (0, 0), False), (26, 8, 8, 12, "before", (3, 11), False), (29, 16, 16, 16, "after", (5, 0), True),
     (3, 8, 8, 16, "after", (2, 14), False)],
)  # fmt: skip
def test_stale(T, dk, dv, chunk, read, phase, write):
    H = 2 if write else 1
    x = draw(T, dk, dv, H=H)
    y = single(x)
    phase = torch.tensor(phase)
    on = torch.rand(B, T, generator=torch.Generator().manual_seed(4)) < 0.7 if write else None
    names = ("q", "k", "v", "theta", "eta", "alpha")
    with torch.no_grad():
        for x_ in (x, y):
            x_["theta"] *= 0.2
    wanted = oracle(*(x[name] for name in names), x["W"], x["S"], read=read, write=on, chunk=chunk, anchor=x["anchor"], phase=phase)
    empty = torch.zeros(B, H, 0, dk), torch.zeros(B, H, 0, dv)
    state = StaleState(y["W"], y["S"], y["anchor"], phase, *empty)
    out, state = linear_stale(*(y[name] for name in names), state, chunk=chunk, read=read, write=on)
    assert (state.phase == (phase + (T if on is None else on.sum(-1))) % chunk).all()
    compare(x, y, wanted, (out, *state[:3]), 2e-5)


@pytest.mark.parametrize(("T", "chunk", "window", "read", "phase"), [(26, 16, 5, "after", (0, 0)), (21, 8, 9, "before", (7, 2))])
def test_omega(T, chunk, window, read, phase):
    x = draw(T, 12, 8, window=window)
    with torch.no_grad():
        x["theta"] *= 0.1
    y = single(x)
    phase = torch.tensor(phase)
    names = ("q", "k", "v", "theta", "eta", "alpha")
    tail = [(x["keys"][:, :, i], x["values"][:, :, i]) for i in reversed(range(window - 1))]
    wanted = oracle(*(x[name] for name in names), x["W"], x["S"], read=read, chunk=chunk, anchor=x["anchor"], phase=phase,
                    gamma=x["gamma"], tail=tail)  # fmt: skip
    state = StaleState(y["W"], y["S"], y["anchor"], phase, y["keys"], y["values"])
    out, state = linear_stale(*(y[name] for name in names), state, chunk=chunk, read=read, gamma=y["gamma"])
    close(state.keys, torch.cat([x["keys"], x["k"]], 2)[:, :, T:].detach())
    compare(x, y, wanted, (out, *state[:3]), 2e-5)


@pytest.mark.parametrize("cut", [1, 10, 16])
def test_split_calls(cut):
    """One call over T tokens equals two, inside a chunk too."""
    T = 24
    y = {name: tensor.detach() for name, tensor in single(draw(T, 8, 8, window=3)).items()}
    names = ("q", "k", "v", "theta", "eta", "alpha", "gamma")

    def run(state, part):
        return linear_stale(*(y[name][:, :, part] for name in names[:-1]), state, gamma=y["gamma"][:, :, part])

    start = StaleState(y["W"], y["S"], y["anchor"], torch.tensor([0, 9]), y["keys"], y["values"])
    whole, end = run(start, slice(None))
    first, middle = run(start, slice(0, cut))
    second, last = run(middle, slice(cut, None))
    close(torch.cat([first, second], 2), whole.double(), 1e-5)
    for a, b in zip(end, last, strict=True):
        close(a, b.double(), 1e-5)


def test_dispatch(monkeypatch):
    """The environment variable leads here, with the torch form's numbers."""
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    y = {name: tensor.detach() for name, tensor in single(draw(20, 8, 8)).items()}
    names = ("q", "k", "v", "theta", "eta", "alpha")
    out, state = dispatch.linear_exact(*(y[name] for name in names), MatrixState(y["W"], y["S"]))
    wanted, end = linear.linear_exact(*(y[name].double() for name in names), MatrixState(y["W"].double(), y["S"].double()))
    for got, want in zip((out, *state), (wanted, *end), strict=True):
        close(got, want)


def test_errors():
    y = single(draw(4, 8, 8))
    with pytest.raises(TypeError, match="float64"):
        linear_exact(*(y[n].double() for n in ("q", "k", "v", "theta", "eta", "alpha")), MatrixState(y["W"].double(), y["S"].double()))
    with pytest.raises(TypeError, match="16-bit"):
        linear_exact(*(y[n].bfloat16() for n in ("q", "k", "v")), y["theta"], None, None, MatrixState(y["W"], y["S"]))
