// planner/slice_dp.h: the dynamic programs over one cost table, each one pass over the triangle and O(units^2).
// All take only slices of cost <= limit and, where `starts` are given (ascending), slices that begin at one of them; other positions get
// infinity. Arrays have one number a position 0 .. units and kLanes infinities behind them (`padded`).
#pragma once

#include <vector>

#include "planner/cost_table.h"

namespace terapipe::planner {

inline size_t padded(int units) { return size_t(units) + 1 + kLanes; }

std::vector<int> all_starts(const CostTable& table); // 0 .. units - 1

// suffix[i] = smallest sum of costs that slices [i, units); infinity where impossible.
void suffix_sums(const CostTable& table, double limit, const std::vector<int>& starts, double* suffix);

// One slice more: suffix[i] = smallest cost of a first slice [i, j) plus after[j].
void add_slice_to_sums(const CostTable& table, double limit, const double* after, double* suffix);

// prefix[i] = smallest sum of costs that slices [0, i).
void prefix_sums(const CostTable& table, double limit, const std::vector<int>& starts, double* prefix);

// largest[i] = smallest possible largest cost that slices [i, units).
void suffix_bottlenecks(const CostTable& table, double* largest);

// One slice more: largest[i] = smallest possible maximum of a first slice [i, j) and after[j].
void add_slice_to_bottlenecks(const CostTable& table, const double* after, double* largest);

// A slicing and what it costs: sum as the dynamic program adds it, from the last slice to the first.
struct Path {
  std::vector<int> lengths;
  double sum = 0, largest = 0;
};

// The longest slice of cost <= limit from `start` with cost + after[its end] == sum, which must exist.
int first_length(const CostTable& table, double limit, int start, double sum, const double* after, int& guess);

// The slicing behind suffix[0]; the longest first slices where several are equally good.
Path best_path(const CostTable& table, double limit, const double* suffix);

// One slice that may be the largest of a better answer, and a lower bound on what any answer costs whose largest slice it is.
struct Edge {
  double cost, bound;
  int start, end, kind;
};

// bound = repeats * (prefix[start] + cost + suffix[end]) + rest + fill * cost.
struct EdgeBound {
  double repeats, rest, fill;
  double operator()(double before, double cost, double after) const { return repeats * (before + cost + after) + rest + fill * cost; }
};

// Appends every slice from one of the starts with above < cost < below whose bound is < best. False, with nothing appended, if there are
// more than `most`.
struct EdgeQuery {
  double above, below, best;
  EdgeBound bound;
  int kind;
  size_t most;
};
bool collect_edges(const CostTable& table, const EdgeQuery& query, const std::vector<int>& starts, const double* prefix,
                   const double* suffix, std::vector<Edge>& edges);

} // namespace terapipe::planner
