// How the router's logits become a choice (experts.h), by a warp per token.
#pragma once

#include "cuda/common.cuh"
#include "cuda/experts/experts.h"

namespace regatta::cuda {

__device__ __forceinline__ uint32_t warp_largest(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, x);
#else
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) x = max(x, __shfl_xor_sync(~0u, x, o));
  return x;
#endif
}

// Whole numbers in the order of the values, none of which is 0; 0 and -0 are one. NaN, for which no
// order has a place, is as -inf.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = isnan(value) ? 0xff800000u : __float_as_uint(value + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// Leaves -inf in `choice` [E] but for the experts of the chosen groups. By a warp, of which as many
// lanes as there are for each go through a group.
__device__ __forceinline__ void choose_groups(const Router& router, float* choice) {
  const int lane = threadIdx.x % kWarp;
  const int num_groups = static_cast<int>(router.num_groups);
  const int size = static_cast<int>(router.num_experts) / num_groups;
  const int lanes = 1 << (31 - __clz(kWarp / num_groups));
  const int group = lane / lanes;
  float* const own = choice + group * size;
  float best = -INFINITY, second = -INFINITY;
  if (group < num_groups) {
    for (int i = lane % lanes; i < size; i += lanes) {
      const float c = own[i];
      if (c > best) {
        second = best, best = c;
      } else if (c > second) {
        second = c;
      }
    }
  }
  for (int o = 1; o < lanes; o *= 2) {
    const float other = __shfl_xor_sync(~0u, best, o);
    const float other_second = __shfl_xor_sync(~0u, second, o);
    second = fmaxf(fminf(best, other), fmaxf(second, other_second));
    best = fmaxf(best, other);
  }
  const float score = router.group_score == GroupScore::kTopTwo ? best + second : best;
  int rank = 0;  // groups that come before this lane's
  for (int g = 0; g < num_groups; ++g) {
    const float other = __shfl_sync(~0u, score, g * lanes);
    if (other > score || (other == score && g < group)) ++rank;
  }
  if (group < num_groups && rank >= router.top_groups) {
    for (int i = lane % lanes; i < size; i += lanes) own[i] = -INFINITY;
  }
  __syncwarp();
}

// A lane's experts are lane, lane + 32 and so on.
template <int kPerLane>
__device__ __forceinline__ void load_logits(const ChooseArgs& a, int token,
                                            float (&value)[kPerLane]) {
  const int count = static_cast<int>(a.router.num_experts);
  const float* const logits = a.logits + static_cast<int64_t>(token) * count;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = static_cast<int>(threadIdx.x) % kWarp + i * kWarp;
    value[i] = e < count ? __ldcg(logits + e) : -INFINITY;
    if (a.bias != nullptr && e < count) value[i] += __ldg(a.bias + e);
  }
}

// One step, and those behind it, of sort_down().
template <int kMerged, int kStep, int kCount>
__device__ __forceinline__ void sort_step(uint64_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i + kStep < kCount; ++i) {
    const int from = i - kStep % kMerged;
    const bool is_low = from >= 0 && from / kStep % 2 == 0;
    if (is_low && i / (2 * kMerged) == (i + kStep) / (2 * kMerged)) {
      const uint64_t low = x[i], high = x[i + kStep];
      x[i] = low > high ? low : high;
      x[i + kStep] = low > high ? high : low;
    }
  }
  if constexpr (kStep > 1) {
    sort_step<kMerged, kStep / 2>(x);
  } else if constexpr (2 * kMerged < kCount) {
    sort_step<2 * kMerged, 2 * kMerged>(x);
  }
}

// The largest first; Batcher's merges of odd and even ones.
template <int kCount>
__device__ __forceinline__ void sort_down(uint64_t (&x)[kCount]) {
  sort_step<1, 1>(x);
}

// The number of an expert among those of which the first one here is 0.
__device__ __forceinline__ int own_number(const ChooseArgs& a, int expert) {
  const int own = expert - a.first_expert;
  return own < 0 ? own + static_cast<int>(a.router.num_experts) : own;
}

// What lane j < top_k has of a token: its j-th choice, the best first.
struct Choice {
  int id;
  float share;
};

// The weight of lane j's choice, the j-th, by the sparse mixer: its softmax among the near ones
// that are left. A whole warp calls it.
__device__ __forceinline__ float mixer_share(const Router& router, const float* logits, int mine) {
  const int lane = threadIdx.x % kWarp, top_k = static_cast<int>(router.top_k);
  const float most = logits[mine];
  float sum = 0.f;
  for (int e = 0; e < router.num_experts; ++e) {
    const float gap = (most - logits[e]) / fmaxf(fabsf(logits[e]), most);
    bool left = !(gap > 2 * router.jitter);
    for (int j = 0; j < top_k; ++j) left &= __shfl_sync(~0u, mine, j) != e || j >= lane;
    if (left) sum += expf(logits[e] - most);
  }
  return 1.f / sum;
}

// Chooses for one token of these logits. scores, choice: room for E values in shared memory, of
// this warp; `choice` where groups are chosen alone.
template <int kPerLane>
__device__ __forceinline__ Choice choose_among(const ChooseArgs& a, float (&value)[kPerLane],
                                               float* scores, float* choice) {
  const int lane = threadIdx.x % kWarp;
  const Router& router = a.router;
  const int count = static_cast<int>(router.num_experts), top_k = static_cast<int>(router.top_k);
  const auto is_there = [&](int i) { return lane + i * kWarp < count; };
  float largest = -INFINITY;
  bool sound = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    sound = sound && !isnan(value[i]);
    largest = fmaxf(largest, value[i]);
  }
  if (!__all_sync(~0u, sound)) return {lane, NAN};
  if (router.scoring == Scoring::kSoftmax) {
    largest = value_of(warp_largest(key_of(largest)));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      value[i] = is_there(i) ? expf(value[i] - largest) : 0.f;
      sum += value[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) value[i] = value[i] / sum;
  } else if (router.scoring == Scoring::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) value[i] = 1.f / (1.f + expf(-value[i]));
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (!is_there(i)) continue;
    scores[lane + i * kWarp] = value[i];
    if (a.correction != nullptr) value[i] += __ldg(a.correction + lane + i * kWarp);
  }
  if (router.top_groups < router.num_groups) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (is_there(i)) choice[lane + i * kWarp] = value[i];
    }
    __syncwarp();
    choose_groups(router, choice);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (is_there(i)) value[i] = choice[lane + i * kWarp];
    }
  }
  __syncwarp();
  // A lane's experts, the best first, and of equal ones the first; behind them there is nothing.
  uint64_t left[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    left[i] = static_cast<uint64_t>(is_there(i) ? key_of(value[i]) : 0) << 32 |
              ~static_cast<uint32_t>(lane + i * kWarp);
  }
  sort_down(left);
  int mine = 0;
  for (int j = 0; j < top_k; ++j) {
    const auto key = static_cast<uint32_t>(left[0] >> 32), at = static_cast<uint32_t>(left[0]);
    const uint32_t top = warp_largest(key);
    bool is_best = key == top;
    unsigned best = __ballot_sync(~0u, is_best);
    if ((best & (best - 1)) != 0) {                           // equal ones of several lanes
      const uint32_t first = warp_largest(is_best ? at : 0);  // by all lanes
      is_best = is_best && at == first;
      best = __ballot_sync(~0u, is_best);
    }
    const uint32_t chosen = __shfl_sync(~0u, at, __ffs(best) - 1);
    if (lane == j) mine = static_cast<int>(~chosen);
    if (is_best) {
#pragma unroll
      for (int i = 0; i + 1 < kPerLane; ++i) left[i] = left[i + 1];
      left[kPerLane - 1] = 0;
    }
  }
  float share = lane < top_k ? scores[mine] : 0.f;
  if (router.scoring == Scoring::kSparseMixer) share = mixer_share(router, scores, mine);
  if (router.renormalize) {
    float sum = 0.f;  // in the order of the choices
    for (int first = 0; first < top_k; first += 8) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float other = __shfl_sync(~0u, share, first + j);
        if (first + j < top_k) sum += other;
      }
    }
    share = share / sum;
  }
  return {mine, share * router.scale};
}

}  // namespace regatta::cuda
