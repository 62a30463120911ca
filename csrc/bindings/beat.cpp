// bindings/beat.cpp: tpkernels._core.Beat, the heartbeat of an end whose memory is not a ring: links/heartbeat.h for a word of any buffer.
#include "bindings/links.h"

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "links/heartbeat.h"

namespace py = pybind11;
using namespace tpk::links;

namespace {

/// Counts up the word at `offset` of `memory` until `stop`, whatever Python is doing.
class PyBeat {
 public:
  PyBeat(const py::buffer& memory, size_t offset) : memory_(memory.request(true)) {
    if (offset % sizeof(Word) != 0 || offset + sizeof(Word) > size_t(memory_.size * memory_.itemsize))
      throw std::invalid_argument("no word at byte " + std::to_string(offset) + " of " + std::to_string(memory_.size * memory_.itemsize));
    word_ = new (static_cast<std::byte*>(memory_.ptr) + offset) Word(0);
    begin_heartbeat(*word_);
  }
  ~PyBeat() { stop(); }
  PyBeat(const PyBeat&) = delete;
  PyBeat& operator=(const PyBeat&) = delete;

  void stop() {
    if (word_ == nullptr) return;
    end_heartbeat(*std::exchange(word_, nullptr));
    memory_ = py::buffer_info(); // whose owner may then unmap it
  }

 private:
  py::buffer_info memory_;
  Word* word_ = nullptr;
};

} // namespace

void bind_beat(py::module_& m) {
  py::class_<PyBeat>(m, "Beat").def(py::init<const py::buffer&, size_t>(), py::arg("memory"), py::arg("offset")).def("stop", &PyBeat::stop);
}
