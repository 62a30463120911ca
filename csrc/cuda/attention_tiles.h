// cuda/attention_tiles.h: tile sizes, warps, stages and shared memory of every attention kernel: the one table, each row with its reason.
// Plain C++: device code, launchers and bindings read it. "rows" are packed query rows (token, head of the group), "keys" keys. Registers
// are what ptxas says; nothing here has been timed on a GPU. Trap: ForwardTile::keys, QueryTile::keys and KeyTile::rows decide
// where sums are cut; changing one changes results in the last bits.
#pragma once

#include <cstdint>

#include "tpk/attention_params.h"

namespace tpk {

// Shared memory that a block may have: 163 KiB on sm_80, 99 KiB on sm_86, sm_89 and sm_120, 227 KiB on sm_90 and sm_100.
inline constexpr int small_shared_bytes = 99 * 1024;

// Owns query rows, walks keys. 32 rows a warp: 16 would read the key tile from shared memory twice as often, which is then the bound.
// K and V tiles share one ring of slots, K_i V_i K_i+1 ...
template <class Element_, int head_dim_> struct ForwardTile {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, rows = 128, keys = 64, warps = 4, threads = warps * 32;
  // head_dim 128: 3 slots are what lets two blocks share a multiprocessor of sm_80 (2 x 82 KiB of 164); 255 registers. head_dim 64:
  // 206 registers; a third block would leave 168 and spill 72 bytes.
  static constexpr int slots = head_dim == 128 ? 3 : 4, blocks = 2;
  static constexpr int warp_rows = rows / warps;
  static constexpr int row_bytes = head_dim * 2, slot_bytes = keys * row_bytes;
  static constexpr int q_at = 0, ring_at = rows * row_bytes, intervals_at = ring_at + slots * slot_bytes;
  static constexpr int place_at = intervals_at + rows * 8, shared_bytes = place_at + 16;
  static_assert(shared_bytes <= small_shared_bytes);
};

} // namespace tpk
