"""What is watched beside the model, a stream each: surprise, intervals that keep their coverage, drift.

All functions are pure and step many streams at once; the state is a data class of tensors with the streams first, so
it is stacked, spilled and replayed like the model's own.

- **Residuals.** A few steps of the horizon are tracked (1, 2, 4, ... and the last). The forecast for step h is held
  back for h rows and judged when its row comes: nothing uses a target before its time.
- **Intervals.** Adaptive conformal, as quantile tracking (Gibbs and Candes 2021; Angelopoulos et al. 2023, eq. 2): the
  interval of step h is the model's outer quantiles stretched about the median by `c_h`, and after each judged row
  log c_h moves by rate x (missed - (1 - level)). Its long-run coverage is the level whatever the data do.
- **Anomaly.** The residual of step 1 in units of its own running absolute deviation (`anomaly`: a single outlier), and
  `surprise`: the same residual in units of what the model said it would be. `unusual` is the anomaly likelihood of
  Ahmad et al. 2017 (eqs. 4-5): how far the mean size of the last ten residuals lies above its long-run mean, in standard
  deviations of such a mean; noisy series are judged by their own noise. After an alarm of it there is none for a while.
- **Drift.** Two-sided CUSUM (Page 1954) of the standardised residual of the longest tracked step (a level that moved
  biases it for a whole horizon, however fast the model follows), and of the successive differences of the residual of
  step 1 (their size is the scale of the noise and does not see levels). Residuals are clipped, so one outlier is no
  drift; the reference value and the limit grow with the residual's autocorrelation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.native import streams
from titans_core.state import select, write_

# log c moves by at most this share a judged row; small enough to be steady, large enough to follow a season.
INTERVAL_RATE = 0.05
# A new stream learns its stretch up to 17 times faster, fading with its rows: a cold memory is more wrong than it says.
INTERVAL_HASTE, INTERVAL_HASTE_ROWS = 64, 4
# Rows over which the absolute deviation of a residual is averaged.
SCALE_ROWS = 64
# A residual counts for at most so many deviations in its running scale: one outlier moves it by 3 %.
SCALE_CLIP = 3.0
# No alarm before so many residuals were seen; for drift eight horizons, in which a new memory learns its first seasons.
WARM_UP = 32
# Residuals beyond so many (normal-equivalent) deviations are outliers; where a stream's tails are heavy the limit rises
# until about one row in a thousand is beyond it.
OUTLIER_LIMIT = 6.0
OUTLIER_SHARE = 1e-3
OUTLIER_RATE = 0.5
# The published windows and threshold of the anomaly likelihood: a tail of 1e-5.
SHORT_ROWS, LONG_ROWS = 10, 1000
UNUSUAL = 4.265
UNUSUAL_WARM_UP = 96
# One disturbance, one alarm.
HOLD_ROWS = 100
DRIFT_CLIP = 3.5
# CUSUM in standard deviations: half the shift to find, and a limit white noise reaches about once in 10^6 rows.
DRIFT_REFERENCE = 0.5
DRIFT_LIMIT = 12.0
AUTOCORRELATION_ROWS = 256
# Neighbouring differences share a value: the sizes of white noise's have an autocorrelation of 0.23 (1.3 times wider
# in the long run), and the running scale they are measured with wanders by some percent.
DIFFERENCES_WIDER = 1.6
# Of |N(0, 1)|.
HALF_NORMAL_MEAN = math.sqrt(2 / math.pi)
HALF_NORMAL_SD = math.sqrt(1 - 2 / math.pi)

OUTLIER, LEVEL, SCALE, UNUSUAL_BIT = 1, 2, 4, 8
"""Bits of an alarm."""


def tracked_steps(horizon: int) -> list[int]:
    """1, 2, 4, ... and the horizon itself."""
    steps = [1]
    while steps[-1] * 2 < horizon:
        steps.append(steps[-1] * 2)
    return steps if horizon == 1 else [*steps, horizon]


@dataclass(frozen=True)
class MonitorState:
    rows: Tensor
    """(n,) int64: rows of the grid so far, gaps included."""
    pending: Tensor
    """(n, P, 3) float64: lower, middle, upper of forecasts that wait for their row; a ring of h entries for each tracked
    step h, entry rows % h. NaN: no forecast was made."""
    stretch: Tensor
    """(n, K) float32: log c of each tracked step."""
    scale: Tensor
    """(n, 2) float64: running absolute deviation of the residuals of the first and the last tracked step."""
    seen: Tensor
    """(n, 2) int64: residuals in `scale`."""
    before: Tensor
    """(n, 2) float32: the standardised residuals of the row before; NaN: none."""
    correlation: Tensor
    """(n,) float32: running lag-one autocorrelation of the standardised residual of the last step."""
    cusum: Tensor
    """(n, 4) float32: level up and down, scale up and down."""
    tolerance: Tensor
    """(n,) float32: log of how far the limit of outliers has risen."""
    jump: Tensor
    """(n, 2) float32: running mean and mean square of the sizes of successive differences."""
    size: Tensor
    """(n, 3) float64: short and long running mean of the absolute residual of step 1, and its long running variance."""
    sizes: Tensor
    """(n,) int64: residuals in `size`."""
    hold: Tensor
    """(n,) int64: rows until the next alarm of `unusual`."""


@dataclass(frozen=True)
class Verdict:
    """What one row showed, a stream each."""

    surprise: Tensor
    """(n,) float64 residual of step 1 in standard deviations of the model's forecast; NaN: no forecast, no value, or a value that differs
    from a forecast without width, as the one after a stream's first row."""
    anomaly: Tensor
    """(n,) float64 residual of step 1 in its own running standard deviations; NaN likewise or while warming up."""
    limit: Tensor
    """(n,) float32: what `anomaly` was held against."""
    unusual: Tensor
    """(n,) float64 anomaly likelihood as a standard score; NaN without a residual or while warming up."""
    alarm: Tensor
    """(n,) int64 bits OUTLIER, UNUSUAL_BIT, LEVEL, SCALE."""
    statistic: Tensor
    """(n, 2) float32: the larger CUSUM of level and of scale, as shares of their limits."""
    covered: Tensor
    """(n,) bool: the value lay in the interval issued for it one row before."""


class Monitors:
    """The functions with their constants for one model: `levels` are its quantiles (rising), `horizon` its steps."""

    def __init__(self, levels: tuple[float, ...], horizon: int):
        self.levels = levels
        self.coverage = levels[-1] - levels[0]
        self.steps = tracked_steps(horizon)
        self._step = torch.tensor(self.steps)
        first = [sum(self.steps[:k]) for k in range(len(self.steps))]
        self._first = torch.tensor(first)
        self._ring = torch.cat([torch.full((h,), h) for h in self.steps])
        """(P,) length of the ring each entry belongs to."""
        self._place = torch.cat([torch.arange(h) for h in self.steps])
        self._rate = INTERVAL_RATE / self._step.sqrt()
        normal = torch.special.ndtri(torch.tensor([levels[0], levels[-1]], dtype=torch.float64))
        self._normal_width = float(normal[1] - normal[0])
        self._between = self._interpolation(horizon)
        self._rules = (
            *(self.coverage, self._normal_width, INTERVAL_HASTE, INTERVAL_HASTE_ROWS, DRIFT_CLIP, SCALE_CLIP, WARM_UP, SCALE_ROWS),
            *(8 * self.steps[-1], OUTLIER_LIMIT, OUTLIER_RATE, OUTLIER_SHARE, SHORT_ROWS, LONG_ROWS, UNUSUAL, UNUSUAL_WARM_UP, HOLD_ROWS),
            *(DRIFT_REFERENCE, DRIFT_LIMIT, AUTOCORRELATION_ROWS, DIFFERENCES_WIDER, HALF_NORMAL_MEAN, HALF_NORMAL_SD),
        )
        self.native = not streams.supports()

    def _interpolation(self, horizon: int) -> Tensor:
        """(K, horizon): log c of every step from the tracked ones, linear in log h."""
        weights = torch.zeros(len(self.steps), horizon)
        logs = [math.log(h) for h in self.steps]
        for h in range(1, horizon + 1):
            right = next(k for k, step in enumerate(self.steps) if step >= h)
            if self.steps[right] == h:
                weights[right, h - 1] = 1.0
            else:
                share = (math.log(h) - logs[right - 1]) / (logs[right] - logs[right - 1])
                weights[right - 1, h - 1], weights[right, h - 1] = 1 - share, share
        return weights

    def initial(self, n: int) -> MonitorState:
        return MonitorState(
            rows=torch.zeros(n, dtype=torch.int64),
            pending=torch.full((n, len(self._ring), 3), torch.nan, dtype=torch.float64),
            stretch=torch.zeros(n, len(self.steps)),
            scale=torch.zeros(n, 2, dtype=torch.float64),
            seen=torch.zeros(n, 2, dtype=torch.int64),
            before=torch.full((n, 2), torch.nan),
            correlation=torch.zeros(n),
            cusum=torch.zeros(n, 4),
            tolerance=torch.zeros(n),
            jump=torch.zeros(n, 2),
            size=torch.zeros(n, 3, dtype=torch.float64),
            sizes=torch.zeros(n, dtype=torch.int64),
            hold=torch.zeros(n, dtype=torch.int64),
        )

    def skip(self, state: MonitorState, gap: Tensor) -> MonitorState:
        """Pass `gap` (n,) rows for which nothing came: what was forecast for them, or would have been made at them, is
        dropped."""
        ahead = (self._place - state.rows.unsqueeze(1)) % self._ring
        gone = (ahead < gap.unsqueeze(1)).unsqueeze(2)
        return _with(
            state,
            rows=state.rows + gap,
            pending=torch.where(gone, torch.nan, state.pending),
            before=torch.where((gap > 0).unsqueeze(1), torch.nan, state.before),
        )

    def row_(self, state: MonitorState, slots: Tensor, y: Tensor, forecast: Tensor) -> tuple[Verdict, Tensor, Tensor]:
        """`judge`, `interval` and `expect` for one row of the streams `slots` (n,) of `state`, in place: y (n,) float64, forecast
        (n, horizon, Q) float64. Returns the verdict, and lower and upper (n, horizon)."""
        if self.native:
            leaves = [getattr(state, f.name) for f in fields(MonitorState)]
            constants = (self._rules, self._step, self._first, self._rate, self._between)
            *verdict, low, high = streams.watch_row(leaves, *constants, slots, y, forecast.permute(2, 0, 1).double().contiguous())
            return Verdict(*verdict), low, high
        part, found = self.judge(select(state, slots), y)
        low, high = self.interval(part, forecast)
        write_(state, slots, self.expect(part, forecast))
        return found, low, high

    def judge(self, state: MonitorState, y: Tensor) -> tuple[MonitorState, Verdict]:
        """Hold `y` (n,) float64 (NaN: missing) against the forecasts made for this row."""
        here = self._first + state.rows.unsqueeze(1) % self._step
        due = state.pending.gather(1, here.unsqueeze(2).expand(-1, -1, 3))
        low, middle, high = due.unbind(2)
        residual = y.unsqueeze(1) - middle
        # How far out the value lies, in half-widths of the model's interval on its side.
        half = torch.where(residual < 0, middle - low, high - middle)
        tiny = torch.finfo(torch.float64).tiny
        out = residual.abs() / half.clamp_min(tiny)
        judged = ~residual.isnan()
        missed = out > state.stretch.double().exp()
        haste = 1 + INTERVAL_HASTE / (state.rows + INTERVAL_HASTE_ROWS).float()
        move = haste.unsqueeze(1) * self._rate * (missed.float() - (1 - self.coverage))
        stretch = torch.where(judged, state.stretch + move, state.stretch).clamp(-10.0, 10.0)
        # A forecast no wider than the numbers resolve (after a first row, or on a stream that never moved) names no unit to be surprised in.
        width = high[:, 0] - low[:, 0]
        named = width > torch.finfo(torch.float64).eps * middle[:, 0].abs()
        surprise = (residual[:, 0].abs() / (width / self._normal_width)).where(named, torch.where(residual[:, 0] == 0, 0.0, torch.nan))
        state, anomaly, drift, statistic = self._watch(state, residual[:, [0, -1]])
        state, unusual, disturbed = self._likelihood(state, residual[:, 0].abs())
        limit = OUTLIER_LIMIT * state.tolerance.exp()
        beyond = anomaly > limit
        tolerance = (state.tolerance + OUTLIER_RATE * (beyond.float() - OUTLIER_SHARE)).clamp(min=0.0)
        alarm = beyond * OUTLIER + disturbed * UNUSUAL_BIT + drift
        covered = judged[:, 0] & ~missed[:, 0]
        return _with(state, stretch=stretch, tolerance=tolerance), Verdict(surprise, anomaly, limit, unusual, alarm, statistic, covered)

    def _likelihood(self, s: MonitorState, size: Tensor) -> tuple[MonitorState, Tensor, Tensor]:
        """size (n,): the absolute residual of step 1, NaN: unknown."""
        known = ~size.isnan()
        short, mean, variance = s.size.unbind(1)
        count = (s.sizes + 1).double()
        short = short + (size - short) / count.clamp(max=SHORT_ROWS)
        deviation = (variance / SHORT_ROWS).sqrt()
        unusual = ((short - mean) / deviation.clamp_min(torch.finfo(torch.float64).tiny)).where(s.sizes >= UNUSUAL_WARM_UP, torch.nan)
        rate = 1.0 / count.clamp(max=LONG_ROWS)
        away = size - mean
        mean = mean + rate * away
        variance = variance + rate * (away * (size - mean) - variance)
        disturbed = (unusual > UNUSUAL) & (s.hold == 0)
        hold = torch.where(disturbed, HOLD_ROWS, (s.hold - 1).clamp(min=0))
        moved = torch.where(known.unsqueeze(1), torch.stack([short, mean, variance], 1), s.size)
        return _with(s, size=moved, sizes=s.sizes + known, hold=hold), unusual, disturbed

    def _watch(self, s: MonitorState, residual: Tensor) -> tuple[MonitorState, Tensor, Tensor, Tensor]:
        """Running scales, outliers and drift. residual (n, 2) of the first and last tracked step, NaN: unknown."""
        known = ~residual.isnan()
        size = residual.abs()
        warm = s.seen >= WARM_UP
        settled = s.rows.unsqueeze(1) >= 8 * self.steps[-1]
        deviation = s.scale / HALF_NORMAL_MEAN
        z = (residual / deviation.clamp_min(torch.finfo(torch.float64).tiny)).where(s.seen > 0, torch.nan)
        anomaly = z[:, 0].abs().where(warm[:, 0], torch.nan)
        clipped = z.clamp(-DRIFT_CLIP, DRIFT_CLIP).float()
        # Scale: the sizes of differences of successive first-step residuals, which do not see the level.
        jump = ((clipped[:, 0] - s.before[:, 0]).abs() / math.sqrt(2)).clamp(max=DRIFT_CLIP)
        # Against their own running mean and deviation: how heavy the tails of a noise are differs from stream to stream.
        mean, square = s.jump.unbind(1)
        usual = (square - mean**2).clamp_min(0.0).sqrt().clamp_min(0.25 * HALF_NORMAL_SD)
        fresh = 1.0 / (s.seen[:, 0] + 1).clamp(max=AUTOCORRELATION_ROWS)
        moved = s.jump + fresh.unsqueeze(1) * (torch.stack([jump, jump**2], 1) - s.jump)
        moved = torch.where(jump.isnan().unsqueeze(1), s.jump, moved)
        jump = (jump - mean) / usual
        watched = torch.stack([clipped[:, 1], jump], 1)
        counts = warm & settled & ~watched.isnan()
        value = torch.where(counts, watched, 0.0)
        pair = counts[:, 0] & ~s.before[:, 1].isnan()
        product = torch.where(pair, value[:, 0] * s.before[:, 1], s.correlation)
        correlation = s.correlation + (product - s.correlation) / AUTOCORRELATION_ROWS
        # Long-run against short-run deviation of an AR(1) with this autocorrelation.
        rho = correlation.clamp(0.0, 0.95)
        wider = torch.stack([((1 + rho) / (1 - rho)).sqrt(), torch.full_like(rho, DIFFERENCES_WIDER)], 1)
        signed = torch.stack([value[:, 0], -value[:, 0], value[:, 1], -value[:, 1]], 1)
        wide = wider.repeat_interleave(2, dim=1)
        counted = counts.repeat_interleave(2, dim=1)
        cusum = torch.where(counted, (s.cusum + signed - DRIFT_REFERENCE * wide).clamp(min=0.0), s.cusum)
        statistic = torch.stack([cusum[:, :2].amax(1), cusum[:, 2:].amax(1)], 1) / (DRIFT_LIMIT * wider)
        drift = statistic >= 1.0
        alarm = drift[:, 0] * LEVEL + drift[:, 1] * SCALE
        # After an alarm the sums begin anew and the scales are learnt quickly again.
        drifted = drift.any(1, keepdim=True)
        cusum = torch.where(drifted, 0.0, cusum)
        seen = torch.where(drifted, s.seen.clamp(max=WARM_UP // 2), s.seen)
        rate = 1.0 / (seen + 1).clamp(max=SCALE_ROWS).double()
        bounded = torch.where(seen > 0, torch.minimum(size, SCALE_CLIP * s.scale / HALF_NORMAL_MEAN), size)
        scale = torch.where(known, s.scale + rate * (bounded - s.scale), s.scale)
        state = _with(
            s,
            scale=scale,
            seen=seen + known,
            before=clipped,
            correlation=correlation,
            cusum=cusum,
            jump=moved,
        )
        return state, anomaly, alarm, statistic

    def expect(self, state: MonitorState, forecast: Tensor) -> MonitorState:
        """Hold `forecast` (n, horizon, Q), made at this row, back until its rows come; the row is finished."""
        kept = forecast[:, self._step - 1][:, :, [0, len(self.levels) // 2, -1]].double()
        here = self._first + state.rows.unsqueeze(1) % self._step
        pending = state.pending.scatter(1, here.unsqueeze(2).expand(-1, -1, 3), kept)
        return _with(state, rows=state.rows + 1, pending=pending)

    def interval(self, state: MonitorState, forecast: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper (n, horizon): the outer quantiles of `forecast` stretched about the median."""
        stretch = (state.stretch @ self._between).exp()
        middle = forecast[:, :, len(self.levels) // 2]
        return middle + stretch * (forecast[:, :, 0] - middle), middle + stretch * (forecast[:, :, -1] - middle)


def _with(state: MonitorState, **changes: Tensor) -> MonitorState:
    return MonitorState(**{**vars(state), **changes})
