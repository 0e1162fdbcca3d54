// Token ids that only the device knows yet: a negative one stands for a row of the step before.
//
// Architectures: all. One thread per token; 1 us, mostly launch.
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    resolve_tokens_kernel(int32_t* token_ids, const int32_t* last_tokens, int64_t num_tokens,
                          int64_t num_last) {
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_tokens) return;
  const int64_t row = -1 - static_cast<int64_t>(token_ids[i]);
  if (row >= 0 && row < num_last) token_ids[i] = last_tokens[row];
}

}  // namespace

Status resolve_tokens(int32_t* token_ids, const int32_t* last_tokens, int64_t num_tokens,
                      int64_t num_last, const Launch& launch_on) {
  if (num_tokens == 0) return {};
  return launch(resolve_tokens_kernel, {launch_on, ceil_div(num_tokens, kThreads), kThreads},
                "resolve_tokens", token_ids, last_tokens, num_tokens, num_last);
}

}  // namespace regatta::cuda
