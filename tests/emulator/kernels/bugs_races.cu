// Planted races: accesses of the same bytes that no barrier, fence or atomic orders. Two blocks of 128 threads, 256
// words. Mended, each kernel reverses the words of every block, or copies them where it says so.
#include "plant.h"

namespace {

template <bool Bug>
__global__ void missing_barrier(Probe p) {
  AGOQ_SHARED(uint32_t, tile, [128]);
  tile[threadIdx.x] = p.in[my_index()]; // FOUND missing_barrier
  if (!Bug) __syncthreads();
  p.out[my_index()] = tile[127 - threadIdx.x]; // FOUND missing_barrier
}
PLANT(missing_barrier, 2, 128, 0)

template <bool Bug>
__global__ void reused_without_barrier(Probe p) {
  AGOQ_SHARED(uint32_t, tile, [64]);
  for (unsigned half = 0; half < 2; ++half) {
    if (threadIdx.x / 64 == half) tile[threadIdx.x % 64] = p.in[my_index()]; // FOUND reused_without_barrier
    __syncthreads();
    // The other half's threads read, those of this half go on.
    if (threadIdx.x / 64 != half) p.out[my_index()] = tile[63 - threadIdx.x % 64]; // FOUND reused_without_barrier
    if (!Bug) __syncthreads();
  }
}
PLANT(reused_without_barrier, 2, 128, 0)

template <bool Bug>
__global__ void missing_syncwarp(Probe p) { // copies
  AGOQ_SHARED(uint32_t, tile, [128]);
  tile[threadIdx.x ^ 1] = p.in[my_index()]; // FOUND missing_syncwarp
  if (Bug)
    (void)__shfl_xor_sync(kFull, threadIdx.x, 1); // exchanges values, orders no memory
  else
    __syncwarp();
  const uint32_t neighbour = tile[threadIdx.x]; // FOUND missing_syncwarp
  p.out[my_index()] = __shfl_xor_sync(kFull, neighbour, 1);
}
PLANT(missing_syncwarp, 2, 128, 0)

template <bool Bug>
__global__ void same_word_in_warp(Probe p) { // copies
  AGOQ_SHARED(uint32_t, sums, [4]);
  p.out[my_index()] = p.in[my_index()];
  if (Bug || threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = threadIdx.x; // FOUND same_word_in_warp
}
PLANT(same_word_in_warp, 2, 128, 0)

template <bool Bug>
__global__ void same_word_in_blocks(Probe p) { // copies
  p.out[my_index()] = p.in[my_index()];
  if (threadIdx.x == 0) p.scratch[Bug ? 0 : blockIdx.x] = 1; // FOUND same_word_in_blocks
}
PLANT(same_word_in_blocks, 2, 128, 0)

template <bool Bug>
__global__ void plain_counter(Probe p) { // copies
  p.out[my_index()] = p.in[my_index()];
  if (Bug)
    p.scratch[0] += 1; // FOUND plain_counter
  else
    atomicAdd(p.scratch, 1u);
}
PLANT(plain_counter, 2, 128, 0)

template <bool Bug>
__global__ void atomic_and_plain(Probe p) { // copies
  AGOQ_SHARED(uint32_t, count, [1]);
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(count, 1u); // FOUND atomic_and_plain
  if (!Bug) __syncthreads();
  p.out[my_index()] = p.in[my_index()];
  if (threadIdx.x == 64) p.scratch[blockIdx.x] = count[0]; // FOUND atomic_and_plain
}
PLANT(atomic_and_plain, 2, 128, 0)

// The last block to finish sums what all blocks have left: that needs a fence before the counter.
template <bool Bug>
__global__ void missing_fence(Probe p) { // copies
  AGOQ_SHARED(bool, last, [1]);
  p.out[my_index()] = p.in[my_index()];
  if (threadIdx.x == 0) {
    p.scratch[8 + blockIdx.x] = p.in[my_index()]; // FOUND missing_fence
    if (!Bug) __threadfence();
    last[0] = atomicAdd(p.scratch, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last[0] && threadIdx.x == 1) {
    uint32_t sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += p.scratch[8 + b]; // FOUND missing_fence
    p.scratch[1] = sum;
  }
}
PLANT(missing_fence, 2, 128, 0)

// A fence for the block does not reach other blocks.
template <bool Bug>
__global__ void fence_too_narrow(Probe p) { // copies
  AGOQ_SHARED(bool, last, [1]);
  p.out[my_index()] = p.in[my_index()];
  if (threadIdx.x == 0) {
    p.scratch[8 + blockIdx.x] = p.in[my_index()]; // FOUND fence_too_narrow
    if (Bug)
      __threadfence_block();
    else
      __threadfence();
    last[0] = atomicAdd(p.scratch, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last[0] && threadIdx.x < gridDim.x)
    p.scratch[16 + threadIdx.x] = p.scratch[8 + threadIdx.x]; // FOUND fence_too_narrow
}
PLANT(fence_too_narrow, 2, 128, 0)

template <bool Bug>
__global__ void named_barrier_of_others(
    Probe p) { // each half has its own barrier; the bug reads the other half's words
  AGOQ_SHARED(uint32_t, tile, [128]);
  const unsigned half = threadIdx.x / 64;
  tile[threadIdx.x] = p.in[my_index()]; // FOUND named_barrier_of_others
  ptx::named_barrier_sync(static_cast<int>(1 + half), 64);
  const unsigned from = (Bug ? 1 - half : half) * 64 + 63 - threadIdx.x % 64;
  const uint32_t v = tile[from]; // FOUND named_barrier_of_others
  p.out[static_cast<int64_t>(blockIdx.x) * blockDim.x + (1 - half) * 64 + threadIdx.x % 64] = v;
}
PLANT(named_barrier_of_others, 2, 128, 0)

template <bool Bug>
__global__ void arrived_without_waiting(Probe p) { // the first half tells that it has written, and reads too
  AGOQ_SHARED(uint32_t, tile, [128]);
  tile[threadIdx.x] = p.in[my_index()]; // FOUND arrived_without_waiting
  if (Bug && threadIdx.x < 64)
    ptx::named_barrier_arrive(1, 128);
  else
    ptx::named_barrier_sync(1, 128);
  p.out[my_index()] = tile[127 - threadIdx.x]; // FOUND arrived_without_waiting
}
PLANT(arrived_without_waiting, 2, 128, 0)

} // namespace
