// The kernel of gemm_sm90.cu, which says what it does, and its launch.
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

constexpr int kGroup = 128;         // threads of a warpgroup: 64 features each
constexpr int kHelperThreads = 64;  // one warp that copies, one that makes row scales
constexpr int kMaxStages = 16;
constexpr int kRowBytes = 128;   // of k per stage: one swizzled row
constexpr int kWgmmaBytes = 32;  // of k per instruction
// Hopper keeps some 14 bits of a sum of e4m3 products: every so many stages, it goes to a float
// (but not with 128 tokens, which leave no registers for it).
constexpr int kPromoteStages = 4;

struct KernelParams {
  Epilogue epilogue;
  BlockScales blocks;
  int num_rows, num_steps;  // stages along k
  int stages, split, trigger;
  Groups groups;
};

template <int kFeatures, int kTokens>
struct Shape {
  static constexpr int kWeightBytes = kFeatures * kRowBytes;
  static constexpr int kTokenBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  static constexpr int kThreads = kFeatures / 64 * kGroup + kHelperThreads;
  static constexpr int kPartialStride = kFeatures + 4;  // floats per token; no bank conflicts
  static constexpr int kPartialBytes = kTokens * kPartialStride * 4;
  // barriers and row scales, then stages aligned to the swizzle's 1024 bytes
  static constexpr int kHeadBytes = 1024;
  // `scales` floats travel with a stage.
  static int shared_bytes(int stages, int scales) {
    const int body = stages * (kStageBytes + scales * 4);
    return 1024 + kHeadBytes + (body > kPartialBytes ? body : kPartialBytes);
  }
};

// Scales of blocks of x that travel with a stage: copies begin at 16 bytes, groups at any row.
template <int kTokens, bool kBlocks, bool kGrouped>
constexpr int kStageScales = !kBlocks   ? 0
                             : kGrouped ? kTokens + 4
                                        : kTokens;

// T: of x and weight; Out: of bias, residual and out. kBlocks: scales of blocks of 128 columns,
// which are a stage's; they travel behind the stages. kGrouped: a tile's rows are of one group.
template <class T, class Out, int kFeatures, int kTokens, bool kGated, bool kBlocks, bool kGrouped>
__global__ void __launch_bounds__(Shape<kFeatures, kTokens>::kThreads, kFeatures == 256 ? 1
                                                                       : kTokens <= 32 && !kBlocks
                                                                           ? 3
                                                                           : 2)
    gemm_sm90_kernel(const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap token_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<kFeatures, kTokens>;
  constexpr int kElements = kRowBytes / sizeof(T);  // of k per stage
  // Whether a thread reads the scales and biases of its columns, which are the same for all of its
  // tokens, while it waits for the others' sums, and residuals a token ahead. Fewer tokens have no
  // registers for it, with more it is slower.
  constexpr bool kReadsAhead = kTokens == 64;
  constexpr bool kPromote = std::is_same_v<T, __nv_fp8_e4m3> && kTokens <= 64;
  static_assert(!kBlocks || (kPromote && kElements == kScaleBlock));
  constexpr int kPromoteEvery = kBlocks ? 1 : kPromoteStages;
  using Acc = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  constexpr int kConsumers = kFeatures / 64 * kGroup;
  extern __shared__ char shared[];
  char* base =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared) + 1023) & ~uintptr_t{1023});
  uint64_t* full = reinterpret_cast<uint64_t*>(base);
  uint64_t* empty = full + kMaxStages;
  float* row_scale = reinterpret_cast<float*>(empty + kMaxStages);  // [kTokens]
  char* stages = base + S::kHeadBytes;
  float* partial = reinterpret_cast<float*>(stages);  // [kTokens, kPartialStride], after the loop
  // [stage, kScales]
  float* x_scale = reinterpret_cast<float*>(stages + p.stages * S::kStageBytes);
  constexpr int kScales = kStageScales<kTokens, kBlocks, kGrouped>;

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.split;
  const int tile = blockIdx.x / p.split;
  const int step0 = static_cast<int>(static_cast<int64_t>(p.num_steps) * rank / p.split);
  const int num_steps =
      static_cast<int>(static_cast<int64_t>(p.num_steps) * (rank + 1) / p.split) - step0;

  if (kGrouped && !p.groups.ready) pdl_wait();
  if (p.trigger < 0) pdl_trigger();
  const int trigger_step = num_steps - 1 - p.trigger;
  if (threadIdx.x == kConsumers) {
    tensor_map_prefetch(&weight_map);
    tensor_map_prefetch(&token_map);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kConsumers / kWarp);
    }
    barrier_init_fence();
  }
  GroupTile own = {0, static_cast<int>(blockIdx.y) * kTokens, p.num_rows};
  if constexpr (kGrouped) {
    own = find_group_tile<kTokens>(p.groups, blockIdx.y);
    if (own.group < 0) return;
  }
  const int token0 = own.first, num_rows = own.end;  // rows from there on are not written
  const auto& epilogue = epilogue_of<Out, kGrouped>(p.epilogue, own.group);
  const BlockScales blocks = kBlocks ? p.blocks.of_group(own.group) : p.blocks;
  __syncthreads();

  // What this thread finishes: eight outputs of one token at a time, of the same columns each time.
  constexpr int kChunks = kGated ? kFeatures / 16 : kFeatures / 8;
  static_assert(kConsumers % kChunks == 0);
  const int out_width = kGated ? epilogue.out_features / 2 : epilogue.out_features;
  const int first_item = rank * kConsumers + static_cast<int>(threadIdx.x);
  const int own_n0 = tile * kChunks * 8 + first_item % kChunks * 8;
  Columns<Out, kGated> columns;
  const auto residual_of = [&](int item) {
    const int t = item / kChunks;
    Vec16<Out> r = {};
    if (kReadsAhead && !kGated && epilogue.residual != nullptr && t < num_rows - token0 &&
        t < kTokens && is_whole<Out>(epilogue, own_n0, out_width)) {
      r = load16_l2(static_cast<const Out*>(epilogue.residual) +
                    static_cast<int64_t>(token0 + t) * out_width + own_n0);
    }
    return r;
  };
  Vec16<Out> next_residual = {};

  Acc acc[kTokens / 2];
  if (warp == kConsumers / kWarp) {
    if (lane == 0) {
      const uint64_t once = policy_evict_first();
      const uint64_t keep = policy_evict_last();
      auto load_weight = [&](int step, int s) {
        char* to = stages + s * S::kStageBytes;
        const int k = (step0 + step) * kElements;
        if constexpr (kGated && kGrouped) {
          tensor_load_5d(to, &weight_map, k, 0, 0, tile * (kFeatures / 16), own.group, &full[s],
                         once);
        } else if constexpr (kGated) {
          tensor_load_4d(to, &weight_map, k, 0, 0, tile * (kFeatures / 16), &full[s], once);
        } else if constexpr (kGrouped) {
          tensor_load_3d(to, &weight_map, k, tile * kFeatures, own.group, &full[s], once);
        } else {
          tensor_load_2d(to, &weight_map, k, tile * kFeatures, &full[s], once);
        }
      };
      // Of blocks: those of a group's first rows may share 16 bytes with the group ahead.
      const int scale0 = kGrouped ? token0 & ~3 : token0;
      const int scale_bytes = kGrouped ? min(kScales, blocks.x_stride - scale0) * 4 : kScales * 4;
      auto load_tokens = [&](int step, int s) {
        tensor_load_2d(stages + s * S::kStageBytes + S::kWeightBytes, &token_map,
                       (step0 + step) * kElements, token0, &full[s], keep);
        if constexpr (kBlocks) {
          bulk_load(x_scale + s * kScales,
                    blocks.x + static_cast<int64_t>(step0 + step) * blocks.x_stride + scale0,
                    scale_bytes, &full[s], keep);
        }
      };
      const int bytes = S::kStageBytes + (kBlocks ? scale_bytes : 0);
      // Weights are constants: fill the pipeline while the previous kernel still runs.
      const int ahead = min(p.stages, num_steps);
      for (int i = 0; i < ahead; ++i) {
        barrier_arrive_expect(&full[i], bytes);
        load_weight(i, i);
      }
      if (p.trigger >= 0 && trigger_step < ahead) pdl_trigger();
      pdl_wait();
      for (int i = 0; i < ahead; ++i) load_tokens(i, i);
      int s = 0;
      uint32_t phase = 0;
      for (int i = p.stages; i < num_steps; ++i) {
        barrier_wait(&empty[s], phase);
        barrier_arrive_expect(&full[s], bytes);
        load_weight(i, s);
        load_tokens(i, s);
        if (p.trigger >= 0 && i == trigger_step) pdl_trigger();
        if (++s == p.stages) s = 0, phase ^= 1;
      }
    }
    __syncwarp();
  } else if (warp == kConsumers / kWarp + 1) {
    pdl_wait();
    if constexpr (kTokens <= 32) {
      warp_row_scales(epilogue, token0, min(kTokens, num_rows - token0), row_scale);
    } else {
      for (int t = lane; t < kTokens && token0 + t < num_rows; t += kWarp) {
        row_scale[t] = row_scale_of(epilogue, token0 + t);
      }
    }
  } else {
    const int group = warp / 4;
    int s = 0;
    uint32_t phase = 0;
    int previous = -1;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0;
    float total[kPromote ? kTokens / 2 : 1] = {};
    const float *scale_low = nullptr, *scale_high = nullptr;  // of this thread's rows of weight
    if constexpr (kBlocks) {
      const int chunk = group * 4 + warp % 4;  // of 16 rows of the tile
      const int low = kGated ? tile * (kFeatures / 2) + chunk * 8 + lane / 4
                             : tile * kFeatures + chunk * 16 + lane / 4;
      scale_low = blocks.of_row(low) + step0;
      scale_high = blocks.of_row(kGated ? epilogue.out_features / 2 + low : low + 8) + step0;
    }
    const WgmmaTile weights = wgmma_descriptor(stages + group * 64 * kRowBytes);  // of stage 0
    const WgmmaTile tokens = wgmma_descriptor(stages + S::kWeightBytes);
    // Not at the barriers: warps that try them take from the blocks of the launch ahead.
    pdl_wait();
    for (int i = 0; i < num_steps; ++i) {
      float low = 1.f, high = 1.f;
      if constexpr (kBlocks) low = __ldg(scale_low + i), high = __ldg(scale_high + i);
      barrier_wait(&full[s], phase);
      const WgmmaTile a = weights.at(s * S::kStageBytes), b = tokens.at(s * S::kStageBytes);
      wgmma_pin(acc);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRowBytes / kWgmmaBytes; ++k) {
        Wgmma<T, kTokens>::run(acc, a.at(k * kWgmmaBytes), b.at(k * kWgmmaBytes),
                               !kPromote || k > 0 || i % kPromoteEvery > 0);
      }
      wgmma_commit();
      wgmma_pin(acc);
      if (kPromote && (i % kPromoteEvery == kPromoteEvery - 1 || i == num_steps - 1)) {
        wgmma_wait<0>();
        wgmma_pin(acc);
        if constexpr (kBlocks) {
#pragma unroll
          for (int j = 0; j < kTokens / 8; ++j) {
            const float* at = x_scale + s * kScales + j * 8 + lane % 4 * 2;
            float2 x;
            if constexpr (kGrouped) {
              x = make_float2(at[token0 % 4], at[token0 % 4 + 1]);
            } else {
              x = *reinterpret_cast<const float2*>(at);
            }
            total[4 * j] += acc[4 * j] * (x.x * low);
            total[4 * j + 1] += acc[4 * j + 1] * (x.y * low);
            total[4 * j + 2] += acc[4 * j + 2] * (x.x * high);
            total[4 * j + 3] += acc[4 * j + 3] * (x.y * high);
          }
        } else {
#pragma unroll
          for (int j = 0; j < kTokens / 2; ++j) total[kPromote ? j : 0] += acc[j];
        }
      } else {
        wgmma_wait<1>();
      }
      if (previous >= 0 && lane == 0) barrier_arrive(&empty[previous]);
      previous = s;
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    // Every warp has read the stages; they now hold the partial sums, token by token.
    named_barrier_sync(1, kConsumers);
    const int feature = group * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      float* to = partial + (j * 8 + lane % 4 * 2) * S::kPartialStride + feature;
      const auto sum = [&](int i) {
        return kPromote ? total[kPromote ? 4 * j + i : 0] : static_cast<float>(acc[4 * j + i]);
      };
      to[0] = sum(0);
      to[S::kPartialStride] = sum(1);
      to[8] = sum(2);
      to[S::kPartialStride + 8] = sum(3);
    }
    if constexpr (kReadsAhead) {
      columns.load(epilogue, own_n0, out_width);
      next_residual = residual_of(first_item);
    }
  }
  if (p.split > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  if (threadIdx.x < kConsumers) {
    // An item is eight outputs of one token. Partials are added in the order of ranks.
    const int items = min(kTokens, num_rows - token0) * kChunks;
    for (int item = first_item; item < items; item += p.split * kConsumers) {
      const Vec16<Out> residual = next_residual;
      if constexpr (kReadsAhead) next_residual = residual_of(item + p.split * kConsumers);
      const int t = item / kChunks;
      const int chunk = item % kChunks;
      const float* at = partial + t * S::kPartialStride + chunk * (kGated ? 16 : 8);
      constexpr int kQuads = kGated ? 4 : 2;
      float v[16];
#pragma unroll
      for (int q = 0; q < kQuads * 4; ++q) v[q] = 0.f;
      if (p.split > 1) {
        for (int r = 0; r < p.split; ++r) {
#pragma unroll
          for (int q = 0; q < kQuads; ++q) {
            const float4 f = load_cluster_float4(at + q * 4, r);
            v[q * 4] += f.x, v[q * 4 + 1] += f.y, v[q * 4 + 2] += f.z, v[q * 4 + 3] += f.w;
          }
        }
      } else {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          const float4 f = *reinterpret_cast<const float4*>(at + q * 4);
          v[q * 4] = f.x, v[q * 4 + 1] = f.y, v[q * 4 + 2] = f.z, v[q * 4 + 3] = f.w;
        }
      }
      const int n0 = tile * (kGated ? kFeatures / 2 : kFeatures) + chunk * 8;
      float squares;
      if constexpr (kReadsAhead) {
        squares = columns.finish(epilogue, v, row_scale[t], token0 + t, n0, out_width,
                                 kGated ? nullptr : &residual);
      } else {
        squares = finish<Out>(epilogue, v, row_scale[t], token0 + t, n0, out_width);
      }
      if (!kGated && !kGrouped && epilogue.sumsq_out != nullptr) {
        // Two or eight adjacent lanes hold the columns of a partial.
        const int lanes = epilogue.sumsq_columns / 8;
        const unsigned mask = 0xffu << (lane & 24);
        for (int o = lanes / 2; o > 0; o /= 2) squares += __shfl_xor_sync(mask, squares, o);
        const int part = n0 / epilogue.sumsq_columns;
        const int parts = (out_width + epilogue.sumsq_columns - 1) / epilogue.sumsq_columns;
        if (lane % lanes == 0 && part < parts) {
          epilogue.sumsq_out[static_cast<int64_t>(token0 + t) * parts + part] = squares;
        }
      }
    }
  }
  // Others may still read this block's partial sums.
  if (p.split > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
#else
  wrong_architecture();
#endif
}

template <class T, class Out, int kFeatures, int kTokens, bool kGated, bool kBlocks, bool kGrouped>
Status run(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  using S = Shape<kFeatures, kTokens>;
  constexpr cuuint32_t kElements = kRowBytes / sizeof(T);
  CUtensorMap weight_map, token_map;
  Status status = encode_weight_map<T, kGated, kGrouped>(&weight_map, p, kFeatures);
  if (!status.ok()) return status;
  status = encode_rows_map(&token_map, kMapType<T>, p.x, p.num_rows, p.in_features, kTokens);
  if (!status.ok()) return status;

  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  if (kBlocks) kp.blocks = make_block_scales(p);
  kp.groups = make_groups(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_steps = static_cast<int>(ceil_div(p.in_features, kElements));
  kp.stages = tile.stages;
  kp.split = tile.split;
  kp.trigger = tile.trigger;

  LaunchConfig config;
  config.grid =
      dim3(static_cast<unsigned>(ceil_div(p.out_features, kFeatures) * tile.split),
           static_cast<unsigned>(kGrouped ? max_group_tiles(p.num_rows, p.num_groups, kTokens)
                                          : ceil_div(p.num_rows, kTokens)));
  config.block = dim3(S::kThreads);
  config.shared_bytes = S::shared_bytes(tile.stages, kStageScales<kTokens, kBlocks, kGrouped>);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  config.cluster_x = static_cast<unsigned>(tile.split);
  return launch(gemm_sm90_kernel<T, Out, kFeatures, kTokens, kGated, kBlocks, kGrouped>, config,
                "gemm_sm90", weight_map, token_map, kp);
}

template <class T, class Out, int kFeatures, bool kGated, bool kBlocks, bool kGrouped>
Status run_tokens(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  switch (tile.tokens) {
    case 8:
      return run<T, Out, kFeatures, 8, kGated, kBlocks, kGrouped>(p, tile, stream);
    case 16:
      return run<T, Out, kFeatures, 16, kGated, kBlocks, kGrouped>(p, tile, stream);
    case 32:
      return run<T, Out, kFeatures, 32, kGated, kBlocks, kGrouped>(p, tile, stream);
    case 64:
      return run<T, Out, kFeatures, 64, kGated, kBlocks, kGrouped>(p, tile, stream);
    default:
      // No registers for the sums of 128 tokens beside a block's.
      return run<T, Out, kFeatures, kBlocks ? 64 : 128, kGated, kBlocks, kGrouped>(p, tile, stream);
  }
}

template <class T, class Out, bool kGated, bool kBlocks, bool kGrouped>
Status run_features(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  switch (tile.features) {
    case 64:
      return run_tokens<T, Out, 64, kGated, kBlocks, kGrouped>(p, tile, stream);
    case 128:
      return run_tokens<T, Out, 128, kGated, kBlocks, kGrouped>(p, tile, stream);
    default:
      // Groups that would fill 256 have gemm_tiles_sm90.
      return run_tokens < T, Out, kBlocks || kGrouped ? 128 : 256, kGated, kBlocks,
             kGrouped > (p, tile, stream);
  }
}

template <class T, class Out, bool kBlocks = false, bool kGrouped = false>
Status run_gemm_sm90(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  return p.gated ? run_features<T, Out, true, kBlocks, kGrouped>(p, tile, stream)
                 : run_features<T, Out, false, kBlocks, kGrouped>(p, tile, stream);
}

}  // namespace
}  // namespace regatta::cuda
