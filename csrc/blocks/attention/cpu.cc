// The attention half of a decoder layer in one region of five phases:
//
//   hidden -> norm -> packed rows | qkv product + bias | norm, rope, cache write | attention ->
//   packed rows | output product + bias + hidden
//
// Between the phases activations stay in scratch in the form that the next phase reads, and are
// rounded only there; keys and values are rounded to the cache's dtype. A batch of more than
// kMaxBlockRows tokens goes in pieces, like a prefill in chunks: the later piece finds the earlier
// one in the cache, and each row's result is the same bits. Bound: the weights' and the cache's
// bytes (decode), the multiplier (prefill).
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "blocks/attention/block.h"
#include "cpu/attention_checks.h"
#include "cpu/attention_plan.h"
#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "regatta/sum_of_ranks.h"

#define REGATTA_INL "blocks/attention/cpu.inl"
#include "cpu/foreach_isa.h"

namespace regatta::cpu {
namespace {

const char* refuse_pairs(const AttentionBlockParams& params) {
  return refuse_odd_head_dim(params.dtype, params.block.head_dim);
}

const OpTable<AttentionBlockParams> kAttentionBlock("attention_block",
                                                    {REGATTA_CANDIDATES_REFUSE(run_attention_block,
                                                                               refuse_pairs)});

}  // namespace

bool narrows(const AttentionBlockParams& p) {
  const auto ascends = [](int32_t a, int32_t b) { return a >= b; };
  return p.block.residual.source != Source::kNormed &&
         std::adjacent_find(p.rows, p.rows + p.num_rows, ascends) == p.rows + p.num_rows &&
         (p.num_rows == 0 || (p.rows[0] >= 0 && p.rows[p.num_rows - 1] < p.batch.num_tokens));
}

Status attention_block(const AttentionBlockParams& params) {
  Status status =
      check_attention_batch("attention_block", params.batch, params.cache, params.block.window);
  if (!status.ok()) return status;
  status = check_rope_indices("attention_block", params.positions, params.slot_mapping,
                              params.batch.num_tokens,
                              params.rope_cache ? params.num_positions : INT64_MAX,
                              params.cache.num_blocks * params.cache.block_size);
  return status.ok() ? kAttentionBlock.run(params) : status;
}

}  // namespace regatta::cpu
