// cpu/level.cpp: the one kernel source. CMake compiles it once per ISA level with that level's flags and TPK_LEVEL set.
// Everything included here has internal linkage in a namespace of its own: an inline function shared with another level would let the
// linker put AVX-512 code into the baseline.
#include "level.h"

#include "kernels.h"
#if TPK_LEVEL == TPK_LEVEL_AMX_BF16
#include "core_amx.h"
#elif TPK_LEVEL == TPK_LEVEL_AVX512_BF16
#include "core_bf16.h"
#else
#include "core_f32.h"
#endif
#include "backward.h"
#include "forward.h"

namespace tpk::cpu {
namespace TPK_NAMESPACE {
namespace {

#if TPK_LEVEL == TPK_LEVEL_AMX_BF16
using LevelCore = CoreAmx;
#elif TPK_LEVEL == TPK_LEVEL_AVX512_BF16
using LevelCore = CoreBf16;
#else
using LevelCore = CoreF32;
#endif

constexpr Kernels table{
    Forward<LevelCore>::bytes,    Forward<LevelCore>::run,   Backward<LevelCore>::head_bytes, Backward<LevelCore>::thread_bytes,
    Backward<LevelCore>::prepare, Backward<LevelCore>::keys, Backward<LevelCore>::finish,     Backward<LevelCore>::sinks,
};

} // namespace
} // namespace TPK_NAMESPACE

const Kernels* TPK_KERNELS([[maybe_unused]] DType dtype) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512_BF16
  if (dtype != DType::bfloat16) return kernels_avx512(dtype);
#endif
  return &TPK_NAMESPACE::table;
}

} // namespace tpk::cpu
