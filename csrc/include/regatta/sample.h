// Picks one token per row of logits.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

// L rows, V vocabulary. Per row:
//   temperature 0 or top_k 1: the largest logit, lowest index among equals.
//   else, with tokens in descending order of logit (ties: lower index first):
//     keep the first top_k (0: all); weights w = exp((logit - largest) / temperature);
//     keep the smallest prefix whose weight is >= top_p of what is kept so far (top_p 1: all);
//     u = philox_uniform(seed, offset); the token is the first whose cumulative weight is
//     > u * weight of the prefix.
// Weights are float, sums are double.
struct SampleParams {
  const float* logits = nullptr;       // [L, V]; -inf excludes a token
  const float* temperature = nullptr;  // [L] >= 0
  const int32_t* top_k = nullptr;      // [L] >= 0
  const float* top_p = nullptr;        // [L] in [0, 1]
  const int64_t* seeds = nullptr;      // [L]
  const int64_t* offsets = nullptr;    // [L]
  int32_t* token_ids = nullptr;        // [L]
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
};

namespace cpu {

// Fails, naming the row, on NaN logits, on a row without a finite largest logit that has to be
// drawn from, and on parameters out of range.
Status sample(const SampleParams& params);

}  // namespace cpu
}  // namespace regatta
