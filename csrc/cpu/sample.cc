// One token per row of logits: greedy, or drawn from the top_k / top_p part of the softmax.
//
// Greedy is one pass for the maximum and a part of another for its first place. Drawing never sorts
// a vocabulary: top_k keeps a buffer of about 2 k tokens and a rising bound; without top_k, passes
// that only add weights find a short interval of logits in which the cumulative weight crosses the
// target, and that interval is sorted. Rows go to threads. Bound: 3 to 5 reads of the row from L2
// with an exp per token in most of them. typical_p finds the interval of logits that it leaves in
// the same way, about 15 passes more.
#include "regatta/sample.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "dispatch.h"
#include "regatta/philox.h"
#include "thread_pool.h"

namespace regatta::cpu {

struct Token {
  float logit;
  int32_t index;
};

// Descending; the lower index among equals.
static bool comes_before(const Token& a, const Token& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.index < b.index;
}

static void sort_tokens(std::vector<Token>* tokens) {
  std::sort(tokens->begin(), tokens->end(), comes_before);
}

// Keeps the `count` first, in any order; returns the least logit among them.
static float keep_first(std::vector<Token>* tokens, int64_t count) {
  const auto last = tokens->begin() + (count - 1);
  std::nth_element(tokens->begin(), last, tokens->end(), comes_before);
  const float least = last->logit;
  tokens->resize(static_cast<size_t>(count));
  return least;
}

struct TokenMass {
  double weight = 0.0;
  int64_t count = 0;
};

struct TokenAt {
  int32_t index;
  double cumulative;  // weight of all tokens up to this one
};

}  // namespace regatta::cpu

#define REGATTA_INL "sample.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

const OpTable<SampleParams> kSample("sample", {REGATTA_CANDIDATES(run_sample)});

Status bad(const char* name, int64_t row, const std::string& got, const char* allowed) {
  return Status::error(std::string("sample: ") + name + "[" + std::to_string(row) + "] is " + got +
                       " (allowed: " + allowed + ")");
}

}  // namespace

Status sample(const SampleParams& params) {
  if (params.num_rows > 0 && params.vocab_size < 1) {
    return Status::error("sample: logits have no columns (allowed: 1 and more)");
  }
  for (int64_t i = 0; i < params.num_rows; ++i) {
    if (!(params.temperature[i] >= 0.0f && params.temperature[i] < __builtin_inff())) {
      return bad("temperature", i, std::to_string(params.temperature[i]), "0 and more, finite");
    }
    if (params.top_k[i] < 0) {
      return bad("top_k", i, std::to_string(params.top_k[i]), "0 for all, 1 and more");
    }
    if (!(params.top_p[i] >= 0.0f && params.top_p[i] <= 1.0f)) {
      return bad("top_p", i, std::to_string(params.top_p[i]), "0 to 1");
    }
    if (params.min_p && !(params.min_p[i] >= 0.0f && params.min_p[i] < 1.0f)) {
      return bad("min_p", i, std::to_string(params.min_p[i]), "0 to below 1");
    }
    if (params.typical_p && !(params.typical_p[i] > 0.0f && params.typical_p[i] <= 1.0f)) {
      return bad("typical_p", i, std::to_string(params.typical_p[i]), "above 0, up to 1");
    }
  }
  return kSample.run(params);
}

}  // namespace regatta::cpu
