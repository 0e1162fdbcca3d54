// What the kernels of few tokens' experts share (experts.h): arguments, the choice by a whole
// block, products of codes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/activation/functions.cuh"
#include "cuda/common.cuh"
#include "cuda/experts/choose.cuh"
#include "cuda/experts/experts.h"
#include "cuda/gemm/dot.cuh"
#include "cuda/gemm/quantize_row.cuh"

namespace regatta::cuda::few {

// Of the weights: T, or codes.
template <class T, bool kCodes>
using Element = std::conditional_t<kCodes, uint8_t, T>;
template <class T, bool kCodes>
constexpr int kUnit = 16 / static_cast<int>(sizeof(Element<T, kCodes>));  // values of 16 bytes

constexpr float kHalfUnit = 1.f / 256;  // of codes as halves
constexpr int kMostVectors = 4;         // of a row that becomes codes: 8,192 columns

template <class T, bool kCodes>
struct Args {
  using Weight = Element<T, kCodes>;
  ChooseArgs choose;
  const T* x;
  const Weight *gate_up, *shared_gate_up, *down, *shared_down;
  const T *gate_up_bias, *down_bias;
  const float *gate_up_scale, *down_scale;  // [E, 2 I] and [E, H], of codes
  const float *gate_up_act, *down_act;      // [1]: the scale of x's codes, or 0: each row's own
  const float* shared_gate;
  T* inner;
  const T* source;
  T* out;
  float* sumsq;
  float source_scale, made_scale;
  int hidden_size, intermediate_size, shared_size, top_k;
  Activation activation;
};

template <class T, bool kCodes>
Args<T, kCodes> make_args(const FewTokensParams& p) {
  using Weight = Element<T, kCodes>;
  Args<T, kCodes> a = {};
  a.choose = p.choose;
  a.x = static_cast<const T*>(p.x);
  a.gate_up = static_cast<const Weight*>(p.gate_up);
  a.gate_up_bias = static_cast<const T*>(p.gate_up_bias);
  a.gate_up_scale = p.gate_up_scale;
  a.gate_up_act = p.gate_up_act;
  a.shared_gate_up = static_cast<const Weight*>(p.shared_gate_up);
  a.down = static_cast<const Weight*>(p.down);
  a.down_bias = static_cast<const T*>(p.down_bias);
  a.down_scale = p.down_scale;
  a.down_act = p.down_act;
  a.shared_down = static_cast<const Weight*>(p.shared_down);
  a.shared_gate = p.shared_gate;
  a.inner = static_cast<T*>(p.inner);
  a.source = static_cast<const T*>(p.source);
  a.out = static_cast<T*>(p.out);
  a.sumsq = p.sumsq_out;
  a.source_scale = p.source_scale;
  a.made_scale = p.made_scale;
  a.hidden_size = static_cast<int>(p.hidden_size);
  a.intermediate_size = static_cast<int>(p.intermediate_size);
  a.shared_size = static_cast<int>(p.shared_size);
  a.top_k = static_cast<int>(p.choose.router.top_k);
  a.activation = p.activation;
  return a;
}

// What a launch asks for. launch() raises the limit for more than 48 KB, and does not know of the
// kernel's own variables.
inline size_t dynamic_bytes(int64_t bytes) {
  constexpr int64_t kLimit = 48 << 10, kOwn = 8 << 10;
  return static_cast<size_t>(bytes > kLimit - kOwn ? std::max(bytes, kLimit + 1024) : bytes);
}

// A token's experts: of several tokens in the order of their numbers.
struct Chosen {
  int32_t ids[kMaxChosen];
  float shares[kMaxChosen];
};

// Room to choose in. kShares: for the shares, too.
template <bool kShares>
struct ChooseRoom {
  static constexpr int kWarps = kMaxExperts / kWarp;  // whose sums are added, whatever the block's
  alignas(16) float keys[kMaxExperts];
  float scores[kShares ? kMaxExperts : 1], largest[kWarps], sums[kWarps];
};

// Numbers in the order of the values, none of which is NaN; 0 and -0 are one. More than 0.
__device__ __forceinline__ uint32_t order_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// What choose() does, by a whole block, whose other warps would wait for one: an expert's rank is
// the number of those that come ahead of it. The same bits by any number of threads, with shares
// and without.
template <int kThreads, bool kShares>
__device__ __forceinline__ void choose_together(const ChooseArgs& a, int token,
                                                ChooseRoom<kShares>& room, Chosen& to) {
  constexpr int kEach = ceil_div(static_cast<int>(kMaxExperts), kThreads),
                kWarps = kThreads / kWarp;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Router& router = a.router;
  const int count = static_cast<int>(router.num_experts), top_k = static_cast<int>(router.top_k);
  const float* logits = a.logits + static_cast<int64_t>(token) * count;
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = static_cast<int>(threadIdx.x) + i * kThreads;
      if (e < count) body(i, e);
    }
  };
  float value[kEach], largest = -INFINITY;
  bool sound = true;
  each([&](int i, int e) {
    value[i] = __ldcg(logits + e);
    if (a.bias != nullptr) value[i] += __ldg(a.bias + e);
    sound = sound && !isnan(value[i]);
    largest = fmaxf(largest, value[i]);
  });
  largest = warp_max(largest);
  if (lane == 0) room.largest[warp] = largest;
  if (!__syncthreads_and(sound)) {
    if (threadIdx.x < top_k) to.ids[threadIdx.x] = threadIdx.x, to.shares[threadIdx.x] = NAN;
    __syncthreads();
    return;
  }
  if (router.scoring == Scoring::kSoftmax) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, room.largest[w]);
    // Of each 32 experts, then of all: threads that have none add nothing.
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int first = i * kThreads + warp * kWarp;
      if (first >= count) break;
      if (first + lane < count) value[i] = expf(value[i] - largest);
      const float sum = warp_sum(first + lane < count ? value[i] : 0.f);
      if (lane == 0) room.sums[first / kWarp] = sum;
    }
    __syncthreads();
    float sum = 0.f;
    for (int w = 0; w * kWarp < count; ++w) sum += room.sums[w];
    each([&](int i, int) { value[i] = value[i] / sum; });
  } else {
    each([&](int i, int) { value[i] = 1.f / (1.f + expf(-value[i])); });
  }
  const bool in_groups = router.top_groups < router.num_groups;
  each([&](int i, int e) {
    if constexpr (kShares) room.scores[e] = value[i];
    if (a.correction != nullptr) value[i] += __ldg(a.correction + e);
    // Infinite logits make scores of NaN, which no order has a place for.
    if (isnan(value[i])) value[i] = -INFINITY;
    if (in_groups) room.keys[e] = value[i];
  });
  if (in_groups) {
    __syncthreads();
    if (warp == 0) choose_groups(router, room.keys);
    __syncthreads();
    each([&](int i, int e) { value[i] = room.keys[e]; });
  }
  each([&](int i, int e) { room.keys[e] = __uint_as_float(order_of(value[i])); });
  const int fours = (count + 3) / 4, behind = count + static_cast<int>(threadIdx.x);
  if (behind < 4 * fours) room.keys[behind] = 0.f;
  __syncthreads();
  // So many neighbouring threads share the others that one is compared with.
  int shift = 0;
  while (shift < 3 && (count << (shift + 1)) <= kThreads) ++shift;
  const int parts = 1 << shift, part = static_cast<int>(threadIdx.x) & (parts - 1);
  for (int first = 0; first < (count << shift); first += kThreads) {
    const int e = (first + static_cast<int>(threadIdx.x)) >> shift, its_four = e / 4;
    const uint32_t own = e < count ? __float_as_uint(room.keys[e]) : ~0u;
    int rank = 0;
#pragma unroll 4
    for (int f = part; f < fours; f += parts) {
      const float4 keys = *reinterpret_cast<const float4*>(room.keys + f * 4);
      // Of equal ones the first is ahead.
      const uint32_t least = f < its_four ? own - 1 : own;
      rank += __float_as_uint(keys.x) > least;
      rank += __float_as_uint(keys.y) > least;
      rank += __float_as_uint(keys.z) > least;
      rank += __float_as_uint(keys.w) > least;
    }
    for (int j = its_four * 4; part == 0 && j < min(e, count); ++j) {
      rank += __float_as_uint(room.keys[j]) == own;
    }
    for (int o = 1; o < parts; o *= 2) rank += __shfl_xor_sync(~0u, rank, o);
    if (e < count && part == 0 && rank < top_k) to.ids[rank] = e;
  }
  __syncthreads();
  if (!kShares && a.num_tokens == 1) return;
  if (warp == 0) {
    const bool inside = lane < top_k;
    const int id = inside ? to.ids[lane] : 0;
    float share = 0.f;
    if constexpr (kShares) {
      if (inside) share = room.scores[id];
      if (router.renormalize) share = share / warp_sum(share);
    }
    int place = lane;
    if (a.num_tokens > 1) {
      place = 0;
      for (int j = 0; j < top_k; ++j) place += __shfl_sync(~0u, id, j) < id;
    }
    __syncwarp();
    if (inside) to.ids[place] = id, to.shares[place] = share * router.scale;
  }
  __syncthreads();
}

__device__ __forceinline__ uint4 unit_at(const void* x) {
  return *reinterpret_cast<const uint4*>(x);
}

__device__ __forceinline__ __half2 halves_of(uint32_t two_codes) {
  return bit_cast<__half2>(
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_codes), __NV_E4M3));
}

// Of codes; x: halves of kHalfUnit.
__device__ __forceinline__ float dot_codes(const uint4& w, const __half* x, float acc) {
  const uint4 first = unit_at(x), second = unit_at(x + 8);
  const uint32_t ws[4] = {w.x, w.y, w.z, w.w};
  const uint32_t xs[8] = {first.x,  first.y,  first.z,  first.w,
                          second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 low = __hmul2(halves_of(ws[i] & 0xffff), bit_cast<__half2>(xs[2 * i]));
    const float2 y =
        __half22float2(__hfma2(halves_of(ws[i] >> 16), bit_cast<__half2>(xs[2 * i + 1]), low));
    acc += y.x + y.y;
  }
  return acc;
}

// Eight codes as halves of kHalfUnit.
__device__ __forceinline__ void store_halves(__half* to, uint2 codes) {
  const __half2 unit = __float2half2_rn(kHalfUnit);
  const uint32_t words[2] = {codes.x, codes.y};
  uint32_t halves[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    halves[i] = bit_cast<uint32_t>(__hmul2(halves_of(words[i / 2] >> i % 2 * 16 & 0xffff), unit));
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(halves[0], halves[1], halves[2], halves[3]);
}

__device__ __forceinline__ float gate_of(const Activation& of, float gate, float up) {
  switch (of.function) {
    case Function::kSilu:
      return gated<Function::kSilu>(of, gate, up);
    case Function::kGelu:
      return gated<Function::kGelu>(of, gate, up);
    case Function::kGeluTanh:
      return gated<Function::kGeluTanh>(of, gate, up);
    case Function::kRelu:
      return gated<Function::kRelu>(of, gate, up);
    case Function::kReluSquared:
      return gated<Function::kReluSquared>(of, gate, up);
  }
  return 0.f;
}

// What `up` made for a token, [K, I], as halves of codes; scales[k] is of its k-th row's. By the
// whole block.
template <class T>
__device__ __forceinline__ void make_codes(const Args<T, true>& a, const T* inner, __half* codes,
                                           float* scales) {
  __shared__ int largest[kMaxChosen];  // bits of floats, none of which is negative
  const int width = a.intermediate_size, units = a.top_k * width / 8;
  if (threadIdx.x < kMaxChosen) largest[threadIdx.x] = 0;
  __syncthreads();
  const float fixed = __ldg(a.down_act);
  for (int first = threadIdx.x / kWarp * kWarp; first < units; first += blockDim.x) {
    const int unit = first + static_cast<int>(threadIdx.x) % kWarp, last = first + kWarp - 1;
    const bool inside = unit < units;
    const Vec16<T> x[1] = {inside ? load16(inner + unit * 8)
                                  : bit_cast<Vec16<T>>(make_uint4(0, 0, 0, 0))};
    float own = largest_of(x);
    if (last < units && first * 8 / width == last * 8 / width) {
      own = warp_max(own);
      if (unit == first) atomicMax(&largest[first * 8 / width], __float_as_int(own));
    } else if (inside) {
      atomicMax(&largest[unit * 8 / width], __float_as_int(own));
    }
  }
  __syncthreads();
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const int k = unit * 8 / width;
    const CodeScale by = code_scale<true>(fixed, __int_as_float(largest[k]), 1.f);
    const Vec16<T> x = load16(inner + unit * 8);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = x.get(i);
    store_halves(codes + unit * 8,
                 make_uint2(four_codes<true>(v, by.factor), four_codes<true>(v + 4, by.factor)));
    if (unit * 8 % width == 0) scales[k] = by.scale;
  }
  __syncthreads();
}

}  // namespace regatta::cuda::few
