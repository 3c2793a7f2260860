// Weights and values of a tile as pairs of bfloat16 along the keys, for products that sum up two keys at a time.
#pragma once

#include "cpu_elements.h"
#include "cpu_products.h"

namespace chunkc {

// Whether products of T take both their sides in pairs: there, the weights of a tile are rounded to T.
template <typename T>
constexpr bool kPairsKeys = kMultipliesPairs && std::is_same_v<T, c10::BFloat16>;

// Where element i of a chunk is after pair_chunks, counted through both vectors: within each 128 bits (8 elements) the
// lower half goes to the first one and the upper half to the second.
constexpr int64_t paired_index(int64_t i) {
  return i % 8 / 4 * kLanes + i / 8 * 4 + i % 4;
}

// Elsewhere declared only: code that is dropped names them.
VecInt round_to_pairs(Vec first, Vec second);
Vec coarse_exp2(Vec x);
Vec add_pairs(Vec sum, VecInt pairs);
VecInt pair_neighbours(Vec first, Vec second);
void pair_chunks(const Chunk<c10::BFloat16>& a, const Chunk<c10::BFloat16>& b, VecInt (&pairs)[2]);
void interleave(const c10::BFloat16* first, const c10::BFloat16* second, int64_t dim, Pair* to);

#if defined(CHUNKC_AVX512) && defined(__AVX512BF16__)
// Lane by lane the pair of two floats, rounded to nearest even; what lies below the normal floats becomes 0.
inline VecInt round_to_pairs(Vec first, Vec second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (VecInt)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// 2^x for x <= 0, to 9e-5 of itself: rounding to bfloat16 shifts it by up to 4e-3. Exactly 1 for 0 and 0 for -inf. The fraction is
// counted from the integer below, as scalef itself takes the integer below x as the exponent.
inline Vec coarse_exp2(Vec x) {
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for -inf
  Vec p = splat(7.706705e-2f);
  p = p * r + 2.2764498e-1f;
  p = p * r + 6.9511679e-1f;
  return (Vec)_mm512_scalef_ps((__m512)(p * r + 1.0f), (__m512)x);
}

// sum + both elements of each pair.
inline Vec add_pairs(Vec sum, VecInt pairs) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, as<__m512bh>(pairs), as<__m512bh>(_mm512_set1_epi32(0x3f803f80)));
}

// Pairs of neighbours: lane i holds elements 2 i and 2 i + 1 of the two vectors in a row.
inline VecInt pair_neighbours(Vec first, Vec second) {
  return (VecInt)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Two chunks as pairs, in the order that costs least: see paired_index.
inline void pair_chunks(const Chunk<c10::BFloat16>& a, const Chunk<c10::BFloat16>& b, VecInt (&pairs)[2]) {
  pairs[0] = (VecInt)_mm512_unpacklo_epi16((__m512i)a.bits, (__m512i)b.bits);
  pairs[1] = (VecInt)_mm512_unpackhi_epi16((__m512i)a.bits, (__m512i)b.bits);
}

// Elements i of two rows side by side, as pairs [round_up(dim, kChunk)], padded with zeros. Without `second` it counts
// as zeros: its memory need not exist.
inline void interleave(const c10::BFloat16* first, const c10::BFloat16* second, int64_t dim, Pair* to) {
  alignas(64) static constexpr auto kOrder = [] {
    struct { uint16_t lower[32], upper[32]; } order{};
    for (int i = 0; i < 16; ++i) {
      order.lower[2 * i] = i, order.lower[2 * i + 1] = 32 + i;
      order.upper[2 * i] = 16 + i, order.upper[2 * i + 1] = 48 + i;
    }
    return order;
  }();
  const __m512i lower = _mm512_load_si512(kOrder.lower), upper = _mm512_load_si512(kOrder.upper);
  for (int64_t d = 0; d < dim; d += kChunk, to += kChunk) {
    const int64_t n = std::min(dim - d, kChunk);
    const __m512i a = (__m512i)load_chunk(first + d, n).bits;
    const __m512i b = second ? (__m512i)load_chunk(second + d, n).bits : __m512i{};
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, lower, b));
    _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(a, upper, b));
  }
}
#endif

}  // namespace chunkc
