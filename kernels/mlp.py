"""The deep memory: an MLP of any depth (or a gated MLP) whose weights learn at test time, in the dual form.

Inside a chunk of C tokens every gradient is taken at the weights the chunk began with (Titans section 3.2), so that each layer's
gradient is the outer product of a delta and an input, known for the whole chunk at once (`kernels.network`). The weights of token t,

    W_t = b_t W_0 + f_t S_0 - sum_{i<=t} G[t,i] delta_i input_i^T                    (`kernels.coefficients`)

are then never formed: a query row x meets them as

    x W_t^T = b_t (x W_0^T) + f_t (x S_0^T) - sum_i G[t,i] (x . input_i) delta_i

layer after layer. The inputs on the key side are those of the anchor; the inputs on the query side are those of W_t.
Exact for the papers' definition at every chunk size; equal to the per-token recurrence only for chunk = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.coefficients import Coefficients, clamp_gates, coefficients, window
from kernels.grid import Grid, check_phase, part_of, phased_grid
from kernels.linear import READS, carry_window, check_window, closing, opening
from kernels.network import DEFAULT, Network, forward, inputs_and_deltas, output

BLOCK = 16  # chunks at once without autograd: bounds the chunk-start weights held for the reads

Weights = tuple[Tensor, ...]
Affine = tuple[Tensor, Tensor] | None


class DeepState(NamedTuple):
    """All that a deep memory keeps of its past. W, S, anchor: one tensor (B, H, out, in) a layer."""

    W: Weights
    S: Weights  # momentum
    anchor: Weights  # weights at the start of the open chunk
    phase: Tensor  # (B,) int64, tokens written into the open chunk; 0: the next write opens one
    keys: Tensor  # (B, H, c - 1, d_in) the Omega window's carried keys, oldest first; zeros before the stream began
    values: Tensor  # (B, H, c - 1, d_out)


def deep_state(init: Sequence[Tensor], streams: int, window: int = 1) -> DeepState:
    """A fresh memory for each of `streams`: W = init (each (H, out, in)), S = 0; window: the c of the Omega rule."""
    W = tuple(w.expand(streams, *w.shape).clone() for w in init)
    H, _, d_in = init[0].shape
    return DeepState(
        W=W,
        S=tuple(torch.zeros_like(w) for w in W),
        anchor=tuple(w.clone() for w in W),
        phase=torch.zeros(streams, dtype=torch.long, device=init[0].device),
        keys=W[0].new_zeros(streams, H, window - 1, d_in),
        values=W[0].new_zeros(streams, H, window - 1, init[-1].shape[-2]),
    )


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
) -> tuple[Tensor, DeepState]:
    """q, k (B, H, T, d_in), v (B, H, T, d_out) -> y (B, H, T, d_out) in v's dtype, and the state after the last token.

    theta, eta, alpha: (B, H, T, L), one gate a memory layer (Titans NeurIPS appendix F: without it depth does not pay), or (B, H, T)
    shared by the layers. eta None: no momentum; alpha None: no decay.
    init: one (H, out, in) a layer, the learned initial weights that the memory decays towards; None: decay to zero, as printed
    (a deep memory then dies: at W = 0 every gradient vanishes).
    affine: trained scale and shift of the LayerNorm, each (H, d_out). write (B, T) bool, False: the token reads and changes nothing.
    read: "after" or "before" the write, or "anchor": the weights the chunk began with (cheapest).
    gamma (B, H, T, c): the Omega rule (ATLAS Eqs. 8-11); c - 1 is the length of state.keys.
    exact_last: the hybrid; hidden features and the gradients below at the anchor, the last layer's errors at its true weights by one
    triangular solve a chunk. Needs a last layer without norm and the "l2" loss; made for Network(norm=False, unit_hidden=True).
    """
    check(q, k, v, theta, eta, alpha, state, init, chunk, network, read, gamma, exact_last)
    dtype = state.W[0].dtype
    B, H, T = k.shape[:3]
    if T == 0 or B == 0:  # no token or no stream
        return torch.zeros_like(v), state
    if T == 1:
        return _step(q, k, v, theta, eta, alpha, state, init, chunk, network, affine, read, write, gamma, exact_last)
    wants_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad
        for x in (q, k, v, theta, eta, alpha, gamma, *state.W, *state.S, *state.anchor, state.keys, *(init or ()), *(affine or ()))
    )
    piece = T
    if gamma is not None and write is not None:
        piece = 1  # the window holds written tokens only: with gaps, one token at a time is the whole rule
    elif not wants_grad or write is not None:
        piece = BLOCK * chunk
    if T > piece:
        outputs = []
        for at in range(0, T, piece):
            part = slice(at, at + piece)
            y, state = deep(
                q[:, :, part], k[:, :, part], v[:, :, part], theta[:, :, part], part_of(eta, part), part_of(alpha, part), state,
                init=init, chunk=chunk, network=network, affine=affine, read=read, write=None if write is None else write[:, part],
                gamma=part_of(gamma, part), exact_last=exact_last,
            )  # fmt: skip
            outputs.append(y)
        return torch.cat(outputs, 2), state

    depth = len(state.W)
    grid = phased_grid(T, chunk, state.phase, write)
    Q = grid.split(q.to(dtype))
    K = grid.split_window(k.to(dtype), state.keys)
    V = grid.split_window(v.to(dtype), state.values)
    blocks = _blocks(grid, theta, eta, alpha, gamma, depth, B, H, dtype)
    heads = None if init is None else tuple(w.expand(B, *w.shape).flatten(0, 1) for w in init)  # (B * H, out, in)
    norm = None if affine is None else tuple(a.expand(B, H, -1).reshape(B * H, 1, -1) for a in affine)
    first = tuple(opening(state.phase, w, a) for w, a in zip(state.W, state.anchor, strict=True))
    start = [x.flatten(0, 1) for x in (*first, *state.W, *state.S)]
    step = _ChunkStep(network, depth, exact_last, heads is not None, norm is not None)
    outer = (*(heads or ()), *(norm or ()))
    per_chunk = _per_chunk(blocks, exact_last)
    inputs, deltas, W_starts, S_starts, W_end, S_end = _run(step, K, V, per_chunk, start, outer, wants_grad)
    anchors = tuple(a.flatten(0, 1).unsqueeze(0) for a in first)
    if grid.chunks > 1:
        anchors = tuple(torch.cat([a, w[1:]]) for a, w in zip(anchors, W_starts, strict=True))
    if read == "anchor":
        Y = output(anchors, Q, network, norm)  # type: ignore[arg-type]
    else:
        seen = blocks if read == "after" else [b.before() for b in blocks]

        def layer(index: int, x: Tensor) -> Tensor:
            b, f, G = seen[index].b.unsqueeze(-1), seen[index].f.unsqueeze(-1), seen[index].G
            old = W_starts[index] if heads is None else W_starts[index] - heads[index]
            z = b * (x @ old.mT) + f * (x @ S_starts[index].mT) - ((x @ inputs[index].mT) * G) @ deltas[index]
            return z if heads is None else z + x @ heads[index].mT

        Y = forward(layer, depth, Q, network, norm)  # type: ignore[arg-type]
    new = DeepState(
        W=tuple(w.unflatten(0, (B, H)) for w in W_end),
        S=tuple(s.unflatten(0, (B, H)) for s in S_end),
        anchor=tuple(closing(grid, a.unflatten(1, (B, H)), c) for a, c in zip(anchors, state.anchor, strict=True)),
        phase=grid.phase,  # type: ignore[arg-type]
        keys=carry_window(state.keys, k.to(dtype), write),
        values=carry_window(state.values, v.to(dtype), write),
    )
    return grid.join(Y, B, H).to(v.dtype), new


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: DeepState,
    init: Sequence[Tensor] | None,
    chunk: int,
    network: Network,
    affine: Affine,
    read: str,
    write: Tensor | None,
    gamma: Tensor | None,
    exact_last: bool,
) -> tuple[Tensor, DeepState]:
    """One token (T = 1), straight from the rule: the weights are written anyway, so nothing needs to stay implicit."""
    dtype = state.W[0].dtype
    depth = len(state.W)
    check_phase(state.phase, chunk)
    eta, alpha = clamp_gates(eta, alpha)
    norm = None if affine is None else (affine[0].unsqueeze(-2), affine[1].unsqueeze(-2))
    anchor = tuple(opening(state.phase, w, a) for w, a in zip(state.W, state.anchor, strict=True))
    keys, values = k.to(dtype), v.to(dtype)
    if gamma is not None:
        keys, values = torch.cat([state.keys, keys], 2), torch.cat([state.values, values], 2)
    inputs, deltas = inputs_and_deltas(anchor, keys, values, network, norm)
    if exact_last:
        deltas[-1] = inputs[-1] @ state.W[-1].mT - (values - keys if network.residual else values)
    at = None if write is None else write.view(-1, 1, 1, 1)

    def gate(g: Tensor, layer: int) -> Tensor:  # (B, H, 1) or (B, H, 1, L) -> (B, H, 1, 1)
        return (g if g.dim() == 3 else g[..., layer]).to(dtype).unsqueeze(-1)

    W, S = [], []
    for i in range(depth):
        delta = deltas[i] * -gate(theta, i)
        if gamma is not None:  # the newest token is the last row, and lag 0
            delta = delta * gamma.to(dtype).flip(-1).mT
        s = delta.mT @ inputs[i]
        if eta is not None:
            s = torch.addcmul(s, state.S[i], gate(eta, i))
        if alpha is None:
            w = state.W[i] + s
        elif init is None:
            w = torch.addcmul(s, state.W[i], 1.0 - gate(alpha, i))
        else:
            w = torch.lerp(state.W[i], init[i].expand_as(state.W[i]), gate(alpha, i)) + s
        W.append(w if at is None else torch.where(at, w, state.W[i]))
        S.append(s if at is None else torch.where(at, s, state.S[i]))
    seen = {"after": tuple(W), "before": state.W, "anchor": anchor}[read]
    y = output(seen, q.to(dtype), network, norm)
    carried = anchor if at is None else tuple(torch.where(at, a, b) for a, b in zip(anchor, state.anchor, strict=True))
    new = DeepState(
        W=tuple(W),
        S=tuple(S),
        anchor=carried,
        phase=(state.phase + (1 if write is None else write[:, 0].long())) % chunk,
        keys=carry_window(state.keys, k.to(dtype), write),
        values=carry_window(state.values, v.to(dtype), write),
    )
    return y.to(v.dtype), new


def _blocks(
    grid: Grid,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    gamma: Tensor | None,
    depth: int,
    B: int,
    H: int,
    dtype: torch.dtype,
) -> list[Coefficients]:
    """One coefficient block a layer; the same object for all layers when the gates are shared."""

    def by_layer(g: Tensor | None) -> Tensor | None:  # -> (N, B * H, layers or 1, S)
        if g is None:
            return None
        g = grid.split(g)
        return g.unsqueeze(2) if g.dim() == 3 else g.mT

    live = grid.writes(B, H)
    shared = [by_layer(g) for g in (theta, eta, alpha)]
    layers = max(g.shape[2] for g in shared if g is not None)
    step = shared[0]
    assert step is not None
    block = coefficients(step.expand(-1, -1, layers, -1), shared[1], shared[2], None if live is None else live.unsqueeze(2))
    if gamma is not None:
        lag = grid.split(gamma).unsqueeze(2)
        block = window(block, lag.expand(-1, -1, layers, -1, -1))
    each = [Coefficients(*(x.expand(*x.shape[:2], layers, *x.shape[3:])[:, :, i].to(dtype) for x in block)) for i in range(layers)]
    return each if layers == depth else each * depth


def _per_chunk(blocks: Sequence[Coefficients], exact_last: bool) -> list[Tensor]:
    """What the sequential loop needs of the blocks: their last rows, and the rows before each token where the last layer is exact."""
    rows: list[Tensor] = []
    for block in blocks:
        rows += [block.b[..., -1], block.f[..., -1], block.m[..., -1], block.G[..., -1, :], block.GS[..., -1, :]]
    if exact_last:
        before = blocks[-1].before()
        rows += [before.b, before.f, before.G]
    return rows


class _ChunkStep(NamedTuple):
    """One chunk of the sequential loop as a pure function of tensors, so that its backward pass can recompute it."""

    network: Network
    depth: int
    exact_last: bool
    to_init: bool
    has_affine: bool

    def __call__(
        self, K: Tensor, V: Tensor, rows: Sequence[Tensor], carry: Sequence[Tensor], outer: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """carry = anchor, W, S (a tensor a layer each) -> inputs beyond the first, deltas, next W, next S."""
        n = self.depth
        anchor, W, S = carry[:n], carry[n : 2 * n], carry[2 * n :]
        init = outer[:n] if self.to_init else None
        affine = (outer[-2], outer[-1]) if self.has_affine else None
        inputs, deltas = inputs_and_deltas(anchor, K, V, self.network, affine)
        if self.exact_last:
            b, f, G = rows[5 * n :]
            A = inputs[-1]
            old = W[-1] if init is None else W[-1] - init[-1]
            right = b.unsqueeze(-1) * (A @ old.mT) + f.unsqueeze(-1) * (A @ S[-1].mT) - (V - K if self.network.residual else V)
            if init is not None:
                right = right + A @ init[-1].mT
            deltas[-1] = torch.linalg.solve_triangular((A @ A.mT) * G, right, upper=False, unitriangular=True)
        next_W, next_S = [], []
        for i in range(n):
            b, f, m, G, GS = (r.unsqueeze(-1) for r in rows[5 * i : 5 * i + 5])
            b, f, m = (x.unsqueeze(-1) for x in (b, f, m))
            both = deltas[i].mT @ torch.cat([G * inputs[i], GS * inputs[i]], -1)
            to_W, to_S = both.split(inputs[i].shape[-1], -1)
            w = torch.addcmul(f * S[i], W[i], b) if init is None else torch.addcmul(f * S[i], W[i] - init[i], b) + init[i]
            next_W.append(w - to_W)
            next_S.append(m * S[i] - to_S)
        return inputs[1:], deltas, next_W, next_S


def _run(
    step: _ChunkStep,
    K: Tensor,
    V: Tensor,
    per_chunk: Sequence[Tensor],
    start: Sequence[Tensor],
    outer: Sequence[Tensor],
    wants_grad: bool,
) -> tuple[list[Tensor], ...]:
    """All chunks in order: inputs and deltas (N, B * H, r, .), the W and S each chunk starts with, and the last W and S, by layer."""
    n = step.depth
    if wants_grad:
        flat = _DeepChunks.apply(step, len(per_chunk), len(start), K, V, *per_chunk, *start, *outer)  # type: ignore[no-untyped-call]
    else:
        flat = _loop(step, K, V, per_chunk, start, outer)
    inputs = [K, *flat[: n - 1]]
    if step.network.gated:
        inputs[1] = K
    rest = flat[n - 1 :]
    return inputs, *(list(rest[i * n : (i + 1) * n]) for i in range(5))


def _loop(
    step: _ChunkStep, K: Tensor, V: Tensor, per_chunk: Sequence[Tensor], start: Sequence[Tensor], outer: Sequence[Tensor]
) -> list[Tensor]:
    n = step.depth
    carry = list(start)
    made: list[list[Tensor]] = []
    for K_n, V_n, *rows in zip(K.unbind(0), V.unbind(0), *(r.unbind(0) for r in per_chunk), strict=True):
        inputs, deltas, W, S = step(K_n, V_n, rows, carry, outer)
        made.append([*inputs, *deltas, *carry[n:]])
        carry = [*W, *W, *S]
    if len(made) == 1:
        return [*(x.unsqueeze(0) for x in made[0]), *carry[n:]]
    return [*(torch.stack(x) for x in zip(*made, strict=True)), *carry[n:]]


class _DeepChunks(torch.autograd.Function):
    """`_loop` with a backward pass that keeps the chunk-start weights and recomputes each chunk, last to first."""

    @staticmethod
    def forward(ctx: Any, step: _ChunkStep, rows: int, carried: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        K, V = tensors[:2]
        per_chunk, start, outer = tensors[2 : 2 + rows], tensors[2 + rows : 2 + rows + carried], tensors[2 + rows + carried :]
        out = _loop(step, K, V, per_chunk, start, outer)
        n = step.depth
        ctx.step, ctx.rows, ctx.carried = step, rows, carried
        ctx.save_for_backward(*tensors, *out[2 * n - 1 : 4 * n - 1])
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step, n = ctx.step, ctx.step.depth
        saved = ctx.saved_tensors
        tensors, starts = saved[: -2 * n], saved[-2 * n :]
        first, last = 2 + ctx.rows, 2 + ctx.rows + ctx.carried
        by_chunk, start, outer = tensors[:first], tensors[first:last], tensors[last:]
        made, at_start, carry_grad = grads[: 2 * n - 1], grads[2 * n - 1 : 4 * n - 1], list(grads[4 * n - 1 :])
        by_chunk_grad = [torch.empty_like(x) for x in by_chunk]
        outer_grad = [torch.zeros_like(x) for x in outer]
        N = by_chunk[0].shape[0]
        chunks = [x.unbind(0) for x in by_chunk]
        for i in reversed(range(N)):
            leaves = [x[i].detach().requires_grad_() for x in chunks]
            state = [x[i].detach().requires_grad_() for x in starts]
            anchor = [x.detach().requires_grad_() for x in start[:n]] if i == 0 else state[:n]
            fixed = [x.detach().requires_grad_() for x in outer]
            with torch.enable_grad():
                inputs, deltas, W, S = step(leaves[0], leaves[1], leaves[2:], [*anchor, *state], fixed)
                wanted = [*leaves, *state, *fixed, *(anchor if i == 0 else ())]
                got = torch.autograd.grad([*inputs, *deltas, *W, *S], wanted, [*(g[i] for g in made), *carry_grad], materialize_grads=True)
            for x, g in zip(by_chunk_grad, got, strict=False):
                x[i].copy_(g)
            carry_grad = [g + outside[i] for g, outside in zip(got[first : first + 2 * n], at_start, strict=True)]
            for x, g in zip(outer_grad, got[first + 2 * n :], strict=False):
                x.add_(g)
        anchor_grad = got[first + 2 * n + len(outer) :]
        return (None, None, None, *by_chunk_grad, *anchor_grad, *carry_grad, *outer_grad)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor | None,
    alpha: Tensor | None,
    state: DeepState,
    init: Sequence[Tensor] | None,
    chunk: int,
    network: Network,
    read: str,
    gamma: Tensor | None,
    exact_last: bool,
) -> None:
    """A wrong shape broadcasts silently into a wrong memory; say which one it is instead."""
    B, H, T, d_in = k.shape
    depth = len(state.W)
    d_out = state.W[-1].shape[-2]
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {"q": (q, (B, H, T, d_in)), "v": (v, (B, H, T, d_out))}
    for name, gate in (("theta", theta), ("eta", eta), ("alpha", alpha)):
        if gate is not None:
            wanted[name] = (gate, (B, H, T) if gate.dim() == 3 else (B, H, T, depth))
    for i, w in enumerate(state.W):
        wanted[f"state.W[{i}]"] = (w, (B, H, *w.shape[-2:]))
        if init is not None:
            if len(init) != depth:
                raise ValueError(f"deep: init has {len(init)} weights, the state {depth}")
            wanted[f"init[{i}]"] = (init[i], (H, *w.shape[-2:]))
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"deep: {name} has shape {tuple(x.shape)}, expected {shape} for k of shape {tuple(k.shape)}")
    if network.gated and depth != 3:
        raise ValueError(f"deep: a gated memory has 3 weights, the state holds {depth}")
    if network.residual and d_in != d_out:
        raise ValueError(f"deep: a residual memory needs d_in == d_out, not {d_in} and {d_out}")
    if chunk < 1:
        raise ValueError(f"deep: chunk must be at least 1, not {chunk}")
    if read not in READS:
        raise ValueError(f"deep: read is one of {READS}, not {read!r}")
    if exact_last and (network.norm or network.loss != "l2" or gamma is not None):
        raise ValueError("deep: exact_last solves a linear system, so it needs norm=False, loss='l2' and no Omega window")
    check_window(gamma, state.keys, "deep")
