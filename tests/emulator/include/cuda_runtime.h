// What the emulator offers in place of CUDA's header of this name: the part of CUDA C++ that src/cuda uses.
//
// A name that is missing here does not compile, which is how a kernel finds out that it left the few primitives of
// src/cuda/launch.cuh and src/cuda/ptx.cuh. docs/testing-cuda.md tells how to add one.
#pragma once

#include "emulator/atomics.h"
#include "emulator/device.h"
#include "emulator/launch.h"
#include "emulator/types.h"
#include "emulator/warp.h"
