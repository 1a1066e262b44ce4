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

// out[r] = sum of the lanes of each(r), VL rows at a time: a transpose that adds on the way.
template <class F>
inline void fold_rows(long rows, float* out, F each) {
  long r = 0;
  for (; r + VL <= rows; r += VL) {
    R x[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) x[i] = each(r + i);
    fold_stage<VL / 2>(x);
    store(out + r, x[0]);
  }
  for (; r < rows; ++r) out[r] = sum(each(r));
}

inline R dot_lanes(const float* w, const float* x, long n) { // x padded with zeros
  R a{};
  long j = 0;
  for (; j + VL <= n; j += VL) a += load(w + j) * load(x + j);
  if (j < n) a += load_some(w + j, n - j) * load(x + j);
  return a;
}

struct StepGates {
  float theta, eta, keep;
};

// Row r of one layer: S <- eta S - theta delta x, W <- keep W + (1 - keep) init + S; returns the lanes of W . q (new or old weights).
inline R step_row(const StepGates& g, float delta, const float* x, const float* q, const float* W, const float* S, const float* init,
                  float* W1, float* S1, long n, bool old) {
  R y{};
  float step = g.theta * delta;
  for (long j = 0; j < n; j += VL) {
    long k = n - j;
    R w = load_some(W + j, k), s = g.eta * load_some(S + j, k) - step * load(x + j);
    R u = g.keep * w + s;
    if (init) u += (1 - g.keep) * load_some(init + j, k);
    store_some(S1 + j, s, k), store_some(W1 + j, u, k);
    y += (old ? w : u) * load(q + j);
  }
  return y;
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
    auto hidden = [&](const float* w, const float* x) { fold_rows(h, z, [&](long r) { return dot_lanes(w + r * d, x, d); }); };
    auto output = [&](const float* w) { fold_rows(o, z2, [&](long r) { return dot_lanes(w + r * h, a, h); }); };
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
    fold_rows(h, z, [&](long r) {
      return step_row(g[0], D1[r], k, q, W1 + r * d, S1 + r * d, I1 ? I1 + r * d : nullptr, W1o + r * d, S1o + r * d, d, old);
    });
    if (!anchored) activate(nullptr);
    fold_rows(o, z2, [&](long r) {
      return step_row(g[1], D2[r], key_features, a, W2 + r * h, S2 + r * h, I2 ? I2 + r * h : nullptr, W2o + r * h, S2o + r * h, h, old);
    });
    if (!anchored) finish();
  }
}

} // namespace
