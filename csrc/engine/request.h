// What a caller asks of an engine, and what it hears of it. No framework, no Python.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/ids.h"
#include "regatta/types.h"

namespace regatta::engine {

// How tokens are chosen: fields, defaults and limits of predict.request.SamplingParams.
struct Sampling {
  double temperature = 1.0;  // divides logits; 0: the largest one (greedy)
  int64_t top_k = 0;         // most likely tokens to draw among; 0, -1: all; 1: greedy
  double top_p = 1.0;        // mass to draw among; 1: all; 0: greedy
  double min_p = 0.0;        // least weight over the largest one; 0: all
  double typical_p = 1.0;    // mass of the most typical; 1: all
  // Same seed, same tokens; none: made of the engine's seed and the request's id.
  std::optional<int64_t> seed;
  double repetition_penalty = 1.0;  // of tokens of prompt and answer; 1: off
  double presence_penalty = 0.0;    // of tokens of the answer
  double frequency_penalty = 0.0;   // of these, for each time
  int64_t no_repeat_ngram_size = 0;
  std::vector<std::pair<int32_t, double>> logit_bias;  // token id, amount; each token once
  std::vector<Ids> bad_words;                          // never completed
};

struct Request {
  Ids ids;                     // the prompt
  int64_t max_new_tokens = 0;  // 0: until max_length of the engine
  int64_t min_new_tokens = 0;  // below, nothing but a length ends the answer
  Sampling sampling;
  Ids stop_ids;                   // end the answer, as those of the model do
  bool ignore_eos = false;        // those of the model do not
  std::vector<std::string> stop;  // UTF-8 that ends the answer's text; needs a tokenizer
  bool include_stop = false;      // the text ends behind it, not before it
  // The likeliest tokens to name beside each new one; -1: no logprobs. Of the raw logits.
  int32_t logprobs = -1;
};

enum class FinishReason { kNone, kStop, kLength, kAbort, kError };

struct Logprob {
  int32_t id = 0;
  float logprob = 0.0f;  // natural logarithm
  int32_t rank = 0;      // 1 for the likeliest
};

struct TokenLogprobs {
  Logprob token;
  std::vector<Logprob> top;  // the likeliest first, the lowest id on ties
};

// What is new of one request. The last one has a finish reason.
struct Update {
  int64_t request_id = 0;
  Ids ids;  // an id that ends the answer included
  // Whole UTF-8 that no later id changes, without what may become a stop string; "" where the
  // engine has no tokenizer. Joined, the pieces are the answer's text.
  std::string text;
  std::vector<TokenLogprobs> logprobs;  // of `ids`, where they are wanted
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;              // what went wrong, where finish_reason is kError
  int64_t num_cached_tokens = 0;  // of the prompt, that the prefix cache had
};

// Hears the updates of a request, on the thread that steps, without a lock held. It may call every
// function of the engine but step() and close(), which return an error there. It must not throw.
using OnUpdate = std::function<void(const Update&)>;

}  // namespace regatta::engine
