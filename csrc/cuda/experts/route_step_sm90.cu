// See experts.h: norm and router of a step's tokens.
//
// Architectures: sm_90; bf16 and fp16. A cluster has 16 tokens and 64 experts, and each of its
// blocks a part of their columns:
//   1. Each block asks for its part of the router's weight, straight into the registers that
//      multiply it, and of the norm's while the launch ahead ends; then for its part of the rows.
//   2. Sums of squares of the parts go to all blocks. Each norms and rounds its part, which the
//      first blocks of tokens write, and multiplies it on tensor cores, a warp for 8 experts.
//   3. A warp's sums go to the block that adds up those of its experts, in the order of the parts.
// Columns of a 32 are multiplied in an order of their own, so that a lane's are 16 bytes. The sums'
// order is that of the width alone. Bound: latency; the router's weight out of L2 once for 16
// tokens. Source: own.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/select.h"
#include "cuda/hopper.cuh"

namespace regatta::cuda {
namespace {

constexpr int kBlocks = 8;  // of a cluster
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTokens = 16;
constexpr int kExperts = 8;                // of a warp
constexpr int kChunk = 32;                 // columns that a warp multiplies at a time
constexpr int kTeam = kThreads / kTokens;  // threads of a row
constexpr int kSums = 4;                   // that a lane adds to in turn
static_assert(kWarps == kBlocks && kWarp % kTeam == 0 && kTeam >= kBlocks);
static_assert(kTokens == kRouteStepTokens && kBlocks * 32 * kChunk == kRouteStepColumns);

template <class T>
struct Args {
  const T* x;
  const T* norm_weight;
  float epsilon;
  bool plus_one;
  const T* weight;
  const T* shared_gate;  // or null; its logit comes behind the experts'
  T* normed;
  float* logits;
  float* shared_gate_out;
  int num_tokens, hidden_size, num_experts;
  int chunks;  // of a block
};

// grid: (kBlocks, tiles of experts, tiles of tokens). kHeld: chunks that a block has room for.
template <class T, int kHeld>
__global__ void __launch_bounds__(kThreads) route_step_kernel(const Args<T> a) {
  constexpr int kUnits = kHeld * kChunk / (kTeam * 8);  // of 8 columns of a thread's row
  // Rows lie so that the eight lanes of an access of 16 bytes meet all banks.
  constexpr int kStride = kHeld * kChunk + (kHeld % 2 == 0 ? kChunk : 0);
  __shared__ __align__(16) T rows[kTokens][kStride];
  __shared__ float squares[kBlocks][kTokens], sums[kBlocks][kTokens * kExperts];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = lane / 4, quarter = lane % 4;
  const int rank = static_cast<int>(cluster_rank()), width = a.hidden_size;
  const int begin = rank * a.chunks * kChunk, end = min(begin + a.chunks * kChunk, width);
  const int first_token = blockIdx.z * kTokens;
  const int first_expert = blockIdx.y * kWarps * kExperts;
  const int num_outputs = a.num_experts + (a.shared_gate != nullptr ? 1 : 0);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  cluster_arrive_relaxed();  // before another block's shared memory is written, it must have begun
  pdl_trigger();
  const int expert = first_expert + warp * kExperts + group;
  const T* const weight =
      expert < a.num_experts ? a.weight + static_cast<int64_t>(expert) * width : a.shared_gate;
  uint4 w[kHeld], norm_weight[kUnits], x[kUnits];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = begin + i * kChunk + quarter * 8;
    const bool inside = i < a.chunks && at < end && expert < num_outputs;
    w[i] = inside ? __ldg(reinterpret_cast<const uint4*>(weight + at)) : zero;
  }
  const int row = threadIdx.x / kTeam, token = first_token + row;
  const auto column = [&](int u) {  // of the block's
    return (u * kTeam + static_cast<int>(threadIdx.x) % kTeam) * 8;
  };
  const auto load = [&](const T* from, uint4(&to)[kUnits]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const bool inside = from != nullptr && begin + column(u) < end;
      to[u] = inside ? bit_cast<uint4>(load16(from + begin + column(u))) : zero;
    }
  };
  load(a.norm_weight, norm_weight);
  pdl_wait();
  const bool is_there = token < a.num_tokens;
  load(is_there ? a.x + static_cast<int64_t>(token) * width : nullptr, x);
  float square = 0.f;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const auto values = bit_cast<Vec16<T>>(x[u]);
#pragma unroll
    for (int i = 0; i < 8; ++i) square = fmaf(values.get(i), values.get(i), square);
  }
#pragma unroll
  for (int o = kTeam / 2; o > 0; o /= 2) square += __shfl_xor_sync(~0u, square, o);
  cluster_wait();
  if (threadIdx.x % kTeam < kBlocks) {
    store_cluster_float(&squares[rank][row], threadIdx.x % kTeam, square);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  float total = 0.f;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) total += squares[b][row];
  const float factor = rsqrtf(total / static_cast<float>(width) + a.epsilon);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const auto values = bit_cast<Vec16<T>>(x[u]), factors = bit_cast<Vec16<T>>(norm_weight[u]);
    Vec16<T> y;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y.set(i, values.get(i) * factor * (factors.get(i) + (a.plus_one ? 1.f : 0.f)));
    }
    store16(&rows[row][column(u)], y);
    if (blockIdx.y == 0 && is_there && begin + column(u) < end) {
      store16(a.normed + static_cast<int64_t>(token) * width + begin + column(u), y);
    }
  }
  __syncthreads();
  float acc[kSums][4] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i >= a.chunks) break;
    const int at = i * kChunk + quarter * 8;
    const auto low = bit_cast<uint4>(load16(&rows[group][at]));
    const auto high = bit_cast<uint4>(load16(&rows[group + 8][at]));
    mma_m16n8k16<T>(acc[2 * i % kSums], {low.x, high.x, low.y, high.y}, w[i].x, w[i].y);
    mma_m16n8k16<T>(acc[(2 * i + 1) % kSums], {low.z, high.z, low.w, high.w}, w[i].z, w[i].w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < kSums; ++s) sum += acc[s][i];
    const int at = (group + i / 2 * 8) * kExperts + quarter * 2 + i % 2;
    store_cluster_float(&sums[rank][at], warp, sum);
  }
  cluster_arrive();
  cluster_wait();
  // What this block adds up: tokens of the experts that the warp of its rank has in each block.
  const int own = first_expert + rank * kExperts + static_cast<int>(threadIdx.x) % kExperts;
  const int of = first_token + static_cast<int>(threadIdx.x) / kExperts;
  if (threadIdx.x >= kTokens * kExperts || own >= num_outputs || of >= a.num_tokens) return;
  float logit = 0.f;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) logit += sums[b][threadIdx.x];
  if (own < a.num_experts) {
    a.logits[static_cast<int64_t>(of) * a.num_experts + own] = logit;
  } else {
    a.shared_gate_out[of] = 1.f / (1.f + __expf(-logit));
  }
}

template <class T>
Status run(const RouteParams& p, const Launch& launch_on) {
  Args<T> a = {};
  a.x = static_cast<const T*>(p.x);
  a.norm_weight = static_cast<const T*>(p.norm_weights.weight);
  a.epsilon = p.norm.epsilon;
  a.plus_one = p.norm.plus_one;
  a.weight = static_cast<const T*>(p.weight);
  a.shared_gate = static_cast<const T*>(p.shared_gate);
  a.normed = static_cast<T*>(p.normed);
  a.logits = p.logits;
  a.shared_gate_out = p.shared_gate_out;
  a.num_tokens = static_cast<int>(p.num_tokens);
  a.hidden_size = static_cast<int>(p.hidden_size);
  a.num_experts = static_cast<int>(p.num_experts);
  a.chunks = static_cast<int>(ceil_div(p.hidden_size, int64_t{kChunk * kBlocks}));
  const int64_t outputs = p.num_experts + (p.shared_gate != nullptr ? 1 : 0);
  LaunchConfig config(launch_on,
                      grid_of(kBlocks, ceil_div(outputs, int64_t{kWarps * kExperts}),
                              ceil_div(p.num_tokens, int64_t{kTokens})),
                      kThreads);
  config.cluster_x = kBlocks;
  auto* kernel = route_step_kernel<T, 32>;
  if (a.chunks <= 16) kernel = route_step_kernel<T, 16>;
  if (a.chunks <= 8) kernel = route_step_kernel<T, 8>;
  return launch(kernel, config, "route", a);
}

}  // namespace

Status route_step(const RouteParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  return p.dtype == DType::kBFloat16 ? run<__nv_bfloat16>(p, launch_on) : run<__half>(p, launch_on);
}

}  // namespace regatta::cuda
