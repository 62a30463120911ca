// planner/equal_cost.cpp: minimise the largest slice, then the sum. With a fixed number of slices both are layered dynamic programs, one
// layer a slice, O(count * units^2); nothing assumes monotone costs. `slicing.h` says who wants it.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "planner/slicing.h"

namespace terapipe::planner {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::max();

Slicing answer(std::vector<int> lengths, double sum, double largest) {
  Slicing slicing;
  slicing.micros.push_back({1, 1, std::move(lengths)});
  slicing.sum = sum, slicing.largest = largest, slicing.cost = largest;
  slicing.evaluations = 2; // one for the largest slice, one for the sum
  return slicing;
}

} // namespace

Slicing equal_cost_slices(const CostTable& table, int count) {
  const int units = table.units();
  if (count < 0 || count > units)
    throw std::invalid_argument(std::to_string(units) + " units cannot be cut into " + std::to_string(count) + " slices; ask for 1 to " +
                                std::to_string(units) + ", or for fewer tokens a unit");
  const char* refusal = "no slicing is allowed: every one has a slice of infinite cost";
  std::vector<double> after(padded(units), kInfinity), now(padded(units));
  if (count == 0) {
    suffix_bottlenecks(table, now.data());
    if (now[0] > kNoLimit) throw std::invalid_argument(refusal);
    const double limit = now[0];
    suffix_sums(table, limit, all_starts(table), now.data());
    Path path = best_path(table, limit, now.data());
    return answer(std::move(path.lengths), path.sum, path.largest);
  }
  after[size_t(units)] = 0;
  for (int slice = 0; slice < count; ++slice) {
    add_slice_to_bottlenecks(table, after.data(), now.data());
    std::swap(after, now);
  }
  const double limit = after[0];
  if (limit > kNoLimit) throw std::invalid_argument(refusal);
  // layers[c][i]: smallest sum of exactly c slices of [i, units)
  std::vector<std::vector<double>> layers(size_t(count) + 1, std::vector<double>(padded(units), kInfinity));
  layers[0][size_t(units)] = 0;
  for (size_t c = 1; c < layers.size(); ++c) add_slice_to_sums(table, limit, layers[c - 1].data(), layers[c].data());
  std::vector<int> lengths;
  double largest = 0;
  int start = 0, guess = table.row_blocks(0);
  for (size_t c = layers.size() - 1; c > 0; --c) {
    const int length = first_length(table, limit, start, layers[c][size_t(start)], layers[c - 1].data(), guess);
    largest = std::max(largest, table.row(start)[length - 1]);
    lengths.push_back(length);
    start += length;
  }
  return answer(std::move(lengths), layers.back()[0], largest);
}

} // namespace terapipe::planner
