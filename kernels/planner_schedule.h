// How long a schedule of pieces takes, in which order to take them, and where to cut blocks so that the units end
// together.
//
// Times are in seconds of one unit that has its share of the device (kernels/device.py). Heads are alike: with g the
// greatest common divisor of heads and units, a schedule of heads / g copies of each block on units / g lanes, repeated
// g times, is a schedule of the whole machine. So only that smaller problem is solved.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace chunkc::planner {

// Cost of a task, see TaskCost in kernels/device.py.
struct Costs {
  double overhead, key_first, key_again, pair, row, partial_row;
};

// Rows of a request that go through its keys together, for each key/value head.
struct Block {
  int32_t request, row_begin, row_end;
  int64_t low, high;  // keys that some row sees
  double per_key, fixed, fixed_piece;  // a task costs its keys and one of the fixed costs
  bool is_stream;  // all rows of its request: its keys are read once, from memory

  double cost(int64_t keys, bool is_piece) const {
    return (is_piece ? fixed_piece : fixed) + static_cast<double>(keys) * per_key;
  }
};

// Keys begin .. end of a block, for `copies` heads from `copy` on.
struct Piece {
  int32_t block, copy, copies;
  int64_t begin, end;
  double cost;
  bool is_partial;
};

using Pieces = std::vector<Piece>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline double total_cost(const Pieces& pieces) {
  double sum = 0;
  for (const Piece& piece : pieces)
    sum += piece.cost * piece.copies;
  return sum;
}

// Lanes that take the next piece as soon as they are free.
class Lanes {
 public:
  explicit Lanes(int64_t count) : busy_until_(count, 0.0) {}

  double first_free() const { return busy_until_[0]; }

  void take(double cost) {
    const size_t n = busy_until_.size();
    const double done = busy_until_[0] + cost;
    latest_ = std::max(latest_, done);
    size_t i = 0;  // sift down
    for (size_t child = 1; child < n; child = 2 * i + 1) {
      child += child + 1 < n && busy_until_[child + 1] < busy_until_[child];
      if (busy_until_[child] >= done)
        break;
      busy_until_[i] = busy_until_[child];
      i = child;
    }
    busy_until_[i] = done;
  }

  double latest() const { return latest_; }
  const std::vector<double>& busy_until() const { return busy_until_; }

 private:
  std::vector<double> busy_until_;  // a heap, the least first
  double latest_ = 0;
};

inline double makespan(const Pieces& pieces, int64_t lanes) {
  Lanes machine(lanes);
  for (const Piece& piece : pieces)
    for (int32_t copy = 0; copy < piece.copies; ++copy)
      machine.take(piece.cost);
  return machine.latest();
}

// Pieces of equal cost stay in the order of their blocks, so that a plan depends on the batch only.
inline Pieces longest_first(const Pieces& pieces) {
  struct Key {
    double cost;
    size_t index;
  };
  std::vector<Key> keys(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i)
    keys[i] = {pieces[i].cost, i};
  std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.index < b.index;
  });
  Pieces sorted;
  sorted.reserve(pieces.size());
  for (const Key& key : keys)
    sorted.push_back(pieces[key.index]);
  return sorted;
}

// Streams and the others progress side by side, each longest first, at one share of their cost. But a piece that would
// end after `end` when it starts as late as that goes first.
inline Pieces interleaved(const Pieces kinds[2], double end) {
  const double totals[2] = {total_cost(kinds[0]), total_cost(kinds[1])};
  double done[2] = {0, 0};
  size_t next[2] = {0, 0};
  const auto start = [&](int kind) {
    const double fair = end * done[kind] / totals[kind];
    return std::min(fair, end - kinds[kind][next[kind]].cost);
  };
  Pieces order;
  const size_t count = kinds[0].size() + kinds[1].size();
  order.reserve(count);
  while (order.size() < count) {
    const bool only[2] = {next[1] == kinds[1].size(), next[0] == kinds[0].size()};
    const int kind = only[0] ? 0 : only[1] ? 1 : start(1) < start(0);
    const Piece& piece = kinds[kind][next[kind]++];
    done[kind] += piece.cost * piece.copies;
    order.push_back(piece);
  }
  return order;
}

struct Schedule {
  Pieces pieces;  // in the order to take them
  double seconds;
};

// The interleaved order, unless it ends later than plainly the longest first.
inline Schedule schedule(const Pieces& sorted, const std::vector<Block>& blocks, int64_t lanes) {
  const double plain = makespan(sorted, lanes);
  Pieces kinds[2];
  for (const Piece& piece : sorted)
    kinds[blocks[piece.block].is_stream].push_back(piece);
  if (kinds[0].empty() || kinds[1].empty())
    return {sorted, plain};
  Pieces mixed = interleaved(kinds, plain);
  const double seconds = makespan(mixed, lanes);
  if (seconds <= 1.01 * plain)
    return {std::move(mixed), seconds};
  return {sorted, plain};
}

// The whole of a block as pieces of even length, none longer than `most` keys (of at least one `step`). Cuts fall on
// multiples of `step`: where the first key does not, the first piece is shorter, but never empty.
inline void cut_evenly(const Block& block, int32_t index, int32_t copies, int64_t most, int64_t step, Pieces& out) {
  const int64_t start = block.low / step * step, span = block.high - start;
  int64_t count = ceil_div(span, ceil_div(most, step) * step);
  const int64_t length = ceil_div(ceil_div(span, count), step) * step;  // evened out, which can save a piece
  count = ceil_div(span, length);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = std::max(start + i * length, block.low), end = std::min(start + (i + 1) * length, block.high);
    const double cost = block.cost(end - begin, count > 1);
    out.push_back({index, 0, copies, begin, end, cost, count > 1});
  }
}

// Fills lanes up to `end` one after the other, as in McNaughton's rule: what does not fit on a lane any more is cut,
// and the rest goes on the next. Blocks that are expensive to cut go first, whole where they fit.
class Filling {
 public:
  Filling(const std::vector<Block>& blocks, int64_t lanes, int64_t step)
      : blocks_(blocks), lanes_(lanes), step_(step) {}

  // Returns the seconds that did not fit.
  double fill(const Pieces& sorted, double end) {
    placed_.clear(), rest_.clear();
    load_.assign(lanes_, 0.0);
    seconds_ = 0;
    place_whole(sorted, end);
    std::sort(load_.begin(), load_.end());  // the emptiest lane gets the longest piece
    size_t lane = 0, first = placed_.size();
    double load = load_[0];
    for (size_t i = 0; i < rest_.size(); ++i) {
      Piece piece = rest_[i];
      const Block& block = blocks_[piece.block];
      const double tolerance = static_cast<double>(step_) / 2 * block.per_key;
      while (load + piece.cost > end + tolerance) {
        const double keys = (end - load - block.fixed_piece) / block.per_key;
        const int64_t cut = (piece.begin + static_cast<int64_t>(std::max(keys, 0.0)) + step_ / 2) / step_ * step_;
        if (cut >= piece.begin + step_ && cut < piece.end) {
          Piece head = piece;
          head.end = cut, head.is_partial = true, head.cost = block.cost(cut - piece.begin, true);
          placed_.push_back({0, head});
          piece.begin = cut, piece.is_partial = true, piece.cost = block.cost(piece.end - cut, true);
        }
        close_lane(lane, first);
        if (++lane == load_.size())
          return piece.cost + std::accumulate(
              rest_.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest_.end(), 0.0,
              [](double sum, const Piece& left) { return sum + left.cost; });
        first = placed_.size(), load = load_[lane];
      }
      placed_.push_back({0, piece});
      load += piece.cost;
    }
    close_lane(lane, first);
    return 0;
  }

  // In the order of their start, in which the lanes take them as they were placed.
  Schedule schedule() {
    std::stable_sort(
        placed_.begin(), placed_.end(), [](const Placed& a, const Placed& b) { return a.start < b.start; });
    Schedule result{{}, seconds_};
    result.pieces.reserve(placed_.size());
    for (const Placed& placed : placed_)
      result.pieces.push_back(placed.piece);
    return result;
  }

 private:
  struct Placed {
    double start;
    Piece piece;
  };

  void place_whole(const Pieces& sorted, double end) {
    Lanes machine(lanes_);
    for (const Piece& piece : sorted) {
      for (int32_t copy = piece.copy; copy < piece.copy + piece.copies; ++copy) {
        Piece single = piece;
        single.copy = copy, single.copies = 1;
        if (blocks_[piece.block].is_stream || machine.first_free() + piece.cost > end) {
          rest_.push_back(single);
        } else {
          placed_.push_back({machine.first_free(), single});
          machine.take(piece.cost);
        }
      }
    }
    load_ = machine.busy_until();
    seconds_ = machine.latest();
  }

  // What was placed on a lane from `first` on starts after what was there, the longest first.
  void close_lane(size_t lane, size_t first) {
    const auto begin = placed_.begin() + static_cast<std::ptrdiff_t>(first);
    std::stable_sort(
        begin, placed_.end(), [](const Placed& a, const Placed& b) { return a.piece.cost > b.piece.cost; });
    double start = load_[lane];
    for (auto placed = begin; placed != placed_.end(); ++placed) {
      placed->start = start;
      start += placed->piece.cost;
    }
    seconds_ = std::max(seconds_, start);
  }

  const std::vector<Block>& blocks_;
  const int64_t lanes_, step_;
  std::vector<Placed> placed_;
  Pieces rest_;
  std::vector<double> load_;
  double seconds_ = 0;
};

// Cuts the blocks where that makes the step shorter by more than a few percent, and orders the pieces.
//
// Streams that are long, against a unit's share of the work and against what cutting costs, are cut beforehand even
// where the model sees no need: no model knows which unit is slow in a step, and short pieces even that out.
inline Schedule balance(const std::vector<Block>& blocks, int32_t copies, int64_t lanes, int64_t step) {
  constexpr double kShareOfPiece = 1.0 / 4, kMostShareOfPiece = 1.0 / 3, kLongPiece = 40;
  constexpr double kGoodEnough = 1.02, kWorthCutting = 0.98, kFinest = 0.0025;
  constexpr int kRounds = 24;
  if (blocks.empty())
    return {};
  double work = 0, cutting = blocks[0].fixed_piece, least = 0;
  for (const Block& block : blocks) {
    const double cost = block.cost(block.high - block.low, false);
    work += cost * copies;
    cutting = std::min(cutting, block.fixed_piece);
    least = std::max(least, std::min(cost, block.cost(step, true)));
  }
  const double share = work / static_cast<double>(lanes);

  Pieces pieces;
  pieces.reserve(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    const double longest = std::max(kShareOfPiece * share, kLongPiece * block.fixed_piece);
    int64_t most = block.high - block.low + step;  // in one piece
    if (block.is_stream && longest < kMostShareOfPiece * share)
      most = static_cast<int64_t>(std::min((longest - block.fixed_piece) / block.per_key, static_cast<double>(most)));
    cut_evenly(block, static_cast<int32_t>(i), copies, most, step, pieces);
  }
  const Pieces sorted = longest_first(pieces);
  Schedule best = schedule(sorted, blocks, lanes);
  if (best.seconds <= kGoodEnough * share)
    return best;

  Filling filling(blocks, lanes, step);
  double end = std::max(share + cutting / 2, least);  // there is hardly more than one cut for each lane
  for (int round = 0; round < kRounds && end < kWorthCutting * best.seconds; ++round) {
    const double excess = filling.fill(sorted, end);
    if (excess == 0) {
      Schedule filled = filling.schedule();
      return filled.seconds < kWorthCutting * best.seconds ? filled : best;
    }
    end += std::max(excess / static_cast<double>(lanes), kFinest * end);
  }
  return best;
}

}  // namespace chunkc::planner
