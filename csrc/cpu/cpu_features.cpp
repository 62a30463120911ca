// cpu/cpu_features.cpp: cpuid and xgetbv by hand (compilers name too few of the bits), and the permission Linux wants for AMX tile data.
#include "cpu_features.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace tpk::cpu {

namespace {

constexpr const char* level_names[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

#if defined(__x86_64__)
uint64_t enabled_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool amx_permitted() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

std::vector<IsaLevel> detect() {
  std::vector<IsaLevel> levels{IsaLevel::baseline};
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return levels;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !avx || !fma || !f16c) return levels;
  const uint64_t state = enabled_state();
  uint32_t a7, b7, c7, d7;
  if ((state & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7) || !(b7 >> 5 & 1)) return levels;
  levels.push_back(IsaLevel::avx2);
  const bool avx512 = (b7 >> 16 & 1) && (b7 >> 17 & 1) && (b7 >> 30 & 1) && (b7 >> 31 & 1); // F, DQ, BW, VL
  if ((state & 0xe6) != 0xe6 || !avx512) return levels;
  levels.push_back(IsaLevel::avx512);
  uint32_t a71 = 0, b71, c71, d71;
  if (a7 < 1 || !__get_cpuid_count(7, 1, &a71, &b71, &c71, &d71) || !(a71 >> 5 & 1)) return levels;
  levels.push_back(IsaLevel::avx512_bf16);
  const bool vbmi = c7 >> 1 & 1; // its kernels look up bytes
  const bool amx = vbmi && (d7 >> 22 & 1) && (d7 >> 24 & 1) && (state >> 17 & 3) == 3;
  if (amx && amx_permitted()) levels.push_back(IsaLevel::amx_bf16);
  return levels;
}
#else
std::vector<IsaLevel> detect() { return {IsaLevel::baseline}; }
#endif

} // namespace

const char* name_of(IsaLevel level) { return level_names[int(level)]; }

const std::vector<IsaLevel>& usable_isa_levels() {
  static const std::vector<IsaLevel> levels = detect();
  return levels;
}

IsaLevel isa_level_by_name(const std::string& name) {
  std::string usable;
  for (const IsaLevel level : usable_isa_levels()) {
    if (name == name_of(level)) return level;
    usable += (usable.empty() ? "" : ", ") + std::string(name_of(level));
  }
  throw std::invalid_argument("TPK_CPU_ISA=" + name + " is not an ISA level this machine can run; usable: " + usable);
}

IsaLevel chosen_isa_level() {
  const char* wanted = std::getenv("TPK_CPU_ISA");
  if (wanted != nullptr && *wanted != '\0') return isa_level_by_name(wanted);
  return usable_isa_levels().back();
}

const Kernels& kernels_of(IsaLevel level, DType dtype) {
#if defined(__x86_64__)
  switch (level) {
  case IsaLevel::amx_bf16:
    return *kernels_amx_bf16(dtype);
  case IsaLevel::avx512_bf16:
    return *kernels_avx512_bf16(dtype);
  case IsaLevel::avx512:
    return *kernels_avx512(dtype);
  case IsaLevel::avx2:
    return *kernels_avx2(dtype);
  case IsaLevel::baseline:
    break;
  }
#else
  (void)level;
#endif
  return *kernels_baseline(dtype);
}

} // namespace tpk::cpu
