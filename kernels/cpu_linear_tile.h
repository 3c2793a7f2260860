// The micro-kernel of chunkc::packed_linear: up to 8 rows of x times one panel of the packed weight.
//
// The weight lies in *steps*: what one instruction takes of a row of x, 4 bytes, which is one float32 or two
// bfloat16. For each step a panel holds 4 bytes per column. So one kernel serves both, but for one instruction.
//
// Every element of the result is summed over the steps in order, in one accumulator, whatever the shape of the tile:
// a row's result does not depend on the rows beside it.
#pragma once

#include "cpu_simd.h"

#if defined(CHUNKC_AVX512)
#include <c10/util/BFloat16.h>

#include <algorithm>

namespace chunkc {

constexpr int kTileRows = 8;
constexpr int kPanelVectors = 3;  // 8 x 3 accumulators, 3 vectors of the weight and one of x: 28 of 32 registers
constexpr int kPanelColumns = kPanelVectors * kLanes;
constexpr int64_t kStepBytes = 4;

template <typename T>
constexpr int64_t kPerStep = kStepBytes / sizeof(T);

struct Tile {
  const char* x;  // first step of the first row
  int64_t x_stride;  // bytes
  const char* weight;
  int64_t steps;
  bool half_step;  // one more element of x follows: the number of bfloat16 in a row is odd
  const float* start;  // what the sums start from: bias, or the sums over earlier steps
  int64_t start_stride;
  void* out;  // T where rounded, else float32
  int64_t out_stride;  // elements
  int columns;  // of out; the others are padding
  bool rounded;
  const char* ahead;  // memory to be asked for meanwhile
  int64_t ahead_step;  // bytes of it per step
};

template <typename T>
inline __m512 multiply_add(__m512i x, __m512i weight, __m512 sum) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(weight), sum);
  } else {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
#else
    return sum;  // never called
#endif
  }
}

inline __mmask16 column_mask(int columns) {
  return columns >= kLanes ? 0xffff : (1u << std::max(columns, 0)) - 1;
}

template <typename T>
inline void store_columns(T* out, __m512 x, int columns) {
  const __mmask16 mask = column_mask(columns);
  if constexpr (std::is_same_v<T, float>) {
    if (mask == 0xffff)
      _mm512_storeu_ps(out, x);
    else
      _mm512_mask_storeu_ps(out, mask, x);
  } else {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    if (mask == 0xffff)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
    else
      _mm256_mask_storeu_epi16(out, mask, rounded);
#endif
  }
}

// The first `columns` numbers from p on, and zeros.
template <typename T>
inline __m512 load_columns(const T* p, int columns) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_maskz_loadu_ps(column_mask(columns), p);
  } else {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    const __m256i halves = _mm256_maskz_loadu_epi16(column_mask(columns), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
    return __m512{};  // never called
#endif
  }
}

// The two halves of a vector, from and to two places. What is stored to one place twice is the lower half.
template <typename T>
inline __m512 load_halves(const T* lower, const T* upper) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(lower)), _mm256_loadu_ps(upper), 1);
  } else {
    const auto load = [](const T* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    const __m256i halves = _mm256_set_m128i(load(upper), load(lower));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
}

template <typename T>
inline void store_halves(T* lower, T* upper, __m512 x) {
  if constexpr (std::is_same_v<T, float>) {
    _mm256_storeu_ps(upper, _mm512_extractf32x8_ps(x, 1));
    _mm256_storeu_ps(lower, _mm512_castps512_ps256(x));
  } else {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper), _mm256_extracti128_si256(rounded, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lower), _mm256_castsi256_si128(rounded));
#endif
  }
}

template <typename T, int ROWS, int VECTORS>
void multiply_tile(const Tile& tile) {
  // few pointers, from which the rows are at most two strides away, leave registers for the addresses
  constexpr int kGroup = 3, kGroups = (ROWS + kGroup - 1) / kGroup;
  const int64_t stride = tile.x_stride, between = tile.ahead_step / VECTORS;
  const char* rows[kGroups];
  __m512 sums[ROWS][VECTORS];
  CHUNKC_UNROLL
  for (int g = 0; g < kGroups; ++g)
    rows[g] = tile.x + g * kGroup * stride;
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    CHUNKC_UNROLL
    for (int v = 0; v < VECTORS; ++v)
      sums[r][v] = _mm512_loadu_ps(tile.start + r * tile.start_stride + v * kLanes);
  }

  const char* weight = tile.weight;
  const char* ahead = tile.ahead;
  const auto step = [&](int64_t offset, auto load_x) __attribute__((always_inline)) {
    __m512i columns[VECTORS];
    CHUNKC_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      columns[v] = _mm512_loadu_si512(weight + v * sizeof(__m512i));
      __builtin_prefetch(ahead + v * between, 0, 2);  // to the second level: the first one waits for too few lines
    }
    weight += VECTORS * sizeof(__m512i), ahead += tile.ahead_step;
    CHUNKC_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const __m512i x = _mm512_set1_epi32(load_x(rows[r / kGroup] + r % kGroup * stride + offset));
      CHUNKC_UNROLL
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = multiply_add<T>(x, columns[v], sums[r][v]);
    }
  };
  for (int64_t i = 0; i < tile.steps; ++i)
    step(i * kStepBytes, [](const char* p) __attribute__((always_inline)) {
      int32_t bits;
      std::memcpy(&bits, p, sizeof(bits));
      return bits;
    });
  if (kPerStep<T> == 2 && tile.half_step)
    step(tile.steps * kStepBytes, [](const char* p) __attribute__((always_inline)) {
      uint16_t bits;  // the other half is another row's, or nobody's
      std::memcpy(&bits, p, sizeof(bits));
      return int32_t(bits);
    });

  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    CHUNKC_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = r * tile.out_stride + v * kLanes;
      if (tile.rounded)
        store_columns(static_cast<T*>(tile.out) + at, sums[r][v], tile.columns - v * kLanes);
      else
        store_columns(static_cast<float*>(tile.out) + at, sums[r][v], tile.columns - v * kLanes);
    }
  }
}

template <typename T>
using TileKernel = void (*)(const Tile&);

template <typename T, int ROWS>
inline TileKernel<T> tile_kernel_of(int vectors) {
  constexpr TileKernel<T> kernels[kPanelVectors] = {
      multiply_tile<T, ROWS, 1>, multiply_tile<T, ROWS, 2>, multiply_tile<T, ROWS, 3>};
  return kernels[vectors - 1];
}

// The kernel for 1 .. kTileRows rows and 1 .. kPanelVectors vectors of columns.
template <typename T>
inline TileKernel<T> tile_kernel(int rows, int vectors) {
  constexpr decltype(&tile_kernel_of<T, 1>) of_rows[kTileRows] = {
      tile_kernel_of<T, 1>, tile_kernel_of<T, 2>, tile_kernel_of<T, 3>, tile_kernel_of<T, 4>,
      tile_kernel_of<T, 5>, tile_kernel_of<T, 6>, tile_kernel_of<T, 7>, tile_kernel_of<T, 8>};
  return of_rows[rows - 1](vectors);
}

}  // namespace chunkc
#endif
