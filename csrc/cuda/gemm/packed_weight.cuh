// Where pack_weight() puts a code, and how codes become bf16 or fp16 operands.
//
// A unit is 16 rows by 128 columns: 8 steps (16 columns each) of a tensor-core instruction with the
// weights on its left, mma m16n8k16 or one warp's part of wgmma. A row of units is contiguous. Lane
// t of a warp owns, of each step, the 8 values of the instruction's left operand: registers a[0..3]
// of two values, at rows r, r + 8, r, r + 8 (r = t / 4) and columns c, c, c + 8, c + 8
// (c = 2 * (t % 4)).
//   8 bits  [4][32 lanes][16 bytes]: 16 bytes are two steps; word 2s + h of them holds a[2h] in
//           bytes 0 and 2 and a[2h + 1] in bytes 1 and 3
//   4 bits  [2][32 lanes][16 bytes]: 16 bytes are four steps, a word each; a[i] in bits 4i .. 4i+3
//           and 16 + 4i ..
// Where groups of columns have scales, [groups][8][2] words of rows r and r + 8 follow: scale, and
// above it the zero point (4 bits: magic + zero; e2m1: nothing).
//
// For 8-bit activations (kW4A8) a step is 32 columns (mma m16n8k32), of which lane t owns 16
// values: a[0..3] of four, at rows r, r + 8, r, r + 8 and columns c.., c.., c + 16.., c + 16..
// (c = 4 * (t % 4)).
//   4 bits  [2][32 lanes][16 bytes]: 16 bytes are two steps; word 2s + h of them holds a[2h] in the
//           low halves of its bytes and a[2h + 1] in the high ones
// Then words as above: a float whose last byte is 128 - zero instead.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/gemm/tiles.h"
#include "regatta/gemm.h"

namespace regatta::cuda {

__host__ __device__ constexpr int unit_bytes(GemmOperands packed, int group_size) {
  return code_bits(packed) * 256 +
         (packed == GemmOperands::kWeightInt8 ? 0 : kUnitColumns / group_size * kUnitRows * 4);
}

// Shared memory of launches that follow each other: a block fits beside one of the next launch,
// which so has its first weights early, but two of one launch should not lie on a multiprocessor
// while another has none. Products with a residual, every other one of a layer, take more than
// half; beside one of their blocks, there is room for one of the others alone.
constexpr int kResidualShared = 114 * 1024, kOtherShared = 112 * 1024;

inline int packed_shared_budget(const GemmParams& p) {
  return p.residual != nullptr ? kResidualShared : kOtherShared;
}

// What a launch that needs so many bytes asks for.
inline int packed_shared_bytes(const GemmParams& p, int bytes) {
  return p.residual != nullptr ? std::max(bytes, kResidualShared) : bytes;
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

// (word & mask) | magic in one instruction, which the compiler does not find for two constants.
__device__ __forceinline__ uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t magic) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(word), "r"(mask), "r"(magic));
  return r;
}

__device__ __forceinline__ uint32_t masked_xor(uint32_t word, uint32_t mask, uint32_t magic) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(word), "r"(mask), "r"(magic));
  return r;
}

// Bytes 0 and 2 of a word, signed, as a pair of T; exact.
template <class T>
__device__ __forceinline__ uint32_t pair_of_int8(uint32_t word) {
  constexpr uint32_t kMagic = CodeMagic<T>::kPair;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // Seven bits of mantissa: 128 + (code & 127), less 128 or, where the sign is set, 256.
    return subtract_pair<T>(masked_or(word, 0x007f007f, kMagic),
                            masked_or(word, 0x00800080, kMagic));
  } else {
    // 1024 + 128 + code, less 1152.
    return subtract_pair<T>(masked_xor(word, 0x00ff00ff, kMagic | 0x00800080), kMagic | 0x00800080);
  }
}

// Scales and zero points (of 4 bits with the magic) of rows r and r + 8, as pairs.
struct GroupScale {
  uint32_t scale[2], zero[2];
};

__device__ __forceinline__ GroupScale group_scale(uint2 words) {
  return {{__byte_perm(words.x, 0, 0x1010), __byte_perm(words.y, 0, 0x1010)},
          {__byte_perm(words.x, 0, 0x3232), __byte_perm(words.y, 0, 0x3232)}};
}

// The scale in a group's word.
template <class T>
__device__ __forceinline__ float low_value(uint32_t word) {
  return Traits<T>::to_float(bit_cast<T>(static_cast<uint16_t>(word)));
}

// a[0..3] of a step: codes less their zero points, exact.
template <class T>
__device__ __forceinline__ void operands_of_int4(uint32_t word, const uint32_t (&zero)[2],
                                                 uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t codes = masked_or(word >> (4 * i), 0x000f000f, CodeMagic<T>::kPair);
    a[i] = subtract_pair<T>(codes, zero[i % 2]);
  }
}

// a[0..3] of a step: codes plus a constant, for products that take it back from their sums: less
// to do than codes less zero points.
template <class T>
__device__ __forceinline__ void lifted_int4(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      a[i] = masked_or(word >> (4 * i), 0x000f000f, 0x43004300);  // 128
    } else {
      // 64: a larger constant costs sums their last bits.
      a[i] = masked_or(i == 0 ? word << 4 : word >> (4 * i - 4), 0x00f000f0, 0x54005400);
    }
  }
}

// The zero point in a group's word, plus lifted_int4's constant.
template <class T>
__device__ __forceinline__ float lifted_zero(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(word & 0xffff0000);
  return Traits<T>::to_float(bit_cast<T>(static_cast<uint16_t>(word >> 16))) -
         (CodeMagic<T>::kValue - 64.f);
}

// a[0..3] of a step: the values of e2m1 codes, exact. Sign, exponent and mantissa lie in them as in
// T, whose exponent's bias is larger.
template <class T>
__device__ __forceinline__ void operands_of_e2m1(uint32_t word, uint32_t (&a)[4]) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kShift = kIsBf16 ? 6 : 3;  // from the top of a pair's halves
  constexpr uint32_t kMagnitude = 0x70007000 >> kShift;
  constexpr uint32_t kBias = kIsBf16 ? 0x7e807e80 : 0x74007400;  // 2^126, 2^14
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t top = word << (12 - 4 * i);
    a[i] = multiply_pair<T>(masked_or(top >> kShift, kMagnitude, top & 0x80008000), kBias);
  }
}

template <class T>
constexpr uint32_t kOnePair = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80 : 0x3c003c00;

// a[0..3] of a step of 8-bit codes: words 2s and 2s + 1.
template <class T>
__device__ __forceinline__ void operands_of_int8(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
  a[0] = pair_of_int8<T>(low);
  a[1] = pair_of_int8<T>(low >> 8);
  a[2] = pair_of_int8<T>(high);
  a[3] = pair_of_int8<T>(high >> 8);
}

// a[0..3] of a step of kW4A8: codes less their zero points, as int8. Biases: 128 - zero of rows r
// and r + 8 in every byte, so that no byte borrows from the next.
__device__ __forceinline__ void operands_of_w4a8(uint32_t low, uint32_t high,
                                                 const uint32_t (&bias)[2], uint32_t (&a)[4]) {
  const uint32_t words[2] = {low, high};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = (((words[i / 2] >> (i % 2 * 4)) & 0x0f0f0f0f) + bias[i % 2]) ^ 0x80808080;
  }
}

// What a weight's operands are, and columns of a group.
template <GemmOperands kOperands, int kGroupSize>
struct PackedFormat {
  static constexpr GemmOperands kPacked = kOperands;
  static constexpr int kCodeBits = code_bits(kOperands);
  static constexpr bool kIsE2m1 = kOperands == GemmOperands::kWeightMxfp4;
  static constexpr bool kGroups = kOperands != GemmOperands::kWeightInt8;  // have scales
  static constexpr int kColumns = kGroupSize;
  // Bytes of a value of x.
  static constexpr int kTokenSize = kOperands == GemmOperands::kW4A8 ? 1 : 2;
  static constexpr int kUnitBytes = unit_bytes(kOperands, kGroupSize);
  static constexpr int kHalfBytes = kCodeBits * 128;  // codes of half a unit
  // Scales that these need; half a unit of kGroupSize 128 needs all.
  static constexpr int kHalfScaleBytes = kGroups ? kUnitRows * 4 * (kGroupSize == 32 ? 2 : 1) : 0;
};

// Calls run with the format of p's weight.
template <class Run>
Status dispatch_packed(const GemmParams& p, const Run& run) {
  using O = GemmOperands;
  switch (p.operands) {
    case O::kWeightInt8:
      return run(PackedFormat<O::kWeightInt8, 128>());
    case O::kWeightInt4:
      return p.group_size == 32   ? run(PackedFormat<O::kWeightInt4, 32>())
             : p.group_size == 64 ? run(PackedFormat<O::kWeightInt4, 64>())
                                  : run(PackedFormat<O::kWeightInt4, 128>());
    case O::kWeightInt8Groups:
      return run(PackedFormat<O::kWeightInt8Groups, 64>());
    case O::kWeightMxfp4:
      return run(PackedFormat<O::kWeightMxfp4, 32>());
    default:
      return p.group_size == 64 ? run(PackedFormat<O::kW4A8, 64>())
                                : run(PackedFormat<O::kW4A8, 128>());
  }
}

// A lane's codes of half a unit, four steps, as they lie there: asked for ahead of their use.
template <class T, class F>
struct PackedCodes {
  static constexpr int kScales = F::kColumns == 32 ? 2 : 1;
  uint4 quads[F::kCodeBits / 4];
  uint2 scales[kScales];  // of groups

  __device__ __forceinline__ void load(const char* unit, int half) {
    load(unit + half * F::kHalfBytes,
         unit + 2 * F::kHalfBytes + (F::kColumns < kUnitColumns ? half * F::kHalfScaleBytes : 0));
  }

  // The same of a half's codes and the words of its scales.
  __device__ __forceinline__ void load(const char* codes, const char* words) {
    load_quads(codes);
    load_scales(words);
  }

  // The second half of the unit that `first` holds the first one of, which may have its scales.
  __device__ __forceinline__ void load_second(const char* unit, const PackedCodes& first) {
    load_quads(unit + F::kHalfBytes);
    if constexpr (F::kColumns < kUnitColumns) {
      load_scales(unit + 2 * F::kHalfBytes + F::kHalfScaleBytes);
    } else if constexpr (F::kGroups) {
      scales[0] = first.scales[0];
    }
  }

  // Words of step j: 4 bits one, 8 bits two.
  __device__ __forceinline__ uint32_t word(int j, int i) const {
    const uint4& quad = quads[F::kCodeBits == 8 ? j / 2 : 0];
    const uint32_t words[4] = {quad.x, quad.y, quad.z, quad.w};
    return words[F::kCodeBits == 8 ? j % 2 * 2 + i : j];
  }

  // The left operands of step j; without kScaled, scales() are left to be applied to their sums.
  template <bool kScaled = true>
  __device__ __forceinline__ void convert(int j, uint32_t (&a)[4]) const {
    GroupScale group = {};
    if constexpr (F::kGroups) group = group_scale(scales[j * kScales / 4]);
    if constexpr (F::kCodeBits == 8) {
      operands_of_int8<T>(word(j, 0), word(j, 1), a);
    } else if constexpr (F::kIsE2m1) {
      operands_of_e2m1<T>(word(j, 0), a);
    } else {
      operands_of_int4<T>(word(j, 0), group.zero, a);
    }
    scale_operands<kScaled>(group, a);
  }

  // Of all four steps.
  template <bool kScaled = true>
  __device__ __forceinline__ void convert(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) convert<kScaled>(j, a[j]);
  }

  // Of the one group of the half, rows r and r + 8 of this lane.
  __device__ __forceinline__ float2 group_scales() const {
    static_assert(kScales == 1);
    return make_float2(low_value<T>(scales[0].x), low_value<T>(scales[0].y));
  }

 private:
  __device__ __forceinline__ void load_quads(const char* codes) {
#pragma unroll
    for (int q = 0; q < F::kCodeBits / 4; ++q) {
      quads[q] = reinterpret_cast<const uint4*>(codes)[q * kWarp + threadIdx.x % kWarp];
    }
  }

  __device__ __forceinline__ void load_scales(const char* words) {
    if constexpr (F::kGroups) {
#pragma unroll
      for (int g = 0; g < kScales; ++g) {
        scales[g] = reinterpret_cast<const uint2*>(words)[g * 8 + threadIdx.x % kWarp / 4];
      }
    }
  }

  template <bool kScaled>
  static __device__ __forceinline__ void scale_operands(const GroupScale& group, uint32_t (&a)[4]) {
    if constexpr (F::kGroups) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (F::kCodeBits == 8) a[i] = subtract_pair<T>(a[i], group.zero[i % 2]);
        if constexpr (kScaled) a[i] = multiply_pair<T>(a[i], group.scale[i % 2]);
      }
    }
  }
};

// The same of kW4A8: half a unit is two steps.
template <class F>
struct W4A8Codes {
  uint4 quad;
  uint2 words;

  __device__ __forceinline__ void load(const char* unit, int half) {
    const int lane = threadIdx.x % kWarp;
    quad = reinterpret_cast<const uint4*>(unit)[half * kWarp + lane];
    const int group = F::kColumns == 64 ? half : 0;
    words = reinterpret_cast<const uint2*>(unit + 1024)[group * 8 + lane / 4];
  }

  // The left operands of the steps; returns the scales of rows r and r + 8.
  __device__ __forceinline__ float2 convert(uint32_t (&a)[2][4]) const {
    const uint32_t bias[2] = {__byte_perm(words.x, 0, 0), __byte_perm(words.y, 0, 0)};
    operands_of_w4a8(quad.x, quad.y, bias, a[0]);
    operands_of_w4a8(quad.z, quad.w, bias, a[1]);
    return make_float2(__uint_as_float(words.x & ~0xffu), __uint_as_float(words.y & ~0xffu));
  }
};

}  // namespace regatta::cuda
