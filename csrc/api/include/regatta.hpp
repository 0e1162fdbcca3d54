// RAII over regatta.h: an engine that closes itself, errors and exceptions of callbacks as
// exceptions of the caller's.
//
//   regatta::Engine engine("folder");
//   regatta::Request request(engine);
//   request.prompt_ids = {1, 2, 3};
//   engine.submit(request, [](const regatta::Event& event) { ... });
//   while (engine.step()) {
//   }
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "regatta.h"

namespace regatta {

struct Error : std::runtime_error {
  explicit Error(regatta_status code) : std::runtime_error(regatta_error()), status(code) {}
  regatta_status status;
};

inline void check(regatta_status status) {
  if (status != REGATTA_OK) throw Error(status);
}

struct Options : regatta_options {
  Options() { check(regatta_options_init(this, sizeof(regatta_options))); }
};

inline regatta_memory sum_memory(const std::string& folder, const Options& options = {}) {
  regatta_memory memory = {};
  memory.struct_size = sizeof memory;
  check(regatta_sum_memory(folder.c_str(), &options, &memory));
  return memory;
}

inline void verify(const std::string& folder) { check(regatta_verify(folder.c_str())); }

// What is new of a request. Views are valid during the callback.
struct Event : regatta_event {
  std::string_view new_text() const { return {text, static_cast<size_t>(text_size)}; }
  bool is_last() const { return finish != REGATTA_UNFINISHED; }
};

using Callback = std::function<void(const Event&)>;

class Engine;

// Fields that are lists have owners here; the rest is regatta_request's, in `fields`.
struct Request {
  explicit Request(const Engine& engine);

  regatta_request fields;
  std::vector<int32_t> prompt_ids;
  std::string prompt;  // taken where prompt_ids is empty
  std::vector<std::pair<int32_t, double>> logit_bias;
  std::vector<std::vector<int32_t>> bad_words;
  std::vector<int32_t> stop_ids;
  std::vector<std::string> stop;
};

class Engine {
 public:
  explicit Engine(const std::string& folder, const Options& options = {}) : state_(new State) {
    regatta_engine* opened = nullptr;
    check(regatta_open(folder.c_str(), &options, &opened));
    engine_.reset(opened);
  }

  Engine(Engine&&) = default;
  // What was here is closed while its callbacks have their state.
  Engine& operator=(Engine&& other) noexcept {
    engine_ = std::move(other.engine_);
    state_ = std::move(other.state_);
    return *this;
  }

  regatta_engine* handle() const { return engine_.get(); }

  regatta_info info() const {
    regatta_info info = {};
    info.struct_size = sizeof info;
    check(regatta_describe(handle(), &info));
    return info;
  }

  regatta_counters counters() const {
    regatta_counters counters = {};
    counters.struct_size = sizeof counters;
    check(regatta_count(handle(), &counters));
    return counters;
  }

  // What a callback throws ends its request, and step() or wait() throws it on.
  int64_t submit(const Request& request, Callback callback) {
    regatta_request given = request.fields;
    std::vector<int32_t> bias_ids;
    std::vector<double> biases;
    for (const auto& [id, bias] : request.logit_bias) {
      bias_ids.push_back(id);
      biases.push_back(bias);
    }
    std::vector<regatta_ids> words;
    for (const auto& word : request.bad_words) words.push_back({word.data(), word.size()});
    std::vector<regatta_string> stop;
    for (const auto& text : request.stop) stop.push_back({text.data(), text.size()});
    if (request.prompt_ids.empty() && !request.prompt.empty()) {
      given.prompt = {request.prompt.data(), request.prompt.size()};
    } else {
      given.prompt_ids = {request.prompt_ids.data(), request.prompt_ids.size()};
    }
    given.bias_ids = bias_ids.data(), given.biases = biases.data();
    given.num_biases = biases.size();
    given.bad_words = words.data(), given.num_bad_words = words.size();
    given.stop_ids = {request.stop_ids.data(), request.stop_ids.size()};
    given.stop = stop.data(), given.num_stop = stop.size();
    auto caller = std::make_unique<Caller>(Caller{state_.get(), handle(), std::move(callback)});
    given.callback = call, given.user = caller.get();
    int64_t id = 0;
    check(regatta_submit(handle(), &given, &id));
    caller.release();  // its last event deletes it
    return id;
  }

  void cancel(int64_t id) { check(regatta_cancel(handle(), id)); }

  // Whether there was anything to do.
  bool step() {
    int64_t ran = 0;
    const regatta_status status = regatta_step(handle(), &ran);
    state_->rethrow();
    check(status);
    return ran != 0;
  }

  void wait() {
    const regatta_status status = regatta_wait(handle());
    state_->rethrow();
    check(status);
  }

 private:
  struct State {
    std::mutex mutex;
    std::exception_ptr thrown;  // the first one of a callback

    void rethrow() {
      std::exception_ptr first;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        first = std::exchange(thrown, nullptr);
      }
      if (first) std::rethrow_exception(first);
    }
  };
  struct Caller {
    State* state;
    regatta_engine* engine;
    Callback callback;
  };
  struct Close {
    void operator()(regatta_engine* engine) const { regatta_close(engine); }
  };

  static void call(void* user, const regatta_event* event) {
    auto* const caller = static_cast<Caller*>(user);
    const bool is_last = event->finish != REGATTA_UNFINISHED;
    try {
      Event given;
      static_cast<regatta_event&>(given) = *event;
      if (caller->callback) caller->callback(given);
    } catch (...) {
      {
        const std::lock_guard<std::mutex> lock(caller->state->mutex);
        if (!caller->state->thrown) caller->state->thrown = std::current_exception();
      }
      caller->callback = nullptr;
      if (!is_last) regatta_cancel(caller->engine, event->id);
    }
    if (is_last) delete caller;
  }

  std::unique_ptr<State> state_;
  std::unique_ptr<regatta_engine, Close> engine_;  // closed first: callbacks use the state
};

inline Request::Request(const Engine& engine) {
  check(regatta_request_init(engine.handle(), &fields, sizeof fields));
}

}  // namespace regatta
