// planner/cost_table.cpp: filling and checking the triangle of costs.
#include "planner/cost_table.h"

#include <cmath>
#include <new>
#include <sstream>
#include <stdexcept>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace terapipe::planner {
namespace {

constexpr int kMostUnits = 1 << 15; // 4 GiB of costs
constexpr size_t kHugePage = size_t{1} << 21;

struct RowFill {
  const double* base; // padded
  double constant, per_start, per_start_length, start;
};

PLANNER_CLONES void fill_row(double* row, int entries, const RowFill& f) {
  Lanes length{1, 2, 3, 4, 5, 6, 7, 8};
  for (int i = 0; i < entries; i += kLanes) {
    Lanes base, context;
    load(base, f.base + i);
    context = f.constant + f.start * (f.per_start + f.per_start_length * length);
    store(row + i, base + context);
    length += double(kLanes);
  }
}

// Smallest entry of each block; false if an entry is negative or NaN.
PLANNER_CLONES bool block_minima_of(const double* row, int entries, double* minima) {
  Lanes zero{};
  bool good = true;
  for (int i = 0; i < entries; i += CostTable::kBlock) {
    Lanes a, b;
    load(a, row + i);
    if (i + kLanes < entries)
      load(b, row + i + kLanes);
    else
      b = a;
    const auto fine = (a >= zero) & (b >= zero);
    int64_t all = -1;
    for (int lane = 0; lane < kLanes; ++lane) all &= fine[lane];
    good &= all != 0;
    const Lanes least = a < b ? a : b;
    *minima++ = smallest(least);
  }
  return good;
}

[[noreturn]] void refuse(int length, int start, double cost) {
  std::ostringstream message;
  message << "the cost of a slice of " << length << " units behind a prefix of " << start << " is " << cost
          << "; costs must be numbers from 0 up (infinity: a slice that is not allowed). Measure the missing lengths or correct the fit.";
  throw std::invalid_argument(message.str());
}

} // namespace

void CostTable::allocate(int units) {
  if (units < 1) throw std::invalid_argument("the cost table is empty; it needs the cost of at least one unit");
  if (units > kMostUnits)
    throw std::invalid_argument("the cost table has " + std::to_string(units) + " units, more than " + std::to_string(kMostUnits) +
                                "; use a larger unit");
  units_ = units;
  offset_.resize(units), block_offset_.resize(units);
  int64_t entries = 0, blocks = 0;
  for (int start = 0; start < units; ++start) {
    offset_[start] = entries, block_offset_[start] = blocks;
    entries += row_lanes(start), blocks += row_blocks(start);
  }
  const size_t bytes = size_t(entries) * sizeof(double);
  const size_t alignment = bytes < 2 * kHugePage ? 64 : kHugePage;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
  if (alignment == kHugePage) madvise(memory, bytes, MADV_HUGEPAGE); // a hint: page faults are half of the time without it
#endif
  values_.reset(static_cast<double*>(memory));
  minima_.resize(size_t(blocks));
}

void CostTable::finish() {
  for (int start = 0; start < units_; ++start) {
    double* cells = values_.get() + offset_[start];
    const int length = row_length(start), lanes = row_lanes(start), blocks = row_blocks(start);
    for (int i = length; i < lanes; ++i) cells[i] = kInfinity;
    double* minima = minima_.data() + block_offset_[start];
    if (!block_minima_of(cells, lanes, minima))
      for (int i = 0; i < length; ++i)
        if (!(cells[i] >= 0)) refuse(i + 1, start, cells[i]);
    for (int block = blocks - 1; block-- > 0;)
      if (minima[block + 1] < minima[block]) minima[block] = minima[block + 1];
  }
}

CostTable::CostTable(const CostCurve& curve) {
  allocate(curve.units);
  std::vector<double> base(size_t(units_) + kLanes, 0.0);
  std::memcpy(base.data(), curve.base, size_t(units_) * sizeof(double));
  std::memcpy(values_.get(), base.data(), size_t(units_) * sizeof(double)); // no context without a prefix
  for (int start = 1; start < units_; ++start)
    fill_row(values_.get() + offset_[start], row_lanes(start),
             {base.data(), curve.constant, curve.per_start, curve.per_start_length, double(start)});
  finish();
}

CostTable::CostTable(const double* values, int units) {
  allocate(units);
  for (int start = 0; start < units_; ++start)
    std::memcpy(values_.get() + offset_[start], values + size_t(start) * size_t(units_), size_t(row_length(start)) * sizeof(double));
  finish();
}

} // namespace terapipe::planner
