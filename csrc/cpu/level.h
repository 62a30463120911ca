// cpu/level.h: the names of the ISA level that this translation unit is compiled for (TPK_LEVEL, set by CMake): its namespace and the
// functions that return its tables of kernels.
#pragma once

#define TPK_LEVEL_BASELINE 0
#define TPK_LEVEL_AVX2 1
#define TPK_LEVEL_AVX512 2
#define TPK_LEVEL_AVX512_BF16 3
#define TPK_LEVEL_AMX_BF16 4

#if TPK_LEVEL == TPK_LEVEL_BASELINE
#define TPK_NAMESPACE baseline
#define TPK_KERNELS kernels_baseline
#define TPK_FUSED_KERNELS fused_kernels_baseline
#elif TPK_LEVEL == TPK_LEVEL_AVX2
#define TPK_NAMESPACE avx2
#define TPK_KERNELS kernels_avx2
#define TPK_FUSED_KERNELS fused_kernels_avx2
#elif TPK_LEVEL == TPK_LEVEL_AVX512
#define TPK_NAMESPACE avx512
#define TPK_KERNELS kernels_avx512
#define TPK_FUSED_KERNELS fused_kernels_avx512
#elif TPK_LEVEL == TPK_LEVEL_AVX512_BF16
#define TPK_NAMESPACE avx512_bf16
#define TPK_KERNELS kernels_avx512_bf16
#define TPK_FUSED_KERNELS fused_kernels_avx512_bf16
#else
#define TPK_NAMESPACE amx_bf16
#define TPK_KERNELS kernels_amx_bf16
#define TPK_FUSED_KERNELS fused_kernels_amx_bf16
#endif
