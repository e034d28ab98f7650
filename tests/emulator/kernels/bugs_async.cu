// Planted bugs of asynchronous copies and mbarriers. One block of 64 threads, 256 words, 16 bytes a thread. Mended,
// each kernel reverses the order of the 16-byte pieces, or copies where it says so.
#include "plant.h"

namespace {

__device__ __forceinline__ void store_piece(Probe p, const uint4& v) { ptx::store16(p.out + threadIdx.x * 4, v); }

template <bool Bug>
__global__ void copy_without_wait(Probe p) {
  AGOQ_SHARED(uint4, tile, [64]);
  ptx::cp_async16(&tile[threadIdx.x], p.in + threadIdx.x * 4);
  ptx::cp_async_commit();
  if (!Bug) ptx::cp_async_wait<0>();
  __syncthreads();
  store_piece(p, tile[63 - threadIdx.x]); // FOUND copy_without_wait
}
PLANT(copy_without_wait, 1, 64, 0)

template <bool Bug>
__global__ void wait_for_too_few_groups(Probe p) {
  AGOQ_SHARED(uint4, tile, [64]);
  for (int half = 0; half < 2; ++half) {
    if (threadIdx.x < 32) ptx::cp_async16(&tile[half * 32 + threadIdx.x], p.in + (half * 32 + threadIdx.x) * 4);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<Bug ? 1 : 0>();
  __syncthreads();
  store_piece(p, tile[63 - threadIdx.x]); // FOUND wait_for_too_few_groups
}
PLANT(wait_for_too_few_groups, 1, 64, 0)

template <bool Bug>
__global__ void copy_without_commit(Probe p) { // waits for groups do not cover what was not committed
  AGOQ_SHARED(uint4, tile, [64]);
  ptx::cp_async16(&tile[threadIdx.x], p.in + threadIdx.x * 4);
  if (!Bug) ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  store_piece(p, tile[63 - threadIdx.x]); // FOUND copy_without_commit
}
PLANT(copy_without_commit, 1, 64, 0)

template <bool Bug>
__global__ void copy_without_barrier(Probe p) { // a thread's wait covers its own copies only
  AGOQ_SHARED(uint4, tile, [64]);
  ptx::cp_async16(&tile[threadIdx.x], p.in + threadIdx.x * 4); // FOUND copy_without_barrier
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  if (!Bug) __syncthreads();
  store_piece(p, tile[63 - threadIdx.x]); // FOUND copy_without_barrier
}
PLANT(copy_without_barrier, 1, 64, 0)

template <bool Bug>
__global__ void copy_over_readers(Probe p) { // the second copy overwrites what others still read
  AGOQ_SHARED(uint4, tile, [32]);
  for (unsigned half = 0; half < 2; ++half) {
    if (threadIdx.x < 32)
      ptx::cp_async16(&tile[threadIdx.x], p.in + (half * 32 + threadIdx.x) * 4); // FOUND copy_over_readers
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    const unsigned to = (1 - half) * 32 + 63 - threadIdx.x;
    if (threadIdx.x >= 32) ptx::store16(p.out + to * 4, tile[threadIdx.x - 32]); // FOUND copy_over_readers
    if (!Bug) __syncthreads();
  }
}
PLANT(copy_over_readers, 1, 64, 0)

template <bool Bug>
__global__ void copy_past_end(Probe p) { // copies; the last piece has to be filled with zeros rather than read
  AGOQ_SHARED(uint4, tile, [65]);
  for (unsigned piece = threadIdx.x; piece < 65; piece += 64) {
    const uint32_t* from = p.in + (Bug || piece < 64 ? piece : 0) * 4;
    ptx::cp_async16(&tile[piece], from, Bug || piece < 64 ? 16 : 0); // FOUND copy_past_end
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  const uint4 rest = threadIdx.x == 0 ? tile[64] : make_uint4(0, 0, 0, 0);
  uint4 v = tile[threadIdx.x];
  v.x += rest.x + rest.y + rest.z + rest.w;
  store_piece(p, v);
}
PLANT(copy_past_end, 1, 64, 0)

template <bool Bug>
__global__ void misaligned_copy(Probe p) { // copies
  AGOQ_SHARED(uint4, tile, [64]);
  const uint32_t* from = p.in + threadIdx.x * 4 - (Bug && threadIdx.x > 0 ? 1 : 0);
  ptx::cp_async16(&tile[threadIdx.x], from); // FOUND misaligned_copy
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  store_piece(p, tile[threadIdx.x]);
}
PLANT(misaligned_copy, 1, 64, 0)

// One thread feeds pieces of 256 bytes into two slots by bulk copies, 32 others consume them.
enum class BulkBug { none, no_wait, slot_reused, wrong_bytes, extra_arrival };

template <BulkBug bug>
__device__ __forceinline__ void bulk_pipeline(Probe p, uint4 (&slots)[2][16], uint64_t* full, uint64_t* empty) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 16);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int piece = 0; piece < 4; ++piece) {
      const int s = piece % 2;
      if (piece >= 2 && bug != BulkBug::slot_reused) ptx::mbarrier_wait(&empty[s], 0); // FOUND bulk_*
      ptx::mbarrier_arrive_expect(&full[s], bug == BulkBug::wrong_bytes ? 272 : 256);  // FOUND bulk_*
      ptx::bulk_copy_to_shared(slots[s], p.in + piece * 64, 256, &full[s]);            // FOUND bulk_*
    }
  } else if (threadIdx.x >= 32 && threadIdx.x < 48) {
    const unsigned lane = threadIdx.x - 32;
    for (int piece = 0; piece < 4; ++piece) {
      const int s = piece % 2;
      if (bug != BulkBug::no_wait) ptx::mbarrier_wait(&full[s], static_cast<unsigned>(piece / 2)); // FOUND bulk_*
      const uint4 v = slots[s][15 - lane];                                                         // FOUND bulk_*
      ptx::store16(p.out + (3 - piece) * 64 + lane * 4, v);
      ptx::mbarrier_arrive(&empty[s]);                                                 // FOUND bulk_*
      if (bug == BulkBug::extra_arrival && lane == 5) ptx::mbarrier_arrive(&empty[s]); // FOUND bulk_*
    }
  }
}

#define PLANT_BULK(name, bug)                                                 \
  template <bool Bug>                                                         \
  __global__ void name(Probe p) {                                             \
    AGOQ_SHARED(uint4, slots, [2][16]);                                       \
    AGOQ_SHARED(uint64_t, full, [2]);                                         \
    AGOQ_SHARED(uint64_t, empty, [2]);                                        \
    bulk_pipeline<Bug ? BulkBug::bug : BulkBug::none>(p, slots, full, empty); \
  }                                                                           \
  PLANT(name, 1, 64, 0)

PLANT_BULK(bulk_without_wait, no_wait)
PLANT_BULK(bulk_slot_reused, slot_reused)
PLANT_BULK(bulk_wrong_bytes, wrong_bytes)
PLANT_BULK(bulk_extra_arrival, extra_arrival)

template <bool Bug>
__global__ void mbarrier_not_initialised(Probe p) { // copies
  AGOQ_SHARED(uint64_t, barrier, [1]);
  if (threadIdx.x == 0) {
    if (Bug)
      barrier[0] = 0;
    else
      ptx::mbarrier_init(barrier, 64);
  }
  __syncthreads();
  ptx::mbarrier_arrive(barrier); // FOUND mbarrier_not_initialised
  ptx::mbarrier_wait(barrier, 0);
  store_piece(p, ptx::load16(p.in + threadIdx.x * 4));
}
PLANT(mbarrier_not_initialised, 1, 64, 0)

template <bool Bug>
__global__ void copy_to_global(Probe p) { // copies
  AGOQ_SHARED(uint4, tile, [64]);
  void* to = Bug ? static_cast<void*>(p.out + threadIdx.x * 4) : &tile[threadIdx.x];
  ptx::cp_async16(to, p.in + threadIdx.x * 4); // FOUND copy_to_global
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  if (!Bug) store_piece(p, tile[threadIdx.x]);
}
PLANT(copy_to_global, 1, 64, 0)

} // namespace
