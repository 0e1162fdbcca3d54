// How likely tokens are by rows of logits, and which ones are the likeliest.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

constexpr int64_t kMaxTopLogprobs = 32;

// L rows, V vocabulary. Per row, with lse = log(sum(exp(logits))) and t = token_ids[row] (a token
// outside of the vocabulary counts as 0), `out` has, floats by their bits:
//   [0]              logits[t] - lse
//   [1]              1 + tokens with a larger logit than t
//   [2 + i]          the num_top tokens with the largest logits, the lowest index first on ties;
//                    -1 behind the last one above -inf
//   [2 + num_top + i]  their logits - lse
// A row with a NaN yields any values.
struct LogprobsParams {
  const float* logits = nullptr;       // [L, V]
  const int32_t* token_ids = nullptr;  // [L]
  int32_t* out = nullptr;              // [L, 2 + 2 * num_top]
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  int64_t num_top = 0;
};

}  // namespace regatta
