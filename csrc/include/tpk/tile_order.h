// include/tpk/tile_order.h: in which order blocks take the tiles of query rows: those that see most keys first, so that the last
// ones to run are short. KV heads are taken in sections whose keys and values fit the L2 cache together.
#pragma once

#include <cstdint>

namespace tpk {

struct TilePlace {
  int row_tile = 0, split = 0, kv_head = 0, batch = 0;
};

struct TileOrder {
  int row_tiles = 0, splits = 1, kv_heads = 0, heads = 0; // heads = batch * kv_heads
  int section_heads = 1;

  constexpr int64_t tiles() const { return int64_t(row_tiles) * splits * heads; }

  // index in [0, tiles()): section, row tile from the last, head of the section, split.
  constexpr TilePlace of(int index) const {
    const int section_tiles = section_heads * row_tiles * splits;
    const int first_head = index / section_tiles * section_heads;
    int rest = index % section_tiles;
    const int section = heads - first_head < section_heads ? heads - first_head : section_heads;
    const int split = rest % splits;
    rest /= splits;
    const int head = first_head + rest % section;
    return {row_tiles - 1 - rest / section, split, head % kv_heads, head / kv_heads};
  }
};

} // namespace tpk
