// y = epilogue(x w^T) of 1 .. 8 rows with weights of 8 or 4 bits, activations of 16, or of 4 bits,
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
//      a time, turns them into the left operand of mma m16n8k16 and multiplies; x is the right
//      operand, absent rows are zero. 8 bits: exactly, bit operations and one subtraction per pair.
//      4 bits: bit operations alone, codes plus a constant; it leaves the sums of a group with the
//      zero point, times the sum of x, and then the scale is applied. Codes of x: mma m16n8k32,
//      whose integer sums of a group are scaled into floats.
//   3. The warps' sums meet in shared memory, where one more warp adds them in their order and
//      finishes them, while the others are at the next slabs; after the last ones, all do.
// Source: own; Marlin showed that the tensor cores are the place for few rows, too.
//
// Bound: memory: 1.50 ms with 8 bits and 0.80 ms with 4 for the 128 layer products of a Llama-3-8B
// decode step at 4.66 TB/s.
// Measured on an H200, us of a layer's products in a Llama-3-8B decode step, each from the end of the
// launch ahead (out: with attention), 1 row of 4 bits: qkv 6.0, out 10.0, gate and up 21.8, down 10.8;
// 8 rows 8.1, 10.3, 22.4, 12.0. Of the step, ms with 1 and 8 rows of 4 bits:
//   1.90  2.18  before what follows
//   1.77  2.08  the copying warp asks with few instructions: it took 1.1 us per stage
//   1.83  1.97  room for the next block beside attention's (Launch), stages given back early
//               (8 rows alone: 1 row 0.06 slower), waiting warps not at barriers
//   1.75  1.91  late trigger
//   1.67  1.84  gate and up's trigger earlier, one row without clusters, what an output takes beside
//               its sum asked for ahead of the products (residual products ended 1 us behind them)
// Did not help: requesting weights into L2 ahead of pdl_wait() (time grows by the bytes), 3 slabs, two
// chains of sums, 16 warps of half a unit each, clusters of four (they do not fill the device). A
// kernel of 4 bits is bound by its instructions: shifts and masks take 45 % of them.
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
// Stages left to ask for when the next launch may start: earlier its copies delay this one's.
constexpr int trigger_of(bool gated) { return gated ? 6 : 4; }

struct KernelParams {
  Epilogue epilogue;
  const uint8_t* weight;
  const void* x;
  int num_rows, in_features;
  int num_units, num_items;  // units along k; slabs, or pairs of them
  int second;                // from a gate's slab to its up's
  int stages, cluster;
};

// kSlabs are multiplied at once.
template <class F, int kTokens, int kSlabs, bool kGated>
struct Shape {
  static constexpr int kWarps = 8;  // that multiply, a unit each
  static constexpr int kItems = kGated ? kSlabs / 2 : kSlabs;
  static constexpr int kRows = kItems * kUnitRows;  // of the output
  static constexpr int kPitch =  // of a row of x; no conflicts
      kWarps * kUnitColumns * F::kTokenSize + 16;
  static constexpr int kSlabBytes = kWarps * F::kUnitBytes;
  static constexpr int kWeightBytes = kSlabs * kSlabBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kPitch;
  static constexpr int kRowStride = kSlabs * kUnitRows + 4;  // floats of a token's sums
  static constexpr int kFixedBytes = kHeadBytes + kWarps * kTokens * kRowStride * 4;
  static constexpr int kThreads = (kWarps + 2) * kWarp;
  static int shared_bytes(int stages) { return kFixedBytes + stages * kStageBytes; }
};

// Outputs [kTokens, S::kRows] of a pass, by kThreads threads of which this is `thread`.
template <class T, class S, int kTokens, bool kGated, int kThreads>
struct Finish {
  static constexpr int kCount = (kTokens * S::kRows + kThreads - 1) / kThreads;
  Output<T> outputs[kCount];

  static __device__ __forceinline__ int token(int i, int thread) {
    return (i * kThreads + thread) / S::kRows;
  }
  static __device__ __forceinline__ int row(int i, int thread) {
    return (i * kThreads + thread) % S::kRows;
  }
  static __device__ __forceinline__ int width(const Epilogue& p) {
    return kGated ? p.out_features / 2 : p.out_features;
  }

  // Of num_rows rows of x, and of `rows` rows of weight from n0 on.
  __device__ __forceinline__ void request(const Epilogue& p, int num_rows, int n0, int rows,
                                          int thread) {
    rows = min(rows, width(p) - n0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int t = token(i, thread), r = row(i, thread);
      outputs[i].inside = t < num_rows && r < rows;
      outputs[i].template request<kGated>(p, t, n0 + r, width(p));
    }
  }

  // Adds the warps' sums in their order. wait() returns when they are there, done() is called when
  // they have been read.
  template <class Wait, class Done>
  __device__ __forceinline__ void run(const Epilogue& p, const float* sums, const float* row_scale,
                                      int n0, int thread, const Wait& wait, const Done& done) {
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
      const int t = token(i, thread), n = n0 + row(i, thread);
      const float scale = row_scale[min(t, kTokens - 1)];
      float square = outputs[i].template write<kGated>(p, sum[i] * scale, up[i] * scale,
                                                       static_cast<int64_t>(t) * width(p) + n);
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

// acc += the products of a unit of codes. weight: the unit of the first slab, the next `stride` bytes
// on; x: this lane's token and 16 of its columns, of which `left` are inside, or zeros.
template <class F, int kSlabs>
__device__ __forceinline__ void multiply_codes(float (&acc)[kSlabs][4], const char* weight,
                                               int stride, const char* x, int left,
                                               const char* zeros) {
  uint32_t b[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) ldmatrix4(b[i], i * 64 < left ? x + i * 64 : zeros);
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

// The same of 16-bit x; x: this lane's token and 8 of its columns. All of a unit's loads come first:
// there are but two warps to hide their latency. (To keep the sums of x for the next slabs was slower.)
// kEarly: done() is called when they have been read, of many codes a half at a time; else behind the
// products, which leaves the compiler to mix loads and products.
template <class T, class F, int kSlabs, bool kEarly, class Done>
__device__ __forceinline__ void multiply_values(float (&acc)[kSlabs][4], const char* weight,
                                                int stride, const char* x, int left,
                                                const char* zeros, const Done& done) {
  const int lane = threadIdx.x % kWarp;
  constexpr bool kLifted = F::kCodeBits == 4;
  constexpr int kParts = kEarly && kSlabs > 3 ? 2 : 1;
  constexpr int kQuads = F::kCodeBits / 2 / kParts;  // of a slab
  constexpr int kSteps = 8 / kParts;                 // of 16 columns
  constexpr int kGroups = kUnitColumns / F::kColumns;
  constexpr int kGroupSteps = 8 / kGroups;
  uint32_t b[4 / kParts][4];
  uint4 quads[kSlabs][kQuads];
  uint2 words[kSlabs][kGroups];
  float sum[kSlabs][4] = {};  // of a group
  float x_sum[4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    if (step % kSteps == 0) {
      const int part = step / kSteps;
#pragma unroll
      for (int i = 0; i < 4 / kParts; ++i) {
        const int at = part * (4 / kParts) + i;
        ldmatrix4(b[i], at * 32 < left ? x + at * 64 : zeros);
      }
#pragma unroll
      for (int j = 0; j < kSlabs; ++j) {
        const char* unit = weight + j * stride;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          quads[j][q] = reinterpret_cast<const uint4*>(unit)[(part * kQuads + q) * kWarp + lane];
        }
#pragma unroll
        for (int g = 0; F::kGroups && part == 0 && g < kGroups; ++g) {
          words[j][g] =
              reinterpret_cast<const uint2*>(unit + F::kCodeBits * 256)[g * 8 + lane / 4];
        }
      }
      if (kEarly && part == kParts - 1) done();
    }
    const uint32_t(&columns)[4] = b[step % kSteps / 2];
    const uint32_t b0 = columns[step % 2 * 2], b1 = columns[step % 2 * 2 + 1];
    if constexpr (kLifted) {
      constexpr uint32_t kOnes[4] = {kOnePair<T>, kOnePair<T>, kOnePair<T>, kOnePair<T>};
      mma_m16n8k16<T>(x_sum, kOnes, b0, b1);
    }
#pragma unroll
    for (int j = 0; j < kSlabs; ++j) {
      const uint4 quad = quads[j][step % kSteps * kQuads / kSteps];
      const uint32_t w[4] = {quad.x, quad.y, quad.z, quad.w};
      uint32_t a[4];
      if constexpr (kLifted) {
        lifted_int4<T>(w[step % 4], a);
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

template <class T, class F, int kTokens, int kSlabs, bool kGated>
__global__ void __launch_bounds__(Shape<F, kTokens, kSlabs, kGated>::kThreads,
                                  2)  // the next launch's block fits beside this one
    gemv_packed_kernel(const __grid_constant__ KernelParams p) {
#ifdef REGATTA_SM90
  using S = Shape<F, kTokens, kSlabs, kGated>;
  constexpr int kWarps = S::kWarps, kItems = S::kItems, kTrigger = trigger_of(kGated);
  extern __shared__ __align__(128) char shared[];
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* empty = full + kMaxStages;
  uint64_t* sums_full = empty + kMaxStages;
  uint64_t* sums_empty = sums_full + 1;
  char* zeros = reinterpret_cast<char*>(sums_empty + 1);           // 16 bytes
  float* row_scale = reinterpret_cast<float*>(zeros + 16);         // [kTokens]
  float* sums = reinterpret_cast<float*>(shared + kHeadBytes);     // [kWarps, kTokens, kRowStride]
  char* stages = shared + S::kFixedBytes;

  const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.cluster;
  const int item0 = static_cast<int>(static_cast<int64_t>(p.num_items) * blockIdx.x / gridDim.x);
  const int items =
      static_cast<int>(static_cast<int64_t>(p.num_items) * (blockIdx.x + 1) / gridDim.x) - item0;
  // The blocks of a cluster go through the same columns of x, also behind their last slabs.
  const int most = p.cluster > 1 ? (p.num_items + gridDim.x - 1) / gridDim.x : items;
  const int passes = (most + kItems - 1) / kItems;
  const int steps = (p.num_units + kWarps - 1) / kWarps;
  const auto rows_of = [&](int pass) {
    return min(S::kRows, (items - pass * kItems) * kUnitRows);
  };

  if (threadIdx.x == kWarps * kWarp) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kWarps * p.cluster);
    }
    barrier_init(sums_full, kWarps + 1);
    barrier_init(sums_empty, 1);
    barrier_init_fence();
  }
  if (threadIdx.x == 0) *reinterpret_cast<uint4*>(zeros) = make_uint4(0, 0, 0, 0);
  __syncthreads();
  if (p.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (warp == kWarps) {
    // Lanes up to kSlabs copy a slab's codes each, those behind them a row of x each.
    constexpr int kStepColumns = kWarps * kUnitColumns;
    const int last = steps - 1, row = lane - kSlabs;
    const bool is_weight = lane < kSlabs;
    const bool is_row = !is_weight && row < p.num_rows && row % p.cluster == rank;
    const uint64_t policy = is_weight ? policy_evict_first() : policy_evict_last();
    const int64_t slab_bytes = static_cast<int64_t>(p.num_units) * F::kUnitBytes;
    const char* from;  // of a pass
    char* to = stages;
    uint32_t step_bytes, last_bytes;
    if (is_weight) {
      const int64_t slab = item0 + lane % kItems + lane / kItems * p.second;
      from = reinterpret_cast<const char*>(p.weight) + slab * slab_bytes;
      to += lane * S::kSlabBytes;
      step_bytes = S::kSlabBytes;
      last_bytes = (p.num_units - last * kWarps) * F::kUnitBytes;
    } else {
      from = static_cast<const char*>(p.x) +
             static_cast<int64_t>(row) * p.in_features * F::kTokenSize;
      to += S::kWeightBytes + row * S::kPitch;
      step_bytes = kStepColumns * F::kTokenSize;
      last_bytes = (p.in_features - last * kStepColumns) * F::kTokenSize;
    }
    bool is_copied;                         // this lane's, in the pass
    uint32_t expected_bytes, expected_last;  // of a step of the pass
    const auto begin_pass = [&](int pass) {
      const int count = max(0, min(kItems, items - pass * kItems));
      is_copied = is_weight ? lane % kItems < count : is_row;
      const auto sum_of = [&](uint32_t bytes) {
        return count * (kGated ? 2 : 1) * __shfl_sync(~0u, bytes, 0) +
               p.num_rows * __shfl_sync(~0u, bytes, kSlabs);
      };
      expected_bytes = sum_of(step_bytes);
      expected_last = sum_of(last_bytes);
    };
    // Codes, x or both. Few instructions: the others wait for what one warp asks for.
    const auto load = [&](bool weights, bool rows, int step, int s) {
      if (weights && lane == 0) {
        barrier_arrive_expect(&full[s], step == last ? expected_last : expected_bytes);
      }
      if (weights) __syncwarp();
      if (!is_copied || !(is_weight ? weights : rows)) return;
      const uint32_t bytes = step == last ? last_bytes : step_bytes;
      if (is_weight || p.cluster == 1) {
        bulk_load(to + s * S::kStageBytes, from + step * step_bytes, bytes, &full[s], policy);
      } else {
        bulk_multicast(to + s * S::kStageBytes, from + step * step_bytes, bytes, &full[s],
                       static_cast<uint16_t>((1 << p.cluster) - 1), policy);
      }
    };
    const int total = passes * steps;
    const int ahead = min(p.stages, total);
    int pass = 0, step = 0;
    const auto advance = [&] {
      if (++step < steps) return;
      step = 0;
      if (is_weight) from += kItems * slab_bytes;
      begin_pass(++pass);
    };
    begin_pass(0);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, advance()) load(true, false, step, i);
    if (total - kTrigger <= ahead) pdl_trigger();
    pdl_wait();
    int step_of_x = 0;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      load(false, true, step_of_x, i);
      if (++step_of_x == steps) step_of_x = 0;
    }
    int s = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int i = ahead; i < total; ++i, advance()) {
      barrier_wait(&empty[s], phase);
      load(true, true, step, s);
      if (i == total - kTrigger) pdl_trigger();
      if (++s == p.stages) s = 0, phase ^= 1;
    }
  } else if (warp > kWarps) {
    pdl_wait();
    warp_row_scales(p.epilogue, 0, p.num_rows, row_scale);
    __syncwarp();
    // The last pass is finished by the warps that multiply.
    for (int pass = 0; pass < passes; ++pass) {
      if (lane == 0) barrier_arrive(sums_full);
      if (pass + 1 == passes) break;
      const int n0 = (item0 + pass * kItems) * kUnitRows;
      Finish<T, S, kTokens, kGated, kWarp> finish;
      finish.request(p.epilogue, p.num_rows, n0, rows_of(pass), lane);
      finish.run(
          p.epilogue, sums, row_scale, n0, lane, [&] { barrier_wait(sums_full, pass % 2); },
          [&] {
            __syncwarp();
            if (lane == 0) barrier_arrive(sums_empty);
          });
    }
  } else {
    const char* x = stages + S::kWeightBytes +
                    (warp * kUnitColumns + lane / 8 * 16 / F::kTokenSize) * F::kTokenSize;
    const bool is_row = lane % 8 < p.num_rows;
    x = is_row ? x + lane % 8 * S::kPitch : zeros;
    // Not at the barriers: warps that try them take from the block of the launch ahead.
    pdl_wait();
    // Asked for now: behind the products it would be waited for, from memory.
    const int last_n0 = (item0 + (passes - 1) * kItems) * kUnitRows;
    Finish<T, S, kTokens, kGated, kWarps * kWarp> finish;
    finish.request(p.epilogue, p.num_rows, last_n0, rows_of(passes - 1), threadIdx.x);
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
          const char* weight = stages + s * S::kStageBytes + warp * F::kUnitBytes;
          // Columns that are left behind this lane's first.
          const int left = is_row ? p.in_features - unit * kUnitColumns -
                                        lane / 8 * 16 / F::kTokenSize
                                  : 0;
          if constexpr (F::kTokenSize == 1) {
            multiply_codes<F, kSlabs>(acc, weight, S::kSlabBytes, x + s * S::kStageBytes, left,
                                      zeros);
            release();
          } else {
            multiply_values<T, F, kSlabs, (kTokens > 1)>(
                acc, weight, S::kSlabBytes, x + s * S::kStageBytes, left, zeros, release);
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
        p.epilogue, sums, row_scale, last_n0, threadIdx.x,
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
  int blocks = std::min(num_multiprocessors(), kp.num_items);
  kp.cluster = std::min(tile.cluster, blocks);
  blocks -= blocks % kp.cluster;
  kp.stages = std::max(
      2, std::min(kMaxStages, (tile.kilobytes * 1024 - S::kFixedBytes) / S::kStageBytes));
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(S::kThreads);
  config.shared_bytes = packed_shared_bytes(p, S::shared_bytes(kp.stages));
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
  return run<T, F, kTokens, 2, false>(p, tile, stream);
}

template <class T, class F>
Status run_tokens(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  return p.num_rows == 1   ? run_slabs<T, F, 1>(p, tile, stream)
         : p.num_rows <= 4 ? run_slabs<T, F, 4>(p, tile, stream)
                           : run_slabs<T, F, 8>(p, tile, stream);
}

template <class T>
Status run_format(const GemmParams& p, const GemvTile& tile, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    return run_tokens<T, decltype(format)>(p, tile, stream);
  });
}

// Of several rows x keeps memory from weights: blocks that share its copies and, with codes of 8 bits,
// as many stages as there is room for.
GemvTile choose_tile(const GemmParams& p) {
  GemvTile tile;
  const bool small = p.operands == GemmOperands::kWeightInt4;
  const bool wide = code_bits(p.operands) == 8 && p.num_rows > 2;
  tile.slabs = p.gated && small && p.num_rows == 1 ? 4 : 2;
  tile.cluster = wide || (small && p.num_rows > 1) ? 2 : 1;
  tile.kilobytes = wide ? 226 : packed_shared_budget(p) / 1024;
  return tile;
}

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
