"""The kernels of the memory of two layers against the float64 oracle; run by test_triton.py with TRITON_INTERPRET=1.

Mutants tried, each caught here: the query side at the anchor's activations, deltas as constants of the first layer (no second derivative),
the norm's backward as if its mean and variance were constants, deltas at W although an earlier call opened the chunk.
"""

import pytest
import torch
from triton_linear import close, compare, poison, single  # noqa: F401

from kernels.mlp import DeepState
from kernels.network import Network
from kernels.reference import OracleState, titans
from kernels.triton import deep

B, H = 2, 2
NAMES = ("q", "k", "v", "theta", "eta", "alpha")


def draw(T, d_in, hidden, d_out, per_layer, window):
    rng = torch.Generator().manual_seed(1)

    def normal(*size):
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    def uniform(*size):
        return torch.rand(*size, generator=rng, dtype=torch.float64)

    gate = (B, H, T, 2) if per_layer else (B, H, T)
    x = {"q": normal(B, H, T, d_in), "k": normal(B, H, T, d_in), "v": normal(B, H, T, d_out)}
    x |= {"theta": 0.02 * uniform(*gate), "eta": 0.2 + 0.6 * uniform(*gate), "alpha": 0.1 * uniform(*gate)}
    for name, scale in (("W", 1.0), ("S", 0.02), ("anchor", 1.0)):
        x[name + "1"] = scale * d_in**-0.5 * normal(B, H, hidden, d_in)
        x[name + "2"] = scale * hidden**-0.5 * normal(B, H, d_out, hidden)
    x |= {"init1": d_in**-0.5 * normal(H, hidden, d_in), "init2": hidden**-0.5 * normal(H, d_out, hidden)}
    x |= {"scale": 1 + 0.1 * normal(H, d_out), "shift": 0.1 * normal(H, d_out)}
    if window > 1:
        x |= {"gamma": uniform(B, H, T, window), "keys": normal(B, H, window - 1, d_in), "values": normal(B, H, window - 1, d_out)}
    return {name: tensor.requires_grad_() for name, tensor in x.items()}


@pytest.mark.parametrize(
    ("T", "d_in", "hidden", "d_out", "chunk", "phase", "read", "network", "per_layer", "window", "without"),
    [
        (18, 12, 20, 12, 16, 0, "after", Network(), True, 1, ()),
        (19, 8, 16, 8, 8, 3, "before", Network(), False, 1, ("affine",)),
        (12, 8, 16, 12, 16, 5, "after", Network(norm=False, residual=False), True, 1, ("affine", "init")),
        (11, 8, 16, 8, 8, 6, "after", Network(), True, 3, ("eta",)),
    ],
)
def test_deep(T, d_in, hidden, d_out, chunk, phase, read, network, per_layer, window, without):
    x = draw(T, d_in, hidden, d_out, per_layer, window)
    for name in {"affine": ("scale", "shift"), "init": ("init1", "init2"), "eta": ("eta",)}.items():
        if name[0] in without:
            for part in name[1]:
                del x[part]
    y = single(x)

    def pair(z, name):
        return (z[name + "1"], z[name + "2"]) if name + "1" in z else None

    def affine(z):
        return (z["scale"], z["shift"]) if "scale" in z else None

    tail = tuple((x["keys"][:, :, i], x["values"][:, :, i]) for i in range(window - 1))
    begin = OracleState(pair(x, "W"), pair(x, "S"), pair(x, "anchor"), phase, tail)
    out, end = titans(*(x.get(name) for name in NAMES), begin, network=network, anchor_every=chunk, read=read,
                      init=pair(x, "init"), affine=affine(x), gamma=x.get("gamma"))  # fmt: skip
    wanted = (out, *end.W, *end.S, *end.anchor)
    tails = (y["keys"], y["values"]) if window > 1 else (torch.zeros(B, H, 0, d_in), torch.zeros(B, H, 0, d_out))
    state = DeepState(pair(y, "W"), pair(y, "S"), pair(y, "anchor"), torch.full((B,), phase), *tails)
    got, new = deep(*(y.get(name) for name in NAMES), state, init=pair(y, "init"), chunk=chunk, network=network, affine=affine(y),
                    read=read, gamma=y.get("gamma"))  # fmt: skip
    assert (new.phase == end.phase).all()
    compare(x, y, wanted, (got, *new.W, *new.S, *new.anchor), 1e-4)


def test_streams_apart_and_unwritten_tokens():
    """Each stream at its own place of its chunk, with missing tokens: as if it were alone, in two calls."""
    T, chunk = 14, 8
    y = {name: tensor.detach() for name, tensor in single(draw(T, 8, 16, 8, True, 1)).items()}
    write = torch.rand(B, T, generator=torch.Generator().manual_seed(4)) < 0.6
    empty = torch.zeros(B, H, 0, 8)

    def pick(value, rows):
        return tuple(pick(x, rows) for x in value) if isinstance(value, tuple) else value[rows]

    def run(rows, cuts):
        state = DeepState(*((y[n + "1"][rows], y[n + "2"][rows]) for n in ("W", "S", "anchor")), torch.tensor([2, 7])[rows],
                          empty[rows], empty[rows])  # fmt: skip
        outputs = []
        for a, b in zip(cuts, cuts[1:], strict=False):
            out, state = deep(*(y[name][rows, :, a:b] for name in NAMES), state, init=(y["init1"], y["init2"]), chunk=chunk,
                              affine=(y["scale"], y["shift"]), write=write[rows, a:b])  # fmt: skip
            outputs.append(out)
        return torch.cat(outputs, 2), state

    whole, end = run(slice(0, B), [0, T])
    for stream in range(B):
        rows = slice(stream, stream + 1)
        alone, last = run(rows, [0, 5, T])
        close(alone, whole[rows].double(), 1e-5)
        for a, b in zip(last, end, strict=True):
            for c, d in zip(a, pick(b, rows), strict=True) if isinstance(a, tuple) else [(a, pick(b, rows))]:
                if c.numel():
                    close(c, d.double(), 1e-5)
