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
// Weights that two tokens choose are read twice, the second time out of L2: all go through their
// experts in the same order.
// e4m3 weights: each block makes the codes of its rows itself, which are those of quantize_rows(),
// and keeps them as halves of 1/256 of what they stand for. A product of two codes is exact in a
// half then; two are added before they become a float.
// Hopper has kernels of its own: few_tokens_sm90.cu.
// Bound: memory. Source: own.
#include <algorithm>

#include "cuda/common.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/few_tokens.cuh"

namespace regatta::cuda {
namespace {

using namespace few;

constexpr int kUpWarps = 8;
constexpr int kUpBlocks = 2;      // of a multiprocessor
constexpr int kColumnWarps = 16;  // of a block of `down`: columns of a partial sum of squares
constexpr int kUnits = 8;         // of 16 bytes that a lane of `down` asks for at once
static_assert(gemm_sumsq_columns(kMostFewTokens) == kColumnWarps);

// Columns of `down`, of all choices, from where on sums by many warps are faster. Measured on an
// H200: 11,264 gain, 28,672 lose. Hopper's own kernels are not measured above.
constexpr int64_t kMostColumns = 12288, kMostColumnsSm90 = 12288;
// What fits into shared memory beside the weights on their way, of Hopper's kernels.
constexpr int64_t kMostMade = 40 << 10, kMostHidden = 32 << 10;

// grid: (blocks, T). inner [T, S + K I]: shared, then those of each choice. Codes: no shared ones.
template <class T, bool kCodes, int kUnroll>
__global__ void __launch_bounds__(kUpWarps* kWarp, kUpBlocks)
    few_tokens_up_kernel(const Args<T, kCodes> a) {
  using Weight = Element<T, kCodes>;
  constexpr int kLane = kUnit<T, kCodes>, kRound = kWarp * kLane * kUnroll;
  extern __shared__ __align__(16) __half x_codes[];  // [H], of codes
  __shared__ ChooseRoom<false> room;
  __shared__ Chosen chosen;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int token = blockIdx.y;
  const int width = a.hidden_size, inner = a.intermediate_size, shared = a.shared_size;
  const int items = shared + a.top_k * inner, stride = gridDim.x * kUpWarps;
  const uint64_t once = policy_evict_first();
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const Weight *gate = nullptr, *up = nullptr;
  // The gate's row among those of all experts; its up is as many further on as there are gates.
  const auto row_of = [&](int item) {
    const int k = (item - shared) / inner;
    return static_cast<int64_t>(chosen.ids[k]) * 2 * inner + (item - shared) % inner;
  };
  const auto aim = [&](int item) {
    const bool is_shared = item < shared;
    gate = (is_shared ? a.shared_gate_up + static_cast<int64_t>(item) * width
                      : a.gate_up + row_of(item) * width) +
           lane * kLane;
    up = gate + static_cast<int64_t>(is_shared ? shared : inner) * width;
  };
  uint4 next_gate[kUnroll], next_up[kUnroll];
  const auto load = [&](int k) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k + u * kWarp * kLane;
      const bool inside = at + lane * kLane < width;
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
  choose_together<kUpWarps * kWarp>(a.choose, token, room, chosen);
  if (!ahead && item < items) {
    aim(item);
    load(0);
  }
  const T* x = a.x + static_cast<int64_t>(token) * width;
  float x_scale = 1.f;
  if constexpr (kCodes) {
    using R = Row<T, RowKind::kPlain, kMostVectors, kUpWarps * kWarp>;
    __shared__ QuantizeScratch scratch;
    QuantizeRowsParams row;
    row.width = width;
    Vec16<T> values[kMostVectors], no_norm[R::kNumWeights] = {};
    R::load(x, width, values);
    x_scale = quantize_row<T, true, RowKind::kPlain, kMostVectors, kUpWarps * kWarp>(
                  row, values, no_norm, __ldg(a.gate_up_act), scratch, 1,
                  [&](int at, uint2 codes) { store_halves(x_codes + at, codes); }) /
              kHalfUnit;
    __syncthreads();
  }
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
        const int at = k + u * kWarp * kLane + lane * kLane;
        if (at >= width) break;
        if constexpr (kCodes) {
          of_gate = dot_codes(now_gate[u], x_codes + at, of_gate);
          of_up = dot_codes(now_up[u], x_codes + at, of_up);
        } else {
          of_gate = dot_unit<T>(now_gate[u], unit_at(x + at), of_gate);
          of_up = dot_unit<T>(now_up[u], unit_at(x + at), of_up);
        }
      }
    }
    of_gate = warp_sum(of_gate);
    of_up = warp_sum(of_up);
    if (lane != 0) continue;
    if constexpr (kCodes) {
      of_gate *= x_scale * __ldg(a.gate_up_scale + row_of(item));
      of_up *= x_scale * __ldg(a.gate_up_scale + row_of(item) + inner);
    }
    if (a.gate_up_bias != nullptr && item >= shared) {
      of_gate += Traits<T>::to_float(a.gate_up_bias[row_of(item)]);
      of_up += Traits<T>::to_float(a.gate_up_bias[row_of(item) + inner]);
    }
    to[item] = Traits<T>::from_float(gate_of(a.activation, of_gate, of_up));
  }
}

// Goes over the weights of one column, 16 bytes a step: the shared experts', then each choice's.
template <class T, bool kCodes>
struct Cursor {
  static constexpr int kSize = kUnit<T, kCodes>;
  using Weight = Element<T, kCodes>;
  const Args<T, kCodes>& a;
  const int32_t* ids;
  const Weight* at;
  int column, unit, units;  // of the segment
  int k = -1;               // whose; -1: the shared experts'

  __device__ __forceinline__ Cursor(const Args<T, kCodes>& args, int column)
      : a(args), column(column) {}
  __device__ __forceinline__ void begin(const int32_t* chosen, int first) {
    ids = chosen, unit = first, k = -1, units = a.shared_size / kSize;
    at = a.shared_down + static_cast<int64_t>(column) * a.shared_size + unit * kSize;
    if (unit >= units) wrap();
  }
  __device__ __forceinline__ bool is_inside() const { return k < a.top_k; }
  __device__ __forceinline__ void advance() {
    unit += kWarp, at += kWarp * kSize;
    if (unit >= units) wrap();
  }

 private:
  __device__ __forceinline__ void wrap() {
    while (k < a.top_k && unit >= units) {
      unit -= units, ++k, units = a.intermediate_size / kSize;
    }
    if (k >= a.top_k) return;
    const int64_t row = static_cast<int64_t>(ids[k]) * a.hidden_size + column;
    at = a.down + row * a.intermediate_size + unit * kSize;
  }
};

// grid: ceil(H / kColumnWarps). A warp has its column of all tokens, one after the other; the next
// one's weights travel while it finishes one.
template <class T, bool kCodes>
__global__ void __launch_bounds__(kColumnWarps* kWarp, 1)
    few_tokens_down_kernel(const Args<T, kCodes> a) {
  constexpr int kLane = kUnit<T, kCodes>, kRound = kUnits * kWarp * kLane;
  extern __shared__ __align__(16) __half inner_codes[];  // [K, I], of codes
  __shared__ ChooseRoom<true> room;
  __shared__ Chosen chosen[kMostFewTokens];
  __shared__ float factors[kColumnWarps][kMaxChosen + 1];  // of a column: the shared ones' first
  __shared__ float squares[kColumnWarps], scales[kMaxChosen];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int tokens = a.choose.num_tokens;
  const int column = min(static_cast<int>(blockIdx.x) * kColumnWarps + warp, a.hidden_size - 1);
  const bool writes = static_cast<int>(blockIdx.x) * kColumnWarps + warp < a.hidden_size;
  for (int token = 0; token < tokens; ++token) {
    choose_together<kColumnWarps * kWarp>(a.choose, token, room, chosen[token]);
  }
  const auto row_of = [&](int token, int k) {
    return static_cast<int64_t>(chosen[token].ids[k]) * a.hidden_size + column;
  };
  const uint64_t once = policy_evict_first();
  const uint4 zero = make_uint4(0, 0, 0, 0);
  Cursor<T, kCodes> cursor(a, column);
  uint4 next[kUnits];
  int next_k[kUnits];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const bool inside = cursor.is_inside();
      next[u] = inside ? bit_cast<uint4>(load16_once(cursor.at, once)) : zero;
      next_k[u] = cursor.k;
      if (inside) cursor.advance();
    }
  };
  cursor.begin(chosen[0].ids, lane);
  load();
  pdl_trigger();
  pdl_wait();
  const int width = a.shared_size + a.top_k * a.intermediate_size;
  for (int token = 0; token < tokens; ++token) {
    const T* inner = a.inner + static_cast<int64_t>(token) * width;
    const int64_t place = static_cast<int64_t>(token) * a.hidden_size + column;
    const float source = Traits<T>::to_float(a.source[place]);
    float factor = lane < a.top_k ? chosen[token].shares[lane] : 0.f;
    if constexpr (kCodes) {
      make_codes(a, inner, inner_codes, scales);
      if (lane < a.top_k) {
        factor *= scales[lane] * __ldg(a.down_scale + row_of(token, lane)) / kHalfUnit;
      }
    }
    if (lane < a.top_k) factors[warp][lane + 1] = factor;
    if (lane == 0) factors[warp][0] = a.shared_gate == nullptr ? 1.f : a.shared_gate[token];
    __syncwarp();
    float sum = 0.f;
    for (int round = 0; round < width; round += kRound) {
      uint4 now[kUnits];
      int k[kUnits];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) now[u] = next[u], k[u] = next_k[u];
      if (round + kRound < width) {
        load();
      } else if (token + 1 < tokens) {
        cursor.begin(chosen[token + 1].ids, lane);
        load();
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int from = round + (u * kWarp + lane) * kLane;
        if (from >= width) break;
        float y;
        if constexpr (kCodes) {
          y = dot_codes(now[u], inner_codes + from, 0.f);
        } else {
          y = dot_unit<T>(now[u], unit_at(inner + from), 0.f);
        }
        sum = fmaf(factors[warp][k[u] + 1], y, sum);
      }
    }
    sum = warp_sum(sum);
    if (a.down_bias != nullptr) {
      for (int k = 0; k < a.top_k; ++k) {
        const float bias = Traits<T>::to_float(a.down_bias[row_of(token, k)]);
        sum = fmaf(chosen[token].shares[k], bias, sum);
      }
    }
    const T y = Traits<T>::from_float(fmaf(a.made_scale, sum, a.source_scale * source));
    if (writes && lane == 0) a.out[place] = y;
    const float rounded = writes ? Traits<T>::to_float(y) : 0.f;
    if (lane == 0) squares[warp] = rounded * rounded;
    __syncthreads();  // codes and factors have been read, too
    if (threadIdx.x == 0 && a.sumsq != nullptr) {
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kColumnWarps; ++w) total += squares[w];
      a.sumsq[static_cast<int64_t>(token) * gridDim.x + blockIdx.x] = total;
    }
    __syncthreads();
  }
}

template <class T, bool kCodes>
Status run(const FewTokensParams& p, const Launch& launch_on) {
  const Args<T, kCodes> a = make_args<T, kCodes>(p);
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
  if (kCodes) config.shared_bytes = p.hidden_size * sizeof(__half);
  const Status status = launch(few_tokens_up_kernel<T, kCodes, 4>, config, "few_tokens_up", a);
  if (!status.ok()) return status;
  config.block = dim3(kColumnWarps * kWarp);
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.hidden_size, int64_t{kColumnWarps})));
  if (kCodes) config.shared_bytes = dynamic_bytes(items * static_cast<int64_t>(sizeof(__half)));
  return launch(few_tokens_down_kernel<T, kCodes>, config, "few_tokens_down", a);
}

template <class T>
Status run_type(const FewTokensParams& p, const Launch& launch_on) {
  return p.gate_up_scale == nullptr ? run<T, false>(p, launch_on) : run<T, true>(p, launch_on);
}

}  // namespace

bool takes_few_tokens(const FewTokensParams& p) {
  const Router& router = p.choose.router;
  const int64_t tokens = p.choose.num_tokens, pairs = tokens * router.top_k;
  if (p.dtype == DType::kFloat32 || tokens > kMostFewTokens || !p.activation.gated) return false;
  if (router.num_groups > kWarp) return false;
  // Of tokens that choose at random one weight in eight is asked for twice, at most.
  if (tokens > 1 && 4 * (pairs - 1) > router.num_experts) return false;
  const bool codes = p.gate_up_scale != nullptr;
  const int64_t columns = p.shared_size + router.top_k * p.intermediate_size;
  if (columns > (compute_capability() == 90 ? kMostColumnsSm90 : kMostColumns)) return false;
  const int64_t unit = codes ? 16 : 8;
  const auto is_whole = [&](int64_t width) { return width % unit == 0; };
  if (!is_whole(p.hidden_size) || !is_whole(p.intermediate_size) || !is_whole(p.shared_size)) {
    return false;
  }
  // Codes' rows are kept whole.
  return !codes || (p.shared_size == 0 && p.hidden_size <= kMostVectors * kQuantizeThreads * 8);
}

Status few_tokens(const FewTokensParams& p, const Launch& launch_on) {
  const int64_t made = p.shared_size + p.choose.router.top_k * p.intermediate_size;
  const bool fits = p.choose.num_tokens * made <= kMostMade && p.hidden_size <= kMostHidden;
  return compute_capability() == 90 && fits ? few_tokens_sm90(p, {}, launch_on)
                                            : few_tokens_generic(p, launch_on);
}

Status few_tokens_generic(const FewTokensParams& p, const Launch& launch_on) {
  if (p.choose.num_tokens == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_type<__nv_bfloat16>(p, launch_on)
                                     : run_type<__half>(p, launch_on);
}

}  // namespace regatta::cuda
