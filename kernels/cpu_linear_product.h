// x [M, K] times a packed weight: how the work is divided over threads, and in which order a thread does its part.
#pragma once

#include "cpu_linear_best.h"
#include "cpu_linear_epilogue.h"
#include "cpu_linear_layout.h"

#if defined(CHUNKC_AVX512)
#include <atomic>
#include <vector>

namespace chunkc {

template <typename T>
struct Product {
  const T* x;
  int64_t rows, x_stride;  // elements; may be anything
  Layout layout;
  const char* weight;
  const T* bias;  // [N] or nullptr
  void* out;  // [M, N], contiguous: T, or float32 where
  bool wide;
  Epilogue<T> epilogue;  // where it does anything, it writes T, in place of the product
  Best* best;  // [M] or nullptr: else the largest of each row's sums is all that is kept
};

// The i-th of `parts` about equal parts of 0 .. n - 1 begins here.
inline int64_t part_begin(int64_t n, int64_t parts, int64_t i) {
  return n * i / parts;
}

inline int64_t parts_of(int64_t n, int64_t most) {
  return (n + most - 1) / most;
}

constexpr int64_t kBlockRows = 128;

// A grid of units of work, blocks of rows by groups of panels, and how many threads share them.
struct Division {
  int64_t blocks, threads;
  std::vector<int64_t> panel_begins;  // of the groups, and the end

  int64_t groups() const { return panel_begins.size() - 1; }
};

// Threads take units as they come, since some start late or are slower. Groups get smaller, down to a panel, so that
// threads end together.
inline Division divide(int64_t rows, const Layout& layout, int64_t max_threads) {
  constexpr int64_t kWorthwhile = 50'000;  // elements of a weight, read or multiplied by a tile, are worth a thread
  const int64_t tiles = parts_of(rows, kTileRows), panels = layout.panels();
  const int64_t worth = layout.bytes() / kStepBytes * (1 + tiles) / 2 / kWorthwhile;
  const int64_t threads = std::clamp<int64_t>(worth, 1, max_threads);
  Division division{parts_of(rows, kBlockRows), threads, {0}};
  while (division.panel_begins.back() < panels) {
    const int64_t begin = division.panel_begins.back(), left = panels - begin;
    division.panel_begins.push_back(begin + (threads == 1 ? left : std::max<int64_t>(1, left / (2 * threads))));
  }
  if (division.blocks * division.groups() < threads)
    division.blocks = std::min(tiles, parts_of(threads, division.groups()));
  division.threads = std::min(threads, division.blocks * division.groups());
  return division;
}

// A unit of work: a block of rows times a group of panels. All tiles of the block go over a panel before the next one,
// so that panel and block stay in the second level cache. Of deep weights a chunk of steps is taken at a time.
//
// `later` is where the weight of the unit begins that the thread does next, or nullptr. Its beginning is asked for at
// the end of this one: a unit that starts with nothing on its way costs a microsecond, a tenth of a short one.
//
// `best` is for the unit's rows, where the product wants it.
template <typename T>
void multiply_block(
    const Product<T>& p, int64_t first, int64_t rows, int64_t panel_begin, int64_t panel_end, const char* later,
    Best* best) {
  constexpr int64_t kChunkSteps = 2048, kAhead = 8192;
  alignas(64) float sums[kBlockRows * kPanelColumns], bias[kPanelColumns] = {};
  const Layout& layout = p.layout;
  const int64_t tiles = parts_of(rows, kTileRows);
  const bool has_more = p.best || p.epilogue.does_anything();  // to be done with the sums
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t columns = layout.columns(panel), width = layout.vectors(panel) * kLanes;
    for (int64_t n = 0; p.bias && n < columns; ++n)
      bias[n] = float(p.bias[layout.row_of(panel * kPanelColumns + n)]);
    const bool is_end = panel + 1 == panel_end;
    // steps at the unit's end, a chunk of their own, which have no others of it ahead of them
    const int64_t tail = tiles == 1 && is_end ? std::min(layout.steps, kAhead / (width * kStepBytes)) : 0;
    const int64_t chunks_before = std::max<int64_t>(1, parts_of(layout.steps - tail, kChunkSteps));
    const int64_t chunks = chunks_before + (tail > 0);
    const auto chunk_begin = [&](int64_t chunk) {
      return chunk > chunks_before ? layout.steps : part_begin(layout.steps - tail, chunks_before, chunk);
    };
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t step = chunk_begin(chunk);
      const int64_t steps = chunk_begin(chunk + 1) - step, bytes = steps * width * kStepBytes;
      const bool is_last = chunk + 1 == chunks;
      Tile tile{};
      tile.x_stride = p.x_stride * sizeof(T);
      tile.weight = p.weight + layout.offset(panel) + step * width * kStepBytes;
      tile.half_step = is_last && layout.in_features % kPerStep<T> != 0;
      tile.steps = steps - tile.half_step;
      const bool is_result = is_last && !has_more;  // else they are sums to be gone on with
      tile.columns = int(is_result ? columns : width), tile.rounded = is_result && !p.wide;
      tile.start_stride = chunk == 0 ? 0 : kPanelColumns;
      tile.out_stride = is_result ? layout.out_features : kPanelColumns;
      // One tile reads the weight at the memory's pace, and asks for what it needs next. Of several, which take
      // longer, the first ones ask for shares of the next chunk.
      const char* ahead = is_last && is_end ? later : tile.weight + (tiles == 1 ? kAhead : bytes);
      const int64_t askers = std::min<int64_t>(tiles, kPanelVectors);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t r = part_begin(rows, tiles, t), count = part_begin(rows, tiles, t + 1) - r;
        tile.x = reinterpret_cast<const char*>(p.x + (first + r) * p.x_stride) + step * kStepBytes;
        tile.start = chunk == 0 ? bias : sums + r * kPanelColumns;
        const int64_t at = (first + r) * layout.out_features + panel * kPanelColumns;
        tile.out = !is_result ? static_cast<void*>(sums + r * kPanelColumns)
            : p.wide          ? static_cast<void*>(static_cast<float*>(p.out) + at)
                              : static_cast<void*>(static_cast<T*>(p.out) + at);
        const bool asks = ahead && t < askers;
        tile.ahead = asks ? ahead + bytes / askers * t : tile.weight;
        tile.ahead_step = asks ? width * kStepBytes / askers : 0;
        tile_kernel<T>(int(count), int(width / kLanes))(tile);
        if (is_last && p.best)
          keep_best(sums + r * kPanelColumns, count, columns, panel * kPanelColumns, best + r);
        else if (is_last && !is_result)
          finish(p.epilogue, layout, panel, sums + r * kPanelColumns, first + r, count, static_cast<T*>(p.out));
      }
    }
  }
}

template <typename T>
void multiply(const Product<T>& p) {
  const Division division = divide(p.rows, p.layout, num_threads());
  const int64_t groups = division.groups(), units = division.blocks * groups;
  const auto panel_begin = [&](int64_t group) { return division.panel_begins[group]; };
  std::vector<Best> best(p.best ? groups * p.rows : 0);  // [groups][M]
  std::atomic<int64_t> next{0};
  const auto run = [&](int64_t) {
    for (int64_t unit = next++; unit < units;) {
      // A unit ahead, so that its weight can be asked for; not near the end, where another thread would wait for it.
      const bool is_early = next.load() + division.threads <= units;
      const int64_t later = is_early ? next++ : units;
      const int64_t block = unit / groups, group = unit % groups;
      const int64_t first = part_begin(p.rows, division.blocks, block);
      multiply_block(
          p, first, part_begin(p.rows, division.blocks, block + 1) - first, panel_begin(group), panel_begin(group + 1),
          later < units ? p.weight + p.layout.offset(panel_begin(later % groups)) : nullptr,
          p.best ? best.data() + group * p.rows + first : nullptr);
      unit = is_early ? later : next++;
    }
  };
  in_parallel(division.threads, run);
  for (int64_t row = 0; p.best && row < p.rows; ++row) {
    p.best[row] = best[row];
    for (int64_t group = 1; group < groups; ++group)
      p.best[row].take(best[group * p.rows + row]);
  }
}

}  // namespace chunkc
#endif
