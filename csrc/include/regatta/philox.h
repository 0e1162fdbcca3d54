// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011): a random number is a pure function of a key and a counter, so that a token's
// draw does not depend on the batch, the thread or the device.
#pragma once

#include <cstdint>

namespace regatta {

struct PhiloxWords {
  uint32_t word[4];
};

constexpr PhiloxWords philox4x32(uint32_t key0, uint32_t key1, PhiloxWords counter) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9;  // golden ratio
    key1 += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

// A number in [0, 1) with 24 random bits: exact in float.
constexpr float philox_uniform(uint64_t seed, uint64_t offset) {
  const PhiloxWords counter = {
      {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), 0, 0}};
  const PhiloxWords words =
      philox4x32(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), counter);
  return static_cast<float>(words.word[0] >> 8) * (1.0f / 16777216.0f);
}

// Known answers of the authors' reference implementation (Random123, kat_vectors).
static_assert(philox4x32(0, 0, {{0, 0, 0, 0}}).word[0] == 0x6627e8d5 &&
              philox4x32(0, 0, {{0, 0, 0, 0}}).word[1] == 0xe169c58d &&
              philox4x32(0, 0, {{0, 0, 0, 0}}).word[2] == 0xbc57ac4c &&
              philox4x32(0, 0, {{0, 0, 0, 0}}).word[3] == 0x9b00dbd8);
static_assert(philox4x32(0xa4093822, 0x299f31d0, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}})
                  .word[0] == 0xd16cfe09);

}  // namespace regatta
