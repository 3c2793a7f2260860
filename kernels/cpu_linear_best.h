// The largest of a row's sums, and its column: the lowest of equals. Greedy decoding wants no more of the head's product.
#pragma once

#include "cpu_linear_tile.h"

#include <cstdint>
#include <limits>

namespace chunkc {

struct Best {
  float value = -std::numeric_limits<float>::infinity();  // NaN once there is one in the row
  int64_t column = 0;

  // Goes on with columns behind all that were seen.
  void take(const Best& behind) {
    if (value == value && !(behind.value <= value))
      *this = behind;
  }
};
}  // namespace chunkc

#if defined(CHUNKC_AVX512)
namespace chunkc {

// Goes on with a panel's sums [rows][kPanelColumns], whose first column is `column`.
inline void keep_best(const float* sums, int64_t rows, int64_t columns, int64_t column, Best* best) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = sums + r * kPanelColumns;
    __m512 largest = lowest;
    bool has_nan = false;
    for (int64_t n = 0; n < columns; n += kLanes) {
      const __mmask16 mask = column_mask(int(std::min<int64_t>(columns - n, kLanes)));
      const __m512 x = _mm512_mask_loadu_ps(lowest, mask, row + n);
      has_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0;
      largest = _mm512_max_ps(largest, x);
    }
    Best here{_mm512_reduce_max_ps(largest), column};
    if (has_nan)
      here.value = std::numeric_limits<float>::quiet_NaN();
    else if (!(here.value > best[r].value))
      continue;
    for (int64_t n = 0; n < columns; ++n) {
      if (has_nan ? row[n] != row[n] : row[n] == here.value) {
        here.column = column + n;
        break;
      }
    }
    best[r].take(here);
  }
}

}  // namespace chunkc
#endif
