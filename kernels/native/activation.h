// The exact (erf) GELU and its first two derivatives, from one exponential:
//     gelu(z) = z Phi(z)      gelu'(z) = Phi(z) + z phi(z)      gelu''(z) = phi(z) (2 - z^2)
#pragma once
#include "vector.h"

namespace {

// 2^y for -126 <= y <= 0, y = scale * x given by its factors so that the fraction is one fused operation.
// Degree-5 minimax polynomial on [-1/2, 1/2]: relative error 7.5e-8.
inline R power_of_two(R x, float scale) {
  R shifted = x * scale + 12582912.0f; // 1.5 * 2^23: the integer part lands in the low bits
  R f = x * scale - (shifted - 12582912.0f);
  R p = splat(0.001327647129073739f);
  p = p * f + 0.009675540961325169f;
  p = p * f + 0.05550713092088699f;
  p = p * f + 0.24022120237350464f;
  p = p * f + 0.6931469440460205f;
  p = p * f + 1.0f;
  return (R)((I)p + ((I)shifted << 23));
}

// Phi and phi at z through the upper tail Phi(-|z|), Abramowitz and Stegun 7.1.26: within 1e-7.
struct Normal {
  R z, x, tail, exponential; // x = min(|z|, 13)

  explicit Normal(R at) : z(at) {
    x = (R)((I)z & 0x7fffffff);
    x = x < 13.0f ? x : splat(13.0f); // beyond it 2^y would leave the normal numbers; Phi is 0 or 1 there
    exponential = power_of_two(x * x, -0.72134752044448170f); // exp(-x^2 / 2)
    R t = 1.0f / (x * 0.231641888f + 1.0f);                   // 0.3275911 / sqrt(2)
    R p = splat(0.5307027145f);
    p = p * t - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.127414796f;
    tail = exponential * (p * t);
  }
  R cumulative() const { return z < 0.0f ? tail : 1.0f - tail; }
  R density() const { return exponential * 0.3989422804014327f; }
  R gelu() const { return (z < 0.0f ? R{} : z) - x * tail; }
  R slope() const { return cumulative() + z * density(); }
  R bend() const { return density() * (2.0f - z * z); }
};

// silu(z) = z sigmoid(z), its slope sigmoid + z sigmoid (1 - sigmoid).
struct Logistic {
  R z, sigmoid;
  explicit Logistic(R at) : z(at) {
    R x = (R)((I)z & 0x7fffffff);
    x = x < 87.0f ? x : splat(87.0f);
    R e = power_of_two(x, -1.44269504088896341f);
    R s = 1.0f / (1.0f + e);
    sigmoid = z < 0.0f ? e * s : s;
  }
  R silu() const { return z * sigmoid; }
  R slope() const { return sigmoid + z * sigmoid * (1.0f - sigmoid); }
};

} // namespace
