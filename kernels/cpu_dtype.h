// The dtype that a library is built for, said by a flag of the compiler.
#pragma once

#include "cpu_check.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace chunkc {

#if defined(CHUNKC_FLOAT32)
using Element = float;
constexpr ScalarType kElement = kFloat;
#elif defined(CHUNKC_BFLOAT16)
using Element = c10::BFloat16;
constexpr ScalarType kElement = kBFloat16;
#elif defined(CHUNKC_FLOAT16)
using Element = c10::Half;
constexpr ScalarType kElement = kHalf;
#else
#error "say for which dtype: -DCHUNKC_FLOAT32, -DCHUNKC_BFLOAT16 or -DCHUNKC_FLOAT16"
#endif

// Each dtype's place among the libraries; -1 for one that has none.
constexpr int kDtypes = 3;
constexpr int place_of(ScalarType dtype) {
  return dtype == kFloat ? 0 : dtype == kBFloat16 ? 1 : dtype == kHalf ? 2 : -1;
}

}  // namespace chunkc
