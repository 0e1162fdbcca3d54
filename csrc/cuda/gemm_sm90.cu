// y = epilogue(x w^T) for few rows: decode. The weights are streamed once, at memory speed.
//
// Input: as GemmParams says: weights as checkpoints have them, [N, K] row-major bf16 or fp16, so
// that cuBLASLt (many rows) and an embedding lookup (tied weights) can use the same copy. K is a
// multiple of 8.
// Architectures: sm_90a.
// Algorithm
//   1. Weights take the M side of wgmma (64 features), tokens the N side (8 .. 128): one row of x
//      wastes a cheap dimension. Both come from shared memory, 128-byte swizzled, by tensor copies.
//   2. Blocks are small enough for two or three per multiprocessor. By programmatic dependent
//      launch the next kernel's blocks fill their stages with weights while this one ends; only x
//      waits.
//   3. `trigger`: they are let in when a block has requested nearly all its own weights. Earlier,
//      they would take bandwidth from the blocks that they wait for, and be full during the gap.
//   4. Products with few tiles split k over a cluster; ranks add each other's sums in rank order
//      through distributed shared memory. The order of every sum depends on N, K and the number of
//      rows rounded up to `tokens` alone: not on other rows, nor on the run.
//   5. A gated tile interleaves 8 gate rows and 8 up rows (a 4-D tensor map of the plain matrix).
// Source: own; wgmma and copy descriptors as the PTX manual describes them. Compared with published
// small-batch kernels (Marlin, FlashInfer, DeepGEMM): no repacking, and PDL instead of persistence.
//
// Bound: memory, 15.01 GB at 4.66 TB/s read = 3.22 ms for a Llama-3-8B decode step's 129 products.
// Measured on an H200, one CUDA graph, with norm scale, residual, SiLU and float logits inside,
// beside cuBLASLt's bare products in the same run (bench_gemm chain; its algorithms are the best of
// eight, timed warm on one layer's weights):
//   M              2     4     8    16    32    64   128
//   ms          3.79  3.82  3.83  3.91  4.02  4.29  4.95    (3.96 .. 3.03 TB/s, 88 .. 67 % of read)
//   no PDL, ms  4.09  4.12  4.13  4.18  4.24  4.74  5.19
//   cuBLASLt    4.13  4.09  4.08  4.16  4.22  4.29  4.57    (an earlier run)
// A single large product (the head) streams at 4.49 TB/s. By subtraction some 3 to 4 us per product
// are lost, probably between its last weight and the next one's first x. From 64 rows on the likely
// limit is L2 reads of x (not profiled).
// What mattered at M 1, in TB/s: evict-first copies of weights (head 3.76 -> 4.27), no 256-byte L2
// promotion (-> 4.46), late trigger (qkv alone, before that, 3.07 -> 3.66). What did not help:
// prefetching into L2, rotating k between blocks, and one persistent block per multiprocessor with
// grid barriers over four products (5.2 ms with stream-K, 4.26 at its best; cause not found), nor
// one block per multiprocessor with even shares of N and less than half of shared memory, so that
// two products' blocks are resident (4.06 ms at M 8: fewer bytes in flight cost more than the gap).
#include <algorithm>

#include "gemm_epilogue.cuh"
#include "gemm_tensor_map.cuh"
#include "hopper.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kGroup = 128;         // threads of a warpgroup: 64 features each
constexpr int kHelperThreads = 64;  // one warp that copies, one that makes row scales
constexpr int kMaxStages = 16;
constexpr int kDepth = 64;      // values of k per stage: one swizzled row
constexpr int kRowBytes = 128;  // of that row

struct KernelParams {
  Epilogue epilogue;
  int num_rows, num_steps;  // steps of kDepth along k
  int stages, split, trigger;
};

template <int kFeatures, int kTokens>
struct Shape {
  static constexpr int kWeightBytes = kFeatures * kDepth * 2;
  static constexpr int kTokenBytes = kTokens * kDepth * 2;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  static constexpr int kThreads = kFeatures / 64 * kGroup + kHelperThreads;
  static constexpr int kPartialStride = kFeatures + 4;  // floats per token; no bank conflicts
  static constexpr int kPartialBytes = kTokens * kPartialStride * 4;
  // barriers and row scales, then stages aligned to the swizzle's 1024 bytes
  static constexpr int kHeadBytes = 1024;
  static int shared_bytes(int stages) {
    const int body = stages * kStageBytes;
    return 1024 + kHeadBytes + (body > kPartialBytes ? body : kPartialBytes);
  }
};

template <class T, int kFeatures, int kTokens, bool kGated>
__global__ void __launch_bounds__(Shape<kFeatures, kTokens>::kThreads, kFeatures == 256 ? 1
                                                                       : kTokens <= 32  ? 3
                                                                                        : 2)
    gemm_sm90_kernel(const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap token_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<kFeatures, kTokens>;
  constexpr int kConsumers = kFeatures / 64 * kGroup;
  extern __shared__ char shared[];
  char* base =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared) + 1023) & ~uintptr_t{1023});
  uint64_t* full = reinterpret_cast<uint64_t*>(base);
  uint64_t* empty = full + kMaxStages;
  float* row_scale = reinterpret_cast<float*>(empty + kMaxStages);  // [kTokens]
  char* stages = base + S::kHeadBytes;
  float* partial = reinterpret_cast<float*>(stages);  // [kTokens, kPartialStride], after the loop

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.split;
  const int tile = blockIdx.x / p.split;
  const int token0 = blockIdx.y * kTokens;
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
  __syncthreads();

  float acc[kTokens / 2];
  if (warp == kConsumers / kWarp) {
    if (lane == 0) {
      const uint64_t once = policy_evict_first();
      const uint64_t keep = policy_evict_last();
      auto load_weight = [&](int step, int s) {
        char* to = stages + s * S::kStageBytes;
        const int k = (step0 + step) * kDepth;
        if constexpr (kGated) {
          tensor_load_4d(to, &weight_map, k, 0, 0, tile * (kFeatures / 16), &full[s], once);
        } else {
          tensor_load_2d(to, &weight_map, k, tile * kFeatures, &full[s], once);
        }
      };
      auto load_tokens = [&](int step, int s) {
        tensor_load_2d(stages + s * S::kStageBytes + S::kWeightBytes, &token_map,
                       (step0 + step) * kDepth, token0, &full[s], keep);
      };
      // Weights are constants: fill the pipeline while the previous kernel still runs.
      const int ahead = min(p.stages, num_steps);
      for (int i = 0; i < ahead; ++i) {
        barrier_arrive_expect(&full[i], S::kStageBytes);
        load_weight(i, i);
      }
      if (p.trigger >= 0 && trigger_step < ahead) pdl_trigger();
      pdl_wait();
      for (int i = 0; i < ahead; ++i) load_tokens(i, i);
      int s = 0;
      uint32_t phase = 0;
      for (int i = p.stages; i < num_steps; ++i) {
        barrier_wait(&empty[s], phase);
        barrier_arrive_expect(&full[s], S::kStageBytes);
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
      warp_row_scales(p.epilogue, token0, min(kTokens, p.num_rows - token0), row_scale);
    } else {
      for (int t = lane; t < kTokens && token0 + t < p.num_rows; t += kWarp) {
        row_scale[t] = row_scale_of(p.epilogue, token0 + t);
      }
    }
  } else {
    const int group = warp / 4;
    int s = 0;
    uint32_t phase = 0;
    int previous = -1;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.f;
    for (int i = 0; i < num_steps; ++i) {
      barrier_wait(&full[s], phase);
      const char* at = stages + s * S::kStageBytes;
      const uint64_t a = wgmma_descriptor(at + group * 64 * kRowBytes);
      const uint64_t b = wgmma_descriptor(at + S::kWeightBytes);
      wgmma_pin(acc);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        Wgmma<T, kTokens>::run(acc, a + k * 2, b + k * 2, 1);
      }
      wgmma_commit();
      wgmma_pin(acc);
      wgmma_wait<1>();
      if (previous >= 0 && lane == 0) barrier_arrive(&empty[previous]);
      previous = s;
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    pdl_wait();
    // Every warp has read the stages; they now hold the partial sums, token by token.
    named_barrier_sync(1, kConsumers);
    const int feature = group * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      float* to = partial + (j * 8 + lane % 4 * 2) * S::kPartialStride + feature;
      to[0] = acc[4 * j];
      to[S::kPartialStride] = acc[4 * j + 1];
      to[8] = acc[4 * j + 2];
      to[S::kPartialStride + 8] = acc[4 * j + 3];
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
    constexpr int kChunks = kGated ? kFeatures / 16 : kFeatures / 8;
    const int out_width = kGated ? p.epilogue.out_features / 2 : p.epilogue.out_features;
    const int items = min(kTokens, p.num_rows - token0) * kChunks;
    for (int item = rank * kConsumers + threadIdx.x; item < items; item += p.split * kConsumers) {
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
      float squares = finish<T>(p.epilogue, v, row_scale[t], token0 + t, n0, out_width);
      if (!kGated && p.epilogue.sumsq_out != nullptr) {
        // Two or eight adjacent lanes hold the columns of a partial.
        const int lanes = p.epilogue.sumsq_columns / 8;
        const unsigned mask = 0xffu << (lane & 24);
        for (int o = lanes / 2; o > 0; o /= 2) squares += __shfl_xor_sync(mask, squares, o);
        const int part = n0 / p.epilogue.sumsq_columns;
        const int parts = (out_width + p.epilogue.sumsq_columns - 1) / p.epilogue.sumsq_columns;
        if (lane % lanes == 0 && part < parts) {
          p.epilogue.sumsq_out[static_cast<int64_t>(token0 + t) * parts + part] = squares;
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

template <class T, int kFeatures, int kTokens, bool kGated>
Status run(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  using S = Shape<kFeatures, kTokens>;
  const auto m = static_cast<cuuint64_t>(p.num_rows);
  const auto k = static_cast<cuuint64_t>(p.in_features);
  const auto n = static_cast<cuuint64_t>(p.out_features);
  CUtensorMap weight_map, token_map;
  if constexpr (kGated) {
    // Groups of eight gate rows and eight up rows alternate in the tile: one thread's accumulators
    // then hold both halves of a product.
    const cuuint64_t sizes[] = {k, 8, 2, n / 16};
    const cuuint64_t strides[] = {k, n / 2 * k, 8 * k};
    const cuuint32_t box[] = {64, 8, 2, kFeatures / 16};
    const Status status = encode_tensor_map(&weight_map, p.dtype, p.weight, 4, sizes, strides, box);
    if (!status.ok()) return status;
  } else {
    const cuuint64_t sizes[] = {k, n};
    const cuuint64_t strides[] = {k};
    const cuuint32_t box[] = {64, kFeatures};
    const Status status = encode_tensor_map(&weight_map, p.dtype, p.weight, 2, sizes, strides, box);
    if (!status.ok()) return status;
  }
  const cuuint64_t sizes[] = {k, m};
  const cuuint64_t strides[] = {k};
  const cuuint32_t box[] = {64, kTokens};
  const Status status = encode_tensor_map(&token_map, p.dtype, p.x, 2, sizes, strides, box);
  if (!status.ok()) return status;

  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_steps = static_cast<int>(ceil_div(p.in_features, kDepth));
  kp.stages = tile.stages;
  kp.split = tile.split;
  kp.trigger = tile.trigger;

  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.out_features, kFeatures) * tile.split),
                     static_cast<unsigned>(ceil_div(p.num_rows, kTokens)));
  config.block = dim3(S::kThreads);
  config.shared_bytes = S::shared_bytes(tile.stages);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  config.cluster_x = static_cast<unsigned>(tile.split);
  return launch(gemm_sm90_kernel<T, kFeatures, kTokens, kGated>, config, "gemm_sm90", weight_map,
                token_map, kp);
}

template <class T, int kFeatures, bool kGated>
Status run_tokens(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  switch (tile.tokens) {
    case 8:
      return run<T, kFeatures, 8, kGated>(p, tile, stream);
    case 16:
      return run<T, kFeatures, 16, kGated>(p, tile, stream);
    case 32:
      return run<T, kFeatures, 32, kGated>(p, tile, stream);
    case 64:
      return run<T, kFeatures, 64, kGated>(p, tile, stream);
    default:
      return run<T, kFeatures, 128, kGated>(p, tile, stream);
  }
}

template <class T, bool kGated>
Status run_features(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  switch (tile.features) {
    case 64:
      return run_tokens<T, 64, kGated>(p, tile, stream);
    case 128:
      return run_tokens<T, 128, kGated>(p, tile, stream);
    default:
      return run_tokens<T, 256, kGated>(p, tile, stream);
  }
}

}  // namespace

// From measurements on an H200 of all five products of a Llama-3-8B decode step (bench_gemm tune).
// Wide products have tiles for every multiprocessor; narrow ones split k. Few rows: small blocks,
// so that the next kernel's fit beside them and fetch weights early. Many rows: large tiles,
// because then activations come out of L2 less often, and L2 is what limits.
GemmTile choose_gemm_tile(const GemmParams& p) {
  GemmTile tile;
  tile.tokens = 8;
  while (tile.tokens < p.num_rows && tile.tokens < 128) tile.tokens *= 2;
  const int64_t tiles = ceil_div(p.out_features, 64);
  const bool wide = tiles >= 256;
  const bool narrow = tiles < 80;
  const bool deep = p.in_features >= 8192;
  int budget = 146;  // KB of stages
  if (wide) {
    const bool huge = tiles >= 1024;
    tile.features = tile.tokens == 128 && !huge ? 256 : tile.tokens <= 16 && huge ? 64 : 128;
    budget = tile.features == 256 ? 192 : huge ? 100 : tile.tokens == 64 ? 216 : 102;
  } else if (narrow) {
    if (tile.tokens <= 32 && !deep) budget = 66;
    if (tile.tokens >= 64) budget = 216;
    // 128 blocks at least, and 256 of the smallest: they end sooner.
    const int64_t want = tile.tokens <= 32 && !deep ? 256 : 128;
    const int64_t steps = ceil_div(p.in_features, kDepth);
    while (tile.split < 8 && tiles * tile.split < want && steps >= 8 * tile.split) tile.split *= 2;
  } else {
    if (tile.tokens == 128) tile.features = 128, tile.split = 2;
    if (tile.tokens >= 64) budget = 216;
  }
  tile.stages = std::min(kMaxStages, budget * 1024 / ((tile.features + tile.tokens) * kRowBytes));
  return tile;
}

const char* gemm_sm90_refuses(const GemmParams& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return "dtype must be bfloat16 or float16";
  }
  if (p.out_dtype != p.dtype && p.out_dtype != DType::kFloat32) {
    return "out_dtype must be dtype or float32";
  }
  if (p.in_features % 8 != 0) return "in_features must be a multiple of 8";
  if (reinterpret_cast<uintptr_t>(p.x) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(p.weight) % 16 != 0) {
    return "x and weight must be aligned to 16 bytes";
  }
  if (p.gated && p.out_features % 16 != 0) {
    return "out_features must be a multiple of 16 when gated";
  }
  if (p.gated && (p.residual != nullptr || p.sumsq_out != nullptr)) {
    return "a gated product takes no residual and gives no sumsq";
  }
  return nullptr;
}

Status gemm_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  if (const char* reason = gemm_sm90_refuses(p)) {
    return Status::error(std::string("gemm_sm90: ") + reason);
  }
  if (p.num_rows == 0) return {};
  if (p.dtype == DType::kBFloat16) {
    return p.gated ? run_features<__nv_bfloat16, true>(p, tile, stream)
                   : run_features<__nv_bfloat16, false>(p, tile, stream);
  }
  return p.gated ? run_features<__half, true>(p, tile, stream)
                 : run_features<__half, false>(p, tile, stream);
}

Status gemm_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemm_sm90(p, choose_gemm_tile(p), stream);
}

}  // namespace regatta::cuda
