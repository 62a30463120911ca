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
// One slice of so many of the triangle is collected at a time: handling them then costs about as much as an evaluation.
constexpr size_t kShare = 256;

double just_below(double value) { return std::nextafter(value, -kInfinity); }

// Answers with low < largest slice < high are still open; they sum to `sum` at least.
struct Interval {
  double low, high, sum;
};

class Search {
 public:
  Search(const std::vector<MicroKind>& kinds, int batch, double fill)
      : kinds_(kinds), batch_(batch), fill_(fill), sizes_(sizes_of(kinds)), fewest_(Knapsack::fewest(sizes_, batch)),
        knapsack_(sizes_, batch), sums_(kinds.size()), suffix_(kinds.size()), prefix_(kinds.size()), every_(kinds.size()) {
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      suffix_[kind].resize(padded(kinds_[kind].table->units()));
      prefix_[kind].resize(padded(kinds_[kind].table->units()));
      if (fewest_[kind] > 0) every_[kind] = all_starts(*kinds_[kind].table);
    }
    best_.cost = kInfinity;
  }

  Slicing run() {
    const double bottleneck = smallest_largest();
    if (bottleneck == kInfinity) throw std::invalid_argument("no slicing is allowed: every one has a slice of infinite cost");
    const Range top = evaluate(std::numeric_limits<double>::max(), every_);
    Range previous = top;
    std::vector<Interval> open;
    if (fill_ > 0 && bottleneck < top.largest) {
      const double ratio = std::pow(std::max(bottleneck / top.largest, 1e-6), 1.0 / (kSeeds + 1));
      double limit = top.largest;
      for (int seed = 0; seed <= kSeeds; ++seed) {
        limit *= ratio;
        const double at = seed == kSeeds ? bottleneck : limit;
        if (at >= previous.largest || at < bottleneck) continue;
        const Range next = evaluate(at, every_);
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
  struct Position { // where a slice of a better answer may begin
    int start;
    double bound; // on what answers cost that pass it, without the fill
  };
  struct Group { // slices that may be the largest of a better answer, in an open interval, and the positions that it may pass, by kind
    double bound;
    std::vector<Edge> edges;
    std::vector<std::vector<Position>> positions;
    bool operator<(const Group& other) const { return bound > other.bound; } // a heap gives the smallest bound first
  };
  using Starts = std::vector<std::vector<int>>; // by kind

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

  Range evaluate(double limit, const Starts& starts) {
    ++best_.evaluations;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (fewest_[kind] > 0) suffix_sums(*kinds_[kind].table, limit, starts[kind], suffix_[kind].data());
      sums_[kind] = fewest_[kind] > 0 ? suffix_[kind][0] : kInfinity;
    }
    const double sum = knapsack_.fill(sums_);
    if (sum == kInfinity) return {sum, limit};
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
      const Range range = evaluate(limit, every_);
      interval.high = range.largest, interval.sum = range.sum;
    }
    if (narrow(interval)) return;
    // From the top down, as many slices at a time as stay in the cache; each evaluation tightens the bounds of those below it.
    Starts starts = every_;
    measure_prefixes(interval.high, starts); // the suffixes in hand are those of the last evaluation, which allowed the same slices
    std::vector<Group> heap;
    for (;;) {
      std::vector<std::vector<Position>> open = positions(starts);
      double middle = interval.low;
      std::vector<Edge> edges;
      while (!collect({middle, interval.high, 0}, starts, edges)) middle += (interval.high - middle) / 2;
      starts = passable(open, interval.low);
      push(heap, std::move(edges), std::move(open));
      if (!(interval.low < middle)) break;
      const Range range = evaluate(middle, starts);
      interval.high = range.largest, interval.sum = range.sum;
      if (narrow(interval)) break;
      measure_prefixes(middle, starts);
    }
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      Group group = std::move(heap.back());
      heap.pop_back();
      drop(group.edges);
      if (!group.edges.empty()) split(std::move(group), heap);
    }
  }

  void split(Group group, std::vector<Group>& heap) {
    std::vector<Edge>& edges = group.edges;
    const auto cheaper = [](const Edge& a, const Edge& b) { return a.cost < b.cost; };
    const Starts starts = passable(group.positions, std::min_element(edges.begin(), edges.end(), cheaper)->cost);
    const auto median = edges.begin() + int64_t(edges.size() / 2);
    std::nth_element(edges.begin(), median, edges.end(), cheaper);
    const double limit = median->cost;
    const Range range = evaluate(limit, starts);
    std::vector<Edge> lower, upper;
    for (const Edge& edge : edges) {
      if (edge.cost > limit)
        upper.push_back(edge);
      else if (edge.cost < range.largest && range.sum + fill_ * edge.cost < best_.cost)
        lower.push_back(edge);
    }
    push(heap, std::move(upper), std::move(group.positions));
    if (lower.empty()) return;
    measure_prefixes(limit, starts);
    for (Edge& edge : lower) {
      const size_t kind = size_t(edge.kind);
      edge.bound =
          std::max(edge.bound, edge_bound(edge.kind)(prefix_[kind][size_t(edge.start)], edge.cost, suffix_[kind][size_t(edge.end)]));
    }
    push(heap, std::move(lower), positions(starts));
  }

  void drop(std::vector<Edge>& edges) const {
    std::erase_if(edges, [this](const Edge& edge) { return !(edge.bound < best_.cost); });
  }

  void push(std::vector<Group>& heap, std::vector<Edge> edges, std::vector<std::vector<Position>> positions) const {
    drop(edges);
    if (edges.empty()) return;
    double least = kInfinity;
    for (const Edge& edge : edges) least = std::min(least, edge.bound);
    heap.push_back({least, std::move(edges), std::move(positions)});
    std::push_heap(heap.begin(), heap.end());
  }

  void measure_prefixes(double limit, const Starts& starts) {
    for (size_t kind = 0; kind < kinds_.size(); ++kind)
      if (fewest_[kind] > 0) prefix_sums(*kinds_[kind].table, limit, starts[kind], prefix_[kind].data());
  }

  // With the prefixes and suffixes in hand.
  std::vector<std::vector<Position>> positions(const Starts& starts) const {
    std::vector<std::vector<Position>> positions(kinds_.size());
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (fewest_[kind] == 0) continue;
      const EdgeBound bound = edge_bound(int(kind));
      for (const int start : starts[kind]) {
        const double cost = bound(prefix_[kind][size_t(start)], 0, suffix_[kind][size_t(start)]);
        if (cost < best_.cost) positions[kind].push_back({start, cost});
      }
    }
    return positions;
  }

  // Positions of answers better than the best whose largest slice costs `least` or more.
  Starts passable(const std::vector<std::vector<Position>>& positions, double least) const {
    Starts starts(kinds_.size());
    for (size_t kind = 0; kind < kinds_.size(); ++kind)
      for (const Position& position : positions[kind])
        if (position.bound + fill_ * least < best_.cost) starts[kind].push_back(position.start);
    return starts;
  }

  // Of an answer that takes micros of this kind: the fewest that can be, the rest at the smallest sum. More of them cost no less.
  EdgeBound edge_bound(int kind) const {
    const int fewest = fewest_[size_t(kind)];
    return {double(fewest), knapsack_.cost(batch_ - fewest * kinds_[size_t(kind)].size), fill_};
  }

  // False if they are too many, unless no table value lies strictly between any more.
  bool collect(const Interval& interval, const Starts& starts, std::vector<Edge>& edges) const {
    edges.clear();
    const bool narrowest = !(interval.low + (interval.high - interval.low) / 2 < just_below(interval.high));
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (fewest_[kind] == 0) continue;
      const CostTable& table = *kinds_[kind].table;
      const size_t units = size_t(table.units()), most = narrowest ? units * units : units * units / kShare + units;
      const EdgeQuery query{interval.low, interval.high, best_.cost, edge_bound(int(kind)), int(kind), most};
      if (!collect_edges(table, query, starts[kind], prefix_[kind].data(), suffix_[kind].data(), edges)) return false;
    }
    return true;
  }

  const std::vector<MicroKind>& kinds_;
  const int batch_;
  const double fill_;
  const std::vector<int> sizes_, fewest_;
  Knapsack knapsack_;
  std::vector<double> sums_;
  std::vector<std::vector<double>> suffix_, prefix_;
  Starts every_; // all positions of the kinds that can take part
  Slicing best_;
};

} // namespace

Slicing slice_batch(const std::vector<MicroKind>& kinds, int batch, double fill) { return Search(kinds, batch, fill).run(); }

} // namespace terapipe::planner
