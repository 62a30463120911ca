// emulator/report.cpp: addresses become source lines by addr2line, which comes with the compiler.
#include "emulator/report.h"

#include <algorithm>
#include <cstdio>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <string_view>

namespace tpk::emulator {
namespace {

const char* module_file() {
  Dl_info info{};
  return dladdr(reinterpret_cast<const void*>(&place), &info) != 0 ? info.dli_fname : "";
}

std::map<Pc, std::string> known_places;
std::mutex known_mutex;

std::string short_file(std::string line) {
  if (const size_t at = line.rfind("csrc/"); at != std::string::npos) line.erase(0, at);
  if (const size_t at = line.find(" (discriminator"); at != std::string::npos) line.erase(at);
  return line;
}

} // namespace

void find_places(const std::vector<Pc>& pcs) {
  const std::lock_guard lock(known_mutex);
  std::string command = std::string("addr2line -a -f -i -e '") + module_file() + "'";
  bool any = false;
  for (const Pc pc : pcs) {
    if (!known_places.try_emplace(pc, "unknown line").second) continue;
    char address[16];
    std::snprintf(address, sizeof address, " 0x%x", pc - 1); // pc is a return address; the call is before it
    command += address;
    any = true;
  }
  if (!any) return;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen((command + " 2>/dev/null").c_str(), "r"), pclose);
  char buffer[4096];
  Pc pc = 0;
  bool is_function = false;
  while (pipe && std::fgets(buffer, sizeof buffer, pipe.get())) { // an address, then function and file:line of each level of inlining
    std::string line(buffer);
    while (!line.empty() && line.back() == '\n') line.pop_back();
    if (line.starts_with("0x")) {
      pc = static_cast<Pc>(std::stoul(line, nullptr, 16)) + 1, is_function = false;
      continue;
    }
    is_function = !is_function;
    if (is_function) continue;
    const std::string file = short_file(line);
    // The stand-ins for instructions are no place that anybody wants to read about.
    if (file.starts_with("csrc/emulator/shim.h") || file.starts_with("csrc/emulator/ptx.h") ||
        file.starts_with("csrc/emulator/session.h") || file.starts_with("?"))
      continue;
    std::string& text = known_places[pc];
    text = text == "unknown line" ? file : text + " < " + file;
  }
}

std::string place(Pc pc) {
  find_places({pc});
  const std::lock_guard lock(known_mutex);
  return known_places[pc];
}

void merge(Report& into, Report&& from) {
  for (Finding& finding : from.findings) {
    const auto same = std::find_if(into.findings.begin(), into.findings.end(), [&](const Finding& other) {
      return other.pc == finding.pc && other.other_pc == finding.other_pc && std::string_view(other.kind) == finding.kind;
    });
    if (same != into.findings.end())
      same->count += finding.count;
    else
      into.findings.push_back(std::move(finding));
  }
  into.findings_left_out += from.findings_left_out;
  for (const auto& [pc, counts] : from.banks) into.banks[pc] += counts;
  for (const auto& [operation, times] : from.operations) into.operations[operation] += times;
}

std::string Finding::text() const {
  std::string text = std::string(kind) + ": kernel " + kernel + ", block " + std::to_string(block) + ", " + threads + " " + what;
  if (pc != 0) text += "\n    at " + place(pc);
  if (other_pc != 0) text += "\n    " + other + " at " + place(other_pc);
  if (!remedy.empty()) text += "\n    remedy: " + remedy;
  if (count > 1) text += "\n    (" + std::to_string(count) + " times at these places)";
  return text;
}

} // namespace tpk::emulator
