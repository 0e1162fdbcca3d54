// The engine over a made-up network, whose logits are a hash of all that a token may read: a wrong
// row, slot, block or token gives other tokens. For sanitizers; prints "NAME: ok" for each test.
//   engine_test SEED NUM_ROUNDS   random requests
//   engine_test threads           100 threads that submit and cancel, over two engines
#include "engine/engine.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define CHECK(...)                                                                 \
  if (!(__VA_ARGS__)) {                                                            \
    std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
    std::_Exit(1);                                                                 \
  }

// Allocations of this thread until one of them finds no memory; below 0: none does.
static thread_local int64_t num_until_memory_ends = -1;

void* operator new(size_t size) {
  if (num_until_memory_ends >= 0 && num_until_memory_ends-- == 0) throw std::bad_alloc();
  if (void* const data = std::malloc(size)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace regatta::engine {
namespace {

constexpr int64_t kVocab = 61;
constexpr int32_t kStop = 0, kThrows = 58, kBroken = 59, kNoNumber = 60;  // ids
constexpr int64_t kBlockSize = 4;
using Dice = std::mt19937_64;

int64_t roll(Dice& dice, int64_t count) { return int64_t(dice() % uint64_t(count)); }

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ (b + 0x9E3779B97F4A7C15u + (a << 6) + (a >> 2))) * 0xBF58476D1CE4E5B9u;
  return x ^ x >> 29;
}

class HashNetwork final : public model::Network {
 public:
  explicit HashNetwork(int64_t num_blocks, int64_t max_length = 48) {
    facts_.vocab_size = kVocab;
    facts_.max_length = max_length;
    facts_.block_size = kBlockSize;
    facts_.num_blocks = num_blocks;
    facts_.stop_ids = {kStop};
    slots_.assign(num_blocks * kBlockSize, 12345);
  }

  Status run(const model::StepRows& rows, float* logits) override {
    for (int64_t i = 0; i < rows.token_ids.size; ++i) {
      if (rows.token_ids[i] == kBroken) return Status::error("token 59 breaks a step");
      if (rows.token_ids[i] == kThrows) throw std::bad_alloc();
    }
    for (int64_t i = 0; i < rows.token_ids.size; ++i) {
      slots_[rows.slot_mapping[i]] =
          uint64_t(rows.token_ids[i]) << 32 | uint64_t(rows.positions[i]);
    }
    CHECK((logits == nullptr) == (rows.row_kind() == model::RowKind::kNone));
    if (!logits) return {};
    int64_t span = 0;
    for (int64_t row = 0; row < rows.logit_indices.size; ++row) {
      const int32_t at = rows.logit_indices[row];
      while (rows.cu_seqlens_q[span + 1] <= at) ++span;
      write(rows, span, at, logits + row * kVocab);
    }
    return {};
  }

 private:
  void write(const model::StepRows& rows, int64_t span, int32_t at, float* logits) const {
    const int64_t num_behind = rows.cu_seqlens_q[span + 1] - 1 - at;
    uint64_t hash = 7;
    bool has_no_number = false;
    for (int64_t i = 0; i < rows.context_lens[span] - num_behind; ++i) {
      const int32_t block = rows.block_tables[span * rows.max_blocks + i / kBlockSize];
      const uint64_t slot = slots_[block * kBlockSize + i % kBlockSize];
      hash = mixed(hash, slot);
      has_no_number |= slot >> 32 == kNoNumber;
    }
    for (int64_t v = 0; v < kVocab; ++v) {
      logits[v] = float(mixed(hash, v) % 1000) / 150.0f;
      if (v >= kThrows) logits[v] -= 50.0f;
    }
    if (has_no_number) logits[3] = std::numeric_limits<float>::quiet_NaN();
  }
  std::vector<uint64_t> slots_;
};

// A letter for each id; one divisible by 5 is certain only with the next.
class LetterStream final : public TextStream {
 public:
  Status add(int32_t id, std::string* piece, std::string* pending) override {
    held_ += id == kStop ? "" : std::string(1, char('a' + id % 4));
    *piece = id % 5 == 0 ? "" : held_;
    if (id % 5 != 0) held_.clear();
    *pending = held_;
    return {};
  }
  Status finish(std::string* piece) override {
    *piece = held_;
    held_.clear();
    return {};
  }

 private:
  std::string held_;
};

class Letters final : public Text {
 public:
  Status encode(const std::string& text, Ids* ids) const override {
    for (const char letter : text) ids->push_back(letter - 'a' + 4);
    return {};
  }
  Status decode(const Ids& ids, bool, std::string* text) const override {
    for (const int32_t id : ids) *text += char('a' + id % 4);
    return {};
  }
  Status stream(const Ids&, std::unique_ptr<TextStream>* stream) const override {
    *stream = std::make_unique<LetterStream>();
    return {};
  }
};

struct Answer {
  Ids ids;
  std::string text, error;
  std::vector<float> logprobs;
  FinishReason reason = FinishReason::kNone;
  bool was_cancelled = false;
  int64_t num_left = -1;  // num_until_memory_ends, while add() runs

  void add(const Update& update) {
    CHECK(reason == FinishReason::kNone);
    ids.insert(ids.end(), update.ids.begin(), update.ids.end());
    text += update.text;
    for (const TokenLogprobs& each : update.logprobs) {
      logprobs.push_back(each.token.logprob);
      for (const Logprob& top : each.top) logprobs.push_back(top.logprob + float(top.id));
    }
    reason = update.finish_reason;
    error = update.error;
    CHECK((reason == FinishReason::kError) != error.empty());
  }
};

std::unique_ptr<Engine> made(int64_t num_blocks, const EngineOptions& options) {
  std::unique_ptr<Engine> engine;
  const Status status = Engine::make(std::make_unique<HashNetwork>(num_blocks),
                                     std::make_shared<Letters>(), options, &engine);
  CHECK(status.ok());
  return engine;
}

int64_t submitted(Engine& engine, const Request& request, OnUpdate on_update) {
  int64_t id = -1;
  const Status status = engine.submit(request, std::move(on_update), &id);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  CHECK(status.ok());
  return id;
}

void step_to_the_end(Engine& engine) {
  for (bool ran = true; ran;) CHECK(engine.step(&ran).ok());
}

void check_counters(const Engine& engine) {
  const Counters counters = engine.counters();
  CHECK(counters.num_free_blocks + counters.num_used_blocks == counters.num_cache_blocks);
}

Request random_request(Dice& dice) {
  Request request;
  Dice text(roll(dice, 3));  // one of a few, cut somewhere, so that prefixes are shared
  for (int64_t i = 1 + roll(dice, 24); i > 0; --i) request.ids.push_back(1 + roll(text, 50));
  for (int64_t i = roll(dice, 3); i > 0; --i) request.ids.push_back(1 + roll(dice, 50));
  if (roll(dice, 40) == 0) request.ids[0] = roll(dice, 2) ? kBroken : kNoNumber;
  request.max_new_tokens = roll(dice, 3) ? 1 + roll(dice, 20) : 0;
  request.min_new_tokens = std::min(roll(dice, 4), request.max_new_tokens);
  request.ignore_eos = roll(dice, 2);
  if (roll(dice, 4) == 0) request.stop_ids = {int32_t(roll(dice, 50)), 7};
  if (roll(dice, 3) == 0) request.stop = {"abc", "dd", "cab"};
  request.include_stop = roll(dice, 2);
  if (roll(dice, 3) == 0) request.logprobs = int32_t(roll(dice, 5));
  Sampling& sampling = request.sampling;
  if (roll(dice, 3) == 0) sampling.temperature = 0;
  sampling.seed = roll(dice, 1000);
  if (roll(dice, 4) == 0) sampling.top_k = 10;
  if (roll(dice, 4) == 0) sampling.top_p = 0.8;
  if (roll(dice, 4) == 0) sampling.min_p = 0.05;
  if (roll(dice, 4) == 0) sampling.repetition_penalty = 1.3;
  if (roll(dice, 4) == 0) sampling.frequency_penalty = 0.4;
  if (roll(dice, 6) == 0) sampling.no_repeat_ngram_size = 2;
  if (roll(dice, 6) == 0) sampling.logit_bias = {{5, 2.0}, {6, -3.0}};
  if (roll(dice, 6) == 0) sampling.bad_words = {{9}, {4, 11}};
  return request;
}

// What the request gives alone: nothing is shared, cut or preempted.
Answer alone(const Request& request) {
  EngineOptions options;
  options.batch_size = 1;
  options.prefix_caching = false;
  const auto engine = made(12, options);
  Answer answer;
  submitted(*engine, request, [&](const Update& update) { answer.add(update); });
  step_to_the_end(*engine);
  return answer;
}

struct Sums {
  int64_t num_preemptions = 0, num_hits = 0, num_errors = 0, num_cancelled = 0, num_stops = 0;
};

// Random options, requests that come between steps and on callbacks, and cancels of both kinds.
void test_random_requests(uint64_t seed, Sums* sums) {
  Dice dice(seed);
  EngineOptions options;
  options.batch_size = 1 + roll(dice, 6);
  options.max_num_batched_tokens = options.batch_size + roll(dice, 24);
  options.prefix_caching = roll(dice, 4) > 0;
  options.reserve_full = roll(dice, 5) == 0;
  options.chunked_prefill = roll(dice, 4) > 0;
  options.separate_steps = roll(dice, 4) == 0;
  const auto engine = made(12 + roll(dice, 12), options);
  std::map<int64_t, Request> requests;
  std::map<int64_t, Answer> answers;
  int64_t num_left = 20 + roll(dice, 20);
  std::function<void()> submit = [&] {
    if (num_left-- <= 0) return;
    const Request request = random_request(dice);
    const int64_t id = submitted(*engine, request, [&](const Update& update) {
      Answer& answer = answers[update.request_id];
      answer.add(update);
      check_counters(*engine);
      bool ran;
      CHECK(!engine->step(&ran).ok() && !engine->close().ok());
      if (roll(dice, 8) == 0) submit();
      if (roll(dice, 30) == 0) {
        const bool has_ended = update.finish_reason != FinishReason::kNone;
        CHECK(engine->cancel(update.request_id).ok() != has_ended);
        answer.was_cancelled |= !has_ended;
      }
    });
    requests[id] = request;
  };
  while (num_left > 0) {
    if (roll(dice, 2)) submit();
    if (roll(dice, 12) == 0 && !requests.empty()) {
      const int64_t id = roll(dice, int64_t(requests.size()));
      if (engine->cancel(id).ok()) answers[id].was_cancelled = true;
    }
    bool ran;
    CHECK(engine->step(&ran).ok());
    check_counters(*engine);
  }
  step_to_the_end(*engine);
  CHECK(answers.size() == requests.size());
  for (const auto& [id, request] : requests) {
    const Answer &got = answers[id], wanted = alone(request);
    if (got.was_cancelled) {
      CHECK(got.reason == FinishReason::kAbort && got.ids.size() <= wanted.ids.size());
      CHECK(std::equal(got.ids.begin(), got.ids.end(), wanted.ids.begin()));
    } else {
      CHECK(got.ids == wanted.ids && got.text == wanted.text && got.logprobs == wanted.logprobs);
      CHECK(got.reason == wanted.reason && got.error == wanted.error);
    }
    sums->num_errors += got.reason == FinishReason::kError;
    sums->num_cancelled += got.reason == FinishReason::kAbort;
    sums->num_stops += got.reason == FinishReason::kStop;
  }
  const Counters counters = engine->counters();
  CHECK(counters.num_used_blocks == 0 && counters.num_running + counters.num_waiting == 0);
  sums->num_preemptions += counters.num_preemptions;
  sums->num_hits += counters.num_prefix_hit_tokens;
}

void test_close_ends_requests_in_flight() {
  EngineOptions options;
  options.batch_size = 2;
  const auto engine = made(30, options);
  Request request;
  request.ids = {1, 2, 3};
  request.ignore_eos = true;
  std::vector<Answer> answers(5);
  for (Answer& answer : answers) {
    submitted(*engine, request, [&](const Update& update) {
      int64_t id;
      answer.add(update);
      if (answer.reason == FinishReason::kNone) return;
      CHECK(!engine->submit(request, {}, &id).ok() && !engine->close().ok());
      CHECK(!engine->cancel(update.request_id).ok());
    });
  }
  bool ran;
  for (int i = 0; i < 3; ++i) CHECK(engine->step(&ran).ok() && ran);
  CHECK(engine->close().ok() && engine->close().ok());
  for (const Answer& answer : answers) CHECK(answer.reason == FinishReason::kAbort);
  CHECK(answers[0].ids.size() == 3 && answers[4].ids.empty());
  CHECK(engine->counters().num_used_blocks == 0 && !engine->step(&ran).ok());
}

void test_all_end_where_memory_ends() {
  EngineOptions options;
  options.batch_size = 2;
  const auto engine = made(30, options);
  std::vector<Answer> answers(4);
  for (size_t i = 0; i < answers.size(); ++i) {
    Request request;
    request.ids = {1, i == 1 ? kThrows : 2};
    submitted(*engine, request, [&answers, i](const Update& update) { answers[i].add(update); });
  }
  step_to_the_end(*engine);
  for (const Answer& answer : answers) {
    CHECK(answer.error.find("the engine cannot go on: ") == 0);
  }
  Request request;
  request.ids = {1};
  int64_t id;
  CHECK(engine->submit(request, {}, &id).message().find("the engine cannot go on: ") == 0);
  CHECK(engine->counters().num_used_blocks == 0 && engine->close().ok());
}

// Whichever allocation of the steps fails: each request that was taken has one last update, and the
// engine closes.
void test_nothing_is_lost_where_memory_ends_once() {
  bool failed = true;
  int64_t num_broken = 0;
  for (int64_t count = 0; failed; ++count) {
    EngineOptions options;
    options.batch_size = 2;
    const auto engine = made(3, options);
    std::vector<Answer> answers(3);
    for (Answer& answer : answers) {
      Request request;
      request.ids = {1, 2, 3, 4};
      request.max_new_tokens = 3;
      request.stop = {"a string that does not come"};
      request.logprobs = 2;
      submitted(*engine, request, [&answer](const Update& update) {
        std::swap(num_until_memory_ends, answer.num_left);
        answer.add(update);
        std::swap(num_until_memory_ends, answer.num_left);
      });
    }
    num_until_memory_ends = count;
    for (bool ran = true; ran;) {
      const Status status = engine->step(&ran);
      CHECK(status.ok());
    }
    failed = num_until_memory_ends < 0;
    num_until_memory_ends = -1;
    for (const Answer& answer : answers) CHECK(answer.reason != FinishReason::kNone);
    num_broken += answers[2].reason == FinishReason::kError;
    CHECK(engine->close().ok());
  }
  CHECK(num_broken > 10);
}

// A caller's code runs where a request is destroyed, too.
void test_callbacks_that_throw_and_streams_that_call() {
  static const Engine* runs = nullptr;
  struct CallingStream final : TextStream {
    Status add(int32_t, std::string*, std::string*) override { return {}; }
    Status finish(std::string*) override { return {}; }
    ~CallingStream() override { num_closed += runs->counters().num_cache_blocks == 12; }
    explicit CallingStream(int& closed) : num_closed(closed) {}
    int& num_closed;
  };
  struct CallingText final : Text {
    Status encode(const std::string&, Ids*) const override { return {}; }
    Status decode(const Ids&, bool, std::string*) const override { return {}; }
    Status stream(const Ids&, std::unique_ptr<TextStream>* stream) const override {
      *stream = std::make_unique<CallingStream>(num_closed);
      return {};
    }
    mutable int num_closed = 0;
  };
  const auto text = std::make_shared<CallingText>();
  std::unique_ptr<Engine> engine;
  CHECK(Engine::make(std::make_unique<HashNetwork>(12), text, {}, &engine).ok());
  runs = engine.get();
  Request request;
  request.ids = {1};
  request.max_new_tokens = 2;
  int num_told = 0;
  for (int i = 0; i < 2; ++i) {
    submitted(*engine, request, [&](const Update&) {
      ++num_told;
      throw std::bad_alloc();
    });
  }
  step_to_the_end(*engine);
  CHECK(num_told == 4 && text->num_closed == 2 && engine->close().ok());
}

void test_another_thread_cannot_step_meanwhile() {
  const auto engine = made(30, {});
  Request request;
  request.ids = {1};
  request.max_new_tokens = 1;
  std::string refusal;
  submitted(*engine, request, [&](const Update&) {
    std::thread([&] {
      bool ran;
      refusal = engine->step(&ran).message();
    }).join();
  });
  step_to_the_end(*engine);
  CHECK(refusal.find("another thread steps") == 0);
  CHECK(!engine->wait().ok());
}

void test_wrong_requests_are_refused() {
  const auto engine = made(30, {});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  using Change = std::function<void(Request&)>;
  const std::pair<const char*, Change> wrong[] = {
      {"the prompt has no tokens", [](Request& r) { r.ids = {}; }},
      {"the prompt has token id 61", [](Request& r) { r.ids = {1, kVocab}; }},
      {"the prompt has token id -1", [](Request& r) { r.ids = {-1}; }},
      {"the prompt has 48 tokens", [](Request& r) { r.ids.assign(48, 1); }},
      {"max_new_tokens -1", [](Request& r) { r.max_new_tokens = -1; }},
      {"min_new_tokens 3 is more", [](Request& r) { r.max_new_tokens = 2, r.min_new_tokens = 3; }},
      {"temperature nan", [&](Request& r) { r.sampling.temperature = nan; }},
      {"temperature -1", [](Request& r) { r.sampling.temperature = -1; }},
      {"top_k -2", [](Request& r) { r.sampling.top_k = -2; }},
      {"top_p 1.5", [](Request& r) { r.sampling.top_p = 1.5; }},
      {"min_p 1", [](Request& r) { r.sampling.min_p = 1; }},
      {"typical_p 0", [](Request& r) { r.sampling.typical_p = 0; }},
      {"repetition_penalty 0", [](Request& r) { r.sampling.repetition_penalty = 0; }},
      {"presence_penalty 1e+31", [](Request& r) { r.sampling.presence_penalty = 1e31; }},
      {"no_repeat_ngram_size -1", [](Request& r) { r.sampling.no_repeat_ngram_size = -1; }},
      {"logit_bias has token id 61", [](Request& r) { r.sampling.logit_bias = {{kVocab, 1}}; }},
      {"logit_bias names token 1", [](Request& r) { r.sampling.logit_bias = {{1, 1}, {1, 2}}; }},
      {"logit_bias of token 1: nan", [&](Request& r) { r.sampling.logit_bias = {{1, nan}}; }},
      {"bad_words has a word without", [](Request& r) { r.sampling.bad_words = {{}}; }},
      {"bad_words has token id -5", [](Request& r) { r.sampling.bad_words = {{-5}}; }},
      {"stop_ids has token id 61", [](Request& r) { r.stop_ids = {kVocab}; }},
      {"stop has an empty text", [](Request& r) { r.stop = {""}; }},
      {"logprobs 21", [](Request& r) { r.logprobs = 21; }},
      {"logprobs -2", [](Request& r) { r.logprobs = -2; }}};
  for (const auto& [said, change] : wrong) {
    Request request;
    request.ids = {1, 2};
    change(request);
    int64_t id;
    const Status status = engine->submit(request, [](const Update&) { CHECK(false); }, &id);
    if (status.message().find(said) == 0) continue;
    std::fprintf(stderr, "%s: %s\n", said, status.message().c_str());
    CHECK(false);
  }
  CHECK(engine->counters().num_waiting == 0);
}

// Two engines share one thread pool; each steps on its own thread.
void test_threads() {
  constexpr int kThreads = 100, kRequests = 4;
  EngineOptions options;
  options.batch_size = 8;
  options.max_num_batched_tokens = 32;
  options.own_thread = true;
  const std::unique_ptr<Engine> engines[] = {made(40, options), made(20, options)};
  std::atomic<int> num_submitted{0}, num_ended{0}, num_cancelled{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Dice dice(i);
      Engine& engine = *engines[i % 2];
      for (int k = 0; k < kRequests; ++k) {
        int64_t id;
        const Request request = random_request(dice);
        const Status status = engine.submit(
            request,
            [&](const Update& update) { num_ended += update.finish_reason != FinishReason::kNone; },
            &id);
        if (!status.ok()) continue;  // closed
        ++num_submitted;
        check_counters(engine);
        if (roll(dice, 3) == 0) num_cancelled += engine.cancel(id).ok();
        if (i == 50 && k == 2) CHECK(engine.close().ok());  // with requests in flight
        if (i % 10 == 1 && k == 3) CHECK(engine.wait().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& engine : engines) {
    CHECK(engine->wait().ok() && engine->counters().num_used_blocks == 0);
    CHECK(engine->close().ok());
  }
  CHECK(num_ended == num_submitted && num_submitted > kThreads);
  std::printf("%d requests, %d cancelled\n", num_submitted.load(), num_cancelled.load());
}

void test_random_rounds(uint64_t seed, int num_rounds) {
  Sums sums;
  for (int round = 0; round < num_rounds; ++round) {
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed + round));
    test_random_requests(seed + round, &sums);
  }
  std::printf(
      "%d rounds: %d preemptions, %d tokens of prefixes, %d errors, %d cancelled, %d stops\n",
      num_rounds, int(sums.num_preemptions), int(sums.num_hits), int(sums.num_errors),
      int(sums.num_cancelled), int(sums.num_stops));
  CHECK(sums.num_preemptions > 0 && sums.num_hits > 0 && sums.num_errors > 0);
  CHECK(sums.num_cancelled > 0 && sums.num_stops > 0);
}

}  // namespace
}  // namespace regatta::engine

int main(int argc, char** argv) {
  using namespace regatta::engine;
  if (argc == 3) {
    test_random_rounds(std::strtoull(argv[1], nullptr, 10), std::atoi(argv[2]));
    std::printf("random requests: ok\n");
    test_close_ends_requests_in_flight();
    test_all_end_where_memory_ends();
    test_nothing_is_lost_where_memory_ends_once();
    test_callbacks_that_throw_and_streams_that_call();
    test_another_thread_cannot_step_meanwhile();
    test_wrong_requests_are_refused();
    std::printf("doors: ok\n");
  } else {
    test_threads();
    std::printf("threads: ok\n");
  }
  return 0;
}
