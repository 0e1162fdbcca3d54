// A weight as checkpoints store it into codes and scales, as predict/schemes/_rounding.py has them.
//
// Input: [N, K] row-major, 16 or 32 bits. Architectures: all. A warp holds what shares a scale:
// one pass finds the largest magnitude, with 4 bits one more sums the errors of all candidates, the
// last one writes codes. Of blocks of 128 x 128 a thread block holds one.
// Bound: reading the weight; with 4 bits some 80 operations a value. Done once per weight, while
// the next one is on its way.
#include "cuda/common.cuh"
#include "cuda/gemm/rounding.h"
#include "regatta/round_weight.h"

namespace regatta::cuda {
namespace {

constexpr int kWarps = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

// The bits of the largest magnitude above, and below them 2^32 - 1 - the first index that has it.
__device__ __forceinline__ uint64_t warp_peak(uint64_t peak) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, peak, offset);
    peak = other > peak ? other : peak;
  }
  return peak;
}

// A thread has the sums of lanes t, t + 32, ... of rounding::kSumLanes.
template <class T>
__device__ __forceinline__ float int4_scale(const T* x, int64_t size, float largest, float peak) {
  constexpr int kCandidates = rounding::kInt4Candidates, kOwn = rounding::kSumLanes / kWarp;
  float scale[kCandidates], inverse[kCandidates], error[kCandidates][kOwn] = {};
#pragma unroll
  for (int i = 0; i < kCandidates; ++i) {
    scale[i] = rounding::int4_candidate(i, largest, peak);
    inverse[i] = rounding::divide(1.f, scale[i]);
  }
  for (int64_t first = threadIdx.x % kWarp; first < size; first += rounding::kSumLanes) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int64_t k = first + own * kWarp;
      if (k >= size) break;
      const float value = Traits<T>::to_float(x[k]);
#pragma unroll
      for (int i = 0; i < kCandidates; ++i) {
        error[i][own] =
            rounding::add(error[i][own], rounding::int4_squared_error(value, scale[i], inverse[i]));
      }
    }
  }
  float best = scale[0], least = __int_as_float(0x7f800000);
#pragma unroll
  for (int i = 0; i < kCandidates; ++i) {
#pragma unroll
    for (int half = kOwn / 2; half > 0; half /= 2) {
#pragma unroll
      for (int own = 0; own < half; ++own) {
        error[i][own] = rounding::add(error[i][own], error[i][own + half]);
      }
    }
    float sum = error[i][0];
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      sum = rounding::add(sum, __shfl_xor_sync(kAllLanes, sum, offset));
    }
    if (sum < least) {
      least = sum;
      best = scale[i];
    }
  }
  return best;
}

// Groups lie one behind the other, those of a row and then those of the next.
template <class T, RoundingRule kRule>
__global__ void __launch_bounds__(kWarps* kWarp)
    round_groups_kernel(const RoundWeightParams p, const int64_t num_groups) {
  const int64_t group = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / kWarp;
  if (group >= num_groups) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t size = p.group_size;
  const T* x = static_cast<const T*>(p.weight) + group * size;
  uint8_t* codes = p.codes + group * size;
  uint64_t found = 0;
  for (int64_t k = lane; k < size; k += kWarp) {
    const uint64_t magnitude = rounding::magnitude_bits(Traits<T>::to_float(x[k]));
    const uint64_t here = magnitude << 32 | (0xffffffffu - static_cast<uint32_t>(k));
    found = here > found ? here : found;
  }
  found = warp_peak(found);
  const float largest = rounding::largest_of(static_cast<uint32_t>(found >> 32));
  float scale;
  if constexpr (kRule == RoundingRule::kInt4) {
    const float peak = Traits<T>::to_float(x[0xffffffffu - static_cast<uint32_t>(found)]);
    scale = int4_scale(x, size, largest, peak);
  } else {
    scale = kRule == RoundingRule::kInt8 ? rounding::int8_scale(largest)
                                         : rounding::e4m3_scale(largest);
  }
  if (lane == 0) {
    p.scale[group] = scale;
    if constexpr (kRule == RoundingRule::kInt4) p.zero[group] = rounding::kInt4Zero;
  }
  for (int64_t k = lane; k < size; k += kWarp) {
    const float value = Traits<T>::to_float(x[k]);
    if constexpr (kRule == RoundingRule::kE4M3) {
      codes[k] = rounding::e4m3_code(value, scale);
    } else {
      codes[k] =
          static_cast<uint8_t>(kRule == RoundingRule::kInt8 ? rounding::int8_code(value, scale)
                                                            : rounding::int4_code(value, scale));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    round_blocks_kernel(const RoundWeightParams p, const int64_t blocks_per_row) {
  __shared__ uint32_t of_warps[kWarps];
  const int64_t row0 = blockIdx.x / blocks_per_row * p.block_rows;
  const int64_t column0 = blockIdx.x % blocks_per_row * p.group_size;
  const int64_t rows = min(p.block_rows, p.out_features - row0);
  const int64_t columns = min(p.group_size, p.in_features - column0);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto for_values = [&](auto&& f) {
    for (int64_t row = warp; row < rows; row += kWarps) {
      for (int64_t column = lane; column < columns; column += kWarp) {
        const int64_t at = (row0 + row) * p.in_features + column0 + column;
        f(at, Traits<T>::to_float(static_cast<const T*>(p.weight)[at]));
      }
    }
  };
  uint32_t found = 0;
  for_values([&](int64_t, float value) { found = max(found, rounding::magnitude_bits(value)); });
  found = static_cast<uint32_t>(warp_peak(found));
  if (lane == 0) of_warps[warp] = found;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) found = max(found, of_warps[i]);
  const float scale = rounding::e4m3_scale(rounding::largest_of(found));
  if (threadIdx.x == 0) p.scale[blockIdx.x] = scale;
  for_values([&](int64_t at, float value) { p.codes[at] = rounding::e4m3_code(value, scale); });
}

}  // namespace

Status round_weight(const RoundWeightParams& p, CUstream_st* stream) {
  if (p.out_features == 0 || p.in_features == 0) return {};
  return dispatch_dtype(p.dtype, "round_weight", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (p.block_rows > 1) {
      const int64_t across = ceil_div(p.in_features, p.group_size);
      const int64_t blocks = across * ceil_div(p.out_features, p.block_rows);
      return launch(round_blocks_kernel<T>, {{stream}, blocks, kWarps * kWarp}, "round_weight", p,
                    across);
    }
    const int64_t num_groups = p.out_features * (p.in_features / p.group_size);
    const auto kernel = p.rule == RoundingRule::kInt8 ? round_groups_kernel<T, RoundingRule::kInt8>
                        : p.rule == RoundingRule::kInt4
                            ? round_groups_kernel<T, RoundingRule::kInt4>
                            : round_groups_kernel<T, RoundingRule::kE4M3>;
    return launch(kernel, {{stream}, ceil_div(num_groups, kWarps), kWarps * kWarp}, "round_weight",
                  p, num_groups);
  });
}

}  // namespace regatta::cuda
