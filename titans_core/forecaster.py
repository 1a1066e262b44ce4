"""The forecaster: a memory that keeps learning along each stream, read with the keys of the horizon, and a map from there to quantiles.

One row of a stream is one token. Every row is written into a bank of matrix memories by the Titans rule with the exact per-row gradient
(papers A.1 with loss 1/2 ||W k - v||^2, no momentum); the keys are orthonormal: one key a slot of a season (hour of the day, hour of the
week), so that the rule is

    W k <- W k - theta (W k - v)          theta = max(rate, 1 / (visits of the slot + 1))

and a season of one slot is a running level. Several heads hold the same season at several rates. A forecast reads the bank **with the
keys of the rows to be forecast**, sets the look-back window beside it, and maps both to all steps of the horizon at once: a line in closed
form (`titans_core.training`), plus a small network that learns what a line cannot say. All of it is relative to the last value
and in units of the stream's own running standard deviation, so a forecast moves and stretches with its series.

Covariates travel behind the slots of a row's phase: what is known of a row beside its value. Those known ahead have an *effect*, one number
a row in units of the stream. The same memory, with the same writes, reads the stream of effects as it reads the stream of values, and since
all of it is linear the difference of the two is what the memory would hold had the covariates done nothing. From that a forecast is made, and
the effect at the rows of the horizon is added: a regression whose errors are the stream. Historic covariates lie beside the look-back.

Three modes share all code, for honest comparison: `carried` (the memory goes on for as long as the stream), `window` (it starts anew from
the learned initial memory before each forecast and writes the look-back only) and `frozen` (the initial memory is read and never written).

Axis letters: B streams, T rows, L look-back, H horizon, Q quantiles, G seasons, K covariates, F = G + K, d features.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear import MatrixState, linear_exact
from titans_core.config import require
from titans_core.patches import PatchConfig, PatchMemory, PatchState
from titans_core.state import map_state

Memory = Literal["carried", "window", "frozen"]

# Quiet windows still deserve an interval: the local scale is never taken below this share of the stream's standard deviation.
QUIETEST = 0.1
WIDE = 16  # streams from which writing row after row is quicker than in chunks (measured: about 0.3 ms a row for up to thousands of streams)
ROWS_AT_ONCE = 2048  # rows of one pass of `observe`: bounds what a long replay holds at a time


@dataclass(frozen=True, kw_only=True)
class Season:
    """A cycle of `rows` rows held in `slots` slots (a slot serves rows / slots rows in turn), once for each of `rates`."""

    rows: int
    slots: int
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        require(
            self.slots >= 1 and self.rows % self.slots == 0,
            f"a season of {self.rows} rows cannot have {self.slots} slots",
        )
        require(all(0 < r <= 1 for r in self.rates), f"rates {self.rates} must lie in (0, 1]")

    @property
    def stride(self) -> int:
        """Rows that one slot serves in a row."""
        return self.rows // self.slots

    def reads(self, horizon: int) -> int:
        """Slots that the rows of a horizon touch, each once."""
        return min(self.slots, math.ceil(horizon / self.stride))


# The first is a running level; the others a daily and a weekly profile of hourly rows.
HOURLY = (
    Season(rows=1, slots=1, rates=(0.003, 0.0005)),
    Season(rows=24, slots=24, rates=(0.1, 0.02)),
    Season(rows=168, slots=168, rates=(0.2,)),
)


@dataclass(frozen=True, kw_only=True)
class CovariateConfig:
    """How many numbers a row has beside its value, in this order: known ahead, known only once they happened, of the series itself."""

    future: int = 0
    historic: int = 0
    static: int = 0

    def __post_init__(self) -> None:
        require(min(self.future, self.historic, self.static) >= 0, f"covariates {self} must not be negative")

    @property
    def total(self) -> int:
        return self.future + self.historic + self.static


@dataclass(frozen=True, kw_only=True)
class ForecasterConfig:
    """hidden: width of the network beside the line (0: the line alone).
    level_rows: rows after which the running mean and deviation forget as slowly as they will (before, they are plain averages).
    patches: Titans blocks over patches of rows, whose reading is added to the line (None: no blocks); only with carried memory.
    covariates: None where rows have nothing beside their value.
    quantiles: levels in rising order. spread: how far intervals follow the roughness of the window, as an exponent (0: not at all).
    """

    look_back: int = 96
    horizon: int = 24
    seasons: tuple[Season, ...] = HOURLY
    memory: Memory = "carried"
    hidden: int = 64
    dropout: float = 0.2
    patches: PatchConfig | None = None
    level_rows: int = 10_000
    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)
    spread: float = 0.5
    covariates: CovariateConfig | None = None

    def __post_init__(self) -> None:
        require(self.look_back >= 1 and self.horizon >= 1, f"look_back {self.look_back} and horizon {self.horizon} must be positive")
        require(self.memory in ("carried", "window", "frozen"), f"memory '{self.memory}' is none of carried, window, frozen")
        if self.patches is not None:
            require(self.memory == "carried", f"blocks over patches carry their memory, the configuration says memory '{self.memory}'")
            require(self.patches.rows <= self.look_back, f"a patch of {self.patches.rows} rows is longer than look_back {self.look_back}")
        levels = self.quantiles
        require(
            len(levels) > 0 and all(0 < a < 1 for a in levels) and list(levels) == sorted(set(levels)),
            f"quantiles {levels} must rise and lie between 0 and 1",
        )

    @property
    def own_features(self) -> int:
        """Look-back and reads of every head: the columns that come first."""
        return self.look_back + sum(len(s.rates) * s.reads(self.horizon) for s in self.seasons)

    @property
    def lift(self) -> slice:
        """Columns that say how far the effect of covariates at each step of the horizon lies above that at the last row."""
        return slice(self.own_features, self.own_features + (0 if self.covariates is None else self.horizon))

    @property
    def covariate_features(self) -> slice:
        """Columns of the covariates themselves: those known ahead at each step, historic ones at each row of the look-back, static ones."""
        c = self.covariates
        width = 0 if c is None else self.horizon * c.future + self.look_back * c.historic + c.static
        return slice(self.lift.stop, self.lift.stop + width)

    @property
    def features(self) -> int:
        """d: own, lift, covariates, a step of the horizon each for the blocks, how far the last value is from the mean, and 1."""
        return self.covariate_features.stop + (0 if self.patches is None else self.horizon) + 2

    @property
    def known(self) -> int:
        """F: what is known of a row beside its value, its slots and its covariates."""
        return len(self.seasons) + (0 if self.covariates is None else self.covariates.total)

    def to_json(self) -> dict[str, Any]:
        """Plain data for json.dumps; `from_json` builds the same configuration."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForecasterConfig:
        """Raises ConfigError or TypeError for data of another shape."""
        seasons = tuple(Season(rows=s["rows"], slots=s["slots"], rates=tuple(s["rates"])) for s in data["seasons"])
        patches = data.get("patches")
        if patches is not None:
            patches = PatchConfig(**{**patches, "layers": tuple(patches["layers"])})
        covariates = data.get("covariates")
        if covariates is not None:
            covariates = CovariateConfig(**covariates)
        plain = {"seasons": seasons, "patches": patches, "covariates": covariates, "quantiles": tuple(data["quantiles"])}
        return cls(**{**data, **plain})


class PhaseMemory(NamedTuple):
    """The heads of one season: row memories W acting on one-hot keys, and how often each slot was written."""

    W: Tensor  # (B, heads, 1, slots) float32, relative to the stream's centre
    visits: Tensor  # (B, slots) float32


@dataclass(frozen=True)
class ForecasterState:
    """All that a forecaster learns along a stream. Values are float32 relative to `centre`, so a high offset costs no precision."""

    centre: Tensor  # (B,) float64, the first observed value (or the known mean)
    count: Tensor  # (B,) float64, observed rows
    mean: Tensor  # (B,) float64, running, relative to the centre
    variance: Tensor  # (B,) float64, running
    last: Tensor  # (B,) float32, last observed value
    window: Tensor  # (B, L) float32, the look-back, oldest first; a missing row holds the last value before it
    phases: Tensor  # (B, L, G) int16, slots of these rows; -1: the row was missing or never was
    memory: tuple[PhaseMemory, ...]  # one a season
    patches: PatchState | None = None  # the blocks' memories
    effect: ForecasterState | None = None  # the same memory of the stream of effects
    historic: Tensor | None = None  # (B, L, historic) float32, the historic covariates of the look-back


class Past(NamedTuple):
    """What a forecast reads of a stream, relative to the stream's centre."""

    window: Tensor  # (N, L) float32
    reads: list[tuple[Tensor, Tensor]]  # a season: held values (N, heads, reads) and visits (N, reads)
    last: Tensor  # (N,) float32
    mean: Tensor  # (N,) float64
    variance: Tensor  # (N,) float64


class Known(NamedTuple):
    """What a forecast knows beside the past of its stream."""

    effect: Past
    now: Tensor  # (N,) float64, the effect at the last observed row
    future: Tensor  # (N, H, future) float32; NaN where it is not known, and the forecast then neither
    historic: Tensor  # (N, L, historic) float32
    static: Tensor  # (N, static) float32


class Track(NamedTuple):
    """What held after each of T rows: the past of a stream as the windows of training need it."""

    last: Tensor  # (B, T) float32
    mean: Tensor  # (B, T) float64
    variance: Tensor  # (B, T) float64
    held: tuple[Tensor, ...]  # a season: (B, heads, T) float32, the memory at the slot of the row
    visits: tuple[Tensor, ...]  # a season: (B, T) float32, writes to the slot of the row so far


class Forecaster(nn.Module):
    """`observe` writes rows, `forecast` reads; both are pure and need no autograd."""

    line: Tensor
    feature_mean: Tensor
    feature_scale: Tensor
    offsets: Tensor
    effect: Tensor

    def __init__(self, config: ForecasterConfig) -> None:
        super().__init__()
        self.config = config
        d, horizon = config.features, config.horizon
        self.register_buffer("line", torch.zeros(d, horizon))  # solved, not descended
        self.register_buffer("feature_mean", torch.zeros(d))
        self.register_buffer("feature_scale", torch.ones(d))
        self.register_buffer("offsets", torch.zeros(horizon, len(config.quantiles)))
        if config.covariates is not None:
            self.register_buffer("effect", torch.zeros(config.covariates.future))
        self.net: nn.Sequential | None = None
        if config.hidden:
            last = nn.Linear(config.hidden, horizon)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.net = nn.Sequential(nn.Linear(d, config.hidden), nn.GELU(), nn.Dropout(config.dropout), last)
        self.patches: PatchMemory | None = None
        if config.patches is not None:
            self.patches = PatchMemory(config.patches, horizon, tuple(season.slots for season in config.seasons))
        self.eval()

    def initial_state(
        self, n: int, mean: Tensor | None = None, deviation: Tensor | None = None, rows: float = 0.0
    ) -> ForecasterState:
        """n streams that have seen nothing; with `mean` and `deviation` (n,) they are known as well as after `rows` rows."""
        c, device = self.config, self.line.device
        zeros = torch.zeros(n, dtype=torch.float64, device=device)
        plain = ForecasterState(
            centre=zeros.clone() if mean is None else mean.to(zeros),
            count=zeros + rows,
            mean=zeros.clone(),
            variance=zeros.clone() if deviation is None else deviation.to(zeros) ** 2,
            last=torch.zeros(n, device=device),
            window=torch.zeros(n, c.look_back, device=device),
            phases=torch.full((n, c.look_back, len(c.seasons)), -1, dtype=torch.int16, device=device),
            memory=tuple(
                PhaseMemory(
                    torch.zeros(n, len(s.rates), 1, s.slots, device=device), torch.zeros(n, s.slots, device=device)
                )
                for s in c.seasons
            ),
        )
        patches = None if self.patches is None else self.patches.initial_state(n)
        if c.covariates is None:
            return dataclasses.replace(plain, patches=patches)
        effect = dataclasses.replace(plain, centre=zeros.clone(), variance=zeros.clone())
        historic = torch.zeros(n, c.look_back, c.covariates.historic, device=device)
        return dataclasses.replace(plain, patches=patches, effect=map_state(Tensor.clone, effect), historic=historic)

    def observe(self, state: ForecasterState, y: Tensor, observed: Tensor, phase: Tensor) -> ForecasterState:
        """Write T rows. y (B, T), observed (B, T) bool, phase (B, T, F): the slot of each row in each season, and its covariates.

        A row that is not observed moves the look-back on and writes nothing; a covariate that is NaN counts as its average, 0. Any split of
        the rows over calls gives the same state (to rounding). Raises ValueError for shapes that do not fit.
        """
        c = self.config
        if phase.shape != (*y.shape, c.known):
            raise ValueError(f"observe: phase {tuple(phase.shape)} must be {(*y.shape, c.known)}: slots and covariates of each row")
        slots = phase[:, :, : len(c.seasons)]
        moved = self._observe(state, y, observed, slots)
        if c.covariates is None:
            return moved
        assert state.effect is not None and state.historic is not None
        given = phase[:, :, len(c.seasons) :].float().nan_to_num(0.0)
        effect = self._observe(state.effect, self.effect_of(given), observed, slots)
        happened = given[:, :, c.covariates.future : c.covariates.future + c.covariates.historic]
        return dataclasses.replace(moved, effect=effect, historic=torch.cat([state.historic, happened], 1)[:, -c.look_back :])

    def effect_of(self, given: Tensor) -> Tensor:
        """What the covariates of rows do, in units of the stream: (..., K) -> (...) float64."""
        total = torch.zeros(given.shape[:-1], dtype=torch.float64, device=given.device)
        for k, weight in enumerate(self.effect):  # one at a time: the order of a sum must not depend on how many rows come together
            total = total + weight * given[..., k].double()
        return total

    def _observe(self, state: ForecasterState, y: Tensor, observed: Tensor, phase: Tensor) -> ForecasterState:
        if y.shape[0] >= WIDE and y.shape[1] > 1 and state.patches is None:
            return self._in_turn(state, y, observed, phase)
        for at in range(0, y.shape[1], ROWS_AT_ONCE):
            part = slice(at, at + ROWS_AT_ONCE)
            before = state
            state, track = self.track(before, y[:, part], observed[:, part], phase[:, part])
            if before.patches is not None:
                assert self.patches is not None
                unit = track.variance.clamp(min=0.0).sqrt().float()
                moved = self.patches.observe(
                    before.patches, before.window, track.last, observed[:, part], track.mean.float(), unit, phase[:, part]
                )
                state = dataclasses.replace(state, patches=moved)
        return state

    def _in_turn(self, state: ForecasterState, y: Tensor, observed: Tensor, phase: Tensor) -> ForecasterState:
        """`observe` for many streams, row after row: a write moves one entry of each stream, where chunks multiply whole blocks."""
        c = self.config
        self._check_rows(y, observed, phase)
        count, centre, value, last = self._values(state, y, observed)
        scaled = (observed if c.memory == "carried" else observed & (count <= c.look_back)).T.contiguous()
        rates = (1.0 / count.clamp(1.0, c.level_rows)).T * scaled  # (T, B)
        mean, variance = state.mean, state.variance
        for rate, v in zip(rates, value.T.contiguous(), strict=True):
            before = mean
            mean = before + rate * (v - before)
            variance = variance + rate * ((v - before) * (v - mean) - variance)
        memory = tuple(PhaseMemory(m.W.clone(), m.visits.clone()) for m in state.memory)
        slots = phase.long()
        if c.memory == "carried":
            values, seen = last.T.contiguous(), observed.T.contiguous()
            for g, (season, m) in enumerate(zip(c.seasons, memory, strict=True)):
                for slot, v, there in zip(slots[:, :, g].T.contiguous(), values, seen, strict=True):
                    write_slot(m, season.rates, slot, v, there)
        return self._after(state, centre, count[:, -1], mean, variance, last, slots, observed, memory)

    def _check_rows(self, y: Tensor, observed: Tensor, phase: Tensor) -> None:
        seasons = len(self.config.seasons)
        if y.shape != observed.shape or phase.shape != (*y.shape, seasons):
            raise ValueError(
                f"observe: y {tuple(y.shape)}, observed {tuple(observed.shape)} and phase {tuple(phase.shape)} must be "
                f"(B, T), (B, T) and (B, T, {seasons})"
            )

    def _values(self, state: ForecasterState, y: Tensor, observed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """count (B, T) of observed rows so far, centre (B,), values (B, T) float64 relative to it, the last observed one (B, T) float32."""
        count = state.count.unsqueeze(1) + observed.cumsum(1)
        first = torch.where(observed.any(1), observed.int().argmax(1), 0).unsqueeze(1)
        begins = (state.count == 0) & observed.any(1)
        centre = torch.where(begins, y.gather(1, first).squeeze(1).double(), state.centre)
        value = torch.where(observed, y.double() - centre.unsqueeze(1), 0.0)
        index = torch.where(observed, torch.arange(y.shape[1], device=y.device), -1).cummax(1).values
        last = torch.where(index >= 0, value.float().gather(1, index.clamp(min=0)), state.last.unsqueeze(1))
        return count, centre, value, last

    def _after(
        self,
        state: ForecasterState,
        centre: Tensor,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        last: Tensor,
        slots: Tensor,
        observed: Tensor,
        memory: tuple[PhaseMemory, ...],
    ) -> ForecasterState:
        """The state after T > 0 rows, from what held after the last of them; last (B, T), slots (B, T, G)."""
        look_back = self.config.look_back
        kept = torch.where(observed.unsqueeze(2), slots, -1).to(state.phases.dtype)
        return ForecasterState(
            centre,
            count,
            mean,
            variance,
            last[:, -1],
            torch.cat([state.window, last], 1)[:, -look_back:],
            torch.cat([state.phases, kept], 1)[:, -look_back:],
            memory,
            state.patches,
            state.effect,
            state.historic,
        )

    def track(
        self, state: ForecasterState, y: Tensor, observed: Tensor, phase: Tensor
    ) -> tuple[ForecasterState, Track]:
        """`observe` without the blocks, with what held after each row."""
        c = self.config
        self._check_rows(y, observed, phase)
        slots = phase.long()
        count, centre, value, last = self._values(state, y, observed)

        # Running mean and variance are memories with one key and theta = 1 / count (Welford's recursion). They are carried state
        # too: without a carried memory they stand still once they are known as well as one look-back tells.
        rate = 1.0 / count.clamp(1.0, c.level_rows)
        scaled = observed if c.memory == "carried" else observed & (count <= c.look_back)
        mean = _running(value, rate, scaled, state.mean)
        before = torch.cat([state.mean.unsqueeze(1), mean[:, :-1]], 1)
        variance = _running((value - before) * (value - mean), rate, scaled, state.variance)

        memory, held, visited = [], [], []
        for g, (season, m) in enumerate(zip(c.seasons, state.memory, strict=True)):
            key = F.one_hot(slots[:, :, g], season.slots).float()  # (B, T, slots)
            writes = observed if c.memory == "carried" else torch.zeros_like(observed)
            written = key * writes.unsqueeze(2)
            visits = (m.visits.unsqueeze(1) + written.cumsum(1)).gather(2, slots[:, :, g : g + 1]).squeeze(2)
            held_now, W = self._write(season, m.W, key, visits, last, observed)
            memory.append(PhaseMemory(W, m.visits + written.sum(1)))
            held.append(held_now)
            visited.append(visits)

        tracked = Track(last, mean, variance, tuple(held), tuple(visited))
        if not y.shape[1]:
            return state, tracked
        after = self._after(
            state, centre, count[:, -1], mean[:, -1], variance[:, -1], last, slots, observed, tuple(memory)
        )
        return after, tracked

    def _write(
        self, season: Season, W: Tensor, key: Tensor, visits: Tensor, value: Tensor, observed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows into the heads of one season: what each row's slot holds afterwards (B, heads, T), and the new W."""
        heads = len(season.rates)
        if self.config.memory != "carried":
            return (W.squeeze(2) @ key.mT).contiguous(), W
        k = key.unsqueeze(1).expand(-1, heads, -1, -1)
        v = value.unsqueeze(1).unsqueeze(3).expand(-1, heads, -1, -1)
        rates = torch.tensor(season.rates, device=W.device).view(1, heads, 1)
        # A young slot averages: its first write is the value itself, the second the mean of two, until the rate is reached.
        theta = torch.maximum(rates, 1.0 / visits.clamp(min=1.0).unsqueeze(1))
        y, after = linear_exact(k, k, v, theta, None, None, MatrixState(W, torch.zeros_like(W)), write=observed)
        return y.squeeze(3), after.W

    def _memory(self, state: ForecasterState) -> tuple[PhaseMemory, ...]:
        """The memories to read: as carried; or begun anew at the level of the look-back, and for `window` written with it."""
        if self.config.memory == "carried":
            return state.memory
        # What a memory that is not carried begins with is a shape; where the series is now, the look-back tells.
        level = state.window.mean(1).view(-1, 1, 1, 1)
        memory = tuple(PhaseMemory(m.W + level, m.visits.clamp(min=1.0)) for m in state.memory)
        if self.config.memory == "window":
            for t in range(self.config.look_back):
                for g, (season, m) in enumerate(zip(self.config.seasons, memory, strict=True)):
                    slot = state.phases[:, t, g].long()
                    write_slot(m, season.rates, slot.clamp(min=0), state.window[:, t], slot >= 0)
        return memory

    def features(self, state: ForecasterState, future_phase: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a forecast is made from: (B, d), the level (B, 1) it is relative to, and the unit (B, 1); future_phase (B, H, F)."""
        c = self.config
        known = None
        if c.covariates is not None:
            assert state.effect is not None and state.historic is not None
            ahead = future_phase[:, :, len(c.seasons) :].float()
            static = ahead[:, 0, c.covariates.future + c.covariates.historic :].nan_to_num(0.0)
            now = state.effect.centre + state.effect.last
            known = Known(self.past(state.effect, future_phase), now, ahead[:, :, : c.covariates.future], state.historic, static)
        blocks = None if self.patches is None or state.patches is None else self.patches.read(state.patches)
        x, level, unit = self.assemble(self.past(state, future_phase), known, blocks)
        return x, state.centre.unsqueeze(1) + level, unit

    def past(self, state: ForecasterState, future_phase: Tensor) -> Past:
        """The look-back, and the memory at the slots of the rows to be forecast. future_phase (B, H, F)."""
        reads = []
        for g, (season, memory) in enumerate(zip(self.config.seasons, self._memory(state), strict=True)):
            slots = self.read_slots(future_phase, g)
            held = memory.W.squeeze(2).gather(2, slots.unsqueeze(1).expand(-1, len(season.rates), -1))
            reads.append((held, memory.visits.gather(1, slots)))
        return Past(state.window, reads, state.last, state.mean, state.variance)

    def read_slots(self, future_phase: Tensor, season: int) -> Tensor:
        """The slots of a season that the horizon's rows touch, in their order. (B, H, F) -> (B, reads)."""
        s = self.config.seasons[season]
        return future_phase[:, :: s.stride, season][:, : s.reads(self.config.horizon)].long()

    def assemble(self, past: Past, known: Known | None = None, blocks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(N, d) features, level (N, 1) float64 relative to the centre, unit (N, 1) float64 (0 for a constant stream).

        blocks (N, H): what the blocks over patches say.
        """
        unit = past.variance.clamp(min=0.0).sqrt().unsqueeze(1)
        scale = torch.where(unit > 0, unit, 1.0).float()
        own, gap = (part / scale for part in _above_last(past))
        columns = []
        if known is not None:
            # Effects are in units of the stream already.
            its_own, its_gap = _above_last(known.effect)
            own, gap = own - its_own, gap - its_gap
            columns.append((self.effect_of(known.future) - known.now.unsqueeze(1)).float())
            columns += [part.flatten(1) for part in (known.future, known.historic, known.static)]
        if blocks is not None:
            columns.append(blocks)
        # The gap is the pull back to where the stream lives.
        x = torch.cat([own, *columns, gap, gap.new_ones(gap.shape)], 1)
        return x, past.last.double().unsqueeze(1), unit

    def centre_of(self, x: Tensor) -> Tensor:
        """Features (N, d) -> expected values (N, H), relative to the level and in its unit."""
        out = x @ self.line
        if self.net is not None:
            out = out + self.net((x - self.feature_mean) * self.feature_scale)
        return out

    def roughness(self, x: Tensor) -> Tensor:
        """How restless the look-back is, in units of the stream's deviation. (N, d) -> (N, 1)."""
        return x[:, : self.config.look_back].std(1, keepdim=True, correction=0).clamp(min=QUIETEST)

    def expected(self, state: ForecasterState, future_phase: Tensor) -> Tensor:
        """Expected values (B, H) float64 of the next H rows; changes no state. future_phase (B, H, F): their slots and covariates."""
        x, level, unit = self.features(state, future_phase)
        return self._known(state, level + unit * self.centre_of(x))

    def forecast(self, state: ForecasterState, future_phase: Tensor) -> Tensor:
        """Quantiles (B, H, Q) float64 of the next H rows, rising along Q; changes no state. future_phase (B, H, F).

        A stream of which nothing was observed yet has NaN: nothing is known about it.
        """
        x, level, unit = self.features(state, future_phase)
        spread = self.roughness(x) ** self.config.spread
        around = self.centre_of(x).unsqueeze(2) + spread.unsqueeze(2) * self.offsets
        return self._known(state, level.unsqueeze(2) + unit.unsqueeze(2) * around)

    def _known(self, state: ForecasterState, values: Tensor) -> Tensor:
        seen = (state.count > 0).view(-1, *[1] * (values.dim() - 1))
        return torch.where(seen, values, math.nan)


def _above_last(past: Past) -> tuple[Tensor, Tensor]:
    """(N, own features): look-back and reads above the last value; (N, 1): the last value above the mean."""
    middle, level = past.mean.float().unsqueeze(1), past.last.unsqueeze(1)
    parts = [past.window]
    for held, visits in past.reads:
        # A slot that was never written knows no more than the mean of the stream.
        parts.append(torch.where(visits.unsqueeze(1) > 0, held, middle.unsqueeze(2)).flatten(1))
    return torch.cat(parts, 1) - level, level - middle


def _running(value: Tensor, rate: Tensor, observed: Tensor, start: Tensor) -> Tensor:
    """m_t = m_{t-1} + rate_t (value_t - m_{t-1}) at observed rows, in float64: the delta rule with one key. (B, T) -> (B, T)."""
    one = torch.ones_like(value)[:, None, :, None]
    W = start.view(-1, 1, 1, 1)
    y, _ = linear_exact(
        one,
        one,
        value[:, None, :, None],
        rate[:, None],
        None,
        None,
        MatrixState(W, torch.zeros_like(W)),
        write=observed,
    )
    return y[:, 0, :, 0]


def write_slot(memory: PhaseMemory, rates: tuple[float, ...], slot: Tensor, value: Tensor, seen: Tensor) -> None:
    """`linear_exact` for one token with a one-hot key, in place: only the entry of the slot moves. slot, value, seen (B,)."""
    column = slot.unsqueeze(1)
    memory.visits.scatter_add_(1, column, seen.float().unsqueeze(1))
    visits = memory.visits.gather(1, column).clamp(min=1.0)
    theta = torch.maximum(torch.tensor(rates, device=value.device), 1.0 / visits) * seen.unsqueeze(1)
    index = column.view(-1, 1, 1, 1).expand(-1, len(rates), 1, 1)
    held = memory.W.gather(3, index)
    memory.W.scatter_(3, index, held + (theta * (value.unsqueeze(1) - held[:, :, 0, 0]))[:, :, None, None])
