// Products with operands rounded to bfloat16 and sums in float32: twice the multiply-adds of float32 where the processor has AVX512-BF16.
// A mode of the call, like the flushing of denormals: `gemm` obeys it, the triangles (vector.h) stay in float32. Elsewhere the operands are
// rounded and multiplied in float32, which gives the same numbers to rounding, and is slower than no rounding at all.
#pragma once
#include "vector.h"

namespace {

inline bool& half_products() {
  static thread_local bool on = false;
  return on;
}

struct Products { // in force until the end of the scope
  bool old = half_products();
  explicit Products(bool half) { half_products() = half; }
  ~Products() { half_products() = old; }
};

inline R round_half(R x) { // to the nearest bfloat16, ties to even
  I bits = (I)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & (int)0xffff0000;
  return x == x ? (R)rounded : x;
}

__attribute__((noinline)) void round_rows(const float* src, long lds, long rows, long cols, float* dst, long ldd) {
  for (long r = 0; r < rows; ++r)
    for (long x = 0; x < cols; x += VL) store(dst + r * ldd + x, round_half(load_some(src + r * lds + x, cols - x)));
}

template <bool T>
void gemm_rounded(long M, long N, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc, Mode mode) {
  Scratch s;
  long rows = T ? K : M, cols = T ? M : K;
  float *a = s.take(rows * odd(cols)), *b = s.take(K * odd(N));
  round_rows(A, lda, rows, cols, a, odd(cols)), round_rows(B, ldb, K, N, b, odd(N));
  gemm32<T>(M, N, K, a, odd(cols), b, odd(N), C, ldc, mode);
}

#if defined(__x86_64__) && TETHYS_WIDTH == 16
#define TETHYS_HALF __attribute__((target("avx512bf16")))

// Two rows of floats -> one of pairs: lane j holds bfloat16 of a[j] (low) and of b[j].
TETHYS_HALF inline __m512i pair_up(__m512 a, __m512 b) {
  const __m512i order = (__m512i)(__v32hi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

inline __mmask16 first(long n) { return n >= 16 ? (__mmask16)0xffff : n > 0 ? (__mmask16)((1 << n) - 1) : (__mmask16)0; }

// Rows 2 r, 2 r + 1 of src -> row r of dst, `ldd` pairs long, whole vectors; an odd last row meets zeros.
TETHYS_HALF __attribute__((noinline)) void pair_rows(const float* src, long lds, long rows, long cols, int32_t* dst, long ldd) {
  for (long r = 0; r < rows; r += 2, src += 2 * lds, dst += ldd) {
    const float* next = r + 1 < rows ? src + lds : src;
    __mmask16 both = r + 1 < rows ? 0xffff : 0;
    long x = 0;
    for (; x + 16 <= cols; x += 16)
      _mm512_storeu_si512(dst + x, pair_up(_mm512_loadu_ps(src + x), _mm512_maskz_loadu_ps(both, next + x)));
    if (__mmask16 in = first(cols - x))
      _mm512_storeu_si512(dst + x, pair_up(_mm512_maskz_loadu_ps(in, src + x), _mm512_maskz_loadu_ps(in & both, next + x)));
  }
}

// Each row by itself: neighbours along it make the pairs.
TETHYS_HALF __attribute__((noinline)) void pair_columns(const float* src, long lds, long rows, long cols, int32_t* dst, long ldd) {
  for (long r = 0; r < rows; ++r, src += lds, dst += ldd) {
    long x = 0;
    for (; x + 32 <= cols; x += 32)
      _mm512_storeu_si512(dst + x / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(src + x + 16), _mm512_loadu_ps(src + x)));
    if (x < cols) {
      __m512 a = _mm512_maskz_loadu_ps(first(cols - x), src + x), b = _mm512_maskz_loadu_ps(first(cols - x - 16), src + x + 16);
      _mm512_storeu_si512(dst + x / 2, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }
}

// As `tile` (vector.h), over K pairs. A: pairs along a row (A[m * lda + k]) or, with T, of two rows (A[k * lda + m]); B: pairs of two rows.
template <bool T, int M, int N>
TETHYS_HALF inline void tile_half(long K, const int32_t* A, long lda, const int32_t* B, long ldb, float* C, long ldc, Mode mode) {
  __m512 acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) acc[m][n] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (long k = 0; k < K; ++k) {
    __m512bh b[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) b[n] = (__m512bh)_mm512_loadu_si512(B + k * ldb + n * 16);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      __m512bh a = (__m512bh)_mm512_set1_epi32(T ? A[k * lda + m] : A[m * lda + k]);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], a, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      float* c = C + m * ldc + n * 16;
      store(c, mode == SET ? (R)acc[m][n] : mode == ADD ? load(c) + (R)acc[m][n] : load(c) - (R)acc[m][n]);
    }
}

template <bool T, int N>
TETHYS_HALF inline void rows_half(long M, long K, const int32_t* A, long lda, const int32_t* B, long ldb, float* C, long ldc, Mode mode) {
  long m = 0;
  auto a = [&] { return T ? A + m : A + m * lda; };
  for (; m + 8 <= M; m += 8) tile_half<T, 8, N>(K, a(), lda, B, ldb, C + m * ldc, ldc, mode);
  if (M - m >= 4) tile_half<T, 4, N>(K, a(), lda, B, ldb, C + m * ldc, ldc, mode), m += 4;
  for (; m < M; ++m) tile_half<T, 1, N>(K, a(), lda, B, ldb, C + m * ldc, ldc, mode);
}

template <bool T>
TETHYS_HALF __attribute__((noinline)) void gemm_half(long M, long N, long K, const float* A, long lda, const float* B, long ldb, float* C,
                                                     long ldc, Mode mode) {
  Scratch s;
  long pairs = (K + 1) / 2, la = T ? odd(M) : odd(pairs), lb = odd(N), j = 0;
  int32_t *a = (int32_t*)s.take((T ? pairs : M) * la), *b = (int32_t*)s.take(pairs * lb);
  if (T) pair_rows(A, lda, K, M, a, la);
  else pair_columns(A, lda, M, K, a, la);
  pair_rows(B, ldb, K, N, b, lb);
  for (; j + 32 <= N; j += 32) rows_half<T, 2>(M, pairs, a, la, b + j, lb, C + j, ldc, mode);
  for (; j < N; j += 16) rows_half<T, 1>(M, pairs, a, la, b + j, lb, C + j, ldc, mode);
}

inline bool has_half() { return __builtin_cpu_supports("avx512bf16"); }
#else
template <bool T>
void gemm_half(long M, long N, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc, Mode mode) {
  gemm_rounded<T>(M, N, K, A, lda, B, ldb, C, ldc, mode);
}
inline bool has_half() { return false; }
#endif

// C[M x N] (=, +=, -=) A[M x K] B[K x N] in the precision in force; arguments as gemm32.
template <bool T>
inline void gemm(long M, long N, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc, Mode mode) {
  static const bool hardware = has_half();
  if (!half_products()) gemm32<T>(M, N, K, A, lda, B, ldb, C, ldc, mode);
  else if (hardware) gemm_half<T>(M, N, K, A, lda, B, ldb, C, ldc, mode);
  else gemm_rounded<T>(M, N, K, A, lda, B, ldb, C, ldc, mode);
}

// C (=, +=, -=) op(A) op(B) for rows [first, first + M) of C, any strides and sizes: the projections. op(A)[m][k] = A[m * lda + k], or with ta
// A[k * lda + m]; op(B)[k][n] = B[k * ldb + n], or with tb B[n * ldb + k].
void matmul(long first, long M, long N, long K, const float* A, long lda, bool ta, const float* B, long ldb, bool tb, float* C, long ldc,
            int mode, bool half) {
  FlushDenormals flush;
  Products products(half);
  Scratch s;
  constexpr long step = 256; // of K: a panel of B then stays in the first cache
  long ldp = odd(N), np = pad(N);
  bool whole = N % VL == 0;
  const float* b = B;
  if (tb || !whole) {
    float* to = s.zeros(K * ldp);
    if (tb) transpose(B, ldb, N, K, to, ldp);
    else copy_in(B, ldb, K, N, to, ldp);
    b = to, ldb = ldp;
  }
  float* c = whole ? C + first * ldc : s.take(M * ldp);
  long lc = whole ? ldc : ldp;
  if (!whole && mode != SET) copy_in(C + first * ldc, ldc, M, N, c, lc);
  for (long k = 0; k < K; k += step) {
    long n = K - k < step ? K - k : step;
    Mode now = k && mode == SET ? ADD : (Mode)mode;
    if (ta) gemm<true>(M, np, n, A + k * lda + first, lda, b + k * ldb, ldb, c, lc, now);
    else gemm<false>(M, np, n, A + first * lda + k, lda, b + k * ldb, ldb, c, lc, now);
  }
  if (!whole) copy_out(c, lc, M, N, C + first * ldc, ldc);
}

} // namespace
