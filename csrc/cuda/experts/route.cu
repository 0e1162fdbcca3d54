// See experts.h: norm and router.
//
// Architectures: all; float32, bf16, fp16.
// Algorithm: a warp owns an expert's row of the router's weight, while it goes over the tokens of
// its block; it makes each token's norm from x itself, ahead of the product. A block more writes
// the normed rows, and the logit of the shared expert's gate. Every sum's order is the row's alone.
// Bound: the router's weight out of L2, T / kTokens times.
// Source: own.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/experts/experts.h"

namespace regatta::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTokens = 8;  // of a block, where there are so many

template <class T>
struct Args {
  const T* x;
  const T* norm_weight;  // null: no norm
  const T* norm_bias;    // or null
  float epsilon;
  bool layer, plus_one;
  const T* weight;
  const float* bias;
  const T* shared_gate;
  T* normed;
  float* logits;
  float* shared_gate_out;
  int num_tokens, hidden_size, num_experts, tokens_per_block;
};

// value(i) of a row's columns, lane after lane, in units of 16 bytes where kVector.
template <class T, bool kVector, class Body>
__device__ __forceinline__ void for_columns(int width, Body&& body) {
  constexpr int kUnit = kVector ? Vec16<T>::kSize : 1;
  for (int i = threadIdx.x % kWarp * kUnit; i < width; i += kWarp * kUnit) body(i);
}

template <class T, bool kVector>
struct Columns {
  static constexpr int kUnit = kVector ? Vec16<T>::kSize : 1;
  float v[kUnit];

  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kVector) {
      const Vec16<T> x = load16(from);
#pragma unroll
      for (int e = 0; e < kUnit; ++e) v[e] = x.get(e);
    } else {
      v[0] = Traits<T>::to_float(*from);
    }
  }
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kVector) {
      Vec16<T> x;
#pragma unroll
      for (int e = 0; e < kUnit; ++e) x.set(e, v[e]);
      store16(to, x);
    } else {
      *to = Traits<T>::from_float(v[0]);
    }
  }
};

// Mean and factor of a row's norm; every lane has them.
template <class T, bool kVector>
__device__ __forceinline__ void statistics(const Args<T>& a, const T* x, float* mean,
                                           float* factor) {
  using Unit = Columns<T, kVector>;
  float sum = 0.f;
  *mean = 0.f;
  if (a.layer) {
    for_columns<T, kVector>(a.hidden_size, [&](int i) {
      Unit u;
      u.load(x + i);
#pragma unroll
      for (int e = 0; e < Unit::kUnit; ++e) sum += u.v[e];
    });
    *mean = warp_sum(sum) / a.hidden_size;
    sum = 0.f;
  }
  for_columns<T, kVector>(a.hidden_size, [&](int i) {
    Unit u;
    u.load(x + i);
#pragma unroll
    for (int e = 0; e < Unit::kUnit; ++e) {
      const float d = u.v[e] - *mean;
      sum = fmaf(d, d, sum);
    }
  });
  *factor = rsqrtf(warp_sum(sum) / a.hidden_size + a.epsilon);
}

// The columns of a normed row from i on, rounded as they leave.
template <class T, bool kVector>
__device__ __forceinline__ Columns<T, kVector> normed_columns(const Args<T>& a, const T* x, int i,
                                                              float mean, float factor) {
  using Unit = Columns<T, kVector>;
  Unit u;
  u.load(x + i);
  if (a.norm_weight == nullptr) return u;
  Unit weight, bias = {};
  weight.load(a.norm_weight + i);
  if (a.norm_bias != nullptr) bias.load(a.norm_bias + i);
#pragma unroll
  for (int e = 0; e < Unit::kUnit; ++e) {
    const float w = a.plus_one ? 1.f + weight.v[e] : weight.v[e];
    const float y = fmaf((u.v[e] - mean) * factor, w, bias.v[e]);
    u.v[e] = Traits<T>::to_float(Traits<T>::from_float(y));
  }
  return u;
}

// grid: (E / kWarps + 1, tiles of tokens). The last block of a tile writes the normed rows.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) route_kernel(const Args<T> a) {
  using Unit = Columns<T, kVector>;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool writes = blockIdx.x == gridDim.x - 1;
  const int expert = blockIdx.x * kWarps + warp;
  const int first = blockIdx.y * a.tokens_per_block;
  const int last = min(first + a.tokens_per_block, a.num_tokens);
  pdl_trigger();
  pdl_wait();
  if (writes) {
    for (int t = first + warp; t < last; t += kWarps) {
      const T* x = a.x + static_cast<int64_t>(t) * a.hidden_size;
      T* to = a.normed + static_cast<int64_t>(t) * a.hidden_size;
      float mean = 0.f, factor = 1.f, dot = 0.f;
      if (a.norm_weight != nullptr) statistics<T, kVector>(a, x, &mean, &factor);
      for_columns<T, kVector>(a.hidden_size, [&](int i) {
        const Unit u = normed_columns<T, kVector>(a, x, i, mean, factor);
        u.store(to + i);
        if (a.shared_gate == nullptr) return;
        Unit gate;
        gate.load(a.shared_gate + i);
#pragma unroll
        for (int e = 0; e < Unit::kUnit; ++e) dot = fmaf(u.v[e], gate.v[e], dot);
      });
      if (a.shared_gate == nullptr) continue;
      dot = warp_sum(dot);
      if (lane == 0) a.shared_gate_out[t] = 1.f / (1.f + __expf(-dot));
    }
    return;
  }
  if (expert >= a.num_experts) return;
  const T* weight = a.weight + static_cast<int64_t>(expert) * a.hidden_size;
  for (int t = first; t < last; ++t) {
    const T* x = a.x + static_cast<int64_t>(t) * a.hidden_size;
    float mean = 0.f, factor = 1.f, dot = 0.f;
    if (a.norm_weight != nullptr) statistics<T, kVector>(a, x, &mean, &factor);
    for_columns<T, kVector>(a.hidden_size, [&](int i) {
      const Unit u = normed_columns<T, kVector>(a, x, i, mean, factor);
      Unit w;
      w.load(weight + i);
#pragma unroll
      for (int e = 0; e < Unit::kUnit; ++e) dot = fmaf(u.v[e], w.v[e], dot);
    });
    dot = warp_sum(dot);
    if (lane == 0) {
      if (a.bias != nullptr) dot += a.bias[expert];
      a.logits[static_cast<int64_t>(t) * a.num_experts + expert] = dot;
    }
  }
}

template <class T>
Status run(const RouteParams& p, const Launch& launch_on) {
  Args<T> a = {};
  a.x = static_cast<const T*>(p.x);
  if (p.norm.is_there) {
    a.norm_weight = static_cast<const T*>(p.norm_weights.weight);
    a.norm_bias = static_cast<const T*>(p.norm_weights.bias);
  }
  a.epsilon = p.norm.epsilon;
  a.layer = p.norm.kind == NormKind::kLayer;
  a.plus_one = p.norm.plus_one;
  a.weight = static_cast<const T*>(p.weight);
  a.bias = p.bias;
  a.shared_gate = static_cast<const T*>(p.shared_gate);
  a.normed = static_cast<T*>(p.normed);
  a.logits = p.logits;
  a.shared_gate_out = p.shared_gate_out;
  a.num_tokens = static_cast<int>(p.num_tokens);
  a.hidden_size = static_cast<int>(p.hidden_size);
  a.num_experts = static_cast<int>(p.router.num_experts);
  // Few tokens: one in each block, so that all multiprocessors are at work.
  a.tokens_per_block = p.num_tokens <= 16 ? 1 : kTokens;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.router.num_experts, int64_t{kWarps}) + 1),
                     static_cast<unsigned>(ceil_div(p.num_tokens, int64_t{a.tokens_per_block})));
  config.block = dim3(kThreads);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  const bool vector = p.hidden_size % Vec16<T>::kSize == 0;
  return vector ? launch(route_kernel<T, true>, config, "route", a)
                : launch(route_kernel<T, false>, config, "route", a);
}

}  // namespace

Status route(const RouteParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  if (p.router.num_experts > kMaxExperts || p.router.top_k > kMaxChosen ||
      p.router.num_groups > kWarp) {
    return Status::error("route: at most " + std::to_string(kMaxExperts) + " experts, " +
                         std::to_string(kMaxChosen) + " of them chosen, in " +
                         std::to_string(kWarp) + " groups");
  }
  return dispatch_dtype(p.dtype, "route", [&](auto* t) {
    return run<std::remove_pointer_t<decltype(t)>>(p, launch_on);
  });
}

}  // namespace regatta::cuda
