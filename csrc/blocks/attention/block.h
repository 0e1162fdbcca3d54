// Attention over keys and values in a paged cache, with the norm ahead of it and the sum behind.
#pragma once

#include "blocks/attention/record.h"
#include "regatta/blocks.h"

namespace regatta {

struct AttentionBlock : AttentionFields {
  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
  // Outputs of the first product: each head's query, and with out_gate its gate behind it; then
  // keys and values.
  int64_t queries_size() const { return q_size() * (out_gate ? 2 : 1); }
  int64_t made_size() const { return queries_size() + 2 * kv_size(); }
};

struct AttentionBlockParams : BlockParams {
  AttentionBlock block;
  NormWeights q_norm, k_norm;
  const void* qk_norm = nullptr;  // [Hq + Hkv, D] with qk_norm_each
  LinearWeights qkv, out;
  const float* sinks = nullptr;             // [Hq] or null
  const float* slopes = nullptr;            // [Hq], of ALiBi
  const float* rope_cache = nullptr;        // [P, R], of rotary positions
  const float* query_rope_cache = nullptr;  // [P, R] or null: rope_cache
  int64_t rotary_dim = 0, num_positions = 0;
  PagedCache cache;  // written in place
};

namespace cpu {

// Whether attention_block() takes params.rows, which are not null: each token at most once, in
// order, and the sum reads no normed input. Else it makes all rows, with `rows` null.
bool narrows(const AttentionBlockParams& params);
Status attention_block(const AttentionBlockParams& params);
// As smaller operators; params.rows are gathered ahead of the last product.
Status attention_sequence(const AttentionBlockParams& params);

}  // namespace cpu
}  // namespace regatta
