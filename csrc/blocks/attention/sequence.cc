// Attention as a sequence of operators: norms of heads with a factor each, prefix masks, and
// positions in two dimensions. The same operators in the same order as predict.nn.kinds.attention's
// run(). Bound: memory, between them.
#include "runtime/sequence.h"

#include <string>
#include <utility>

#include "blocks/attention/block.h"
#include "cpu/thread_pool.h"
#include "regatta/attention.h"
#include "runtime/rows.h"

namespace regatta::cpu {
namespace {

Status check_step(const AttentionBlockParams& p) {
  const bool two = p.block.positions.two_dimensional;
  if (p.block.prefix_mask && p.batch.prefix_lens == nullptr) {
    return Status::error("blocks: a block has a prefix_mask, and the step no prefix_lens");
  }
  if (!two) return {};
  if (p.block_positions == nullptr) {
    return Status::error("blocks: a block has positions in two dimensions, and the step one");
  }
  const bool fits = p.rope_cache != nullptr && 2 * p.rotary_dim <= p.block.head_dim &&
                    !p.block.positions.interleaved && !p.block.qk_norm_last;
  if (fits) return {};
  return Status::error("blocks: positions in two dimensions turn " + std::to_string(p.rotary_dim) +
                       " dims each of " + std::to_string(p.block.head_dim) +
                       " (allowed: half of them, not interleaved, no norm behind)");
}

// out [T, Hq D] = rotated queries; keys and values go to the cache.
Status rotate(const AttentionBlockParams& p, const void* qkv, void* out) {
  const AttentionBlock& block = p.block;
  RopeAndCacheWriteParams r;
  r.dtype = p.dtype, r.qkv = qkv, r.positions = p.positions, r.slot_mapping = p.slot_mapping;
  r.rope_cache = p.rope_cache, r.query_rope_cache = p.query_rope_cache;
  r.rotary_dim = p.rotary_dim, r.num_positions = p.num_positions;
  if (block.positions.two_dimensional) r.block_positions = p.block_positions;
  r.q_norm = p.q_norm.weight, r.k_norm = p.k_norm.weight;
  r.cache = p.cache, r.q_out = out, r.num_tokens = p.num_tokens;
  r.num_heads = block.num_heads, r.num_kv_heads = block.num_kv_heads, r.head_dim = block.head_dim;
  if (block.qk_norm.is_there)
    r.epsilon = block.qk_norm.epsilon, r.plus_one = block.qk_norm.plus_one;
  r.whole = block.qk_norm_whole, r.last = block.qk_norm_last;
  r.interleaved = block.positions.interleaved;
  return rope_and_cache_write(r);
}

Status attend(const AttentionBlockParams& p, const void* queries, void* out) {
  const AttentionBlock& block = p.block;
  PagedAttentionParams a;
  a.dtype = p.dtype, a.q = queries, a.cache = p.cache, a.batch = p.batch, a.out = out;
  a.num_heads = block.num_heads, a.num_kv_heads = block.num_kv_heads, a.head_dim = block.head_dim;
  a.softmax_scale = block.softmax_scale, a.window = block.window, a.softcap = block.softcap;
  a.slopes = p.slopes, a.sinks = p.sinks;
  if (!block.prefix_mask) a.batch.prefix_lens = nullptr;
  return paged_attention(a);
}

}  // namespace

Status attention_sequence(const AttentionBlockParams& params) {
  REGATTA_RETURN_IF_ERROR(check_step(params));
  AttentionBlockParams p = params;
  const AttentionBlock& block = p.block;
  Scratch& scratch = Scratch::mine();
  const Scratch::Scope scope(scratch);
  const void* x = p.hidden;
  REGATTA_RETURN_IF_ERROR(runtime::normed(p, block.norm, p.norm, scratch, &x));
  void* qkv = runtime::rows_of(p, scratch, block.qkv_size());
  REGATTA_RETURN_IF_ERROR(runtime::product_of(p, p.qkv, block.qkv, x, p.hidden_size,
                                              block.qkv_size(), qkv, Adapted::kQkv));
  if (block.qk_norm_each) {
    void* const out = runtime::rows_of(p, scratch, block.qkv_size());
    void* const copy = runtime::rows_of(p, scratch, block.qkv_size());
    NormParams n = runtime::norm_params(p, block.qk_norm, {p.qk_norm, nullptr}, qkv, out, copy);
    n.num_weights = block.num_heads + block.num_kv_heads;
    n.num_parts = n.num_weights + block.num_kv_heads;
    n.num_tokens = p.num_tokens * n.num_parts, n.hidden_size = block.head_dim;
    REGATTA_RETURN_IF_ERROR(norm(n));
    qkv = out;
  }
  void* const queries = runtime::rows_of(p, scratch, block.q_size());
  REGATTA_RETURN_IF_ERROR(rotate(p, qkv, queries));
  const void* mixed = runtime::rows_of(p, scratch, block.q_size());
  REGATTA_RETURN_IF_ERROR(attend(p, queries, const_cast<void*>(mixed)));
  if (p.rows != nullptr) {
    const int64_t num_source = std::exchange(p.num_tokens, p.num_rows);
    const auto gather = [&](const void** rows, int64_t width) {
      void* const out = runtime::rows_of(p, scratch, width);
      const void* const from = std::exchange(*rows, out);
      return runtime::gather_rows(p.rows, p.num_rows, from, num_source, width, p.dtype, out);
    };
    REGATTA_RETURN_IF_ERROR(gather(&mixed, block.q_size()));
    const bool is_hidden = x == p.hidden;
    REGATTA_RETURN_IF_ERROR(gather(&p.hidden, p.hidden_size));
    if (is_hidden) x = p.hidden;
    if (!is_hidden) REGATTA_RETURN_IF_ERROR(gather(&x, p.hidden_size));
  }
  void* const made = runtime::rows_of(p, scratch, p.hidden_size);
  REGATTA_RETURN_IF_ERROR(runtime::product_of(p, p.out, block.out, mixed, block.q_size(),
                                              p.hidden_size, made, Adapted::kOut));
  return runtime::ended(p, block, p.hidden, x, made, scratch);
}

}  // namespace regatta::cpu
