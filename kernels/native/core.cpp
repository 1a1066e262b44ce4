// One vector width of the core. build.py compiles this file once a width: TETHYS_WIDTH floats a vector, TETHYS_CORE the table's name.
#include "core.h"
#include "block_step.h"
#include "linear.h"
#include "deep_step.h"
#include "deep_backward.h"
#include "layer.h"
#include "layer_forward.h"
#include "layer_step.h"
#include "elementwise.h"

namespace {

double fma(long repeats) { // 12 independent accumulators hide the latency of two units, and fit 16 registers
  R a[12], x = splat(0.999999f), y = splat(1e-9f);
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) a[i] = y * (float)i;
  for (long r = 0; r < repeats; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) a[i] = a[i] * x + y;
  }
  R s{};
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) s += a[i];
  volatile float keep = sum(s);
  (void)keep;
  return 2.0 * VL * 12 * repeats;
}

void product(long M, long N, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc) {
  gemm32<false>(M, N, K, A, lda, B, ldb, C, ldc, SET);
}

long deep_count(const tethys::DeepCall& c) {
  std::vector<Block> blocks;
  size_t most = 0;
  for (long i = 0; i < c.B; ++i) {
    blocks_of(c, i, blocks);
    most = blocks.size() > most ? blocks.size() : most;
  }
  return (long)most;
}

} // namespace

extern const tethys::Core TETHYS_CORE;
const tethys::Core TETHYS_CORE = {VL, linear_forward, linear_backward, linear_step, deep_forward, deep_backward,
                                  deep_step, heads_forward, heads_backward, gate_forward, gate_backward,
                                  product, has_half, matmul, layer_step, layer_forward, block_step, norm_times,
                                  swiglu_forward, swiglu_backward, norm_forward, norm_backward, rope,
                                  linear_saved, deep_count, deep_saved, fma};
