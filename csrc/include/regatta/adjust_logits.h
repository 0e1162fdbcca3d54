// Changes logits by the tokens that a request has had, and by fixed amounts.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

// L rows, V vocabulary. With x a token's logit, per row that has a history:
//   tokens of the history (prompt and output): x > 0 ? x / repetition : x * repetition
//   tokens of the output, c times in it:       x -= presence + c * frequency
// then, for the row's pairs in bias: x += value (-inf bans the token).
struct AdjustLogitsParams {
  float* logits = nullptr;  // [L, V], changed in place
  // One per row:
  const float* repetition = nullptr;
  const float* presence = nullptr;
  const float* frequency = nullptr;
  const int32_t* slot = nullptr;        // row of `history`; -1: none
  const int32_t* length = nullptr;      // tokens of the request, the newest included
  const int32_t* num_prompt = nullptr;  // of these, from the prompt
  const int32_t* bias_begin = nullptr;  // the row's pairs in bias_tokens, bias_values
  const int32_t* bias_end = nullptr;

  const int32_t* token_ids = nullptr;      // [T]: the row's newest token is
  const int32_t* logit_indices = nullptr;  // [L]  token_ids[logit_indices[row]]
  int32_t* history = nullptr;              // [S, M]; the newest token is added to it
  uint32_t* counts = nullptr;              // [>= L, V] zeros, zeros again afterwards
  const int32_t* bias_tokens = nullptr;
  const float* bias_values = nullptr;
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  int64_t max_length = 0;  // M
};

}  // namespace regatta
