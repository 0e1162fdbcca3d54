// y = epilogue(x w^T) of 1 .. 16 rows with weights of 8 or 4 bits, activations of 16, or of 4 bits,
// activations of 8.
//
// Input: x [M, K] bf16 or fp16, or int8; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90.
// Algorithm
//   1. One block per multiprocessor owns neighbouring slabs of 16 rows of weight (gated: slabs of
//      gates and their ups) and takes a few at a time over all of k. One warp keeps a ring of
//      contiguous copies full, about half of shared memory, so that the next launch's block fits
//      beside it and has its first 100 KB of weights when this launch ends.
//   2. A stage is 128 columns for each of the other warps. A warp reads a lane's codes 16 bytes at
//      a time, turns them into the left operand of mma m16n8k16 (exactly: bit operations and one
//      subtraction per pair), and multiplies; x is the right operand, absent rows are zero. With 4
//      bits the scale is applied to the sums of a group, in float; of more than 8 rows to the codes.
//      Codes of x: mma m16n8k32, whose integer sums of a group are scaled into floats.
//   3. The warps' sums meet in shared memory, where one more warp adds them in their order and
//      finishes them, while the others are at the next slabs.
//   4. Of more than 8 rows x is most of what is read: two blocks share its copies.
// Source: own; Marlin showed that the tensor cores are the place for few rows, too.
//
// Bound: memory: 1.50 ms with 8 bits and 0.80 ms with 4 for the 128 layer products of a Llama-3-8B
// decode step at 4.66 TB/s.
// Measured on an H200 (bench_packed chain, dense beside it 3.39 ms at M 1 and 3.60 at M 8): 8 bits
// 1.89 ms at M 1, 2.17 at 4, 2.26 at 8; 4 bits 1.34, 1.50, 1.94; M 16 by the sum of its products 2.6
// both. Did not help: 16 warps of half a unit each (56 registers; 2.0 and 1.45 ms at M 1), clusters of
// four (they do not fill the device), one block of 220 KB.
#include <algorithm>
#include <type_traits>

#include "gemm_epilogue.cuh"
#include "hopper.cuh"
#include "packed_weight.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kMaxStages = 16;
constexpr int kHeadBytes = 1024;

struct KernelParams {
  Epilogue epilogue;
  const uint8_t* weight;
  const void* x;
  int num_rows, in_features;
  int num_units, num_items;  // units along k; slabs, or pairs of them
  int second;                // from a gate's slab to its up's
  int stages, cluster;
};

// kSlabs are multiplied at once; their sums are handed over in rounds of kRoundSlabs.
template <class F, int kTokens, int kSlabs, bool kGated>
struct Shape {
  static constexpr int kWarps = 8;  // that multiply
  static constexpr int kItems = kGated ? kSlabs / 2 : kSlabs;
  static constexpr int kRoundSlabs = kSlabs % 2 == 0 ? 2 : 1;
  static constexpr int kRounds = kSlabs / kRoundSlabs;
  static constexpr int kRoundItems = kGated ? 1 : kRoundSlabs;
  static constexpr int kRows = kRoundItems * kUnitRows;  // of the output
  // With many tokens a stage is shorter, for x: two warps share a unit.
  static constexpr int kShare = kTokens > 8 ? 2 : 1;
  static constexpr int kUnits = kWarps / kShare;  // of a stage
  static constexpr int kPitch =  // of a row of x; no conflicts
      kUnits * kUnitColumns * F::kTokenSize + 16;
  static constexpr int kWeightBytes = kSlabs * kUnits * F::kUnitBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kPitch;
  static constexpr int kRowStride = kRoundSlabs * kUnitRows + 4;  // floats of a token's sums
  static constexpr int kSumFloats = kWarps * kTokens * kRowStride;
  static constexpr int kBuffers = kTokens > 16 ? 1 : 2;
  static constexpr int kFixedBytes = kHeadBytes + kBuffers * kSumFloats * 4;
  static constexpr int kFinishers = kTokens > 8 ? kTokens / 8 : 1;  // warps
  static constexpr int kPerLane =                                   // outputs of a finisher
      (kTokens / kFinishers * kRows + kWarp - 1) / kWarp;
  static constexpr int kThreads = (kWarps + 1 + kFinishers) * kWarp;
  // Few tokens: the next launch's block fits beside this one.
  static constexpr int kBlocks = kTokens > 8 ? 1 : 2;
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

// acc += the products of kHalves halves of a unit, from column 64 * half0 on. weight: the unit of
// the first slab, the next `stride` bytes on; x: this lane's row of the first 8 tokens and 16 of its
// columns, of which `left` are inside; zeros: 16 bytes.
template <class F, int kHalves, int kSlabs, int kTiles>
__device__ __forceinline__ void multiply_codes(float (&acc)[kSlabs][kTiles][4], const char* weight,
                                               int stride, int half0, const char* x, int pitch,
                                               int left, int num_rows, const char* zeros) {
  const int lane = threadIdx.x % kWarp;
  uint32_t b[kHalves][kTiles][4];
#pragma unroll
  for (int i = 0; i < kHalves; ++i) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const bool inside = n * 8 + lane % 8 < num_rows && i * 64 < left;
      ldmatrix4(b[i][n], inside ? x + n * 8 * pitch + i * 64 : zeros);
    }
  }
#pragma unroll
  for (int j = 0; j < kSlabs; ++j) {
    const char* unit = weight + j * stride;
    int sum[kTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      W4A8Codes<F> codes;
      codes.load(unit, half0 + i);
      uint32_t a[2][4];
      const float2 scale = codes.convert(a);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_m16n8k32(sum[n], a[e], b[i][n][2 * e], b[i][n][2 * e + 1]);
        }
      }
      if (i + 1 < kHalves && F::kColumns != 64) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          acc[j][n][h] =
              fmaf(h < 2 ? scale.x : scale.y, static_cast<float>(sum[n][h]), acc[j][n][h]);
          sum[n][h] = 0;
        }
      }
    }
  }
}

template <class T, class F, int kTokens, int kSlabs, bool kGated>
__global__ void __launch_bounds__(Shape<F, kTokens, kSlabs, kGated>::kThreads,
                                  Shape<F, kTokens, kSlabs, kGated>::kBlocks)
    gemv_packed_kernel(const __grid_constant__ KernelParams p) {
#ifdef REGATTA_SM90
  using S = Shape<F, kTokens, kSlabs, kGated>;
  constexpr int kWarps = S::kWarps, kItems = S::kItems;
  constexpr int kTiles = kTokens > 8 ? kTokens / 8 : 1;  // of eight tokens
  extern __shared__ __align__(128) char shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + kMaxStages;
  uint64_t* sums_full = empty + kMaxStages;                        // [2]
  uint64_t* sums_empty = sums_full + 2;                            // [2]
  char* zeros = reinterpret_cast<char*>(sums_empty + 2);           // 16 bytes
  float* row_scale = reinterpret_cast<float*>(zeros + 16);         // [kTokens]
  float* sums = reinterpret_cast<float*>(shared + kHeadBytes);     // [kBuffers][kSumFloats]
  char* stages = shared + S::kFixedBytes;

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.cluster;
  const int item0 = static_cast<int>(static_cast<int64_t>(p.num_items) * blockIdx.x / gridDim.x);
  const int items =
      static_cast<int>(static_cast<int64_t>(p.num_items) * (blockIdx.x + 1) / gridDim.x) - item0;
  // The blocks of a cluster go through the same columns of x, also behind their last slabs.
  const int most = p.cluster > 1 ? (p.num_items + gridDim.x - 1) / gridDim.x : items;
  const int passes = (most + kItems - 1) / kItems;
  const int steps = (p.num_units + S::kUnits - 1) / S::kUnits;

  pdl_trigger();
  if (threadIdx.x == kWarps * kWarp) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kWarps * p.cluster);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&sums_full[i], kWarps);
      barrier_init(&sums_empty[i], S::kFinishers);
    }
    barrier_init_fence();
  }
  if (threadIdx.x == 0) *reinterpret_cast<uint4*>(zeros) = make_uint4(0, 0, 0, 0);
  __syncthreads();
  if (p.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (warp == kWarps) {
    const uint64_t once = policy_evict_first();
    const uint64_t keep = policy_evict_last();
    const auto units_of = [&](int step) { return min(S::kUnits, p.num_units - step * S::kUnits); };
    const auto load_weight = [&](int pass, int step, int s) {
      const int count = max(0, min(kItems, items - pass * kItems));
      const int units = units_of(step);
      const int columns =
          min(units * kUnitColumns, p.in_features - step * S::kUnits * kUnitColumns);
      const uint32_t bytes = units * F::kUnitBytes;
      if (lane == 0) {
        barrier_arrive_expect(&full[s],
                              count * (kGated ? 2 : 1) * bytes +
                                  p.num_rows * columns * F::kTokenSize);
      }
      __syncwarp();
      if (lane < kSlabs && lane % kItems < count) {
        const int64_t slab = item0 + pass * kItems + lane % kItems + lane / kItems * p.second;
        bulk_load(stages + s * S::kStageBytes + lane * S::kUnits * F::kUnitBytes,
                  p.weight + (slab * p.num_units + step * S::kUnits) * F::kUnitBytes, bytes,
                  &full[s], once);
      }
    };
    const auto load_tokens = [&](int step, int s) {
      const int column = step * S::kUnits * kUnitColumns;
      const int columns = min(units_of(step) * kUnitColumns, p.in_features - column);
      if (lane < p.num_rows && lane % p.cluster == rank) {
        char* to = stages + s * S::kStageBytes + S::kWeightBytes + lane * S::kPitch;
        const char* from =
            static_cast<const char*>(p.x) +
            (static_cast<int64_t>(lane) * p.in_features + column) * F::kTokenSize;
        if (p.cluster > 1) {
          bulk_multicast(to, from, columns * F::kTokenSize, &full[s],
                         static_cast<uint16_t>((1 << p.cluster) - 1), keep);
        } else {
          bulk_load(to, from, columns * F::kTokenSize, &full[s], keep);
        }
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
  } else if (warp > kWarps) {
    pdl_wait();
    const int finisher = warp - kWarps - 1;
    const int t0 = finisher * (kTokens / S::kFinishers);
    warp_row_scales(p.epilogue, t0, min(kTokens / S::kFinishers, p.num_rows - t0), row_scale + t0);
    __syncwarp();
    const int width = kGated ? p.epilogue.out_features / 2 : p.epilogue.out_features;
    for (int round = 0; round < passes * S::kRounds; ++round) {
      const int item = round / S::kRounds * kItems + round % S::kRounds * S::kRoundItems;
      const int n0 = (item0 + item) * kUnitRows;
      const int rows = min(min(S::kRoundItems, items - item) * kUnitRows, width - n0);
      Output<T> outputs[S::kPerLane];
#pragma unroll
      for (int i = 0; i < S::kPerLane; ++i) {
        const int t = t0 + (i * kWarp + lane) / S::kRows, row = (i * kWarp + lane) % S::kRows;
        outputs[i].inside = t < p.num_rows && row < rows;
        outputs[i].template request<kGated>(p.epilogue, t, n0 + row, width);
      }
      const int buffer = round % S::kBuffers;
      barrier_wait(&sums_full[buffer], round / S::kBuffers % 2);
      float sum[S::kPerLane], up[S::kPerLane];
#pragma unroll
      for (int i = 0; i < S::kPerLane; ++i) {
        const int t = min(t0 + (i * kWarp + lane) / S::kRows, kTokens - 1);
        const float* at = sums + buffer * S::kSumFloats + t * S::kRowStride +
                          (i * kWarp + lane) % S::kRows;
        sum[i] = 0.f, up[i] = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          sum[i] += at[w * kTokens * S::kRowStride];
          if (kGated) up[i] += at[w * kTokens * S::kRowStride + kUnitRows];
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&sums_empty[buffer]);
#pragma unroll
      for (int i = 0; i < S::kPerLane; ++i) {
        const int t = t0 + (i * kWarp + lane) / S::kRows, row = (i * kWarp + lane) % S::kRows;
        const float scale = row_scale[min(t, kTokens - 1)];
        const int64_t at = static_cast<int64_t>(t) * width + n0 + row;
        float square =
            outputs[i].template write<kGated>(p.epilogue, sum[i] * scale, up[i] * scale, at);
        if (!kGated && p.epilogue.sumsq_out != nullptr) {
          for (int o = kUnitRows / 2; o > 0; o /= 2) square += __shfl_xor_sync(~0u, square, o);
          const int parts = (width + kUnitRows - 1) / kUnitRows;
          if (row % kUnitRows == 0 && outputs[i].inside) {
            p.epilogue.sumsq_out[static_cast<int64_t>(t) * parts + (n0 + row) / kUnitRows] = square;
          }
        }
      }
    }
  } else {
    const int g = lane / 4;
    const int q = lane % 4;
    // This warp's part of a stage: a unit, or half of one.
    const int part = warp % S::kShare;
    constexpr int kQuarters = 4 / S::kShare;  // of 32 columns
    int s = 0, round = 0;
    uint32_t phase = 0;
    for (int pass = 0; pass < passes; ++pass) {
      float acc[kSlabs][kTiles][4] = {};
      for (int step = 0; step < steps; ++step) {
        barrier_wait(&full[s], phase);
        const char* stage = stages + s * S::kStageBytes;
        const int unit = step * S::kUnits + warp / S::kShare;
        if constexpr (F::kTokenSize == 1) {
          constexpr int kHalves = 2 / S::kShare;
          const int column = part * kHalves * 64 + lane / 8 * 16;  // of the unit
          if (unit < p.num_units) {
            multiply_codes<F, kHalves, kSlabs, kTiles>(
                acc, stage + warp / S::kShare * F::kUnitBytes, S::kUnits * F::kUnitBytes,
                part * kHalves,
                stage + S::kWeightBytes + lane % 8 * S::kPitch +
                    warp / S::kShare * kUnitColumns + column,
                S::kPitch, p.in_features - unit * kUnitColumns - column, p.num_rows, zeros);
          }
        } else if (unit < p.num_units) {
          constexpr bool kLifted = F::kCodeBits == 4 && kTiles == 1;
          const int column = part * kQuarters * 32 + lane / 8 * 8;  // of the unit
          const char* rows = stage + S::kWeightBytes + lane % 8 * S::kPitch +
                             (warp / S::kShare * kUnitColumns + column) * 2;
          const int left = p.in_features - unit * kUnitColumns - column;
          const char* at = stage + warp / S::kShare * F::kUnitBytes;  // slabs are kUnits apart
          float sum[kSlabs][kTiles][4] = {};  // of a group
          float x_sum[4] = {};
          uint4 quads[kSlabs];
          uint2 words[kSlabs];
#pragma unroll
          for (int i = 0; i < kQuarters; ++i) {
            const int quarter = part * kQuarters + i;
            uint32_t b[kTiles][4];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              const bool inside = n * 8 + lane % 8 < p.num_rows && i * 32 < left;
              ldmatrix4(b[n], inside ? rows + n * 8 * S::kPitch + i * 64 : zeros);
            }
#pragma unroll
            for (int j = 0; j < kSlabs; ++j) {
              const char* from = at + j * S::kUnits * F::kUnitBytes;
              const uint4* codes = reinterpret_cast<const uint4*>(from) + lane;
              if constexpr (F::kCodeBits == 8) {
                quads[j] = codes[quarter * kWarp];
              } else if (i % 2 == 0) {
                quads[j] = codes[quarter / 2 * kWarp];
              }
              if (F::kGroups && (i % 2 == 0 || F::kColumns == 32)) {
                words[j] = reinterpret_cast<const uint2*>(
                    from + F::kCodeBits * 256)[quarter * 32 / F::kColumns * 8 + g];
              }
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if constexpr (kLifted) {
                constexpr uint32_t kOnes[4] = {kOnePair<T>, kOnePair<T>, kOnePair<T>, kOnePair<T>};
                mma_m16n8k16<T>(x_sum, kOnes, b[0][2 * e], b[0][2 * e + 1]);
              }
#pragma unroll
              for (int j = 0; j < kSlabs; ++j) {
                uint32_t a[4];
                if constexpr (kLifted) {
                  const uint32_t w[4] = {quads[j].x, quads[j].y, quads[j].z, quads[j].w};
                  lifted_int4<T>(w[i % 2 * 2 + e], a);
                } else if constexpr (F::kCodeBits == 8) {
                  operands_of_int8<T>(e ? quads[j].z : quads[j].x, e ? quads[j].w : quads[j].y, a);
                } else {
                  const uint32_t w[4] = {quads[j].x, quads[j].y, quads[j].z, quads[j].w};
                  operands_of_int4<T>(w[i % 2 * 2 + e], group_scale(words[j]).zero, a);
                }
                if constexpr (F::kGroups && !kLifted) {
                  const GroupScale group = group_scale(words[j]);
#pragma unroll
                  for (int h = 0; h < 4; ++h) {
                    if (F::kCodeBits == 8) a[h] = subtract_pair<T>(a[h], group.zero[h % 2]);
                    // Of many tokens there are more sums than codes.
                    if (kTiles > 1) a[h] = multiply_pair<T>(a[h], group.scale[h % 2]);
                  }
                }
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                  auto& to = F::kGroups && kTiles == 1 ? sum[j][n] : acc[j][n];
                  mma_m16n8k16<T>(to, a, b[n][2 * e], b[n][2 * e + 1]);
                }
              }
            }
            const bool ends = i + 1 == kQuarters || (i + 1) * 32 % F::kColumns == 0;
            if (F::kGroups && kTiles == 1 && ends) {
#pragma unroll
              for (int j = 0; j < kSlabs; ++j) {
                const float scales[2] = {low_value<T>(words[j].x), low_value<T>(words[j].y)};
                const float lifts[2] = {lifted_zero<T>(words[j].x), lifted_zero<T>(words[j].y)};
#pragma unroll
                for (int h = 0; h < 4; ++h) {
                  if (kLifted) sum[j][0][h] = fmaf(-lifts[h / 2], x_sum[h], sum[j][0][h]);
                  acc[j][0][h] = fmaf(scales[h / 2], sum[j][0][h], acc[j][0][h]);
                  sum[j][0][h] = 0.f;
                }
              }
#pragma unroll
              for (int h = 0; h < 4; ++h) x_sum[h] = 0.f;
            }
          }
        }
        __syncwarp();
        if (p.cluster > 1) {
          if (lane < p.cluster) barrier_arrive_cluster(&empty[s], lane);
        } else if (lane == 0) {
          barrier_arrive(&empty[s]);
        }
        if (++s == p.stages) s = 0, phase ^= 1;
      }

#pragma unroll
      for (int r = 0; r < S::kRounds; ++r, ++round) {
        const int buffer = round % S::kBuffers;
        if (round >= S::kBuffers) {
          barrier_wait(&sums_empty[buffer], (round / S::kBuffers - 1) % 2);
        }
        float* to = sums + buffer * S::kSumFloats + (warp * kTokens + 2 * q) * S::kRowStride + g;
#pragma unroll
        for (int k = 0; k < S::kRoundSlabs; ++k) {
          const int j = kGated ? r + k * kItems : r * S::kRoundSlabs + k;
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            float* row = to + n * 8 * S::kRowStride + k * kUnitRows;
            if (2 * q < kTokens) row[0] = acc[j][n][0], row[8] = acc[j][n][2];
            if (2 * q + 1 < kTokens) {
              row[S::kRowStride] = acc[j][n][1], row[S::kRowStride + 8] = acc[j][n][3];
            }
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&sums_full[buffer]);
      }
    }
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

template <class T, class F, int kTokens, int kSlabs, bool kGated>
Status run(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  using S = Shape<F, kTokens, kSlabs, kGated>;
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
      2, std::min(kMaxStages, (tile.kilobytes * 1024 - S::kFixedBytes) / S::kStageBytes));
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  int blocks = std::min(multiprocessors, kp.num_items);
  kp.cluster = std::min(tile.cluster, blocks);
  // Clusters of more than two do not fill a part of the device whose count is no multiple.
  if (kp.cluster > 2) blocks = std::min(blocks, multiprocessors / 16 * 16);
  blocks -= blocks % kp.cluster;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(S::kThreads);
  config.shared_bytes = S::shared_bytes(kp.stages);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  config.cluster_x = static_cast<unsigned>(kp.cluster);
  return launch(gemv_packed_kernel<T, F, kTokens, kSlabs, kGated>, config, "gemv_packed", kp);
}

template <class T, class F, int kTokens>
Status run_slabs(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  if (p.gated) {
    return tile.slabs > 2 ? run<T, F, kTokens, 4, true>(p, tile, stream)
                          : run<T, F, kTokens, 2, true>(p, tile, stream);
  }
  return tile.slabs > 2 ? run<T, F, kTokens, 3, false>(p, tile, stream)
                        : run<T, F, kTokens, 2, false>(p, tile, stream);
}

template <class T, class F>
Status run_tokens(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  if (p.num_rows == 1) return run_slabs<T, F, 1>(p, tile, stream);
  if constexpr (F::kTokenSize > 1) {
    if (p.num_rows <= 4) return run_slabs<T, F, 4>(p, tile, stream);
    if (p.num_rows > 16) return run_slabs<T, F, 32>(p, tile, stream);
  }
  return p.num_rows <= 8 ? run_slabs<T, F, 8>(p, tile, stream)
                         : run_slabs<T, F, 16>(p, tile, stream);
}

template <class T>
Status run_format(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    return run_tokens<T, decltype(format)>(p, tile, stream);
  });
}

// As many slabs at once as leave the fewest passes half empty; more where x is what is read most.
GemvTile choose_tile(const GemmParams& p) {
  GemvTile tile;
  if (p.gated) {
    const bool small = code_bits(p.operands) == 4;
    tile.slabs = p.num_rows > 8 || (small && p.num_rows > 4) ? 4 : 2;
  } else {
    tile.slabs = ceil_div(packed_tiles(p.out_features), 132) % 3 == 0 ? 3 : 2;
  }
  tile.cluster = p.num_rows > 8 ? 2 : 1;
  tile.kilobytes = p.num_rows > 8 ? 226 : 112;
  return tile;
}

}  // namespace

const char* gemv_packed_sm90_refuses(const GemmParams& p) {
  if (p.num_rows > 32) return "more than 32 rows";
  if (p.num_rows > 16 && p.operands == GemmOperands::kW4A8) return "more than 16 rows of codes";
  if (p.num_rows > 8 && p.sumsq_out != nullptr) return "sums of squares of more than 8 rows";
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
