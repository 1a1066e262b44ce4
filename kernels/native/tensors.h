// What operators on stacked states share: their arguments, checked and taken as plain numbers.
#pragma once
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if defined(__x86_64__) && defined(__linux__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T> struct Kind;
template <> struct Kind<float> { static constexpr auto value = ScalarType::Float; };
template <> struct Kind<double> { static constexpr auto value = ScalarType::Double; };
template <> struct Kind<int64_t> { static constexpr auto value = ScalarType::Long; };
template <> struct Kind<int16_t> { static constexpr auto value = ScalarType::Short; };
template <> struct Kind<bool> { static constexpr auto value = ScalarType::Bool; };

// The numbers of a contiguous tensor of this shape; -1: any size.
template <class T> T* data(const Tensor& t, const char* name, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(t.scalar_type() == Kind<T>::value, "tethys_native: ", name, " has the wrong dtype");
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous(), "tethys_native: ", name, " must be contiguous and on the CPU");
  STD_TORCH_CHECK(t.dim() == (int64_t)shape.size(), "tethys_native: ", name, " has ", t.dim(), " dimensions, expected ", shape.size());
  for (size_t i = 0; i < shape.size(); ++i)
    STD_TORCH_CHECK(shape[i] < 0 || t.size(i) == shape[i], "tethys_native: ", name, " has size ", t.size(i), " in dimension ", i,
                    ", expected ", shape[i]);
  return (T*)t.data_ptr();
}

inline const int64_t* within(const Tensor& t, const char* name, int64_t n, int64_t limit) {
  const int64_t* p = data<int64_t>(t, name, {n});
  for (int64_t i = 0; i < n; ++i) STD_TORCH_CHECK(p[i] >= 0 && p[i] < limit, "tethys_native: ", name, " must lie in [0, ", limit, ")");
  return p;
}

// One season of a forecaster's memory, N streams.
struct Season {
  float *W, *visits;   // (N, heads, 1, slots), (N, slots)
  const float* rates;  // (heads)
  int64_t heads, slots, stride, reads;
};

} // namespace
