// planner/knapsack.h: which micro sizes fill a batch, given the smallest cost of one micro of each size. O(batch * kinds).
#pragma once

#include <utility>
#include <vector>

#include "planner/lanes.h"

namespace terapipe::planner {

class Knapsack {
 public:
  Knapsack(std::vector<int> sizes, int batch) : sizes_(std::move(sizes)), cost_(size_t(batch) + 1), choice_(size_t(batch) + 1) {}

  // Smallest sum of `costs` over counts with sum of sizes = batch. Ties go to the size that is listed first.
  double fill(const std::vector<double>& costs) {
    cost_[0] = 0;
    for (size_t b = 1; b < cost_.size(); ++b) {
      cost_[b] = kInfinity, choice_[b] = -1;
      for (size_t kind = 0; kind < sizes_.size(); ++kind) {
        if (size_t(sizes_[kind]) > b) continue;
        const double cost = cost_[b - size_t(sizes_[kind])] + costs[kind];
        if (cost < cost_[b]) cost_[b] = cost, choice_[b] = int(kind);
      }
    }
    return cost_.back();
  }

  double cost(int batch) const { return cost_[size_t(batch)]; }

  // How many micros of each kind the last `fill` took.
  std::vector<int> counts() const {
    std::vector<int> counts(sizes_.size());
    for (size_t b = cost_.size() - 1; b > 0; b -= size_t(sizes_[size_t(choice_[b])])) ++counts[size_t(choice_[b])];
    return counts;
  }

  // For each kind the fewest micros of it (at least one) that other kinds can complete to the batch, or 0 if it cannot take part.
  static std::vector<int> fewest(const std::vector<int>& sizes, int batch) {
    std::vector<int> fewest(sizes.size());
    for (size_t kind = 0; kind < sizes.size(); ++kind) {
      std::vector<char> reached(size_t(batch) + 1);
      reached[0] = 1;
      for (int b = 1; b <= batch; ++b)
        for (size_t other = 0; other < sizes.size(); ++other)
          if (other != kind && sizes[other] <= b && reached[size_t(b - sizes[other])]) reached[size_t(b)] = 1;
      for (int count = 1; count * sizes[kind] <= batch && fewest[kind] == 0; ++count)
        if (reached[size_t(batch - count * sizes[kind])]) fewest[kind] = count;
    }
    return fewest;
  }

 private:
  std::vector<int> sizes_;
  std::vector<double> cost_;
  std::vector<int> choice_;
};

} // namespace terapipe::planner
