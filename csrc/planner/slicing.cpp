// planner/slicing.cpp: the search over t_max, the largest slice allowed.
//
// S(t_max), the smallest sum with slices <= t_max, never grows with t_max. One evaluation at t_max (a dynamic program for each kind of
// micro and a knapsack) gives S and the true largest slice m, and S is constant on [m, t_max], whose best answer is m: the range is done.
// What is left are open intervals between evaluations. An answer in (low, high) costs at least S(high) + fill * t for its t, so an interval
// that cannot beat the best answer is dropped, and its upper end lowered to where it can. Of what remains, those slices are collected that
// can be the largest of a better answer (prefix + slice + suffix + fill * slice < best); the search recurses on their median. Nothing
// assumes that costs are monotone or convex: noise only leaves more slices in the filter.
#include "planner/slicing.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "planner/knapsack.h"

namespace terapipe::planner {
namespace {

// Evaluations between the two ends before the filter, geometrically spaced; and, in one interval, before its slices are collected.
constexpr int kSeeds = 24, kDescents = 2;

double just_below(double value) { return std::nextafter(value, -kInfinity); }

// Answers with low < largest slice < high are still open; they sum to `sum` at least.
struct Interval {
  double low, high, sum;
};

class Search {
 public:
  Search(const std::vector<MicroKind>& kinds, int batch, double fill)
      : kinds_(kinds), batch_(batch), fill_(fill), sizes_(sizes_of(kinds)), fewest_(Knapsack::fewest(sizes_, batch)),
        knapsack_(sizes_, batch), sums_(kinds.size()), suffix_(kinds.size()), prefix_(kinds.size()) {
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      suffix_[kind].resize(padded(kinds_[kind].table->units()));
      prefix_[kind].resize(padded(kinds_[kind].table->units()));
    }
    best_.cost = kInfinity;
  }

  Slicing run() {
    const double bottleneck = smallest_largest();
    if (bottleneck == kInfinity) throw std::invalid_argument("no slicing is allowed: every one has a slice of infinite cost");
    const Range top = evaluate(std::numeric_limits<double>::max());
    Range previous = top;
    std::vector<Interval> open;
    if (fill_ > 0 && bottleneck < top.largest) {
      const double ratio = std::pow(std::max(bottleneck / top.largest, 1e-6), 1.0 / (kSeeds + 1));
      double limit = top.largest;
      for (int seed = 0; seed <= kSeeds; ++seed) {
        limit *= ratio;
        const double at = seed == kSeeds ? bottleneck : limit;
        if (at >= previous.largest || at < bottleneck) continue;
        const Range next = evaluate(at);
        open.push_back({at, previous.largest, previous.sum});
        previous = next;
      }
    }
    std::sort(open.begin(), open.end(), [this](const Interval& a, const Interval& b) { return bound(a) < bound(b); });
    for (const Interval& interval : open) close(interval);
    return best_;
  }

 private:
  struct Range { // S is `sum` for every t_max from `largest` to the limit evaluated
    double sum, largest;
  };
  struct Group { // slices that may be the largest of a better answer, in an open interval
    double bound;
    std::vector<Edge> edges;
    bool operator<(const Group& other) const { return bound > other.bound; } // a heap gives the smallest bound first
  };

  static std::vector<int> sizes_of(const std::vector<MicroKind>& kinds) {
    std::vector<int> sizes;
    for (const MicroKind& kind : kinds) sizes.push_back(kind.size);
    return sizes;
  }

  double bound(const Interval& interval) const { return interval.sum + fill_ * interval.low; }

  // The smallest t_max with an answer. The best largest slice of a batch is the worst of its micros', so sizes are added from the best on.
  double smallest_largest() {
    std::vector<std::pair<double, int>> order;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      suffix_bottlenecks(*kinds_[kind].table, suffix_[kind].data());
      order.emplace_back(suffix_[kind][0], int(kind));
    }
    std::sort(order.begin(), order.end());
    std::vector<double> costs(kinds_.size(), kInfinity);
    for (const auto& [largest, kind] : order) {
      costs[size_t(kind)] = 0;
      if (knapsack_.fill(costs) < kInfinity) return largest;
    }
    throw std::invalid_argument("no micro sizes of the table sum to the batch of " + std::to_string(batch_) + " sequences; add size 1");
  }

  Range evaluate(double limit) {
    ++best_.evaluations;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      suffix_sums(*kinds_[kind].table, limit, suffix_[kind].data());
      sums_[kind] = suffix_[kind][0];
    }
    const double sum = knapsack_.fill(sums_);
    const std::vector<int> counts = knapsack_.counts();
    std::vector<MicroSlices> micros;
    double largest = 0;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (counts[kind] == 0) continue;
      Path path = best_path(*kinds_[kind].table, limit, suffix_[kind].data());
      largest = std::max(largest, path.largest);
      micros.push_back({kinds_[kind].size, counts[kind], std::move(path.lengths)});
    }
    const double cost = sum + fill_ * largest;
    if (cost < best_.cost) best_.cost = cost, best_.sum = sum, best_.largest = largest, best_.micros = std::move(micros);
    return {sum, largest};
  }

  // Lowers the upper end to where an answer can still be better. True if nothing is left.
  bool narrow(Interval& interval) const {
    const double high = (best_.cost - interval.sum) / fill_;
    // Rounding must not cut off an answer: a little more than the quotient is kept, and only if that is a real cut.
    if (high * (1 + 1e-12) < interval.high) interval.high = high * (1 + 1e-12);
    return !(interval.low < interval.high) || !(bound(interval) < best_.cost);
  }

  void close(Interval interval) {
    for (int descent = 0; descent < kDescents; ++descent) {
      if (narrow(interval)) return;
      const double limit = just_below(interval.high);
      if (limit <= interval.low) return;
      const Range range = evaluate(limit);
      interval.high = range.largest, interval.sum = range.sum;
    }
    if (narrow(interval)) return;
    // The suffixes in hand are those of the last evaluation, which allowed every slice of the interval.
    std::vector<Group> heap;
    push(heap, collect(interval));
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      std::vector<Edge> edges = std::move(heap.back().edges);
      heap.pop_back();
      drop(edges);
      if (!edges.empty()) split(std::move(edges), heap);
    }
  }

  void split(std::vector<Edge> edges, std::vector<Group>& heap) {
    const auto median = edges.begin() + int64_t(edges.size() / 2);
    std::nth_element(edges.begin(), median, edges.end(), [](const Edge& a, const Edge& b) { return a.cost < b.cost; });
    const double limit = median->cost;
    const Range range = evaluate(limit);
    std::vector<Edge> lower, upper;
    for (const Edge& edge : edges) {
      if (edge.cost > limit)
        upper.push_back(edge);
      else if (edge.cost < range.largest && range.sum + fill_ * edge.cost < best_.cost)
        lower.push_back(edge);
    }
    push(heap, std::move(upper));
    if (lower.empty()) return;
    measure_prefixes(limit);
    for (Edge& edge : lower) {
      const size_t kind = size_t(edge.kind);
      edge.bound =
          std::max(edge.bound, edge_bound(edge.kind)(prefix_[kind][size_t(edge.start)], edge.cost, suffix_[kind][size_t(edge.end)]));
    }
    push(heap, std::move(lower));
  }

  void drop(std::vector<Edge>& edges) const {
    std::erase_if(edges, [this](const Edge& edge) { return !(edge.bound < best_.cost); });
  }

  void push(std::vector<Group>& heap, std::vector<Edge> edges) const {
    drop(edges);
    if (edges.empty()) return;
    double least = kInfinity;
    for (const Edge& edge : edges) least = std::min(least, edge.bound);
    heap.push_back({least, std::move(edges)});
    std::push_heap(heap.begin(), heap.end());
  }

  void measure_prefixes(double limit) {
    for (size_t kind = 0; kind < kinds_.size(); ++kind)
      if (fewest_[kind] > 0) prefix_sums(*kinds_[kind].table, limit, prefix_[kind].data());
  }

  // Of an answer that takes micros of this kind: the fewest that can be, the rest at the smallest sum. More of them cost no less.
  EdgeBound edge_bound(int kind) const {
    const int fewest = fewest_[size_t(kind)];
    return {double(fewest), knapsack_.cost(batch_ - fewest * kinds_[size_t(kind)].size), fill_};
  }

  std::vector<Edge> collect(const Interval& interval) {
    std::vector<Edge> edges;
    measure_prefixes(interval.high);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (fewest_[kind] == 0) continue;
      const EdgeQuery query{interval.low, interval.high, best_.cost, edge_bound(int(kind)), int(kind)};
      collect_edges(*kinds_[kind].table, query, prefix_[kind].data(), suffix_[kind].data(), edges);
    }
    return edges;
  }

  const std::vector<MicroKind>& kinds_;
  const int batch_;
  const double fill_;
  const std::vector<int> sizes_, fewest_;
  Knapsack knapsack_;
  std::vector<double> sums_;
  std::vector<std::vector<double>> suffix_, prefix_;
  Slicing best_;
};

} // namespace

Slicing slice_batch(const std::vector<MicroKind>& kinds, int batch, double fill) { return Search(kinds, batch, fill).run(); }

} // namespace terapipe::planner
