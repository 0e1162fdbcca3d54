// The attention half of a decoder layer over a cache of latents (regatta/blocks.h), in regions of a
// few phases each:
//
//   hidden -> norm -> packed rows | q_a (or q) and kv_a in one product | norm, rope, cache write |
//   q_b | then in one of two forms, and last the output product + bias + hidden
//
// Absorbed: of each head q . key_up -> a query over latents | attention of all heads over one row
// per token, whose first L values are its value | . value_up. A latent is read once for all heads:
// what a few tokens behind a long context want. Bound: the latents' bytes, or 2 L + R products of a
// pair of tokens and a head.
//
// Expanded: keys and values of whole contexts are made of latents, some heads at a time, so that
// they stay in cache; then attention as ever, N + R + V products of a pair and a head. For spans of
// many tokens. Bound: the multiplier.
//
// Which form a span takes follows from the number of its products alone. Within a form a row's
// result is the same bits in any batch and chunk (attention_plan.h); between forms it differs by
// rounding.
// Source: DeepSeek-V2 (2024) for both; own.
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "blocks/latent_attention/block.h"
#include "blocks/latent_attention/plan.h"
#include "cpu/attention_checks.h"
#include "cpu/attention_plan.h"
#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "cpu/gemm_groups.h"
#include "regatta/sum_of_ranks.h"

#define REGATTA_INL "blocks/latent_attention/cpu.inl"
#include "cpu/foreach_isa.h"

namespace regatta::cpu {
namespace {

const char* refuse_pairs(const LatentAttentionBlockParams& params) {
  const LatentAttentionBlock& block = params.block;
  const bool dense = block.kv_format == KvFormat::kDense;
  for (const int64_t size :
       {dense ? block.latent_size() : block.kv_lora_rank, block.q_head_size()}) {
    if (const char* reason = refuse_odd_head_dim(params.dtype, size)) return reason;
  }
  return nullptr;
}

const OpTable<LatentAttentionBlockParams> kLatentAttentionBlock(
    "latent_attention_block",
    {REGATTA_CANDIDATES_REFUSE(run_latent_attention_block, refuse_pairs)});

}  // namespace

Status latent_attention_block(const LatentAttentionBlockParams& params) {
  const char* op = "latent_attention_block";
  if (params.batch.prefix_lens) return Status::error(std::string(op) + ": prefix_lens are given");
  Status status = check_attention_batch(op, params.batch, params.cache, -1);
  if (!status.ok()) return status;
  status =
      check_rope_indices(op, params.positions, params.slot_mapping, params.batch.num_tokens,
                         params.num_positions, params.cache.num_blocks * params.cache.block_size);
  return status.ok() ? kLatentAttentionBlock.run(params) : status;
}

}  // namespace regatta::cpu
