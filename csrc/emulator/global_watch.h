// emulator/global_watch.h: who touched which part of a writable tensor: blocks of one launch run in no order, so what one of them writes no
// other may read or write, unless all of them add atomically. And what nobody has written yet.
// Kept for every two bytes, since blocks may run on several host threads, without locks. Trap: order within a block is not watched here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "emulator/shadow.h"

namespace tpk::emulator {

struct BlockClash {
  enum class Kind : uint8_t { none, unwritten, race } kind = Kind::none;
  uint32_t other_block = 0;
  bool other_wrote = false, many = false; // many: several blocks read it
};

class GlobalWatch {
 public:
  static constexpr uint64_t cell_bytes = 2;

  // fresh: what is there is garbage until it is written.
  GlobalWatch(uint64_t bytes, bool fresh)
      : count_((bytes + cell_bytes - 1) / cell_bytes), writers_(new uint32_t[count_]), readers_(new uint32_t[count_]()) {
    std::fill_n(writers_.get(), count_, fresh ? nobody : earlier);
  }

  // A launch begins: what was written is settled.
  void begin_launch() {
    for (uint64_t i = 0; i < count_; ++i) {
      if (writers_[i] != nobody) writers_[i] = earlier;
      readers_[i] = 0;
    }
  }

  BlockClash touch(Access access, uint32_t block, uint64_t offset, uint64_t bytes) {
    BlockClash first;
    for (uint64_t i = offset / cell_bytes; i < (offset + bytes + cell_bytes - 1) / cell_bytes; ++i) {
      const BlockClash clash = access == Access::read ? read(i, block) : write(i, block, access == Access::atomic);
      if (first.kind == BlockClash::Kind::none) first = clash;
    }
    return first;
  }

  bool written(uint64_t offset) const { return writers_[offset / cell_bytes] != nobody; }

 private:
  static constexpr uint32_t nobody = 0, earlier = 1, first_block = 2; // then two a block: plainly, atomically
  static constexpr uint32_t several = ~0u;

  static uint32_t block_of(uint32_t writer) { return (writer - first_block) / 2; }
  static std::atomic_ref<uint32_t> at(uint32_t& cell) { return std::atomic_ref<uint32_t>(cell); }

  BlockClash read(uint64_t i, uint32_t block) {
    const uint32_t writer = at(writers_[i]).load(std::memory_order_relaxed);
    const uint32_t reader = at(readers_[i]).load(std::memory_order_relaxed);
    if (reader != block + 1) at(readers_[i]).store(reader == 0 ? block + 1 : several, std::memory_order_relaxed);
    if (writer == nobody) return {BlockClash::Kind::unwritten};
    if (writer >= first_block && block_of(writer) != block) return {BlockClash::Kind::race, block_of(writer), true};
    return {};
  }

  BlockClash write(uint64_t i, uint32_t block, bool atomic) {
    const uint32_t before = at(writers_[i]).exchange(first_block + block * 2 + (atomic ? 1 : 0), std::memory_order_relaxed);
    const uint32_t reader = at(readers_[i]).load(std::memory_order_relaxed);
    if (before == nobody && atomic) return {BlockClash::Kind::unwritten};
    if (before >= first_block && block_of(before) != block && !(atomic && (before - first_block) % 2 == 1))
      return {BlockClash::Kind::race, block_of(before), true};
    if (reader != 0 && reader != block + 1) return {BlockClash::Kind::race, reader - 1, false, reader == several};
    return {};
  }

  uint64_t count_;
  std::unique_ptr<uint32_t[]> writers_, readers_;
};

} // namespace tpk::emulator
