// What the tables must be for a call: no task reads or writes what the batch and the cache do not have, every piece of
// a split block is there, once, and new tokens have slots in the cache. All of it is checked before anything is
// written. The tables' meaning is in kernels/tasks.py.
#pragma once

#include "cpu_call.h"

#include <vector>

namespace chunkc {

// Throws where a task names what the batch does not have.
inline void check_task(const Call& call, const Task& task) {
  CHUNKC_CHECK_INDEX(
      task.request >= 0 && task.request < call.num_requests && task.kv_head >= 0 && task.kv_head < call.num_kv_heads,
      "mixed_attention: a task names request ", task.request, " and key/value head ", task.kv_head,
      ", which the batch does not have");
  const int64_t first = call.q_offsets[task.request], last = call.q_offsets[task.request + 1];
  CHUNKC_CHECK_INDEX(
      first >= 0 && last <= call.num_tokens && task.row_begin >= 0 && task.row_begin < task.row_end &&
          task.row_end <= (last - first) * call.group,
      "mixed_attention: a task names rows that request ", task.request, " does not have");
  CHUNKC_CHECK_INDEX(
      task.kv_begin >= 0 && task.kv_begin < task.kv_end &&
          task.kv_end <= std::min<int64_t>(call.kv_lens[task.request], call.page_table_stride * call.page_size),
      "mixed_attention: a task names keys that request ", task.request, " does not have");
}

// Throws where a new token's slot is not in the cache. A negative one is nowhere, and right.
inline void check_slots(const Call& call, const int64_t* slots) {
  const int64_t num_slots = call.num_pages * call.page_size;
  for (int64_t t = 0; t < call.num_tokens; ++t)
    CHUNKC_CHECK_INDEX(slots[t] < num_slots, "mixed_attention: slot ", slots[t], " is not in the cache");
}

// Throws where a page is not in the cache that tasks, which must have been checked, read keys of. A request's tasks
// read about the same pages, which are looked at once.
inline void check_pages(const Call& call, const Task* tasks, int64_t num_tasks) {
  struct Keys {
    int32_t begin = 0, end = 0;
  };
  std::vector<Keys> read(call.num_requests);
  for (const Task* task = tasks; task != tasks + num_tasks; ++task) {
    Keys& keys = read[task->request];
    keys = keys.end == 0
        ? Keys{task->kv_begin, task->kv_end}
        : Keys{std::min(keys.begin, task->kv_begin), std::max(keys.end, task->kv_end)};
  }
  for (int64_t r = 0; r < call.num_requests; ++r) {
    if (read[r].end == 0)  // without keys a page may have no slots
      continue;
    const int32_t* pages = call.page_table + r * call.page_table_stride;
    for (int64_t i = read[r].begin / call.page_size; i * call.page_size < read[r].end; ++i)
      CHUNKC_CHECK_INDEX(
          pages[i] >= 0 && pages[i] < call.num_pages, "mixed_attention: page ", pages[i], " is not in the cache");
  }
}

// Rows of partial results that the tables need. Throws where a task names what the batch does not have, or the tables
// do not fit together.
inline int64_t check_tables(const Call& call, const Task* tasks, int64_t num_tasks, int64_t num_merges) {
  std::vector<int64_t> first_piece(num_merges + 1, 0);  // of each merge, among all pieces
  int64_t scratch_rows = 0;
  for (int64_t i = 0; i < num_merges; ++i) {
    const Merge& m = call.merges[i];
    CHUNKC_CHECK_INDEX(
        m.num_splits > 0 && first_piece[i] + m.num_splits <= num_tasks && m.row_begin < m.row_end &&
            m.partial >= scratch_rows,
        "mixed_attention: merge ", i, " has no pieces, more than there are tasks, or the scratch rows of another");
    first_piece[i + 1] = first_piece[i] + m.num_splits;
    scratch_rows = m.partial + int64_t(m.num_splits) * (int64_t(m.row_end) - m.row_begin);
  }
  std::vector<bool> seen(first_piece[num_merges], false);
  int64_t pieces = 0;
  for (int64_t i = 0; i < num_tasks; ++i) {
    const Task& task = tasks[i];
    check_task(call, task);
    if (task.partial < 0 && task.merge < 0)
      continue;
    CHUNKC_CHECK_INDEX(
        task.partial >= 0 && task.merge >= 0 && task.merge < num_merges,
        "mixed_attention: task ", i, " names merge ", task.merge, ", which is not in the table");
    const Merge& m = call.merges[task.merge];
    const int64_t rows = int64_t(m.row_end) - m.row_begin, offset = int64_t(task.partial) - m.partial;
    CHUNKC_CHECK_INDEX(
        task.request == m.request && task.kv_head == m.kv_head && task.row_begin == m.row_begin &&
            task.row_end == m.row_end && offset >= 0 && offset % rows == 0 && offset / rows < m.num_splits,
        "mixed_attention: task ", i, " is no piece of its merge ", task.merge);
    const int64_t piece = first_piece[task.merge] + offset / rows;
    CHUNKC_CHECK_INDEX(!seen[piece], "mixed_attention: task ", i, " is a piece of merge ", task.merge, " again");
    seen[piece] = true, ++pieces;
  }
  CHUNKC_CHECK_INDEX(
      pieces == first_piece[num_merges], "mixed_attention: of ", first_piece[num_merges],
      " pieces that are to be merged, ", pieces, " are among the tasks");
  return scratch_rows;
}

}  // namespace chunkc
