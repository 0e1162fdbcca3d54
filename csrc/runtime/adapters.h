// Adapters of requests as operators take them (regatta/adapters.h).
#pragma once

#include <algorithm>
#include <string>

#include "regatta/adapters.h"
#include "runtime/checks.h"

namespace regatta::runtime {

// What all adapters add to a linear of so many parts. a, b: LowRankWeights', packed on the CPU.
inline Status low_rank_weights(const TensorView& a, const TensorView& b, const char* name,
                               int64_t parts, int64_t in_features, int64_t out_features,
                               DType dtype, bool on_cpu, LowRankWeights* weights) {
  using Shape = std::vector<int64_t>;
  const int64_t groups_in = (in_features + kPackedIn - 1) / kPackedIn;
  const int64_t groups_out = (out_features + kPackedOut - 1) / kPackedOut;
  *weights = {a.data, b.data, a.shape[0]};
  REGATTA_RETURN_IF_ERROR(check(a, name, dtype,
                                on_cpu ? Shape{-1, parts, groups_in, kPageRanks, kPackedIn}
                                       : Shape{-1, parts, kPageRanks, in_features}));
  return check(b, name, dtype,
               on_cpu ? Shape{a.shape[0], groups_out, kPageRanks, kPackedOut}
                      : Shape{a.shape[0], kPageRanks, out_features});
}

// The adapters of so many tokens, for linears that have room for `num_pages` pages of them. On the
// CPU an adapter or a page that is not there is an error.
inline Status adapter_rows(const TensorView& ids, const TensorView& pages, int64_t num_pages,
                           int64_t num_tokens, bool on_cpu, AdapterRows* rows) {
  REGATTA_RETURN_IF_ERROR(take_ids(ids, "adapter_ids", {num_tokens}, &rows->ids));
  REGATTA_RETURN_IF_ERROR(take_ids(pages, "adapter_pages", {-1, kNumAdapted, -1}, &rows->pages));
  rows->num_adapters = pages.shape[0];
  rows->max_pages = pages.shape[2];
  if (!on_cpu) return {};
  const auto check_below = [](const char* name, const int32_t* values, int64_t count, int64_t end) {
    const int32_t* const wrong =
        std::find_if(values, values + count, [&](int32_t value) { return value >= end; });
    if (wrong == values + count) return Status();
    return Status::error(std::string(name) + " holds " + std::to_string(*wrong) +
                         " (allowed: below " + std::to_string(end) + ")");
  };
  REGATTA_RETURN_IF_ERROR(check_below("adapter_ids", rows->ids, num_tokens, rows->num_adapters));
  return check_below("adapter_pages", rows->pages,
                     rows->num_adapters * kNumAdapted * rows->max_pages, num_pages);
}

}  // namespace regatta::runtime
