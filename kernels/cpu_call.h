// What a call of the operator consists of: the plan, the batch, the paged keys and values, and a thread's memory.
#pragma once

#include "cpu_elements.h"
#include "cpu_tensor.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

namespace chunkc {

constexpr int64_t kTile = 64;  // keys that are scored at a time

// The columns of the task and merge tables, see kernels/tasks.py.
struct Task {
  int32_t request, kv_head, row_begin, row_end, kv_begin, kv_end, partial, merge;
};
struct Merge {
  int32_t request, kv_head, row_begin, row_end, partial, num_splits, unused[2];
};
static_assert(sizeof(Task) == 32 && sizeof(Merge) == 32);

// Everything a task needs to know about the call.
struct Call {
  const int32_t* q_offsets;
  const int32_t* kv_lens;
  const int32_t* page_table;
  int64_t page_table_stride, num_requests, num_tokens, num_pages, page_size;
  int64_t num_q_heads, num_kv_heads, group, qk_dim, v_dim;
  const float* sinks;         // [Hq] or nullptr
  const float* alibi_slopes;  // [Hq] or nullptr
  float scale, softcap;
  int64_t window, chunk;
  const Merge* merges;
  float* partials;  // [scratch rows][v_dim + 2]: unnormalised output, peak, total
  std::atomic<int32_t>* pieces_left;  // per merge

  int64_t partial_stride() const { return v_dim + 2; }
};

// A strided 3-d or 4-d tensor whose last dim is contiguous.
template <typename T>
struct View {
  T* data;
  int64_t stride0, stride1, stride2;

  explicit View(const Tensor& t)
      : data(static_cast<T*>(const_cast<void*>(t.const_data_ptr()))), stride0(t.stride(0)), stride1(t.stride(1)),
        stride2(t.dim() == 4 ? t.stride(2) : 0) {}
  T* at(int64_t i, int64_t j, int64_t k = 0) const { return data + i * stride0 + j * stride1 + k * stride2; }
};

// The keys or the values of one request and head. The pages must have been checked.
template <typename T>
struct PagedRows {
  const View<const T>& pages;
  const int32_t* table;
  int64_t head, page_size, dim;

  PagedRows(const Call& call, const View<const T>& pages, int64_t request, int64_t head, int64_t dim)
      : pages(pages), table(call.page_table + request * call.page_table_stride), head(head),
        page_size(call.page_size), dim(dim) {}

  // Where the rows begin .. begin + count - 1 lie.
  void find(int64_t begin, int64_t count, const T** rows) const {
    for (int64_t page_index = begin / page_size, offset = begin % page_size, j = 0; j < count; ++page_index) {
      const int64_t page = table[page_index], end = std::min(count, j + page_size - offset);
      for (const T* row = pages.at(page, head, offset); j < end; ++j, row += pages.stride2)
        rows[j] = row;
      offset = 0;
    }
  }
};

// Asks for a row ahead of its use: pages lie anywhere, where the hardware cannot guess the next one. Into the second
// level cache, as the first one waits for too few lines at a time (twice the bandwidth on Zen 4). Always inlined: a
// function that does nothing but this has no effect that GCC would know, and calls of it are dropped.
template <typename T>
CHUNKC_INLINE void prefetch_row(const T* row, int64_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < dim * int64_t(sizeof(T)); i += 64)
    __builtin_prefetch(bytes + i, 0, 2);
}

// Memory that only grows, aligned so that no vector straddles two cache lines.
template <typename T>
class Buffer {
 public:
  T* reserve(int64_t n) {
    if (n > size_) {
      const size_t bytes = round_up(n * sizeof(T), kLine);
      size_ = 0;
      memory_.reset(static_cast<T*>(std::aligned_alloc(kLine, bytes)));
      if (!memory_)
        throw std::bad_alloc();
      size_ = n;
    }
    return memory_.get();
  }
  T* data() const { return memory_.get(); }
  T& operator[](int64_t i) const { return memory_.get()[i]; }

 private:
  static constexpr size_t kLine = 64;
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t size_ = 0;
};

// A thread's memory, kept between calls. The first part is a task's state: what its rows may see, and the sums over
// the keys so far. Scores are in units of log2, so that weights are powers of 2.
struct Workspace {
  Buffer<int32_t> first_key, last_key;  // [rows], both inclusive
  Buffer<float> output;                 // [rows][output_stride], not normalised
  Buffer<float> peak, total;            // [rows]
  Buffer<float> slopes;                 // [rows], ALiBi's, where there is one
  int64_t output_stride = 0;

  Buffer<float> scores, rescale, queries, keys, values, totals;
  Buffer<char> raw_queries;
  Buffer<const float*> query_rows, key_rows, value_rows, weight_columns;
  Buffer<const void*> rows;
};

}  // namespace chunkc
