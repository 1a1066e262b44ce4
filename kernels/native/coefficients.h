// The coefficient block of one chunk and its reverse: momentum and decay as two row recurrences,
//     GS_t = eta_t GS_{t-1} + theta_t e_t       m_t = eta_t m_{t-1}
//     G_t  = keep_t G_{t-1} + GS_t              f_t = keep_t f_{t-1} + m_t        b_t = keep_t b_{t-1}
// so that W_t = b_t W_0 + f_t S_0 - sum_i G[t,i] u_i and S_t = m_t S_0 - sum_i GS[t,i] u_i. No exponential and no quotient.
// Row 0 is the state before the chunk, row t the state after token t-1. A token that does not write repeats the row before it.
#pragma once
#include "core.h"
#include "half.h"

namespace {

// A window into it is the unit vector of any place, without writing one number into a vector.
struct Unit {
  float at[2 * VL - 1] = {};
  constexpr Unit() { at[VL - 1] = 1; }
};
constexpr Unit kUnit;

struct Coefficients {
  long ld;
  float *G, *GS, *b, *f, *m;       // rows 0..n
  float *theta, *eta, *keep;       // gates of the n tokens
  uint8_t* live;

  Coefficients(Scratch& s, long n) : ld(odd(n)) {
    G = s.zeros((n + 1) * ld), GS = s.zeros((n + 1) * ld);
    b = s.take(n + 1), f = s.take(n + 1), m = s.take(n + 1);
    theta = s.take(n), eta = s.take(n), keep = s.take(n);
    live = (uint8_t*)s.take(n / 4 + 1);
  }

  // theta, eta, alpha: gate of the chunk's first token and stride; write: null or one byte a token.
  void set(long n, const float* th, long th_t, const float* et, long et_t, const float* al, long al_t, const uint8_t* write, long w_t) {
    using tethys::kGateFloor;
    b[0] = 1, f[0] = 0, m[0] = 1;
    for (long t = 0; t < n; ++t) {
      theta[t] = th[t * th_t];
      eta[t] = et ? (et[t * et_t] < kGateFloor ? kGateFloor : et[t * et_t]) : 0.0f;
      keep[t] = al ? 1.0f - (al[t * al_t] > 1.0f - kGateFloor ? 1.0f - kGateFloor : al[t * al_t]) : 1.0f;
      live[t] = write ? write[t * w_t] : 1;
      const float *g = G + t * ld, *gs = GS + t * ld;
      float *g1 = G + (t + 1) * ld, *gs1 = GS + (t + 1) * ld;
      float e = eta[t], k = keep[t], th1 = theta[t];
      if (!live[t]) e = 1, k = 1, th1 = 0;
      long last = t / VL * VL;
      // the vector of column t holds stale numbers of the last chunk beyond row t: rows are rewritten from zero there
      if (t == last) store(const_cast<float*>(g) + last, R{}), store(const_cast<float*>(gs) + last, R{});
      if (live[t]) {
        for (long j = 0; j <= last; j += VL) {
          R x = e * load(gs + j);
          if (j == last) x += th1 * load(kUnit.at + VL - 1 - (t - last));
          store(gs1 + j, x);
          store(g1 + j, k * load(g + j) + x);
        }
        m[t + 1] = e * m[t], b[t + 1] = k * b[t], f[t + 1] = k * f[t] + m[t + 1];
      } else {
        for (long j = 0; j <= last; j += VL) store(gs1 + j, load(gs + j)), store(g1 + j, load(g + j));
        m[t + 1] = m[t], b[t + 1] = b[t], f[t + 1] = f[t];
      }
    }
  }
};

// Gradients of the rows of a block, filled by the memory's backward, and turned into gradients of the gates.
struct CoefficientGradients {
  long ld;
  float *G, *b, *f; // rows 0..n like the block's
  float* GS;        // of the last row only
  float m;          // of m_n
  float *aG, *aGS;

  CoefficientGradients(Scratch& s, long n) : ld(odd(n)) {
    G = s.zeros((n + 1) * ld), GS = s.zeros(ld);
    b = s.take(n + 1), f = s.take(n + 1);
    aG = s.take(ld), aGS = s.take(ld);
    m = 0;
  }

  // Writes d theta, d eta, d alpha of the chunk's tokens (null eta, alpha: absent gates).
  void reverse(const Coefficients& c, long n, float* dth, long th_t, float* det, long et_t, float* dal, long al_t, const float* et,
               long et_s, const float* al, long al_s) {
    using tethys::kGateFloor;
    long width = pad(n);
    memset(aG, 0, width * 4);
    memset(aGS, 0, width * 4);
    float ab = 0, af = 0, am = m;
    float keep = 1, eta = 1; // gates of the token after row t + 1
    for (long j = 0; j < width; j += VL) store(aGS + j, load(GS + j));
    bool first = true;
    for (long t = n - 1; t >= 0; --t) {
      long last = t / VL * VL;
      const float* dg = G + (t + 1) * ld;
      if (!c.live[t]) { // row t + 1 is row t: its gradient joins the row before
        float* to = G + t * ld;
        for (long j = 0; j <= last; j += VL) store(to + j, (j <= (t - 1) / VL * VL && t > 0 ? load(to + j) : R{}) + load(dg + j));
        b[t] += b[t + 1], f[t] += f[t + 1];
        dth[t * th_t] = 0;
        if (det) det[t * et_t] = 0;
        if (dal) dal[t * al_t] = 0;
        continue;
      }
      ab = b[t + 1] + keep * ab;
      af = f[t + 1] + keep * af;
      am = af + (first ? am : eta * am);
      R dk{}, de{};
      const float *g = c.G + t * c.ld, *gs = c.GS + t * c.ld;
      for (long j = 0; j <= last; j += VL) {
        R x = load(dg + j) + keep * load(aG + j);
        R y = x + (first ? load(aGS + j) : eta * load(aGS + j));
        store(aG + j, x), store(aGS + j, y);
        dk += x * load(g + j), de += y * load(gs + j);
      }
      float dkeep = sum(dk) + ab * c.b[t] + af * c.f[t], deta = sum(de) + am * c.m[t];
      dth[t * th_t] = aGS[t];
      if (det) det[t * et_t] = et[t * et_s] < kGateFloor ? 0.0f : deta;
      if (dal) dal[t * al_t] = al[t * al_s] > 1.0f - kGateFloor ? 0.0f : -dkeep;
      keep = c.keep[t], eta = c.eta[t];
      first = false;
    }
  }
};

} // namespace
