// Masks on rows of logits.
//
// Architectures: all. A block has a piece of a row, a thread one token at a time: the 32 lanes of a
// warp share a word, and write their logits side by side. Allowed logits are neither read nor
// written. Bound: bytes, 4 per banned token and 1/8 per token.
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = 4096;

__global__ void __launch_bounds__(kThreads) mask_logits_kernel(const MaskLogitsParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.y;
  float* logits = p.logits + row * p.vocab_size;
  const int32_t* mask = p.masks + row * p.num_words;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokensPerBlock;
  const int64_t end = min(first + kTokensPerBlock, p.vocab_size);
  for (int64_t token = first + threadIdx.x; token < end; token += kThreads) {
    const uint32_t word = static_cast<uint32_t>(mask[token / kWarp]);
    if ((word >> token % kWarp & 1u) == 0) logits[token] = -INFINITY;
  }
}

}  // namespace

Status mask_logits(const MaskLogitsParams& params, const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  return launch(
      mask_logits_kernel,
      {launch_on, grid_of(ceil_div(params.vocab_size, kTokensPerBlock), params.num_rows), kThreads},
      "mask_logits", params);
}

}  // namespace regatta::cuda
