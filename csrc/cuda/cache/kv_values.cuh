// Cache codes as 16-bit values: what the prefill kernel puts into shared memory.
#pragma once

#include "kv_fragments.cuh"

namespace regatta::cuda {

// half2 and scale -> two values of T: each times scale.x plus scale.y.
template <class T>
__device__ __forceinline__ uint32_t scaled_pair(float a, float b, float2 scale) {
  return bit_cast<uint32_t>(
      Traits<T>::from_float2(make_float2(fmaf(a, scale.x, scale.y), fmaf(b, scale.x, scale.y))));
}

// out: vectors of 8 values, one for each word of 4-bit codes, or for each two of 8-bit ones.
template <class T, KvFormat kFormat, int kWords>
__device__ __forceinline__ void dequantize(const uint32_t (&words)[kWords], float2 scale,
                                           uint4* out) {
  if constexpr (kFormat == KvFormat::kInt4) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t pairs[4];  // columns 0 and 4, 1 and 5, 2 and 6, 3 and 7
      RowsOf4<64>::unpack(words[w], pairs);
      float2 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __half22float2(bit_cast<__half2>(pairs[i]));
      out[w] =
          make_uint4(scaled_pair<T>(x[0].x, x[1].x, scale), scaled_pair<T>(x[2].x, x[3].x, scale),
                     scaled_pair<T>(x[0].y, x[1].y, scale), scaled_pair<T>(x[2].y, x[3].y, scale));
    }
  } else {
    uint32_t values[2 * kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t first, second;
      if constexpr (kFormat == KvFormat::kFp8) {
        E4m3Codes::along(words[w], &first, &second);
      } else {
        Int8Codes::along(words[w], &first, &second);
      }
      const float2 a = __half22float2(bit_cast<__half2>(first));
      const float2 b = __half22float2(bit_cast<__half2>(second));
      values[2 * w] = scaled_pair<T>(a.x, a.y, scale);
      values[2 * w + 1] = scaled_pair<T>(b.x, b.y, scale);
    }
#pragma unroll
    for (int v = 0; v < kWords / 2; ++v) {
      out[v] = make_uint4(values[4 * v], values[4 * v + 1], values[4 * v + 2], values[4 * v + 3]);
    }
  }
}

}  // namespace regatta::cuda
