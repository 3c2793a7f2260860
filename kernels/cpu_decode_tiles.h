// The order in which a few rows go through the keys and values of several heads of a request.
//
// Page by page, head by head, as they lie in memory: the hardware fetches ahead by itself for as long as a run of
// addresses lasts, and needs some time to find the next one. (One core of Zen 4 reads 14 GB/s in runs of 16 KiB that
// lie anywhere, 21 in runs of 48 KiB, 27 in runs of 256 KiB and 31 in order.)
#pragma once

#include "cpu_call.h"

namespace chunkc {

// Tasks of a table, side by side there, that differ in their heads only: their rows see the same keys.
struct Bundle {
  const Task* tasks = nullptr;
  int64_t count = 0;

  const Task& first() const { return tasks[0]; }
};

// At most kTile keys and values of one head, where they lie. Pointers to keys are padded to whole vectors with the last
// one.
template <typename T>
struct Tile {
  const T *keys[kTile], *values[kTile];
  int64_t head, begin;  // which of the bundle's, first key
  int64_t count = 0;
};

template <typename T>
class Tiles {
 public:
  Tiles(const Call& call, const View<const T>& k_pages, const View<const T>& v_pages, const Bundle& bundle)
      : call_(call), k_pages_(k_pages), v_pages_(v_pages), bundle_(bundle),
        span_(round_up(call.page_size, kTile)), end_(bundle.first().kv_end) {
    start_span(bundle.first().kv_begin);
  }

  // The next tile; false, and the tile is empty, where there is none.
  bool next(Tile<T>& tile) {
    if (at_ == span_end_) {
      if (++head_ < bundle_.count)
        at_ = span_begin_;
      else
        start_span(span_end_);
    }
    tile.count = std::min(kTile, span_end_ - at_);
    if (tile.count <= 0)
      return false;
    tile.head = head_, tile.begin = at_;
    const Task& task = bundle_.tasks[head_];
    PagedRows<T>(call_, k_pages_, task.request, task.kv_head, call_.qk_dim).find(at_, tile.count, tile.keys);
    PagedRows<T>(call_, v_pages_, task.request, task.kv_head, call_.v_dim).find(at_, tile.count, tile.values);
    std::fill(tile.keys + tile.count, tile.keys + round_up(tile.count, kLanes), tile.keys[tile.count - 1]);
    at_ += tile.count;
    return true;
  }

 private:
  // A span is the keys of a page, or of several where they are short.
  void start_span(int64_t begin) {
    span_begin_ = at_ = begin, head_ = 0;
    span_end_ = std::min(end_, (begin / span_ + 1) * span_);
  }

  const Call& call_;
  const View<const T>&k_pages_, &v_pages_;
  const Bundle bundle_;
  const int64_t span_, end_;
  int64_t span_begin_ = 0, span_end_ = 0, head_ = 0, at_ = 0;
};

}  // namespace chunkc
