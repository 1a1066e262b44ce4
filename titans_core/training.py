"""Training a forecaster: replay the past once, solve the line in closed form, let a small network learn the rest, calibrate the quantiles.

The memory has no weights to train, so its reads are computed once, by the same code that serves a live stream, and everything after is
ordinary supervised learning on them. Every choice is made on validation windows; test rows are never needed here.

Letters: S series, T rows, N origins, L look-back, H horizon, d features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_core.forecaster import ROWS_AT_ONCE, Forecaster, ForecasterConfig, ForecasterState, Known, Past, PhaseMemory
from titans_core.patches import PatchMemory, PatchRows, fit_patches
from titans_core.state import map_state, select

CELLS_AT_ONCE = 1 << 18  # series x rows written at once: some 5 KB each while they are
ORIGINS_AT_ONCE = 512  # origins whose features are made in one batch


@dataclass(frozen=True)
class Windows:
    """Training examples, all relative to the last value and in the stream's unit.

    x (N, d) features, y (N, H) futures (NaN where not observed); level and unit (N,) float64 lead back to the series:
    value = level + unit * y. weight (N,) float32: what an error of one unit counts for (None: 1 everywhere).
    """

    x: Tensor
    y: Tensor
    level: Tensor
    unit: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Series side by side on one grid: y (S, T) float64, observed (S, T) bool, phase (S, T + H, G) int16 slots, H rows past the end.

    covariates (S, T + H, K) float32, where the model has them.
    """

    y: Tensor
    observed: Tensor
    phase: Tensor
    covariates: Tensor | None = None

    def first(self, rows: int) -> Rows:
        """The rows of training alone; what is known of later ones stays."""
        return dataclasses.replace(self, y=self.y[:, :rows], observed=self.observed[:, :rows])


@torch.no_grad()
def replay(
    model: Forecaster, state: ForecasterState, rows: Rows, origins: Sequence[Tensor]
) -> tuple[list[Windows], ForecasterState]:
    """Write all rows in turn; the windows at every origin of each group, and the state after the last row.

    origins: groups of row counts; origin t has seen rows 0..t-1 and is followed by row t (at least one look-back of rows must lie before
    it). Windows come origin by origin, each with its S series in order.
    """
    c = model.config
    S, T = rows.y.shape
    series = torch.arange(S).unsqueeze(0)
    newest = [_newest(rows.phase[:, :T, g].long(), season.slots) for g, season in enumerate(c.seasons)]
    seen = torch.where(rows.observed.unsqueeze(2), rows.phase[:, :T], -1)
    padded = F.pad(torch.where(rows.observed, rows.y, torch.nan), (0, c.horizon), value=torch.nan)
    counts = state.count.unsqueeze(1) + rows.observed.cumsum(1)
    own = _Replayed(model, state, rows, rows.y, newest)
    effect: _Replayed | None = None
    happened = None
    if c.covariates is not None:
        assert rows.covariates is not None and state.effect is not None
        effect = _Replayed(model, state.effect, rows, model.effect_of(rows.covariates[:, :T]), newest)
        happened = rows.covariates[:, :T, c.covariates.future : c.covariates.future + c.covariates.historic]
        happened = F.pad(happened, (0, 0, c.look_back, 0))
    past = _patch_rows(rows, own.last, own.mean, own.variance)
    corrections = None if model.patches is None else _corrections(model.patches, past)

    def block(t: Tensor) -> Windows:
        """The windows at origins t (n,), for all series: N = n S."""
        n = len(t)
        future = rows.phase.unfold(1, c.horizon, 1)[:, t].movedim(3, 2).transpose(0, 1).flatten(0, 1)  # (N, H, G)
        known = None
        if effect is not None:
            assert rows.covariates is not None and happened is not None and c.covariates is not None
            ahead = rows.covariates.unfold(1, c.horizon, 1)[:, t].movedim(3, 2).transpose(0, 1).flatten(0, 1)  # (N, H, K)
            behind = happened.unfold(1, c.look_back, 1)[:, t].movedim(3, 2).transpose(0, 1).flatten(0, 1)  # (N, L, historic)
            static = ahead[:, 0, c.covariates.future + c.covariates.historic :]
            its = effect.past(t, future, seen)
            known = Known(its, effect.after.centre.repeat(n) + its.last, ahead[:, :, : c.covariates.future], behind, static)
        x, level, unit = model.assemble(own.past(t, future, seen), known, None if corrections is None else corrections(t))
        scale = torch.where(unit > 0, unit, 1.0)
        origin_level = level + own.after.centre.repeat(n).unsqueeze(1)
        y = padded.unfold(1, c.horizon, 1)[:, t].transpose(0, 1).flatten(0, 1)
        # A stream that has shown fewer than two values has no unit yet and teaches nothing.
        y = torch.where(counts[series, (t - 1).unsqueeze(1)].flatten().unsqueeze(1) >= 2, y, torch.nan)
        return Windows(x, ((y - origin_level) / scale).float(), origin_level.squeeze(1), scale.squeeze(1))

    groups = []
    for group in origins:
        parts = [block(t) for t in group.long().split(ORIGINS_AT_ONCE)]
        names = ("x", "y", "level", "unit")
        groups.append(Windows(*(torch.cat([getattr(p, name) for p in parts]) for name in names)))
    after = own.after
    if effect is not None:
        assert happened is not None
        after = dataclasses.replace(after, effect=effect.after, historic=happened[:, -c.look_back :])
    return groups, after


class _Replayed:
    """One stream a series (its values, or the effects of its covariates), written once from `start`, to be read at any origin."""

    def __init__(self, model: Forecaster, start: ForecasterState, rows: Rows, y: Tensor, newest: list[Tensor]) -> None:
        self.model, self.start, self.newest = model, start, newest
        T, state, tracks = y.shape[1], start, []
        step = min(ROWS_AT_ONCE, max(64, CELLS_AT_ONCE // len(y)))
        for at in range(0, T, step):
            part = slice(at, at + step)
            state, track = model.track(state, y[:, part], rows.observed[:, part], rows.phase[:, :T][:, part])
            tracks.append(track)
        self.after = state
        self.last, self.mean, self.variance = (torch.cat([getattr(t, name) for t in tracks], 1) for name in ("last", "mean", "variance"))
        self.held = [torch.cat(parts, 2) for parts in zip(*(t.held for t in tracks), strict=True)]
        self.visits = [torch.cat(parts, 1) for parts in zip(*(t.visits for t in tracks), strict=True)]

    def past(self, t: Tensor, future: Tensor, seen: Tensor) -> Past:
        """What a forecast at origins t (n,) reads, N = n S. future (N, H, G); seen (S, T, G): slots of observed rows, else -1."""
        model, start, c = self.model, self.start, self.model.config
        S, n = len(self.last), len(t)
        series, row = torch.arange(S).unsqueeze(0), (t - 1).unsqueeze(1)  # (1, S), (n, 1)
        window = self.last.unfold(1, c.look_back, 1)[:, t - c.look_back].transpose(0, 1).flatten(0, 1)
        last, mean, variance = (v[series, row].flatten() for v in (self.last, self.mean, self.variance))
        if c.memory != "carried":
            phases = seen.unfold(1, c.look_back, 1)[:, t - c.look_back].movedim(3, 2).transpose(0, 1).flatten(0, 1)
            fresh = map_state(lambda leaf: leaf.repeat(n, *[1] * (leaf.dim() - 1)), start)
            fresh = dataclasses.replace(fresh, window=window, phases=phases, last=last, mean=mean, variance=variance)
            return model.past(fresh, future)
        reads = []
        for g, season in enumerate(c.seasons):
            slots = model.read_slots(future, g).unflatten(0, (n, S))  # (n, S, reads)
            where = self.newest[g][series.unsqueeze(2), row.unsqueeze(2), slots].long()  # row of the newest token of that slot
            known = where >= 0
            where = where.clamp(min=0)
            heads = torch.arange(len(season.rates)).view(-1, 1)
            begun = start.memory[g].W[:, :, 0].unsqueeze(0).expand(n, -1, -1, -1)
            begun = begun.gather(3, slots.unsqueeze(2).expand(-1, -1, len(season.rates), -1))
            values = self.held[g][series.view(1, S, 1, 1), heads, where.unsqueeze(2)]
            values = torch.where(known.unsqueeze(2), values, begun)
            times = torch.where(known, self.visits[g][series.unsqueeze(2), where], start.memory[g].visits[series.unsqueeze(2), slots])
            reads.append((values.flatten(0, 1), times.flatten(0, 1)))
        return Past(window, reads, last, mean, variance)


# A window of so many units (root mean square over its future) counts for no more than this: of a series that stood still and jumps, the
# unit is as small as its noise was, and one window would outweigh all others. On made series, half of them such, the error of the others is
# 0.68 with 5 or 10, 0.70 with 20, 0.77 with 50 and 1,527 without (0.64 where none of them jumps, whatever the number).
MOST_UNITS = 10.0


def weigh(windows: Windows, scale: Tensor | None) -> Windows:
    """Windows with their weights. scale (N,): what errors are measured in (None: the unit of each window).

    Windows beyond MOST_UNITS are taken down to it.
    """
    weight = torch.ones_like(windows.unit) if scale is None else torch.where(scale > 0, windows.unit / scale, 0.0)
    seen = torch.isfinite(windows.y)
    square = torch.where(seen, windows.y, 0.0).square().sum(1).double() / seen.sum(1).clamp(min=1)
    return dataclasses.replace(windows, weight=(weight * (MOST_UNITS / square.sqrt().clamp(min=MOST_UNITS))).float())


def _patch_rows(rows: Rows, last: Tensor, mean: Tensor, variance: Tensor) -> PatchRows:
    T = rows.y.shape[1]
    return PatchRows(last, rows.observed, mean.float(), variance.clamp(min=0.0).sqrt().float(), rows.phase[:, :T])


def _corrections(patches: PatchMemory, past: PatchRows) -> Callable[[Tensor], Tensor]:
    """What the blocks say at origins (n,), for all series: (n S, H), origin by origin. A series begins at its first observed row."""
    P, S = patches.config.rows, past.rows.shape[0]
    starts = past.observed.int().argmax(1)
    outputs: list[Tensor | None] = [None] * S
    for start in starts.unique().tolist():
        index = (starts == start).nonzero(as_tuple=True)[0]
        fields = [getattr(past, f.name)[index, start:] for f in dataclasses.fields(past)]
        inputs = patches.tokens(0, fields[0].new_zeros(len(index), P), *fields)
        output, _ = patches.backbone(patches.embed(inputs), patches.backbone.initial_state(len(index)))
        for i, one in zip(index.tolist(), output, strict=True):
            outputs[i] = one

    def at(t: Tensor) -> Tensor:
        said = []
        for i, one in enumerate(outputs):
            seen = t - starts[i]
            full = seen >= P
            token = torch.where(full, seen // P - 1, 0)
            assert one is not None
            read = patches.correction(one[token], seen.clamp(min=0) % P) if len(one) else t.new_zeros(len(t), patches.last.out_features)
            said.append(torch.where(full.unsqueeze(1), read, 0.0))
        return torch.stack(said, 1).flatten(0, 1)

    return at


def learn_patches(
    model: Forecaster, state: ForecasterState, rows: Rows, known: Tensor, judged: Tensor, *, epochs: int, seed: int
) -> bool:
    """Train the blocks on what line and network leave over; False: nothing that helps on the judged origins was found, and they stay mute.

    known, judged: row counts of the origins to learn from and to be judged by (validation). When True the line has been told to add what
    the blocks say; windows made before are out of date.
    """
    patches = model.patches
    assert patches is not None
    T, c = rows.y.shape[1], model.config
    with torch.no_grad():
        (windows,), _ = replay(model, state, rows, [torch.cat([known, judged])])
        left = torch.full((rows.y.shape[0], T, c.horizon), torch.nan)
        each = torch.cat([windows.y[at : at + 4096] - model.centre_of(windows.x[at : at + 4096]) for at in range(0, len(windows.x), 4096)])
        left[:, torch.cat([known, judged]) - 1] = each.unflatten(0, (-1, rows.y.shape[0])).transpose(0, 1)
        _, track = model.track(state, rows.y, rows.observed, rows.phase[:, :T])
        past = _patch_rows(rows, track.last, track.mean, track.variance)
    masks = [torch.zeros(T, dtype=torch.bool).index_fill(0, at - 1, True) for at in (known, judged)]
    found = fit_patches(patches, past, left, *masks, epochs=epochs, seed=seed)
    if min(found) == found[0]:
        return False
    with torch.no_grad():
        model.line[-2 - c.horizon : -2] = torch.eye(c.horizon)  # before the gap and the 1
    return True


def _newest(slots: Tensor, count: int) -> Tensor:
    """The row of the newest token of every slot, after each row; -1 before the first. (S, T) -> (S, T, count) int32."""
    series = slots.shape[0]
    if (slots == slots[:1]).all():  # one calendar for all series, the usual case: worked out once
        slots = slots[:1]
    rows = torch.arange(slots.shape[1], dtype=torch.int32).view(1, -1, 1)
    return torch.where(slots.unsqueeze(2) == torch.arange(count), rows, -1).cummax(1).values.expand(series, -1, -1)


@torch.no_grad()
def initial_memory(model: Forecaster, state: ForecasterState, rows: Rows) -> ForecasterState:
    """`state` with the memory W_0 that `frozen` and `window` start from: the mean shape of every season over the rows of training.

    A slot's mean is what the delta rule holds when it writes with theta = 1 / (visits + 1) and never forgets; the mean over the slots is
    taken off, because a level of long ago says little about now.
    """
    memory = []
    values = torch.where(rows.observed, rows.y - state.centre.unsqueeze(1), 0.0)
    for g, (season, held) in enumerate(zip(model.config.seasons, state.memory, strict=True)):
        slots = rows.phase[:, : rows.y.shape[1], g].long()
        visits = torch.zeros(held.visits.shape, dtype=torch.float64).scatter_add_(1, slots, rows.observed.double())
        sums = torch.zeros_like(visits).scatter_add_(1, slots, values)
        level = sums.sum(1, keepdim=True) / visits.sum(1, keepdim=True).clamp(min=1.0)
        shape = torch.where(visits > 0, sums / visits.clamp(min=1.0) - level, 0.0).float()
        memory.append(PhaseMemory(shape[:, None, None].repeat(1, len(season.rates), 1, 1), visits.float()))
    return dataclasses.replace(state, memory=tuple(memory))


@dataclass(frozen=True)
class Line:
    """How the closed-form line was chosen, and its mean squared error on validation, in units of the streams.

    The defaults are what a file of plain JSON numbers cannot say and leaves out.
    """

    penalty: float
    gap_penalty: float = math.inf  # infinite: no pull back to the mean
    covariate_penalty: float = math.inf  # infinite: covariates act by their effect alone
    score: float = math.nan  # mean log error over all folds
    error: float = math.nan  # not a number: there was no validation window


# Per training window. Measured on validation folds of hourly and quarter-hourly series: 0.015 to 0.5 is flat, both ends beyond are worse.
PENALTIES = (0.015, 0.15, 0.5)
GAP_PENALTIES = (math.inf, 0.15, 0.015)
COVARIATE_PENALTIES = (math.inf, 0.5, 0.05)
FOLDS = ((3, (4, 5)), (5, (6, 7)))  # eighths of the training windows: fitted on the first so many, judged on those
# A future of which less than this share was observed teaches too little for what has to be filled in.
OBSERVED_SHARE = 0.5
FILLINGS = 3
# Training ends after so many epochs in a row whose error is above the best by this factor: the line leaves nothing to learn.
PATIENCE, HOPELESS = 3, 1.02


class _Moments(NamedTuple):
    gram: Tensor  # (d, d) float64, X'X
    cross: Tensor  # (d, H) float64, X'Y
    square: float  # sum of y^2
    windows: int


def _moments(x: Tensor, y: Tensor) -> _Moments:
    gram = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    cross = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    square = 0.0
    for at in range(0, len(x), 8192):
        a, b = x[at : at + 8192], y[at : at + 8192]
        gram += (a.mT @ a).double()
        cross += (a.mT @ b).double()
        square += float((b**2).sum(dtype=torch.float64))
    return _Moments(gram, cross, square, len(x))


def _total(parts: Sequence[_Moments]) -> _Moments:
    gram, cross, square, windows = parts[0]
    for p in parts[1:]:
        gram, cross, square, windows = gram + p.gram, cross + p.cross, square + p.square, windows + p.windows
    return _Moments(gram, cross, square, windows)


def _solve(config: ForecasterConfig, m: _Moments, line: Line) -> Tensor:
    """(d, H) float64: argmin of the squares plus count * penalty * ||W||^2; the gap's row and those of covariates have penalties of their own.

    The lift is added as it is: its rows are the unit matrix.
    """
    diagonal = torch.full((len(m.gram),), line.penalty * m.windows, dtype=torch.float64)
    keep = torch.ones(len(m.gram), dtype=torch.bool)
    for rows, penalty in ((slice(-2, -1), line.gap_penalty), (config.covariate_features, line.covariate_penalty), (config.lift, math.inf)):
        keep[rows] = math.isfinite(penalty)
        diagonal[rows] = penalty * m.windows
    solved = torch.zeros_like(m.cross)
    cross = m.cross
    if config.lift.stop > config.lift.start:
        solved[config.lift] = torch.eye(config.horizon, dtype=torch.float64)
        cross = cross - m.gram[:, config.lift]
    solved[keep] = torch.linalg.solve(m.gram[keep][:, keep] + diagonal[keep].diag(), cross[keep])
    return solved


def _error(m: _Moments, line: Tensor) -> float:
    total = float((line * (m.gram @ line)).sum() - 2 * (line * m.cross).sum()) + m.square
    return total / (m.windows * m.cross.shape[1])


@torch.no_grad()
def fit_line(model: Forecaster, train: Windows, valid: Windows) -> Line:
    """Set the model's line, ridge regression of the futures on the features; says how it was chosen.

    The penalty is the one with the least mean log error over rolling folds: two inside the training windows (an eighth of them left out
    between fitting and judging) and validation. One period alone is a poor judge: errors of neighbouring seasons differ more than those of
    neighbouring penalties. Futures with missing steps are filled with the line's own forecast and the line is solved
    again: missing cells then carry no weight. Raises ValueError where no training window has half of its future.
    """
    c = model.config
    x, y, weight = _usable(train)
    if not len(x):
        raise ValueError("no training window has half of its future observed")
    mean, scale = x.mean(0), 1.0 / x.std(0, correction=0).clamp(min=1e-2)
    x, y = _times(x, weight), _times(y, weight)
    missing = ~torch.isfinite(y)
    filled = torch.where(missing, 0.0, y)
    if bool(missing.any()):
        for _ in range(FILLINGS):
            first = _solve(c, _moments(x, filled), Line(PENALTIES[0], GAP_PENALTIES[1])).float()
            filled = torch.where(missing, x @ first, y)
    eighths = [_moments(a, b) for a, b in zip(x.tensor_split(8), filled.tensor_split(8), strict=True)]
    whole = _total(eighths)
    held, target, weight = _usable(valid)
    held, target = _times(held, weight), _times(target, weight)
    complete = torch.isfinite(target).all(1)
    folds = [
        (_total(eighths[:a]), _total([eighths[i] for i in b])) for a, b in FOLDS if min(m.windows for m in eighths)
    ]
    final = _moments(held[complete], target[complete]) if bool(complete.any()) else None

    def log_error(fit: _Moments, judge: _Moments, line: Line) -> float:
        return math.log(max(_error(judge, _solve(c, fit, line)), 1e-30))

    def over_folds(line: Line) -> float:
        pairs = folds if final is None else [*folds, (whole, final)]
        return sum(log_error(fit, judge, line) for fit, judge in pairs) / max(len(pairs), 1)

    # Validation alone judges the pull back to the mean: where a series' mean is known from its training rows, folds inside them know
    # what lies ahead of them.
    gap = GAP_PENALTIES[0]
    if final is not None:
        gap = min(GAP_PENALTIES, key=lambda g: min(log_error(whole, final, Line(p, g)) for p in PENALTIES))
    covariates = COVARIATE_PENALTIES if c.covariate_features.stop > c.covariate_features.start else (math.inf,)
    score, line = min(((over_folds(line), line) for line in (Line(p, gap, q) for q in covariates for p in PENALTIES)), key=lambda found: found[0])
    solved = _solve(c, whole, line)
    model.line.copy_(solved)
    model.feature_mean.copy_(mean)
    model.feature_mean[-1] = 0.0
    model.feature_scale.copy_(scale)
    model.feature_scale[-1] = 1.0
    return dataclasses.replace(line, score=score, error=math.nan if final is None else _error(final, solved))


# Effect and line are solved in turns; on made series with promotions the effect moves by less than 1 % after the third.
EFFECT_TURNS = 4
EFFECT_NUMBERS = 40_000_000  # features held at a time while the effect is solved
# Each covariate is replayed like a series of its own; one number for each is well known from so many series and rows.
EFFECT_SERIES, EFFECT_ROWS = 256, 10_000


@torch.no_grad()
def fit_effect(model: Forecaster, state: ForecasterState, rows: Rows, origins: Tensor) -> None:
    """Set the model's effect: what a unit of each covariate known ahead adds to the value of its row, in units of the stream.

    A forecast is a line of the past without effects, plus the effect. For a given line that is linear in the effect, so that the two are
    solved in turns; what the line makes of each covariate's own past is read by the same memory. rows: those of training only; origins
    (n,): row counts whose horizon lies inside them.
    """
    c = model.config
    assert c.covariates is not None and rows.covariates is not None
    which = torch.linspace(0, len(rows.y) - 1, min(len(rows.y), EFFECT_SERIES)).round().long()
    cut = max(0, rows.y.shape[1] - EFFECT_ROWS)
    rows = Rows(rows.y[which, cut:], rows.observed[which, cut:], rows.phase[which, cut:], rows.covariates[which, cut:])
    state, origins = select(state, which), origins[origins - cut >= c.look_back] - cut
    count, own = c.covariates.future, [*range(c.own_features), c.features - 2, c.features - 1]
    most = max(1, EFFECT_NUMBERS // (len(rows.y) * (len(own) + c.horizon) * (count + 1)))
    some = origins[torch.linspace(0, len(origins) - 1, min(most, len(origins))).round().long()]
    model.effect.zero_()
    (raw,), _ = replay(model, state, rows, [some])
    use = torch.isfinite(raw.y).float().mean(1) >= OBSERVED_SHARE
    if not bool(use.any()):
        return
    weight = weigh(raw, None).weight
    assert weight is not None
    weight = weight[use].unsqueeze(1)
    x, y = _times(raw.x[use][:, own], weight), _times(raw.y[use], weight)
    seen = torch.isfinite(y)
    past, lift = [], []
    for k in range(count):
        model.effect.zero_()
        model.effect[k] = 1.0
        (one,), _ = replay(model, state, rows, [some])
        past.append(x - _times(one.x[use][:, own], weight))
        lift.append(_times(one.x[use][:, c.lift], weight))
    plain = dataclasses.replace(c, covariates=None, patches=None)
    effect = torch.zeros(count)
    y = torch.where(seen, y, 0.0)
    # Every row stands in so many windows; it weighs against the penalty, one row of one squared unit, as one.
    overlap = float(seen.sum()) / max(int(rows.observed.sum()), 1)
    for _ in range(EFFECT_TURNS):
        without = x - sum((w * p for w, p in zip(effect, past, strict=True)), torch.zeros(()))
        target = y - sum((w * q for w, q in zip(effect, lift, strict=True)), torch.zeros(()))
        line = torch.zeros(len(own), c.horizon)
        for _ in range(1 if bool(seen.all()) else FILLINGS):
            line = _solve(plain, _moments(without, torch.where(seen, target, without @ line)), Line(PENALTIES[1], GAP_PENALTIES[1])).float()
        left = torch.where(seen, y - x @ line, 0.0)
        acts = torch.stack([torch.where(seen, q - p @ line, 0.0).flatten() for p, q in zip(past, lift, strict=True)])
        gram = (acts @ acts.mT).double() + max(overlap, 1e-6) * torch.eye(count, dtype=torch.float64)
        effect = torch.linalg.solve(gram, (acts @ left.flatten()).double()).float()
    model.effect.copy_(effect)


def _usable(windows: Windows) -> tuple[Tensor, Tensor, Tensor]:
    """Features, futures and weights (n, 1) of the windows with enough of their future."""
    enough = torch.isfinite(windows.y).float().mean(1) >= OBSERVED_SHARE
    weight = torch.ones(len(windows.x)) if windows.weight is None else windows.weight
    if not bool(enough.all()):
        return windows.x[enough], windows.y[enough], weight[enough].unsqueeze(1)
    return windows.x, windows.y, weight.unsqueeze(1)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows of least squares with their weights; not copied where all weigh 1."""
    return rows if bool((weight == 1).all()) else rows * weight


@dataclass(frozen=True)
class Training:
    """Settings of the network's training: AdamW with a one-cycle rate; the best epoch on validation stays."""

    epochs: int = 8
    batch: int = 512
    rate: float = 1e-3
    decay: float = 1e-2
    seed: int = 0


def fit_network(
    model: Forecaster,
    line: Line,
    train: Windows,
    valid: Windows,
    settings: Training,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Train the network on what the line leaves over, with a Huber loss; returns the model's error on validation.

    Two trainings with one schedule: one on the first five eighths of the windows, judged on the last quarter, and the real one, judged on
    validation. The epoch with the least mean log error over both stays (epoch 0 is the line alone): what helps in one period only is
    not kept. progress is called after every epoch with its number (counted over both) and the judging error.
    """
    x, y, weight = _usable(train)
    held, target, judged = _usable(valid)
    if model.net is None or not len(held):
        return validation_error(model, held, target, judged)
    pieces = [p for p in x.tensor_split(8)]
    first, last = sum(len(p) for p in pieces[:5]), sum(len(p) for p in pieces[:6])
    filled = torch.where(torch.isfinite(y[:first]), y[:first], x[:first] @ model.line)
    early = _solve(model.config, _moments(_times(x[:first], weight[:first]), _times(filled, weight[:first])), line).float()
    real = model.line.clone()
    model.line.copy_(early)
    epochs = settings.epochs
    tell = None if progress is None else (lambda epoch, error: progress(epoch, error))
    begin, end = (x[:first], y[:first], weight[:first]), (x[last:], y[last:], weight[last:])
    before, _ = _descend(model, begin, end, settings, tell)
    model.line.copy_(real)
    tell = None if progress is None else (lambda epoch, error: progress(epochs + epoch, error))
    now, kept = _descend(model, (x, y, weight), (held, target, judged), settings, tell)
    both = [math.log(max(a, 1e-30)) + math.log(max(b, 1e-30)) for a, b in zip(before, now, strict=False)]
    best = min(range(len(both)), key=both.__getitem__)
    model.net.load_state_dict(kept[best])
    return now[best]


def refit_network(model: Forecaster, windows: Windows, settings: Training) -> None:
    """Train a network that validation has kept once more, now on all windows that are known, by the whole schedule.

    The line must have been solved on them before. A network and a line that both stop before validation are worse for rows after it: learnt
    again, their errors fell by 0.5 to 5 per cent on five hourly data sets at H=1, by 2 to 16 on four at H=24.
    """
    x, y, weight = _usable(windows)
    assert model.net is not None
    _, kept = _descend(model, (x, y, weight), (x[:0], y[:0], weight[:0]), settings, None)
    model.net.load_state_dict(kept[-1])


def _descend(
    model: Forecaster,
    train: tuple[Tensor, Tensor, Tensor],
    held: tuple[Tensor, Tensor, Tensor],
    settings: Training,
    progress: Callable[[int, float], None] | None,
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train the network from the start; its error on the held windows and its weights before the first epoch and after each.

    train, held: features, futures and weights, as `_usable` gives them.
    """
    x, y, weight = train
    net = model.net
    assert net is not None
    torch.manual_seed(settings.seed)
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    out = net[-1]
    assert isinstance(out, nn.Linear)
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)
    errors, kept = [validation_error(model, *held)], [{k: v.clone() for k, v in net.state_dict().items()}]
    with torch.no_grad():
        seen = torch.isfinite(y)
        counts = seen * weight.square()
        masked = not bool((counts == 1).all())
        left = torch.where(seen, y, 0.0) - x @ model.line
        inputs = (x - model.feature_mean) * model.feature_scale
    size = min(settings.batch, len(x))
    batches = len(x) // size
    optimiser = torch.optim.AdamW(net.parameters(), lr=settings.rate, weight_decay=settings.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.rate, total_steps=settings.epochs * batches + 1, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(settings.seed)
    worse = 0
    for epoch in range(settings.epochs):
        net.train()
        order = torch.randperm(len(x), generator=generator)
        for batch in range(batches):
            index = order[batch * size : (batch + 1) * size]
            loss = F.smooth_l1_loss(net(inputs[index]), left[index], reduction="none")
            loss = (loss * counts[index]).sum() / counts[index].sum().clamp(min=1e-12) if masked else loss.mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        net.eval()
        error = validation_error(model, *held)
        worse = worse + 1 if error > HOPELESS * min(errors) else 0
        errors.append(error)
        kept.append({k: v.clone() for k, v in net.state_dict().items()})
        if progress is not None:
            progress(epoch, error)
        if worse == PATIENCE:
            break
    return errors, kept


@torch.no_grad()
def validation_error(model: Forecaster, x: Tensor, y: Tensor, weight: Tensor | None = None) -> float:
    """Mean squared error of the expected values over observed cells, in units of the streams times weight (N, 1). x (N, d), y (N, H)."""
    total, cells = 0.0, 0
    for at in range(0, len(x), 4096):
        error = model.centre_of(x[at : at + 4096]) - y[at : at + 4096]
        if weight is not None:
            error = error * weight[at : at + 4096]
        seen = torch.isfinite(error)
        total += float((error[seen] ** 2).sum(dtype=torch.float64))
        cells += int(seen.sum())
    return total / cells if cells else math.nan


@torch.no_grad()
def calibrate(model: Forecaster, valid: Windows) -> None:
    """Quantile offsets from the residuals of validation, for every step of the horizon, with the finite-sample correction.

    The residuals of a step are sorted once and read at all levels, so quantiles can never cross. A level q is read at rank
    ceil((n + 1) q) above the median and floor((n + 1) q) below it: split conformal prediction, one side at a time.
    """
    spread = model.roughness(valid.x) ** model.config.spread
    centre = torch.cat([model.centre_of(valid.x[at : at + 4096]) for at in range(0, len(valid.x), 4096)] or [valid.y])
    residual = (valid.y - centre) / spread
    for step in range(residual.shape[1]):
        seen = residual[:, step]
        seen = seen[torch.isfinite(seen)].sort().values
        for i, level in enumerate(model.config.quantiles):
            rank = (len(seen) + 1) * level
            place = math.ceil(rank) if level >= 0.5 else math.floor(rank)
            if len(seen):
                model.offsets[step, i] = seen[min(max(place, 1), len(seen)) - 1]
