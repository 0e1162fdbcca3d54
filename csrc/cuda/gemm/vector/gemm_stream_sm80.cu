// y = epilogue(x w^T) for one row (gemv) and for few rows without Hopper's instructions (mma.sync).
//
// Input: as GemmParams says, weights [N, K] row-major bf16 or fp16 as checkpoints have them; K is a
// multiple of 8. Architectures: sm_80 and later.
// Algorithm
//   1. Weights go to registers in 16-byte loads, a round of k ahead, past L1 and first to leave L2;
//      the first round is requested before pdl_wait().
//   2. gemv: a warp owns two rows (or a gate and its up) and finishes its outputs alone. It makes
//      the norm's sum of squares from x itself: every warp would read the same partial sums.
//   3. mma: a block owns 16 rows; its 8 warps split k and add up in shared memory, in warp order.
//      k is permuted for both operands alike, so that a 16-byte load is half of two fragments.
//   4. Groups of rows with a weight each. gemv: a row of x is a product of its own; a warp's next
//      rows of weight travel while it finishes its last. mma: a block's tokens are of one group.
// Source: own; the load pattern of gemv is the classic one. Bound: memory.
#include "cuda/gemm/dot.cuh"
#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTile = 16;        // rows of weight per block; gated: 8 gate rows and their 8 up rows
constexpr int kVectorRows = 32;  // of gemv in groups, at most
constexpr int kSharedSums = 256;  // partial sums of squares per token that fit in shared memory

// Writes a tile of sums: sums[t][0..15] are the products of token t. One token and eight outputs
// per thread.
template <class T, int kTokens>
__device__ __forceinline__ void finish_tile(const Epilogue& p, const float (*sums)[kTile + 4],
                                            const float* row_scale, int num_rows, int token0,
                                            int tile) {
  const int lane = threadIdx.x % kWarp;
  const int width = p.gated ? p.out_features / 2 : p.out_features;
  const int first = p.gated ? tile * 8 : tile * kTile;
  const int chunks = p.gated ? 1 : 2;
  const int item = threadIdx.x;
  const int t = item / chunks;
  if (t >= kTokens || token0 + t >= num_rows) return;
  const int chunk = item % chunks;
  float v[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < 2 || p.gated) {
      const float4 f = *reinterpret_cast<const float4*>(&sums[t][chunk * 8 + i * 4]);
      v[4 * i] = f.x, v[4 * i + 1] = f.y, v[4 * i + 2] = f.z, v[4 * i + 3] = f.w;
    }
  }
  const int n0 = first + chunk * 8;
  float square = finish<T>(p, v, row_scale[t], token0 + t, n0, width);
  if (p.sumsq_out != nullptr) {
    square += __shfl_xor_sync(3u << (lane & 30), square, 1);
    const int parts = (width + kTile - 1) / kTile;
    if (chunk == 0) p.sumsq_out[static_cast<int64_t>(token0 + t) * parts + tile] = square;
  }
}

// Requests the sums of squares of token `warp`; they travel while the products are computed.
template <int kTokens>
__device__ __forceinline__ bool request_sumsq(const Epilogue& p, float (*squares)[kSharedSums],
                                              int num_rows, int token0) {
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const bool early = kTokens <= 8 && warp < kTokens && p.sumsq != nullptr &&
                     p.num_sumsq <= kSharedSums && p.num_sumsq % 4 == 0 && token0 + warp < num_rows;
  if (early) {
    const float* from = p.sumsq + static_cast<int64_t>(token0 + warp) * p.num_sumsq;
    for (int i = lane * 4; i < p.num_sumsq; i += kWarp * 4) cp_async16(&squares[warp][i], from + i);
    cp_async_commit();
  }
  return early;
}

// Row scales, one warp per token.
template <int kTokens>
__device__ __forceinline__ void make_row_scales(const Epilogue& p, float (*squares)[kSharedSums],
                                                float* row_scale, bool early, int num_rows,
                                                int token0) {
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  for (int t = warp; t < kTokens && token0 + t < num_rows; t += blockDim.x / kWarp) {
    float scale = 1.f;
    if (p.sumsq != nullptr) {
      const float* from = p.sumsq + static_cast<int64_t>(token0 + t) * p.num_sumsq;
      float sum = 0.f;
      if (early) {
        cp_async_wait<0>();
        __syncwarp();
        for (int i = lane; i < p.num_sumsq; i += kWarp) sum += squares[warp][i];
      } else {
        for (int i = lane; i < p.num_sumsq; i += kWarp) sum += __ldcg(from + i);
      }
      scale = rsqrtf(warp_sum(sum) * p.inverse_width + p.epsilon);
    }
    if (lane == 0) row_scale[t] = scale;
  }
}

// Fragments of 32 values of k: lane l reads 8 at k = 8 * (l % 4) of weight rows l / 4 and l / 4
// + 8. The mma's own order of k is another; x is read in the same order, so the sum is the same.
template <int kUnroll>
struct Fragments {
  uint4 low[kUnroll], high[kUnroll];
};

template <class T, int kTokens, int kUnroll, int kBlocks, bool kGrouped>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gemm_stream_sm80_kernel(const T* __restrict__ all_weights, const T* __restrict__ x,
                            const Epilogue epilogue, const int all_rows, const int in_features,
                            const Groups groups) {
  constexpr int kEights = kTokens / 8;
  constexpr int kChunk = kUnroll * 32;  // k per warp and round
  __shared__ float partial[kWarps][kTokens][kTile + 4];
  __shared__ float sums[kTokens][kTile + 4];
  __shared__ float row_scale[kTokens];
  __shared__ alignas(16) float squares[8][kSharedSums];

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int g = lane / 4;
  const int q = lane % 4 * 8;
  const int tile = blockIdx.x;
  GroupTile own = {0, static_cast<int>(blockIdx.y) * kTokens, all_rows};
  if constexpr (kGrouped) {
    if (!groups.ready) pdl_wait();
    own = find_group_tile<kTokens>(groups, blockIdx.y);
    if (own.group < 0) return;
  }
  const int token0 = own.first, num_rows = own.end;
  const auto& p = epilogue_of<T, kGrouped>(epilogue, own.group);
  const T* weight = all_weights + static_cast<int64_t>(own.group) * p.out_features * in_features;
  const int width = p.gated ? p.out_features / 2 : p.out_features;
  const int64_t first = p.gated ? tile * 8 : tile * kTile;
  // Rows past the end repeat the last one; their results are not written.
  const int64_t row_low = min(first + g, static_cast<int64_t>(p.out_features) - 1);
  const int64_t row_high =
      min(p.gated ? width + first + g : first + g + 8, static_cast<int64_t>(p.out_features) - 1);
  const T* low = weight + row_low * in_features + q;
  const T* high = weight + row_high * in_features + q;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  const uint64_t once = policy_evict_first();
  auto load = [&](Fragments<kUnroll>& f, int k) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k + u * 32;
      const bool inside = at + q < in_features;
      f.low[u] = inside ? bit_cast<uint4>(load16_once(low + at, once)) : zero;
      f.high[u] = inside ? bit_cast<uint4>(load16_once(high + at, once)) : zero;
    }
  };

  // The first weights do not depend on the kernel ahead.
  Fragments<kUnroll> next;
  load(next, warp * kChunk);
  pdl_trigger();
  pdl_wait();

  const bool early = request_sumsq<kTokens>(p, squares, num_rows, token0);

  const T* token[kEights];
  bool valid[kEights];
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    valid[j] = token0 + j * 8 + g < num_rows;
    token[j] = x + static_cast<int64_t>(valid[j] ? token0 + j * 8 + g : 0) * in_features + q;
  }
  float acc[kEights][4] = {};
  for (int k = warp * kChunk; k < in_features; k += kWarps * kChunk) {
    const Fragments<kUnroll> now = next;
    if (k + kWarps * kChunk < in_features) load(next, k + kWarps * kChunk);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k + u * 32;
      const bool inside = at + q < in_features;
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        uint4 b = zero;
        if (inside && valid[j]) b = *reinterpret_cast<const uint4*>(token[j] + at);
        const uint32_t a0[4] = {now.low[u].x, now.high[u].x, now.low[u].y, now.high[u].y};
        const uint32_t a1[4] = {now.low[u].z, now.high[u].z, now.low[u].w, now.high[u].w};
        mma_m16n8k16<T>(acc[j], a0, b.x, b.y);
        mma_m16n8k16<T>(acc[j], a1, b.z, b.w);
      }
    }
  }

#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int t = j * 8 + lane % 4 * 2;
    partial[warp][t][g] = acc[j][0];
    partial[warp][t + 1][g] = acc[j][1];
    partial[warp][t][g + 8] = acc[j][2];
    partial[warp][t + 1][g + 8] = acc[j][3];
  }
  make_row_scales<kTokens>(p, squares, row_scale, early, num_rows, token0);
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kTile; i += kThreads) {
    const int t = i / kTile;
    const int n = i % kTile;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][t][n];
    sums[t][n] = sum;
  }
  __syncthreads();
  finish_tile<T, kTokens>(p, sums, row_scale, num_rows, token0, tile);
}

// One token: a warp reads two rows of weight (gated: a gate and its up), 512 adjacent bytes of each
// at a time, multiplies in float, and finishes its outputs by itself: no warp waits for another.
template <class T, int kUnroll, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gemv_stream_kernel(const T* __restrict__ weight, const T* __restrict__ x, const Epilogue p,
                       const int in_features) {
  constexpr int kRound = kWarp * 8 * kUnroll;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int width = p.gated ? p.out_features / 2 : p.out_features;
  // This lane's output: lanes 0 and 1 (gated: 0) write.
  const int64_t first = p.gated ? static_cast<int64_t>(blockIdx.x) * kWarps + warp
                                : static_cast<int64_t>(blockIdx.x) * kTile + warp * 2;
  const int64_t last = p.out_features - 1;
  const T* low = weight + min(first, last) * in_features + lane * 8;
  const T* high = weight + min(p.gated ? width + first : first + 1, last) * in_features + lane * 8;
  const uint64_t once = policy_evict_first();
  const uint4 zero = make_uint4(0, 0, 0, 0);
  Fragments<kUnroll> next;
  const auto load = [&](int k) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k + u * kWarp * 8;
      const bool inside = at + lane * 8 < in_features;
      next.low[u] = inside ? bit_cast<uint4>(load16_once(low + at, once)) : zero;
      next.high[u] = inside ? bit_cast<uint4>(load16_once(high + at, once)) : zero;
    }
  };
  load(0);
  pdl_trigger();
  pdl_wait();
  const int64_t n = first + lane;
  const bool writes = lane < (p.gated ? 1 : 2) && n < width;
  float residual = 0.f, bias = 0.f, bias_up = 0.f;
  if (writes) {
    if (p.residual != nullptr) {
      residual = Traits<T>::to_float(static_cast<const T*>(p.residual)[n]);
    }
    if (p.bias != nullptr) {
      bias = Traits<T>::to_float(static_cast<const T*>(p.bias)[n]);
      if (p.gated) bias_up = Traits<T>::to_float(static_cast<const T*>(p.bias)[width + n]);
    }
  }

  float acc_low = 0.f, acc_high = 0.f, acc_square = 0.f;
  for (int k = 0; k < in_features; k += kRound) {
    const Fragments<kUnroll> now = next;
    if (k + kRound < in_features) load(k + kRound);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k + u * kWarp * 8 + lane * 8;
      const uint4 b = at < in_features ? *reinterpret_cast<const uint4*>(x + at) : zero;
      const uint32_t bw[4] = {b.x, b.y, b.z, b.w};
      const uint32_t lw[4] = {now.low[u].x, now.low[u].y, now.low[u].z, now.low[u].w};
      const uint32_t hw[4] = {now.high[u].x, now.high[u].y, now.high[u].z, now.high[u].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        using Pair = typename Traits<T>::Pair;
        const float2 xv = Traits<T>::to_float2(bit_cast<Pair>(bw[i]));
        const float2 lv = Traits<T>::to_float2(bit_cast<Pair>(lw[i]));
        const float2 hv = Traits<T>::to_float2(bit_cast<Pair>(hw[i]));
        acc_low = fmaf(lv.y, xv.y, fmaf(lv.x, xv.x, acc_low));
        acc_high = fmaf(hv.y, xv.y, fmaf(hv.x, xv.x, acc_high));
        acc_square = fmaf(xv.y, xv.y, fmaf(xv.x, xv.x, acc_square));
      }
    }
  }
  float scale = 1.f;
  if (p.sumsq != nullptr) {
    // From x itself: reading the partial sums, every warp the same ones, would cost more.
    scale = rsqrtf(warp_sum(acc_square) * p.inverse_width + p.epsilon);
  }
  acc_low = warp_sum(acc_low) * scale;
  acc_high = warp_sum(acc_high) * scale;
  float values[1] = {(p.gated || lane == 0 ? acc_low : acc_high) + bias};
  if (p.gated || p.activates) apply(p.function, values);
  float y = p.gated ? values[0] * (acc_high + bias_up) : values[0] + residual;
  if (writes) {
    if (p.float_out) {
      static_cast<float*>(p.out)[n] = y;
    } else {
      const T rounded = Traits<T>::from_float(y);
      static_cast<T*>(p.out)[n] = rounded;
      y = Traits<T>::to_float(rounded);
    }
  }
  if (p.sumsq_out != nullptr) {
    __shared__ float scratch[kWarps];
    const float square = writes ? y * y : 0.f;
    const float pair = square + __shfl_xor_sync(~0u, square, 1);
    if (lane == 0) scratch[warp] = pair;
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += scratch[w];
      p.sumsq_out[blockIdx.x] = sum;
    }
  }
}

// Rows of x with a weight each, as gemv_stream_kernel has one. Blocks stay: what a warp owns of one
// row of x is too little to fill memory's latency with.
template <class T, int kUnroll, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gemv_groups_kernel(const T* __restrict__ weight, const T* __restrict__ x, const Epilogue p,
                       const int most_rows, const int in_features, const Groups groups) {
  constexpr int kRound = kWarp * 8 * kUnroll;
  __shared__ int group_of[kVectorRows];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (!groups.ready) pdl_wait();
  const int num_rows = rows_of_groups(groups, most_rows);
  for (int row = warp; row < num_rows; row += kWarps) {
    const int group = find_group(groups, row);
    if (lane == 0) group_of[row] = group;
  }
  __syncthreads();

  // An item is two rows of weight (gated: a gate and its up) for a row of x; a row's items adjoin.
  const int width = p.gated ? p.out_features / 2 : p.out_features;
  const int per_row = p.gated ? width : (width + 1) / 2;
  const int items = num_rows * per_row, stride = gridDim.x * kWarps;
  const auto first_of = [&](int item) { return item % per_row * (p.gated ? 1 : 2); };
  const uint64_t once = policy_evict_first();
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const T *low = nullptr, *high = nullptr;
  const auto aim = [&](int item) {
    const int first = first_of(item), last = p.out_features - 1;
    const int64_t row = static_cast<int64_t>(group_of[item / per_row]) * p.out_features;
    low = weight + (row + first) * in_features + lane * 8;
    high = weight + (row + min(p.gated ? width + first : first + 1, last)) * in_features + lane * 8;
  };
  Fragments<kUnroll> next;
  const auto load = [&](int k) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k + u * kWarp * 8;
      const bool inside = at + lane * 8 < in_features;
      next.low[u] = inside ? bit_cast<uint4>(load16_once(low + at, once)) : zero;
      next.high[u] = inside ? bit_cast<uint4>(load16_once(high + at, once)) : zero;
    }
  };
  int item = blockIdx.x * kWarps + warp;
  if (item < items) {
    aim(item);
    load(0);
  }
  pdl_trigger();
  pdl_wait();

  for (; item < items; item += stride) {
    const int row = item / per_row;
    const int n = first_of(item) + lane;  // of this lane's output, if it has one
    const bool writes = lane < (p.gated ? 1 : 2) && n < width;
    float bias = 0.f, bias_up = 0.f;
    if (writes && p.bias != nullptr) {
      const T* from =
          static_cast<const T*>(p.bias) + static_cast<int64_t>(group_of[row]) * p.out_features + n;
      bias = Traits<T>::to_float(*from);
      if (p.gated) bias_up = Traits<T>::to_float(from[width]);
    }
    const T* token = x + static_cast<int64_t>(row) * in_features + lane * 8;
    float acc_low = 0.f, acc_high = 0.f;
    for (int k = 0; k < in_features; k += kRound) {
      const Fragments<kUnroll> now = next;
      if (k + kRound < in_features) {
        load(k + kRound);
      } else if (item + stride < items) {
        aim(item + stride);
        load(0);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = k + u * kWarp * 8;
        const uint4 b =
            at + lane * 8 < in_features ? *reinterpret_cast<const uint4*>(token + at) : zero;
        acc_low = dot_unit<T>(now.low[u], b, acc_low);
        acc_high = dot_unit<T>(now.high[u], b, acc_high);
      }
    }
    acc_low = warp_sum(acc_low);
    acc_high = warp_sum(acc_high);
    float values[1] = {(p.gated || lane == 0 ? acc_low : acc_high) + bias};
    if (p.gated || p.activates) apply(p.function, values);
    const float y = p.gated ? values[0] * (acc_high + bias_up) : values[0];
    if (!writes) continue;
    const int64_t to = static_cast<int64_t>(row) * width + n;
    if (p.float_out) {
      static_cast<float*>(p.out)[to] = y;
    } else {
      static_cast<T*>(p.out)[to] = Traits<T>::from_float(y);
    }
  }
}

template <class T, int kTokens, int kUnroll, int kBlocks, bool kGrouped>
Status run(const GemmParams& p, cudaStream_t stream) {
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  const int64_t tiles =
      kGrouped ? max_group_tiles(p.num_rows, p.num_groups, kTokens) : ceil_div(p.num_rows, kTokens);
  return launch(gemm_stream_sm80_kernel<T, kTokens, kUnroll, kBlocks, kGrouped>,
                {{stream, p.dependent_launch},
                 grid_of(ceil_div(width, p.gated ? 8 : kTile), tiles),
                 kThreads},
                "gemm_stream_sm80", static_cast<const T*>(p.weight), static_cast<const T*>(p.x),
                make_epilogue(p), static_cast<int>(p.num_rows), static_cast<int>(p.in_features),
                make_groups(p));
}

template <class T>
Status run_gemv(const GemmParams& p, cudaStream_t stream) {
  const LaunchConfig config({stream, p.dependent_launch}, ceil_div(p.out_features, kTile),
                            kThreads);
  // One block of a multiprocessor has as much on its way as two. Its registers leave no room beside
  // a product's blocks: of few columns, which follow attention, alone.
  const bool alone =
      static_cast<int>(config.grid.x) <= num_multiprocessors() && p.in_features <= 4096;
  auto* const kernel = alone ? gemv_stream_kernel<T, 8, 1> : gemv_stream_kernel<T, 4, 2>;
  return launch(kernel, config, "gemv_stream", static_cast<const T*>(p.weight),
                static_cast<const T*>(p.x), make_epilogue(p), static_cast<int>(p.in_features));
}

template <class T>
Status run_gemv_groups(const GemmParams& p, cudaStream_t stream) {
  constexpr int kBlocks = 2;  // of a multiprocessor
  const int64_t blocks = p.num_rows * ceil_div(p.out_features, kTile);
  return launch(gemv_groups_kernel<T, 4, kBlocks>,
                {{stream, p.dependent_launch},
                 std::min<int64_t>(blocks, kBlocks * num_multiprocessors()),
                 kThreads},
                "gemv_groups", static_cast<const T*>(p.weight), static_cast<const T*>(p.x),
                make_epilogue(p), static_cast<int>(p.num_rows), static_cast<int>(p.in_features),
                make_groups(p));
}

template <class T>
Status run_groups(const GemmParams& p, bool use_mma, cudaStream_t stream) {
  if (p.num_rows <= kVectorRows && !use_mma) return run_gemv_groups<T>(p, stream);
  const int tokens = choose_group_tokens(p.num_rows, p.num_groups, 8, 32);
  if (tokens == 8) return run<T, 8, 4, 2, true>(p, stream);
  return tokens == 16 ? run<T, 16, 4, 2, true>(p, stream) : run<T, 32, 4, 2, true>(p, stream);
}

template <class T>
Status run_rows(const GemmParams& p, bool use_mma, cudaStream_t stream) {
  if (p.num_groups > 0) return run_groups<T>(p, use_mma, stream);
  if (p.num_rows == 1 && !use_mma) return run_gemv<T>(p, stream);
  if (p.num_rows <= 8) return run<T, 8, 4, 2, false>(p, stream);
  return p.num_rows <= 16 ? run<T, 16, 4, 2, false>(p, stream) : run<T, 32, 4, 2, false>(p, stream);
}

}  // namespace

Status gemm_stream_sm80(const GemmParams& p, bool use_mma, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_stream_sm80", gemm_stream_sm80_refuses(p)));
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_rows<__nv_bfloat16>(p, use_mma, stream)
                                     : run_rows<__half>(p, use_mma, stream);
}

}  // namespace regatta::cuda
