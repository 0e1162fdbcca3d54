// out = a_scale * a + b_scale * b, in float, rounded once; without b: a_scale * a.
//
// Architectures: all; float32, bf16, fp16. One thread per 16 bytes, the last one element by element
// where the count is not a multiple. Bound: bytes, 3 * count, 2 without b.
#include <type_traits>

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, bool kAdds>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const T* a, const T* b, T* out, int64_t count, float a_scale, float b_scale) {
  constexpr int kUnit = Vec16<T>::kSize;
  pdl_trigger();
  pdl_wait();
  const auto sum = [&](float x, float y) {
    return kAdds ? fmaf(a_scale, x, b_scale * y) : a_scale * x;
  };
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kUnit;
  if (first + kUnit <= count) {
    const Vec16<T> x = load16(a + first);
    Vec16<T> y = {}, z;
    if constexpr (kAdds) y = load16(b + first);
#pragma unroll
    for (int e = 0; e < kUnit; ++e) z.set(e, sum(x.get(e), y.get(e)));
    store16(out + first, z);
    return;
  }
  for (int64_t i = first; i < count; ++i) {
    const float y = kAdds ? Traits<T>::to_float(b[i]) : 0.f;
    out[i] = Traits<T>::from_float(sum(Traits<T>::to_float(a[i]), y));
  }
}

}  // namespace

Status add(const AddParams& params, const Launch& launch_on) {
  if (params.count == 0) return {};
  return dispatch_dtype(params.dtype, "add", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return launch(params.b != nullptr ? add_kernel<T, true> : add_kernel<T, false>,
                  {launch_on, ceil_div(params.count, kThreads * Vec16<T>::kSize), kThreads}, "add",
                  static_cast<const T*>(params.a), static_cast<const T*>(params.b),
                  static_cast<T*>(params.out), params.count, params.a_scale, params.b_scale);
  });
}

}  // namespace regatta::cuda
