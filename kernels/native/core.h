// What the bindings hand to the vector core: plain pointers and strides, no tensor type, so that the core compiles without torch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tethys {

// (B, H, T, d) float32 with unit stride in the last dimension.
struct Rows {
  float* p = nullptr;
  long b = 0, h = 0, t = 0;
  float* at(long i, long j) const { return p + i * b + j * h; }
};

// (B, H, T) or (B, H, T, L) float32 with any strides; null means "gate absent": no momentum, no decay.
struct Gate {
  float* p = nullptr;
  long b = 0, h = 0, t = 0, l = 0;
  float* at(long i, long j) const { return p ? p + i * b + j * h : nullptr; }
};

// (B, T) bool; null means every token writes.
struct Mask {
  const uint8_t* p = nullptr;
  long b = 0, t = 0;
  const uint8_t* at(long i) const { return p ? p + i * b : nullptr; }
};

// Smallest eta and smallest 1 - alpha, shared with the torch form; beyond them the gate's gradient is zero.
constexpr float kGateFloor = 1e-6f;

struct LinearCall {
  long B, H, T, dk, dv, chunk;
  bool read_before;
  bool half; // products in bfloat16 (half.h)
  Rows q, k, v, y;
  Gate theta, eta, alpha;
  Mask write;
  const float *W, *S;   // (B, H, dv, dk) contiguous
  float *W_out, *S_out; // the same; may alias W and S in a step
  float* saved;         // chunk-start states (B * H, chunks, dk, 2 * padded dv), or null
  // backward
  Rows dy, dq, dkey, dval;
  Gate dtheta, deta, dalpha;
  const float *dW_out, *dS_out;
  float *dW, *dS;
};

struct DeepCall {
  long B, H, T, din, dout, h, chunk;
  int read;     // 0 after the write, 1 before it, 2 the anchor
  bool norm, residual;
  bool half;    // products in bfloat16 (half.h)
  bool shared;  // one gate for both layers; gradients then go to layer 0 alone
  float eps;
  Rows q, k, v, y;
  Gate theta, eta, alpha;
  Mask write;
  const int64_t* phase;          // (B,)
  const float *scale, *shift;    // LayerNorm affine (H, dout), or null
  const float* init[2];          // (H, h, din), (H, dout, h), or null: decay to zero
  const float *W[2], *S[2], *A[2]; // weights, momentum, anchor: (B, H, h, din) and (B, H, dout, h) contiguous
  float *W_out[2], *S_out[2], *A_out[2];
  float* saved;                  // block-start states, `blocks` a memory, or null
  long blocks;
  // backward
  Rows dy, dq, dkey, dval;
  Gate dtheta, deta, dalpha;
  const float *dW_out[2], *dS_out[2], *dA_out[2];
  float *dW[2], *dS[2], *dA[2];
  float *dscale, *dshift;        // (B, H, dout)
  float* dinit[2];               // (B, H, h, din), (B, H, dout, h)
};

// The layer around a memory, on the way in: u = x W_qkv (B, T, 3 D) through a short causal convolution, SiLU, and rows of length `scale`
// for queries and keys.
struct HeadsCall {
  long B, H, T, d, taps;
  float scale;
  const float* u;      // (B, T, 3 D), row stride u_t
  long u_b, u_t;
  const float* tail;   // (B, taps - 1, 3 D) inputs before the first token
  const float* weight; // (taps, 3 D)
  float* out;          // (B, T, 3 D): q, k, v, each head by head
  // backward
  Rows dq, dk, dv;
  float *du, *dtail, *dweight; // (B, T, 3 D), (B, taps - 1, 3 D), (B, taps, 3 D)
};

// On the way out: o = rmsnorm_head(y) weight silu(g).
struct GateCall {
  long B, H, T, d;
  Rows y;
  const float* g; // (B, T, D), row stride g_t
  long g_b, g_t;
  const float* weight; // (d)
  float* out;          // (B, T, D)
  // backward
  const float* dout; // (B, T, D) contiguous
  Rows dy;
  float *dg, *dweight; // (B, T, D), (B, H, d)
};

// One token of a whole layer between its projections: p = x [W_qkv | W_gate | W_gates]^T (B, 4 D + 3 H L, padded) -> o (B, D), which the
// output projection takes. Tail and memory are updated in place.
struct StepCall {
  bool matrix, momentum, decay;
  bool half; // products in bfloat16 (half.h); one token is always in float32
  long layers;       // L: gates a head
  long width, wide;  // padded rows of project and output
  const float *x, *project, *output;
  const float* init; // (H, d, d) what a matrix memory decays towards: its state is the difference; null: zero
  float* y;          // (B, T, D), as x
  float* tail;
  float divisor;     // of theta
  const float* p;    // row stride p_b
  long p_b;
  const float* bias; // (3 H L): alpha, eta, theta
  float* gates;      // work, (B, 3, H, L)
  HeadsCall heads;   // out: work, (B, 3 D)
  LinearCall linear;
  DeepCall deep;
  GateCall gate;     // y: work, (B, H, 1, d)
};

// One token of attention with rotary positions, caches in place. A window slides: N slots hold the last N tokens, oldest first. A segment fills:
// slot `count` is the token's, and what a memory returned for it stands beside it.
struct AttendCall {
  long H, d, P, N;                  // persistent tokens, slots
  bool slides;
  const float* frequency;           // (d / 2)
  const float *prefix_k, *prefix_v; // (H, P, d)
  float *keys, *values;             // (B, H, N, d)
  float *context_k, *context_v;     // the same, of what was retrieved, or null
  const int64_t* count;             // (B,) tokens before this one, of the stream or of the segment
};

// One token of a block: x += mixer(rms(x)), x += down(silu(gate) up) of rms(x). Matrices as they are trained: (out, in).
struct BlockCall {
  enum Kind { kLmm, kWindow, kMag, kMal, kMac };
  int kind;
  long D, hidden;
  float* x; // (B, D)
  const float *mixer_norm, *feed_norm, *gate_up, *down;
  const float *qkv, *out;
  const float* norms[2]; // of attention and memory (MAG, MAC), or between them (MAL)
  AttendCall attend;
  const float *memory_qkv, *memory_gate, *memory_gates, *memory_out;
  StepCall memory;  // project and output are not used
  float* reading;   // (B, taps - 1, D): convolution tail of the retrieval queries
  float* anchor[2]; // W, S of a matrix memory or W1, W2 of a deep one, that are read and not written
};

// Rotary positions: x (B, H, T, d) -> out; cosine and sine (1 or B, T, d / 2). sign -1 turns back, which is the gradient.
struct RopeCall {
  long B, H, T, d, b; // b: rows of cosine from stream to stream, 0 where all are alike
  float sign;
  Rows x, out;
  const float *cosine, *sine;
};

// One table a vector width. Every function works on the memories [begin, end) of the B * H in a call.
struct Core {
  int width; // floats a vector
  void (*linear_forward)(const LinearCall&, long begin, long end);
  void (*linear_backward)(const LinearCall&, long begin, long end);
  void (*linear_step)(const LinearCall&, long begin, long end);
  void (*deep_forward)(const DeepCall&, long begin, long end);
  void (*deep_backward)(const DeepCall&, long begin, long end);
  void (*deep_step)(const DeepCall&, long begin, long end);
  void (*heads_forward)(const HeadsCall&, long begin, long end);
  void (*heads_backward)(const HeadsCall&, long begin, long end);
  void (*gate_forward)(const GateCall&, long begin, long end);
  void (*gate_backward)(const GateCall&, long begin, long end);
  void (*product)(long M, long N, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc); // N padded
  bool (*has_half)(); // whether bfloat16 products are the processor's own
  void (*matmul)(long first, long M, long N, long K, const float* A, long lda, bool ta, const float* B, long ldb, bool tb, float* C, long ldc,
                 int mode, bool half); // rows [first, first + M) of C (=, +=, -=: 0, 1, 2) op(A) op(B)
  void (*layer_step)(const StepCall&, long begin, long end);
  void (*layer_forward)(const StepCall&, long begin, long end); // streams, not memories
  void (*block_step)(const BlockCall&, long begin, long end); // streams
  void (*norm_times)(long n, long N, long D, const float* x, const float* norm, const float* W, float* y);
  void (*swiglu_forward)(const float* h, float* out, long n, long begin, long end); // rows
  void (*swiglu_backward)(const float* h, const float* dout, float* dh, long n, long begin, long end);
  void (*norm_forward)(const float* x, const float* w, float* out, float* scale, long D, float floor, long begin, long end);
  void (*norm_backward)(const float* x, const float* w, const float* scale, const float* dy, float* dx, float* dw, long D, long begin, long end);
  void (*rope)(const RopeCall&, long begin, long end);
  size_t (*linear_saved)(const LinearCall&); // floats a memory
  long (*deep_count)(const DeepCall&);       // blocks of the stream that has most
  size_t (*deep_saved)(const DeepCall&);     // floats a block
  double (*fma)(long repeats); // runs repeats * flops-per-repeat fused multiply-adds in registers, returns the flops done
};

} // namespace tethys
