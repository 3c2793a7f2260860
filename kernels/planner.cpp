// Plans a step's attention. What a plan is, and why, is in kernels/tasks.py; costs are in kernels/device.py.

#include "planner_schedule.h"

#include <new>

namespace chunkc::planner {
namespace {

constexpr int kMaxQBlocks = 8;

// The fields of Options in kernels/planner.py.
struct Options {
  int64_t heads, group, window, chunk, units, row_tile;
  int64_t align;  // cuts fall on its multiples
  int64_t kv_split;  // most keys in a task, 0 = choose
  int64_t num_q_blocks, q_blocks[kMaxQBlocks];  // rows of a block, of which the best is taken
  Costs costs;
};

// A plan of this thread, kept until it is fetched.
struct Plan {
  std::vector<Block> blocks;
  Schedule schedule;
  int64_t groups, copies;  // head = group * copies + copy
};
thread_local Plan plan;

// Adds the blocks of at most `q_block` rows of a request. Rows that see no key are in none, or in one with others.
void add_blocks(
    const Options& o, const int32_t* q_offsets, const int32_t* kv_lens, int32_t request, int64_t q_block,
    std::vector<Block>& out) {
  const int64_t q_len = q_offsets[request + 1] - q_offsets[request], rows = q_len * o.group;
  const int64_t first = kv_lens[request] - q_len, count = ceil_div(rows, q_block);
  // The blocks run side by side: what one reads from memory, the others find in the cache.
  const double others = static_cast<double>(count - 1);
  const double key = (o.costs.key_first + others * o.costs.key_again) / (others + 1);
  for (int64_t begin = 0; begin < rows; begin += q_block) {
    const int64_t end = std::min(begin + q_block, rows), num_rows = end - begin;
    const int64_t first_query = first + begin / o.group;
    Block block{};
    block.high = first + (end - 1) / o.group + 1;
    if (o.window)
      block.low = std::max(block.low, first_query - o.window + 1);
    if (o.chunk && first_query > 0)
      block.low = std::max(block.low, first_query / o.chunk * o.chunk);
    if (block.high <= block.low)
      continue;
    block.request = request;
    block.row_begin = static_cast<int32_t>(begin), block.row_end = static_cast<int32_t>(end);
    const double padded = static_cast<double>(ceil_div(num_rows, o.row_tile) * o.row_tile);
    block.per_key = std::max(key, padded * o.costs.pair);
    block.fixed = o.costs.overhead + static_cast<double>(num_rows) * o.costs.row;
    block.fixed_piece = o.costs.overhead + static_cast<double>(num_rows) * o.costs.partial_row;
    block.is_stream = count == 1;
    out.push_back(block);
  }
}

double work_of(const std::vector<Block>& blocks) {
  double work = 0;
  for (const Block& block : blocks)
    work += block.cost(block.high - block.low, false);
  return work;
}

// What `blocks` will cost, cuts included, next to streams that cost `streams`; all for one head. Fewer blocks than the
// units that they are worth will have to be cut.
double estimate(const Options& o, const std::vector<Block>& blocks, double streams) {
  const double work = work_of(blocks), heads = static_cast<double>(o.heads);
  double piece = 0;
  for (const Block& block : blocks)
    piece = std::max(piece, block.fixed_piece);
  const double worth = static_cast<double>(o.units) / heads * work / (work + streams);
  return work + std::max(0.0, worth - static_cast<double>(blocks.size())) * piece;
}

void make_blocks(const Options& o, const int32_t* q_offsets, const int32_t* kv_lens, int64_t num_requests) {
  std::vector<int32_t> large;  // requests that the size of a block makes a difference to
  plan.blocks.clear();
  for (int32_t r = 0; r < static_cast<int32_t>(num_requests); ++r) {
    if ((q_offsets[r + 1] - q_offsets[r]) * o.group > o.q_blocks[0])
      large.push_back(r);
    else
      add_blocks(o, q_offsets, kv_lens, r, o.q_blocks[0], plan.blocks);
  }
  if (large.empty())
    return;
  const double streams = work_of(plan.blocks);
  std::vector<Block> best, candidate;
  double least = 0;
  for (int64_t i = 0; i < o.num_q_blocks; ++i) {
    candidate.clear();
    for (const int32_t r : large)
      add_blocks(o, q_offsets, kv_lens, r, o.q_blocks[i], candidate);
    const double guess = estimate(o, candidate, streams);
    if (i == 0 || guess < least)
      least = guess, std::swap(best, candidate);
  }
  plan.blocks.insert(plan.blocks.end(), best.begin(), best.end());
}

void make_plan(const Options& o, const int32_t* q_offsets, const int32_t* kv_lens, int64_t num_requests) {
  make_blocks(o, q_offsets, kv_lens, num_requests);
  plan.groups = std::gcd(o.heads, o.units);
  plan.copies = o.heads / plan.groups;
  const int32_t copies = static_cast<int32_t>(plan.copies);
  const int64_t lanes = o.units / plan.groups;
  if (o.kv_split) {
    Pieces pieces;
    for (size_t i = 0; i < plan.blocks.size(); ++i)
      cut_evenly(plan.blocks[i], static_cast<int32_t>(i), copies, o.kv_split, o.align, pieces);
    plan.schedule = schedule(longest_first(pieces), plan.blocks, lanes);
  } else {
    // Steps of a few keys are finer than any body's tiles, and would only make ragged ones.
    constexpr int64_t kStep = 16;
    plan.schedule = balance(plan.blocks, copies, lanes, ceil_div(kStep, o.align) * o.align);
  }
}

// The columns of the tables, see kernels/tasks.py.
struct Task {
  int32_t request, kv_head, row_begin, row_end, kv_begin, kv_end, partial, merge;
};
struct Merge {
  int32_t request, kv_head, row_begin, row_end, partial, num_splits, unused0, unused1;
};

// One copy of a piece that shares its block with others.
struct Part {
  int32_t block, copy;
  int64_t begin;
  size_t task, stride;  // where its tasks are, one for each group of heads
};

void write_tables(const Plan& plan, Task* tasks, Merge* merges) {
  std::vector<Part> parts;
  Task* next = tasks;
  const int64_t groups = plan.groups;
  for (const Piece& piece : plan.schedule.pieces) {
    const Block& block = plan.blocks[piece.block];
    for (int32_t i = 0; piece.is_partial && i < piece.copies; ++i)
      parts.push_back(
          {piece.block, piece.copy + i, piece.begin, static_cast<size_t>(next - tasks + i),
           static_cast<size_t>(piece.copies)});
    // In the order of the heads, as their keys lie: a body may do neighbours together.
    for (int64_t g = 0; g < groups; ++g) {
      for (int32_t copy = piece.copy; copy < piece.copy + piece.copies; ++copy) {
        const int32_t head = static_cast<int32_t>(g * plan.copies + copy);
        *next++ = {block.request, head, block.row_begin, block.row_end, static_cast<int32_t>(piece.begin),
                   static_cast<int32_t>(piece.end), -1, -1};
      }
    }
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return std::pair(a.block, std::pair(a.copy, a.begin)) < std::pair(b.block, std::pair(b.copy, b.begin));
  });
  int32_t scratch = 0, merge = 0;
  for (size_t first = 0, last; first < parts.size(); first = last) {
    last = first + 1;
    while (last < parts.size() && parts[last].block == parts[first].block && parts[last].copy == parts[first].copy)
      ++last;
    const int32_t num_splits = static_cast<int32_t>(last - first);
    for (int64_t g = 0; g < groups; ++g, ++merge) {
      const Task& task = tasks[parts[first].task + g * parts[first].stride];
      merges[merge] = {task.request, task.kv_head, task.row_begin, task.row_end, scratch, num_splits, 0, 0};
      for (size_t i = first; i < last; ++i, scratch += task.row_end - task.row_begin) {
        Task& part = tasks[parts[i].task + g * parts[i].stride];
        part.partial = scratch, part.merge = merge;
      }
    }
  }
}

}  // namespace
}  // namespace chunkc::planner

// Plans a step: q_offsets [num_requests + 1], kv_lens [num_requests]. Numbers of tasks and merges are left in `counts`.
// False where memory does not suffice.
extern "C" bool chunkc_plan(
    const chunkc::planner::Options* options, const int32_t* q_offsets, const int32_t* kv_lens, int64_t num_requests,
    int64_t* counts) try {
  using namespace chunkc::planner;
  make_plan(*options, q_offsets, kv_lens, num_requests);
  counts[0] = counts[1] = 0;
  for (const Piece& piece : plan.schedule.pieces) {
    counts[0] += piece.copies * plan.groups;
    // one piece of every cut block ends where the block does
    counts[1] += piece.is_partial && piece.end == plan.blocks[piece.block].high ? piece.copies * plan.groups : 0;
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

// Writes the tables of this thread's latest plan: [counts[0]][8] and [counts[1]][8].
extern "C" void chunkc_fetch_plan(int32_t* tasks, int32_t* merges) {
  using namespace chunkc::planner;
  write_tables(plan, reinterpret_cast<Task*>(tasks), reinterpret_cast<Merge*>(merges));
}
