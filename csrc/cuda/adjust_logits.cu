// Penalties for tokens seen before, and per-token biases, on rows of logits.
//
// Architectures: all. One block per row; a row without work ends at once. The tokens of a history
// are counted in a table of the vocabulary's size, from which the first thread to come for a token
// takes the count and leaves zero: so each distinct token is changed once, and the table is clean
// for the next call. Bound: scattered reads, three per token of the history.
#include "common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kInPrompt = 1u << 31;  // beside a count of the output's tokens

__global__ void __launch_bounds__(kThreads) adjust_logits_kernel(const AdjustLogitsParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.x;
  float* logits = p.logits + row * p.vocab_size;
  const int slot = p.slot[row];
  if (slot >= 0) {
    const int length = p.length[row], num_prompt = p.num_prompt[row];
    const float repetition = p.repetition[row], presence = p.presence[row];
    const float frequency = p.frequency[row];
    int32_t* history = p.history + slot * p.max_length;
    uint32_t* counts = p.counts + row * p.vocab_size;
    const int newest = p.token_ids[p.logit_indices[row]];
    if (threadIdx.x == 0) history[length - 1] = newest;
    auto token = [&](int i) {
      const int id = i == length - 1 ? newest : history[i];
      return id >= 0 && id < p.vocab_size ? id : -1;
    };
    for (int i = threadIdx.x; i < length; i += kThreads) {
      const int id = token(i);
      if (id < 0) continue;
      if (i < num_prompt) {
        atomicOr(counts + id, kInPrompt);
      } else {
        atomicAdd(counts + id, 1u);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += kThreads) {
      const int id = token(i);
      const uint32_t count = id < 0 ? 0 : atomicExch(counts + id, 0u);
      if (count == 0) continue;
      float x = logits[id];
      x = x > 0.f ? x / repetition : x * repetition;
      const uint32_t in_output = count & ~kInPrompt;
      if (in_output > 0) x -= presence + frequency * static_cast<float>(in_output);
      logits[id] = x;
    }
    __syncthreads();
  }
  // By one thread, in order: a token may be named twice.
  if (threadIdx.x == 0) {
    for (int i = p.bias_begin[row]; i < p.bias_end[row]; ++i) {
      const int id = p.bias_tokens[i];
      if (id >= 0 && id < p.vocab_size) logits[id] += p.bias_values[i];
    }
  }
}

}  // namespace

Status adjust_logits(const AdjustLogitsParams& params, const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(params.num_rows));
  config.block = dim3(kThreads);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(adjust_logits_kernel, config, "adjust_logits", params);
}

}  // namespace regatta::cuda
