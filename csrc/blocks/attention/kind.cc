// Tensors: norm [H] (and its bias), qkv's, qkv bias?, q norm and k norm? (with qk_norm_each one of
// all heads'), out's, out bias?, sinks [Hq]?, post norm?, slopes [Hq] of ALiBi, or the rotary table
// [P, R] and the one of queries?; a cache. Behind each linear's bias A and B of all adapters, where
// it has any (LowRankWeights of regatta/adapters.h).
#include "blocks/attention/block.h"
#include "runtime/kinds.h"
#include "runtime/rows.h"
#include "runtime/sequence.h"

namespace regatta::runtime {
namespace {

Status check(const AttentionBlock& block) {
  REGATTA_RETURN_IF_ERROR(check_heads(block.num_heads, block.num_kv_heads, block.head_dim));
  REGATTA_RETURN_IF_ERROR(check_softmax_scale(block.softmax_scale));
  const Norm& norm = block.qk_norm;
  if (norm.is_there && !block.qk_norm_each && (norm.kind != NormKind::kRms || norm.bias)) {
    return Status::error(
        "blocks: qk_norm is a layer norm or has a bias (allowed: an RMS norm without)");
  }
  if (block.qk_norm_each && (!norm.is_there || norm.bias || block.qk_norm_whole)) {
    return Status::error("blocks: qk_norm_each is of a qk_norm without bias, not qk_norm_whole");
  }
  const bool needs_parts =
      block.qk_norm_each || block.prefix_mask || block.positions.two_dimensional;
  if (needs_parts && !block.composed) {
    return Status::error(
        "blocks: a block has qk_norm_each, prefix_mask or two-dimensional positions (allowed: none "
        "of these, but with composed)");
  }
  REGATTA_RETURN_IF_ERROR(check_composed("attention", block));
  if (block.composed && block.out_gate) {
    return Status::error("blocks: attention is composed and has an out_gate (allowed: one)");
  }
  if (block.out_gate && block.qk_norm_whole) {
    return Status::error("blocks: a block has an out_gate and qk_norm_whole (allowed: one)");
  }
  return {};
}

void take(AttentionBlockParams& p, Tensors& tensors) {
  const AttentionBlock& block = p.block;
  const int64_t width = p.hidden_size;
  const bool whole = block.qk_norm_whole;
  if (block.composed) tensors.check_on_cpu("composed");
  p.norm = tensors.norm("norm", block.norm, width);
  p.qkv = tensors.linear("qkv", block.qkv, width, block.made_size(), block.qkv_bias,
                         block.adapters ? 3 : 0);
  if (block.qk_norm_each) {
    const int64_t heads = block.num_heads + block.num_kv_heads;
    p.qk_norm = tensors.matrix("qk norm", {heads, block.head_dim}).data;
  } else {
    p.q_norm = tensors.norm("q norm", block.qk_norm, whole ? block.q_size() : block.head_dim);
    p.k_norm = tensors.norm("k norm", block.qk_norm, whole ? block.kv_size() : block.head_dim);
  }
  p.out = tensors.linear("out", block.out, block.q_size(), width, block.out_bias, block.adapters);
  if (block.sinks) p.sinks = tensors.floats("sinks", block.num_heads);
  p.post_norm = tensors.norm("post norm", block.post_norm, width);
  if (block.positions.kind == PositionKind::kAlibi) {
    p.slopes = tensors.floats("slopes", block.num_heads);
  } else if (block.positions.kind == PositionKind::kRotary) {
    const TensorView& table = tensors.rope_table(&p, block.head_dim);
    if (block.positions.query_table >= 0) {
      p.query_rope_cache = static_cast<const float*>(
          tensors.table("query_rope_cache", {table.shape[0], table.shape[1]}).data);
    }
  }
  p.cache = tensors.cache(block.kv_format, block.num_kv_heads, block.head_dim);
}

Status run(AttentionBlockParams& p) {
  if (p.block.composed) return cpu::attention_sequence(p);
  if (p.rows != nullptr && cpu::narrows(p)) return cpu::attention_block(p);
  return run_all_rows(p, [&] { return cpu::attention_block(p); });
}

const KindOf<AttentionBlockParams> kAttention("attention", /*reads_step=*/true, check, take, run);

}  // namespace
}  // namespace regatta::runtime
