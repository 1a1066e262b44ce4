// One token of a whole block of a language model, stream by stream: norms, attention over kept keys and values, the memory, the feed-forward.
// Weights are read where they lie, each row once for all streams of a call; caches and memory are changed in place.
#pragma once
#include "layer_step.h"

namespace {

using tethys::AttendCall;
using tethys::BlockCall;

// Rows of numbers padded with zeros to whole vectors, one a stream.
struct Lines {
  float* p;
  long ld;
  Lines(Scratch& s, long n, long width) : p(s.zeros(n * pad(width))), ld(pad(width)) {}
  float* operator[](long i) const { return p + i * ld; }
};

// y (n, N) = x W^T, W (N, K): a block of its rows stays in the nearest cache while every stream meets it.
inline void times(long n, long N, long K, const Lines& x, const float* W, float* y, long ldy) {
  long block = pad(4096 / K + 1);
  for (long r = 0; r < N; r += block)
    for (long i = 0; i < n; ++i) dot_rows(N - r < block ? N - r : block, K, W + r * K, x[i], y + i * ldy + r);
}

inline void rms_row(const float* x, const float* weight, long D, float* out) {
  R q{};
  for (long j = 0; j < D; j += VL) {
    R e = load_some(x + j, D - j);
    q += e * e;
  }
  float r = 1.0f / std::sqrt(sum(q) / D + kRmsFloor);
  for (long j = 0; j < D; j += VL) store_some(out + j, r * load_some(x + j, D - j) * load_some(weight + j, D - j), D - j);
}

// out = rms(y) a * sigmoid(rms(m) b): the memory as a gate on attention. y, m, out padded.
inline void gate_row(const float* y, const float* a, float* m, const float* b, long D, float* out) {
  rms_row(m, b, D, m);
  rms_row(y, a, D, out);
  for (long j = 0; j < D; j += VL) store(out + j, load(out + j) * Logistic(load(m + j)).sigmoid);
}

inline void turn(const float* x, const float* cosine, const float* sine, long half, float scale, float* out) {
  for (long j = 0; j < half; ++j) {
    float a = x[j], b = x[half + j];
    out[j] = scale * (a * cosine[j] - b * sine[j]), out[half + j] = scale * (a * sine[j] + b * cosine[j]);
  }
}

struct Span { // keys and values (n, d) that a query sees
  const float *keys, *values;
  long n;
};

// softmax(q K^T) V over the spans; q padded, scores with room for all spans and a vector.
inline void softmax_read(const Span* spans, int count, long d, const float* q, float* scores, float* y) {
  long total = 0;
  for (int s = 0; s < count; ++s) dot_rows(spans[s].n, d, spans[s].keys, q, scores + total), total += spans[s].n;
  float most = scores[0];
  for (long r = 1; r < total; ++r) most = scores[r] > most ? scores[r] : most;
  for (long r = total; r < pad(total); ++r) scores[r] = most - 100;
  R whole{};
  for (long r = 0; r < total; r += VL) {
    R e = load(scores + r) - most;
    e = power_of_two(e > -87.0f ? e : splat(-87.0f), 1.44269504088896341f);
    store(scores + r, e);
    whole += e;
  }
  float share = 1.0f / sum(whole);
  for (long x = 0; x < d; x += VL) {
    R a[4] = {};
    const float* p = scores;
    for (int s = 0; s < count; ++s) {
      const float* v = spans[s].values + x;
      long n = spans[s].n, r = 0;
      if (d - x >= VL) {
        for (; r + 4 <= n; r += 4)
          for (int l = 0; l < 4; ++l) a[l] += p[r + l] * load(v + (r + l) * d);
        for (; r < n; ++r) a[0] += p[r] * load(v + r * d);
      } else {
        for (; r < n; ++r) a[0] += p[r] * load_some(v + r * d, d - x);
      }
      p += n;
    }
    store_some(y + x, share * ((a[0] + a[1]) + (a[2] + a[3])), d - x);
  }
}

// One token of stream i. u: q, k, v (3 D); retrieved: k, v of what the memory returned for it (2 D), or null; y (D).
void attend_row(const AttendCall& c, long i, const float* u, const float* retrieved, float* y) {
  Scratch s;
  long H = c.H, d = c.d, N = c.N, D = H * d, half = d / 2, at = c.count[i];
  long before = c.slides ? (at < N ? at : N) : at;
  float *cosine = s.take(half), *sine = s.take(half), *q = s.zeros(pad(d)), *k = s.zeros(pad(d)), *scores = s.take(c.P + 2 * N + 2 + 2 * VL);
  for (long j = 0; j < half; ++j) {
    float angle = (float)at * c.frequency[j];
    cosine[j] = std::cos(angle), sine[j] = std::sin(angle);
  }
  for (long j = 0; j < H; ++j) {
    const float* v = u + 2 * D + j * d;
    turn(u + j * d, cosine, sine, half, 1.0f / std::sqrt((float)d), q);
    turn(u + D + j * d, cosine, sine, half, 1.0f, k);
    float *K = c.keys + (i * H + j) * N * d, *W = c.values + (i * H + j) * N * d;
    Span spans[3];
    int count = 0;
    if (c.P) spans[count++] = {c.prefix_k + j * c.P * d, c.prefix_v + j * c.P * d, c.P};
    if (c.slides) {
      if (before) spans[count++] = {K + (N - before) * d, W + (N - before) * d, before};
      spans[count++] = {k, v, 1};
    } else {
      memcpy(K + at * d, k, d * 4), memcpy(W + at * d, v, d * 4);
      if (retrieved) {
        float *CK = c.context_k + (i * H + j) * N * d, *CV = c.context_v + (i * H + j) * N * d;
        turn(retrieved + j * d, cosine, sine, half, 1.0f, CK + at * d);
        memcpy(CV + at * d, retrieved + D + j * d, d * 4);
        spans[count++] = {CK, CV, at + 1};
      }
      spans[count++] = {K, W, at + 1};
    }
    softmax_read(spans, count, d, q, scores, y + j * d);
    if (c.slides && N) {
      memmove(K, K + d, (N - 1) * d * 4), memcpy(K + (N - 1) * d, k, d * 4);
      memmove(W, W + d, (N - 1) * d * 4), memcpy(W + (N - 1) * d, v, d * 4);
    }
  }
}

// Queries alone, against a memory that is not written: x (n lines) -> what the memory returned (n lines).
void retrieve(const BlockCall& c, long begin, long n, const Lines& x, const Lines& out) {
  Scratch s;
  const tethys::StepCall& m = c.memory;
  const HeadsCall& h = m.heads;
  long H = h.H, d = h.d, D = H * d, D3 = 3 * D, behind = h.taps - 1;
  Lines u(s, n, D), g(s, n, D), q(s, n, D), y(s, n, D), o(s, n, D);
  times(n, D, D, x, c.memory_qkv, u.p, u.ld);
  times(n, D, D, x, c.memory_gate, g.p, g.ld);
  for (long i = 0; i < n; ++i) {
    float* tail = c.reading + (begin + i) * behind * D;
    for (long j = 0; j < D; j += VL) {
      R e = load_some(h.weight + behind * D3 + j, D - j) * load(u[i] + j);
      for (long l = 0; l < behind; ++l) e += load_some(h.weight + l * D3 + j, D - j) * load_some(tail + l * D + j, D - j);
      store(q[i] + j, Logistic(e).silu());
    }
    for (long j = 0; j < H; ++j) {
      R length{};
      for (long e = 0; e < d; e += VL) length += load_some(q[i] + j * d + e, d - e) * load_some(q[i] + j * d + e, d - e);
      float r = h.scale / std::sqrt(sum(length) + kUnitFloor);
      for (long e = 0; e < d; ++e) q[i][j * d + e] *= r;
    }
    if (behind) memmove(tail, tail + D, (behind - 1) * D * 4), memcpy(tail + (behind - 1) * D, u[i], D * 4);
  }
  static const uint8_t never = 0;
  tethys::Rows queries{q.p, q.ld, d, 0}, reads{y.p, y.ld, d, 0};
  auto fixed = [&](auto call) {
    call.B = n, call.q = call.k = call.v = queries, call.y = reads, call.write = {&never, 0, 0};
    return call;
  };
  if (m.matrix) {
    tethys::LinearCall e = fixed(m.linear);
    long size = H * d * d;
    e.W = e.W_out = c.anchor[0] + begin * size, e.S = e.S_out = c.anchor[1] + begin * size, e.read_before = false;
    linear_step(e, 0, n * H);
    if (m.init)
      for (long i = 0; i < n * H; ++i) times_rows(m.init + i % H * d * d, d, queries.at(i / H, i % H), reads.at(i / H, i % H), 1);
  } else {
    DeepCall e = fixed(m.deep);
    e.read = 0, e.phase += begin;
    for (int l = 0; l < 2; ++l) {
      e.W[l] = e.A[l] = e.S[l] = c.anchor[l] + begin * H * d * e.h;
      e.W_out[l] = e.A_out[l] = e.S_out[l] = (float*)e.W[l];
    }
    deep_step(e, 0, n * H);
  }
  GateCall gate = m.gate;
  gate.B = n, gate.y = reads, gate.g = g.p, gate.g_b = g.ld, gate.out = s.take(n * D);
  gate_forward(gate, 0, n * H);
  for (long i = 0; i < n; ++i) memcpy(o[i], gate.out + i * D, D * 4);
  times(n, D, D, o, c.memory_out, out.p, out.ld);
}

// Write and read one token of each stream: x (n lines) -> y (n lines).
void remember(const BlockCall& c, long begin, long n, const Lines& x, const Lines& y) {
  Scratch s;
  const tethys::StepCall& m = c.memory;
  long H = m.heads.H, D = H * m.heads.d;
  float* p = (float*)m.p + begin * m.p_b;
  times(n, 3 * D, D, x, c.memory_qkv, p, m.p_b);
  times(n, D, D, x, c.memory_gate, p + 3 * D, m.p_b);
  times(n, 3 * H * m.layers, D, x, c.memory_gates, p + 4 * D, m.p_b);
  layer_step(m, begin * H, (begin + n) * H);
  Lines o(s, n, D);
  for (long i = 0; i < n; ++i) memcpy(o[i], m.gate.out + (begin + i) * D, D * 4);
  times(n, D, D, o, c.memory_out, y.p, y.ld);
}

// x (n lines) -> attention's output (n lines).
void attend(const BlockCall& c, long begin, long n, const Lines& x, const Lines& y) {
  Scratch s;
  long D = c.D;
  Lines u(s, n, 3 * D), back(s, n, D), kv(s, n, 2 * D), mixed(s, n, D);
  times(n, 3 * D, D, x, c.qkv, u.p, u.ld);
  bool mac = c.kind == BlockCall::kMac;
  if (mac) {
    retrieve(c, begin, n, x, back);
    times(n, 2 * D, D, back, c.qkv + D * D, kv.p, kv.ld);
  }
  for (long i = 0; i < n; ++i) attend_row(c.attend, begin + i, u[i], mac ? kv[i] : nullptr, mixed[i]);
  times(n, D, D, mixed, c.out, y.p, y.ld);
}

// Streams [begin, end). Counters are left to the caller.
void block_step(const BlockCall& c, long begin, long end) {
  FlushDenormals flush;
  Scratch s;
  long n = end - begin, D = c.D;
  float* x = c.x + begin * D;
  Lines h(s, n, D), a(s, n, D), m(s, n, D);
  auto add = [&](const Lines& y) {
    for (long i = 0; i < n; ++i)
      for (long j = 0; j < D; j += VL) store_some(x + i * D + j, load_some(x + i * D + j, D - j) + load(y[i] + j), D - j);
  };
  for (long i = 0; i < n; ++i) rms_row(x + i * D, c.mixer_norm, D, h[i]);
  switch (c.kind) {
    case BlockCall::kLmm: remember(c, begin, n, h, a); break;
    case BlockCall::kWindow: attend(c, begin, n, h, a); break;
    case BlockCall::kMag:
    case BlockCall::kMac:
      attend(c, begin, n, h, a);
      remember(c, begin, n, c.kind == BlockCall::kMag ? h : a, m);
      for (long i = 0; i < n; ++i) gate_row(a[i], c.norms[0], m[i], c.norms[1], D, a[i]);
      break;
    case BlockCall::kMal:
      remember(c, begin, n, h, m);
      for (long i = 0; i < n; ++i) {
        for (long j = 0; j < pad(D); j += VL) store(h[i] + j, load(h[i] + j) + load(m[i] + j));
        rms_row(h[i], c.norms[0], D, h[i]);
      }
      attend(c, begin, n, h, a);
      add(m);
  }
  add(a);
  Lines wide(s, n, 2 * c.hidden), inner(s, n, c.hidden);
  for (long i = 0; i < n; ++i) rms_row(x + i * D, c.feed_norm, D, h[i]);
  times(n, 2 * c.hidden, D, h, c.gate_up, wide.p, wide.ld);
  for (long i = 0; i < n; ++i)
    for (long j = 0; j < c.hidden; j += VL)
      store(inner[i] + j, Logistic(load_some(wide[i] + j, c.hidden - j)).silu() * load_some(wide[i] + c.hidden + j, c.hidden - j));
  times(n, D, c.hidden, inner, c.down, a.p, a.ld);
  add(a);
}

// y (n, N) = rms(x) W^T: the last norm and the head.
void norm_times(long n, long N, long D, const float* x, const float* norm, const float* W, float* y) {
  Scratch s;
  Lines h(s, n, D);
  for (long i = 0; i < n; ++i) rms_row(x + i * D, norm, D, h[i]);
  times(n, N, D, h, W, y, N);
}

} // namespace
