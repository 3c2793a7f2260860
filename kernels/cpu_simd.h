// Vectors of float on the compiler's own vector types (GCC and clang), so one source serves AVX512, AVX2 and others.
// Intrinsics only where the compiler does not find the instruction by itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace chunkc {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__BMI2__)
#define CHUNKC_AVX512 1
constexpr int kLanes = 16;
constexpr int kMaxVectors = 4;  // columns of a register tile, in vectors: 6 x 4 accumulators fit 32 registers
#elif defined(__AVX2__)
#define CHUNKC_AVX2 1
constexpr int kLanes = 8;
constexpr int kMaxVectors = 2;  // 6 x 2 accumulators fit 16 registers
#else
constexpr int kLanes = 4;
constexpr int kMaxVectors = 2;
#endif

// Before a loop over the vectors of a register tile: only what is unrolled can stay in registers.
#if defined(__clang__)
#define CHUNKC_UNROLL _Pragma("unroll")
#else
#define CHUNKC_UNROLL _Pragma("GCC unroll 16")
#endif

#define CHUNKC_INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t VecInt __attribute__((vector_size(kLanes * sizeof(int32_t))));

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The same bits as another type.
template <typename To, typename From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

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

// 0, 1, 2, ..
inline VecInt lane_numbers() {
  VecInt x;
  for (int i = 0; i < kLanes; ++i)
    x[i] = i;
  return x;
}

inline Vec to_floats(VecInt x) {
  return __builtin_convertvector(x, Vec);
}

// The larger one; b where either is NaN.
inline Vec max(Vec a, Vec b) {
#if defined(CHUNKC_AVX512)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(CHUNKC_AVX2)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// Combines halves of a vector until four lanes are left.
template <int LANES = kLanes, typename V = Vec, typename F>
inline float fold(V x, const F& combine) {
  if constexpr (LANES == 4) {
    return combine(combine(x[0], x[1]), combine(x[2], x[3]));
  } else {
    typedef float Half __attribute__((vector_size(LANES / 2 * sizeof(float))));
    Half half[2];
    std::memcpy(half, &x, sizeof(x));
    return fold<LANES / 2, Half>(combine(half[0], half[1]), combine);
  }
}

inline float sum(Vec x) {
  return fold(x, [](auto a, auto b) { return a + b; });
}

inline float largest(Vec x) {
  return fold(x, [](auto a, auto b) { return a > b ? a : b; });
}

// The sums across the lanes of kLanes vectors, one a lane, in two stages, so that few vectors are alive at a time:
// half_sums turns four vectors into one of kLanes partial sums, whole_sums kLanes / 4 of those into the result.
#if defined(CHUNKC_AVX512)
// Two vectors are added up to one by a blend, which any unit does, and one shuffle, which few do.
inline Vec half_sums(Vec a, Vec b, Vec c, Vec d) {
  const auto pairs = [](Vec x, Vec y) {  // upper half onto lower half
    return _mm512_add_ps(
        _mm512_mask_blend_ps(0xff00, (__m512)x, (__m512)y), _mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x4e));
  };
  const __m512d x = _mm512_castps_pd(pairs(a, b)), y = _mm512_castps_pd(pairs(c, d));
  return (Vec)_mm512_add_ps(  // upper half of each quad onto its lower half
      _mm512_castpd_ps(_mm512_mask_blend_pd(0xaa, x, y)), _mm512_castpd_ps(_mm512_shuffle_pd(x, y, 0x55)));
}

inline Vec whole_sums(const Vec (&halves)[4]) {
  const auto pairs = [](__m512 x, __m512 y, __mmask16 mask, __m512i others) {
    return _mm512_add_ps(_mm512_mask_blend_ps(mask, x, y), _mm512_permutex2var_ps(x, others, y));
  };
  const __m512i quads = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  const __m512i lanes = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
  const __m512i order = _mm512_setr_epi32(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15);
  const __m512 x = pairs((__m512)halves[0], (__m512)halves[1], 0xf0f0, quads);
  const __m512 y = pairs((__m512)halves[2], (__m512)halves[3], 0xf0f0, quads);
  return (Vec)_mm512_permutexvar_ps(order, pairs(x, y, 0xaaaa, lanes));
}
#elif defined(CHUNKC_AVX2)
inline Vec half_sums(Vec a, Vec b, Vec c, Vec d) {
  return (Vec)_mm256_hadd_ps(
      _mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
}

inline Vec whole_sums(const Vec (&halves)[2]) {
  const __m256 x = (__m256)halves[0], y = (__m256)halves[1];
  return (Vec)_mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
#else
inline Vec half_sums(Vec a, Vec b, Vec c, Vec d) {
  return Vec{sum(a), sum(b), sum(c), sum(d)};
}

inline Vec whole_sums(const Vec (&halves)[1]) {
  return halves[0];
}
#endif

// 2^x to about 1e-7 relative for x <= 0; 0 below the normal floats (or less than the smallest one) and for -inf.
// With n = round(x), 2^x = 2^n * 2^(x - n), the rest by its minimax polynomial on [-1/2, 1/2].
inline Vec exp2_nonpositive(Vec x) {
  const auto polynomial = [](Vec r) {
    Vec p = splat(1.5345805e-4f);
    p = p * r + 1.3399931e-3f;
    p = p * r + 9.6184891e-3f;
    p = p * r + 5.5503286e-2f;
    p = p * r + 2.4022646e-1f;
    p = p * r + 6.9314718e-1f;
    return p * r + 1.0f;
  };
#if defined(CHUNKC_AVX512)
  const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 for -inf
  return (Vec)_mm512_scalef_ps((__m512)polynomial(r), n);
#else
  const Vec lowest = splat(-126.0f);
  const Vec clamped = max(lowest, x);  // in this order a NaN stays one
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const Vec shifted = clamped + shifter;
  const Vec p = polynomial(clamped - (shifted - shifter));
  const Vec power = as<Vec>(as<VecInt>(p) + (as<VecInt>(shifted) << 23));
  return x < lowest ? Vec{} : power;
#endif
}

// tanh without overflow for any x: 2^(-2 |x| log2 e) lies in (0, 1].
inline Vec tanh(Vec x) {
  const Vec magnitude = x < 0.0f ? -x : x;
  const Vec e = exp2_nonpositive(magnitude * (-2.0f * kLog2E));
  const Vec t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

}  // namespace chunkc
