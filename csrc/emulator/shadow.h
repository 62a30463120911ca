// emulator/shadow.h: what is known of every byte of shared memory: who wrote it last and when, who has read it since, whether an
// asynchronous copy into it is under way. An access is checked against that and recorded.
// Memory is watched in chunks of 16 bytes as long as accesses cover whole chunks, which ldmatrix and cp.async do; a chunk that is accessed
// in part falls into cells of 2 bytes, until a whole write makes it one again. Trap: one-byte accesses are watched by the pair.
#pragma once

#include <cstdint>
#include <vector>

#include "emulator/clocks.h"

namespace tpk::emulator {

using Pc = uint32_t; // offset of an instruction from the start of the module

enum class Access : uint8_t { read, write, atomic };

// An access that clashes with an earlier one, or with none at all.
struct Clash {
  enum class Kind : uint8_t { none, unwritten, race, copy_pending, barrier_object } kind = Kind::none;
  uint32_t other_thread = 0;
  Pc other_pc = 0;
  bool other_wrote = false;
};

class Shadow {
 public:
  static constexpr uint32_t chunk_bytes = 16, cell_bytes = 2, cells_per_chunk = chunk_bytes / cell_bytes;

  void reset(uint32_t bytes);

  // [offset, offset + bytes) lies within the memory. `seen` is the accessing thread's clock row.
  Clash access(Access access, uint32_t thread, const int32_t* seen, uint32_t offset, uint32_t bytes, Pc pc);
  // An asynchronous copy of `thread` into whole chunks or cells begins (a write that nobody may read), and ends (visible to the thread).
  Clash begin_copy(uint32_t thread, const int32_t* seen, uint32_t offset, uint32_t bytes, Pc pc);
  void end_copy(uint32_t thread, int32_t now, uint32_t offset, uint32_t bytes);
  // The 8 bytes at offset become a barrier object, or ordinary unwritten memory again.
  Clash make_barrier(uint32_t thread, const int32_t* seen, uint32_t offset, Pc pc);
  void drop_barrier(uint32_t offset);
  // unwritten: no barrier object is there; race: the thread has not seen it made.
  Clash use_barrier(const int32_t* seen, uint32_t offset);

 private:
  enum class State : uint8_t { unwritten, written, atomic, pending, barrier };
  struct Reader {
    int32_t clock;
    Pc pc;
    uint16_t thread;
  };
  struct Cell {
    int32_t write_clock = 0, read_clock = 0;
    Pc write_pc = 0, read_pc = 0;
    uint32_t readers = 0; // 1 + index of more readers than one, or 0
    uint16_t writer = 0, reader = 0;
    State state = State::unwritten;
    bool read_atomically = false;
  };

  template <class Visit> void visit(uint32_t offset, uint32_t bytes, bool whole_write, Visit&& visit);
  Clash check(const Cell& cell, Access access, const int32_t* seen) const;
  void record_read(Cell& cell, uint32_t thread, const int32_t* seen, Pc pc);
  void record_write(Cell& cell, State state, uint32_t thread, const int32_t* seen, Pc pc);
  void forget_readers(Cell& cell);
  void split(uint32_t chunk);

  std::vector<Cell> chunks_, cells_;
  std::vector<uint8_t> is_split_;
  std::vector<std::vector<Reader>> readers_;
  std::vector<uint32_t> free_readers_;
};

} // namespace tpk::emulator
