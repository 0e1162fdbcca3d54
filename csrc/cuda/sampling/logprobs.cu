// Logprobs of one token per row of logits and of the likeliest ones, without a sort of the row.
//
// Architectures: all. One block per row, two passes over it. Values and indices make words that are
// all different and sort in the order wanted. The first pass finds the sum of exponentials,
// rescaled as the maximum grows, and each thread's largest word; of these the num_top-th largest is
// a word that num_top tokens reach. The second collects all that reach it, few more than num_top,
// and counts those above the token; what was collected is sorted. Where too many reach it (large
// logits at a stride of the block) the largest are looked for one by one.
// Bound: memory, the row read twice, the second time mostly from L2.
#include "row.cuh"

namespace regatta::cuda {
namespace {

// Larger words for larger values; 0 for -inf. Both zeros are one value.
__device__ uint64_t word_of(float value, int index) {
  if (value == -INFINITY) return 0;
  const uint32_t bits = __float_as_uint(value + 0.f);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(index);
}

// Calls f(index, value) for this thread's share of a row: the same of every row.
template <class F>
__device__ void for_each(const float* row, int size, F&& f) {
  // Of odd sizes some rows begin in the middle of 16 bytes.
  const bool aligned = size % 4 == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0;
  const int num_quads = aligned ? size / 4 : 0;
  for (int i = threadIdx.x; i < num_quads; i += kThreads) {
    const float4 x = reinterpret_cast<const float4*>(row)[i];
    f(4 * i, x.x), f(4 * i + 1, x.y), f(4 * i + 2, x.z), f(4 * i + 3, x.w);
  }
  for (int i = 4 * num_quads + threadIdx.x; i < size; i += kThreads) f(i, row[i]);
}

// Sorts a word per thread, largest first; thread i returns the i-th. words: [kThreads].
__device__ uint64_t sort(uint64_t mine, uint64_t* words) {
  for (int size = 2; size <= kThreads; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      uint64_t other;
      if (stride >= kWarp) {
        __syncthreads();
        words[threadIdx.x] = mine;
        __syncthreads();
        other = words[threadIdx.x ^ stride];
      } else {
        other = __shfl_xor_sync(~0u, mine, stride);
      }
      const bool descending = (threadIdx.x & size) == 0, first = (threadIdx.x & stride) == 0;
      mine = first == descending ? max(mine, other) : min(mine, other);
    }
  }
  __syncthreads();
  return mine;
}

__global__ void __launch_bounds__(kThreads) logprobs_kernel(const LogprobsParams p) {
  __shared__ uint64_t words[kThreads];
  __shared__ uint64_t threshold;
  __shared__ LogSum sums[kWarps];
  __shared__ int num_collected, num_above;
  pdl_trigger();
  pdl_wait();
  const float* row = p.logits + blockIdx.x * p.vocab_size;
  const int size = static_cast<int>(p.vocab_size), num_top = static_cast<int>(p.num_top);
  int32_t* out = p.out + blockIdx.x * (2 + 2 * p.num_top);

  LogSum total;
  uint64_t best = 0;
  for_each(row, size, [&](int i, float x) {
    total.add(x);
    best = max(best, word_of(x, i));
  });
  if (threadIdx.x == 0) num_collected = num_above = 0;
  total.add_block(sums);
  const float log_sum = total.largest + logf(total.sum);

  // A word that num_top tokens reach; 1: all but those of -inf do.
  if (num_top > 0) {
    const uint64_t sorted = sort(best, words);
    if (threadIdx.x == num_top - 1) threshold = max(sorted, uint64_t{1});
  } else if (threadIdx.x == 0) {
    threshold = ~uint64_t{0};
  }
  __syncthreads();

  int token = p.token_ids[blockIdx.x];
  if (token < 0 || token >= size) token = 0;
  const float chosen = row[token];
  const uint64_t least = threshold;
  int above = 0;
  for_each(row, size, [&](int i, float x) {
    above += x > chosen;
    const uint64_t word = word_of(x, i);
    if (word >= least) {
      const int place = atomicAdd(&num_collected, 1);
      if (place < kThreads) words[place] = word;
    }
  });
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) above += __shfl_xor_sync(~0u, above, o);
  if (threadIdx.x % kWarp == 0 && above > 0) atomicAdd(&num_above, above);
  __syncthreads();
  const int count = num_collected;
  if (threadIdx.x == 0) {
    out[0] = __float_as_int(chosen - log_sum);
    out[1] = 1 + num_above;
  }
  auto put = [&](int place, uint64_t word) {
    out[2 + place] = word == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(word));
    const float value = word == 0 ? -INFINITY : value_of(word) - log_sum;
    out[2 + num_top + place] = __float_as_int(value);
  };
  if (count <= kThreads) {
    const uint64_t word =
        sort(static_cast<int>(threadIdx.x) < count ? words[threadIdx.x] : 0, words);
    if (static_cast<int>(threadIdx.x) < num_top) put(threadIdx.x, word);
    return;
  }
  uint64_t taken = ~uint64_t{0};
  for (int place = 0; place < num_top; ++place) {
    uint64_t next = 0;
    for_each(row, size, [&](int i, float x) {
      const uint64_t word = word_of(x, i);
      if (word < taken) next = max(next, word);
    });
    taken = block_max(next, words);
    if (threadIdx.x == 0) put(place, taken);
  }
}

}  // namespace

Status logprobs(const LogprobsParams& params, const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  REGATTA_RETURN_IF_ERROR(check_vocab_size("logprobs", params.vocab_size));
  if (params.num_top < 0 || params.num_top > kMaxTopLogprobs) {
    return Status::error("logprobs: num_top " + std::to_string(params.num_top) +
                         " (allowed: 0 to " + std::to_string(kMaxTopLogprobs) + ")");
  }
  return launch(logprobs_kernel, {launch_on, params.num_rows, kThreads}, "logprobs", params);
}

}  // namespace regatta::cuda
