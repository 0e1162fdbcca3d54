// Log-probabilities of some rows of logits, in place, and the likeliest tokens of such rows.
//
// Architectures: all. One block per row.
//  * log_softmax: one pass for maximum and sum (rescaled as the maximum grows), one that subtracts.
//  * likeliest: without a sort. Values and indices make words that are all different and sort in
//    the order wanted. Thread t keeps the largest word of elements t, t + kThreads, ...; each round
//    takes the largest of all threads' words, and the whole block finds that thread's next one.
// Bound: latency, about 2 us per round, and the first read of the row.
#include "row.cuh"

namespace regatta::cuda {
namespace {

// Larger words for larger values, 0 for what cannot be taken; a NaN is above everything.
__device__ uint64_t word_of(float value, int index) {
  if (value == -INFINITY) return 0;
  const uint32_t bits = __float_as_uint(value);
  uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (isnan(value)) ordered = ~0u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(index);
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
  __shared__ LogSum of_warps[kWarps];
  pdl_trigger();
  pdl_wait();
  const int64_t row = p.rows[blockIdx.x];
  if (row < 0 || row >= p.num_logit_rows) return;
  float* logits = p.logits + row * p.vocab_size;
  const int size = static_cast<int>(p.vocab_size);
  LogSum total;
  for (int i = threadIdx.x; i < size; i += kThreads) total.add(logits[i]);
  total.add_block(of_warps);
  const float log_sum = logf(total.sum);
  for (int i = threadIdx.x; i < size; i += kThreads) {
    logits[i] = logits[i] - total.largest - log_sum;
  }
}

template <class Kernel>
Status launch_rows(Kernel kernel, const char* name, const LikeliestParams& params,
                   const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  REGATTA_RETURN_IF_ERROR(check_vocab_size(name, params.vocab_size));
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
