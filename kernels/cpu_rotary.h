// Rotary positions: heads of queries and keys, rotated by what their token's cosines and sines say.
//
// A head x of which the first n elements are rotated, in halves, becomes
//   x[i] * cos[i] - x[i + n/2] * sin[i]                      for i < n/2
//   x[i] * cos[i] + x[i - n/2] * sin[i]                      for n/2 <= i < n
//   x[i]                                                     behind
// in float32, rounded once. No product is taken into a fused multiply-add: the bits are those of the reference.
#pragma once

#include "cpu_call.h"
#include "cpu_tensor.h"

#include <optional>

namespace chunkc {

// A call's cosines and sines, [T, n] each, with rows in one piece; undefined where nothing is rotated.
struct RotaryTables {
  Tensor cos, sin;

  explicit operator bool() const { return cos.defined(); }
};

// Checks the operands against the queries [T, Hq, D].
inline RotaryTables rotary_tables(
    const Tensor& q, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin) {
  CHUNKC_CHECK_VALUE(cos.has_value() == sin.has_value(), "mixed_attention: cos and sin go together");
  if (!cos)
    return {};
  CHUNKC_CHECK_TYPE(
      cos->scalar_type() == q.scalar_type() && sin->scalar_type() == q.scalar_type(),
      "mixed_attention: cos and sin must have the dtype of q");
  CHUNKC_CHECK_VALUE(
      cos->dim() == 2 && sin->dim() == 2 && cos->size(0) == sin->size(0) && cos->size(1) == sin->size(1) &&
          cos->size(0) == q.size(0) && cos->size(1) % 2 == 0 && cos->size(1) > 0 && cos->size(1) <= q.size(2),
      "mixed_attention: cos ", cos->sizes(), " and sin ", sin->sizes(), " do not fit q ", q.sizes());
  const auto contiguous_rows = [](const Tensor& t) { return t.stride(1) == 1 ? t : t.contiguous(); };
  return {contiguous_rows(*cos), contiguous_rows(*sin)};
}

// A product as it is rounded, not to be taken into a fused multiply-add.
CHUNKC_INLINE Vec rounded(Vec product) {
#if defined(CHUNKC_AVX512)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

// Rotates heads of one token after the other. A thread has one of its own.
template <typename T>
class Rotation {
 public:
  explicit Rotation(const RotaryTables& tables)
      : from_cos_(static_cast<const T*>(tables.cos.const_data_ptr())),
        from_sin_(static_cast<const T*>(tables.sin.const_data_ptr())), cos_stride_(tables.cos.stride(0)),
        sin_stride_(tables.sin.stride(0)), n_(tables.cos.size(1)) {
    const int64_t padded = round_up(n_, kLanes) + kLanes;  // halves are read and written in whole vectors
    float* memory = memory_.reserve(4 * padded);
    std::fill_n(memory, 4 * padded, 0.0f);
    cos_ = memory, sin_ = cos_ + padded, from_ = sin_ + padded, to_ = from_ + padded;
  }

  // The heads that come next are those of token t.
  void set_token(int64_t t) {
    widen_row(from_cos_ + t * cos_stride_, cos_, n_);
    widen_row(from_sin_ + t * sin_stride_, sin_, n_);
  }

  // Writes the head of `dim` elements, rotated.
  void rotate(const T* head, T* to, int64_t dim) {
    const int64_t half = n_ / 2;
    widen_row(head, from_, n_);
    const auto products = [&](int64_t at, int64_t across) {
      return Floats{rounded(load(from_ + at) * load(cos_ + at)), rounded(load(from_ + across) * load(sin_ + at))};
    };
    // What the last vector of the first half writes behind it, the second half writes again.
    for (int64_t i = 0; i < half; i += kLanes) {
      const auto [straight, crossed] = products(i, half + i);
      store(to_ + i, straight - crossed);
    }
    for (int64_t i = half; i < n_; i += kLanes) {
      const auto [straight, crossed] = products(i, i - half);
      store(to_ + i, straight + crossed);
    }
    narrow_row(to_, to, n_, 1.0f);
    std::copy_n(head + n_, dim - n_, to + n_);
  }

 private:
  const T *from_cos_, *from_sin_;
  int64_t cos_stride_, sin_stride_, n_;
  Buffer<float> memory_;
  float *cos_, *sin_, *from_, *to_;
};

}  // namespace chunkc
