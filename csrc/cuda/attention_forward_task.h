// cuda/attention_forward_task.h: what the forward kernels take, and the choices of a call: splits, order of tiles, workspace. Plain C++.
#pragma once

#include <algorithm>

#include "cuda/attention_tiles.h"
#include "cuda/dispatch.h"
#include "tpk/scoring.h"
#include "tpk/tile_order.h"

namespace tpk {

inline constexpr int combine_threads = 128;
// Below this many key tiles a split costs more than it gains: its partial results are written and read again.
inline constexpr int64_t least_tiles_a_split = 4, most_splits = 32;

struct ForwardTask {
  ForwardParams call;
  Scoring scoring;
  TileOrder order;
  float* part_out = nullptr; // [splits, B, T, Hq, D], with splits
  float* part_lse = nullptr; // [splits, B, Hq, T]

  int64_t rows() const { return call.shape.batch * call.shape.tokens * call.shape.query_heads; }
  int64_t workspace_bytes() const { return order.splits > 1 ? order.splits * rows() * (call.shape.head_dim + 1) * 4 : 0; }
  void take_workspace(void* memory) {
    part_out = static_cast<float*>(memory), part_lse = part_out + order.splits * rows() * call.shape.head_dim;
  }
};

// KV heads whose keys and values stay in L2 together; a quarter of it is left to queries and results.
inline int heads_of_a_section(const AttentionShape& shape, const DeviceLimits& device) {
  const int64_t head_bytes = shape.keys * (shape.head_dim + shape.value_head_dim) * dtype_bytes(shape.dtype);
  return int(std::clamp<int64_t>(device.l2_bytes * 3 / 4 / std::max<int64_t>(head_bytes, 1), 1, shape.batch * shape.kv_heads));
}

template <class Tile> ForwardTask plan_forward(const ForwardParams& call, const DeviceLimits& device, bool deterministic) {
  const AttentionShape& shape = call.shape;
  check_shape(shape, call.mask);
  check_rows("q", call.q, 2), check_rows("k", call.k, 2), check_rows("v", call.v, 2), check_rows("out", call.out, 2);
  ForwardTask task{call, Scoring::of(call.scale, call.softcap), {}};
  const int64_t heads = shape.batch * shape.kv_heads, row_tiles = (shape.tokens * shape.group() + Tile::rows - 1) / Tile::rows;
  const int64_t blocks = heads * row_tiles, resident = int64_t(device.multiprocessors) * Tile::blocks;
  int64_t seen = shape.keys; // the most keys that one tile of rows sees
  const int64_t right = call.mask.causal ? 0 : call.mask.window_right;
  if (call.mask.window_left >= 0 && right >= 0)
    seen = std::min(seen, call.mask.window_left + right + 1 + (Tile::rows + shape.group() - 1) / shape.group());
  int64_t splits = 1;
  if (!deterministic) splits = std::clamp<int64_t>(std::min(resident / blocks, seen / Tile::keys / least_tiles_a_split), 1, most_splits);
  check_grid(blocks * splits);
  task.order = {int(row_tiles), int(splits), int(shape.kv_heads), int(heads), heads_of_a_section(shape, device)};
  return task;
}

} // namespace tpk
