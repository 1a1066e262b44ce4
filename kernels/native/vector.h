// Vectors, scratch memory, transposes and the register-tiled products the memories are made of.
// Compiled once for each vector width (TETHYS_WIDTH floats) with the matching -march; everything sits in an anonymous namespace,
// so that no function of one width can be linked into another.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int VL = TETHYS_WIDTH;
typedef float V __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(VL * 4)));
typedef float R __attribute__((vector_size(VL * 4))); // in registers: naturally aligned

// Rows of accumulators a tile: 32 registers hold 8 x 2 and more; 16 registers 4 x 2.
constexpr int MR = VL == 16 ? 8 : 4;
constexpr int NR = 2;

inline long up(long n, long m) { return (n + m - 1) / m * m; }
inline long pad(long n) { return up(n, VL); }
// Row length of a scratch matrix: an odd number of vectors, so that rows do not fall into the same cache sets.
inline long odd(long n) { return (pad(n) / VL | 1) * VL; }

inline R load(const float* p) { return *(const V*)p; }
inline void store(float* p, R x) { *(V*)p = x; }
inline R splat(float x) { return R{} + x; }

inline R load_some(const float* p, long n) { // the first n numbers, zeros behind
  if (n >= VL) return load(p);
  R x{};
  for (long j = 0; j < n; ++j) x[j] = p[j];
  return x;
}
inline void store_some(float* p, R x, long n) {
  if (n >= VL) return store(p, x);
  for (long j = 0; j < n; ++j) p[j] = x[j];
}

template <int S, int... J>
inline R rotate(R x, std::integer_sequence<int, J...>) { // x[(j + S) mod VL]
  return __builtin_shuffle(x, I{((J + S) & (VL - 1))...});
}
template <int S = VL / 2>
inline float sum(R x) {
  x += rotate<S>(x, std::make_integer_sequence<int, VL>());
  if constexpr (S > 1) return sum<S / 2>(x);
  else return x[0];
}

inline float dot(const float* a, const float* b, long n) { // n a multiple of VL
  R s{};
  for (long j = 0; j < n; j += VL) s += load(a + j) * load(b + j);
  return sum(s);
}

// Denormal numbers make the decayed momenta ten times slower; flushed here, and the caller's mode restored.
struct FlushDenormals {
#if defined(__x86_64__)
  unsigned old = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(old | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(old); }
#elif defined(__aarch64__)
  uint64_t old;
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old));
    asm volatile("msr fpcr, %0" ::"r"(old | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(old)); }
#endif
};

// Scratch of one thread; a function takes from it front to back and gives all back at its end, like a stack.
class Scratch {
 public:
  Scratch() : block(arena().block), used(arena().used) {}
  ~Scratch() { arena().block = block, arena().used = used; }
  Scratch(const Scratch&) = delete;
  float* take(size_t n) {
    Arena& a = arena();
    // Arrays of whole pages would start at the same place of a page, and a store to one would stall loads of the next: 39 lines apart.
    size_t bytes = (n * 4 + 63) / 64 * 64 + 39 * 64;
    while (a.block < a.blocks.size() && a.used + bytes > a.blocks[a.block].second) ++a.block, a.used = 0;
    if (a.block == a.blocks.size()) {
      size_t size = bytes > (1u << 20) ? up(bytes, 4096) : (1u << 20);
      void* p = std::aligned_alloc(4096, size);
      if (!p) throw std::bad_alloc();
      a.blocks.emplace_back((char*)p, size);
    }
    float* p = (float*)(a.blocks[a.block].first + a.used);
    a.used += bytes;
    return p;
  }
  float* zeros(size_t n) {
    float* p = take(n);
    memset(p, 0, n * 4);
    return p;
  }

 private:
  struct Arena {
    std::vector<std::pair<char*, size_t>> blocks;
    size_t block = 0, used = 0;
    ~Arena() {
      for (auto& b : blocks) std::free(b.first);
    }
  };
  size_t block, used;
  static Arena& arena() {
    static thread_local Arena a;
    return a;
  }
};

// One stage of the block transpose: swap the off-diagonal S x S blocks of x[i], x[i + S].
template <int S, int... J>
inline void exchange(R& a, R& b, std::integer_sequence<int, J...>) {
  R low = __builtin_shuffle(a, b, I{(J & S ? VL + J - S : J)...});
  b = __builtin_shuffle(a, b, I{(J & S ? VL + J : J + S)...});
  a = low;
}

template <int S>
inline void transpose_stage(R* x) {
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i)
    if (!(i & S)) exchange<S>(x[i], x[i + S], std::make_integer_sequence<int, VL>());
  if constexpr (S > 1) transpose_stage<S / 2>(x);
}

// dst[c][r] = src[r][c] for r < rows, c < cols; dst rows are filled with zeros up to a whole vector.
__attribute__((noinline)) void transpose(const float* src, long lds, long rows, long cols, float* dst, long ldd) {
  for (long r = 0; r < rows; r += VL)
    for (long c = 0; c < cols; c += VL) {
      long nr = rows - r < VL ? rows - r : VL, nc = cols - c < VL ? cols - c : VL;
      R x[VL];
      if (nc == VL) {
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i) x[i] = i < nr ? load(src + (r + i) * lds + c) : R{};
      } else {
        for (int i = 0; i < VL; ++i) {
          x[i] = R{};
          if (i < nr)
            for (long j = 0; j < nc; ++j) x[i][j] = src[(r + i) * lds + c + j];
        }
      }
      transpose_stage<VL / 2>(x);
      for (long j = 0; j < nc; ++j) store(dst + (c + j) * ldd + r, x[j]);
    }
}

// The same into rows of exactly `rows` numbers (the caller's memory: nothing may be written behind them).
__attribute__((noinline)) void transpose_exact(const float* src, long lds, long rows, long cols, float* dst, long ldd) {
  if (rows % VL == 0) return transpose(src, lds, rows, cols, dst, ldd);
  for (long c = 0; c < cols; ++c)
    for (long r = 0; r < rows; ++r) dst[c * ldd + r] = src[r * lds + c];
}

// n rows of d numbers into scratch rows padded with zeros. The same rows `ahead` numbers further on are asked for from memory: those of the
// next chunk, which the prefetcher does not foresee when rows are far apart.
__attribute__((noinline)) void copy_in(const float* src, long stride, long n, long d, float* dst, long ld, long ahead = 0) {
  long whole = d / VL * VL, width = pad(d);
  for (long t = 0; t < n; ++t) {
    if (ahead)
      for (long j = 0; j < d; j += 16) __builtin_prefetch(src + t * stride + ahead + j, 0, 2);
    for (long j = 0; j < whole; j += VL) store(dst + t * ld + j, load(src + t * stride + j));
    if (whole < width) {
      R x{};
      for (long j = whole; j < d; ++j) x[j - whole] = src[t * stride + j];
      store(dst + t * ld + whole, x);
    }
  }
}

__attribute__((noinline)) void copy_out(const float* src, long ld, long n, long d, float* dst, long stride) {
  long whole = d / VL * VL;
  for (long t = 0; t < n; ++t) {
    for (long j = 0; j < whole; j += VL) store(dst + t * stride + j, load(src + t * ld + j));
    for (long j = whole; j < d; ++j) dst[t * stride + j] = src[t * ld + j];
  }
}

enum Mode { SET, ADD, SUB };

// C[M x N] (=, +=, -=) A[M x K] B[K x N] for one register tile. A is row-major (A[m * lda + k]) or, with T, transposed (A[k * lda + m]).
template <bool T, int M, int N>
inline void tile(long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc, Mode mode) {
  R acc[M][N];
  const float* row[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    row[m] = T ? A + m : A + m * lda;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[m][n] = R{};
  }
#pragma GCC unroll 2
  for (long k = 0; k < K; ++k) {
    R b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = load(B + k * ldb + n * VL);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      float a = T ? A[k * lda + m] : row[m][k];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] += a * b[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* c = C + m * ldc + n * VL;
      store(c, mode == SET ? acc[m][n] : mode == ADD ? load(c) + acc[m][n] : load(c) - acc[m][n]);
    }
}

template <bool T, int N>
inline void tile_rows(long M, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc, Mode mode) {
  long m = 0;
  auto a = [&] { return T ? A + m : A + m * lda; };
  for (; m + MR <= M; m += MR) tile<T, MR, N>(K, a(), lda, B, ldb, C + m * ldc, ldc, mode);
  if constexpr (MR > 4)
    if (M - m >= 4) tile<T, 4, N>(K, a(), lda, B, ldb, C + m * ldc, ldc, mode), m += 4;
  if (M - m >= 2) tile<T, 2, N>(K, a(), lda, B, ldb, C + m * ldc, ldc, mode), m += 2;
  if (M - m >= 1) tile<T, 1, N>(K, a(), lda, B, ldb, C + m * ldc, ldc, mode);
}

// N counts padded columns (a multiple of VL).
template <bool T>
__attribute__((noinline)) void gemm32(long M, long N, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc, Mode mode) {
  long j = 0;
  for (; j + NR * VL <= N; j += NR * VL) tile_rows<T, NR>(M, K, A, lda, B + j, ldb, C + j, ldc, mode);
  for (; j < N; j += VL) tile_rows<T, 1>(M, K, A, lda, B + j, ldb, C + j, ldc, mode);
}

// C += or -= L B with L lower triangular (n x n, zeros above the diagonal inside each block of MR rows).
__attribute__((noinline)) void lower(long n, long N, const float* L, long ldl, const float* B, long ldb, float* C, long ldc, Mode mode) {
  for (long r = 0; r < n; r += MR) {
    long m = n - r < MR ? n - r : MR;
    gemm32<false>(m, N, r + m, L + r * ldl, ldl, B, ldb, C + r * ldc, ldc, mode);
  }
}

// C += or -= L^T B.
__attribute__((noinline)) void lower_transposed(long n, long N, const float* L, long ldl, const float* B, long ldb, float* C, long ldc, Mode mode) {
  for (long r = 0; r < n; r += MR) {
    long m = n - r < MR ? n - r : MR;
    gemm32<true>(m, N, n - r, L + r * ldl + r, ldl, B + r * ldb, ldb, C + r * ldc, ldc, mode);
  }
}

// The lower triangle of C = A B, in blocks: entries right of a block's vectors are not touched.
__attribute__((noinline)) void lower_of_product(long n, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc) {
  for (long r = 0; r < n; r += MR) {
    long m = n - r < MR ? n - r : MR;
    gemm32<false>(m, pad(r + m), K, A + r * lda, lda, B, ldb, C + r * ldc, ldc, SET);
  }
}

// X (n x N, in place) <- (I + L)^-1 X, L strictly lower; Transposed: (I + L)^-T X. Blocks of MR rows: a product with what is solved,
// then the small triangle in registers.
template <bool Transposed, int M, int N>
inline void solve_tile(long n, long r, const float* L, long ldl, float* X, long ldx) {
  if (Transposed)
    tile<true, M, N>(n - r - M, L + (r + M) * ldl + r, ldl, X + (r + M) * ldx, ldx, X + r * ldx, ldx, SUB);
  else
    tile<false, M, N>(r, L + r * ldl, ldl, X, ldx, X + r * ldx, ldx, SUB);
  R x[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) x[i][j] = load(X + (r + i) * ldx + j * VL);
#pragma GCC unroll 8
  for (int i = 1; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < i; ++j) {
      // Transposed goes from the last row up: row M-1-i takes L[M-1-j][M-1-i] times row M-1-j.
      int to = Transposed ? M - 1 - i : i, from = Transposed ? M - 1 - j : j;
      float l = Transposed ? L[(r + from) * ldl + r + to] : L[(r + to) * ldl + r + from];
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) x[to][c] -= l * x[from][c];
    }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(X + (r + i) * ldx + j * VL, x[i][j]);
}

template <bool Transposed, int N>
inline void solve_columns(long n, const float* L, long ldl, float* X, long ldx) {
  long whole = n / MR * MR;
  auto tail = [&] { // fewer than MR rows at the end, one by one
    if (Transposed)
      for (long r = n - 1; r >= whole; --r) solve_tile<Transposed, 1, N>(n, r, L, ldl, X, ldx);
    else
      for (long r = whole; r < n; ++r) solve_tile<Transposed, 1, N>(n, r, L, ldl, X, ldx);
  };
  if (Transposed) {
    tail();
    for (long r = whole - MR; r >= 0; r -= MR) solve_tile<Transposed, MR, N>(n, r, L, ldl, X, ldx);
  } else {
    for (long r = 0; r < whole; r += MR) solve_tile<Transposed, MR, N>(n, r, L, ldl, X, ldx);
    tail();
  }
}

template <bool Transposed>
__attribute__((noinline)) void solve(long n, long N, const float* L, long ldl, float* X, long ldx) {
  long j = 0;
  for (; j + NR * VL <= N; j += NR * VL) solve_columns<Transposed, NR>(n, L, ldl, X + j, ldx);
  for (; j < N; j += VL) solve_columns<Transposed, 1>(n, L, ldl, X + j, ldx);
}

} // namespace
