// emulator/tensors.h: the global memory that a kernel may touch: tensors registered by name, shape and strides.
// An access must lie within one contiguous run of one tensor, so that a step into the gap between two rows of a view is an error even where
// the memory exists. Trap: strides must be nested (each covers what the smaller ones span); other views are checked as one range.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emulator/global_watch.h"
#include "emulator/order.h"

namespace tpk::emulator {

struct Tensor {
  std::string name;
  uintptr_t data = 0;
  uint32_t item_bytes = 0;
  bool writable = false;
  bool fresh = false;                  // holds garbage until it is written
  bool shared = false;                 // launches of several streams write it, and order their accesses themselves
  std::vector<int64_t> sizes, strides; // in elements
};

class Tensors {
 public:
  void add(Tensor tensor);
  void clear() { entries_.clear(); }
  void remove(const std::string& name) {
    std::erase_if(entries_, [&](const Entry& entry) { return entry.tensor.name == name; });
  }
  bool any_shared() const;
  void begin_launch() {
    for (Entry& entry : entries_)
      if (entry.watch) entry.watch->begin_launch();
  }

  // Whether the access is allowed, and how it clashes with those of other blocks. Inline: every global access of every thread comes here.
  struct Touch {
    bool allowed = false;
    BlockClash clash;
    OrderWatch* order = nullptr; // of a shared tensor, to be asked for `offset`
    uint64_t offset = 0;
  };
  Touch touch(uintptr_t address, uint32_t bytes, Access access, uint32_t block) {
    Entry* found = nullptr;
    for (Entry& entry : entries_) {
      if (address - entry.run_begin >= entry.run_bytes || bytes > entry.run_bytes - (address - entry.run_begin)) continue;
      if (access != Access::read && !entry.tensor.writable) continue;
      found = &entry;
      break;
    }
    if (found == nullptr) found = find_run(address, bytes, access != Access::read);
    if (found == nullptr) return {};
    if (found->order) return {true, {}, found->order.get(), address - found->begin};
    return {true, found->watch ? found->watch->touch(access, block, address - found->begin, bytes) : BlockClash{}};
  }
  // Index of the first element of a fresh tensor that nothing has written, as "[0, 1]"; empty when there is none.
  std::string first_unwritten(const std::string& name) const;
  // Where an address is, in words: "k[0, 12, 1, 64]", "8 bytes past the end of k", "no registered tensor".
  std::string describe(uintptr_t address) const;
  // The address is inside a tensor that may not be written.
  bool read_only(uintptr_t address) const;

 private:
  struct Dimension {
    int64_t size, stride_bytes;
    size_t index; // in the tensor's own order
  };
  struct Entry {
    Tensor tensor;
    std::vector<Dimension> dimensions; // without strides of zero and sizes of one, largest stride first
    std::vector<Dimension> outer;      // those outside of a contiguous run
    int64_t run_length = 0;
    uintptr_t begin = 0, end = 0;
    bool nested = true;
    uintptr_t run_begin = 0, run_bytes = 0; // the contiguous run of the last access
    std::shared_ptr<GlobalWatch> watch;     // of a writable tensor; host threads share it
    std::shared_ptr<OrderWatch> order;      // instead, of a shared one
  };

  Entry* find_run(uintptr_t address, uint32_t bytes, bool write);
  static bool locate(const Entry& entry, uintptr_t address, uintptr_t& run_begin, uintptr_t& run_bytes);
  static std::string index_of(const Entry& entry, uintptr_t address);

  std::vector<Entry> entries_;
};

} // namespace tpk::emulator
