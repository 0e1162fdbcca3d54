// What the attention kernels share: arguments, how spans become work, tile loads, masks.
//
// Rows. The query heads of one KV head (the "group") are packed with the tokens of a span: row r of
// a span is token r / group, head kv_head * group + r % group. A span of n tokens has n * group
// rows per KV head. Row r sees positions up to context_len - n + r / group.
//
// Behind a prefix mask all of a request's rows see its first prefix_lens positions, those behind a
// row as far as a window goes both ways: the prefill and generic kernels know them. A single token
// sees what is before it in any case.
//
// Two kernels share a call. Spans of few rows (decode, drafts) are bound by reading the cache:
// their context is split over blocks (attention_decode_*). Longer spans are bound by the matrix
// units: one block per tile of rows (attention_prefill_*). Beside longer ones, the sm90 kernels
// treat drafts as prefill: one block per possible tile of drafts would cost more than it gains.
#pragma once

#include <type_traits>

#include "cuda/attention/select.h"
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

// The rotary embedding and cache write that a decode kernel does on the way: see
// RopeAndCacheWriteParams. qkv null: done already.
struct FusedRope {
  const void* qkv;                           // [T, (Hq + 2 Hkv) * D]
  const int32_t* positions;                  // [T]
  const int32_t* slot_mapping;               // [T]
  const float* table;                        // [num_positions, rotary_dim]
  const void* q_norm;                        // [D] or null
  const void* k_norm;                        // [D] or null
  int rotary_dim, num_positions, num_slots;  // rotary_dim 0: nothing rotates
  float epsilon;
  // What few models have: queries' own table or null, norms' factors of 1 + weight, pairs of
  // neighbours.
  const float* query_table;
  bool plus_one, interleaved;

  bool is_rare() const { return query_table != nullptr || plus_one || interleaved; }
};

struct AttentionArgs {
  const void* q;           // [T, Hq, D]
  const void* key;         // [num_blocks, Hkv, block_size, row]: kv_format.h
  const void* value;       // as key
  const float* key_scale;  // where the format has them
  const float* value_scale;
  void* out;                    // [T, Hq, D]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* context_lens;  // [B]
  const int32_t* block_tables;  // [B, max_blocks]
  const uint32_t* tree_mask;    // [T, tree_words] or null: see AttentionBatch
  const int32_t* prefix_lens;   // [B] or null
  int tree_words;
  // What blocks leave for each other, results that are not normalised, the largest logit (log2) and
  // the sum, and counters, which are zero between calls. The sm80 decode kernel's: [units, Hkv,
  // partial_rows, D], [units, Hkv, partial_rows] and [units, Hkv]. The sm90 decode kernel's:
  // vectors of 4 columns, [blocks, 8 * D / 4] both, and [items]. The sm90 prefill kernel's: [2
  // blocks, 2, D / 2 + 4, 128], none, and [blocks, 2].
  float* partial_out;
  float2* partial_stats;
  int* counters;
  // [2 + kDecodeTickets]: unused, of prefill, of sm90 decode launches in turn; zero between calls
  int* tickets;
  int num_tokens, num_seqs, max_blocks;
  int num_heads, num_kv_heads, group;
  uint32_t group_inverse;                // ceil(2^32 / group), 0 for a group of 1
  int block_shift;                       // log2(block_size)
  int window;                            // kNoWindow when off
  int least_team_log2, blocks_per_span;  // of the sm90 decode kernel, as ticket
  int* ticket;                           // null: no span takes more than blocks_per_span
  int max_decode_rows;  // per KV head, of spans of several tokens that a decode kernel takes
  int tile_rows;        // of the sm80 decode kernel
  int partial_rows;     // min(tile_rows, rows of the largest decode span)
  float scale_log2;     // softmax_scale * log2(e): exponents are base 2
  bool bf16;            // q and out: else fp16 (or float32, in the generic kernel)
  bool
      prefill_alone;  // the prefill kernel takes spans of any length: it has no decode kernel ahead
  bool decode_apart;  // blocks of the sm90 decode kernel meet in memory
  bool shares_prefill;  // blocks may share an item's keys: its bits depend on the batch then
  FusedRope rope;       // of the sm90 decode kernel
  // What becomes of scores, see PagedAttentionParams: softcap * log2(e), or 0 for none; and what
  // times a logit (base 2) is the exponent (base 2) of tanh.
  float cap_log2, cap_exponent;
  const float* slopes;  // [Hq] or null
  const float* sinks;   // [Hq] or null
  // Of keys and values made of latents, see latent/expanded.h: q is the part of each head's own,
  // block_tables the first row of each span.
  const void* shared_q;
};

// Whether scores are more than products.
__host__ __device__ inline bool shapes_scores(const AttentionArgs& args) {
  return args.cap_log2 != 0.f || args.slopes != nullptr;
}

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kNoWindow = 1 << 30;
constexpr int kDecodeTickets = 32;        // more than launches that dependent launch lets overlap
constexpr int kMaxSplits = 32;            // of a context
constexpr int kDecodeRows = 8;            // of queries that an item of the sm90 decode kernel takes
constexpr int kMaxMultiprocessors = 144;  // of sm_90 that are made use of: a whole GH100
constexpr int kMinSplit = 256;            // tokens: below, merging costs more than it spreads

// Tokens per split of a context of `length` tokens: a power of two, a function of the length alone.
// Few splits, because an item's fixed costs (queries, merging) are those of about 250 tokens: at
// batch 32 and 1024 tokens on an H200, 2 splits took 41 us, 4 took 66 and 8 took 65; at batch
// 1, 11.6, 10.3 and 10.9. Contexts past 8k get 32, so that one long request alone fills the chip.
__host__ __device__ inline int split_tokens(int length) {
  const int splits = length <= 1024 ? 2 : length <= 2048 ? 4 : length <= 8192 ? 8 : 32;
  int split = kMinSplit;
  while (split * splits < length) split *= 2;
  return split;
}

// row / group: a division takes as long as a product of the matrix units.
__device__ __forceinline__ int token_of_row(const AttentionArgs& args, int row) {
  return args.group_inverse == 0 ? row : static_cast<int>(__umulhi(row, args.group_inverse));
}

// Whether a span may be a tree of drafts: only the decode kernel of sm90 and the generic one know
// trees, and the launcher sees to it that they take all of them.
__device__ __forceinline__ bool is_tree(const AttentionArgs& args, int num_tokens) {
  return args.tree_mask != nullptr && num_tokens <= 32 * args.tree_words;
}

// Positions before its span that a token of a tree adds to the span's first position.
__device__ __forceinline__ int tree_depth(const AttentionArgs& args, int token) {
  int seen = 0;
  for (int i = 0; i < args.tree_words; ++i) {
    seen += __popc(args.tree_mask[static_cast<int64_t>(token) * args.tree_words + i]);
  }
  return seen - 1;
}

__device__ __forceinline__ bool tree_sees(const AttentionArgs& args, int token, int other) {
  return args.tree_mask[static_cast<int64_t>(token) * args.tree_words + other / 32] >>
             (other % 32) &
         1;
}

// The last position of a request's prefix; -1: it has none.
__device__ __forceinline__ int last_of_prefix(const AttentionArgs& args, int seq, int context_len) {
  return args.prefix_lens == nullptr ? -1 : min(args.prefix_lens[seq], context_len) - 1;
}

// The last position that the token at `position` sees; common: last_of_prefix().
__device__ __forceinline__ int last_visible(int position, int common, int window) {
  return max(position, min(common, position + window - 1));
}

// First visible position of a span's first row.
__device__ __forceinline__ int first_visible(int context_len, int num_tokens, int window) {
  const int first = context_len - num_tokens - window + 1;
  return first > 0 ? first : 0;
}

// The prefill tile with number `rank` over all spans, heaviest of each span first. Whole warps call
// it together. Past the last tile it returns false and sets num_tiles.
struct PrefillTile {
  int seq, tile;           // tile counts kRows rows from the start of the span
  int token0, num_tokens;  // span in T
  int context_len;
  int common;  // the last position of the request's prefix; -1: it has none
};

template <int kRows>
__device__ __forceinline__ bool find_prefill_tile(const AttentionArgs& args, int rank,
                                                  PrefillTile* found, int* num_tiles = nullptr) {
  const int lane = threadIdx.x % kWarp, wanted = rank;
  for (int base = 0; base < args.num_seqs; base += kWarp) {
    const int seq = base + lane;
    int tiles = 0;
    if (seq < args.num_seqs) {
      const int num_tokens = args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq];
      if (args.prefill_alone || !is_decode_span(num_tokens, args.group, args.max_decode_rows)) {
        tiles = (num_tokens * args.group + kRows - 1) / kRows;
      }
    }
    const int end = warp_inclusive_scan(tiles);
    const int total = __shfl_sync(~0u, end, kWarp - 1);
    if (rank < total) {
      const int owner = __ffs(__ballot_sync(~0u, rank < end)) - 1;
      found->seq = base + owner;
      found->tile = __shfl_sync(~0u, end, owner) - 1 - rank;
      found->token0 = args.cu_seqlens_q[found->seq];
      found->num_tokens = args.cu_seqlens_q[found->seq + 1] - found->token0;
      found->context_len = args.context_lens[found->seq];
      found->common = last_of_prefix(args, found->seq, found->context_len);
      return true;
    }
    rank -= total;
  }
  if (num_tiles != nullptr) *num_tiles = wanted - rank;
  return false;
}

// Copies units [first_unit, first_unit + kUnits * 32) of 16 bytes of the 16 tokens at `source`
// (contiguous, [16, D]) into rows of D + 8 elements: the odd number of 16-byte units per row keeps
// ldmatrix free of bank conflicts for every D here. Tokens outside of [low, high) become zeros and
// are not read: their slots may hold anything, and 0 * NaN is NaN.
template <class T, int D, int kUnits>
__device__ __forceinline__ void load_16_tokens(T* shared, const T* source, int first_unit,
                                               int position, int low, int high) {
  constexpr int kUnitsPerRow = D / 8;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int unit = first_unit + u * kWarp + lane;
    const int row = unit / kUnitsPerRow, column = unit % kUnitsPerRow;
    const bool seen = position + row >= low && position + row < high;
    cp_async16(shared + row * (D + 8) + column * 8, source + unit * 8, seen ? 16 : 0);
  }
}

// First element of the 16 tokens from `position` on; position is a multiple of 16.
template <class T, int D>
__device__ __forceinline__ const T* cache_tokens(const void* cache, const AttentionArgs& args,
                                                 int block, int kv_head, int position) {
  const int in_block = position & ((1 << args.block_shift) - 1);
  const int64_t row =
      ((static_cast<int64_t>(block) * args.num_kv_heads + kv_head) << args.block_shift) + in_block;
  return static_cast<const T*>(cache) + row * D;
}

template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  return bit_cast<uint32_t>(Traits<T>::from_float2(make_float2(low, high)));
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// softcap * tanh(score / softcap), both base 2. tanh(x) = 1 - 2 / (1 + exp(2x)): off by 1e-7 of the
// cap, which the instruction for it is by 5e-4.
__device__ __forceinline__ float capped_logit(const AttentionArgs& args, float logit) {
  const float e = exp2_approx(logit * args.cap_exponent);
  return fmaf(-2.f * args.cap_log2, __fdividef(1.f, 1.f + e), args.cap_log2);
}

// Products of a thread, at(i) of row(i) (0 or 1), become logits, base 2: `units` of a row's times
// its product, with what args.cap_log2 and args.slopes say. Element i lies offset(i) keys behind
// the one that is distances[row] from the row's query (key - query). Without slopes `slopes` is not
// read.
template <int kCount, class At, class Row, class Offset>
__device__ __forceinline__ void shape_logits(const AttentionArgs& args, const float (&units)[2],
                                             const float (&slopes)[2], const int (&distances)[2],
                                             At at, Row row, Offset offset) {
  if (args.cap_log2 != 0.f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(i) = capped_logit(args, at(i) * units[row(i)]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(i) *= units[row(i)];
  }
  if (args.slopes != nullptr) {
    const float first[2] = {slopes[0] * static_cast<float>(distances[0]),
                            slopes[1] * static_cast<float>(distances[1])};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      at(i) += fmaf(slopes[row(i)], static_cast<float>(offset(i)), first[row(i)]);
    }
  }
}

// The same of the results of products with 8 keys each, as mma.sync and wgmma leave them.
template <int kCount, class At>
__device__ __forceinline__ void shape_logits(const AttentionArgs& args, const float (&slopes)[2],
                                             const int (&distances)[2], At at) {
  const float units[2] = {args.scale_log2, args.scale_log2};
  shape_logits<kCount>(
      args, units, slopes, distances, at, [](int i) { return i / 2 & 1; },
      [](int i) { return i / 4 * 8 + (i & 1); });
}

// Of a query head, times log2(e); 0 without slopes.
__device__ __forceinline__ float slope_of(const AttentionArgs& args, int head) {
  return args.slopes == nullptr ? 0.f : args.slopes[head] * kLog2E;
}

// The sum of a row's weights, exp2(logit - base), with that of a sink. One far above all logits
// makes it infinite, and what is divided by it 0.
__device__ __forceinline__ float with_sink(float sum, float base, float sink) {
  return sum + exp2_approx(fmaf(sink, kLog2E, -base));
}

// With the sink of the row's head, where there are sinks. Whoever ends a row calls it, once: parts
// of a context have no sink.
__device__ __forceinline__ float sum_with_sink(const AttentionArgs& args, float sum, float base,
                                               int head) {
  return args.sinks == nullptr ? sum : with_sink(sum, base, args.sinks[head]);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// f(std::integral_constant<int, head_dim>()), of the head_dims that the kernels of matrix
// instructions have.
template <class F>
Status dispatch_head_dim(int head_dim, const char* name, F&& f) {
  switch (head_dim) {
    case 64:
      return f(std::integral_constant<int, 64>());
    case 80:
      return f(std::integral_constant<int, 80>());
    case 96:
      return f(std::integral_constant<int, 96>());
    case 128:
      return f(std::integral_constant<int, 128>());
    case 256:
      return f(std::integral_constant<int, 256>());
  }
  return Status::error(std::string(name) + ": head_dim " + std::to_string(head_dim) +
                       " is not supported (allowed: 64, 80, 96, 128, 256)");
}

// f(std::integral_constant<KvFormat, format>()) of a cache of codes.
template <class F>
Status dispatch_codes(KvFormat format, const char* name, F&& f) {
  switch (format) {
    case KvFormat::kInt8Static:
      return f(std::integral_constant<KvFormat, KvFormat::kInt8Static>());
    case KvFormat::kInt8Dynamic:
      return f(std::integral_constant<KvFormat, KvFormat::kInt8Dynamic>());
    case KvFormat::kFp8:
      return f(std::integral_constant<KvFormat, KvFormat::kFp8>());
    case KvFormat::kInt4:
      return f(std::integral_constant<KvFormat, KvFormat::kInt4>());
    case KvFormat::kDense:
      break;
  }
  return Status::error(std::string(name) + ": kv_format " + kv_format_info(format).name +
                       " is not supported (allowed: int8_static, int8_dynamic, fp8, int4)");
}

// Launchers, one per kernel. num_cache_rows: num_blocks * Hkv * block_size.
Status launch_attention_decode_sm80(const AttentionArgs& args, DType dtype, int head_dim,
                                    int num_sms, const Launch& launch);
Status launch_attention_decode_sm90(const AttentionArgs& args, DType dtype, KvFormat format,
                                    int head_dim, const AttentionLimits& limits, int num_sms,
                                    const Launch& launch);
Status launch_attention_decode_quantized_sm90(const AttentionArgs& args, KvFormat format,
                                              int head_dim, const AttentionLimits& limits,
                                              int num_sms, const Launch& launch);
Status launch_attention_prefill_sm80(const AttentionArgs& args, DType dtype, int head_dim,
                                     const Launch& launch);
Status launch_attention_prefill_sm90(const AttentionArgs& args, DType dtype, KvFormat format,
                                     int head_dim, int64_t num_cache_rows, int num_sms,
                                     const Launch& launch);
// args.key [num_rows, Hkv * N] and args.value [num_rows, Hkv * V] of heads, shared_key [num_rows,
// R].
Status launch_attention_prefill_expanded_sm90(const AttentionArgs& args, DType dtype,
                                              const void* shared_key, int64_t num_rows, int num_sms,
                                              const Launch& launch);
Status launch_attention_prefill_quantized_sm90(const AttentionArgs& args, DType dtype,
                                               KvFormat format, int head_dim, int num_sms,
                                               const Launch& launch);
Status launch_attention_generic(const AttentionArgs& args, DType dtype, KvFormat format,
                                int head_dim, const Launch& launch);

}  // namespace regatta::cuda
