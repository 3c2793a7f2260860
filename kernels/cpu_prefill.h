// Attention of many rows, as in a chunk of a prompt: bound by arithmetic.
//
//   * The rows' queries are laid out once as Q^T [qk_dim][rows].
//   * The keys are walked in tiles of 64, and all rows of the task share each tile. Keys are used where they lie in
//     the pages; only what the products cannot read (float16, say) is widened to float first, once per task.
//   * Scores are held transposed, S^T [keys][rows]: a vector holds the scores of several rows for one key, so masks,
//     softcap, exp and the online softmax need no sums across the lanes of a vector. They stay in the cache.
//   * O [rows][v_dim] is the running output, rescaled while P V is added. The weights P keep float's precision, but
//     where bfloat16 are multiplied in pairs: there they are rounded to bfloat16, as P V would take twice as long, and
//     a tile's values are laid out once in pairs along the keys.
//   * Of a tile on the edge of the mask, only the rows that see some of it take part (in whole vectors).
#pragma once

#include "cpu_call.h"
#include "cpu_pairs.h"

namespace chunkc {

// Turns the products of kLanes rows from r on with a tile's keys, `stride` apart, into scores; returns the largest so
// far of each. kAlibi: as in finish_row.
template <bool kAlibi>
inline Vec finish_lanes(
    const Call& call, const Workspace& ws, int64_t r, float* scores, int64_t stride, int64_t begin, int64_t count) {
  const float scale = std::abs(call.scale);
  const VecInt first = load(ws.first_key.data() + r), last = load(ws.last_key.data() + r);
  const Vec slope = kAlibi ? load(ws.slopes.data() + r) : Vec{};
  Vec peak = load(ws.peak.data() + r);
  for (int64_t j = 0; j < count; ++j) {
    Vec s = load(scores + j * stride);
    if (call.softcap > 0)
      s = tanh(s * (scale / call.softcap)) * (call.softcap * kLog2E);
    else
      s = s * (scale * kLog2E);
    const VecInt key = VecInt{} + static_cast<int32_t>(begin + j);
    if constexpr (kAlibi)
      s += to_floats(key - last) * slope;
    s = ((key >= first) & (key <= last)) ? s : splat(kMinusInf);
    store(scores + j * stride, s);
    peak = max(s, peak);
  }
  return peak;
}

template <typename T>
class ManyRows {
 public:
  // Leaves the task's sums in the workspace. `query_of(task, r)` is the pointer to a row's query.
  template <typename Query>
  static void attend(
      const Call& call, const Task& task, const View<const T>& k_pages, const View<const T>& v_pages,
      const Query& query_of, Workspace& ws) {
    const PagedRows<T> keys(call, k_pages, task.request, task.kv_head, call.qk_dim);
    const PagedRows<T> values(call, v_pages, task.request, task.kv_head, call.v_dim);
    const auto query = [&](int64_t r) { return query_of(task, r); };
    ManyRows self(call, task, values.dim, ws);
    if constexpr (kMultipliesPairs && std::is_same_v<T, c10::BFloat16>) {
      if (keys.dim % 2 == 0)
        return self.template run<Pair>(keys, values, query);
    }
    self.template run<float>(keys, values, query);
  }

 private:
  ManyRows(const Call& call, const Task& task, int64_t v_dim, Workspace& ws)
      : call_(call), task_(task), ws_(ws), rows_(task.row_end - task.row_begin), padded_(round_up(rows_, kLanes)),
        vd_(round_up(v_dim, kLanes)) {}

  // E: what elements the scores are computed from.
  template <typename E, typename Query>
  void run(const PagedRows<T>& keys, const PagedRows<T>& values, const Query& query) {
    prepare();
    lay_out_queries<E>(keys.dim, query);
    const T** key_rows = reinterpret_cast<const T**>(ws_.rows.reserve(2 * kTile));
    const T** value_rows = key_rows + kTile;
    int64_t seeing = 0;  // first row that sees the tile's last keys or later ones: earlier ones see less and less
    bool found = false;  // whether key_rows holds the tile's keys
    for (int64_t begin = task_.kv_begin, end; begin < task_.kv_end; begin = end) {
      end = std::min<int64_t>(begin + kTile, task_.kv_end);
      const int64_t count = end - begin;
      // The rows that see keys of this tile lie side by side, as both ends of what a row sees grow with the row.
      while (seeing < rows_ && ws_.last_key[seeing] < begin)
        ++seeing;
      const int64_t stop = std::upper_bound(ws_.first_key.data() + seeing, ws_.first_key.data() + rows_, end - 1) -
          ws_.first_key.data();
      const int64_t from = seeing / kLanes * kLanes, to = round_up(stop, kLanes);
      if (from >= to) {
        found = false;
        continue;
      }
      if (!found)
        keys.find(begin, count, key_rows);
      values.find(begin, count, value_rows);
      fetch(value_rows, count, values.dim);
      score<E>(key_rows, count, keys.dim, from, to);
      const bool masked = ws_.last_key[from] < end - 1 || ws_.first_key[std::min(to, rows_) - 1] > begin;
      for (int64_t r = from; r < to; r += kLanes)
        soft_max(r, begin, count, masked);
      found = end < task_.kv_end;
      if (found) {
        const int64_t next_count = std::min(kTile, task_.kv_end - end);
        keys.find(end, next_count, key_rows);
        fetch(key_rows, next_count, keys.dim);
      }
      if constexpr (kPairsKeys<T>)
        add_values(as_pairs(value_rows, count, values.dim), (count + 1) / 2, from, to);
      else
        add_values(as_floats(value_rows, count, values.dim, ws_.values, ws_.value_rows), count, from, to);
    }
  }

  // O = rescale * O + P V of the rows from .. to - 1.
  template <typename E>
  void add_values(const E* const* values, int64_t depth, int64_t from, int64_t to) const {
    const E* const* weights = reinterpret_cast<const E* const*>(ws_.weight_columns.data());
    multiply(
        weights + from, padded_, values, depth, ws_.output.data() + from * vd_, vd_, ws_.rescale.data() + from,
        std::min(to, rows_) - from, 0, vd_);
  }

  // Rows of values, two in one. A last one without partner is paired with zeros, whose weight is 0 too: what lies
  // behind it may be NaN.
  const Pair* const* as_pairs(const T* const* rows, int64_t count, int64_t dim) const {
    const int64_t padded = round_up(dim, kChunk);
    float* to = ws_.values.reserve(kTile / 2 * padded);
    const float** pointers = ws_.value_rows.reserve(kTile);
    for (int64_t j = 0; j < count; j += 2, to += padded) {
      interleave(rows[j], j + 1 < count ? rows[j + 1] : nullptr, dim, reinterpret_cast<Pair*>(to));
      pointers[j / 2] = to;
    }
    return reinterpret_cast<const Pair* const*>(pointers);
  }

  static CHUNKC_INLINE void fetch(const T* const* rows, int64_t count, int64_t dim) {
    for (int64_t j = 0; j < count; ++j)
      prefetch_row(rows[j], dim);
  }

  void prepare() {
    ws_.output_stride = vd_;
    std::fill_n(ws_.output.reserve(rows_ * vd_), rows_ * vd_, 0.0f);
    std::fill_n(ws_.peak.reserve(padded_), padded_, kMinusInf);
    std::fill_n(ws_.total.reserve(padded_), padded_, 0.0f);
    ws_.rescale.reserve(padded_);
    float* scores = ws_.scores.reserve(kTile * padded_);
    ws_.weight_columns.reserve(rows_);
    for (int64_t r = 0; r < rows_; ++r)
      ws_.weight_columns[r] = scores + r;
    // Idle lanes: their scores are finite and nobody reads them.
    for (int64_t r = rows_; r < padded_; ++r)
      ws_.first_key[r] = 0, ws_.last_key[r] = std::numeric_limits<int32_t>::max();
  }

  // Q^T, negated where the scale is negative, so that the largest product is the largest score.
  template <typename E, typename Query>
  void lay_out_queries(int64_t dim, const Query& query) {
    constexpr bool kPairs = std::is_same_v<E, Pair>;
    const int64_t depth = kPairs ? dim / 2 : dim, padded_dim = round_up(dim, kLanes);
    float* lines = ws_.queries.reserve(depth * padded_ + padded_dim);
    float* row = lines + depth * padded_;
    std::fill_n(lines, depth * padded_, 0.0f);
    ws_.query_rows.reserve(depth);
    for (int64_t d = 0; d < depth; ++d)
      ws_.query_rows[d] = lines + d * padded_;
    for (int64_t r = 0; r < rows_; ++r) {
      if constexpr (kPairs) {
        std::memcpy(row, query(r), dim * sizeof(T));
        const int32_t flip = call_.scale < 0 ? 0x80008000 : 0;
        for (int64_t d = 0; d < depth; ++d)
          lines[d * padded_ + r] = as<float>(as<int32_t>(row[d]) ^ flip);
      } else {
        widen_row(query(r), row, dim);
        for (int64_t d = 0; d < depth; ++d)
          lines[d * padded_ + r] = call_.scale < 0 ? -row[d] : row[d];
      }
    }
  }

  template <typename E>
  void score(const T** rows, int64_t count, int64_t dim, int64_t from, int64_t to) const {
    const E* const* keys;
    if constexpr (std::is_same_v<E, Pair> || std::is_same_v<T, float>)
      keys = reinterpret_cast<const E* const*>(rows);  // single elements are read: no padding is needed
    else
      keys = as_floats(rows, count, dim, ws_.keys, ws_.key_rows);
    const E* const* queries = reinterpret_cast<const E* const*>(ws_.query_rows.data());
    const int64_t depth = std::is_same_v<E, Pair> ? dim / 2 : dim;
    multiply(keys, 1, queries, depth, ws_.scores.data(), padded_, nullptr, count, from, to);
  }

  // Rows as vectors of floats can be read from them: where they lie, or widened and padded with zeros into `buffer`.
  static const float* const* as_floats(
      const T* const* rows, int64_t count, int64_t dim, Buffer<float>& buffer, Buffer<const float*>& pointers) {
    const int64_t padded = round_up(dim, kLanes);
    if constexpr (std::is_same_v<T, float>) {
      if (dim == padded)
        return rows;
    }
    float* to = buffer.reserve(kTile * padded);
    const float** pointer = pointers.reserve(kTile);
    for (int64_t j = 0; j < count; ++j, to += padded) {
      widen_row(rows[j], to, dim);
      pointer[j] = to;
    }
    return pointer;
  }

  // Online softmax of kLanes rows from r on: turns the products of a tile into weights, updates peak and total, and
  // sets the factor by which what was summed before must be multiplied.
  void soft_max(int64_t r, int64_t begin, int64_t count, bool masked) const {
    float* scores = ws_.scores.data() + r;
    const float scale = std::abs(call_.scale);
    const bool alibi = call_.alibi_slopes != nullptr, edit = alibi || masked || call_.softcap > 0;
    const Vec old_peak = load(ws_.peak.data() + r);
    Vec peak = old_peak;
    if (edit) {
      const auto finish = alibi ? finish_lanes<true> : finish_lanes<false>;
      peak = finish(call_, ws_, r, scores, padded_, begin, count);
    } else {
      Vec largest = load(scores);
      for (int64_t j = 1; j < count; ++j)
        largest = max(load(scores + j * padded_), largest);
      peak = max(largest * (scale * kLog2E), peak);
    }
    // A row that has seen no key yet has peak -inf; 0 in its place keeps -inf - -inf out, and its weights are 0.
    const Vec base = peak == kMinusInf ? Vec{} : peak;
    const Vec rescale = exp2_nonpositive(old_peak - base);
    const float factor = edit ? 1.0f : scale * kLog2E;
    Vec total = load(ws_.total.data() + r) * rescale;
    const auto exponent = [&](int64_t j) { return load(scores + j * padded_) * factor - base; };
    if constexpr (kPairsKeys<T>) {
      // The pairs go over the scores that have been read. The total is that of the rounded weights: so they still
      // average the values (the weights over the total sum up to 1), and what rounding shifts is at most its share of
      // the values' distances from the result, not of the values; equal values come out as they are.
      const auto put = [&](int64_t pair, Vec first, Vec second) {
        const VecInt weights = round_to_pairs(first, second);
        store(scores + pair * padded_, as<Vec>(weights));
        total = add_pairs(total, weights);
      };
      for (int64_t j = 0; j + 1 < count; j += 2)
        put(j / 2, coarse_exp2(exponent(j)), coarse_exp2(exponent(j + 1)));
      if (count % 2)
        put(count / 2, coarse_exp2(exponent(count - 1)), Vec{});
    } else {
      for (int64_t j = 0; j < count; ++j) {
        const Vec weight = exp2_nonpositive(exponent(j));
        store(scores + j * padded_, weight);
        total += weight;
      }
    }
    store(ws_.peak.data() + r, peak);
    store(ws_.total.data() + r, total);
    store(ws_.rescale.data() + r, rescale);
  }

  const Call& call_;
  const Task& task_;
  Workspace& ws_;
  const int64_t rows_, padded_, vd_;
};

}  // namespace chunkc
