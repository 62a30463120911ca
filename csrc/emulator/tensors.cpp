// emulator/tensors.cpp: from an address to a tensor's index, and back into words.
#include "emulator/tensors.h"

#include <algorithm>

namespace tpk::emulator {
namespace {

constexpr uintptr_t most_watched_bytes = 256 << 20; // a view with huge strides is only checked for bounds

} // namespace

void Tensors::add(Tensor tensor) {
  Entry entry;
  int64_t last = 0;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    if (tensor.sizes[i] == 0) return; // nothing of it exists
    last += (tensor.sizes[i] - 1) * tensor.strides[i];
    if (tensor.sizes[i] > 1 && tensor.strides[i] != 0)
      entry.dimensions.push_back({tensor.sizes[i], tensor.strides[i] * tensor.item_bytes, i});
  }
  std::sort(entry.dimensions.begin(), entry.dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride_bytes > b.stride_bytes; });
  entry.run_length = tensor.item_bytes;
  for (size_t i = entry.dimensions.size(); i-- > 0;) {
    const Dimension& dimension = entry.dimensions[i];
    const bool nested =
        dimension.stride_bytes >= (entry.outer.empty() ? entry.run_length : entry.outer.back().size * entry.outer.back().stride_bytes);
    entry.nested &= nested;
    if (entry.outer.empty() && dimension.stride_bytes == entry.run_length)
      entry.run_length *= dimension.size;
    else
      entry.outer.push_back(dimension);
  }
  std::reverse(entry.outer.begin(), entry.outer.end());
  entry.begin = tensor.data;
  entry.end = tensor.data + static_cast<uintptr_t>((last + 1) * tensor.item_bytes);
  if (tensor.shared)
    entry.order = std::make_shared<OrderWatch>(entry.end - entry.begin, tensor.fresh);
  else if (tensor.writable && entry.end - entry.begin <= most_watched_bytes)
    entry.watch = std::make_shared<GlobalWatch>(entry.end - entry.begin, tensor.fresh);
  entry.tensor = std::move(tensor);
  entries_.push_back(std::move(entry));
}

// The contiguous run that holds `address`; false where the tensor has none there.
bool Tensors::locate(const Entry& entry, uintptr_t address, uintptr_t& run_begin, uintptr_t& run_bytes) {
  if (address < entry.begin || address >= entry.end) return false;
  run_begin = entry.begin, run_bytes = entry.end - entry.begin;
  if (!entry.nested) return true;
  auto rest = static_cast<int64_t>(address - entry.begin);
  for (const Dimension& dimension : entry.outer) {
    const int64_t at = rest / dimension.stride_bytes;
    if (at >= dimension.size) return false;
    rest -= at * dimension.stride_bytes;
  }
  run_begin = address - static_cast<uintptr_t>(rest), run_bytes = static_cast<uintptr_t>(entry.run_length);
  return rest < entry.run_length;
}

Tensors::Entry* Tensors::find_run(uintptr_t address, uint32_t bytes, bool write) {
  for (Entry& entry : entries_) {
    uintptr_t begin = 0, run = 0;
    if ((write && !entry.tensor.writable) || !locate(entry, address, begin, run) || address - begin + bytes > run) continue;
    entry.run_begin = begin, entry.run_bytes = run;
    return &entry;
  }
  return nullptr;
}

bool Tensors::any_shared() const {
  return std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.tensor.shared; });
}

std::string Tensors::first_unwritten(const std::string& name) const {
  for (const Entry& entry : entries_) {
    if (entry.tensor.name != name || !entry.watch) continue;
    for (uintptr_t address = entry.begin; address < entry.end; address += entry.tensor.item_bytes) {
      uintptr_t begin = 0, run = 0;
      if (locate(entry, address, begin, run) && !entry.watch->written(address - entry.begin)) return index_of(entry, address);
    }
  }
  return {};
}

bool Tensors::read_only(uintptr_t address) const {
  uintptr_t begin = 0, run = 0;
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) { return locate(entry, address, begin, run); });
}

std::string Tensors::index_of(const Entry& entry, uintptr_t address) {
  std::vector<int64_t> index(entry.tensor.sizes.size(), 0);
  auto rest = static_cast<int64_t>(address - entry.begin);
  for (const Dimension& dimension : entry.dimensions) {
    index[dimension.index] = rest / dimension.stride_bytes;
    rest %= dimension.stride_bytes;
  }
  std::string text;
  for (const int64_t i : index) text += (text.empty() ? "" : ", ") + std::to_string(i);
  return "[" + text + "]";
}

std::string Tensors::describe(uintptr_t address) const {
  const Entry* nearest = nullptr;
  uintptr_t distance = ~uintptr_t{0};
  for (const Entry& entry : entries_) {
    uintptr_t begin = 0, run = 0;
    if (locate(entry, address, begin, run)) return entry.tensor.name + index_of(entry, address);
    const uintptr_t away = address < entry.begin ? entry.begin - address : address >= entry.end ? address - entry.end : 0;
    if (away < distance) nearest = &entry, distance = away;
  }
  if (nearest == nullptr) return "global memory, where no tensor is registered";
  const std::string& name = nearest->tensor.name;
  if (address < nearest->begin) return std::to_string(distance) + " bytes before the start of " + name;
  if (address >= nearest->end) return std::to_string(distance) + " bytes past the end of " + name;
  return "a gap between the rows of " + name + ", " + std::to_string(address - nearest->begin) + " bytes from its start";
}

} // namespace tpk::emulator
