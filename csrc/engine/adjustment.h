// Changes of a row of logits before its token is chosen, in the order of
// predict/engine/logits_processors.py: logit_bias, bad words and minimum length, repetition
// penalty, presence and frequency penalty, no_repeat_ngram_size. To the bit what NumPy makes of
// them there.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/ids.h"
#include "engine/request.h"

namespace regatta::engine {

class Adjustment {
 public:
  Adjustment() = default;
  // stop_ids: the model's.
  Adjustment(const Request& request, const Ids& stop_ids);

  // Whether it changes anything behind so many output tokens.
  bool changes(int64_t num_output_tokens) const { return num_output_tokens < ends_at_; }

  // Changes logits [vocab_size] in place. ids: prompt and answer so far. counts: [vocab_size]
  // zeros, which it leaves so.
  void apply(const Ids& ids, int64_t num_prompt_tokens, int64_t vocab_size, int32_t* counts,
             float* logits) const;

 private:
  // `amount` is added to the logit of `token` wherever `prefix` ends the tokens, while the answer
  // has fewer than `until` of them.
  struct Rule {
    int32_t token;
    float amount;
    Ids prefix;
    int64_t until;
  };
  bool penalizes() const { return repetition_ != 1.0f || presence_ != 0.0f || frequency_ != 0.0f; }
  void penalize(const Ids& ids, int64_t num_prompt_tokens, int32_t* counts, float* logits) const;
  void ban_repeats(const Ids& ids, float* logits) const;

  float repetition_ = 1.0f, presence_ = 0.0f, frequency_ = 0.0f;
  int64_t ngram_size_ = 0;
  std::vector<Rule> rules_;
  int64_t ends_at_ = 0;
};

}  // namespace regatta::engine
