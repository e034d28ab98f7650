// The fused CPU kernels compiled for the baseline instruction set.
#define AGOQ_ISA_NAMESPACE baseline
#include "fused_impl.h"
