// From rows of logits to tokens: predict/engine/{sampler,choices,logprobs}.py.
#pragma once

#include <vector>

#include "engine/sequence.h"

namespace regatta::engine {

// The seed of a request: its own modulo 2^63, or one made of the engine's and its number.
int64_t request_seed(int64_t engine_seed, const Sequence& sequence);

// The logprob of a token by a row of raw logits [vocab_size], and the num_top likeliest tokens.
TokenLogprobs measure(const float* logits, int64_t vocab_size, int32_t token, int32_t num_top);

class Sampler {
 public:
  Sampler(int64_t seed, int64_t vocab_size) : seed_(seed), counts_(vocab_size) {}

  // The next token of each request by its row of logits [L, vocab_size], which is changed; -1
  // where none can be drawn. logprobs: an entry for each row, filled where they are wanted.
  Status choose(const std::vector<const Sequence*>& rows, float* logits, Ids* tokens,
                std::vector<TokenLogprobs>* logprobs);

 private:
  const int64_t seed_;
  std::vector<int32_t> counts_;  // zeros
};

}  // namespace regatta::engine
