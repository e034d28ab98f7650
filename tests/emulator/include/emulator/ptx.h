// The twins of src/cuda/ptx.cuh: the same functions, carried out by the emulator.
#pragma once

#include <cuda_runtime.h>

namespace emulator {

// Checked at its full width, so that a misaligned vector access is found whatever its values are used for.
void vector_load(void* value, const void* p, unsigned bytes, Site site);
void vector_store(void* p, const void* value, unsigned bytes, Site site);

void named_barrier(int id, int threads, bool wait, Site site);

void async_copy(void* to, const void* from, unsigned bytes, unsigned source_bytes, Site site);
void async_commit();
void async_wait(unsigned groups_left);

void mbarrier_init(uint64_t* barrier, unsigned arrivals, Site site);
void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, Site site);
void mbarrier_wait(uint64_t* barrier, unsigned parity, Site site);
void bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier, Site site);

struct LoadMatrixCall { // ldmatrix: one lane's row address and registers
  const void* row;
  uint32_t* registers;
  int matrices;
  bool transposed;
};
struct MultiplyCall { // mma: one lane's fragments
  float* d;
  const uint32_t *a, *b;
  const float* c;
};
void matrix_collective(WarpOp op, void* call, Site site);

} // namespace emulator

namespace agoq::ptx {

using emulator::Site;

// --- vector accesses -----------------------------------------------------------------------------------------

inline uint4 load16(const void* p, Site site = Site::here()) {
  uint4 v;
  emulator::vector_load(&v, p, sizeof v, site);
  return v;
}
inline uint2 load8(const void* p, Site site = Site::here()) {
  uint2 v;
  emulator::vector_load(&v, p, sizeof v, site);
  return v;
}
inline uint32_t load4(const void* p, Site site = Site::here()) {
  uint32_t v;
  emulator::vector_load(&v, p, sizeof v, site);
  return v;
}
inline void store16(void* p, uint4 v, Site site = Site::here()) { emulator::vector_store(p, &v, sizeof v, site); }
inline void store8(void* p, uint2 v, Site site = Site::here()) { emulator::vector_store(p, &v, sizeof v, site); }
inline void store4(void* p, uint32_t v, Site site = Site::here()) { emulator::vector_store(p, &v, sizeof v, site); }

// --- named barriers ------------------------------------------------------------------------------------------

inline void named_barrier_sync(int id, int threads, Site site = Site::here()) {
  emulator::named_barrier(id, threads, true, site);
}
inline void named_barrier_arrive(int id, int threads, Site site = Site::here()) {
  emulator::named_barrier(id, threads, false, site);
}

// --- asynchronous copies -------------------------------------------------------------------------------------

inline void cp_async16(void* to, const void* from, unsigned source_bytes = 16, Site site = Site::here()) {
  emulator::async_copy(to, from, 16, source_bytes, site);
}
inline void cp_async_commit() { emulator::async_commit(); }
template <int GroupsLeft>
void cp_async_wait() {
  emulator::async_wait(GroupsLeft);
}

inline void mbarrier_init(uint64_t* barrier, unsigned arrivals, Site site = Site::here()) {
  emulator::mbarrier_init(barrier, arrivals, site);
}
inline void mbarrier_arrive(uint64_t* barrier, Site site = Site::here()) {
  emulator::mbarrier_arrive(barrier, 0, site);
}
inline void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes, Site site = Site::here()) {
  emulator::mbarrier_arrive(barrier, bytes, site);
}
inline void mbarrier_wait(uint64_t* barrier, unsigned parity, Site site = Site::here()) {
  emulator::mbarrier_wait(barrier, parity, site);
}
inline void bulk_copy_to_shared(void* to, const void* from, unsigned bytes, uint64_t* barrier,
                                Site site = Site::here()) {
  emulator::bulk_copy(to, from, bytes, barrier, site);
}

// --- tensor cores --------------------------------------------------------------------------------------------

template <int Matrices, bool Transposed = false>
void ldmatrix(uint32_t (&r)[Matrices], const void* row, Site site = Site::here()) {
  static_assert(Matrices == 1 || Matrices == 2 || Matrices == 4, "ldmatrix loads 1, 2 or 4 matrices");
  emulator::LoadMatrixCall call{row, r, Matrices, Transposed};
  emulator::matrix_collective(emulator::WarpOp::load_matrix, &call, site);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4],
                     Site site = Site::here()) {
  emulator::MultiplyCall call{d, a, b, c};
  emulator::matrix_collective(emulator::WarpOp::multiply, &call, site);
}

} // namespace agoq::ptx
