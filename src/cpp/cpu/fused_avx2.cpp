// The fused CPU kernels compiled for the avx2 instruction set.
#define AGOQ_ISA_NAMESPACE avx2
#include "fused_impl.h"
