// RMSNorm of the rows that a linear multiplies, rounded where the models round: the statistics are float32, what is
// divided by them is rounded to T before the norm's weight is multiplied.
#pragma once

#include "cpu_linear_tile.h"
#include "cpu_parallel.h"

#if defined(CHUNKC_AVX512)
#include <cmath>

namespace chunkc {

template <typename T>
inline __m512 rounded_to(__m512 x) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  if constexpr (!std::is_same_v<T, float>)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
#endif
  return x;
}

// x, weight, out [size]. The order of the sum hangs on the size alone.
template <typename T>
void normalise_row(const T* x, int64_t size, const T* weight, float eps, T* out) {
  constexpr int kSums = 4;
  __m512 sums[kSums] = {};
  const auto add = [&](__m512& sum, int64_t k) __attribute__((always_inline)) {
    const __m512 numbers = load_columns(x + k, int(std::min<int64_t>(size - k, kLanes)));
    sum = _mm512_fmadd_ps(numbers, numbers, sum);
  };
  int64_t k = 0;
  for (; k + kSums * kLanes <= size; k += kSums * kLanes) {
    CHUNKC_UNROLL
    for (int i = 0; i < kSums; ++i)
      add(sums[i], k + i * kLanes);
  }
  for (; k < size; k += kLanes)
    add(sums[0], k);
  const float mean = sum((Vec)((sums[0] + sums[1]) + (sums[2] + sums[3]))) / float(size);
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (k = 0; k < size; k += kLanes) {
    const int left = int(std::min<int64_t>(size - k, kLanes));
    const __m512 scaled = rounded_to<T>(_mm512_mul_ps(load_columns(x + k, left), factor));
    store_columns(out + k, _mm512_mul_ps(scaled, load_columns(weight + k, left)), left);
  }
}

// All rows; out [rows, size] is contiguous. They are few in a decode step: then one thread is done before others woke.
template <typename T>
void normalise(
    const T* x, int64_t x_stride, int64_t rows, int64_t size, const T* weight, float eps, T* out) {
  constexpr int64_t kWorthwhile = 32'768;  // elements are worth a thread
  const int64_t grain = std::max<int64_t>(1, kWorthwhile / std::max<int64_t>(1, size));
  parallel_ranges(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      normalise_row(x + r * x_stride, size, weight, eps, out + r * size);
  });
}

}  // namespace chunkc
#endif
