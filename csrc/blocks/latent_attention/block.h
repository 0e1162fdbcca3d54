// Attention over latents in a paged cache (DeepSeek-V2, 2024).
//
// L kv_lora_rank, N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim; a latent is a row of L + R.
#pragma once

#include "blocks/latent_attention/record.h"
#include "regatta/blocks.h"

namespace regatta {

struct LatentAttentionBlock : LatentAttentionFields {
  int64_t latent_size() const { return kv_lora_rank + qk_rope_head_dim; }
  int64_t q_head_size() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int64_t q_size() const { return num_heads * q_head_size(); }
  int64_t mixed_size() const { return num_heads * v_head_dim; }
  // Outputs of the first product: q_a's (or, where q_lora_rank is 0, the queries), then the
  // latent's.
  int64_t q_a_size() const { return q_lora_rank ? q_lora_rank : q_size(); }
  int64_t a_size() const { return q_a_size() + latent_size(); }
};

// Of each head, as pack_dense has a matrix, and heads as one more dimension, the first.
struct HeadMatrices {
  TensorView key_up;      // [heads, N, L]
  TensorView value_up;    // [heads, V, L]
  TensorView key_absorb;  // [heads, L, N] key_up turned
};

struct LatentAttentionBlockParams : BlockParams {
  LatentAttentionBlock block;
  NormWeights q_a_norm, kv_a_norm;
  LinearWeights qkv_a, q_b, out;
  HeadMatrices kv_b;
  const float* rope_cache = nullptr;  // [P, R]
  int64_t rotary_dim = 0, num_positions = 0;
  PagedCache cache;  // of latents: one head; values are the first L of keys
};

namespace cpu {
Status latent_attention_block(const LatentAttentionBlockParams& params);
}

}  // namespace regatta
