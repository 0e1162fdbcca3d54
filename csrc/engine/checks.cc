#include "engine/checks.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>

namespace regatta::engine {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxBiases = 16384, kMaxWords = 16384, kMaxWordSize = 65536;
constexpr size_t kMaxStopIds = 1024, kMaxStops = 256, kMaxStopSize = 16384;
constexpr double kMaxAmount = 1e30;

struct Real {
  const char* name;
  double Sampling::* field;
  double low, high;
  bool or_zero;
  const char* allowed;
};

constexpr Real kReals[] = {
    {"temperature", &Sampling::temperature, 1e-30, 1e30, true,
     "0, which is greedy, or a finite number from 1e-30 to 1e+30"},
    {"top_p", &Sampling::top_p, 1e-30, 1.0, true,
     "0, which is greedy, or a number from 1e-30 to 1; 1 turns it off"},
    {"min_p", &Sampling::min_p, 0.0, 1.0 - 0x1p-24, false,
     "a number from 0 to below 1, in float32; 0 turns it off"},
    {"typical_p", &Sampling::typical_p, 1e-30, 1.0, false,
     "a number above 0 and up to 1, from 1e-30 on; 1 turns it off"},
    {"repetition_penalty", &Sampling::repetition_penalty, 1e-6, 1e6, false,
     "a number above 0, from 1e-06 to 1e+06; 1 turns it off"},
    {"presence_penalty", &Sampling::presence_penalty, -kMaxAmount, kMaxAmount, false,
     "a finite number from -1e+30 to 1e+30; 0 turns it off"},
    {"frequency_penalty", &Sampling::frequency_penalty, -kMaxAmount, kMaxAmount, false,
     "a finite number from -1e+30 to 1e+30; 0 turns it off"},
};

std::string shown(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

Status refused(const std::string& name, const std::string& got, const std::string& allowed) {
  return Status::error(name + " " + got + " is not supported (allowed: " + allowed + ")");
}

Status check_whole(const char* name, int64_t value, int64_t low, int64_t high) {
  if (low <= value && value <= high) return {};
  return refused(name, std::to_string(value),
                 "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
}

Status check_ids(const char* name, const Ids& ids, int64_t vocab_size) {
  for (const int32_t id : ids) {
    if (0 <= id && id < vocab_size) continue;
    return Status::error(std::string(name) + " has token id " + std::to_string(id) +
                         ", which is outside the vocabulary (allowed: 0 to " +
                         std::to_string(vocab_size - 1) + ")");
  }
  return {};
}

Status check_count(const char* name, size_t count, size_t most, const char* of) {
  if (count <= most) return {};
  return Status::error(std::string(name) + " has " + std::to_string(count) + " " + of +
                       " (allowed: at most " + std::to_string(most) + ")");
}

Status check_sampling(const Sampling& sampling, int64_t vocab_size) {
  for (const Real& each : kReals) {
    const double value = sampling.*each.field;
    if ((each.or_zero && value == 0) || (each.low <= value && value <= each.high)) continue;
    return refused(each.name, shown(value), each.allowed);
  }
  REGATTA_RETURN_IF_ERROR(check_whole("top_k", sampling.top_k, -1, kMaxInt));
  REGATTA_RETURN_IF_ERROR(
      check_whole("no_repeat_ngram_size", sampling.no_repeat_ngram_size, 0, kMaxInt));
  REGATTA_RETURN_IF_ERROR(
      check_count("logit_bias", sampling.logit_bias.size(), kMaxBiases, "tokens"));
  std::set<int32_t> biased;
  for (const auto& [id, amount] : sampling.logit_bias) {
    REGATTA_RETURN_IF_ERROR(check_ids("logit_bias", {id}, vocab_size));
    if (!biased.insert(id).second) {
      return Status::error("logit_bias names token " + std::to_string(id) +
                           " twice; leave one of the two out");
    }
    if (std::abs(amount) <= kMaxAmount) continue;
    return refused("logit_bias of token " + std::to_string(id) + ":", shown(amount),
                   "a number from -1e+30 to 1e+30; a token that must never come goes into "
                   "bad_words");
  }
  size_t word_size = 0;
  for (const Ids& word : sampling.bad_words) {
    if (word.empty())
      return Status::error(
          "bad_words has a word without token ids (allowed: 1 "
          "and more)");
    REGATTA_RETURN_IF_ERROR(check_ids("bad_words", word, vocab_size));
    word_size += word.size();
  }
  REGATTA_RETURN_IF_ERROR(check_count("bad_words", sampling.bad_words.size(), kMaxWords, "words"));
  return check_count("bad_words", word_size, kMaxWordSize, "token ids in all");
}

Status check_stops(const Request& request, bool has_text) {
  if (!request.stop.empty() && !has_text) {
    return Status::error(
        "stop has texts, and this folder has no tokenizer: its engine runs on ids; give stop_ids");
  }
  size_t size = 0;
  for (const std::string& text : request.stop) {
    if (text.empty()) return Status::error("stop has an empty text (allowed: 1 byte and more)");
    size += text.size();
  }
  REGATTA_RETURN_IF_ERROR(check_count("stop", request.stop.size(), kMaxStops, "texts"));
  return check_count("stop", size, kMaxStopSize, "bytes, all texts together");
}

}  // namespace

Status check_request(const Request& request, int64_t vocab_size, bool has_text) {
  if (request.ids.empty()) {
    return Status::error("the prompt has no tokens (at least 1 needed)");
  }
  REGATTA_RETURN_IF_ERROR(check_ids("the prompt", request.ids, vocab_size));
  REGATTA_RETURN_IF_ERROR(check_whole("max_new_tokens", request.max_new_tokens, 0, kMaxInt));
  REGATTA_RETURN_IF_ERROR(check_whole("min_new_tokens", request.min_new_tokens, 0, kMaxInt));
  if (request.max_new_tokens > 0 && request.min_new_tokens > request.max_new_tokens) {
    return Status::error("min_new_tokens " + std::to_string(request.min_new_tokens) +
                         " is more than max_new_tokens " + std::to_string(request.max_new_tokens) +
                         "; lower min_new_tokens or raise max_new_tokens");
  }
  REGATTA_RETURN_IF_ERROR(check_sampling(request.sampling, vocab_size));
  REGATTA_RETURN_IF_ERROR(
      check_count("stop_ids", request.stop_ids.size(), kMaxStopIds, "token ids"));
  REGATTA_RETURN_IF_ERROR(check_ids("stop_ids", request.stop_ids, vocab_size));
  REGATTA_RETURN_IF_ERROR(check_stops(request, has_text));
  if (request.logprobs == -1) return {};
  return check_whole("logprobs", request.logprobs, 0, 20);
}

}  // namespace regatta::engine
