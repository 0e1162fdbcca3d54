// Inputs of a draft model's step behind a verification whose outcome only the device knows: made as
// if all drafts had been right, they are moved back by those that were not.
//
// Architectures: all. One thread per request; 2 us, mostly launch. No early trigger: kernels to
// come read positions and slots before they wait (see rope_and_paged_attention).
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 64;

__global__ void __launch_bounds__(kThreads) follow_drafts_kernel(const FollowDraftsParams p) {
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_seqs) return;
  const int32_t* plan = p.plan + i * p.plan_width;
  const int num_drafts = plan[0];
  if (num_drafts < 0) return;
  const int32_t* chosen = p.tokens + plan[1];
  const int32_t* drafts = plan + 3;
  int right = 0;
  while (right < num_drafts) {
    const int draft = p.tokens[drafts[right]];
    if (draft < 0 || draft != chosen[right]) break;
    ++right;
  }
  const int64_t begin = p.cu_seqlens_q[i], end = p.cu_seqlens_q[i + 1];
  if (plan[2] == 2) {
    if (right > 0) p.token_ids[begin] = chosen[right - 1];
    p.token_ids[begin + 1] = chosen[right];
  }
  const int back = num_drafts - right;
  const int32_t* table = p.block_tables + i * p.blocks_per_seq;
  for (int64_t t = begin; t < end; ++t) {
    const int position = p.positions[t] - back;
    p.positions[t] = position;
    p.slot_mapping[t] = table[position / p.block_size] * p.block_size + position % p.block_size;
  }
  p.context_lens[i] -= back;
  p.offsets[i] -= back;
}

}  // namespace

Status follow_drafts(const FollowDraftsParams& params, const Launch& launch_on) {
  if (params.num_seqs == 0) return {};
  return launch(follow_drafts_kernel, {launch_on, ceil_div(params.num_seqs, kThreads), kThreads},
                "follow_drafts", params);
}

}  // namespace regatta::cuda
