// A whole layer over many tokens without autograd, a tile of tokens at a time: between the projections nothing leaves the second cache.
#pragma once
#include "deep.h"
#include "layer.h"
#include "linear.h"

namespace {

constexpr long kTile = 64; // tokens: a tile of projections is then a quarter of a megabyte at width 256

// Streams [begin, end). State and tail in place; phase is left to the caller, who knows T.
void layer_forward(const tethys::StepCall& call, long begin, long end) {
  FlushDenormals flush;
  Products products(call.half);
  Scratch s;
  tethys::StepCall c = call;
  HeadsCall& h = c.heads;
  long H = h.H, L = c.layers, d = h.d, D = H * d, D3 = 3 * D, T = h.T, behind = h.taps - 1, gates = 3 * H * L, gw = pad(gates);
  long chunk = c.matrix ? c.linear.chunk : c.deep.chunk, tile = chunk < kTile ? kTile / chunk * chunk : kTile;
  if (tile > T) tile = T;
  float *p = s.take(tile * c.width), *qkv = s.take(tile * D3), *g = s.take(tile * gw), *read = s.take(tile * D), *o = s.take(tile * D);
  float *result = s.take(tile * c.wide), *tail = s.zeros((behind + 1) * D3), *bias = s.zeros(gw);
  memcpy(bias, c.bias, gates * 4);
  auto rows = [&](float* at, long stride) { return tethys::Rows{at, 0, d, stride}; };
  auto gate = [&](long part) { return tethys::Gate{g + part * H * L, 0, L, gw, 1}; };
  auto fill = [&](auto& m) {
    m.B = 1, m.q = rows(qkv, D3), m.k = rows(qkv + D, D3), m.v = rows(qkv + 2 * D, D3), m.y = rows(read, D);
    m.theta = gate(2), m.eta = c.momentum ? gate(1) : tethys::Gate{}, m.alpha = c.decay ? gate(0) : tethys::Gate{};
    m.write = {}, m.saved = nullptr;
    m.T = tile;
  };
  const int64_t* phases = c.deep.phase;
  int64_t phase = 0;
  fill(c.linear), fill(c.deep);
  c.deep.phase = &phase;
  // one memory's working arrays serve all heads; only the states are kept apart
  LinearForward* linear = nullptr;
  Deep* deep = nullptr;
  alignas(LinearForward) char linear_room[sizeof(LinearForward)];
  alignas(Deep) char deep_room[sizeof(Deep)];
  struct Held {
    float *WS, *WS1, *WS2, *I1, *I2, *A1t, *A2t;
    bool wrote;
  };
  std::vector<Held> held(H);
  if (c.matrix) {
    linear = new (linear_room) LinearForward(s, c.linear, chunk < tile ? chunk : tile);
    for (auto& e : held) e.WS = s.zeros(d * linear->w.ldw);
  } else {
    deep = new (deep_room) Deep(s, c.deep, false);
    for (auto& e : held)
      e = {nullptr, s.zeros(2 * d * deep->ldh), s.zeros(c.deep.h * deep->ld2), s.zeros(d * deep->ldh), s.zeros(c.deep.h * deep->ldo),
           s.zeros(d * deep->ldh), s.zeros(c.deep.h * deep->ldo), false};
  }
  auto use = [&](long j) {
    if (linear) {
      linear->w.WS = held[j].WS;
    } else {
      const Held& e = held[j];
      deep->WS1 = e.WS1, deep->WS2 = e.WS2, deep->I1 = e.I1, deep->I2 = e.I2, deep->A1t = e.A1t, deep->A2t = e.A2t;
    }
  };
  std::vector<Block> blocks;
  h.B = 1, h.u_b = 0, h.u = p, h.u_t = c.width, h.out = qkv, h.tail = tail;
  c.gate.B = 1, c.gate.y = rows(read, D), c.gate.g = p + D3, c.gate.g_b = 0, c.gate.g_t = c.width, c.gate.out = o;
  for (long i = begin; i < end; ++i) {
    float* own = c.tail + i * behind * D3;
    memcpy(tail, own, behind * D3 * 4);
    if (!c.matrix) phase = phases[i];
    for (long j = 0; j < H; ++j) {
      use(j);
      if (linear) {
        linear->w.load_state(c.linear.W + (i * H + j) * d * d, c.linear.S + (i * H + j) * d * d);
      } else {
        deep->load_outer(j), deep->load_state(i * H + j);
        if (phase) deep->load_anchor(i * H + j);
        held[j].wrote = false;
      }
    }
    for (long t = 0; t < T; t += tile) {
      long n = T - t < tile ? T - t : tile;
      gemm<false>(n, pad(4 * D + gates), D, c.x + (i * T + t) * D, D, c.project, c.width, p, c.width, SET);
      for (long r = 0; r < n; ++r) {
        float* to = g + r * gw;
        for (long x = 0; x < gw; x += VL) store(to + x, Logistic(load(p + r * c.width + 4 * D + x) + load(bias + x)).sigmoid);
        for (long x = 0; x < H * L; ++x) to[2 * H * L + x] *= (c.momentum ? 1 - to[H * L + x] : 1.0f) / c.divisor;
      }
      h.T = n;
      heads_forward(h, 0, H);
      if (n >= behind)
        for (long l = 0; l < behind; ++l) memcpy(tail + l * D3, p + (n - behind + l) * c.width, D3 * 4);
      else
        for (long l = 0; l < behind; ++l)
          memmove(tail + l * D3, l + n < behind ? tail + (l + n) * D3 : p + (l + n - behind) * c.width, D3 * 4);
      c.linear.T = c.deep.T = n;
      if (!c.matrix) blocks_of(c.deep, 0, blocks);
      for (long j = 0; j < H; ++j) {
        use(j);
        if (linear) {
          const float* init = c.init ? c.init + j * d * d : nullptr;
          float* head = qkv + j * d;
          if (init) matmul(0, n, d, d, head + D, D3, false, init, d, true, head + 2 * D, D3, SUB, c.half);
          linear->run(c.linear, 0, j, nullptr);
          if (init) matmul(0, n, d, d, head, D3, false, init, d, true, read + j * d, D, ADD, c.half);
        } else {
          if (phase) deep->a1 = deep->A1t, deep->a2 = deep->A2t, deep->lda2 = deep->ldo;
          if (c.deep.scale) memcpy(deep->scale, c.deep.scale + j * d, d * 4), memcpy(deep->shift, c.deep.shift + j * d, d * 4);
          held[j].wrote |= run_blocks(*deep, c.deep, 0, j, blocks, nullptr);
        }
      }
      if (!c.matrix) phase = (phase + n) % chunk;
      c.gate.T = n;
      gate_forward(c.gate, 0, H);
      if (D % VL == 0) {
        gemm<false>(n, D, D, o, D, c.output, c.wide, c.y + (i * T + t) * D, D, SET);
      } else {
        gemm<false>(n, c.wide, D, o, D, c.output, c.wide, result, c.wide, SET);
        for (long r = 0; r < n; ++r) memcpy(c.y + (i * T + t + r) * D, result + r * c.wide, D * 4);
      }
    }
    memcpy(own, tail, behind * D3 * 4);
    for (long j = 0; j < H; ++j) {
      use(j);
      if (linear) linear->store_state(c.linear, i * H + j);
      else store_deep(*deep, c.deep, i * H + j, held[j].wrote);
    }
  }
}

} // namespace
