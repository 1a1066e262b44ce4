"""Titans blocks over a stream of numbers: every `rows` rows become one token of a backbone whose memory is carried along the stream.

The forecaster's line and phase memories say what recurs; this says what follows from the order of things. Its head starts at
zero, so a model begins as the line and learns only what the line leaves over. A patch that is not full yet waits in the look-back
window and in the count of rows: any split of the rows into calls gives the same tokens.

Axis letters: B streams, T rows, K tokens, P rows a patch, L look-back, G seasons, D width, H horizon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_core import state as value
from titans_core.blocks import Backbone
from titans_core.config import BackboneConfig, MemoryConfig, Mixer, Rule, require


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """rows: of a patch. layers: the mixer of each block (lmm, mac, mag, mal ...). rule, window: of their memories (`MemoryConfig`)."""

    rows: int = 8
    layers: tuple[Mixer, ...] = ("lmm",)
    dim: int = 32
    heads: int = 4
    rule: Rule = "exact"
    window: int = 1
    dropout: float = 0.2

    def __post_init__(self) -> None:
        require(self.rows >= 1, f"a patch of {self.rows} rows must have at least one")
        require(len(self.layers) > 0, "layers must name at least one block")

    def backbone(self) -> BackboneConfig:
        chunk = 64 if self.rule == "exact" else 16
        memory = MemoryConfig(dim=self.dim, heads=self.heads, rule=self.rule, window=self.window, chunk=chunk)
        return BackboneConfig(memory=memory, layers=self.layers, window=16, segment=16)


@dataclass(frozen=True)
class PatchState:
    """backbone: the state of the blocks; output (B, D): theirs after the last full patch; seen (B,): rows so far."""

    backbone: tuple[Any, ...]
    output: Tensor
    seen: Tensor


class PatchMemory(nn.Module):
    """`observe` turns rows into tokens and writes them; `correction` reads what the line leaves over, in units of the stream."""

    def __init__(self, config: PatchConfig, horizon: int, cycles: tuple[int, ...]) -> None:
        super().__init__()
        self.config, self.cycles = config, cycles
        self.embed = nn.Linear(config.rows + 3 + 2 * len(cycles), config.dim)
        self.backbone = Backbone(config.backbone())
        self.place = nn.Embedding(config.rows, config.dim)  # how many rows ago the last patch was full
        self.head = nn.Sequential(nn.GELU(), nn.Dropout(config.dropout), nn.Linear(config.dim, horizon))
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    @property
    def last(self) -> nn.Linear:
        layer = self.head[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def initial_state(self, n: int) -> PatchState:
        zeros = self.last.weight.new_zeros(n, self.config.dim)
        return PatchState(self.backbone.initial_state(n), zeros, torch.zeros(n, dtype=torch.long, device=zeros.device))

    def tokens(
        self, seen: int, past: Tensor, rows: Tensor, observed: Tensor, mean: Tensor, unit: Tensor, phase: Tensor
    ) -> Tensor:
        """Inputs (B, K, P + 3 + 2 G) of the patches that these T rows complete, after `seen` rows before.

        past (B, L): filled values before the rows; rows, mean, unit (B, T): filled values, running mean and deviation; observed (B, T)
        bool; phase (B, T, G): slots. A patch is relative to its last value and in units of the stream.
        """
        P = self.config.rows
        padded = torch.cat([past[:, -P:], rows], 1)
        first = P - 1 - seen % P  # index, among the new rows, of the first that completes a patch
        ends = torch.arange(first, max(first, rows.shape[1]), P, device=rows.device)
        patch = padded[:, ends.unsqueeze(1) + 1 + torch.arange(P, device=rows.device)]  # (B, K, P), oldest first
        now, middle = rows[:, ends].unsqueeze(2), mean[:, ends].unsqueeze(2)
        scale = torch.where(unit > 0, unit, 1.0)[:, ends].unsqueeze(2)
        before = padded[:, ends].unsqueeze(2)  # the value before the patch
        share = observed.float()[:, ends].unsqueeze(2)
        parts = [(patch - now) / scale, (now - before) / scale, (now - middle) / scale, share]
        for g, cycle in enumerate(self.cycles):
            angle = phase[:, ends, g].float().unsqueeze(2) * (2 * math.pi / cycle)
            parts += [angle.sin(), angle.cos()]
        return torch.cat([p.float() for p in parts], 2)

    def observe(
        self, state: PatchState, past: Tensor, rows: Tensor, observed: Tensor, mean: Tensor, unit: Tensor, phase: Tensor
    ) -> PatchState:
        """Write the patches that T rows complete; the arguments are those of `tokens`."""
        places = (state.seen % self.config.rows).unique()
        if len(places) > 1:  # streams whose patches end at other rows: those in step go together
            for place in places:
                index = (state.seen % self.config.rows == place).nonzero(as_tuple=True)[0]
                part = [x.index_select(0, index) for x in (past, rows, observed, mean, unit, phase)]
                moved = self.observe(value.select(state, index), *part)
                state = value.replace(state, index, moved)
            return state
        inputs = self.tokens(int(places[0]), past, rows, observed, mean, unit, phase)
        seen = state.seen + rows.shape[1]
        if inputs.shape[1] == 0:
            return PatchState(state.backbone, state.output, seen)
        output, backbone = self.backbone(self.embed(inputs), state.backbone)
        return PatchState(backbone, output[:, -1], seen)

    def correction(self, output: Tensor, place: Tensor) -> Tensor:
        """What to add to the line's forecast, in units of the stream: output (..., D), place (...) rows since the patch -> (..., H)."""
        corrected: Tensor = self.head(output + self.place(place))
        return corrected

    def read(self, state: PatchState) -> Tensor:
        """(B, H); zero before the first full patch."""
        out = self.correction(state.output, state.seen % self.config.rows)
        return torch.where((state.seen >= self.config.rows).unsqueeze(1), out, 0.0)


@dataclass(frozen=True)
class PatchRows:
    """What training sees: filled values, running mean and deviation (S, T) relative to the stream's centre, observed (S, T), phase (S, T, G)."""

    rows: Tensor
    observed: Tensor
    mean: Tensor
    unit: Tensor
    phase: Tensor


def fit_patches(
    model: PatchMemory, past: PatchRows, left: Tensor, known: Tensor, judged: Tensor, *, epochs: int, seed: int,
    rate: float = 1e-3, segment: int = 64,
) -> list[float]:  # fmt: skip
    """Train on what the line leaves over, with back-propagation through segments of tokens and the memory carried between them.

    left (S, T, H): the line's residuals in units of the stream at the origin after each row, NaN where unknown; known, judged (T,) bool:
    origins to learn from and to be judged by. The weights of the epoch with the least judged error stay; epoch 0, the zero head, is one of
    them, so a model that learns nothing of use stays the line. Returns the judged error (mean square) before training and after each epoch.
    """
    torch.manual_seed(seed)
    P = model.config.rows
    fresh = past.rows.new_zeros(past.rows.shape[0], P)
    inputs = model.tokens(0, fresh, past.rows, past.observed, past.mean, past.unit, past.phase).detach()
    K = inputs.shape[1]
    origins = torch.arange(P - 1, P - 1 + K * P)
    inside = origins < left.shape[1]
    target = torch.full((left.shape[0], K * P, left.shape[2]), torch.nan)
    target[:, inside] = left[:, origins[inside]].float()
    target = target.unflatten(1, (K, P))
    use = {
        name: F.pad(mask[origins[inside]], (0, int((~inside).sum()))).view(K, P).float() for name, mask in (("known", known), ("judged", judged))
    }
    place = torch.arange(P)
    finite = torch.isfinite(target)
    target = torch.where(finite, target, 0.0)

    def errors(output: Tensor, part: slice, mask: Tensor, robust: bool) -> tuple[Tensor, Tensor]:
        out = model.correction(output.unsqueeze(2), place)  # (S, k, P, H)
        weight = finite[:, part] * mask[part].view(1, -1, P, 1)
        if robust:
            each = F.smooth_l1_loss(out, target[:, part], reduction="none")
        else:
            each = (out - target[:, part]).square()
        return (each * weight).sum(), weight.sum()

    @torch.no_grad()
    def judge() -> float:
        model.eval()
        state, total, count = model.backbone.initial_state(inputs.shape[0]), 0.0, 0.0
        for at in range(0, K, segment):
            part = slice(at, at + segment)
            output, state = model.backbone(model.embed(inputs[:, part]), state)
            error, weight = errors(output, part, use["judged"], robust=False)
            total, count = total + float(error), count + float(weight)
        return total / max(count, 1.0)

    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    found = [judge()]
    best = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(epochs):
        model.train()
        state = model.backbone.initial_state(inputs.shape[0])
        for at in range(0, K, segment):
            part = slice(at, at + segment)
            output, state = model.backbone(model.embed(inputs[:, part]), state)
            error, weight = errors(output, part, use["known"], robust=True)
            if float(weight) > 0:
                optimiser.zero_grad()
                (error / weight).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
            state = value.map_state(lambda leaf: leaf.detach(), state)
        found.append(judge())
        if found[-1] <= min(found):
            best = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best)
    model.eval()
    return found
