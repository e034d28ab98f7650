// Planted bugs of barriers and warp collectives: divergence, masks, early exits, deadlocks. Two blocks of 128 threads,
// 256 words. Mended, each kernel copies its input.
#include "plant.h"

namespace {

template <bool Bug>
__global__ void shuffle_in_branches(Probe p) {
  uint32_t v = p.in[my_index()];
  if (Bug && threadIdx.x % 32 < 16)
    v = __shfl_xor_sync(kFull, v, 1); // FOUND shuffle_in_branches
  else
    v = __shfl_xor_sync(kFull, v, 1); // FOUND shuffle_in_branches
  p.out[my_index() ^ 1] = v;
}
PLANT(shuffle_in_branches, 2, 128, 0)

template <bool Bug>
__global__ void masks_differ(Probe p) {
  const uint32_t v = p.in[my_index()];
  const unsigned mask = Bug && threadIdx.x % 32 < 8 ? 0xFFFFu : kFull;
  p.out[my_index() ^ 1] = __shfl_xor_sync(mask, v, 1); // FOUND masks_differ
}
PLANT(masks_differ, 2, 128, 0)

template <bool Bug>
__global__ void mask_without_caller(Probe p) {
  const uint32_t v = p.in[my_index()];
  const unsigned mask = Bug && threadIdx.x == 40 ? 0xFFu : kFull;
  p.out[my_index() ^ 1] = __shfl_xor_sync(mask, v, 1); // FOUND mask_without_caller
}
PLANT(mask_without_caller, 2, 128, 0)

template <bool Bug>
__global__ void source_outside_mask(Probe p) {
  const uint32_t v = p.in[my_index()];
  uint32_t swapped = 0;
  if (threadIdx.x % 32 < 16) swapped = __shfl_xor_sync(0xFFFFu, v, Bug ? 16 : 1); // FOUND source_outside_mask
  if (threadIdx.x % 32 >= 16) swapped = __shfl_xor_sync(0xFFFF0000u, v, 1);
  p.out[my_index() ^ 1] = swapped;
}
PLANT(source_outside_mask, 2, 128, 0)

template <bool Bug>
__global__ void different_collectives(Probe p) {
  uint32_t v = p.in[my_index()];
  if (Bug && threadIdx.x % 32 >= 16)
    v = __ballot_sync(kFull, v != 0); // FOUND different_collectives
  else
    v = __shfl_xor_sync(kFull, v, 1); // FOUND different_collectives
  p.out[my_index() ^ 1] = v;
}
PLANT(different_collectives, 2, 128, 0)

template <bool Bug>
__global__ void exit_before_shuffle(Probe p) {
  const int64_t i = my_index();
  if (Bug && i >= 250) return;
  const uint32_t v = __shfl_xor_sync(kFull, p.in[i], 1); // FOUND exit_before_shuffle
  p.out[i ^ 1] = v;
}
PLANT(exit_before_shuffle, 2, 128, 0)

template <bool Bug>
__global__ void exit_before_barrier(Probe p) {
  const int64_t i = my_index();
  if (Bug && i >= 224) return; // a whole warp
  p.out[i] = p.in[i];
  __syncthreads(); // FOUND exit_before_barrier
}
PLANT(exit_before_barrier, 2, 128, 0)

template <bool Bug>
__global__ void barriers_in_branches(Probe p) {
  p.out[my_index()] = p.in[my_index()];
  if (Bug && threadIdx.x < 32)
    __syncthreads(); // FOUND barriers_in_branches
  else
    __syncthreads(); // FOUND barriers_in_branches
}
PLANT(barriers_in_branches, 2, 128, 0)

template <bool Bug>
__global__ void barrier_for_some(Probe p) {
  p.out[my_index()] = p.in[my_index()];
  if (!Bug || threadIdx.x < 32) __syncthreads(); // FOUND barrier_for_some
}
PLANT(barrier_for_some, 2, 128, 0)

template <bool Bug>
__global__ void barrier_against_warp(Probe p) { // some lanes wait for the block, the others for them
  p.out[my_index()] = p.in[my_index()];
  if (Bug && threadIdx.x % 32 < 16)
    __syncthreads(); // FOUND barrier_against_warp
  else
    __syncwarp(); // FOUND barrier_against_warp
}
PLANT(barrier_against_warp, 2, 128, 0)

template <bool Bug>
__global__ void starved_named_barrier(Probe p) {
  p.out[my_index()] = p.in[my_index()];
  if (threadIdx.x < 64) ptx::named_barrier_sync(1, Bug ? 96 : 64); // FOUND starved_named_barrier
}
PLANT(starved_named_barrier, 2, 128, 0)

template <bool Bug>
__global__ void named_barrier_counts(Probe p) {
  p.out[my_index()] = p.in[my_index()];
  const int threads = Bug && threadIdx.x < 32 ? 64 : 128;
  ptx::named_barrier_sync(2, threads); // FOUND named_barrier_counts
}
PLANT(named_barrier_counts, 2, 128, 0)

template <bool Bug>
__global__ void named_barrier_number(Probe p) {
  p.out[my_index()] = p.in[my_index()];
  ptx::named_barrier_sync(Bug ? 16 : 15, 128); // FOUND named_barrier_number
}
PLANT(named_barrier_number, 2, 128, 0)

template <bool Bug>
__global__ void multiply_in_half_warp(Probe p) {
  p.out[my_index()] = p.in[my_index()];
  const uint32_t a[4] = {}, b[2] = {};
  float d[4] = {};
  if (Bug && threadIdx.x % 32 >= 16) return;
  ptx::mma_bf16(d, a, b, d); // FOUND multiply_in_half_warp
}
PLANT(multiply_in_half_warp, 2, 128, 0)

template <bool Bug>
__global__ void misaligned_matrix_row(Probe p) {
  AGOQ_SHARED(uint4, rows, [33]);
  if (threadIdx.x == 0) rows[32] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < 32) rows[threadIdx.x] = make_uint4(threadIdx.x, 0, 0, 0);
  __syncthreads();
  p.out[my_index()] = p.in[my_index()];
  uint32_t r[4];
  const char* row = reinterpret_cast<const char*>(&rows[threadIdx.x % 32]);
  ptx::ldmatrix<4>(r, Bug ? row + 8 : row); // FOUND misaligned_matrix_row
}
PLANT(misaligned_matrix_row, 2, 128, 0)

} // namespace
