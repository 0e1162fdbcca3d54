// See experts.h: the experts of a single token, from the router's logits to the block's output.
//
// Architectures: all; bf16 and fp16. Two launches, each straight from the logits: no row is sorted
// or copied, and each block chooses itself.
//   1. up: a warp makes a gate and its up, function and all; blocks stay, and a warp's next rows
//      travel while it finishes its last. Shared experts' rows, which need no choice, come first.
//   2. down: a warp makes a column of the output, one weighed sum over all experts chosen; it asks
//      for weights while `up` ends.
// e4m3 weights: each block makes the codes of its rows itself, those of quantize_rows(), and keeps
// them as halves of 1/256 of what they stand for: a product of two codes is exact in a half then.
// Bound: memory. Source: own.
#include <algorithm>
#include <type_traits>

#include "cuda/activation/functions.cuh"
#include "cuda/common.cuh"
#include "cuda/experts/choose.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/select.h"
#include "cuda/gemm/dot.cuh"
#include "cuda/gemm/quantize_row.cuh"

namespace regatta::cuda {
namespace {

constexpr int kUpWarps = 8;
constexpr int kUpBlocks = 2;      // of a multiprocessor
constexpr int kColumnWarps = 16;  // of a block of `down`: columns of a partial sum of squares
constexpr int kUnits = 8;         // of 16 bytes that a lane of `down` asks for at once
static_assert(gemm_sumsq_columns(1) == kColumnWarps);

// Of the weights: T, or codes.
template <class T, bool kCodes>
using Element = std::conditional_t<kCodes, uint8_t, T>;
template <class T, bool kCodes>
constexpr int kUnit = 16 / static_cast<int>(sizeof(Element<T, kCodes>));  // values of 16 bytes

constexpr int kMostVectors = 4;         // of a row that becomes codes
constexpr float kHalfUnit = 1.f / 256;  // of codes as halves
static_assert(kMostVectors * kQuantizeThreads * 8 == kOneTokenCodes);

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

// The token's experts that are here, the best first.
struct Chosen {
  int32_t ids[kMaxChosen];  // counted from the first one here
  float shares[kMaxChosen];
  int count;
};

// Room to choose in.
struct ChooseRoom {
  alignas(16) float scores[kMaxExperts], choice[kMaxExperts];
  float largest[kColumnWarps], sums[kColumnWarps];
};

// Leaves the experts that are here, in their order. By a warp.
__device__ __forceinline__ void keep_own(const ChooseArgs& a, Chosen& chosen) {
  const int lane = threadIdx.x % kWarp;
  const bool inside = lane < a.router.top_k;
  const int id = inside ? own_number(a, chosen.ids[lane]) : a.num_own;
  const float share = inside ? chosen.shares[lane] : 0.f;
  const unsigned own = __ballot_sync(~0u, id < a.num_own);
  const int at = __popc(own & ((1u << lane) - 1));
  if (id < a.num_own) chosen.ids[at] = id, chosen.shares[at] = share;
  if (lane == 0) chosen.count = __popc(own);
}

// What choose() does, by a whole block, whose other warps would wait for one: an expert's rank is
// the number of those that come ahead of it.
template <int kThreads>
__device__ __forceinline__ void choose_together(const ChooseArgs& a, ChooseRoom& room, Chosen& to) {
  constexpr int kEach = ceil_div(static_cast<int>(kMaxExperts), kThreads),
                kWarps = kThreads / kWarp;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Router& router = a.router;
  const int count = static_cast<int>(router.num_experts), top_k = static_cast<int>(router.top_k);
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = static_cast<int>(threadIdx.x) + i * kThreads;
      if (e < count) body(i, e);
    }
  };
  float value[kEach], largest = -INFINITY, sum = 0.f;
  bool sound = true;
  each([&](int i, int e) {
    value[i] = __ldcg(a.logits + e);
    if (a.bias != nullptr) value[i] += __ldg(a.bias + e);
    sound = sound && !isnan(value[i]);
    largest = fmaxf(largest, value[i]);
  });
  largest = warp_max(largest);
  if (lane == 0) room.largest[warp] = largest;
  if (!__syncthreads_and(sound)) {
    if (threadIdx.x < top_k) to.ids[threadIdx.x] = threadIdx.x, to.shares[threadIdx.x] = NAN;
    __syncwarp();
    if (warp == 0) keep_own(a, to);
    __syncthreads();
    return;
  }
  if (router.scoring == Scoring::kSoftmax) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, room.largest[w]);
    each([&](int i, int) {
      value[i] = expf(value[i] - largest);
      sum += value[i];
    });
    sum = warp_sum(sum);
    if (lane == 0) room.sums[warp] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += room.sums[w];
    each([&](int i, int) { value[i] = value[i] / sum; });
  } else if (router.scoring == Scoring::kSigmoid) {
    each([&](int i, int) { value[i] = 1.f / (1.f + expf(-value[i])); });
  }
  each([&](int i, int e) {
    room.scores[e] = value[i];
    const float own = a.correction == nullptr ? value[i] : value[i] + __ldg(a.correction + e);
    // Infinite logits make scores of NaN, which no order has a place for.
    room.choice[e] = isnan(own) ? -INFINITY : own;
  });
  if (threadIdx.x < 4 && count % 4 > 0) {
    const int e = count / 4 * 4 + static_cast<int>(threadIdx.x);
    if (e >= count) room.choice[e] = -INFINITY;
  }
  __syncthreads();
  if (router.top_groups < router.num_groups) {
    if (warp == 0) choose_groups(router, room.choice);
    __syncthreads();
  }
  each([&](int, int e) {
    const float own = room.choice[e];
    int rank = 0;
    for (int j = 0; j < count; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(room.choice + j);
      rank += four.x > own || (four.x == own && j < e);
      rank += four.y > own || (four.y == own && j + 1 < e);
      rank += four.z > own || (four.z == own && j + 2 < e);
      rank += four.w > own || (four.w == own && j + 3 < e);
    }
    if (rank < top_k) to.ids[rank] = e;
  });
  __syncthreads();
  if (warp == 0) {
    const bool inside = lane < top_k;
    const int mine = inside ? to.ids[lane] : 0;
    float share = inside ? room.scores[mine] : 0.f;
    if (router.scoring == Scoring::kSparseMixer) share = mixer_share(router, room.scores, mine);
    if (router.renormalize) share = share / warp_sum(share);
    if (inside) to.shares[lane] = share * router.scale;
    __syncwarp();
    keep_own(a, to);
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

// inner [S + K I]: shared, then those of each choice. Codes: no shared ones.
template <class T, bool kCodes, int kUnroll>
__global__ void __launch_bounds__(kUpWarps* kWarp, kUpBlocks)
    one_token_up_kernel(const Args<T, kCodes> a) {
  using Weight = Element<T, kCodes>;
  constexpr int kLane = kUnit<T, kCodes>, kRound = kWarp * kLane * kUnroll;
  extern __shared__ __align__(16) __half x_codes[];  // [H], of codes
  __shared__ ChooseRoom room;
  __shared__ Chosen chosen;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int width = a.hidden_size, inner = a.intermediate_size, shared = a.shared_size;
  const int stride = gridDim.x * kUpWarps;
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
  choose_together<kUpWarps * kWarp>(a.choose, room, chosen);
  const int items = shared + chosen.count * inner;
  if (!ahead && item < items) {
    aim(item);
    load(0);
  }
  float x_scale = 1.f;
  if constexpr (kCodes) {
    using R = Row<T, RowKind::kPlain, kMostVectors, kUpWarps * kWarp>;
    __shared__ QuantizeScratch scratch;
    QuantizeRowsParams row;
    row.width = width;
    Vec16<T> values[kMostVectors], no_norm[R::kNumWeights] = {};
    R::load(a.x, width, values);
    x_scale = quantize_row<T, true, RowKind::kPlain, kMostVectors, kUpWarps * kWarp>(
                  row, values, no_norm, __ldg(a.gate_up_act), scratch, 1,
                  [&](int at, uint2 codes) { store_halves(x_codes + at, codes); }) /
              kHalfUnit;
    __syncthreads();
  }
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
          of_gate = dot_unit<T>(now_gate[u], unit_at(a.x + at), of_gate);
          of_up = dot_unit<T>(now_up[u], unit_at(a.x + at), of_up);
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
    a.inner[item] = Traits<T>::from_float(gate_of(a.activation, of_gate, of_up));
  }
}

// What `up` made, [count, I], as halves of codes; scales[k] is of its k-th row's. By the whole
// block.
template <class T>
__device__ __forceinline__ void make_codes(const Args<T, true>& a, int count, __half* codes,
                                           float* scales) {
  __shared__ int largest[kMaxChosen];  // bits of floats, none of which is negative
  const int width = a.intermediate_size, units = count * width / 8;
  if (threadIdx.x < kMaxChosen) largest[threadIdx.x] = 0;
  __syncthreads();
  const float fixed = __ldg(a.down_act);
  for (int first = threadIdx.x / kWarp * kWarp; first < units; first += blockDim.x) {
    const int unit = first + static_cast<int>(threadIdx.x) % kWarp, last = first + kWarp - 1;
    const bool inside = unit < units;
    const Vec16<T> x[1] = {inside ? load16(a.inner + unit * 8)
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
    const Vec16<T> x = load16(a.inner + unit * 8);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = x.get(i);
    store_halves(codes + unit * 8,
                 make_uint2(four_codes<true>(v, by.factor), four_codes<true>(v + 4, by.factor)));
    if (unit * 8 % width == 0) scales[k] = by.scale;
  }
  __syncthreads();
}

// Goes over the weights of one column, 16 bytes a step: the shared experts', then each choice's.
template <class T, bool kCodes>
struct Cursor {
  static constexpr int kSize = kUnit<T, kCodes>;
  using Weight = Element<T, kCodes>;
  const Args<T, kCodes>& a;
  const Chosen& chosen;
  const Weight* at;
  int column, unit, units;  // of the segment
  int k = -1;               // whose; -1: the shared experts'

  __device__ __forceinline__ Cursor(const Args<T, kCodes>& args, const Chosen& chosen, int column,
                                    int first)
      : a(args), chosen(chosen), column(column), unit(first), units(a.shared_size / kSize) {
    at = a.shared_down + static_cast<int64_t>(column) * a.shared_size + unit * kSize;
    if (unit >= units) wrap();
  }
  __device__ __forceinline__ bool is_inside() const { return k < chosen.count; }
  __device__ __forceinline__ void advance() {
    unit += kWarp, at += kWarp * kSize;
    if (unit >= units) wrap();
  }

 private:
  __device__ __forceinline__ void wrap() {
    while (k < chosen.count && unit >= units) {
      unit -= units, ++k, units = a.intermediate_size / kSize;
    }
    if (k >= chosen.count) return;
    const int64_t row = static_cast<int64_t>(chosen.ids[k]) * a.hidden_size + column;
    at = a.down + row * a.intermediate_size + unit * kSize;
  }
};

// grid: ceil(H / kColumnWarps). A warp has a column.
template <class T, bool kCodes>
__global__ void __launch_bounds__(kColumnWarps* kWarp, 1)
    one_token_down_kernel(const Args<T, kCodes> a) {
  constexpr int kLane = kUnit<T, kCodes>, kRound = kUnits * kWarp * kLane;
  extern __shared__ __align__(16) __half inner_codes[];  // [K, I], of codes
  __shared__ ChooseRoom room;
  __shared__ Chosen chosen;
  __shared__ float factors[kColumnWarps][kMaxChosen + 1];  // of a column: the shared ones' first
  __shared__ float squares[kColumnWarps], scales[kMaxChosen];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = min(static_cast<int>(blockIdx.x) * kColumnWarps + warp, a.hidden_size - 1);
  const bool writes = static_cast<int>(blockIdx.x) * kColumnWarps + warp < a.hidden_size;
  choose_together<kColumnWarps * kWarp>(a.choose, room, chosen);
  const auto row_of = [&](int k) {
    return static_cast<int64_t>(chosen.ids[k]) * a.hidden_size + column;
  };
  const uint64_t once = policy_evict_first();
  const uint4 zero = make_uint4(0, 0, 0, 0);
  Cursor<T, kCodes> cursor(a, chosen, column, lane);
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
  load();
  pdl_trigger();
  pdl_wait();
  const int count = chosen.count, width = a.shared_size + count * a.intermediate_size;
  const float source = a.source == nullptr ? 0.f : Traits<T>::to_float(a.source[column]);
  float factor = lane < count ? chosen.shares[lane] : 0.f;
  if constexpr (kCodes) {
    make_codes(a, count, inner_codes, scales);
    if (lane < count) {
      factor *= scales[lane] * __ldg(a.down_scale + row_of(lane)) / kHalfUnit;
    }
  }
  if (lane < count) factors[warp][lane + 1] = factor;
  if (lane == 0) factors[warp][0] = a.shared_gate == nullptr ? 1.f : *a.shared_gate;
  __syncwarp();
  float sum = 0.f;
  for (int round = 0; round < width; round += kRound) {
    uint4 now[kUnits];
    int k[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) now[u] = next[u], k[u] = next_k[u];
    if (round + kRound < width) load();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int from = round + (u * kWarp + lane) * kLane;
      if (from >= width) break;
      float y;
      if constexpr (kCodes) {
        y = dot_codes(now[u], inner_codes + from, 0.f);
      } else {
        y = dot_unit<T>(now[u], unit_at(a.inner + from), 0.f);
      }
      sum = fmaf(factors[warp][k[u] + 1], y, sum);
    }
  }
  sum = warp_sum(sum);
  if (a.down_bias != nullptr) {
    for (int k = 0; k < count; ++k) {
      sum = fmaf(chosen.shares[k], Traits<T>::to_float(a.down_bias[row_of(k)]), sum);
    }
  }
  const T y = Traits<T>::from_float(fmaf(a.made_scale, sum, a.source_scale * source));
  if (writes && lane == 0) a.out[column] = y;
  const float rounded = writes ? Traits<T>::to_float(y) : 0.f;
  if (lane == 0) squares[warp] = rounded * rounded;
  __syncthreads();
  if (threadIdx.x == 0 && a.sumsq != nullptr) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) total += squares[w];
    a.sumsq[blockIdx.x] = total;
  }
}

template <class T, bool kCodes>
Status run(const OneTokenParams& p, const Launch& launch_on) {
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
  const int64_t items = p.shared_size + p.choose.router.top_k * p.intermediate_size;
  const int64_t blocks = int64_t{kUpBlocks} * num_multiprocessors();
  LaunchConfig config(launch_on, std::min(ceil_div(items, int64_t{kUpWarps}), blocks),
                      kUpWarps * kWarp, kCodes ? p.hidden_size * sizeof(__half) : 0);
  REGATTA_RETURN_IF_ERROR(launch(one_token_up_kernel<T, kCodes, 4>, config, "one_token_up", a));
  config.block = dim3(kColumnWarps * kWarp);
  config.grid = grid_of(ceil_div(p.hidden_size, int64_t{kColumnWarps}), 1);
  if (kCodes) {
    // launch() raises the limit for more than 48 KB, and does not know of the kernel's own
    // variables.
    const auto bytes = static_cast<size_t>(items) * sizeof(__half);
    config.shared_bytes = bytes > (40 << 10) ? std::max<size_t>(bytes, 49 << 10) : bytes;
  }
  return launch(one_token_down_kernel<T, kCodes>, config, "one_token_down", a);
}

template <class T>
Status run_type(const OneTokenParams& p, const Launch& launch_on) {
  return p.gate_up_scale == nullptr ? run<T, false>(p, launch_on) : run<T, true>(p, launch_on);
}

}  // namespace

Status one_token(const OneTokenParams& p, const Launch& launch_on) {
  if (p.choose.num_tokens == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_type<__nv_bfloat16>(p, launch_on)
                                     : run_type<__half>(p, launch_on);
}

}  // namespace regatta::cuda
