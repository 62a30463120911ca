// planner/slicing.h: exact slicing. Minimise  sum of all slices of all micros + fill * largest slice,  fill = stages - 1, over the micro
// sizes (they sum to the batch) and the slicing of each: TeraPipe's Algorithm 1 (Li et al. 2021, sections 3.3 and 3.4) with epsilon = 0,
// the bubble term charged once a step. One sequence in D equal micros is one kind of size 1 and a batch of D.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/slice_dp.h"

namespace terapipe::planner {

// Micros of `size` sequences cost what `table` says.
struct MicroKind {
  const CostTable* table;
  int size;
};

struct MicroSlices {
  int size, count; // `count` micros of `size` sequences are sliced the same way
  std::vector<int> lengths;
};

struct Slicing {
  std::vector<MicroSlices> micros; // by ascending size
  double sum = 0;                  // of every slice of every micro
  double largest = 0;
  double cost = 0; // sum + fill * largest
  int64_t evaluations = 0;
};

// std::invalid_argument if no micro sizes sum to the batch or no slicing is allowed.
Slicing slice_batch(const std::vector<MicroKind>& kinds, int batch, double fill);

// The slicing whose largest slice is smallest and, among those, whose sum is: what schedules want that pair slices of different micros
// (1F1B). `count` slices exactly; 0 takes as many as it likes.
Slicing equal_cost_slices(const CostTable& table, int count);

} // namespace terapipe::planner
