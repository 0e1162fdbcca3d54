// y = epilogue(x w^T) of rows in groups with a packed weight each (experts), by blocks that stay.
//
// Input: as gemm_packed_sm90.cu; weights [G] of what they are there, groups as groups.cuh says.
// Architectures: sm_90a. A source for each type of x.
// Algorithm
//   1. As many blocks as fit share the slabs of all tiles (up to kTokens rows of a group) evenly,
//      in passes of up to eight slabs of one tile (gated, four and their ups), over all of k.
//   2. One warp keeps the ring of stages full, whatever pass they belong to: a block for each
//      expert, whose weight is a few stages, would wait for memory as long as it multiplies.
//   3. A warp multiplies one slab as in gemm_packed_sm90.cu and finishes its sums alone; gated, the
//      warps of gates and of their ups take turns. Passes come from a table the block makes first.
// k is never split: a row has the same bits however many there are, among tiles whose scales are
// applied alike (alike_packed_tokens()).
// Source: own; persistent blocks over ragged groups are what CUTLASS's grouped products have.
//
// Bound: memory, while a multiprocessor issues fast enough: at 4.3 TB/s, 4 bits have to issue in
// three of four clocks. Two warps of a scheduler wait for their products: hence two blocks.
#pragma once

#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/small/gemm_packed_sm90.cuh"

namespace regatta::cuda {
namespace {

struct GroupKernelParams {
  Epilogue epilogue;
  Groups groups;
  int num_units;  // along k
  int num_items;  // slabs of a weight; gated, pairs of them
  int grain;      // of them, which go to one block
  int stages, trigger;
};

template <class F, int kTokens, bool kGated>
struct GroupShape : Stage<F, kTokens> {
  using Base = Stage<F, kTokens>;
  static constexpr int kParts = kGated ? 2 : 1;     // of an item: slabs
  static constexpr int kItems = kSlabs / kParts;    // of a pass
  static constexpr int kGroupItems = kItems / 2;    // of a warpgroup
  static constexpr int kSumStride = kUnitRows + 4;  // floats of a token's sums
  static constexpr int kSums = 8 * kSumStride;      // of eight tokens
  static constexpr int kSumBytes = 2 * kSlabs * kSums * 4;
  // Of fewer items than a pass has, each has a copy of its own, whose place is aligned.
  static constexpr int kItemBytes = (kParts * F::kUnitBytes + 127) / 128 * 128;
  static_assert((kItems - 1) * kItemBytes <= Base::kStageBytes - Base::kWeights);
  static constexpr int kFixedBytes =
      1024 + kHeadBytes + static_cast<int>(sizeof(GroupTable)) + kSumBytes;
  static constexpr int kBlocks = packed_groups_fit(F::kPacked, kTokens);  // and the next launch's
  static constexpr int kThreads = kConsumers + (Base::kGives ? kGroup : kWarp);
  static int shared_bytes(int stages) { return kFixedBytes + stages * Base::kStageBytes; }
};

// A block's passes, as a warp goes through them.
template <int kTokens, int kItems>
struct Passes {
  const GroupTable& table;
  int count;                // of groups
  int num_items, grain;     // of a weight
  int next, last;           // grains of all tiles: the next one to take, and where the block's end
  int known = -1;           // the tile that was looked for last
  GroupTile tile = {};      // of the pass
  int item = 0, items = 0;  // its first, and how many

  __device__ __forceinline__ int grains() const { return (num_items + grain - 1) / grain; }

  // The next pass; whether there is one. By a whole warp.
  __device__ __forceinline__ bool advance() {
    if (next >= last) return false;
    const int index = next / grains(), at = next - index * grains();
    if (index != known) tile = table.tile<kTokens>(known = index, count);
    const int taken = min(min(kItems / grain, last - next), grains() - at);
    item = at * grain;
    items = min(taken * grain, num_items - item);
    next += taken;
    return true;
  }
};

// What four adjacent outputs of a group take beside their sums: asked for ahead of them.
template <class T, class F, bool kGated>
struct GroupOutputs {
  static constexpr int kParts = kGated ? 2 : 1;  // gates and ups
  float scale[F::kGroups ? 1 : kParts][4];
  uint2 bias[kParts];  // of T
  int inside;          // of them

  __device__ __forceinline__ void request(const Epilogue& p, int group, int n, int width) {
    inside = max(0, min(4, width - n));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t at = static_cast<int64_t>(group) * p.out_features + part * width + n;
      bias[part] = make_uint2(0, 0);
      if (p.bias != nullptr) {
        bias[part] = load_four(static_cast<const T*>(p.bias) + at, inside, false);
      }
#pragma unroll
      for (int i = 0; i < (F::kGroups ? 0 : 4); ++i) {
        scale[part][i] = i < inside ? __ldg(p.weight_scale + at + i) : 0.f;
      }
    }
  }

  // Those of a row, from element `at` of the output on; sums are scaled by the row's scale.
  __device__ __forceinline__ void write(const Epilogue& p, const float (&sum)[4],
                                        const float (&up)[4], int64_t at) const {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = fmaf(sum[i], F::kGroups ? 1.f : scale[0][i], value_of<T>(bias[0], i));
      if constexpr (kGated) {
        const float factor = fmaf(up[i], F::kGroups ? 1.f : scale[1][i], value_of<T>(bias[1], i));
        y[i] = __fdividef(y[i], 1.f + __expf(-y[i])) * factor;
      }
    }
    if (p.float_out) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < inside) static_cast<float*>(p.out)[at + i] = y[i];
      }
    } else {
      write_four(static_cast<T*>(p.out) + at, y, inside, p.vector_out);
    }
  }
};

// Asks for what a block's passes read, by a whole warp.
template <class F, int kTokens, bool kGated>
__device__ __forceinline__ void copy_passes(
    const CUtensorMap& token_map, const CUtensorMap& wide_map, const CUtensorMap& narrow_map,
    const GroupKernelParams& p, Passes<kTokens, GroupShape<F, kTokens, kGated>::kItems> passes,
    char* stages, Ring ring) {
  using S = GroupShape<F, kTokens, kGated>;
  using BlockPasses = Passes<kTokens, S::kItems>;
  const int lane = threadIdx.x % kWarp;
  const uint64_t once = policy_evict_first(), keep = policy_evict_last();
  const auto load_weight = [&](const BlockPasses& of, int step, int s) {
    // A stage's bytes are expected ahead of all copies, whichever lanes ask for them.
    if (lane == 0) {
      barrier_arrive_expect(&ring.full[s], S::kWeights + of.items * S::kParts * F::kUnitBytes);
    }
    __syncwarp();
    char* to = stages + s * S::kStageBytes + S::kWeights;
    const uint64_t policy = of.tile.end - of.tile.first > kTokens ? keep : once;
    const int half = step * 2, part = of.tile.group * S::kParts;
    if (of.items == S::kItems) {
      if (lane == 0) tensor_load_4d(to, &wide_map, 0, half, of.item, part, &ring.full[s], policy);
    } else if (lane < of.items) {
      tensor_load_4d(to + lane * S::kItemBytes, &narrow_map, 0, half, of.item + lane, part,
                     &ring.full[s], policy);
    }
  };
  const auto load_tokens = [&](const BlockPasses& of, int step, int s) {
    if (lane > 0) return;
#pragma unroll
    for (int box = 0; box < S::kBoxes; ++box) {
      tensor_load_2d(stages + s * S::kStageBytes + box * S::kTokenBytes, &token_map,
                     step * kUnitColumns + box * S::kBoxColumns, of.tile.first, &ring.full[s],
                     keep);
    }
  };
  bool has_pass = passes.advance(), has_triggered = p.trigger < 0;
  int step = 0;
  const auto go_on = [&](BlockPasses& of, int& at) {
    if (++at < p.num_units) return true;
    at = 0;
    return of.advance();
  };
  const auto trigger = [&] {
    const bool is_last = passes.next >= passes.last;
    if (has_triggered || !is_last || (has_pass && p.num_units - step > p.trigger)) return;
    pdl_trigger();
    has_triggered = true;
  };
  BlockPasses token_passes = passes;
  int token_step = 0, ahead = 0;
#pragma unroll 1
  for (; has_pass && ahead < p.stages; ++ahead) {
    load_weight(passes, step, ahead);
    has_pass = go_on(passes, step);
  }
  trigger();
  pdl_wait();
#pragma unroll 1
  for (int s = 0; s < ahead; ++s) {
    load_tokens(token_passes, token_step, s);
    go_on(token_passes, token_step);
  }
#pragma unroll 1
  while (has_pass) {
    barrier_wait(&ring.empty[ring.s], ring.phase);
    load_weight(passes, step, ring.s);
    load_tokens(passes, step, ring.s);
    ring.advance();
    has_pass = go_on(passes, step);
    trigger();
  }
}

// Multiplies and finishes what a warp has of a block's passes. sums: the block's.
template <class T, class F, int kTokens, bool kGated>
__device__ __forceinline__ void multiply_passes(
    const GroupKernelParams& p, Passes<kTokens, GroupShape<F, kTokens, kGated>::kItems> passes,
    const char* stages, float* sums, Ring ring, int warp) {
  using S = GroupShape<F, kTokens, kGated>;
  const int lane = threadIdx.x % kWarp;
  const int own_item = warp / S::kParts, own_part = warp % S::kParts;  // of a pass
  const int width = p.epilogue.out_features / S::kParts;
  const WgmmaTile tokens = wgmma_descriptor(stages);
  float* own_sums = sums + warp * 2 * S::kSums;
  float* gate_sums = sums + own_item * S::kParts * 2 * S::kSums;
  int turn = 0;  // of the two pieces of shared memory
  while (passes.advance()) {
    // The items of a warpgroup are neighbours: of few, one has none.
    if (warp / 4 * S::kGroupItems >= passes.items) {
#pragma unroll 1
      for (int step = 0; step < p.num_units; ++step) {
        ring.wait();
        ring.release(ring.s);
        ring.advance();
      }
      continue;
    }
    const GroupTile tile = passes.tile;
    const int rows = min(kTokens, tile.end - tile.first);
    int has_slab = own_item < passes.items;  // else its sums are nobody's
    asm volatile("" : "+r"(has_slab));       // or the compiler finds it out at each step
    const int n = (passes.item + own_item) * kUnitRows + lane % 4 * 4;
    GroupOutputs<T, F, kGated> outputs;
    outputs.request(p.epilogue, tile.group, n, has_slab ? width : 0);
    float row_scales[F::kTokenSize == 1 ? kTokens / 8 : 1];  // of this lane's tokens
#pragma unroll
    for (int j = 0; j < (F::kTokenSize == 1 ? kTokens / 8 : 0); ++j) {
      const int row = min(tile.first + j * 8 + lane / 4, tile.end - 1);
      row_scales[j] = __ldcg(p.epilogue.x_scale + row);
    }
    const char* units =
        stages + S::kWeights +
        (passes.items == S::kItems ? (own_part * S::kItems + own_item) * F::kUnitBytes
                                   : own_item * S::kItemBytes + own_part * F::kUnitBytes);
    float acc[kTokens / 2];
    ring.wait();
    const int last = multiply_slab<T, F, kTokens>(acc, tokens, units, has_slab, p.num_units, ring);
    if (last >= 0) ring.release(last);
    if (!has_slab) continue;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      if (j * 8 >= rows) break;
      // Who reads one piece has read the other before the next eight tokens are waited for.
      const int piece = turn * S::kSums;
      turn ^= 1;
      store_sums<S::kSumStride>(own_sums + piece + lane % 4 * 2 * S::kSumStride + lane / 4,
                                acc + 4 * j);
      if constexpr (kGated) {
        named_barrier_sync(1 + own_item, 2 * kWarp);
        if (j % 2 != own_part) continue;
      } else {
        __syncwarp();
      }
      const int token = j * 8 + lane / 4;
      const float* from = gate_sums + piece + lane / 4 * S::kSumStride + lane % 4 * 4;
      float sum[4], up[4] = {};
      load_four(sum, from);
      if constexpr (kGated) load_four(up, from + 2 * S::kSums);
      if constexpr (F::kTokenSize == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] *= row_scales[j], up[i] *= row_scales[j];
      }
      if (token < rows && outputs.inside > 0) {
        outputs.write(p.epilogue, sum, up, static_cast<int64_t>(tile.first + token) * width + n);
      }
    }
  }
}

template <class T, class F, int kTokens, bool kGated>
__global__ void __launch_bounds__(GroupShape<F, kTokens, kGated>::kThreads,
                                  GroupShape<F, kTokens, kGated>::kBlocks)
    gemm_packed_groups_kernel(const __grid_constant__ CUtensorMap token_map,
                              const __grid_constant__ CUtensorMap wide_map,
                              const __grid_constant__ CUtensorMap narrow_map,
                              const __grid_constant__ GroupKernelParams p) {
#ifdef REGATTA_SM90A
  using S = GroupShape<F, kTokens, kGated>;
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* stages = shared + (-shared_address(shared) & 1023);
  char* head = stages + p.stages * S::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(head);
  uint64_t* empty = full + kMaxStages;
  GroupTable& table = *reinterpret_cast<GroupTable*>(head + kHeadBytes);
  float* sums = reinterpret_cast<float*>(head + kHeadBytes + sizeof(GroupTable));

  const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  if (!p.groups.ready) pdl_wait();
  if (p.trigger < 0) pdl_trigger();
  if (threadIdx.x == kConsumers) {
    tensor_map_prefetch(&token_map);
    tensor_map_prefetch(&wide_map);
    tensor_map_prefetch(&narrow_map);
#pragma unroll 1
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kSlabs);
    }
    barrier_init_fence();
  }
  make_group_table<kTokens>(p.groups, &table);
  __syncthreads();

  Passes<kTokens, S::kItems> passes = {table, p.groups.count, p.num_items, p.grain};
  // A shuffle tells the compiler, of a number from memory, that a warp's threads agree.
  const int64_t total =
      static_cast<int64_t>(__shfl_sync(~0u, table.tile_ends[p.groups.count - 1], 0)) *
      passes.grains();
  passes.next = static_cast<int>(total * blockIdx.x / gridDim.x);
  passes.last = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  const Ring ring = {full, empty, p.stages};
  if (warp >= kSlabs) {
    if constexpr (S::kGives) registers_give<40>();
    if (warp > kSlabs) return;
    copy_passes<F, kTokens, kGated>(token_map, wide_map, narrow_map, p, passes, stages, ring);
  } else {
    if constexpr (S::kGives) registers_take<232>();
    // Not at the barrier: warps that try it take from the block of the launch ahead.
    pdl_wait();
    multiply_passes<T, F, kTokens, kGated>(p, passes, stages, sums, ring, warp);
  }
#else
  wrong_architecture();
#endif
}

template <class T, class F, int kTokens, bool kGated>
Status run_groups(const GemmParams& p, const PackedGroupsTile& tile, cudaStream_t stream) {
  using S = GroupShape<F, kTokens, kGated>;
  GroupKernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.groups = make_groups(p);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.num_items = static_cast<int>(packed_tiles(p.out_features)) / S::kParts;
  kp.grain = std::clamp(tile.grain, 1, S::kItems);
  kp.trigger = tile.trigger;
  kp.stages = std::clamp((tile.kilobytes * 1024 - S::kFixedBytes) / S::kStageBytes, 2, kMaxStages);
  CUtensorMap token_map, wide_map, narrow_map;
  const DType type = F::kTokenSize == 1 ? DType::kUInt8 : p.dtype;
  REGATTA_RETURN_IF_ERROR(
      encode_rows_map(&token_map, type, p.x, p.num_rows, p.in_features, kTokens));
  REGATTA_RETURN_IF_ERROR(encode_packed_map(&wide_map, p, F::kUnitBytes, S::kItems));
  REGATTA_RETURN_IF_ERROR(encode_packed_map(&narrow_map, p, F::kUnitBytes, 1));
  const int64_t grains =
      max_group_tiles(p.num_rows, p.num_groups, kTokens) * ceil_div(kp.num_items, kp.grain);
  const int64_t blocks = std::min<int64_t>(tile.blocks * num_multiprocessors(), grains);
  return launch(gemm_packed_groups_kernel<T, F, kTokens, kGated>,
                {{stream, p.dependent_launch}, blocks, S::kThreads, S::shared_bytes(kp.stages)},
                "gemm_packed_groups", token_map, wide_map, narrow_map, kp);
}

template <class T, class F, bool kGated>
Status run_group_tokens(const GemmParams& p, const PackedGroupsTile& tile, cudaStream_t stream) {
  return tile.tokens <= 8    ? run_groups<T, F, 8, kGated>(p, tile, stream)
         : tile.tokens == 16 ? run_groups<T, F, 16, kGated>(p, tile, stream)
         : tile.tokens == 32 ? run_groups<T, F, 32, kGated>(p, tile, stream)
         : tile.tokens == 64 ? run_groups<T, F, 64, kGated>(p, tile, stream)
                             : run_groups<T, F, 128, kGated>(p, tile, stream);
}

template <class T>
Status run_packed_groups(const GemmParams& p, const PackedGroupsTile& tile, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    using F = decltype(format);
    return p.gated ? run_group_tokens<T, F, true>(p, tile, stream)
                   : run_group_tokens<T, F, false>(p, tile, stream);
  });
}

}  // namespace

// Of the other source. p: what gemm_packed_sm90_refuses() lets through, with rows in groups.
Status gemm_packed_groups_fp16_sm90(const GemmParams& p, const PackedGroupsTile& tile,
                                    CUstream_st* stream);

}  // namespace regatta::cuda
