// cuda/ptx.cuh: every inline PTX instruction of the kernels, behind a named function; nothing else in csrc/cuda contains asm.
// Lane layouts (g = lane / 4, t = lane % 4), as the PTX manual gives them:
//   mma m16n8k16   A a[0] row g, columns 2t 2t+1; a[1] row g+8; a[2] row g, columns +8; a[3] row g+8, columns +8.
//                  B b0 rows (k) 2t 2t+1, column (n) g; b1 rows +8.   D d[0] d[1] row g, columns 2t 2t+1; d[2] d[3] row g+8.
//   ldmatrix_x4    lane 8i + r gives the address of row r of matrix i; r[i] is row g, columns 2t 2t+1 of matrix i, transposed with _trans.
// Shared memory is addressed by 32 bits (shared_address). Trap: the emulator implements exactly these signatures in csrc/emulator; a
// function added here needs its twin there.
#pragma once

#include "cuda/device.cuh"

#ifndef TPK_EMULATOR

namespace tpk::ptx {

// Address of a byte of shared memory, as the functions below take it.
TPK_DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// ---- asynchronous copies, sm_80 -----------------------------------------------------------------------------------------------

// 16 bytes from global to shared memory; zeros, and no read at all, where not valid. Both addresses are multiples of 16.
TPK_DEVICE void cp_async_16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
// Closes the group of this thread's copies since the last commit; a group may be empty.
TPK_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are unfinished. Other threads see the data after a barrier.
template <int pending> TPK_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// ---- shared memory ------------------------------------------------------------------------------------------------------------

TPK_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}
TPK_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}
TPK_DEVICE void store_shared_4(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}
TPK_DEVICE void store_shared_16(uint32_t shared, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}
TPK_DEVICE uint4 load_shared_16(uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(shared));
  return value;
}

// ---- global memory ------------------------------------------------------------------------------------------------------------

// 16 bytes at a multiple of 16. Not through the read-only path: the kernels also read memory that another device writes.
TPK_DEVICE uint4 load_global_16(const void* global) {
  uint4 value;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(global));
  return value;
}
TPK_DEVICE void store_global_16(void* global, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}
TPK_DEVICE void store_global_8(void* global, uint2 value) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(value.x), "r"(value.y) : "memory");
}
// How many neighbouring floats one reduction adds: memory that is reduced into is laid out for it.
inline constexpr int reduction_width = TPK_ARCH >= 900 ? 4 : 1;
// *global += value in fp32, in no particular order, without a result.
TPK_DEVICE void red_add(float* global, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}
// The same for four neighbours at a multiple of 16 bytes; one instruction since sm_90.
TPK_DEVICE void red_add_4(float* global, float a, float b, float c, float d) {
#if TPK_ARCH >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  red_add(global, a), red_add(global + 1, b), red_add(global + 2, c), red_add(global + 3, d);
#endif
}

// ---- words that order what others see: aligned, 32 bits; .gpu within a device, .sys also with other devices and the host --------

TPK_DEVICE uint32_t load_relaxed_sys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
TPK_DEVICE uint32_t load_relaxed_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// Whoever acquires the value sees this thread's writes before it, and those that it has seen: of its block after a barrier.
TPK_DEVICE void store_release_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// After a relaxed load of a released value it makes that load an acquire.
TPK_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// *word += value; returns what was there.
TPK_DEVICE uint32_t add_acq_rel_gpu(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}
// *word = value; returns what was there.
TPK_DEVICE uint32_t exchange_relaxed_gpu(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}
// Nanoseconds, on some devices in steps of a microsecond.
TPK_DEVICE uint64_t global_timer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// About so long, to leave the memory to others.
TPK_DEVICE void nanosleep(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

// ---- arithmetic ---------------------------------------------------------------------------------------------------------------

// 2^x to two ulp; -inf gives 0, a result below 2^-126 is 0.
TPK_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x), absolute error 2^-22 near 1, else relative; 0 gives -inf.
TPK_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x to one ulp, without the branches of a division; infinity gives 0.
TPK_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest, `low` in bits 0-15 (the element at the lower address).
template <class Element> TPK_DEVICE uint32_t pack2(float low, float high);
template <> TPK_DEVICE uint32_t pack2<bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <> TPK_DEVICE uint32_t pack2<fp16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// The reverse: x from bits 0-15, y from bits 16-31.
template <class Element> TPK_DEVICE float2 unpack2(uint32_t pair);
template <> TPK_DEVICE float2 unpack2<bf16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> TPK_DEVICE float2 unpack2<fp16>(uint32_t pair) {
  float2 value;
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(pair));
  return value;
}

// d += a b, fp32 sums of 16-bit products.
template <class Element> TPK_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> TPK_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> TPK_DEVICE void mma_m16n8k16<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x, which the compiler can no longer tell from another: what is made of it is made again here, not held in registers since it was made
// elsewhere.
TPK_DEVICE uint32_t afresh(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- barriers -----------------------------------------------------------------------------------------------------------------

// Named barrier 1..15 of `threads` threads, a multiple of 32 (0 is __syncthreads).
TPK_DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

} // namespace tpk::ptx

#endif
