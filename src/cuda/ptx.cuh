// Every instruction that CUDA C++ does not name, and every vector access: one wrapper each.
//
// Where no CUDA compiler is at work, tests/emulator/include/emulator/ptx.h defines a twin of each of them.
#pragma once

#include "launch.cuh"

#if !defined(__CUDACC__)
#include <emulator/ptx.h>
#else

namespace agoq::ptx {

// --- vector accesses -----------------------------------------------------------------------------------------

// Of global memory; `p` is aligned to the width. In PTX, since the compiler takes C++ vector accesses apart where
// another path stores the same elements one by one. Not through the read-only path: kernels overwrite what they have
// read.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load8(const void* p) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load4(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}

__device__ __forceinline__ void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store8(void* p, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store4(void* p, uint32_t v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory");
}

// The address that instructions on shared memory take.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- named barriers ------------------------------------------------------------------------------------------

// Barriers 1 to 15 among `threads` threads, a multiple of 32. Those that arrive do not wait.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- asynchronous copies -------------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory, both 16-byte aligned. Only the first `source_bytes` are read, the rest
// becomes zero. Other threads see them after this thread's wait and a barrier.
__device__ __forceinline__ void cp_async16(void* to, const void* from, unsigned source_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the `GroupsLeft` latest groups of this thread are under way.
template <int GroupsLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GroupsLeft) : "memory");
}

// mbarriers and bulk copies exist from sm_90 on; elsewhere these trap.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define AGOQ_ASM_SM90(...) asm volatile(__VA_ARGS__)
#else
#define AGOQ_ASM_SM90(...) __trap()
#endif

// One thread initialises, then a block barrier; a phase completes after `arrivals` arrivals and all expected bytes.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, unsigned arrivals) {
  AGOQ_ASM_SM90(
      "mbarrier.init.shared::cta.b64 [%0], %1;\n fence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier)),
      "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  AGOQ_ASM_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes) {
  AGOQ_ASM_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                "r"(bytes) : "memory");
}
// Waits for the phase of this parity: 0 for the first, then 1, 0, ...
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, unsigned parity) {
  uint32_t complete = 1;
  do {
    AGOQ_ASM_SM90(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(
            complete) : "r"(shared_address(barrier)),
        "r"(parity) : "memory");
  } while (complete == 0);
}
// One thread copies `bytes`, a multiple of 16, from global to shared memory, both 16-byte aligned; the copy arrives on
// the mbarrier, where its bytes have to be expected.
__device__ __forceinline__ void bulk_copy_to_shared(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
  AGOQ_ASM_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    shared_address(to)),
                "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#undef AGOQ_ASM_SM90

// --- tensor cores --------------------------------------------------------------------------------------------

// 8 x 8 matrices of 16-bit elements from shared memory: lane 8 m + i names row i of matrix m, 16-byte aligned. Lane l
// gets elements (l / 4, 2 (l % 4)) and the next one of matrix m in r[m]; of its transpose if `Transposed`.
template <int Matrices, bool Transposed = false>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[Matrices], const void* row) {
  static_assert(Matrices == 1 || Matrices == 2 || Matrices == 4, "ldmatrix loads 1, 2 or 4 matrices");
  const uint32_t p = shared_address(row);
  if constexpr (Matrices == 4 && !Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
  else if constexpr (Matrices == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
  else if constexpr (Matrices == 2 && !Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(p)
                 : "memory");
  else if constexpr (Matrices == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(p)
                 : "memory");
  else if constexpr (!Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(p) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(p) : "memory");
}

// d [16, 8] = a [16, 16] b [16, 8] + c [16, 8]: bf16 products, FP32 sums; fragments as in the PTX manual (m16n8k16).
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                         const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

} // namespace agoq::ptx

#endif
