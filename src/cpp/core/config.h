// Qualifiers, fixed-width types and the named FP32 operations on which every codec is built.
//
// The core headers compile as host C++20, under nvcc and under NVRTC; they include no torch, Python or CUDA runtime.
// Bits must not depend on the compiler, so arithmetic whose rounding matters goes through mul_rn, add_rn, sub_rn and
// div_rn: one IEEE round-to-nearest-even FP32 operation each, never contracted into an fma.
// (Host code is compiled with -ffp-contract=off and without fast math.)
#pragma once

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define AGOQ_HD __host__ __device__ __forceinline__
#else
// Always inlined, so that a translation unit compiled for a wider instruction set never lends its copy to another.
#define AGOQ_HD inline __attribute__((always_inline))
#endif

namespace agoq {

#if defined(__CUDA_ARCH__)
AGOQ_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
AGOQ_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
AGOQ_HD float sub_rn(float a, float b) { return __fsub_rn(a, b); }
AGOQ_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
AGOQ_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
AGOQ_HD constexpr float mul_rn(float a, float b) { return a * b; }
AGOQ_HD constexpr float add_rn(float a, float b) { return a + b; }
AGOQ_HD constexpr float sub_rn(float a, float b) { return a - b; }
AGOQ_HD constexpr float div_rn(float a, float b) { return a / b; }
AGOQ_HD float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

AGOQ_HD constexpr uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
AGOQ_HD constexpr float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }

} // namespace agoq
