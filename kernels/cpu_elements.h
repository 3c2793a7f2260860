// Rows of float, bfloat16 and float16 elements as vectors of float, and back.
#pragma once

#include "cpu_simd.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace chunkc {

constexpr int64_t kChunk = 2 * kLanes;  // elements of a Chunk

// kChunk consecutive elements as they lie in memory.
template <typename T>
struct Chunk {
  VecInt bits;
};
template <>
struct Chunk<float> {
  Vec first, second;
};

// The first n elements (at most kChunk), then zeros; reads nothing behind them.
template <typename T>
inline Chunk<T> load_chunk(const T* p, int64_t n = kChunk) {
#if defined(CHUNKC_AVX512)
  const uint32_t mask = _bzhi_u32(~0u, n);
  if constexpr (std::is_same_v<T, float>) {
    return {
        (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p),
        (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + kLanes)};
  } else {
    return {as<VecInt>(_mm512_maskz_loadu_epi16(mask, p))};
  }
#else
  Chunk<T> x;
  T buffer[kChunk];
  if (n < kChunk) {
    std::fill(std::copy_n(p, n, buffer), buffer + kChunk, T(0.0f));
    p = buffer;
  }
  std::memcpy(&x, p, sizeof(x));
  return x;
#endif
}

// A chunk as floats, in the order that costs least: a bfloat16 is the upper half of a float, so of two neighbours
// one is shifted up and the other masked, which gives the even elements first and the odd ones second.
struct Floats {
  Vec first, second;
};

inline Floats widen(const Chunk<float>& x) {
  return {x.first, x.second};
}

inline Floats widen(const Chunk<c10::BFloat16>& x) {
  return {as<Vec>(x.bits << 16), as<Vec>(x.bits & static_cast<int32_t>(0xffff0000))};
}

inline Floats widen(const Chunk<c10::Half>& x) {
#if defined(CHUNKC_AVX512)
  const __m512i bits = (__m512i)x.bits;
  return {(Vec)_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), (Vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
#elif defined(CHUNKC_AVX2) && defined(__F16C__)
  const __m256i bits = (__m256i)x.bits;
  return {(Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
#else
  c10::Half elements[kChunk];
  std::memcpy(elements, &x, sizeof(x));
  Floats y;
  for (int i = 0; i < kLanes; ++i)
    y.first[i] = elements[i], y.second[i] = elements[kLanes + i];
  return y;
#endif
}

// Where element i of a chunk is after widen: lane order_of<T>(i) of first and second, one after the other.
template <typename T>
constexpr int64_t widened_index(int64_t i) {
  return std::is_same_v<T, c10::BFloat16> ? i / 2 + i % 2 * kLanes : i;
}

// sum + a * b, lane by lane, each lane summing up two elements.
template <typename T>
inline Vec add_products(Vec sum, const Chunk<T>& a, const Chunk<T>& b) {
#if defined(CHUNKC_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, as<__m512bh>(a.bits), as<__m512bh>(b.bits));
#endif
  const Floats x = widen(a), y = widen(b);
  sum += x.first * y.first;
  return sum + x.second * y.second;
}

// Widens n elements in their order and pads with zeros up to a multiple of kLanes.
template <typename T>
inline void widen_row(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, c10::Half>) {
    for (; i + kChunk <= n; i += kChunk) {
      const Floats x = widen(load_chunk(from + i));
      store(to + i, x.first), store(to + i + kLanes, x.second);
    }
  }
#pragma omp simd
  for (int64_t j = i; j < n; ++j)
    to[j] = static_cast<float>(from[j]);
  for (int64_t j = n; j % kLanes; ++j)
    to[j] = 0;
}

// Writes from[i] * factor, rounded to nearest even.
template <typename T>
inline void narrow_row(const float* from, T* to, int64_t n, float factor) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    typedef uint16_t VecShort __attribute__((vector_size(kLanes * sizeof(uint16_t))));
    for (; i + kLanes <= n; i += kLanes) {
      const Vec x = load(from + i) * factor;
      const VecInt bits = as<VecInt>(x);
      const VecInt rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      const VecShort out = __builtin_convertvector(x == x ? rounded : VecInt{} + 0x7fc0, VecShort);
      std::memcpy(to + i, &out, sizeof(out));
    }
  }
#if defined(CHUNKC_AVX512)
  if constexpr (std::is_same_v<T, c10::Half>) {
    for (; i + kLanes <= n; i += kLanes) {
      const __m256i out = _mm512_cvtps_ph((__m512)(load(from + i) * factor), _MM_FROUND_TO_NEAREST_INT);
      std::memcpy(to + i, &out, sizeof(out));
    }
  }
#endif
  for (; i < n; ++i)
    to[i] = static_cast<T>(from[i] * factor);
}

}  // namespace chunkc
