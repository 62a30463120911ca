// include/tpk/tiling.h: the tile sizes of the CPU kernels that results depend on, with their reasons.
// Sums are cut at absolute key tiles and (backward) absolute query tiles, never at tiles counted from the slice, so that a slicing of the
// sequence changes no bit. Changing a number here changes results in the last bits.
#pragma once

#include <cstdint>

namespace tpk {

// Masks and skips inside a key tile work on chunks of this many keys: the diagonal wastes at most half a chunk a row.
inline constexpr int64_t key_chunk = 32;
// Forward: keys between two looks at the running maximum. 256 keys x 32 lanes of fp32 scores stay close to L1.
inline constexpr int64_t forward_key_tile = 256;
// Backward: keys whose dk and dv one thread owns at a time.
inline constexpr int64_t backward_key_tile = 256;
// Backward: query rows (tokens x heads of a group) whose contribution to dk and dv is summed from zero before it is added.
inline constexpr int64_t backward_query_rows = 128;

// Tokens in a backward query tile: the largest power of two whose rows fit, at least one. Also the invariance unit.
constexpr int64_t backward_query_tokens(int64_t group) {
  int64_t tokens = 1;
  while (tokens * 2 * group <= backward_query_rows) tokens *= 2;
  return tokens;
}

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr int64_t floor_div(int64_t value, int64_t unit) { return value >= 0 ? value / unit : -((-value + unit - 1) / unit); }

} // namespace tpk
