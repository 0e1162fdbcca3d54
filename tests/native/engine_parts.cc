// The parts of csrc/engine that have twins in Python, by lines of text: tests/csrc/test_engine.py
// writes what the twins were given, and compares what is printed with what they made of it.
//
//   blake2b HEX                                the digest
//   scheduler <8 numbers of SchedulerConfig>   a new scheduler
//   add ID MAX_NEW MIN_NEW IGNORE_EOS | STOP_IDS | PROMPT
//   cancel ID
//   step TOKENS                                a step, and the tokens that it yields
//   stops INCLUDE HIDDEN... | STOPS...         a new text; strings in hex, HIDDEN as ID=HEX
//   token ID MAY_STOP IS_LAST PIECE PENDING    what its stream gives; in hex, "-" for none
//   adjust V MIN_NEW IGNORE_EOS NUM_PROMPT NGRAM | REPETITION PRESENCE FREQUENCY | BIASES |
//       WORDS... | STOP_IDS | IDS              changed logits of 0.25, -0.25, 0.5, -0.5, ...
//   measure TOKEN NUM_TOP | LOGITS             logprobs
//   seed ENGINE_SEED ID SEED|-                 the seed of a request
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "engine/sampler.h"
#include "engine/scheduler.h"

namespace regatta::engine {
namespace {

using Words = std::vector<std::string>;

const Ids kStopIds = {0};

// The words of each part of a line.
std::vector<Words> parts_of(const std::string& line) {
  std::vector<Words> parts(1);
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    if (word == "|") {
      parts.emplace_back();
    } else {
      parts.back().push_back(word);
    }
  }
  return parts;
}

std::string bytes_of(const std::string& hex) {
  std::string bytes;
  if (hex == "-") return bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

template <class Bytes>
std::string hex_of(const Bytes& bytes) {
  std::string hex;
  char two[3];
  for (const auto byte : bytes) {
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(byte));
    hex += two;
  }
  return hex.empty() ? "-" : hex;
}

Ids ids_of(const Words& words) {
  Ids ids;
  for (const std::string& word : words) ids.push_back(std::stoi(word));
  return ids;
}

const char* name_of(FinishReason reason) {
  constexpr const char* kNames[] = {"none", "stop", "length", "abort", "error"};
  return kNames[static_cast<int>(reason)];
}

class Trace {
 public:
  explicit Trace(const Words& w) {
    const auto at = [&](size_t i) { return std::stoll(w[i]); };
    config_ = {at(1), at(2), at(3), at(4), at(5), at(6) > 0, at(7) > 0, at(8) > 0, at(9) > 0};
    if (!config_.check().ok()) std::exit(3);
    scheduler_ = std::make_unique<Scheduler>(config_);
  }

  void add(const std::vector<Words>& parts) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = std::stoll(parts[0][1]);
    sequence->request.max_new_tokens = std::stoll(parts[0][2]);
    sequence->request.min_new_tokens = std::stoll(parts[0][3]);
    sequence->request.ignore_eos = parts[0][4] == "1";
    sequence->request.stop_ids = ids_of(parts[1]);
    sequence->ids = ids_of(parts[2]);
    sequence->num_prompt_tokens = int64_t(sequence->ids.size());
    sequence->chain = BlockManager::chain_of("");
    const Status fits = set_limits(config_, sequence.get());
    std::printf("%s\n", fits.ok() ? "added" : fits.message().c_str());
    if (!fits.ok()) return;
    scheduler_->add(sequence.get());
    sequences_[sequence->id] = std::move(sequence);
  }

  void cancel(int64_t id) {
    Sequence* sequence = sequences_.at(id).get();
    if (sequence->status == SequenceStatus::kFinished) return;
    scheduler_->end(sequence, FinishReason::kAbort);
    print_state();
  }

  void step(const Ids& tokens) {
    const Batch batch = scheduler_->schedule();
    for (const Span& span : batch.spans) {
      std::printf("%lld:%lld+%lld%s[", static_cast<long long>(span.sequence->id),
                  static_cast<long long>(span.start), static_cast<long long>(span.num_tokens),
                  span.samples ? "!" : "");
      for (const int32_t block : span.sequence->blocks) std::printf("%d ", block);
      std::printf("] ");
    }
    for (const Sequence* each : batch.preempted) {
      std::printf("preempted %lld ", static_cast<long long>(each->id));
    }
    if (batch.num_samples != int64_t(tokens.size())) {
      std::printf("wants %lld tokens\n", static_cast<long long>(batch.num_samples));
      std::exit(4);
    }
    for (const Sequence* each : scheduler_->update(batch, tokens, kStopIds)) {
      std::printf("%lld ends by %s ", static_cast<long long>(each->id),
                  name_of(each->finish_reason));
    }
    print_state();
  }

 private:
  void print_state() const {
    const Counters& counters = scheduler_->counters();
    std::printf("%s %lld running %lld waiting %lld free %lld hits %lld preemptions\n",
                scheduler_->is_in_order() ? "ok" : "BLOCKS IN DISORDER",
                static_cast<long long>(scheduler_->num_running()),
                static_cast<long long>(scheduler_->num_waiting()),
                static_cast<long long>(scheduler_->blocks().num_free_blocks()),
                static_cast<long long>(counters.num_prefix_hit_tokens),
                static_cast<long long>(counters.num_preemptions));
  }

  SchedulerConfig config_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<int64_t, std::unique_ptr<Sequence>> sequences_;
};

// Gives what the lines say.
struct GivenStream : TextStream {
  std::string piece, pending, rest;
  Status add(int32_t, std::string* piece_out, std::string* pending_out) override {
    *piece_out = piece;
    *pending_out = pending;
    return {};
  }
  Status finish(std::string* piece_out) override {
    *piece_out = pending;
    return {};
  }
};

class GivenText {
 public:
  explicit GivenText(const std::vector<Words>& parts) {
    auto stream = std::make_unique<GivenStream>();
    stream_ = stream.get();
    AnswerText::Hidden hidden;
    for (size_t i = 2; i < parts[0].size(); ++i) {
      const size_t at = parts[0][i].find('=');
      hidden[std::stoi(parts[0][i])] = bytes_of(parts[0][i].substr(at + 1));
    }
    std::vector<std::string> stops;
    for (const std::string& hex : parts[1]) stops.push_back(bytes_of(hex));
    answer_ = std::make_unique<AnswerText>(std::move(stream), stops, parts[0][1] == "1", hidden);
  }

  void token(const Words& w) {
    stream_->piece = bytes_of(w[4]);
    stream_->pending = bytes_of(w[5]);
    bool completes = false;
    if (!answer_->append(std::stoi(w[1]), w[2] == "1", w[3] == "1", &completes).ok()) std::exit(5);
    std::printf("%d %s\n", completes, hex_of(answer_->take()).c_str());
  }

 private:
  GivenStream* stream_;
  std::unique_ptr<AnswerText> answer_;
};

void adjust(const std::vector<Words>& parts) {
  Request request;
  const int64_t vocab_size = std::stoll(parts[0][1]), num_prompt = std::stoll(parts[0][4]);
  request.min_new_tokens = std::stoll(parts[0][2]);
  request.ignore_eos = parts[0][3] == "1";
  Sampling& sampling = request.sampling;
  sampling.no_repeat_ngram_size = std::stoll(parts[0][5]);
  sampling.repetition_penalty = std::stod(parts[1][0]);
  sampling.presence_penalty = std::stod(parts[1][1]);
  sampling.frequency_penalty = std::stod(parts[1][2]);
  for (size_t i = 0; i < parts[2].size(); i += 2) {
    sampling.logit_bias.emplace_back(std::stoi(parts[2][i]), std::stod(parts[2][i + 1]));
  }
  for (const std::string& word : parts[3]) {
    Words ids(1);
    for (const char c : word) c == ',' ? ids.emplace_back() : ids.back() += c, void();
    sampling.bad_words.push_back(ids_of(ids));
  }
  request.stop_ids = ids_of(parts[4]);
  const Ids ids = ids_of(parts[5]);
  std::vector<float> logits(vocab_size);
  for (int64_t i = 0; i < vocab_size; ++i) logits[i] = (i % 2 ? -0.25f : 0.25f) * float(i / 2 + 1);
  std::vector<int32_t> counts(vocab_size);
  const Adjustment adjustment(request, kStopIds);
  if (adjustment.changes(int64_t(ids.size()) - num_prompt)) {
    adjustment.apply(ids, num_prompt, vocab_size, counts.data(), logits.data());
  }
  for (const int32_t count : counts) {
    if (count != 0) std::exit(6);
  }
  for (const float logit : logits) std::printf("%a ", static_cast<double>(logit));
  std::printf("\n");
}

void print_measured(const std::vector<Words>& parts) {
  std::vector<float> logits;
  for (const std::string& word : parts[1]) logits.push_back(std::stof(word));
  const TokenLogprobs found = measure(logits.data(), int64_t(logits.size()), std::stoi(parts[0][1]),
                                      std::stoi(parts[0][2]));
  std::vector<Logprob> all = found.top;
  all.insert(all.begin(), found.token);
  for (const Logprob& each : all) {
    std::printf("%d %.9g %d ", each.id, static_cast<double>(each.logprob), each.rank);
  }
  std::printf("\n");
}

void print_seed(const Words& w) {
  Sequence sequence;
  sequence.id = std::stoll(w[2]);
  if (w[3] != "-") sequence.request.sampling.seed = std::stoll(w[3]);
  const int64_t seed = request_seed(std::stoll(w[1]), sequence);
  std::printf("%lld\n", static_cast<long long>(seed));
}

int run() {
  std::unique_ptr<Trace> trace;
  std::unique_ptr<GivenText> text;
  for (std::string line; std::getline(std::cin, line);) {
    const std::vector<Words> parts = parts_of(line);
    const Words& w = parts[0];
    const std::string& what = w[0];
    if (what == "blake2b") {
      const std::string bytes = bytes_of(w[1]);
      std::printf("%s\n", hex_of(blake2b(bytes.data(), bytes.size())).c_str());
    } else if (what == "scheduler") {
      trace = std::make_unique<Trace>(w);
    } else if (what == "add") {
      trace->add(parts);
    } else if (what == "cancel") {
      trace->cancel(std::stoll(w[1]));
    } else if (what == "step") {
      trace->step(ids_of({w.begin() + 1, w.end()}));
    } else if (what == "stops") {
      text = std::make_unique<GivenText>(parts);
    } else if (what == "token") {
      text->token(w);
    } else if (what == "adjust") {
      adjust(parts);
    } else if (what == "measure") {
      print_measured(parts);
    } else if (what == "seed") {
      print_seed(w);
    } else {
      std::fprintf(stderr, "unknown: %s\n", line.c_str());
      return 2;
    }
  }
  return 0;
}

}  // namespace
}  // namespace regatta::engine

int main() { return regatta::engine::run(); }
