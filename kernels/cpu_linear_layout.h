// How a weight [N, K] is laid out: panels of kPanelColumns columns of the result, one after the other, each
// [steps][columns]. The last panel is only as wide as it must be, in whole vectors. What is missing is zero.
#pragma once

#include "cpu_linear_tile.h"
#include "cpu_parallel.h"

#if defined(CHUNKC_AVX512)
#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace chunkc {

struct Layout {
  int64_t in_features, out_features, steps;

  template <typename T>
  static Layout of(int64_t in_features, int64_t out_features) {
    return {in_features, out_features, (in_features + kPerStep<T> - 1) / kPerStep<T>};
  }
  int64_t bytes() const { return steps * round_up(out_features, kLanes) * kStepBytes; }
  int64_t panels() const { return (out_features + kPanelColumns - 1) / kPanelColumns; }
  int64_t columns(int64_t panel) const {
    return std::min<int64_t>(kPanelColumns, out_features - panel * kPanelColumns);
  }
  int vectors(int64_t panel) const { return int(round_up(columns(panel), kLanes) / kLanes); }
  int64_t offset(int64_t panel) const { return panel * steps * kPanelColumns * kStepBytes; }
};

// Gives whole pages of memory back that nobody reads again; their contents are undefined from then on.
inline void give_back([[maybe_unused]] const void* from, [[maybe_unused]] const void* to) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(from) + kPage - 1) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(to) / kPage * kPage;
  if (begin < end)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#endif
}

// Lays the weight [N, K], with any strides, out in `to`. Where it is consumed its memory is given back piece by piece.
template <typename T>
void pack(const at::Tensor& weight, const Layout& layout, char* to, bool consumed) {
  constexpr int64_t kPiece = 16;  // panels
  constexpr int64_t kSome = 64;  // elements of a row at a time: what they are scattered over fits the first level cache
  const T* from = weight.const_data_ptr<T>();
  const int64_t row = weight.stride(0), column = weight.stride(1);
  consumed = consumed && weight.is_contiguous();
  parallel_ranges(layout.panels(), 4, [&](int64_t begin, int64_t end) {
    int64_t read_from = begin;
    for (int64_t panel = begin; panel < end; ++panel) {
      if (consumed && panel - read_from == kPiece) {
        give_back(from + read_from * kPanelColumns * row, from + panel * kPanelColumns * row);
        read_from = panel;
      }
      const T* rows = from + panel * kPanelColumns * row;
      const int64_t columns = layout.columns(panel), width = layout.vectors(panel) * kLanes;
      T* at = reinterpret_cast<T*>(to + layout.offset(panel));
      std::fill_n(at, layout.steps * width * kPerStep<T>, T(0.0f));
      for (int64_t some = 0; some < layout.in_features; some += kSome) {
        const int64_t last = std::min(some + kSome, layout.in_features);
        for (int64_t n = 0; n < columns; ++n) {
          for (int64_t k = some; k < last; ++k)
            at[(k / kPerStep<T> * width + n) * kPerStep<T> + k % kPerStep<T>] = rows[n * row + k * column];
        }
      }
    }
  });
}

// Rows of the weight that lies at `from`, back in plain: out [count, K].
template <typename T>
void unpack(const char* from, const Layout& layout, const int64_t* rows, int64_t count, T* out) {
  parallel_ranges(count, 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      TORCH_CHECK_INDEX(
          rows[i] >= 0 && rows[i] < layout.out_features, "packed_rows: there is no row ", rows[i], " of ",
          layout.out_features);
      const int64_t panel = rows[i] / kPanelColumns, n = rows[i] % kPanelColumns;
      const int64_t width = layout.vectors(panel) * kLanes;
      const T* at = reinterpret_cast<const T*>(from + layout.offset(panel));
      for (int64_t k = 0; k < layout.in_features; ++k)
        out[i * layout.in_features + k] = at[(k / kPerStep<T> * width + n) * kPerStep<T> + k % kPerStep<T>];
    }
  });
}

}  // namespace chunkc
#endif
