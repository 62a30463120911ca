// emulator/ptx.h: the functions of cuda/ptx.cuh for the host, signature by signature. What they mean is written there; which file of the
// emulator does the work is named by each group.
#pragma once

#include <cmath>
#include <cstdint>

#include "tpk/elements.h"

namespace tpk {

__forceinline__ unsigned char* shared_memory() { return emulator::shared_memory(); }

namespace emulator {

struct Quad {
  uint32_t r[4];
};
struct FloatQuad {
  float f[4];
};

// shared.cpp
uint32_t shared_address(const void* pointer);
void store_shared_4(uint32_t shared, uint32_t value);
void store_shared_16(uint32_t shared, Quad value);
Quad load_shared_16(uint32_t shared);
// global.cpp
Quad load_global_16(const void* global);
void store_global_16(void* global, Quad value);
void store_global_8(void* global, uint64_t value);
void red_add(float* global, float value);
void red_add_4(float* global, FloatQuad values);
// ordering.cpp
uint32_t load_relaxed(const uint32_t* word, bool system);
void store_word(uint32_t* word, uint32_t value, bool release, bool system);
void fence_acq_rel();
uint32_t atomic_add(uint32_t* word, uint32_t value, bool acquire_release);
uint32_t atomic_exchange(uint32_t* word, uint32_t value);
uint64_t global_timer();
void nanosleep();
// async_copies.cpp
void cp_async(uint32_t shared, const void* global, uint32_t bytes, uint32_t read_bytes);
void cp_async_commit();
void cp_async_wait(uint32_t pending);
// matrix_moves.cpp
Quad ldmatrix(uint32_t shared, uint32_t matrices, bool transposed);
void stmatrix(uint32_t shared, Quad values, uint32_t matrices, bool transposed);
// mma.cpp
FloatQuad mma_bf16(FloatQuad d, Quad a, uint32_t b0, uint32_t b1);
FloatQuad mma_fp16(FloatQuad d, Quad a, uint32_t b0, uint32_t b1);
// formats.cpp
[[gnu::const]] uint16_t to_bf16(float x) noexcept;
[[gnu::const]] uint16_t to_fp16(float x) noexcept;
[[gnu::const]] float from_fp16(uint16_t bits) noexcept;
void cp_async_wait_all();
// mbarriers.cpp
void mbarrier_init(uint32_t shared, uint32_t count);
void mbarrier_invalidate(uint32_t shared);
void mbarrier_arrive(uint32_t shared);
void mbarrier_arrive_expect(uint32_t shared, uint32_t bytes);
void mbarrier_wait(uint32_t shared, uint32_t parity);
void cp_async_mbarrier_arrive(uint32_t shared);
// barriers.cpp
void barrier_sync(int id, int threads);

} // namespace emulator

namespace ptx {

__forceinline__ uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

__forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  emulator::cp_async(shared, global, 16, valid ? 16 : 0);
}
__forceinline__ void cp_async_commit() { emulator::cp_async_commit(); }
template <int pending> __forceinline__ void cp_async_wait() { emulator::cp_async_wait(pending); }

__forceinline__ void unpack(uint32_t (&r)[4], emulator::Quad quad) {
  r[0] = quad.r[0], r[1] = quad.r[1], r[2] = quad.r[2], r[3] = quad.r[3];
}
__forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) { unpack(r, emulator::ldmatrix(shared, 4, false)); }
__forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) { unpack(r, emulator::ldmatrix(shared, 4, true)); }

__forceinline__ void store_shared_4(uint32_t shared, uint32_t value) { emulator::store_shared_4(shared, value); }
__forceinline__ void store_shared_16(uint32_t shared, uint4 value) {
  emulator::store_shared_16(shared, {value.x, value.y, value.z, value.w});
}
__forceinline__ uint4 load_shared_16(uint32_t shared) { return __builtin_bit_cast(uint4, emulator::load_shared_16(shared)); }

__forceinline__ uint4 load_global_16(const void* global) { return __builtin_bit_cast(uint4, emulator::load_global_16(global)); }
__forceinline__ void store_global_16(void* global, uint4 value) { emulator::store_global_16(global, {value.x, value.y, value.z, value.w}); }
__forceinline__ void store_global_8(void* global, uint2 value) { emulator::store_global_8(global, __builtin_bit_cast(uint64_t, value)); }
inline constexpr int reduction_width = TPK_ARCH >= 900 ? 4 : 1;
__forceinline__ void red_add(float* global, float value) { emulator::red_add(global, value); }
__forceinline__ void red_add_4(float* global, float a, float b, float c, float d) { emulator::red_add_4(global, {a, b, c, d}); }

__forceinline__ uint32_t load_relaxed_sys(const uint32_t* word) { return emulator::load_relaxed(word, true); }
__forceinline__ uint32_t load_relaxed_gpu(const uint32_t* word) { return emulator::load_relaxed(word, false); }
__forceinline__ void store_release_sys(uint32_t* word, uint32_t value) { emulator::store_word(word, value, true, true); }
__forceinline__ void fence_acq_rel_sys() { emulator::fence_acq_rel(); }
__forceinline__ uint32_t add_acq_rel_gpu(uint32_t* word, uint32_t value) { return emulator::atomic_add(word, value, true); }
__forceinline__ uint32_t exchange_relaxed_gpu(uint32_t* word, uint32_t value) { return emulator::atomic_exchange(word, value); }
__forceinline__ uint64_t global_timer() { return emulator::global_timer(); }
__forceinline__ void nanosleep(uint32_t) { emulator::nanosleep(); }

// The flushes to zero are those of the instructions; their last bits are not.
__forceinline__ float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
__forceinline__ float log2_approx(float x) { return std::log2(std::fabs(x) < 0x1p-126f ? 0.0f : x); }

__forceinline__ float reciprocal_approx(float x) {
  const float y = 1.0f / (std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x);
  return std::fabs(y) < 0x1p-126f ? std::copysign(0.0f, y) : y;
}

template <class Element> uint32_t pack2(float low, float high);
template <> __forceinline__ uint32_t pack2<bf16>(float low, float high) {
  return emulator::to_bf16(low) | uint32_t{emulator::to_bf16(high)} << 16;
}
template <> __forceinline__ uint32_t pack2<fp16>(float low, float high) {
  return emulator::to_fp16(low) | uint32_t{emulator::to_fp16(high)} << 16;
}
template <class Element> float2 unpack2(uint32_t pair);
template <> __forceinline__ float2 unpack2<bf16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <> __forceinline__ float2 unpack2<fp16>(uint32_t pair) {
  return {emulator::from_fp16(static_cast<uint16_t>(pair)), emulator::from_fp16(static_cast<uint16_t>(pair >> 16))};
}

template <class Element> void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::FloatQuad sum = emulator::mma_bf16({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, b0, b1);
  d[0] = sum.f[0], d[1] = sum.f[1], d[2] = sum.f[2], d[3] = sum.f[3];
}
template <> __forceinline__ void mma_m16n8k16<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::FloatQuad sum = emulator::mma_fp16({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, b0, b1);
  d[0] = sum.f[0], d[1] = sum.f[1], d[2] = sum.f[2], d[3] = sum.f[3];
}

__forceinline__ uint32_t afresh(uint32_t x) { return x; }

__forceinline__ void barrier_sync(int id, int threads) { emulator::barrier_sync(id, threads); }

} // namespace ptx
} // namespace tpk
