// bindings/emulator.cpp: tpk_emulator, for tests: registered tensors, settings, the report, and the kernels as the tests call them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "emulator/session.h"
#include "emulator/test_kernels.h"

namespace py = pybind11;
using namespace tpk::emulator;

namespace {

void register_tensor(const std::string& name, int64_t address, uint32_t item_bytes, std::vector<int64_t> sizes,
                     std::vector<int64_t> strides, bool writable, bool fresh, bool shared) {
  session().tensors.add({name, static_cast<uintptr_t>(address), item_bytes, writable, fresh, shared, std::move(sizes), std::move(strides)});
}

py::dict take_report() {
  const Report report = session().take_report();
  py::list findings, banks;
  std::vector<Pc> pcs;
  for (const Finding& finding : report.findings) pcs.insert(pcs.end(), {finding.pc, finding.other_pc});
  for (const auto& [pc, counts] : report.banks) pcs.push_back(pc);
  find_places(pcs);
  for (const Finding& finding : report.findings) {
    py::dict entry;
    entry["kind"] = finding.kind, entry["kernel"] = finding.kernel, entry["block"] = finding.block, entry["threads"] = finding.threads;
    entry["text"] = finding.text(), entry["count"] = finding.count;
    findings.append(entry);
  }
  for (const auto& [pc, counts] : report.banks) {
    py::dict entry;
    entry["place"] = place(pc), entry["accesses"] = counts.accesses, entry["phases"] = counts.phases, entry["turns"] = counts.turns;
    banks.append(entry);
  }
  py::dict result;
  result["findings"] = findings, result["findings_left_out"] = report.findings_left_out;
  result["banks"] = banks, result["operations"] = report.operations, result["blocks"] = report.blocks;
  return result;
}

} // namespace

PYBIND11_MODULE(tpk_emulator, m) {
  m.doc() = "CUDA kernels of tpkernels on the host, with every access checked. For tests.";
  m.def("register_tensor", &register_tensor, py::arg("name"), py::arg("address"), py::arg("item_bytes"), py::arg("sizes"),
        py::arg("strides"), py::arg("writable"), py::arg("fresh") = false, py::arg("shared") = false);
  m.def("remove_tensor", [](const std::string& name) { session().tensors.remove(name); }, py::arg("name"));
  m.def("first_unwritten", [](const std::string& name) { return session().tensors.first_unwritten(name); }, py::arg("name"));
  m.def("clear_tensors", [] { session().clear(); });
  m.def(
      "configure",
      [](uint32_t host_threads, bool backwards, uint32_t seed) {
        session().host_threads = host_threads, session().backwards = backwards, session().seed = seed;
      },
      py::arg("host_threads"), py::arg("backwards"), py::arg("seed") = 0);
  m.def("set_patience", [](double seconds) { session().patience_s = seconds; }, py::arg("seconds"));
  m.def("hold", [] { session().hold(); });
  m.def("run_held", [] {
    const py::gil_scoped_release unlocked;
    session().run_held();
  });
  m.def(
      "set_device",
      [](int capability, int multiprocessors, int shared_bytes) {
        session().device = {capability, multiprocessors, shared_bytes, int64_t{40} << 20};
      },
      py::arg("capability"), py::arg("multiprocessors"), py::arg("shared_bytes"));
  m.def("take_report", &take_report);
  m.def(
      "run_test_kernel",
      [](const std::string& name, int64_t grid, int threads, int64_t shared_bytes, const std::array<int64_t, 4>& addresses,
         const std::array<int64_t, 4>& sizes, int device, int64_t stream) {
        TestTask task{{}, sizes};
        for (size_t i = 0; i < 4; ++i) task.tensors[i] = reinterpret_cast<void*>(addresses[i]);
        const py::gil_scoped_release unlocked;
        run_test_kernel(name, grid, threads, shared_bytes, task, {device, reinterpret_cast<void*>(stream)});
      },
      py::arg("name"), py::arg("grid"), py::arg("threads"), py::arg("shared_bytes"), py::arg("addresses"), py::arg("sizes"),
      py::arg("device") = 0, py::arg("stream") = 0);
}
