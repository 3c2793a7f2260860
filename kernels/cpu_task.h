// One task: attention of some rows of a request over a range of its keys, and the merging of split blocks.
//
//   * The rows (query tokens x group) are laid out once as Q^T [qk_dim][rows], scaled.
//   * The keys are walked in tiles of 64. All rows of the task share each tile, so a key is read from the cache and
//     widened to float once per task, not once per query head.
//   * Scores are held transposed, S^T [keys][rows]: a vector holds the scores of several rows for one key, so masks,
//     softcap, exp and the online softmax need no sums across the lanes of a vector.
//   * O [rows][v_dim] is the running output, rescaled while P V is added.
//
// Both products run through one register tile (`multiply`). With only a few rows (a decode) most lanes of S^T would
// idle, and the scores are plain dot products instead.
#pragma once

#include "cpu_products.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace chunkc {

constexpr int64_t kTile = 64;    // keys per tile
constexpr int64_t kFewRows = 4;  // up to here scores are dot products

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
  const float* sinks;  // [Hq] or nullptr
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

  explicit View(const at::Tensor& t)
      : data(t.data_ptr<std::remove_const_t<T>>()), stride0(t.stride(0)), stride1(t.stride(1)),
        stride2(t.dim() == 4 ? t.stride(2) : 0) {}
  T* at(int64_t i, int64_t j, int64_t k = 0) const { return data + i * stride0 + j * stride1 + k * stride2; }
};

// Per-thread memory, kept between calls.
struct Workspace {
  std::vector<float> queries, queries_t, scores, keys, values, output;
  std::vector<float> peak, total, rescale;
  std::vector<int32_t> first_key, last_key;
  std::vector<const float*> key_rows, value_rows, query_rows, weight_columns;

  void reserve(int64_t rows, int64_t qk_dim, int64_t v_dim) {
    grow(queries, rows * qk_dim), grow(queries_t, qk_dim * rows), grow(scores, kTile * rows);
    grow(keys, kTile * qk_dim), grow(values, kTile * v_dim), grow(output, rows * v_dim);
    grow(peak, rows), grow(total, rows), grow(rescale, rows), grow(first_key, rows), grow(last_key, rows);
    grow(key_rows, kTile), grow(value_rows, kTile), grow(query_rows, qk_dim), grow(weight_columns, rows);
  }
  template <typename T>
  static void grow(std::vector<T>& v, int64_t n) {
    if (static_cast<int64_t>(v.size()) < n)
      v.resize(n);
  }
};

// Pointers to `count` rows of a paged tensor as floats: into the pages where the layout allows it, else into `buffer`.
template <typename T>
void tile_rows(
    const Call& call, const View<const T>& pages, const int32_t* table, int64_t head, int64_t begin, int64_t count,
    int64_t dim, float* buffer, const float** rows) {
  const int64_t padded = round_up(dim, kLanes);
  for (int64_t j = 0; j < count;) {
    const int64_t page = table[(begin + j) / call.page_size], offset = (begin + j) % call.page_size;
    TORCH_CHECK_INDEX(page >= 0 && page < call.num_pages, "mixed_attention: page ", page, " is not in the cache");
    const int64_t run = std::min(count - j, call.page_size - offset);
    const T* source = pages.at(page, head, offset);
    for (int64_t i = 0; i < run; ++i, ++j, source += pages.stride2) {
      if constexpr (std::is_same_v<T, float>) {
        if (dim == padded) {
          rows[j] = source;
          continue;
        }
      }
      widen(source, buffer + j * padded, dim);
      rows[j] = buffer + j * padded;
    }
  }
}

// Asks for the same rows ahead of their use: pages lie anywhere, where the hardware cannot guess the next one.
template <typename T>
void prefetch_rows(
    const Call& call, const View<const T>& pages, const int32_t* table, int64_t head, int64_t begin, int64_t end,
    int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t key = begin; key < end;) {
    const int64_t offset = key % call.page_size, run = std::min(end - key, call.page_size - offset);
    const T* source = pages.at(table[key / call.page_size], head, offset);
    for (int64_t i = 0; i < run; ++i, ++key, source += pages.stride2)
      for (int64_t d = 0; d < dim; d += kLine)
        __builtin_prefetch(source + d);
  }
}

template <typename T>
class Body {
 public:
  Body(const Call& call, const at::Tensor& q, const at::Tensor& k_pages, const at::Tensor& v_pages, at::Tensor& out)
      : call_(call), q_(q), k_pages_(k_pages), v_pages_(v_pages), out_(out) {}

  void run(const Task& task, Workspace& ws) const {
    check(task);
    const int64_t rows = task.row_end - task.row_begin, padded_rows = round_up(rows, kLanes);
    const int64_t qk = round_up(call_.qk_dim, kLanes), vd = round_up(call_.v_dim, kLanes);
    ws.reserve(padded_rows, qk, vd);
    std::fill_n(ws.output.data(), rows * vd, 0.0f);
    std::fill_n(ws.peak.data(), padded_rows, kMinusInf);
    std::fill_n(ws.total.data(), padded_rows, 0.0f);
    load_queries(task, rows, padded_rows, qk, ws);
    const int64_t all_see_from = *std::max_element(ws.first_key.begin(), ws.first_key.begin() + rows);
    const int64_t all_see_to = *std::min_element(ws.last_key.begin(), ws.last_key.begin() + rows);

    const int32_t* table = call_.page_table + int64_t(task.request) * call_.page_table_stride;
    for (int64_t begin = task.kv_begin; begin < task.kv_end; begin += kTile) {
      const int64_t count = std::min<int64_t>(kTile, task.kv_end - begin);
      tile_rows<T>(
          call_, k_pages_, table, task.kv_head, begin, count, call_.qk_dim, ws.keys.data(), ws.key_rows.data());
      prefetch_rows<T>(call_, v_pages_, table, task.kv_head, begin, begin + count, call_.v_dim);
      score(rows, padded_rows, qk, count, ws);
      const bool masked = begin < all_see_from || begin + count - 1 > all_see_to;
      soft_max(begin, count, padded_rows, masked, ws);
      tile_rows<T>(
          call_, v_pages_, table, task.kv_head, begin, count, call_.v_dim, ws.values.data(), ws.value_rows.data());
      const int64_t next_end = std::min<int64_t>(begin + 2 * kTile, task.kv_end);
      prefetch_rows<T>(call_, k_pages_, table, task.kv_head, begin + count, next_end, call_.qk_dim);
      multiply(
          ws.weight_columns.data(), padded_rows, ws.value_rows.data(), count,
          ws.output.data(), vd, ws.rescale.data(), rows, vd);
    }
    if (task.partial < 0) {
      for (int64_t r = 0; r < rows; ++r)
        write(task.request, task.kv_head, task.row_begin + r, ws.output.data() + r * vd, ws.peak[r], ws.total[r]);
      return;
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* partial = call_.partials + (int64_t(task.partial) + r) * call_.partial_stride();
      std::copy_n(ws.output.data() + r * vd, call_.v_dim, partial);
      partial[call_.v_dim] = ws.peak[r];
      partial[call_.v_dim + 1] = ws.total[r];
    }
    // acq_rel: whoever takes the last piece sees what the others wrote.
    if (call_.pieces_left[task.merge].fetch_sub(1, std::memory_order_acq_rel) == 1)
      merge(call_.merges[task.merge], ws);
  }

 private:
  void check(const Task& task) const {
    TORCH_CHECK_INDEX(
        task.request >= 0 && task.request < call_.num_requests && task.kv_head >= 0 &&
            task.kv_head < call_.num_kv_heads,
        "mixed_attention: a task names request ", task.request, " and key/value head ", task.kv_head,
        ", which the batch does not have");
    const int64_t first = call_.q_offsets[task.request], last = call_.q_offsets[task.request + 1];
    TORCH_CHECK_INDEX(
        first >= 0 && last <= call_.num_tokens && task.row_begin >= 0 && task.row_begin < task.row_end &&
            task.row_end <= (last - first) * call_.group,
        "mixed_attention: a task names rows that request ", task.request, " does not have");
    TORCH_CHECK_INDEX(
        task.kv_begin >= 0 && task.kv_begin < task.kv_end &&
            task.kv_end <= std::min<int64_t>(call_.kv_lens[task.request], call_.page_table_stride * call_.page_size),
        "mixed_attention: a task names keys that request ", task.request, " does not have");
  }

  // Fills queries (rows contiguous, for dot products) or queries_t, the key range of each row, and weight_columns.
  void load_queries(const Task& task, int64_t rows, int64_t padded_rows, int64_t qk, Workspace& ws) const {
    const int64_t first_token = call_.q_offsets[task.request];
    const int64_t q_len = call_.q_offsets[task.request + 1] - first_token;
    for (int64_t r = 0; r < padded_rows; ++r) {
      float* query = ws.queries.data() + r * qk;
      if (r >= rows) {  // idle lanes: their scores are finite and nobody reads them
        std::fill_n(query, qk, 0.0f);
        ws.first_key[r] = 0;
        ws.last_key[r] = std::numeric_limits<int32_t>::max();
        continue;
      }
      const int64_t index = (task.row_begin + r) / call_.group, head = (task.row_begin + r) % call_.group;
      widen(q_.at(first_token + index, task.kv_head * call_.group + head), query, call_.qk_dim);
      for (int64_t d = 0; d < qk; ++d)
        query[d] *= call_.scale;
      const int64_t position = call_.kv_lens[task.request] - q_len + index;
      int64_t first = 0;
      if (call_.window > 0)
        first = std::max(first, position - call_.window + 1);
      if (call_.chunk > 0)
        first = std::max(first, position / call_.chunk * call_.chunk);
      ws.first_key[r] = first;
      ws.last_key[r] = position;
      ws.weight_columns[r] = ws.scores.data() + r;
    }
    if (rows <= kFewRows)
      return;
    for (int64_t d = 0; d < qk; ++d) {
      float* line = ws.queries_t.data() + d * padded_rows;
      ws.query_rows[d] = line;
      for (int64_t r = 0; r < padded_rows; ++r)
        line[r] = ws.queries[r * qk + d];
    }
  }

  void score(int64_t rows, int64_t padded_rows, int64_t qk, int64_t count, Workspace& ws) const {
    const float* const* keys = ws.key_rows.data();
    float* scores = ws.scores.data();
    if (rows > kFewRows) {
      multiply(keys, 1, ws.query_rows.data(), qk, scores, padded_rows, nullptr, count, padded_rows);
      return;
    }
    static_assert(kFewRows == 4 && kLanes >= kFewRows);
    std::fill_n(scores, count * padded_rows, 0.0f);
    switch (rows) {
      case 1: return dot_products<1>(keys, count, ws.queries.data(), qk, scores, padded_rows);
      case 2: return dot_products<2>(keys, count, ws.queries.data(), qk, scores, padded_rows);
      case 3: return dot_products<3>(keys, count, ws.queries.data(), qk, scores, padded_rows);
      default: return dot_products<4>(keys, count, ws.queries.data(), qk, scores, padded_rows);
    }
  }

  // Online softmax: turns the scores of a tile into weights, updates peak and total, and sets the factor `rescale`
  // by which what was summed before must be multiplied.
  void soft_max(int64_t begin, int64_t count, int64_t padded_rows, bool masked, Workspace& ws) const {
    for (int64_t r = 0; r < padded_rows; r += kLanes) {
      float* scores = ws.scores.data() + r;
      const VecInt first = load(ws.first_key.data() + r), last = load(ws.last_key.data() + r);
      const Vec old_peak = load(ws.peak.data() + r);
      Vec peak = old_peak;
      for (int64_t j = 0; j < count; ++j) {
        Vec s = load(scores + j * padded_rows);
        if (call_.softcap > 0)
          s = tanh(s / call_.softcap) * call_.softcap;
        if (masked) {
          const VecInt key = VecInt{} + static_cast<int32_t>(begin + j);
          s = (key >= first) & (key <= last) ? s : splat(kMinusInf);
        }
        if (masked || call_.softcap > 0)
          store(scores + j * padded_rows, s);
        peak = max(s, peak);
      }
      // A row that has seen no key yet has peak -inf; 0 in its place keeps -inf - -inf out, and its weights are 0.
      const Vec base = peak == kMinusInf ? Vec{} : peak;
      const Vec rescale = exp_nonpositive(old_peak - base);
      Vec total = load(ws.total.data() + r) * rescale;
      for (int64_t j = 0; j < count; ++j) {
        const Vec weight = exp_nonpositive(load(scores + j * padded_rows) - base);
        store(scores + j * padded_rows, weight);
        total += weight;
      }
      store(ws.peak.data() + r, peak);
      store(ws.total.data() + r, total);
      store(ws.rescale.data() + r, rescale);
    }
  }

  // Adds up the pieces of a split block, in the order of the keys.
  void merge(const Merge& merge, Workspace& ws) const {
    const int64_t rows = merge.row_end - merge.row_begin;
    for (int64_t r = 0; r < rows; ++r) {
      auto piece = [&](int64_t s) { return call_.partials + (merge.partial + s * rows + r) * call_.partial_stride(); };
      float peak = kMinusInf, total = 0;
      for (int64_t s = 0; s < merge.num_splits; ++s)
        peak = std::max(peak, piece(s)[call_.v_dim]);
      std::fill_n(ws.output.data(), call_.v_dim, 0.0f);
      for (int64_t s = 0; s < merge.num_splits; ++s) {
        const float* part = piece(s);
        const float weight = part[call_.v_dim] == kMinusInf ? 0.0f : std::exp(part[call_.v_dim] - peak);
        total += weight * part[call_.v_dim + 1];
        for (int64_t d = 0; d < call_.v_dim; ++d)
          ws.output[d] += weight * part[d];
      }
      write(merge.request, merge.kv_head, merge.row_begin + r, ws.output.data(), peak, total);
    }
  }

  // Brings the sink in, normalises one row and writes it.
  void write(int64_t request, int64_t kv_head, int64_t row, const float* sums, float peak, float total) const {
    const int64_t head = kv_head * call_.group + row % call_.group;
    float factor = 1;
    if (call_.sinks) {
      const float sink = call_.sinks[head], base = std::max(peak, sink);
      factor = peak == kMinusInf ? 0.0f : std::exp(peak - base);
      total = total * factor + std::exp(sink - base);
    }
    factor = total == 0 ? 0.0f : factor / total;
    T* out = out_.at(call_.q_offsets[request] + row / call_.group, head);
    for (int64_t d = 0; d < call_.v_dim; ++d)
      out[d] = static_cast<T>(sums[d] * factor);
  }

  const Call& call_;
  const View<const T> q_, k_pages_, v_pages_;
  const View<T> out_;
};

}  // namespace chunkc
