// Small products of matrices with float results, on register tiles.
#pragma once

#include "cpu_simd.h"

namespace chunkc {

constexpr int kTileRows = 6;  // rows of a register tile

// Two neighbouring bfloat16 of the dimension that is summed over: an element of a matrix of half that depth. Read from
// memory that other types were written to.
struct __attribute__((packed, aligned(2), may_alias)) Pair {
  int32_t bits;
};

#if defined(CHUNKC_AVX512) && defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// kLanes elements of a row of B.
inline Vec load_elements(const float* p) {
  return load(p);
}

inline VecInt load_elements(const Pair* p) {
  VecInt x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

inline Vec add_multiple(Vec sum, float a, Vec b) {
  return sum + a * b;
}

inline Vec add_multiple(Vec sum, Pair a, VecInt b) {
#if defined(CHUNKC_AVX512) && defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)sum, as<__m512bh>(_mm512_set1_epi32(a.bits)), as<__m512bh>(b));
#else
  const VecInt upper = VecInt{} + static_cast<int32_t>(0xffff0000);
  sum += as<float>(a.bits << 16) * as<Vec>(b << 16);
  return sum + as<float>(a.bits & upper[0]) * as<Vec>(b & upper);
#endif
}

// C[m][0:NV] = scale[m] * C[m][0:NV] + sum_k A(m, k) * B[k][0:NV], in vectors; without `scale` C is overwritten.
// A(m, k) = a[m][k * a_step]. The rows of A or B are reached through pointers, so they may lie in pages.
template <int M, int NV, typename E>
inline void multiply_tile(
    const E* const* a, int64_t a_step, const E* const* b, int64_t column, int64_t depth,
    float* c, int64_t c_stride, const float* scale) {
  Vec sum[M][NV];
  CHUNKC_UNROLL
  for (int m = 0; m < M; ++m)
    CHUNKC_UNROLL
    for (int n = 0; n < NV; ++n)
      sum[m][n] = scale ? load(c + m * c_stride + n * kLanes) * scale[m] : Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    decltype(load_elements(b[0])) row[NV];
    CHUNKC_UNROLL
    for (int n = 0; n < NV; ++n)
      row[n] = load_elements(b[k] + column + n * kLanes);
    CHUNKC_UNROLL
    for (int m = 0; m < M; ++m)
      CHUNKC_UNROLL
      for (int n = 0; n < NV; ++n)
        sum[m][n] = add_multiple(sum[m][n], a[m][k * a_step], row[n]);
  }
  CHUNKC_UNROLL
  for (int m = 0; m < M; ++m)
    CHUNKC_UNROLL
    for (int n = 0; n < NV; ++n)
      store(c + m * c_stride + n * kLanes, sum[m][n]);
}

template <int NV, typename E>
void multiply_columns(
    const E* const* a, int64_t a_step, const E* const* b, int64_t column, int64_t depth,
    float* c, int64_t c_stride, const float* scale, int64_t rows) {
  int64_t m = 0;
  auto step = [&](auto count) {
    constexpr int M = decltype(count)::value;
    for (; m + M <= rows; m += M)
      multiply_tile<M, NV>(
          a + m, a_step, b, column, depth, c + m * c_stride + column, c_stride, scale ? scale + m : nullptr);
  };
  step(std::integral_constant<int, kTileRows>());
  step(std::integral_constant<int, kTileRows - 2>());
  step(std::integral_constant<int, 1>());
}

// Columns begin to end, multiples of kLanes, of C = scale * C + A B.
template <typename E>
void multiply(
    const E* const* a, int64_t a_step, const E* const* b, int64_t depth,
    float* c, int64_t c_stride, const float* scale, int64_t rows, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + kMaxVectors * kLanes <= end; n += kMaxVectors * kLanes)
    multiply_columns<kMaxVectors>(a, a_step, b, n, depth, c, c_stride, scale, rows);
  for (; n < end; n += kLanes)
    multiply_columns<1>(a, a_step, b, n, depth, c, c_stride, scale, rows);
}

}  // namespace chunkc
