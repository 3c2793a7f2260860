// Attention of a few rows over many keys, as in a decode: bound by the memory that the keys and values come from.
//
//   * Each key and value is read from memory once, for all rows, and as it lies there: nothing is packed.
//   * Scores are dot products along the rows of keys. The sums across lanes are done for kLanes keys at a time.
//   * Where bfloat16 are multiplied in pairs the weights are rounded to bfloat16, as in a prefill (see there), and two
//     values are multiplied at a time.
//   * While the keys of a tile are scored the next tile's keys are fetched ahead, and so with the values; the next
//     tile of a task's last one is the first of the task that the thread does next.
#pragma once

#include "cpu_call.h"
#include "cpu_pairs.h"

namespace chunkc {

constexpr int64_t kFewRows = 8;
constexpr int kRowBlock = 4;  // rows whose sums fit the registers at a time

// Rows to fetch ahead while those of a tile are used: the same rows of the next tile, and again, as a prefetch that
// finds too many others under way is dropped, the tile's own a little ahead. Of short rows few are under way at a time,
// and to ask again costs more than it brings (a sixth of the bandwidth with 128 bytes a row, nothing with 256, where of
// 512 a tenth is won). Nothing where it is empty.
template <typename T>
struct Ahead {
  const T* const* rows = nullptr;
  int64_t count = 0;
  const T* const* next_rows = nullptr;
  int64_t next_count = 0, dim = 0;

  CHUNKC_INLINE void fetch(int64_t j) const {
    constexpr int64_t kAgain = 16, kShort = 128;  // rows, bytes
    if (j < next_count)
      prefetch_row(next_rows[j], dim);
    if (dim * int64_t(sizeof(T)) > kShort && j + kAgain < count)
      prefetch_row(rows[j + kAgain], dim);
  }
};

// sums[r]: partial sums (see half_sums) of the products of query r with four keys.
template <typename T, int ROWS>
CHUNKC_INLINE void score_quad(const T* const* keys, const T* queries, int64_t dim, int64_t stride, Vec* sums) {
  Vec sum[ROWS][4];
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r)
    sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = Vec{};
  for (int64_t d = 0; d < dim; d += kChunk) {
    const int64_t n = std::min(dim - d, kChunk);
    const Chunk<T> key[4] = {
        load_chunk(keys[0] + d, n), load_chunk(keys[1] + d, n), load_chunk(keys[2] + d, n), load_chunk(keys[3] + d, n)};
    CHUNKC_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Chunk<T> query = load_chunk(queries + r * stride + d);
      CHUNKC_UNROLL
      for (int i = 0; i < 4; ++i)
        sum[r][i] = add_products<T>(sum[r][i], query, key[i]);
    }
  }
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r)
    sums[r] = half_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

// scores[r][j] = queries[r] . keys[j] for j up to count rounded up to kLanes; there are as many pointers.
// Queries are padded with zeros to whole chunks.
template <typename T, int ROWS>
void score_keys(
    const T* const* keys, int64_t count, const T* queries, int64_t dim, float* scores, const Ahead<T>& ahead) {
  const int64_t stride = round_up(dim, kChunk);
  for (int64_t j = 0; j < count; j += kLanes) {
    Vec quads[kLanes / 4][ROWS];
    for (int quad = 0; quad < kLanes / 4; ++quad) {
      for (int i = 0; i < 4; ++i)
        ahead.fetch(j + 4 * quad + i);
      score_quad<T, ROWS>(keys + j + 4 * quad, queries, dim, stride, quads[quad]);
    }
    for (int r = 0; r < ROWS; ++r) {
      Vec row[kLanes / 4];
      for (int quad = 0; quad < kLanes / 4; ++quad)
        row[quad] = quads[quad][r];
      store(scores + r * kTile + j, whole_sums(row));
    }
  }
}

// output[r] = rescale[r] * output[r] + sum_j weights[r][j] values[j] (weights as soft_max leaves them) for C chunks of columns from d on.
template <typename T, int ROWS, int C>
void add_columns(
    const T* const* values, int64_t count, const float* weights, const float* rescale, float* output, int64_t d,
    int64_t dim, const Ahead<T>& ahead) {
  const int64_t stride = round_up(dim, kChunk);
  Vec sums[ROWS][2 * C];
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    CHUNKC_UNROLL
    for (int i = 0; i < 2 * C; ++i)
      sums[r][i] = load(output + r * stride + d + i * kLanes) * rescale[r];
  }
  const int64_t n = C == 1 ? std::min(dim - d, kChunk) : kChunk;
  if constexpr (kPairsKeys<T>) {
    // Two keys at a time. The loads cost the same, and the products, which hold up a group of rows, half.
    const auto step = [&](int64_t j, const T* second, int64_t second_n) __attribute__((always_inline)) {
      CHUNKC_UNROLL
      for (int i = 0; i < C; ++i) {
        VecInt pairs[2];
        pair_chunks(load_chunk(values[j] + d + i * kChunk, n), load_chunk(second + d + i * kChunk, second_n), pairs);
        CHUNKC_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          const Pair weight = reinterpret_cast<const Pair*>(weights + r * kTile)[j / 2];
          sums[r][2 * i] = add_multiple(sums[r][2 * i], weight, pairs[0]);
          sums[r][2 * i + 1] = add_multiple(sums[r][2 * i + 1], weight, pairs[1]);
        }
      }
    };
    for (int64_t j = 0; j + 1 < count; j += 2) {
      ahead.fetch(j);
      ahead.fetch(j + 1);
      step(j, values[j + 1], n);
    }
    if (count % 2)  // what lies behind the last key may be NaN: its partner is zeros
      step(count - 1, values[count - 1], 0);
  } else {
    for (int64_t j = 0; j < count; ++j) {
      ahead.fetch(j);
      CHUNKC_UNROLL
      for (int i = 0; i < C; ++i) {
        const Floats value = widen(load_chunk(values[j] + d + i * kChunk, n));
        CHUNKC_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          sums[r][2 * i] += weights[r * kTile + j] * value.first;
          sums[r][2 * i + 1] += weights[r * kTile + j] * value.second;
        }
      }
    }
  }
  CHUNKC_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    CHUNKC_UNROLL
    for (int i = 0; i < 2 * C; ++i)
      store(output + r * stride + d + i * kLanes, sums[r][i]);
  }
}

// All columns, in the order of `widen` or `pair_chunks` and padded to chunks.
template <typename T, int ROWS>
void add_values(
    const T* const* values, int64_t count, const float* weights, const float* rescale, float* output, int64_t dim,
    Ahead<T> ahead) {
  constexpr int kMany = kMaxVectors / 2;
  int64_t d = 0;
  for (; d + kMany * kChunk <= dim; d += kMany * kChunk, ahead = {})
    add_columns<T, ROWS, kMany>(values, count, weights, rescale, output, d, dim, ahead);
  for (; d < dim; d += kChunk, ahead = {})
    add_columns<T, ROWS, 1>(values, count, weights, rescale, output, d, dim, ahead);
}

// Turns the products of a row and a tile into scores; returns the largest so far. kAlibi: with a bias by distance,
// ws.slopes[r] * (key - position); a row's position is the last key that it sees.
template <bool kAlibi>
inline float finish_row(
    const Call& call, const Workspace& ws, int64_t r, float* scores, int64_t begin, int64_t count, bool masked) {
  const int64_t padded = round_up(count, kLanes);
  const float scale = call.scale * kLog2E;
  const VecInt first = VecInt{} + ws.first_key[r];
  const VecInt last = VecInt{} + std::min<int32_t>(ws.last_key[r], begin + count - 1);
  Vec peaks = splat(ws.peak[r]);
  for (int64_t j = 0; j < padded; j += kLanes) {
    Vec s = load(scores + j);
    if (call.softcap > 0)
      s = tanh(s * (call.scale / call.softcap)) * (call.softcap * kLog2E);
    else
      s = s * scale;
    const VecInt key = lane_numbers() + static_cast<int32_t>(begin + j);
    if constexpr (kAlibi)
      s += to_floats(key - ws.last_key[r]) * ws.slopes[r];
    if (masked || padded != count)
      s = ((key >= first) & (key <= last)) ? s : splat(kMinusInf);
    store(scores + j, s);
    peaks = max(s, peaks);
  }
  return largest(peaks);
}

template <typename T>
class FewRows {
 public:
  // Leaves the task's sums in the workspace. `query(r)` is the pointer to a row's query. The first tile may have been
  // `fetched`, as the one of `after` (or nullptr) is then.
  template <typename Query>
  static void attend(
      const Call& call, const Task& task, const TaskRows<T>& at, const Query& query, Workspace& ws, bool fetched,
      const TaskRows<T>* after) {
    FewRows(call, task, ws).run(at, query, fetched, after);
  }

 private:
  FewRows(const Call& call, const Task& task, Workspace& ws)
      : call_(call), task_(task), ws_(ws), rows_(task.row_end - task.row_begin) {}

  template <typename Query>
  void run(const TaskRows<T>& at, const Query& query, bool fetched, const TaskRows<T>* after) {
    const PagedRows<T>&keys = at.keys, &values = at.values;
    const int64_t qk = round_up(keys.dim, kChunk), vd = round_up(values.dim, kChunk);
    const T** pointers = reinterpret_cast<const T**>(ws_.rows.reserve(4 * kTile));
    Tile tile{pointers, pointers + kTile}, upcoming{pointers + 2 * kTile, pointers + 3 * kTile};
    tile.find(at, at.begin);
    if (!fetched)
      tile.fetch(keys.dim, values.dim);
    T* queries = reinterpret_cast<T*>(ws_.raw_queries.reserve(rows_ * qk * sizeof(T)));
    for (int64_t r = 0; r < rows_; ++r) {
      std::copy_n(query(r), keys.dim, queries + r * qk);
      std::fill(queries + r * qk + keys.dim, queries + (r + 1) * qk, T(0.0f));
    }
    scores_ = ws_.scores.reserve(rows_ * kTile);
    totals_ = ws_.totals.reserve(rows_ * kLanes);
    ws_.rescale.reserve(rows_), ws_.peak.reserve(rows_), ws_.total.reserve(rows_);
    ws_.output_stride = vd;
    float* output = ws_.output.reserve(rows_ * vd);
    std::fill_n(output, rows_ * vd, 0.0f);
    std::fill_n(totals_, rows_ * kLanes, 0.0f);
    std::fill_n(ws_.peak.data(), rows_, kMinusInf);
    const int64_t all_see_from = *std::max_element(ws_.first_key.data(), ws_.first_key.data() + rows_);
    const int64_t all_see_to = *std::min_element(ws_.last_key.data(), ws_.last_key.data() + rows_);

    for (int64_t begin = at.begin; begin < at.end; std::swap(tile, upcoming)) {
      const int64_t next = begin + tile.count;
      if (next == at.end && after)
        upcoming.find(*after, after->begin);
      else
        upcoming.find(at, next);
      by_row_blocks([&](auto rows, int64_t r) {
        const Ahead<T> ahead{tile.keys, tile.count, upcoming.keys, upcoming.count, keys.dim};
        score_keys<T, rows.value>(
            tile.keys, tile.count, queries + r * qk, keys.dim, scores_ + r * kTile, r ? Ahead<T>{} : ahead);
      });
      const bool masked = begin < all_see_from || next - 1 > all_see_to;
      for (int64_t r = 0; r < rows_; ++r)
        soft_max(r, begin, tile.count, masked);
      by_row_blocks([&](auto rows, int64_t r) {
        const Ahead<T> ahead{tile.values, tile.count, upcoming.values, upcoming.count, values.dim};
        add_values<T, rows.value>(
            tile.values, tile.count, scores_ + r * kTile, ws_.rescale.data() + r, output + r * vd, values.dim,
            r ? Ahead<T>{} : ahead);
      });
      begin = next;
    }
    for (int64_t r = 0; r < rows_; ++r) {
      ws_.total[r] = sum(load(totals_ + r * kLanes));
      restore_order(output + r * vd, vd);
    }
  }

  // Where the keys and values of a tile lie. The keys' pointers are padded to whole vectors with the last one.
  struct Tile {
    const T **keys, **values;
    int64_t count = 0;

    void find(const TaskRows<T>& all, int64_t begin) {
      count = std::min(kTile, all.end - begin);
      if (count <= 0)
        return;
      all.keys.find(begin, count, keys);
      all.values.find(begin, count, values);
      std::fill(keys + count, keys + round_up(count, kLanes), keys[count - 1]);
    }

    void fetch(int64_t qk_dim, int64_t v_dim) const {
      for (int64_t j = 0; j < count; ++j)
        prefetch_row(keys[j], qk_dim);
      for (int64_t j = 0; j < count; ++j)
        prefetch_row(values[j], v_dim);
    }
  };

  template <typename F>
  void by_row_blocks(const F& f) const {
    static_assert(kRowBlock == 4);
    for (int64_t r = 0; r < rows_; r += kRowBlock) {
      switch (rows_ - r) {
        case 1: f(std::integral_constant<int, 1>(), r); break;
        case 2: f(std::integral_constant<int, 2>(), r); break;
        case 3: f(std::integral_constant<int, 3>(), r); break;
        default: f(std::integral_constant<int, 4>(), r); break;
      }
    }
  }

  // Online softmax: turns a row's scores into weights, updates its peak and total, and sets the factor by which
  // what was summed before must be multiplied.
  void soft_max(int64_t r, int64_t begin, int64_t count, bool masked) const {
    float* scores = scores_ + r * kTile;
    const int64_t padded = round_up(count, kLanes);
    const float old_peak = ws_.peak[r];
    const auto finish = call_.alibi_slopes ? finish_row<true> : finish_row<false>;
    const float peak = finish(call_, ws_, r, scores, begin, count, masked);
    // A row that has seen no key yet has peak -inf; 0 in its place keeps -inf - -inf out, and its weights are 0.
    const Vec base = splat(peak == kMinusInf ? 0.0f : peak);
    const float rescale = exp2_nonpositive(splat(old_peak) - base)[0];
    Vec total = load(totals_ + r * kLanes) * rescale;
    const auto weight = [&](int64_t j) { return exp2_nonpositive(load(scores + j) - base); };
    if constexpr (kPairsKeys<T>) {
      for (int64_t j = 0; j < padded; j += 2 * kLanes) {  // over the scores that have been read
        const VecInt pairs = pair_neighbours(weight(j), j + kLanes < padded ? weight(j + kLanes) : Vec{});
        store(scores + j / 2, as<Vec>(pairs));
        total = add_pairs(total, pairs);
      }
    } else {
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec w = weight(j);
        store(scores + j, w);
        total += w;
      }
    }
    store(totals_ + r * kLanes, total);
    ws_.peak[r] = peak;
    ws_.rescale[r] = rescale;
  }

  static void restore_order(float* row, int64_t padded_dim) {
    if constexpr (!std::is_same_v<T, c10::BFloat16>)
      return;
    for (int64_t d = 0; d < padded_dim; d += kChunk) {
      float widened[kChunk];
      std::copy_n(row + d, kChunk, widened);
      for (int64_t i = 0; i < kChunk; ++i)
        row[d + i] = widened[kPairsKeys<T> ? paired_index(i) : widened_index<T>(i)];
    }
  }

  const Call& call_;
  const Task& task_;
  Workspace& ws_;
  const int64_t rows_;
  float *scores_ = nullptr, *totals_ = nullptr;
};

}  // namespace chunkc
