// bindings/links_step.h: the transfers of one step at one end of a link, in the plan's order, as Python objects. A put or take is one call
// from Python, since these are counted in tenths of microseconds: order, shapes and prebuilt views are looked up here.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace tpk::links {

namespace py = pybind11;

/// Names of a tensor's members, made once.
struct Names {
  PyObject *dtype = made("dtype"), *shape = made("shape"), *data_ptr = made("data_ptr"), *is_cpu = made("is_cpu"),
           *is_contiguous = made("is_contiguous"), *contiguous = made("contiguous"), *detach = made("detach"), *is_neg = made("is_neg"),
           *resolve_neg = made("resolve_neg");
  static const Names& get() {
    static const Names* const names = new Names; // never destroyed: the interpreter may end first
    return *names;
  }

 private:
  static PyObject* made(const char* name) { return PyUnicode_InternFromString(name); }
};

inline py::object member(py::handle object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name);
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

inline py::object call(py::handle object, PyObject* method) {
  PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), method);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

inline bool same(py::handle a, py::handle b) {
  if (a.is(b)) return true;
  const int equal = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal != 0;
}

inline std::byte* address_of(py::handle tensor) {
  void* address = PyLong_AsVoidPtr(call(tensor, Names::get().data_ptr).ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return static_cast<std::byte*>(address);
}

/// view: the slot as a tensor of the transfer's shape, made once and never given away itself.
struct Transfer {
  py::object key, shape, view;
  uint32_t slot = 0;
  uint64_t bytes = 0;
  bool held = false; // taken and not released
};

class Step {
 public:
  void set(const py::list& transfers) {
    order_.clear(), places_.clear();
    for (const py::handle each : transfers) {
      const auto fields = py::cast<py::tuple>(each); // key, slot, shape, view
      Transfer transfer{fields[0], fields[2], fields[3], py::cast<uint32_t>(fields[1]), 0};
      transfer.bytes = py::cast<uint64_t>(py::object(transfer.view.attr("nbytes")));
      places_[transfer.key] = order_.size();
      order_.push_back(std::move(transfer));
    }
    begin();
  }

  void begin() {
    done_ = 0, reserved_ = false;
    for (Transfer& transfer : order_) transfer.held = false;
  }

  bool empty() const { return order_.empty(); }
  size_t done() const { return done_; }
  bool reserved() const { return reserved_; }
  void reserve() { reserved_ = true; }
  void advance() { ++done_, reserved_ = false; }

  /// The transfer that is due, if it is `key`; null otherwise.
  Transfer* due(py::handle key) { return done_ < order_.size() && same(order_[done_].key, key) ? &order_[done_] : nullptr; }

  /// Null for a key that the step does not have.
  Transfer* find(py::handle key) {
    PyObject* place = PyDict_GetItemWithError(places_.ptr(), key.ptr());
    if (place == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return place == nullptr ? nullptr : &order_[PyLong_AsSize_t(place)];
  }

  py::list held() const {
    py::list keys;
    for (const Transfer& transfer : order_)
      if (transfer.held) keys.append(transfer.key);
    return keys;
  }

 private:
  std::vector<Transfer> order_;
  py::dict places_;
  size_t done_ = 0;
  bool reserved_ = false; // the one that is due has its slot
};

} // namespace tpk::links
