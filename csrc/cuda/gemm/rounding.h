// One value's rounding, for kernels and for what stands in for them on a host.
//
// NumPy rounds every product, sum and quotient of predict/schemes/_rounding.py to float32. So must
// this: the intrinsics keep the compiler from fusing a product with the sum behind it. What is no
// number has the code 0, of e4m3 127, NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define REGATTA_ROUNDING __host__ __device__ __forceinline__
#else
#define REGATTA_ROUNDING inline
#endif

namespace regatta::cuda::rounding {

// Squared errors of a group are summed in so many lanes, value i in lane i % 128, in order; then
// lane i takes lane i + 64, then i + 32, and so on. Which of two scales has the smaller sum depends
// on it.
constexpr int kSumLanes = 128;
constexpr int kInt4Candidates = 6;
constexpr float kInt4Zero = 8.f;

REGATTA_ROUNDING float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

REGATTA_ROUNDING float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

REGATTA_ROUNDING float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

REGATTA_ROUNDING uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

REGATTA_ROUNDING float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Bits of |x|: they are ordered as the magnitudes are, and a NaN is above all.
REGATTA_ROUNDING uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// The largest magnitude of what shares a scale, 1 where all of it is zero or something is a NaN.
REGATTA_ROUNDING float largest_of(uint32_t bits) {
  const float largest = of_bits(bits);
  return largest > 0.f ? largest : 1.f;
}

// A NaN stays one.
REGATTA_ROUNDING float clip(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

REGATTA_ROUNDING int8_t code_of(float whole) {
  return whole == whole ? static_cast<int8_t>(static_cast<int>(whole)) : int8_t{0};
}

REGATTA_ROUNDING float int8_scale(float largest) { return divide(largest, 127.f); }

REGATTA_ROUNDING int8_t int8_code(float x, float scale) {
  return code_of(clip(rintf(divide(x, scale)), -127.f, 127.f));
}

// peak: the first value of the largest magnitude.
REGATTA_ROUNDING float int4_candidate(int index, float largest, float peak) {
  constexpr float kClips[kInt4Candidates - 1] = {1.f, 0.95f, 0.9f, 0.85f, 0.8f};
  if (index < kInt4Candidates - 1) return divide(multiply(kClips[index], largest), 7.f);
  return divide(peak == 0.f ? largest : peak, -8.f);
}

// inverse: 1 / scale.
REGATTA_ROUNDING float int4_squared_error(float x, float scale, float inverse) {
  const float whole = clip(rintf(multiply(x, inverse)), -8.f, 7.f);
  const float error = add(multiply(whole, scale), -x);
  return multiply(error, error);
}

REGATTA_ROUNDING int8_t int4_code(float x, float scale) {
  return code_of(add(clip(rintf(divide(x, scale)), -8.f, 7.f), kInt4Zero));
}

REGATTA_ROUNDING float e4m3_scale(float largest) { return divide(largest, 448.f); }

// Half to even, clipped to +-448.
REGATTA_ROUNDING uint8_t e4m3_code(float x, float scale) {
  const float quotient = divide(x, scale);
  const uint32_t magnitude = magnitude_bits(quotient);
  const uint32_t sign = bits_of(quotient) >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7e);  // 448
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9, and 8 of them are the next code
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(of_bits(magnitude) * 512.f)));
  }
  const uint32_t even = magnitude >> 20 & 1;
  return static_cast<uint8_t>(sign | (((magnitude + 0x7ffffu + even) >> 20) - (120u << 3)));
}

}  // namespace regatta::cuda::rounding

#undef REGATTA_ROUNDING
