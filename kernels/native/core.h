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
  long B, H, T, d, h, chunk, blocks;
  int read; // 0 after, 1 before, 2 anchor
  bool norm, residual;
  float eps;
  Rows q, k, v, y;
  Gate theta, eta, alpha;
  Mask write;
  const int64_t* phase;            // (B,), may be null (all zero)
  const float *scale, *shift;      // LayerNorm affine, (H, d) through affine_h stride, or null
  long affine_h;
  const float* init[2];            // (H or 1, h, d), (H or 1, d, h) with init_h stride, or null: decay to zero
  long init_h[2];
  const float *W[2], *S[2], *A[2]; // (B, H, h, d) and (B, H, d, h) contiguous
  float *W_out[2], *S_out[2], *A_out[2];
  float* saved;                    // block-start states, or null
  // backward
  Rows dy, dq, dkey, dval;
  Gate dtheta, deta, dalpha;
  const float *dW_out[2], *dS_out[2], *dA_out[2];
  float *dW[2], *dS[2], *dA[2];
  float *dscale, *dshift;          // (B, H, d)
  float* dinit[2];                 // (B, H, h, d), (B, H, d, h)
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
  size_t (*linear_saved)(const LinearCall&); // floats a memory
  size_t (*deep_saved)(const DeepCall&);
  double (*fma)(long repeats); // runs repeats * flops-per-repeat fused multiply-adds in registers, returns the flops done
};

} // namespace tethys
