"""Training a forecaster: replay the past once, solve the line in closed form, let a small network learn the rest, calibrate the quantiles.

The memory has no weights to train, so its reads are computed once, by the same code that serves a live stream, and everything after is
ordinary supervised learning on them. Every choice is made on validation windows; test rows are never needed here.

Letters: S series, T rows, N origins, L look-back, H horizon, d features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_core.forecaster import ROWS_AT_ONCE, Forecaster, ForecasterState, Level, PhaseMemory
from titans_core.state import map_state

ORIGINS_AT_ONCE = 512  # origins whose features are made in one batch


@dataclass(frozen=True)
class Windows:
    """Training examples, all relative to the last value and in the stream's unit.

    x (N, d) features, y (N, H) futures (NaN where not observed), gap (N,) last value minus running mean; level and unit (N,) float64 lead
    back to the series: value = level + unit * y.
    """

    x: Tensor
    y: Tensor
    gap: Tensor
    level: Tensor
    unit: Tensor

    def relative_to(self, level: Level) -> tuple[Tensor, Tensor]:
        """Features and futures relative to the last value (as they are) or to the running mean."""
        if level == "last":
            return self.x, self.y
        x = self.x + self.gap.unsqueeze(1)
        x[:, -1] = 1.0
        return x, self.y + self.gap.unsqueeze(1)


@dataclass(frozen=True)
class Rows:
    """Series side by side on one grid: y (S, T) float64, observed (S, T) bool, phase (S, T + H, G) int16 slots, H rows past the end."""

    y: Tensor
    observed: Tensor
    phase: Tensor


@torch.no_grad()
def replay(
    model: Forecaster, state: ForecasterState, rows: Rows, origins: Sequence[Tensor]
) -> tuple[list[Windows], ForecasterState]:
    """Write all rows in turn; the windows at every origin of each group, and the state after the last row.

    origins: groups of row counts; origin t has seen rows 0..t-1 and is followed by row t (at least one look-back of rows must lie before
    it). Windows come origin by origin, each with its S series in order.
    """
    c = model.config
    # Relative to the last value, whatever the model's level: `Windows.relative_to` shifts them.
    reader = Forecaster(dataclasses.replace(c, level="last", hidden=0))
    S, T = rows.y.shape
    start, tracks = state, []
    for at in range(0, T, ROWS_AT_ONCE):
        part = slice(at, at + ROWS_AT_ONCE)
        state, track = model.track(state, rows.y[:, part], rows.observed[:, part], rows.phase[:, :T][:, part])
        tracks.append(track)
    last, mean, variance = (torch.cat([getattr(t, name) for t in tracks], 1) for name in ("last", "mean", "variance"))
    held = [torch.cat(parts, 2) for parts in zip(*(t.held for t in tracks), strict=True)]
    visits = [torch.cat(parts, 1) for parts in zip(*(t.visits for t in tracks), strict=True)]
    padded = F.pad(torch.where(rows.observed, rows.y, torch.nan), (0, c.horizon), value=torch.nan)
    newest = [_newest(rows.phase[:, :T, g].long(), season.slots) for g, season in enumerate(c.seasons)]
    seen = torch.where(rows.observed.unsqueeze(2), rows.phase[:, :T], -1)
    series = torch.arange(S).unsqueeze(0)

    def block(t: Tensor) -> Windows:
        """The windows at origins t (n,), for all series: N = n S."""
        row = (t - 1).unsqueeze(1)  # (n, 1)
        window = last.unfold(1, c.look_back, 1)[:, t - c.look_back].transpose(0, 1).flatten(0, 1)
        future = rows.phase.unfold(1, c.horizon, 1)[:, t].movedim(3, 2).transpose(0, 1).flatten(0, 1)  # (N, H, G)
        at_origin = [v[series, row].flatten() for v in (last, mean, variance)]
        if c.memory == "window":
            n = len(t)
            phases = seen.unfold(1, c.look_back, 1)[:, t - c.look_back].movedim(3, 2).transpose(0, 1).flatten(0, 1)
            fresh = map_state(lambda leaf: leaf.repeat(n, *[1] * (leaf.dim() - 1)), start)
            fresh = dataclasses.replace(
                fresh, window=window, phases=phases, last=at_origin[0], mean=at_origin[1], variance=at_origin[2]
            )
            x, level, unit = reader.features(fresh, future)
            level = level - fresh.centre.unsqueeze(1)
        else:
            reads = []
            for g, season in enumerate(c.seasons):
                slots = reader.read_slots(future, g).unflatten(0, (len(t), S))  # (n, S, reads)
                where = newest[g][series.unsqueeze(2), row.unsqueeze(2), slots].long()  # row of the newest token of that slot
                known = where >= 0
                where = where.clamp(min=0)
                heads = torch.arange(len(season.rates)).view(-1, 1)
                begun = start.memory[g].W[:, :, 0].unsqueeze(0).expand(len(t), -1, -1, -1)
                begun = begun.gather(3, slots.unsqueeze(2).expand(-1, -1, len(season.rates), -1))
                values = held[g][series.view(1, S, 1, 1), heads, where.unsqueeze(2)]
                values = torch.where(known.unsqueeze(2), values, begun)
                times = torch.where(known, visits[g][series.unsqueeze(2), where], start.memory[g].visits[series.unsqueeze(2), slots])
                reads.append((values.flatten(0, 1), times.flatten(0, 1)))
            x, level, unit = reader.assemble(window, reads, *at_origin)
        scale = torch.where(unit > 0, unit, 1.0)
        origin_level = level + state.centre.repeat(len(t)).unsqueeze(1)
        y = padded.unfold(1, c.horizon, 1)[:, t].transpose(0, 1).flatten(0, 1)
        gap = ((level.squeeze(1) - at_origin[1]) / scale.squeeze(1)).float()
        return Windows(x, ((y - origin_level) / scale).float(), gap, origin_level.squeeze(1), scale.squeeze(1))

    groups = []
    for group in origins:
        parts = [block(t) for t in group.long().split(ORIGINS_AT_ONCE)]
        names = [f.name for f in dataclasses.fields(Windows)]
        groups.append(Windows(*(torch.cat([getattr(p, name) for p in parts]) for name in names)))
    return groups, state


def _newest(slots: Tensor, count: int) -> Tensor:
    """The row of the newest token of every slot, after each row; -1 before the first. (S, T) -> (S, T, count) int32."""
    series = slots.shape[0]
    if (slots == slots[:1]).all():  # one calendar for all series, the usual case: worked out once
        slots = slots[:1]
    rows = torch.arange(slots.shape[1], dtype=torch.int32).view(1, -1, 1)
    return torch.where(slots.unsqueeze(2) == torch.arange(count), rows, -1).cummax(1).values.expand(series, -1, -1)


@torch.no_grad()
def initial_memory(model: Forecaster, state: ForecasterState, rows: Rows) -> ForecasterState:
    """`state` with the memory W_0 that `frozen` and `window` start from: every slot's plain mean over the rows of training.

    This is what the delta rule holds when it writes with theta = 1 / (visits + 1) and never forgets.
    """
    memory = []
    values = torch.where(rows.observed, rows.y - state.centre.unsqueeze(1), 0.0)
    for g, (season, held) in enumerate(zip(model.config.seasons, state.memory, strict=True)):
        slots = rows.phase[:, : rows.y.shape[1], g].long()
        visits = torch.zeros(held.visits.shape, dtype=torch.float64).scatter_add_(1, slots, rows.observed.double())
        sums = torch.zeros_like(visits).scatter_add_(1, slots, values)
        mean = (sums / visits.clamp(min=1.0)).float()
        memory.append(PhaseMemory(mean[:, None, None].repeat(1, len(season.rates), 1, 1), visits.float()))
    return dataclasses.replace(state, memory=tuple(memory))


@dataclass(frozen=True)
class Line:
    """How the closed-form line was chosen: level, whether restless windows weigh less, penalty, and its validation error."""

    level: Level
    weighted: bool
    penalty: float
    error: float


PENALTIES = (10.0, 100.0, 1e3, 1e4, 3e4)


def _moments(x: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, float]:
    """X'WX, X'WY (float64) and the number of rows; rows with a missing future are left out."""
    whole = torch.isfinite(y).all(1)
    if not bool(whole.all()):
        x, y = x[whole], y[whole]
        weight = None if weight is None else weight[whole]
    gram = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    cross = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    for a, b, w in zip(x.split(8192), y.split(8192), [None] * len(x) if weight is None else weight.split(8192), strict=False):
        left = a if w is None else a * w.unsqueeze(1)
        gram += (left.mT @ a).double()
        cross += (left.mT @ b).double()
    return gram, cross, float(len(x))


@torch.no_grad()
def fit_line(model: Forecaster, train: Windows, valid: Windows, levels: Sequence[Level] = ("last", "mean")) -> tuple[Forecaster, Line]:
    """The line that does best on validation among levels, weightings and penalties; sets the weights, returns the model at that level.

    Minimises sum_i w_i ||x_i W - y_i||^2 + penalty * mean(w) ||W||^2. Weighted: w = 1 / (1 + variance of the look-back), generalised
    least squares for series whose noise grows with their movement. Raises ValueError where no training window has its whole future.
    """
    best: tuple[float, Tensor, Line] | None = None
    look_back = model.config.look_back
    for level in levels:
        x, y = train.relative_to(level)
        held, target = valid.relative_to(level)
        whole = torch.isfinite(target).all(1)
        held, target = held[whole], target[whole]
        for weighted in (False, True):
            weight = 1.0 / (1.0 + x[:, :look_back].var(1, correction=0)) if weighted else None
            gram, cross, count = _moments(x, y, weight)
            if count == 0:
                raise ValueError("fit_line: no training window has its whole future observed")
            scale = 1.0 if weight is None else float(weight.mean())
            for penalty in PENALTIES:
                eye = torch.eye(len(gram), dtype=torch.float64)
                line = torch.linalg.solve(gram + penalty * scale * eye, cross).float()
                error = float(((held @ line - target) ** 2).mean()) if len(held) else penalty
                if best is None or error < best[0]:
                    best = (error, line, Line(level, weighted, penalty, error))
    assert best is not None
    chosen = Forecaster(dataclasses.replace(model.config, level=best[2].level))
    chosen.line.copy_(best[1])
    x, _ = train.relative_to(best[2].level)
    chosen.feature_mean.copy_(x.mean(0))
    chosen.feature_mean[-1] = 0.0
    chosen.feature_scale.copy_(1.0 / x.std(0).clamp(min=1e-2))
    chosen.feature_scale[-1] = 1.0
    return chosen, best[2]


@dataclass(frozen=True)
class Training:
    """Settings of the network's training. AdamW with a one-cycle rate; the best epoch on validation stays."""

    epochs: int = 8
    batch: int = 512
    rate: float = 1e-3
    decay: float = 1e-2
    seed: int = 0


def fit_network(
    model: Forecaster,
    train: Windows,
    valid: Windows,
    settings: Training,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Train the network on what the line leaves over, with a Huber loss; keeps the epoch that is best on validation, or none.

    progress is called after every epoch with its number and the validation error (mean squared, in units of the stream). Returns the best.
    """
    level = model.config.level
    x, y = train.relative_to(level)
    whole = torch.isfinite(y).all(1)
    x, y = x[whole], y[whole]
    held, target = valid.relative_to(level)
    whole = torch.isfinite(target).all(1)
    held, target = held[whole], target[whole]
    net = model.net
    if net is None or not len(held):
        return validation_error(model, held, target)
    torch.manual_seed(settings.seed)
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            layer.reset_parameters()
    torch.nn.init.zeros_(net[-1].weight)  # type: ignore[arg-type]
    torch.nn.init.zeros_(net[-1].bias)  # type: ignore[arg-type]
    best, kept = validation_error(model, held, target), {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        left = y - x @ model.line
        inputs = (x - model.feature_mean) * model.feature_scale
    batches = max(1, len(x) // settings.batch)
    optimiser = torch.optim.AdamW(net.parameters(), lr=settings.rate, weight_decay=settings.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.rate, total_steps=settings.epochs * batches + 1, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(settings.seed)
    for epoch in range(settings.epochs):
        net.train()
        for index in torch.randperm(len(x), generator=generator)[: batches * settings.batch].split(settings.batch):
            loss = F.smooth_l1_loss(net(inputs[index]), left[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        net.eval()
        error = validation_error(model, held, target)
        if error < best:
            best, kept = error, {k: v.clone() for k, v in net.state_dict().items()}
        if progress is not None:
            progress(epoch, error)
    net.load_state_dict(kept)
    net.eval()
    return best


@torch.no_grad()
def validation_error(model: Forecaster, x: Tensor, y: Tensor) -> float:
    """Mean squared error of the expected values, in units of the stream. x (N, d), y (N, H)."""
    if not len(x):
        return float("nan")
    model.eval()
    total = sum(float(((model.centre_of(a) - b) ** 2).sum(dtype=torch.float64)) for a, b in zip(x.split(4096), y.split(4096), strict=True))
    return total / y.numel()


@torch.no_grad()
def calibrate(model: Forecaster, valid: Windows) -> None:
    """Quantile offsets from the residuals of validation, for every step of the horizon, with the finite-sample correction.

    The residuals of a step are sorted once and read at all levels, so quantiles can never cross. A level q is read at rank
    ceil((n + 1) q) above the median and floor((n + 1) q) below it: split conformal prediction, one side at a time.
    """
    model.eval()
    x, y = valid.relative_to(model.config.level)
    spread = model.roughness(x) ** model.config.spread
    centre = torch.cat([model.centre_of(part) for part in x.split(4096)]) if len(x) else y
    residual = (y - centre) / spread
    for step in range(residual.shape[1]):
        seen = residual[:, step]
        seen = seen[torch.isfinite(seen)].sort().values
        if not len(seen):
            continue
        for i, level in enumerate(model.config.quantiles):
            rank = (len(seen) + 1) * level
            place = int(-(-rank // 1)) if level >= 0.5 else int(rank)
            model.offsets[step, i] = seen[min(max(place - 1, 0), len(seen) - 1)]
