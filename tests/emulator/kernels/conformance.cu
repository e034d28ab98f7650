// Sound kernels whose results the tests know by other means: what each primitive computes.
#include "plant.h"

namespace {

// out [6, 32]: shuffles of one warp's words.
__global__ void shuffles(Probe p) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t v = p.in[lane];
  p.out[0 * 32 + lane] = __shfl_sync(kFull, v, 5);
  p.out[1 * 32 + lane] = __shfl_sync(kFull, v, lane + 1, 8);
  p.out[2 * 32 + lane] = __shfl_xor_sync(kFull, v, 3);
  p.out[3 * 32 + lane] = __shfl_xor_sync(kFull, v, 9, 8); // the partner lies in another segment
  p.out[4 * 32 + lane] = __shfl_up_sync(kFull, v, 2, 16);
  const double wide = __shfl_down_sync(kFull, static_cast<double>(v), 3, 8);
  p.out[5 * 32 + lane] = static_cast<uint32_t>(wide);
}
SOUND(shuffles, dim3(1), dim3(32), 0)

// out [14, 32]: votes, matches and reductions of one warp's words.
__global__ void votes(Probe p) {
  const unsigned lane = threadIdx.x;
  const uint32_t v = p.in[lane];
  const int s = static_cast<int>(v);
  uint32_t* out = p.out + lane;
  out[0 * 32] = __ballot_sync(kFull, v & 1);
  out[1 * 32] = static_cast<uint32_t>(__any_sync(kFull, lane == 31));
  out[2 * 32] = static_cast<uint32_t>(__all_sync(kFull, lane < 31));
  out[3 * 32] = __match_any_sync(kFull, v % 4);
  int same = 0;
  const uint32_t all = __match_all_sync(kFull, v / 4 * 0 + 7, &same);
  out[4 * 32] = all + static_cast<uint32_t>(same);
  out[5 * 32] = __match_all_sync(kFull, v, &same) + static_cast<uint32_t>(same);
  out[6 * 32] = __reduce_add_sync(kFull, v);
  out[7 * 32] = __reduce_min_sync(kFull, v);
  out[8 * 32] = __reduce_max_sync(kFull, v);
  out[9 * 32] = static_cast<uint32_t>(__reduce_min_sync(kFull, s));
  out[10 * 32] = static_cast<uint32_t>(__reduce_max_sync(kFull, s));
  out[11 * 32] = __reduce_and_sync(kFull, v | 0xFFu);
  out[12 * 32] = __reduce_or_sync(kFull, v);
  out[13 * 32] = __reduce_xor_sync(kFull, v);
}
SOUND(votes, dim3(1), dim3(32), 0)

// 2 x 2 blocks of 16 x 8 x 4 threads. out [n]: a thread writes its own index at its own place; scratch [0..15]: how
// often each low nibble occurs in the input; scratch [16..27]: three votes of every block.
__global__ void blocks_and_votes(Probe p) {
  AGOQ_SHARED(uint32_t, bins, [16]);
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  const unsigned i = block * 512 + thread;
  if (thread < 16) bins[thread] = 0;
  __syncthreads();
  atomicAdd(&bins[p.in[i] & 15], 1u);
  p.out[i] = i;
  const int count = __syncthreads_count(p.in[i] & 1);
  const int all = __syncthreads_and(p.in[i] != 0);
  const int any = __syncthreads_or(p.in[i] == 0);
  if (thread < 16) atomicAdd(&p.scratch[thread], bins[thread]);
  if (thread == 0) {
    p.scratch[16 + 3 * block] = static_cast<uint32_t>(count);
    p.scratch[17 + 3 * block] = static_cast<uint32_t>(all != 0);
    p.scratch[18 + 3 * block] = static_cast<uint32_t>(any != 0);
  }
}
SOUND(blocks_and_votes, dim3(2, 2), dim3(16, 8, 4), 0)

// Atomics whose final values do not depend on the order. Copies its input.
__global__ void atomics(Probe p) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t v = p.in[i];
  p.out[i] = v;
  atomicAdd(&p.scratch[0], v);
  atomicAdd(reinterpret_cast<int*>(&p.scratch[1]), -1);
  atomicMax(&p.scratch[2], v);
  atomicMin(reinterpret_cast<int*>(&p.scratch[3]), static_cast<int>(v));
  atomicOr(&p.scratch[4], v);
  atomicXor(&p.scratch[5], v);
  atomicInc(&p.scratch[6], 9u);
  for (uint32_t seen = p.scratch[63], old;; seen = old) { // a product by compare-and-swap; nobody else touches word 63
    old = atomicCAS(&p.scratch[7], seen, seen + 2u);
    if (old == seen) break;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(&p.scratch[8]), static_cast<unsigned long long>(v) << 8);
  atomicAdd(reinterpret_cast<float*>(&p.scratch[10]), 0.5f);
  atomicExch(&p.scratch[11], 77u);
}
SOUND(atomics, dim3(2), dim3(128), 0)

// in: 32 rows of 16 bytes. out [11, 32]: the registers of ldmatrix .x4, .x4.trans, .x2 and .x1.
__global__ void load_matrices(Probe p) {
  AGOQ_SHARED(uint4, rows, [32]);
  const unsigned lane = threadIdx.x;
  rows[lane] = ptx::load16(p.in + lane * 4);
  __syncwarp();
  uint32_t four[4], transposed[4], two[2], one[1];
  ptx::ldmatrix<4>(four, &rows[lane]);
  ptx::ldmatrix<4, true>(transposed, &rows[lane]);
  ptx::ldmatrix<2>(two, &rows[lane]);
  ptx::ldmatrix<1>(one, &rows[lane]);
  for (int r = 0; r < 4; ++r) {
    p.out[r * 32 + lane] = four[r];
    p.out[(4 + r) * 32 + lane] = transposed[r];
  }
  p.out[8 * 32 + lane] = two[0];
  p.out[9 * 32 + lane] = two[1];
  p.out[10 * 32 + lane] = one[0];
}
SOUND(load_matrices, dim3(1), dim3(32), 0)

// in: fragments a [32, 4], b [32, 2], c [32, 4]. out: d [32, 4], then what is left of the n words as zeros.
__global__ void multiply(Probe p) {
  const unsigned lane = threadIdx.x;
  uint32_t a[4], b[2];
  float c[4];
  for (int r = 0; r < 4; ++r) a[r] = p.in[lane * 4 + r];
  for (int r = 0; r < 2; ++r) b[r] = p.in[128 + lane * 2 + r];
  for (int r = 0; r < 4; ++r) c[r] = __uint_as_float(p.in[192 + lane * 4 + r]);
  ptx::mma_bf16(c, a, b, c);
  for (int r = 0; r < 4; ++r) p.out[lane * 4 + r] = __float_as_uint(c[r]);
  for (int64_t i = 128 + lane; i < p.n; i += 32) p.out[i] = 0;
}
SOUND(multiply, dim3(1), dim3(32), 0)

// Two warps fill a tile for two others, four times: full and empty are named barriers, one side of each only arrives.
__global__ void named_pipeline(Probe p) {
  AGOQ_SHARED(uint32_t, tile, [64]);
  constexpr int full = 1, empty = 2;
  const unsigned i = threadIdx.x % 64;
  for (int step = 0; step < 4; ++step) {
    if (threadIdx.x < 64) {
      if (step > 0) ptx::named_barrier_sync(empty, 128);
      tile[i] = p.in[step * 64 + i];
      ptx::named_barrier_arrive(full, 128);
    } else {
      ptx::named_barrier_sync(full, 128);
      p.out[step * 64 + i] = tile[63 - i];
      if (step < 3) ptx::named_barrier_arrive(empty, 128);
    }
  }
}
SOUND(named_pipeline, dim3(1), dim3(128), 0)

// in: bf16 a [32, 128], then b [32, 128]. out: float a b^T [32, 32], then zeros. Four warps, one 16 x 16 tile each; k
// in steps of 32 through two buffers that cp.async fills.
__global__ void tile_product(Probe p) {
  constexpr int kRow = 40; // elements: 32 and padding, so that ldmatrix meets no bank conflicts
  AGOQ_DYNAMIC_SHARED(bytes);
  uint16_t* const tiles = reinterpret_cast<uint16_t*>(bytes); // [2 buffers][a, b][32][kRow]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int row0 = warp / 2 * 16, col0 = warp % 2 * 16;
  const auto tile = [&](int buffer, int operand, int row) {
    return tiles + ((buffer * 2 + operand) * 32 + row) * kRow;
  };
  const auto fetch = [&](int buffer, int step) {
    for (int piece = thread; piece < 256; piece += 128) {
      const int operand = piece / 128, row = piece / 4 % 32, part = piece % 4;
      ptx::cp_async16(tile(buffer, operand, row) + part * 8,
                      p.in + ((operand * 32 + row) * 128 + step * 32 + part * 8) / 2);
    }
    ptx::cp_async_commit();
  };
  float sums[2][4] = {};
  fetch(0, 0);
  for (int step = 0; step < 4; ++step) {
    if (step < 3) fetch((step + 1) % 2, step + 1);
    if (step < 3)
      ptx::cp_async_wait<1>();
    else
      ptx::cp_async_wait<0>();
    __syncthreads();
    for (int k = 0; k < 32; k += 16) {
      uint32_t a[4], b[4];
      ptx::ldmatrix<4>(a, tile(step % 2, 0, row0 + lane % 16) + k + lane / 16 * 8);
      ptx::ldmatrix<4>(b, tile(step % 2, 1, col0 + lane % 8 + lane / 16 * 8) + k + lane / 8 % 2 * 8);
      for (int half = 0; half < 2; ++half) {
        const uint32_t part[2] = {b[half * 2], b[half * 2 + 1]};
        ptx::mma_bf16(sums[half], a, part, sums[half]);
      }
    }
    __syncthreads(); // the next fetch overwrites the other buffer
  }
  for (int half = 0; half < 2; ++half)
    for (int r = 0; r < 4; ++r) {
      const int row = row0 + lane / 4 + r / 2 * 8, col = col0 + half * 8 + lane % 4 * 2 + r % 2;
      p.out[row * 32 + col] = __float_as_uint(sums[half][r]);
    }
  for (int64_t i = 1024 + thread; i < p.n; i += 128) p.out[i] = 0;
}
SOUND(tile_product, dim3(1), dim3(128), 2 * 2 * 32 * 40 * 2)

// out [n]: in which order the threads came.
__global__ void tickets(Probe p) { p.out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(p.scratch, 1u); }
SOUND(tickets, dim3(2), dim3(64), 0)

} // namespace
