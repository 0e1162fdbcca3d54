// y = epilogue(x w^T) of 65 to 1,023 rows with weights of 8 or 4 bits, activations of 16, where
// tiles are too few for the device or leave much of it idle: blocks share their columns.
//
// Input: x [M, K] bf16 or fp16; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90a.
// Algorithm
//   1. A tile is 256 rows of weight by 96 or 128 tokens, or (8 bits) 128 by 256. What whole waves of
//      tiles leave over is shared out by columns: blocks take parts of those tiles first, leave
//      their sums in scratch, then take whole tiles, and finish the groups of tokens that are theirs
//      at last. Sums are added in the order of columns. A tile's counter says when all of its sums
//      are there; blocks wait for one another, and all of them are at work.
//   2. One warp fills a ring of stages. Two warpgroups turn codes into the left operand of wgmma in
//      registers, one step of 16 columns while the tensor cores multiply the ones ahead.
//   3. Three warps make row scales (norms of x). Outputs pass through shared memory, transposed by
//      stmatrix, so that rows are read and written 16 bytes at a time.
// Source: own; stream-K (Osama et al., 2023) shares tiles by columns.
//
// Bound: few rows, the bytes of weights; many, the tensor cores.
// Measured on an H200 (bench_packed large, us of qkv, out, down; 8 bits, 4 bits; dense beside them):
//   M  96  20.8 + 19.2 + 31.8   20.0 + 18.2 + 30.5   (22.4 + 19.9 + 45.9)
//   M 128  25.3 + 20.5 + 34.0   25.1 + 19.6 + 33.4   (20.9 + 17.1 + 38.1)
//   M 192  30.0 + 21.3 + 47.2   28.2 + 20.5 + 46.2   (22.3 + 18.1 + 45.0)
//   M 256  31.2 + 21.8 + 48.6   32.6 + 22.9 + 52.6   (22.1 + 17.4 + 46.3)
// A share costs 14 us beside its columns, three times what its sums' way through L2 should, and a unit
// 1.33 us, where the loop of gemm_packed_tiles_sm90.cu, four steps at a time, needs 1.25.
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
constexpr int kThreads = 3 * kGroup;
constexpr int kMaxStages = 8;
constexpr int kScaleWarps = 3;  // that make row scales
constexpr int kHeadBytes = 256;
constexpr int kOrder = 1024;      // tokens that are worked on together
constexpr int kMostShared = 256;  // tiles whose columns blocks share
constexpr int kTokenGroup = 16;   // tokens that are finished together

// How many blocks' warpgroups have left their sums of a shared tile, and then how many groups of its
// tokens are finished: 0 between launches. [tile, warpgroup]
__device__ unsigned shared_tiles[kMostShared * 2];

template <class F, int kTokens>
struct Shape {
  static constexpr int kTiles = kTokens > 128 ? 1 : 2;  // of 64 rows, of a warpgroup
  static constexpr int kRows = 2 * kTiles * kTileRows;
  static constexpr int kSlabs = kRows / kUnitRows;
  static constexpr int kHalves = kTiles;  // of units, of a stage
  static constexpr int kStageColumns = kHalves * 64;
  static constexpr int kTokenBytes = kTokens * 128;  // of 64 columns
  static constexpr int kSlabBytes =                  // of a stage
      kHalves == 2 ? F::kUnitBytes : F::kHalfBytes + F::kHalfScaleBytes;
  static constexpr int kStageLoad = kHalves * kTokenBytes + kSlabs * kSlabBytes;
  static constexpr int kStageBytes = (kStageLoad + 1023) / 1024 * 1024;
  static constexpr int kOutGroups =  // of tokens; three stages should have room
      kTokens / kTokenGroup / (kTokens > 128 || kStageBytes > 64 * 1024 ? 2 : 1);
  static constexpr int kOutBytes = kOutGroups * kTokenGroup * 128;  // of 64 features
  static constexpr int kScaleBytes = 2 * kTokens * 4;  // of rows of x, of two tiles
  static constexpr int kStages = std::min(
      kMaxStages, (226 * 1024 - kHeadBytes - 2 * kOutBytes - kScaleBytes) / kStageBytes);
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + 2 * kOutBytes + kHeadBytes + kScaleBytes;
  // Sums of a tile as threads hold them: [warpgroup][tile of 64 rows][tokens / 8][kGroup] of float4.
  static constexpr int kSumsBytes = kRows * kTokens * 4;
};

// Things that workers share out, one behind the other. Without divisions: what they yield does not
// count as the same for all of a warp, and descriptors of operands would pass through its registers.
struct Shares {
  int each, extra;  // the first `extra` workers have one more

  static Shares of(int count, int workers) {
    return workers > 0 ? Shares{count / workers, count % workers} : Shares{0, 0};
  }
  // Where worker w's begin.
  __device__ __forceinline__ int begin(int w) const { return each * w + min(w, extra); }
  // Who has thing i.
  __device__ __forceinline__ int owner(int i) const {
    const int first = (each + 1) * extra;
    return i < first ? i / (each + 1) : extra + (i - first) / each;
  }
};

struct KernelParams {
  Epilogue epilogue;
  const uint8_t* weight;
  int num_rows, num_units;  // units along k
  int num_slabs;            // of 16 rows
  int row_blocks, token_blocks;
  // The units of the first `shared` tiles are shared out among the first `workers` blocks, whose sums
  // go to `sums`, and then groups of their tokens; blocks take the other tiles whole.
  int shared, workers;
  Shares units, groups;
  uint64_t unit_reciprocal;  // 2^32 / num_units, rounded up
  float4* sums;

  // Where worker w's sums of a tile are: a worker's second tile begins with it.
  __device__ __forceinline__ int slot(int tile, int w) const {
    return units.begin(w) >= tile * num_units ? w : workers + tile;
  }
};

// What a block does: tiles, or units of them, one after the other.
struct Parts {
  int tile, unit, end;
  __device__ __forceinline__ explicit Parts(const KernelParams& p) {
    const int worker = blockIdx.x;
    at_ = worker < p.workers ? p.units.begin(worker) : 0;
    limit_ = worker < p.workers ? p.units.begin(worker + 1) : 0;
    whole_ = p.shared + worker;
  }
  __device__ __forceinline__ bool next(const KernelParams& p) {
    if (at_ < limit_) {
      tile = static_cast<int>(at_ * p.unit_reciprocal >> 32);
      unit = at_ - tile * p.num_units;
      end = min(limit_ - tile * p.num_units, p.num_units);
      at_ += end - unit;
      return true;
    }
    tile = whole_;
    unit = 0;
    end = p.num_units;
    whole_ += gridDim.x;
    return tile < p.row_blocks * p.token_blocks;
  }

 private:
  int at_, limit_, whole_;
};

struct Tile {
  int token0, row0;
};

__device__ __forceinline__ void add_release(unsigned* counter, unsigned count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* counter) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

template <class S, int kTokens>
__device__ __forceinline__ Tile tile_of(const KernelParams& p, int index) {
  constexpr int kTogether = (kOrder + kTokens - 1) / kTokens;
  const int first = index / (kTogether * p.row_blocks) * kTogether;
  const int order = min(kTogether, p.token_blocks - first);
  const int within = index - first * p.row_blocks;
  return {(first + within % order) * kTokens, within / order * S::kRows};
}

// 16 bytes `chunk` of token t among outputs of 64 features; eight tokens' do not conflict.
__device__ __forceinline__ char* out_chunk(char* out, int t, int chunk) {
  return out + t * 128 + ((chunk ^ (t & 7)) << 4);
}

// Writes 64 features from n0 on of `groups` groups of tokens, at most kGroups, from token0 on.
// value(i, j) is the pair of tokens 8 j .. that a thread holds of row g (i 0) or g + 8 of its tile.
template <class T, int kGroups, class Value>
__device__ __forceinline__ void write_tokens(const Epilogue& p, char* out, int group, int n0,
                                             int width, int token0, int num_rows, int groups,
                                             const Value& value) {
  constexpr int kChunks = 8, kStep = kGroup / kChunks;  // tokens at a time
  constexpr int kSteps = kGroups * kTokenGroup / kStep;
  const int thread = threadIdx.x % kGroup, warp = thread / kWarp, lane = thread % kWarp;
  const int chunk = thread % kChunks, n = n0 + chunk * 8;
  const int last = n < width ? min(num_rows, token0 + groups * kTokenGroup) - token0 : 0;
  const bool residual = p.residual != nullptr;
  const int64_t at_token0 = static_cast<int64_t>(token0) * width + n;
  if (residual) {
    const T* from = static_cast<const T*>(p.residual) + at_token0;
    uint4 x[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int t = i * kStep + thread / kChunks;
      x[i] = make_uint4(0, 0, 0, 0);
      if (t < last) x[i] = __ldcg(reinterpret_cast<const uint4*>(from + t * static_cast<int64_t>(width)));
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int t = i * kStep + thread / kChunks;
      *reinterpret_cast<uint4*>(out_chunk(out, t, chunk)) = x[i];
    }
    named_barrier_sync(1 + group, kGroup);
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (i >= groups) break;
    // Matrices: features 0..7 and 8..15 of the group's first 8 tokens, then of its others.
    char* at = out_chunk(out, i * kTokenGroup + lane / 16 * 8 + lane % 8,
                             warp * 2 + lane / 8 % 2);
    uint32_t r[4] = {0, 0, 0, 0};
    if (residual) ldmatrix4_trans(r, at);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float2 y = value(m % 2, 2 * i + m / 2);
      if (residual) {
        const float2 x = Traits<T>::to_float2(bit_cast<typename Traits<T>::Pair>(r[m]));
        y.x += x.x, y.y += x.y;
      }
      r[m] = bit_cast<uint32_t>(Traits<T>::from_float2(y));
    }
    store_matrix4_trans(at, r);
  }
  named_barrier_sync(1 + group, kGroup);
  T* to = static_cast<T*>(p.out) + at_token0;
  const bool handed = p.sumsq_out != nullptr;
  Vec16<T> norm_weight;
  const bool scaled = handed && p.scaled_out != nullptr && n < width;
  if (scaled) norm_weight = load16(static_cast<const T*>(p.next_norm_weight) + n);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int t = i * kStep + thread / kChunks;
    const Vec16<T> y = load16(reinterpret_cast<const T*>(out_chunk(out, t, chunk)));
    if (t < last) store16(to + t * static_cast<int64_t>(width), y);
    if (!handed) continue;
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += y.get(e) * y.get(e);
    if (n >= width) squares = 0.f;
#pragma unroll
    for (int o = 1; o < kChunks; o *= 2) squares += __shfl_xor_sync(~0u, squares, o);
    if (t >= last) continue;
    if (chunk == 0) {
      p.sumsq_out[static_cast<int64_t>(token0 + t) * ((width + 63) / 64) + n0 / 64] = squares;
    }
    if (scaled) {
      Vec16<T> z;
#pragma unroll
      for (int e = 0; e < 8; ++e) z.set(e, y.get(e) * norm_weight.get(e));
      store16(static_cast<T*>(p.scaled_out) + at_token0 + t * static_cast<int64_t>(width), z);
    }
  }
  named_barrier_sync(1 + group, kGroup);  // `out` is free again
}

// row_scale_of() by four lanes, of which this thread is one: with few registers, a thread would wait
// for one load after the other.
__device__ __forceinline__ float quad_row_scale(const Epilogue& p, int row) {
  const float* from = p.sumsq + static_cast<int64_t>(row) * p.num_sumsq;
  const int q = threadIdx.x % 4, whole = p.num_sumsq % 4 == 0 ? p.num_sumsq / 16 * 16 : 0;
  float sum = 0.f;
#pragma unroll 4
  for (int i = q * 4; i < whole; i += 16) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from + i));
    sum += (v.x + v.y) + (v.z + v.w);
  }
  for (int i = whole + q; i < p.num_sumsq; i += 4) sum += __ldcg(from + i);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  return rsqrtf(sum * p.inverse_width + p.epsilon);
}

// Scale and bias of a row of weight.
template <class T>
struct RowFactors {
  float scale, bias;
  __device__ __forceinline__ RowFactors(const Epilogue& p, int row) {
    const bool inside = row < p.out_features;
    scale = inside && p.weight_scale != nullptr ? __ldg(p.weight_scale + row) : 1.f;
    bias = inside && p.bias != nullptr ? Traits<T>::to_float(static_cast<const T*>(p.bias)[row])
                                       : 0.f;
  }
  __device__ __forceinline__ float of(float x) const { return fmaf(x, scale, bias); }
};

// Finishes `groups` groups of tokens, from token0 of all on, of a warpgroup's tile r. sum(j): the
// float4 that this thread holds of tokens 8 j ...
template <class T, class S, int kGroups, class Sum>
__device__ __forceinline__ void finish_tokens(const KernelParams& p, char* out, const Tile& tile,
                                              int r, int token0, int groups, const Sum& sum) {
  const int warp = threadIdx.x / kWarp % 4, group = threadIdx.x / kGroup;
  const int n0 = tile.row0 + (group * S::kTiles + r) * kTileRows;
  const int row = n0 + warp * 16 + threadIdx.x % kWarp / 4;
  const RowFactors<T> rows[2] = {{p.epilogue, row}, {p.epilogue, row + 8}};
  write_tokens<T, kGroups>(p.epilogue, out, group, n0, p.epilogue.out_features, token0, p.num_rows,
                           groups, [&](int i, int j) {
                             const float4 x = sum(j);
                             return i == 0 ? make_float2(rows[0].of(x.x), rows[0].of(x.y))
                                           : make_float2(rows[1].of(x.z), rows[1].of(x.w));
                           });
}

// By a warpgroup of a worker: adds up what all of them left of its groups of tokens of shared tiles,
// in the order of their columns, and finishes them.
template <class T, class S, int kTokens>
__device__ __forceinline__ void finish_shared(const KernelParams& p, char* out, int group) {
  constexpr int kTileGroups = kTokens / kTokenGroup, kItems = S::kTiles * kTileGroups;
  constexpr int kGroups = 4;  // at a time
  constexpr int kSlot = S::kSumsBytes / 16, kTileSums = kTokens / 8 * kGroup;
  const int thread = threadIdx.x % kGroup;
  const int last = p.groups.begin(blockIdx.x + 1);
  for (int item = p.groups.begin(blockIdx.x); item < last;) {
    const int index = item / kItems, within = item % kItems;
    const int r = within / kTileGroups, first = within % kTileGroups;
    const int groups = min(min(kGroups, last - item), kTileGroups - first);
    const int begin = p.units.owner(index * p.num_units);
    const int end = p.units.owner((index + 1) * p.num_units - 1) + 1;
    unsigned* arrivals = shared_tiles + index * 2 + group;
    if (thread == 0) {
      while (load_acquire(arrivals) < static_cast<unsigned>(end - begin)) {
      }
    }
    named_barrier_sync(1 + group, kGroup);
    float4 sums[2 * kGroups];
#pragma unroll
    for (int j = 0; j < 2 * kGroups; ++j) sums[j] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
    for (int w = begin; w < end; ++w) {
      const float4* from = p.sums + static_cast<int64_t>(p.slot(index, w)) * kSlot +
                           (group * S::kTiles + r) * kTileSums + first * 2 * kGroup + thread;
      float4 x[2 * kGroups];
#pragma unroll
      for (int j = 0; j < 2 * kGroups; ++j) {  // all at a time: behind the groups, the last again
        x[j] = __ldcg(from + min(j, 2 * groups - 1) * kGroup);
      }
#pragma unroll
      for (int j = 0; j < 2 * kGroups; ++j) {
        sums[j].x += x[j].x, sums[j].y += x[j].y, sums[j].z += x[j].z, sums[j].w += x[j].w;
      }
    }
    const Tile tile = tile_of<S, kTokens>(p, index);
    finish_tokens<T, S, kGroups>(p, out, tile, r, tile.token0 + first * kTokenGroup, groups,
                                 [&](int j) { return sums[j]; });
    // Behind the barriers of finish_tokens: all of the warpgroup has read.
    if (thread == 0) {
      const unsigned all = end - begin + kItems;
      if (atomicAdd(arrivals, groups) + groups == all) atomicExch(arrivals, 0);
    }
    item += groups;
  }
}

// A lane's codes of four steps of a tile. batch: of the stage, which has kTiles tiles' steps of 64
// columns, then of the others.
template <class T, class F, class S>
__device__ __forceinline__ void load_codes(PackedCodes<T, F>& codes, const char* stages, int stage,
                                           int batch) {
  const int slab = threadIdx.x / kGroup * 4 * S::kTiles + threadIdx.x / kWarp % 4;
  const char* at =
      stages + stage * S::kStageBytes + S::kHalves * S::kTokenBytes + slab * S::kSlabBytes;
  if constexpr (S::kHalves == 2) {
    codes.load(at + batch % S::kTiles * 4 * S::kSlabBytes, batch / S::kTiles);
  } else {
    codes.load(at, at + F::kHalfBytes);
  }
}

template <class T, class F, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_packed_shared_kernel(const __grid_constant__ CUtensorMap token_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<F, kTokens>;
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* stages = shared + (-shared_address(shared) & 1023);
  char* outs = stages + S::kStages * S::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(outs + 2 * S::kOutBytes);
  uint64_t* empty = full + kMaxStages;
  uint64_t* scaled_full = empty + kMaxStages;  // [2]
  uint64_t* scaled_empty = scaled_full + 2;    // [2]
  float* row_scale = reinterpret_cast<float*>(outs + 2 * S::kOutBytes + kHeadBytes);  // [2, kTokens]

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  pdl_trigger();
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&token_map);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], 2 * kGroup / kWarp);
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(&scaled_full[s], kScaleWarps);
      barrier_init(&scaled_empty[s], 2 * kGroup / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();

  constexpr int kUnitSteps = 2 / S::kHalves;  // stages of a unit
  if (warp >= 2 * kGroup / kWarp) {
    registers_give<40>();
    if (warp > 2 * kGroup / kWarp) {
      if (p.epilogue.sumsq == nullptr) return;
      pdl_wait();
      int s = 0;
      uint32_t phase = 1;
      Parts parts(p);
      while (parts.next(p)) {
        const int token0 = tile_of<S, kTokens>(p, parts.tile).token0;
        barrier_wait(&scaled_empty[s], phase);
        for (int t = (threadIdx.x - 2 * kGroup - kWarp) / 4; t < kTokens; t += kScaleWarps * 8) {
          const float scale = quad_row_scale(p.epilogue, min(token0 + t, p.num_rows - 1));
          if (lane % 4 == 0) row_scale[s * kTokens + t] = scale;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&scaled_full[s]);
        if (++s == 2) s = 0, phase ^= 1;
      }
      return;
    }
    const uint64_t keep = policy_evict_last();
    const uint64_t once = p.token_blocks > 1 ? keep : policy_evict_first();
    bool waited = false;
    int s = 0;
    uint32_t phase = 1;  // the first round waits for nothing
    Parts parts(p);
    while (parts.next(p)) {
      const Tile tile = tile_of<S, kTokens>(p, parts.tile);
      // This lane's slab. Behind the last one, its own rows again: they are not written.
      const int slab = tile.row0 / kUnitRows + lane;
      const uint8_t* from =
          p.weight + static_cast<int64_t>(min(slab, p.num_slabs - 1)) * p.num_units * F::kUnitBytes;
      const auto load_weight = [&](int step, int stage) {
        if (lane == 0) barrier_arrive_expect(&full[stage], S::kStageLoad);
        __syncwarp();
        if (lane >= S::kSlabs) return;
        char* to =
            stages + stage * S::kStageBytes + S::kHalves * S::kTokenBytes + lane * S::kSlabBytes;
        const uint8_t* unit = from + static_cast<int64_t>(step / kUnitSteps) * F::kUnitBytes;
        if constexpr (S::kHalves == 2) {
          bulk_load(to, unit, F::kUnitBytes, &full[stage], once);
        } else {
          const int half = step % 2;
          bulk_load(to, unit + half * F::kHalfBytes, F::kHalfBytes, &full[stage], once);
          if constexpr (F::kGroups) {
            const int words = F::kColumns < kUnitColumns ? half * F::kHalfScaleBytes : 0;
            bulk_load(to + F::kHalfBytes, unit + 2 * F::kHalfBytes + words, F::kHalfScaleBytes,
                      &full[stage], once);
          }
        }
      };
      const auto load_tokens = [&](int step, int stage) {
        if (lane < S::kHalves) {
          tensor_load_2d(stages + stage * S::kStageBytes + lane * S::kTokenBytes, &token_map,
                         step * S::kStageColumns + lane * 64, tile.token0, &full[stage], keep);
        }
      };
      const int first = parts.unit * kUnitSteps, end = parts.end * kUnitSteps;
      // Weights of the first part are on their way before x is there.
      int ahead = 0;
      if (!waited) {
        ahead = min(S::kStages, end - first);
        for (int i = 0; i < ahead; ++i) load_weight(first + i, i);
        pdl_wait();
        waited = true;
      }
      for (int step = first; step < end; ++step) {
        if (ahead > 0) {
          --ahead;
        } else {
          barrier_wait(&empty[s], phase);
          load_weight(step, s);
        }
        load_tokens(step, s);
        if (++s == S::kStages) s = 0, phase ^= 1;
      }
    }
    return;
  }

  registers_take<232>();
  pdl_wait();
  const int group = warp / 4;
  char* out = outs + group * S::kOutBytes;
  constexpr int kBatches = S::kHalves * S::kTiles;  // of four steps of a tile, of a stage
  int s = 0, scaled = 0;
  uint32_t phase = 0, scaled_phase = 0;
  Parts parts(p);
  while (parts.next(p)) {
    float acc[S::kTiles][kTokens / 2];
#pragma unroll
    for (int r = 0; r < S::kTiles; ++r) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[r][i] = 0.f;
    }
    PackedCodes<T, F> codes[2];
    uint32_t a[4][4];  // operands of four steps
    const WgmmaTile tokens = wgmma_descriptor(stages);  // of the first stage
    barrier_wait(&full[s], phase);
    load_codes<T, F, S>(codes[0], stages, s, 0);
    codes[0].convert(0, a[0]);
    int previous = -1, current = s;
    int left = parts.end - parts.unit;
    do {
#pragma unroll
      for (int q = 0; q < 2 * S::kTiles; ++q) {  // of the unit's batches of four steps of a tile
        const int r = q % S::kTiles, batch = q % kBatches;
        if (batch == 0) {
          current = s;
          if (++s == S::kStages) s = 0, phase ^= 1;
        }
        const WgmmaTile b =
            tokens.at(current * S::kStageBytes + batch / S::kTiles * S::kTokenBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma_fence();
          Wgmma<T, kTokens>::run(acc[r], a[k], b.at(k * 32), 1);
          wgmma_commit();
          if (k == 0) {  // the next batch's codes
            if (batch + 1 < kBatches) {
              load_codes<T, F, S>(codes[(q + 1) % 2], stages, current, batch + 1);
            } else if (q + 1 < 2 * S::kTiles || left > 1) {
              barrier_wait(&full[s], phase);
              load_codes<T, F, S>(codes[(q + 1) % 2], stages, s, 0);
            }
          }
          // The next operands are made while the tensor cores read these.
          wgmma_wait<3>();
          if (batch == 0 && k == 3) {  // all of the stage before has been read
            if (previous >= 0 && lane == 0) barrier_arrive(&empty[previous]);
            previous = current;
          }
          codes[(q + k / 3) % 2].convert((k + 1) % 4, a[(k + 1) % 4]);
        }
      }
    } while (--left > 0);
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < S::kTiles; ++r) wgmma_pin(acc[r]);
    if (lane == 0) barrier_arrive(&empty[previous]);
    if (p.epilogue.sumsq != nullptr) {
      barrier_wait(&scaled_full[scaled], scaled_phase);
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        const float2 scale =
            load_shared_float2(row_scale + scaled * kTokens + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int r = 0; r < S::kTiles; ++r) {
          acc[r][4 * j] *= scale.x, acc[r][4 * j + 1] *= scale.y;
          acc[r][4 * j + 2] *= scale.x, acc[r][4 * j + 3] *= scale.y;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&scaled_empty[scaled]);
      if (++scaled == 2) scaled = 0, scaled_phase ^= 1;
      __syncwarp();
    }
    const auto sum = [&](int r, int j) {
      return make_float4(acc[r][4 * j], acc[r][4 * j + 1], acc[r][4 * j + 2], acc[r][4 * j + 3]);
    };
    if (parts.tile < p.shared) {  // even where this block has all of its units
      float4* to = p.sums +
                   static_cast<int64_t>(p.slot(parts.tile, blockIdx.x)) * (S::kSumsBytes / 16) +
                   group * S::kTiles * (kTokens / 8 * kGroup) + threadIdx.x % kGroup;
#pragma unroll
      for (int r = 0; r < S::kTiles; ++r) {
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
          __stcg(to + (r * (kTokens / 8) + j) * kGroup, sum(r, j));
        }
      }
      named_barrier_sync(1 + group, kGroup);
      if (threadIdx.x % kGroup == 0) add_release(shared_tiles + parts.tile * 2 + group, 1);
      __syncwarp();  // else `s` would not count as the same for all of the warp
      continue;
    }
    const Tile tile = tile_of<S, kTokens>(p, parts.tile);
#pragma unroll
    for (int r = 0; r < S::kTiles; ++r) {
#pragma unroll
      for (int first = 0; first < kTokens / kTokenGroup; first += S::kOutGroups) {
        finish_tokens<T, S, S::kOutGroups>(p, out, tile, r, tile.token0 + first * kTokenGroup,
                                           S::kOutGroups,
                                           [&](int j) { return sum(r, first * 2 + j); });
      }
    }
  }
  if (blockIdx.x < p.workers) finish_shared<T, S, kTokens>(p, out, group);
#else
  wrong_architecture();
#endif
}

template <class T, class F, int kTokens>
Status run(const GemmParams& p, int workers, float4* sums, cudaStream_t stream) {
  using S = Shape<F, kTokens>;
  CUtensorMap token_map;
  const Status status =
      encode_rows_map(&token_map, p.dtype, p.x, p.num_rows, p.in_features, kTokens);
  if (!status.ok()) return status;
  const int blocks = num_multiprocessors();
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.weight = static_cast<const uint8_t*>(p.weight);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.num_slabs = static_cast<int>(packed_tiles(p.out_features));
  kp.row_blocks = static_cast<int>(ceil_div(p.out_features, S::kRows));
  kp.token_blocks = static_cast<int>(ceil_div(p.num_rows, kTokens));
  const int tiles = kp.row_blocks * kp.token_blocks;
  kp.workers = workers;
  kp.shared = workers > 0 ? tiles % blocks : 0;
  kp.units = Shares::of(kp.shared * kp.num_units, workers);
  kp.groups = Shares::of(kp.shared * S::kTiles * (kTokens / kTokenGroup), workers);
  kp.unit_reciprocal = ((uint64_t{1} << 32) + kp.num_units - 1) / kp.num_units;
  kp.sums = sums;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(workers > 0 && tiles < blocks ? workers : std::min(blocks, tiles)));
  config.block = dim3(kThreads);
  config.shared_bytes = S::kSharedBytes;
  config.stream = stream;
  config.pdl = p.dependent_launch;
  return launch(gemm_packed_shared_kernel<T, F, kTokens>, config, "gemm_packed_shared",
                token_map, kp);
}

template <class T>
Status run_format(const GemmParams& p, const PackedTile& tile, float4* sums, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kTokenSize == 1) {
      return Status::error("gemm_packed_shared_sm90: codes");
    } else {
      if constexpr (!F::kGroups) {
        if (tile.tokens == 256) return run<T, F, 256>(p, tile.workers, sums, stream);
      }
      return tile.tokens == 96 ? run<T, F, 96>(p, tile.workers, sums, stream)
                               : run<T, F, 128>(p, tile.workers, sums, stream);
    }
  });
}

// Bytes of sums that the workers leave.
int64_t sums_bytes(const GemmParams& p, const PackedTile& tile) {
  if (tile.workers == 0) return 0;
  const int64_t rest = packed_tile_count(p, tile.tokens) % num_multiprocessors();
  return (tile.workers + rest) * packed_tile_rows(tile.tokens) * tile.tokens * 4;
}

}  // namespace

const char* gemm_packed_shared_sm90_refuses(const GemmParams& p) {
  if (const char* reason = packed_refuses(p)) return reason;
  if (p.operands == GemmOperands::kW4A8) return "activations must have 16 bits";
  if (p.out_dtype != p.dtype) return "out_dtype must be dtype";
  if (p.sumsq_out != nullptr && gemm_sumsq_columns(p.num_rows) != 64) return "sumsq_out of few rows";
  if (p.gated) return "gated";
  if (!make_epilogue(p).vector_out) {
    return "rows of out, residual and scaled_out must be aligned to 16 bytes";
  }
  if (p.scaled_out != nullptr &&
      (p.sumsq_out == nullptr || reinterpret_cast<uintptr_t>(p.next_norm_weight) % 16 != 0)) {
    return "scaled_out comes with sumsq_out and weights aligned to 16 bytes";
  }
  return nullptr;
}

int64_t packed_tile_count(const GemmParams& p, int tokens) {
  return ceil_div(p.out_features, packed_tile_rows(tokens)) * ceil_div(p.num_rows, tokens);
}

// By microseconds as measured on an H200.
PackedTile choose_packed_tile(const GemmParams& p, int num_multiprocessors, int64_t scratch_bytes) {
  constexpr struct {
    int tokens;
    double unit, whole;  // of a unit of a tile, and beside, of a tile
  } kCosts[] = {{96, 1.22, 4.}, {128, 1.33, 4.5}, {256, 1.29, 5.}};
  const int64_t units = packed_units(p.in_features), blocks = num_multiprocessors;
  // Whole tiles by gemm_packed_tiles_sm90, and of few rows k in two parts by gemm_packed_sm90.
  double best_cost = ceil_div(packed_tile_count(p, 128), blocks) * (units * 1.25 + 4.);
  if (p.num_rows <= 128 && ceil_div(p.out_features, 128) * 2 <= blocks) {
    best_cost = std::min(best_cost, 6. + .45 * units);
  }
  PackedTile best;
  for (const auto& [tokens, unit, whole] : kCosts) {
    if (tokens == 256 && (p.operands != GemmOperands::kWeightInt8 || p.num_rows > 256)) continue;
    const int64_t tiles = packed_tile_count(p, tokens), rest = tiles % blocks;
    if (rest == 0) continue;
    for (const int64_t workers : {blocks / rest * rest, blocks}) {
      PackedTile tile;
      tile.tokens = tokens;
      tile.workers = static_cast<int>(std::min(workers, rest * units));
      if (tile.workers == rest || sums_bytes(p, tile) > scratch_bytes) continue;
      // Where shares begin amid a tile, a block may leave sums twice, and finishes more tokens.
      const bool amid = tile.workers % rest != 0;
      const int64_t share = ceil_div(rest * units, tile.workers);
      const double cost = tiles / blocks * (units * unit + whole) + share * unit + 14. +
                          (amid ? 2. + 12. * rest / tile.workers + .15 * share : 0.);
      if (cost < best_cost) best_cost = cost, best = tile;
    }
  }
  return best;
}

bool gemm_packed_shares(const GemmParams& p, const GemmResources& r) {
  return choose_packed_tile(p, num_multiprocessors(), r.scratch_bytes).workers > 0;
}

Status gemm_packed_shared_sm90(const GemmParams& p, const PackedTile& tile,
                               const GemmResources& resources, CUstream_st* stream) {
  if (const char* reason = gemm_packed_shared_sm90_refuses(p)) {
    return Status::error(std::string("gemm_packed_shared_sm90: ") + reason);
  }
  if (sums_bytes(p, tile) > resources.scratch_bytes) {
    return Status::error("gemm_packed_shared_sm90: " + std::to_string(sums_bytes(p, tile)) +
                         " bytes of scratch needed, got " + std::to_string(resources.scratch_bytes));
  }
  if (p.num_rows == 0) return {};
  float4* sums = static_cast<float4*>(resources.scratch);
  return p.dtype == DType::kBFloat16 ? run_format<__nv_bfloat16>(p, tile, sums, stream)
                                     : run_format<__half>(p, tile, sums, stream);
}

Status gemm_packed_shared_sm90(const GemmParams& p, const GemmResources& resources,
                               CUstream_st* stream) {
  const PackedTile tile = choose_packed_tile(p, num_multiprocessors(), resources.scratch_bytes);
  if (tile.workers == 0) return Status::error("gemm_packed_shared_sm90: nothing to share");
  return gemm_packed_shared_sm90(p, tile, resources, stream);
}

}  // namespace regatta::cuda
