// Instruction sets: what was compiled in, what this machine runs, and the kernel table of each.
#include "kernels.h"

namespace agoq::cpu {

// Each defined in its own translation unit, compiled for that instruction set.
namespace baseline {
extern const KernelTable kTable;
}
#if defined(AGOQ_HAVE_AVX2)
namespace avx2 {
extern const KernelTable kTable;
}
#endif
#if defined(AGOQ_HAVE_AVX512)
namespace avx512 {
extern const KernelTable kTable;
}
#endif

const char* isa_name(Isa isa) {
  constexpr const char* names[kNumIsas] = {"baseline", "avx2", "avx512"};
  return names[static_cast<int>(isa)];
}

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::baseline: return true;
    case Isa::avx2:
#if defined(AGOQ_HAVE_AVX2)
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
      return false;
#endif
    case Isa::avx512:
#if defined(AGOQ_HAVE_AVX512)
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && isa_available(Isa::avx2);
#else
      return false;
#endif
  }
  return false;
}

Isa best_isa() {
  static const Isa best = isa_available(Isa::avx512) ? Isa::avx512
                          : isa_available(Isa::avx2) ? Isa::avx2
                                                     : Isa::baseline;
  return best;
}

const KernelTable& kernels(Isa isa) {
#if defined(AGOQ_HAVE_AVX512)
  if (isa == Isa::avx512) return avx512::kTable;
#endif
#if defined(AGOQ_HAVE_AVX2)
  if (isa == Isa::avx2) return avx2::kTable;
#endif
  (void)isa;
  return baseline::kTable;
}

double lane_sum(const double* values, int64_t count) {
  double lanes[kNormLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i % kNormLanes] += values[i];
  for (int half = kNormLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

} // namespace agoq::cpu
