// One token of the 2-layer memory, in the caller's own layout: every row of W and S is read once and written once, and the read-out of a
// row follows its update while it is in registers.
#pragma once
#include "deep.h"

namespace {

template <int S>
inline void fold_stage(R* x) {
#pragma GCC unroll 16
  for (int i = 0; i < S; ++i) {
    exchange<S>(x[i], x[i + S], std::make_integer_sequence<int, VL>());
    x[i] += x[i + S];
  }
  if constexpr (S > 1) fold_stage<S / 2>(x);
}

// Rows in groups of four, so that x and q are loaded once for four rows; VL rows' lanes are folded together.
template <class Four, class One>
inline void by_rows(long rows, float* out, Four four, One one) {
  long r = 0;
  for (; r + VL <= rows; r += VL) {
    R lanes[VL];
    for (int i = 0; i < VL; i += 4) four(r + i, lanes + i);
    fold_stage<VL / 2>(lanes);
    store(out + r, lanes[0]);
  }
  for (; r < rows; ++r) out[r] = sum(one(r));
}

// out[r] = W[r] . x over n columns; x padded with zeros.
__attribute__((noinline)) void dot_rows(long rows, long n, const float* W, const float* x, float* out) {
  auto one = [=](long r) {
    R a{};
    for (long j = 0; j < n; j += VL) a += load_some(W + r * n + j, n - j) * load(x + j);
    return a;
  };
  auto four = [=](long r, R* to) {
    const float* w = W + r * n;
    R a{}, b{}, c{}, d{};
    long j = 0;
    for (; j + VL <= n; j += VL) {
      R e = load(x + j);
      a += load(w + j) * e, b += load(w + n + j) * e, c += load(w + 2 * n + j) * e, d += load(w + 3 * n + j) * e;
    }
    if (j < n) {
      R e = load(x + j);
      a += load_some(w + j, n - j) * e, b += load_some(w + n + j, n - j) * e;
      c += load_some(w + 2 * n + j, n - j) * e, d += load_some(w + 3 * n + j, n - j) * e;
    }
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  };
  by_rows(rows, out, four, one);
}

struct StepGates {
  float theta, eta, keep;
};

// One layer: S <- eta S - theta delta x, W <- keep W + (1 - keep) init + S, row by row; out[r] = W[r] . q with the new weights, or the old.
template <bool Init, bool Old>
__attribute__((noinline)) void step_rows(long rows, long n, StepGates g, const float* delta, const float* x, const float* q, const float* W,
                                         const float* S, const float* init, float* W1, float* S1, float* out) {
  auto vec = [=](long at, float step, R xj, R qj, long k) { // k: numbers left in the row
    R w = load_some(W + at, k), s = g.eta * load_some(S + at, k) - step * xj;
    R u = g.keep * w + s;
    if (Init) u += (1 - g.keep) * load_some(init + at, k);
    store_some(S1 + at, s, k), store_some(W1 + at, u, k);
    return (Old ? w : u) * qj;
  };
  auto one = [=](long r) {
    R y{};
    for (long j = 0; j < n; j += VL) y += vec(r * n + j, g.theta * delta[r], load(x + j), load(q + j), n - j);
    return y;
  };
  auto four = [=](long r, R* to) {
    R a{}, b{}, c{}, d{};
    float s0 = g.theta * delta[r], s1 = g.theta * delta[r + 1], s2 = g.theta * delta[r + 2], s3 = g.theta * delta[r + 3];
    long at = r * n, j = 0;
    for (; j + VL <= n; j += VL) {
      R xj = load(x + j), qj = load(q + j);
      a += vec(at + j, s0, xj, qj, VL), b += vec(at + n + j, s1, xj, qj, VL);
      c += vec(at + 2 * n + j, s2, xj, qj, VL), d += vec(at + 3 * n + j, s3, xj, qj, VL);
    }
    if (j < n) {
      R xj = load(x + j), qj = load(q + j);
      a += vec(at + j, s0, xj, qj, n - j), b += vec(at + n + j, s1, xj, qj, n - j);
      c += vec(at + 2 * n + j, s2, xj, qj, n - j), d += vec(at + 3 * n + j, s3, xj, qj, n - j);
    }
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  };
  by_rows(rows, out, four, one);
}

void deep_step(const DeepCall& c, long begin, long end) {
  using tethys::kGateFloor;
  FlushDenormals flush;
  Scratch s;
  long d = c.din, o = c.dout, h = c.h, dp = pad(d), op = pad(o), hp = pad(h), n1 = h * d, n2 = o * h;
  float *k = s.zeros(dp), *q = s.zeros(dp), *v = s.zeros(op), *a = s.zeros(hp), *slope = s.zeros(hp), *D1 = s.zeros(hp), *z = s.zeros(hp);
  float *D2 = s.zeros(op), *u = s.zeros(op), *z2 = s.zeros(op), *ones = s.zeros(op), *scale = s.zeros(op), *shift = s.zeros(op);
  for (long x = 0; x < o; ++x) ones[x] = scale[x] = 1;
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H;
    memcpy(k, c.k.at(i, j), d * 4), memcpy(q, c.q.at(i, j), d * 4), memcpy(v, c.v.at(i, j), o * 4);
    if (c.scale) memcpy(scale, c.scale + j * o, o * 4), memcpy(shift, c.shift + j * o, o * 4);
    bool live = !c.write.p || *c.write.at(i);
    bool opens = c.phase[i] == 0;
    const float *W1 = c.W[0] + m * n1, *W2 = c.W[1] + m * n2, *S1 = c.S[0] + m * n1, *S2 = c.S[1] + m * n2;
    const float *A1 = c.A[0] + m * n1, *A2 = c.A[1] + m * n2;
    float *W1o = c.W_out[0] + m * n1, *W2o = c.W_out[1] + m * n2, *S1o = c.S_out[0] + m * n1, *S2o = c.S_out[1] + m * n2;
    float *A1o = c.A_out[0] + m * n1, *A2o = c.A_out[1] + m * n2;
    if (opens && live) A1 = W1, A2 = W2;
    if (A1o != A1) memcpy(A1o, A1, n1 * 4), memcpy(A2o, A2, n2 * 4);
    if (opens) A1 = W1, A2 = W2; // read only until the rows below are updated
    bool anchored = c.read == 2;
    auto hidden = [&](const float* w, const float* x) { dot_rows(h, d, w, x, z); };
    auto output = [&](const float* w) { dot_rows(o, h, w, a, z2); };
    auto finish = [&] { // z2 -> y
      norm_row(c, op, z2, ones, scale, shift, u, z2);
      float* y = c.y.at(i, j);
      for (long x = 0; x < op; x += VL) store_some(y + x, load(z2 + x) + (c.residual ? load(q + x) : R{}), o - x);
    };
    auto activate = [&](float* to_slope) {
      for (long x = 0; x < hp; x += VL) {
        R e = load(z + x);
        Normal p(e);
        store(a + x, p.gelu());
        if (to_slope) store(to_slope + x, p.slope());
      }
    };
    if (anchored || !live) {
      hidden(anchored ? A1 : W1, q);
      activate(nullptr);
      output(anchored ? A2 : W2);
      finish();
      if (!live) {
        if (W1o != W1)
          memcpy(W1o, W1, n1 * 4), memcpy(W2o, W2, n2 * 4), memcpy(S1o, S1, n1 * 4), memcpy(S2o, S2, n2 * 4);
        continue;
      }
    }
    hidden(A1, k);
    activate(slope);
    output(A2);
    float inverse = norm_row(c, op, z2, ones, scale, shift, u, D2);
    for (long x = 0; x < op; x += VL) {
      R e = load(D2 + x) - load(v + x);
      if (c.residual) e += load(k + x);
      store(D2 + x, e * load(scale + x));
    }
    if (c.norm) norm_row_backward(c, op, D2, ones, u, inverse);
    long x = 0;
    for (; x + 4 * VL <= h; x += 4 * VL) { // D1 = (A2^T D2) gelu'
      R b[4] = {};
      for (long r = 0; r < o; ++r)
        for (int l = 0; l < 4; ++l) b[l] += D2[r] * load(A2 + r * h + x + l * VL);
      for (int l = 0; l < 4; ++l) store(D1 + x + l * VL, b[l] * load(slope + x + l * VL));
    }
    for (; x < h; x += VL) {
      R b{};
      for (long r = 0; r < o; ++r) b += D2[r] * load_some(A2 + r * h + x, h - x);
      store(D1 + x, b * load(slope + x));
    }
    StepGates g[2];
    for (int l = 0; l < 2; ++l) {
      const float *et = c.eta.at(i, j), *al = c.alpha.at(i, j);
      g[l].theta = c.theta.at(i, j)[l * c.theta.l];
      g[l].eta = et ? (et[l * c.eta.l] < kGateFloor ? kGateFloor : et[l * c.eta.l]) : 0.0f;
      g[l].keep = al ? 1.0f - (al[l * c.alpha.l] > 1.0f - kGateFloor ? 1.0f - kGateFloor : al[l * c.alpha.l]) : 1.0f;
    }
    const float *I1 = c.init[0] ? c.init[0] + j * n1 : nullptr, *I2 = c.init[1] ? c.init[1] + j * n2 : nullptr;
    bool old = c.read == 1;
    // layer 2 needs the key's hidden features while the query's are being made
    float* key_features = slope;
    memcpy(key_features, a, hp * 4);
    auto rows = I1 ? (old ? step_rows<true, true> : step_rows<true, false>) : (old ? step_rows<false, true> : step_rows<false, false>);
    rows(h, d, g[0], D1, k, q, W1, S1, I1, W1o, S1o, z);
    if (!anchored) activate(nullptr);
    rows(o, h, g[1], D2, key_features, a, W2, S2, I2, W2o, S2o, z2);
    if (!anchored) finish();
  }
}

} // namespace
