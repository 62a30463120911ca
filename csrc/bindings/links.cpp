// bindings/links.cpp: tpkernels._core.Ring, one end of a shared-memory link. Export only: waits give up the GIL and look at signals
// between slices; a wait that fails returns a Trouble, which tpkernels.links words for people.
#include "bindings/links.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "links/heartbeat.h"
#include "links/ring.h"

namespace py = pybind11;
using namespace tpk::links;

namespace {

struct Trouble {
  Outcome outcome;
  uint32_t slot, tile, wanted, seen;
  double seconds;
};

const char* name_of(Outcome outcome) {
  switch (outcome) {
  case Outcome::closed:
    return "closed";
  case Outcome::gone:
    return "gone";
  case Outcome::silent:
    return "silent";
  default:
    return "late";
  }
}

std::chrono::nanoseconds nanoseconds(double seconds) { return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)); }

using Result = std::optional<Trouble>;

class PyRing {
 public:
  PyRing(py::buffer memory, const Geometry& geometry, uint32_t generation, bool sender, double spin_s, double silence_s, double timeout_s,
         int socket, int pidfd)
      : memory_(memory.request(true)) {
    auto* const bytes = static_cast<std::byte*>(memory_.ptr);
    check(*reinterpret_cast<const Header*>(bytes), geometry, generation);
    Patience patience{.spin = nanoseconds(spin_s), .silence = nanoseconds(silence_s), .timeout = nanoseconds(timeout_s)};
    patience.socket = socket, patience.pidfd = pidfd;
    ring_ = std::make_unique<Ring<>>(bytes, sender ? Role::sender : Role::receiver, patience);
    begin_heartbeat(ring_->beat());
  }
  ~PyRing() { close(); }

  void close() {
    if (!ring_ || owner_ != getpid()) return; // a forked child has a copy of this object, and no say
    end_heartbeat(ring_->beat());
    ring_->close();
    ring_.reset();
  }

  uint64_t slot_offset(uint32_t slot) { return open().slot(slot) - static_cast<std::byte*>(memory_.ptr); }

  Result reserve(uint32_t slot) {
    if (auto trouble = wait(open().for_credit(slot))) return trouble;
    open().claim(slot);
    return {};
  }

  void post(uint32_t slot, uint64_t bytes) { open().post_all(slot, bytes); }

  Result put(uint32_t slot, uintptr_t from, uint64_t bytes) {
    if (auto trouble = reserve(slot)) return trouble;
    const py::gil_scoped_release unlocked;
    ring_->write(slot, reinterpret_cast<const std::byte*>(from), bytes);
    return {};
  }

  Result take(uint32_t slot, uint64_t bytes) {
    open().begin_use(slot);
    for (uint32_t tile = 0; tile < ring_->tiles_of(bytes); ++tile)
      if (auto trouble = wait(ring_->for_tile(slot, tile))) return trouble;
    return {};
  }

  /// Copies tile by tile as they come, and frees the slot.
  Result take_copy(uint32_t slot, uintptr_t to, uint64_t bytes) {
    open().begin_use(slot);
    const uint64_t tile_bytes = ring_->geometry().tile_bytes;
    for (uint32_t tile = 0; tile < ring_->tiles_of(bytes); ++tile) {
      if (auto trouble = wait(ring_->for_tile(slot, tile))) return trouble;
      const py::gil_scoped_release unlocked;
      const uint64_t begin = tile * tile_bytes;
      std::memcpy(reinterpret_cast<std::byte*>(to) + begin, ring_->slot(slot) + begin, std::min(tile_bytes, bytes - begin));
    }
    ring_->release(slot);
    return {};
  }

  bool holds(uint32_t slot) { return open().holds(slot); }

  /// With `poison` the slot's bytes become NaN of any float type first.
  void release(uint32_t slot, bool poison) {
    if (poison) std::memset(open().slot(slot), 0xff, ring_->geometry().slot_bytes);
    open().release(slot);
  }

 private:
  Ring<>& open() {
    if (!ring_) throw std::runtime_error("this link was closed");
    return *ring_;
  }

  static void check(const Header& found, const Geometry& geometry, uint32_t generation) {
    const Header wanted{.generation = generation, .first_epoch = found.first_epoch, .geometry = geometry};
    if (found == wanted) return;
    const auto words = [](const Header& h) {
      return "version " + std::to_string(h.version) + ", generation " + std::to_string(h.generation) + ", " +
             std::to_string(h.geometry.slots) + " slots of " + std::to_string(h.geometry.slot_bytes) + " bytes in tiles of " +
             std::to_string(h.geometry.tile_bytes);
    };
    throw std::invalid_argument(found.magic == wanted.magic ? "the segment has " + words(found) + ", but this end expects " + words(wanted)
                                                            : "the segment does not begin with a link's header");
  }

  Result wait(Wait wait) {
    if (open().ready(wait)) return {};
    while (true) {
      Outcome outcome;
      {
        const py::gil_scoped_release unlocked;
        outcome = ring_->wait(wait);
      }
      if (outcome == Outcome::reached) return {};
      if (outcome != Outcome::waiting)
        return Trouble{outcome, wait.slot, wait.tile, wait.wanted, wait.seen, std::chrono::duration<double>(wait.waited).count()};
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      open(); // a signal handler may have closed the link
    }
  }

  const py::buffer_info memory_; // keeps the mapping
  const pid_t owner_ = getpid();
  std::unique_ptr<Ring<>> ring_;
};

} // namespace

void bind_links(py::module_& m) {
  py::class_<Geometry>(m, "RingGeometry")
      .def(py::init([](uint32_t slots, uint64_t slot_bytes, uint64_t tile_bytes) {
             return Geometry{slots, static_cast<uint32_t>((slot_bytes + tile_bytes - 1) / tile_bytes), slot_bytes, tile_bytes};
           }),
           py::kw_only(), py::arg("slots"), py::arg("slot_bytes"), py::arg("tile_bytes"))
      .def_property_readonly("bytes", [](const Geometry& g) { return Layout(g).bytes; })
      .def("format", [](const Geometry& g, const py::buffer& memory, uint32_t generation, uint32_t first_epoch) {
        Ring<>::format(static_cast<std::byte*>(memory.request(true).ptr), g, generation, first_epoch);
      });
  py::class_<Trouble>(m, "Trouble")
      .def_property_readonly("outcome", [](const Trouble& t) { return name_of(t.outcome); })
      .def_readonly("slot", &Trouble::slot)
      .def_readonly("tile", &Trouble::tile)
      .def_readonly("wanted", &Trouble::wanted)
      .def_readonly("seen", &Trouble::seen)
      .def_readonly("seconds", &Trouble::seconds);
  py::class_<PyRing>(m, "Ring")
      .def(py::init<py::buffer, const Geometry&, uint32_t, bool, double, double, double, int, int>(), py::arg("memory"),
           py::arg("geometry"), py::kw_only(), py::arg("generation"), py::arg("sender"), py::arg("spin_s"), py::arg("silence_s"),
           py::arg("timeout_s"), py::arg("socket"), py::arg("pidfd"))
      .def("slot_offset", &PyRing::slot_offset)
      .def("reserve", &PyRing::reserve)
      .def("post", &PyRing::post)
      .def("put", &PyRing::put)
      .def("take", &PyRing::take)
      .def("take_copy", &PyRing::take_copy)
      .def("holds", &PyRing::holds)
      .def("release", &PyRing::release)
      .def("close", &PyRing::close, py::call_guard<py::gil_scoped_release>());
}
