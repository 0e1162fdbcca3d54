// The kernel of gemm_sm90.cu, which says what it does, and its launch.
#pragma once

#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/gemm_tensor_map.cuh"
#include "cuda/gemm/small/stages.cuh"

namespace regatta::cuda {
namespace {

struct KernelParams {
  Epilogue epilogue;
  BlockScales blocks;
  int num_rows, num_steps;  // stages along k
  int stages, split, trigger;
};

template <int kFeatures, int kTokens>
struct Shape : Stages<kFeatures, kTokens> {
  static constexpr int kThreads = kFeatures / 64 * kGroup + kHelperThreads;
  static constexpr int kPartialStride = kFeatures + 4;  // floats per token; no bank conflicts
  static constexpr int kPartialBytes = kTokens * kPartialStride * 4;
  // barriers and row scales, then stages aligned to the swizzle's 1024 bytes
  static constexpr int kHeadBytes = 1024;
  // `scales` floats travel with a stage.
  static int shared_bytes(int stages, int scales) {
    const int body = stages * (Shape::kStageBytes + scales * 4);
    return 1024 + kHeadBytes + (body > kPartialBytes ? body : kPartialBytes);
  }
};

// T: of x and weight; Out: of bias, residual and out. kBlocks: scales of blocks of 128 columns,
// which are a stage's; they travel behind the stages.
template <class T, class Out, int kFeatures, int kTokens, bool kGated, bool kBlocks>
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
  constexpr int kScales = kBlocks ? kTokens : 0;

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.split;
  const int tile = blockIdx.x / p.split;
  const int step0 = static_cast<int>(static_cast<int64_t>(p.num_steps) * rank / p.split);
  const int num_steps =
      static_cast<int>(static_cast<int64_t>(p.num_steps) * (rank + 1) / p.split) - step0;

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
  const int token0 = static_cast<int>(blockIdx.y) * kTokens;
  const int num_rows = p.num_rows;  // rows from there on are not written
  const Epilogue& epilogue = p.epilogue;
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

  if (warp == kConsumers / kWarp) {
    if (lane == 0) {
      const uint64_t once = policy_evict_first();
      const uint64_t keep = policy_evict_last();
      auto load_weight = [&](int step, int s) {
        char* to = stages + s * S::kStageBytes;
        const int k = (step0 + step) * kElements;
        if constexpr (kGated) {
          tensor_load_4d(to, &weight_map, k, 0, 0, tile * (kFeatures / 16), &full[s], once);
        } else {
          tensor_load_2d(to, &weight_map, k, tile * kFeatures, &full[s], once);
        }
      };
      constexpr int kScaleBytes = kScales * 4;
      auto load_tokens = [&](int step, int s) {
        tensor_load_2d(stages + s * S::kStageBytes + S::kWeightBytes, &token_map,
                       (step0 + step) * kElements, token0, &full[s], keep);
        if constexpr (kBlocks) {
          bulk_load(x_scale + s * kScales,
                    p.blocks.x + static_cast<int64_t>(step0 + step) * p.blocks.x_stride + token0,
                    kScaleBytes, &full[s], keep);
        }
      };
      constexpr int bytes = S::kStageBytes + kScaleBytes;
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
    StageSums<T, kTokens, kBlocks> sums;
    sums.begin();
    const float *scale_low = nullptr, *scale_high = nullptr;  // of this thread's rows of weight
    if constexpr (kBlocks) {
      const int chunk = group * 4 + warp % 4;  // of 16 rows of the tile
      const int low = kGated ? tile * (kFeatures / 2) + chunk * 8 + lane / 4
                             : tile * kFeatures + chunk * 16 + lane / 4;
      scale_low = p.blocks.of_row(low) + step0;
      scale_high = p.blocks.of_row(kGated ? epilogue.out_features / 2 + low : low + 8) + step0;
    }
    const WgmmaTile weights = wgmma_descriptor(stages + group * 64 * kRowBytes);  // of stage 0
    const WgmmaTile tokens = wgmma_descriptor(stages + S::kWeightBytes);
    // Not at the barriers: warps that try them take from the blocks of the launch ahead.
    pdl_wait();
    for (int i = 0; i < num_steps; ++i) {
      float low = 1.f, high = 1.f;
      if constexpr (kBlocks) low = __ldg(scale_low + i), high = __ldg(scale_high + i);
      barrier_wait(&full[s], phase);
      const bool whole = sums.add(weights.at(s * S::kStageBytes), tokens.at(s * S::kStageBytes), i,
                                  i == num_steps - 1);
      if constexpr (kBlocks) {
        sums.template promote<true>(x_scale + s * kScales, low, high);
      } else if (whole) {
        sums.promote();
      }
      if (previous >= 0 && lane == 0) barrier_arrive(&empty[previous]);
      previous = s;
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    sums.end();
    // Every warp has read the stages; they now hold the partial sums, token by token.
    named_barrier_sync(1, kConsumers);
    sums.store(partial + warp * kChunk, S::kPartialStride);
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
      if (!kGated && epilogue.sumsq_out != nullptr) {
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

template <class T, class Out, int kFeatures, int kTokens, bool kGated, bool kBlocks>
Status run(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  using S = Shape<kFeatures, kTokens>;
  constexpr cuuint32_t kElements = kRowBytes / sizeof(T);
  CUtensorMap weight_map, token_map;
  REGATTA_RETURN_IF_ERROR(encode_weight_map<T, kGated, false>(&weight_map, p, kFeatures));
  REGATTA_RETURN_IF_ERROR(
      encode_rows_map(&token_map, kMapType<T>, p.x, p.num_rows, p.in_features, kTokens));

  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  if (kBlocks) kp.blocks = make_block_scales(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_steps = static_cast<int>(ceil_div(p.in_features, kElements));
  kp.stages = tile.stages;
  kp.split = tile.split;
  kp.trigger = tile.trigger;

  LaunchConfig config(
      Launch{stream, p.dependent_launch},
      grid_of(ceil_div(p.out_features, kFeatures) * tile.split, ceil_div(p.num_rows, kTokens)),
      S::kThreads, S::shared_bytes(tile.stages, kBlocks ? kTokens : 0));
  config.cluster_x = static_cast<unsigned>(tile.split);
  return launch(gemm_sm90_kernel<T, Out, kFeatures, kTokens, kGated, kBlocks>, config, "gemm_sm90",
                weight_map, token_map, kp);
}

template <class T, class Out, bool kBlocks = false>
Status run_gemm_sm90(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  // No registers for the sums of 128 tokens beside a block's.
  return dispatch_tile<kBlocks ? 128 : 256, kBlocks ? 64 : 128>(
      tile, [&](auto features, auto tokens) {
        return p.gated ? run<T, Out, features(), tokens(), true, kBlocks>(p, tile, stream)
                       : run<T, Out, features(), tokens(), false, kBlocks>(p, tile, stream);
      });
}

}  // namespace
}  // namespace regatta::cuda
