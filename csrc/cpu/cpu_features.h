// cpu/cpu_features.h: the ISA levels this build has and this machine can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace tpk::cpu {

enum class IsaLevel { baseline, avx2, avx512, avx512_bf16, amx_bf16 };

const char* name_of(IsaLevel level);
// Ascending; never empty. Asks the kernel for the AMX tile state on the first call.
const std::vector<IsaLevel>& usable_isa_levels();
// By name; throws std::invalid_argument that names the usable levels.
IsaLevel isa_level_by_name(const std::string& name);
// TPK_CPU_ISA when set (read on every call, so that tests can change it), else the highest usable level.
IsaLevel chosen_isa_level();
const Kernels& kernels_of(IsaLevel level, DType dtype);

} // namespace tpk::cpu
