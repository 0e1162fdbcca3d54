// Attention of spans with few rows on Hopper: a cluster of blocks per (span, KV head).
//
// Architectures: sm_90; bf16 and fp16 activations; caches in any KV format; head_dim 64 to 256.
// Algorithm
//  1. An item is a span, a KV head and up to 8 of its query rows. A team of 1, 2 or 4 warps of a
//     block takes it, or all warps of a cluster, by the number of requests and context length.
//  2. Each warp of a team streams its own tiles through its own ring of asynchronous copies: no
//     barrier until the end. Tokens that nobody sees become zeros (unused slots may hold NaN).
//     Memory is returned in order, so constants are asked for before the ring's copies.
//  3. mma.sync m16n8k16 with the rows as its 8 columns; movmatrix turns weights into operands. The
//     online softmax rescales only for a logit 2^8 above the running maximum. Codes become fp16 in
//     registers (kv_fragments.cuh); scales multiply logits and weights, not elements.
//  4. Warps merge in shared memory, blocks of a cluster in each other's. Where clusters would wait
//     for free multiprocessors, blocks meet in memory and the last one merges, in the same order.
// Fused (spans of one token): the team rotates its queries, makes the token's key and value and
// writes them to the cache. Its copies depend on no kernel ahead: rings fill before pdl_wait().
// Bound: bytes of keys and values over the read bandwidth.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <type_traits>

#include "attention.cuh"
#include "cuda/cache/kv_fragments.cuh"
#include "cuda/cache/rotate_head.cuh"
#include "cuda/hopper.cuh"

namespace regatta::cuda {

template <class T, int D, KvFormat kFormat>
struct RowsFor {
  using Type = RowsOf16<D>;
};
template <class T, int D>
struct RowsFor<T, D, KvFormat::kInt8Static> {
  using Type = RowsOf8<D, Int8Codes>;
};
template <class T, int D>
struct RowsFor<T, D, KvFormat::kInt8Dynamic> {
  using Type = RowsOf8<D, Int8Codes>;
};
template <class T, int D>
struct RowsFor<T, D, KvFormat::kFp8> {
  using Type = RowsOf8<D, E4m3Codes>;
};
template <class T, int D>
struct RowsFor<T, D, KvFormat::kInt4> {
  using Type = RowsOf4<D>;
};

constexpr int kMaxCluster = 8, kMaxApart = 16, kMaxTeamLog2 = 2, kMaxTeam = 1 << kMaxTeamLog2;
constexpr int kLongContext = 32768;  // tokens that a launch must have room for, to be spread widely
constexpr int kTeamTokens = 512;     // that a warp of a team of less than kMaxTeam takes at most
constexpr int kLeastParts = 8;       // of 16 tokens, that are worth another block of the cluster
// No two blocks of this share a multiprocessor, nor two beside a block that takes half of it.
constexpr size_t kAloneBytes = 116 * 1024, kAloneBesideBytes = 58 * 1024;

// kBlocks: of a multiprocessor (228 KB, of which the system takes 1 KB per block), which the rings
// share. While one begins or ends, the others stream. Four take a large batch in fewer rounds, two
// have the longer rings that a small one needs: int4 takes 88 us for 64 x 4096 (512 blocks) and 32
// for 16 x 4096 with four, 89 and 28 with two; with three, whose second round is nearly empty, 102
// and 29.
template <class T, int D, KvFormat kFormat, int kBlocks>
struct DecodeShape {
  using Rows = typename RowsFor<T, D, kFormat>::Type;
  static constexpr bool kDense = kFormat == KvFormat::kDense;
  static constexpr bool kTokenScales = has_token_scales(kFormat);
  static constexpr int kScales = kTokenScales ? scale_floats(kFormat) : 0;
  static constexpr int kWarps = kMaxTeam, kThreads = kWarps * kWarp;
  static constexpr int kRows = kDecodeRows;
  // A tile is one or two parts of 16 tokens; two spread what a tile costs besides its bytes.
  static constexpr int kParts = kFormat == KvFormat::kInt4 ? 2 : 1;
  static constexpr int kTokens = 16 * kParts;
  // So that ldmatrix has no bank conflicts, a row's units are permuted, or where there are not 2^n
  // of them, rows are an odd number of 16-byte units apart.
  static constexpr bool kPermutes = (Rows::kUnits & (Rows::kUnits - 1)) == 0;
  static constexpr int kStride = (kPermutes ? Rows::kUnits : Rows::kUnits | 1) * 16;
  // What to exclusive-or to the offsets of 16-byte units in a row.
  static __host__ __device__ constexpr int permutation(int row) {
    constexpr int kShift = Rows::kUnits >= 8 ? 0 : Rows::kUnits == 4 ? 1 : 2;
    constexpr int kMask = (Rows::kUnits < 8 ? Rows::kUnits : 8) - 1;
    return kPermutes ? (row >> kShift & kMask) * 16 : 0;
  }
  static constexpr int kTileBytes = kTokens * kStride;
  static constexpr int kScaleBytes = kTokens * kScales * 4;
  static constexpr int kStageBytes = 2 * (kTileBytes + kScaleBytes);  // keys, values, their scales
  static constexpr int kColumns = Rows::kSteps * 16;  // D, or more where units are filled up
  static constexpr int kCopyBytes = Rows::kRowBytes % 16 == 0 ? 16 : 8;
  static constexpr int kCopies = Rows::kRowBytes / kCopyBytes;  // per row
  static constexpr int kQueryStride = kColumns * 2 + 16;
  static constexpr int kQueryBytes = kRows * kQueryStride;
  static constexpr int kNewBytes = 2 * Rows::kUnits * 16;  // the new token's key and value
  static constexpr int kTeamBytes = kQueryBytes + kNewBytes;
  static constexpr int kMaxStages = 8;
  // Parts of all blocks for one block's share of the results: vectors of 4 columns, their maxima
  // and sums. A share is num_vectors / cluster, rounded up to 2^n. They lie where the queries of
  // other teams would: blocks of clusters are one team. Four of a multiprocessor are in none.
  static constexpr int kVectors = kRows * D / 4;
  static constexpr int kPlaces = D <= 64 ? 128 : D <= 128 ? 256 : 512;  // kVectors, up to 2^n
  static constexpr int kPartBytes = kBlocks == 4 ? 0 : kPlaces * 24;
  static constexpr int kOthersBytes = (kWarps - 1) * kTeamBytes;
  static constexpr int kBesides =
      kTeamBytes + (kPartBytes > kOthersBytes ? kPartBytes : kOthersBytes);
  static constexpr int kBudget = 228 * 1024 / kBlocks - 4 * 1024 - kBesides;
  static constexpr int kFit = kBudget / (kWarps * kStageBytes);
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kResultStride = D + 4;  // floats: stores of a row's columns take all banks
  static constexpr bool kFits = kStages >= 2 && kWarpBytes >= kRows * kResultStride * 4;
  static_assert(kTeamBytes % 16 == 0);
  static constexpr int kSharedBytes = kWarps * kWarpBytes + kBesides;
};

// No cache policy: with one, ptxas of CUDA 13.0 gives some of these kernels an instruction that
// Hopper refuses; it was worth 0.5 %.
template <int kBytes>
__device__ __forceinline__ void copy_piece(uint32_t shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(shared), "l"(global),
                 "n"(kBytes)
                 : "memory");
  }
#else
  wrong_architecture();
#endif
}

// The same, or zeros where the source is not valid.
template <int kBytes>
__device__ __forceinline__ void copy_piece(uint32_t shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global),
                 "r"(valid ? 8 : 0)
                 : "memory");
  }
#else
  wrong_architecture();
#endif
}

// The transpose of an 8x8 tile of 16-bit elements, two of a row per lane.
__device__ __forceinline__ uint32_t transpose_tile(uint32_t x) {
  uint32_t y = 0;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Over the lanes that share lane % 4.
__device__ __forceinline__ float stride_max(float x) {
#pragma unroll
  for (int o = 4; o < kWarp; o *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

__device__ __forceinline__ float stride_sum(float x) {
#pragma unroll
  for (int o = 4; o < kWarp; o *= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// Stores to an address of another block of the cluster, counted in bytes by its barrier.
__device__ __forceinline__ void store_cluster(uint32_t remote, float4 x, uint32_t barrier) {
  REGATTA_SM90_ASM(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier) : "memory");
}

__device__ __forceinline__ void store_cluster(uint32_t remote, float2 x, uint32_t barrier) {
  REGATTA_SM90_ASM(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
      "[%3];" ::"r"(remote),
      "f"(x.x), "f"(x.y), "r"(barrier) : "memory");
}

// exp2(largest - total_largest) for parts that may be empty.
__device__ __forceinline__ float part_weight(float largest, float total_largest) {
  return total_largest == -INFINITY ? 0.f : exp2_approx(largest - total_largest);
}

// 16-bit activations, bf16 or fp16, where the products' type does not tell (quantized caches).
__device__ __forceinline__ void load_head_part(HeadPart* x, const void* head, bool bf16,
                                               const HeadUnits& units, int unit, bool active) {
  if (bf16) {
    x->load(static_cast<const __nv_bfloat16*>(head), units, unit, active);
  } else {
    x->load(static_cast<const __half*>(head), units, unit, active);
  }
}

__device__ __forceinline__ void normalise_head_part(HeadPart* x, const void* weight, bool bf16,
                                                    const HeadUnits& units, int unit, int head_dim,
                                                    float epsilon, bool plus_one) {
  if (bf16) {
    x->normalise(static_cast<const __nv_bfloat16*>(weight), units, unit, head_dim, epsilon,
                 plus_one);
  } else {
    x->normalise(static_cast<const __half*>(weight), units, unit, head_dim, epsilon, plus_one);
  }
}

// log2 of the warps that share an item: a function of the launch and the context's own length.
__device__ __forceinline__ int team_log2_of(const AttentionArgs& args, int length) {
  int team_log2 = args.least_team_log2;
  while (team_log2 < kMaxTeamLog2 && kTeamTokens << team_log2 < length) ++team_log2;
  return team_log2;
}

// Of a power of two.
__device__ __forceinline__ int log2_of(int x) { return 31 - __clz(x); }

// Blocks that a span takes beyond the first blocks_per_span.
__device__ __forceinline__ int rest_of(const AttentionArgs& args, int num_tokens, int context_len) {
  if (num_tokens <= 0 || !is_decode_span(num_tokens, args.group, args.max_decode_rows)) return 0;
  const int length = context_len - first_visible(context_len, num_tokens, args.window);
  const int teams_log2 = kMaxTeamLog2 - team_log2_of(args, length);
  const int items = (num_tokens * args.group + kDecodeRows - 1) / kDecodeRows * args.num_kv_heads;
  return max(0, ((items + (1 << teams_log2) - 1) >> teams_log2) - args.blocks_per_span);
}

// The blocks that long contexts take beyond those that every span has, in the order of the spans.
// The whole block calls the functions.
template <int kThreads>
struct Rest {
  // Of the first kThreads spans: tokens begin, end; context.
  int sizes[3][kThreads];
  int warp_totals[kThreads / kWarp], found[2], ticket;

  __device__ __forceinline__ void prefetch(const AttentionArgs& args) {
    const int seq = threadIdx.x;
    if (seq >= args.num_seqs) return;
    copy_piece<4>(shared_address(&sizes[0][seq]), args.cu_seqlens_q + seq);
    copy_piece<4>(shared_address(&sizes[1][seq]), args.cu_seqlens_q + seq + 1);
    copy_piece<4>(shared_address(&sizes[2][seq]), args.context_lens + seq);
  }
  // Finds block `rank` of the rest, or returns false and how many there are.
  __device__ __forceinline__ bool find(const AttentionArgs& args, int rank, int* seq, int* z,
                                       int* count) {
    const int tid = threadIdx.x, warp = tid / kWarp;
    *count = 0;
    for (int base = 0; base < args.num_seqs; base += kThreads) {
      const int candidate = base + tid;
      int mine = 0;
      if (candidate < args.num_seqs) {
        mine = base == 0
                   ? rest_of(args, sizes[1][tid] - sizes[0][tid], sizes[2][tid])
                   : rest_of(args, args.cu_seqlens_q[candidate + 1] - args.cu_seqlens_q[candidate],
                             args.context_lens[candidate]);
      }
      int end = *count + warp_inclusive_scan(mine), total = 0;
      if (tid % kWarp == kWarp - 1) warp_totals[warp] = end - *count;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kThreads / kWarp; ++w) {
        if (w < warp) end += warp_totals[w];
        total += warp_totals[w];
      }
      if (rank < end && rank >= end - mine) {
        found[0] = candidate, found[1] = args.blocks_per_span + rank - (end - mine);
      }
      __syncthreads();
      *count += total;
      if (rank < *count) {
        *seq = found[0], *z = found[1];
        return true;
      }
    }
    return false;
  }
};

// Block z of span seq. Its teams return when they are done. kMore: with a soft cap or slopes, or a
// rotation or norms that few models have.
template <class T, int D, KvFormat kFormat, int kBlocks, bool kMore>
__device__ __forceinline__ void attend(const AttentionArgs& args, int seq, int z) {
  using S = DecodeShape<T, D, kFormat, kBlocks>;
  static_assert(S::kFits);
  using Rows = typename S::Rows;
  constexpr int kWarps = S::kWarps, kSteps = Rows::kSteps, kUnits = Rows::kUnits;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float2 warp_stats[kWarps][S::kRows];
  __shared__ float query_scales[kWarps][S::kRows], query_sums[kWarps][S::kRows];
  __shared__ __align__(16) float all_new_scales[kWarps][2][2];
  __shared__ float all_sinks[kWarps][S::kRows];
  __shared__ uint64_t exchange;  // counts what the cluster's blocks store for this one
  __shared__ bool merges;        // whether this block merges what others left in memory
  float4* const parts = reinterpret_cast<float4*>(shared + kWarps * S::kWarpBytes + S::kTeamBytes);
  float2* const part_stats = reinterpret_cast<float2*>(parts + S::kPlaces);

  int tid;  // read anew, or what derives from it is kept in registers over the loop of the kernel
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  const int lane = tid % kWarp;
  const int warp = __shfl_sync(~0u, tid / kWarp, 0);
  const int rank = blockIdx.x;
  const bool fused = args.rope.qkv != nullptr;
  const int32_t* const table = args.block_tables + static_cast<int64_t>(seq) * args.max_blocks;
  const int first_blocks = lane < args.max_blocks ? table[lane] : 0;  // while lengths are under way
  const int token0 = args.cu_seqlens_q[seq];
  const int num_tokens = args.cu_seqlens_q[seq + 1] - token0;
  const int last_token = args.cu_seqlens_q[args.num_seqs];
  const int context_len = args.context_lens[seq];
  // Right when all spans have a token.
  const int likely_token = min(seq, args.num_tokens - 1);
  int rope_position = fused ? args.rope.positions[likely_token] : 0;
  int slot = fused ? args.rope.slot_mapping[likely_token] : -1;
  const int low = first_visible(context_len, num_tokens, args.window);
  // The team of warps that shares an item, and its item of the span.
  const int team_log2 = team_log2_of(args, context_len - low), team = 1 << team_log2;
  const int my_team = warp >> team_log2, member = warp & (team - 1);
  const int team_tid = tid - my_team * team * kWarp, team_threads = team * kWarp;
  auto team_sync = [&] {
    if (team == kWarps) {
      __syncthreads();
    } else if (team == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + my_team, team_threads);
    }
  };
  int kv_head = z * (kWarps >> team_log2) + my_team, row_tile = 0;
  for (; kv_head >= args.num_kv_heads; kv_head -= args.num_kv_heads) ++row_tile;
  const int num_rows = num_tokens * args.group, first_row = row_tile * S::kRows;
  uint8_t* const queries = shared + kWarps * S::kWarpBytes + my_team * S::kTeamBytes;
  uint8_t* const new_rows = queries + S::kQueryBytes;
  float* const query_scale = query_scales[my_team];
  float* const query_sum = query_sums[my_team];
  float (*const new_scales)[2] = all_new_scales[my_team];
  float* const sinks = all_sinks[my_team];
  // Tiles of 16 tokens: those of the context, of this block, of this warp.
  const int first_tile = low / S::kTokens;
  const int num_tiles = (context_len + S::kTokens - 1) / S::kTokens - first_tile;
  // Blocks that take part: of a cluster, 2^n, or of those that meet in memory.
  const bool apart = kBlocks < 4 && args.decode_apart;
  int sharers = gridDim.x;
  while (sharers > 1 && num_tiles * S::kParts <= kLeastParts * sharers / 2) sharers /= 2;
  const int cluster = apart ? 1 : sharers, cluster_log2 = log2_of(cluster);
  const bool mine = num_tokens > 0 &&
                    is_decode_span(num_tokens, args.group, args.max_decode_rows) &&
                    first_row < num_rows && rank < sharers;
  const int per_block =
      apart ? (num_tiles + sharers - 1) / sharers : (num_tiles + cluster - 1) >> cluster_log2;
  const int block_begin = first_tile + rank * per_block;
  const int block_end = min(block_begin + per_block, first_tile + num_tiles);
  const int my_tile = block_begin + member;
  const int my_tiles =
      mine && my_tile < block_end ? (block_end - my_tile + team - 1) >> team_log2 : 0;
  const bool clears = rank == 0 && z == 0;  // rows behind the last span
  if (fused && !mine && !clears) return;
  // The token that this step adds is not in the cache yet when fused.
  const int stored_len = fused ? context_len - 1 : context_len;

  // Constants that the queries need, in front of the ring's copies.
  const HeadUnits units = HeadUnits::of(D, fused ? args.rope.rotary_dim : 0);
  const int lanes_log2 = log2_of(units.lanes);
  const int unit = tid & (units.lanes - 1);
  float key_factor = 1.f, value_factor = 1.f;
  if (mine && (kFormat == KvFormat::kInt8Static || kFormat == KvFormat::kFp8)) {
    key_factor = args.key_scale[kv_head], value_factor = args.value_scale[kv_head];
  }
  Angles angles;
  [[maybe_unused]] int64_t angles_at = 0;
  [[maybe_unused]] auto load_angles = [&](const float* table) {
    if (args.rope.interleaved) {
      angles.load_interleaved(table + angles_at, units, unit);
    } else {
      angles.load(table + angles_at, units, unit);
    }
  };
  if (fused && mine) {
    if (token0 != likely_token) {
      rope_position = args.rope.positions[token0], slot = args.rope.slot_mapping[token0];
    }
    if (slot >= args.rope.num_slots) slot = -1;
    const int position = min(max(rope_position, 0), args.rope.num_positions - 1);
    if constexpr (kMore) {
      angles_at = static_cast<int64_t>(position) * args.rope.rotary_dim;
      load_angles(args.rope.table);
    } else {
      angles.load(args.rope.table + static_cast<int64_t>(position) * args.rope.rotary_dim, units,
                  unit);
    }
  }

  // Sinks come on the side: read where rows end, they would be waited for.
  if (args.sinks != nullptr && mine && team_tid < S::kRows && first_row + team_tid < num_rows) {
    const int r = first_row + team_tid, t = token_of_row(args, r);
    copy_piece<4>(shared_address(sinks + team_tid),
                  args.sinks + kv_head * args.group + r - t * args.group);
  }

  uint8_t* const ring = shared + warp * S::kWarpBytes;
  const uint32_t ring_address = shared_address(ring);
  // Lane i holds where part i of the warp's tiles begins, in 16 rows of the cache, of 32 parts at a
  // time; one group ahead.
  constexpr int kParts = S::kParts, kGroupTiles = kWarp / kParts;
  const int shift16 = args.block_shift - 4;
  auto read_rows = [&](int from, auto first) {
    const int i = from + lane / kParts;
    const int part = (my_tile + i * team) * kParts + lane % kParts;
    const bool used = i < my_tiles && part * 16 < context_len;
    const int at = used ? part >> shift16 : 0;
    const bool known = decltype(first)::value && __all_sync(~0u, at < kWarp);
    const int block = max(0, known ? __shfl_sync(~0u, first_blocks, at) : table[at]);
    return ((block * args.num_kv_heads + kv_head) << shift16) + (part & ((1 << shift16) - 1));
  };
  int rows16 = read_rows(0, std::true_type());
  int next_rows16 = read_rows(kGroupTiles, std::false_type());
  // whole: all of the tile's tokens are seen, else those that are not become zeros.
  auto copy_tile = [&](int i, uint32_t to, int position, auto whole) {
    constexpr int kBytes = S::kCopyBytes, kPieces = 16 * S::kCopies;
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      const int64_t at =
          static_cast<int64_t>(__shfl_sync(~0u, rows16, i % kGroupTiles * kParts + h)) *
          (16 * Rows::kRowBytes);
      const uint8_t* const key = static_cast<const uint8_t*>(args.key) + at + lane * kBytes;
      const uint8_t* const value = static_cast<const uint8_t*>(args.value) + at + lane * kBytes;
#pragma unroll
      for (int u = 0; u < kPieces; u += kWarp) {
        const int piece = u + lane;
        if (kPieces % kWarp == 0 || piece < kPieces) {
          // Written so that rows of 2^n pieces take a constant per u.
          const int r =
              kWarp % S::kCopies == 0 ? u / S::kCopies + lane / S::kCopies : piece / S::kCopies;
          const int in_row = kWarp % S::kCopies == 0 ? lane % S::kCopies : piece - r * S::kCopies;
          const int turned =  // u / kCopies + lane / kCopies has no carry
              kWarp % S::kCopies == 0
                  ? S::permutation(u / S::kCopies) ^ S::permutation(lane / S::kCopies)
                  : S::permutation(r);
          const uint32_t offset = (h * 16 + r) * S::kStride + (in_row * kBytes ^ turned);
          if constexpr (decltype(whole)::value) {
            copy_piece<kBytes>(to + offset, key + u * kBytes);
            copy_piece<kBytes>(to + S::kTileBytes + offset, value + u * kBytes);
          } else {
            const int p = position + h * 16 + r;
            const bool seen = p >= low && p < stored_len;
            copy_piece<kBytes>(to + offset, key + u * kBytes, seen);
            copy_piece<kBytes>(to + S::kTileBytes + offset, value + u * kBytes, seen);
          }
        }
      }
    }
    if constexpr (S::kTokenScales) {  // four floats per copy
      constexpr int kPartCopies = 4 * S::kScales, kAll = kParts * kPartCopies;
      static_assert(2 * kAll <= kWarp);
      const int h = lane / kPartCopies % kParts, copy = lane % kPartCopies;
      const int row16 = __shfl_sync(~0u, rows16, i % kGroupTiles * kParts + h);
      if (lane < 2 * kAll) {
        const float* from = (lane < kAll ? args.key_scale : args.value_scale) +
                            static_cast<int64_t>(row16) * (16 * S::kScales) + copy * 4;
        const int first = position + h * 16 + copy * 4 / S::kScales;
        const bool seen = first + 4 / S::kScales > low && first < stored_len;
        copy_piece<16>(to + 2 * S::kTileBytes + lane * 16, from, seen);
      }
    }
  };
  auto issue = [&](int i, int stage) {
    if (i < my_tiles) {
      if (i % kGroupTiles == 0 && i > 0) {
        rows16 = next_rows16;
        next_rows16 = read_rows(i + kGroupTiles, std::false_type());
      }
      const int position = (my_tile + i * team) * S::kTokens;
      const uint32_t to = ring_address + stage * S::kStageBytes;
      if (position >= low && position + S::kTokens <= stored_len) {
        copy_tile(i, to, position, std::true_type());
      } else {
        copy_tile(i, to, position, std::false_type());
      }
    }
    cp_async_commit();
  };
#pragma unroll 1  // less code: each launch reads it anew
  for (int i = 0; i < S::kStages; ++i) issue(i, i);

  // Queries (and the new token) of this team: what does not depend on them first.
  const int rows = mine ? min(S::kRows, num_rows - first_row) : 0;
  if constexpr (S::kColumns > D) {
    constexpr int kUnits8 = (S::kColumns - D) / 8;
    for (int i = team_tid; i < S::kRows * kUnits8; i += team_threads) {
      *reinterpret_cast<uint4*>(queries + i / kUnits8 * S::kQueryStride +
                                (D + i % kUnits8 * 8) * 2) = make_uint4(0, 0, 0, 0);
    }
  }
  for (int i = rows * S::kQueryStride / 16 + team_tid; i < S::kQueryBytes / 16; i += team_threads) {
    reinterpret_cast<uint4*>(queries)[i] = make_uint4(0, 0, 0, 0);
  }
  if (!S::kDense && team_tid < S::kRows && team_tid >= rows) {
    query_scale[team_tid] = 1.f, query_sum[team_tid] = 0.f;
  }
  // The results in vectors of four columns; 2^n of them are a block's share of them.
  const int num_vectors = rows * (D / 4);
  const int share_log2 = max(0, 32 - __clz(num_vectors - 1) - cluster_log2);
  const int share = 1 << share_log2;
  const int own_vectors = min(share, num_vectors - rank * share);
  if (kBlocks < 4 && cluster > 1 && mine) {
    if (tid == 0) {
      barrier_init(&exchange, 1);
      barrier_init_fence();
      if (own_vectors > 0) barrier_arrive_expect(&exchange, own_vectors * cluster * 24);
    }
    __syncwarp();
    cluster_arrive_relaxed();  // all blocks have begun: waited for in front of the merge
  }
  const int new_tile = (context_len - 1) / S::kTokens;  // last of the context
  const bool owns_new =
      fused && mine && context_len > 0 && new_tile >= block_begin && new_tile < block_end;
  const bool bf16 = S::kDense ? Traits<T>::dtype == DType::kBFloat16 : args.bf16;
  const int per_pass = team_threads >> lanes_log2;
  const int heads = rows + (owns_new ? 2 : 0);  // and the new token's key and value
  auto source_of = [&](int base) {
    const int head = base + (team_tid >> lanes_log2);
    const uint8_t* const source = static_cast<const uint8_t*>(fused ? args.rope.qkv : args.q);
    int64_t source_head;
    if (head < rows) {
      const int r = first_row + head, t = token_of_row(args, r);
      const int64_t per_token = fused ? args.num_heads + 2 * args.num_kv_heads : args.num_heads;
      source_head = (token0 + t) * per_token + kv_head * args.group + r - t * args.group;
    } else {
      source_head = static_cast<int64_t>(token0) * (args.num_heads + 2 * args.num_kv_heads) +
                    args.num_heads + (head == rows + 1 ? args.num_kv_heads : 0) + kv_head;
    }
    return source + source_head * D * 2;
  };
  const uint8_t* const first_source = source_of(0);
  if (fused) pdl_wait();
  if (clears) {
    const int64_t row = static_cast<int64_t>(args.num_heads) * D;
    for (int64_t i = last_token * row / 8 + static_cast<int64_t>(seq) * S::kThreads + tid;
         i < args.num_tokens * row / 8; i += int64_t{gridDim.y} * S::kThreads) {
      static_cast<uint4*>(args.out)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  if (!mine) return;
  {
    auto load = [&](const uint8_t* source, int base) {
      HeadPart x;
      load_head_part(&x, source, bf16, units, unit, base + (team_tid >> lanes_log2) < heads);
      return x;
    };
    HeadPart next = load(first_source, 0);
    for (int base = 0; base < heads; base += per_pass) {
      HeadPart x = next;
      if (base + per_pass < heads) next = load(source_of(base + per_pass), base + per_pass);
      const int head = base + (team_tid >> lanes_log2);
      const bool is_query = head < rows, active = head < heads, is_value = head == rows + 1;
      const bool any_query = __any_sync(~0u, is_query);
      const bool any_new = __any_sync(~0u, active && !is_query);
      if (fused) {
        if (args.rope.q_norm != nullptr || args.rope.k_norm != nullptr) {
          const void* weight = is_value ? nullptr : is_query ? args.rope.q_norm : args.rope.k_norm;
          normalise_head_part(&x, weight, bf16, units, unit, D, args.rope.epsilon,
                              kMore && args.rope.plus_one);
        }
        if constexpr (kMore) {
          if (args.rope.query_table != nullptr && !is_value) {
            load_angles(is_query ? args.rope.query_table : args.rope.table);
          }
          if (!is_value && args.rope.interleaved) {
            x.rotate_interleaved(angles);
          } else if (!is_value) {
            x.rotate(angles);
          }
        } else {
          if (!is_value) x.rotate(angles);
        }
      }
      if constexpr (!S::kDense) {
        // Queries as fp16 between 1 and 2 at most: no bf16 magnitude overflows.
        float factor = 1.f;
        const float top = any_query ? x.largest(units.lanes) : 0.f;
        if (is_query) {
          const int bits = max(27, min(227, __float_as_int(fmaxf(top, 1e-30f)) >> 23));
          factor = __int_as_float((254 - bits) << 23);  // 2^(127 - bits)
          float sum = 0.f;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            x.low[e] = __half2float(__float2half_rn(x.low[e] * factor));
            x.high[e] = __half2float(__float2half_rn(x.high[e] * factor));
            sum += x.low[e] + x.high[e];
          }
          sum = lanes_sum(sum, units.lanes);
          if (unit == 0) query_scale[head] = __int_as_float(bits << 23), query_sum[head] = sum;
        } else if (any_query) {
          lanes_sum(0.f, units.lanes);  // with the other lanes of the warp
        }
      }
      if (is_query) {
        uint8_t* const to = queries + head * S::kQueryStride;
        if (unit < units.units) {
          *reinterpret_cast<uint4*>(to + units.column(unit) * 2) = from_floats<T>(x.low);
          if (units.has_pair(unit)) {
            *reinterpret_cast<uint4*>(to + (units.column(unit) + units.half) * 2) =
                from_floats<T>(x.high);
          }
        }
      }
      if (any_new) {  // the whole warp alike: row_scale() needs it
        const float given = scale_floats(kFormat) > 0 && !S::kTokenScales
                                ? (is_value ? value_factor : key_factor)
                                : 1.f;
        const RowScale scale = row_scale(kFormat, x, units.lanes, given);
        if (!is_query && active) {
          uint8_t* const to = new_rows + (is_value ? kUnits * 16 : 0);
          const int64_t cache_row =
              ((static_cast<int64_t>(slot >> args.block_shift) * args.num_kv_heads + kv_head)
               << args.block_shift) +
              (slot & ((1 << args.block_shift) - 1));
          uint8_t* const cached =
              static_cast<uint8_t*>(const_cast<void*>(is_value ? args.value : args.key)) +
              cache_row * Rows::kRowBytes;
          const bool writes = slot >= 0 && row_tile == 0;
          auto store = [&](int column, const float (&v)[8]) {
            store_columns<T>(kFormat, to, column, v, scale);
            if (writes) store_columns<T>(kFormat, cached, column, v, scale);
          };
          if (x.used) store(units.column(unit), x.low);
          if (x.pair) store(units.column(unit) + units.half, x.high);
          if constexpr (S::kTokenScales) {
            if (unit == 0) {
              float* const scales =
                  const_cast<float*>(is_value ? args.value_scale : args.key_scale);
              new_scales[is_value][0] = scale.stored.x;
              new_scales[is_value][1] = scale.stored.y;
              if (writes) {
                scales[cache_row * S::kScales] = scale.stored.x;
                if (S::kScales > 1) scales[cache_row * S::kScales + 1] = scale.stored.y;
              }
            }
          }
        }
      }
    }
  }
  team_sync();

  // This lane's fragments: row g = lane / 4 of the queries.
  const int g = lane / 4, c = lane % 4;
  uint32_t q[kSteps][2];
  {
    const uint8_t* const row = queries + g * S::kQueryStride;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (S::kDense) {
        q[k][0] = *reinterpret_cast<const uint32_t*>(row + k * 32 + c * 4);
        q[k][1] = *reinterpret_cast<const uint32_t*>(row + k * 32 + c * 4 + 16);
      } else if constexpr (kFormat != KvFormat::kInt4) {
        const uint2 x = *reinterpret_cast<const uint2*>(row + k * 32 + c * 8);
        q[k][0] = x.x, q[k][1] = x.y;
      } else if (k % 2 == 0) {
        // Eight columns; a lane's words pair columns 0 and 4, 1 and 5, 2 and 6, 3 and 7, of which
        // the second and fourth pair of keys come 16 times as large.
        constexpr uint32_t kSixteenth = 0x2c002c00u;
        const uint4 x = *reinterpret_cast<const uint4*>(row + k / 2 * 64 + c * 16);
        q[k][0] = __byte_perm(x.x, x.z, 0x5410);
        q[k][1] = half2_mul(__byte_perm(x.x, x.z, 0x7632), kSixteenth);
        q[k + 1][0] = __byte_perm(x.y, x.w, 0x5410);
        q[k + 1][1] = half2_mul(__byte_perm(x.y, x.w, 0x7632), kSixteenth);
      }
    }
  }
  // Results of this lane belong to rows 2c and 2c + 1, r = 0 and 1 of what follows. Logits (base 2)
  // are products times unit[r].
  float unit_log2[2], columns_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unit_log2[r] = args.scale_log2 * key_factor * Rows::kKeyUnit;
    if constexpr (!S::kDense) unit_log2[r] *= query_scale[2 * c + r];
    if constexpr (kFormat == KvFormat::kInt4) {
      columns_sum[r] = query_sum[2 * c + r] * (1.f / Rows::kKeyUnit);
    } else if constexpr (!S::kDense) {
      columns_sum[r] = query_sum[2 * c + r] * -Rows::Codes::kKeyBias;
    }
  }
  // What becomes of products, base 2, is times this then.
  auto logit_unit = [&](int r) { return kMore ? 1.f : unit_log2[r]; };
  [[maybe_unused]] float slopes[2];
  [[maybe_unused]] int depths[2];
  // Row r sees positions in (depth - window, limit]; in a tree, of the span those that its mask
  // has.
  const int before = context_len - num_tokens;
  const bool trees = is_tree(args, num_tokens);
  if constexpr (kMore) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(first_row + 2 * c + r, num_rows - 1), token = token_of_row(args, row);
      slopes[r] = slope_of(args, kv_head * args.group + row - token * args.group);
      depths[r] = before + (trees ? tree_depth(args, token0 + token) : token);
    }
  }

  float out[kSteps][4];  // out^T: columns Rows::column(m, lane, e); rows 2c + e % 2
#pragma unroll
  for (int m = 0; m < kSteps; ++m) out[m][0] = out[m][1] = out[m][2] = out[m][3] = 0.f;
  float largest[2] = {-INFINITY, -INFINITY}, base[2] = {0.f, 0.f};
  float sum[2] = {0.f, 0.f}, offset_sum[2] = {0.f, 0.f};
  // Values' scales are relative to base_scale, so that weights fit fp16.
  float base_scale = 1e-37f, base_inverse = 1e37f;

  // Of this lane's ldmatrix row: tokens (lane & 7) + 8 * (lane >> 4), unit (lane >> 3) & 1.
  const int lane_row = (lane & 7) + (lane >> 4) * 8;
  const int lane_unit = (lane >> 3 & 1) * 16 ^ S::permutation(lane_row);
  // Units u and u + 1 of the 16 tokens at `rows`; u is even.
  auto units_at = [&](const uint8_t* rows, int u) {
    return rows + (S::kPermutes ? u * 16 ^ lane_unit : u * 16 + lane_unit);
  };

  int stage = 0;
  for (int i = 0; i < my_tiles; ++i) {
    cp_async_wait<S::kStages - 1>();
    __syncwarp();
    uint8_t* const tile = ring + stage * S::kStageBytes;
    const int position = (my_tile + i * team) * S::kTokens;
    if (owns_new && my_tile + i * team == new_tile) {
      const int row = (context_len - 1) % S::kTokens;
      for (int u = lane; u < 2 * kUnits; u += kWarp) {
        const int at = u < kUnits ? u : u - kUnits;
        *reinterpret_cast<uint4*>(tile + (u < kUnits ? 0 : S::kTileBytes) + row * S::kStride +
                                  (at * 16 ^ S::permutation(row))) =
            *reinterpret_cast<const uint4*>(new_rows + u * 16);
      }
      if constexpr (S::kTokenScales) {
        if (lane < 2 * S::kScales) {
          const int which = lane / S::kScales, e = lane % S::kScales;
          reinterpret_cast<float*>(tile + 2 * S::kTileBytes +
                                   which * S::kScaleBytes)[row * S::kScales + e] =
              new_scales[which][e];
        }
      }
      __syncwarp();
    }
    // Logits^T of each part: tokens g (e = 0, 1) and g + 8 (2, 3), rows 2c + e % 2.
    constexpr int kChains = kParts == 1 ? 2 : 1;  // of products that wait for each other
    float s[kParts][4];
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      float product[kChains][4] = {};
      const uint8_t* const keys = tile + (h * 16 + lane_row) * S::kStride;
      if constexpr (kFormat == KvFormat::kInt8Static || kFormat == KvFormat::kInt8Dynamic) {
#pragma unroll
        for (int e = 0; e < 4; ++e) product[0][e] = columns_sum[e % 2];
      }
      if constexpr (S::kDense) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t b[4];  // tokens 0-7: both halves of the step; tokens 8-15 alike
          ldmatrix4(b, units_at(keys, k * 2));
          const uint32_t a[4] = {b[0], b[2], b[1], b[3]};
          mma_m16n8k16<T>(product[k % kChains], a, q[k][0], q[k][1]);
        }
      } else {
#pragma unroll
        for (int u = 0; u < kUnits; u += 2) {
          uint32_t b[4];  // tokens 0-7: units u, u + 1; tokens 8-15 alike
          ldmatrix4(b, units_at(keys, u));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (u + j >= kUnits) continue;
            if constexpr (kFormat == KvFormat::kInt4) {
              uint32_t x[4], y[4];
              Rows::tiny(b[j], x);
              Rows::tiny(b[2 + j], y);
              const int k = (u + j) * 2;
              const uint32_t a0[4] = {x[0], y[0], x[1], y[1]}, a1[4] = {x[2], y[2], x[3], y[3]};
              mma_m16n8k16<T>(product[0], a0, q[k][0], q[k][1]);
              mma_m16n8k16<T>(product[kChains - 1], a1, q[k + 1][0], q[k + 1][1]);
            } else {
              uint32_t x[2], y[2];
              Rows::Codes::keys(b[j], &x[0], &x[1]);
              Rows::Codes::keys(b[2 + j], &y[0], &y[1]);
              const uint32_t a[4] = {x[0], y[0], x[1], y[1]};
              mma_m16n8k16<T>(product[j % kChains], a, q[u + j][0], q[u + j][1]);
            }
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[h][e] = kChains == 1 ? product[0][e] : product[0][e] + product[kChains - 1][e];
      }
    }
    float value_scales[kParts][2], value_offsets[kParts][2];  // of tokens g, g + 8
    if constexpr (S::kTokenScales) {
      const auto* scales = reinterpret_cast<const float*>(tile + 2 * S::kTileBytes);
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int token = h * 16 + t * 8 + g;
          if constexpr (kFormat == KvFormat::kInt4) {
            const float2 k = *reinterpret_cast<const float2*>(scales + token * 2);
            const float2 v =
                *reinterpret_cast<const float2*>(scales + S::kScaleBytes / 4 + token * 2);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              s[h][2 * t + r] = fmaf(s[h][2 * t + r], k.x, columns_sum[r] * k.y);
            }
            value_scales[h][t] = v.x, value_offsets[h][t] = v.y;
          } else {
            s[h][2 * t] *= scales[token], s[h][2 * t + 1] *= scales[token];
            value_scales[h][t] = scales[S::kScaleBytes / 4 + token];
          }
        }
      }
    }
    if constexpr (kMore) {
      const int distances[2] = {position + g - depths[0], position + g - depths[1]};
      shape_logits<4 * kParts>(
          args, unit_log2, slopes, distances, [&](int i) -> float& { return s[i / 4][i % 4]; },
          [](int i) { return i % 2; }, [](int i) { return i / 4 * 16 + i / 2 % 2 * 8; });
    }
    if (position + S::kTokens > before || position <= context_len - 1 - args.window) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row_token = token_of_row(args, first_row + 2 * c + r);
        const bool tree = trees && row_token < num_tokens;
        const int limit = tree ? context_len - 1 : before + row_token;
        const int depth = tree ? before + tree_depth(args, token0 + row_token) : limit;
#pragma unroll
        for (int h = 0; h < kParts; ++h) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const int token = position + h * 16 + t * 8 + g;
            bool seen = token <= limit && token > depth - args.window;
            if (tree && seen && token >= before) {
              seen = tree_sees(args, token0 + row_token, token - before);
            }
            s[h][2 * t + r] = seen ? s[h][2 * t + r] : -INFINITY;
            if (S::kTokenScales && r == 0) {  // a slot beside a seen one may hold any scale
              const bool used = token >= low && token < context_len;
              value_scales[h][t] = used ? value_scales[h][t] : 0.f;
              if (kFormat == KvFormat::kInt4) {
                value_offsets[h][t] = used ? value_offsets[h][t] : 0.f;
              }
            }
          }
        }
      }
    }
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e % 2] = fmaxf(top[e % 2], s[h][e]);
    }
    constexpr float kSlack = 8.f;  // weights stay below 2^8: exact enough in bf16 and fp16
    bool rescale = top[0] * logit_unit(0) > largest[0] + kSlack ||
                   top[1] * logit_unit(1) > largest[1] + kSlack;
    float top_scale = 0.f;
    if constexpr (S::kTokenScales) {
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
        top_scale = fmaxf(top_scale, fmaxf(value_scales[h][0], value_scales[h][1]));
      }
      rescale = rescale || top_scale > base_scale * 16.f;
    }
    if (__any_sync(~0u, rescale)) {
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float grown = fmaxf(largest[r], stride_max(top[r] * logit_unit(r)));
        scale[r] = part_weight(largest[r], grown);
        largest[r] = grown;
        base[r] = grown == -INFINITY ? 0.f : grown;
        sum[r] *= scale[r];
        offset_sum[r] *= scale[r];
      }
      if constexpr (S::kTokenScales) {
        const float grown = fmaxf(base_scale, stride_max(top_scale));
        scale[0] *= base_scale / grown;
        scale[1] *= base_scale / grown;
        base_scale = grown;
        base_inverse = 1.f / grown;
      }
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][e] *= scale[e % 2];
      }
    }
    uint32_t weights[kParts][2];  // tokens 2c, 2c + 1 (and 8 more) of row g
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float x[2];
        const float relative = S::kTokenScales ? value_scales[h][t] * base_inverse : 1.f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[r] = exp2_approx(fmaf(s[h][2 * t + r], logit_unit(r), -base[r]));
          sum[r] += x[r];
          if (kFormat == KvFormat::kInt4) {
            offset_sum[r] = fmaf(x[r], value_offsets[h][t], offset_sum[r]);
          }
          if (S::kTokenScales) x[r] *= relative;
        }
        weights[h][t] = transpose_tile(pack2<T>(x[0], x[1]));
      }
    }
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      const uint8_t* const values = tile + S::kTileBytes + (h * 16 + lane_row) * S::kStride;
      if constexpr (S::kDense) {
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          uint32_t a[4];
          ldmatrix4_trans(a, units_at(values, m * 2));
          mma_m16n8k16<T>(out[m], a, weights[h][0], weights[h][1]);
        }
      } else {
#pragma unroll
        for (int u = 0; u < kUnits; u += 2) {
          uint32_t b[4];
          ldmatrix4_trans(b, units_at(values, u));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (u + j >= kUnits) continue;
            if constexpr (kFormat == KvFormat::kInt4) {
              uint32_t x[4], y[4];
              Rows::tiny(b[j], x);
              Rows::tiny(b[2 + j], y);
              const uint32_t a0[4] = {x[0], x[1], y[0], y[1]}, a1[4] = {x[2], x[3], y[2], y[3]};
              mma_m16n8k16<T>(out[(u + j) * 2], a0, weights[h][0], weights[h][1]);
              mma_m16n8k16<T>(out[(u + j) * 2 + 1], a1, weights[h][0], weights[h][1]);
            } else {
              uint32_t a[4];
              Rows::Codes::across(b[j], &a[0], &a[1]);
              Rows::Codes::across(b[2 + j], &a[2], &a[3]);
              mma_m16n8k16<T>(out[u + j], a, weights[h][0], weights[h][1]);
            }
          }
        }
      }
    }
    __syncwarp();  // nobody reads the stage any more
    issue(i + S::kStages, stage);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncwarp();

  // Warps: results where the ring was. All rows, also those that do not exist: a condition for each
  // store took 3,000 cycles.
  {
    float* const results = reinterpret_cast<float*>(ring);
    float factor = value_factor;
    if constexpr (S::kTokenScales) factor = base_scale;
    float offsets[2] = {0.f, 0.f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = stride_sum(sum[r]);
      if (kFormat == KvFormat::kInt4) offsets[r] = stride_sum(offset_sum[r]);
      if (g == 0) warp_stats[warp][2 * c + r] = make_float2(largest[r], total);
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * c + (e & 1), column = Rows::column(m, lane, e);
        if (S::kColumns == D || column < D) {
          results[row * S::kResultStride + column] =
              fmaf(out[m][e], factor * Rows::value_unit(e), offsets[e & 1]);
        }
      }
    }
  }
  team_sync();

  auto store4 = [&](int row, int column, float4 x, float most, float sum) {
    const float total = args.sinks == nullptr ? sum : with_sink(sum, most, sinks[row]);
    const float scale = total > 0.f ? __fdividef(1.f, total) : 0.f;
    const int r = first_row + row, t = token_of_row(args, r);
    const int64_t at = (static_cast<int64_t>(token0 + t) * args.num_heads + kv_head * args.group +
                        r - t * args.group) *
                           D +
                       column;
    uint2 packed;
    if (bf16) {
      packed = make_uint2(pack2<__nv_bfloat16>(x.x * scale, x.y * scale),
                          pack2<__nv_bfloat16>(x.z * scale, x.w * scale));
    } else {
      packed = make_uint2(pack2<__half>(x.x * scale, x.y * scale),
                          pack2<__half>(x.z * scale, x.w * scale));
    }
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.out) + at * 2) = packed;
  };
  if (kBlocks < 4 && cluster > 1) cluster_wait();
  const int first_warp = my_team * team;
  // Of blocks that meet in memory: parts and then stats of each, item by item.
  constexpr int kFarVectors = S::kVectors;
  const int far_item = static_cast<int>(blockIdx.y * gridDim.z) + z;
  float4* const far_parts =
      reinterpret_cast<float4*>(args.partial_out) + int64_t{far_item} * gridDim.x * kFarVectors;
  float2* const far_stats =
      reinterpret_cast<float2*>(args.partial_stats) + int64_t{far_item} * gridDim.x * kFarVectors;
#pragma unroll 2
  for (int i = team_tid; i < num_vectors; i += team_threads) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    auto result = [&](int w) {
      return *reinterpret_cast<const float4*>(
          reinterpret_cast<const float*>(shared + w * S::kWarpBytes) + row * S::kResultStride +
          column);
    };
    float most = warp_stats[first_warp][row].x, total = warp_stats[first_warp][row].y;
    float4 x = result(first_warp);
    if (team > 1) {
      for (int w = 1; w < team; ++w) most = fmaxf(most, warp_stats[first_warp + w][row].x);
      const float first_weight = part_weight(warp_stats[first_warp][row].x, most);
      total *= first_weight;
      x.x *= first_weight, x.y *= first_weight, x.z *= first_weight, x.w *= first_weight;
#pragma unroll 3
      for (int w = 1; w < team; ++w) {
        const float weight = part_weight(warp_stats[first_warp + w][row].x, most);
        const float4 y = result(first_warp + w);
        total = fmaf(weight, warp_stats[first_warp + w][row].y, total);
        x.x = fmaf(weight, y.x, x.x);
        x.y = fmaf(weight, y.y, x.y);
        x.z = fmaf(weight, y.z, x.z);
        x.w = fmaf(weight, y.w, x.w);
      }
    }
    if (apart && sharers > 1) {
      __stcg(far_parts + rank * kFarVectors + i, x);
      __stcg(far_stats + rank * kFarVectors + i, make_float2(most, total));
    } else if (kBlocks == 4 || cluster == 1) {
      store4(row, column, x, most, total);
    } else {
      const int owner = i >> share_log2, at = (rank << share_log2) + (i & (share - 1));
      const uint32_t barrier = cluster_address(&exchange, owner);
      store_cluster(cluster_address(parts + at, owner), x, barrier);
      store_cluster(cluster_address(part_stats + at, owner), make_float2(most, total), barrier);
    }
  }
  // Vector i of all parts, merged in the order of the blocks.
  auto merge = [&](int i, int count, auto stats_of, auto part_of) {
    float most = -INFINITY, total = 0.f;
    for (int other = 0; other < count; ++other) most = fmaxf(most, stats_of(other).x);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int other = 0; other < count; ++other) {
      const float2 stats = stats_of(other);
      const float4 y = part_of(other);
      const float weight = part_weight(stats.x, most);
      total = fmaf(weight, stats.y, total);
      x.x = fmaf(weight, y.x, x.x);
      x.y = fmaf(weight, y.y, x.y);
      x.z = fmaf(weight, y.z, x.z);
      x.w = fmaf(weight, y.w, x.w);
    }
    store4(i / (D / 4), i % (D / 4) * 4, x, most, total);
  };
  if (apart && sharers > 1) {
    __threadfence();
    __syncthreads();
    if (tid == 0) {
      int* const counter = args.counters + far_item;
      merges = atomicAdd(counter, 1) == sharers - 1;
      if (merges) *counter = 0;  // for the next call
      __threadfence();
    }
    __syncthreads();
    if (!merges) return;
    for (int i = tid; i < num_vectors; i += S::kThreads) {
      merge(
          i, sharers, [&](int other) { return __ldcg(far_stats + other * kFarVectors + i); },
          [&](int other) { return __ldcg(far_parts + other * kFarVectors + i); });
    }
    return;
  }
  if (kBlocks == 4 || cluster == 1 || own_vectors <= 0) return;
  barrier_wait(&exchange, 0);
  for (int j = tid; j < own_vectors; j += S::kThreads) {  // this block's share
    merge(
        rank * share + j, cluster, [&](int other) { return part_stats[other * share + j]; },
        [&](int other) { return parts[other * share + j]; });
  }
}

template <class T, int D, KvFormat kFormat, int kBlocks, bool kMore>
__global__ void __launch_bounds__(DecodeShape<T, D, kFormat, kBlocks>::kThreads, kBlocks)
    attention_decode_sm90_kernel(const AttentionArgs args) {
  constexpr int kThreads = DecodeShape<T, D, kFormat, kBlocks>::kThreads;
  if (args.rope.qkv != nullptr) {
    pdl_trigger();
  } else {  // trigger after the wait: the prefill kernel behind relies on it (attention.cu)
    pdl_wait();
    pdl_trigger();
  }
  int seq = blockIdx.y, z = blockIdx.z;
  // First the blocks that every span has, then by tickets those that long contexts have besides.
  __shared__ Rest<kThreads> rest;
  if (args.ticket != nullptr) rest.prefetch(args);
  bool found = z < args.blocks_per_span;
  for (int count = -1;;) {
    if (found) attend<T, D, kFormat, kBlocks, kMore>(args, seq, z);
    if (args.ticket == nullptr) return;
    cp_async_wait<0>();
    __syncthreads();
    if (count < 0) rest.find(args, INT_MAX, &seq, &z, &count);
    if (count == 0) return;
    if (threadIdx.x == 0) rest.ticket = atomicAdd(args.ticket, 1);
    __syncthreads();
    const int ticket = rest.ticket;
    found = rest.find(args, ticket, &seq, &z, &count);
    if (!found) {  // the last block to find none left leaves 0 for the next launch
      if (threadIdx.x == 0 && ticket == count + gridDim.y * gridDim.z - 1) *args.ticket = 0;
      return;
    }
  }
}

// Blocks per (span, KV head): until there are blocks for half of the multiprocessors. Merging more
// costs more than it spreads, and what a block beside the kernel ahead takes from it, too. Added to
// a product of 50 MB on an H200, 8 KV heads of 128, us for 1 / 2 / 4 / 8 blocks: batch 1 of 1024
// tokens 10.5 / 7.3 / 5.5 / 4.4, of 4096 35 / 20 / 12 / 8.7; batch 8 of 1024 12.4 / 15 / 20 / 25.
inline int decode_cluster(const AttentionArgs& args, int num_sms, int64_t max_context_len) {
  const int64_t pairs = static_cast<int64_t>(args.num_seqs) * args.num_kv_heads;
  const int64_t tiles = ceil_div(max_context_len, 16);
  int cluster = 1;
  while (cluster < kMaxCluster && pairs * cluster * 2 <= num_sms && cluster * 4 < tiles) {
    cluster *= 2;
  }
  return cluster;
}

template <class T, int D, KvFormat kFormat, int kBlocks>
Status launch_decode(AttentionArgs args, LaunchConfig config, const AttentionLimits& limits,
                     int num_sms, size_t alone_bytes) {
  using S = DecodeShape<T, D, kFormat, kBlocks>;
  config.block = dim3(S::kThreads);
  // launch() raises the limit for more than 48 KB, and does not know of the kernel's own variables.
  config.shared_bytes =
      S::kSharedBytes > 44 * 1024 ? std::max(S::kSharedBytes, 49 * 1024) : S::kSharedBytes;
  // Few blocks, which wait for the kernel ahead with their rings full: one per multiprocessor, or
  // the scheduler puts neighbours onto one (batch 1 of 4096 tokens: 8.7 us instead of 10.3).
  const int64_t blocks = int64_t{config.grid.x} * config.grid.y * config.grid.z;
  if ((args.rope.qkv != nullptr || args.decode_apart) && blocks <= num_sms) {
    config.shared_bytes = std::max(config.shared_bytes, alone_bytes);
  }
  // Teams as small as a single round of the blocks on the chip asks for.
  const unsigned all = config.grid.z;
  const int64_t places = kBlocks * int64_t{num_sms};
  args.least_team_log2 = config.grid.x > 1 || blocks <= places ? kMaxTeamLog2
                         : blocks <= 2 * places                ? 1
                                                               : 0;
  const unsigned teams = kMaxTeam >> args.least_team_log2;
  args.blocks_per_span = (all + teams - 1) / teams;
  config.grid.z = args.blocks_per_span;
  if (teams > 1 && limits.max_context_len > kTeamTokens << args.least_team_log2) {
    static std::atomic<unsigned> launches{0};
    args.ticket = args.tickets + 2 + launches.fetch_add(1) % kDecodeTickets;
    const int64_t idle = places / config.grid.y - config.grid.z;
    config.grid.z += static_cast<unsigned>(std::clamp<int64_t>(idle, 0, all - config.grid.z));
  }
  const bool more = shapes_scores(args) || (args.rope.qkv != nullptr && args.rope.is_rare());
  auto* const kernel = more ? attention_decode_sm90_kernel<T, D, kFormat, kBlocks, true>
                            : attention_decode_sm90_kernel<T, D, kFormat, kBlocks, false>;
  return launch(kernel, config, "paged_attention decode_sm90", args);
}

// Clusters of so many blocks, each on a multiprocessor of its own, that this GPU holds at once:
// fewer than it has multiprocessors for, since a cluster lies within one of the groups that they
// come in. 0: it does not say.
template <class T, int D, KvFormat kFormat, int kBlocks>
int resident_clusters(int cluster) {
  using S = DecodeShape<T, D, kFormat, kBlocks>;
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices][kMaxCluster + 1] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return 0;
  int count = known[device][cluster];
  if (count > 0) return count;
  auto* const kernel = attention_decode_sm90_kernel<T, D, kFormat, kBlocks, false>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = std::max<size_t>(S::kSharedBytes, kAloneBytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(config.dynamicSmemBytes));
  if (error != cudaSuccess || cudaOccupancyMaxActiveClusters(&count, kernel, &config)) return 0;
  known[device][cluster] = count;
  return count;
}

template <class T, int D, KvFormat kFormat>
Status run_attention_decode_sm90(AttentionArgs args, const AttentionLimits& limits, int num_sms,
                                 const Launch& launch_on) {
  using Two = DecodeShape<T, D, kFormat, 2>;
  using Four = DecodeShape<T, D, kFormat, 4>;
  constexpr int kBlocks = Two::kFits && !(kFormat == KvFormat::kDense && D > 128) ? 2 : 1;
  const int64_t max_rows = std::max<int64_t>(
      args.group, std::min<int64_t>(limits.max_query_len * args.group, args.max_decode_rows));
  const int64_t per_span = args.num_kv_heads * ceil_div(max_rows, Two::kRows);
  int cluster = decode_cluster(args, num_sms, limits.max_context_len), apart = 1;
  // Clusters that would wait for others: their blocks meet in memory instead, as many as there are
  // multiprocessors for. Batch 4 of 1000 tokens beside a product of 50 MB takes 8 us instead of 14,
  // of 32000 122 instead of 161. Where clusters fit, their merging is faster, by 1.5 us, but codes
  // take so much arithmetic that more blocks are worth it: fp8, batch 1 of 32000 tokens, 23 us
  // instead of 35.
  if (cluster > 2 && per_span == args.num_kv_heads) {
    const int64_t pairs = args.num_seqs * per_span;
    const int64_t blocks =
        std::min<int64_t>(std::min(num_sms, kMaxMultiprocessors) / pairs, kMaxApart);
    const int resident = resident_clusters<T, D, kFormat, kBlocks>(cluster);
    if ((0 < resident && resident < pairs) ||
        (kFormat != KvFormat::kDense && limits.max_context_len >= kLongContext &&
         blocks > cluster)) {
      apart = static_cast<int>(blocks);
      cluster = 1;
    }
  }
  args.decode_apart = apart > 1;
  LaunchConfig config(launch_on, grid_of(std::max(cluster, apart), args.num_seqs, per_span));
  config.cluster_x = static_cast<unsigned>(cluster);
  const size_t alone_bytes = launch_on.between_halves ? kAloneBesideBytes : kAloneBytes;
  const int64_t blocks = int64_t{config.grid.x} * config.grid.y * config.grid.z;
  if constexpr (Four::kFits) {  // without parts of other blocks
    if (cluster == 1 && blocks > 2 * num_sms) {
      return launch_decode<T, D, kFormat, 4>(args, config, limits, num_sms, alone_bytes);
    }
  }
  return launch_decode<T, D, kFormat, kBlocks>(args, config, limits, num_sms, alone_bytes);
}

}  // namespace regatta::cuda
