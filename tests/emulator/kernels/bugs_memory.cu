// Planted bugs of memory: bounds, initialisation, inputs and outputs, alignment, pointers. Two blocks of 128 threads,
// 256 words. Mended, each kernel copies its input.
#include "plant.h"

namespace {

template <bool Bug>
__global__ void read_past_end(Probe p) {
  const int64_t i = my_index() + 1;            // a tail test that lets one element too many through
  if (i < p.n + Bug) p.out[i % p.n] = p.in[i]; // FOUND read_past_end
  if (i == p.n && !Bug) p.out[0] = p.in[0];
}
PLANT(read_past_end, 2, 128, 0)

template <bool Bug>
__global__ void write_past_end(Probe p) {
  const int64_t i = my_index();
  p.out[i] = p.in[i];
  if (Bug && i + 1 == p.n) p.out[i + 1] = 0; // FOUND write_past_end
}
PLANT(write_past_end, 2, 128, 0)

template <bool Bug>
__global__ void write_between_rows(Probe p) { // words 100 to 103 of the output lie between two rows of a view
  const int64_t i = my_index();
  if (Bug || i < 100 || i >= 104) p.out[i] = p.in[i]; // FOUND write_between_rows
}
PLANT(write_between_rows, 2, 128, 0)

template <bool Bug>
__global__ void shared_past_end(Probe p) {
  AGOQ_SHARED(uint32_t, tile, [128]);
  const int64_t i = my_index();
  const unsigned at = Bug ? threadIdx.x + 1 : threadIdx.x;
  tile[at] = p.in[i]; // FOUND shared_past_end
  __syncthreads();
  p.out[i] = tile[at];
}
PLANT(shared_past_end, 2, 128, 0)

template <bool Bug>
__global__ void dynamic_past_end(Probe p) {
  AGOQ_DYNAMIC_SHARED(bytes);
  uint32_t* const tile = reinterpret_cast<uint32_t*>(bytes);
  const int64_t i = my_index();
  tile[threadIdx.x] = p.in[i];
  __syncthreads();
  p.out[i] = tile[Bug && threadIdx.x == 0 ? 128 : threadIdx.x]; // FOUND dynamic_past_end
}
PLANT(dynamic_past_end, 2, 128, 512)

template <bool Bug>
__global__ void dynamic_not_asked_for(Probe p) { // the launch gives it none; naming it alone is fine
  AGOQ_DYNAMIC_SHARED(bytes);
  const int64_t i = my_index();
  if (Bug && i == 0) bytes[0] = 1; // FOUND dynamic_not_asked_for
  p.out[i] = p.in[i];
}
PLANT(dynamic_not_asked_for, 2, 128, 0)

template <bool Bug>
__global__ void uninitialised_global(Probe p) {
  const int64_t i = my_index();
  if (Bug)
    p.out[i] += p.in[i]; // FOUND uninitialised_global
  else
    p.out[i] = p.in[i];
}
PLANT(uninitialised_global, 2, 128, 0)

template <bool Bug>
__global__ void uninitialised_shared(Probe p) {
  AGOQ_SHARED(uint32_t, tile, [128]);
  const int64_t i = my_index();
  if (!Bug || threadIdx.x != 17) tile[threadIdx.x] = p.in[i];
  __syncthreads();
  p.out[i] = tile[threadIdx.x]; // FOUND uninitialised_shared
}
PLANT(uninitialised_shared, 2, 128, 0)

template <bool Bug>
__global__ void write_to_input(Probe p) {
  const int64_t i = my_index();
  p.out[i] = p.in[i];
  if (Bug && i == 5) const_cast<uint32_t*>(p.in)[i] = 0; // FOUND write_to_input
}
PLANT(write_to_input, 2, 128, 0)

template <bool Bug>
__global__ void unwritten_output(Probe p) {
  const int64_t i = my_index();
  if (!Bug || i != 7) p.out[i] = p.in[i];
}
PLANT(unwritten_output, 2, 128, 0)

template <bool Bug>
__global__ void misaligned_load(Probe p) {
  const int64_t i = my_index() * 4;
  if (i >= p.n) return;
  const int64_t from = Bug && i > 0 ? i - 1 : i;
  ptx::store16(p.out + i, ptx::load16(p.in + from)); // FOUND misaligned_load
}
PLANT(misaligned_load, 2, 128, 0)

template <bool Bug>
__global__ void misaligned_store(Probe p) {
  const int64_t i = my_index() * 2;
  if (i >= p.n) return;
  const int64_t to = Bug && i > 0 ? i - 1 : i;
  ptx::store8(p.out + to, ptx::load8(p.in + i)); // FOUND misaligned_store
}
PLANT(misaligned_store, 2, 128, 0)

template <bool Bug>
__global__ void misaligned_struct(Probe p) { // without the wrapper
  const int64_t i = my_index() * 4;
  if (i >= p.n) return;
  const int64_t from = Bug && i > 0 ? i - 1 : i;
  *reinterpret_cast<uint4*>(p.out + i) = *reinterpret_cast<const uint4*>(p.in + from); // FOUND misaligned_struct
}
PLANT(misaligned_struct, 2, 128, 0)

template <bool Bug>
__global__ void misaligned_word(Probe p) {
  const int64_t i = my_index();
  const char* from = reinterpret_cast<const char*>(p.in + i);
  p.out[i] = *reinterpret_cast<const uint32_t*>(Bug && i == 9 ? from + 1 : from); // FOUND misaligned_word
}
PLANT(misaligned_word, 2, 128, 0)

template <bool Bug>
__global__ void shared_as_global(Probe p) { // the wrappers read global memory only
  AGOQ_SHARED(uint4, tile, [64]);
  tile[threadIdx.x] = ptx::load16(p.in + threadIdx.x * 4);
  const uint4 v = Bug ? ptx::load16(&tile[threadIdx.x]) : tile[threadIdx.x]; // FOUND shared_as_global
  ptx::store16(p.out + threadIdx.x * 4, v);
}
PLANT(shared_as_global, 1, 64, 0)

template <bool Bug>
__global__ void wild_pointer(Probe p) {
  const int64_t i = my_index();
  const uint32_t* from = Bug && i == 3 ? reinterpret_cast<const uint32_t*>(uintptr_t{4096}) : p.in + i;
  p.out[i] = *from; // FOUND wild_pointer
}
PLANT(wild_pointer, 2, 128, 0)

template <bool Bug>
__global__ void other_threads_stack(Probe p) {
  AGOQ_SHARED(const uint32_t*, addresses, [128]);
  const int64_t i = my_index();
  const volatile uint32_t mine = p.in[i];
  addresses[threadIdx.x] = const_cast<const uint32_t*>(&mine);
  __syncthreads();
  p.out[i] = *addresses[Bug ? threadIdx.x ^ 1 : threadIdx.x]; // FOUND other_threads_stack
  __syncthreads();
}
PLANT(other_threads_stack, 2, 128, 0)

template <bool Bug>
__global__ void endless_loop(Probe p) {
  const int64_t i = my_index();
  p.out[i] = p.in[i];
  volatile uint32_t* const flag = p.scratch;
  while (Bug && *flag == 0) continue; // FOUND endless_loop
}
PLANT(endless_loop, 2, 128, 0)

template <bool Bug>
__global__ void too_many_threads(Probe p) {
  const int64_t i = my_index();
  if (i < p.n) p.out[i] = p.in[i];
}
static int launch_too_many_threads(const Probe& p, void* stream) {
  return agoq::cuda::launch(too_many_threads<true>, {dim3(1), dim3(1056), 0, stream}, p);
}
EMULATOR_KERNEL(too_many_threads, Probe, launch_too_many_threads)

#if !defined(__CUDACC__) // there it does not even compile
template <bool Bug>
__global__ void too_much_shared(Probe p) {
  AGOQ_SHARED(uint32_t, tile, [Bug ? 16384 : 128]);
  const int64_t i = my_index();
  tile[threadIdx.x] = p.in[i];
  p.out[i] = tile[threadIdx.x];
}
PLANT(too_much_shared, 2, 128, 0)
#endif

} // namespace
