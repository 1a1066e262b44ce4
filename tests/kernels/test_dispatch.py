"""The choice of an implementation: the same numbers, the one that was asked for, and a reason where it cannot run."""

from __future__ import annotations

import pytest
import torch
from memory_cases import build

from kernels import dispatch, linear, mlp, muon, native, omega


def case(matrix: bool):  # type: ignore[no-untyped-def]
    return build(seed=1, B=2, H=2, T=11, d=4, chunk=4, cuts=[], form="two layers, norm, residual", lags=1, matrix=matrix)


def to32(x):  # type: ignore[no-untyped-def]
    if isinstance(x, torch.Tensor):
        return x.float() if x.is_floating_point() else x
    return type(x)(*map(to32, x)) if hasattr(x, "_fields") else tuple(map(to32, x))


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHYS_KERNELS", "cuda")
    with pytest.raises(ValueError, match="TETHYS_KERNELS is one of"):
        dispatch.forced()
    c = case(matrix=True)
    monkeypatch.setenv("TETHYS_KERNELS", "torch")
    got, _ = dispatch.linear_exact(*c.tokens, c.matrix_state(), chunk=4)
    assert torch.equal(got, linear.linear_exact(*c.tokens, c.matrix_state(), chunk=4)[0])
    monkeypatch.setenv("TETHYS_KERNELS", "native")
    with pytest.raises(ValueError, match="TETHYS_KERNELS=native, but"):  # float64 has only the torch form
        dispatch.linear_exact(*c.tokens, c.matrix_state(), chunk=4)
    with pytest.raises(ValueError, match="no native form"):
        dispatch.linear_stale(*to32(c.tokens), to32(c.stale_state()), chunk=4)
    monkeypatch.setenv("TETHYS_KERNELS", "triton")
    with pytest.raises(ValueError, match="TETHYS_KERNELS=triton, but"):
        dispatch.linear_exact(*c.tokens, c.matrix_state(), chunk=4)


def test_float64_and_unusual_rules_get_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETHYS_KERNELS", raising=False)
    c, d = case(matrix=True), case(matrix=False)
    assert torch.equal(dispatch.linear_stale(*c.tokens, c.stale_state())[0], linear.linear_stale(*c.tokens, c.stale_state())[0])
    options = {"init": d.init, "affine": d.affine, "chunk": 4}
    assert torch.equal(dispatch.deep(*d.tokens, d.deep_state(), **options)[0], mlp.deep(*d.tokens, d.deep_state(), **options)[0])


@pytest.mark.parametrize("length", [1, 11])
def test_the_chosen_form_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.delenv("TETHYS_KERNELS", raising=False)
    c, d = case(matrix=True), case(matrix=False)
    tokens = [to32(x)[:, :, :length] for x in c.tokens]
    want, _ = linear.linear_exact(*c.tokens, c.matrix_state())
    got, _ = dispatch.linear_exact(*tokens, to32(c.matrix_state()))
    torch.testing.assert_close(got.double(), want[:, :, :length], atol=1e-4, rtol=1e-4)
    want, _ = mlp.deep(*d.tokens, d.deep_state(), init=d.init, affine=d.affine)
    got, _ = dispatch.deep(*(to32(x)[:, :, :length] for x in d.tokens), to32(d.deep_state()), init=to32(d.init), affine=to32(d.affine))
    torch.testing.assert_close(got.double(), want[:, :, :length], atol=1e-3, rtol=1e-3)
    expected = "native" if native.status().available else "torch"
    assert dispatch.available()["cpu"] == expected
    assert (
        dispatch.choose("linear_exact", torch.device("cpu"), lambda: "" if native.status().available else "not built", lambda: "no")
        == expected
    )


def test_a_wrong_shape_is_named_whoever_computes() -> None:
    c = case(matrix=True)
    with pytest.raises(ValueError, match="theta has shape"):
        dispatch.linear_exact(*(to32(x) for x in c.tokens[:3]), to32(c.theta)[..., :3], *to32(c.tokens[4:]), to32(c.matrix_state()))


@pytest.mark.parametrize("taps", [1, 4, 9])
def test_the_parts_around_a_memory(monkeypatch: pytest.MonkeyPatch, taps: int) -> None:
    torch.manual_seed(0)
    u, tail, weight = torch.randn(2, 7, 24), torch.randn(2, taps - 1, 24), torch.randn(taps, 24)
    y, g, scale = torch.randn(2, 2, 7, 4), torch.randn(2, 7, 8), torch.randn(4)
    found = [*dispatch.conv_heads(u, tail, weight, 2, 1.5), dispatch.gated_norm(y, g, scale)]
    monkeypatch.setenv("TETHYS_KERNELS", "torch")
    wanted = [*dispatch.conv_heads(u, tail, weight, 2, 1.5), dispatch.gated_norm(y, g, scale)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_omega_and_atlas_are_chosen_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETHYS_KERNELS", raising=False)
    c = build(seed=1, B=2, H=2, T=7, d=4, chunk=4, cuts=[], form="", lags=3, matrix=True)
    d = build(seed=1, B=2, H=2, T=7, d=4, chunk=4, cuts=[], form="two layers, norm, residual", lags=3, matrix=False)
    stale, fresh = c.stale_state(), muon.atlas_state(d.init, 2, 3)
    window = omega.OmegaState(stale.W, stale.S, stale.keys, stale.values)
    options = {"init": d.init, "affine": d.affine, "chunk": 4, "every": 2, "gamma": d.gamma}
    assert torch.equal(dispatch.omega_exact(*c.tokens, c.gamma, window)[0], omega.omega_exact(*c.tokens, c.gamma, window)[0])
    assert torch.equal(dispatch.atlas(*d.tokens, fresh, **options)[0], muon.atlas(*d.tokens, fresh, **options)[0])
    for forced, reason in (("native", "no native form"), ("triton", "Triton")):
        monkeypatch.setenv("TETHYS_KERNELS", forced)
        with pytest.raises(ValueError, match=f"omega_exact: TETHYS_KERNELS={forced}, but the exact Omega rule has no"):
            dispatch.omega_exact(*c.tokens, c.gamma, window)
        with pytest.raises(ValueError, match=f"atlas: TETHYS_KERNELS={forced}, but .*({reason}|triton)"):  # float64 too
            dispatch.atlas(*d.tokens, fresh, **options)


def test_every_rule_says_what_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHYS_KERNELS", "torch")
    assert {dispatch.available()[rule].split(",")[0] for rule in dispatch.FORMS} == {"torch on the cpu"}
    monkeypatch.delenv("TETHYS_KERNELS")
    facts = dispatch.available()
    assert facts["omega_exact"].startswith("torch on the cpu")
    assert facts["linear_exact"].startswith(f"{facts['cpu']} on the cpu")


def test_channelwise_forgetting_gets_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETHYS_KERNELS", raising=False)
    c = case(matrix=True)
    tokens, alpha = [to32(x) for x in c.tokens[:5]], torch.sigmoid(to32(c.v))
    got, _ = dispatch.linear_exact(*tokens, alpha, to32(c.matrix_state()))
    assert torch.equal(got, linear.linear_exact(*tokens, alpha, to32(c.matrix_state()))[0])
    monkeypatch.setenv("TETHYS_KERNELS", "native")
    with pytest.raises(ValueError, match="channel-wise forgetting is not native|is not built"):
        dispatch.linear_exact(*tokens, alpha, to32(c.matrix_state()))
    monkeypatch.setenv("TETHYS_KERNELS", "triton")
    with pytest.raises(ValueError, match="channel-wise forgetting"):
        dispatch.linear_stale(*tokens, alpha, to32(c.stale_state()))
