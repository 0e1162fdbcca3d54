// See experts.h: the experts of few tokens, from the router's logits to the block's output.
//
// Architectures: all; bf16 and fp16. Two launches, each straight from the logits: no row is sorted
// or copied, and each block chooses for its token itself.
//   1. up: a warp makes a gate and its up, function and all; blocks stay, and a warp's next rows
//      travel while it finishes its last. Rows of shared experts need no choice: they come first,
//      and are asked for while the launch ahead ends.
//   2. down: a warp makes a column of the output, which is one sum over all that were chosen: each
//      product is weighed as it is added. The logits are two launches old, so it chooses and asks
//      for weights while `up` ends.
// Weights that two tokens choose are read twice, the second time out of L2. Bound: memory. Source:
// own.
#include <algorithm>

#include "cuda/activation/functions.cuh"
#include "cuda/common.cuh"
#include "cuda/experts/choose.cuh"
#include "cuda/experts/experts.h"

namespace regatta::cuda {
namespace {

constexpr int kUpWarps = 8;
constexpr int kUpBlocks = 2;      // of a multiprocessor
constexpr int kColumnWarps = 16;  // of a block of `down`: columns of a partial sum of squares
constexpr int kUnits = 8;         // of 16 bytes that a lane of `down` asks for at once
static_assert(gemm_sumsq_columns(kMostFewTokens) == kColumnWarps);

template <class T>
struct Args {
  ChooseArgs choose;
  const T* x;
  const T *gate_up, *gate_up_bias, *shared_gate_up;
  const T *down, *down_bias, *shared_down;
  const float* shared_gate;
  T* inner;
  const T* source;
  T* out;
  float* sumsq;
  float source_scale, made_scale;
  int hidden_size, intermediate_size, shared_size, top_k;
  Activation activation;
};

// What a token's experts are.
struct Chosen {
  float scores[kMaxExperts], choice[kMaxExperts];
  int32_t ids[kMaxChosen];
  float shares[kMaxChosen];
};

// acc += the eight products of w and x, one after the other.
template <class T>
__device__ __forceinline__ float dot_unit(const uint4& w, const uint4& x, float acc) {
  using Pair = typename Traits<T>::Pair;
  const uint32_t ws[4] = {w.x, w.y, w.z, w.w}, xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = Traits<T>::to_float2(bit_cast<Pair>(ws[i]));
    const float2 b = Traits<T>::to_float2(bit_cast<Pair>(xs[i]));
    acc = fmaf(a.y, b.y, fmaf(a.x, b.x, acc));
  }
  return acc;
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

// grid: (blocks, T). inner [T, S + K I]: shared, then those of each choice.
template <class T, int kUnroll>
__global__ void __launch_bounds__(kUpWarps* kWarp, kUpBlocks)
    few_tokens_up_kernel(const Args<T> a) {
  constexpr int kRound = kWarp * 8 * kUnroll;
  __shared__ Chosen chosen;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int token = blockIdx.y;
  const int width = a.hidden_size, inner = a.intermediate_size, shared = a.shared_size;
  const int items = shared + a.top_k * inner, stride = gridDim.x * kUpWarps;
  const uint64_t once = policy_evict_first();
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const T *gate = nullptr, *up = nullptr;
  const auto aim = [&](int item) {
    if (item < shared) {
      gate = a.shared_gate_up + static_cast<int64_t>(item) * width + lane * 8;
      up = gate + static_cast<int64_t>(shared) * width;
    } else {
      const int k = (item - shared) / inner, row = (item - shared) % inner;
      gate = a.gate_up + (static_cast<int64_t>(chosen.ids[k]) * 2 * inner + row) * width + lane * 8;
      up = gate + static_cast<int64_t>(inner) * width;
    }
  };
  uint4 next_gate[kUnroll], next_up[kUnroll];
  const auto load = [&](int k) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k + u * kWarp * 8;
      const bool inside = at + lane * 8 < width;
      next_gate[u] = inside ? bit_cast<uint4>(load16_once(gate + at, once)) : zero;
      next_up[u] = inside ? bit_cast<uint4>(load16_once(up + at, once)) : zero;
    }
  };
  int item = blockIdx.x * kUpWarps + warp;
  const bool ahead = item < shared;
  if (ahead) {
    aim(item);
    load(0);
  }
  pdl_wait();
  pdl_trigger();  // the logits are the next launch's, too
  if (warp == 0) {
    choose(a.choose, token, chosen.ids, chosen.shares, chosen.scores, chosen.choice);
  }
  __syncthreads();
  if (!ahead && item < items) {
    aim(item);
    load(0);
  }
  const T* x = a.x + static_cast<int64_t>(token) * width + lane * 8;
  T* to = a.inner + static_cast<int64_t>(token) * items;
  for (; item < items; item += stride) {
    float of_gate = 0.f, of_up = 0.f;
    for (int k = 0; k < width; k += kRound) {
      uint4 now_gate[kUnroll], now_up[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) now_gate[u] = next_gate[u], now_up[u] = next_up[u];
      if (k + kRound < width) {
        load(k + kRound);
      } else if (item + stride < items) {
        aim(item + stride);
        load(0);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = k + u * kWarp * 8;
        const uint4 b = at + lane * 8 < width ? *reinterpret_cast<const uint4*>(x + at) : zero;
        of_gate = dot_unit<T>(now_gate[u], b, of_gate);
        of_up = dot_unit<T>(now_up[u], b, of_up);
      }
    }
    of_gate = warp_sum(of_gate);
    of_up = warp_sum(of_up);
    if (lane != 0) continue;
    if (a.gate_up_bias != nullptr && item >= shared) {
      const int k = (item - shared) / inner, row = (item - shared) % inner;
      const T* bias = a.gate_up_bias + static_cast<int64_t>(chosen.ids[k]) * 2 * inner + row;
      of_gate += Traits<T>::to_float(bias[0]);
      of_up += Traits<T>::to_float(bias[inner]);
    }
    to[item] = Traits<T>::from_float(gate_of(a.activation, of_gate, of_up));
  }
}

// Goes over the weights of one column, 16 bytes a step: the shared experts', then each choice's.
template <class T>
struct Cursor {
  const Args<T>& a;
  const Chosen& chosen;
  int column, unit;  // of the segment
  int k = -1;        // whose; -1: the shared experts'

  __device__ __forceinline__ Cursor(const Args<T>& args, const Chosen& of, int column, int first)
      : a(args), chosen(of), column(column), unit(first) {
    wrap();
  }
  __device__ __forceinline__ int size() const {
    return (k < 0 ? a.shared_size : a.intermediate_size) / 8;
  }
  __device__ __forceinline__ void wrap() {
    while (k < a.top_k && unit >= size()) unit -= size(), ++k;
  }
  __device__ __forceinline__ bool is_inside() const { return k < a.top_k; }
  __device__ __forceinline__ const T* weight() const {
    return k < 0 ? a.shared_down + static_cast<int64_t>(column) * a.shared_size + unit * 8
                 : a.down +
                       (static_cast<int64_t>(chosen.ids[k]) * a.hidden_size + column) *
                           a.intermediate_size +
                       unit * 8;
  }
  __device__ __forceinline__ void advance() {
    unit += kWarp;
    wrap();
  }
};

// grid: (ceil(H / kColumnWarps), T).
template <class T>
__global__ void __launch_bounds__(kColumnWarps* kWarp, 1) few_tokens_down_kernel(const Args<T> a) {
  __shared__ Chosen chosen;
  __shared__ float squares[kColumnWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int token = blockIdx.y;
  const int column = min(static_cast<int>(blockIdx.x) * kColumnWarps + warp, a.hidden_size - 1);
  const bool writes = static_cast<int>(blockIdx.x) * kColumnWarps + warp < a.hidden_size;
  if (warp == 0) {
    choose(a.choose, token, chosen.ids, chosen.shares, chosen.scores, chosen.choice);
  }
  __syncthreads();
  const float of_shared =
      a.shared_gate == nullptr || a.shared_size == 0 ? 1.f : __ldcg(a.shared_gate + token);
  const uint64_t once = policy_evict_first();
  const uint4 zero = make_uint4(0, 0, 0, 0);
  Cursor<T> at(a, chosen, column, lane);
  uint4 next[kUnits];
  float next_share[kUnits];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const bool inside = at.is_inside();
      next[u] = inside ? bit_cast<uint4>(load16_once(at.weight(), once)) : zero;
      next_share[u] = !inside ? 0.f : at.k < 0 ? of_shared : chosen.shares[at.k];
      at.advance();
    }
  };
  load();
  pdl_trigger();
  pdl_wait();
  const int width = a.shared_size + a.top_k * a.intermediate_size;
  const T* inner = a.inner + static_cast<int64_t>(token) * width;
  const int64_t place = static_cast<int64_t>(token) * a.hidden_size + column;
  const float source = Traits<T>::to_float(a.source[place]);
  float sum = 0.f;
  for (int first = lane * 8; first < width; first += kUnits * kWarp * 8) {
    uint4 now[kUnits];
    float share[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) now[u] = next[u], share[u] = next_share[u];
    if (first + kUnits * kWarp * 8 < width) load();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int from = first + u * kWarp * 8;
      if (from >= width) break;
      const uint4 x = *reinterpret_cast<const uint4*>(inner + from);
      sum = fmaf(share[u], dot_unit<T>(now[u], x, 0.f), sum);
    }
  }
  sum = warp_sum(sum);
  if (a.down_bias != nullptr) {
    for (int k = 0; k < a.top_k; ++k) {
      const int64_t row = static_cast<int64_t>(chosen.ids[k]) * a.hidden_size + column;
      sum = fmaf(chosen.shares[k], Traits<T>::to_float(a.down_bias[row]), sum);
    }
  }
  const T y = Traits<T>::from_float(fmaf(a.made_scale, sum, a.source_scale * source));
  if (writes && lane == 0) a.out[place] = y;
  if (a.sumsq == nullptr) return;
  const float rounded = writes ? Traits<T>::to_float(y) : 0.f;
  if (lane == 0) squares[warp] = rounded * rounded;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) total += squares[w];
    a.sumsq[static_cast<int64_t>(token) * gridDim.x + blockIdx.x] = total;
  }
}

template <class T>
Status run(const FewTokensParams& p, const Launch& launch_on) {
  Args<T> a = {};
  a.choose = p.choose;
  a.x = static_cast<const T*>(p.x);
  a.gate_up = static_cast<const T*>(p.gate_up);
  a.gate_up_bias = static_cast<const T*>(p.gate_up_bias);
  a.shared_gate_up = static_cast<const T*>(p.shared_gate_up);
  a.down = static_cast<const T*>(p.down);
  a.down_bias = static_cast<const T*>(p.down_bias);
  a.shared_down = static_cast<const T*>(p.shared_down);
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
  const auto tokens = static_cast<unsigned>(p.choose.num_tokens);
  const int64_t items = p.shared_size + p.choose.router.top_k * p.intermediate_size;
  LaunchConfig config;
  config.block = dim3(kUpWarps * kWarp);
  config.grid = dim3(static_cast<unsigned>(std::min(
                         ceil_div(items, int64_t{kUpWarps}),
                         ceil_div(int64_t{kUpBlocks} * num_multiprocessors(), int64_t{tokens}))),
                     tokens);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  const Status status = launch(few_tokens_up_kernel<T, 4>, config, "few_tokens_up", a);
  if (!status.ok()) return status;
  config.block = dim3(kColumnWarps * kWarp);
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.hidden_size, int64_t{kColumnWarps})), tokens);
  return launch(few_tokens_down_kernel<T>, config, "few_tokens_down", a);
}

}  // namespace

bool takes_few_tokens(const Router& router, int64_t num_tokens, DType dtype) {
  const int64_t pairs = num_tokens * router.top_k;
  if (dtype == DType::kFloat32 || num_tokens > kMostFewTokens) return false;
  // Of tokens that choose at random one weight in eight is read twice, at most.
  return num_tokens == 1 || 4 * (pairs - 1) <= router.num_experts;
}

Status few_tokens(const FewTokensParams& p, const Launch& launch_on) {
  if (p.choose.num_tokens == 0) return {};
  return p.dtype == DType::kBFloat16 ? run<__nv_bfloat16>(p, launch_on) : run<__half>(p, launch_on);
}

}  // namespace regatta::cuda
