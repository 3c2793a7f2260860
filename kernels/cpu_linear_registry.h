// Packed weights by number. A number is never given twice, so that a stale one is an error and not another weight.
//
// Finding a weight takes no lock: a reader counts itself in before it looks, and who takes a weight out waits until
// the readers that may have seen it are done.
#pragma once

#include "cpu_check.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

namespace chunkc {

template <typename Weight>
class Registry {
  struct Slot {
    std::atomic<const Weight*> weight{nullptr};
    std::atomic<int64_t> readers{0};
  };

 public:
  // A weight in use; it stays until this goes.
  class Borrowed {
   public:
    explicit Borrowed(Slot& slot) : slot_(slot) {
      slot_.readers.fetch_add(1);  // all sequentially consistent: either the remover sees this, or we see no weight
      weight_ = slot_.weight.load();
    }
    Borrowed(const Borrowed&) = delete;
    ~Borrowed() { slot_.readers.fetch_sub(1); }
    const Weight* get() const { return weight_; }

   private:
    Slot& slot_;
    const Weight* weight_;
  };

  // Registries in different places give different numbers.
  explicit Registry(int64_t place) : first_(place * kMost) {}

  // The place of the registry that gave a number; -1 or more than there are where none did.
  static int64_t place_of(int64_t number) { return number < 0 ? -1 : number / kMost; }

  int64_t add(std::unique_ptr<const Weight> weight) {
    std::lock_guard lock(mutex_);
    CHUNKC_CHECK(size_ < kMost, "packed_linear: too many weights were packed in this process");
    auto& block = blocks_[size_ / kBlockSlots];
    if (!block.load())
      block.store(new Slot[kBlockSlots]);
    block.load()[size_ % kBlockSlots].weight.store(weight.release());
    return first_ + size_++;
  }

  // The weight, borrowed; its get() is null if it is gone.
  Borrowed find(int64_t number) {
    Slot* slot = find_slot(number);
    CHUNKC_CHECK(slot, "packed_linear: ", number, " was never the handle of a packed weight");
    return Borrowed(*slot);
  }

  // Frees the weight once nobody uses it.
  void remove(int64_t number) {
    Slot* slot = find_slot(number);
    const Weight* weight = slot ? slot->weight.exchange(nullptr) : nullptr;
    while (weight && slot->readers.load() != 0)
      std::this_thread::yield();
    delete weight;
  }

 private:
  static constexpr int64_t kBlocks = 4096, kBlockSlots = 1024, kMost = kBlocks * kBlockSlots;

  Slot* find_slot(int64_t number) {
    number -= first_;
    if (number < 0 || number >= kMost)
      return nullptr;
    Slot* block = blocks_[number / kBlockSlots].load(std::memory_order_acquire);
    return block ? block + number % kBlockSlots : nullptr;
  }

  const int64_t first_;
  std::mutex mutex_;
  int64_t size_ = 0;
  std::atomic<Slot*> blocks_[kBlocks] = {};  // never freed, so that readers may always look
};

}  // namespace chunkc
