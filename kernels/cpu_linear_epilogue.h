// What is done to the sums of a product before they are rounded, once: gates let through what is beside them, and a
// residual is added. Added at the end: a residual stream holds large numbers, on which products added one by one would
// lose their last digits.
#pragma once

#include "cpu_linear_layout.h"

namespace chunkc {

// Of gates; numbered as in fused_linear.py.
enum class Activation : int64_t { kNone, kSilu, kGeluTanh };
}  // namespace chunkc

#if defined(CHUNKC_AVX512)
namespace chunkc {

template <typename T>
struct Epilogue {
  Activation activation;  // none unless the weight is gated
  const T* residual;  // as the result, or nullptr
  bool does_anything() const { return activation != Activation::kNone || residual; }
};

inline Vec sigmoid(Vec x) {
  const Vec e = exp2_nonpositive((x < 0.0f ? x : -x) * kLog2E), upper = 1.0f / (1.0f + e);
  return x < 0.0f ? e * upper : upper;
}

template <Activation ACTIVATION>
inline Vec activate(Vec x) {
  if constexpr (ACTIVATION == Activation::kSilu)
    return x * sigmoid(x);
  // (1 + tanh(y)) / 2 is the sigmoid of 2 y, which keeps its digits where tanh nears -1
  constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return x * sigmoid(kTwiceRoot * (x + 0.044715f * (x * x * x)));
}

// Results of a panel, from its sums [rows][kPanelColumns].
template <typename T>
void add_residual(const T* residual, const float* sums, int64_t rows, int64_t columns, int64_t stride, T* out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < columns; n += kLanes) {
      const int64_t at = r * stride + n;
      const int left = int(std::min<int64_t>(columns - n, kLanes));
      const __m512 x = _mm512_loadu_ps(sums + r * kPanelColumns + n);
      store_columns(out + at, _mm512_add_ps(x, load_columns(residual + at, left)), left);
    }
  }
}

// The same of a gated weight, half as many. A vector of sums makes half a vector of them, and two make a whole one,
// whether they are one row's or not.
template <typename T, Activation ACTIVATION>
void open_gates(const T* residual, const float* sums, int64_t rows, int64_t vectors, int64_t stride, T* out) {
  int64_t row = 0, vector = 0;
  struct Place {
    const float* sums;
    int64_t at;  // in the results
  };
  const auto next = [&] {
    const Place place{sums + row * kPanelColumns + vector * kLanes, row * stride + vector * kTurn};
    if (++vector == vectors)
      ++row, vector = 0;
    return place;
  };
  for (int64_t left = rows * vectors; left > 0; left -= 2) {
    const Place one = next(), other = left > 1 ? next() : one;
    const __m512 a = _mm512_loadu_ps(one.sums), b = _mm512_loadu_ps(other.sums);
    const Vec gates = (Vec)_mm512_shuffle_f32x4(a, b, 0x44), rest = (Vec)_mm512_shuffle_f32x4(a, b, 0xee);
    Vec x = activate<ACTIVATION>(gates) * rest;
    if (residual)
      x += (Vec)load_halves(residual + one.at, residual + other.at);
    store_halves(out + one.at, out + other.at, (__m512)x);
  }
}

// The results of a panel; out [M, N], or [M, N / 2] where the weight is gated.
template <typename T>
void finish(
    const Epilogue<T>& epilogue, const Layout& layout, int64_t panel, const float* sums, int64_t first, int64_t rows,
    T* out) {
  const int64_t stride = layout.out_features / layout.halves();
  const int64_t at = first * stride + panel * kPanelColumns / layout.halves();
  const T* residual = epilogue.residual ? epilogue.residual + at : nullptr;
  if (epilogue.activation == Activation::kNone)
    add_residual(residual, sums, rows, layout.columns(panel), stride, out + at);
  else if (epilogue.activation == Activation::kSilu)
    open_gates<T, Activation::kSilu>(residual, sums, rows, layout.vectors(panel), stride, out + at);
  else
    open_gates<T, Activation::kGeluTanh>(residual, sums, rows, layout.vectors(panel), stride, out + at);
}

}  // namespace chunkc
#endif
