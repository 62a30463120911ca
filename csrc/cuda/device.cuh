// cuda/device.cuh: what device code stands on: the CUDA language, or csrc/emulator's stand-in for it when TPK_EMULATOR is defined.
// Every *.cuh includes this and nothing of CUDA itself, so that one source runs on a GPU and, for tests, on the host. Code may use:
// __global__, __device__, __forceinline__, __launch_bounds__, __grid_constant__; threadIdx, blockIdx, blockDim, gridDim (x only);
// __syncthreads, __syncwarp, __shfl_sync, __shfl_xor_sync, __ballot_sync; the vector types int2, int4, uint2, uint4, float2, float4 and
// their make_ functions; __float_as_uint, __uint_as_float;
// shared_memory() below; and tpk::ptx. Traps: shared memory is dynamic only, and host functions that device code calls are constexpr
// (nvcc runs with --expt-relaxed-constexpr).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tpk/elements.h"

#ifdef TPK_EMULATOR
#include "emulator/shim.h" // also TPK_ARCH, tpk::shared_memory() and tpk::ptx
#else
#include <cuda_runtime.h>

#ifdef __CUDA_ARCH__
#define TPK_ARCH __CUDA_ARCH__ // 800 is sm_80
#else
#define TPK_ARCH 0 // the host's pass over the source
#endif
#endif

#define TPK_DEVICE __device__ __forceinline__

namespace tpk {

inline constexpr int warp_threads = 32;
inline constexpr uint32_t all_lanes = 0xffffffffu;

#ifndef TPK_EMULATOR
extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];

// The block's dynamic shared memory, aligned to 1024 bytes.
TPK_DEVICE unsigned char* shared_memory() { return dynamic_shared_memory; }
#endif

} // namespace tpk

#include "cuda/ptx.cuh"
