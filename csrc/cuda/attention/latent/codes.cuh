// Values of a latent's codes.
#pragma once

#include "cuda/common.cuh"

namespace regatta::cuda {

// Two e4m3 codes, in bits 8 to 15 and 24 to 31, as halves of 1/256 of what they stand for. Exact,
// subnormal ones too, and of no float8 unit.
__device__ __forceinline__ __half2 e4m3_halves(uint32_t codes) {
  return bit_cast<__half2>((codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u));
}
constexpr float kE4m3Unit = 256.f;

// Eight codes times a scale.
template <class T>
__device__ __forceinline__ Vec16<T> values_of_codes(uint2 codes, float scale) {
  using Pair = typename Traits<T>::Pair;
  const float unit = scale * kE4m3Unit;
  Vec16<T> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // A zero below each of two bytes.
    const uint32_t two = __byte_perm(i < 2 ? codes.x : codes.y, 0, i % 2 ? 0x3424 : 0x1404);
    const float2 x = __half22float2(e4m3_halves(two));
    reinterpret_cast<Pair*>(out.v)[i] = Traits<T>::from_float2(make_float2(x.x * unit, x.y * unit));
  }
  return out;
}

}  // namespace regatta::cuda
