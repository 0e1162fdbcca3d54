#include "engine/adjustment.h"

#include <algorithm>
#include <limits>

namespace regatta::engine {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr int64_t kForEver = std::numeric_limits<int64_t>::max();

}  // namespace

Adjustment::Adjustment(const Request& request, const Ids& stop_ids)
    : repetition_(static_cast<float>(request.sampling.repetition_penalty)),
      presence_(static_cast<float>(request.sampling.presence_penalty)),
      frequency_(static_cast<float>(request.sampling.frequency_penalty)),
      ngram_size_(request.sampling.no_repeat_ngram_size) {
  for (const auto& [token, amount] : request.sampling.logit_bias) {
    rules_.push_back({token, static_cast<float>(amount), {}, kForEver});
  }
  for (Ids word : request.sampling.bad_words) {
    const int32_t token = word.back();
    word.pop_back();
    // As in transformers: an end-of-text token of its own is no bad word.
    if (!word.empty() || !holds(stop_ids, token)) {
      rules_.push_back({token, kBanned, std::move(word), kForEver});
    }
  }
  if (request.min_new_tokens > 0) {
    Ids ends = request.stop_ids;
    if (!request.ignore_eos) ends.insert(ends.end(), stop_ids.begin(), stop_ids.end());
    for (const int32_t token : ends) {
      rules_.push_back({token, kBanned, {}, request.min_new_tokens});
    }
  }
  if (penalizes() || ngram_size_ > 0) ends_at_ = kForEver;
  for (const Rule& rule : rules_) ends_at_ = std::max(ends_at_, rule.until);
}

void Adjustment::apply(const Ids& ids, int64_t num_prompt_tokens, int64_t vocab_size,
                       int32_t* counts, float* logits) const {
  const int64_t num_output = static_cast<int64_t>(ids.size()) - num_prompt_tokens;
  for (const Rule& rule : rules_) {
    const Ids& prefix = rule.prefix;
    const bool ends_so =
        prefix.size() <= ids.size() && std::equal(prefix.rbegin(), prefix.rend(), ids.rbegin());
    if (num_output < rule.until && ends_so && rule.token < vocab_size) {
      logits[rule.token] += rule.amount;
    }
  }
  if (penalizes()) penalize(ids, num_prompt_tokens, counts, logits);
  if (ngram_size_ > 0) ban_repeats(ids, logits);
}

void Adjustment::penalize(const Ids& ids, int64_t num_prompt_tokens, int32_t* counts,
                          float* logits) const {
  for (const int32_t id : ids) {
    if (counts[id]++ > 0 || repetition_ == 1.0f) continue;
    logits[id] = logits[id] > 0.0f ? logits[id] / repetition_ : logits[id] * repetition_;
  }
  for (const int32_t id : ids) counts[id] = 0;
  if (presence_ == 0.0f && frequency_ == 0.0f) return;
  for (size_t i = num_prompt_tokens; i < ids.size(); ++i) ++counts[ids[i]];
  for (size_t i = num_prompt_tokens; i < ids.size(); ++i) {
    int32_t& count = counts[ids[i]];
    if (count == 0) continue;  // done
    // Rounded on its own: a fused multiply-add would give other last bits than NumPy.
    const volatile float of_all = frequency_ * static_cast<float>(count);
    logits[ids[i]] -= presence_ + of_all;
    count = 0;
  }
}

void Adjustment::ban_repeats(const Ids& ids, float* logits) const {
  const int64_t last = static_cast<int64_t>(ids.size()) - ngram_size_;  // where one may begin
  const auto newest = ids.end() - std::min<int64_t>(ngram_size_ - 1, int64_t(ids.size()));
  for (int64_t begin = 0; begin <= last; ++begin) {
    if (std::equal(newest, ids.end(), ids.begin() + begin)) {
      logits[ids[begin + ngram_size_ - 1]] = kBanned;
    }
  }
}

}  // namespace regatta::engine
