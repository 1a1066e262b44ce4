// The elementwise parts of a block, row by row and in one pass each, forward and backward: the gated feed-forward, RMSNorm, rotary positions.
#pragma once
#include "layer.h"

namespace {

using tethys::RopeCall;

// h (rows, 2 n) = [gate | up] -> out (rows, n) = silu(gate) up.
void swiglu_forward(const float* h, float* out, long n, long begin, long end) {
  for (long r = begin; r < end; ++r) {
    const float *g = h + r * 2 * n, *u = g + n;
    float* o = out + r * n;
    for (long j = 0; j < n; j += VL) store_some(o + j, Logistic(load_some(g + j, n - j)).silu() * load_some(u + j, n - j), n - j);
  }
}

void swiglu_backward(const float* h, const float* dout, float* dh, long n, long begin, long end) {
  for (long r = begin; r < end; ++r) {
    const float *g = h + r * 2 * n, *u = g + n, *d = dout + r * n;
    float *dg = dh + r * 2 * n, *du = dg + n;
    for (long j = 0; j < n; j += VL) {
      Logistic s(load_some(g + j, n - j));
      R e = load_some(d + j, n - j);
      store_some(dg + j, e * load_some(u + j, n - j) * s.slope(), n - j);
      store_some(du + j, e * s.silu(), n - j);
    }
  }
}

// out = x r w with r = 1 / sqrt(mean x^2 + floor), kept for the way back.
void norm_forward(const float* x, const float* w, float* out, float* scale, long D, float floor, long begin, long end) {
  for (long r = begin; r < end; ++r) {
    const float* row = x + r * D;
    R q{};
    for (long j = 0; j < D; j += VL) {
      R e = load_some(row + j, D - j);
      q += e * e;
    }
    float s = scale[r] = 1.0f / std::sqrt(sum(q) / D + floor);
    for (long j = 0; j < D; j += VL) store_some(out + r * D + j, s * load_some(row + j, D - j) * load_some(w + j, D - j), D - j);
  }
}

// dx = r (w dy - x r^2 mean(w dy x)); dw += dy x r, over these rows.
void norm_backward(const float* x, const float* w, const float* scale, const float* dy, float* dx, float* dw, long D, long begin, long end) {
  Scratch s;
  float* total = s.zeros(pad(D));
  for (long r = begin; r < end; ++r) {
    const float *row = x + r * D, *d = dy + r * D;
    float k = scale[r];
    R along{};
    for (long j = 0; j < D; j += VL) {
      R e = load_some(d + j, D - j) * load_some(row + j, D - j);
      store(total + j, load(total + j) + k * e);
      along += e * load_some(w + j, D - j);
    }
    float back = k * k * sum(along) / D;
    for (long j = 0; j < D; j += VL)
      store_some(dx + r * D + j, k * (load_some(w + j, D - j) * load_some(d + j, D - j) - back * load_some(row + j, D - j)), D - j);
  }
  memcpy(dw, total, D * 4);
}

// Pairs (x_j, x_{j + d/2}) turned by the angles of their position; memories [begin, end) are heads of streams.
void rope(const RopeCall& c, long begin, long end) {
  long half = c.d / 2;
  for (long m = begin; m < end; ++m) {
    const float* x = c.x.at(m / c.H, m % c.H);
    float* out = c.out.at(m / c.H, m % c.H);
    for (long t = 0; t < c.T; ++t, x += c.x.t, out += c.out.t) {
      const float *cosine = c.cosine + (m / c.H * c.b + t) * half, *sine = c.sine + (m / c.H * c.b + t) * half;
      for (long j = 0; j < half; j += VL) {
        long n = half - j;
        R a = load_some(x + j, n), b = load_some(x + half + j, n), s = c.sign * load_some(sine + j, n), k = load_some(cosine + j, n);
        store_some(out + j, a * k - b * s, n), store_some(out + half + j, a * s + b * k, n);
      }
    }
  }
}

} // namespace
