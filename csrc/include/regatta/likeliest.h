// The likeliest tokens of some rows of logits: what a beam search continues with.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

// Rows outside of [0, num_logit_rows) are left out, or found empty.
struct LikeliestParams {
  float* logits = nullptr;        // [num_logit_rows, V]
  const int32_t* rows = nullptr;  // [num_rows]
  // The `count` largest values above -inf, the largest first, the lower index first on ties:
  // token ids, -1 behind the last one and for a row with a NaN; then the values.
  int32_t* token_ids = nullptr;  // [num_rows, count]
  float* values = nullptr;       // [num_rows, count]
  int64_t num_rows = 0;
  int64_t num_logit_rows = 0;
  int64_t vocab_size = 0;
  int64_t count = 0;
};

}  // namespace regatta
