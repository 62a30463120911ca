// planner/cost_table.h: t(length, start), the cost of a slice of `length` units behind a prefix of `start` units, as a triangle of rows.
// Row `start` holds lengths 1 .. units - start, padded with infinity to whole lanes, so that loops over a row have no tail. Beside each row
// stands the suffix minimum of its blocks, which bounds where costs within a limit can lie even if the row is not monotone.
// +infinity is a slice that is not allowed; NaN and negative costs are refused. Trap: `row(start)[0]` is length 1.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "planner/lanes.h"

namespace terapipe::planner {

// t(l, s) = base[l - 1] + (s > 0 ? constant + s * (per_start + per_start_length * l) : 0), computed in this order without contraction.
struct CostCurve {
  const double* base; // `units` numbers, lengths 1 .. units
  int units;
  double constant, per_start, per_start_length;
};

class CostTable {
 public:
  static constexpr int kBlock = 2 * kLanes;

  explicit CostTable(const CostCurve& curve);
  // values[start * units + length - 1]; entries past the end of the sequence are not read.
  CostTable(const double* values, int units);

  int units() const { return units_; }
  const double* row(int start) const { return values_.get() + offset_[start]; }
  int row_length(int start) const { return units_ - start; }
  int row_lanes(int start) const { return (units_ - start + kLanes - 1) / kLanes * kLanes; }
  const double* block_minima(int start) const { return minima_.data() + block_offset_[start]; }
  int row_blocks(int start) const { return (units_ - start + kBlock - 1) / kBlock; }

  // How many entries of the row, in whole lanes, hold every cost up to `limit`. `guess` is where to begin to look, in blocks, and is
  // updated; rows next to each other have windows of about the same size.
  int window(int start, double limit, int& guess) const {
    const double* minima = block_minima(start);
    const int blocks = row_blocks(start);
    int block = guess < blocks ? guess : blocks;
    while (block < blocks && minima[block] <= limit) ++block;
    while (block > 0 && minima[block - 1] > limit) --block;
    guess = block;
    const int entries = block * kBlock, most = row_lanes(start);
    return entries < most ? entries : most;
  }

 private:
  struct Free {
    void operator()(double* p) const { std::free(p); }
  };

  void allocate(int units);
  void finish(); // suffix minima of the blocks; std::invalid_argument for a cost that is none

  int units_ = 0;
  std::vector<int64_t> offset_, block_offset_;
  std::unique_ptr<double[], Free> values_;
  std::vector<double> minima_;
};

} // namespace terapipe::planner
