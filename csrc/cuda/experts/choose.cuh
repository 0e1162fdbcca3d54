// How the router's logits become a choice (experts.h), by a warp per token.
#pragma once

#include "cuda/common.cuh"
#include "cuda/experts/experts.h"

namespace regatta::cuda {

// The largest of the lanes' values and where it stands; of equal ones the lower place.
__device__ __forceinline__ void warp_largest(float* value, int* at) {
#if __CUDA_ARCH__ >= 800
  // Whole numbers in the order of the values; 0 and -0 are one.
  const uint32_t bits = __float_as_uint(*value + 0.f);
  const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
  const uint32_t top = __reduce_max_sync(~0u, key);
  *at = static_cast<int>(__reduce_min_sync(~0u, key == top ? static_cast<uint32_t>(*at) : ~0u));
  *value = __uint_as_float(top >> 31 ? top ^ 0x80000000u : ~top);
#else
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) {
    const float other = __shfl_xor_sync(~0u, *value, o);
    const int place = __shfl_xor_sync(~0u, *at, o);
    if (other > *value || (other == *value && place < *at)) *value = other, *at = place;
  }
#endif
}

// Leaves -inf in `choice` [E] but for the experts of the chosen groups. By a warp.
__device__ __forceinline__ void choose_groups(const Router& router, float* choice) {
  const int lane = threadIdx.x % kWarp;
  const int num_groups = static_cast<int>(router.num_groups);
  const int size = static_cast<int>(router.num_experts) / num_groups;
  float best = -INFINITY, second = -INFINITY;
  if (lane < num_groups) {
    for (int i = 0; i < size; ++i) {
      const float c = choice[lane * size + i];
      if (c > best) {
        second = best, best = c;
      } else if (c > second) {
        second = c;
      }
    }
  }
  const float score = router.group_score == GroupScore::kTopTwo ? best + second : best;
  int rank = 0;  // groups that come before this lane's
  for (int g = 0; g < num_groups; ++g) {
    const float other = __shfl_sync(~0u, score, g);
    if (other > score || (other == score && g < lane)) ++rank;
  }
  const unsigned chosen = __ballot_sync(~0u, lane < num_groups && rank < router.top_groups);
  for (int e = lane; e < num_groups * size; e += kWarp) {
    if ((chosen >> (e / size) & 1) == 0) choice[e] = -INFINITY;
  }
  __syncwarp();
}

// Chooses for one token of these logits [E]: ids and shares [K], the best first. scores, choice:
// room for E values in shared memory, of this warp. kPerLane: experts of a lane, at least E / 32.
template <int kPerLane>
__device__ __forceinline__ void choose_among(const ChooseArgs& a, const float* logits, int32_t* ids,
                                             float* shares, float* scores, float* choice) {
  const int lane = threadIdx.x % kWarp;
  const Router& router = a.router;
  const int count = static_cast<int>(router.num_experts), top_k = static_cast<int>(router.top_k);
  float value[kPerLane], largest = -INFINITY;
  bool sound = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + i * kWarp;
    value[i] = e < count ? __ldcg(logits + e) : -INFINITY;
    if (a.bias != nullptr && e < count) value[i] += __ldg(a.bias + e);
    sound = sound && !isnan(value[i]);
    largest = fmaxf(largest, value[i]);
  }
  sound = __all_sync(~0u, sound);
  if (!sound) {
    if (lane < top_k) ids[lane] = lane, shares[lane] = NAN;
    return;
  }
  if (router.scoring == Scoring::kSoftmax) {
    largest = warp_max(largest);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      value[i] = lane + i * kWarp < count ? expf(value[i] - largest) : 0.f;
      sum += value[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) value[i] = value[i] / sum;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) value[i] = 1.f / (1.f + expf(-value[i]));
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + i * kWarp;
    if (e >= count) continue;
    scores[e] = value[i];
    choice[e] = a.correction == nullptr ? value[i] : value[i] + __ldg(a.correction + e);
  }
  __syncwarp();
  if (router.top_groups < router.num_groups) choose_groups(router, choice);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + i * kWarp;
    value[i] = e < count ? choice[e] : -INFINITY;
  }
  int mine = 0;  // lane j keeps the j-th choice
  for (int j = 0; j < top_k; ++j) {
    float best = -INFINITY;
    int at = 1 << 30;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = lane + i * kWarp;
      if (e < count && (value[i] > best || at == 1 << 30)) best = value[i], at = e;
    }
    warp_largest(&best, &at);
    if (lane == j) mine = at;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      // A chosen one is no candidate any more; one of a group that is not chosen never was.
      if (lane + i * kWarp == at) value[i] = -INFINITY;
    }
  }
  float share = lane < top_k ? scores[mine] : 0.f;
  if (router.renormalize) {
    float sum = 0.f;  // in the order of the choices
    for (int j = 0; j < top_k; ++j) sum += __shfl_sync(~0u, share, j);
    share = share / sum;
  }
  if (lane < top_k) ids[lane] = mine, shares[lane] = share * router.scale;
}

// The same into the lists of all tokens.
__device__ __forceinline__ void choose(const ChooseArgs& a, int token, float* scores,
                                       float* choice) {
  const int64_t count = a.router.num_experts, first = token * a.router.top_k;
  const float* const logits = a.logits + token * count;
  int32_t* const ids = a.ids + first;
  float* const shares = a.shares + first;
  if (count <= 4 * kWarp) return choose_among<4>(a, logits, ids, shares, scores, choice);
  if (count <= 8 * kWarp) return choose_among<8>(a, logits, ids, shares, scores, choice);
  choose_among<kMaxExperts / kWarp>(a, logits, ids, shares, scores, choice);
}

}  // namespace regatta::cuda
