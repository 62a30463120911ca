// cuda/attention_backward_task.h: what the backward kernels take, and the workspace of a call. Plain C++.
//     p = exp(s - lse)   ds = scale * p * (dout v^T - delta)   dv += p^T dout   dk += ds^T q   dq = ds k
// Packed rows: for each (batch, KV head), tiles * rows places; query row r (query_rows.cuh) lies at place r + shift, where shift is
// start * group modulo the tile's rows. So a tile holds the same rows of the sequence for every slicing at multiples of a tile, and a
// place that holds no row is one that sees nothing.
#pragma once

#include "cuda/attention_forward_task.h"

namespace tpk {

// What the backward knows of a query row: lse in base 2 (+inf: p is 0), delta = rowsum(out * dout), its keys. Both ends of the keys never
// decrease over the places, so what sees a key tile is found by search.
struct alignas(16) PackedRow {
  float lse, delta;
  int32_t lo, hi;
};

inline constexpr int prepare_threads = 128, sink_threads = 256, round_threads = 128;

struct BackwardTask {
  BackwardParams call;
  Scoring scoring;
  float inverse_cap = 0;
  TileOrder key_order, row_order; // of the kernels that own keys and, for a deterministic dq, rows
  int tile_rows = 0, row_tiles = 0, shift = 0;
  bool deterministic = false;
  PackedRow* packed_rows = nullptr; // [B, Hkv, row_tiles * tile_rows]
  float* packed_dq = nullptr; // [B, Hkv, row_tiles * tile_rows / 16, D / 8, 128]: accumulators as they lie in a warp; null if deterministic

  constexpr int64_t head_places() const { return int64_t(row_tiles) * tile_rows; }
  constexpr int64_t places() const { return call.shape.batch * call.shape.kv_heads * head_places(); }
  int64_t workspace_bytes() const {
    return places() * (int64_t(sizeof(PackedRow)) + (deterministic ? 0 : call.shape.head_dim * int64_t(sizeof(float))));
  }
  void take_workspace(void* memory) {
    packed_rows = static_cast<PackedRow*>(memory);
    packed_dq = deterministic ? nullptr : reinterpret_cast<float*>(packed_rows + places());
  }
};

template <class Keys, class Queries>
BackwardTask plan_backward(const BackwardParams& call, const DeviceLimits& device, bool deterministic) {
  const AttentionShape& shape = call.shape;
  check_shape(shape, call.mask);
  check_rows("q", call.q, 2), check_rows("k", call.k, 2), check_rows("v", call.v, 2), check_rows("out", call.out, 2);
  check_rows("dout", call.dout, 2), check_rows("dq", call.dq, 2), check_rows("dk", call.dk, 4), check_rows("dv", call.dv, 4);
  BackwardTask task;
  task.call = call, task.scoring = Scoring::of(call.scale, call.softcap);
  task.inverse_cap = call.softcap == 0 ? 0 : 1 / call.softcap;
  const int64_t heads = shape.batch * shape.kv_heads, rows = shape.tokens * shape.group();
  const int64_t first_row = call.mask.start * shape.group();
  task.tile_rows = Keys::rows, task.shift = int((first_row % Keys::rows + Keys::rows) % Keys::rows);
  task.row_tiles = int((rows + task.shift + Keys::rows - 1) / Keys::rows);
  task.deterministic = deterministic;
  const int key_tiles = int((shape.keys + Keys::keys - 1) / Keys::keys), query_tiles = int((rows + Queries::rows - 1) / Queries::rows);
  const int section = heads_of_a_section(shape, device);
  task.key_order = {key_tiles, 1, int(shape.kv_heads), int(heads), section};
  task.row_order = {query_tiles, 1, int(shape.kv_heads), int(heads), section};
  check_grid(task.key_order.tiles()), check_grid(task.row_order.tiles()), check_grid(task.places());
  return task;
}

} // namespace tpk
