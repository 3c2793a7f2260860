// Memory for packed weights. They are read once a step, at the pace of the memory, which is a tenth to a fifth faster
// from huge pages. Those are 2 MB, and most weights are smaller or end amid one: several share a block.
#pragma once

#include "cpu_simd.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace chunkc {

// A piece of a block, which goes when its last piece goes. A piece's pages are given back at once.
class Memory {
 public:
  Memory() = default;
  Memory(std::shared_ptr<char> block, int64_t offset, int64_t bytes)
      : block_(std::move(block)), offset_(offset), bytes_(bytes) {}
  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;
  ~Memory() {
#if defined(__linux__)
    if (block_)
      madvise(data(), bytes_, MADV_DONTNEED);
#endif
  }
  char* data() const { return block_.get() + offset_; }

  static Memory allocate(int64_t bytes) {
    static std::mutex mutex;
    static std::shared_ptr<char>& current = *new std::shared_ptr<char>;  // never destroyed: threads may outlive main
    static int64_t used = 0;
    bytes = round_up(std::max<int64_t>(bytes, 1), kPage);
    if (bytes > kShared)
      return {new_block(bytes), 0, bytes};
    std::lock_guard lock(mutex);
    if (!current || used + bytes > kBlock)
      current = new_block(kBlock), used = 0;
    used += bytes;
    return {current, used - bytes, bytes};
  }

 private:
  // pages of x86, which our layout needs: a larger page would be given back with what its neighbours hold
  static constexpr int64_t kPage = 4096, kHugePage = 2 << 20, kBlock = 64 << 20, kShared = 16 << 20;

  static std::shared_ptr<char> new_block(int64_t bytes) {
    bytes = round_up(bytes, kHugePage);
    std::shared_ptr<char> block(static_cast<char*>(std::aligned_alloc(kHugePage, bytes)), std::free);
    if (!block)
      throw std::bad_alloc();
#if defined(__linux__)
    madvise(block.get(), bytes, MADV_HUGEPAGE);  // where it is refused, small pages serve
#endif
    return block;
  }

  std::shared_ptr<char> block_;
  int64_t offset_ = 0, bytes_ = 0;
};

}  // namespace chunkc
