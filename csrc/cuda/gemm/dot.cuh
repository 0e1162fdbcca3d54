// Products of 16 bytes of weights, for kernels of single rows.
#pragma once

#include "cuda/common.cuh"

namespace regatta::cuda {

// acc + the eight products of w and x, of bf16 or fp16, one after the other.
template <class T>
__device__ __forceinline__ float dot_unit(const uint4& w, const uint4& x, float acc) {
  using Pair = typename Traits<T>::Pair;
  const uint32_t ws[4] = {w.x, w.y, w.z, w.w}, xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 wv = Traits<T>::to_float2(bit_cast<Pair>(ws[i]));
    const float2 xv = Traits<T>::to_float2(bit_cast<Pair>(xs[i]));
    acc = fmaf(wv.y, xv.y, fmaf(wv.x, xv.x, acc));
  }
  return acc;
}

}  // namespace regatta::cuda
