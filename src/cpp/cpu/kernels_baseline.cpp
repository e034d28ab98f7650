// The CPU kernels compiled for the baseline instruction set.
#define AGOQ_ISA_NAMESPACE baseline
#include "kernels_impl.h"
