// y = epilogue(x w^T) of many rows with weights of 8 or 4 bits, activations of 16.
//
// Input: x [M, K] bf16 or fp16; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90a.
// Algorithm
//   1. Blocks stay and take tiles of 128 to 256 rows of weight by 64 to 256 tokens, of the shape
//      whose waves cost least (choose_packed_tiles). Tiles of a last wave are shared out along k;
//      the shares' sums meet through L2. Of groups, tiles come from a table the block makes first.
//   2. One warp fills a ring of stages with weights before it waits for x. A warpgroup turns 64
//      columns of codes into the left operand of wgmma in registers while the tensor cores work.
//   3. Outputs are transposed in shared memory (stmatrix), and written 16 bytes at a time.
// Source: own; CUTLASS's mixed-input products and Machete have the same main loop, Stream-K shares
// out last waves.
//
// Bound: the tensor cores, at the clock that the power limit leaves; for few tokens the number of
// instructions: hence the vote in add_shares(), with which descriptors are in uniform registers.
#include <algorithm>
#include <iterator>
#include <string>
#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/gemm_tensor_map.cuh"
#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/packed_weight.cuh"
#include "cuda/gemm/select.h"
#include "cuda/hopper.cuh"
#include "cuda/wgmma.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kTileRows = 64;  // rows of weight of an instruction
constexpr int kGroup = 128;    // threads of a warpgroup
constexpr int kMaxStages = 8;
constexpr int kHeadBytes = 256;
constexpr int kOrder = 1024;  // tokens that are worked on together

// A block's tile of kRows rows of weight and kTokens tokens.
template <class F, int kRows, int kTokens, bool kGated, bool kGrouped>
struct Shape {
  static constexpr int kHalves = kTokens > 192 ? 1 : 2;         // of a unit, in a stage
  static constexpr int kTokenBytes = kTokens * 128;             // of a half
  static constexpr int kGroups = kRows == 192 ? 3 : 2;          // warpgroups that multiply
  static constexpr int kTiles = kRows / (kGroups * kTileRows);  // of each
  static constexpr int kSlabs = kRows / kUnitRows;
  static constexpr int kGroupSlabs = kGated ? 4 : 4 * kTiles;  // gated: of gates
  static constexpr int kThreads = (kGroups + 1) * kGroup;
  static constexpr int kRegisters = kGroups == 3 ? 160 : 232;  // of a thread that multiplies
  static constexpr int kCopyRegisters = kGroups == 3 ? 32 : 40;
  // Halves of units whose codes are asked for ahead of their use.
  static constexpr int kAhead =
      kRows == 128 && (kTokens <= 128 || (kTokens == 160 && F::kCodeBits == 4)) ? 2 : 1;
  // Of a slab; behind all slabs' codes, where a stage is a half, its scales.
  static constexpr int kCodeBytes = kHalves == 2 ? F::kUnitBytes : F::kHalfBytes;
  static constexpr int kScaleBytes = kHalves == 2 ? 0 : F::kHalfScaleBytes;
  static constexpr int kLoadBytes = kHalves * kTokenBytes + kSlabs * (kCodeBytes + kScaleBytes);
  static constexpr int kStageBytes = (kLoadBytes + 1023) / 1024 * 1024;
  // Outputs pass through shared memory in parts, beside the stages where that leaves three of them,
  // else where a warpgroup's weights of the last one were.
  static constexpr int kOutTokens = kTokens % 64 == 0 ? 64 : kTokens / 2;
  static constexpr int kOutBytes = kOutTokens * kTileRows * 2;  // of a warpgroup
  static constexpr int kTableBytes = kGrouped ? sizeof(GroupTable) : 0;
  static constexpr int kStageSpace = 226 * 1024 - kHeadBytes - kTableBytes;
  static constexpr bool kOutBeside = (kStageSpace - kGroups * kOutBytes) / kStageBytes >= 3;
  static_assert(kOutBeside || kOutBytes <= kTileRows / kUnitRows * kCodeBytes);
  static constexpr int kOutsBytes = kOutBeside ? kGroups * kOutBytes : 0;
  static constexpr int kStages = std::min(kMaxStages, (kStageSpace - kOutsBytes) / kStageBytes);
  // Two ahead, a stage is waited for before the one in front of it is given back.
  static_assert(kStages > kAhead);
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + kOutsBytes + kHeadBytes + kTableBytes;
};

struct KernelParams {
  Epilogue epilogue;
  int num_rows, num_units;  // units along k
  int row_blocks, token_blocks;
  int num_whole, num_items;  // tiles; behind the whole ones, shares of tiles
  int share_bits;            // of such a tile, a power of two of shares
  int share_units;           // units of each but the last
  Groups groups;
};

struct Tile {
  int token0, row0;  // row0: of the output
  int end;           // of the tokens that are written
  int group;
};

// Tile `index` of token_blocks tiles of tokens from token0 to `end`.
template <int kOutRows, int kTokens>
__device__ __forceinline__ Tile tile_at(int row_blocks, int token_blocks, int index, int token0,
                                        int end, int group) {
  constexpr int kTogether = kOrder / kTokens;
  const int first = index / (kTogether * row_blocks) * kTogether;
  const int order = min(kTogether, token_blocks - first);
  const int within = index - first * row_blocks;
  return {token0 + (first + within % order) * kTokens, within / order * kOutRows, end, group};
}

template <int kOutRows, int kTokens>
__device__ __forceinline__ Tile tile_of(const KernelParams& p, int item) {
  const int behind = item - p.num_whole;
  const int index = behind < 0 ? item : p.num_whole + (behind >> p.share_bits);
  return tile_at<kOutRows, kTokens>(p.row_blocks, p.token_blocks, index, 0, p.num_rows, 0);
}

// The same of groups, by a whole warp.
template <int kOutRows, int kTokens>
__device__ __forceinline__ Tile tile_of(const KernelParams& p, const GroupTable& table, int item) {
  const int group = table.group_of(item / p.row_blocks, p.groups.count);
  const int first_tile = group == 0 ? 0 : table.tile_ends[group - 1];
  const int first_row = group == 0 ? 0 : table.row_ends[group - 1];
  return tile_at<kOutRows, kTokens>(p.row_blocks, table.tile_ends[group] - first_tile,
                                    item - first_tile * p.row_blocks, first_row,
                                    table.row_ends[group], group);
}

// The part of k that an item is. Without divisions the compiler knows that a warp's threads agree,
// and keeps in uniform registers what a loop over it needs.
struct Part {
  int unit0, end_unit;
  int share;  // -1: the whole
};

__device__ __forceinline__ Part part_of(const KernelParams& p, int item) {
  if (item < p.num_whole) return {0, p.num_units, -1};
  const int share = (item - p.num_whole) & ((1 << p.share_bits) - 1);
  const int unit0 = share * p.share_units;
  return {unit0, min(p.num_units, unit0 + p.share_units), share};
}

// What the blocks that share a tile send each other: [tile][share][8 tokens of 64 rows][thread],
// and how many have sent and taken. Products are queued one after the other, so that one piece
// serves all.
__device__ float4 parts[kMaxShared * 192 * 192 / 4];
__device__ unsigned num_sent[kMaxShared], num_taken[kMaxShared];

__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// The sums of this share's tokens become those of all shares. Called by kThreads threads.
template <int kShares, int kThreads, int kTiles, int kCount>
__device__ __forceinline__ void add_shares(float (&acc)[kTiles][kCount], int tile, int share) {
  constexpr int kFours = kCount / 4, kOwn = kFours / kShares;  // of eight tokens; of a share
  const auto part = [&](int from, int r, int j) {
    return parts +
           ((static_cast<int64_t>(tile * kShares + from) * kTiles + r) * kFours + j) * kThreads +
           threadIdx.x;
  };
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    if (j / kOwn == share) continue;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      __stcg(part(share, r, j),
             make_float4(acc[r][4 * j], acc[r][4 * j + 1], acc[r][4 * j + 2], acc[r][4 * j + 3]));
    }
  }
  constexpr int kBarrier = 4;
  __threadfence();
  named_barrier_sync(kBarrier, kThreads);
  if (threadIdx.x == 0) atomicAdd(&num_sent[tile], 1);
  // A vote: of a loop that lanes could leave by themselves the compiler would have to think that
  // they are apart from then on, and keep nothing in uniform registers.
  for (int tries = 0; __any_sync(~0u, load_acquire(&num_sent[tile]) < kShares); ++tries) {
    if (tries == 1 << 22) asm volatile("trap;");  // seconds: an error, not a hang
  }
  for (int i = 1; i < kShares; ++i) {
    const int from = i <= share ? i - 1 : i;
#pragma unroll
    for (int own = 0; own < kShares; ++own) {
      if (own != share) continue;
#pragma unroll
      for (int j = own * kOwn; j < (own + 1) * kOwn; ++j) {
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          const float4 v = __ldcg(part(from, r, j));
          acc[r][4 * j] += v.x, acc[r][4 * j + 1] += v.y;
          acc[r][4 * j + 2] += v.z, acc[r][4 * j + 3] += v.w;
        }
      }
    }
  }
  // The last block, none of whose warps looks any more, leaves the counts as they were found; the
  // next product's blocks wait for this one's.
  named_barrier_sync(kBarrier, kThreads);
  if (threadIdx.x == 0 && atomicAdd(&num_taken[tile], 1) == kShares - 1) {
    num_sent[tile] = num_taken[tile] = 0;
  }
}

// 16 bytes `chunk` of token t in an output tile.
__device__ __forceinline__ char* out_chunk(char* out, int t, int chunk) {
  return out + t * 128 + ((chunk ^ (t & 7)) << 4);
}

// Writes 64 features from feature n0 on of parts `begin` to `end` of kPart of a tile's tokens;
// value(i, j) is the pair of tokens that register pair i (0: row g, 1: row g + 8) of tokens 8 j
// holds.
template <class T, int kTokens, int kPart, class Value>
__device__ __forceinline__ void write_tile(const Epilogue& p, char* out, int group, int n0,
                                           int width, int token0, int end_token, int begin, int end,
                                           const Value& value) {
  constexpr int kCount = kPart / 16, kParts = kTokens / kPart;
  // What follows from it is not to be made, and kept in registers, ahead of the products.
  int thread = threadIdx.x % kGroup;
  asm volatile("" : "+r"(thread));
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int row = thread / 8, chunk = thread % 8, n = n0 + chunk * 8;
  const int count = n < width ? end_token - token0 - row : 0;  // tokens from this thread's first on
  const int64_t first = static_cast<int64_t>(token0 + row) * width + n;
  const auto place = [&](int t) { return first + static_cast<int64_t>(t) * width; };
  const T* residual = static_cast<const T*>(p.residual);
  uint4 ahead[kCount];  // of the next part
  const auto load_residual = [&](int part) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int t = part * kPart + i * 16;
      ahead[i] = make_uint4(0, 0, 0, 0);
      if (t < count) ahead[i] = __ldcg(reinterpret_cast<const uint4*>(residual + place(t)));
    }
  };
  if (residual != nullptr) load_residual(begin);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (part < begin || part >= end) continue;
    named_barrier_sync(1 + group, kGroup);  // nothing reads what is there any more
    if (residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        *reinterpret_cast<uint4*>(out_chunk(out, i * 16 + row, chunk)) = ahead[i];
      }
      if (part + 1 < end) load_residual(part + 1);
      named_barrier_sync(1 + group, kGroup);
    }
#pragma unroll
    for (int j = 0; j < kPart / 8; j += 2) {
      // Matrices: features 0..7 and 8..15 of tokens 8j.., then of tokens 8j + 8..
      char* at = out_chunk(out, j * 8 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
      uint32_t r[4] = {0, 0, 0, 0};
      if (residual != nullptr) ldmatrix4_trans(r, at);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float2 y = value(m % 2, part * (kPart / 8) + j + m / 2);
        if (residual != nullptr) {
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
    for (int i = 0; i < kCount; ++i) {
      const int t = part * kPart + i * 16;
      if (t < count) {
        *reinterpret_cast<uint4*>(to + place(t)) =
            *reinterpret_cast<const uint4*>(out_chunk(out, i * 16 + row, chunk));
      }
    }
  }
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

template <class T, class F, int kRows, int kTokens, bool kGated, bool kGrouped>
__global__ void __launch_bounds__(Shape<F, kRows, kTokens, kGated, kGrouped>::kThreads, 1)
    gemm_packed_tiles_kernel(const __grid_constant__ CUtensorMap token_map,
                             const __grid_constant__ CUtensorMap weight_map,
                             const __grid_constant__ CUtensorMap scale_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<F, kRows, kTokens, kGated, kGrouped>;
  constexpr int kTokenBytes = S::kTokenBytes;
  constexpr int kOutRows = kGated ? kRows / 2 : kRows;
  constexpr int kMultiply = S::kGroups * kGroup;  // threads
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* stages = shared + (-shared_address(shared) & 1023);
  char* outs = stages + S::kStages * S::kStageBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(outs + S::kOutsBytes);
  uint64_t* empty = full + kMaxStages;
  GroupTable& table =
      *reinterpret_cast<GroupTable*>(reinterpret_cast<char*>(full) + kHeadBytes);  // of groups

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const auto tile_at = [&](int item) {
    if constexpr (kGrouped) {
      return tile_of<kOutRows, kTokens>(p, table, item);
    } else {
      return tile_of<kOutRows, kTokens>(p, item);
    }
  };
  const auto part_at = [&](int item) {
    return kGrouped ? Part{0, p.num_units, -1} : part_of(p, item);
  };
  if (kGrouped && !p.groups.ready) pdl_wait();
  pdl_trigger();
  if constexpr (kGrouped) make_group_table<kTokens>(p.groups, &table);
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&token_map);
    tensor_map_prefetch(&weight_map);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kMultiply / kWarp);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int num_items = kGrouped ? table.tile_ends[p.groups.count - 1] * p.row_blocks : 0;
  // A vote tells the compiler, of a number from memory, that a warp's threads agree.
  const auto has_item = [&](int item) {
    return kGrouped ? __any_sync(~0u, item < num_items) != 0 : item < p.num_items;
  };
  if (kGrouped && !has_item(blockIdx.x)) return;

  if (warp >= kMultiply / kWarp) {
    registers_give<S::kCopyRegisters>();
    if (warp > kMultiply / kWarp) return;
    const uint64_t policy = policy_evict_first();
    constexpr int kPerUnit = 2 / S::kHalves;  // stages
    const auto load_weight = [&](const Tile& tile, int step, int stage) {
      if (lane > 0) return;
      barrier_arrive_expect(&full[stage], S::kLoadBytes);
      char* to = stages + stage * S::kStageBytes + S::kHalves * kTokenBytes;
      const int slab = tile.row0 / kUnitRows, layer = tile.group * (kGated ? 2 : 1);
      if constexpr (S::kHalves == 2) {
        tensor_load_4d(to, &weight_map, 0, step * 2, slab, layer, &full[stage], policy);
      } else {
        const int unit = step / 2, half = step % 2;
        tensor_load_4d(to, &weight_map, half * (F::kHalfBytes / 8), unit, slab, layer, &full[stage],
                       policy);
        if constexpr (F::kGroups) {
          const int at = F::kColumns < kUnitColumns ? half * F::kHalfScaleBytes : 0;
          tensor_load_4d(to + S::kSlabs * F::kHalfBytes, &scale_map, (2 * F::kHalfBytes + at) / 8,
                         unit, slab, layer, &full[stage], policy);
        }
      }
    };
    const auto load_tokens = [&](const Tile& tile, int step, int stage) {
      if (lane > 0) return;
#pragma unroll
      for (int box = 0; box < S::kHalves; ++box) {
        tensor_load_2d(stages + stage * S::kStageBytes + box * kTokenBytes, &token_map,
                       (step * S::kHalves + box) * (kUnitColumns / 2), tile.token0, &full[stage],
                       policy);
      }
    };
    // Weights of the first stages are on their way before x is there.
    const Part first = part_at(blockIdx.x);
    const int ahead = min(S::kStages, (first.end_unit - first.unit0) * kPerUnit);
    for (int i = 0; i < ahead; ++i) load_weight(tile_at(blockIdx.x), first.unit0 * kPerUnit + i, i);
    pdl_wait();
    int s = 0, loaded = ahead;
    uint32_t phase = 1;  // the first round waits for nothing
    for (int item = blockIdx.x; has_item(item); item += gridDim.x) {
      const Tile tile = tile_at(item);
      const Part part = part_at(item);
      for (int step = part.unit0 * kPerUnit; step < part.end_unit * kPerUnit; ++step) {
        barrier_wait(&empty[s], phase);
        if (--loaded < 0) load_weight(tile, step, s);
        load_tokens(tile, step, s);
        if (++s == S::kStages) s = 0, phase ^= 1;
      }
    }
    return;
  }

  registers_take<S::kRegisters>();
  pdl_wait();
  const int group = warp / 4;
  // A warpgroup's slabs: gated, of gates and, behind all gates, of their ups.
  const int slab = group * S::kGroupSlabs;
  const int group_bytes = S::kHalves * kTokenBytes + slab * S::kCodeBytes;
  const int warp_bytes = group_bytes + warp % 4 * S::kCodeBytes;
  const int scale_bytes =
      S::kHalves * kTokenBytes + S::kSlabs * S::kCodeBytes + (slab + warp % 4) * S::kScaleBytes;
  int s = 0;
  uint32_t phase = 0;
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(&empty[stage]);
  };
  for (int item = blockIdx.x; has_item(item); item += gridDim.x) {
    Tile tile = {};
    if (!kGrouped) tile = tile_at(item);
    const Part own = part_at(item);
    float acc[S::kTiles][kTokens / 2];
#pragma unroll
    for (int r = 0; r < S::kTiles; ++r) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[r][i] = 0.f;
    }
    uint32_t a[2][4][4];  // one is made while the tensor cores read the other
    PackedCodes<T, F> codes[S::kAhead];
    const WgmmaTile tokens = wgmma_descriptor(stages);  // of the first stage
    constexpr int kSteps = 2 * S::kTiles;               // of a unit
    constexpr int kStageSteps = S::kHalves * S::kTiles;
    const auto load_codes = [&](int stage, int q) {
      // Slabs from the first tile's to the second's.
      constexpr int kNext = kGated ? S::kSlabs / 2 : 4;
      const char* at = stages + stage * S::kStageBytes;
      const char* unit = at + warp_bytes + q % S::kTiles * kNext * S::kCodeBytes;
      if constexpr (S::kHalves == 2) {
        codes[q % S::kAhead].load(unit, q / S::kTiles);
      } else {
        static_assert(S::kTiles == 1);
        codes[q % S::kAhead].load(unit, at + scale_bytes);
      }
    };
    barrier_wait(&full[s], phase);
#pragma unroll
    for (int q = 0; q < S::kAhead; ++q) load_codes(s, q);
    int current = -1;
    int left = own.end_unit - own.unit0;
    do {
#pragma unroll
      for (int q = 0; q < kSteps; ++q) {
        const int then = q + S::kAhead, previous = current;
        if (q % kStageSteps == 0) {
          current = s;
          if (++s == S::kStages) s = 0, phase ^= 1;
        }
        codes[q % S::kAhead].convert(a[q % 2]);
        const WgmmaTile b =
            tokens.at(current * S::kStageBytes + q % kStageSteps / S::kTiles * kTokenBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Wgmma<T, kTokens>::run(acc[q % S::kTiles], a[q % 2][k], b.at(k * 32), 1);
        }
        wgmma_commit();
        if (then / kStageSteps == q / kStageSteps) {
          load_codes(current, then);
        } else if (then < kSteps || left > 1) {
          if (then % kStageSteps == 0) barrier_wait(&full[s], phase);
          load_codes(s, then % kSteps);
        }
        wgmma_wait<1>();
        if (q % kStageSteps == 0 && previous >= 0) release(previous);
      }
    } while (--left > 0);
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < S::kTiles; ++r) wgmma_pin(acc[r]);

    if (kGrouped) tile = tile_at(item);  // not in registers beside the products
    const auto& epilogue = epilogue_of<T, kGrouped>(p.epilogue, tile.group);
    const int width = kGated ? epilogue.out_features / 2 : epilogue.out_features;
    if (S::kOutBeside) release(current);
    char* out = S::kOutBeside ? outs + group * S::kOutBytes
                              : stages + current * S::kStageBytes + group_bytes;
    const auto write = [&](auto part, int begin, int end) {
      constexpr int kPart = decltype(part)::value;
      if constexpr (kGated) {
        const int n0 = tile.row0 + group * kTileRows;
        const int row = n0 + warp % 4 * 16 + lane / 4;
        const RowFactors<T> gate(epilogue, row), up(epilogue, width + row);
        write_tile<T, kTokens, kPart>(
            epilogue, out, group, n0, width, tile.token0, tile.end, begin, end, [&](int i, int j) {
              const auto pair = [&](int c) {
                return gated_value(fmaf(acc[0][4 * j + 2 * i + c], gate.scale[i], gate.bias[i]),
                                   fmaf(acc[1][4 * j + 2 * i + c], up.scale[i], up.bias[i]));
              };
              return make_float2(pair(0), pair(1));
            });
      } else {
#pragma unroll
        for (int r = 0; r < S::kTiles; ++r) {
          const int n0 = tile.row0 + (group * S::kTiles + r) * kTileRows;
          const RowFactors<T> row(epilogue, n0 + warp % 4 * 16 + lane / 4);
          write_tile<T, kTokens, kPart>(
              epilogue, out, group, n0, width, tile.token0, tile.end, begin, end,
              [&](int i, int j) {
                return make_float2(fmaf(acc[r][4 * j + 2 * i], row.scale[i], row.bias[i]),
                                   fmaf(acc[r][4 * j + 2 * i + 1], row.scale[i], row.bias[i]));
              });
        }
      }
    };
    if (own.share < 0) {
      write(std::integral_constant<int, S::kOutTokens>(), 0, kTokens / S::kOutTokens);
    } else {  // a block's last item
      constexpr int kPart = 16;
      const int shared = (item - p.num_whole) >> p.share_bits;
      if (p.share_bits == 1) add_shares<2, kMultiply>(acc, shared, own.share);
      if constexpr (kTokens % (4 * kPart) == 0) {
        if (p.share_bits == 2) add_shares<4, kMultiply>(acc, shared, own.share);
      }
      if constexpr (kTokens % (8 * kPart) == 0) {
        if (p.share_bits == 3) add_shares<8, kMultiply>(acc, shared, own.share);
      }
      const int count = kTokens / kPart >> p.share_bits;
      write(std::integral_constant<int, kPart>(), count * own.share, count * (own.share + 1));
    }
    if (!S::kOutBeside) {
      async_proxy_fence();  // weights will be copied to where outputs were
      __syncwarp();
      release(current);
    }
  }
#else
  wrong_architecture();
#endif
}

template <class T, class F, int kRows, int kTokens, bool kGated, bool kGrouped>
Status run(const GemmParams& p, int share_bits, cudaStream_t stream) {
  using S = Shape<F, kRows, kTokens, kGated, kGrouped>;
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.row_blocks = static_cast<int>(ceil_div(p.out_features, kRows));
  kp.token_blocks = static_cast<int>(kGrouped ? max_group_tiles(p.num_rows, p.num_groups, kTokens)
                                              : ceil_div(p.num_rows, kTokens));
  kp.groups = make_groups(p);
  const int tiles = kp.row_blocks * kp.token_blocks;
  const int blocks = num_multiprocessors();
  if (kGrouped) share_bits = 0;
  kp.share_bits = share_bits;
  kp.share_units = static_cast<int>(ceil_div(kp.num_units, 1 << share_bits));
  kp.num_whole = share_bits > 0 ? tiles - tiles % blocks : tiles;
  kp.num_items = kp.num_whole + ((tiles - kp.num_whole) << share_bits);
  CUtensorMap token_map, weight_map, scale_map = {};
  REGATTA_RETURN_IF_ERROR(
      encode_rows_map(&token_map, p.dtype, p.x, p.num_rows, p.in_features, kTokens));
  constexpr int kSlabs = S::kSlabs / (kGated ? 2 : 1);
  if (S::kHalves == 2) {
    REGATTA_RETURN_IF_ERROR(encode_packed_map(&weight_map, p, F::kUnitBytes, kSlabs));
  } else {
    REGATTA_RETURN_IF_ERROR(
        encode_packed_part_map(&weight_map, p, F::kUnitBytes, F::kHalfBytes, kSlabs));
    if (F::kGroups) {
      REGATTA_RETURN_IF_ERROR(
          encode_packed_part_map(&scale_map, p, F::kUnitBytes, F::kHalfScaleBytes, kSlabs));
    }
  }
  return launch(
      gemm_packed_tiles_kernel<T, F, kRows, kTokens, kGated, kGrouped>,
      {{stream, p.dependent_launch}, std::min(blocks, kp.num_items), S::kThreads, S::kSharedBytes},
      "gemm_packed_tiles", token_map, weight_map, scale_map, kp);
}

template <class T, class F, bool kGrouped, size_t kIndex = 0>
Status run_shape(const GemmParams& p, const PackedTiles& tiles, cudaStream_t stream) {
  if constexpr (kIndex == std::size(kPackedTiles)) {
    return Status::error("gemm_packed_tiles_sm90: no tiles of " + std::to_string(tiles.rows) +
                         " x " + std::to_string(tiles.tokens) + (p.gated ? ", gated" : "") +
                         (kGrouped ? ", of groups of rows" : ""));
  } else {
    constexpr PackedTileCost kShape = kPackedTiles[kIndex];
    const bool same = tiles.rows == kShape.rows && tiles.tokens == kShape.tokens;
    if (same) {
      if constexpr (kShape.grouped || !kGrouped) {
        if (!p.gated) {
          return run<T, F, kShape.rows, kShape.tokens, false, kGrouped>(p, tiles.share_bits,
                                                                        stream);
        }
        if constexpr (kShape.gated) {
          return run<T, F, kShape.rows, kShape.tokens, true, kGrouped>(p, tiles.share_bits, stream);
        }
      }
    }
    return run_shape<T, F, kGrouped, kIndex + 1>(p, tiles, stream);
  }
}

template <class T>
Status run_format(const GemmParams& p, const PackedTiles& tiles, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kTokenSize == 1) {
      return Status::error("gemm_packed_tiles_sm90: codes");
    } else {
      return p.num_groups > 0 ? run_shape<T, F, true>(p, tiles, stream)
                              : run_shape<T, F, false>(p, tiles, stream);
    }
  });
}

}  // namespace

PackedTiles packed_tiles_of(const GemmParams& p, int rows, int tokens) {
  for (const PackedTileCost& shape : kPackedTiles) {
    if (shape.rows == rows && shape.tokens == tokens) {
      return packed_tiles_of(p, shape, num_multiprocessors());
    }
  }
  return {rows, tokens};
}

Status gemm_packed_tiles_sm90(const GemmParams& p, const PackedTiles& tiles, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_packed_tiles_sm90", gemm_packed_tiles_sm90_refuses(p)));
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_format<__nv_bfloat16>(p, tiles, stream)
                                     : run_format<__half>(p, tiles, stream);
}

Status gemm_packed_tiles_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemm_packed_tiles_sm90(p, choose_packed_tiles(p, num_multiprocessors()), stream);
}

}  // namespace regatta::cuda
