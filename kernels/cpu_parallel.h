// Work for all threads of the caller.
//
// Straight on OpenMP: at::parallel_for asks torch for a number of threads, and the first time that a library does so in
// a thread, torch sets the thread's number to what was set last in any thread. A thread that has cores of its own, and
// so a number of its own, must keep it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>

#include <omp.h>

namespace chunkc {

// How many threads the caller may use; one inside of a parallel region.
inline int64_t num_threads() {
  return omp_in_parallel() ? 1 : omp_get_max_threads();
}

// f(i) for i up to count, each in a thread of its own where there are as many. What f throws is thrown here, once all
// have ended.
template <typename F>
void in_parallel(int64_t count, const F& f) {
  const int64_t threads = std::min(count, num_threads());
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i)
      f(i);
    return;
  }
  std::exception_ptr error;
#pragma omp parallel num_threads(threads)
  {
    try {
      for (int64_t i = omp_get_thread_num(); i < count; i += omp_get_num_threads())
        f(i);
    } catch (...) {
#pragma omp critical(chunkc_in_parallel)
      error = std::current_exception();
    }
  }
  if (error)
    std::rethrow_exception(error);
}

// f(begin, end) for ranges that cover 0 to count, one a thread, of at least `grain` but for the last.
template <typename F>
void parallel_ranges(int64_t count, int64_t grain, const F& f) {
  const int64_t ranges = std::max<int64_t>(1, std::min(num_threads(), (count + grain - 1) / grain));
  const int64_t size = (count + ranges - 1) / ranges;
  in_parallel(ranges, [&](int64_t i) {
    const int64_t begin = std::min(i * size, count), end = std::min(begin + size, count);
    if (begin < end)
      f(begin, end);
  });
}

}  // namespace chunkc
