// 16 bytes of cache codes as 16-bit values: what the prefill kernel puts into shared memory.
#pragma once

#include "kv_fragments.cuh"

namespace regatta::cuda {

// half2 and scale -> two values of T: each times scale.x plus scale.y.
template <class T>
__device__ __forceinline__ uint32_t scaled_pair(float a, float b, float2 scale) {
  return bit_cast<uint32_t>(
      Traits<T>::from_float2(make_float2(fmaf(a, scale.x, scale.y), fmaf(b, scale.x, scale.y))));
}

template <KvFormat kFormat>
struct UnitOf {
  static constexpr int kBits = kFormat == KvFormat::kInt4 ? 4 : 8;
  static constexpr int kValues = 128 / kBits;   // per 16 bytes
  static constexpr int kVectors = kValues / 8;  // of 16 bytes of values
};

// out[UnitOf<kFormat>::kVectors]
template <class T, KvFormat kFormat>
__device__ __forceinline__ void dequantize(const uint4& codes, float2 scale, uint4* out) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  if constexpr (kFormat == KvFormat::kInt4) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
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
    uint32_t values[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
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
    out[0] = make_uint4(values[0], values[1], values[2], values[3]);
    out[1] = make_uint4(values[4], values[5], values[6], values[7]);
  }
}

}  // namespace regatta::cuda
