// Requests over a network, step by step, on one thread: no lock, no callback. See engine.h.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/batch.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "model/network.h"

namespace regatta::engine {

// What is new of a request, and whom to tell. Of one that has ended the request itself.
struct News {
  Sequence* sequence;
  Update update;
  std::unique_ptr<Sequence> ended;
};

class Stepper {
 public:
  // config.check() is ok. The network must live as long as this.
  Stepper(model::Network* network, const SchedulerConfig& config, int64_t seed);

  // A request with limits, which set_limits() has set. Left to the caller where memory ends ahead
  // of it; else end_all() knows it.
  void add(std::unique_ptr<Sequence>&& sequence);

  // Ends a request as kAbort; nothing where it has ended.
  void cancel(int64_t id);

  // Runs a step; false: there is nothing to run. What fails is one request's: see run_apart.
  bool step();

  // Ends each request that has not ended.
  void end_all(FinishReason reason, const std::string& error);

  // Since the last call, in the order of what happened.
  std::vector<News> take_news();

  Counters counters() const;

 private:
  // A token of each span that samples, -1 where there is none, and what is measured of it.
  struct Chosen {
    Ids tokens;
    std::vector<TokenLogprobs> logprobs;
  };
  void run_apart(const Span* begin, const Span* end, Chosen* chosen);
  Status run(const std::vector<Span>& spans, Chosen* chosen);
  void fail(Sequence* sequence, const std::string& message);
  void tell(Sequence* sequence, Update update);

  model::Network* const network_;
  const SchedulerConfig config_;
  Scheduler scheduler_;
  Sampler sampler_;
  StepBuffers buffers_;
  model::PlacedRows placed_;
  std::vector<float> logits_;
  std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences_;  // whose end was not told
  std::vector<News> news_;
};

}  // namespace regatta::engine
