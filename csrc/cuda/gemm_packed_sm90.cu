// y = epilogue(x w^T) with weights of 8 or 4 bits, activations of 16, or of 4 bits, activations of 8:
// made into operands on the way to the tensor cores.
//
// Input: x [M, K] bf16 or fp16, or int8; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90a.
// Algorithm: as gemm_sm90.cu (weights on the M side of wgmma, a ring filled ahead of pdl_wait(), k
// split over a cluster), except that
//   1. a stage is 128 columns: 16 packed rows of weight per copy, and x;
//   2. a warpgroup reads its codes from shared memory, 16 bytes per thread without conflicts, turns
//      them into the instruction's left operand in registers (bit operations, one subtraction, with
//      4 bits one multiplication, all in pairs), half a unit of one of its tiles of 64 rows at a
//      time, while the tensor cores work on the one ahead;
//   3. a gated product pairs tiles of gate rows with their up rows, so that the packing knows
//      nothing of gates.
//   With int8 x, codes less zero points are int8 operands, and a group's integer sums are scaled into
//   floats.
// Source: own; biasing codes into a mantissa is what FasterTransformer and Marlin do. QServe and QQQ
// multiply 4-bit codes as int8; theirs scale groups in integers or multiply codes by 16 instead.
//
// Bound: memory: 1.50 ms with 8 bits and 0.80 ms with 4 for the 128 layer products of a Llama-3-8B
// decode step at 4.66 TB/s.
// Measured on an H200 (bench_packed tune, the four products of a layer, us; not the chain): M 32, 8
// bits 13.0 + 13.0 + 37.4 + 31.4, 4 bits 12.3 + 12.0 + 33.9 + 30.5; M 64 16.6 + 16.1 + 44.2 + 38.0 and
// 15.4 + 15.4 + 40.2 + 35.5; M 128 (gate and up by gemm_packed_tiles_sm90) 20.3 + 19.8 + 49.1 and 19.3 +
// 18.9 + 49.4. Blocks of 64 rows of weight at M 128 read x too often (7 ms for all layers). It is not
// known what bounds M 16 .. 64: neither the bytes of weights nor the waits between instructions do.
#include <algorithm>
#include <type_traits>

#include "gemm_epilogue.cuh"
#include "gemm_tensor_map.cuh"
#include "hopper.cuh"
#include "packed_weight.cuh"
#include "regatta/gemm.h"
#include "wgmma.cuh"

namespace regatta::cuda {
namespace {

constexpr int kGroup = 128;         // threads of a warpgroup
constexpr int kTileRows = 64;       // rows of weight of an instruction
constexpr int kMaxStages = 16;
constexpr int kRowBytes = 128;  // 64 values or 128 codes of x: one swizzled row
constexpr int kHeadBytes = 1024;
constexpr int kOrder = 8;  // tiles of tokens that are worked on together

struct KernelParams {
  Epilogue epilogue;
  const uint8_t* weight;
  int num_rows, num_units;   // units along k
  int num_slabs, up;         // of 16 rows; the first up's, gated
  int row_blocks, token_blocks;
  int stages, split, trigger;
};

// kGroups warpgroups with kTiles tiles each.
template <class F, int kGroups, int kTiles, int kTokens>
struct Shape {
  static constexpr int kBlockTiles = kGroups * kTiles;
  static constexpr int kBoxes = F::kTokenSize;              // of x, of a stage
  static constexpr int kBoxColumns = kUnitColumns / kBoxes;
  static constexpr int kTokenBytes = kTokens * kRowBytes;  // of a box
  static constexpr int kStageLoad = kBoxes * kTokenBytes + kBlockTiles * F::kTileBytes;
  static constexpr int kStageBytes = (kStageLoad + 1023) / 1024 * 1024;
  static constexpr int kConsumers = kGroups * kGroup;
  static constexpr int kPartialStride = kBlockTiles * 64 + 4;  // floats per token; no conflicts
  static constexpr int kPartialBytes = kTokens * kPartialStride * 4;
  static constexpr int kSums = F::kTokenSize == 1 ? kTokens / 2 : 0;  // of a group of codes
  static constexpr int kAccumulators = kTiles * kTokens / 2 + kSums;  // per thread
  static constexpr int kBlocks =  // per multiprocessor
      kAccumulators > (F::kTokenSize == 1 ? 64 : 32) ? 1 : 2;
  // One warp copies and one makes row scales; a warpgroup of them can give its registers away.
  static constexpr bool kGives = kAccumulators > 64;
  static constexpr int kThreads = kConsumers + (kGives ? 128 : 64);
  static int shared_bytes(int stages) {
    return 1024 + kHeadBytes + std::max(stages * kStageBytes, kPartialBytes);
  }
};

template <class T, class F, int kGroups, int kTiles, int kTokens, bool kGated>
__global__ void __launch_bounds__(Shape<F, kGroups, kTiles, kTokens>::kThreads,
                                  Shape<F, kGroups, kTiles, kTokens>::kBlocks)
    gemm_packed_kernel(const __grid_constant__ CUtensorMap token_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<F, kGroups, kTiles, kTokens>;
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* base = shared + (-shared_address(shared) & 1023);
  uint64_t* full = reinterpret_cast<uint64_t*>(base);
  uint64_t* empty = full + kMaxStages;
  float* row_scale = reinterpret_cast<float*>(empty + kMaxStages);  // [kTokens]
  char* stages = base + kHeadBytes;
  float* partial = reinterpret_cast<float*>(stages);  // [kTokens, kPartialStride], after the loop

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.split;
  // Blocks of neighbouring rows and tokens run at the same time and share what they read in L2.
  const int index = blockIdx.x / p.split;
  const int first = index / (kOrder * p.row_blocks) * kOrder;
  const int order = min(kOrder, p.token_blocks - first);
  const int within = index - first * p.row_blocks;
  const int token0 = (first + within % order) * kTokens;
  // Tiles of 64 rows: gated, half of them are gates and the others their ups.
  const int tile0 = within / order * (kGated ? S::kBlockTiles / 2 : S::kBlockTiles);
  const int step0 = static_cast<int>(static_cast<int64_t>(p.num_units) * rank / p.split);
  const int num_steps =
      static_cast<int>(static_cast<int64_t>(p.num_units) * (rank + 1) / p.split) - step0;

  if (p.trigger < 0) pdl_trigger();
  const int trigger_step = num_steps - 1 - p.trigger;
  if (threadIdx.x == S::kConsumers) {
    tensor_map_prefetch(&token_map);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], S::kConsumers / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();

  // Partial sums and row scales of all blocks of the cluster are there.
  const auto meet = [&] {
    if (p.split > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      named_barrier_sync(2, S::kThreads);
    }
  };
  // Others may still read this block's partial sums.
  const auto part = [&] {
    if (p.split > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
  };
  if (warp >= S::kConsumers / kWarp) {
    if constexpr (S::kGives) registers_give<40>();
    if (warp == S::kConsumers / kWarp) {
      const uint64_t once = p.token_blocks > 1 ? policy_evict_last() : policy_evict_first();
      const uint64_t keep = policy_evict_last();
      const uint8_t* from = nullptr;  // this lane's slab
      if (lane < S::kBlockTiles * 4) {
        int first = tile0 * 4 + lane;
        if (kGated && lane >= S::kBlockTiles * 2) first += p.up - S::kBlockTiles * 2;
        // Behind the last slab, its own rows again: they are not written.
        const int64_t slab = min(first, p.num_slabs - 1);
        from = p.weight + (slab * p.num_units + step0) * F::kUnitBytes;
      }
      const auto load_weight = [&](int step, int s) {
        if (lane == 0) barrier_arrive_expect(&full[s], S::kStageLoad);
        __syncwarp();
        if (lane < S::kBlockTiles * 4) {
          bulk_load(stages + s * S::kStageBytes + S::kBoxes * S::kTokenBytes + lane * F::kUnitBytes,
                    from + static_cast<int64_t>(step) * F::kUnitBytes, F::kUnitBytes, &full[s], once);
        }
      };
      const auto load_tokens = [&](int step, int s) {
        if (lane < S::kBoxes) {
          tensor_load_2d(stages + s * S::kStageBytes + lane * S::kTokenBytes, &token_map,
                         (step0 + step) * kUnitColumns + lane * S::kBoxColumns, token0, &full[s],
                         keep);
        }
      };
      const int ahead = min(p.stages, num_steps);
      for (int i = 0; i < ahead; ++i) load_weight(i, i);
      if (p.trigger >= 0 && trigger_step < ahead) pdl_trigger();
      pdl_wait();
      for (int i = 0; i < ahead; ++i) load_tokens(i, i);
      int s = 0;
      uint32_t phase = 0;
      for (int i = p.stages; i < num_steps; ++i) {
        barrier_wait(&empty[s], phase);
        load_weight(i, s);
        load_tokens(i, s);
        if (p.trigger >= 0 && i == trigger_step) pdl_trigger();
        if (++s == p.stages) s = 0, phase ^= 1;
      }
    } else if (warp == S::kConsumers / kWarp + 1) {
      pdl_wait();
      if constexpr (kTokens <= 32) {
        warp_row_scales(p.epilogue, token0, min(kTokens, p.num_rows - token0), row_scale);
      } else {
        for (int t = lane; t < kTokens && token0 + t < p.num_rows; t += kWarp) {
          row_scale[t] = row_scale_of(p.epilogue, token0 + t);
        }
      }
    }
    __syncwarp();
    meet();
    part();
    return;
  }

  if constexpr (S::kGives) registers_take<232>();
  float acc[kTiles][kTokens / 2];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[r][i] = 0.f;
  }
  // This warp's slab of tile r is 4 r units on.
  const int slab = warp / 4 * kTiles * 4 + warp % 4;
  int s = 0;
  uint32_t phase = 0;
  barrier_wait(&full[0], 0);
  const char* first_unit = stages + S::kBoxes * S::kTokenBytes + slab * F::kUnitBytes;
  // At least once: a way around the loop would set accumulators beside those in flight, for
  // which the compiler makes each instruction wait for the one ahead.
  int left = num_steps;
  if constexpr (F::kTokenSize == 1) {
    int sum[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
    uint32_t a[2][2][4];  // one is made while the tensor cores read the other
    W4A8Codes<F> codes;
    codes.load(first_unit, 0);
    do {
      const uint64_t b = wgmma_descriptor(stages + s * S::kStageBytes);
      const char* unit = first_unit + s * S::kStageBytes;
      const int current = s;
      if (++s == p.stages) s = 0, phase ^= 1;
#pragma unroll
      for (int q = 0; q < 2 * kTiles; ++q) {
        const int half = q % 2, r = q / 2;
        constexpr bool kEach = F::kColumns == 64;  // half is a group
        const float2 scale = codes.convert(a[half]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          Wgmma<int8_t, kTokens>::run(sum, a[half][k], b + (2 * half + k) * 2,
                                  k > 0 || (half > 0 && !kEach));
        }
        wgmma_commit();
        if (q + 1 < 2 * kTiles) {
          codes.load(unit + (q + 1) / 2 * 4 * F::kUnitBytes, (q + 1) % 2);
        } else if (left > 1) {
          barrier_wait(&full[s], phase);
          codes.load(first_unit + s * S::kStageBytes, 0);
        }
        if (half == 0 && !kEach) continue;
        wgmma_wait<0>();
        wgmma_pin(sum);
        if (q + 1 == 2 * kTiles && lane == 0) barrier_arrive(&empty[current]);
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
          acc[r][i] = fmaf(i % 4 < 2 ? scale.x : scale.y, static_cast<float>(sum[i]), acc[r][i]);
        }
      }
    } while (--left > 0);
  } else {
    int previous = -1;
    uint32_t a[2][4][4];  // one is made while the tensor cores read the other
    PackedCodes<T, F> codes;
    codes.load(first_unit, 0);
    do {
      const char* at = stages + s * S::kStageBytes;
      const char* unit = first_unit + s * S::kStageBytes;
      const int current = s;
      if (++s == p.stages) s = 0, phase ^= 1;
#pragma unroll
      for (int q = 0; q < 2 * kTiles; ++q) {
        const int half = q / kTiles, r = q % kTiles;
        codes.convert(a[q % 2]);
        const uint64_t b = wgmma_descriptor(at + half * S::kTokenBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<T, kTokens>::run(acc[r], a[q % 2][k], b + k * 2, 1);
        wgmma_commit();
        if (q + 1 < 2 * kTiles) {
          codes.load(unit + (q + 1) % kTiles * 4 * F::kUnitBytes, (q + 1) / kTiles);
        } else if (left > 1) {
          barrier_wait(&full[s], phase);
          codes.load(first_unit + s * S::kStageBytes, 0);
        }
        wgmma_wait<1>();
        if (q == 0 && previous >= 0 && lane == 0) barrier_arrive(&empty[previous]);
      }
      previous = current;
    } while (--left > 0);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int r = 0; r < kTiles; ++r) wgmma_pin(acc[r]);
  pdl_wait();
  // Every warp has read the stages; they now hold the partial sums, token by token.
  named_barrier_sync(1, S::kConsumers);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    const int feature = (slab + r * 4) * kUnitRows + lane / 4;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      float* to = partial + (j * 8 + lane % 4 * 2) * S::kPartialStride + feature;
      to[0] = acc[r][4 * j];
      to[S::kPartialStride] = acc[r][4 * j + 1];
      to[8] = acc[r][4 * j + 2];
      to[S::kPartialStride + 8] = acc[r][4 * j + 3];
    }
  }
  meet();

  // An item is eight outputs of one token. Partials are added in the order of ranks.
  constexpr int kChunks = S::kBlockTiles * (kGated ? 4 : 8);
  constexpr int kQuads = kGated ? 4 : 2;
  constexpr int kUp = S::kBlockTiles * 32;  // from a gate to its up
  const int out_width = kGated ? p.epilogue.out_features / 2 : p.epilogue.out_features;
  const int items = min(kTokens, p.num_rows - token0) * kChunks;
  for (int item = rank * S::kConsumers + threadIdx.x; item < items;
       item += p.split * S::kConsumers) {
    const int t = item / kChunks;
    const int chunk = item % kChunks;
    const float* at = partial + t * S::kPartialStride + chunk * 8;
    float v[16];
#pragma unroll
    for (int q = 0; q < kQuads * 4; ++q) v[q] = 0.f;
    for (int r = 0; r < p.split; ++r) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const float* from = at + q / 2 * kUp + q % 2 * 4;  // gated: gates, then ups
        const float4 f =
            p.split > 1 ? load_cluster_float4(from, r) : *reinterpret_cast<const float4*>(from);
        v[q * 4] += f.x, v[q * 4 + 1] += f.y, v[q * 4 + 2] += f.z, v[q * 4 + 3] += f.w;
      }
    }
    const int n0 = tile0 * 64 + chunk * 8;
    if (n0 >= out_width) continue;
    float squares = finish<T>(p.epilogue, v, row_scale[t], token0 + t, n0, out_width);
    if (!kGated && p.epilogue.sumsq_out != nullptr) {
      // Two or eight adjacent lanes hold the columns of a partial.
      const int lanes = p.epilogue.sumsq_columns / 8;
      const int part = n0 / p.epilogue.sumsq_columns;
      const int parts = (out_width + p.epilogue.sumsq_columns - 1) / p.epilogue.sumsq_columns;
      const unsigned mask = __activemask();
      for (int o = lanes / 2; o > 0; o /= 2) {
        const float other = __shfl_xor_sync(mask, squares, o);
        squares += (mask >> (lane ^ o) & 1) ? other : 0.f;
      }
      if (lane % lanes == 0 && part < parts) {
        p.epilogue.sumsq_out[static_cast<int64_t>(token0 + t) * parts + part] = squares;
      }
    }
  }
  part();
#else
  wrong_architecture();
#endif
}

template <class T, class F, int kGroups, int kTiles, int kTokens, bool kGated>
Status run(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  using S = Shape<F, kGroups, kTiles, kTokens>;
  CUtensorMap token_map;
  const auto k = static_cast<cuuint64_t>(p.in_features);
  const cuuint64_t sizes[] = {k, static_cast<cuuint64_t>(p.num_rows)};
  const cuuint64_t strides[] = {k};
  const cuuint32_t box[] = {S::kBoxColumns, kTokens};
  const DType type = F::kTokenSize == 1 ? DType::kUInt8 : p.dtype;
  const Status status = encode_tensor_map(&token_map, type, p.x, 2, sizes, strides, box);
  if (!status.ok()) return status;
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.weight = static_cast<const uint8_t*>(p.weight);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.num_slabs = static_cast<int>(packed_tiles(p.out_features));
  kp.up = static_cast<int>(p.out_features / 2 / kUnitRows);
  kp.row_blocks = static_cast<int>(ceil_div(p.out_features, kTileRows * S::kBlockTiles));
  kp.token_blocks = static_cast<int>(ceil_div(p.num_rows, kTokens));
  kp.split = tile.split;
  while (kp.split > kp.num_units) kp.split /= 2;  // a block has a step at least
  kp.trigger = tile.trigger;
  kp.stages = std::max(
      2, std::min({tile.stages, kMaxStages, (226 * 1024 - kHeadBytes - 1024) / S::kStageBytes}));
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(kp.row_blocks * kp.token_blocks * kp.split));
  config.block = dim3(S::kThreads);
  config.shared_bytes = S::shared_bytes(kp.stages);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  config.cluster_x = static_cast<unsigned>(kp.split);
  return launch(gemm_packed_kernel<T, F, kGroups, kTiles, kTokens, kGated>, config, "gemm_packed",
                token_map, kp);
}

template <class T, class F, int kGroups, int kTiles, bool kGated>
Status run_tokens(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  switch (tile.tokens) {
    case 8:
    case 16:
    case 32:
      return run<T, F, kGroups, kTiles, 32, kGated>(p, tile, stream);
    case 64:
      return run<T, F, kGroups, kTiles, 64, kGated>(p, tile, stream);
    default:
      // No registers for the sums of codes of two tiles.
      return run<T, F, kGroups, F::kTokenSize == 1 ? 1 : kTiles, 128, kGated>(p, tile, stream);
  }
}

template <class T, class F>
Status run_groups(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  if (tile.features == 256) {
    return p.gated ? run_tokens<T, F, 2, 2, true>(p, tile, stream)
                   : run_tokens<T, F, 2, 2, false>(p, tile, stream);
  }
  return p.gated ? run_tokens<T, F, 2, 1, true>(p, tile, stream)
                 : run_tokens<T, F, 2, 1, false>(p, tile, stream);
}

template <class T>
Status run_format(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    return run_groups<T, decltype(format)>(p, tile, stream);
  });
}

// Blocks of many rows of weight, for each reads all of x's columns that it works on. Of many tokens
// a block fills a multiprocessor, and clusters of more than two no longer fill the device.
GemmTile choose_tile(const GemmParams& p) {
  GemmTile tile;
  tile.tokens = 32;
  while (tile.tokens < p.num_rows && tile.tokens < 128) tile.tokens *= 2;
  const bool few = tile.tokens <= 64;
  const bool codes = p.operands == GemmOperands::kW4A8;
  tile.features = p.gated && !few && !codes ? 256 : 128;
  const int64_t blocks =
      ceil_div(p.out_features, tile.features) * ceil_div(p.num_rows, tile.tokens);
  const int64_t units = packed_units(p.in_features);
  if (few) {
    while (tile.split < 8 && units >= 4 * tile.split &&
           blocks * tile.split < (units >= 28 * tile.split ? 129 : 128)) {
      tile.split *= 2;
    }
  } else if (units >= 4 && blocks * 2 <= 132) {
    tile.split = 2;
  }
  const int64_t unit = unit_bytes(p.operands, static_cast<int>(p.group_size));
  const int64_t stage =
      round_up(tile.tokens * (codes ? 1 : 2) * kRowBytes + tile.features / kUnitRows * unit, 1024);
  tile.stages =
      static_cast<int>(std::min<int64_t>(kMaxStages, (few ? 108 : 220) * 1024 / stage));
  tile.trigger = -1;
  return tile;
}

}  // namespace

const char* gemm_packed_sm90_refuses(const GemmParams& p) {
  if (p.gated && p.out_features % (2 * kUnitRows) != 0) {
    return "out_features must be a multiple of 32 when gated";
  }
  return packed_refuses(p);
}

Status gemm_packed_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  if (const char* reason = gemm_packed_sm90_refuses(p)) {
    return Status::error(std::string("gemm_packed_sm90: ") + reason);
  }
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_format<__nv_bfloat16>(p, tile, stream)
                                     : run_format<__half>(p, tile, stream);
}

Status gemm_packed_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemm_packed_sm90(p, choose_tile(p), stream);
}

}  // namespace regatta::cuda
