// One row of many live streams, in place on a stacked state: the forecaster's write and features, and what is watched beside it.
// Twins of titans_core.forecaster (observe, then features) and pipelines.streaming.monitors (judge, interval, expect), to rounding.
// A stream is one unit of work: its numbers do not depend on which others share the call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tensors.h"

namespace {

struct ForecasterCall {
  int64_t n, L, H, G, d;
  double level_rows, quietest;
  double *centre, *count, *mean, *variance;  // (N)
  float *last, *window;                      // (N), (N, L)
  int16_t* phases;                           // (N, L, G)
  std::vector<Season> seasons;
  const int64_t *slot, *which;      // (n): of each row its stream and its time
  const double* y;                  // (n)
  const bool* observed;             // (n)
  const float *now, *ahead;         // (times, G), (times, H, G)
  float* x;                         // (n, d)
  double *level, *unit;             // (n)
  float* rough;                     // (n)
};

CLONES void forecaster_rows(const ForecasterCall& c) {
  for (int64_t i = 0; i < c.n; ++i) {
    const int64_t s = c.slot[i], L = c.L, G = c.G;
    const bool seen = c.observed[i];
    if (seen && c.count[s] == 0) c.centre[s] = c.y[i];
    const double value = seen ? c.y[i] - c.centre[s] : 0.0;
    if (seen) c.count[s] += 1, c.last[s] = (float)value;
    const float last = c.last[s];
    if (seen) {
      const double rate = 1.0 / std::min(std::max(c.count[s], 1.0), c.level_rows), before = c.mean[s];
      c.mean[s] = before + rate * (value - before);
      c.variance[s] += rate * ((value - before) * (value - c.mean[s]) - c.variance[s]);
    }
    float* w = c.window + s * L;
    memmove(w, w + 1, (L - 1) * sizeof(float));
    w[L - 1] = last;
    int16_t* phases = c.phases + s * L * G;
    memmove(phases, phases + G, (L - 1) * G * sizeof(int16_t));
    const float* now = c.now + c.which[i] * G;
    const float* ahead = c.ahead + c.which[i] * c.H * G;
    const float middle = (float)c.mean[s];
    const double unit = std::sqrt(std::max(c.variance[s], 0.0));
    const float scale = unit > 0 ? (float)unit : 1.0f;
    float* x = c.x + i * c.d;
    double total = 0, squares = 0;
    for (int64_t l = 0; l < L; ++l) x[l] = (w[l] - last) / scale;
    for (int64_t l = 0; l < L; ++l) total += x[l];
    total /= L;
    for (int64_t l = 0; l < L; ++l) squares += (x[l] - total) * (x[l] - total);
    c.rough[i] = (float)std::max(std::sqrt(squares / L), c.quietest);
    float* out = x + L;
    for (int64_t g = 0; g < G; ++g) {
      const Season& season = c.seasons[g];
      float *W = season.W + s * season.heads * season.slots, *visits = season.visits + s * season.slots;
      const int64_t here = (int64_t)now[g];
      phases[(L - 1) * G + g] = seen ? (int16_t)here : -1;
      if (seen) {
        visits[here] += 1;
        for (int64_t h = 0; h < season.heads; ++h) {
          float* held = W + h * season.slots + here;
          *held += std::max(season.rates[h], 1.0f / visits[here]) * (last - *held);
        }
      }
      for (int64_t h = 0; h < season.heads; ++h)
        for (int64_t r = 0; r < season.reads; ++r) {
          const int64_t there = (int64_t)ahead[r * season.stride * G + g];
          *out++ = ((visits[there] > 0 ? W[h * season.slots + there] : middle) - last) / scale;
        }
    }
    *out++ = (last - middle) / scale;
    *out++ = 1.0f;
    c.level[i] = c.centre[s] + (double)last;
    c.unit[i] = unit;
  }
}

// state: centre, count, mean, variance, last, window, phases, then W and visits of each season; strides and reads of each.
void forecaster_row(std::vector<Tensor> state, std::vector<Tensor> rates, std::vector<int64_t> strides, std::vector<int64_t> reads,
                    double level_rows, double quietest, Tensor slots, Tensor y, Tensor observed, Tensor which, Tensor now, Tensor ahead,
                    Tensor x, Tensor level, Tensor unit, Tensor rough) {
  ForecasterCall c{};
  const int64_t G = rates.size(), N = state[0].size(0), U = now.size(0);
  STD_TORCH_CHECK((int64_t)state.size() == 7 + 2 * G && (int64_t)strides.size() == G && (int64_t)reads.size() == G,
                  "tethys_native: a state of ", state.size(), " tensors is not that of ", G, " seasons");
  c.n = slots.size(0), c.L = state[5].size(1), c.H = ahead.size(1), c.G = G, c.level_rows = level_rows, c.quietest = quietest;
  c.centre = data<double>(state[0], "centre", {N}), c.count = data<double>(state[1], "count", {N});
  c.mean = data<double>(state[2], "mean", {N}), c.variance = data<double>(state[3], "variance", {N});
  c.last = data<float>(state[4], "last", {N}), c.window = data<float>(state[5], "window", {N, c.L});
  c.phases = data<int16_t>(state[6], "phases", {N, c.L, G});
  c.slot = within(slots, "slots", c.n, N), c.which = within(which, "which", c.n, U);
  c.y = data<double>(y, "y", {c.n}), c.observed = data<bool>(observed, "observed", {c.n});
  c.now = data<float>(now, "now", {U, G}), c.ahead = data<float>(ahead, "ahead", {U, c.H, G});
  c.d = c.L + 2;
  for (int64_t g = 0; g < G; ++g) {
    const Tensor &W = state[7 + 2 * g], &visits = state[8 + 2 * g];
    Season s{nullptr, nullptr, nullptr, W.size(1), W.size(3), strides[g], reads[g]};
    s.W = data<float>(W, "W", {N, s.heads, 1, s.slots}), s.visits = data<float>(visits, "visits", {N, s.slots});
    s.rates = data<float>(rates[g], "rates", {s.heads});
    STD_TORCH_CHECK(s.stride >= 1 && s.reads >= 0 && (s.reads == 0 || (s.reads - 1) * s.stride < c.H), "tethys_native: reads beyond the horizon");
    for (int64_t u = 0; u < U; ++u)
      for (int64_t h = -1; h < c.H; ++h) {
        const float slot = h < 0 ? c.now[u * G + g] : c.ahead[(u * c.H + h) * G + g];
        STD_TORCH_CHECK(slot >= 0 && slot < s.slots, "tethys_native: slot ", slot, " of a season of ", s.slots);
      }
    c.d += s.heads * s.reads;
    c.seasons.push_back(s);
  }
  c.x = data<float>(x, "x", {c.n, c.d}), c.level = data<double>(level, "level", {c.n});
  c.unit = data<double>(unit, "unit", {c.n}), c.rough = data<float>(rough, "rough", {c.n});
  forecaster_rows(c);
}

constexpr double kTiny = std::numeric_limits<double>::min(), kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
constexpr int64_t kOutlier = 1, kLevel = 2, kScale = 4, kUnusual = 8;

// The constants of pipelines.streaming.monitors, in the order in which it gives them.
struct Rules {
  double coverage, normal_width, haste, haste_rows, clip, scale_clip, warm_up, scale_rows, settled, outlier_limit, outlier_rate, outlier_share,
      short_rows, long_rows, unusual, unusual_warm_up, hold_rows, reference, limit, correlation_rows, wider, mean, deviation;
};

struct WatchCall {
  int64_t n, K, P, H, Q;
  Rules r;
  int64_t* rows;           // (N)
  double* pending;         // (N, P, 3)
  float* stretch;          // (N, K)
  double* scale;           // (N, 2)
  int64_t* seen;           // (N, 2)
  float *before, *correlation, *cusum, *tolerance, *jump; // (N, 2), (N), (N, 4), (N), (N, 2)
  double* size;            // (N, 3)
  int64_t *sizes, *hold;   // (N)
  const int64_t *slot, *step, *first;   // (n), (K), (K)
  const float *rate, *between;          // (K), (K, H)
  const double *y, *forecast;           // (n), (Q, n, H)
  double *surprise, *anomaly, *unusual; // (n)
  float *limit, *statistic;             // (n), (n, 2)
  int64_t* alarm;                       // (n)
  bool* covered;                        // (n)
  double *low, *high;                   // (n, H)
};

// NaN stays NaN, as in torch's clamp.
inline double least(double v, double bound) { return v < bound ? bound : v; }
inline float least(float v, float bound) { return v < bound ? bound : v; }
inline double at_most(double v, double bound) { return v > bound ? bound : v; }
inline float at_most(float v, float bound) { return v > bound ? bound : v; }

void judge(const WatchCall& c, int64_t i, double* residual) {
  const Rules& r = c.r;
  const int64_t s = c.slot[i], K = c.K, rows = c.rows[s];
  const float haste = 1.0f + (float)r.haste / (float)(rows + (int64_t)r.haste_rows);
  double size0 = 0;
  for (int64_t k = 0; k < K; ++k) {
    const double* due = c.pending + (s * c.P + c.first[k] + rows % c.step[k]) * 3;
    const double off = c.y[i] - due[1], half = off < 0 ? due[1] - due[0] : due[2] - due[1];
    float& stretch = c.stretch[s * K + k];
    const bool judged = !std::isnan(off), missed = std::fabs(off) / least(half, kTiny) > std::exp((double)stretch);
    if (judged) stretch += haste * c.rate[k] * ((float)missed - (float)(1 - r.coverage));
    stretch = std::min(std::max(stretch, -10.0f), 10.0f);
    residual[k] = off;
    if (k == 0) {
      c.covered[i] = judged && !missed;
      size0 = std::fabs(off);
      const double width = due[2] - due[0];
      c.surprise[i] = width > kEpsilon * std::fabs(due[1]) ? size0 / (width / r.normal_width) : size0 == 0 ? 0.0 : kNaN;
    }
  }
  // Running scales, outliers and drift, of the first and the last tracked step.
  const double both[2] = {residual[0], residual[K - 1]};
  double* scale = c.scale + s * 2;
  int64_t* seen = c.seen + s * 2;
  float *before = c.before + s * 2, *moved = c.jump + s * 2, *cusum = c.cusum + s * 4;
  const bool warm[2] = {seen[0] >= r.warm_up, seen[1] >= r.warm_up}, settled = rows >= r.settled;
  double z[2];
  float clipped[2];
  for (int j = 0; j < 2; ++j) {
    z[j] = seen[j] > 0 ? both[j] / least(scale[j] / r.mean, kTiny) : kNaN;
    clipped[j] = (float)at_most(least(z[j], -r.clip), r.clip);
  }
  c.anomaly[i] = warm[0] ? std::fabs(z[0]) : kNaN;
  float jump = at_most(std::fabs(clipped[0] - before[0]) / (float)M_SQRT2, (float)r.clip);
  const float usual = std::max(std::sqrt(std::max(moved[1] - moved[0] * moved[0], 0.0f)), (float)(0.25 * r.deviation)), mean = moved[0];
  if (!std::isnan(jump)) {
    const float fresh = 1.0f / (float)std::min(seen[0] + 1, (int64_t)r.correlation_rows);
    moved[0] += fresh * (jump - moved[0]), moved[1] += fresh * (jump * jump - moved[1]);
  }
  const float watched[2] = {clipped[1], (jump - mean) / usual};
  bool counts[2];
  float value[2];
  for (int j = 0; j < 2; ++j) counts[j] = warm[j] && settled && !std::isnan(watched[j]), value[j] = counts[j] ? watched[j] : 0.0f;
  float& correlation = c.correlation[s];
  const float product = counts[0] && !std::isnan(before[1]) ? value[0] * before[1] : correlation;
  correlation += (product - correlation) / (float)r.correlation_rows;
  const float rho = std::min(std::max(correlation, 0.0f), 0.95f);
  const float wider[2] = {std::sqrt((1 + rho) / (1 - rho)), (float)r.wider};
  int64_t alarm = 0;
  for (int j = 0; j < 2; ++j) {
    float* sums = cusum + 2 * j;
    if (counts[j])
      for (int side = 0; side < 2; ++side)
        sums[side] = std::max(sums[side] + (side ? -value[j] : value[j]) - (float)r.reference * wider[j], 0.0f);
    c.statistic[i * 2 + j] = std::max(sums[0], sums[1]) / ((float)r.limit * wider[j]);
    if (c.statistic[i * 2 + j] >= 1.0f) alarm |= j ? kScale : kLevel;
  }
  if (alarm) // after an alarm the sums begin anew and the scales are learnt quickly again
    for (int j = 0; j < 4; ++j) cusum[j] = 0, seen[j / 2] = std::min(seen[j / 2], (int64_t)r.warm_up / 2);
  for (int j = 0; j < 2; ++j) {
    before[j] = clipped[j];
    if (std::isnan(both[j])) continue;
    const double size = std::fabs(both[j]), rate = 1.0 / (double)std::min(seen[j] + 1, (int64_t)r.scale_rows);
    const double bounded = seen[j] > 0 ? std::min(size, r.scale_clip * scale[j] / r.mean) : size;
    scale[j] += rate * (bounded - scale[j]);
    seen[j] += 1;
  }
  // Anomaly likelihood.
  double* average = c.size + s * 3;
  const double count = (double)(c.sizes[s] + 1), brief = average[0] + (size0 - average[0]) / std::min(count, r.short_rows);
  const double usually = std::sqrt(average[2] / r.short_rows);
  c.unusual[i] = c.sizes[s] >= r.unusual_warm_up ? (brief - average[1]) / least(usually, kTiny) : kNaN;
  if (c.unusual[i] > r.unusual && c.hold[s] == 0) alarm |= kUnusual, c.hold[s] = (int64_t)r.hold_rows;
  else c.hold[s] = std::max<int64_t>(c.hold[s] - 1, 0);
  if (!std::isnan(size0)) {
    const double rate = 1.0 / std::min(count, r.long_rows), away = size0 - average[1];
    average[0] = brief, average[1] += rate * away;
    average[2] += rate * (away * (size0 - average[1]) - average[2]);
    c.sizes[s] += 1;
  }
  float& tolerance = c.tolerance[s];
  c.limit[i] = (float)r.outlier_limit * std::exp(tolerance);
  const bool beyond = c.anomaly[i] > c.limit[i];
  if (beyond) alarm |= kOutlier;
  tolerance = std::max(tolerance + (float)r.outlier_rate * ((float)beyond - (float)r.outlier_share), 0.0f);
  c.alarm[i] = alarm;
}

CLONES void watch_rows(const WatchCall& c) {
  std::vector<double> residual(c.K);
  std::vector<float> logs(c.H);
  for (int64_t i = 0; i < c.n; ++i) {
    judge(c, i, residual.data());
    const int64_t s = c.slot[i], H = c.H, rows = c.rows[s];
    const double *bottom = c.forecast + i * H, *middle = bottom + c.Q / 2 * c.n * H, *top = bottom + (c.Q - 1) * c.n * H;
    std::fill(logs.begin(), logs.end(), 0.0f);
    for (int64_t k = 0; k < c.K; ++k)
      for (int64_t h = 0; h < H; ++h) logs[h] += c.stretch[s * c.K + k] * c.between[k * H + h];
    for (int64_t h = 0; h < H; ++h) logs[h] = std::exp(logs[h]);
    for (int64_t h = 0; h < H; ++h) c.low[i * H + h] = middle[h] + logs[h] * (bottom[h] - middle[h]);
    for (int64_t h = 0; h < H; ++h) c.high[i * H + h] = middle[h] + logs[h] * (top[h] - middle[h]);
    for (int64_t k = 0; k < c.K; ++k) {
      double* kept = c.pending + (s * c.P + c.first[k] + rows % c.step[k]) * 3;
      const int64_t h = c.step[k] - 1;
      kept[0] = bottom[h], kept[1] = middle[h], kept[2] = top[h];
    }
    c.rows[s] = rows + 1;
  }
}

// state: rows, pending, stretch, scale, seen, before, correlation, cusum, tolerance, jump, size, sizes, hold.
// out: surprise, anomaly, limit, unusual, alarm, statistic, covered, low, high. forecast: (Q, n, H).
void watch_row(std::vector<Tensor> state, std::vector<double> rules, Tensor step, Tensor first, Tensor rate, Tensor between, Tensor slots,
               Tensor y, Tensor forecast, std::vector<Tensor> out) {
  STD_TORCH_CHECK(state.size() == 13 && out.size() == 9 && rules.size() * sizeof(double) == sizeof(Rules), "tethys_native: not a monitor's call");
  WatchCall c{};
  memcpy(&c.r, rules.data(), sizeof(Rules));
  const int64_t N = state[0].size(0);
  const int64_t n = c.n = slots.size(0), K = c.K = step.size(0), P = c.P = state[1].size(1), H = c.H = between.size(1);
  c.Q = forecast.size(0);
  c.rows = data<int64_t>(state[0], "rows", {N}), c.pending = data<double>(state[1], "pending", {N, P, 3});
  c.stretch = data<float>(state[2], "stretch", {N, K}), c.scale = data<double>(state[3], "scale", {N, 2});
  c.seen = data<int64_t>(state[4], "seen", {N, 2}), c.before = data<float>(state[5], "before", {N, 2});
  c.correlation = data<float>(state[6], "correlation", {N}), c.cusum = data<float>(state[7], "cusum", {N, 4});
  c.tolerance = data<float>(state[8], "tolerance", {N}), c.jump = data<float>(state[9], "jump", {N, 2});
  c.size = data<double>(state[10], "size", {N, 3}), c.sizes = data<int64_t>(state[11], "sizes", {N});
  c.hold = data<int64_t>(state[12], "hold", {N}), c.slot = within(slots, "slots", n, N);
  c.step = data<int64_t>(step, "step", {K}), c.first = data<int64_t>(first, "first", {K});
  for (int64_t k = 0; k < K; ++k)
    STD_TORCH_CHECK(c.step[k] >= 1 && c.step[k] <= H && c.first[k] >= 0 && c.first[k] + c.step[k] <= P, "tethys_native: tracked steps do not fit");
  c.rate = data<float>(rate, "rate", {K}), c.between = data<float>(between, "between", {K, H});
  c.y = data<double>(y, "y", {n}), c.forecast = data<double>(forecast, "forecast", {c.Q, n, H});
  c.surprise = data<double>(out[0], "surprise", {n}), c.anomaly = data<double>(out[1], "anomaly", {n});
  c.limit = data<float>(out[2], "limit", {n}), c.unusual = data<double>(out[3], "unusual", {n});
  c.alarm = data<int64_t>(out[4], "alarm", {n}), c.statistic = data<float>(out[5], "statistic", {n, 2});
  c.covered = data<bool>(out[6], "covered", {n}), c.low = data<double>(out[7], "low", {n, H}), c.high = data<double>(out[8], "high", {n, H});
  watch_rows(c);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tethys_native, m) {
  m.def(
      "forecaster_row(Tensor(a!)[] state, Tensor[] rates, int[] strides, int[] reads, float level_rows, float quietest, Tensor slots, "
      "Tensor y, Tensor observed, Tensor which, Tensor now, Tensor ahead, Tensor(b!) x, Tensor(c!) level, Tensor(d!) unit, "
      "Tensor(e!) rough) -> ()");
  m.def(
      "watch_row(Tensor(a!)[] state, float[] rules, Tensor step, Tensor first, Tensor rate, Tensor between, Tensor slots, Tensor y, "
      "Tensor forecast, Tensor(b!)[] out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tethys_native, CPU, m) {
  m.impl("forecaster_row", TORCH_BOX(&forecaster_row));
  m.impl("watch_row", TORCH_BOX(&watch_row));
}
