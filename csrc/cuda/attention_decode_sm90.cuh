// Attention of spans with few rows on Hopper: a cluster of blocks per (span, KV head), no
// workspace.
//
// Architectures: sm_90; bf16 and fp16 activations; caches in any KV format; head_dim 64 to 256.
// Algorithm
//  1. The blocks of a cluster share out the tiles of a context, of 16 tokens or 32 (int4). Each
//     warp streams its own tiles through its own ring of asynchronous copies: no barrier until the
//     end. Tokens that nobody sees are not read but filled with zeros (unused slots may hold NaN).
//  2. Logits^T [16, 8] = keys [16, D] queries^T and out^T [D, 8] += values^T [D, 16] weights^T are
//     mma.sync m16n8k16 with up to 8 rows of a KV group as the operand of 8 columns: none of a
//     product is spent on rows that do not exist. movmatrix turns the weights from the one's result
//     into the other's operand. The online softmax rescales only when a logit exceeds the running
//     maximum by a factor of 2^8, which costs one vote per tile. Codes of a quantized cache become
//     fp16 in registers, where it can be without arithmetic (kv_fragments.cuh); scales per token
//     multiply logits and weights, and minima enter through the sum of a query's columns and the
//     sum of weights, so that no element is scaled.
//  3. Warps are merged in shared memory. Each block of the cluster finishes a share of the columns:
//     the others store their parts of it into its shared memory, and leave.
// Fused (params of the rotary embedding given; spans of one token): the block rotates its queries
// itself, and the one whose tiles end the context makes the token's key and value, writes them to
// the cache, and uses them from shared memory. Nothing of what it copies depends on the kernels
// ahead then, so the rings fill before pdl_wait().
// Bound: bytes of keys and values over the read bandwidth, 4.67 TB/s measured.
// H200, 32/8 heads of 128, block_size 64, in a graph with dependent launches, us (TB/s); cuDNN on
// contiguous caches through PyTorch 2.11 in brackets:
//   bf16, 1 x 1024: 7.3   1 x 4096: 11.5 [11.7]   8 x 1024: 15.3 [15.1]   128 x 1024: 135 [127]
//   64 x 4096: 258 (4.16) [244]   int8 136 (3.94), fp8 138 (3.90), int8 per token 140 (3.94), int4
//   88 (3.42); 128 x 4096: int8 261 (4.11), int4 164 (3.67)
// Fused, beside a product of 50 MB, a step gains: batch 1 of 128 tokens 2.8 us, of 1024 4.2 (int8
// 3.4), of 4096 8.6; rotary embedding and attention as two launches 5.6, 7.8, 12.6.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.cuh"
#include "hopper.cuh"
#include "kv_fragments.cuh"
#include "rotate_head.cuh"

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

constexpr int kMaxCluster = 8;
constexpr size_t kAloneBytes = 116 * 1024;  // no two blocks of this share a multiprocessor

// kBlocks: of a multiprocessor (227 KB), which the rings share. While one begins or ends, the
// others stream. Four take a large batch in fewer rounds, two have the longer rings that a small
// one needs: int4 takes 88 us for 64 x 4096 (512 blocks) and 32 for 16 x 4096 with four, 89 and 28
// with two; with three, whose second round is nearly empty, 102 and 29.
template <class T, int D, KvFormat kFormat, int kBlocks>
struct DecodeShape {
  using Rows = typename RowsFor<T, D, kFormat>::Type;
  static constexpr bool kDense = kFormat == KvFormat::kDense;
  static constexpr bool kTokenScales = has_token_scales(kFormat);
  static constexpr int kScales = kTokenScales ? scale_floats(kFormat) : 0;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
  static constexpr int kRows = 8;  // of queries
  // A tile is one or two parts of 16 tokens; two spread what a tile costs besides its bytes.
  static constexpr int kParts = kFormat == KvFormat::kInt4 ? 2 : 1;
  static constexpr int kTokens = 16 * kParts;
  // Rows an odd number of 16-byte units apart: ldmatrix has no bank conflicts.
  static constexpr int kStride = (Rows::kUnits | 1) * 16;
  static constexpr int kTileBytes = kTokens * kStride;
  static constexpr int kScaleBytes = kTokens * kScales * 4;
  static constexpr int kStageBytes = 2 * (kTileBytes + kScaleBytes);  // keys, values, their scales
  static constexpr int kColumns = Rows::kSteps * 16;  // D, or more where units are filled up
  static constexpr int kCopyBytes = Rows::kRowBytes % 16 == 0 ? 16 : 8;
  static constexpr int kCopies = Rows::kRowBytes / kCopyBytes;  // per row
  static constexpr int kQueryStride = kColumns * 2 + 16;
  static constexpr int kQueryBytes = kRows * kQueryStride;
  static constexpr int kNewBytes = 2 * Rows::kUnits * 16;  // the new token's key and value
  static constexpr int kMaxStages = 8;
  static constexpr int kBudget = 226 * 1024 / kBlocks - 3 * 1024 - kQueryBytes - kNewBytes -
                                 kRows * D / 4 * 24 - kMaxCluster * 24;
  static constexpr int kFit = kBudget / (kWarps * kStageBytes);
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr bool kFits = kStages >= 2 && kWarpBytes >= kRows * D * 4;  // results of a warp
  // Parts of all blocks for one block's share of the results: vectors of 4 columns, their maxima
  // and sums. A share is num_vectors / cluster, rounded up.
  static constexpr int kVectors = kRows * D / 4;
  static constexpr int kPartBytes = (kVectors + kMaxCluster) * 16;
  static constexpr int kPartStatsBytes = (kVectors + kMaxCluster) * 8;
  static constexpr int kSharedBytes =
      kWarps * kWarpBytes + kQueryBytes + kNewBytes + kPartBytes + kPartStatsBytes;
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
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"(shared), "l"(global)
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
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared),
                 "l"(global), "r"(valid ? 8 : 0)
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

// Stores to the same shared-memory address of another block of the cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
  uint32_t remote = 0;
#ifdef REGATTA_SM90
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(shared)), "r"(rank));
#endif
  return remote;
}

__device__ __forceinline__ void store_cluster(uint32_t remote, float4 x) {
#ifdef REGATTA_SM90
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
#endif
}

__device__ __forceinline__ void store_cluster(uint32_t remote, float2 x) {
#ifdef REGATTA_SM90
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(x.x), "f"(x.y)
               : "memory");
#endif
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
                                                    float epsilon) {
  if (bf16) {
    x->normalise(static_cast<const __nv_bfloat16*>(weight), units, unit, head_dim, epsilon);
  } else {
    x->normalise(static_cast<const __half*>(weight), units, unit, head_dim, epsilon);
  }
}

template <class T, int D, KvFormat kFormat, int kBlocks>
__global__ void __launch_bounds__(DecodeShape<T, D, kFormat, kBlocks>::kThreads, kBlocks)
    attention_decode_sm90_kernel(const AttentionArgs args) {
  using S = DecodeShape<T, D, kFormat, kBlocks>;
  static_assert(S::kFits);
  using Rows = typename S::Rows;
  constexpr int kWarps = S::kWarps, kSteps = Rows::kSteps, kUnits = Rows::kUnits;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float2 warp_stats[kWarps][S::kRows];
  __shared__ float query_scale[S::kRows], query_sum[S::kRows];
  __shared__ __align__(16) float new_scales[2][2];
  uint8_t* const queries = shared + kWarps * S::kWarpBytes;
  uint8_t* const new_rows = queries + S::kQueryBytes;
  float4* const parts = reinterpret_cast<float4*>(new_rows + S::kNewBytes);
  float2* const part_stats = reinterpret_cast<float2*>(parts + S::kVectors + kMaxCluster);

  const int tid = threadIdx.x, lane = tid % kWarp;
  const int warp = __shfl_sync(~0u, tid / kWarp, 0);
  const int rank = blockIdx.x, cluster = gridDim.x;
  const int kv_head = blockIdx.y % args.num_kv_heads, row_tile = blockIdx.y / args.num_kv_heads;
  const int seq = blockIdx.z;
  const bool fused = args.rope.qkv != nullptr;
  if (fused) {
    pdl_trigger();
  } else {  // trigger after the wait: the prefill kernel behind relies on it (attention.cu)
    pdl_wait();
    pdl_trigger();
  }

  const int token0 = args.cu_seqlens_q[seq];
  const int num_tokens = args.cu_seqlens_q[seq + 1] - token0;
  const int last_token = args.cu_seqlens_q[args.num_seqs];
  const int context_len = args.context_lens[seq];
  const int num_rows = num_tokens * args.group, first_row = row_tile * S::kRows;
  const bool mine = num_tokens > 0 &&
                    is_decode_span(num_tokens, args.group, args.max_decode_rows) &&
                    first_row < num_rows;
  const int low = first_visible(context_len, num_tokens, args.window);
  // Tiles of 16 tokens: those of the context, of this block, of this warp.
  const int first_tile = low / S::kTokens;
  const int num_tiles = (context_len + S::kTokens - 1) / S::kTokens - first_tile;
  const int per_block = (num_tiles + cluster - 1) / cluster;
  const int block_begin = first_tile + rank * per_block;
  const int block_end = min(block_begin + per_block, first_tile + num_tiles);
  const int my_tile = block_begin + warp;
  const int my_tiles =
      mine && my_tile < block_end ? (block_end - my_tile + kWarps - 1) / kWarps : 0;
  // The token that this step adds is not in the cache yet when fused.
  const int stored_len = fused ? context_len - 1 : context_len;

  uint8_t* const ring = shared + warp * S::kWarpBytes;
  const uint32_t ring_address = shared_address(ring);
  const int32_t* const table = args.block_tables + static_cast<int64_t>(seq) * args.max_blocks;
  // Lane i holds where part i of the warp's tiles begins, in 16 rows of the cache, of 32 parts at a
  // time; one group ahead.
  constexpr int kParts = S::kParts, kGroupTiles = kWarp / kParts;
  const int shift16 = args.block_shift - 4;
  auto read_rows = [&](int from) {
    const int i = from + lane / kParts;
    const int part = (my_tile + i * kWarps) * kParts + lane % kParts;
    if (i >= my_tiles || part * 16 >= context_len) return 0;
    const int block = max(0, table[part >> shift16]);
    return ((block * args.num_kv_heads + kv_head) << shift16) + (part & ((1 << shift16) - 1));
  };
  int rows16 = read_rows(0), next_rows16 = read_rows(kGroupTiles);
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
          const int r = kWarp % S::kCopies == 0 ? u / S::kCopies + lane / S::kCopies
                                                : piece / S::kCopies;
          const int in_row =
              kWarp % S::kCopies == 0 ? lane % S::kCopies : piece - r * S::kCopies;
          const uint32_t offset = (h * 16 + r) * S::kStride + in_row * kBytes;
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
        next_rows16 = read_rows(i + kGroupTiles);
      }
      const int position = (my_tile + i * kWarps) * S::kTokens;
      const uint32_t to = ring_address + stage * S::kStageBytes;
      if (position >= low && position + S::kTokens <= stored_len) {
        copy_tile(i, to, position, std::true_type());
      } else {
        copy_tile(i, to, position, std::false_type());
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < S::kStages; ++i) issue(i, i);

  // Queries (and the new token) of this block.
  const int rows = mine ? min(S::kRows, num_rows - first_row) : 0;
  if constexpr (S::kColumns > D) {
    constexpr int kUnits8 = (S::kColumns - D) / 8;
    for (int i = tid; i < S::kRows * kUnits8; i += S::kThreads) {
      *reinterpret_cast<uint4*>(queries + i / kUnits8 * S::kQueryStride +
                                (D + i % kUnits8 * 8) * 2) = make_uint4(0, 0, 0, 0);
    }
  }
  const int new_tile = (context_len - 1) / S::kTokens;  // last of the context
  const bool owns_new =
      fused && mine && context_len > 0 && new_tile >= block_begin && new_tile < block_end;
  const HeadUnits units = HeadUnits::of(D, fused ? args.rope.rotary_dim : 0);
  const int unit = tid % units.lanes;
  Angles angles;
  int slot = -1;
  if (fused) {
    if (mine) {
      const int position = min(max(args.rope.positions[token0], 0), args.rope.num_positions - 1);
      slot = args.rope.slot_mapping[token0];
      if (slot >= args.rope.num_slots) slot = -1;
      angles.load(args.rope.table + static_cast<int64_t>(position) * args.rope.rotary_dim, units,
                  unit);
    }
    pdl_wait();
  }
  // Rows behind the last span.
  {
    const int64_t row = static_cast<int64_t>(args.num_heads) * D;
    const int block = (seq * gridDim.y + blockIdx.y) * gridDim.x + rank;
    const int64_t step = static_cast<int64_t>(gridDim.x) * gridDim.y * gridDim.z * S::kThreads;
    for (int64_t i = last_token * row / 8 + static_cast<int64_t>(block) * S::kThreads + tid;
         i < args.num_tokens * row / 8; i += step) {
      static_cast<uint4*>(args.out)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  if (!mine) {  // the whole cluster alike
    cp_async_wait<0>();
    return;
  }
  if (cluster > 1) cluster_arrive();  // all blocks have begun: waited for in front of the merge
  const bool bf16 = S::kDense ? Traits<T>::dtype == DType::kBFloat16 : args.bf16;
  const float key_factor =
      kFormat == KvFormat::kInt8Static || kFormat == KvFormat::kFp8 ? args.key_scale[kv_head] : 1.f;
  const float value_factor = kFormat == KvFormat::kInt8Static || kFormat == KvFormat::kFp8
                                 ? args.value_scale[kv_head]
                                 : 1.f;
  {
    const int per_pass = S::kThreads / units.lanes;
    const int heads = S::kRows + (owns_new ? 2 : 0);
    for (int base = 0; base < heads; base += per_pass) {
      const int head = base + tid / units.lanes;
      const bool is_query = head < S::kRows;
      const bool active = is_query ? head < rows : head < heads;
      const bool is_value = head == S::kRows + 1;
      int64_t source_head;
      const uint8_t* source = static_cast<const uint8_t*>(fused ? args.rope.qkv : args.q);
      if (is_query) {
        const int r = first_row + head, t = token_of_row(args, r);
        const int64_t per_token = fused ? args.num_heads + 2 * args.num_kv_heads : args.num_heads;
        source_head = (token0 + t) * per_token + kv_head * args.group + r - t * args.group;
      } else {
        source_head = static_cast<int64_t>(token0) * (args.num_heads + 2 * args.num_kv_heads) +
                      args.num_heads + (is_value ? args.num_kv_heads : 0) + kv_head;
      }
      HeadPart x;
      load_head_part(&x, source + source_head * D * 2, bf16, units, unit, active);
      if (fused) {
        if (args.rope.q_norm != nullptr || args.rope.k_norm != nullptr) {
          const void* weight = is_value ? nullptr : is_query ? args.rope.q_norm : args.rope.k_norm;
          normalise_head_part(&x, weight, bf16, units, unit, D, args.rope.epsilon);
        }
        if (!is_value) x.rotate(angles);
      }
      if constexpr (!S::kDense) {
        // Queries as fp16 between 1 and 2 at most: no bf16 magnitude overflows.
        float factor = 1.f;
        const float top = x.largest(units.lanes);
        if (is_query) {
          const int exponent = max(-100, min(100, ilogbf(fmaxf(top, 1e-30f))));
          factor = ldexpf(1.f, -exponent);
          float sum = 0.f;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            x.low[e] = __half2float(__float2half_rn(x.low[e] * factor));
            x.high[e] = __half2float(__float2half_rn(x.high[e] * factor));
            sum += x.low[e] + x.high[e];
          }
          sum = lanes_sum(sum, units.lanes);
          if (unit == 0) query_scale[head] = ldexpf(1.f, exponent), query_sum[head] = sum;
        } else {
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
      if (owns_new) {  // the whole block alike: row_scale() needs whole warps
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
          auto store = [&](int column, const float(&v)[8]) {
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
  __syncthreads();

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
  // Row r sees positions in (depth - window, limit]; in a tree, of the span those that its mask
  // has.
  const int before = context_len - num_tokens;
  const bool trees = is_tree(args, num_tokens);

  float out[kSteps][4];  // out^T: columns Rows::column(m, lane, e); rows 2c + e % 2
#pragma unroll
  for (int m = 0; m < kSteps; ++m) out[m][0] = out[m][1] = out[m][2] = out[m][3] = 0.f;
  float largest[2] = {-INFINITY, -INFINITY}, base[2] = {0.f, 0.f};
  float sum[2] = {0.f, 0.f}, offset_sum[2] = {0.f, 0.f};
  // Values' scales are relative to base_scale, so that weights fit fp16.
  float base_scale = 1e-37f, base_inverse = 1e37f;

  // Of this lane's ldmatrix row: tokens (lane & 7) + 8 * (lane >> 4), unit (lane >> 3) & 1.
  const uint32_t lane_offset = ((lane & 7) + (lane >> 4) * 8) * S::kStride + (lane >> 3 & 1) * 16;

  int stage = 0;
  for (int i = 0; i < my_tiles; ++i) {
    cp_async_wait<S::kStages - 1>();
    __syncwarp();
    uint8_t* const tile = ring + stage * S::kStageBytes;
    const int position = (my_tile + i * kWarps) * S::kTokens;
    if (owns_new && my_tile + i * kWarps == new_tile) {
      const int row = (context_len - 1) % S::kTokens;
      for (int u = lane; u < 2 * kUnits; u += kWarp) {
        const int at = u < kUnits ? u : u - kUnits;
        *reinterpret_cast<uint4*>(tile + (u < kUnits ? 0 : S::kTileBytes) + row * S::kStride +
                                  at * 16) = *reinterpret_cast<const uint4*>(new_rows + u * 16);
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
      const uint8_t* const keys = tile + h * 16 * S::kStride + lane_offset;
      if constexpr (kFormat == KvFormat::kInt8Static || kFormat == KvFormat::kInt8Dynamic) {
#pragma unroll
        for (int e = 0; e < 4; ++e) product[0][e] = columns_sum[e % 2];
      }
      if constexpr (S::kDense) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t b[4];  // tokens 0-7: both halves of the step; tokens 8-15 alike
          ldmatrix4(b, keys + k * 32);
          const uint32_t a[4] = {b[0], b[2], b[1], b[3]};
          mma_m16n8k16<T>(product[k % kChains], a, q[k][0], q[k][1]);
        }
      } else {
#pragma unroll
        for (int u = 0; u < kUnits; u += 2) {
          uint32_t b[4];  // tokens 0-7: units u, u + 1; tokens 8-15 alike
          ldmatrix4(b, keys + u * 16);
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
    bool rescale = top[0] * unit_log2[0] > largest[0] + kSlack ||
                   top[1] * unit_log2[1] > largest[1] + kSlack;
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
        const float grown = fmaxf(largest[r], stride_max(top[r] * unit_log2[r]));
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
          x[r] = exp2_approx(fmaf(s[h][2 * t + r], unit_log2[r], -base[r]));
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
      const uint8_t* const values = tile + S::kTileBytes + h * 16 * S::kStride + lane_offset;
      if constexpr (S::kDense) {
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          uint32_t a[4];
          ldmatrix4_trans(a, values + m * 32);
          mma_m16n8k16<T>(out[m], a, weights[h][0], weights[h][1]);
        }
      } else {
#pragma unroll
        for (int u = 0; u < kUnits; u += 2) {
          uint32_t b[4];
          ldmatrix4_trans(b, values + u * 16);
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

  // Warps: results [8 rows, D] where the ring was; column x of row r lies at (x + 8 r) % D.
  auto result_at = [](float* results, int row, int column) -> float* {
    return results + row * D + (column + row * 8) % D;
  };
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
        if (row < rows && (S::kColumns == D || column < D)) {
          *result_at(results, row, column) =
              fmaf(out[m][e], factor * Rows::value_unit(e), offsets[e & 1]);
        }
      }
    }
  }
  __syncthreads();

  auto store4 = [&](int row, int column, float4 x, float total) {
    const float scale = total > 0.f ? 1.f / total : 0.f;
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
  const int num_vectors = rows * (D / 4);
  const int share = (num_vectors + cluster - 1) / cluster;
  if (cluster > 1) cluster_wait();
  for (int i = tid; i < num_vectors; i += S::kThreads) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    float most = -INFINITY, total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, warp_stats[w][row].x);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = part_weight(warp_stats[w][row].x, most);
      const float4 y = *reinterpret_cast<const float4*>(
          result_at(reinterpret_cast<float*>(shared + w * S::kWarpBytes), row, column));
      total = fmaf(weight, warp_stats[w][row].y, total);
      x.x = fmaf(weight, y.x, x.x);
      x.y = fmaf(weight, y.y, x.y);
      x.z = fmaf(weight, y.z, x.z);
      x.w = fmaf(weight, y.w, x.w);
    }
    if (cluster == 1) {
      store4(row, column, x, total);
    } else {
      const int owner = i / share, at = rank * share + i - owner * share;
      store_cluster(cluster_address(parts + at, owner), x);
      store_cluster(cluster_address(part_stats + at, owner), make_float2(most, total));
    }
  }
  if (cluster == 1) return;
  cluster_arrive();
  cluster_wait();
  // This block's share, merged in the order of the blocks.
  for (int j = tid; j < share; j += S::kThreads) {
    const int i = rank * share + j;
    if (i >= num_vectors) break;
    float most = -INFINITY, total = 0.f;
    for (int other = 0; other < cluster; ++other) {
      most = fmaxf(most, part_stats[other * share + j].x);
    }
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int other = 0; other < cluster; ++other) {
      const float2 stats = part_stats[other * share + j];
      const float4 y = parts[other * share + j];
      const float weight = part_weight(stats.x, most);
      total = fmaf(weight, stats.y, total);
      x.x = fmaf(weight, y.x, x.x);
      x.y = fmaf(weight, y.y, x.y);
      x.z = fmaf(weight, y.z, x.z);
      x.w = fmaf(weight, y.w, x.w);
    }
    store4(i / (D / 4), i % (D / 4) * 4, x, total);
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
Status launch_decode(const AttentionArgs& args, LaunchConfig config, int num_sms) {
  using S = DecodeShape<T, D, kFormat, kBlocks>;
  config.block = dim3(S::kThreads);
  // launch() raises the limit for more than 48 KB, and does not know of the kernel's own variables.
  config.shared_bytes = S::kSharedBytes > 47 * 1024 ? std::max(S::kSharedBytes, 49 * 1024)
                                                    : S::kSharedBytes;
  // Few blocks, which wait for the kernel ahead with their rings full: one per multiprocessor, or
  // the scheduler puts neighbours onto one (batch 1 of 4096 tokens: 8.7 us instead of 10.3).
  const int64_t blocks = int64_t{config.grid.x} * config.grid.y * config.grid.z;
  if (args.rope.qkv != nullptr && blocks <= num_sms) {
    config.shared_bytes = std::max(config.shared_bytes, kAloneBytes);
  }
  return launch(attention_decode_sm90_kernel<T, D, kFormat, kBlocks>, config,
                "paged_attention decode_sm90", args);
}

template <class T, int D, KvFormat kFormat>
Status run_attention_decode_sm90(const AttentionArgs& args, const AttentionLimits& limits,
                                 int num_sms, const Launch& launch_on) {
  using Two = DecodeShape<T, D, kFormat, 2>;
  using Four = DecodeShape<T, D, kFormat, 4>;
  const int cluster = decode_cluster(args, num_sms, limits.max_context_len);
  const int64_t max_rows = std::max<int64_t>(
      args.group, std::min<int64_t>(limits.max_query_len * args.group, args.max_decode_rows));
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(cluster),
                     static_cast<unsigned>(args.num_kv_heads * ceil_div(max_rows, Two::kRows)),
                     static_cast<unsigned>(args.num_seqs));
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  config.cluster_x = static_cast<unsigned>(cluster);
  const int64_t blocks = int64_t{config.grid.x} * config.grid.y * config.grid.z;
  if constexpr (Four::kFits) {
    if (blocks > 2 * num_sms) return launch_decode<T, D, kFormat, 4>(args, config, num_sms);
  }
  constexpr int kBlocks = Two::kFits && !(kFormat == KvFormat::kDense && D > 128) ? 2 : 1;
  return launch_decode<T, D, kFormat, kBlocks>(args, config, num_sms);
}

}  // namespace regatta::cuda
