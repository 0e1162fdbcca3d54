// Attention over a paged cache: rotary embedding and cache write, and attention itself. No
// framework, no ISA code.
//
// T tokens, B requests (spans of tokens), Hq query heads, Hkv key/value heads, D head_dim, R rotary
// dims, P positions of the rotary table, M blocks per request.
// "T" of a comment is the activation dtype: float32, bfloat16 or float16, one for the whole call.
#pragma once

#include <cstdint>
#include <string>

#include "regatta/kv_format.h"
#include "regatta/types.h"

namespace regatta {

// Keys and values of all requests: plain row-major blocks of block_size tokens.
// slot = block id * block_size + offset in the block.
struct PagedCache {
  void* key = nullptr;    // [num_blocks, Hkv, block_size, row], a row of D values or their codes
  void* value = nullptr;  // alike
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  KvFormat format = KvFormat::kDense;
  // Of kv_format.h's shapes, null where the format has none. Written with the rows where they are
  // per token, given where they are per head.
  float* key_scale = nullptr;
  float* value_scale = nullptr;
  // Of latents in fp8, whose keys and values are codes alike, both with key_scale.
  void* tail = nullptr;  // [num_blocks, 1, block_size, R] of the activations' dtype
};

// Which tokens a step computes and where each request's context lies.
struct AttentionBatch {
  const int32_t* cu_seqlens_q = nullptr;  // [B + 1] borders of the spans in T, from 0
  const int32_t* context_lens = nullptr;  // [B] tokens in the cache, this step's included
  const int32_t* block_tables = nullptr;  // [B, M] block ids; entries past the context are not read
  int64_t num_tokens = 0;                 // T; rows past cu_seqlens_q[B] are padding
  int64_t num_seqs = 0;                   // B
  int64_t max_blocks = 0;                 // M
  // Draft trees. Bit i % 32 of word i / 32 of a token's row: whether it sees token i of its own
  // span. The last bit set is its own: parents come before children. Null, or a span of more than
  // 32 words: each token sees the span's up to itself. What lies before the span every token sees;
  // a window counts from the span's first position plus the number of bits, less 1: the depth in
  // the tree.
  const int32_t* tree_mask = nullptr;  // [T, tree_words]
  int64_t tree_words = 0;
  // The first so many tokens of each request are seen by all of its tokens, those before them too:
  // a span that begins among them has them all. Null: none. Without trees and slopes. A window goes
  // both ways there.
  const int32_t* prefix_lens = nullptr;  // [B]
  // The first so many tokens of each span have no row in the output. Null: none. On a CPU.
  const int32_t* unread = nullptr;  // [B]
};

// The end of the positions that the token before `end` sees, of a prefix of so many tokens.
inline int64_t seen_end(int64_t end, int64_t prefix, int64_t window) {
  if (window >= 0 && prefix > end - 1 + window) prefix = end - 1 + window;
  return end < prefix ? prefix : end;
}

struct RopeAndCacheWriteParams {
  DType dtype = DType::kFloat32;
  const void* qkv = nullptr;              // [T, (Hq + 2 Hkv) * D]: queries, keys, values
  const int32_t* positions = nullptr;     // [T] rows of rope_cache
  const int32_t* slot_mapping = nullptr;  // [T] slot of each token, -1 writes nothing
  const float* rope_cache = nullptr;  // [P, R] R / 2 cosines, then R / 2 sines; null: no rotation
  const float* query_rope_cache = nullptr;  // [P, R] of queries alone; null: rope_cache
  const void* q_norm = nullptr;  // [D] or null: RMS norm of each query head before rotation
  const void* k_norm = nullptr;  // [D] or null
  PagedCache cache;              // written in place
  void* q_out = nullptr;         // [T, Hq * D]
  int64_t num_tokens = 0;
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  int64_t rotary_dim = 0, num_positions = 0;
  float epsilon = 0.0f;   // of the norms
  bool plus_one = false;  // the norms' factors are 1 + weight
  bool whole = false;     // q_norm [Hq * D] and k_norm [Hkv * D] norm all heads' values together
  // With `whole` over ranks, on GPUs: [T, 2] the sums of squares of queries and of keys of all of
  // them, of whole_size values each (cuda::whole_squares()); null: of these heads alone.
  const float* whole_squares = nullptr;
  int64_t whole_size = 0;
  bool last = false;         // they come behind the rotation; not with `whole`
  bool interleaved = false;  // pairs are (2i, 2i + 1), not (i, i + R / 2)
  // Rows of rope_cache by which dims [R, 2R) rotate, besides [0, R) by `positions`; null: they
  // pass.
  const int32_t* block_positions = nullptr;  // [T]
};

struct PagedAttentionParams {
  DType dtype = DType::kFloat32;
  const void* q = nullptr;  // [T, Hq * D]
  PagedCache cache;         // read only
  AttentionBatch batch;
  void* out = nullptr;  // [T, Hq * D]; padding rows become 0
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float softmax_scale = 1.0f;
  int64_t window = -1;  // positions a token sees, itself included; -1 is all before it
  // Scores, q . k * softmax_scale, become softcap * tanh(score / softcap) where it is not 0; then
  // slopes[head] * (key position - query position) is added where there are slopes. In a tree the
  // query's position is its depth.
  float softcap = 0.0f;
  const float* slopes = nullptr;  // [Hq] or null
  // What the softmax's sum has besides the keys' exp(score) is exp(sinks[head]), where there are
  // sinks: a score that no value goes with. softmax_scale and softcap leave it as it is.
  const float* sinks = nullptr;  // [Hq] or null
};

namespace cpu {

Status rope_and_cache_write(const RopeAndCacheWriteParams& params);
Status paged_attention(const PagedAttentionParams& params);

}  // namespace cpu
}  // namespace regatta
