// Matrix instructions of a warp, with the fragment layouts of the PTX manual.
//
// Lane l of a fragment is in group g = l / 4, at position t = l % 4 of it. A 32-bit register holds two neighbouring
// 16-bit elements. Sums are formed in FP64 and rounded once; a tensor core truncates, so compare by tolerance.
#include "tensor_core.h"

#include <cstring>

#include "checker.h"
#include "memory.h"
#include "state.h"

namespace emulator {
namespace {

double bf16_value(uint32_t bits) { return __builtin_bit_cast(float, bits << 16); }
double element(uint32_t word, int half) { return bf16_value(half == 0 ? word & 0xFFFFu : word >> 16); }

} // namespace

void load_matrices(unsigned warp, WarpCall* const (&calls)[32]) {
  const auto call_of = [&](unsigned lane) -> LoadMatrixCall& {
    return *static_cast<LoadMatrixCall*>(calls[lane]->payload);
  };
  const int matrices = call_of(0).matrices;
  const bool transposed = call_of(0).transposed;
  for (int m = 0; m < matrices; ++m) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row) { // lane 8 m + row holds that row's address
      const auto lane = static_cast<unsigned>(m * 8 + row);
      const void* p = call_of(lane).row;
      const Site site = calls[lane]->site;
      if (!is_shared(offset_of(p)))
        fail("misuse", {nullptr, site, &threads[warp * 32 + lane]}, "",
             format("ldmatrix: lane %u's row is not in shared memory", lane));
      if (checking)
        check_access(threads[warp * 32 + lane], p, 16, Access::read, 16, {nullptr, site, &threads[warp * 32 + lane]});
      memcpy(matrix[row], p, 16);
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
      const unsigned g = lane / 4, t = lane % 4 * 2;
      const uint32_t low = transposed ? matrix[t][g] : matrix[g][t];
      const uint32_t high = transposed ? matrix[t + 1][g] : matrix[g][t + 1];
      call_of(lane).registers[m] = low | high << 16;
    }
  }
}

void multiply_matrices(WarpCall* const (&calls)[32]) {
  double a[16][16], b[16][8]; // [row][k], [k][column]
  for (int lane = 0; lane < 32; ++lane) {
    const auto& call = *static_cast<MultiplyCall*>(calls[lane]->payload);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][t + r / 2 * 8 + half] = element(call.a[r], half);
      for (int r = 0; r < 2; ++r) b[t + r * 8 + half][g] = element(call.b[r], half);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& call = *static_cast<MultiplyCall*>(calls[lane]->payload);
    const int g = lane / 4, t = lane % 4 * 2;
    float d[4];
    for (int r = 0; r < 4; ++r) {
      double sum = call.c[r];
      for (int k = 0; k < 16; ++k) sum += a[g + r / 2 * 8][k] * b[k][t + r % 2];
      d[r] = static_cast<float>(sum);
    }
    memcpy(call.d, d, sizeof d); // d and c may be the same registers
  }
}

} // namespace emulator
