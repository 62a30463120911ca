// planner/lanes.h: eight doubles at a time, with GCC vector extensions, so one source serves every architecture; and the mark that compiles
// a loop for AVX-512 too, chosen when the extension is loaded. (A clone for AVX2 was no faster than SSE2.)
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define PLANNER_CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define PLANNER_CLONES
#endif
#define PLANNER_INLINE inline __attribute__((always_inline))

namespace terapipe::planner {

inline constexpr int kLanes = 8;
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

typedef double Lanes __attribute__((vector_size(64)));

// Macros of a kind: vector values never cross a call, whose ABI would depend on the ISA.
PLANNER_INLINE void load(Lanes& lanes, const double* from) { std::memcpy(&lanes, from, sizeof lanes); }
PLANNER_INLINE void store(double* to, const Lanes& lanes) { std::memcpy(to, &lanes, sizeof lanes); }
PLANNER_INLINE void fill(Lanes& lanes, double value) { lanes = Lanes{value, value, value, value, value, value, value, value}; }
PLANNER_INLINE double smallest(const Lanes& lanes) {
  double least = lanes[0];
  for (int i = 1; i < kLanes; ++i)
    if (lanes[i] < least) least = lanes[i];
  return least;
}

} // namespace terapipe::planner
