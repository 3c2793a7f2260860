// How a weight [N, K] is laid out: panels of kPanelColumns columns of the result, one after the other, each
// [steps][columns]. The last panel is only as wide as it must be, in whole vectors. What is missing is zero.
//
// Of a gated weight the first half of the rows makes gates and the second half what they let through. Its rows are
// taken in turns, half a vector of each, so that a gate and what it is multiplied with meet in one vector of columns.
#pragma once

#include "cpu_linear_tile.h"
#include "cpu_parallel.h"

namespace chunkc {
constexpr int64_t kTurn = 8;  // rows of a gated weight that are taken from a half at a time; as in fused_linear.py
}

#if defined(CHUNKC_AVX512)
#include "cpu_tensor.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace chunkc {

static_assert(kTurn * 2 == kLanes);

struct Layout {
  int64_t in_features, out_features, steps;
  bool gated;

  template <typename T>
  static Layout of(int64_t in_features, int64_t out_features, bool gated) {
    return {in_features, out_features, (in_features + kPerStep<T> - 1) / kPerStep<T>, gated};
  }
  int64_t halves() const { return gated ? 2 : 1; }
  // What row of the weight makes a column, and the other way round.
  int64_t row_of(int64_t column) const {
    return gated ? column % kLanes / kTurn * (out_features / 2) + column / kLanes * kTurn + column % kTurn : column;
  }
  int64_t column_of(int64_t row) const {
    const int64_t half = row / (out_features / halves()), in_half = row % (out_features / halves());
    return gated ? in_half / kTurn * kLanes + half * kTurn + in_half % kTurn : row;
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
void pack(const Tensor& weight, const Layout& layout, char* to, bool consumed) {
  constexpr int64_t kPiece = 16;  // panels
  constexpr int64_t kSome = 64;  // elements of a row at a time: what they are scattered over fits the first level cache
  const T* from = weight.const_data_ptr<T>();
  const int64_t row = weight.stride(0), column = weight.stride(1);
  consumed = consumed && weight.is_contiguous();
  parallel_ranges(layout.panels(), 4, [&](int64_t begin, int64_t end) {
    int64_t read_from = begin;
    for (int64_t panel = begin; panel < end; ++panel) {
      if (consumed && panel - read_from == kPiece) {
        for (int64_t half = 0; half < layout.halves(); ++half) {
          const T* first = from + half * (layout.out_features / 2) * row;
          const int64_t panel_rows = kPanelColumns / layout.halves();
          give_back(first + read_from * panel_rows * row, first + panel * panel_rows * row);
        }
        read_from = panel;
      }
      const int64_t columns = layout.columns(panel), width = layout.vectors(panel) * kLanes;
      T* at = reinterpret_cast<T*>(to + layout.offset(panel));
      std::fill_n(at, layout.steps * width * kPerStep<T>, T(0.0f));
      for (int64_t some = 0; some < layout.in_features; some += kSome) {
        const int64_t last = std::min(some + kSome, layout.in_features);
        for (int64_t n = 0; n < columns; ++n) {
          const T* numbers = from + layout.row_of(panel * kPanelColumns + n) * row;
          for (int64_t k = some; k < last; ++k)
            at[(k / kPerStep<T> * width + n) * kPerStep<T> + k % kPerStep<T>] = numbers[k * column];
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
      CHUNKC_CHECK_INDEX(
          rows[i] >= 0 && rows[i] < layout.out_features, "packed_rows: there is no row ", rows[i], " of ",
          layout.out_features);
      const int64_t column = layout.column_of(rows[i]);
      const int64_t panel = column / kPanelColumns, n = column % kPanelColumns;
      const int64_t width = layout.vectors(panel) * kLanes;
      const T* at = reinterpret_cast<const T*>(from + layout.offset(panel));
      for (int64_t k = 0; k < layout.in_features; ++k)
        out[i * layout.in_features + k] = at[(k / kPerStep<T> * width + n) * kPerStep<T> + k % kPerStep<T>];
    }
  });
}

}  // namespace chunkc
#endif
