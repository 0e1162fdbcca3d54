// y = epilogue(x w^T) of many rows with weights of 8 or 4 bits, activations of 16.
//
// Input: x [M, K] bf16 or fp16; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90a.
// Algorithm
//   1. A block stays and takes tiles of 256 rows of weight (gated: 128 gates and their ups) by 128
//      tokens, tokens first, so that blocks at work at a time share what they read in L2. A tile of
//      many rows of weight and few tokens reads less than the other way round: weights are small.
//   2. One warp fills a ring of stages of 128 columns. Two warpgroups own 128 rows each: a half of
//      a stage of one 64-row tile is turned into the left operand of wgmma in registers while the
//      tensor cores multiply the one ahead.
//   3. Outputs pass through shared memory, a swizzled tile of 64 features per warpgroup, transposed
//      by stmatrix, so that rows are read and written 16 bytes at a time.
// Source: own; CUTLASS's mixed-input products and Machete have the same main loop.
//
// Bound: the tensor cores.
// Measured on an H200 (bench_packed large; dense beside it 17.5 and 161.6 ms for all layers): 18.5 ms
// at M 1,024 with 8 bits and 19.6 with 4; 164 and 157 ms at M 8,192, gate and up 712-742 TFLOP/s
// (dense 666).
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

constexpr int kTokens = 128;
constexpr int kTileRows = 64;   // rows of weight of an instruction
constexpr int kBlockRows = 256;
constexpr int kGroup = 128;     // threads of a warpgroup
constexpr int kThreads = 3 * kGroup;
constexpr int kMaxStages = 8;
constexpr int kHeadBytes = 256;
constexpr int kTokenBytes = kTokens * 128;  // of 64 columns
constexpr int kOutBytes = kTokens * 128;    // 64 features of each token, of a warpgroup
constexpr int kOrder = 8;                   // tiles of tokens that are worked on together

template <class F>
struct Shape {
  static constexpr int kStageLoad = 2 * kTokenBytes + 4 * F::kTileBytes;
  static constexpr int kStageBytes = (kStageLoad + 1023) / 1024 * 1024;
  static constexpr int kStages =
      std::min(kMaxStages, (226 * 1024 - kHeadBytes - 2 * kOutBytes) / kStageBytes);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kOutBytes + kHeadBytes;
};

struct KernelParams {
  Epilogue epilogue;
  const uint8_t* weight;
  int num_rows, num_units;  // units along k
  int num_slabs, up;        // of 16 rows; the first up's, gated
  int row_blocks, token_blocks;
};

struct Tile {
  int token0, row0;  // row0: of the output
};

template <bool kGated>
__device__ __forceinline__ Tile tile_of(const KernelParams& p, int index) {
  const int first = index / (kOrder * p.row_blocks) * kOrder;
  const int order = min(kOrder, p.token_blocks - first);
  const int within = index - first * p.row_blocks;
  return {(first + within % order) * kTokens,
          within / order * (kGated ? kBlockRows / 2 : kBlockRows)};
}

// 16 bytes `chunk` of token t in an output tile.
__device__ __forceinline__ char* out_chunk(char* out, int t, int chunk) {
  return out + t * 128 + ((chunk ^ (t & 7)) << 4);
}

// Writes 64 features by 128 tokens from feature n0 on; value(i, j) is the pair of tokens that
// register pair i (0: row g, 1: row g + 8) of tokens 8 j holds.
template <class T, class Value>
__device__ __forceinline__ void write_tile(const Epilogue& p, char* out, int group, int n0,
                                           int width, int token0, int num_rows,
                                           const Value& value) {
  const int thread = threadIdx.x % kGroup, warp = thread / kWarp, lane = thread % kWarp;
  const int chunk = thread % 8, n = n0 + chunk * 8;
  const bool inside = n < width;
  if (p.residual != nullptr) {
    const T* residual = static_cast<const T*>(p.residual);
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      const int t = i * 16 + thread / 8;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (inside && token0 + t < num_rows) {
        x = __ldcg(reinterpret_cast<const uint4*>(
            residual + static_cast<int64_t>(token0 + t) * width + n));
      }
      *reinterpret_cast<uint4*>(out_chunk(out, t, chunk)) = x;
    }
    named_barrier_sync(1 + group, kGroup);
  }
#pragma unroll
  for (int j = 0; j < kTokens / 8; j += 2) {
    // Matrices: features 0..7 and 8..15 of tokens 8j.., then of tokens 8j + 8..
    char* at = out_chunk(out, j * 8 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
    uint32_t r[4] = {0, 0, 0, 0};
    if (p.residual != nullptr) ldmatrix4_trans(r, at);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float2 y = value(m % 2, j + m / 2);
      if (p.residual != nullptr) {
        const float2 x = Traits<T>::to_float2(bit_cast<typename Traits<T>::Pair>(r[m]));
        y.x += x.x, y.y += x.y;
      }
      r[m] = bit_cast<uint32_t>(Traits<T>::from_float2(y));
    }
    store_matrix4_trans(at, r);
  }
  named_barrier_sync(1 + group, kGroup);
  T* to = static_cast<T*>(p.out);
#pragma unroll
  for (int i = 0; i < kTokens / 16; ++i) {
    const int t = i * 16 + thread / 8;
    if (inside && token0 + t < num_rows) {
      *reinterpret_cast<uint4*>(to + static_cast<int64_t>(token0 + t) * width + n) =
          *reinterpret_cast<const uint4*>(out_chunk(out, t, chunk));
    }
  }
  named_barrier_sync(1 + group, kGroup);  // the tile is free again
}

// Scale and bias of a thread's rows g and g + 8 of a tile.
template <class T>
struct RowFactors {
  float scale[2], bias[2];
  __device__ __forceinline__ RowFactors(const Epilogue& p, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool inside = row + h * 8 < p.out_features;
      scale[h] = inside && p.weight_scale != nullptr ? __ldg(p.weight_scale + row + h * 8) : 1.f;
      bias[h] = inside && p.bias != nullptr
                    ? Traits<T>::to_float(static_cast<const T*>(p.bias)[row + h * 8])
                    : 0.f;
    }
  }
};

__device__ __forceinline__ float gated_value(float gate, float up) {
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

template <class T, class F, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_packed_tiles_kernel(const __grid_constant__ CUtensorMap token_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<F>;
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* stages = shared + (-shared_address(shared) & 1023);
  char* outs = stages + S::kStages * S::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(outs + 2 * kOutBytes);
  uint64_t* empty = full + kMaxStages;

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int num_tiles = p.row_blocks * p.token_blocks;
  pdl_trigger();
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&token_map);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], 2 * kGroup / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= 2 * kGroup / kWarp) {
    registers_give<40>();
    if (warp > 2 * kGroup / kWarp) return;
    const uint64_t keep = policy_evict_last();
    pdl_wait();
    int s = 0;
    uint32_t phase = 1;  // the first round waits for nothing
    for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
      const Tile tile = tile_of<kGated>(p, index);
      // This lane's slab. Behind the last one, its own rows again: they are not written.
      int slab = tile.row0 / kUnitRows + lane;
      if (kGated && lane >= 8) slab = p.up + tile.row0 / kUnitRows + lane - 8;
      const uint8_t* from =
          p.weight + static_cast<int64_t>(min(slab, p.num_slabs - 1)) * p.num_units * F::kUnitBytes;
      for (int unit = 0; unit < p.num_units; ++unit) {
        barrier_wait(&empty[s], phase);
        if (lane == 0) barrier_arrive_expect(&full[s], S::kStageLoad);
        __syncwarp();
        char* stage = stages + s * S::kStageBytes;
        if (lane < 16) {
          bulk_load(stage + 2 * kTokenBytes + lane * F::kUnitBytes,
                    from + static_cast<int64_t>(unit) * F::kUnitBytes, F::kUnitBytes, &full[s],
                    keep);
        } else if (lane < 18) {
          tensor_load_2d(stage + (lane - 16) * kTokenBytes, &token_map,
                         unit * kUnitColumns + (lane - 16) * 64, tile.token0, &full[s], keep);
        }
        if (++s == S::kStages) s = 0, phase ^= 1;
      }
    }
    return;
  }

  registers_take<232>();
  pdl_wait();
  const int group = warp / 4;
  // Slabs of a warpgroup's tiles, 16 rows each: gated, gates and their ups.
  const int slab = kGated ? group * 4 + warp % 4 : group * 8 + warp % 4;
  constexpr int kNext = kGated ? 8 : 4;  // from the first tile's slab to the second's
  int s = 0;
  uint32_t phase = 0;
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const Tile tile = tile_of<kGated>(p, index);
    float acc[2][kTokens / 2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[r][i] = 0.f;
    }
    uint32_t a[2][4][4];  // one is made while the tensor cores read the other
    PackedCodes<T, F> codes;
    const WgmmaTile tokens = wgmma_descriptor(stages);  // of the first stage
    const auto unit_of = [&](int stage) {
      return stages + stage * S::kStageBytes + 2 * kTokenBytes + slab * F::kUnitBytes;
    };
    barrier_wait(&full[s], phase);
    codes.load(unit_of(s), 0);
    int previous = -1;
    int left = p.num_units;
    do {
      const int current = s;
      if (++s == S::kStages) s = 0, phase ^= 1;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int half = q / 2, r = q % 2;
        codes.convert(a[r]);
        const WgmmaTile b = tokens.at(current * S::kStageBytes + half * kTokenBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<T, kTokens>::run(acc[r], a[r][k], b.at(k * 32), 1);
        wgmma_commit();
        if (q < 3) {
          codes.load(unit_of(current) + (q + 1) % 2 * kNext * F::kUnitBytes, (q + 1) / 2);
        } else if (left > 1) {
          barrier_wait(&full[s], phase);
          codes.load(unit_of(s), 0);
        }
        wgmma_wait<1>();
        if (q == 0 && previous >= 0 && lane == 0) barrier_arrive(&empty[previous]);
      }
      previous = current;
    } while (--left > 0);
    wgmma_wait<0>();
    wgmma_pin(acc[0]);
    wgmma_pin(acc[1]);
    if (lane == 0) barrier_arrive(&empty[previous]);

    const int width = kGated ? p.epilogue.out_features / 2 : p.epilogue.out_features;
    char* out = outs + group * kOutBytes;
    if constexpr (kGated) {
      const int n0 = tile.row0 + group * kTileRows;
      const int row = n0 + warp % 4 * 16 + lane / 4;
      const RowFactors<T> gate(p.epilogue, row), up(p.epilogue, width + row);
      write_tile<T>(p.epilogue, out, group, n0, width, tile.token0, p.num_rows,
                    [&](int i, int j) {
                      const auto pair = [&](int c) {
                        return gated_value(
                            fmaf(acc[0][4 * j + 2 * i + c], gate.scale[i], gate.bias[i]),
                            fmaf(acc[1][4 * j + 2 * i + c], up.scale[i], up.bias[i]));
                      };
                      return make_float2(pair(0), pair(1));
                    });
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n0 = tile.row0 + (group * 2 + r) * kTileRows;
        const RowFactors<T> row(p.epilogue, n0 + warp % 4 * 16 + lane / 4);
        write_tile<T>(p.epilogue, out, group, n0, width, tile.token0, p.num_rows,
                      [&](int i, int j) {
                        return make_float2(
                            fmaf(acc[r][4 * j + 2 * i], row.scale[i], row.bias[i]),
                            fmaf(acc[r][4 * j + 2 * i + 1], row.scale[i], row.bias[i]));
                      });
      }
    }
  }
#else
  wrong_architecture();
#endif
}

template <class T, class F, bool kGated>
Status run(const GemmParams& p, cudaStream_t stream) {
  CUtensorMap token_map;
  const Status status =
      encode_rows_map(&token_map, p.dtype, p.x, p.num_rows, p.in_features, kTokens);
  if (!status.ok()) return status;
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.weight = static_cast<const uint8_t*>(p.weight);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.num_slabs = static_cast<int>(packed_tiles(p.out_features));
  kp.up = static_cast<int>(p.out_features / 2 / kUnitRows);
  kp.row_blocks = static_cast<int>(ceil_div(p.out_features, kBlockRows));
  kp.token_blocks = static_cast<int>(ceil_div(p.num_rows, kTokens));
  LaunchConfig config;
  config.grid =
      dim3(static_cast<unsigned>(std::min(num_multiprocessors(), kp.row_blocks * kp.token_blocks)));
  config.block = dim3(kThreads);
  config.shared_bytes = Shape<F>::kSharedBytes;
  config.stream = stream;
  config.pdl = p.dependent_launch;
  return launch(gemm_packed_tiles_kernel<T, F, kGated>, config, "gemm_packed_tiles", token_map, kp);
}

template <class T, class F>
Status run_gated(const GemmParams& p, cudaStream_t stream) {
  return p.gated ? run<T, F, true>(p, stream) : run<T, F, false>(p, stream);
}

template <class T>
Status run_format(const GemmParams& p, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kTokenSize == 1) {
      return Status::error("gemm_packed_tiles_sm90: codes");
    } else {
      return run_gated<T, F>(p, stream);
    }
  });
}

}  // namespace

const char* gemm_packed_tiles_sm90_refuses(const GemmParams& p) {
  if (const char* reason = packed_refuses(p)) return reason;
  if (p.operands == GemmOperands::kW4A8) return "activations must have 16 bits";
  if (p.out_dtype != p.dtype) return "out_dtype must be dtype";
  if (p.sumsq != nullptr || p.sumsq_out != nullptr) return "sums of squares";
  if (p.gated && p.out_features % (2 * kUnitRows) != 0) {
    return "out_features must be a multiple of 32 when gated";
  }
  if (!make_epilogue(p).vector_out) {
    return "rows of out and residual must be aligned to 16 bytes";
  }
  return nullptr;
}

Status gemm_packed_tiles_sm90(const GemmParams& p, CUstream_st* stream) {
  if (const char* reason = gemm_packed_tiles_sm90_refuses(p)) {
    return Status::error(std::string("gemm_packed_tiles_sm90: ") + reason);
  }
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_format<__nv_bfloat16>(p, stream)
                                     : run_format<__half>(p, stream);
}

}  // namespace regatta::cuda
