// What this machine can do at most, for the benchmark to compare with: bytes read from memory per second, in order or in
// runs that lie anywhere, and floating point operations per second in products of cached tiles. Called through ctypes.
//
// The products are torch's brgemm where it has one, and the attention's own register tiles.

#include "cpu_call.h"
#include "cpu_parallel.h"
#include "cpu_products.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>
#include <random>
#include <vector>

namespace chunkc {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Loads that the compiler must not leave out.
int32_t read(const char* begin, const char* end) {
  VecInt sums[4] = {};
  for (const char* p = begin; p < end; p += sizeof(sums)) {
    VecInt line[4];
    std::memcpy(line, p, sizeof(line));
    for (int i = 0; i < 4; ++i)
      sums[i] ^= line[i];
    asm volatile("" ::: "memory");
  }
  const VecInt all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  return all[0];
}

// The same for runs of `size` bytes in a given order; what comes about 16 KiB later is asked for meanwhile.
int32_t read_runs(const char* data, const int64_t* order, int64_t count, int64_t size) {
  constexpr int64_t kAhead = 16 << 10;
  const int64_t runs_ahead = kAhead / size, bytes_ahead = kAhead % size;
  int32_t seen = 0;
  for (int64_t i = 0; i < count; ++i) {
    const char* run = data + order[i] * size;
    const char* later = data + order[std::min(i + runs_ahead, count - 1)] * size + bytes_ahead;
    const char* next = data + order[std::min(i + runs_ahead + 1, count - 1)] * size + bytes_ahead - size;
    for (int64_t at = 0; at < size; at += 256) {
      prefetch_row((at + bytes_ahead < size ? later : next) + at, 256);
      seen ^= read(run + at, run + at + 256);
    }
  }
  return seen;
}

// Operations per second of `multiply(work)` on every thread, each with operands of its own.
template <typename T, typename F>
double product_rate(int64_t m, int64_t n, int64_t k, int64_t count, int64_t threads, const F& multiply) {
  const auto loop = [&](int64_t times) {
    in_parallel(threads, [&](int64_t) {
      thread_local Buffer<T> a, b;
      thread_local Buffer<float> c;
      std::fill_n(a.reserve(m * k), m * k, T(0.0f)), std::fill_n(b.reserve(k * n), k * n, T(0.0f));
      std::fill_n(c.reserve(m * n), m * n, 0.0f);
      for (int64_t i = 0; i < times; ++i)
        multiply(a.data(), b.data(), c.data());
    });
  };
  loop(1);  // compiles, where the library does
  const double start = seconds();
  loop(count);
  return 2.0 * m * n * k * count * threads / (seconds() - start);
}

template <typename T>
double brgemm_rate(int64_t m, int64_t n, int64_t k, int64_t count, int64_t threads) {
#if defined(CPUBLAS_BRGEMM_F32F32F32) && defined(CPUBLAS_BRGEMM_BF16BF16F32)
  return product_rate<T>(m, n, k, count, threads, [=](const T* a, const T* b, float* c) {
    at::native::cpublas::brgemm(m, n, k, k, n, n, true, a, b, c, !std::is_same_v<T, float>);
  });
#else
  return 0;
#endif
}

template <typename T>
double own_rate(int64_t m, int64_t n, int64_t k, int64_t count, int64_t threads) {
  using E = std::conditional_t<std::is_same_v<T, float>, float, Pair>;
  const int64_t depth = k * sizeof(T) / sizeof(E);
  return product_rate<T>(m, n, k, count, threads, [=](const T* a, const T* b, float* c) {
    thread_local std::vector<const E*> rows_a, rows_b;
    thread_local std::vector<float> scale;
    if (rows_a.size() != size_t(m) || rows_b.size() != size_t(depth) || rows_a[0] != reinterpret_cast<const E*>(a)) {
      rows_a.resize(m), rows_b.resize(depth), scale.assign(m, 1.0f);
      for (int64_t i = 0; i < m; ++i)
        rows_a[i] = reinterpret_cast<const E*>(a) + i * depth;
      for (int64_t i = 0; i < depth; ++i)
        rows_b[i] = reinterpret_cast<const E*>(b) + i * n;
    }
    multiply(rows_a.data(), 1, rows_b.data(), depth, c, n, scale.data(), m, 0, n);
  });
}

}  // namespace
}  // namespace chunkc

// Bytes per second; `bytes` is a multiple of 256 per thread.
extern "C" double chunkc_read_rate(const char* data, int64_t bytes, int64_t threads) {
  const int64_t share = bytes / threads;
  std::vector<int32_t> seen(threads);
  const double start = chunkc::seconds();
  chunkc::in_parallel(threads, [&](int64_t t) {
    seen[t] = chunkc::read(data + t * share, data + (t + 1) * share);
  });
  return share * threads / (chunkc::seconds() - start);
}

// Bytes per second in runs of `size` bytes, a multiple of 256, in random order.
extern "C" double chunkc_run_read_rate(const char* data, int64_t bytes, int64_t size, int64_t threads) {
  const int64_t count = bytes / size / threads;
  std::vector<int64_t> order(count * threads);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::minstd_rand(1));
  std::vector<int32_t> seen(threads);
  const double start = chunkc::seconds();
  chunkc::in_parallel(threads, [&](int64_t t) {
    seen[t] = chunkc::read_runs(data, order.data() + t * count, count, size);
  });
  return count * threads * size / (chunkc::seconds() - start);
}

// Operations per second of C [m][n] += A [m][k] B [k][n]; 0 where this torch or CPU has no brgemm.
extern "C" double chunkc_brgemm_rate(int bfloat16, int64_t m, int64_t n, int64_t k, int64_t count, int64_t threads) {
  try {
    return bfloat16 ? chunkc::brgemm_rate<c10::BFloat16>(m, n, k, count, threads)
                    : chunkc::brgemm_rate<float>(m, n, k, count, threads);
  } catch (const std::exception&) {
    return 0;
  }
}

extern "C" double chunkc_own_rate(int bfloat16, int64_t m, int64_t n, int64_t k, int64_t count, int64_t threads) {
  return bfloat16 ? chunkc::own_rate<c10::BFloat16>(m, n, k, count, threads)
                  : chunkc::own_rate<float>(m, n, k, count, threads);
}
