// Changes logits by what a request's parameters and its tokens ask.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

// L rows, V vocabulary. With x a token's logit, in this order, per row that has a slot:
//   its rules:                                 x += amount, for the rule's last token, where the
//                                              tokens before it in the rule end the history, and
//                                              the output has fewer than `until` tokens
//   tokens of the history (prompt and output): x > 0 ? x / repetition : x * repetition
//   tokens of the output, c times in it:       x -= presence + c * frequency
//   tokens that would complete an n-gram of no_repeat_ngram_size (0: off) that the history has:
//                                              x = -inf
struct AdjustLogitsParams {
  float* logits = nullptr;  // [L, V], changed in place
  // One per row:
  const float* repetition = nullptr;
  const float* presence = nullptr;
  const float* frequency = nullptr;
  const int32_t* slot = nullptr;        // row of `history` and `rules`; -1: the row stays as it is
  const int32_t* length = nullptr;      // tokens of the request up to the row's
  const int32_t* num_prompt = nullptr;  // of these, from the prompt
  const int32_t* num_new = nullptr;     // of these, the last that are not in `history` yet, >= 1
  const int32_t* no_repeat_ngram_size = nullptr;

  const int32_t* token_ids = nullptr;      // [T]: the row's new tokens end
  const int32_t* logit_indices = nullptr;  // [L]  at token_ids[logit_indices[row]]
  int32_t* history = nullptr;              // [S, M]; the row's newest token is added to it
  // [S, W]: number of rules; four words for each: its first token's place in the row, number of
  // tokens (>= 1), amount (a float's bits; -inf bans), until; then the tokens.
  const int32_t* rules = nullptr;
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  int64_t max_length = 0;   // M
  int64_t rules_width = 0;  // W
  int64_t first_token = 0;  // of the first column: 0 but where one rank has some tokens' logits
};

}  // namespace regatta
