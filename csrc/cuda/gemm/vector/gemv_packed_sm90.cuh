// The kernel of gemv_packed_sm90.cu, which says what it does, and its launch. A source for each
// type of x, some fifty kernels each, and one for groups of rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/gemm_tensor_map.cuh"
#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/packed_weight.cuh"
#include "cuda/gemm/select.h"
#include "cuda/hopper.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kMaxStages = 16;
constexpr int kHeadBytes = 1024;
constexpr int kRowBytes = 128;  // 64 values or 128 codes of x: one swizzled row

struct KernelParams {
  Epilogue epilogue;
  int num_rows;
  int num_units, num_items;  // units along k; slabs, or pairs of them
  int stages, cluster;
  int trigger;  // stages left to ask for when the next launch may start
  Groups groups;
  int row_passes;  // of groups: over the slabs of a row's weight
};

constexpr int kSlabs = 2;  // that are multiplied at once: gated, gates and their ups

template <class F, int kTokens, bool kGated>
struct Shape {
  static constexpr int kWarps = 8;  // that multiply, a unit each
  static constexpr int kItems = kGated ? kSlabs / 2 : kSlabs;
  static constexpr int kRows = kItems * kUnitRows;       // of the output
  static constexpr int kBoxes = kWarps * F::kTokenSize;  // of kRowBytes columns of x, of a stage
  static constexpr int kSlabBytes = kWarps * F::kUnitBytes;
  static constexpr int kWeightBytes = kSlabs * kSlabBytes;
  static constexpr int kStageBytes = kWeightBytes + kBoxes * kTokens * kRowBytes;
  static constexpr int kRowStride = kSlabs * kUnitRows + 4;  // floats of a token's sums
  static constexpr int kSumBytes = kWarps * kTokens * kRowStride * 4;
  static constexpr int kFixedBytes = 1024 + kHeadBytes + kSumBytes;
  static constexpr int kThreads = (kWarps + 2) * kWarp;
  static int shared_bytes(int stages) { return kFixedBytes + stages * kStageBytes; }
};

// What a block takes at a time, over all of k.
struct Pass {
  int item, left;  // the first slab, or pair of them, and how many are left from there on
  GroupTile rows;  // of groups: one
};

// Outputs [kTokens, S::kRows] of a pass, by kThreads threads of which this is `thread`.
template <class T, class S, int kTokens, bool kGated, bool kGrouped, int kThreads>
struct Finish {
  static constexpr int kCount = (kTokens * S::kRows + kThreads - 1) / kThreads;
  Output<T> outputs[kCount];
  float row_scale;  // a group's row has none in shared memory
  static_assert(!kGrouped || kCount == 1);

  static __device__ __forceinline__ int token(int i, int thread) {
    return (i * kThreads + thread) / S::kRows;
  }
  static __device__ __forceinline__ int row(int i, int thread) {
    return (i * kThreads + thread) % S::kRows;
  }
  static __device__ __forceinline__ int width(const Epilogue& p) {
    return kGated ? p.out_features / 2 : p.out_features;
  }

  __device__ __forceinline__ void request(const Epilogue& all, const Pass& pass, int thread) {
    const auto& p = epilogue_of<T, kGrouped>(all, pass.rows.group);
    const int n0 = pass.item * kUnitRows;
    const int rows = min(min(S::kRows, pass.left * kUnitRows), width(p) - n0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int t = token(i, thread), r = row(i, thread);
      outputs[i].inside = t < pass.rows.end - pass.rows.first && r < rows;
      outputs[i].template request<kGated>(p, t, n0 + r, width(p));
      if constexpr (kGrouped) {
        row_scale = outputs[i].inside ? row_scale_of(p, pass.rows.first + t) : 0.f;
      }
    }
  }

  // Adds the warps' sums in their order. wait() returns when they are there, done() is called when
  // they have been read.
  template <class Wait, class Done>
  __device__ __forceinline__ void run(const Epilogue& p, const float* sums, const float* row_scales,
                                      const Pass& pass, int thread, const Wait& wait,
                                      const Done& done) {
    wait();
    float sum[kCount], up[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float* at = sums + min(token(i, thread), kTokens - 1) * S::kRowStride + row(i, thread);
      sum[i] = 0.f, up[i] = 0.f;
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) {
        sum[i] += at[w * kTokens * S::kRowStride];
        if (kGated) up[i] += at[w * kTokens * S::kRowStride + S::kRows];
      }
    }
    done();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int t = token(i, thread), n = pass.item * kUnitRows + row(i, thread);
      const float scale = kGrouped ? row_scale : row_scales[min(t, kTokens - 1)];
      const int64_t at = static_cast<int64_t>(pass.rows.first + t) * width(p) + n;
      float square = outputs[i].template write<kGated>(p, sum[i] * scale, up[i] * scale, at);
      if (!kGated && p.sumsq_out != nullptr) {
        for (int o = kUnitRows / 2; o > 0; o /= 2) square += __shfl_xor_sync(~0u, square, o);
        const int parts = (width(p) + kUnitRows - 1) / kUnitRows;
        if (row(i, thread) % kUnitRows == 0 && outputs[i].inside) {
          p.sumsq_out[static_cast<int64_t>(t) * parts + n / kUnitRows] = square;
        }
      }
    }
  }
};

// Where a lane reads its token's columns of a unit, 16 bytes in steps of 64: swizzled rows of one
// box of codes, or of two boxes of values.
struct TokenRow {
  uint32_t box[2];  // addresses in shared memory
  __device__ __forceinline__ uint32_t at(int i) const { return box[i / 2] ^ i % 2 * 64; }
};

// acc += the products of a unit of codes. weight: the unit of the first slab, the next `stride`
// bytes on.
template <class F>
__device__ __forceinline__ void multiply_codes(float (&acc)[kSlabs][4], const char* weight,
                                               int stride, const TokenRow& x) {
  uint32_t b[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) ldmatrix4(b[i], x.at(i));
#pragma unroll
  for (int j = 0; j < kSlabs; ++j) {
    int sum[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      W4A8Codes<F> codes;
      codes.load(weight + j * stride, i);
      uint32_t a[2][4];
      const float2 scale = codes.convert(a);
#pragma unroll
      for (int e = 0; e < 2; ++e) mma_m16n8k32(sum, a[e], b[i][2 * e], b[i][2 * e + 1]);
      if (i == 0 && F::kColumns != 64) continue;
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        acc[j][h] = fmaf(h < 2 ? scale.x : scale.y, static_cast<float>(sum[h]), acc[j][h]);
        sum[h] = 0;
      }
    }
  }
}

// The same of 16-bit x. All of a unit's loads come first: there are but two warps to hide their
// latency. kEarly: done() is called when they have been read; else behind the products, which
// leaves the compiler to mix loads and products.
template <class T, class F, bool kEarly, class Done>
__device__ __forceinline__ void multiply_values(float (&acc)[kSlabs][4], const char* weight,
                                                int stride, const TokenRow& x, const Done& done) {
  const int lane = threadIdx.x % kWarp;
  constexpr bool kLifted = F::kCodeBits == 4 && !F::kIsE2m1;
  constexpr int kQuads = F::kCodeBits / 2;  // of a slab
  constexpr int kGroups = kUnitColumns / F::kColumns;
  constexpr int kGroupSteps = 8 / kGroups;
  uint32_t b[4][4];
  uint4 quads[kSlabs][kQuads];
  uint2 words[kSlabs][kGroups];
  float sum[kSlabs][4] = {};  // of a group
  float x_sum[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) ldmatrix4(b[i], x.at(i));
#pragma unroll
  for (int j = 0; j < kSlabs; ++j) {
    const char* unit = weight + j * stride;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      quads[j][q] = reinterpret_cast<const uint4*>(unit)[q * kWarp + lane];
    }
#pragma unroll
    for (int g = 0; F::kGroups && g < kGroups; ++g) {
      words[j][g] = reinterpret_cast<const uint2*>(unit + F::kCodeBits * 256)[g * 8 + lane / 4];
    }
  }
  if (kEarly) done();
#pragma unroll
  for (int step = 0; step < 8; ++step) {  // of 16 columns
    const uint32_t b0 = b[step / 2][step % 2 * 2], b1 = b[step / 2][step % 2 * 2 + 1];
    if constexpr (kLifted) {
      constexpr uint32_t kOnes[4] = {kOnePair<T>, kOnePair<T>, kOnePair<T>, kOnePair<T>};
      mma_m16n8k16<T>(x_sum, kOnes, b0, b1);
    }
#pragma unroll
    for (int j = 0; j < kSlabs; ++j) {
      const uint4 quad = quads[j][step * kQuads / 8];
      const uint32_t w[4] = {quad.x, quad.y, quad.z, quad.w};
      uint32_t a[4];
      if constexpr (kLifted) {
        lifted_int4<T>(w[step % 4], a);
      } else if constexpr (F::kIsE2m1) {
        operands_of_e2m1<T>(w[step % 4], a);
      } else {
        operands_of_int8<T>(w[step % 2 * 2], w[step % 2 * 2 + 1], a);
        if constexpr (F::kGroups) {
          const GroupScale group = group_scale(words[j][step / kGroupSteps]);
#pragma unroll
          for (int h = 0; h < 4; ++h) a[h] = subtract_pair<T>(a[h], group.zero[h % 2]);
        }
      }
      mma_m16n8k16<T>(F::kGroups ? sum[j] : acc[j], a, b0, b1);
    }
    if (F::kGroups && (step + 1) % kGroupSteps == 0) {
#pragma unroll
      for (int j = 0; j < kSlabs; ++j) {
        const uint2 word = words[j][step / kGroupSteps];
        const float scales[2] = {low_value<T>(word.x), low_value<T>(word.y)};
        const float lifts[2] = {lifted_zero<T>(word.x), lifted_zero<T>(word.y)};
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          if (kLifted) sum[j][h] = fmaf(-lifts[h / 2], x_sum[h], sum[j][h]);
          acc[j][h] = fmaf(scales[h / 2], sum[j][h], acc[j][h]);
          sum[j][h] = 0.f;
        }
      }
#pragma unroll
      for (int h = 0; h < 4; ++h) x_sum[h] = 0.f;
    }
  }
  if (!kEarly) done();
}

template <class T, class F, int kTokens, bool kGated, bool kGrouped>
__global__ void __launch_bounds__(Shape<F, kTokens, kGated>::kThreads,
                                  2)  // the next launch's block fits beside this one
    gemv_packed_kernel(const __grid_constant__ CUtensorMap token_map,
                       const __grid_constant__ CUtensorMap wide_map,
                       const __grid_constant__ CUtensorMap narrow_map,
                       const __grid_constant__ KernelParams p) {
#ifdef REGATTA_SM90
  using S = Shape<F, kTokens, kGated>;
  constexpr int kWarps = S::kWarps, kItems = S::kItems;
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* stages = shared + (-shared_address(shared) & 1023);
  char* head = stages + p.stages * S::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(head);
  uint64_t* empty = full + kMaxStages;
  uint64_t* sums_full = empty + kMaxStages;
  uint64_t* sums_empty = sums_full + 1;
  char* zeros = head + 3 * kRowBytes;                              // of absent tokens
  float* row_scale = reinterpret_cast<float*>(zeros + kRowBytes);  // [kTokens]
  float* sums = reinterpret_cast<float*>(head + kHeadBytes);       // [kWarps, kTokens, kRowStride]

  const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.cluster;
  // This block's slabs or pairs of them; of groups, its passes over those of all rows.
  int num_items = p.num_items;
  if constexpr (kGrouped) {
    if (!p.groups.ready) pdl_wait();
    num_items = rows_of_groups(p.groups, p.num_rows) * p.row_passes;
  }
  const int item0 = static_cast<int>(static_cast<int64_t>(num_items) * blockIdx.x / gridDim.x);
  const int items =
      static_cast<int>(static_cast<int64_t>(num_items) * (blockIdx.x + 1) / gridDim.x) - item0;
  // The blocks of a cluster go through the same columns of x, also behind their last slabs.
  const int most = p.cluster > 1 ? (p.num_items + gridDim.x - 1) / gridDim.x : items;
  const int passes = kGrouped ? items : (most + kItems - 1) / kItems;
  if (kGrouped && passes == 0) return;
  const int steps = (p.num_units + kWarps - 1) / kWarps;
  int known = -1;  // the last row whose group this warp has looked for
  GroupTile rows = {0, 0, p.num_rows};
  const auto pass_of = [&](int pass) -> Pass {  // by a whole warp
    if constexpr (kGrouped) {
      const int row = (item0 + pass) / p.row_passes;
      const int item = (item0 + pass - row * p.row_passes) * kItems;
      if (row != known) rows = {find_group(p.groups, known = row), row, row + 1};
      return {item, p.num_items - item, rows};
    } else {
      return {item0 + pass * kItems, items - pass * kItems, rows};
    }
  };

  if (threadIdx.x == kWarps * kWarp) {
    tensor_map_prefetch(&token_map);
    tensor_map_prefetch(&wide_map);
    tensor_map_prefetch(&narrow_map);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kWarps * p.cluster);
    }
    barrier_init(sums_full, kWarps + 1);
    barrier_init(sums_empty, 1);
    barrier_init_fence();
  }
  if (threadIdx.x < kRowBytes / 16) {
    reinterpret_cast<uint4*>(zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  if (p.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (warp == kWarps) {
    const uint64_t once = policy_evict_first(), keep = policy_evict_last();
    // One lane asks, with few instructions: the others wait for what is asked for.
    const auto load_weight = [&](const Pass& pass, int step, int s) {
      if (lane > 0) return;
      const int count = min(kItems, pass.left);  // 0 behind the last of this block
      constexpr int kTokenBytes = S::kBoxes * kTokens * kRowBytes;
      barrier_arrive_expect(&full[s],
                            kTokenBytes + max(count, 0) * (kGated ? 2 : 1) * S::kSlabBytes);
      if (count <= 0) return;
      char* to = stages + s * S::kStageBytes;
      tensor_load_4d(to, count == kItems ? &wide_map : &narrow_map, 0, step * kWarps * 2, pass.item,
                     kGrouped ? pass.rows.group * (kGated ? 2 : 1) : 0, &full[s], once);
    };
    const auto load_tokens = [&](const GroupTile& rows, int step, int s) {
      if (lane > 0) return;
      const int boxes = S::kBoxes / p.cluster, box = rank * boxes;
      char* to = stages + s * S::kStageBytes + S::kWeightBytes + box * kTokens * kRowBytes;
      if (p.cluster == 1) {
        tensor_load_3d(to, &token_map, 0, rows.first, step * S::kBoxes, &full[s], keep);
      } else {
        tensor_multicast_3d(to, &token_map, 0, 0, step * S::kBoxes + box, &full[s],
                            static_cast<uint16_t>((1 << p.cluster) - 1), keep);
      }
    };
    const int total = passes * steps;
    const int ahead = min(p.stages, total);
    int pass = 0, step = 0;
    const auto advance = [&] {
      if (++step == steps) step = 0, ++pass;
    };
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, advance()) load_weight(pass_of(pass), step, i);
    if (total - p.trigger <= ahead) pdl_trigger();
    pdl_wait();
    int pass_of_x = 0, step_of_x = 0;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      load_tokens(pass_of(pass_of_x).rows, step_of_x, i);
      if (++step_of_x == steps) step_of_x = 0, ++pass_of_x;
    }
    int s = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int i = ahead; i < total; ++i, advance()) {
      const Pass at = pass_of(pass);
      barrier_wait(&empty[s], phase);
      load_weight(at, step, s);
      load_tokens(at.rows, step, s);
      if (i == total - p.trigger) pdl_trigger();
      if (++s == p.stages) s = 0, phase ^= 1;
    }
  } else if (warp > kWarps) {
    pdl_wait();
    if constexpr (!kGrouped) warp_row_scales(p.epilogue, 0, p.num_rows, row_scale);
    __syncwarp();
    // The last pass is finished by the warps that multiply.
    for (int pass = 0; pass < passes; ++pass) {
      if (lane == 0) barrier_arrive(sums_full);
      if (pass + 1 == passes) break;
      const Pass at = pass_of(pass);
      Finish<T, S, kTokens, kGated, kGrouped, kWarp> finish;
      finish.request(p.epilogue, at, lane);
      finish.run(
          p.epilogue, sums, row_scale, at, lane, [&] { barrier_wait(sums_full, pass % 2); },
          [&] {
            __syncwarp();
            if (lane == 0) barrier_arrive(sums_empty);
          });
    }
  } else {
    // This lane's token, and where its 16 bytes lie in the first half of a box's row.
    const int token = lane % 8;
    const bool is_token = token < kTokens;
    const auto box_of = [&](int box) {
      const int row = box * kTokens + token;
      const int offset = S::kWeightBytes + row * kRowBytes + (lane / 8 ^ row % 8) * 16;
      return shared_address(is_token ? stages + offset : zeros);
    };
    const uint32_t first_box = box_of(warp * F::kTokenSize);
    const uint32_t second_box = box_of(warp * F::kTokenSize + F::kTokenSize - 1);
    const int token_stride = is_token ? S::kStageBytes : 0;
    // Not at the barriers: warps that try them take from the block of the launch ahead.
    pdl_wait();
    // Asked for now: behind the products it would be waited for, from memory.
    const Pass last = pass_of(passes - 1);
    Finish<T, S, kTokens, kGated, kGrouped, kWarps * kWarp> finish;
    finish.request(p.epilogue, last, threadIdx.x);
    int s = 0;
    uint32_t phase = 0;
    for (int pass = 0; pass < passes; ++pass) {
      float acc[kSlabs][4] = {};
      for (int step = 0; step < steps; ++step) {
        barrier_wait(&full[s], phase);
        const auto release = [&] {
          __syncwarp();
          if (p.cluster > 1) {
            if (lane < p.cluster) barrier_arrive_cluster(&empty[s], lane);
          } else if (lane == 0) {
            barrier_arrive(&empty[s]);
          }
        };
        const int unit = step * kWarps + warp;
        if (unit < p.num_units) {
          const char* weight = stages + s * S::kStageBytes + warp * F::kUnitBytes;  // of its slab
          const TokenRow x = {{first_box + s * token_stride, second_box + s * token_stride}};
          if constexpr (F::kTokenSize == 1) {
            multiply_codes<F>(acc, weight, S::kSlabBytes, x);
            release();
          } else {
            multiply_values<T, F, (kTokens > 1)>(acc, weight, S::kSlabBytes, x, release);
          }
        } else {
          release();
        }
        if (++s == p.stages) s = 0, phase ^= 1;
      }

      if (pass > 0) barrier_wait(sums_empty, (pass - 1) % 2);
      float* to = sums + (warp * kTokens + lane % 4 * 2) * S::kRowStride + lane / 4;
#pragma unroll
      for (int j = 0; j < kSlabs; ++j) {
        float* row = to + j * kUnitRows;
        if (lane % 4 * 2 < kTokens) row[0] = acc[j][0], row[8] = acc[j][2];
        if (lane % 4 * 2 + 1 < kTokens) {
          row[S::kRowStride] = acc[j][1], row[S::kRowStride + 8] = acc[j][3];
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(sums_full);
    }
    finish.run(
        p.epilogue, sums, row_scale, last, threadIdx.x,
        [&] { barrier_wait(sums_full, (passes - 1) % 2); }, [] {});
  }
  // Others may still tell this block what they have read.
  if (p.cluster > 1) {
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  }
#else
  wrong_architecture();
#endif
}

template <class T, class F, int kTokens, bool kGated, bool kGrouped>
Status run(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  using S = Shape<F, kTokens, kGated>;
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.num_items = static_cast<int>(packed_tiles(kGated ? p.out_features / 2 : p.out_features));
  kp.groups = make_groups(p);
  kp.row_passes = static_cast<int>(ceil_div(kp.num_items, S::kItems));
  int blocks = static_cast<int>(std::min<int64_t>(
      num_multiprocessors(), kGrouped ? p.num_rows * kp.row_passes : kp.num_items));
  // Blocks of a cluster would have to go through the same rows.
  kp.cluster = kGrouped ? 1 : std::min(tile.cluster, blocks);
  kp.trigger = tile.trigger;
  blocks -= blocks % kp.cluster;
  kp.stages =
      std::max(2, std::min(kMaxStages, (tile.kilobytes * 1024 - S::kFixedBytes) / S::kStageBytes));
  CUtensorMap token_map, wide_map, narrow_map;
  REGATTA_RETURN_IF_ERROR(encode_boxes_map(&token_map, F::kTokenSize == 1 ? DType::kUInt8 : p.dtype,
                                           p.x, p.num_rows, p.in_features, kTokens,
                                           S::kBoxes / kp.cluster));
  REGATTA_RETURN_IF_ERROR(encode_packed_map(&wide_map, p, F::kUnitBytes, S::kItems, 2 * S::kWarps));
  REGATTA_RETURN_IF_ERROR(encode_packed_map(&narrow_map, p, F::kUnitBytes, 1, 2 * S::kWarps));
  LaunchConfig config({stream, p.dependent_launch}, blocks, S::kThreads,
                      packed_shared_bytes(p, S::shared_bytes(kp.stages)));
  config.cluster_x = static_cast<unsigned>(kp.cluster);
  return launch(gemv_packed_kernel<T, F, kTokens, kGated, kGrouped>, config, "gemv_packed",
                token_map, wide_map, narrow_map, kp);
}

template <class T, class F, int kTokens, bool kGrouped>
Status run_gated(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  return p.gated ? run<T, F, kTokens, true, kGrouped>(p, tile, stream)
                 : run<T, F, kTokens, false, kGrouped>(p, tile, stream);
}

template <class T, class F, bool kGrouped>
Status run_tokens(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  if constexpr (kGrouped) {
    return run_gated<T, F, 1, true>(p, tile, stream);
  } else {
    return p.num_rows == 1   ? run_gated<T, F, 1, false>(p, tile, stream)
           : p.num_rows <= 4 ? run_gated<T, F, 4, false>(p, tile, stream)
                             : run_gated<T, F, 8, false>(p, tile, stream);
  }
}

template <class T, bool kGrouped>
Status run_gemv_packed(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  return dispatch_packed(
      p, [&](auto format) { return run_tokens<T, decltype(format), kGrouped>(p, tile, stream); });
}

}  // namespace

// Of the other sources. p: what gemv_packed_sm90_refuses() lets through, with rows.
Status gemv_packed_fp16_sm90(const GemmParams& p, const GemvTile& tile, CUstream_st* stream);
Status gemv_packed_groups_sm90(const GemmParams& p, const GemvTile& tile, CUstream_st* stream);

}  // namespace regatta::cuda
