// The 2-layer memory M(x) = [x +] [LN] (W2 gelu(W1 x)) under chunk-start gradients, in the dual form: every gradient of a chunk is an outer
// product known at the anchor, so that no token's weights are ever formed (kernels/mlp.py states the formulas).
// Inside, the state is held transposed and joined, so that one product serves both parts:
//     layer 1 stacked   [W1^T; S1^T]  (2 din x h)      read by rows [b q | f q]
//     layer 2 abreast   [W2^T | S2^T] (h x 2 dout)     read once, then combined by b, f
// and beside it I1^T, I2^T, the weights decayed towards (absent: decay to zero), read with 1 - b. A call is cut into blocks: runs of tokens
// inside one open chunk. For a backward pass every block leaves its start where it was and writes the next one behind it.
#pragma once
#include "activation.h"
#include "coefficients.h"

namespace {

using tethys::DeepCall;

struct Block {
  long t, n;      // tokens [t, t + n)
  long phase;     // written tokens of the chunk before the block
  long opened;    // the block that opened the chunk (its starting weights are the anchor), -1: the call's carried anchor
  bool keeps;     // the chunk goes on after the block, or the caller carries its anchor on
  bool last;      // the last block that writes: its anchor is the one to carry
  long written;
};

inline void blocks_of(const DeepCall& c, long stream, std::vector<Block>& out) {
  out.clear();
  long phase = c.phase[stream], t = 0, opened = -1;
  const uint8_t* write = c.write.at(stream);
  while (t < c.T) {
    Block b{t, 0, phase, phase ? opened : (long)out.size(), false, false, 0};
    while (t < c.T && b.n < c.chunk && phase < c.chunk) {
      long w = write ? write[t * c.write.t] : 1;
      phase += w, b.written += w, ++b.n, ++t;
    }
    opened = b.opened;
    b.keeps = phase < c.chunk;
    if (phase == c.chunk) phase = 0;
    out.push_back(b);
  }
  for (auto b = out.rbegin(); b != out.rend(); ++b)
    if (b->written) {
      b->keeps = b->last = true;
      break;
    }
}

// z -> x^ (into u) and the network's output LN(z) scale + shift, or z without a norm; returns 1 / sigma. `ones` masks the padding.
inline float norm_row(const DeepCall& c, long op, const float* z, const float* ones, const float* scale, const float* shift, float* u,
                      float* out) {
  if (!c.norm) {
    for (long x = 0; x < op; x += VL) store(out + x, load(z + x));
    return 1;
  }
  R s{}, q{};
  for (long x = 0; x < op; x += VL) s += load(z + x);
  float mean = sum(s) / c.dout;
  for (long x = 0; x < op; x += VL) {
    R e = (load(z + x) - mean) * load(ones + x);
    store(u + x, e);
    q += e * e;
  }
  float inverse = 1.0f / std::sqrt(sum(q) / c.dout + c.eps);
  for (long x = 0; x < op; x += VL) {
    R e = load(u + x) * inverse;
    store(u + x, e);
    store(out + x, e * load(scale + x) + load(shift + x));
  }
  return inverse;
}

// g -> (g - mean(g) - x^ mean(g x^)) / sigma, in place: the LayerNorm's backward, which is its own adjoint.
inline void norm_row_backward(const DeepCall& c, long op, float* g, const float* ones, const float* u, float inverse) {
  R s{}, p{};
  for (long x = 0; x < op; x += VL) {
    R e = load(g + x);
    s += e, p += e * load(u + x);
  }
  float mean = sum(s) / c.dout, along = sum(p) / c.dout;
  for (long x = 0; x < op; x += VL) store(g + x, (load(g + x) - mean * load(ones + x) - along * load(u + x)) * inverse);
}

struct Deep {
  const DeepCall& c;
  long d, o, h, op, hp, ldd, ldo, ldh, ld2, ldp, ldq, ldn, most; // ld2, ldp: of rows of 2 and 3 padded dout
  long parts; // 3 with init, else 2
  // state
  float *WS1, *WS2, *I1, *I2, *A1t, *A2t, *A2;
  const float *a1, *a2; // the anchor in use
  long lda2;
  // block
  float *KQ, *V, *Z, *A, *Aq, *G1, *G1q, *G2, *Z2, *U, *inv, *D1, *B1, *D2, *QB, *P2, *X1, *X2, *M1, *M2, *Kt, *At, *GK, *GD2, *Y;
  float *ones, *scale, *shift;
  Coefficients co0, co1;
  bool reads;    // per-token weights
  bool training; // keep second derivatives

  Deep(Scratch& s, const DeepCall& call, bool train)
      : c(call), d(c.din), o(c.dout), h(c.h), op(pad(o)), hp(pad(h)), ldd(odd(d)), ldo(odd(o)), ldh(odd(h)), ld2(odd(2 * op)), ldp(odd(3 * op)),
        ldq(odd(3 * d + VL)), most(c.chunk < c.T ? c.chunk : c.T), parts(c.init[0] ? 3 : 2), co0(s, most), co1(s, most), reads(c.read != 2),
        training(train) {
    long n = most;
    ldn = odd(n);
    WS1 = s.zeros(2 * d * ldh), WS2 = s.zeros(h * ld2), I1 = s.zeros(d * ldh), I2 = s.zeros(h * ldo), A1t = s.zeros(d * ldh), A2t = s.zeros(h * ldo), A2 = s.zeros(o * ldh);
    KQ = s.zeros(2 * n * ldd), V = s.zeros(n * ldo), Z = s.take(2 * n * ldh), A = s.take(3 * n * ldh), G1 = s.take(2 * n * ldh);
    G2 = train ? s.take(n * ldh) : nullptr;
    Z2 = s.take(3 * n * ldo), U = s.take(2 * n * ldo), inv = s.take(2 * n), D1 = s.take(n * ldh), D2 = s.take(3 * n * ldo);
    B1 = train ? s.take(n * ldh) : D1;
    GK = s.take(n * ldq), GD2 = s.take(n * ld2), Y = s.take(n * ldo);
    if (reads) {
      QB = s.take(n * ldq), P2 = s.take(n * ldp), X1 = s.take(n * ldn), X2 = s.take(n * ldn), M1 = s.take(n * ldn), M2 = s.take(n * ldn);
      Kt = s.take(d * ldn), At = s.take(h * ldn);
    }
    ones = s.zeros(op), scale = s.zeros(op), shift = s.zeros(op);
    for (long x = 0; x < o; ++x) ones[x] = scale[x] = 1;
  }

  const Coefficients& second() const { return c.shared ? co0 : co1; }

  void load_outer(long j) { // what all streams of a head share
    if (c.init[0]) {
      transpose(c.init[0] + j * h * d, d, h, d, I1, ldh);
      transpose(c.init[1] + j * o * h, h, o, h, I2, ldo);
    }
    if (c.scale) memcpy(scale, c.scale + j * o, o * 4), memcpy(shift, c.shift + j * o, o * 4);
  }

  void load_state(long m) {
    transpose(c.W[0] + m * h * d, d, h, d, WS1, ldh);
    transpose(c.S[0] + m * h * d, d, h, d, WS1 + d * ldh, ldh);
    transpose(c.W[1] + m * o * h, h, o, h, WS2, ld2);
    transpose(c.S[1] + m * o * h, h, o, h, WS2 + op, ld2);
  }

  void load_anchor(long m) {
    transpose(c.A[0] + m * h * d, d, h, d, A1t, ldh);
    transpose(c.A[1] + m * o * h, h, o, h, A2t, ldo);
    a1 = A1t, a2 = A2t, lda2 = ldo;
  }

  void set_coefficients(long i, long j, const Block& b) {
    for (int l = 0; l < (c.shared ? 1 : 2); ++l) {
      const float *et = c.eta.at(i, j), *al = c.alpha.at(i, j);
      (l ? co1 : co0).set(b.n, c.theta.at(i, j) + b.t * c.theta.t + l * c.theta.l, c.theta.t,
                          et ? et + b.t * c.eta.t + l * c.eta.l : nullptr, c.eta.t, al ? al + b.t * c.alpha.t + l * c.alpha.l : nullptr,
                          c.alpha.t, c.write.p ? c.write.at(i) + b.t * c.write.t : nullptr, c.write.t);
    }
  }

  void normalise(long n, const float* z, float* u, float* iv, float* out) const {
    for (long r = 0; r < n; ++r) iv[r] = norm_row(c, op, z + r * ldo, ones, scale, shift, u + r * ldo, out + r * ldo);
  }

  void norm_backward(long n, float* g, const float* u, const float* iv) const {
    for (long r = 0; r < n; ++r) norm_row_backward(c, op, g + r * ldo, ones, u + r * ldo, iv[r]);
  }

  void activate(long n, const float* z, float* a, float* slope, float* bend) const {
    for (long r = 0; r < n; ++r)
      for (long x = r * ldh; x < r * ldh + hp; x += VL) {
        R v = load(z + x);
        Normal p(v);
        store(a + x, p.gelu());
        if (slope) store(slope + x, p.slope());
        if (bend) store(bend + x, p.bend());
      }
  }

  // Inputs and deltas at the anchor (and, for read = anchor, the query side with them): A, Z2, D2, D1; R in V's place. next: tokens to the
  // block that comes after this one.
  void deltas(long i, long j, const Block& b, long next) {
    long n = b.n, t = b.t, both = reads ? n : 2 * n;
    copy_in(c.k.at(i, j) + t * c.k.t, c.k.t, n, d, KQ, ldd, next * c.k.t);
    copy_in(c.q.at(i, j) + t * c.q.t, c.q.t, n, d, KQ + n * ldd, ldd, next * c.q.t);
    copy_in(c.v.at(i, j) + t * c.v.t, c.v.t, n, o, V, ldo, next * c.v.t);
    transpose(a2, lda2, h, o, A2, ldh);
    gemm<false>(both, hp, d, KQ, ldd, a1, ldh, Z, ldh, SET);
    activate(n, Z, A, G1, G2);
    if (!reads) activate(n, Z + n * ldh, A + n * ldh, training ? G1 + n * ldh : nullptr, nullptr);
    Aq = A + n * ldh, G1q = G1 + n * ldh;
    gemm<false>(both, op, h, A, ldh, a2, lda2, Z2, ldo, SET);
    normalise(n, Z2, U, inv, D2); // the output, for now
    for (long r = 0; r < n; ++r)
      for (long x = 0; x < op; x += VL) { // R = M(k) - v, then D2 = LN'(scale R)
        R e = load(D2 + r * ldo + x) - load(V + r * ldo + x);
        if (c.residual) e += load(KQ + r * ldd + x);
        store(V + r * ldo + x, e);
        store(D2 + r * ldo + x, e * load(scale + x));
      }
    if (c.norm) norm_backward(n, D2, U, inv);
    gemm<false>(n, hp, o, D2, ldo, A2, ldh, B1, ldh, SET);
    for (long r = 0; r < n; ++r)
      for (long x = r * ldh; x < r * ldh + hp; x += VL) store(D1 + x, load(B1 + x) * load(G1 + x));
  }

  static void weigh(long n, const Coefficients& co, int after, const float* X, long ldx, float* out) {
    for (long r = 0; r < n; ++r) {
      const float* g = co.G + (r + after) * co.ld;
      long last = r / VL * VL, block = pad(r / MR * MR + MR);
      for (long x = 0; x <= last; x += VL) store(out + r * ldx + x, load(g + x) * load(X + r * ldx + x));
      for (long x = last + VL; x < block && x < ldx; x += VL) store(out + r * ldx + x, R{});
    }
  }

  // Query side under per-token weights: Z (rows n..), Aq, and Z2's rows n... X1, X2 the plain products, M1, M2 weighed.
  void read_tokens(const Block& b) {
    long n = b.n;
    int after = c.read == 0;
    const Coefficients &c1 = co0, &c2 = second();
    const float* Q = KQ + n * ldd;
    for (long r = 0; r < n; ++r) {
      float w = c1.b[r + after], f = c1.f[r + after];
      float* to = QB + r * ldq;
      long dp = pad(d);
      for (long x = 0; x < dp; x += VL) store(to + x, w * load(Q + r * ldd + x));
      for (long x = 0; x < dp; x += VL) store(to + d + x, f * load(Q + r * ldd + x));
      if (parts == 3)
        for (long x = 0; x < dp; x += VL) store(to + 2 * d + x, (1 - w) * load(Q + r * ldd + x));
    }
    float* Zq = Z + n * ldh;
    transpose(KQ, ldd, n, d, Kt, ldn);
    lower_of_product(n, d, Q, ldd, Kt, ldn, X1, ldn);
    weigh(n, c1, after, X1, ldn, M1);
    gemm<false>(n, hp, 2 * d, QB, ldq, WS1, ldh, Zq, ldh, SET);
    if (parts == 3) gemm<false>(n, hp, d, QB + 2 * d, ldq, I1, ldh, Zq, ldh, ADD);
    lower(n, hp, M1, ldn, D1, ldh, Zq, ldh, SUB);
    activate(n, Zq, Aq, training ? G1q : nullptr, nullptr);
    transpose(A, ldh, n, h, At, ldn);
    lower_of_product(n, h, Aq, ldh, At, ldn, X2, ldn);
    weigh(n, c2, after, X2, ldn, M2);
    gemm<false>(n, 2 * op, h, Aq, ldh, WS2, ld2, P2, ldp, SET);
    if (parts == 3) gemm<false>(n, op, h, Aq, ldh, I2, ldo, P2 + 2 * op, ldp, SET);
    float* z2 = Z2 + n * ldo;
    for (long r = 0; r < n; ++r) {
      float w = c2.b[r + after], f = c2.f[r + after];
      const float* p = P2 + r * ldp;
      for (long x = 0; x < op; x += VL) {
        R e = w * load(p + x) + f * load(p + op + x);
        if (parts == 3) e += (1 - w) * load(p + 2 * op + x);
        store(z2 + r * ldo + x, e);
      }
    }
    lower(n, op, M2, ldn, D2, ldo, z2, ldo, SUB);
  }

  // [g K | gs K] and [g D2 | gs D2]: the two updates' small factors
  void weigh_updates(long n) {
    const Coefficients &c1 = co0, &c2 = second();
    const float *g1 = c1.G + n * c1.ld, *s1 = c1.GS + n * c1.ld, *g2 = c2.G + n * c2.ld, *s2 = c2.GS + n * c2.ld;
    long dp = pad(d);
    for (long r = 0; r < n; ++r) {
      for (long x = 0; x < dp; x += VL) store(GK + r * ldq + x, g1[r] * load(KQ + r * ldd + x));
      for (long x = 0; x < dp; x += VL) store(GK + r * ldq + d + x, s1[r] * load(KQ + r * ldd + x));
      for (long x = 0; x < op; x += VL) {
        R e = load(D2 + r * ldo + x);
        store(GD2 + r * ld2 + x, g2[r] * e), store(GD2 + r * ld2 + op + x, s2[r] * e);
      }
    }
  }

  // Moves the state to W1 (2 din x ldh) and W2 (h x ld2), which may be where it is.
  void update(const Block& b, float* W1, float* W2) {
    long n = b.n;
    const Coefficients &c1 = co0, &c2 = second();
    if (b.keeps && b.phase == 0) { // a1, a2 point at weights that this or a later call may move
      for (long r = 0; r < d; ++r) memcpy(A1t + r * ldh, WS1 + r * ldh, hp * 4);
      for (long r = 0; r < h; ++r) memcpy(A2t + r * ldo, WS2 + r * ld2, op * 4);
      a1 = A1t, a2 = A2t, lda2 = ldo;
    }
    weigh_updates(n);
    float w = c1.b[n], f = c1.f[n], m = c1.m[n];
    for (long r = 0; r < d; ++r)
      for (long x = r * ldh; x < r * ldh + hp; x += VL) {
        R S = load(WS1 + d * ldh + x), e = w * load(WS1 + x) + f * S;
        if (parts == 3) e += (1 - w) * load(I1 + x);
        store(W1 + x, e), store(W1 + d * ldh + x, m * S);
      }
    gemm<true>(2 * d, hp, n, GK, ldq, D1, ldh, W1, ldh, SUB);
    w = c2.b[n], f = c2.f[n], m = c2.m[n];
    for (long r = 0; r < h; ++r) {
      const float* p = WS2 + r * ld2;
      for (long x = 0; x < op; x += VL) {
        R S = load(p + op + x), e = w * load(p + x) + f * S;
        if (parts == 3) e += (1 - w) * load(I2 + r * ldo + x);
        store(W2 + r * ld2 + x, e), store(W2 + r * ld2 + op + x, m * S);
      }
    }
    gemm<true>(h, 2 * op, n, A, ldh, GD2, ld2, W2, ld2, SUB);
    WS1 = W1, WS2 = W2;
  }

  void open(const Block& b) { // the anchor of a block that opens a chunk is where the weights stand
    if (b.phase == 0) a1 = WS1, a2 = WS2, lda2 = ld2;
  }
};

size_t deep_saved(const DeepCall& c) { return (size_t)(2 * c.din * odd(c.h) + c.h * odd(2 * pad(c.dout))); }

// The blocks of one memory, from and to the state in w; true if a token wrote (then A1t, A2t hold the anchor to carry). With `saved`, the
// start of every block stays there, one behind the other, and only the end comes back to where w held its state.
bool run_blocks(Deep& w, const DeepCall& c, long i, long j, const std::vector<Block>& blocks, float* saved) {
  bool wrote = false;
  size_t first = 2 * c.din * w.ldh, each = deep_saved(c);
  float *home1 = w.WS1, *home2 = w.WS2;
  if (saved) {
    memcpy(saved, home1, first * 4), memcpy(saved + first, home2, (each - first) * 4);
    w.WS1 = saved, w.WS2 = saved + first;
  }
  for (size_t at = 0; at < blocks.size(); ++at) {
    const Block& b = blocks[at];
    w.open(b);
    w.set_coefficients(i, j, b);
    w.deltas(i, j, b, b.n);
    if (w.reads) w.read_tokens(b);
    w.normalise(b.n, w.Z2 + b.n * w.ldo, w.U + b.n * w.ldo, w.inv + b.n, w.Y);
    if (c.residual)
      for (long r = 0; r < b.n; ++r)
        for (long x = 0; x < w.op; x += VL)
          store(w.Y + r * w.ldo + x, load(w.Y + r * w.ldo + x) + load(w.KQ + (b.n + r) * w.ldd + x));
    copy_out(w.Y, w.ldo, b.n, c.dout, c.y.at(i, j) + b.t * c.y.t, c.y.t);
    float *next1 = home1, *next2 = home2;
    if (saved && at + 1 < blocks.size()) next1 = saved + (at + 1) * each, next2 = next1 + first;
    if (b.written) {
      w.update(b, next1, next2), wrote = true;
    } else if (w.WS1 != next1) {
      memcpy(next1, w.WS1, first * 4), memcpy(next2, w.WS2, (each - first) * 4);
      w.WS1 = next1, w.WS2 = next2;
    }
  }
  return wrote;
}

void store_deep(const Deep& w, const DeepCall& c, long m, bool wrote) {
  long n1 = c.h * c.din, n2 = c.dout * c.h;
  transpose_exact(w.WS1, w.ldh, c.din, c.h, c.W_out[0] + m * n1, c.din);
  transpose_exact(w.WS1 + c.din * w.ldh, w.ldh, c.din, c.h, c.S_out[0] + m * n1, c.din);
  transpose_exact(w.WS2, w.ld2, c.h, c.dout, c.W_out[1] + m * n2, c.h);
  transpose_exact(w.WS2 + w.op, w.ld2, c.h, c.dout, c.S_out[1] + m * n2, c.h);
  if (wrote) {
    transpose_exact(w.A1t, w.ldh, c.din, c.h, c.A_out[0] + m * n1, c.din);
    transpose_exact(w.A2t, w.ldo, c.h, c.dout, c.A_out[1] + m * n2, c.h);
  } else {
    memmove(c.A_out[0] + m * n1, c.A[0] + m * n1, n1 * 4), memmove(c.A_out[1] + m * n2, c.A[1] + m * n2, n2 * 4);
  }
}

void deep_forward(const DeepCall& c, long begin, long end) {
  FlushDenormals flush;
  Products products(c.half);
  Scratch s;
  Deep w(s, c, false);
  std::vector<Block> blocks;
  for (long m = begin; m < end; ++m) {
    long i = m / c.H, j = m % c.H;
    w.load_outer(j);
    w.load_state(m);
    blocks_of(c, i, blocks);
    if (blocks[0].phase) w.load_anchor(m);
    store_deep(w, c, m, run_blocks(w, c, i, j, blocks, c.saved ? c.saved + m * c.blocks * deep_saved(c) : nullptr));
  }
}

} // namespace
