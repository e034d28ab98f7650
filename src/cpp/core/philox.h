// Philox4x32-10, the counter-based generator of stochastic rounding (Salmon et al., SC 2011).
#pragma once

#include "config.h"

namespace agoq {

struct PhiloxWords {
  uint32_t word[4];
};

// The four random words of counter (counter, 0) under `key`.
AGOQ_HD constexpr PhiloxWords philox(uint64_t key, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A uniform FP32 number in [0, 1) from the top 24 bits of a random word.
AGOQ_HD constexpr float uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f; // 2^-24
}

} // namespace agoq
