// Products of a quantized weight and few or many tokens by mma.sync, for every GPU: the loop that
// gemm_packed_mma.cu and gemm_codes_mma.cu share. They differ in how a warp comes to its operands.
//
// Architectures: sm_75 and later; bf16: sm_80 and later. On sm_75 copies are not asynchronous.
// Algorithm
//   1. A warp owns a pair of 16 rows of weight (gated: gates and their ups), kTokens tokens and a
//      part of k, in units of 128 columns. Codes go from memory into the registers of the lane
//      whose operand they are, a unit ahead; x goes through a ring in shared memory.
//   2. Warps on the same part of k share that ring and a named barrier; the parts' sums are added
//      in order at the end. Eight warps stand side by side along rows, else along k.
//   3. Of groups a block finds its tile of tokens and their group's weight (groups.cuh).
// Source: own. That weights skip shared memory is what sets it apart from Marlin and TurboMind.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/tiles.h"
#include "regatta/gemm.h"

namespace regatta::cuda {

constexpr int kMmaWarps = 8;
constexpr int kMmaThreads = kMmaWarps * kWarp;
constexpr int kMmaUnit = 128;       // columns
constexpr int kMmaStepBytes = 128;  // of a row of x: a step of the ring
constexpr int kMmaSumTokens = 32;   // whose sums lie in shared memory at a time

// GemmParams, as the kernels take it.
struct MmaParams {
  Epilogue epilogue;
  BlockScales scales;  // of blocks; num_blocks 0: none
  const uint8_t* x;
  const uint8_t* weight;
  int num_rows, x_bytes;  // x_bytes: of a row
  int num_units;          // along k
  int pairs;              // side by side in a block
  int up;                 // rows from a gate to its up; 0: not gated
  int token_blocks;
  int unit_bytes, num_slabs;  // of packed weights
  bool half;                  // bias, residual and out are fp16, else bf16 (of codes)
  bool once;                  // a weight is read by one block of tokens
  Groups groups;
  int64_t weight_bytes;  // of a group's weight
};

// What a group's tile reads; without groups, all of it.
template <bool kGrouped>
__device__ __forceinline__ decltype(auto) params_of(const MmaParams& p, int group) {
  if constexpr (kGrouped) {
    MmaParams own = p;
    own.weight += group * p.weight_bytes;
    // bias is of 16-bit values, whichever.
    own.epilogue = epilogue_of<__half, true>(p.epilogue, group);
    if (p.scales.num_blocks != 0) own.scales = p.scales.of_group(group);
    return own;
  } else {
    return (p);
  }
}

// Weights that one block of tokens reads are read once.
__device__ __forceinline__ uint64_t policy_of_weights(bool once) {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  if (once) {
    policy = policy_evict_first();
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
#endif
  return policy;
}

__device__ __forceinline__ uint4 load_codes(const void* from, uint64_t policy) {
  return bit_cast<uint4>(load16_once(static_cast<const __half*>(from), policy));
}

// The first row of weight of the pair's half `s`.
__device__ __forceinline__ int row_of_pair(const MmaParams& p, int pair, int s) {
  return p.up == 0 ? pair * 32 + s * 16 : pair * 16 + s * p.up;
}

// Shared memory of the sums of `tokens` tokens, each part of k its own: floats from a token to the
// next without bank conflicts.
__host__ __device__ constexpr int mma_sum_stride(int pairs) { return pairs * 32 + 4; }
__host__ __device__ constexpr int mma_sum_bytes(int pairs, int splits, int tokens) {
  return splits * tokens * mma_sum_stride(pairs) * 4;
}

// d: the accumulators of 16 rows by 8 tokens, into a part's sums from their first row and token on.
template <class Sum>
__device__ __forceinline__ void put_sums(float* sums, int stride, const Sum (&d)[4]) {
  const int lane = threadIdx.x % kWarp;
  float* to = sums + lane % 4 * 2 * stride + lane / 4;
  to[0] = static_cast<float>(d[0]);
  to[stride] = static_cast<float>(d[1]);
  to[8] = static_cast<float>(d[2]);
  to[stride + 8] = static_cast<float>(d[3]);
}

// Finishes `count` tokens from token0 on: an item is eight outputs of one token. By the whole
// block.
template <class T>
__device__ __forceinline__ void finish_sums(const MmaParams& p, const float* sums, int pairs,
                                            int splits, int tokens, const float* row_scale,
                                            int token0, int count, int pair0) {
  const Epilogue& e = p.epilogue;
  const bool gated = p.up != 0;
  const int stride = mma_sum_stride(pairs);
  const int width = gated ? e.out_features / 2 : e.out_features;
  const int chunks = gated ? pairs * 2 : pairs * 4;
  const int items = count * chunks;
  for (int first = 0; first < items; first += kMmaThreads) {
    const int item = first + static_cast<int>(threadIdx.x);
    const int t = item / chunks, chunk = item % chunks;
    const int n0 = pair0 * (gated ? 16 : 32) + chunk * 8;
    float squares = 0.f;
    if (item < items && n0 < width) {
      const float* at = sums + t * stride + (gated ? chunk / 2 * 32 + chunk % 2 * 8 : chunk * 8);
      float v[16] = {};
      for (int s = 0; s < splits; ++s, at += tokens * stride) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          if (q >= 2 && !gated) break;
          const float4 f = *reinterpret_cast<const float4*>(at + q / 2 * 16 + q % 2 * 4);
          v[q * 4] += f.x, v[q * 4 + 1] += f.y, v[q * 4 + 2] += f.z, v[q * 4 + 3] += f.w;
        }
      }
      squares = finish<T>(e, v, row_scale[t], token0 + t, n0, width);
    }
    if (e.sumsq_out != nullptr) {
      // Two or eight adjacent lanes hold the columns of a partial.
      const int lanes = e.sumsq_columns / 8;
      for (int o = lanes / 2; o > 0; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
      const int part = n0 / e.sumsq_columns;
      const int parts = (width + e.sumsq_columns - 1) / e.sumsq_columns;
      if (item < items && item % lanes == 0 && part < parts) {
        e.sumsq_out[static_cast<int64_t>(token0 + t) * parts + part] = squares;
      }
    }
  }
}

// Outputs of fp16 or bf16, by what the weights' type says or, of codes (Out is void), by p.half.
template <class Out, class... Args>
__device__ __forceinline__ void finish_any(const MmaParams& p, Args... args) {
  if constexpr (!std::is_void_v<Out>) {
    finish_sums<Out>(p, args...);
  } else if (p.half) {
    finish_sums<__half>(p, args...);
  } else {
    finish_sums<__nv_bfloat16>(p, args...);
  }
}

// Weights: one warp's operands, see PackedWeights (gemm_packed_mma.cu) and CodeWeights
// (gemm_codes_mma.cu).
//   kTokens; kBlocks: per multiprocessor; kHalves: steps of x in a unit; kPitch: bytes of a row of
//   x in the ring
//   Sum: of the accumulators; Out: see finish_any()
//   chunk_place(row, chunk): where 16 bytes of x lie in a step
//   place(p, pair): before all else; load(p, half, unit): asks for codes
//   multiply<kGrouped>(p, half, unit, token0, x, acc): adds their products
template <class Weights>
struct MmaShape {
  static constexpr int kTokens = Weights::kTokens;
  static constexpr int kStages = kTokens == 8 ? 4 : 3;
  static constexpr int kStageBytes = kTokens * Weights::kPitch;
  static constexpr int kHeadBytes = kTokens * 4;  // row scales
  static constexpr int kSumTokens = kTokens < kMmaSumTokens ? kTokens : kMmaSumTokens;
  static int shared_bytes(int pairs) {
    const int splits = kMmaWarps / pairs;
    return kHeadBytes +
           std::max(splits * kStages * kStageBytes, mma_sum_bytes(pairs, splits, kSumTokens));
  }
};

template <class Weights, bool kGrouped>
__global__ void __launch_bounds__(kMmaThreads, Weights::kBlocks)
    mma_kernel(const __grid_constant__ MmaParams all) {
  using S = MmaShape<Weights>;
  constexpr int kTokens = S::kTokens, kHalves = Weights::kHalves;
  extern __shared__ __align__(16) char shared[];
  float* row_scale = reinterpret_cast<float*>(shared);
  const int warp = threadIdx.x / kWarp;
  const int pairs = all.pairs, splits = kMmaWarps / pairs;
  const int pair = warp % pairs, split = warp / pairs;
  const int token_block = blockIdx.x % all.token_blocks;
  const int pair0 = blockIdx.x / all.token_blocks * pairs;
  GroupTile tile = {0, token_block * kTokens, all.num_rows};
  if constexpr (kGrouped) {
    if (!all.groups.ready) pdl_wait();
    tile = find_group_tile<kTokens>(all.groups, token_block);
    if (tile.group < 0) return;
  }
  const auto& p = params_of<kGrouped>(all, tile.group);
  const int token0 = tile.first;
  const int count = min(kTokens, tile.end - token0);
  char* ring = shared + S::kHeadBytes + split * S::kStages * S::kStageBytes;
  // This part's units: split, split + splits, ...
  const int num_units = split < p.num_units ? (p.num_units - split - 1) / splits + 1 : 0;
  const int num_steps = num_units * kHalves;

  Weights weights;
  weights.place(p, pair0 + pair);
  if (num_units > 0) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) weights.load(p, h, split);
  }
  pdl_trigger();
  pdl_wait();

  // Rows behind the last token and columns behind the last one are zeros.
  const int group = pairs * kWarp, thread = threadIdx.x - split * group;
  const int chunk = thread % 8;
  const auto copy = [&](int step) {
    const int unit = split + step / kHalves * splits;
    const int at = (unit * kHalves + step % kHalves) * kMmaStepBytes + chunk * 16;
    char* to = ring + step % S::kStages * S::kStageBytes;
    for (int row = thread / 8; row < kTokens; row += group / 8) {
      const bool inside = row < count && at < p.x_bytes;
      const uint8_t* from =
          inside ? p.x + static_cast<int64_t>(token0 + row) * p.x_bytes + at : p.x;
      cp_async16(to + Weights::chunk_place(row, chunk), from, inside ? 16 : 0);
    }
  };
#pragma unroll
  for (int i = 0; i < S::kStages - 1; ++i) {
    if (i < num_steps) copy(i);
    cp_async_commit();
  }
  for (int t = threadIdx.x; t < count; t += kMmaThreads) {
    row_scale[t] = row_scale_of(p.epilogue, token0 + t);
  }

  typename Weights::Sum acc[2][kTokens / 8][4];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[s][n][i] = 0;
    }
  }
  for (int u = 0; u < num_units; ++u) {
    const int unit = split + u * splits;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int step = u * kHalves + h;
      cp_async_wait<S::kStages - 2>();
      // Step `step` is there, and everyone is done with the one ahead, whose place is next.
      if (pairs == 1) {
        __syncwarp();
      } else {
        named_barrier_sync(1 + split, group);
      }
      if (step + S::kStages - 1 < num_steps) copy(step + S::kStages - 1);
      cp_async_commit();
      weights.template multiply<kGrouped>(p, h, unit, token0,
                                          ring + step % S::kStages * S::kStageBytes, acc);
      if (u + 1 < num_units) weights.load(p, h, unit + splits);
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  float* sums = reinterpret_cast<float*>(shared + S::kHeadBytes);
  const int stride = mma_sum_stride(pairs);
#pragma unroll
  for (int first = 0; first < kTokens; first += S::kSumTokens) {
    if (first >= count) break;
    if (first > 0) __syncthreads();
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int n = 0; n < S::kSumTokens / 8; ++n) {
        put_sums(sums + (split * S::kSumTokens + n * 8) * stride + pair * 32 + s * 16, stride,
                 acc[s][first / 8 + n]);
      }
    }
    __syncthreads();
    finish_any<typename Weights::Out>(p, sums, pairs, splits, S::kSumTokens, row_scale + first,
                                      token0 + first, min(S::kSumTokens, count - first), pair0);
  }
}

// Blocks of `tokens` tokens; of groups, as many as there may be.
inline int64_t mma_token_blocks(const GemmParams& p, int64_t tokens) {
  return p.num_groups > 0 ? max_group_tiles(p.num_rows, p.num_groups, tokens)
                          : ceil_div(p.num_rows, tokens);
}

// What the kernels read of `p`, but for the weights' own layout.
inline MmaParams make_mma_params(const GemmParams& p, const MmaTile& tile, int bytes_of_x) {
  MmaParams m = {};
  m.epilogue = make_epilogue(p);
  if (p.scale_rows != 0) m.scales = make_block_scales(p);
  m.x = static_cast<const uint8_t*>(p.x);
  m.weight = static_cast<const uint8_t*>(p.weight);
  m.num_rows = static_cast<int>(p.num_rows);
  m.x_bytes = static_cast<int>(p.in_features * bytes_of_x);
  m.num_units = static_cast<int>(ceil_div(p.in_features, kMmaUnit));
  m.pairs = tile.pairs;
  m.up = p.gated ? static_cast<int>(p.out_features / 2) : 0;
  m.token_blocks = static_cast<int>(mma_token_blocks(p, tile.tokens));
  m.once = m.token_blocks == 1 || (p.num_groups > 0 && tile.tokens == 8);
  m.half = p.dtype == DType::kFloat16;
  m.groups = make_groups(p);
  m.weight_bytes = p.out_features * p.in_features;  // of codes
  return m;
}

// Pairs of 16 rows of weight in all.
inline int64_t num_mma_pairs(const GemmParams& p) {
  return p.gated ? ceil_div(p.out_features / 2, 16) : ceil_div(p.out_features, 32);
}

template <class Weights>
Status run_mma(const GemmParams& p, const MmaParams& m, const char* name, cudaStream_t stream) {
  const auto kernel = p.num_groups > 0 ? mma_kernel<Weights, true> : mma_kernel<Weights, false>;
  return launch(kernel,
                {{stream, p.dependent_launch},
                 ceil_div(num_mma_pairs(p), m.pairs) * m.token_blocks,
                 kMmaThreads,
                 MmaShape<Weights>::shared_bytes(m.pairs)},
                name, m);
}

// Of groups: tokens by their mean. In the batch-invariant mode k has the same parts for any rows.
inline MmaTile choose_group_mma_tile(const GemmParams& p, int num_multiprocessors) {
  const int tokens = choose_group_tokens(p.num_rows, p.num_groups, 8, 64);
  MmaTile tile = {tokens == 16 ? 32 : tokens, 4};
  if (is_batch_invariant || tile.tokens == 64) return tile;
  const int64_t pairs = num_mma_pairs(p), blocks = mma_token_blocks(p, tile.tokens);
  const int least = tile.tokens == 8 ? 1 : 2;
  while (tile.pairs > least && ceil_div(pairs, tile.pairs) * blocks < 2 * num_multiprocessors) {
    tile.pairs /= 2;
  }
  return tile;
}

// Tiles as large as leave a block for every multiprocessor. Sums of squares of more than 8 rows are
// of 64 columns, hence two pairs.
inline MmaTile choose_mma_tile(const GemmParams& p, int num_multiprocessors) {
  if (p.num_groups > 0) return choose_group_mma_tile(p, num_multiprocessors);
  if (is_batch_invariant) return {p.num_rows <= 8 ? 8 : p.num_rows <= 32 ? 32 : 64, 4};
  const int64_t pairs = num_mma_pairs(p);
  if (p.num_rows > 32 && ceil_div(pairs, 4) * ceil_div(p.num_rows, 64) >= num_multiprocessors) {
    return {64, 4};
  }
  MmaTile tile = {p.num_rows <= 8 ? 8 : 32, 4};
  const int least = tile.tokens == 8 ? 1 : 2;
  while (tile.pairs > least && ceil_div(pairs, tile.pairs) * ceil_div(p.num_rows, tile.tokens) <
                                   2 * num_multiprocessors) {
    tile.pairs /= 2;
  }
  return tile;
}

inline bool mma_tile_is_known(const GemmParams& p, const MmaTile& tile) {
  if (tile.tokens == 64) return tile.pairs == 4;
  if (tile.tokens != 8 && tile.tokens != 32) return false;
  const bool few = p.num_rows <= 8 || p.num_groups > 0;  // groups give no sums of squares
  const int least = few && tile.tokens == 8 ? 1 : 2;
  return tile.pairs >= least && tile.pairs <= 4 && (tile.pairs & (tile.pairs - 1)) == 0;
}

}  // namespace regatta::cuda
