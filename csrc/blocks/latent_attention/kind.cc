// Tensors: norm, qkv_a's, qkv_a bias?, q_a norm and q_b's?, kv_a norm, of all heads key_up,
// value_up and key_absorb, out's, out bias?, post norm?, the rotary table; a cache. Adapters as
// attention's.
#include <algorithm>

#include "blocks/latent_attention/block.h"
#include "runtime/kinds.h"
#include "runtime/rows.h"

namespace regatta::runtime {
namespace {

Status check(const LatentAttentionBlock& block) {
  const auto sizes = {block.num_heads, block.kv_lora_rank, block.qk_nope_head_dim,
                      block.qk_rope_head_dim, block.v_head_dim};
  if (std::min(sizes) < 1 || block.q_lora_rank < 0) {
    return Status::error("blocks: num_heads " + std::to_string(block.num_heads) +
                         ", kv_lora_rank " + std::to_string(block.kv_lora_rank) +
                         ", qk_nope_head_dim " + std::to_string(block.qk_nope_head_dim) +
                         ", qk_rope_head_dim " + std::to_string(block.qk_rope_head_dim) +
                         ", v_head_dim " + std::to_string(block.v_head_dim) + ", q_lora_rank " +
                         std::to_string(block.q_lora_rank) +
                         " (allowed: 1 and more, q_lora_rank 0 too)");
  }
  REGATTA_RETURN_IF_ERROR(check_softmax_scale(block.softmax_scale));
  if (!block.kv_a_norm.is_there || block.q_a_norm.is_there != (block.q_lora_rank > 0)) {
    return Status::error(
        "blocks: kv_a_norm is not there, or q_a_norm without q_lora_rank, or that without it");
  }
  const Positions& positions = block.positions;
  if (positions.kind != PositionKind::kRotary || positions.two_dimensional ||
      positions.query_table >= 0) {
    return Status::error(
        "blocks: latents have other positions (allowed: rotary, one table, one dimension)");
  }
  if (block.kv_format != KvFormat::kDense && block.kv_format != KvFormat::kFp8) {
    return Status::error("blocks: latents have kv_format " +
                         std::string(kv_format_info(block.kv_format).name) +
                         " (allowed: dense, fp8)");
  }
  return {};
}

void take(LatentAttentionBlockParams& p, Tensors& tensors) {
  const LatentAttentionBlock& block = p.block;
  const int64_t width = p.hidden_size, heads = block.num_heads, rank = block.kv_lora_rank;
  p.norm = tensors.norm("norm", block.norm, width);
  p.qkv_a = tensors.linear("qkv_a", block.qkv_a, width, block.a_size(), block.a_bias,
                           block.adapters ? 2 : 0);
  p.q_a_norm = tensors.norm("q_a norm", block.q_a_norm, block.q_lora_rank);
  if (block.q_lora_rank > 0) {
    p.q_b =
        tensors.linear("q_b", block.q_b, block.q_lora_rank, block.q_size(), false, block.adapters);
  }
  p.kv_a_norm = tensors.norm("kv_a norm", block.kv_a_norm, rank);
  p.kv_b.key_up = tensors.by_head("key_up", heads, block.qk_nope_head_dim, rank);
  p.kv_b.value_up = tensors.by_head("value_up", heads, block.v_head_dim, rank);
  p.kv_b.key_absorb = tensors.by_head("key_absorb", heads, rank, block.qk_nope_head_dim);
  p.out =
      tensors.linear("out", block.out, block.mixed_size(), width, block.out_bias, block.adapters);
  p.post_norm = tensors.norm("post norm", block.post_norm, width);
  tensors.rope_table(&p, block.qk_rope_head_dim);
  p.cache = tensors.latent_cache(block.kv_format, rank, block.qk_rope_head_dim);
}

Status run(LatentAttentionBlockParams& p) {
  return run_all_rows(p, [&] { return cpu::latent_attention_block(p); });
}

const KindOf<LatentAttentionBlockParams> kLatentAttention("latent_attention", /*reads_step=*/true,
                                                          check, take, run);

}  // namespace
}  // namespace regatta::runtime
