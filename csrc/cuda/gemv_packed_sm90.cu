// y = epilogue(x w^T) of 1 .. 8 rows with weights of 8 or 4 bits, activations of 16.
//
// Input: x [M, K] bf16 or fp16; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90.
// Algorithm
//   1. One block per multiprocessor owns neighbouring slabs of 16 rows of weight (gated: slabs of
//      gates and their ups) and takes a few at a time over all of k. One warp keeps a ring of
//      contiguous copies full, about half of shared memory, so that the next launch's block fits
//      beside it and has its first 100 KB of weights when this launch ends.
//   2. A stage is 128 columns for each of the other warps. A warp reads a lane's codes 16 bytes at
//      a time, turns them into the left operand of mma m16n8k16 (exactly: bit operations and one
//      subtraction per pair), and multiplies; x is the right operand, absent rows are zero. With 4
//      bits the scale is applied to the sums of a group, in float.
//   3. The warps' sums meet in shared memory, where one more warp adds them in their order and
//      finishes them, while the others are at the next slabs.
// Source: own; Marlin showed that the tensor cores are the place for few rows, too.
//
// Bound: memory: 1.50 ms with 8 bits and 0.80 ms with 4 for the 128 layer products of a Llama-3-8B
// decode step at 4.66 TB/s.
#include <algorithm>
#include <type_traits>

#include "gemm_epilogue.cuh"
#include "hopper.cuh"
#include "packed_weight.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kMaxStages = 16;
constexpr int kHeadBytes = 512;

struct KernelParams {
  Epilogue epilogue;
  const uint8_t* weight;
  const void* x;
  int num_rows, in_features;
  int num_units, num_items;  // units along k; slabs, or pairs of them
  int second;                // from a gate's slab to its up's
  int stages;
};

// kBits and kGroupSize of the codes; kSlabs at once.
template <int kBits, int kGroupSize, int kTokens, int kSlabs, int kWarps>
struct Shape {
  static constexpr int kUnitBytes = unit_bytes(kBits, kGroupSize);
  static constexpr int kPitch = kWarps * kUnitColumns * 2 + 16;  // of a row of x; no conflicts
  static constexpr int kWeightBytes = kSlabs * kWarps * kUnitBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kPitch;
  static constexpr int kRowStride = kSlabs * kUnitRows + 4;  // floats of a token's partial sums
  static constexpr int kPartialFloats = kWarps * kTokens * kRowStride;
  static constexpr int kFixedBytes = kHeadBytes + 2 * kPartialFloats * 4;
  static int shared_bytes(int stages) { return kFixedBytes + stages * kStageBytes; }
};

// What one output takes beside its sum: asked for ahead of it.
template <class T>
struct Output {
  float scale = 1.f, up_scale = 1.f, bias = 0.f, up_bias = 0.f, residual = 0.f;
  bool inside;

  template <bool kGated>
  __device__ __forceinline__ void request(const Epilogue& p, int64_t t, int n, int width) {
    if (!inside) return;
    if (p.weight_scale != nullptr) {
      scale = p.weight_scale[n];
      if (kGated) up_scale = p.weight_scale[width + n];
    }
    if (p.bias != nullptr) {
      const T* from = static_cast<const T*>(p.bias) + n;
      bias = Traits<T>::to_float(*from);
      if (kGated) up_bias = Traits<T>::to_float(from[width]);
    }
    if (p.residual != nullptr) {
      residual = Traits<T>::to_float(__ldcg(static_cast<const T*>(p.residual) + t * width + n));
    }
  }

  // Returns the square of what it wrote.
  template <bool kGated>
  __device__ __forceinline__ float write(const Epilogue& p, float sum, float up, int64_t at) const {
    if (!inside) return 0.f;
    float y = fmaf(sum, scale, bias);
    if (kGated) y = y / (1.f + __expf(-y)) * fmaf(up, up_scale, up_bias);
    y += residual;
    if (p.float_out) {
      static_cast<float*>(p.out)[at] = y;
    } else {
      const T rounded = Traits<T>::from_float(y);
      static_cast<T*>(p.out)[at] = rounded;
      y = Traits<T>::to_float(rounded);
    }
    return y * y;
  }
};

template <class T, int kBits, int kGroupSize, int kTokens, int kSlabs, int kWarps, bool kGated>
__global__ void __launch_bounds__((kWarps + 2) * kWarp, kWarps == 8 ? 2 : 1)
    gemv_packed_kernel(const __grid_constant__ KernelParams p) {
#ifdef REGATTA_SM90
  using S = Shape<kBits, kGroupSize, kTokens, kSlabs, kWarps>;
  constexpr int kItems = kGated ? kSlabs / 2 : kSlabs;
  extern __shared__ __align__(128) char shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + kMaxStages;
  char* zeros = reinterpret_cast<char*>(empty + kMaxStages);           // 16 bytes
  float* row_scale = reinterpret_cast<float*>(zeros + 16);             // [kTokens]
  uint64_t* sums_full = reinterpret_cast<uint64_t*>(row_scale + 8);    // [2]
  uint64_t* sums_empty = sums_full + 2;                                // [2]
  float* partial = reinterpret_cast<float*>(shared + kHeadBytes);      // [2][kPartialFloats]
  char* stages = shared + S::kFixedBytes;

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int item0 = static_cast<int>(static_cast<int64_t>(p.num_items) * blockIdx.x / gridDim.x);
  const int items =
      static_cast<int>(static_cast<int64_t>(p.num_items) * (blockIdx.x + 1) / gridDim.x) - item0;
  const int passes = (items + kItems - 1) / kItems;
  const int steps = (p.num_units + kWarps - 1) / kWarps;

  pdl_trigger();
  if (threadIdx.x == kWarps * kWarp) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&sums_full[i], kWarps);
      barrier_init(&sums_empty[i], 1);
    }
    barrier_init_fence();
  }
  if (threadIdx.x == 0) *reinterpret_cast<uint4*>(zeros) = make_uint4(0, 0, 0, 0);
  __syncthreads();

  if (warp == kWarps) {
    const uint64_t once = policy_evict_first();
    const uint64_t keep = policy_evict_last();
    const auto units_of = [&](int step) { return min(kWarps, p.num_units - step * kWarps); };
    const auto load_weight = [&](int pass, int step, int s) {
      const int count = min(kItems, items - pass * kItems);
      const int units = units_of(step);
      const int columns = min(units * kUnitColumns, p.in_features - step * kWarps * kUnitColumns);
      const uint32_t bytes = units * S::kUnitBytes;
      if (lane == 0) {
        barrier_arrive_expect(&full[s],
                              count * (kGated ? 2 : 1) * bytes + p.num_rows * columns * 2);
      }
      __syncwarp();
      if (lane < kSlabs && lane % kItems < count) {
        const int64_t slab = item0 + pass * kItems + lane % kItems + lane / kItems * p.second;
        bulk_load(stages + s * S::kStageBytes + lane * kWarps * S::kUnitBytes,
                  p.weight + (slab * p.num_units + step * kWarps) * S::kUnitBytes, bytes, &full[s],
                  once);
      }
    };
    const auto load_tokens = [&](int step, int s) {
      const int column = step * kWarps * kUnitColumns;
      const int columns = min(units_of(step) * kUnitColumns, p.in_features - column);
      if (lane < p.num_rows) {
        bulk_load(stages + s * S::kStageBytes + S::kWeightBytes + lane * S::kPitch,
                  static_cast<const T*>(p.x) + static_cast<int64_t>(lane) * p.in_features + column,
                  columns * 2, &full[s], keep);
      }
    };
    const int total = passes * steps;
    const int ahead = min(p.stages, total);
    for (int i = 0; i < ahead; ++i) load_weight(i / steps, i % steps, i);
    pdl_wait();
    for (int i = 0; i < ahead; ++i) load_tokens(i % steps, i);
    int s = 0, pass = ahead / steps, step = ahead % steps;
    uint32_t phase = 0;
    for (int i = ahead; i < total; ++i) {
      barrier_wait(&empty[s], phase);
      load_weight(pass, step, s);
      load_tokens(step, s);
      if (++s == p.stages) s = 0, phase ^= 1;
      if (++step == steps) step = 0, ++pass;
    }
    return;
  }
  if (warp == kWarps + 1) {
    pdl_wait();
    warp_row_scales(p.epilogue, 0, p.num_rows, row_scale);
    __syncwarp();
    constexpr int kRows = kItems * kUnitRows;
    constexpr int kPerLane = (kTokens * kRows + kWarp - 1) / kWarp;  // outputs
    const int width = kGated ? p.epilogue.out_features / 2 : p.epilogue.out_features;
    for (int pass = 0; pass < passes; ++pass) {
      const int n0 = (item0 + pass * kItems) * kUnitRows;
      const int rows = min(min(kItems, items - pass * kItems) * kUnitRows, width - n0);
      Output<T> outputs[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int t = (i * kWarp + lane) / kRows, row = (i * kWarp + lane) % kRows;
        outputs[i].inside = t < p.num_rows && row < rows;
        outputs[i].template request<kGated>(p.epilogue, t, n0 + row, width);
      }
      const int buffer = pass % 2;
      barrier_wait(&sums_full[buffer], pass / 2 % 2);
      const float* from = partial + buffer * S::kPartialFloats;
      float sum[kPerLane], up[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int t = min((i * kWarp + lane) / kRows, kTokens - 1);
        const float* at = from + t * S::kRowStride + (i * kWarp + lane) % kRows;
        sum[i] = 0.f, up[i] = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          sum[i] += at[w * kTokens * S::kRowStride];
          if (kGated) up[i] += at[w * kTokens * S::kRowStride + kRows];
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&sums_empty[buffer]);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int t = (i * kWarp + lane) / kRows, row = (i * kWarp + lane) % kRows;
        const float scale = row_scale[min(t, kTokens - 1)];
        float square = outputs[i].template write<kGated>(p.epilogue, sum[i] * scale, up[i] * scale,
                                                         static_cast<int64_t>(t) * width + n0 + row);
        if (!kGated && p.epilogue.sumsq_out != nullptr) {
          for (int o = kUnitRows / 2; o > 0; o /= 2) square += __shfl_xor_sync(~0u, square, o);
          const int parts = (width + kUnitRows - 1) / kUnitRows;
          if (row % kUnitRows == 0 && outputs[i].inside) {
            p.epilogue.sumsq_out[static_cast<int64_t>(t) * parts + (n0 + row) / kUnitRows] = square;
          }
        }
      }
    }
    return;
  }

  const int g = lane / 4;
  const int q = lane % 4;
  int s = 0;
  uint32_t phase = 0;
  for (int pass = 0; pass < passes; ++pass) {
    float acc[kSlabs][4] = {};
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&full[s], phase);
      const char* stage = stages + s * S::kStageBytes;
      const int unit = step * kWarps + warp;
      if (unit < p.num_units) {
        uint32_t b[kUnitColumns / 16][2];
        const int token = lane % 8;
        const char* row = stage + S::kWeightBytes + token * S::kPitch +
                          (warp * kUnitColumns + lane / 8 * 8) * 2;
        const int left = p.in_features - unit * kUnitColumns - lane / 8 * 8;
#pragma unroll
        for (int i = 0; i < kUnitColumns / 32; ++i) {
          uint32_t r[4];
          ldmatrix4(r, token < p.num_rows && i * 32 < left ? row + i * 64 : zeros);
          b[2 * i][0] = r[0], b[2 * i][1] = r[1], b[2 * i + 1][0] = r[2], b[2 * i + 1][1] = r[3];
        }
        const char* at = stage + warp * S::kUnitBytes;  // slab by slab, kWarps units apart
        if constexpr (kBits == 8) {
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            uint4 w[kSlabs];
#pragma unroll
            for (int j = 0; j < kSlabs; ++j) {
              w[j] = reinterpret_cast<const uint4*>(at + j * kWarps * S::kUnitBytes)[h * kWarp +
                                                                                       lane];
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
              for (int j = 0; j < kSlabs; ++j) {
                uint32_t a[4];
                operands_of_int8<T>(e ? w[j].z : w[j].x, e ? w[j].w : w[j].y, a);
                mma_m16n8k16<T>(acc[j], a, b[2 * h + e][0], b[2 * h + e][1]);
              }
            }
          }
        } else {
          float part[kSlabs][4] = {};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t w[kSlabs][4];
            uint2 words[kSlabs];
#pragma unroll
            for (int j = 0; j < kSlabs; ++j) {
              const char* from = at + j * kWarps * S::kUnitBytes;
              const uint4 quad = reinterpret_cast<const uint4*>(from)[h * kWarp + lane];
              w[j][0] = quad.x, w[j][1] = quad.y, w[j][2] = quad.z, w[j][3] = quad.w;
              words[j] = reinterpret_cast<const uint2*>(
                  from + 1024)[(kGroupSize == 64 ? h * 8 : 0) + g];
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
              for (int j = 0; j < kSlabs; ++j) {
                const uint32_t zero[2] = {__byte_perm(words[j].x, 0, 0x3232),
                                          __byte_perm(words[j].y, 0, 0x3232)};
                uint32_t a[4];
                operands_of_int4<T>(w[j][e], zero, a);
                mma_m16n8k16<T>(part[j], a, b[4 * h + e][0], b[4 * h + e][1]);
              }
            }
            if (kGroupSize == 64 || h == 1) {
#pragma unroll
              for (int j = 0; j < kSlabs; ++j) {
                const float low = low_value<T>(words[j].x), high = low_value<T>(words[j].y);
                acc[j][0] = fmaf(low, part[j][0], acc[j][0]);
                acc[j][1] = fmaf(low, part[j][1], acc[j][1]);
                acc[j][2] = fmaf(high, part[j][2], acc[j][2]);
                acc[j][3] = fmaf(high, part[j][3], acc[j][3]);
#pragma unroll
                for (int i = 0; i < 4; ++i) part[j][i] = 0.f;
              }
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[s]);
      if (++s == p.stages) s = 0, phase ^= 1;
    }

    const int buffer = pass % 2;
    if (pass >= 2) barrier_wait(&sums_empty[buffer], pass / 2 % 2 ^ 1);
    float* to = partial + buffer * S::kPartialFloats + (warp * kTokens + 2 * q) * S::kRowStride + g;
#pragma unroll
    for (int j = 0; j < kSlabs; ++j) {
      if (2 * q < kTokens) {
        to[j * kUnitRows] = acc[j][0];
        to[j * kUnitRows + 8] = acc[j][2];
      }
      if (2 * q + 1 < kTokens) {
        to[S::kRowStride + j * kUnitRows] = acc[j][1];
        to[S::kRowStride + j * kUnitRows + 8] = acc[j][3];
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&sums_full[buffer]);
  }
#else
  wrong_architecture();
#endif
}

template <class T, int kBits, int kGroupSize, int kTokens, int kSlabs, int kWarps, bool kGated>
Status run(const GemmParams& p, int kilobytes, cudaStream_t stream) {
  using S = Shape<kBits, kGroupSize, kTokens, kSlabs, kWarps>;
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.weight = static_cast<const uint8_t*>(p.weight);
  kp.x = p.x;
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.in_features = static_cast<int>(p.in_features);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.num_items = static_cast<int>(packed_tiles(kGated ? p.out_features / 2 : p.out_features));
  kp.second = kp.num_items;
  kp.stages = std::max(
      2, std::min(kMaxStages, (kilobytes * 1024 - S::kFixedBytes) / S::kStageBytes));
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min(multiprocessors, kp.num_items)));
  config.block = dim3((kWarps + 2) * kWarp);
  config.shared_bytes = S::shared_bytes(kp.stages);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  return launch(gemv_packed_kernel<T, kBits, kGroupSize, kTokens, kSlabs, kWarps, kGated>, config,
                "gemv_packed", kp);
}

template <class T, int kBits, int kGroupSize, int kTokens, int kSlabs, int kWarps>
Status run_gated(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  if constexpr (kSlabs % 2 == 0) {
    if (p.gated) {
      return run<T, kBits, kGroupSize, kTokens, kSlabs, kWarps, true>(p, tile.kilobytes, stream);
    }
  }
  return run<T, kBits, kGroupSize, kTokens, kSlabs, kWarps, false>(p, tile.kilobytes, stream);
}

template <class T, int kBits, int kGroupSize, int kTokens>
Status run_slabs(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  if (tile.warps == 16 && kTokens < 8) {
    return tile.slabs == 1 && !p.gated
               ? run_gated<T, kBits, kGroupSize, kTokens, 1, 16>(p, tile, stream)
               : run_gated<T, kBits, kGroupSize, kTokens, 2, 16>(p, tile, stream);
  }
  switch (p.gated && tile.slabs % 2 != 0 ? tile.slabs + 1 : tile.slabs) {
    case 1:
      return run_gated<T, kBits, kGroupSize, kTokens, 1, 8>(p, tile, stream);
    case 2:
      return run_gated<T, kBits, kGroupSize, kTokens, 2, 8>(p, tile, stream);
    case 3:
      return run_gated<T, kBits, kGroupSize, kTokens, 3, 8>(p, tile, stream);
    default:
      return run_gated<T, kBits, kGroupSize, kTokens, 4, 8>(p, tile, stream);
  }
}

template <class T, int kBits, int kGroupSize>
Status run_tokens(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  if (p.num_rows == 1) return run_slabs<T, kBits, kGroupSize, 1>(p, tile, stream);
  if (p.num_rows == 2) return run_slabs<T, kBits, kGroupSize, 2>(p, tile, stream);
  if (p.num_rows <= 4) return run_slabs<T, kBits, kGroupSize, 4>(p, tile, stream);
  return run_slabs<T, kBits, kGroupSize, 8>(p, tile, stream);
}

template <class T>
Status run_format(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  if (p.operands == GemmOperands::kWeightInt8) return run_tokens<T, 8, 128>(p, tile, stream);
  return p.group_size == 64 ? run_tokens<T, 4, 64>(p, tile, stream)
                            : run_tokens<T, 4, 128>(p, tile, stream);
}

GemvTile choose_tile(const GemmParams&) { return {}; }

}  // namespace

const char* gemv_packed_sm90_refuses(const GemmParams& p) {
  if (p.num_rows > 8) return "more than 8 rows";
  if (p.gated && p.out_features % (2 * kUnitRows) != 0) {
    return "out_features must be a multiple of 32 when gated";
  }
  return packed_refuses(p);
}

Status gemv_packed_sm90(const GemmParams& p, const GemvTile& tile, CUstream_st* stream) {
  if (const char* reason = gemv_packed_sm90_refuses(p)) {
    return Status::error(std::string("gemv_packed_sm90: ") + reason);
  }
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_format<__nv_bfloat16>(p, tile, stream)
                                     : run_format<__half>(p, tile, stream);
}

Status gemv_packed_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemv_packed_sm90(p, choose_tile(p), stream);
}

}  // namespace regatta::cuda
