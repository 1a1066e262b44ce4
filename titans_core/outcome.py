"""The outcome memory: when the truth of an earlier forecast arrives, it is written, and the forecasts after it are the better for it.

Beside the sequence memory of `titans_core.forecaster` (key: the time's phase, value: what was seen) every stream has a second one. Its key
is the context z at the time a forecast was made, its value what the forecast was wrong by. The write is the exact Omega rule (ATLAS,
eq. 9: all pairs of a window at once) over a window that fades, anchored to the frozen weights:

    W_h(t) = argmin_W  sum_{s <= t-h} lam^(t-h-s) |e_h(s) - W z_s|^2  +  penalty |W|^2        e_h(s) = (y(s+h) - base_h(s)) / unit(s)

in the form of recursive least squares (Plackett 1950): the gain K_s of a context needs no target, so it is worked out when the forecast is
made, kept beside the context, and used for step h at row s + h, the moment its own target is there. One inverse Gram matrix serves
all steps of the horizon, each strictly delayed by its own length. So that forgetting does not wear the anchor down, every row also
rehearses one axis i of the context: the pseudo-observation W[i] = 0 with weight penalty (1 - lam) d, which keeps the penalty where it is and
the inverse Gram matrix bounded. Its updates are symmetric to the bit, and float32 suffices.

The inverse of a whole Gram matrix of all features would be most of the state and of the time, so it is held whole for a block of the
context only: the directions that matter most in training. Memories at several rates lam read the block. One more, the wide memory, reads
all directions: the Gram matrix of those outside the block is kept as its diagonal, which is nearly all there is of it, since they were
whitened in training (a decoupled Kalman filter: Puskorius and Feldkamp 1991). The narrow ones learn soonest; the wide one also unlearns
what the frozen forecast is wrong by in directions of which training thought little.

Their forecasts, the frozen one, one without carried state, the last value and the held season are experts: a small least-squares mix
about the slowest narrow memory is learnt for every step (the same recursion), and the experts and the mix are weighted by their own
recent, delayed errors, w ~ exp(-trust (loss / best loss - 1)) (Vovk 1990; with forgetting, Herbster and Warmuth 1998).

All of it is a value per stream: nothing is shared but the frozen projection. What a truth differs by from what its memory expected is
clipped, in units of the stream's deviation over its past (the recursion of Huber's loss), so that one broken reading does not undo what
was learnt, while a burst that is foreseen is learnt in full.

Axis letters: B streams, H horizon, F features of the forecaster (and of the context), k block, R rates, E experts, K mixed experts,
M weighted forecasts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titans_core.config import require
from titans_core.forecaster import Forecaster

# Rows of an overlapping horizon count for less: penalties grow with the horizon, from this one on.
SHORTEST = 4
# Directions of the features with less variance in training, in squared units, are taken for this.
FAINTEST = 1e-4


@dataclass(frozen=True, kw_only=True)
class OutcomeConfig:
    """Times are in rows: a value of n forgets with lam = 1 - 1/n. The defaults are for hourly rows; see `daily`.

    features, horizon, look_back: the forecaster's. season: (first column, columns, rows a column serves) of the seasonal reads in its
    features, or None. outcomes: how many directions of the forecasts lead the context. block: how much of it has a whole Gram matrix.
    forget: windows of the memories, the slowest last. penalty and mix_penalty: per step of the horizon. clip: the largest surprise that is
    written, widest: the largest entry of a context, both in units.
    """

    features: int
    horizon: int
    look_back: int
    season: tuple[int, int, int] | None = None
    outcomes: int = 16
    block: int = 48
    forget: tuple[float, ...] = (500.0, 3333.0)
    penalty: float = 40.0
    mix_forget: float = 3333.0
    mix_penalty: float = 4.0
    loss_forget: float = 500.0
    trust: float = 20.0
    clip: float = 10.0
    widest: float = 50.0

    def __post_init__(self) -> None:
        require(self.features >= 2 and self.horizon >= 1, f"features {self.features} must be two or more, horizon {self.horizon} positive")
        require(1 <= self.look_back <= self.features, f"look_back {self.look_back} must lie in 1..features {self.features}")
        require(self.outcomes >= 0 and self.block >= 1, f"outcomes {self.outcomes} cannot be negative, block {self.block} must be positive")
        windows = (*self.forget, self.mix_forget, self.loss_forget)
        require(len(self.forget) >= 1 and all(n > 1 for n in windows), f"windows {windows} must be longer than one row")
        require(self.penalty > 0 and self.mix_penalty > 0, f"penalties {self.penalty}, {self.mix_penalty} must be positive")
        require(self.clip > 0 and self.trust >= 0, f"clip {self.clip} must be positive and trust {self.trust} not negative")

    @property
    def whole(self) -> int:
        """k: entries of the context whose Gram matrix is held whole."""
        return min(self.block, self.features - 1)

    @property
    def experts(self) -> int:
        """E: base, memories and the wide one, without carried state, last value, season."""
        return 4 + len(self.forget) + (self.season is not None)

    @classmethod
    def daily(cls, model: Forecaster, rows: int, **options: Any) -> OutcomeConfig:
        """For a fitted forecaster of a stream with `rows` rows a day: windows of 21 and 139 days."""
        c, season, column = model.config, None, model.config.look_back
        for s in c.seasons:
            if s.slots > 1:
                season = (column, s.reads(c.horizon), s.stride)
                break
            column += len(s.rates) * s.reads(c.horizon)
        days = rows / 24.0
        fast, slow = 500 * days, 3333 * days
        times: dict[str, Any] = {"forget": (fast, slow), "mix_forget": slow, "loss_forget": fast}
        return cls(features=c.features, horizon=c.horizon, look_back=c.look_back, season=season, **{**times, **options})

    def to_json(self) -> dict[str, Any]:
        """Plain data for json.dumps; `from_json` builds the same configuration."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OutcomeConfig:
        season = data["season"]
        return cls(**{**data, "season": None if season is None else tuple(season), "forget": tuple(data["forget"])})


@dataclass(frozen=True)
class OutcomeState:
    """All that was learnt from outcomes, streams first. Rings hold the last H origins, the newest first: entry h-1 is due at the next row
    for step h."""

    rows: Tensor  # (B,) int64
    level: Tensor  # (B, H) float64, level of each origin
    unit: Tensor  # (B, H) float64, unit of each origin; 0: no forecast was made
    keys: Tensor  # (B, H, F) contexts
    gains: Tensor  # (B, R + 1, H, k) of the block of each context; the last one is the wide memory's
    rehearsed: Tensor  # (B, R + 1, H, k) gains of the axis that was rehearsed with each
    inverse: Tensor  # (B, R + 1, k, k) inverse Gram matrices of the block
    memory: Tensor  # (B, R + 1, H, k) W on the block
    damping: Tensor  # (B, H) what the gains of the rest are divided by
    squares: Tensor  # (B, F - k) the diagonal of the Gram matrix of the rest
    rest: Tensor  # (B, H, F - k) W of the wide memory on the rest
    pending: Tensor  # (B, H, H, E + 1) forecasts in the origin's unit, relative to its level; origins, steps, experts and the mix
    mix_inverse: Tensor  # (B, H, K, K)
    mix: Tensor  # (B, H, K) weights about the slowest memory
    loss: Tensor  # (B, H, M) fading sums of squared errors


class Origin(NamedTuple):
    """What a forecast is made from: what `Forecaster.features` and `centre_of` return."""

    x: Tensor  # (B, F) features
    base: Tensor  # (B, H) expected values, relative to the level, in units
    level: Tensor  # (B,) float64
    unit: Tensor  # (B,) float64


class Thought(NamedTuple):
    """What is made of an origin."""

    key: Tensor  # (B, F) context
    issued: Tensor  # (B, H, E + 1) what the experts and the mix say, relative to the level
    unit: Tensor  # (B,) float64; 0: nothing is known yet
    forecast: Tensor  # (B, H) float64, in the values of the series


def origin_of(model: Forecaster, state: Any, future_phase: Tensor) -> Origin:
    """The origin of a forecaster that has just observed a row; future_phase (B, H, G)."""
    x, level, unit = model.features(state, future_phase)
    return Origin(x, model.centre_of(x), level.squeeze(1), unit.squeeze(1))


class OutcomeMemory(nn.Module):
    """The functions with their frozen weights. How it goes beside a forecaster, one row of every stream a round:

        outcome = OutcomeMemory(OutcomeConfig.daily(model, rows=24)).fit(windows.x, windows.y, model.line)
        state, learnt = model.initial_state(n), outcome.initial_state(n)
        ...
        state = model.observe(state, y, observed, phase)                                 # the row, y (n, 1)
        origin = origin_of(model, state, future_phase)
        learnt, corrected = outcome.step(learnt, origin, y[:, 0], observed[:, 0])       # (n, H), row + 1 .. row + H
        quantiles = model.forecast(state, future_phase)
        quantiles = quantiles + (corrected - model.expected(state, future_phase)).unsqueeze(2)

    `step` first judges the forecasts that were made for this row, then corrects the new one; `y` may touch nothing but the former. The
    numbers of a stream do not depend on which others share the call.
    """

    projection: Tensor
    window_line: Tensor
    _steps: Tensor
    _lam: Tensor
    _mix_lam: Tensor
    _season: Tensor

    def __init__(self, config: OutcomeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("projection", torch.zeros(config.features, config.features - 1))
        self.register_buffer("window_line", torch.zeros(config.look_back + 1, config.horizon))
        self.register_buffer("_steps", torch.arange(1, config.horizon + 1), persistent=False)
        self.register_buffer("_lam", 1.0 - 1.0 / torch.tensor((*config.forget, config.forget[-1])).unsqueeze(1), persistent=False)
        self.register_buffer("_mix_lam", torch.tensor(1.0 - 1.0 / config.mix_forget), persistent=False)
        if config.season is not None:
            first, columns, rows = config.season
            self.register_buffer("_season", first + (self._steps - 1) // rows % columns, persistent=False)
        self.eval()

    @torch.no_grad()
    def fit(self, x: Tensor, y: Tensor, line: Tensor, penalty: float = 1e3) -> OutcomeMemory:
        """Frozen weights from training windows: x (N, F), the last of them constant, y (N, H) with NaN where unknown, line (F, H).

        The context is 1 and, whitened on these windows, the leading directions of the line's forecasts (reduced-rank regression) and
        the principal components of what they leave over of the features, the largest first. The window line is ridge regression on the
        look-back alone.
        Raises ValueError where there are fewer windows than features.
        """
        c = self.config
        if x.shape[0] <= c.features or x.shape[1] != c.features or y.shape != (x.shape[0], c.horizon):
            raise ValueError(
                f"fit: x {tuple(x.shape)} and y {tuple(y.shape)} must be (N, {c.features}) and (N, {c.horizon}) with N > {c.features}"
            )
        x64, line64 = x.double().clamp(-1e3, 1e3), line.double()
        covariance = torch.cov(x64.mT, correction=0)
        count = min(c.outcomes, c.horizon, c.features - 1)
        _, directions = torch.linalg.eigh(line64.mT @ covariance @ line64)
        outcomes = line64 @ directions.flip(1)[:, :count]
        outcomes = outcomes / (outcomes * (covariance @ outcomes)).sum(0).clamp(min=FAINTEST).sqrt()
        # What the outcomes leave over of the features.
        beside = torch.eye(c.features, dtype=torch.float64) - outcomes @ outcomes.mT @ covariance
        values, vectors = torch.linalg.eigh(beside.mT @ covariance @ beside)
        values, vectors = values.flip(0)[: c.features - 1 - count], vectors.flip(1)[:, : c.features - 1 - count]
        self.projection.copy_(torch.cat([outcomes, beside @ (vectors / values.clamp(min=FAINTEST).sqrt())], 1))
        window = torch.cat([x64[:, : c.look_back], x64[:, -1:]], 1)
        known = torch.isfinite(y).all(1)
        window, target = window[known], y[known].double()
        gram = window.mT @ window + penalty * torch.eye(c.look_back + 1, dtype=torch.float64)
        self.window_line.copy_(torch.linalg.solve(gram, window.mT @ target))
        return self

    def initial_state(self, n: int) -> OutcomeState:
        """n streams of which no outcome is known: their forecasts are the base's."""
        c, like = self.config, self.projection
        H, F, R, E, K = c.horizon, c.features, len(c.forget), c.experts, c.experts - 1
        k = c.whole

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(n, *shape, dtype=dtype, device=like.device)

        wide = torch.float64
        return OutcomeState(
            rows=zeros(dtype=torch.int64),
            level=zeros(H, dtype=wide),
            unit=zeros(H, dtype=wide),
            keys=zeros(H, F),
            gains=zeros(R + 1, H, k),
            rehearsed=zeros(R + 1, H, k),
            inverse=zeros(R + 1, k, k) + torch.eye(k, device=like.device) / self._penalty(c.penalty),
            memory=zeros(R + 1, H, k),
            damping=zeros(H) + 1.0,
            squares=zeros(F - k) + self._penalty(c.penalty),
            rest=zeros(H, F - k),
            pending=zeros(H, H, E + 1),
            mix_inverse=zeros(H, K, K) + torch.eye(K, device=like.device) / self._penalty(c.mix_penalty),
            mix=zeros(H, K),
            loss=zeros(H, self._weighted),
        )

    @property
    def _weighted(self) -> int:
        """M: base, memories and the wide one, without carried state, and the mix."""
        return 4 + len(self.config.forget)

    def _penalty(self, per_step: float) -> float:
        return per_step * max(self.config.horizon, SHORTEST)

    def step(self, state: OutcomeState, origin: Origin, y: Tensor, observed: Tensor) -> tuple[OutcomeState, Tensor]:
        """One row: judge what was forecast for it, then correct the forecast that is made at it.

        origin: made after the row was observed. y (B,) the row's value, observed (B,) bool. Returns the state and the corrected expected
        values (B, H) float64; where nothing is known of a stream yet they are the base's. Raises ValueError for shapes that do not fit.
        """
        c = self.config
        if origin.x.shape != (len(y), c.features) or origin.base.shape != (len(y), c.horizon) or observed.shape != y.shape:
            raise ValueError(
                f"step: x {tuple(origin.x.shape)}, base {tuple(origin.base.shape)}, y {tuple(y.shape)} and observed "
                f"{tuple(observed.shape)} must be (B, {c.features}), (B, {c.horizon}), (B,) and (B,)"
            )
        with torch.inference_mode():
            judged = self._judge(state, y, observed)
            if bool(observed.all()):
                thought = self._think(judged, origin)
                return self._issue(judged, origin, thought), thought.forecast
            # A missing row is passed, as `skip` passes it: its forecast is read and forgotten.
            judged = _where(observed, judged, state)
            thought = self._think(judged, origin)
            passed = self.skip(state, torch.ones_like(state.rows))
            return _where(observed, self._issue(judged, origin, thought), passed), thought.forecast

    def correct(self, state: OutcomeState, origin: Origin) -> Tensor:
        """The corrected expected values (B, H) float64 of an origin; changes no state."""
        with torch.inference_mode():
            return self._think(state, origin).forecast

    def _judge(self, s: OutcomeState, y: Tensor, observed: Tensor) -> OutcomeState:
        """Write the truth `y` of this row for step h of the origin h rows ago, for all h."""
        c = self.config
        value = torch.where(observed, y.double(), 0.0)
        made = s.unit > 0
        known = observed.unsqueeze(1) & made
        truth = ((value.unsqueeze(1) - s.level) / torch.where(made, s.unit, 1.0)).float()  # (B, H)
        due = s.pending.diagonal(dim1=1, dim2=2).mT  # (B, H, E + 1): step h of entry h-1

        # The memories. Every step has its own column of W, and meets each context with the gain that was worked out for it.
        block, beside = s.keys[:, :, : c.whole], s.keys[:, :, c.whole :]
        surprise = (truth - due[:, :, 0]).unsqueeze(1) - self._read(s, block, beside)
        surprise = torch.where(known.unsqueeze(1), surprise.clamp(-c.clip, c.clip), 0.0)
        memory = torch.addcmul(s.memory, s.gains, surprise.unsqueeze(3))
        axis = ((s.rows.unsqueeze(1) - self._steps) % c.whole)[:, None, :, None].expand(-1, memory.shape[1], -1, -1)
        memory = torch.addcmul(memory, s.rehearsed, memory.gather(3, axis), value=-1.0)
        wear = 1.0 - (1.0 - self._lam[-1]) * self._penalty(c.penalty) / s.squares
        write = (surprise[:, -1] / s.damping).unsqueeze(2)
        rest = torch.addcmul(s.rest * wear.unsqueeze(1), beside / s.squares.unsqueeze(1), write)

        # The mix about the slowest memory, and the losses.
        slow, others = self._about_slow(due[:, :, : c.experts])
        lam = self._mix_lam
        gain, _, inverse = _absorb(s.mix_inverse, others, lam, lam)
        surprise = (truth - slow - (others * s.mix).sum(2)).clamp(-c.clip, c.clip)
        mix = s.mix + gain * surprise.unsqueeze(2)
        K = c.experts - 1
        i = (s.rows % K)[:, None, None].expand(-1, c.horizon, 1)
        gain, inverse = _rehearse(inverse, i, self._penalty(c.mix_penalty) * (1 - lam) * K)
        mix = mix - gain * mix.gather(2, i)
        loss = (1.0 - 1.0 / c.loss_forget) * s.loss + (self._judged(due) - truth.unsqueeze(2)).clamp(-c.clip, c.clip).square()

        each = known.unsqueeze(2)
        return dataclasses.replace(
            s,
            memory=memory,
            rest=rest,
            mix=torch.where(each, mix, s.mix),
            mix_inverse=torch.where(each.unsqueeze(3), inverse, s.mix_inverse),
            loss=torch.where(each, loss, s.loss),
        )

    def _think(self, s: OutcomeState, origin: Origin) -> Thought:
        """What every expert says of an origin, and the forecast that it comes to."""
        c = self.config
        known = (origin.unit > 0) & origin.x.isfinite().all(1) & origin.base.isfinite().all(1)
        x = torch.where(known.unsqueeze(1), origin.x, 0.0)
        frozen = torch.where(known.unsqueeze(1), origin.base, 0.0)
        key = torch.cat([torch.ones_like(x[:, :1]), x @ self.projection], 1).clamp(-c.widest, c.widest) * known.unsqueeze(1)
        free, rest = self._experts(x)
        corrected = frozen.unsqueeze(1) + self._read(s, key[:, None, : c.whole], key[:, None, c.whole :])
        experts = torch.stack([frozen, *corrected.unbind(1), free, *rest], 2)  # (B, H, E)
        slow, others = self._about_slow(experts)
        issued = torch.cat([experts, (slow + (others * s.mix).sum(2)).unsqueeze(2)], 2)
        best = s.loss.amin(2, keepdim=True)
        behind = (s.loss - best) / best.clamp(min=torch.finfo(torch.float32).tiny)
        weights = torch.exp(-c.trust * behind)
        forecast = (weights * self._judged(issued)).sum(2) / weights.sum(2)
        # Before the first truth all losses are equal, and only the frozen forecast has earned any trust.
        forecast = torch.where(best.squeeze(2) > 0, forecast, frozen)

        made = origin.level.unsqueeze(1) + origin.unit.unsqueeze(1) * forecast.double()
        made = torch.where(known.unsqueeze(1), made, origin.level.unsqueeze(1) + origin.unit.unsqueeze(1) * origin.base)
        return Thought(key, issued, torch.where(known, origin.unit, 0.0), made)

    def _issue(self, s: OutcomeState, origin: Origin, thought: Thought) -> OutcomeState:
        """Keep what the truths of a new origin will be written with."""
        c, lam, key = self.config, self._lam, thought.key
        squares = key[:, c.whole :].square()
        beside = torch.zeros(len(key), len(lam), 1, device=key.device)
        beside[:, -1] = (squares / s.squares).sum(1, keepdim=True)
        gain, damping, inverse = _absorb(s.inverse, key[:, None, : c.whole], lam, lam + beside)
        i = (s.rows % c.whole)[:, None, None].expand(-1, len(lam), 1)
        again, inverse = _rehearse(inverse, i, self._penalty(c.penalty) * (1 - lam) * c.whole)
        return dataclasses.replace(
            s,
            rows=s.rows + 1,
            level=_push(s.level, origin.level, 1),
            unit=_push(s.unit, thought.unit, 1),
            keys=_push(s.keys, key, 1),
            gains=_push(s.gains, gain, 2),
            damping=_push(s.damping, damping[:, -1, 0], 1),
            rehearsed=_push(s.rehearsed, again, 2),
            inverse=inverse,
            squares=lam[-1] * s.squares + squares + (1 - lam[-1]) * self._penalty(c.penalty),
            pending=_push(s.pending, thought.issued, 1),
        )

    def _read(self, s: OutcomeState, block: Tensor, rest: Tensor) -> Tensor:
        """What the memories add to the base (B, R + 1, H), the wide one last; block (B, H or 1, k) and rest (B, H or 1, F - k) of the context."""
        read = (s.memory * block.unsqueeze(1)).sum(3)
        return torch.cat([read[:, :-1], read[:, -1:] + (s.rest * rest).sum(2).unsqueeze(1)], 1)

    def _experts(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Without carried state, and the rest: last value and season; each (B, H)."""
        c = self.config
        free = torch.cat([x[:, : c.look_back], x[:, -1:]], 1) @ self.window_line
        rest = [x[:, c.look_back - 1].unsqueeze(1).expand(-1, c.horizon)]
        if c.season is not None:
            rest.append(x[:, self._season])
        return free, rest

    def _about_slow(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, E) -> the slowest memory's forecast (B, H), and the others relative to it (B, H, K)."""
        at = len(self.config.forget)
        slow = experts[:, :, at : at + 1]
        return slow.squeeze(2), torch.cat([experts[:, :, :at], experts[:, :, at + 1 :]], 2) - slow

    def _judged(self, issued: Tensor) -> Tensor:
        """(..., E + 1) -> those that are weighted (..., M): base, memories, without carried state, mix."""
        return torch.cat([issued[..., : self._weighted - 1], issued[..., -1:]], -1)

    def skip(self, state: OutcomeState, gap: Tensor) -> OutcomeState:
        """Pass `gap` (B,) rows at which nothing came and nothing was forecast: what was due at them is dropped."""
        H = self.config.horizon
        entry = torch.arange(H, device=gap.device) - gap.unsqueeze(1)  # (B, H)

        def move(ring: Tensor, dim: int) -> Tensor:
            shape = [len(gap)] + [1] * (ring.dim() - 1)
            shape[dim] = H
            index, stays = entry.clamp(min=0).view(shape), (entry >= 0).view(shape)
            return torch.where(stays, ring.gather(dim, index.expand_as(ring)), 0.0)

        damping = move(state.damping, 1)
        return dataclasses.replace(
            state,
            rows=state.rows + gap,
            damping=torch.where(damping > 0, damping, 1.0),
            level=move(state.level, 1),
            unit=move(state.unit, 1),
            keys=move(state.keys, 1),
            gains=move(state.gains, 2),
            rehearsed=move(state.rehearsed, 2),
            pending=move(state.pending, 1),
        )


def _absorb(inverse: Tensor, key: Tensor, lam: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One observation of recursive least squares: inverse (..., d, d), key (..., d), lam and noise (..., 1); noise is lam, and more where
    the key is only a part of what was seen. Returns gain (..., d), what it was divided by (..., 1), new inverse."""
    held = (inverse * key.unsqueeze(-2)).sum(-1)
    size = noise + (key * held).sum(-1, keepdim=True)
    half = held / size.sqrt()
    return held / size, size, torch.addcmul(inverse, half.unsqueeze(-1), half.unsqueeze(-2), value=-1.0) / lam.unsqueeze(-1)


def _rehearse(inverse: Tensor, axis: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """An observation of the unit vector `axis` (..., 1) with a weight (..., 1): its gain (..., d), and the new inverse."""
    held = inverse.gather(-1, axis.unsqueeze(-1).expand(*inverse.shape[:-1], 1)).squeeze(-1)
    size = 1.0 / weight + held.gather(-1, axis)
    half = held / size.sqrt()
    return held / size, torch.addcmul(inverse, half.unsqueeze(-1), half.unsqueeze(-2), value=-1.0)


def _where(chosen: Tensor, left: OutcomeState, right: OutcomeState) -> OutcomeState:
    """`left` for the streams that are chosen (B,), `right` for the others."""
    parts = {}
    for part in dataclasses.fields(OutcomeState):
        a, b = getattr(left, part.name), getattr(right, part.name)
        parts[part.name] = torch.where(chosen.view(-1, *[1] * (a.dim() - 1)), a, b)
    return OutcomeState(**parts)


def _push(ring: Tensor, newest: Tensor, dim: int) -> Tensor:
    """The newest entry in front, the oldest gone."""
    return torch.cat([newest.unsqueeze(dim), ring.narrow(dim, 0, ring.shape[dim] - 1)], dim)
