// One token of a whole layer, head by head: nothing of a head leaves the nearest cache between the projections.
#pragma once
#include "deep_step.h"
#include "layer.h"
#include "linear.h"

namespace {

inline float logistic(float z) { return 1.0f / (1.0f + std::exp(-z)); }

// y += sign W x, W (d x d) row by row.
inline void times_rows(const float* W, long d, const float* x, float* y, float sign) {
  for (long r = 0; r < d; ++r, W += d) {
    R s{};
    for (long j = 0; j < d; j += VL) s += load_some(W + j, d - j) * load_some(x + j, d - j);
    y[r] += sign * sum(s);
  }
}

void layer_step(const tethys::StepCall& c, long begin, long end) {
  FlushDenormals flush;
  const HeadsCall& h = c.heads;
  long H = h.H, L = c.layers, D = H * h.d, D3 = 3 * D;
  for (long m = begin; m < end; ++m) {
    long i = m / H, j = m % H;
    heads_forward(h, m, m + 1);
    if (h.taps > 1) { // this head's channels move up by one input
      float* tail = const_cast<float*>(h.tail) + i * (h.taps - 1) * D3;
      const float* u = h.u + i * h.u_b;
      for (int part = 0; part < 3; ++part) {
        long from = part * D + j * h.d;
        for (long l = 0; l + 2 < h.taps; ++l) memcpy(tail + l * D3 + from, tail + (l + 1) * D3 + from, h.d * 4);
        memcpy(tail + (h.taps - 2) * D3 + from, u + from, h.d * 4);
      }
    }
    const float *p = c.p + i * c.p_b + 4 * D, *bias = c.bias;
    float* g = c.gates + i * 3 * H * L;
    for (long l = j * L; l < (j + 1) * L; ++l) {
      float alpha = logistic(p[l] + bias[l]), eta = logistic(p[H * L + l] + bias[H * L + l]);
      float theta = logistic(p[2 * H * L + l] + bias[2 * H * L + l]);
      g[l] = alpha, g[H * L + l] = eta, g[2 * H * L + l] = (c.momentum ? (1 - eta) * theta : theta) / c.divisor;
    }
    const float* init = c.init ? c.init + j * h.d * h.d : nullptr;
    if (init) times_rows(init, h.d, c.linear.k.at(i, j), c.linear.v.at(i, j), -1);
    if (c.matrix) linear_step(c.linear, m, m + 1);
    else deep_step(c.deep, m, m + 1);
    if (init) times_rows(init, h.d, c.linear.q.at(i, j), c.linear.y.at(i, j), 1);
    gate_forward(c.gate, m, m + 1);
  }
}

} // namespace
