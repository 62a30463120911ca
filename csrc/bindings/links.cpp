// bindings/links.cpp: tpkernels._core.Ring, one end of a shared-memory link: `links/ring.h` and the step's order behind one call for each
// put or take. Waits give up the GIL and look at signals between slices. What goes wrong is worded in Python: `refuse(key)` and
// `lose(key, trouble)` return the exception.
//
// One call at a time is inside; only `give_up` and `close` may come from another thread meanwhile. The trap: a close must not take the
// ring from under the call that is inside, so it ends that call's wait, and the last to leave lets go.
#include "bindings/links.h"

#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "bindings/addresses.h"
#include "bindings/links_step.h"
#include "cpu/fused.h"
#include "links/heartbeat.h"
#include "links/ring.h"

namespace py = pybind11;
using namespace tpk::links;

namespace {

using tpk::bindings::pointer, tpk::bindings::Rows, tpk::bindings::rows_at;

struct Trouble {
  const char* outcome;
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

double seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

[[noreturn]] void raise(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

/// Rows of one dtype behind a raw address.
struct RowFormat {
  tpk::DType dtype;
  int64_t columns;
  int64_t bytes() const { return columns * tpk::dtype_bytes(dtype); }
};

class PyRing {
 public:
  PyRing(py::buffer memory, const Geometry& geometry, uint32_t generation, bool sender, double spin_s, double silence_s, double timeout_s,
         int socket, int pidfd, py::object dtype, py::object refuse, py::object lose)
      : memory_(memory.request(true)), dtype_(std::move(dtype)), refuse_(std::move(refuse)), lose_(std::move(lose)) {
    auto* const bytes = static_cast<std::byte*>(memory_.ptr);
    check(*reinterpret_cast<const Header*>(bytes), geometry, generation);
    Patience patience{.spin = nanoseconds(spin_s), .silence = nanoseconds(silence_s), .timeout = nanoseconds(timeout_s)};
    patience.socket = socket, patience.pidfd = pidfd;
    ring_ = std::make_unique<Ring<>>(bytes, sender ? Role::sender : Role::receiver, patience);
    begin_heartbeat(ring_->beat());
  }
  ~PyRing() {
    if (ring_ && owner_ == getpid()) ring_->close(), let_go();
  }

  /// Turns calls away from now on, ends the wait of the one that another thread is in, and waits `within_s` for it to leave; false if it
  /// stays longer. Calls `freed` once nobody uses what the ring was made of: at the end of the call that is inside, or now.
  bool close(py::object freed, double within_s) {
    if (!ring_) return true;
    if (owner_ != getpid()) return freed(), true; // a forked child has copies, and no say
    if (!closing_.exchange(true)) freed_ = std::move(freed), ring_->close();
    if (inside_.load() == std::thread::id()) return let_go(), true;
    if (inside_.load() == std::this_thread::get_id()) return true; // a signal's handler
    const py::gil_scoped_release unlocked;
    for (const auto until = Clock::now() + nanoseconds(within_s); inside_.load() != std::thread::id();) {
      if (Clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

  uint64_t slot_offset(uint32_t slot) {
    const Inside inside(*this, py::none());
    return ring_->slot(slot) - static_cast<std::byte*>(memory_.ptr);
  }

  /// Ends this end's waits, now and later; from any thread.
  void give_up() { given_up_.store(true, std::memory_order_relaxed); }

  // Of the peer, without waiting, while a call may be inside; a closed end says that all is well.
  uint32_t peer_beat() const { return ring_ ? ring_->peer_beat() : 0; }
  bool peer_gone() const { return ring_ && ring_->peer_gone(); }

  // ---- the step

  void expect(const py::list& transfers) {
    const Inside inside(*this, py::none());
    step_.set(transfers);
  }
  void begin() {
    const Inside inside(*this, py::none());
    step_.begin();
  }
  size_t done() const { return step_.done(); }
  py::list held() const { return step_.held(); }
  double began_at() const { return seconds(began_at_); }
  double arrived_at() const { return seconds(arrived_at_); }
  double posted_at() const { return seconds(posted_at_); }
  /// Tests: `watch(action, tile)` before each action; it may raise, or return true to have the action left out.
  void watch(py::object watch) { watch_ = std::move(watch); }

  // ---- sender

  py::object reserve(const py::object& key) {
    const Inside inside(*this, key);
    Transfer& transfer = next(key);
    if (!step_.reserved()) claim(transfer);
    return transfer.view;
  }

  void put(const py::object& key, py::object x) {
    const Inside inside(*this, key);
    Transfer& transfer = next(key);
    const uint32_t tiles = ring_->tiles_of(transfer.bytes);
    if (x.is(transfer.view) && step_.reserved()) { // what `reserve` gave: nothing else need be touched, which a cold cache would tell
      post(transfer, 0, tiles);
      return step_.advance();
    }
    const Names& names = Names::get();
    if (!member(x, names.dtype).is(dtype_) || !member(x, names.is_cpu).is(py::handle(Py_True)) ||
        !same(member(x, names.shape), transfer.shape))
      raise(refuse_(key, x, step_.done()));
    if (!call(x, names.is_contiguous).is(py::handle(Py_True))) x = call(x, names.contiguous);
    if (call(x, names.is_neg).is(py::handle(Py_True))) x = call(x, names.resolve_neg); // a sign that memory does not have
    const std::byte* const from = address_of(x);
    std::byte* const slot = ring_->slot(transfer.slot);
    if (!step_.reserved()) claim(transfer);
    if (from == slot)
      post(transfer, 0, tiles);
    else
      by_tiles(transfer, tiles_of_copy(), [&](uint64_t begin, uint64_t end) { std::memcpy(slot + begin, from + begin, end - begin); });
    step_.advance();
  }

  /// x + residual, rows of contiguous elements, added into the slot and posted tile by tile. The sum.
  py::object put_sum(const py::object& key, int dtype, int64_t columns, const Rows& x, const Rows& residual, int num_threads) {
    const Inside inside(*this, key);
    Transfer& transfer = next(key);
    const RowFormat format{static_cast<tpk::DType>(dtype), columns};
    if (!step_.reserved()) claim(transfer);
    const tpk::cpu::RowsView out{ring_->slot(transfer.slot), columns};
    const tpk::cpu::RowsView left = rows_at(x), right = rows_at(residual);
    by_tiles(transfer, num_threads, [&](uint64_t begin, uint64_t end) {
      const int64_t first = begin / format.bytes(), count = (end - begin) / format.bytes();
      const auto from = [&](const tpk::cpu::RowsView& rows) { return skip(rows, first, format); };
      tpk::cpu::add({count, columns, from(left), from(right), from(out)}, format.dtype, num_threads);
    });
    step_.advance();
    return call(transfer.view, Names::get().detach);
  }

  // ---- receiver

  /// A leaf of its own over the slot: no gradient or hook of an earlier use. With `copies` its own memory, and the slot is free again.
  py::object take(const py::object& key, bool copies) {
    const Inside inside(*this, key);
    Transfer& transfer = next(key);
    py::object x = copies ? transfer.view.attr("new_empty")(transfer.shape) : call(transfer.view, Names::get().detach);
    std::byte* const to = copies ? address_of(x) : nullptr;
    begin_use(transfer, !copies);
    for_tiles(transfer, [&](uint64_t begin, uint64_t end) {
      if (to == nullptr) return;
      const py::gil_scoped_release unlocked;
      std::memcpy(to + begin, ring_->slot(transfer.slot) + begin, end - begin);
    });
    if (copies) ring_->release(transfer.slot);
    return x;
  }

  /// `take`, and the norm of each tile as soon as it is there. into: out [rows, columns], weight, bias or 0, mean (0 for RMSNorm), rstd.
  py::object take_norm(const py::object& key, int dtype, bool rms, float eps, int64_t columns, const std::array<int64_t, 5>& into,
                       int num_threads) {
    const Inside inside(*this, key);
    const auto [out, weight, bias, mean, rstd] = into;
    Transfer& transfer = next(key);
    const RowFormat format{static_cast<tpk::DType>(dtype), columns};
    began_at_ = Clock::now();
    py::object x = call(transfer.view, Names::get().detach);
    begin_use(transfer, true);
    const tpk::cpu::RowsView slot{ring_->slot(transfer.slot), columns}, normed = rows_at({out, columns});
    tpk::cpu::NormForward norm;
    norm.dim = columns, norm.rms = rms, norm.eps = eps, norm.weight = pointer<void>(weight), norm.bias = pointer<void>(bias);
    float *const means = pointer<float>(mean), *const rstds = pointer<float>(rstd);
    for_tiles(transfer, [&](uint64_t begin, uint64_t end) {
      const int64_t first = begin / format.bytes();
      norm.rows = (end - begin) / format.bytes();
      norm.x = norm.total = skip(slot, first, format), norm.out = skip(normed, first, format);
      norm.mean = means == nullptr ? nullptr : means + first, norm.rstd = rstds + first;
      const py::gil_scoped_release unlocked;
      tpk::cpu::norm_forward(norm, format.dtype, num_threads);
    });
    return x;
  }

  /// Whether the slot of `key` still holds what was taken.
  bool holds(const py::object& key) {
    const Inside inside(*this, key);
    seen("verify", 0);
    const Transfer* transfer = step_.find(key);
    return transfer != nullptr && transfer->held && ring_->holds(transfer->slot);
  }

  /// With `poison` the slot's bytes become NaN of any float type first.
  void release(const py::object& key, bool poison) {
    const Inside inside(*this, key);
    Transfer& transfer = *step_.find(key); // `holds` found it
    if (seen("release", 0)) return;
    if (poison) std::memset(ring_->slot(transfer.slot), 0xff, ring_->geometry().slot_bytes);
    transfer.held = false;
    ring_->release(transfer.slot);
    seen("released", 0);
  }

 private:
  static tpk::cpu::RowsView skip(const tpk::cpu::RowsView& rows, int64_t count, const RowFormat& format) {
    return {static_cast<std::byte*>(rows.data) + count * rows.stride * tpk::dtype_bytes(format.dtype), rows.stride};
  }

  /// A call from Python, from its begin to its end. Made and ended with the GIL held.
  struct Inside {
    PyRing& ring;
    Inside(PyRing& ring, const py::object& key) : ring(ring) {
      if (ring.closing_) raise(ring.refuse_(key, py::none(), ring.step_.done()));
      if (ring.inside_.load(std::memory_order_relaxed) != std::thread::id())
        throw std::runtime_error("an end of a link is used by one thread at a time, and another call is inside it");
      ring.inside_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Inside() {
      if (ring.closing_) ring.let_go();
      ring.inside_.store(std::thread::id(), std::memory_order_release);
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
  };

  void let_go() {
    end_heartbeat(ring_->beat());
    ring_.reset();
    step_.set(py::list());       // tensors over the memory
    memory_ = py::buffer_info(); // whose owner may then unmap it
    const py::object freed = std::exchange(freed_, py::object());
    try {
      if (freed) freed();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("closing a link");
    }
  }

  Transfer& next(const py::object& key) {
    Transfer* const transfer = step_.due(key);
    if (transfer == nullptr) raise(refuse_(key, py::none(), step_.done()));
    return *transfer;
  }

  bool seen(const char* action, uint32_t tile) { return watch_ && py::cast<bool>(watch_(action, tile)); }

  void claim(const Transfer& transfer) {
    seen("reserve", 0);
    await(ring_->for_credit(transfer.slot), transfer.key);
    seen("claim", 0);
    ring_->claim(transfer.slot);
    step_.reserve();
  }

  void post(const Transfer& transfer, uint32_t first, uint32_t end) {
    if (watch_) {
      const py::gil_scoped_acquire locked;
      if (seen("post", first)) return;
    }
    posted_at_ = Clock::now();
    ring_->post(transfer.slot, first, end);
  }

  /// Tiles between two posts of a copy: a post waits for every store before it, 0.3 us that a small tile would not take to copy.
  int tiles_of_copy() const { return static_cast<int>(std::max<uint64_t>(1, (128 << 10) / ring_->geometry().tile_bytes)); }

  /// Lets `write(begin, end)` fill the slot some tiles at a time, and posts each time.
  template <class Write> void by_tiles(const Transfer& transfer, int step, Write&& write) {
    const py::gil_scoped_release unlocked;
    const uint32_t tiles = ring_->tiles_of(transfer.bytes);
    const uint64_t tile_bytes = ring_->geometry().tile_bytes;
    for (uint32_t first = 0; first < tiles; first += step) {
      const uint32_t end = std::min<uint32_t>(tiles, first + step);
      if (watch_) {
        const py::gil_scoped_acquire locked;
        seen("write", first);
      }
      write(first * tile_bytes, std::min(transfer.bytes, end * tile_bytes));
      post(transfer, first, end);
    }
  }

  void begin_use(Transfer& transfer, bool holds) {
    seen("take", 0);
    arrived_at_ = Clock::now();
    transfer.held = holds;
    step_.advance();
    ring_->begin_use(transfer.slot);
  }

  /// Calls `read(begin, end)` for all tiles, as many at a time as are there.
  template <class Read> void for_tiles(const Transfer& transfer, Read&& read) {
    const uint32_t tiles = ring_->tiles_of(transfer.bytes);
    const uint64_t tile_bytes = ring_->geometry().tile_bytes;
    for (uint32_t first = 0; first < tiles;) {
      seen("wait", first);
      await(ring_->for_tile(transfer.slot, first), transfer.key);
      uint32_t end = first + 1;
      while (end < tiles && ring_->ready(ring_->for_tile(transfer.slot, end))) ++end;
      seen("read", first);
      read(first * tile_bytes, std::min(transfer.bytes, end * tile_bytes));
      first = end;
    }
    seen("taken", 0);
  }

  void await(Wait wait, const py::object& key) {
    if (ring_->ready(wait)) return;
    while (true) {
      if (closing_) raise(refuse_(key, py::none(), step_.done()));
      Outcome outcome;
      {
        const py::gil_scoped_release unlocked;
        outcome = ring_->wait(wait);
      }
      arrived_at_ = Clock::now();
      if (outcome == Outcome::reached) return;
      if (outcome != Outcome::waiting || given_up_.load(std::memory_order_relaxed))
        raise(lose_(key, Trouble{outcome == Outcome::waiting ? "ended" : name_of(outcome), wait.slot, wait.tile, wait.wanted, wait.seen,
                                 std::chrono::duration<double>(wait.waited).count()}));
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  py::buffer_info memory_; // keeps the mapping
  const pid_t owner_ = getpid();
  const py::object dtype_, refuse_, lose_;
  py::object watch_;
  std::atomic<bool> given_up_{false}, closing_{false};
  std::atomic<std::thread::id> inside_; // of the call that is inside; changes with the GIL held
  py::object freed_;                    // once closing
  std::unique_ptr<Ring<>> ring_;
  Step step_;
  Clock::time_point began_at_, arrived_at_, posted_at_; // the last take's begin, the last wait's end, just before the last post
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
      .def_readonly("outcome", &Trouble::outcome)
      .def_readonly("slot", &Trouble::slot)
      .def_readonly("tile", &Trouble::tile)
      .def_readonly("wanted", &Trouble::wanted)
      .def_readonly("seen", &Trouble::seen)
      .def_readonly("seconds", &Trouble::seconds);
  py::class_<PyRing>(m, "Ring")
      .def(py::init<py::buffer, const Geometry&, uint32_t, bool, double, double, double, int, int, py::object, py::object, py::object>(),
           py::arg("memory"), py::arg("geometry"), py::kw_only(), py::arg("generation"), py::arg("sender"), py::arg("spin_s"),
           py::arg("silence_s"), py::arg("timeout_s"), py::arg("socket"), py::arg("pidfd"), py::arg("dtype"), py::arg("refuse"),
           py::arg("lose"))
      .def("slot_offset", &PyRing::slot_offset)
      .def("expect", &PyRing::expect)
      .def("begin", &PyRing::begin)
      .def_property_readonly("done", &PyRing::done)
      .def_property_readonly("held", &PyRing::held)
      .def_property_readonly("began_at", &PyRing::began_at)
      .def_property_readonly("arrived_at", &PyRing::arrived_at)
      .def_property_readonly("posted_at", &PyRing::posted_at)
      .def("watch", &PyRing::watch)
      .def("give_up", &PyRing::give_up)
      .def_property_readonly("peer_beat", &PyRing::peer_beat)
      .def_property_readonly("peer_gone", &PyRing::peer_gone)
      .def("reserve", &PyRing::reserve)
      .def("put", &PyRing::put)
      .def("put_sum", &PyRing::put_sum)
      .def("take", &PyRing::take)
      .def("take_norm", &PyRing::take_norm)
      .def("holds", &PyRing::holds)
      .def("release", &PyRing::release)
      .def("close", &PyRing::close, py::arg("freed"), py::arg("within_s"));
}
