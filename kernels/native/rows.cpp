// Whole histories of a forecaster: many rows written into a stacked state in one call, and the forecast made from it.
// Twins of titans_core.forecaster (observe; expected and forecast), to rounding.
// A stream is one unit of work: its numbers are the same bits whichever others share the call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tensors.h"

namespace {

struct State {
  int64_t N, L, G;
  double *centre, *count, *mean, *variance;  // (N)
  float *last, *window;                      // (N), (N, L)
  int16_t* phases;                           // (N, L, G)
  std::vector<Season> seasons;
};

// state: centre, count, mean, variance, last, window, phases, then W and visits of each season.
State opened(const std::vector<Tensor>& state, int64_t G) {
  STD_TORCH_CHECK((int64_t)state.size() == 7 + 2 * G, "tethys_native: a state of ", state.size(), " tensors is not that of ", G, " seasons");
  State s{};
  const int64_t N = s.N = state[0].size(0);
  s.L = state[5].size(1), s.G = G;
  s.centre = data<double>(state[0], "centre", {N}), s.count = data<double>(state[1], "count", {N});
  s.mean = data<double>(state[2], "mean", {N}), s.variance = data<double>(state[3], "variance", {N});
  s.last = data<float>(state[4], "last", {N}), s.window = data<float>(state[5], "window", {N, s.L});
  s.phases = data<int16_t>(state[6], "phases", {N, s.L, G});
  for (int64_t g = 0; g < G; ++g) {
    const Tensor &W = state[7 + 2 * g], &visits = state[8 + 2 * g];
    Season season{nullptr, nullptr, nullptr, W.size(1), W.size(3), 1, 0};
    season.W = data<float>(W, "W", {N, season.heads, 1, season.slots});
    season.visits = data<float>(visits, "visits", {N, season.slots});
    s.seasons.push_back(season);
  }
  return s;
}

// (U, rows, G) slots of every season at U different runs of time.
const float* slots_of(const Tensor& phase, const char* name, const State& s, int64_t rows) {
  const int64_t U = phase.size(0);
  const float* p = data<float>(phase, name, {U, rows, s.G});
  for (int64_t i = 0; i < U * rows; ++i)
    for (int64_t g = 0; g < s.G; ++g)
      STD_TORCH_CHECK(p[i * s.G + g] >= 0 && p[i * s.G + g] < s.seasons[g].slots, "tethys_native: slot ", p[i * s.G + g], " of a season of ",
                      s.seasons[g].slots);
  return p;
}

CLONES void write_rows(const State& c, int64_t T, double level_rows, const double* values, const bool* observed, const float* phase,
                       const int64_t* which) {
  const int64_t L = c.L, G = c.G, fresh = std::min(T, L);  // rows of the look-back that are new
  for (int64_t s = 0; s < c.N; ++s) {
    float* window = c.window + s * L;
    int16_t* phases = c.phases + s * L * G;
    memmove(window, window + fresh, (L - fresh) * sizeof(float));
    memmove(phases, phases + fresh * G, (L - fresh) * G * sizeof(int16_t));
    for (int64_t t = 0; t < T; ++t) {
      const bool seen = observed[s * T + t];
      const float* now = phase + (which[s] * T + t) * G;
      if (seen) {
        const double y = values[s * T + t];
        if (c.count[s] == 0) c.centre[s] = y;
        const double value = y - c.centre[s], before = c.mean[s];
        c.count[s] += 1, c.last[s] = (float)value;
        const double rate = 1.0 / std::min(std::max(c.count[s], 1.0), level_rows);
        c.mean[s] = before + rate * (value - before);
        c.variance[s] += rate * ((value - before) * (value - c.mean[s]) - c.variance[s]);
        for (int64_t g = 0; g < G; ++g) {
          const Season& season = c.seasons[g];
          const int64_t here = (int64_t)now[g];
          float *W = season.W + s * season.heads * season.slots + here, *visits = season.visits + s * season.slots + here;
          *visits += 1;
          for (int64_t h = 0; h < season.heads; ++h) {
            float* held = W + h * season.slots;
            *held += std::max(season.rates[h], 1.0f / *visits) * (c.last[s] - *held);
          }
        }
      }
      if (t >= T - fresh) {
        const int64_t l = L - T + t;
        window[l] = c.last[s];
        for (int64_t g = 0; g < G; ++g) phases[l * G + g] = seen ? (int16_t)now[g] : -1;
      }
    }
  }
}

// y, observed (N, T); phase (U, T, G); which (N): the run of times of each stream.
void forecaster_history(std::vector<Tensor> state, std::vector<Tensor> rates, double level_rows, Tensor y, Tensor observed, Tensor phase,
                        Tensor which) {
  State s = opened(state, rates.size());
  for (int64_t g = 0; g < s.G; ++g) s.seasons[g].rates = data<float>(rates[g], "rates", {s.seasons[g].heads});
  const int64_t T = y.size(1);
  const double* values = data<double>(y, "y", {s.N, T});
  const bool* seen = data<bool>(observed, "observed", {s.N, T});
  write_rows(s, T, level_rows, values, seen, slots_of(phase, "phase", s, T), within(which, "which", s.N, phase.size(0)));
}

struct Head {
  int64_t H, Q, d, hidden;
  double quietest;
  float spread;
  const float *line, *shift, *stretch;                  // (d, H), (d), (d)
  const float *first, *first_bias, *second, *second_bias;  // (d, hidden), (hidden), (hidden, H), (H)
  const float* offsets;                                 // (H, Q)
  double *mean, *quantiles;                             // (N, H), (N, H, Q)
};

// out (columns) += x (rows) times w (rows, columns), row after row.
CLONES void add_product(const float* x, const float* w, int64_t rows, int64_t columns, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const float by = x[r];
    for (int64_t j = 0; j < columns; ++j) out[j] += by * w[r * columns + j];
  }
}

CLONES void read_ahead(const State& c, const Head& head, const float* ahead, const int64_t* which) {
  const int64_t L = c.L, G = c.G, H = head.H, Q = head.Q, d = head.d, hidden = head.hidden;
  std::vector<float> x(d), normal(d), units(hidden), out(H);
  for (int64_t s = 0; s < c.N; ++s) {
    if (c.count[s] == 0) {
      std::fill_n(head.mean + s * H, H, std::numeric_limits<double>::quiet_NaN());
      std::fill_n(head.quantiles + s * H * Q, H * Q, std::numeric_limits<double>::quiet_NaN());
      continue;
    }
    const float *w = c.window + s * L, *times = ahead + which[s] * H * G;
    const float last = c.last[s], middle = (float)c.mean[s];
    const double unit = std::sqrt(std::max(c.variance[s], 0.0)), level = c.centre[s] + (double)last;
    const float scale = unit > 0 ? (float)unit : 1.0f;
    double total = 0, squares = 0;
    for (int64_t l = 0; l < L; ++l) x[l] = (w[l] - last) / scale;
    for (int64_t l = 0; l < L; ++l) total += x[l];
    total /= L;
    for (int64_t l = 0; l < L; ++l) squares += (x[l] - total) * (x[l] - total);
    const float rough = (float)std::max(std::sqrt(squares / L), head.quietest);
    float* own = x.data() + L;
    for (int64_t g = 0; g < G; ++g) {
      const Season& season = c.seasons[g];
      const float *W = season.W + s * season.heads * season.slots, *visits = season.visits + s * season.slots;
      for (int64_t h = 0; h < season.heads; ++h)
        for (int64_t r = 0; r < season.reads; ++r) {
          const int64_t there = (int64_t)times[r * season.stride * G + g];
          *own++ = ((visits[there] > 0 ? W[h * season.slots + there] : middle) - last) / scale;
        }
    }
    *own++ = (last - middle) / scale;
    *own++ = 1.0f;
    std::fill(out.begin(), out.end(), 0.0f);
    add_product(x.data(), head.line, d, H, out.data());
    if (hidden) {
      for (int64_t k = 0; k < d; ++k) normal[k] = (x[k] - head.shift[k]) * head.stretch[k];
      std::copy_n(head.first_bias, hidden, units.data());
      add_product(normal.data(), head.first, d, hidden, units.data());
      for (float& u : units) u = 0.5f * u * (1.0f + std::erf(u * (float)M_SQRT1_2));
      for (int64_t h = 0; h < H; ++h) out[h] += head.second_bias[h];
      add_product(units.data(), head.second, hidden, H, out.data());
    }
    const float around = std::pow(rough, head.spread);
    for (int64_t h = 0; h < H; ++h) {
      head.mean[s * H + h] = level + unit * (double)out[h];
      for (int64_t q = 0; q < Q; ++q) head.quantiles[(s * H + h) * Q + q] = level + unit * (double)(out[h] + around * head.offsets[h * Q + q]);
    }
  }
}

// weights: line, feature_mean, feature_scale, offsets, and of the network, if there is one, first, first_bias, second, second_bias;
// those of a product as (in, out). ahead (U, H, G); which (N).
void forecaster_ahead(std::vector<Tensor> state, std::vector<int64_t> strides, std::vector<int64_t> reads, std::vector<Tensor> weights,
                      double spread, double quietest, Tensor ahead, Tensor which, Tensor mean, Tensor quantiles) {
  State s = opened(state, strides.size());
  STD_TORCH_CHECK((int64_t)reads.size() == s.G && (weights.size() == 4 || weights.size() == 8), "tethys_native: not a forecaster's weights");
  Head head{};
  const int64_t H = head.H = ahead.size(1), Q = head.Q = quantiles.size(2);
  head.d = s.L + 2, head.spread = (float)spread, head.quietest = quietest;
  for (int64_t g = 0; g < s.G; ++g) {
    STD_TORCH_CHECK(strides[g] >= 1 && reads[g] >= 0 && (reads[g] == 0 || (reads[g] - 1) * strides[g] < H),
                    "tethys_native: reads beyond the horizon");
    s.seasons[g].stride = strides[g], s.seasons[g].reads = reads[g];
    head.d += s.seasons[g].heads * reads[g];
  }
  head.line = data<float>(weights[0], "line", {head.d, H});
  head.shift = data<float>(weights[1], "feature_mean", {head.d}), head.stretch = data<float>(weights[2], "feature_scale", {head.d});
  head.offsets = data<float>(weights[3], "offsets", {H, Q});
  if (weights.size() == 8) {
    head.hidden = weights[4].size(1);
    head.first = data<float>(weights[4], "first", {head.d, head.hidden}), head.first_bias = data<float>(weights[5], "bias", {head.hidden});
    head.second = data<float>(weights[6], "second", {head.hidden, H}), head.second_bias = data<float>(weights[7], "bias", {H});
  }
  head.mean = data<double>(mean, "mean", {s.N, H}), head.quantiles = data<double>(quantiles, "quantiles", {s.N, H, Q});
  read_ahead(s, head, slots_of(ahead, "ahead", s, H), within(which, "which", s.N, ahead.size(0)));
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tethys_native, m) {
  m.def(
      "forecaster_history(Tensor(a!)[] state, Tensor[] rates, float level_rows, Tensor y, Tensor observed, Tensor phase, Tensor which) -> ()");
  m.def(
      "forecaster_ahead(Tensor[] state, int[] strides, int[] reads, Tensor[] weights, float spread, float quietest, Tensor ahead, "
      "Tensor which, Tensor(a!) mean, Tensor(b!) quantiles) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tethys_native, CPU, m) {
  m.impl("forecaster_history", TORCH_BOX(&forecaster_history));
  m.impl("forecaster_ahead", TORCH_BOX(&forecaster_ahead));
}
