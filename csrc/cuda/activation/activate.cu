// out = function(gate) * up, gate and up side by side in one row; or function(x) without a gate.
//
// Architectures: all; float32, bf16, fp16. One thread per 16 bytes of output (per element when the
// size is not a multiple). Bound: bytes, 3 * intermediate_size per token, 2 without a gate.
#include <type_traits>

#include "cuda/activation/functions.cuh"
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

// units_per_row: of the output.
template <class T, Function kFunction, bool kGated, bool kVector>
__global__ void __launch_bounds__(kThreads)
    activate_kernel(const T* x, T* out, int64_t num_units, int units_per_row, const Activation of) {
  constexpr int kUnit = kVector ? Vec16<T>::kSize : 1;
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_units) return;
  const T* gate = x + i * kUnit;
  if constexpr (kGated) {
    const int64_t row = i / units_per_row, column = i % units_per_row;
    gate = x + (2 * row * units_per_row + column) * kUnit;
  }
  const T* up = gate + static_cast<int64_t>(units_per_row) * kUnit;
  if constexpr (kVector) {
    const Vec16<T> g = load16(gate);
    Vec16<T> u, y;
    if constexpr (kGated) u = load16(up);
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      y.set(e, kGated ? gated<kFunction>(of, g.get(e), u.get(e)) : apply<kFunction>(g.get(e)));
    }
    store16(out + i * kUnit, y);
  } else {
    const float x = Traits<T>::to_float(*gate);
    if constexpr (kGated) {
      out[i] = Traits<T>::from_float(gated<kFunction>(of, x, Traits<T>::to_float(*up)));
    } else {
      out[i] = Traits<T>::from_float(apply<kFunction>(x));
    }
  }
}

template <class T, Function kFunction>
Status run(const ActivateParams& params, const Launch& launch_on) {
  const bool vector = params.intermediate_size % Vec16<T>::kSize == 0;
  const int64_t units =
      vector ? params.intermediate_size / Vec16<T>::kSize : params.intermediate_size;
  auto* const kernel = params.activation.gated
                           ? (vector ? activate_kernel<T, kFunction, true, true>
                                     : activate_kernel<T, kFunction, true, false>)
                           : (vector ? activate_kernel<T, kFunction, false, true>
                                     : activate_kernel<T, kFunction, false, false>);
  return launch(kernel, {launch_on, ceil_div(params.num_tokens * units, kThreads), kThreads},
                "activate", static_cast<const T*>(params.x), static_cast<T*>(params.out),
                params.num_tokens * units, static_cast<int>(units), params.activation);
}

}  // namespace

Status activate(const ActivateParams& params, const Launch& launch_on) {
  if (params.num_tokens == 0 || params.intermediate_size == 0) return {};
  return dispatch_dtype(params.dtype, "activate", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    switch (params.activation.function) {
      case Function::kSilu:
        return run<T, Function::kSilu>(params, launch_on);
      case Function::kGelu:
        return run<T, Function::kGelu>(params, launch_on);
      case Function::kGeluTanh:
        return run<T, Function::kGeluTanh>(params, launch_on);
      case Function::kRelu:
        return run<T, Function::kRelu>(params, launch_on);
      case Function::kReluSquared:
        return run<T, Function::kReluSquared>(params, launch_on);
    }
    return Status::error("activate: function " +
                         std::to_string(static_cast<int>(params.activation.function)) +
                         " is not known (allowed: 0 to " + std::to_string(kNumFunctions - 1) + ")");
  });
}

}  // namespace regatta::cuda
