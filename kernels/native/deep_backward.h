// The reverse of deep_forward, with the second-order terms through the inner gradient. Blocks run last to first, each recomputed from its
// saved start. Names: dX is the gradient of X; the state's gradients are held like the state (deep.h).
#pragma once
#include "deep.h"

namespace {

struct DeepReverse {
  Deep& w;
  const DeepCall& c;
  long d, o, h, op, hp, ldd, ldo, ldh, ld2, ldp, ldq, ldn, parts;
  float *DS1, *DS2, *DA1, *DA2; // of [W1^T; S1^T; I1^T] (3 din x ldh), [W2^T | S2^T | I2^T] (h x ldp), A1t, A2t
  float *dW1x, *dW2x, *W1x, *W2x; // transposes
  float *T, *Sx, *dD1, *dZ, *dA, *dKQ, *dD2, *Wide, *D2t, *D1t, *N1, *N2, *dscale, *dshift;
  CoefficientGradients g0, g1;
  bool held = false;    // DA1, DA2 hold something
  bool reached = false; // the last block that writes: the gradient of the carried anchor is its anchor's

  DeepReverse(Scratch& s, Deep& deep)
      : w(deep), c(deep.c), d(w.d), o(w.o), h(w.h), op(w.op), hp(w.hp), ldd(w.ldd), ldo(w.ldo), ldh(w.ldh), ld2(w.ld2), ldp(w.ldp), ldq(w.ldq), ldn(w.ldn),
        parts(w.parts), g0(s, w.most), g1(s, w.most) {
    long n = w.most;
    DS1 = s.zeros(3 * d * ldh), DS2 = s.zeros(h * ldp), DA1 = s.zeros(d * ldh), DA2 = s.zeros(h * ldo);
    dW1x = s.zeros(h * ldq), dW2x = s.zeros(3 * op * ldh), W1x = s.zeros(h * ldq), W2x = s.zeros(3 * op * ldh);
    T = s.zeros(n * ldq), Sx = s.take(n * ld2), dZ = w.Z; // the pre-activations are not needed again: G1, G2 and A hold what follows from them
    dD1 = w.reads ? s.take(n * ldh) : w.D1, dA = w.reads ? s.take(n * ldh) : w.D1; // at the anchor one place serves them in turn
    dKQ = s.take(2 * n * ldd), dD2 = s.take(n * ldo), Wide = s.take(n * ldp);
    if (w.reads) D2t = s.take(op * ldn), D1t = s.take(hp * ldn), N1 = s.take(n * ldn), N2 = s.take(n * ldn);
    dscale = s.take(op), dshift = s.take(op);
  }

  CoefficientGradients& second() { return c.shared ? g0 : g1; }

  static void add_rows(long n, long width, float* to, long ld, const float* from, long ldf) {
    for (long r = 0; r < n; ++r)
      for (long x = 0; x < width; x += VL) store(to + r * ld + x, load(to + r * ld + x) + load(from + r * ldf + x));
  }

  // dG rows of the reads, and the weighed triangle for the products: N (dZ delta^T, lower) -> -N o G; rows added to dco.
  static void triangle(long n, int after, const Coefficients& co, CoefficientGradients& dco, const float* X, float* N, long ldn) {
    for (long r = 0; r < n; ++r) {
      float* row = dco.G + (r + after) * dco.ld;
      const float* g = co.G + (r + after) * co.ld;
      long last = r / VL * VL, block = pad(r / MR * MR + MR);
      for (long x = 0; x <= last; x += VL) {
        R a = -load(N + r * ldn + x);
        store(row + x, load(row + x) + a * load(X + r * ldn + x));
        store(N + r * ldn + x, a * load(g + x));
      }
      for (long x = last + VL; x < block && x < ldn; x += VL) store(N + r * ldn + x, R{});
    }
  }

  void clear(CoefficientGradients& g, long n) {
    memset(g.G, 0, (n + 1) * g.ld * 4);
    memset(g.GS, 0, g.ld * 4);
    memset(g.b, 0, (n + 1) * 4), memset(g.f, 0, (n + 1) * 4);
    g.m = 0;
  }

  void block(long i, long j, const Block& b) {
    long n = b.n, dp = pad(d);
    const Coefficients &c1 = w.co0, &c2 = w.second();
    CoefficientGradients &h1 = g0, &h2 = second();
    clear(g0, n);
    if (!c.shared) clear(g1, n);
    // ---- the end of the block: W' = b W + f S + (1 - b) I - (g K)^T D1 and its three brothers
    w.weigh_updates(n);
    transpose(DS1, ldh, 2 * d, h, dW1x, ldq);  // h x 2 din
    transpose(DS2, ldp, h, 2 * op, dW2x + op * ldh, ldh); // rows op.. : 2 dout x h; rows 0..op are kept for A2
    gemm<false>(n, pad(2 * d), h, w.D1, ldh, dW1x, ldq, T, ldq, SET);      // D1 [dW1 | dS1]
    gemm<false>(n, 2 * op, h, w.A, ldh, DS2, ldp, Sx, ld2, SET);           // A [dW2 | dS2]
    gemm<false>(n, hp, 2 * d, w.GK, ldq, DS1, ldh, dD1, ldh, SET);         // -dD1
    const float *gw1 = c1.G + n * c1.ld, *gs1 = c1.GS + n * c1.ld, *gw2 = c2.G + n * c2.ld, *gs2 = c2.GS + n * c2.ld;
    float *dK = dKQ, *dQ = dKQ + n * ldd;
    for (long r = 0; r < n; ++r) {
      R a{}, e{};
      const float *t = T + r * ldq, *kk = w.KQ + r * ldd;
      for (long x = 0; x < dp; x += VL) { // lanes beyond din meet zeros of K
        R tw = load(t + x), ts = load(t + d + x), kx = load(kk + x);
        a += kx * tw, e += kx * ts;
        store(dK + r * ldd + x, -gw1[r] * tw - gs1[r] * ts);
      }
      h1.G[n * h1.ld + r] -= sum(a), h1.GS[r] -= sum(e);
      R a2{}, e2{};
      const float *p = Sx + r * ld2, *dd = w.D2 + r * ldo;
      for (long x = 0; x < op; x += VL) {
        R sw = load(p + x), ss = load(p + op + x), dx = load(dd + x);
        a2 += dx * sw, e2 += dx * ss;
        store(dD2 + r * ldo + x, -gw2[r] * sw - gs2[r] * ss);
      }
      h2.G[n * h2.ld + r] -= sum(a2), h2.GS[r] -= sum(e2);
      for (long x = r * ldh; x < r * ldh + hp; x += VL) store(dD1 + x, -load(dD1 + x));
      // dA's factors [dZ2 | -g D2 | -gs D2]; dZ2 follows
      for (long x = 0; x < 2 * op; x += VL) store(Wide + r * ldp + op + x, -load(w.GD2 + r * ld2 + x));
    }
    combine(d, hp, w.WS1, ldh, d * ldh, w.I1, ldh, DS1, ldh, d * ldh, c1, h1, n);
    combine(h, op, w.WS2, ld2, op, w.I2, ldo, DS2, ldp, op, c2, h2, n);

    // ---- the reads
    float *dZq = dZ + n * ldh, *dAq = dZq, *dZ2q = w.Z2 + n * ldo, *u = w.U, *uq = w.U + n * ldo;
    copy_in(c.dy.at(i, j) + b.t * c.dy.t, c.dy.t, n, o, dZ2q, ldo, -n * c.dy.t);
    for (long r = 0; r < n; ++r) {
      if (c.residual)
        for (long x = 0; x < dp; x += VL) store(dQ + r * ldd + x, load(dZ2q + r * ldo + x));
      else
        for (long x = 0; x < dp; x += VL) store(dQ + r * ldd + x, R{});
      if (c.norm)
        for (long x = 0; x < op; x += VL) {
          R e = load(dZ2q + r * ldo + x);
          store(dscale + x, load(dscale + x) + e * load(uq + r * ldo + x)), store(dshift + x, load(dshift + x) + e);
          store(dZ2q + r * ldo + x, e * load(w.scale + x));
        }
    }
    if (c.norm) w.norm_backward(n, dZ2q, uq, w.inv + n);
    int after = c.read == 0;
    memcpy(dW2x, w.A2, o * ldh * 4);
    if (w.reads) {
      const float* Q = w.KQ + n * ldd;
      // layer 2: z = b A_q W2 + f A_q S2 + (1 - b) A_q I2 - ((A_q A^T) o G) D2
      for (long r = 0; r < n; ++r) {
        float bb = c2.b[r + after], ff = c2.f[r + after];
        R sb{}, sf{};
        const float* p = w.P2 + r * ldp;
        for (long x = 0; x < op; x += VL) {
          R e = load(dZ2q + r * ldo + x), pw = load(p + x);
          if (parts == 3) pw -= load(p + 2 * op + x);
          sb += e * pw, sf += e * load(p + op + x);
          float* to = w.P2 + r * ldp + x; // the products are not needed again: their place takes the weighed gradients
          store(to, bb * e), store(to + op, ff * e);
          if (parts == 3) store(to + 2 * op, (1 - bb) * e);
        }
        h2.b[r + after] += sum(sb), h2.f[r + after] += sum(sf);
      }
      transpose(w.WS2, ld2, h, 2 * op, W2x, ldh);
      if (parts == 3) transpose(w.I2, ldo, h, op, W2x + 2 * op * ldh, ldh);
      gemm<false>(n, hp, parts * op, w.P2, ldp, W2x, ldh, dAq, ldh, SET);
      gemm<true>(h, parts * op, n, w.Aq, ldh, w.P2, ldp, DS2, ldp, ADD);
      transpose(w.D2, ldo, n, o, D2t, ldn);
      lower_of_product(n, o, dZ2q, ldo, D2t, ldn, N2, ldn);
      triangle(n, after, c2, h2, w.X2, N2, ldn);
      lower(n, hp, N2, ldn, w.A, ldh, dAq, ldh, ADD);
      gemm_zero(n, hp, dA, ldh);
      lower_transposed(n, hp, N2, ldn, w.Aq, ldh, dA, ldh, ADD);
      lower_transposed(n, op, w.M2, ldn, dZ2q, ldo, dD2, ldo, SUB);
      for (long r = 0; r < n; ++r)
        for (long x = r * ldh; x < r * ldh + hp; x += VL) store(dZq + x, load(dAq + x) * load(w.G1q + x));
      // layer 1
      transpose(w.WS1, ldh, 2 * d, h, W1x, ldq);
      if (parts == 3) transpose(w.I1, ldh, d, h, W1x + 2 * d, ldq);
      gemm<false>(n, pad(parts * d), h, dZq, ldh, W1x, ldq, T, ldq, SET); // dZq [W1 | S1 | I1]
      for (long r = 0; r < n; ++r) {
        float bb = c1.b[r + after], ff = c1.f[r + after];
        R sb{}, sf{};
        const float *t = T + r * ldq, *qq = Q + r * ldd;
        for (long x = 0; x < dp; x += VL) {
          R tw = load(t + x), ts = load(t + d + x), qx = load(qq + x), e = load(dQ + r * ldd + x) + bb * tw + ff * ts;
          if (parts == 3) {
            R ti = load(t + 2 * d + x);
            e += (1 - bb) * ti, tw -= ti;
          }
          sb += qx * tw, sf += qx * ts;
          store(dQ + r * ldd + x, e);
        }
        h1.b[r + after] += sum(sb), h1.f[r + after] += sum(sf);
      }
      gemm<true>(parts * d, hp, n, w.QB, ldq, dZq, ldh, DS1, ldh, ADD);
      transpose(w.D1, ldh, n, h, D1t, ldn);
      lower_of_product(n, h, dZq, ldh, D1t, ldn, N1, ldn);
      triangle(n, after, c1, h1, w.X1, N1, ldn);
      lower(n, dp, N1, ldn, w.KQ, ldd, dQ, ldd, ADD);
      lower_transposed(n, dp, N1, ldn, Q, ldd, dK, ldd, ADD);
      lower_transposed(n, hp, w.M1, ldn, dZq, ldh, dD1, ldh, SUB);
    } else { // z = A_q A2 at the anchor
      gemm<false>(n, hp, o, dZ2q, ldo, w.A2, ldh, dAq, ldh, SET);
      for (long r = 0; r < n; ++r)
        for (long x = r * ldh; x < r * ldh + hp; x += VL) store(dZq + x, load(dAq + x) * load(w.G1q + x));
    }

    // ---- the deltas: D1 = B1 o gelu'(Z1), B1 = D2 W2, D2 = LN'(scale R), R = [K +] LN(Z2) - V, Z2 = A W2, A = gelu(Z1)
    // rows of the joint product for dW2 at the anchor: [A; (A_q;) dB1]^T [dZ2; (dZ2q;) D2]
    long at = w.reads ? n : 2 * n;
    float *dB1 = w.reads ? w.Aq : w.A + 2 * n * ldh; // after the reads A_q is not needed again
    float *dZ2 = w.Z2, *third = w.Z2 + at * ldo;
    float* dZk = dZ;
    for (long r = 0; r < n; ++r)
      for (long x = 0; x < hp; x += VL) {
        R e = load(dD1 + r * ldh + x);
        store(dB1 + r * ldh + x, e * load(w.G1 + r * ldh + x));
        store(dZk + r * ldh + x, e * load(w.B1 + r * ldh + x) * load(w.G2 + r * ldh + x));
      }
    gemm<false>(n, op, h, dB1, ldh, w.a2, w.lda2, dD2, ldo, ADD);
    for (long r = 0; r < n; ++r) memcpy(third + r * ldo, w.D2 + r * ldo, op * 4);
    float* dv = c.dval.at(i, j) + b.t * c.dval.t;
    for (long r = 0; r < n; ++r) {
      float *dd = dD2 + r * ldo, *z = dZ2 + r * ldo;
      const float *ur = u + r * ldo, *dl = w.D2 + r * ldo, *rr = w.V + r * ldo; // V holds R
      if (c.norm) {
        R ll{}, cc{}, ee{};
        for (long x = 0; x < op; x += VL) {
          R e = load(dd + x), y = load(ur + x);
          ll += e * load(dl + x), ee += e * y, cc += load(rr + x) * load(w.scale + x) * y;
        }
        float L = sum(ll), cg = sum(cc) / o, ec = sum(ee) / o, iv = w.inv[r];
        for (long x = 0; x < op; x += VL) { // dx^ before R's own share
          R g = load(rr + x) * load(w.scale + x);
          store(z + x, -iv * (ec * g + cg * load(dd + x)) * load(w.ones + x));
        }
        norm_row_backward(c, op, dd, w.ones, ur, iv); // dg
        for (long x = 0; x < op; x += VL) {
          R g = load(dd + x), y = load(ur + x), dr = g * load(w.scale + x);
          store(dscale + x, load(dscale + x) + g * load(rr + x) + dr * y), store(dshift + x, load(dshift + x) + dr);
          store(z + x, load(z + x) + dr * load(w.scale + x));
          store(dd + x, dr);
        }
        norm_row_backward(c, op, z, w.ones, ur, iv);
        float k = -L * iv / o;
        for (long x = 0; x < op; x += VL) store(z + x, load(z + x) + k * load(ur + x));
      } else {
        for (long x = 0; x < op; x += VL) store(z + x, load(dd + x));
      }
      for (long x = 0; x < o; x += VL) store_some(dv + r * c.dval.t + x, -load(dd + x), o - x);
      if (c.residual)
        for (long x = 0; x < dp; x += VL) store(dK + r * ldd + x, load(dK + r * ldd + x) + load(dd + x));
      for (long x = 0; x < op; x += VL) store(Wide + r * ldp + x, load(z + x));
    }
    // anchor's gradients go to the weights where this block opened the chunk
    bool own = b.phase == 0;
    reached = reached || b.last;
    if (own && held && reached) {
      add_rows(d, hp, DS1, ldh, DA1, ldh), add_rows(h, op, DS2, ldp, DA2, ldo);
      memset(DA1, 0, d * ldh * 4), memset(DA2, 0, h * ldo * 4);
      held = false;
    }
    if (!own) held = true;
    float *to1 = own ? DS1 : DA1, *to2 = own ? DS2 : DA2;
    long ldt = own ? ldp : ldo;
    gemm<true>(h, op, at + n, w.A, ldh, w.Z2, ldo, to2, ldt, ADD);
    gemm<false>(n, hp, 3 * op, Wide, ldp, dW2x, ldh, dA, ldh, w.reads ? ADD : SET);
    for (long r = 0; r < n; ++r)
      for (long x = r * ldh; x < r * ldh + hp; x += VL) store(dZk + x, load(dZk + x) + load(dA + x) * load(w.G1 + x));
    long rows = w.reads ? n : 2 * n;
    transpose(w.a1, ldh, d, h, W1x, ldq);
    gemm<false>(rows, dp, h, dZ, ldh, W1x, ldq, dKQ, ldd, ADD);
    gemm<true>(d, hp, rows, w.KQ, ldd, dZ, ldh, to1, ldh, ADD);
    copy_out(dK, ldd, n, d, c.dkey.at(i, j) + b.t * c.dkey.t, c.dkey.t);
    copy_out(dQ, ldd, n, d, c.dq.at(i, j) + b.t * c.dq.t, c.dq.t);

    // ---- gates
    for (int l = 0; l < (c.shared ? 1 : 2); ++l) {
      const float *et = c.eta.at(i, j), *al = c.alpha.at(i, j);
      float *det = c.deta.at(i, j), *dal = c.dalpha.at(i, j);
      (l ? g1 : g0).reverse(l ? w.co1 : w.co0, n, c.dtheta.at(i, j) + b.t * c.dtheta.t + l * c.dtheta.l, c.dtheta.t,
                            det ? det + b.t * c.deta.t + l * c.deta.l : nullptr, c.deta.t,
                            dal ? dal + b.t * c.dalpha.t + l * c.dalpha.l : nullptr, c.dalpha.t,
                            et ? et + b.t * c.eta.t + l * c.eta.l : nullptr, c.eta.t, al ? al + b.t * c.alpha.t + l * c.alpha.l : nullptr,
                            c.alpha.t);
    }
  }

  static void gemm_zero(long n, long width, float* to, long ld) {
    for (long r = 0; r < n; ++r) memset(to + r * ld, 0, width * 4);
  }

  // W, S at W, W + step, I apart; the gradients at D, D + gstep, D + 2 gstep: dW <- b dW', dS <- f dW' + m dS', dI += (1 - b) dW'.
  void combine(long rows, long width, const float* W, long ld, long step, const float* init, long ldi, float* D, long ldg, long gstep,
               const Coefficients& co, CoefficientGradients& g, long n) const {
    float b = co.b[n], f = co.f[n], m = co.m[n];
    R sb{}, sf{}, sm{};
    for (long r = 0; r < rows; ++r, W += ld, D += ldg, init += ldi)
      for (long x = 0; x < width; x += VL) {
        R dw = load(D + x), ds = load(D + gstep + x), ww = load(W + x), ss = load(W + step + x);
        sf += dw * ss, sm += ds * ss;
        if (parts == 3) {
          ww -= load(init + x);
          store(D + 2 * gstep + x, load(D + 2 * gstep + x) + (1 - b) * dw);
        }
        sb += dw * ww;
        store(D + x, b * dw), store(D + gstep + x, f * dw + m * ds);
      }
    g.b[n] += sum(sb), g.f[n] += sum(sf), g.m += sum(sm);
  }
};

void deep_backward(const DeepCall& c, long begin, long end) {
  FlushDenormals flush;
  Products products(c.half);
  Scratch s;
  Deep w(s, c, true);
  DeepReverse g(s, w);
  std::vector<Block> blocks;
  long d = c.din, o = c.dout, h = c.h;
  size_t each = deep_saved(c), first = 2 * d * w.ldh;
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H, n1 = h * d, n2 = o * h;
    w.load_outer(j);
    blocks_of(c, i, blocks);
    transpose(c.dW_out[0] + m * n1, d, h, d, g.DS1, w.ldh), transpose(c.dS_out[0] + m * n1, d, h, d, g.DS1 + d * w.ldh, w.ldh);
    transpose(c.dW_out[1] + m * n2, h, o, h, g.DS2, w.ldp), transpose(c.dS_out[1] + m * n2, h, o, h, g.DS2 + w.op, w.ldp);
    if (c.init[0]) {
      for (long r = 0; r < d; ++r) memset(g.DS1 + (2 * d + r) * w.ldh, 0, w.hp * 4);
      for (long r = 0; r < h; ++r) memset(g.DS2 + r * w.ldp + 2 * w.op, 0, w.op * 4);
    }
    // the carried anchor is the last written block's
    transpose(c.dA_out[0] + m * n1, d, h, d, g.DA1, w.ldh), transpose(c.dA_out[1] + m * n2, h, o, h, g.DA2, w.ldo);
    g.held = true, g.reached = false;
    memset(g.dscale, 0, w.op * 4), memset(g.dshift, 0, w.op * 4);
    float* saved = c.saved + m * c.blocks * each;
    for (long at = (long)blocks.size() - 1; at >= 0; --at) {
      const Block& b = blocks[at];
      w.WS1 = saved + at * each, w.WS2 = w.WS1 + first;
      if (b.phase == 0) {
        w.open(b);
      } else if (b.opened < 0) {
        w.load_anchor(m);
      } else {
        w.a1 = saved + b.opened * each, w.a2 = w.a1 + first, w.lda2 = w.ld2;
      }
      w.set_coefficients(i, j, b);
      w.deltas(i, j, b, -b.n);
      if (w.reads) w.read_tokens(b);
      w.normalise(b.n, w.Z2 + b.n * w.ldo, w.U + b.n * w.ldo, w.inv + b.n, w.Y);
      g.block(i, j, b);
    }
    transpose_exact(g.DS1, w.ldh, d, h, c.dW[0] + m * n1, d), transpose_exact(g.DS1 + d * w.ldh, w.ldh, d, h, c.dS[0] + m * n1, d);
    transpose_exact(g.DS2, w.ldp, h, o, c.dW[1] + m * n2, h), transpose_exact(g.DS2 + w.op, w.ldp, h, o, c.dS[1] + m * n2, h);
    transpose_exact(g.DA1, w.ldh, d, h, c.dA[0] + m * n1, d), transpose_exact(g.DA2, w.ldo, h, o, c.dA[1] + m * n2, h);
    if (c.init[0]) {
      transpose_exact(g.DS1 + 2 * d * w.ldh, w.ldh, d, h, c.dinit[0] + m * n1, d);
      transpose_exact(g.DS2 + 2 * w.op, w.ldp, h, o, c.dinit[1] + m * n2, h);
    }
    if (c.scale) memcpy(c.dscale + m * o, g.dscale, o * 4), memcpy(c.dshift + m * o, g.dshift, o * 4);
  }
}

} // namespace
