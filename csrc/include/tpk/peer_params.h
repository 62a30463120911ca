// include/tpk/peer_params.h: the words of a peer link, and plain parameters of its kernels. The protocol, which the Triton kernels share,
// is in cuda/peer_protocol.cuh; tpkernels/hand_off.py has the same numbers, and a test compares them.
#pragma once

#include <cstdint>

#include "tpk/attention_params.h"

namespace tpk {

// Words of `control`, in this end's device memory.
struct PeerControl {
  static constexpr int stopped = 0, reporter = 1, direction = 2, generation = 3;
};
// Words that the host sees: it sets `abort`, and reads the report: who, direction, slot, tile, want, got, generation.
struct PeerWords {
  static constexpr int abort = 0, report = 1;
};
// who: waited for a credit, waited for a tile, found a slot written over
enum class PeerWho : uint32_t { sender = 1, receiver = 2, holder = 3 };

// Rows of a tile: what one block of a product makes.
inline constexpr int peer_tile_rows = 64;

// One slot as the kernels of one end see it. data, claim and flags [tiles] lie in the receiver's memory, credit in the sender's, the rest
// in this end's; words where the host reads them. Null flags: no slot, a kernel is the plain op.
struct PeerSlot {
  void* data = nullptr;
  uint32_t *claim = nullptr, *flags = nullptr, *credit = nullptr, *uses = nullptr, *arrived = nullptr, *control = nullptr, *words = nullptr;
  int64_t budget_ns = 0; // of a wait
  int32_t index = 0;
};

// out = x + residual of [rows, columns], contiguous; residual may be null.
struct PeerAddPut {
  int64_t rows = 0, columns = 0;
  const void *x = nullptr, *residual = nullptr;
  void* out = nullptr;
};

// out [rows, n] = a [rows, k] @ b + residual, all contiguous; b is [k, n], transposed [n, k]; residual may be null.
struct PeerMatmul {
  int64_t rows = 0, n = 0, k = 0;
  bool transposed = true;
  const void *a = nullptr, *b = nullptr, *residual = nullptr;
  void* out = nullptr;
};

} // namespace tpk
