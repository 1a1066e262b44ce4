// The exact (erf) GELU and its first two derivatives, from one exponential:
//     gelu(z) = z Phi(z)      gelu'(z) = Phi(z) + z phi(z)      gelu''(z) = phi(z) (2 - z^2)
#pragma once
#include "vector.h"

namespace {

inline R exponential(R x) { // x <= 0; the cephes polynomial, one unit in the last place
  const float lowest = -87.0f;
  x = x < lowest ? splat(lowest) : x;
  R shifted = x * 1.44269504088896341f + 12582912.0f; // 1.5 * 2^23: the integer part lands in the low bits
  R n = shifted - 12582912.0f;
  R r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  R p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return (R)((I)p + ((I)shifted << 23));
}

struct Normal {
  R cumulative, density;
};

// Phi and phi at z. Abramowitz and Stegun 7.1.26: within 1.5e-7 / 2 of Phi.
inline Normal normal(R z) {
  R x = (R)((I)z & 0x7fffffff);
  R e = exponential(-0.5f * z * z);
  R t = 1.0f / (x * 0.231641888f + 1.0f); // 0.3275911 / sqrt(2)
  R p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  R tail = 0.5f * e * (p * t);
  return {z < 0.0f ? tail : 1.0f - tail, e * 0.3989422804014327f};
}

} // namespace
