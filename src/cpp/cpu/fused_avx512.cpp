// The fused CPU kernels compiled for the avx512 instruction set.
#define AGOQ_ISA_NAMESPACE avx512
#include "fused_impl.h"
