// Adapters of requests as operators take them (regatta/adapters.h).
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "device.h"
#include "regatta/adapters.h"

namespace regatta::binding {

// What all adapters add to a linear of so many parts. a, b: LowRankWeights', packed on the CPU.
inline LowRankWeights low_rank_weights(const TensorView& a, const TensorView& b, const char* name,
                                       int64_t parts, int64_t in_features, int64_t out_features,
                                       DType dtype, bool on_cpu) {
  const int64_t groups_in = (in_features + kPackedIn - 1) / kPackedIn;
  const int64_t groups_out = (out_features + kPackedOut - 1) / kPackedOut;
  check(a, name, dtype,
        on_cpu ? Shape{-1, parts, groups_in, kPageRanks, kPackedIn}
               : Shape{-1, parts, kPageRanks, in_features});
  check(b, name, dtype,
        on_cpu ? Shape{a.shape[0], groups_out, kPageRanks, kPackedOut}
               : Shape{a.shape[0], kPageRanks, out_features});
  return {a.data, b.data, a.shape[0]};
}

// Fails for an adapter or a page that is not there.
inline void check_adapters(const AdapterRows& rows, int64_t num_tokens, int64_t num_pages) {
  const auto check = [](const char* name, const int32_t* values, int64_t count, int64_t end) {
    const int32_t* const wrong =
        std::find_if(values, values + count, [&](int32_t value) { return value >= end; });
    if (wrong == values + count) return;
    fail(std::string(name) + " holds " + std::to_string(*wrong) + " (allowed: below " +
         std::to_string(end) + ")");
  };
  check("adapter_ids", rows.ids, num_tokens, rows.num_adapters);
  check("adapter_pages", rows.pages, rows.num_adapters * kNumAdapted * rows.max_pages, num_pages);
}

// The adapters of so many tokens, for linears that have room for `num_pages` pages of them.
inline AdapterRows adapter_rows(const paddle::Tensor& adapter_ids,
                                const paddle::Tensor& adapter_pages, int64_t num_pages,
                                int64_t num_tokens, const Device& device) {
  const TensorView ids =
      checked_view(adapter_ids, "adapter_ids", DType::kInt32, {num_tokens}, device.place);
  const TensorView pages = checked_view(adapter_pages, "adapter_pages", DType::kInt32,
                                        {-1, kNumAdapted, -1}, device.place);
  AdapterRows rows;
  rows.ids = static_cast<const int32_t*>(ids.data);
  rows.pages = static_cast<const int32_t*>(pages.data);
  rows.num_adapters = pages.shape[0];
  rows.max_pages = pages.shape[2];
  if (device.is_cpu()) check_adapters(rows, num_tokens, num_pages);
  return rows;
}

}  // namespace regatta::binding
