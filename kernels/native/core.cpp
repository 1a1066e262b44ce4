// One vector width of the core. build.py compiles this file once a width: TETHYS_WIDTH floats a vector, TETHYS_CORE the table's name.
#include "core.h"
#include "linear.h"

namespace {

double fma(long repeats) { // 16 independent accumulators hide the latency of two units
  R a[16], x = splat(0.999999f), y = splat(1e-9f);
  for (int i = 0; i < 16; ++i) a[i] = y * (float)i;
  for (long r = 0; r < repeats; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = a[i] * x + y;
    for (int i = 0; i < 16; ++i) asm volatile("" : "+x"(a[i]));
  }
  R s{};
  for (int i = 0; i < 16; ++i) s += a[i];
  volatile float keep = sum(s);
  (void)keep;
  return 2.0 * VL * 16 * repeats;
}

} // namespace

extern const tethys::Core TETHYS_CORE;
const tethys::Core TETHYS_CORE = {VL, linear_forward, linear_backward, linear_step, nullptr, nullptr, nullptr, linear_saved, nullptr, fma};
