// y = epilogue(x w^T) of many rows with weights of 8 or 4 bits, activations of 16.
//
// Input: x [M, K] bf16 or fp16; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90a.
// Algorithm
//   1. A block stays and takes tiles of 128, 192 or 256 rows of weight (gated: 128 gates and their ups)
//      by 128 or 64 tokens, of the shape whose waves cost least (choose_packed_tiles), tokens first, so
//      that blocks at work at a time share what they read in L2. What the last wave of large tiles
//      leaves idle for the most part is cut in halves, of one warpgroup each.
//   2. One warp fills a ring of stages of 128 columns, with weights before it waits for x. Two or three
//      warpgroups own 64 or 128 rows each: a half of a stage of one 64-row tile is turned into the
//      left operand of wgmma in registers while the tensor cores multiply the one ahead.
//   3. Outputs pass through shared memory, a swizzled tile of 64 features per warpgroup, transposed
//      by stmatrix, so that rows are read and written 16 bytes at a time.
// Source: own; CUTLASS's mixed-input products and Machete have the same main loop.
//
// Bound: the tensor cores.
// Measured on an H200 (bench_packed large, ms of all products of 32 layers with 8 bits, 4 bits, dense;
// clocks differ by some 3 % within a run):
//   M 192  5.5   5.4   5.7    M   512   9.8   9.7   9.9    M 1,024  18.8  18.5  18.5
//   M 256  6.0   5.8   5.9    M   768  15.0  14.7  14.1    M 2,048  40.6  36.0  36.6
//   M 384  8.7   8.5   9.5
// Did not help: x by multicast to two blocks (it did while the copying warp asked for each slab by itself,
// 18 copies a stage), k shared out among blocks (stream-K), gated tiles of 64 tokens (0.95 us a unit
// where 128 tokens take 1.31).
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

constexpr int kTileRows = 64;   // rows of weight of an instruction
constexpr int kGroup = 128;     // threads of a warpgroup
constexpr int kMaxStages = 8;
constexpr int kHeadBytes = 256;
constexpr int kOrder = 1024;  // tokens that are worked on together

// A block's tile of kRows rows of weight and kTokens tokens.
template <class F, int kRows, int kTokens>
struct Shape {
  static constexpr int kTokenBytes = kTokens * 128;  // of 64 columns
  static constexpr int kOutBytes = kTokens * 128;    // 64 features of each token, of a warpgroup
  static constexpr int kGroups = kRows == 192 ? 3 : 2;  // warpgroups that multiply
  static constexpr int kTiles = kRows / (kGroups * kTileRows);  // of each
  static constexpr int kSlabs = kRows / kUnitRows;
  static constexpr int kThreads = (kGroups + 1) * kGroup;
  static constexpr int kRegisters = kGroups == 3 ? 152 : 232;  // of a thread that multiplies
  static constexpr int kStageBytes =
      (2 * kTokenBytes + kSlabs * F::kUnitBytes + 1023) / 1024 * 1024;
  static constexpr int kStages =
      std::min(kMaxStages, (226 * 1024 - kHeadBytes - kGroups * kOutBytes) / kStageBytes);
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + kGroups * kOutBytes + kHeadBytes;
};

struct KernelParams {
  Epilogue epilogue;
  int num_rows, num_units;  // units along k
  int row_blocks, token_blocks;
  int num_whole, num_items;  // tiles; behind the whole ones, halves
};

struct Tile {
  int token0, row0;  // row0: of the output
  bool half;         // of its rows: the first warpgroup's
};

template <int kOutRows, int kTokens>
__device__ __forceinline__ Tile tile_of(const KernelParams& p, int item) {
  constexpr int kTogether = kOrder / kTokens;
  const bool half = item >= p.num_whole;
  const int index = half ? p.num_whole + (item - p.num_whole) / 2 : item;
  const int first = index / (kTogether * p.row_blocks) * kTogether;
  const int order = min(kTogether, p.token_blocks - first);
  const int within = index - first * p.row_blocks;
  const int token0 = (first + within % order) * kTokens, row_block = within / order;
  const int second = half ? (item - p.num_whole) % 2 : 0;
  return {token0, row_block * kOutRows + second * (kOutRows / 2), half};
}

// 16 bytes `chunk` of token t in an output tile.
__device__ __forceinline__ char* out_chunk(char* out, int t, int chunk) {
  return out + t * 128 + ((chunk ^ (t & 7)) << 4);
}

// Writes 64 features by kTokens tokens from feature n0 on; value(i, j) is the pair of tokens that
// register pair i (0: row g, 1: row g + 8) of tokens 8 j holds.
template <class T, int kTokens, class Value>
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

template <class T, class F, int kRows, int kTokens, bool kGated>
__global__ void __launch_bounds__(Shape<F, kRows, kTokens>::kThreads, 1)
    gemm_packed_tiles_kernel(const __grid_constant__ CUtensorMap token_map,
                             const __grid_constant__ CUtensorMap whole_map,
                             const __grid_constant__ CUtensorMap half_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<F, kRows, kTokens>;
  constexpr int kTokenBytes = S::kTokenBytes;
  constexpr int kOutRows = kGated ? kRows / 2 : kRows;
  constexpr int kMultiply = S::kGroups * kGroup;  // threads
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* stages = shared + (-shared_address(shared) & 1023);
  char* outs = stages + S::kStages * S::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(outs + S::kGroups * S::kOutBytes);
  uint64_t* empty = full + kMaxStages;

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const auto tile_at = [&](int item) { return tile_of<kOutRows, kTokens>(p, item); };
  pdl_trigger();
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&token_map);
    tensor_map_prefetch(&whole_map);
    tensor_map_prefetch(&half_map);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kMultiply / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= kMultiply / kWarp) {
    registers_give<40>();
    if (warp > kMultiply / kWarp) return;
    const uint64_t keep = policy_evict_last();
    const auto load_weight = [&](const Tile& tile, int unit, int stage) {
      if (lane > 0) return;
      const int slabs = tile.half ? S::kSlabs / 2 : S::kSlabs;
      barrier_arrive_expect(&full[stage], 2 * kTokenBytes + slabs * F::kUnitBytes);
      tensor_load_4d(stages + stage * S::kStageBytes + 2 * kTokenBytes,
                     tile.half ? &half_map : &whole_map, 0, unit * 2, tile.row0 / kUnitRows, 0,
                     &full[stage], keep);
    };
    const auto load_tokens = [&](const Tile& tile, int unit, int stage) {
      if (lane > 0) return;
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        tensor_load_2d(stages + stage * S::kStageBytes + box * kTokenBytes, &token_map,
                       unit * kUnitColumns + box * 64, tile.token0, &full[stage], keep);
      }
    };
    // Weights of the first stages are on their way before x is there.
    const int ahead = min(S::kStages, p.num_units);
    for (int i = 0; i < ahead; ++i) load_weight(tile_at(blockIdx.x), i, i);
    pdl_wait();
    int s = 0, loaded = ahead;
    uint32_t phase = 1;  // the first round waits for nothing
    for (int item = blockIdx.x; item < p.num_items; item += gridDim.x) {
      const Tile tile = tile_at(item);
      for (int unit = 0; unit < p.num_units; ++unit) {
        barrier_wait(&empty[s], phase);
        if (--loaded < 0) load_weight(tile, unit, s);
        load_tokens(tile, unit, s);
        if (++s == S::kStages) s = 0, phase ^= 1;
      }
    }
    return;
  }

  registers_take<S::kRegisters>();
  pdl_wait();
  const int group = warp / 4;
  // This warp's slab of a warpgroup's tiles: gated, of gates and, behind all gates, of their ups.
  const int slab = group * (kGated ? 4 : 4 * S::kTiles) + warp % 4;
  int s = 0;
  uint32_t phase = 0;
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(&empty[stage]);
  };
  int item = blockIdx.x;
  const int end_item = S::kTiles > 1 && group > 0 ? p.num_whole : p.num_items;
  for (; item < end_item; item += gridDim.x) {
    const Tile tile = tile_at(item);
    float acc[S::kTiles][kTokens / 2];
#pragma unroll
    for (int r = 0; r < S::kTiles; ++r) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[r][i] = 0.f;
    }
    uint32_t a[2][4][4];  // one is made while the tensor cores read the other
    PackedCodes<T, F> codes;
    const WgmmaTile tokens = wgmma_descriptor(stages);  // of the first stage
    // From the first tile's slab to the second's.
    const int next = kGated && !tile.half ? S::kSlabs / 2 : 4;
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
      for (int q = 0; q < 2 * S::kTiles; ++q) {
        const int half = q / S::kTiles, r = q % S::kTiles;
        codes.convert(a[q % 2]);
        const WgmmaTile b = tokens.at(current * S::kStageBytes + half * kTokenBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<T, kTokens>::run(acc[r], a[q % 2][k], b.at(k * 32), 1);
        wgmma_commit();
        if (q + 1 < 2 * S::kTiles) {
          codes.load(unit_of(current) + (q + 1) % S::kTiles * next * F::kUnitBytes,
                     (q + 1) / S::kTiles);
        } else if (left > 1) {
          barrier_wait(&full[s], phase);
          codes.load(unit_of(s), 0);
        }
        wgmma_wait<1>();
        if (q == 0 && previous >= 0) release(previous);
      }
      previous = current;
    } while (--left > 0);
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < S::kTiles; ++r) wgmma_pin(acc[r]);
    release(previous);

    const int width = kGated ? p.epilogue.out_features / 2 : p.epilogue.out_features;
    char* out = outs + group * S::kOutBytes;
    if constexpr (kGated) {
      const int n0 = tile.row0 + group * kTileRows;
      const int row = n0 + warp % 4 * 16 + lane / 4;
      const RowFactors<T> gate(p.epilogue, row), up(p.epilogue, width + row);
      write_tile<T, kTokens>(p.epilogue, out, group, n0, width, tile.token0, p.num_rows,
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
      for (int r = 0; r < S::kTiles; ++r) {
        const int n0 = tile.row0 + (group * S::kTiles + r) * kTileRows;
        const RowFactors<T> row(p.epilogue, n0 + warp % 4 * 16 + lane / 4);
        write_tile<T, kTokens>(p.epilogue, out, group, n0, width, tile.token0, p.num_rows,
                               [&](int i, int j) {
                                 return make_float2(
                                     fmaf(acc[r][4 * j + 2 * i], row.scale[i], row.bias[i]),
                                     fmaf(acc[r][4 * j + 2 * i + 1], row.scale[i], row.bias[i]));
                               });
      }
    }
  }
  // Halves are the first warpgroup's alone. Not in the loop above: with ways around its products the
  // compiler makes each of them wait for the one ahead.
  for (; item < p.num_items; item += gridDim.x) {
    for (int unit = 0; unit < p.num_units; ++unit) {
      barrier_wait(&full[s], phase);
      release(s);
      if (++s == S::kStages) s = 0, phase ^= 1;
    }
  }
#else
  wrong_architecture();
#endif
}

template <class T, class F, int kRows, int kTokens, bool kGated>
Status run(const GemmParams& p, cudaStream_t stream) {
  using S = Shape<F, kRows, kTokens>;
  CUtensorMap token_map, whole_map, half_map;
  constexpr int kSlabs = S::kSlabs / (kGated ? 2 : 1);
  Status status = encode_rows_map(&token_map, p.dtype, p.x, p.num_rows, p.in_features, kTokens);
  if (status.ok()) status = encode_packed_map(&whole_map, p, F::kUnitBytes, kSlabs);
  if (status.ok()) status = encode_packed_map(&half_map, p, F::kUnitBytes, kSlabs / 2);
  if (!status.ok()) return status;
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.row_blocks = static_cast<int>(ceil_div(p.out_features, kRows));
  kp.token_blocks = static_cast<int>(ceil_div(p.num_rows, kTokens));
  const int tiles = kp.row_blocks * kp.token_blocks, blocks = num_multiprocessors();
  const int rest = tiles % blocks;
  kp.num_whole = S::kTiles > 1 && rest * 2 <= blocks ? tiles - rest : tiles;
  kp.num_items = 2 * tiles - kp.num_whole;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min(blocks, kp.num_items)));
  config.block = dim3(S::kThreads);
  config.shared_bytes = S::kSharedBytes;
  config.stream = stream;
  config.pdl = p.dependent_launch;
  return launch(gemm_packed_tiles_kernel<T, F, kRows, kTokens, kGated>, config, "gemm_packed_tiles",
                token_map, whole_map, half_map, kp);
}

template <class T, class F>
Status run_shape(const GemmParams& p, const PackedTiles& shape, cudaStream_t stream) {
  if (p.gated) return run<T, F, 256, 128, true>(p, stream);
  return shape.tokens == 64 ? run<T, F, 128, 64, false>(p, stream)
         : shape.rows == 128 ? run<T, F, 128, 128, false>(p, stream)
         : shape.rows == 192 ? run<T, F, 192, 128, false>(p, stream)
                             : run<T, F, 256, 128, false>(p, stream);
}

template <class T>
Status run_format(const GemmParams& p, const PackedTiles& shape, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kTokenSize == 1) {
      return Status::error("gemm_packed_tiles_sm90: codes");
    } else {
      return run_shape<T, F>(p, shape, stream);
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

PackedTiles choose_packed_tiles(const GemmParams& p) {
  // Microseconds, as measured on an H200.
  constexpr struct {
    int rows, tokens;
    double unit, whole;  // of a unit of a tile, and beside, of a tile
  } kShapes[] = {{256, 128, 1.31, 2.}, {192, 128, 1., 1.5}, {128, 128, .65, 2.}, {128, 64, .51, 2.}};
  constexpr double kHalf = .53;  // of a unit's time, half a tile
  const int64_t units = packed_units(p.in_features), blocks = num_multiprocessors();
  PackedTiles best;
  for (const auto& shape : kShapes) {
    if (p.gated && shape.rows != 256) continue;
    const int64_t tiles =
        ceil_div(p.out_features, shape.rows) * ceil_div(p.num_rows, shape.tokens);
    const int64_t rest = tiles % blocks;
    const double columns = units * shape.unit;
    double cost = 2. + tiles / blocks * (columns + shape.whole);
    if (rest > 0) {
      cost += columns * (shape.rows == 256 && rest * 2 <= blocks ? kHalf : 1.) + shape.whole;
    }
    if (best.rows == 0 || cost < best.cost) best = {shape.rows, shape.tokens, cost};
  }
  return best;
}

Status gemm_packed_tiles_sm90(const GemmParams& p, const PackedTiles& shape, CUstream_st* stream) {
  if (const char* reason = gemm_packed_tiles_sm90_refuses(p)) {
    return Status::error(std::string("gemm_packed_tiles_sm90: ") + reason);
  }
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_format<__nv_bfloat16>(p, shape, stream)
                                     : run_format<__half>(p, shape, stream);
}

Status gemm_packed_tiles_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemm_packed_tiles_sm90(p, choose_packed_tiles(p), stream);
}

}  // namespace regatta::cuda
