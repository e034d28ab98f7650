// Stochastic rounding of a group: the uniforms of its elements.

struct Randoms {
  alignas(64) float storage[kMaxGroup + 4 * kCounters];
  int skip = 0;

  const float* at(int block) const { return storage + skip + block * kBlock; }

  // Uniforms of the elements first, first + 1, ...: the counter advances every fourth element.
  void fill(uint64_t seed, uint64_t first, int count) {
    skip = static_cast<int>(first % 4);
    for (int i = 0; i < skip + count; i += 4 * kCounters)
      fill_uniforms(seed, first / 4 + static_cast<uint64_t>(i) / 4, storage + i);
  }
};
