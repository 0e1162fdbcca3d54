#include "engine/blake2b.h"

#include <algorithm>
#include <cstring>

namespace regatta::engine {
namespace {

constexpr size_t kBlock = 128;  // bytes that are mixed in at a time
constexpr uint64_t kInit[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                               0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                               0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint8_t kSigma[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
// The four numbers of each mixing step: columns, then diagonals.
constexpr uint8_t kLanes[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                                  {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};

uint64_t rotated(uint64_t x, int bits) { return x >> bits | x << (64 - bits); }

// Words are little-endian, as on every machine that this runs on.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

void mix_block(uint64_t* state, const uint8_t* block, uint64_t num_bytes, bool is_last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, kBlock);
  for (int i = 0; i < 8; ++i) v[i] = state[i], v[i + 8] = kInit[i];
  v[12] ^= num_bytes;  // of less than 2^64
  if (is_last) v[14] = ~v[14];
  for (int round = 0; round < 12; ++round) {
    const uint8_t* sigma = kSigma[round % 10];
    for (int i = 0; i < 8; ++i) {
      uint64_t &a = v[kLanes[i][0]], &b = v[kLanes[i][1]], &c = v[kLanes[i][2]],
               &d = v[kLanes[i][3]];
      a += b + m[sigma[2 * i]];
      d = rotated(d ^ a, 32);
      c += d;
      b = rotated(b ^ c, 24);
      a += b + m[sigma[2 * i + 1]];
      d = rotated(d ^ a, 16);
      c += d;
      b = rotated(b ^ c, 63);
    }
  }
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

Digest blake2b(const void* data, size_t size) {
  Digest digest;
  uint64_t state[8];
  std::memcpy(state, kInit, sizeof state);
  state[0] ^= 0x01010000 ^ digest.size();
  const auto* bytes = static_cast<const uint8_t*>(data);
  size_t done = 0;
  for (; size - done > kBlock; done += kBlock) {
    mix_block(state, bytes + done, done + kBlock, false);
  }
  uint8_t last[kBlock] = {};
  if (size > done) std::memcpy(last, bytes + done, size - done);
  mix_block(state, last, size, true);
  std::memcpy(digest.data(), state, digest.size());
  return digest;
}

}  // namespace regatta::engine
