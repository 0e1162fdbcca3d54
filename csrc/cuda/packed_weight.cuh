// Where pack_weight() puts a code, and how codes become bf16 or fp16 operands.
//
// A unit is 64 rows by 128 columns: 8 steps of wgmma (16 columns each). Thread t of a warpgroup
// owns, of each step, the 8 values of the instruction's left operand: registers a[0..3] of two
// values, at rows r, r + 8, r, r + 8 (r = t / 32 * 16 + t % 32 / 4) and columns c, c, c + 8, c + 8
// (c = 2 * (t % 4)).
//   8 bits  [4][128 threads][16 bytes]: 16 bytes are two steps; word 2s + h of them holds a[2h] in
//           bytes 0 and 2 and a[2h + 1] in bytes 1 and 3
//   4 bits  [2][128 threads][16 bytes]: 16 bytes are four steps, a word each; a[i] in bits 4i ..
//   4i+3
//           and 16 + 4i ..; then [groups][64 rows] words: scale, and above it magic + zero
#pragma once

#include <type_traits>

#include "common.cuh"

namespace regatta::cuda {

constexpr int kUnitRows = 64;
constexpr int kUnitColumns = 128;

__host__ __device__ constexpr int unit_bytes(int bits, int group_size) {
  return bits == 8 ? 8192 : 4096 + kUnitColumns / group_size * kUnitRows * 4;
}

// A code of 4 or 8 bits in the mantissa of this number is the number plus the code.
template <class T>
struct CodeMagic;
template <>
struct CodeMagic<__nv_bfloat16> {
  static constexpr uint32_t kPair = 0x43004300;  // 128
  static constexpr float kValue = 128.f;
};
template <>
struct CodeMagic<__half> {
  static constexpr uint32_t kPair = 0x64006400;  // 1024
  static constexpr float kValue = 1024.f;
};

template <class T>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  using Pair = typename Traits<T>::Pair;
  return bit_cast<uint32_t>(__hsub2(bit_cast<Pair>(a), bit_cast<Pair>(b)));
}

template <class T>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  using Pair = typename Traits<T>::Pair;
  return bit_cast<uint32_t>(__hmul2(bit_cast<Pair>(a), bit_cast<Pair>(b)));
}

// Bytes 0 and 2 of a word, signed, as a pair of T; exact.
template <class T>
__device__ __forceinline__ uint32_t pair_of_int8(uint32_t word) {
  constexpr uint32_t kMagic = CodeMagic<T>::kPair;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // Seven bits of mantissa: 128 + (code & 127), less 128 or, where the sign is set, 256.
    return subtract_pair<T>((word & 0x007f007f) | kMagic, (word & 0x00800080) | kMagic);
  } else {
    // 1024 + 128 + code, less 1152.
    return subtract_pair<T>((word & 0x00ff00ff) ^ (kMagic | 0x00800080), kMagic | 0x00800080);
  }
}

// a[0..3] of a step. `scale` and `zero` (with the magic) are those of rows r and r + 8, as pairs.
template <class T>
__device__ __forceinline__ void operands_of_int4(uint32_t word, const uint32_t (&scale)[2],
                                                 const uint32_t (&zero)[2], uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t codes = ((word >> (4 * i)) & 0x000f000f) | CodeMagic<T>::kPair;
    a[i] = multiply_pair<T>(subtract_pair<T>(codes, zero[i % 2]), scale[i % 2]);
  }
}

}  // namespace regatta::cuda
