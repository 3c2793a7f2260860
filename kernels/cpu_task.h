// A task's computation: what its rows may see, their attention (few rows or many), and the merging of split blocks.
#pragma once

#include "cpu_decode.h"
#include "cpu_prefill.h"

namespace chunkc {

template <typename T>
class Body {
 public:
  Body(const Call& call, const Tensor& q, const Tensor& k_pages, const Tensor& v_pages, Tensor& out)
      : call_(call), q_(q), k_pages_(k_pages), v_pages_(v_pages), out_(out) {}

  // Whether the task's keys and values are read at the memory's pace, so that bundles are worth it, and what comes
  // after them may be asked for.
  static bool has_few_rows(const Task& task) { return task.row_end - task.row_begin <= kFewRows; }

  // Tasks must have been checked; a bundle of more than one has few rows. `after`, or nullptr, is what the same thread
  // does next: its first keys are asked for meanwhile where `bundle` has few rows. `fetched`: they were for this one.
  void run(const Bundle& bundle, Workspace& ws, bool fetched, const Bundle* after) const {
    const int64_t rows = bundle.first().row_end - bundle.first().row_begin;
    const auto query = [&](const Task& task, int64_t r) {
      const int64_t row = task.row_begin + r;
      return q_.at(call_.q_offsets[task.request] + row / call_.group, task.kv_head * call_.group + row % call_.group);
    };
    see_keys(bundle, rows, ws);
    if (call_.alibi_slopes)
      set_slopes(bundle, rows, ws);
    if (has_few_rows(bundle.first()))
      FewRows<T>::attend(call_, bundle, k_pages_, v_pages_, query, ws, fetched, after);
    else
      ManyRows<T>::attend(call_, bundle.first(), k_pages_, v_pages_, query, ws);
    for (int64_t i = 0; i < bundle.count; ++i)
      finish(bundle.tasks[i], i * rows, ws);
  }

 private:
  // Each row's slope in units of log2; 0 in the lanes of no row.
  void set_slopes(const Bundle& bundle, int64_t rows, Workspace& ws) const {
    const int64_t all = bundle.count * rows, padded = round_up(all, kLanes);
    float* slopes = ws.slopes.reserve(padded);
    std::fill_n(slopes, padded, 0.0f);
    for (int64_t i = 0; i < all; ++i) {
      const Task& task = bundle.tasks[i / rows];
      slopes[i] = call_.alibi_slopes[task.kv_head * call_.group + (task.row_begin + i % rows) % call_.group] * kLog2E;
    }
  }

  // Sets the range of keys that each row sees.
  void see_keys(const Bundle& bundle, int64_t rows, Workspace& ws) const {
    const Task& task = bundle.first();
    const int64_t padded = round_up(bundle.count * rows, kLanes);
    int32_t *first_key = ws.first_key.reserve(padded), *last_key = ws.last_key.reserve(padded);
    const int64_t q_len = call_.q_offsets[task.request + 1] - call_.q_offsets[task.request];
    int64_t position = call_.kv_lens[task.request] - q_len + task.row_begin / call_.group;
    for (int64_t r = 0, head = task.row_begin % call_.group; r < rows; ++position, head = 0) {
      int64_t first = 0;
      if (call_.window > 0)
        first = std::max(first, position - call_.window + 1);
      if (call_.chunk > 0)
        first = std::max(first, position / call_.chunk * call_.chunk);
      for (; head < call_.group && r < rows; ++head, ++r) {
        first_key[r] = first;
        last_key[r] = position;
      }
    }
    for (int64_t i = 1; i < bundle.count; ++i) {
      std::copy_n(first_key, rows, first_key + i * rows);
      std::copy_n(last_key, rows, last_key + i * rows);
    }
  }

  // Writes what the rows from `at` on in the workspace came to: the task's output, or its part of one.
  void finish(const Task& task, int64_t at, Workspace& ws) const {
    const int64_t rows = task.row_end - task.row_begin, stride = ws.output_stride;
    const float *output = ws.output.data() + at * stride, *peak = ws.peak.data() + at, *total = ws.total.data() + at;
    if (task.partial < 0) {
      for (int64_t r = 0; r < rows; ++r)
        write(task.request, task.kv_head, task.row_begin + r, output + r * stride, peak[r], total[r]);
      return;
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* partial = call_.partials + (int64_t(task.partial) + r) * call_.partial_stride();
      std::copy_n(output + r * stride, call_.v_dim, partial);
      partial[call_.v_dim] = peak[r];
      partial[call_.v_dim + 1] = total[r];
    }
    // acq_rel: whoever takes the last piece sees what the others wrote.
    if (call_.pieces_left[task.merge].fetch_sub(1, std::memory_order_acq_rel) == 1)
      merge(call_.merges[task.merge], ws);
  }

  // Adds up the pieces of a split block, in the order of the keys.
  void merge(const Merge& merge, Workspace& ws) const {
    const int64_t rows = merge.row_end - merge.row_begin;
    for (int64_t r = 0; r < rows; ++r) {
      auto piece = [&](int64_t s) { return call_.partials + (merge.partial + s * rows + r) * call_.partial_stride(); };
      float peak = kMinusInf, total = 0;
      for (int64_t s = 0; s < merge.num_splits; ++s)
        peak = std::max(peak, piece(s)[call_.v_dim]);
      float* sums = ws.output.data();  // has room for a row, and the first task in it is done
      std::fill_n(sums, call_.v_dim, 0.0f);
      for (int64_t s = 0; s < merge.num_splits; ++s) {
        const float* part = piece(s);
        const float weight = part[call_.v_dim] == kMinusInf ? 0.0f : std::exp2(part[call_.v_dim] - peak);
        total += weight * part[call_.v_dim + 1];
        for (int64_t d = 0; d < call_.v_dim; ++d)
          sums[d] += weight * part[d];
      }
      write(merge.request, merge.kv_head, merge.row_begin + r, sums, peak, total);
    }
  }

  // Brings the sink in, normalises one row and writes it.
  void write(int64_t request, int64_t kv_head, int64_t row, const float* sums, float peak, float total) const {
    const int64_t head = kv_head * call_.group + row % call_.group;
    float factor = 1;
    const float sink = call_.sinks ? call_.sinks[head] * kLog2E : kMinusInf;
    if (sink != kMinusInf) {  // else it has no share, though no key may have one either
      const float base = std::max(peak, sink);
      factor = peak == kMinusInf ? 0.0f : std::exp2(peak - base);
      total = total * factor + std::exp2(sink - base);
    }
    factor = total == 0 ? 0.0f : factor / total;
    narrow_row(sums, out_.at(call_.q_offsets[request] + row / call_.group, head), call_.v_dim, factor);
  }

  const Call& call_;
  const View<const T> q_, k_pages_, v_pages_;
  const View<T> out_;
};

}  // namespace chunkc
