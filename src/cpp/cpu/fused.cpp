// The table of fused kernels of each instruction set.
#include "fused.h"

namespace agoq::cpu {

// Each defined in its own translation unit, compiled for that instruction set.
namespace baseline {
extern const FusedTable kFusedTable;
}
#if defined(AGOQ_HAVE_AVX2)
namespace avx2 {
extern const FusedTable kFusedTable;
}
#endif
#if defined(AGOQ_HAVE_AVX512)
namespace avx512 {
extern const FusedTable kFusedTable;
}
#endif

const FusedTable& fused_kernels(Isa isa) {
#if defined(AGOQ_HAVE_AVX512)
  if (isa == Isa::avx512) return avx512::kFusedTable;
#endif
#if defined(AGOQ_HAVE_AVX2)
  if (isa == Isa::avx2) return avx2::kFusedTable;
#endif
  (void)isa;
  return baseline::kFusedTable;
}

} // namespace agoq::cpu
