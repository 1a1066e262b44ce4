"""Chooses the implementation of a memory by device, dtype and shape; what it computes is the same.

    torch    `kernels.linear`, `.mlp`, `.omega`, `.muon`: every rule and option, any device, float32 and float64
    native   `kernels.native`: float32 on the CPU, built ahead of time; the exact matrix memory and the 2-layer memory
    triton   `kernels.triton`: CUDA and HIP devices; the matrix memories, the 2-layer memory and Newton-Schulz, which is most of Atlas

TETHYS_KERNELS=torch|native|triton overrides the choice. A forced implementation that cannot take a call raises and says why: a run that
asked for one implementation never silently gets another.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import attention, heads, linear, mlp, muon, omega
from kernels import newton_schulz as orthogonalisation
from kernels.linear import MatrixState, StaleState
from kernels.mlp import Affine, DeepState
from kernels.muon import AtlasState
from kernels.network import DEFAULT, Network
from kernels.omega import OmegaState

Precision = Literal["float32", "bfloat16"]

VARIABLE = "TETHYS_KERNELS"
NAMES = ("torch", "native", "triton")
FEW = 8  # rows of a product below which the native form gains nothing
NATIVE_TAPS = 8  # longest convolution of the native form
FORMS = {  # the implementations each rule has beside torch's
    "linear_exact": ("native", "triton"),
    "linear_stale": ("triton",),
    "deep": ("native", "triton"),
    "omega_exact": (),
    "atlas": ("triton",),
    "newton_schulz": ("triton",),
}
TRITON_ROWS = 128  # tokens of a chunk, its window included, and channels of a head that one Triton program holds


def forced() -> str | None:
    """The implementation that the environment asks for, if any."""
    name = os.environ.get(VARIABLE, "").strip()
    if name and name not in NAMES:
        raise ValueError(f"{VARIABLE} is one of {', '.join(NAMES)}, not {name!r}")
    return name or None


def available() -> dict[str, str]:
    """What runs here and why, by implementation, the one that float32 tensors get on the CPU and on a GPU, and the same by rule."""
    from kernels import native

    status = native.status()
    gpu = torch.cuda.is_available()
    has_triton = importlib.util.find_spec("triton") is not None
    facts = {
        "torch": "yes",
        "native": f"{'yes' if status.available else 'no'}: {status.reason}" + ("" if status.cost == "none" else f"; {status.cost}"),
        "triton": "yes" if gpu and has_triton else "no: " + ("no CUDA or HIP device" if has_triton else "the package is not installed"),
    }
    facts["cpu"] = forced() or ("native" if status.available else "torch")
    facts["gpu"] = forced() or ("none" if not gpu else "triton" if has_triton else "torch")
    for rule, forms in FORMS.items():
        places = {place: facts[place] if facts[place] in (*forms, "none") else "torch" for place in ("cpu", "gpu")}
        facts[rule] = ", ".join(f"{form} on the {place}" for place, form in places.items() if form != "none")
    return facts


def choose(name: str, device: torch.device, native: Callable[[], str], triton: Callable[[], str]) -> str:
    """The implementation for one call. native(), triton(): empty if it can take the call, else why not."""
    asked = forced()
    if asked == "torch":
        return "torch"
    if asked is not None:
        reason = native() if asked == "native" else triton()
        if reason:
            raise ValueError(f"{name}: {VARIABLE}={asked}, but {reason}; unset it, or set it to torch")
        return asked
    if device.type == "cpu":
        return "torch" if native() else "native"
    if device.type == "cuda":
        return "torch" if triton() else "triton"
    return "torch"


def linear_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: MatrixState,
    *,
    chunk: int = 64,
    read: str = "after",
    write: Tensor | None = None,
    decayed_error: bool = False,
    precision: Precision = "float32",
) -> tuple[Tensor, MatrixState]:
    """As `kernels.linear.linear_exact`. precision: the least that products may have; only the native form uses less than float32."""

    def native() -> str:
        from kernels.native import supports_linear

        return supports_linear(q, k, v, alpha, state, decayed_error)

    def triton() -> str:
        if decayed_error or (alpha is not None and alpha.dim() == 4):
            return "channel-wise forgetting and the decayed error have only the torch form"
        return _triton_takes((q, k, v), state, chunk=0)

    chosen = choose("linear_exact", q.device, native, triton)
    if chosen == "torch":
        return linear.linear_exact(
            q, k, v, theta, eta, alpha, state, chunk=chunk, read=read, write=write, decayed_error=decayed_error
        )  # fmt: skip
    linear.check(q, k, v, theta, eta, alpha, state.W, chunk, read, ("after", "before"))
    options: dict[str, Any] = {"chunk": chunk, "precision": precision} if chosen == "native" else {"chunk": min(chunk, TRITON_ROWS)}
    y, new = _load(chosen).linear_exact(q, k, v, theta, eta, alpha, state, read=read, write=write, **options)
    return y, new


def linear_stale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: StaleState,
    *,
    chunk: int = 16,
    read: str = "after",
    write: Tensor | None = None,
    gamma: Tensor | None = None,
    loss: str = "l2",
) -> tuple[Tensor, StaleState]:
    """As `kernels.linear.linear_stale`."""

    def triton() -> str:
        if loss != "l2" or read == "anchor" or (gamma is not None and write is not None) or (alpha is not None and alpha.dim() == 4):
            return "loss 'dot', read 'anchor', gamma with write and channel-wise forgetting have only the torch form"
        return _triton_takes((q, k, v), (state.W, state.S, state.anchor), chunk=chunk + state.keys.shape[2])

    chosen = choose("linear_stale", q.device, lambda: "the chunk-start matrix memory has no native form", triton)
    if chosen == "torch":
        return linear.linear_stale(q, k, v, theta, eta, alpha, state, chunk=chunk, read=read, write=write, gamma=gamma, loss=loss)
    linear.check(q, k, v, theta, eta, alpha, state.W, chunk, read, linear.READS)
    y, new = _load(chosen).linear_stale(q, k, v, theta, eta, alpha, state, chunk=chunk, read=read, write=write, gamma=gamma)
    return y, new


def deep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: DeepState,
    *,
    init: Sequence[Tensor] | None,
    chunk: int = 16,
    network: Network = DEFAULT,
    affine: Affine = None,
    read: str = "after",
    write: Tensor | None = None,
    gamma: Tensor | None = None,
    exact_last: bool = False,
    precision: Precision = "float32",
) -> tuple[Tensor, DeepState]:
    """As `kernels.mlp.deep`; precision as in `linear_exact`."""

    def native() -> str:
        from kernels.native import supports_deep

        return supports_deep(q, k, v, state, network, gamma, exact_last)

    def triton() -> str:
        if len(state.W) != 2 or network.gated or network.unit_hidden or network.loss != "l2" or exact_last or read == "anchor":
            return (
                "other than two layers, gated and unit_hidden networks, loss 'dot', read 'anchor' and exact_last have only the torch form"
            )
        if gamma is not None and write is not None:
            return "gamma with write has only the torch form"
        return _triton_takes((q, k, v), (*state.W, *state.S, *state.anchor), chunk=chunk + state.keys.shape[2])

    chosen = choose("deep", q.device, native, triton)
    if chosen == "torch":
        return mlp.deep(
            q, k, v, theta, eta, alpha, state, init=init, chunk=chunk, network=network, affine=affine, read=read, write=write,
            gamma=gamma, exact_last=exact_last,
        )  # fmt: skip
    mlp.check(q, k, v, theta, eta, alpha, state, init, chunk, network, read, gamma, exact_last)
    options: dict[str, Any] = {"init": init, "chunk": chunk, "network": network, "affine": affine, "read": read, "write": write}
    options |= {"gamma": gamma} if chosen == "triton" else {"precision": precision}
    y, new = _load(chosen).deep(q, k, v, theta, eta, alpha, state, **options)
    return y, new


def omega_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    gamma: Tensor,
    state: OmegaState,
    *,
    chunk: int = 16,
    read: str = "after",
    write: Tensor | None = None,
) -> tuple[Tensor, OmegaState]:
    """As `kernels.omega.omega_exact`, which has the torch form only."""
    choose("omega_exact", q.device, lambda: "the exact Omega rule has no native form", lambda: "the exact Omega rule has no Triton form")
    return omega.omega_exact(q, k, v, theta, eta, alpha, gamma, state, chunk=chunk, read=read, write=write)


def atlas(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: AtlasState,
    *,
    init: Sequence[Tensor] | None,
    chunk: int = 16,
    every: int = 1,
    network: Network = DEFAULT,
    affine: Affine = None,
    gamma: Tensor | None = None,
    read: str = "after",
    write: Tensor | None = None,
) -> tuple[Tensor, AtlasState]:
    """As `kernels.muon.atlas`: the torch form around the chosen `newton_schulz`, which is nearly all of its arithmetic."""

    def triton() -> str:
        return next((reason for s in state.S if (reason := _triton_orthogonalises(s))), "")

    choose("atlas", q.device, lambda: "Atlas has no native form", triton)
    return muon.atlas(
        q, k, v, theta, eta, alpha, state, init=init, chunk=chunk, every=every, network=network, affine=affine, gamma=gamma, read=read,
        write=write, orthogonalise=newton_schulz,
    )  # fmt: skip


def newton_schulz(S: Tensor) -> Tensor:
    """As `kernels.newton_schulz.newton_schulz`."""
    chosen = choose("newton_schulz", S.device, lambda: "Newton-Schulz has no native form", lambda: _triton_orthogonalises(S))
    X: Tensor = orthogonalisation.newton_schulz(S) if chosen == "torch" else _load(chosen).newton_schulz(S)
    return X


def _triton_orthogonalises(S: Tensor) -> str:
    """Empty if the Triton form of Newton-Schulz can take S, else why not."""
    if min(S.shape[-2:]) > TRITON_ROWS:
        return f"Triton orthogonalises matrices whose smaller side is at most {TRITON_ROWS}, not {tuple(S.shape[-2:])}"
    return _triton_takes((), (S,), chunk=0)


def conv_heads(u: Tensor, tail: Tensor, weight: Tensor, count: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.heads.conv_heads`; count: heads."""
    if weight.shape[0] > NATIVE_TAPS or not _elementwise(u, tail, weight):
        return heads.conv_heads(u, tail, weight, count, scale)
    q, k, v = _load("native").conv_heads(u, tail, weight, count, scale)
    return q, k, v


def gated_norm(y: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """As `kernels.heads.gated_norm`."""
    if not _elementwise(y, g, weight):
        return heads.gated_norm(y, g, weight)
    out: Tensor = _load("native").gated_norm(y, g, weight)
    return out


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T: x (..., K), weight (N, K) -> (..., N)."""
    if x.numel() < FEW * x.shape[-1] or not _elementwise(x, weight):
        return F.linear(x, weight)
    y: Tensor = _load("native.elementwise").project(x, weight)
    return y


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) up of h (..., 2 n) = [gate | up] -> (..., n)."""
    if not _elementwise(h):
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    y: Tensor = _load("native.elementwise").swiglu(h)
    return y


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean x^2 + RMS_FLOOR) weight over the last axis."""
    if not _elementwise(x, weight):
        return F.rms_norm(x, weight.shape, weight, heads.RMS_FLOOR)
    y: Tensor = _load("native.elementwise").rms_norm(x, weight, heads.RMS_FLOOR)
    return y


def rope(x: Tensor, position: Tensor) -> Tensor:
    """As `kernels.attention.rope`."""
    if not _elementwise(x):
        return attention.rope(x, position)
    cosine, sine = attention.rotation(position, x.shape[-1], x.dtype)
    y: Tensor = _load("native.elementwise").rope(x, cosine, sine)
    return y


def _elementwise(*tensors: Tensor) -> bool:
    """Whether the native form of the parts around a memory runs. There is no Triton form, and forcing one concerns the memories only."""
    from kernels import native

    return forced() in (None, "native") and not native.supports(*tensors) and not torch.is_autocast_enabled("cpu")


def _load(name: str) -> Any:
    return importlib.import_module(f"kernels.{name}")


def _triton_takes(tokens: Sequence[Tensor], state: Sequence[Tensor], chunk: int) -> str:
    """Empty if the Triton kernels can take these tensors, else why not."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if any(x.dtype is not torch.float32 for x in state):
        return f"Triton states are float32, not {state[0].dtype}"
    if any(x.dtype not in (torch.float32, torch.bfloat16, torch.float16) for x in tokens):
        return f"Triton reads float32, bfloat16 and float16, not {tokens[0].dtype}"
    if max((x.shape[-1] for x in tokens), default=0) > TRITON_ROWS or chunk > TRITON_ROWS:
        return (
            f"a Triton program holds heads of at most {TRITON_ROWS} channels and chunks, window included, of at most {TRITON_ROWS} tokens"
        )
    return ""
