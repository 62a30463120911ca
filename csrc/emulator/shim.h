// emulator/shim.h: the CUDA language for the host compiler: what cuda/device.cuh promises to device code, and tpk::ptx (ptx.h).
// Everything is a thin inline function that calls into the emulator by value, so that the arrays of device code stay in registers and the
// return address tells where in the device code the call stands. Trap: only device code may include this.
#pragma once

#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#ifndef TPK_ARCH
#define TPK_ARCH 800
#endif

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
__forceinline__ int2 make_int2(int x, int y) { return {x, y}; }
__forceinline__ int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
__forceinline__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
__forceinline__ float2 make_float2(float x, float y) { return {x, y}; }
__forceinline__ float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace tpk::emulator {

struct Index {
  unsigned x;
};
// One thread, one answer: the compiler may remember it.
[[gnu::const]] Index thread_index() noexcept;
[[gnu::const]] Index block_index() noexcept;
[[gnu::const]] Index block_size() noexcept;
[[gnu::const]] Index grid_size() noexcept;
[[gnu::const]] unsigned char* shared_memory() noexcept;

void sync_threads();
void sync_warp(uint32_t mask);
uint32_t shuffle(uint32_t mask, uint32_t value, uint32_t source_lane);
uint32_t ballot(uint32_t mask, bool predicate);

} // namespace tpk::emulator

#define threadIdx (::tpk::emulator::thread_index())
#define blockIdx (::tpk::emulator::block_index())
#define blockDim (::tpk::emulator::block_size())
#define gridDim (::tpk::emulator::grid_size())

__forceinline__ unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
__forceinline__ float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
__forceinline__ int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
__forceinline__ float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }

__forceinline__ void __syncthreads() { tpk::emulator::sync_threads(); }
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { tpk::emulator::sync_warp(mask); }
// Values of four bytes.
template <class T> __forceinline__ T __shfl_sync(unsigned mask, T value, int lane) {
  return __builtin_bit_cast(T, tpk::emulator::shuffle(mask, __builtin_bit_cast(uint32_t, value), static_cast<uint32_t>(lane) % 32));
}
template <class T> __forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  const uint32_t source = threadIdx.x % 32 ^ static_cast<uint32_t>(lane_mask);
  return __builtin_bit_cast(T, tpk::emulator::shuffle(mask, __builtin_bit_cast(uint32_t, value), source));
}
template <class T> __forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const uint32_t own = threadIdx.x % 32, source = own + delta < 32 ? own + delta : own;
  return __builtin_bit_cast(T, tpk::emulator::shuffle(mask, __builtin_bit_cast(uint32_t, value), source));
}
template <class T> __forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const uint32_t own = threadIdx.x % 32, source = own >= delta ? own - delta : own;
  return __builtin_bit_cast(T, tpk::emulator::shuffle(mask, __builtin_bit_cast(uint32_t, value), source));
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) { return tpk::emulator::ballot(mask, predicate != 0); }
__forceinline__ int __any_sync(unsigned mask, int predicate) { return tpk::emulator::ballot(mask, predicate != 0) != 0; }
__forceinline__ int __all_sync(unsigned mask, int predicate) { return tpk::emulator::ballot(mask, predicate == 0) == 0; }

#include "emulator/ptx.h"
