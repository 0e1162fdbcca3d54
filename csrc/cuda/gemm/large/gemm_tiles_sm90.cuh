// The kernel of gemm_tiles_sm90.cu, which says what it does, and its launch.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/gemm_tensor_map.cuh"
#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/tiles.h"
#include "cuda/hopper.cuh"
#include "cuda/wgmma.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kTokens = kLargeTokens;  // per block
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;  // one that fetches, two that multiply
constexpr int kHalf = kTokens / 2;        // of a warpgroup that multiplies
constexpr int kCluster = kLargeCluster;
constexpr int kRowBytes = 128;  // of k per stage: one swizzled row
constexpr int kWgmmaBytes = 32;
constexpr int kMaxStages = 8;
constexpr int kHeadBytes = 2048;  // barriers, scales of rows
constexpr int kSharedBytes = 227 * 1024;
constexpr int kOrder = 8;  // pairs of token tiles that are worked on together

// Whether a tile's scales of weights and its bias wait in shared memory when it is finished,
// instead of a load each that the next outputs wait for: of codes, whose scales of blocks are in
// the sums.
template <class T, bool kBlocks>
constexpr bool kScalesAhead = sizeof(T) == 1 && !kBlocks;

struct KernelParams {
  Epilogue epilogue;
  BlockScales blocks;
  int num_rows, num_steps;
  int pairs, tiles;  // of tokens and of weights
  int stages;
  Groups groups;
};

template <int kColumns, bool kBlocks, bool kScales, bool kGrouped>
struct Shape {
  static constexpr int kTokenBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kColumns * kRowBytes;
  // Of a stage, behind all stages; copies begin at 16 bytes, groups at any row.
  static constexpr int kScaleRows = !kBlocks ? 0 : kGrouped ? kTokens + 4 : kTokens;
  static constexpr int kScaleBytes = kScaleRows * 4;
  // Stages begin at multiples of 1024; scales and biases of two tiles lie behind scales of rows,
  // and what lies ahead of each group behind those.
  static constexpr int kColumnBytes = kScales ? (4 * kColumns * 4 + 1023) / 1024 * 1024 : 0;
  static constexpr int kGroupBytes =
      kGrouped ? (2 * (static_cast<int>(kMaxGroups) + 1) * 4 + 1023) / 1024 * 1024 : 0;
  static constexpr int kHead = kHeadBytes + kColumnBytes + kGroupBytes;
  static constexpr int kStages =
      std::min(kMaxStages, (kSharedBytes - 1024 - kHead) / (kStageBytes + kScaleBytes));
  static constexpr int kSharedTotal = 1024 + kHead + kStages * (kStageBytes + kScaleBytes);
};

// What a block of a cluster makes of a tile.
struct Tile {
  int token0, tile;
  int group, end;  // rows of x from `end` on are not the tile's
  bool wide;       // both blocks have the same tokens, and a tile of weights each
  bool once;       // its weights are read for no other tile
};

// Of `pairs` pairs of token tiles.
__device__ __forceinline__ Tile tile_of_pairs(int pairs, int tiles, int index, int rank) {
  const int per_order = kOrder * tiles;
  const int first = index / per_order * kOrder;
  const int count = min(kOrder, pairs - first);
  const int within = index % per_order;
  return {((first + within % count) * kCluster + rank) * kTokens, within / count};
}

// Pairs of token tiles of a group; up to kTokens rows more have none, but pairs of tiles of
// weights.
__device__ __forceinline__ int pairs_of(int rows) {
  return (rows + kTokens - 1) / (kCluster * kTokens);
}

__device__ __forceinline__ int tiles_of(int rows, int tiles) {
  const int pairs = pairs_of(rows);
  return pairs * tiles + (rows > pairs * kCluster * kTokens ? (tiles + 1) / kCluster : 0);
}

template <bool kGrouped>
__device__ __forceinline__ Tile tile_of(const KernelParams& p, const Ahead& ahead, int index,
                                        int rank) {
  if constexpr (!kGrouped) {
    Tile t = tile_of_pairs(p.pairs, p.tiles, index, rank);
    t.group = 0, t.end = p.num_rows, t.wide = t.once = false;
    return t;
  }
  const int group = ahead.group_of(p.groups, index);
  const int begin = ahead.rows[group], end = ahead.rows[group + 1];
  const int pairs = pairs_of(end - begin), within = index - ahead.tiles[group];
  const int wide = within - pairs * p.tiles;
  Tile t = {pairs * kCluster * kTokens, wide * kCluster + rank};
  if (wide < 0) t = tile_of_pairs(pairs, p.tiles, within, rank);
  t.token0 += begin;
  t.group = group, t.end = end, t.wide = wide >= 0;
  t.once = end - begin <= kCluster * kTokens;
  return t;
}

// Lane q of a quad holds v[j]: pair q of row j; then it holds pair j of row q.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
  const int q = threadIdx.x % 4;
  const bool odd = q & 1, high = q & 2;
  {
    const uint32_t a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    const uint32_t b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    (odd ? v[0] : v[1]) = a;
    (odd ? v[2] : v[3]) = b;
  }
  {
    const uint32_t a = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
    const uint32_t b = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
    (high ? v[0] : v[2]) = a;
    (high ? v[1] : v[3]) = b;
  }
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t x) {
  return Traits<T>::to_float2(bit_cast<typename Traits<T>::Pair>(x));
}

template <class T>
__device__ __forceinline__ uint32_t pack(float2 x) {
  return bit_cast<uint32_t>(Traits<T>::from_float2(x));
}

// Two adjacent outputs' biases, from column n on.
template <class T>
__device__ __forceinline__ float2 bias_pair(const void* bias, int n) {
  return unpack<T>(__ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(bias) + n)));
}

// By a warp: scales of weights of a tile's columns (gated: gates, then ups), and their biases
// behind.
template <class T, int kColumns, bool kGated>
__device__ __forceinline__ void load_columns(const Epilogue& p, int tile, float* columns) {
  constexpr int kOutputs = kGated ? kColumns / 2 : kColumns;
  const int width = kGated ? p.out_features / 2 : p.out_features;
  for (int i = threadIdx.x % kWarp; i < kColumns; i += kWarp) {
    const int n = tile * kOutputs + i % kOutputs, row = i / kOutputs * width + n;
    const bool inside = n < width;
    columns[i] = inside ? __ldg(p.weight_scale + row) : 0.f;
    columns[kColumns + i] =
        inside && p.bias != nullptr ? Traits<T>::to_float(static_cast<const T*>(p.bias)[row]) : 0.f;
  }
}

// y * scale + bias of columns i and i + 1 that load_columns() left.
template <int kColumns>
__device__ __forceinline__ float2 scaled(float2 y, const float* columns, int i) {
  const float2 scale = load_shared_float2(columns + i);
  const float2 bias = load_shared_float2(columns + kColumns + i);
  return make_float2(y.x * scale.x + bias.x, y.y * scale.y + bias.y);
}

// acc: 64 tokens by kColumns as wgmma leaves them; this thread's rows are `row` and row + 8.
// columns: of load_columns(), where kScales.
template <class T, class Acc, int kColumns, bool kGated, bool kScales>
__device__ __forceinline__ void finish_tile(const Epilogue& p, const Acc (&acc)[kColumns / 2],
                                            const float (&scale)[2], int row, int num_rows,
                                            int tile, const float* columns) {
  const int q = threadIdx.x % 4;
  constexpr int kChunks = kGated ? kColumns / 16 : kColumns / 8;  // of eight outputs
  const int width = kGated ? p.out_features / 2 : p.out_features;
  const int first = tile * kChunks * 8;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t m = row + h * 8;
    const bool inside = m < num_rows;
    float squares = 0.f;
    constexpr int kLoads = kGated ? 1 : 4;  // of residuals that are waited for at once
    uint4 ahead[kLoads];
#pragma unroll
    for (int b = 0; b < kChunks / 4; ++b) {
      const int mine = first + (b * 4 + q) * 8;  // the chunk that this lane reads and writes
      const bool writes = inside && mine < width;
      uint32_t r[4] = {0, 0, 0, 0};
      if (!kGated && p.residual != nullptr) {
        if (b % kLoads == 0) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const int n = mine + i * 32;
            ahead[i] = make_uint4(0, 0, 0, 0);
            if (inside && n < width && b + i < kChunks / 4) {
              ahead[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.residual) +
                                                               m * width + n));
            }
          }
        }
        const uint4 x = ahead[b % kLoads];
        r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
        transpose_quad(r);
      }
      float2 y[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = (b * 4 + c) * 8 + q * 2, n = first + i;
        const int j = kGated ? (b * 4 + c) * 2 : b * 4 + c;
        y[c] = make_float2(acc[4 * j + 2 * h] * scale[h], acc[4 * j + 2 * h + 1] * scale[h]);
        const bool biased = !kScales && p.bias != nullptr && n < width;
        if constexpr (kScales) {
          y[c] = scaled<kColumns>(y[c], columns, i);
        } else if (p.weight_scale != nullptr && n < width) {
          const float2 x = __ldg(reinterpret_cast<const float2*>(p.weight_scale + n));
          y[c].x *= x.x, y[c].y *= x.y;
        }
        if (biased) {
          const float2 x = bias_pair<T>(p.bias, n);
          y[c].x += x.x, y[c].y += x.y;
        }
        if constexpr (kGated) {
          float2 up =
              make_float2(acc[4 * j + 4 + 2 * h] * scale[h], acc[4 * j + 5 + 2 * h] * scale[h]);
          if constexpr (kScales) {
            up = scaled<kColumns>(up, columns, kColumns / 2 + i);
          } else if (p.weight_scale != nullptr && n < width) {
            const float2 x = __ldg(reinterpret_cast<const float2*>(p.weight_scale + width + n));
            up.x *= x.x, up.y *= x.y;
          }
          if (biased) {
            const float2 x = bias_pair<T>(p.bias, width + n);
            up.x += x.x, up.y += x.y;
          }
          y[c].x = __fdividef(y[c].x, 1.f + __expf(-y[c].x)) * up.x;
          y[c].y = __fdividef(y[c].y, 1.f + __expf(-y[c].y)) * up.y;
        } else if (p.residual != nullptr) {
          const float2 x = unpack<T>(r[c]);
          y[c].x += x.x, y[c].y += x.y;
        }
      }
      if (!kGated && p.float_out) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int n = first + (b * 4 + c) * 8 + q * 2;
          if (!inside || n >= width) continue;
          *reinterpret_cast<float2*>(static_cast<float*>(p.out) + m * width + n) = y[c];
          squares += y[c].x * y[c].x + y[c].y * y[c].y;
        }
      } else {
        uint32_t v[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) v[c] = pack<T>(y[c]);
        transpose_quad(v);
        if (writes) {
          *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + m * width + mine) =
              make_uint4(v[0], v[1], v[2], v[3]);
        }
        if (!kGated && p.sumsq_out != nullptr && writes) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 x = unpack<T>(v[i]);
            squares += x.x * x.x + x.y * x.y;
          }
        }
      }
      if (!kGated && p.sumsq_out != nullptr && b % 2 == 1) {
        squares += __shfl_xor_sync(~0u, squares, 1);
        squares += __shfl_xor_sync(~0u, squares, 2);
        const int part = (first + (b - 1) * 32) / 64;
        const int parts = (width + 63) / 64;
        if (q == 0 && inside && part < parts) p.sumsq_out[m * parts + part] = squares;
        squares = 0.f;
      }
    }
  }
}

// Asks for step i of a tile in groups. Of a pair of token tiles each block fetches half of the
// weights for both; of a wide tile half of the tokens, of which only halves with rows of the group
// come.
template <class T, int kColumns, bool kGated, bool kBlocks>
__device__ __forceinline__ void request_group_stage(const KernelParams& p,
                                                    const CUtensorMap& weight_map,
                                                    const CUtensorMap& token_map, const Tile& t,
                                                    int i, int rank, char* stage, float* x_scale,
                                                    uint64_t* full) {
  using S = Shape<kColumns, kBlocks, kScalesAhead<T, kBlocks>, true>;
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  constexpr int kHalfBytes = kHalf * kRowBytes, kHalfColumns = kColumns / 2;
  const int k = i * (kRowBytes / static_cast<int>(sizeof(T)));
  const int halves = t.end - t.token0 > kHalf ? 2 : 1;
  const uint64_t keep = policy_evict_last();
  const uint64_t weight_policy = t.once ? policy_evict_first() : keep;
  const int scale0 = t.token0 & ~3;
  const int scales = kBlocks ? min(S::kScaleRows, p.blocks.x_stride - scale0) : 0;
  barrier_arrive_expect(full, S::kStageBytes - (2 - halves) * kHalfBytes + scales * 4);
  if constexpr (kBlocks) {
    bulk_load(x_scale, p.blocks.x + static_cast<int64_t>(i) * p.blocks.x_stride + scale0,
              scales * 4, full, keep);
  }
  for (int h = 0; h < 2; ++h) {
    char* tokens = stage + h * kHalfBytes;
    char* weights = stage + S::kTokenBytes + h * kHalfColumns * kRowBytes;
    const int token = t.token0 + h * kHalf, column = t.tile * kColumns + h * kHalfColumns;
    if (h < halves && t.wide && h == rank) {
      tensor_multicast_2d(tokens, &token_map, k, token, full, kBoth, keep);
    } else if (h < halves && !t.wide) {
      tensor_load_2d(tokens, &token_map, k, token, full, keep);
    }
    if (!t.wide && h != rank) continue;
    if constexpr (kGated) {
      if (t.wide) {
        tensor_load_5d(weights, &weight_map, k, 0, 0, column / 16, t.group, full, weight_policy);
      } else {
        tensor_multicast_5d(weights, &weight_map, k, 0, 0, column / 16, t.group, full, kBoth,
                            weight_policy);
      }
    } else if (t.wide) {
      tensor_load_3d(weights, &weight_map, k, column, t.group, full, weight_policy);
    } else {
      tensor_multicast_3d(weights, &weight_map, k, column, t.group, full, kBoth, weight_policy);
    }
  }
}

// T: of x and weight; Out: of bias, residual and out. kBlocks: scales of blocks of 128 x 128, with
// 128 columns: a tile's (gated: its half's) rows of weight have one scale per stage. kGrouped: a
// tile's rows are of one group.
template <class T, class Out, int kColumns, bool kGated, bool kBlocks, bool kGrouped>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_tiles_kernel(const __grid_constant__ CUtensorMap weight_map,
                      const __grid_constant__ CUtensorMap token_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  constexpr bool kScales = kScalesAhead<T, kBlocks>;
  using S = Shape<kColumns, kBlocks, kScales, kGrouped>;
  constexpr int kElements = kRowBytes / sizeof(T);
  constexpr int kStages = S::kStages;
  using Acc = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  extern __shared__ char shared[];
  char* base =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared) + 1023) & ~uintptr_t{1023});
  uint64_t* full = reinterpret_cast<uint64_t*>(base);
  uint64_t* empty = full + kMaxStages;
  uint64_t* scale_full = empty + kMaxStages;                     // [2]
  uint64_t* scale_empty = scale_full + 2;                        // [2]
  float* row_scale = reinterpret_cast<float*>(scale_empty + 2);  // [2, kTokens]
  float* columns = row_scale + 2 * kTokens;  // [2, 2 * kColumns] of load_columns(), where kScales
  char* stages = base + S::kHead;
  // [stage, kScaleRows]
  float* x_scale = reinterpret_cast<float*>(stages + kStages * S::kStageBytes);
  static_assert(!kBlocks || (kColumns == kScaleBlock && kElements == kScaleBlock));

  const int warpgroup = threadIdx.x / kWarpgroup;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int rank = cluster_rank();
  const int clusters = gridDim.x / kCluster;
  Ahead ahead = {};
  if constexpr (kGrouped) {
    ahead.rows = reinterpret_cast<int*>(base + kHeadBytes + S::kColumnBytes);
    ahead.tiles = ahead.rows + kMaxGroups + 1;
    if (!p.groups.ready) pdl_wait();
    count_ahead(p.groups, ahead, [&](int rows) { return tiles_of(rows, p.tiles); });
  }

  if (threadIdx.x == 0) {
    tensor_map_prefetch(&weight_map);
    tensor_map_prefetch(&token_map);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kCluster * 8);
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(&scale_full[s], 1);
      barrier_init(&scale_empty[s], 8);
    }
    barrier_init_fence();
  }
  cluster_arrive();
  cluster_wait();
  const int total = kGrouped ? ahead.tiles[p.groups.count] : p.pairs * p.tiles;

  if (warpgroup == 0) {
    registers_give<40>();
    if (warp == 0 && lane == 0) {
      pdl_wait();
      const uint64_t keep = policy_evict_last();
      int s = 0;
      uint32_t phase = 0;
      for (int index = blockIdx.x / kCluster; index < total; index += clusters) {
        const Tile t = tile_of<kGrouped>(p, ahead, index, rank);
        if (index + clusters >= total) pdl_trigger();
        for (int i = 0; i < p.num_steps; ++i) {
          barrier_wait(&empty[s], phase ^ 1);
          char* to = stages + s * S::kStageBytes;
          if constexpr (kGrouped) {
            request_group_stage<T, kColumns, kGated, kBlocks>(
                p, weight_map, token_map, t, i, rank, to, x_scale + s * S::kScaleRows, &full[s]);
          } else {
            barrier_arrive_expect(&full[s], S::kStageBytes + S::kScaleBytes);
            if constexpr (kBlocks) {
              // A pair's second tile may lie past the end; the scales there are of nothing.
              const int token0 = min(t.token0, p.blocks.x_stride - kTokens);
              bulk_load(x_scale + s * kTokens,
                        p.blocks.x + static_cast<int64_t>(i) * p.blocks.x_stride + token0,
                        S::kScaleBytes, &full[s], keep);
            }
            tensor_load_2d(to, &token_map, i * kElements, t.token0, &full[s], keep);
            to += S::kTokenBytes + rank * (kColumns / kCluster) * kRowBytes;
            if constexpr (kGated) {
              tensor_multicast_4d(to, &weight_map, i * kElements, 0, 0,
                                  t.tile * (kColumns / 16) + rank * (kColumns / 32), &full[s],
                                  (1 << kCluster) - 1, keep);
            } else {
              tensor_multicast_2d(to, &weight_map, i * kElements,
                                  t.tile * kColumns + rank * (kColumns / kCluster), &full[s],
                                  (1 << kCluster) - 1, keep);
            }
          }
          if (++s == kStages) s = 0, phase ^= 1;
        }
      }
    } else if (warp == 1) {
      pdl_wait();
      int s = 0;
      uint32_t phase = 0;
      for (int index = blockIdx.x / kCluster; index < total; index += clusters) {
        const Tile t = tile_of<kGrouped>(p, ahead, index, rank);
        barrier_wait(&scale_empty[s], phase ^ 1);
        for (int i = lane; i < kTokens; i += kWarp) {
          row_scale[s * kTokens + i] =
              t.token0 + i < t.end ? row_scale_of(p.epilogue, t.token0 + i) : 0.f;
        }
        if constexpr (kScales) {
          load_columns<Out, kColumns, kGated>(epilogue_of<Out, kGrouped>(p.epilogue, t.group),
                                              t.tile, columns + s * 2 * kColumns);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&scale_full[s]);
        if (++s == 2) s = 0, phase ^= 1;
      }
    }
  } else {
    registers_take<232>();
    pdl_wait();
    const int half = (warpgroup - 1) * kHalf;
    const WgmmaTile tokens = wgmma_descriptor(stages + half * kRowBytes);  // of stage 0
    const WgmmaTile weights = wgmma_descriptor(stages + S::kTokenBytes);
    const int row = half + warp % 4 * 16 + lane / 4;
    int s = 0, scale_s = 0;
    uint32_t phase = 0, scale_phase = 0;
    Acc acc[kColumns / 2];
    for (int index = blockIdx.x / kCluster; index < total; index += clusters) {
      const Tile t = tile_of<kGrouped>(p, ahead, index, rank);
      const auto free_scales = [&] {
        __syncwarp();
        if (lane == 0) barrier_arrive(&scale_empty[scale_s]);
        if (++scale_s == 2) scale_s = 0, scale_phase ^= 1;
      };
      if (kGrouped && t.token0 + half >= t.end) {
        // None of this warpgroup's rows are the group's: it only hands the stages on.
        for (int i = 0; i < p.num_steps; ++i) {
          barrier_wait(&full[s], phase);
          if (lane < kCluster) barrier_arrive_cluster(&empty[s], lane);
          if (++s == kStages) s = 0, phase ^= 1;
        }
        barrier_wait(&scale_full[scale_s], scale_phase);
        free_scales();
        continue;
      }
      int previous = -1;
      float total[kBlocks ? kColumns / 2 : 1] = {};
      const float *scale_first = nullptr, *scale_up = nullptr;  // of the tile's rows of weight
      if constexpr (kBlocks) {
        const BlockScales blocks = p.blocks.of_group(t.group);
        const int first = t.tile * (kGated ? kColumns / 2 : kColumns);
        scale_first = blocks.of_row(first);
        scale_up = blocks.of_row(p.epilogue.out_features / 2 + first);
      }
      for (int i = 0; i < p.num_steps; ++i) {
        float by_first = 1.f, by_up = 1.f;
        if constexpr (kBlocks) by_first = __ldg(scale_first + i), by_up = __ldg(scale_up + i);
        barrier_wait(&full[s], phase);
        const WgmmaTile a = tokens.at(s * S::kStageBytes), b = weights.at(s * S::kStageBytes);
        wgmma_pin(acc);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kRowBytes / kWgmmaBytes; ++k) {
          Wgmma<T, kColumns>::run(acc, a.at(k * kWgmmaBytes), b.at(k * kWgmmaBytes),
                                  k > 0 || (i > 0 && !kBlocks));
        }
        wgmma_commit();
        wgmma_pin(acc);
        if constexpr (kBlocks) {
          const float* of_rows = x_scale + s * S::kScaleRows + (kGrouped ? t.token0 % 4 : 0) + row;
          const float low = of_rows[0], high = of_rows[8];
          wgmma_wait<0>();
          wgmma_pin(acc);
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            const float by = kGated && j % 2 == 1 ? by_up : by_first;
            total[4 * j] += acc[4 * j] * (low * by);
            total[4 * j + 1] += acc[4 * j + 1] * (low * by);
            total[4 * j + 2] += acc[4 * j + 2] * (high * by);
            total[4 * j + 3] += acc[4 * j + 3] * (high * by);
          }
        } else {
          wgmma_wait<1>();
        }
        if (previous >= 0 && lane < kCluster) barrier_arrive_cluster(&empty[previous], lane);
        previous = s;
        if (++s == kStages) s = 0, phase ^= 1;
      }
      wgmma_wait<0>();
      wgmma_pin(acc);
      if (lane < kCluster) barrier_arrive_cluster(&empty[previous], lane);
      barrier_wait(&scale_full[scale_s], scale_phase);
      const float scale[2] = {row_scale[scale_s * kTokens + row],
                              row_scale[scale_s * kTokens + row + 8]};
      if constexpr (!kScales) free_scales();
      const auto& epilogue = epilogue_of<Out, kGrouped>(p.epilogue, t.group);
      if constexpr (kBlocks) {
        finish_tile<Out, float, kColumns, kGated, kScales>(epilogue, total, scale, t.token0 + row,
                                                           t.end, t.tile, nullptr);
      } else {
        finish_tile<Out, Acc, kColumns, kGated, kScales>(
            epilogue, acc, scale, t.token0 + row, t.end, t.tile, columns + scale_s * 2 * kColumns);
      }
      if constexpr (kScales) free_scales();
    }
  }
  __syncwarp();
  // The other block may still multicast into this one, or arrive at its barriers.
  cluster_arrive_relaxed();
  cluster_wait();
#else
  wrong_architecture();
#endif
}

template <class T, class Out, int kColumns, bool kGated, bool kBlocks, bool kGrouped>
Status run(const GemmParams& p, cudaStream_t stream) {
  using S = Shape<kColumns, kBlocks, kScalesAhead<T, kBlocks>, kGrouped>;
  constexpr cuuint32_t kElements = kRowBytes / sizeof(T);
  CUtensorMap weight_map, token_map;
  REGATTA_RETURN_IF_ERROR(
      encode_weight_map<T, kGated, kGrouped>(&weight_map, p, kColumns / kCluster));
  REGATTA_RETURN_IF_ERROR(encode_rows_map(&token_map, kMapType<T>, p.x, p.num_rows, p.in_features,
                                          kGrouped ? kHalf : kTokens));
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  if (kBlocks) kp.blocks = make_block_scales(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_steps = static_cast<int>(ceil_div(p.in_features, kElements));
  kp.pairs = static_cast<int>(ceil_div(p.num_rows, kCluster * kTokens));
  kp.tiles = static_cast<int>(ceil_div(p.out_features, kColumns));
  kp.groups = make_groups(p);
  const int64_t most_pairs =
      kGrouped ? max_group_tiles(p.num_rows, p.num_groups, kTokens) : int64_t{kp.pairs};
  const int64_t clusters =
      std::min<int64_t>(num_multiprocessors() / kCluster, most_pairs * kp.tiles);
  LaunchConfig config({stream, p.dependent_launch}, clusters * kCluster, kThreads, S::kSharedTotal);
  config.cluster_x = kCluster;
  return launch(gemm_tiles_kernel<T, Out, kColumns, kGated, kBlocks, kGrouped>, config,
                "gemm_tiles", weight_map, token_map, kp);
}

template <class T, class Out, bool kGated, bool kGrouped>
Status run_columns(const GemmParams& p, int columns, cudaStream_t stream) {
  switch (columns) {
    case 128:
      return run<T, Out, 128, kGated, false, kGrouped>(p, stream);
    case 192:
      return run<T, Out, 192, kGated, false, kGrouped>(p, stream);
    default:
      return run<T, Out, 256, kGated, false, kGrouped>(p, stream);
  }
}

template <class T, class Out, bool kGrouped = false>
Status run_gemm_tiles(const GemmParams& p, int columns, cudaStream_t stream) {
  return p.gated ? run_columns<T, Out, true, kGrouped>(p, columns, stream)
                 : run_columns<T, Out, false, kGrouped>(p, columns, stream);
}

// With scales of blocks.
template <class Out, bool kGrouped>
Status run_blocks(const GemmParams& p, cudaStream_t stream) {
  return p.gated ? run<__nv_fp8_e4m3, Out, 128, true, true, kGrouped>(p, stream)
                 : run<__nv_fp8_e4m3, Out, 128, false, true, kGrouped>(p, stream);
}

}  // namespace
}  // namespace regatta::cuda
