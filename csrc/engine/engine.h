// Runs many requests over one network: continuous batching, a paged cache that shares prefixes,
// sampling, text. The rules are those of predict/engine, step by step.
//
//   std::unique_ptr<Engine> engine;
//   Status status = Engine::make(std::move(network), text, options, &engine);
//   status = engine->submit(request, [](const Update& update) { ... }, &id);
//   for (bool ran = true; ran && status.ok();) status = engine->step(&ran);
#pragma once

#include <memory>

#include "engine/request.h"
#include "engine/text.h"
#include "model/network.h"

namespace regatta::engine {

struct EngineOptions {
  int64_t batch_size = 8;  // requests in a step, at most
  // Tokens of a step. 0: 512, or batch_size if that is more; max_length where prompts run whole.
  int64_t max_num_batched_tokens = 0;
  int64_t max_length = 0;       // prompt and answer; 0: the network's, which is the most
  bool prefix_caching = true;   // full blocks are kept and shared
  bool reserve_full = false;    // a request takes blocks of its whole length at once
  bool chunked_prefill = true;  // prompts may be cut over steps
  bool separate_steps = false;  // prompts and decoding requests take turns
  int64_t seed = 0;             // of requests that have none
  bool own_thread = false;      // a thread of the engine steps; else the caller
};

// Counts since the engine was made, and what holds now. num_free_blocks + num_used_blocks is
// num_cache_blocks at any time.
struct Counters {
  int64_t num_steps = 0;
  int64_t num_scheduled_tokens = 0;   // that these computed
  int64_t num_prompt_tokens = 0;      // of prompts that were taken in
  int64_t num_output_tokens = 0;      // generated
  int64_t num_prefix_hit_tokens = 0;  // of prompts, that the prefix cache had
  int64_t num_preemptions = 0;
  int64_t num_running = 0;  // requests in the batch
  int64_t num_waiting = 0;  // submitted ones and preempted ones
  int64_t num_cache_blocks = 0;
  int64_t num_used_blocks = 0;  // that unfinished requests hold
  int64_t num_free_blocks = 0;  // those with a cached prefix included
};

class Engine {
 public:
  // text: null where the folder has no tokenizer; shared by as many engines as like. An error says
  // which option cannot work.
  static Status make(std::unique_ptr<model::Network> network, std::shared_ptr<const Text> text,
                     const EngineOptions& options, std::unique_ptr<Engine>* engine);

  virtual ~Engine() = default;  // as close(), from a thread that may call it

  virtual const model::NetworkFacts& facts() const = 0;
  virtual const Text* text() const = 0;  // null where there is none

  // Queues a request; *id is its number, 0 for the first. An error says what is wrong with it or
  // why nothing can be queued; then on_update is never called. Any thread.
  virtual Status submit(Request request, OnUpdate on_update, int64_t* id) = 0;

  // Ends a request as kAbort; its last update comes on the thread that steps, ahead of the next
  // step. An error where the id is unknown or the request has ended. Any thread.
  virtual Status cancel(int64_t id) = 0;

  // Runs one step and calls back; *ran is false where there was nothing to do. An error with
  // own_thread, on a callback, and while another thread steps; a step of the network that fails
  // ends its requests as kError and is none.
  virtual Status step(bool* ran) = 0;

  // Waits until no request is unfinished; only with own_thread, and not from a callback.
  virtual Status wait() = 0;

  // Ends each unfinished request as kAbort, calling back, and refuses what comes later. Waits for
  // a running step. An error from a callback. A second call does nothing.
  virtual Status close() = 0;

  virtual Counters counters() const = 0;  // as the last step left them; any thread
};

}  // namespace regatta::engine
