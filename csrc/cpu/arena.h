// cpu/arena.h: lays aligned arrays out in one block. With a null block it only measures.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct Arena {
  std::byte* block = nullptr;
  int64_t bytes = 0;

  template <class T> T* take(int64_t count) {
    T* at = block == nullptr ? nullptr : reinterpret_cast<T*>(block + bytes);
    bytes += (count * int64_t(sizeof(T)) + 127) / 128 * 128;
    return at;
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
