// Cache rows as operands of mma.sync m16n8k16: which values of a head a lane of a fragment holds,
// and how codes become 16-bit values in registers. One struct per storage of a row.
//
// Products sum over columns of the head (logits) or over tokens (values), so any order of columns
// serves as long as queries, keys and results agree. Each struct picks the order in which ldmatrix
// delivers its rows: with g = lane / 4 and c = lane % 4, ldmatrix gives a lane bytes 4c..4c+3 of a
// 16-byte unit of row g, and transposed, elements g (16 bits) of rows 2c and 2c + 1.
//
//   kSteps            products of 16 columns per row; columns past D count for nothing
//   kUnits            16-byte units of a row
//   column(m, lane, e) the column of result (m, e) of out^T += values^T weights^T
//   kKeyUnit          what products of keys have to be multiplied by; value_unit(e), of values
//
// Codes as subnormal halves: a code in the low ten bits of a half is code * 2^-24, exactly, and
// products take it as any other half. So four bits become a half by one mask, instead of a mask, a
// bias put in, and taken out again.
#pragma once

#include "cuda/common.cuh"
#include "kv_device.cuh"

namespace regatta::cuda {

// What codes as subnormal halves have to be multiplied by.
constexpr float kTinyUnit = 16777216.f;  // 2^24

// bf16 or fp16 rows as they are.
template <int D>
struct RowsOf16 {
  static constexpr int kSteps = D / 16, kRowBytes = D * 2, kUnits = kRowBytes / 16;
  static constexpr float kKeyUnit = 1.f;
  static __device__ __forceinline__ int column(int m, int lane, int e) {
    return m * 16 + lane / 4 + e / 2 * 8;
  }
  static __device__ __forceinline__ float value_unit(int) { return 1.f; }
};

// half2(a, b) of bytes i and j of x as 1024 + byte each.
template <int kSelect>
__device__ __forceinline__ uint32_t biased_halves(uint32_t x) {
  return __byte_perm(x, 0x64646464u, kSelect);
}

__device__ __forceinline__ uint32_t half2_add(uint32_t a, uint32_t b) {
  return bit_cast<uint32_t>(__hadd2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
}

__device__ __forceinline__ uint32_t half2_mul(uint32_t a, uint32_t b) {
  return bit_cast<uint32_t>(__hmul2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
}

__device__ __forceinline__ uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  return bit_cast<uint32_t>(
      __hfma2(bit_cast<__half2>(a), bit_cast<__half2>(b), bit_cast<__half2>(c)));
}

// int8 codes with 128 added.
struct Int8Codes {
  static constexpr uint32_t kMinus = 0xe480e480u;  // half2(-1152): 1024 and the 128 of the code
  // Keys come as code + 128 in subnormal halves: the sum of a query's columns tells what to take
  // off its logits. Not so values: sums over many tokens would lose digits.
  static constexpr float kKeyUnit = kTinyUnit, kKeyBias = 128.f / kTinyUnit;
  static __device__ __forceinline__ void keys(uint32_t x, uint32_t* first, uint32_t* second) {
    *first = __byte_perm(x, 0, 0x4140);
    *second = __byte_perm(x, 0, 0x4342);
  }
  // Four codes of a row: columns 0, 1 and 2, 3.
  static __device__ __forceinline__ void along(uint32_t x, uint32_t* first, uint32_t* second) {
    *first = half2_add(biased_halves<0x4140>(x), kMinus);
    *second = half2_add(biased_halves<0x4342>(x), kMinus);
  }
  // Two columns of two rows: column 0 of both, column 1 of both.
  static __device__ __forceinline__ void across(uint32_t x, uint32_t* first, uint32_t* second) {
    *first = half2_add(biased_halves<0x4240>(x), kMinus);
    *second = half2_add(biased_halves<0x4341>(x), kMinus);
  }
};

__device__ __forceinline__ uint32_t e4m3_to_half2(uint32_t two) {
  uint32_t x = 0;
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(x)
      : "r"(two));
#else
  wrong_architecture();
#endif
  return x;
}

struct E4m3Codes {
  static constexpr float kKeyUnit = 1.f, kKeyBias = 0.f;
  static __device__ __forceinline__ void keys(uint32_t x, uint32_t* first, uint32_t* second) {
    along(x, first, second);
  }
  static __device__ __forceinline__ void along(uint32_t x, uint32_t* first, uint32_t* second) {
    *first = e4m3_to_half2(x);
    *second = e4m3_to_half2(x >> 16);
  }
  static __device__ __forceinline__ void across(uint32_t x, uint32_t* first, uint32_t* second) {
    const uint32_t sorted = __byte_perm(x, 0, 0x3120);
    *first = e4m3_to_half2(sorted);
    *second = e4m3_to_half2(sorted >> 16);
  }
};

// One byte per column.
template <int D, class Codes_>
struct RowsOf8 {
  using Codes = Codes_;
  static constexpr int kSteps = D / 16, kRowBytes = D, kUnits = kRowBytes / 16;
  static constexpr float kKeyUnit = Codes::kKeyUnit;
  static __device__ __forceinline__ int column(int m, int lane, int e) {
    return m * 16 + lane / 4 * 2 + e / 2;
  }
  static __device__ __forceinline__ float value_unit(int) { return 1.f; }
};

// Two columns per byte, the even one in the low four bits. A row of 40 bytes (D of 80) fills half
// of its last unit.
template <int D>
struct RowsOf4 {
  static constexpr int kRowBytes = D / 2, kUnits = (kRowBytes + 15) / 16, kSteps = kUnits * 2;
  static constexpr float kKeyUnit = kTinyUnit;
  static __device__ __forceinline__ int column(int m, int lane, int e) {
    return m / 2 * 32 + lane / 4 * 4 + m % 2 * 2 + e / 2;
  }
  static __device__ __forceinline__ float value_unit(int e) {
    return e / 2 ? kTinyUnit / 16.f : kTinyUnit;
  }
  // The codes at bits 0-3, 4-7, 8-11 and 12-15 of both halves of x as pairs of subnormal halves,
  // the second and the fourth times 16.
  static __device__ __forceinline__ void tiny(uint32_t x, uint32_t (&pair)[4]) {
    constexpr uint32_t kLow = 0x000f000fu, kHigh = 0x00f000f0u;
    const uint32_t y = x >> 8;
    pair[0] = x & kLow;
    pair[1] = x & kHigh;
    pair[2] = y & kLow;
    pair[3] = y & kHigh;
  }
  // The same as halves of the codes' values.
  static __device__ __forceinline__ void unpack(uint32_t x, uint32_t (&pair)[4]) {
    constexpr uint32_t kLow = 0x000f000fu, kHigh = 0x00f000f0u, kOne = 0x64006400u;
    constexpr uint32_t kMinus = 0xe400e400u;      // half2(-1024)
    constexpr uint32_t kSixteenth = 0x2c002c00u;  // half2(1 / 16)
    constexpr uint32_t kMinus64 = 0xd400d400u;    // half2(-64)
    const uint32_t y = x >> 8;
    pair[0] = half2_add((x & kLow) | kOne, kMinus);
    pair[1] = half2_fma((x & kHigh) | kOne, kSixteenth, kMinus64);
    pair[2] = half2_add((y & kLow) | kOne, kMinus);
    pair[3] = half2_fma((y & kHigh) | kOne, kSixteenth, kMinus64);
  }
};

}  // namespace regatta::cuda
