// The elementwise parts of a memory layer, each in one pass over its data instead of a dozen: between the projections and the memory, and
// between the memory and the output projection. One head of one stream is the unit of work.
#pragma once
#include "activation.h"
#include "core.h"

namespace {

using tethys::GateCall;
using tethys::HeadsCall;

constexpr float kUnitFloor = 1e-6f; // added to a squared length: a zero row stays zero
constexpr float kRmsFloor = 1e-6f;
constexpr long kTaps = 8;           // longest convolution

// Row t of the inputs, which begins with the tail.
inline const float* input_row(const HeadsCall& c, long i, long t) {
  long D3 = 3 * c.H * c.d;
  return t < 0 ? c.tail + (i * (c.taps - 1) + c.taps - 1 + t) * D3 : c.u + i * c.u_b + t * c.u_t;
}

// Convolution and SiLU of channels [from, from + d) at token t into `a`; returns the lanes of the squared length.
inline R convolve(const HeadsCall& c, const float* const* rows, long from, float* a, float* slope) {
  R length{};
  long D3 = 3 * c.H * c.d;
  for (long x = 0; x < c.d; x += VL) {
    long n = c.d - x;
    R y{};
    for (long l = 0; l < c.taps; ++l) y += load_some(c.weight + l * D3 + from + x, n) * load_some(rows[l] + from + x, n);
    Logistic s(y);
    R v = s.silu();
    store(a + x, v);
    if (slope) store(slope + x, s.slope());
    length += v * v;
  }
  return length;
}

// Four taps and heads of exactly N vectors, the common case: weights, sums and the running gradients stay in registers.
template <int N>
struct FourTaps {
  R w[4][N];

  FourTaps(const HeadsCall& c, long from) {
    for (int l = 0; l < 4; ++l)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) w[l][v] = load(c.weight + l * 3 * c.H * c.d + from + v * VL);
  }

  // rows: the four inputs, oldest first, at the head's channels
  void convolve(const float* const* rows, R* y) const {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      y[v] = R{};
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) y[v] += w[l][v] * load(rows[l] + v * VL);
    }
  }

  static void forward(const HeadsCall& c, long i, long from, bool unit) {
    FourTaps k(c, from);
    long D3 = 3 * c.H * c.d;
    const float* rows[4] = {nullptr, input_row(c, i, -3) + from, input_row(c, i, -2) + from, input_row(c, i, -1) + from};
    float* out = c.out + i * c.T * D3 + from;
    for (long t = 0; t < c.T; ++t, out += D3) {
      rows[0] = rows[1], rows[1] = rows[2], rows[2] = rows[3], rows[3] = c.u + i * c.u_b + t * c.u_t + from;
      R y[N], length{};
      k.convolve(rows, y);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) y[v] = Logistic(y[v]).silu(), length += y[v] * y[v];
      float r = unit ? c.scale / std::sqrt(sum(length) + kUnitFloor) : 1.0f;
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) store(out + v * VL, r * y[v]);
    }
  }

  static void backward(const HeadsCall& c, long i, long from, bool unit, const float* dy, long dy_t) {
    FourTaps k(c, from);
    long D3 = 3 * c.H * c.d;
    R dw[4][N], ring[3][N]; // ring[j]: gradient of the convolution's output at token t + 1 + j
    for (int v = 0; v < N; ++v) {
      for (int l = 0; l < 4; ++l) dw[l][v] = R{};
      for (int l = 0; l < 3; ++l) ring[l][v] = R{};
    }
    auto push = [&](float* du, const R* now) { // the input of this token met tap 3 now, tap 2 one token later, ...
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        store(du + v * VL, k.w[3][v] * now[v] + k.w[2][v] * ring[0][v] + k.w[1][v] * ring[1][v] + k.w[0][v] * ring[2][v]);
        ring[2][v] = ring[1][v], ring[1][v] = ring[0][v], ring[0][v] = now[v];
      }
    };
    for (long t = c.T - 1; t >= 0; --t) {
      const float* rows[4];
      for (int l = 0; l < 4; ++l) rows[l] = (t + l >= 3 ? c.u + i * c.u_b + (t + l - 3) * c.u_t : input_row(c, i, t + l - 3)) + from;
      R a[N], g[N], length{}, along{};
      k.convolve(rows, a);
      const float* d = dy + t * dy_t;
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        Logistic s(a[v]);
        a[v] = s.silu(), g[v] = s.slope();
        length += a[v] * a[v], along += a[v] * load(d + v * VL);
      }
      float r = 1, back = 0;
      if (unit) {
        float r2 = 1.0f / (sum(length) + kUnitFloor);
        r = c.scale * std::sqrt(r2), back = r2 * sum(along);
      }
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        g[v] *= r * (load(d + v * VL) - back * a[v]);
#pragma GCC unroll 4
        for (int l = 0; l < 4; ++l) dw[l][v] += g[v] * load(rows[l] + v * VL);
      }
      push(c.du + (i * c.T + t) * D3 + from, g);
    }
    R none[N] = {};
    for (long t = 2; t >= 0; --t) push(c.dtail + (i * 3 + t) * D3 + from, none);
    for (int l = 0; l < 4; ++l)
      for (int v = 0; v < N; ++v) store(c.dweight + (i * 4 + l) * D3 + from + v * VL, dw[l][v]);
  }
};

// The number of vectors of a head that FourTaps serves, or 0.
inline long four_taps(const HeadsCall& c) {
  long n = c.d / VL;
  return c.taps == 4 && c.d % VL == 0 && (n == 1 || n == 2 || n == 4) ? n : 0;
}

void heads_forward(const HeadsCall& c, long begin, long end) {
  FlushDenormals flush;
  if (long n = four_taps(c)) {
    auto run = n == 1 ? FourTaps<1>::forward : n == 2 ? FourTaps<2>::forward : FourTaps<4>::forward;
    for (long m = begin; m < end; ++m)
      for (int part = 0; part < 3; ++part) run(c, m / c.H, part * c.H * c.d + m % c.H * c.d, part < 2);
    return;
  }
  Scratch s;
  long D = c.H * c.d;
  float* a = s.zeros(pad(c.d));
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H;
    for (long t = 0; t < c.T; ++t) {
      const float* rows[kTaps];
      for (long l = 0; l < c.taps; ++l) rows[l] = input_row(c, i, t - (c.taps - 1) + l);
      float* out = c.out + (i * c.T + t) * 3 * D + j * c.d;
      for (int part = 0; part < 3; ++part) {
        R length = convolve(c, rows, part * D + j * c.d, a, nullptr);
        float r = part < 2 ? c.scale / std::sqrt(sum(length) + kUnitFloor) : 1.0f;
        for (long x = 0; x < c.d; x += VL) store_some(out + part * D + x, r * load(a + x), c.d - x);
      }
    }
  }
}

// One vector of channels over n tokens: dc (n + taps - 1 rows, the last ones of the tokens behind) and the inputs give du and dw.
// Input t meets tap l in the output of token t + taps - 1 - l.
template <int Taps>
inline void convolve_backward(const HeadsCall& c, long i, long t0, long n, long from, long width, const float* dc, long ld, float* dw) {
  long taps = Taps ? Taps : c.taps, D3 = 3 * c.H * c.d;
  constexpr long most = Taps ? Taps : kTaps;
  R w[most] = {}, sum[most] = {};
#pragma GCC unroll 8
  for (long l = 0; l < taps; ++l) w[l] = load_some(c.weight + l * D3 + from, width), sum[l] = load(dw + l * VL);
  for (long t = 0; t < n; ++t) {
    R e{}, now = load(dc + t * ld);
#pragma GCC unroll 8
    for (long l = 0; l < taps; ++l) {
      e += w[l] * load(dc + (t + taps - 1 - l) * ld);
      sum[l] += now * load_some(input_row(c, i, t0 + t - (taps - 1) + l) + from, width);
    }
    store_some(c.du + (i * c.T + t0 + t) * D3 + from, e, width);
  }
#pragma GCC unroll 8
  for (long l = 0; l < taps; ++l) store(dw + l * VL, sum[l]);
}

void heads_backward(const HeadsCall& c, long begin, long end) {
  FlushDenormals flush;
  if (long n = four_taps(c)) {
    auto run = n == 1 ? FourTaps<1>::backward : n == 2 ? FourTaps<2>::backward : FourTaps<4>::backward;
    for (long m = begin; m < end; ++m)
      for (int part = 0; part < 3; ++part) {
        const tethys::Rows& g = part == 0 ? c.dq : part == 1 ? c.dk : c.dv;
        run(c, m / c.H, part * c.H * c.d + m % c.H * c.d, part < 2, g.at(m / c.H, m % c.H), g.t);
      }
    return;
  }
  Scratch s;
  constexpr long most = 128; // tokens a pass: their gradients stay in the nearest cache
  long D = c.H * c.d, D3 = 3 * D, dp = pad(c.d), ld = odd(c.d), behind = c.taps - 1;
  float *a = s.zeros(dp), *slope = s.zeros(dp), *dc = s.take((most + kTaps) * ld), *dw = s.take(kTaps * dp);
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H;
    for (int part = 0; part < 3; ++part) {
      const tethys::Rows& g = part == 0 ? c.dq : part == 1 ? c.dk : c.dv;
      long from = part * D + j * c.d;
      memset(dw, 0, kTaps * dp * 4);
      memset(dc, 0, kTaps * ld * 4); // no tokens behind the last
      for (long t0 = (c.T - 1) / most * most; t0 >= 0; t0 -= most) {
        long n = c.T - t0 < most ? c.T - t0 : most;
        for (long l = behind - 1; l >= 0; --l) memmove(dc + (n + l) * ld, dc + l * ld, dp * 4);
        for (long t = 0; t < n; ++t) {
          const float* rows[kTaps];
          for (long l = 0; l < c.taps; ++l) rows[l] = input_row(c, i, t0 + t - behind + l);
          const float* dy = g.at(i, j) + (t0 + t) * g.t;
          R length = convolve(c, rows, from, a, slope), along{};
          float r = 1, back = 0;
          if (part < 2) {
            float r2 = 1.0f / (sum(length) + kUnitFloor);
            for (long x = 0; x < c.d; x += VL) along += load(a + x) * load_some(dy + x, c.d - x);
            r = c.scale * std::sqrt(r2), back = r2 * sum(along);
          }
          for (long x = 0; x < c.d; x += VL)
            store(dc + t * ld + x, r * (load_some(dy + x, c.d - x) - back * load(a + x)) * load(slope + x));
        }
        for (long x = 0; x < c.d; x += VL) {
          auto pass = c.taps == 4 ? convolve_backward<4> : convolve_backward<0>;
          pass(c, i, t0, n, from + x, c.d - x, dc + x, ld, dw + x / VL * kTaps * VL);
        }
      }
      for (long t = -behind; t < 0; ++t) { // the tail's own gradients, from the first tokens
        float* du = c.dtail + (i * behind + behind + t) * D3 + from;
        for (long x = 0; x < c.d; x += VL) {
          R e{};
          for (long l = 0; l <= behind + t; ++l) {
            long token = t + behind - l;
            if (token < c.T) e += load_some(c.weight + l * D3 + from + x, c.d - x) * load(dc + token * ld + x);
          }
          store_some(du + x, e, c.d - x);
        }
      }
      for (long l = 0; l < c.taps; ++l)
        for (long x = 0; x < c.d; x += VL)
          store_some(c.dweight + (i * c.taps + l) * D3 + from + x, load(dw + x / VL * kTaps * VL + l * VL), c.d - x);
    }
  }
}

void gate_forward(const GateCall& c, long begin, long end) {
  FlushDenormals flush;
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H, D = c.H * c.d;
    for (long t = 0; t < c.T; ++t) {
      const float *y = c.y.at(i, j) + t * c.y.t, *g = c.g + i * c.g_b + t * c.g_t + j * c.d;
      float* out = c.out + (i * c.T + t) * D + j * c.d;
      R q{};
      for (long x = 0; x < c.d; x += VL) {
        R v = load_some(y + x, c.d - x);
        q += v * v;
      }
      float r = 1.0f / std::sqrt(sum(q) / c.d + kRmsFloor);
      for (long x = 0; x < c.d; x += VL) {
        long n = c.d - x;
        store_some(out + x, r * load_some(y + x, n) * load_some(c.weight + x, n) * Logistic(load_some(g + x, n)).silu(), n);
      }
    }
  }
}

void gate_backward(const GateCall& c, long begin, long end) {
  FlushDenormals flush;
  Scratch s;
  long dp = pad(c.d);
  float *dw = s.take(dp), *e = s.take(dp);
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H, D = c.H * c.d;
    memset(dw, 0, dp * 4);
    for (long t = 0; t < c.T; ++t) {
      const float *y = c.y.at(i, j) + t * c.y.t, *g = c.g + i * c.g_b + t * c.g_t + j * c.d;
      const float* dout = c.dout + (i * c.T + t) * D + j * c.d;
      float *dy = c.dy.at(i, j) + t * c.dy.t, *dg = c.dg + (i * c.T + t) * D + j * c.d;
      R q{};
      for (long x = 0; x < c.d; x += VL) {
        R v = load_some(y + x, c.d - x);
        q += v * v;
      }
      float r = 1.0f / std::sqrt(sum(q) / c.d + kRmsFloor);
      R along{};
      for (long x = 0; x < c.d; x += VL) {
        long n = c.d - x;
        Logistic z(load_some(g + x, n));
        R o = load_some(dout + x, n), v = load_some(y + x, n), w = load_some(c.weight + x, n), u = r * v;
        store_some(dg + x, o * u * w * z.slope(), n);
        R k = o * z.silu();
        store(dw + x, load(dw + x) + k * u);
        k *= w;
        store(e + x, k);
        along += k * v;
      }
      float k = r * r * sum(along) / c.d;
      for (long x = 0; x < c.d; x += VL) store_some(dy + x, r * (load(e + x) - k * load_some(y + x, c.d - x)), c.d - x);
    }
    for (long x = 0; x < c.d; x += VL) store_some(c.dweight + m * c.d + x, load(dw + x), c.d - x);
  }
}

} // namespace
