// Attention of a few rows over many keys, as in a decode: bound by the memory that the keys and values come from.
//
//   * Each key and value is read from memory once, for all rows, and as it lies there: nothing is packed.
//   * Scores are dot products along the rows of keys. The sums across lanes are done for kLanes keys at a time.
//   * Where bfloat16 are multiplied in pairs the weights are rounded to bfloat16, as in a prefill (see there), and two
//     values are multiplied at a time.
//   * The heads of a request are done together, in the order that their keys lie in; and while the keys of a tile are
//     scored, the values of the one before are added up, a few of each in turns: see cpu_decode_tiles.h.
#pragma once

#include "cpu_decode_products.h"
#include "cpu_decode_tiles.h"

namespace chunkc {

constexpr int64_t kFewRows = 8;

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
  // Leaves the sums of the bundle's tasks in the workspace, one task's rows after the other's. `query(task, r)` is the
  // pointer to a row's query. The first tile may have been `fetched`, as the one of `after` (or nullptr) is then.
  template <typename Query>
  static void attend(
      const Call& call, const Bundle& bundle, const View<const T>& k_pages, const View<const T>& v_pages,
      const Query& query, Workspace& ws, bool fetched, const Bundle* after) {
    Tiles<T> tiles(call, k_pages, v_pages, bundle);
    FewRows self(call, bundle, ws);
    self.prepare(query);
    if (!after)
      return self.run(tiles, fetched, static_cast<Tiles<T>*>(nullptr));
    Tiles<T> later(call, k_pages, v_pages, *after);
    self.run(tiles, fetched, &later);
  }

 private:
  FewRows(const Call& call, const Bundle& bundle, Workspace& ws)
      : call_(call), bundle_(bundle), ws_(ws), rows_(bundle.first().row_end - bundle.first().row_begin),
        qk_(round_up(call.qk_dim, kChunk)), vd_(round_up(call.v_dim, kChunk)) {}

  template <typename Query>
  void prepare(const Query& query) {
    const int64_t all = bundle_.count * rows_;
    queries_ = reinterpret_cast<T*>(ws_.raw_queries.reserve(all * qk_ * sizeof(T)));
    for (int64_t i = 0; i < all; ++i) {
      T* row = queries_ + i * qk_;
      std::copy_n(query(bundle_.tasks[i / rows_], i % rows_), call_.qk_dim, row);
      std::fill(row + call_.qk_dim, row + qk_, T(0.0f));
    }
    scores_ = ws_.scores.reserve(2 * rows_ * kTile);
    totals_ = ws_.totals.reserve(all * kLanes);
    ws_.rescale.reserve(rows_), ws_.peak.reserve(all), ws_.total.reserve(all);
    ws_.output_stride = vd_;
    std::fill_n(ws_.output.reserve(all * vd_), all * vd_, 0.0f);
    std::fill_n(totals_, all * kLanes, 0.0f);
    std::fill_n(ws_.peak.data(), all, kMinusInf);
    all_see_from_ = *std::max_element(ws_.first_key.data(), ws_.first_key.data() + rows_);
    all_see_to_ = *std::min_element(ws_.last_key.data(), ws_.last_key.data() + rows_);
  }

  void run(Tiles<T>& tiles, bool fetched, Tiles<T>* after) {
    Tile<T> ring[3];
    Tile<T>*scored = nullptr, *scoring = &ring[0], *upcoming = &ring[1], *free = &ring[2];
    float *weights = scores_, *scores = scores_ + rows_ * kTile;
    tiles.next(*scoring);
    if (!fetched)
      fetch(*scoring);
    for (bool more = true; scoring || scored;) {
      if (scoring && !(more = tiles.next(*upcoming)) && after)
        after->next(*upcoming);
      step(scoring, scored, *upcoming, scores, weights);
      if (scoring)
        soft_max(*scoring, scores);
      std::swap(scores, weights);
      Tile<T>* done = scored ? scored : free;
      scored = scoring;
      scoring = more && scored ? upcoming : nullptr;
      if (scoring)
        upcoming = done;
    }
    const int64_t all = bundle_.count * rows_;
    for (int64_t i = 0; i < all; ++i) {
      ws_.total[i] = sum(load(totals_ + i * kLanes));
      restore_order(ws_.output.data() + i * vd_, vd_);
    }
  }

  // Scores the keys of one tile and adds up the values of another, kLanes of each in turns. Meanwhile what comes after
  // them is asked for.
  void step(
      const Tile<T>* scoring, const Tile<T>* scored, const Tile<T>& upcoming, float* scores, float* weights) const {
    const int64_t num_keys = scoring ? scoring->count : 0, num_values = scored ? scored->count : 0;
    const Tile<T>& next = scoring ? *scoring : upcoming;
    Ahead<T> keys_ahead, values_ahead;
    if (scoring)
      keys_ahead = ahead_of(scoring->keys, num_keys, upcoming.keys, upcoming.count, call_.qk_dim);
    if (scored)
      values_ahead = ahead_of(scored->values, num_values, next.values, next.count, call_.v_dim);
    const T* queries = scoring ? queries_ + scoring->head * rows_ * qk_ : nullptr;
    float* output = scored ? ws_.output.data() + scored->head * rows_ * vd_ : nullptr;
    for (int64_t j = 0; j < std::max(num_keys, num_values); j += kLanes) {
      if (j < num_keys) {
        by_row_blocks([&](auto rows, int64_t r) {
          score_keys<T, rows.value>(
              scoring->keys + j, queries + r * qk_, call_.qk_dim, scores + r * kTile + j, r ? Ahead<T>{} : keys_ahead);
        });
        keys_ahead.move(kLanes);
      }
      if (j < num_values) {
        const float *row_weights = weights + (kPairsKeys<T> ? j / 2 : j), *rescale = j ? nullptr : ws_.rescale.data();
        by_row_blocks([&](auto rows, int64_t r) {
          add_values<T, rows.value>(
              scored->values + j, std::min<int64_t>(kLanes, num_values - j), row_weights + r * kTile,
              rescale ? rescale + r : nullptr, output + r * vd_, call_.v_dim, r ? Ahead<T>{} : values_ahead);
        });
        values_ahead.move(kLanes);
      }
    }
  }

  // What to ask for while a tile's rows are used: those of the next tile, and its own that come a little later.
  static Ahead<T> ahead_of(
      const T* const* rows, int64_t count, const T* const* next_rows, int64_t next_count, int64_t dim) {
    constexpr int64_t kLater = 4096;  // bytes
    const int64_t own = std::max<int64_t>(1, kLater / (dim * int64_t(sizeof(T))));
    return {next_rows, next_count, rows + own, count - own, dim};
  }

  void fetch(const Tile<T>& tile) const {
    for (int64_t j = 0; j < tile.count; ++j)
      prefetch_row(tile.keys[j], call_.qk_dim);
    for (int64_t j = 0; j < tile.count; ++j)
      prefetch_row(tile.values[j], call_.v_dim);
  }

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

  // Online softmax: turns the scores of a tile into weights, updates peaks and totals, and sets the factors by which
  // what was summed before must be multiplied. Rows go through each stage together: of one alone, every stage waits for
  // the one before.
  void soft_max(const Tile<T>& tile, float* scores) const {
    const int64_t row = tile.head * rows_, padded = round_up(tile.count, kLanes), last = tile.begin + tile.count - 1;
    const bool masked = tile.begin < all_see_from_ || last > all_see_to_;
    const auto finish = call_.alibi_slopes ? finish_row<true> : finish_row<false>;
    alignas(64) float base[kFewRows + kLanes] = {}, rescale[kFewRows + kLanes] = {};
    for (int64_t r = 0; r < rows_; ++r) {
      rescale[r] = ws_.peak[row + r];
      ws_.peak[row + r] = finish(call_, ws_, row + r, scores + r * kTile, tile.begin, tile.count, masked);
      // A row that has seen no key yet has peak -inf; 0 in its place keeps -inf - -inf out, and its weights are 0.
      base[r] = ws_.peak[row + r] == kMinusInf ? 0.0f : ws_.peak[row + r];
    }
    for (int64_t r = 0; r < rows_; r += kLanes)
      store(rescale + r, exp2_nonpositive(load(rescale + r) - load(base + r)));
    std::copy_n(rescale, rows_, ws_.rescale.data());
    for (int64_t r = 0; r < rows_; ++r)
      weigh(scores + r * kTile, padded, splat(base[r]), totals_ + (row + r) * kLanes, rescale[r]);
  }

  // Turns a row's scores into weights and adds them to its total.
  static void weigh(float* scores, int64_t padded, Vec base, float* row_total, float rescale) {
    Vec total = load(row_total) * rescale;
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
    store(row_total, total);
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
  const Bundle& bundle_;
  Workspace& ws_;
  const int64_t rows_, qk_, vd_;  // rows of a task; the dims in whole chunks
  T* queries_ = nullptr;
  float *scores_ = nullptr, *totals_ = nullptr;
  int64_t all_see_from_ = 0, all_see_to_ = 0;
};

}  // namespace chunkc
