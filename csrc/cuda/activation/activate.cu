// out = silu(gate) * up, gate and up side by side in one row.
//
// Architectures: all; float32, bf16, fp16. One thread per 16 bytes of output (per element when the
// size is not a multiple). Bound: bytes, 3 * intermediate_size per token.
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    silu_mul_kernel(const T* gate_up, T* out, int64_t num_units, int units_per_row) {
  constexpr int kUnit = kVector ? Vec16<T>::kSize : 1;
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_units) return;
  const int64_t row = i / units_per_row, column = i % units_per_row;
  const T* gate = gate_up + (2 * row * units_per_row + column) * kUnit;
  const T* up = gate + static_cast<int64_t>(units_per_row) * kUnit;
  if constexpr (kVector) {
    const Vec16<T> g = load16(gate), u = load16(up);
    Vec16<T> x;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) x.set(e, silu(g.get(e)) * u.get(e));
    store16(out + i * kUnit, x);
  } else {
    out[i] = Traits<T>::from_float(silu(Traits<T>::to_float(*gate)) * Traits<T>::to_float(*up));
  }
}

}  // namespace

Status activate(const ActivateParams& params, const Launch& launch_on) {
  if (params.num_tokens == 0) return {};
  return dispatch_dtype(params.dtype, "silu_mul", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const bool vector = params.intermediate_size % Vec16<T>::kSize == 0;
    const int64_t units =
        vector ? params.intermediate_size / Vec16<T>::kSize : params.intermediate_size;
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(ceil_div(params.num_tokens * units, kThreads)));
    config.block = dim3(kThreads);
    config.stream = launch_on.stream;
    config.pdl = launch_on.pdl;
    return launch(vector ? silu_mul_kernel<T, true> : silu_mul_kernel<T, false>, config, "silu_mul",
                  static_cast<const T*>(params.gate_up), static_cast<T*>(params.out),
                  params.num_tokens * units, static_cast<int>(units));
  });
}

}  // namespace regatta::cuda
