// Log-probabilities of some rows of logits, in place, and the likeliest tokens of such rows.
//
// Architectures: all. One block per row.
//  * log_softmax: one pass for maximum and sum (rescaled as the maximum grows), one that subtracts.
//  * likeliest: without a sort. Values and indices make words that are all different and sort in
//    the order wanted. Thread t keeps the largest word of elements t, t + kThreads, ...; each round
//    takes the largest of all threads' words, and the whole block finds that thread's next one.
// Bound: latency, about 2 us per round, and the first read of the row.
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

// Larger words for larger values, 0 for what cannot be taken; a NaN is above everything.
__device__ uint64_t word_of(float value, int index) {
  if (value == -INFINITY) return 0;
  const uint32_t bits = __float_as_uint(value);
  uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (isnan(value)) ordered = ~0u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(index);
}

__device__ float value_of(uint64_t word) {
  const uint32_t ordered = static_cast<uint32_t>(word >> 32);
  return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

// The largest word of a block, in every thread. `scratch`: kWarps words.
__device__ uint64_t block_max(uint64_t word, uint64_t* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) word = max(word, __shfl_xor_sync(~0u, word, o));
  __syncthreads();  // whoever reads scratch from the round before is done
  if (lane == 0) scratch[warp] = word;
  __syncthreads();
  word = scratch[lane % kWarps];
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) word = max(word, __shfl_xor_sync(~0u, word, o));
  return word;
}

__global__ void __launch_bounds__(kThreads) likeliest_kernel(const LikeliestParams p) {
  __shared__ uint64_t scratch[kWarps];
  pdl_trigger();
  pdl_wait();
  const int64_t row = p.rows[blockIdx.x];
  const bool there = row >= 0 && row < p.num_logit_rows;
  const float* logits = p.logits + (there ? row : 0) * p.vocab_size;
  const int size = there ? static_cast<int>(p.vocab_size) : 0;
  int32_t* token_ids = p.token_ids + blockIdx.x * p.count;
  float* values = p.values + blockIdx.x * p.count;
  uint64_t mine = 0;
  for (int i = threadIdx.x; i < size; i += kThreads) mine = max(mine, word_of(logits[i], i));
  bool empty = false;
  for (int k = 0; k < p.count; ++k) {
    const uint64_t taken = block_max(mine, scratch);
    empty = empty || taken == 0 || taken >> 32 == ~0u;  // nothing is left, or a NaN
    const int index = static_cast<int>(~static_cast<uint32_t>(taken));
    if (threadIdx.x == 0) {
      token_ids[k] = empty ? -1 : index;
      values[k] = empty ? -INFINITY : value_of(taken);
    }
    if (empty) continue;
    const int owner = index % kThreads;
    uint64_t next = 0;
    for (int i = owner + threadIdx.x * kThreads; i < size; i += kThreads * kThreads) {
      const uint64_t word = word_of(logits[i], i);
      if (word < taken) next = max(next, word);
    }
    next = block_max(next, scratch);
    if (threadIdx.x == owner) mine = next;
  }
}

__global__ void __launch_bounds__(kThreads) log_softmax_kernel(const LikeliestParams p) {
  __shared__ float maxima[kWarps], sums[kWarps];
  pdl_trigger();
  pdl_wait();
  const int64_t row = p.rows[blockIdx.x];
  if (row < 0 || row >= p.num_logit_rows) return;
  float* logits = p.logits + row * p.vocab_size;
  const int size = static_cast<int>(p.vocab_size);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float largest = -INFINITY, sum = 0.f;
  // -inf - -inf is NaN: a maximum of -inf adds nothing.
  auto add = [&](float other_largest, float other_sum) {
    const float top = fmaxf(largest, other_largest);
    if (top == -INFINITY) return;
    sum = sum * expf(largest - top) + other_sum * expf(other_largest - top);
    largest = top;
  };
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const float x = logits[i];
    if (x > largest) {
      sum = sum * expf(largest - x) + 1.f;
      largest = x;
    } else if (x != -INFINITY) {
      sum += expf(x - largest);  // a NaN stays one
    }
  }
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) {
    const float other_largest = __shfl_xor_sync(~0u, largest, o);
    add(other_largest, __shfl_xor_sync(~0u, sum, o));
  }
  if (lane == 0) maxima[warp] = largest, sums[warp] = sum;
  __syncthreads();
  largest = maxima[lane % kWarps], sum = sums[lane % kWarps];
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) {
    const float other_largest = __shfl_xor_sync(~0u, largest, o);
    add(other_largest, __shfl_xor_sync(~0u, sum, o));
  }
  const float log_sum = logf(sum);
  for (int i = threadIdx.x; i < size; i += kThreads) logits[i] = logits[i] - largest - log_sum;
}

template <class Kernel>
Status launch_rows(Kernel kernel, const char* name, const LikeliestParams& params,
                   const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  if (params.vocab_size >= int64_t{1} << 30) {
    return Status::error(std::string(name) + ": vocab_size " + std::to_string(params.vocab_size) +
                         " is out of range (allowed: up to 2^30 - 1)");
  }
  return launch(kernel, {launch_on, params.num_rows, kThreads}, name, params);
}

}  // namespace

Status log_softmax(const LikeliestParams& params, const Launch& launch_on) {
  return launch_rows(log_softmax_kernel, "log_softmax", params, launch_on);
}

Status likeliest(const LikeliestParams& params, const Launch& launch_on) {
  return launch_rows(likeliest_kernel, "likeliest", params, launch_on);
}

}  // namespace regatta::cuda
