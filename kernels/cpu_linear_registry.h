// Packed weights by number. A number is never given twice, so that a stale one is an error and not another weight.
//
// Finding a weight takes no lock: a reader counts itself in before it looks, and who takes a weight out waits until
// the readers that may have seen it are done.
#pragma once

#include <c10/util/Exception.h>

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

  int64_t add(std::unique_ptr<const Weight> weight) {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(size_ < kBlocks * kBlockSlots, "packed_linear: too many weights were packed in this process");
    auto& block = blocks_[size_ / kBlockSlots];
    if (!block.load())
      block.store(new Slot[kBlockSlots]);
    block.load()[size_ % kBlockSlots].weight.store(weight.release());
    return size_++;
  }

  // The weight, borrowed; its get() is null if it is gone.
  Borrowed find(int64_t number) {
    Slot* slot = find_slot(number);
    TORCH_CHECK(slot, "packed_linear: ", number, " was never the handle of a packed weight");
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
  static constexpr int64_t kBlocks = 4096, kBlockSlots = 1024;

  Slot* find_slot(int64_t number) {
    if (number < 0 || number >= kBlocks * kBlockSlots)
      return nullptr;
    Slot* block = blocks_[number / kBlockSlots].load(std::memory_order_acquire);
    return block ? block + number % kBlockSlots : nullptr;
  }

  std::mutex mutex_;
  int64_t size_ = 0;
  std::atomic<Slot*> blocks_[kBlocks] = {};  // never freed, so that readers may always look
};

}  // namespace chunkc
