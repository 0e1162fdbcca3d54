// The border: nothing throws past it.
#include "regatta.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "api/border.h"
#include "api/tokenizer.h"
#include "cpu/thread_pool.h"
#include "engine/engine.h"
#include "model/network.h"

using regatta::Status;
using regatta::api::check;
using regatta::api::Failure;
using regatta::api::give;
using regatta::api::guarded;
using regatta::api::require;
using regatta::api::taken;
using regatta::api::Tokenizer;
namespace engine = regatta::engine;
namespace model = regatta::model;

struct regatta_engine {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<engine::Engine> engine;
};

namespace {

constexpr size_t kMaxMessage = 2048;
thread_local char last_error[kMaxMessage];  // no destructor, and room for it where memory ends
thread_local const regatta_engine* calling_back = nullptr;  // whose callback this thread runs
constexpr int64_t kMaxThreads = 4096;

regatta_options default_options() {
  regatta_options options = {};
  options.struct_size = sizeof options;
  options.batch_size = engine::EngineOptions().batch_size;
  options.prefix_caching = 1;
  return options;
}

regatta_options options_of(const regatta_options* given) {
  const regatta_options options =
      given ? taken(given, default_options(), "options") : default_options();
  const auto check_count = [](const char* name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return;
    throw Failure{REGATTA_INVALID, std::string("options.") + name + " is " + std::to_string(value) +
                                       " (allowed: " + std::to_string(least) + " .. " +
                                       std::to_string(most) + ")"};
  };
  constexpr int64_t kMost = INT32_MAX;
  check_count("memory_limit", options.memory_limit, 0, INT64_MAX);
  check_count("num_blocks", options.num_blocks, 0, kMost);
  check_count("batch_size", options.batch_size, 1, kMost);
  check_count("max_num_batched_tokens", options.max_num_batched_tokens, 0, kMost);
  check_count("max_length", options.max_length, 0, kMost);
  check_count("num_threads", options.num_threads, 0, kMaxThreads);
  check_count("prefix_caching", options.prefix_caching, 0, 1);
  check_count("own_thread", options.own_thread, 0, 1);
  check_count("verify", options.verify, 0, 1);
  return options;
}

model::OpenOptions network_options(const regatta_options& options) {
  model::OpenOptions made;
  made.memory_limit = options.memory_limit;
  made.num_blocks = options.num_blocks;
  made.num_seqs = options.batch_size;
  made.max_step_tokens = options.max_num_batched_tokens
                             ? options.max_num_batched_tokens
                             : std::max<int64_t>(512, options.batch_size);
  made.max_length = options.max_length;
  made.shares_prefixes = options.prefix_caching != 0;
  return made;
}

engine::EngineOptions engine_options(const regatta_options& options) {
  engine::EngineOptions made;
  made.batch_size = options.batch_size;
  made.max_num_batched_tokens = options.max_num_batched_tokens;
  made.max_length = options.max_length;
  made.prefix_caching = options.prefix_caching != 0;
  made.seed = options.seed;
  made.own_thread = options.own_thread != 0;
  return made;
}

std::string megabytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

void open_into(const std::string& folder, const regatta_options& options, regatta_engine* made) {
  if (options.tokenizer != nullptr)
    made->tokenizer = std::make_shared<Tokenizer>(*options.tokenizer);
  if (options.verify) check(model::verify(folder), REGATTA_BAD_FOLDER);
  const model::OpenOptions wanted = network_options(options);
  model::MemorySum sum;
  if (options.log != nullptr) check(model::memory_sum(folder, wanted, &sum), REGATTA_BAD_FOLDER);
  std::unique_ptr<model::Network> network;
  check(model::open(folder, wanted, &network), REGATTA_BAD_FOLDER);
  const std::string type = network->facts().model_type;
  check(engine::Engine::make(std::move(network), made->tokenizer, engine_options(options),
                             &made->engine),
        REGATTA_INVALID);
  if (options.num_threads > 0) {
    regatta::cpu::set_num_threads(static_cast<int>(options.num_threads));
  }
  if (options.log == nullptr) return;
  const std::string text =
      folder + ": " + type + ", weights " + megabytes(sum.weights) + ", cache " +
      megabytes(sum.cache) + " (" + std::to_string(sum.num_blocks) + " blocks), a step " +
      megabytes(sum.step) + ", " + std::to_string(regatta::cpu::num_threads()) + " threads";
  options.log(options.log_user, REGATTA_LOG_INFO, text.c_str());
}

const engine::Engine& of(const regatta_engine* handle) {
  require(handle != nullptr, "engine is null");
  return *handle->engine;
}

engine::Engine& of(regatta_engine* handle) {
  require(handle != nullptr, "engine is null");
  return *handle->engine;
}

void refuse_on_callback(const regatta_engine* handle, const char* call) {
  if (calling_back != handle || handle == nullptr) return;
  throw Failure{REGATTA_BUSY, std::string(call) + " was called on a callback of the same engine"};
}

regatta_request default_request(const regatta_engine* handle) {
  const model::SamplingDefaults none;
  const model::SamplingDefaults& said = handle ? handle->engine->facts().sampling : none;
  regatta_request request = {};
  request.struct_size = sizeof request;
  request.max_new_tokens = said.max_new_tokens;
  request.temperature = said.temperature;
  request.top_k = said.top_k;
  request.top_p = said.top_p;
  request.min_p = said.min_p;
  request.typical_p = said.typical_p;
  request.repetition_penalty = said.repetition_penalty;
  request.no_repeat_ngram_size = said.no_repeat_ngram_size;
  request.num_logprobs = -1;
  return request;
}

std::vector<int32_t> ids_of(const regatta_ids& ids, const char* name) {
  if (ids.data == nullptr && ids.size > 0) {
    throw Failure{REGATTA_INVALID, std::string(name) + " has a size and is null"};
  }
  return {ids.data, ids.data + ids.size};
}

std::string string_of(const regatta_string& text, const char* name) {
  if (text.data == nullptr && text.size > 0) {
    throw Failure{REGATTA_INVALID, std::string(name) + " has a size and is null"};
  }
  return {text.data != nullptr ? text.data : "", text.size};
}

std::vector<int32_t> prompt_of(const regatta_engine& handle, const regatta_request& given) {
  if (given.prompt.data == nullptr) return ids_of(given.prompt_ids, "prompt_ids");
  require(given.prompt_ids.data == nullptr,
          "a request has both prompt_ids and prompt; leave one out");
  if (handle.tokenizer == nullptr) {
    throw Failure{REGATTA_UNSUPPORTED,
                  "a prompt is a text, and the engine has no tokenizer; give options.tokenizer, or "
                  "prompt_ids"};
  }
  std::vector<int32_t> ids;
  check(handle.tokenizer->encode(string_of(given.prompt, "prompt"), true, &ids), REGATTA_INVALID);
  return ids;
}

bool switch_of(const char* name, int64_t value) {
  if (value != 0 && value != 1) {
    throw Failure{REGATTA_INVALID,
                  std::string(name) + " is " + std::to_string(value) + " (allowed: 0, 1)"};
  }
  return value == 1;
}

engine::Sampling sampling_of(const regatta_request& given) {
  engine::Sampling made;
  made.temperature = given.temperature;
  made.top_k = given.top_k;
  made.top_p = given.top_p;
  made.min_p = given.min_p;
  made.typical_p = given.typical_p;
  made.repetition_penalty = given.repetition_penalty;
  made.presence_penalty = given.presence_penalty;
  made.frequency_penalty = given.frequency_penalty;
  made.no_repeat_ngram_size = given.no_repeat_ngram_size;
  if (switch_of("has_seed", given.has_seed)) made.seed = given.seed;
  require((given.bias_ids != nullptr && given.biases != nullptr) || given.num_biases == 0,
          "bias_ids or biases are null, and num_biases is not 0");
  for (size_t i = 0; i < given.num_biases; ++i) {
    made.logit_bias.emplace_back(given.bias_ids[i], given.biases[i]);
  }
  require(given.bad_words != nullptr || given.num_bad_words == 0,
          "bad_words is null, and num_bad_words is not 0");
  for (size_t i = 0; i < given.num_bad_words; ++i) {
    made.bad_words.push_back(ids_of(given.bad_words[i], "a bad word"));
  }
  return made;
}

engine::Request request_of(const regatta_engine& handle, const regatta_request& given) {
  engine::Request made;
  made.ids = prompt_of(handle, given);
  made.max_new_tokens = given.max_new_tokens;
  made.min_new_tokens = given.min_new_tokens;
  made.sampling = sampling_of(given);
  made.stop_ids = ids_of(given.stop_ids, "stop_ids");
  made.ignore_eos = switch_of("ignore_eos", given.ignore_eos);
  require(given.stop != nullptr || given.num_stop == 0, "stop is null, and num_stop is not 0");
  for (size_t i = 0; i < given.num_stop; ++i) {
    made.stop.push_back(string_of(given.stop[i], "a stop string"));
  }
  if (!made.stop.empty() && handle.tokenizer == nullptr) {
    throw Failure{REGATTA_UNSUPPORTED,
                  "stop strings need a tokenizer, and the engine has none; give options.tokenizer, "
                  "or stop_ids"};
  }
  made.include_stop = switch_of("include_stop", given.include_stop);
  if (given.num_logprobs < -1 || given.num_logprobs > INT32_MAX) {
    throw Failure{REGATTA_INVALID,
                  "num_logprobs is " + std::to_string(given.num_logprobs) + " (allowed: -1 .. 20)"};
  }
  made.logprobs = static_cast<int32_t>(given.num_logprobs);
  return made;
}

regatta_finish finish_of(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::kStop:
      return REGATTA_STOP;
    case engine::FinishReason::kLength:
      return REGATTA_LENGTH;
    case engine::FinishReason::kAbort:
      return REGATTA_CANCELLED;
    case engine::FinishReason::kError:
      return REGATTA_ERROR;
    case engine::FinishReason::kNone:
      break;
  }
  return REGATTA_UNFINISHED;
}

// Logprobs of an update as columns.
struct Columns {
  std::vector<float> logprobs, likeliest_logprobs;
  std::vector<int32_t> ranks, likeliest_ids;
  size_t num_likeliest = 0;

  explicit Columns(const std::vector<engine::TokenLogprobs>& tokens) {
    for (const auto& token : tokens) num_likeliest = std::max(num_likeliest, token.top.size());
    for (const auto& token : tokens) {
      logprobs.push_back(token.token.logprob);
      ranks.push_back(token.token.rank);
      for (size_t i = 0; i < num_likeliest; ++i) {
        const bool is_there = i < token.top.size();
        likeliest_ids.push_back(is_there ? token.top[i].id : -1);
        likeliest_logprobs.push_back(is_there ? token.top[i].logprob : 0.0f);
      }
    }
  }
};

void tell(const regatta_engine* handle, regatta_callback callback, void* user,
          const engine::Update& update) {
  const Columns columns(update.logprobs);
  regatta_event event = {};
  event.struct_size = sizeof event;
  event.id = update.request_id;
  event.ids = update.ids.data();
  event.num_ids = static_cast<int64_t>(update.ids.size());
  event.text = update.text.c_str();
  event.text_size = static_cast<int64_t>(update.text.size());
  if (!update.logprobs.empty()) {
    event.logprobs = columns.logprobs.data();
    event.ranks = columns.ranks.data();
    event.num_likeliest = static_cast<int64_t>(columns.num_likeliest);
    event.likeliest_ids = columns.likeliest_ids.data();
    event.likeliest_logprobs = columns.likeliest_logprobs.data();
  }
  event.finish = finish_of(update.finish_reason);
  event.error = event.finish == REGATTA_ERROR ? update.error.c_str() : nullptr;
  event.num_cached_tokens = update.num_cached_tokens;
  const regatta_engine* const before = std::exchange(calling_back, handle);
  try {
    callback(user, &event);
  } catch (...) {  // of a callback in C++: the engine has nobody to give it to
  }
  calling_back = before;
}

}  // namespace

regatta_status regatta::api::failed(regatta_status status, const char* message) noexcept {
  size_t size = std::min(std::strlen(message), sizeof last_error - 1);
  // A character that would be cut goes as a whole: bytes behind its first begin with 10.
  if (message[size] != 0) {
    while (size > 0 && (static_cast<unsigned char>(message[size]) & 0xC0u) == 0x80u) --size;
  }
  std::memcpy(last_error, message, size);
  last_error[size] = 0;
  return status;
}

uint32_t regatta_version(void) { return REGATTA_VERSION; }

const char* regatta_error(void) { return last_error; }

regatta_status regatta_options_init(regatta_options* options, size_t struct_size) {
  return guarded([&] {
    require(options != nullptr, "options is null");
    give(default_options(), options, struct_size, "options");
  });
}

regatta_status regatta_request_init(const regatta_engine* handle, regatta_request* request,
                                    size_t struct_size) {
  return guarded([&] {
    require(request != nullptr, "request is null");
    give(default_request(handle), request, struct_size, "request");
  });
}

regatta_status regatta_sum_memory(const char* folder, const regatta_options* options,
                                  regatta_memory* memory) {
  return guarded([&] {
    require(folder != nullptr && memory != nullptr, "folder or memory is null");
    const size_t size = memory->struct_size;
    model::MemorySum sum;
    check(model::memory_sum(folder, network_options(options_of(options)), &sum),
          REGATTA_BAD_FOLDER);
    give({0, sum.weights, sum.cache, sum.step, sum.limit, sum.num_blocks}, memory, size, "memory");
  });
}

regatta_status regatta_verify(const char* folder) {
  return guarded([&] {
    require(folder != nullptr, "folder is null");
    check(model::verify(folder), REGATTA_BAD_FOLDER);
  });
}

regatta_status regatta_tokenizer_file(const char* folder, char* path, size_t capacity,
                                      size_t* size) {
  return guarded([&] {
    require(folder != nullptr && size != nullptr && (path != nullptr || capacity == 0),
            "an argument is null");
    model::TokenizerOf found;
    check(model::tokenizer_of(folder, &found), REGATTA_BAD_FOLDER);
    if (found.file.empty()) {
      throw Failure{REGATTA_UNSUPPORTED,
                    std::string(folder) + " has no tokenizer: " + found.why + "; it runs on ids"};
    }
    *size = found.file.size() + 1;
    if (*size > capacity) {
      throw Failure{REGATTA_TOO_SMALL, "the path has " + std::to_string(*size) +
                                           " bytes, the buffer room for " +
                                           std::to_string(capacity)};
    }
    std::memcpy(path, found.file.c_str(), *size);
  });
}

regatta_status regatta_open(const char* folder, const regatta_options* options,
                            regatta_engine** handle) {
  return guarded([&] {
    require(handle != nullptr, "engine is null");
    *handle = nullptr;
    require(folder != nullptr, "folder is null");
    auto made = std::make_unique<regatta_engine>();
    open_into(folder, options_of(options), made.get());
    *handle = made.release();
  });
}

regatta_status regatta_close(regatta_engine* handle) {
  return guarded([&] {
    if (handle == nullptr) return;
    refuse_on_callback(handle, "regatta_close");
    check(handle->engine->close(), REGATTA_BUSY);
    delete handle;
  });
}

regatta_status regatta_describe(const regatta_engine* handle, regatta_info* info) {
  return guarded([&] {
    require(info != nullptr, "info is null");
    const model::NetworkFacts& facts = of(handle).facts();
    give({0, facts.model_type.c_str(), regatta::dtype_name(facts.dtype), facts.vocab_size,
          facts.max_length, facts.block_size, facts.num_blocks, facts.block_bytes,
          facts.stop_ids.data(), static_cast<int64_t>(facts.stop_ids.size())},
         info, info->struct_size, "info");
  });
}

regatta_status regatta_count(const regatta_engine* handle, regatta_counters* counters) {
  return guarded([&] {
    require(counters != nullptr, "counters is null");
    const engine::Counters now = of(handle).counters();
    give({0, now.num_steps, now.num_scheduled_tokens, now.num_prompt_tokens, now.num_output_tokens,
          now.num_prefix_hit_tokens, now.num_preemptions, now.num_running, now.num_waiting,
          now.num_cache_blocks, now.num_used_blocks, now.num_free_blocks},
         counters, counters->struct_size, "counters");
  });
}

regatta_status regatta_submit(regatta_engine* handle, const regatta_request* given, int64_t* id) {
  return guarded([&] {
    engine::Engine& runs = of(handle);
    require(given != nullptr, "request is null");
    const regatta_request request = taken(given, default_request(handle), "request");
    engine::OnUpdate on_update = [](const engine::Update&) {};
    if (request.callback != nullptr) {
      on_update = [handle, callback = request.callback, user = request.user](
                      const engine::Update& update) { tell(handle, callback, user, update); };
    }
    int64_t given_id = -1;
    check(runs.submit(request_of(*handle, request), std::move(on_update), &given_id),
          REGATTA_INVALID);
    if (id != nullptr) *id = given_id;
  });
}

regatta_status regatta_cancel(regatta_engine* handle, int64_t id) {
  return guarded([&] { check(of(handle).cancel(id), REGATTA_INVALID); });
}

regatta_status regatta_step(regatta_engine* handle, int64_t* ran) {
  return guarded([&] {
    engine::Engine& runs = of(handle);
    refuse_on_callback(handle, "regatta_step");
    bool has_run = false;
    check(runs.step(&has_run), REGATTA_BUSY);
    if (ran != nullptr) *ran = has_run ? 1 : 0;
  });
}

regatta_status regatta_wait(regatta_engine* handle) {
  return guarded([&] {
    engine::Engine& runs = of(handle);
    refuse_on_callback(handle, "regatta_wait");
    check(runs.wait(), REGATTA_BUSY);
  });
}
