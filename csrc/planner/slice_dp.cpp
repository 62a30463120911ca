// planner/slice_dp.cpp: the inner loops of the slicing search. They run at the speed at which the triangle streams from memory.
#include "planner/slice_dp.h"

#include <algorithm>
#include <cassert>
#include <numeric>

namespace terapipe::planner {

namespace {

void end_at(double* values, int units, double last) {
  std::fill_n(values, padded(units), kInfinity);
  values[units] = last;
}

// `after` may be `suffix` itself: positions behind `start` are final when `start` is computed.
PLANNER_CLONES void sum_rows(const CostTable& table, double limit, const std::vector<int>& starts, const double* after_positions,
                             double* suffix) {
  Lanes infinity, bound;
  fill(infinity, kInfinity), fill(bound, limit);
  int guess = 0;
  for (size_t next = starts.size(); next-- > 0;) {
    const int start = starts[next];
    const double* row = table.row(start);
    const double* after = after_positions + start + 1;
    const int entries = table.window(start, limit, guess);
    Lanes even = infinity, odd = infinity;
    int i = 0;
    for (; i + 2 * kLanes <= entries; i += 2 * kLanes) {
      Lanes a, b, c, d;
      load(a, row + i), load(b, row + i + kLanes), load(c, after + i), load(d, after + i + kLanes);
      const Lanes x = a <= bound ? a + c : infinity, y = b <= bound ? b + d : infinity;
      even = x < even ? x : even, odd = y < odd ? y : odd;
    }
    if (i < entries) {
      Lanes a, c;
      load(a, row + i), load(c, after + i);
      const Lanes x = a <= bound ? a + c : infinity;
      even = x < even ? x : even;
    }
    const Lanes least = odd < even ? odd : even;
    suffix[start] = smallest(least);
  }
}

PLANNER_CLONES void bottleneck_rows(const CostTable& table, const double* after_positions, double* largest) {
  for (int start = table.units() - 1; start >= 0; --start) {
    const double* row = table.row(start);
    const double* after = after_positions + start + 1;
    const int entries = table.row_lanes(start);
    Lanes least;
    fill(least, kInfinity);
    for (int i = 0; i < entries; i += kLanes) {
      Lanes cost, rest;
      load(cost, row + i), load(rest, after + i);
      const Lanes larger = cost > rest ? cost : rest;
      least = larger < least ? larger : least;
    }
    largest[start] = smallest(least);
  }
}

} // namespace

std::vector<int> all_starts(const CostTable& table) {
  std::vector<int> starts(size_t(table.units()));
  std::iota(starts.begin(), starts.end(), 0);
  return starts;
}

void suffix_sums(const CostTable& table, double limit, const std::vector<int>& starts, double* suffix) {
  end_at(suffix, table.units(), 0);
  sum_rows(table, limit, starts, suffix, suffix);
}

void add_slice_to_sums(const CostTable& table, double limit, const double* after, double* suffix) {
  end_at(suffix, table.units(), kInfinity);
  sum_rows(table, limit, all_starts(table), after, suffix);
}

void suffix_bottlenecks(const CostTable& table, double* largest) {
  end_at(largest, table.units(), 0);
  bottleneck_rows(table, largest, largest);
}

void add_slice_to_bottlenecks(const CostTable& table, const double* after, double* largest) {
  end_at(largest, table.units(), kInfinity);
  bottleneck_rows(table, after, largest);
}

PLANNER_CLONES void prefix_sums(const CostTable& table, double limit, const std::vector<int>& starts, double* prefix) {
  const int units = table.units();
  Lanes infinity, bound;
  fill(infinity, kInfinity), fill(bound, limit);
  for (int i = 1; i <= units + kLanes; ++i) prefix[i] = kInfinity;
  prefix[0] = 0;
  int guess = table.row_blocks(0);
  for (const int start : starts) {
    if (prefix[start] == kInfinity) continue;
    const double* row = table.row(start);
    double* after = prefix + start + 1;
    const int entries = table.window(start, limit, guess);
    Lanes here;
    fill(here, prefix[start]);
    for (int i = 0; i < entries; i += kLanes) {
      Lanes cost, reached;
      load(cost, row + i), load(reached, after + i);
      const Lanes sum = cost <= bound ? cost + here : infinity;
      reached = sum < reached ? sum : reached;
      store(after + i, reached);
    }
  }
}

int first_length(const CostTable& table, double limit, int start, double sum, const double* after, int& guess) {
  const double* row = table.row(start);
  int length = table.window(start, limit, guess);
  if (length > table.row_length(start)) length = table.row_length(start);
  while (!(row[length - 1] <= limit && row[length - 1] + after[start + length] == sum)) {
    --length;
    assert(length > 0);
  }
  return length;
}

Path best_path(const CostTable& table, double limit, const double* suffix) {
  Path path;
  path.sum = suffix[0];
  int guess = table.row_blocks(0);
  for (int start = 0; start < table.units(); start += path.lengths.back()) {
    path.lengths.push_back(first_length(table, limit, start, suffix[start], suffix, guess));
    path.largest = std::max(path.largest, table.row(start)[path.lengths.back() - 1]);
  }
  return path;
}

PLANNER_CLONES bool collect_edges(const CostTable& table, const EdgeQuery& query, const std::vector<int>& starts, const double* prefix,
                                  const double* suffix, std::vector<Edge>& edges) {
  const size_t before_all = edges.size();
  Lanes above, below;
  fill(above, query.above), fill(below, query.below);
  const EdgeBound& bound = query.bound;
  int guess = table.row_blocks(0);
  for (const int start : starts) {
    if (edges.size() - before_all > query.most) {
      edges.resize(before_all);
      return false;
    }
    if (!(bound(prefix[start], query.above, 0) < query.best)) continue;
    const double* row = table.row(start);
    const double* after = suffix + start + 1;
    const int entries = table.window(start, query.below, guess);
    Lanes before, best;
    fill(before, prefix[start]), fill(best, query.best);
    for (int i = 0; i < entries; i += kLanes) {
      Lanes cost, rest;
      load(cost, row + i), load(rest, after + i);
      const Lanes total = bound.repeats * (before + cost + rest) + bound.rest + bound.fill * cost;
      const auto keep = (cost > above) & (cost < below) & (total < best);
      int64_t any = 0;
      for (int lane = 0; lane < kLanes; ++lane) any |= keep[lane];
      if (any != 0)
        for (int lane = 0; lane < kLanes; ++lane)
          if (keep[lane]) edges.push_back({cost[lane], total[lane], start, start + 1 + i + lane, query.kind});
    }
  }
  return true;
}

} // namespace terapipe::planner
