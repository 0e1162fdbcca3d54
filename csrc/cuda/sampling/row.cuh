// What kernels of one block per row of logits share: words that sort as values do, the largest of a
// block, and sums of exponentials.
#pragma once

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

inline Status check_vocab_size(const char* name, int64_t vocab_size) {
  if (vocab_size > 0 && vocab_size < int64_t{1} << 30) return {};
  return Status::error(std::string(name) + ": vocab_size " + std::to_string(vocab_size) +
                       " is out of range (allowed: 1 to 2^30 - 1)");
}

// Unsigned order of these words is the order of the floats; NaN (either sign) is given the top.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (x != x) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 equals 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The value of a word whose upper half is ordered as values are.
inline __device__ float value_of(uint64_t word) {
  const uint32_t ordered = static_cast<uint32_t>(word >> 32);
  return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

// The largest word of a block, in every thread. `scratch`: kWarps words.
inline __device__ uint64_t block_max(uint64_t word, uint64_t* scratch) {
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

// A sum of exponentials, rescaled as the largest value grows.
struct LogSum {
  float largest = -INFINITY;
  float sum = 0.f;  // of exp(x - largest)

  __device__ void add(float x) {
    if (x > largest) {
      sum = sum * expf(largest - x) + 1.f;
      largest = x;
    } else if (x != -INFINITY) {
      sum += expf(x - largest);  // a NaN stays one
    }
  }
  __device__ void add(float other_largest, float other_sum) {
    const float top = fmaxf(largest, other_largest);
    if (top == -INFINITY) return;  // -inf - -inf is NaN
    sum = sum * expf(largest - top) + other_sum * expf(other_largest - top);
    largest = top;
  }
  __device__ void add_lanes() {
#pragma unroll
    for (int o = kWarp / 2; o > 0; o /= 2) {
      const float other_largest = __shfl_xor_sync(~0u, largest, o);
      add(other_largest, __shfl_xor_sync(~0u, sum, o));
    }
  }
  // The block's, in every thread. of_warps: [kWarps], shared.
  __device__ void add_block(LogSum* of_warps) {
    add_lanes();
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = *this;
    __syncthreads();
    *this = of_warps[threadIdx.x % kWarps];
    add_lanes();
  }
};

}  // namespace
}  // namespace regatta::cuda
