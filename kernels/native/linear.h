// The matrix memory in the exact chunk form: e_t = W_{t-1} k_t - v_t is the true online error, found for a whole chunk by one
// unit-triangular solve, so that the size of a chunk never changes the result. Inside, the state is held transposed and side by side,
// WS = [W^T | S^T] (d_k x 2 padded d_v), so that every product runs over rows.
#pragma once
#include "coefficients.h"

namespace {

using tethys::LinearCall;

struct LinearChunk {
  long n, dk, dv, dvp, ldd, ldw, ldn, lde;
  float *KQ, *Kt, *P, *X, *E, *GE, *WS;

  LinearChunk(Scratch& s, const LinearCall& c, long most) : dk(c.dk), dv(c.dv), dvp(pad(c.dv)) {
    ldd = odd(dk), ldw = odd(2 * dvp), ldn = odd(most), lde = odd(dv);
    KQ = s.take(2 * most * ldd), Kt = s.take(dk * ldn), P = s.take(2 * most * ldw), X = s.take(2 * most * ldn);
    E = s.take(most * lde), GE = s.take(most * ldw), WS = s.zeros(dk * ldw);
    n = 0;
  }

  // Rows [K; Q], their products with the state and with K, and the errors E, from WS at the chunk's start. next: tokens to the next chunk.
  void errors(const LinearCall& c, long i, long j, long t, long tokens, const Coefficients& co, long next) {
    n = tokens;
    copy_in(c.k.at(i, j) + t * c.k.t, c.k.t, n, dk, KQ, ldd, next * c.k.t);
    copy_in(c.q.at(i, j) + t * c.q.t, c.q.t, n, dk, KQ + n * ldd, ldd, next * c.q.t);
    transpose(KQ, ldd, n, dk, Kt, ldn);
    gemm<false>(2 * n, 2 * dvp, dk, KQ, ldd, WS, ldw, P, ldw, SET);
    lower_of_product(n, dk, KQ, ldd, Kt, ldn, X, ldn);
    lower_of_product(n, dk, KQ + n * ldd, ldd, Kt, ldn, X + n * ldn, ldn);
    copy_in(c.v.at(i, j) + t * c.v.t, c.v.t, n, dv, E, lde, next * c.v.t);
    for (long r = 0; r < n; ++r) {
      const float* p = P + r * ldw;
      float b = co.b[r], f = co.f[r];
      for (long x = 0; x < dvp; x += VL) store(E + r * lde + x, b * load(p + x) + f * load(p + dvp + x) - load(E + r * lde + x));
    }
  }

  // G rows of the state before each token times K K^T. At a new vector of columns the row before is still zero there.
  static void weigh(long n, const float* G, long ldg, const float* X, long ldx, float* out, long ldo, bool before) {
    for (long r = 0; r < n; ++r) {
      const float* g = G + (before ? r : r + 1) * ldg;
      long last = r / VL * VL;
      for (long x = 0; x <= last; x += VL) store(out + r * ldo + x, load(g + x) * load(X + r * ldx + x));
      long block = pad(r / MR * MR + MR); // the products read whole blocks of rows
      for (long x = last + VL; x < block && x < ldo; x += VL) store(out + r * ldo + x, R{});
    }
  }

  void weigh_errors(const Coefficients& co) { // GE = [G_n o E | GS_n o E]
    const float *g = co.G + n * co.ld, *gs = co.GS + n * co.ld;
    for (long r = 0; r < n; ++r)
      for (long x = 0; x < dvp; x += VL) {
        R e = load(E + r * lde + x);
        store(GE + r * ldw + x, g[r] * e), store(GE + r * ldw + dvp + x, gs[r] * e);
      }
  }

  void load_state(const float* W, const float* S) {
    transpose(W, dk, dv, dk, WS, ldw);
    transpose(S, dk, dv, dk, WS + dvp, ldw);
  }
};

inline const uint8_t* mask_at(const tethys::Mask& w, long i, long t) { return w.p ? w.at(i) + t * w.t : nullptr; }

inline void set_coefficients(Coefficients& co, const LinearCall& c, long i, long j, long t, long n) {
  const float *et = c.eta.at(i, j), *al = c.alpha.at(i, j);
  co.set(n, c.theta.at(i, j) + t * c.theta.t, c.theta.t, et ? et + t * c.eta.t : nullptr, c.eta.t, al ? al + t * c.alpha.t : nullptr,
         c.alpha.t, mask_at(c.write, i, t), c.write.t);
}

size_t linear_saved(const LinearCall& c) { return (size_t)((c.T + c.chunk - 1) / c.chunk) * c.dk * 2 * pad(c.dv); }

// The chunks of one memory (stream i, head j), from and to the state in w.WS.
struct LinearForward {
  LinearChunk w;
  Coefficients co;
  float *A, *Y;

  LinearForward(Scratch& s, const LinearCall& c, long most) : w(s, c, most), co(s, most) {
    A = s.take(2 * most * w.ldn), Y = s.take(most * w.lde);
  }

  void run(const LinearCall& c, long i, long j, float* saved) {
    for (long t = 0; t < c.T; t += c.chunk) {
      long n = c.T - t < c.chunk ? c.T - t : c.chunk;
      if (saved) copy_out(w.WS, w.ldw, c.dk, 2 * w.dvp, saved, 2 * w.dvp), saved += c.dk * 2 * w.dvp;
      set_coefficients(co, c, i, j, t, n);
      w.errors(c, i, j, t, n, co, n);
      LinearChunk::weigh(n, co.G, co.ld, w.X, w.ldn, A, w.ldn, true);
      solve<false>(n, w.dvp, A, w.ldn, w.E, w.lde);
      // y = b (Q W) + f (Q S) - (G o Q K^T) E
      int after = c.read_before ? 0 : 1;
      LinearChunk::weigh(n, co.G, co.ld, w.X + n * w.ldn, w.ldn, A, w.ldn, c.read_before);
      for (long r = 0; r < n; ++r) {
        const float* p = w.P + (n + r) * w.ldw;
        float b = co.b[r + after], f = co.f[r + after];
        for (long x = 0; x < w.dvp; x += VL) store(Y + r * w.lde + x, b * load(p + x) + f * load(p + w.dvp + x));
      }
      lower(n, w.dvp, A, w.ldn, w.E, w.lde, Y, w.lde, SUB);
      copy_out(Y, w.lde, n, c.dv, c.y.at(i, j) + t * c.y.t, c.y.t);
      // WS <- decayed WS - K^T [g o E | gs o E]
      w.weigh_errors(co);
      float b = co.b[n], f = co.f[n], m = co.m[n];
      for (long r = 0; r < c.dk; ++r) {
        float* p = w.WS + r * w.ldw;
        for (long x = 0; x < w.dvp; x += VL) {
          R S = load(p + w.dvp + x);
          store(p + x, b * load(p + x) + f * S), store(p + w.dvp + x, m * S);
        }
      }
      gemm<false>(c.dk, 2 * w.dvp, n, w.Kt, w.ldn, w.GE, w.ldw, w.WS, w.ldw, SUB);
    }
  }

  void store_state(const LinearCall& c, long m) const {
    transpose_exact(w.WS, w.ldw, c.dk, c.dv, c.W_out + m * c.dv * c.dk, c.dk);
    transpose_exact(w.WS + w.dvp, w.ldw, c.dk, c.dv, c.S_out + m * c.dv * c.dk, c.dk);
  }
};

void linear_forward(const LinearCall& c, long begin, long end) {
  FlushDenormals flush;
  Products products(c.half);
  Scratch s;
  LinearForward f(s, c, c.chunk < c.T ? c.chunk : c.T);
  for (long m = begin; m < end; ++m) {
    f.w.load_state(c.W + m * c.dv * c.dk, c.S + m * c.dv * c.dk);
    f.run(c, m / c.H, m % c.H, c.saved ? c.saved + m * linear_saved(c) : nullptr);
    f.store_state(c, m);
  }
}

// Chunks in reverse; each is recomputed from its saved start.
void linear_backward(const LinearCall& c, long begin, long end) {
  FlushDenormals flush;
  Products products(c.half);
  Scratch s;
  long most = c.chunk < c.T ? c.chunk : c.T;
  LinearChunk w(s, c, most);
  Coefficients co(s, most);
  CoefficientGradients dco(s, most);
  long dk = c.dk, dvp = w.dvp, ldw = w.ldw, ldn = w.ldn, lde = w.lde, ldd = w.ldd;
  float* A = s.take(2 * most * ldn);   // G o K K^T and G o Q K^T
  float* M = s.take(2 * most * ldn);   // gradients of the two triangles
  float* D = s.take(2 * most * lde);   // [dU; dY]
  float* KD = s.take(most * ldw);      // K [dW | dS] at the chunk's end
  float* DP = s.take(2 * most * ldw);  // gradients of P
  float* Et = s.take(w.dv * ldn);
  float* DKQ = s.take(2 * most * ldd);
  float* WSt = s.take(2 * dvp * ldd), *DWSt = s.take(2 * dvp * ldd);
  float* DWS = s.zeros(dk * ldw);
  int after = c.read_before ? 0 : 1;
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H;
    transpose(c.dW_out + m * c.dv * dk, dk, c.dv, dk, DWS, ldw);
    transpose(c.dS_out + m * c.dv * dk, dk, c.dv, dk, DWS + dvp, ldw);
    const float* saved = c.saved + m * linear_saved(c);
    for (long t = (c.T - 1) / c.chunk * c.chunk; t >= 0; t -= c.chunk) {
      long n = c.T - t < c.chunk ? c.T - t : c.chunk;
      const float* start = saved + t / c.chunk * dk * 2 * dvp;
      copy_in(start, 2 * dvp, dk, 2 * dvp, w.WS, ldw, -dk * 2 * dvp);
      set_coefficients(co, c, i, j, t, n);
      w.errors(c, i, j, t, n, co, -c.chunk);
      float *AK = A, *AQ = A + most * ldn, *DU = D, *DY = D + n * lde;
      LinearChunk::weigh(n, co.G, co.ld, w.X, ldn, AK, ldn, true);
      LinearChunk::weigh(n, co.G, co.ld, w.X + n * ldn, ldn, AQ, ldn, c.read_before);
      solve<false>(n, dvp, AK, ldn, w.E, lde);
      w.weigh_errors(co);
      copy_in(c.dy.at(i, j) + t * c.dy.t, c.dy.t, n, c.dv, DY, lde, -c.chunk * c.dy.t);
      gemm<false>(n, 2 * dvp, dk, w.KQ, ldd, DWS, ldw, KD, ldw, SET);
      // dE = -(G o Q K^T)^T dY - g o K dW - gs o K dS, then dU = (I + L)^-T dE
      const float *g = co.G + n * co.ld, *gs = co.GS + n * co.ld;
      for (long r = 0; r < n; ++r) {
        R dg{}, dgs{};
        for (long x = 0; x < dvp; x += VL) {
          R kw = load(KD + r * ldw + x), ks = load(KD + r * ldw + dvp + x), e = load(w.E + r * lde + x);
          store(DU + r * lde + x, -g[r] * kw - gs[r] * ks);
          dg += e * kw, dgs += e * ks;
        }
        dco.G[n * dco.ld + r] = -sum(dg);
        dco.GS[r] = -sum(dgs);
      }
      for (long r = n; r < pad(n); ++r) dco.G[n * dco.ld + r] = dco.GS[r] = 0;
      lower_transposed(n, dvp, AQ, ldn, DY, lde, DU, lde, SUB);
      solve<true>(n, dvp, AK, ldn, DU, lde);
      // dV = -dU; gradients of P = [K; Q] [W | S]; scalars of b and f
      float* dv = c.dval.at(i, j) + t * c.dval.t;
      memset(dco.b, 0, (n + 1) * 4), memset(dco.f, 0, (n + 1) * 4);
      float *DPK = DP, *DPQ = DP + n * ldw;
      for (long r = 0; r < n; ++r) {
        R bk{}, fk{}, bq{}, fq{};
        float b0 = co.b[r], f0 = co.f[r], b1 = co.b[r + after], f1 = co.f[r + after];
        const float *pk = w.P + r * ldw, *pq = w.P + (n + r) * ldw;
        for (long x = 0; x < dvp; x += VL) {
          R du = load(DU + r * lde + x), dy = load(DY + r * lde + x);
          bk += du * load(pk + x), fk += du * load(pk + dvp + x), bq += dy * load(pq + x), fq += dy * load(pq + dvp + x);
          store(DPK + r * ldw + x, b0 * du), store(DPK + r * ldw + dvp + x, f0 * du);
          store(DPQ + r * ldw + x, b1 * dy), store(DPQ + r * ldw + dvp + x, f1 * dy);
        }
        dco.b[r] += sum(bk), dco.f[r] += sum(fk), dco.b[r + after] += sum(bq), dco.f[r + after] += sum(fq);
        for (long x = 0; x < c.dv; x += VL) store_some(dv + r * c.dval.t + x, -load(DU + r * lde + x), c.dv - x);
      }
      // triangles: -[dU; dY] E^T, against G and against the products of keys
      transpose(w.E, lde, n, w.dv, Et, ldn);
      float *MK = M, *MQ = M + n * ldn;
      lower_of_product(n, w.dv, DU, lde, Et, ldn, MK, ldn);
      lower_of_product(n, w.dv, DY, lde, Et, ldn, MQ, ldn);
      for (long r = 0; r < n; ++r) { // rows r (state before token r) from K, and r or r + 1 from Q
        long last = r / VL * VL;
        float *row0 = dco.G + r * dco.ld, *row1 = dco.G + (r + 1) * dco.ld;
        const float *g0 = co.G + r * co.ld, *gq = co.G + (r + after) * co.ld;
        const float *xk = w.X + r * ldn, *xq = w.X + (n + r) * ldn;
        float *mk = MK + r * ldn, *mq = MQ + r * ldn;
        for (long x = 0; x <= last; x += VL) {
          R a = -load(mk + x), q = -load(mq + x);
          R d0 = a * load(xk + x), d1 = q * load(xq + x);
          if (c.read_before) d0 += d1, d1 = R{};
          R old0 = r > 0 ? load(row0 + x) : R{};
          if (x > (r - 1) / VL * VL) old0 = R{};
          store(row0 + x, old0 + d0);
          if (r + 1 < n) store(row1 + x, d1);
          else store(row1 + x, load(row1 + x) + d1);
          store(mk + x, a * load(g0 + x)), store(mq + x, q * load(gq + x));
        }
        long block = pad(r / MR * MR + MR);
        for (long x = last + VL; x < block && x < ldn; x += VL) store(mk + x, R{}), store(mq + x, R{});
      }
      // dQ = dPq WS^T + MQ K ; dK = dPk WS^T - GE dWS^T + (MK + MK^T) K + MQ^T Q
      transpose(w.WS, ldw, dk, 2 * dvp, WSt, ldd);
      transpose(DWS, ldw, dk, 2 * dvp, DWSt, ldd);
      long dkp = pad(dk);
      gemm<false>(2 * n, dkp, 2 * dvp, DP, ldw, WSt, ldd, DKQ, ldd, SET);
      gemm<false>(n, dkp, 2 * dvp, w.GE, ldw, DWSt, ldd, DKQ, ldd, SUB);
      lower(n, dkp, MK, ldn, w.KQ, ldd, DKQ, ldd, ADD);
      lower(n, dkp, MQ, ldn, w.KQ, ldd, DKQ + n * ldd, ldd, ADD);
      lower_transposed(n, dkp, MK, ldn, w.KQ, ldd, DKQ, ldd, ADD);
      lower_transposed(n, dkp, MQ, ldn, w.KQ + n * ldd, ldd, DKQ, ldd, ADD);
      copy_out(DKQ, ldd, n, dk, c.dkey.at(i, j) + t * c.dkey.t, c.dkey.t);
      copy_out(DKQ + n * ldd, ldd, n, dk, c.dq.at(i, j) + t * c.dq.t, c.dq.t);
      // state
      R bn{}, fn{}, mn{};
      float b = co.b[n], f = co.f[n], mm = co.m[n];
      for (long r = 0; r < dk; ++r) {
        float *d = DWS + r * ldw, *p = w.WS + r * ldw;
        for (long x = 0; x < dvp; x += VL) {
          R dw = load(d + x), ds = load(d + dvp + x), W = load(p + x), S = load(p + dvp + x);
          bn += dw * W, fn += dw * S, mn += ds * S;
          store(d + x, b * dw), store(d + dvp + x, f * dw + mm * ds);
        }
      }
      dco.b[n] += sum(bn), dco.f[n] += sum(fn), dco.m = sum(mn);
      gemm<true>(dk, 2 * dvp, 2 * n, w.KQ, ldd, DP, ldw, DWS, ldw, ADD);
      const float *et = c.eta.at(i, j), *al = c.alpha.at(i, j);
      float *det = c.deta.at(i, j), *dal = c.dalpha.at(i, j);
      dco.reverse(co, n, c.dtheta.at(i, j) + t * c.dtheta.t, c.dtheta.t, det ? det + t * c.deta.t : nullptr, c.deta.t,
                  dal ? dal + t * c.dalpha.t : nullptr, c.dalpha.t, et ? et + t * c.eta.t : nullptr, c.eta.t,
                  al ? al + t * c.alpha.t : nullptr, c.alpha.t);
    }
    transpose_exact(DWS, ldw, dk, c.dv, c.dW + m * c.dv * dk, dk);
    transpose_exact(DWS + dvp, ldw, dk, c.dv, c.dS + m * c.dv * dk, dk);
  }
}

// One token. Each row of W and S is read once and written once: e, the update and the read of a row need no other row.
void linear_step(const LinearCall& c, long begin, long end) {
  FlushDenormals flush;
  using tethys::kGateFloor;
  long dk = c.dk, dv = c.dv, whole = dk / VL * VL;
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H;
    const float *q = c.q.at(i, j), *k = c.k.at(i, j), *v = c.v.at(i, j);
    const float *W = c.W + m * dv * dk, *S = c.S + m * dv * dk, *eta_p = c.eta.at(i, j), *al_p = c.alpha.at(i, j);
    float *W1 = c.W_out + m * dv * dk, *S1 = c.S_out + m * dv * dk, *y = c.y.at(i, j);
    bool live = !c.write.p || *c.write.at(i);
    float theta = *c.theta.at(i, j);
    float eta = eta_p ? (*eta_p < kGateFloor ? kGateFloor : *eta_p) : 0.0f;
    float keep = al_p ? 1.0f - (*al_p > 1.0f - kGateFloor ? 1.0f - kGateFloor : *al_p) : 1.0f;
    for (long r = 0; r < dv; ++r) {
      const float *w = W + r * dk, *s = S + r * dk;
      float *w1 = W1 + r * dk, *s1 = S1 + r * dk;
      R a{}, y0{};
      float e = 0, yr = 0;
      for (long x = 0; x < whole; x += VL) {
        R row = load(w + x);
        a += row * load(k + x), y0 += row * load(q + x);
      }
      e = sum(a), yr = sum(y0);
      for (long x = whole; x < dk; ++x) e += w[x] * k[x], yr += w[x] * q[x];
      if (!live) {
        if (w1 != w) memcpy(w1, w, dk * 4), memcpy(s1, s, dk * 4);
        y[r] = yr;
        continue;
      }
      float step = theta * (e - v[r]);
      R y1{};
      float tail = 0;
      for (long x = 0; x < whole; x += VL) {
        R sn = eta * load(s + x) - step * load(k + x), wn = keep * load(w + x) + sn;
        store(s1 + x, sn), store(w1 + x, wn);
        y1 += wn * load(q + x);
      }
      for (long x = whole; x < dk; ++x) {
        float sn = eta * s[x] - step * k[x], wn = keep * w[x] + sn;
        s1[x] = sn, w1[x] = wn;
        tail += wn * q[x];
      }
      y[r] = c.read_before ? yr : sum(y1) + tail;
    }
  }
}

} // namespace
