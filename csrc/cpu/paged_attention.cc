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

const OpTable<PagedAttentionParams> kPagedAttention(
    "paged_attention",
    {{"avx512_bf16", Isa::kAvx512Bf16, refuse_pairs, avx512_bf16::run_paged_attention},
     {"avx512", Isa::kAvx512, nullptr, avx512::run_paged_attention},
     {"avx2", Isa::kAvx2, nullptr, avx2::run_paged_attention},
     {"scalar", Isa::kScalar, nullptr, scalar::run_paged_attention}});

}  // namespace

Status paged_attention(const PagedAttentionParams& params) {
  const Status status =
      check_attention_batch("paged_attention", params.batch, params.cache, params.window);
  return status.ok() ? kPagedAttention.run(params) : status;
}

}  // namespace regatta::cpu
