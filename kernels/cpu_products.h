// Small products of float matrices, on register tiles.
#pragma once

#include "cpu_simd.h"

namespace chunkc {

constexpr int kTileRows = 6;  // rows of a register tile

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// C[m][0:NV] = scale[m] * C[m][0:NV] + sum_k A(m, k) * B[k][0:NV], in vectors; without `scale` C is overwritten.
// A(m, k) = a[m][k * a_step]. The rows of B are reached through pointers, so B may lie in pages.
template <int M, int NV>
inline void multiply_tile(
    const float* const* a, int64_t a_step, const float* const* b, int64_t column, int64_t depth,
    float* c, int64_t c_stride, const float* scale) {
  Vec sum[M][NV];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < NV; ++n)
      sum[m][n] = scale ? load(c + m * c_stride + n * kLanes) * scale[m] : Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[NV];
    for (int n = 0; n < NV; ++n)
      row[n] = load(b[k] + column + n * kLanes);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < NV; ++n)
        sum[m][n] += a[m][k * a_step] * row[n];
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < NV; ++n)
      store(c + m * c_stride + n * kLanes, sum[m][n]);
}

template <int NV>
void multiply_columns(
    const float* const* a, int64_t a_step, const float* const* b, int64_t column, int64_t depth,
    float* c, int64_t c_stride, const float* scale, int64_t rows) {
  int64_t m = 0;
  auto step = [&](auto count) {
    constexpr int M = decltype(count)::value;
    for (; m + M <= rows; m += M)
      multiply_tile<M, NV>(
          a + m, a_step, b, column, depth, c + m * c_stride + column, c_stride, scale ? scale + m : nullptr);
  };
  step(std::integral_constant<int, kTileRows>());
  step(std::integral_constant<int, 3>());
  step(std::integral_constant<int, 1>());
}

// C [rows][columns] = scale * C + A B; columns is a multiple of kLanes.
inline void multiply(
    const float* const* a, int64_t a_step, const float* const* b, int64_t depth,
    float* c, int64_t c_stride, const float* scale, int64_t rows, int64_t columns) {
  int64_t n = 0;
  for (; n + kMaxVectors * kLanes <= columns; n += kMaxVectors * kLanes)
    multiply_columns<kMaxVectors>(a, a_step, b, n, depth, c, c_stride, scale, rows);
  for (; n < columns; n += kLanes)
    multiply_columns<1>(a, a_step, b, n, depth, c, c_stride, scale, rows);
}

// scores[j][r] = keys[j] . queries[r] for a few rows; `dim` is a multiple of kLanes.
template <int ROWS>
void dot_products(
    const float* const* keys, int64_t num_keys, const float* queries, int64_t dim, float* scores, int64_t stride) {
  for (int64_t j = 0; j < num_keys; ++j) {
    Vec total[ROWS] = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec key = load(keys[j] + d);
      for (int r = 0; r < ROWS; ++r)
        total[r] += key * load(queries + r * dim + d);
    }
    for (int r = 0; r < ROWS; ++r)
      scores[j * stride + r] = sum(total[r]);
  }
}

}  // namespace chunkc
