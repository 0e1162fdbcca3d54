// Bias, scale and soft cap of logits, see finish_logits.h.
//
// Architectures: all; biases of float32, bf16, fp16. A block has a piece of a row, a thread one
// logit at a time. Bound: bytes, 8 per logit.
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/sampling/finish_logits.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLogitsPerBlock = 2048;

template <class T>
__global__ void __launch_bounds__(kThreads) finish_logits_kernel(const FinishLogitsParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kLogitsPerBlock;
  const int64_t end = min(first + kLogitsPerBlock, p.vocab_size);
  float* const row = p.logits + static_cast<int64_t>(blockIdx.x) * p.vocab_size;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    float x = row[i];
    if (p.bias != nullptr) x += Traits<T>::to_float(static_cast<const T*>(p.bias)[i]);
    x *= p.scale;
    if (p.softcap != 0.f) x = p.softcap * tanhf(x / p.softcap);
    row[i] = x;
  }
}

}  // namespace

Status finish_logits(const FinishLogitsParams& params, const Launch& launch_on) {
  if (params.num_rows == 0 || params.vocab_size == 0) return {};
  return dispatch_dtype(params.dtype, "finish_logits", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return launch(
        finish_logits_kernel<T>,
        {launch_on, grid_of(params.num_rows, ceil_div(params.vocab_size, kLogitsPerBlock)),
         kThreads},
        "finish_logits", params);
  });
}

}  // namespace regatta::cuda
