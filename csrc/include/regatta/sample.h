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
//     keep w >= min_p (0: all);
//     typical_p below 1: what equals the last kept logit is kept too; with p = w / their sum and
//     H their entropy, keep those with the least |-log p - H| that together reach typical_p, and
//     what ties with the last of them. (-log p - H is the distance (largest - logit) / temperature
//     less its mean over p: the kept ones are neighbours in the order of logits.)
//     u = philox_uniform(seed, offset); the token is the first whose cumulative weight is
//     > u * weight of what is kept.
// A row with a NaN, and one to be drawn from whose largest logit is infinite, yields -1.
// The order is that of Hugging Face transformers' warpers (typical_p: Meister et al. 2022).
// Weights are float, sums are double.
struct SampleParams {
  const float* logits = nullptr;       // [L, V]; -inf excludes a token
  const float* temperature = nullptr;  // [L] >= 0
  const int32_t* top_k = nullptr;      // [L] >= 0
  const float* top_p = nullptr;        // [L] in [0, 1]
  const float* min_p = nullptr;        // [L] in [0, 1); null: 0 for all
  const float* typical_p = nullptr;    // [L] in (0, 1]; null: 1 for all
  const int64_t* seeds = nullptr;      // [L]
  const int64_t* offsets = nullptr;    // [L]
  int32_t* token_ids = nullptr;        // [L]
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
};

namespace cpu {

// Fails, naming the row, on parameters out of range.
Status sample(const SampleParams& params);

}  // namespace cpu
}  // namespace regatta
