"""A CUDA kernel of one's own over the package's headers: squares, encoded as int8 by the package's codec.

Compiles without a GPU; runs where there is one.
"""

import torch
from common import arguments

from agoq_ext import jit

SOURCE = """
#include "agoq/core/codec.h"
extern "C" __global__ void squares(const float* x, unsigned char* codes, float scale, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) codes[i] = static_cast<unsigned char>(agoq::encode_nearest<agoq::Format::int8>(x[i] * x[i] / scale));
}
"""

arguments()
for architecture in ("sm_80", "sm_90", "sm_100"):
    print(f"{architecture}: {len(jit.compile(SOURCE, architecture)):,} bytes of machine code")
if torch.cuda.is_available():
    import cupy

    x = torch.rand(1 << 20, device="cuda")
    codes = torch.empty(x.shape, dtype=torch.uint8, device="cuda")
    arrays = (cupy.from_dlpack(x), cupy.from_dlpack(codes), cupy.float32(1 / 127), x.numel())
    jit.kernel(SOURCE, "squares")((x.numel() // 256,), (256,), arrays)
    print(f"largest code {codes.max().item()}")
