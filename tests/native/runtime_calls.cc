// What regatta.h promises of calls that are wrong, of callbacks that call, and of many threads,
// each checked on a folder: runtime_calls FOLDER.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <regatta.hpp>
#include <thread>

namespace {

#define EXPECT(...)                                                                           \
  do {                                                                                        \
    if (!(__VA_ARGS__)) {                                                                     \
      std::fprintf(stderr, "line %d: %s; \"%s\"\n", __LINE__, #__VA_ARGS__, regatta_error()); \
      std::_Exit(1);                                                                          \
    }                                                                                         \
  } while (false)

#define EXPECT_STATUS(expected, ...)                                                        \
  do {                                                                                      \
    const regatta_status got = (__VA_ARGS__);                                               \
    if (got != (expected) || (got != REGATTA_OK && regatta_error()[0] == 0)) {              \
      std::fprintf(stderr, "line %d: %s is %d; \"%s\"\n", __LINE__, #__VA_ARGS__, int(got), \
                   regatta_error());                                                        \
      std::_Exit(1);                                                                        \
    }                                                                                       \
  } while (false)

bool said(const char* words) { return std::strstr(regatta_error(), words) != nullptr; }

// Counts the events of requests; every request has one last event.
struct Heard {
  std::mutex mutex;
  std::map<int64_t, int> num_last, num_tokens;
  std::map<int64_t, int64_t> finish;

  void add(const regatta_event& event) {
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT(num_last[event.id] == 0);  // nothing comes behind the last one
    EXPECT(event.struct_size == sizeof event && event.text[event.text_size] == 0);
    EXPECT((event.error != nullptr) == (event.finish == REGATTA_ERROR));
    num_tokens[event.id] += static_cast<int>(event.num_ids);
    num_last[event.id] += event.finish != REGATTA_UNFINISHED;
    finish[event.id] = event.finish;
  }
};

regatta::Options options_of(bool own_thread) {
  regatta::Options options;
  options.own_thread = own_thread;
  options.num_threads = 2;
  options.num_blocks = 48;
  return options;
}

regatta::Request request_of(const regatta::Engine& engine, int64_t num_tokens) {
  regatta::Request request(engine);
  request.prompt_ids = {5, 9, 7};
  request.fields.temperature = 0;
  request.fields.max_new_tokens = num_tokens;
  request.fields.ignore_eos = 1;
  return request;
}

void finish(regatta::Engine& engine) {
  while (engine.step()) {
  }
}

void wrong_arguments(const char* folder) {
  regatta_options options;
  regatta_request request;
  regatta_engine* engine = nullptr;
  int64_t id = 0;
  EXPECT(regatta_version() == REGATTA_VERSION);
  EXPECT_STATUS(REGATTA_INVALID, regatta_options_init(nullptr, sizeof options));
  EXPECT_STATUS(REGATTA_INVALID, regatta_options_init(&options, 4));
  EXPECT_STATUS(REGATTA_INVALID, regatta_open(nullptr, nullptr, &engine));
  EXPECT_STATUS(REGATTA_INVALID, regatta_open(folder, nullptr, nullptr));
  EXPECT_STATUS(REGATTA_BAD_FOLDER, regatta_open("/no such folder", nullptr, &engine));
  EXPECT(engine == nullptr && said("/no such folder"));
  EXPECT_STATUS(REGATTA_INVALID, regatta_submit(nullptr, &request, &id));
  EXPECT_STATUS(REGATTA_INVALID, regatta_cancel(nullptr, 0));
  EXPECT_STATUS(REGATTA_INVALID, regatta_step(nullptr, nullptr));
  EXPECT_STATUS(REGATTA_INVALID, regatta_wait(nullptr));
  EXPECT_STATUS(REGATTA_INVALID, regatta_verify(nullptr));
  EXPECT_STATUS(REGATTA_OK, regatta_close(nullptr));
  EXPECT_STATUS(REGATTA_OK, regatta_options_init(&options, sizeof options));
  options.batch_size = 0;
  EXPECT_STATUS(REGATTA_INVALID, regatta_open(folder, &options, &engine));
  EXPECT(said("options.batch_size is 0 (allowed: 1 .. "));
  options.batch_size = 8;
  options.memory_limit = 1000;
  EXPECT_STATUS(REGATTA_BAD_FOLDER, regatta_open(folder, &options, &engine));
  EXPECT(engine == nullptr && said("does not fit"));
  // Slots of more blocks have no number of 32 bits.
  regatta_memory memory = {};
  memory.struct_size = sizeof memory;
  options.memory_limit = INT64_MAX;
  options.num_blocks = 1 << 28;
  EXPECT_STATUS(REGATTA_BAD_FOLDER, regatta_sum_memory(folder, &options, &memory));
  EXPECT(said("num_blocks is 268435456 of "));
}

void structs_of_other_sizes(const char* folder) {
  struct {
    regatta_options known;
    int64_t of_later;
  } options;
  std::memset(&options, 255, sizeof options);
  EXPECT_STATUS(REGATTA_OK, regatta_options_init(&options.known, sizeof options));
  EXPECT(options.of_later == 0 && options.known.struct_size == sizeof options);
  regatta_memory memory = {};
  memory.struct_size = offsetof(regatta_memory, cache);
  memory.cache = 77;
  EXPECT_STATUS(REGATTA_OK, regatta_sum_memory(folder, &options.known, &memory));
  EXPECT(memory.weights > 0 && memory.cache == 77);
  options.of_later = 1;
  EXPECT_STATUS(REGATTA_UNSUPPORTED, regatta_sum_memory(folder, &options.known, &memory));
  EXPECT(said("a field at byte"));
  for (const size_t size : {size_t{0}, size_t{12}, size_t{1} << 40}) {
    options.known.struct_size = size;
    EXPECT_STATUS(REGATTA_INVALID, regatta_sum_memory(folder, &options.known, &memory));
    EXPECT(said("options.struct_size is "));
  }
}

void requests_that_are_wrong(const char* folder) {
  regatta::Engine engine(folder, options_of(false));
  const auto refused = [&](const char* words, auto change) {
    regatta::Request request = request_of(engine, 2);
    change(request);
    try {
      engine.submit(request, [](const regatta::Event&) { std::abort(); });
    } catch (const regatta::Error& error) {
      EXPECT(std::strstr(error.what(), words) != nullptr);
      return error.status;
    }
    return REGATTA_OK;
  };
  const int32_t end = static_cast<int32_t>(engine.info().vocab_size);
  using Request = regatta::Request;
  const auto invalid = [&](const char* words, auto change) {
    EXPECT_STATUS(REGATTA_INVALID, refused(words, change));
  };
  invalid("outside the vocabulary", [&](Request& r) { r.prompt_ids = {1, end}; });
  invalid("outside the vocabulary", [](Request& r) { r.prompt_ids = {-1}; });
  invalid("", [](Request& r) { r.prompt_ids = {}; });
  invalid("temperature", [](Request& r) { r.fields.temperature = -1; });
  invalid("top_p", [](Request& r) { r.fields.top_p = 2; });
  invalid("num_logprobs", [](Request& r) { r.fields.num_logprobs = int64_t{1} << 40; });
  invalid("has_seed", [](Request& r) { r.fields.has_seed = 7; });
  invalid("max_new_tokens", [](Request& r) { r.fields.max_new_tokens = -5; });
  EXPECT_STATUS(REGATTA_UNSUPPORTED,
                refused("no tokenizer", [](Request& r) { r.prompt_ids = {}, r.prompt = "a"; }));
  EXPECT_STATUS(REGATTA_UNSUPPORTED, refused("stop", [](Request& r) { r.stop = {"a"}; }));
  EXPECT(!engine.step());
}

void calls_on_callbacks(const char* folder) {
  regatta::Engine engine(folder, options_of(false));
  Heard heard;
  int num_next = 0;
  const int64_t id = engine.submit(request_of(engine, 50), [&](const regatta::Event& event) {
    heard.add(event);
    EXPECT_STATUS(REGATTA_BUSY, regatta_close(engine.handle()));
    EXPECT_STATUS(REGATTA_BUSY, regatta_step(engine.handle(), nullptr));
    EXPECT_STATUS(REGATTA_BUSY, regatta_wait(engine.handle()));
    EXPECT(said("callback"));
    if (event.is_last()) {
      EXPECT_STATUS(REGATTA_INVALID, regatta_cancel(engine.handle(), event.id));
    } else if (heard.num_tokens[event.id] == 3) {
      engine.cancel(event.id);
      engine.cancel(event.id);
      engine.submit(request_of(engine, 2),
                    [&](const regatta::Event& e) { num_next += e.is_last(); });
    }
    EXPECT(engine.counters().num_steps >= 0);
  });
  finish(engine);
  EXPECT(heard.finish[id] == REGATTA_CANCELLED && heard.num_tokens[id] == 3 && num_next == 1);
  EXPECT_STATUS(REGATTA_INVALID, regatta_cancel(engine.handle(), id));
  EXPECT_STATUS(REGATTA_INVALID, regatta_cancel(engine.handle(), 1000));
  EXPECT_STATUS(REGATTA_BUSY, regatta_wait(engine.handle()));

  engine.submit(request_of(engine, 5),
                [](const regatta::Event&) { throw std::logic_error("mine"); });
  bool thrown = false;
  try {
    finish(engine);
  } catch (const std::logic_error&) {
    thrown = true;
  }
  finish(engine);
  const regatta_counters counters = engine.counters();
  EXPECT(thrown && counters.num_running == 0 && counters.num_waiting == 0 &&
         counters.num_used_blocks == 0);
}

void close_with_requests(const char* folder) {
  for (const bool own_thread : {false, true}) {
    Heard heard;
    constexpr int kRequests = 12;
    {
      regatta::Engine engine(folder, options_of(own_thread));
      for (int i = 0; i < kRequests; ++i) {
        engine.submit(request_of(engine, 40),
                      [&](const regatta::Event& event) { heard.add(event); });
      }
      if (!own_thread) engine.step();
      if (own_thread) EXPECT_STATUS(REGATTA_BUSY, regatta_step(engine.handle(), nullptr));
    }
    EXPECT(heard.num_last.size() == kRequests);
    for (const auto& [id, count] : heard.num_last) EXPECT(count == 1 && heard.finish[id] > 0);
  }
}

// An engine that gets another one's place is closed first: its callbacks find what they need.
void moved_engines(const char* folder) {
  regatta::Engine engine(folder, options_of(false));
  int num_last = 0;
  engine.submit(request_of(engine, 40), [&](const regatta::Event& event) {
    num_last += event.is_last();
    throw std::logic_error("mine");
  });
  engine = regatta::Engine(folder, options_of(false));
  EXPECT(num_last == 1 && !engine.step());
}

void many_threads(const char* folder) {
  Heard heard;
  std::atomic<int> num_submitted{0}, num_cancelled{0};
  regatta::Engine engine(folder, options_of(true));
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    threads.emplace_back([&, seed] {
      std::minstd_rand dice(seed + 1);
      for (int i = 0; i < 3; ++i) {
        const int64_t id = engine.submit(request_of(engine, 1 + dice() % 8),
                                         [&](const regatta::Event& event) { heard.add(event); });
        ++num_submitted;
        if (dice() % 2) num_cancelled += regatta_cancel(engine.handle(), id) == REGATTA_OK;
        EXPECT(engine.counters().num_cache_blocks > 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  engine.wait();
  EXPECT(num_submitted == 300 && heard.num_last.size() == 300);
  int num_told = 0;
  for (const auto& [id, reason] : heard.finish) {
    EXPECT(heard.num_last[id] == 1 && (reason == REGATTA_LENGTH || reason == REGATTA_CANCELLED));
    num_told += reason == REGATTA_CANCELLED;
  }
  EXPECT(num_told <= num_cancelled);
  const regatta_counters counters = engine.counters();
  EXPECT(counters.num_used_blocks == 0 && counters.num_running == 0);
  EXPECT(counters.num_free_blocks == counters.num_cache_blocks);
}

// Greedy answers of two engines, each with a thread, are those of one alone.
void two_engines(const char* folder) {
  const auto answers = [&](regatta::Engine& engine, std::vector<int32_t>* ids) {
    for (int i = 0; i < 3; ++i) {
      engine.submit(request_of(engine, 12), [ids](const regatta::Event& event) {
        ids->insert(ids->end(), event.ids, event.ids + event.num_ids);
      });
      engine.wait();
    }
  };
  std::vector<int32_t> first, second, alone;
  {
    regatta::Engine one(folder, options_of(true)), two(folder, options_of(true));
    std::thread beside([&] { answers(two, &second); });
    answers(one, &first);
    beside.join();
  }
  regatta::Engine engine(folder, options_of(true));
  answers(engine, &alone);
  EXPECT(alone.size() == 36 && first == alone && second == alone);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  wrong_arguments(argv[1]);
  structs_of_other_sizes(argv[1]);
  requests_that_are_wrong(argv[1]);
  calls_on_callbacks(argv[1]);
  close_with_requests(argv[1]);
  moved_engines(argv[1]);
  many_threads(argv[1]);
  two_engines(argv[1]);
  std::printf("all is as promised\n");
}
