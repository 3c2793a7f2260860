// Vectors of float on the compiler's own vector types (GCC and clang), so one source serves AVX512, AVX2 and others.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace chunkc {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxVectors = 4;  // columns of a register tile, in vectors: 6 x 4 accumulators fit 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kMaxVectors = 2;  // 6 x 2 accumulators fit 16 registers
#else
constexpr int kLanes = 4;
constexpr int kMaxVectors = 2;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t VecInt __attribute__((vector_size(kLanes * sizeof(int32_t))));

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

inline VecInt load(const int32_t* p) {
  VecInt x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

inline void store(float* p, Vec x) {
  std::memcpy(p, &x, sizeof(x));
}

inline Vec splat(float x) {
  return Vec{} + x;
}

inline Vec max(Vec a, Vec b) {
  return a > b ? a : b;
}

// Adds halves of a vector until four lanes are left.
template <int LANES = kLanes, typename V = Vec>
inline float sum(V x) {
  if constexpr (LANES == 4) {
    return (x[0] + x[1]) + (x[2] + x[3]);
  } else {
    typedef float Half __attribute__((vector_size(LANES / 2 * sizeof(float))));
    Half half[2];
    std::memcpy(half, &x, sizeof(x));
    return sum<LANES / 2, Half>(half[0] + half[1]);
  }
}

// exp(x) to about 1e-7 relative for x <= 0; exactly 0 below the normal floats and for -inf. Cody and Waite: with
// n = round(x / ln 2), exp(x) = 2^n * exp(x - n ln 2), the rest by its Taylor polynomial on |r| <= ln(2) / 2.
inline Vec exp_nonpositive(Vec x) {
  const Vec lowest = splat(-87.0f);
  const Vec clamped = max(lowest, x);  // in this order a NaN stays one
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const Vec shifted = clamped * 1.44269504088896341f + shifter;
  const Vec n = shifted - shifter;
  const Vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const VecInt exponent = __builtin_convertvector(n, VecInt);
  VecInt bits;
  std::memcpy(&bits, &p, sizeof(bits));
  bits += exponent << 23;
  std::memcpy(&p, &bits, sizeof(p));
  return x < lowest ? Vec{} : p;
}

// tanh without overflow for any x: exp(-2|x|) lies in (0, 1].
inline Vec tanh(Vec x) {
  const Vec magnitude = x < 0.0f ? -x : x;
  const Vec e = exp_nonpositive(magnitude * -2.0f);
  const Vec t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

// Widens `n` values to float and pads with zeros up to a multiple of kLanes.
template <typename T>
inline void widen(const T* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, c10::Half>) {
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  }
#elif defined(__F16C__)
  if constexpr (std::is_same_v<T, c10::Half>) {
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
#pragma omp simd
  for (int64_t j = i; j < n; ++j)
    to[j] = static_cast<float>(from[j]);
  for (int64_t j = n; j % kLanes; ++j)
    to[j] = 0;
}

}  // namespace chunkc
