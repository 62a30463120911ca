// bindings/planner.cpp: terapipe._core, export only: buffers become vectors and pointers; errors become ValueError with values.
// The GIL is released while a table is filled, a search or a simulation runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "planner/cost_table.h"
#include "planner/orders.h"
#include "planner/simulator.h"
#include "planner/slicing.h"
#include "planner/slots.h"

namespace py = pybind11;
namespace planner = terapipe::planner;

namespace {

// A contiguous buffer of T; the Python side converts, so anything else is a mistake of ours.
template <typename T> class View {
 public:
  View(const py::buffer& buffer, py::ssize_t size, const char* name) : info_(buffer.request()) {
    if (!info_.item_type_is_equivalent_to<T>() || info_.size != size || !contiguous())
      throw std::invalid_argument(std::string(name) + " must be a contiguous buffer of " + std::to_string(size) + " entries of format '" +
                                  py::format_descriptor<T>::format() + "', got " + std::to_string(info_.size) + " of '" + info_.format +
                                  "'");
  }
  const T* data() const { return static_cast<const T*>(info_.ptr); }
  std::vector<T> vector() const { return {data(), data() + info_.size}; }

 private:
  bool contiguous() const {
    py::ssize_t stride = info_.itemsize;
    for (py::ssize_t axis = info_.ndim; axis-- > 0; stride *= info_.shape[size_t(axis)])
      if (info_.shape[size_t(axis)] > 1 && info_.strides[size_t(axis)] != stride) return false;
    return true;
  }
  py::buffer_info info_;
};

int units_of(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  if (info.shape.empty()) throw std::invalid_argument("the costs have no dimension");
  if (info.shape[0] > (1 << 30)) throw std::invalid_argument("the cost table has too many units; use a larger unit");
  return int(info.shape[0]);
}

std::shared_ptr<planner::CostTable> table_from_curve(const py::buffer& base, double constant, double per_start, double per_start_length) {
  const int units = units_of(base);
  const View<double> view(base, units, "base");
  const py::gil_scoped_release unlocked;
  return std::make_shared<planner::CostTable>(planner::CostCurve{view.data(), units, constant, per_start, per_start_length});
}

std::shared_ptr<planner::CostTable> table_from_values(const py::buffer& values) {
  const int units = units_of(values);
  const View<double> view(values, py::ssize_t(units) * units, "costs");
  const py::gil_scoped_release unlocked;
  return std::make_shared<planner::CostTable>(view.data(), units);
}

planner::Slicing slice_batch(const std::vector<std::pair<std::shared_ptr<planner::CostTable>, int>>& kinds, int batch, double fill) {
  std::vector<planner::MicroKind> plain;
  for (const auto& [table, size] : kinds) plain.push_back({table.get(), size});
  const py::gil_scoped_release unlocked;
  return planner::slice_batch(plain, batch, fill);
}

planner::FlatSchedule flat_schedule(const py::buffer& stages, const py::bytes& kinds, const py::buffer& micros, const py::buffer& slices,
                                    const std::vector<int32_t>& rank_lengths) {
  const std::string letters = kinds;
  const auto count = py::ssize_t(letters.size());
  const View<int32_t> stage(stages, count, "stages"), micro(micros, count, "micros"), slice(slices, count, "slices");
  std::vector<planner::ScheduledAction> actions;
  for (size_t i = 0; i < letters.size(); ++i) {
    const size_t kind = std::string("FBIW").find(letters[i]);
    if (kind == std::string::npos) throw std::invalid_argument(std::string("unknown kind of action ") + letters[i]);
    actions.push_back({stage.data()[i], planner::Kind(kind), micro.data()[i], slice.data()[i]});
  }
  const py::gil_scoped_release unlocked;
  return planner::FlatSchedule(std::move(actions), rank_lengths);
}

planner::PutGates put_gates(const planner::FlatSchedule& schedule, const std::vector<int32_t>& slot, const std::vector<int32_t>& slots,
                            bool resident) {
  if (slot.size() != size_t(schedule.size()) || slots.size() != schedule.links().size())
    throw std::invalid_argument("slots of another schedule");
  for (size_t i = 0; i < slot.size(); ++i) {
    const int32_t link = schedule.link_of()[i];
    if (link == planner::kNone || slots[size_t(link)] == 0) continue;
    if (slot[i] < 0 || slot[i] >= slots[size_t(link)])
      throw std::invalid_argument("slot " + std::to_string(slot[i]) + " on a link of " + std::to_string(slots[size_t(link)]));
  }
  return planner::put_gates(schedule, slot, slots, resident);
}

template <typename Time>
planner::SimulatedTimes<Time> simulate(const planner::FlatSchedule& schedule, const py::buffer& costs,
                                       const std::optional<py::buffer>& occupancy, const std::optional<py::buffer>& latency,
                                       const planner::PutGates* gates) {
  if (!schedule.regular()) throw std::invalid_argument("the schedule is not regular");
  const View<Time> cost(costs, schedule.size(), "costs");
  std::optional<View<Time>> busy, late;
  if (occupancy) busy.emplace(*occupancy, schedule.size(), "occupancy");
  if (latency) late.emplace(*latency, py::ssize_t(schedule.links().size()), "latency");
  const py::gil_scoped_release unlocked;
  return planner::simulate<Time>(schedule, {cost.data(), busy ? busy->data() : nullptr, late ? late->data() : nullptr}, gates);
}

template <typename Time, typename Size>
planner::LiveSteps<Time, Size> live(const planner::SimulatedTimes<Time>& times, const planner::FlatSchedule& schedule, int32_t rank,
                                    const Size* size) {
  return planner::live<Time, Size>(schedule, rank, times.start.data(), times.end.data(), size);
}

// Sizes are whole numbers or doubles, as their buffer says.
template <typename Time, typename Get>
py::object live_of(const planner::SimulatedTimes<Time>& times, const planner::FlatSchedule& schedule, int32_t rank,
                   const std::optional<py::buffer>& sizes, Get get) {
  if (rank < 0 || rank >= schedule.ranks())
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(schedule.ranks()));
  if (!sizes) return get(live<Time, int64_t>(times, schedule, rank, nullptr));
  if (sizes->request().item_type_is_equivalent_to<double>())
    return get(live(times, schedule, rank, View<double>(*sizes, schedule.size(), "sizes").data()));
  return get(live(times, schedule, rank, View<int64_t>(*sizes, schedule.size(), "sizes").data()));
}

template <typename Time> void bind_times(py::module_& m, const char* name, const char* function) {
  using Times = planner::SimulatedTimes<Time>;
  const auto steps = [](const auto& found) { return py::object(py::make_tuple(py::cast(found.time), py::cast(found.held))); };
  const auto peak = [](const auto& found) { return py::object(py::cast(found.peak)); };
  py::class_<Times>(m, name)
      .def_readonly("finished", &Times::finished)
      .def_readonly("makespan", &Times::makespan)
      .def_readonly("start", &Times::start)
      .def_readonly("end", &Times::end)
      .def_readonly("flight_start", &Times::flight_start)
      .def_readonly("flight_end", &Times::flight_end)
      .def(
          "live",
          [steps](const Times& t, const planner::FlatSchedule& s, int32_t rank, const std::optional<py::buffer>& sizes) {
            return live_of(t, s, rank, sizes, steps);
          },
          py::arg("schedule"), py::arg("rank"), py::arg("sizes") = py::none())
      .def(
          "peak_live",
          [peak](const Times& t, const planner::FlatSchedule& s, int32_t rank, const std::optional<py::buffer>& sizes) {
            return live_of(t, s, rank, sizes, peak);
          },
          py::arg("schedule"), py::arg("rank"), py::arg("sizes") = py::none());
  m.def(function, &simulate<Time>, py::arg("schedule"), py::kw_only(), py::arg("costs"), py::arg("occupancy") = py::none(),
        py::arg("latency") = py::none(), py::arg("gates") = py::none());
}

void bind_slicing(py::module_& m) {
  py::class_<planner::CostTable, std::shared_ptr<planner::CostTable>>(m, "CostTable")
      .def(py::init(&table_from_values), py::arg("values"))
      .def_static("from_curve", &table_from_curve, py::arg("base"), py::kw_only(), py::arg("constant"), py::arg("per_start"),
                  py::arg("per_start_length"))
      .def_property_readonly("units", &planner::CostTable::units)
      .def(
          "cost",
          [](const planner::CostTable& table, int length, int start) {
            if (start < 0 || length < 1 || length > table.units() || start > table.units() - length)
              throw std::invalid_argument("no slice of " + std::to_string(length) + " units behind a prefix of " + std::to_string(start) +
                                          " in a table of " + std::to_string(table.units()) + " units");
            return table.row(start)[length - 1];
          },
          py::arg("length"), py::arg("start"));
  py::class_<planner::MicroSlices>(m, "MicroSlices")
      .def_readonly("size", &planner::MicroSlices::size)
      .def_readonly("count", &planner::MicroSlices::count)
      .def_readonly("lengths", &planner::MicroSlices::lengths);
  py::class_<planner::Slicing>(m, "Slicing")
      .def_readonly("micros", &planner::Slicing::micros)
      .def_readonly("sum", &planner::Slicing::sum)
      .def_readonly("largest", &planner::Slicing::largest)
      .def_readonly("cost", &planner::Slicing::cost)
      .def_readonly("evaluations", &planner::Slicing::evaluations);
  m.def("slice_batch", &slice_batch, py::arg("kinds"), py::kw_only(), py::arg("batch"), py::arg("fill"));
  m.def("equal_cost_slices", &planner::equal_cost_slices, py::arg("table"), py::kw_only(), py::arg("count"),
        py::call_guard<py::gil_scoped_release>());
}

void bind_simulator(py::module_& m) {
  py::class_<planner::FlatSchedule>(m, "FlatSchedule")
      .def(py::init(&flat_schedule), py::kw_only(), py::arg("stages"), py::arg("kinds"), py::arg("micros"), py::arg("slices"),
           py::arg("rank_lengths"))
      .def_property_readonly("regular", &planner::FlatSchedule::regular)
      .def_property_readonly("ranks", &planner::FlatSchedule::ranks)
      .def_property_readonly("links",
                             [](const planner::FlatSchedule& schedule) {
                               py::list links;
                               for (const auto& link : schedule.links())
                                 links.append(py::make_tuple(link.source_rank, link.destination_rank, link.forward ? "F" : "B"));
                               return links;
                             })
      .def_property_readonly("link_of", &planner::FlatSchedule::link_of);
  py::class_<planner::SlotColours>(m, "SlotColours")
      .def_readonly("slot", &planner::SlotColours::slot)
      .def_readonly("counts", &planner::SlotColours::counts);
  m.def("sound", &planner::sound, py::arg("schedule"), py::call_guard<py::gil_scoped_release>());
  m.def("linear_order", &planner::linear_order, py::arg("schedule"), py::kw_only(), py::arg("by_ticks"),
        py::call_guard<py::gil_scoped_release>());
  m.def("finished_before_puts", &planner::finished_before_puts, py::arg("schedule"), py::call_guard<py::gil_scoped_release>());
  m.def("colour_slots", &planner::colour_slots, py::arg("schedule"), py::arg("finished"), py::kw_only(), py::arg("resident"),
        py::arg("at_most"), py::call_guard<py::gil_scoped_release>());
  py::class_<planner::PutGates>(m, "PutGates")
      .def(py::init(&put_gates), py::arg("schedule"), py::kw_only(), py::arg("slot"), py::arg("slots"), py::arg("resident"));
  bind_times<int64_t>(m, "WholeTimes", "simulate_whole");
  bind_times<double>(m, "FloatTimes", "simulate_float");
}

} // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The planner's search and the schedule simulator: use terapipe.planner and terapipe.schedule instead.";
  bind_slicing(m);
  bind_simulator(m);
}
