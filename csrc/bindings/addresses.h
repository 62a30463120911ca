// bindings/addresses.h: Python's addresses and codes as pointers, rows and dtypes. Rows are (address, row stride in elements); address 0
// is none.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "tpk/fused_params.h"

namespace tpk::bindings {

using Rows = std::array<int64_t, 2>;

template <class T> T* pointer(int64_t address) { return reinterpret_cast<T*>(static_cast<intptr_t>(address)); }

inline RowsView rows_at(const Rows& rows) { return {pointer<void>(rows[0]), rows[1]}; }

// who: the kernels, for messages.
inline DType dtype_of(const char* who, int code) {
  if (code < 0 || code > 2) throw std::invalid_argument(std::string(who) + ": unknown dtype code " + std::to_string(code));
  return static_cast<DType>(code);
}

} // namespace tpk::bindings
