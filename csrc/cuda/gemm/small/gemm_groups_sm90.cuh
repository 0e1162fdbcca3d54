// The kernel of gemm_groups_sm90.cu, which says what it does, and its launch.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/gemm_tensor_map.cuh"
#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/small/stages.cuh"
#include "cuda/gemm/tiles.h"

namespace regatta::cuda {
namespace {

constexpr int kSlots = 2;  // tiles whose places, scales and biases wait in shared memory

struct KernelParams {
  Epilogue epilogue;
  BlockScales blocks;
  Groups groups;
  int num_steps;  // stages of a tile
  int stages, trigger;
};

// Rows of x from `first` up to `end`, by the features of a tile from `feature` on.
struct GroupedTile {
  int group, first, end, feature;
  bool once;  // no other tile has its weights
};

// What is known of a tile ahead of its sums.
template <int kFeatures, int kTokens>
struct Slot {
  GroupedTile tile;
  alignas(16) float row_scale[kTokens];
  // Of weights; gated: of eight gates, then of their ups, as a tile has them.
  alignas(16) float scale[kFeatures], bias[kFeatures];
};

template <int kFeatures, int kTokens, bool kBlocks>
struct Shape : Stages<kFeatures, kTokens> {
  using S = Stages<kFeatures, kTokens>;
  static constexpr int kConsumers = kFeatures / 64 * kGroup;
  static constexpr int kThreads = kConsumers + kHelperThreads;
  static constexpr int kChunkStride = kChunk + 4;  // floats per token; no bank conflicts
  // Copies begin at 16 bytes, groups at any row.
  static constexpr int kScales = kBlocks ? kTokens + 4 : 0;
  static constexpr int kPartialBytes = kConsumers / kWarp * kTokens * kChunkStride * 4;
  static constexpr int kSlotBytes = kSlots * sizeof(Slot<kFeatures, kTokens>);
  // Barriers, slots, sums and what lies ahead of each group; then stages aligned to the swizzle's
  // 1024 bytes.
  static constexpr int kBarrierBytes = (2 * kMaxStages + 2 * kSlots) * 8;
  static constexpr int head_bytes(int groups) {
    return static_cast<int>(
        ceil_div(kBarrierBytes + kSlotBytes + kPartialBytes + 2 * (groups + 1) * 4, 1024) * 1024);
  }
  static constexpr int shared_bytes(int stages, int groups) {
    return 1024 + head_bytes(groups) + stages * (S::kStageBytes + kScales * 4);
  }
};

template <int kFeatures, int kTokens, bool kGated>
__device__ __forceinline__ GroupedTile tile_at(const KernelParams& p, const Ahead& ahead,
                                               int index) {
  const int group = ahead.group_of(p.groups, index);
  const int begin = ahead.rows[group], end = ahead.rows[group + 1];
  const int tokens = (end - begin + kTokens - 1) / kTokens, within = index - ahead.tiles[group];
  // Those of the same weights follow each other: they come out of L2 the second time.
  return {group, begin + within % tokens * kTokens, end,
          within / tokens * (kGated ? kFeatures / 2 : kFeatures), tokens == 1};
}

// By a warp.
template <class Out, int kFeatures, int kTokens, bool kGated>
__device__ __forceinline__ void fill_slot(const KernelParams& p, const GroupedTile& tile,
                                          Slot<kFeatures, kTokens>& slot) {
  const int lane = threadIdx.x % kWarp;
  const auto& epilogue = epilogue_of<Out, true>(p.epilogue, tile.group);
  const int width = kGated ? epilogue.out_features / 2 : epilogue.out_features;
  if (lane == 0) slot.tile = tile;
  for (int i = lane; i < kFeatures; i += kWarp) {
    const int n = tile.feature + (kGated ? i / kChunk * 8 + i % 8 : i);
    const int row = kGated && i % kChunk >= 8 ? width + n : n;
    const bool inside = n < width;
    slot.scale[i] =
        inside && epilogue.weight_scale != nullptr ? __ldg(epilogue.weight_scale + row) : 1.f;
    slot.bias[i] = inside && epilogue.bias != nullptr
                       ? Traits<Out>::to_float(static_cast<const Out*>(epilogue.bias)[row])
                       : 0.f;
  }
  for (int t = lane; t < kTokens && tile.first + t < tile.end; t += kWarp) {
    slot.row_scale[t] = row_scale_of(epilogue, tile.first + t);
  }
  __syncwarp();
}

// T: of x and weight; Out: of bias and out. kBlocks: scales of blocks of 128 columns, which are a
// stage's; they travel behind the stages.
template <class T, class Out, int kFeatures, int kTokens, bool kGated, bool kBlocks>
__global__ void __launch_bounds__(Shape<kFeatures, kTokens, kBlocks>::kThreads,
                                  kTokens <= 32 ? 2 : 1)
    gemm_groups_sm90_kernel(const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ CUtensorMap token_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<kFeatures, kTokens, kBlocks>;
  constexpr int kElements = kRowBytes / sizeof(T);  // of k per stage
  constexpr int kConsumers = S::kConsumers;
  extern __shared__ char shared[];
  char* base =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared) + 1023) & ~uintptr_t{1023});
  uint64_t* full = reinterpret_cast<uint64_t*>(base);
  uint64_t* empty = full + kMaxStages;
  uint64_t* slot_full = empty + kMaxStages;
  uint64_t* slot_empty = slot_full + kSlots;
  auto* slots = reinterpret_cast<Slot<kFeatures, kTokens>*>(base + S::kBarrierBytes);
  float* partials = reinterpret_cast<float*>(base + S::kBarrierBytes + S::kSlotBytes);
  Ahead ahead;
  ahead.rows = reinterpret_cast<int*>(partials + S::kPartialBytes / 4);
  ahead.tiles = ahead.rows + p.groups.count + 1;
  char* stages = base + S::head_bytes(p.groups.count);
  float* x_scale = reinterpret_cast<float*>(stages + p.stages * S::kStageBytes);  // [stage, ]

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int tiles = static_cast<int>(ceil_div(p.epilogue.out_features, kFeatures));

  if (!p.groups.ready) pdl_wait();
  if (p.trigger < 0) pdl_trigger();
  if (threadIdx.x == kConsumers) {
    tensor_map_prefetch(&weight_map);
    tensor_map_prefetch(&token_map);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kConsumers / kWarp);
    }
    for (int s = 0; s < kSlots; ++s) {
      barrier_init(&slot_full[s], 1);
      barrier_init(&slot_empty[s], kConsumers / kWarp);
    }
    barrier_init_fence();
  }
  count_ahead(p.groups, ahead, [&](int rows) { return (rows + kTokens - 1) / kTokens * tiles; });
  __syncthreads();
  const int first = static_cast<int>(blockIdx.x), total = ahead.tiles[p.groups.count];
  if (first >= total) return;
  const int stride = static_cast<int>(gridDim.x);
  const auto tile_of = [&](int index) {
    return tile_at<kFeatures, kTokens, kGated>(p, ahead, index);
  };

  if (warp == kConsumers / kWarp) {
    if (lane > 0) return;
    const uint64_t once = policy_evict_first();
    const uint64_t keep = policy_evict_last();
    // A step of the block's tiles, one after the other.
    struct Place {
      int index, step;
      GroupedTile tile;
    };
    const auto advance = [&](Place& at) {
      if (++at.step < p.num_steps) return;
      at.step = 0, at.index += stride;
      if (at.index < total) at.tile = tile_of(at.index);
    };
    // Of blocks: those of a group's first rows may share 16 bytes with the group ahead.
    const auto scale_bytes = [&](const Place& at) {
      return kBlocks ? min(S::kScales, p.blocks.x_stride - (at.tile.first & ~3)) * 4 : 0;
    };
    const auto load_weight = [&](const Place& at, int s) {
      char* to = stages + s * S::kStageBytes;
      const int k = at.step * kElements;
      const uint64_t policy = at.tile.once ? once : keep;
      barrier_arrive_expect(&full[s], S::kStageBytes + scale_bytes(at));
      if constexpr (kGated) {
        tensor_load_5d(to, &weight_map, k, 0, 0, at.tile.feature / 8, at.tile.group, &full[s],
                       policy);
      } else {
        tensor_load_3d(to, &weight_map, k, at.tile.feature, at.tile.group, &full[s], policy);
      }
    };
    const auto load_tokens = [&](const Place& at, int s) {
      tensor_load_2d(stages + s * S::kStageBytes + S::kWeightBytes, &token_map, at.step * kElements,
                     at.tile.first, &full[s], keep);
      if constexpr (kBlocks) {
        bulk_load(
            x_scale + s * S::kScales,
            p.blocks.x + static_cast<int64_t>(at.step) * p.blocks.x_stride + (at.tile.first & ~3),
            scale_bytes(at), &full[s], keep);
      }
    };
    const int steps = ((total - 1 - first) / stride + 1) * p.num_steps;
    const int filled = min(p.stages, steps), trigger_step = steps - 1 - p.trigger;
    Place weights = {first, 0, tile_of(first)}, tokens = weights;
    // Weights are constants: fill the pipeline while the previous kernel still runs.
    for (int i = 0; i < filled; ++i) {
      load_weight(weights, i);
      advance(weights);
    }
    if (p.trigger >= 0 && trigger_step < filled) pdl_trigger();
    pdl_wait();
    for (int i = 0; i < filled; ++i) {
      load_tokens(tokens, i);
      advance(tokens);
    }
    int s = 0;
    uint32_t phase = 0;
    for (int i = filled; i < steps; ++i) {
      barrier_wait(&empty[s], phase);
      load_weight(weights, s);
      load_tokens(weights, s);
      advance(weights);
      if (p.trigger >= 0 && i == trigger_step) pdl_trigger();
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    return;
  }
  if (warp == kConsumers / kWarp + 1) {
    pdl_wait();
    int slot = 0;
    uint32_t phase = 0;
    for (int index = first; index < total; index += stride) {
      const GroupedTile tile = tile_of(index);
      barrier_wait(&slot_empty[slot], phase ^ 1);
      fill_slot<Out, kFeatures, kTokens, kGated>(p, tile, slots[slot]);
      if (lane == 0) barrier_arrive(&slot_full[slot]);
      if (++slot == kSlots) slot = 0, phase ^= 1;
    }
    return;
  }

  // A warp has sixteen rows of a tile's weight, gated eight outputs' gates and ups: it needs no
  // other one to finish them.
  StageSums<T, kTokens, kBlocks> sums;
  const WgmmaTile weights = wgmma_descriptor(stages + warp / 4 * 64 * kRowBytes);  // of stage 0
  const WgmmaTile tokens = wgmma_descriptor(stages + S::kWeightBytes);
  float* partial = partials + warp * kTokens * S::kChunkStride;
  int s = 0, slot = 0;
  uint32_t phase = 0, slot_phase = 0;
  // Not at the barriers: warps that try them take from the blocks of the launch ahead.
  pdl_wait();
  for (int index = first; index < total; index += stride) {
    barrier_wait(&slot_full[slot], slot_phase);
    const auto& own = slots[slot];
    const GroupedTile tile = own.tile;
    const auto& epilogue = epilogue_of<Out, true>(p.epilogue, tile.group);
    const int width = kGated ? epilogue.out_features / 2 : epilogue.out_features;
    const float *scale_low = nullptr, *scale_high = nullptr;  // of this thread's rows of weight
    if constexpr (kBlocks) {
      const BlockScales blocks = p.blocks.of_group(tile.group);
      const int low = tile.feature + warp * (kGated ? 8 : kChunk) + lane / 4;
      scale_low = blocks.of_row(low);
      scale_high = blocks.of_row(kGated ? width + low : low + 8);
    }
    int previous = -1;
    sums.begin();
    for (int i = 0; i < p.num_steps; ++i) {
      float low = 1.f, high = 1.f;
      if constexpr (kBlocks) low = __ldg(scale_low + i), high = __ldg(scale_high + i);
      barrier_wait(&full[s], phase);
      const bool whole = sums.add(weights.at(s * S::kStageBytes), tokens.at(s * S::kStageBytes), i,
                                  i == p.num_steps - 1);
      if constexpr (kBlocks) {
        sums.template promote<false>(x_scale + s * S::kScales + tile.first % 4, low, high);
      } else if (whole) {
        sums.promote();
      }
      if (previous >= 0 && lane == 0) barrier_arrive(&empty[previous]);
      previous = s;
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    sums.end();
    if (lane == 0) barrier_arrive(&empty[previous]);
    __syncwarp();  // its last tile's sums have been read
    sums.store(partial, S::kChunkStride);
    __syncwarp();
    constexpr int kChunks = kGated ? 1 : 2;  // of eight outputs, of a warp
    const int count = min(kTokens, tile.end - tile.first);
    const int chunk = lane % kChunks, column = warp * kChunk + chunk * 8;  // of the tile's rows
    const int n0 = tile.feature + (kGated ? warp * 8 : column);
    Columns<Out, kGated> columns;
    if (lane / kChunks < count) columns.take(own.scale + column, own.bias + column);
    for (int t = lane / kChunks; t < count; t += kWarp / kChunks) {
      const float* at = partial + t * S::kChunkStride + chunk * 8;
      float v[kGated ? 16 : 8];
#pragma unroll
      for (int q = 0; q < (kGated ? 4 : 2); ++q) {
        const float4 f = *reinterpret_cast<const float4*>(at + q * 4);
        v[q * 4] = f.x, v[q * 4 + 1] = f.y, v[q * 4 + 2] = f.z, v[q * 4 + 3] = f.w;
      }
      columns.finish(epilogue, v, own.row_scale[t], tile.first + t, n0, width, nullptr);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&slot_empty[slot]);
    if (++slot == kSlots) slot = 0, slot_phase ^= 1;
  }
#else
  wrong_architecture();
#endif
}

template <class T, class Out, int kFeatures, int kTokens, bool kGated, bool kBlocks>
Status run(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  using S = Shape<kFeatures, kTokens, kBlocks>;
  CUtensorMap weight_map, token_map;
  REGATTA_RETURN_IF_ERROR(encode_weight_map<T, kGated, true>(&weight_map, p, kFeatures));
  REGATTA_RETURN_IF_ERROR(
      encode_rows_map(&token_map, kMapType<T>, p.x, p.num_rows, p.in_features, kTokens));

  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  if (kBlocks) kp.blocks = make_block_scales(p);
  kp.groups = make_groups(p);
  kp.num_steps = static_cast<int>(ceil_div(p.in_features, kRowBytes / int64_t{sizeof(T)}));
  kp.stages = tile.stages;
  kp.trigger = tile.trigger;

  const int64_t blocks = std::min<int64_t>(
      ceil_div(p.out_features, kFeatures) * max_group_tiles(p.num_rows, p.num_groups, kTokens),
      int64_t{tile.blocks} * num_multiprocessors());
  return launch(gemm_groups_sm90_kernel<T, Out, kFeatures, kTokens, kGated, kBlocks>,
                {{stream, p.dependent_launch},
                 blocks,
                 S::kThreads,
                 S::shared_bytes(tile.stages, kp.groups.count)},
                "gemm_groups_sm90", weight_map, token_map, kp);
}

template <class T, class Out, bool kBlocks = false>
Status run_groups_sm90(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  return dispatch_tile<128, 64>(tile, [&](auto features, auto tokens) {
    return p.gated ? run<T, Out, features(), tokens(), true, kBlocks>(p, tile, stream)
                   : run<T, Out, features(), tokens(), false, kBlocks>(p, tile, stream);
  });
}

}  // namespace
}  // namespace regatta::cuda
