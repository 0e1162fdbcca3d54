// See experts.h: norm and router.
//
// Architectures: all; float32, bf16, fp16.
// Algorithm: a warp owns an expert's row of the router's weight, times the norm's. 2,048 columns of
// it stay in registers while the warp goes over the tokens of its block; each token's sum of
// squares is made beside the product, and divides it in the end. A block more, or all of them where
// no logits are wanted, writes the normed rows, a warp per token (of few all of it), and the logit
// of the shared expert's gate. Every sum's order is the row's alone, in the batch-invariant mode
// that of normed rows too. Bound: the router's weight out of L2, once for kTokens tokens. Source:
// own.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/experts/experts.h"

namespace regatta::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kUnits = 8;  // of 8 columns, that a lane holds at a time
constexpr int kChunk = kUnits * kWarp * 8;

template <class T>
struct Args {
  const T* x;
  const T* norm_weight;  // null: no norm
  const T* norm_bias;    // or null
  float epsilon;
  bool layer, plus_one;
  bool together;  // a block may norm a row, in an order of its own
  const T* weight;
  const T* shared_gate;
  T* normed;
  float* logits;
  float* shared_gate_out;
  int num_tokens, hidden_size, num_experts;
};

// Eight columns of a row from `first` on, those past its end as 0. kVector: the row is whole units
// of 16 bytes (or 32), aligned.
template <bool kVector, class T>
__device__ __forceinline__ void load_unit(const T* row, int first, int width, float (&to)[8]) {
  if (kVector && sizeof(T) == 2) {
    if (first < width) {
      const Vec16<T> v = load16(row + first);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = v.get(i);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = 0.f;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      to[i] = first + i < width ? Traits<T>::to_float(row[first + i]) : 0.f;
    }
  }
}

template <bool kVector, class T>
__device__ __forceinline__ void store_unit(T* row, int first, int width, const float (&from)[8]) {
  if (kVector && sizeof(T) == 2) {
    if (first >= width) return;
    Vec16<T> v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.set(i, from[i]);
    store16(row + first, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i < width) row[first + i] = Traits<T>::from_float(from[i]);
    }
  }
}

// unit(first column, its values) of a row, all loads of a chunk ahead of the first call.
template <bool kVector, class T, class Unit>
__device__ __forceinline__ void for_units(const T* row, int width, Unit&& unit) {
  for (int c = threadIdx.x % kWarp * 8; c < width; c += kChunk) {
    float v[kUnits][8];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_unit<kVector>(row, c + u * kWarp * 8, width, v[u]);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) unit(c + u * kWarp * 8, v[u]);
  }
}

// Mean and factor of a row's norm; every lane has them.
template <class T, bool kVector>
__device__ __forceinline__ void statistics(const Args<T>& a, const T* x, float* mean,
                                           float* factor) {
  float sum = 0.f;
  *mean = 0.f;
  if (a.layer) {
    for_units<kVector>(x, a.hidden_size, [&](int, const float (&v)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += v[i];
    });
    *mean = warp_sum(sum) / a.hidden_size;
    sum = 0.f;
  }
  for_units<kVector>(x, a.hidden_size, [&](int first, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float d = first + i < a.hidden_size ? v[i] - *mean : 0.f;
      sum = fmaf(d, d, sum);
    }
  });
  *factor = rsqrtf(warp_sum(sum) / a.hidden_size + a.epsilon);
}

// factor of columns from `first` on: the norm's weight, or 1.
template <bool kVector, class T>
__device__ __forceinline__ void norm_unit(const Args<T>& a, int first, float (&to)[8]) {
  if (a.norm_weight == nullptr) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = 1.f;
    return;
  }
  load_unit<kVector>(a.norm_weight, first, a.hidden_size, to);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] += a.plus_one ? 1.f : 0.f;
}

// Eight columns of a row, v, behind the norm with these factors. Returns `dot` and their products
// with the shared gate.
template <class T, bool kVector>
__device__ __forceinline__ float write_unit(const Args<T>& a, int token, int first,
                                            const float (&v)[8], const float (&factors)[8],
                                            float mean, float factor, float dot) {
  const int width = a.hidden_size;
  float y[8], bias[8] = {}, gate[8] = {};
  if (a.norm_bias != nullptr) load_unit<kVector>(a.norm_bias, first, width, bias);
  if (a.shared_gate != nullptr) load_unit<kVector>(a.shared_gate, first, width, gate);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y[i] = fmaf((v[i] - mean) * factor, factors[i], bias[i]);
    dot = fmaf(Traits<T>::to_float(Traits<T>::from_float(y[i])), gate[i], dot);
  }
  store_unit<kVector>(a.normed + static_cast<int64_t>(token) * width, first, width, y);
  return dot;
}

// One token's normed row, and what its shared gate lets through. By a warp.
template <class T, bool kVector>
__device__ __forceinline__ void write_normed(const Args<T>& a, int token) {
  const T* x = a.x + static_cast<int64_t>(token) * a.hidden_size;
  float mean = 0.f, factor = 1.f, dot = 0.f;
  if (a.norm_weight != nullptr) statistics<T, kVector>(a, x, &mean, &factor);
  for_units<kVector>(x, a.hidden_size, [&](int first, const float (&v)[8]) {
    float factors[8];
    norm_unit<kVector>(a, first, factors);
    dot = write_unit<T, kVector>(a, token, first, v, factors, mean, factor, dot);
  });
  if (a.shared_gate == nullptr) return;
  dot = warp_sum(dot);
  if (threadIdx.x % kWarp == 0) a.shared_gate_out[token] = 1.f / (1.f + __expf(-dot));
}

constexpr int kUnitsTogether = 4;  // of a thread of a block that norms a row
constexpr int kMostTogether = kUnitsTogether * kThreads * 8;

// The same by a whole block, all of the row on its way at once.
template <class T, bool kVector>
__device__ __forceinline__ void write_normed_together(const Args<T>& a, int token) {
  constexpr int kMost = kUnitsTogether, kSpan = kThreads * 8;  // columns between units
  __shared__ float sums[2][kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, own = threadIdx.x * 8;
  const int width = a.hidden_size;
  float factors[kMost][8], x[kMost][8];
#pragma unroll
  for (int u = 0; u < kMost; ++u) norm_unit<kVector>(a, own + u * kSpan, factors[u]);
  pdl_wait();
#pragma unroll
  for (int u = 0; u < kMost; ++u) {
    load_unit<kVector>(a.x + static_cast<int64_t>(token) * width, own + u * kSpan, width, x[u]);
  }
  // Of all threads' values, in the order of the warps.
  const auto total = [&](float value, float* of_warps) {
    value = warp_sum(value);
    if (lane == 0) of_warps[warp] = value;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w];
    return sum;
  };
  float mean = 0.f, factor = 1.f, square = 0.f, dot = 0.f;
  if (a.layer) {
    float sum = 0.f;
#pragma unroll
    for (int u = 0; u < kMost; ++u) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[u][i];
    }
    mean = total(sum, sums[0]) / width;
  }
  if (a.norm_weight != nullptr) {
#pragma unroll
    for (int u = 0; u < kMost; ++u) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float d = own + u * kSpan + i < width ? x[u][i] - mean : 0.f;
        square = fmaf(d, d, square);
      }
    }
    factor = rsqrtf(total(square, sums[1]) / width + a.epsilon);
  }
#pragma unroll
  for (int u = 0; u < kMost; ++u) {
    dot = write_unit<T, kVector>(a, token, own + u * kSpan, x[u], factors[u], mean, factor, dot);
  }
  if (a.shared_gate == nullptr) return;
  __syncthreads();  // the sums are written again
  dot = total(dot, sums[0]);
  if (threadIdx.x == 0) a.shared_gate_out[token] = 1.f / (1.f + __expf(-dot));
}

// A chunk of an expert's weight times the norm's; adds to its sum, and to that of its products with
// the norm's bias.
template <class T, bool kVector>
__device__ __forceinline__ void load_factors(const Args<T>& a, const T* weight, int first,
                                             float (&w)[kUnits][8], float* whole, float* shift) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int at = first + u * kWarp * 8;
    float norm[8];
    load_unit<kVector>(weight, at, a.hidden_size, w[u]);
    norm_unit<kVector>(a, at, norm);
    if (a.norm_bias != nullptr) {
      float bias[8];
      load_unit<kVector>(a.norm_bias, at, a.hidden_size, bias);
#pragma unroll
      for (int i = 0; i < 8; ++i) *shift = fmaf(w[u][i], bias[i], *shift);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[u][i] *= norm[i];
      *whole += w[u][i];
    }
  }
}

// grid: (E / kWarps + 1, tiles of tokens). The last block of a tile writes the normed rows. What is
// constant is asked for while the launch ahead ends.
template <class T, bool kVector, int kTokens>
__global__ void __launch_bounds__(kThreads) route_kernel(const Args<T> a) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int expert = blockIdx.x * kWarps + warp;
  const int first = blockIdx.y * kTokens;
  const int count = min(kTokens, a.num_tokens - first);
  pdl_trigger();
  if (blockIdx.x == gridDim.x - 1) {
    if (kTokens == 1 && a.together) {
      write_normed_together<T, kVector>(a, first);
      return;
    }
    pdl_wait();
    for (int t = warp; t < count; t += kWarps) write_normed<T, kVector>(a, first + t);
    return;
  }
  if (expert >= a.num_experts) {
    pdl_wait();
    return;
  }
  const T* weight = a.weight + static_cast<int64_t>(expert) * a.hidden_size;
  // Of x times the norm's weight, of x itself, of its squares; and of the weight alone.
  float dot[kTokens] = {}, sum[kTokens] = {}, square[kTokens] = {}, whole = 0.f, shift = 0.f;
  float w[kUnits][8];
  load_factors<T, kVector>(a, weight, lane * 8, w, &whole, &shift);
  pdl_wait();
  for (int c = lane * 8; c < a.hidden_size; c += kChunk) {
    if (c >= kChunk) load_factors<T, kVector>(a, weight, c, w, &whole, &shift);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) break;
      const T* x = a.x + static_cast<int64_t>(first + t) * a.hidden_size;
      float v[kUnits][8];
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        load_unit<kVector>(x, c + u * kWarp * 8, a.hidden_size, v[u]);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          dot[t] = fmaf(v[u][i], w[u][i], dot[t]);
          square[t] = fmaf(v[u][i], v[u][i], square[t]);
          if (a.layer) sum[t] += v[u][i];
        }
      }
    }
  }
  if (a.layer) whole = warp_sum(whole);
  if (a.norm_bias != nullptr) shift = warp_sum(shift);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= count) break;
    float y = warp_sum(dot[t]);
    if (a.norm_weight != nullptr) {
      const float mean = a.layer ? warp_sum(sum[t]) / a.hidden_size : 0.f;
      const float variance = warp_sum(square[t]) / a.hidden_size - mean * mean;
      y = fmaf(y - mean * whole, rsqrtf(variance + a.epsilon), shift);
    }
    if (lane == 0) a.logits[static_cast<int64_t>(first + t) * a.num_experts + expert] = y;
  }
}

template <class T, bool kVector, int kTokens>
Status run_tokens(const Args<T>& a, const Launch& launch_on) {
  return launch(
      route_kernel<T, kVector, kTokens>,
      {launch_on, grid_of(ceil_div(a.num_experts, kWarps) + 1, ceil_div(a.num_tokens, kTokens)),
       kThreads},
      "route", a);
}

template <class T, bool kVector>
Status run_vector(const Args<T>& a, const Launch& launch_on) {
  // Few tokens: as many blocks as keep all multiprocessors at work.
  if (a.num_experts > 0 && a.num_tokens <= 8) return run_tokens<T, kVector, 1>(a, launch_on);
  if (a.num_experts > 0 && a.num_tokens <= 64) return run_tokens<T, kVector, 4>(a, launch_on);
  return run_tokens<T, kVector, 8>(a, launch_on);
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
  a.shared_gate = static_cast<const T*>(p.shared_gate);
  a.normed = static_cast<T*>(p.normed);
  a.logits = p.logits;
  a.shared_gate_out = p.shared_gate_out;
  a.together = !is_batch_invariant && p.hidden_size <= kMostTogether;
  a.num_tokens = static_cast<int>(p.num_tokens);
  a.hidden_size = static_cast<int>(p.hidden_size);
  a.num_experts = p.logits == nullptr ? 0 : static_cast<int>(p.num_experts);
  return p.hidden_size % 8 == 0 ? run_vector<T, true>(a, launch_on)
                                : run_vector<T, false>(a, launch_on);
}

}  // namespace

Status route(const RouteParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  return dispatch_dtype(p.dtype, "route", [&](auto* t) {
    return run<std::remove_pointer_t<decltype(t)>>(p, launch_on);
  });
}

}  // namespace regatta::cuda
