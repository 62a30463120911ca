// emulator/shadow.cpp: the checks of one access to shared memory.
#include "emulator/shadow.h"

namespace tpk::emulator {

void Shadow::reset(uint32_t bytes) {
  const uint32_t chunks = (bytes + chunk_bytes - 1) / chunk_bytes;
  chunks_.assign(chunks, Cell{});
  is_split_.assign(chunks, 0);
  if (cells_.size() < size_t{chunks} * cells_per_chunk) cells_.resize(size_t{chunks} * cells_per_chunk);
  readers_.clear();
  free_readers_.clear();
}

void Shadow::forget_readers(Cell& cell) {
  if (cell.readers != 0) {
    readers_[cell.readers - 1].clear();
    free_readers_.push_back(cell.readers - 1);
    cell.readers = 0;
  }
  cell.read_clock = 0;
}

void Shadow::split(uint32_t chunk) {
  Cell* cells = &cells_[size_t{chunk} * cells_per_chunk];
  const uint32_t readers = chunks_[chunk].readers;
  for (uint32_t i = 0; i < cells_per_chunk; ++i) {
    cells[i] = chunks_[chunk];
    if (readers != 0 && i > 0) {
      readers_.push_back(readers_[readers - 1]);
      cells[i].readers = static_cast<uint32_t>(readers_.size());
    }
  }
  is_split_[chunk] = 1;
}

// Calls visit(cell) for every cell of the range. A write of a whole chunk visits its cells for the check and then leaves one cell.
template <class Visit> void Shadow::visit(uint32_t offset, uint32_t bytes, bool whole_write, Visit&& visit) {
  for (uint32_t at = offset, end = offset + bytes; at < end;) {
    const uint32_t chunk = at / chunk_bytes, chunk_end = std::min(end, (chunk + 1) * chunk_bytes);
    const bool whole = at % chunk_bytes == 0 && chunk_end - at == chunk_bytes;
    if (!is_split_[chunk] && !whole) split(chunk);
    if (!is_split_[chunk]) {
      visit(chunks_[chunk]);
    } else {
      Cell* cells = &cells_[size_t{chunk} * cells_per_chunk];
      for (uint32_t i = at % chunk_bytes / cell_bytes; i < (chunk_end - chunk * chunk_bytes + cell_bytes - 1) / cell_bytes; ++i)
        visit(cells[i]);
      if (whole && whole_write) {
        chunks_[chunk] = cells[0];
        is_split_[chunk] = 0;
      }
    }
    at = chunk_end;
  }
}

Clash Shadow::check(const Cell& cell, Access access, const int32_t* seen) const {
  using Kind = Clash::Kind;
  if (cell.state == State::pending) return {Kind::copy_pending, cell.writer, cell.write_pc, true};
  if (cell.state == State::barrier) return {Kind::barrier_object, cell.writer, cell.write_pc, true};
  if (cell.state == State::unwritten) {
    if (access != Access::write) return {Kind::unwritten, 0, 0, false};
  } else if (cell.write_clock > seen[cell.writer] && !(access == Access::atomic && cell.state == State::atomic)) {
    return {Kind::race, cell.writer, cell.write_pc, true};
  }
  if (access == Access::read || cell.read_clock == 0) return {};
  if (access == Access::atomic && cell.read_atomically) return {};
  if (cell.read_clock > seen[cell.reader]) return {Kind::race, cell.reader, cell.read_pc, false};
  if (cell.readers != 0)
    for (const Reader& reader : readers_[cell.readers - 1])
      if (reader.clock > seen[reader.thread]) return {Kind::race, reader.thread, reader.pc, false};
  return {};
}

void Shadow::record_read(Cell& cell, uint32_t thread, const int32_t* seen, Pc pc) {
  // Reads that this thread has seen are covered by this one: whoever is ordered after it is ordered after them.
  if (cell.read_clock > seen[cell.reader] && cell.reader != thread) {
    if (cell.readers == 0) {
      if (free_readers_.empty()) {
        readers_.emplace_back();
        free_readers_.push_back(static_cast<uint32_t>(readers_.size() - 1));
      }
      cell.readers = free_readers_.back() + 1;
      free_readers_.pop_back();
    }
    std::vector<Reader>& more = readers_[cell.readers - 1];
    std::erase_if(more, [&](const Reader& reader) { return reader.thread == thread || reader.clock <= seen[reader.thread]; });
    more.push_back({cell.read_clock, cell.read_pc, cell.reader});
  } else if (cell.readers != 0) {
    std::vector<Reader>& more = readers_[cell.readers - 1];
    std::erase_if(more, [&](const Reader& reader) { return reader.thread == thread || reader.clock <= seen[reader.thread]; });
  }
  cell.reader = static_cast<uint16_t>(thread);
  cell.read_clock = seen[thread];
  cell.read_pc = pc;
  cell.read_atomically = false;
}

void Shadow::record_write(Cell& cell, State state, uint32_t thread, const int32_t* seen, Pc pc) {
  forget_readers(cell);
  cell.state = state;
  cell.writer = static_cast<uint16_t>(thread);
  cell.write_clock = seen[thread];
  cell.write_pc = pc;
}

Clash Shadow::access(Access access, uint32_t thread, const int32_t* seen, uint32_t offset, uint32_t bytes, Pc pc) {
  Clash first;
  visit(offset, bytes, access == Access::write, [&](Cell& cell) {
    const Clash clash = check(cell, access, seen);
    if (clash.kind != Clash::Kind::none && first.kind == Clash::Kind::none) first = clash;
    if (cell.state == State::barrier) return;
    // A word that was read or written too early counts as written from now on, so that one mistake is one report.
    if (access == Access::read) {
      if (cell.state == State::unwritten || cell.state == State::pending) return;
      record_read(cell, thread, seen, pc);
    } else {
      record_write(cell, access == Access::atomic ? State::atomic : State::written, thread, seen, pc);
    }
  });
  return first;
}

Clash Shadow::begin_copy(uint32_t thread, const int32_t* seen, uint32_t offset, uint32_t bytes, Pc pc) {
  Clash first;
  visit(offset, bytes, true, [&](Cell& cell) {
    const Clash clash = check(cell, Access::write, seen);
    if (clash.kind != Clash::Kind::none && first.kind == Clash::Kind::none) first = clash;
    record_write(cell, State::pending, thread, seen, pc);
  });
  return first;
}

void Shadow::end_copy(uint32_t thread, int32_t now, uint32_t offset, uint32_t bytes) {
  visit(offset, bytes, false, [&](Cell& cell) {
    if (cell.state != State::pending || cell.writer != thread) return;
    cell.state = State::written;
    cell.write_clock = now;
  });
}

Clash Shadow::make_barrier(uint32_t thread, const int32_t* seen, uint32_t offset, Pc pc) {
  Clash first;
  visit(offset, 8, false, [&](Cell& cell) {
    const Clash clash = check(cell, Access::write, seen);
    if (clash.kind != Clash::Kind::none && first.kind == Clash::Kind::none) first = clash;
    record_write(cell, State::barrier, thread, seen, pc);
  });
  return first;
}

void Shadow::drop_barrier(uint32_t offset) {
  visit(offset, 8, false, [&](Cell& cell) {
    forget_readers(cell);
    cell.state = State::unwritten;
  });
}

Clash Shadow::use_barrier(const int32_t* seen, uint32_t offset) {
  Clash first;
  visit(offset, 8, false, [&](Cell& cell) {
    if (first.kind != Clash::Kind::none) return;
    if (cell.state != State::barrier)
      first = {Clash::Kind::unwritten, 0, 0, false};
    else if (cell.write_clock > seen[cell.writer])
      first = {Clash::Kind::race, cell.writer, cell.write_pc, true};
  });
  return first;
}

} // namespace tpk::emulator
