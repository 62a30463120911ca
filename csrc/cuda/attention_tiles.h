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
// Whether so many blocks share a multiprocessor of sm_80: it has 164 KiB, of which each block costs 1 KiB more than it asks for.
constexpr bool fit_sm80(int blocks, int shared_bytes) { return blocks * (shared_bytes + 1024) <= 164 * 1024; }

// Owns query rows, walks keys. 32 rows a warp: 16 would read the key tile from shared memory twice as often, which is then the bound.
// K and V tiles share one ring of slots, K_i V_i K_i+1 ...
template <class Element_, int head_dim_> struct ForwardTile {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, rows = 128, keys = 64, warps = 4, threads = warps * 32;
  // head_dim 128: 3 slots are what lets two blocks share a multiprocessor of sm_80 (2 x 82 KiB of 164, to the byte); 255 registers.
  // head_dim 64: 214 registers; a third block would leave 168 and spill 72 bytes.
  static constexpr int slots = head_dim == 128 ? 3 : 4, blocks = 2;
  static constexpr int warp_rows = rows / warps;
  static constexpr int row_bytes = head_dim * 2, slot_bytes = keys * row_bytes;
  static constexpr int q_at = 0, ring_at = rows * row_bytes, intervals_at = ring_at + slots * slot_bytes;
  static constexpr int shared_bytes = intervals_at + rows * 8;
  static_assert(shared_bytes <= small_shared_bytes && fit_sm80(blocks, shared_bytes));
};

// Owns keys, walks query rows: dk, dv and what dq takes. Each warp owns warp_keys keys and the whole head_dim of their dk and dv, so that
// P^T and dS^T are operands where they arise: 128 fp32 registers of sums. Query tiles come in `chunk` rows, which is what S^T and dP^T
// hold at a time. Two stages of (q, dout, rows).
template <class Element_, int head_dim_, bool small> struct KeyTile {
  using Element = Element_;
  // head_dim 64: 32 keys a warp halve what it reads of q and dout. head_dim 128: 16 keys fill the registers; 128 keys a block make
  // the reductions of dq half as many as 64 would. small: what fits 99 KiB. Registers allow two blocks of head_dim 64, and so does the
  // shared memory of sm_90; that of sm_80 lacks 1 KiB. chunk: with 32 rows, head_dim 64 would spill up to 136 bytes.
  static constexpr int head_dim = head_dim_, rows = small ? 32 : 64, keys = small ? 64 : 128, chunk = head_dim == 64 ? 16 : 32;
  static constexpr int warp_keys = head_dim == 64 ? 32 : 16, warps = keys / warp_keys, threads = warps * 32;
  static constexpr int row_bytes = head_dim * 2, stages = 2, packed_row_bytes = 16;
  static constexpr int q_at = 0, dout_at = rows * row_bytes, rows_at = 2 * dout_at, stage_bytes = rows_at + rows * packed_row_bytes;
  static constexpr int k_at = 0, v_at = keys * row_bytes, ds_at = 2 * v_at, ds_row_bytes = rows * 2;
  static constexpr int stages_at = ds_at + keys * ds_row_bytes, place_at = stages_at + stages * stage_bytes, shared_bytes = place_at + 64;
  // dq of a tile: each warp 32 rows and 32 columns.
  static constexpr int dq_row_warps = rows / 32, dq_column_warps = head_dim / 32;
  static_assert(dq_row_warps * dq_column_warps == warps);
};

// Owns query rows, walks keys: the deterministic dq. 16 rows a warp: S, dP and dq are 128 registers.
template <class Element_, int head_dim_> struct QueryTile {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, rows = 64, keys = 64, warps = 4, threads = warps * 32, blocks = 2;
  static constexpr int row_bytes = head_dim * 2, slot_bytes = keys * row_bytes;
  // Two slots of K and one of V, which is read first and can be filled again earlier: two blocks share a multiprocessor of sm_80.
  static constexpr int q_at = 0, dout_at = rows * row_bytes, k_at = 2 * dout_at, v_at = k_at + 2 * slot_bytes;
  static constexpr int rows_at = v_at + slot_bytes, shared_bytes = rows_at + rows * 16;
  static_assert(shared_bytes <= small_shared_bytes && fit_sm80(blocks, shared_bytes));
};

} // namespace tpk
