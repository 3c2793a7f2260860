// Products of a few rows with keys and values as they lie in memory.
#pragma once

#include "cpu_call.h"
#include "cpu_pairs.h"

namespace chunkc {

constexpr int kRowBlock = 4;  // rows whose sums fit the registers at a time

// Rows to ask for while others are used, one with each of them: of more at a time the last ones are dropped. Those of
// the next tile, and again the tile's own a little ahead.
template <typename T>
struct Ahead {
  const T* const* rows = nullptr;
  int64_t count = 0;
  const T* const* own = nullptr;
  int64_t own_count = 0, dim = 0;

  CHUNKC_INLINE void fetch(int64_t j) const {
    if (j < count)
      prefetch_row(rows[j], dim);
    if (j < own_count)
      prefetch_row(own[j], dim);
  }
  void move(int64_t n) {
    rows += n, count -= n, own += n, own_count -= n;
  }
};

// sums[r]: partial sums (see half_sums) of the products of query r with four keys.
template <typename T, int ROWS>
CHUNKC_INLINE void score_quad(const T* const* keys, const T* queries, int64_t dim, int64_t stride, Vec* sums) {
  Vec sum[ROWS][4];
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r)
    sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = Vec{};
  for (int64_t d = 0; d < dim; d += kChunk) {
    const int64_t n = std::min(dim - d, kChunk);
    const Chunk<T> key[4] = {
        load_chunk(keys[0] + d, n), load_chunk(keys[1] + d, n), load_chunk(keys[2] + d, n), load_chunk(keys[3] + d, n)};
    CHUNKC_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Chunk<T> query = load_chunk(queries + r * stride + d);
      CHUNKC_UNROLL
      for (int i = 0; i < 4; ++i)
        sum[r][i] = add_products<T>(sum[r][i], query, key[i]);
    }
  }
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r)
    sums[r] = half_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

// scores[r][j] = queries[r] . keys[j] for the kLanes keys from j = 0 on. Queries are padded with zeros to whole chunks.
template <typename T, int ROWS>
CHUNKC_INLINE void score_keys(
    const T* const* keys, const T* queries, int64_t dim, float* scores, const Ahead<T>& ahead) {
  const int64_t stride = round_up(dim, kChunk);
  Vec quads[kLanes / 4][ROWS];
  for (int quad = 0; quad < kLanes / 4; ++quad) {
    for (int i = 0; i < 4; ++i)
      ahead.fetch(4 * quad + i);
    score_quad<T, ROWS>(keys + 4 * quad, queries, dim, stride, quads[quad]);
  }
  for (int r = 0; r < ROWS; ++r) {
    Vec row[kLanes / 4];
    for (int quad = 0; quad < kLanes / 4; ++quad)
      row[quad] = quads[quad][r];
    store(scores + r * kTile, whole_sums(row));
  }
}

// output[r] = rescale[r] * output[r] + sum_j weights[r][j] values[j] for C chunks of columns from d on, with weights as
// soft_max leaves them. Without `rescale` it is 1.
template <typename T, int ROWS, int C>
CHUNKC_INLINE void add_columns(
    const T* const* values, int64_t count, const float* weights, const float* rescale, float* output, int64_t d,
    int64_t dim, const Ahead<T>& ahead) {
  const int64_t stride = round_up(dim, kChunk);
  Vec sums[ROWS][2 * C];
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const float factor = rescale ? rescale[r] : 1.0f;
    CHUNKC_UNROLL
    for (int i = 0; i < 2 * C; ++i)
      sums[r][i] = load(output + r * stride + d + i * kLanes) * factor;
  }
  const int64_t n = C == 1 ? std::min(dim - d, kChunk) : kChunk;
  if constexpr (kPairsKeys<T>) {
    // Two keys at a time. The loads cost the same, and the products, which hold up a group of rows, half.
    const auto step = [&](int64_t j, const T* second, int64_t second_n) __attribute__((always_inline)) {
      CHUNKC_UNROLL
      for (int i = 0; i < C; ++i) {
        VecInt pairs[2];
        pair_chunks(load_chunk(values[j] + d + i * kChunk, n), load_chunk(second + d + i * kChunk, second_n), pairs);
        CHUNKC_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          const Pair weight = reinterpret_cast<const Pair*>(weights + r * kTile)[j / 2];
          sums[r][2 * i] = add_multiple(sums[r][2 * i], weight, pairs[0]);
          sums[r][2 * i + 1] = add_multiple(sums[r][2 * i + 1], weight, pairs[1]);
        }
      }
    };
    for (int64_t j = 0; j + 1 < count; j += 2) {
      ahead.fetch(j);
      ahead.fetch(j + 1);
      step(j, values[j + 1], n);
    }
    if (count % 2)  // what lies behind the last key may be NaN: its partner is zeros
      step(count - 1, values[count - 1], 0);
  } else {
    for (int64_t j = 0; j < count; ++j) {
      ahead.fetch(j);
      CHUNKC_UNROLL
      for (int i = 0; i < C; ++i) {
        const Floats value = widen(load_chunk(values[j] + d + i * kChunk, n));
        CHUNKC_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          sums[r][2 * i] += weights[r * kTile + j] * value.first;
          sums[r][2 * i + 1] += weights[r * kTile + j] * value.second;
        }
      }
    }
  }
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    CHUNKC_UNROLL
    for (int i = 0; i < 2 * C; ++i)
      store(output + r * stride + d + i * kLanes, sums[r][i]);
  }
}

// All columns, in the order of `widen` or `pair_chunks` and padded to chunks.
template <typename T, int ROWS>
void add_values(
    const T* const* values, int64_t count, const float* weights, const float* rescale, float* output, int64_t dim,
    Ahead<T> ahead) {
  constexpr int kMany = kMaxVectors / 2;
  int64_t d = 0;
  for (; d + kMany * kChunk <= dim; d += kMany * kChunk, ahead = {})
    add_columns<T, ROWS, kMany>(values, count, weights, rescale, output, d, dim, ahead);
  for (; d < dim; d += kChunk, ahead = {})
    add_columns<T, ROWS, 1>(values, count, weights, rescale, output, d, dim, ahead);
}

}  // namespace chunkc
