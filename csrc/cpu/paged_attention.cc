// Attention of ragged spans over a paged cache. See attention.inl.
#include <cstring>
#include <type_traits>
#include <utility>

#include "attention_checks.h"
#include "attention_plan.h"
#include "dispatch.h"
#include "gemm.h"
#include "regatta/attention.h"

#define REGATTA_INL "paged_attention.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

const char* refuse_pairs(const PagedAttentionParams& params) {
  return refuse_odd_head_dim(params.dtype, params.head_dim);
}

const OpTable<PagedAttentionParams> kPagedAttention("paged_attention",
                                                    {REGATTA_CANDIDATES_REFUSE(run_paged_attention,
                                                                               refuse_pairs)});

}  // namespace

Status paged_attention(const PagedAttentionParams& params) {
  const Status status =
      check_attention_batch("paged_attention", params.batch, params.cache, params.window);
  return status.ok() ? kPagedAttention.run(params) : status;
}

}  // namespace regatta::cpu
