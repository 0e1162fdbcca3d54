#include "engine/engine.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "engine/batch.h"
#include "engine/checks.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/stops.h"

namespace regatta::engine {
namespace {

constexpr int64_t kDefaultBudget = 512;  // tokens of a step

// A token of each span that samples, and what is measured of it.
struct Chosen {
  Ids tokens;
  std::vector<TokenLogprobs> logprobs;
};

std::string placing_salt(const model::Positions& positions, const model::Places& places) {
  const int64_t first_row = places.first_row;
  if (positions.kind == model::Positions::kPlain) return "";
  return {reinterpret_cast<const char*>(&first_row), sizeof first_row};
}

class EngineOfNetwork final : public Engine {
 public:
  EngineOfNetwork(std::unique_ptr<model::Network> network, std::shared_ptr<const Text> text,
                  const SchedulerConfig& config, const EngineOptions& options)
      : network_(std::move(network)),
        text_(std::move(text)),
        config_(config),
        own_thread_(options.own_thread),
        scheduler_(config),
        sampler_(options.seed, network_->facts().vocab_size) {
    count();
    if (own_thread_) thread_ = std::thread([this] { step_until_closed(); });
  }
  ~EngineOfNetwork() override {
    const Status closed = close();
    (void)closed;  // of a callback alone, which must not delete the engine
  }

  const model::NetworkFacts& facts() const override { return network_->facts(); }
  const Text* text() const override { return text_.get(); }

  Status submit(Request request, OnUpdate on_update, int64_t* id) override;
  Status cancel(int64_t id) override;
  Status step(bool* ran) override;
  Status wait() override;
  Status close() override;

  Counters counters() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    Counters counters = counters_;
    counters.num_waiting += int64_t(submitted_.size());
    return counters;
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Of any thread, with the lock.
  bool is_on_callback() const { return is_stepping_ && stepper_ == std::this_thread::get_id(); }
  void begin_step() {
    is_stepping_ = true;
    stepper_ = std::this_thread::get_id();
  }
  void end_step() {
    is_stepping_ = false;
    changed_.notify_all();
  }

  // Of the thread that steps, without the lock.
  void step_until_closed();
  bool run_step();
  std::vector<Sequence*> take_in();
  void run_apart(const Span* begin, const Span* end, Chosen* chosen);
  Status run(const std::vector<Span>& spans, Chosen* chosen);
  void fail(Sequence* sequence, const std::string& message);
  void count();
  void end_all(FinishReason reason, const std::string& error);
  void forget(const std::vector<Sequence*>& ended);
  void tell(Sequence* sequence, Update update);

  const std::unique_ptr<model::Network> network_;
  const std::shared_ptr<const Text> text_;
  const SchedulerConfig config_;
  const bool own_thread_;

  // Of the thread that steps.
  Scheduler scheduler_;
  Sampler sampler_;
  StepBuffers buffers_;
  model::PlacedRows placed_;
  std::vector<float> logits_;
  std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences_;  // that were taken in

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // With the lock.
  std::vector<std::unique_ptr<Sequence>> submitted_;  // not taken in yet
  std::vector<int64_t> cancelled_;
  std::unordered_set<int64_t> unfinished_;
  int64_t num_submitted_ = 0;
  bool is_stepping_ = false;
  std::thread::id stepper_;
  bool is_closing_ = false, is_closed_ = false;
  std::string broken_;  // why nothing can be queued any more
  Counters counters_;

  std::thread thread_;  // the last one: it uses all of the above
};

Status EngineOfNetwork::submit(Request request, OnUpdate on_update, int64_t* id) {
  const model::NetworkFacts& facts = network_->facts();
  REGATTA_RETURN_IF_ERROR(check_request(request, facts.vocab_size, text_ != nullptr));
  auto sequence = std::make_unique<Sequence>();
  if (text_) {
    AnswerText::Hidden hidden;
    REGATTA_RETURN_IF_ERROR(find_special_stops(*text_, &request, &hidden));
    std::unique_ptr<TextStream> stream;
    REGATTA_RETURN_IF_ERROR(text_->stream(request.ids, &stream));
    sequence->answer = std::make_unique<AnswerText>(std::move(stream), request.stop,
                                                    request.include_stop, std::move(hidden));
  }
  sequence->adjustment = Adjustment(request, facts.stop_ids);
  sequence->ids = request.ids;
  sequence->num_prompt_tokens = int64_t(request.ids.size());
  sequence->places = facts.positions.of(request.ids);
  sequence->runs_whole = facts.positions.runs_whole();
  sequence->chain = BlockManager::chain_of(placing_salt(facts.positions, sequence->places));
  sequence->request = std::move(request);
  sequence->on_update = std::move(on_update);
  REGATTA_RETURN_IF_ERROR(set_limits(config_, sequence.get()));

  const Lock lock(mutex_);
  if (is_closing_) return Status::error("the engine is closed; make another one");
  if (!broken_.empty()) return Status::error("the engine cannot go on: " + broken_);
  *id = sequence->id = num_submitted_++;
  unfinished_.insert(*id);
  submitted_.push_back(std::move(sequence));
  changed_.notify_all();
  return {};
}

Status EngineOfNetwork::cancel(int64_t id) {
  const Lock lock(mutex_);
  if (unfinished_.count(id) == 0) {
    return Status::error("request " + std::to_string(id) + " is unknown or has ended");
  }
  cancelled_.push_back(id);
  return {};
}

Status EngineOfNetwork::step(bool* ran) {
  *ran = false;
  Lock lock(mutex_);
  if (own_thread_)
    return Status::error(
        "a thread of the engine steps; wait(), or make the engine "
        "without own_thread");
  if (is_on_callback()) return Status::error("step() was called on a callback of a step");
  if (is_stepping_) return Status::error("another thread steps; call step() on one thread");
  if (is_closing_) return Status::error("the engine is closed; make another one");
  begin_step();
  lock.unlock();
  *ran = run_step();
  lock.lock();
  end_step();
  return {};
}

Status EngineOfNetwork::wait() {
  Lock lock(mutex_);
  if (!own_thread_)
    return Status::error(
        "the caller steps; call step(), or make the engine with "
        "own_thread");
  if (is_on_callback()) return Status::error("wait() was called on a callback of a step");
  changed_.wait(lock, [this] { return unfinished_.empty() && !is_stepping_; });
  return {};
}

Status EngineOfNetwork::close() {
  Lock lock(mutex_);
  if (is_on_callback()) {
    return Status::error(
        "close() was called on a callback, which a step waits for; cancel the "
        "requests, and close() behind the step");
  }
  if (is_closing_) {
    changed_.wait(lock, [this] { return is_closed_; });
    return {};
  }
  is_closing_ = true;
  changed_.notify_all();
  if (own_thread_) {
    lock.unlock();
    thread_.join();
    lock.lock();
  } else {
    changed_.wait(lock, [this] { return !is_stepping_; });
    begin_step();
    lock.unlock();
    end_all(FinishReason::kAbort, "");
    lock.lock();
    end_step();
  }
  is_closed_ = true;
  changed_.notify_all();
  return {};
}

void EngineOfNetwork::step_until_closed() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_closing_ || !unfinished_.empty(); });
    begin_step();
    const bool closes = is_closing_;
    lock.unlock();
    if (closes) {
      end_all(FinishReason::kAbort, "");
    } else {
      run_step();
    }
    lock.lock();
    end_step();
    if (closes) return;
  }
}

// Whether there was anything to do. What throws, memory above all, ends all requests: no one knows
// then what the scheduler has.
bool EngineOfNetwork::run_step() {
  try {
    const std::vector<Sequence*> cancelled = take_in();
    const Batch batch = scheduler_.schedule();
    Chosen chosen;
    if (!batch.spans.empty()) {
      run_apart(batch.spans.data(), batch.spans.data() + batch.spans.size(), &chosen);
    }
    std::vector<Sequence*> ended = cancelled;
    for (const Span& span : batch.spans) {
      if (span.sequence->status == SequenceStatus::kFinished) ended.push_back(span.sequence);
    }
    const std::vector<Sequence*> finished =
        scheduler_.update(batch, chosen.tokens, network_->facts().stop_ids);
    ended.insert(ended.end(), finished.begin(), finished.end());
    count();
    forget(ended);
    for (Sequence* sequence : cancelled) tell(sequence, {});
    size_t row = 0;
    for (const Span& span : batch.spans) {
      Update update;
      if (span.samples) {
        const int32_t token = chosen.tokens[row];
        if (token >= 0) update.ids.push_back(token);
        if (token >= 0 && span.sequence->request.logprobs >= 0) {
          update.logprobs.push_back(std::move(chosen.logprobs[row]));
        }
        ++row;
      }
      const bool has_ended = span.sequence->status == SequenceStatus::kFinished;
      if (span.samples || has_ended) tell(span.sequence, std::move(update));
    }
    return !batch.spans.empty() || !cancelled.empty();
  } catch (const std::exception& error) {
    {
      const Lock lock(mutex_);
      broken_ = error.what();
    }
    end_all(FinishReason::kError, "the engine cannot go on: " + broken_);
    return true;
  }
}

// Takes in what was submitted, and ends what was cancelled, which it returns.
std::vector<Sequence*> EngineOfNetwork::take_in() {
  std::vector<std::unique_ptr<Sequence>> submitted;
  std::vector<int64_t> ids;
  {
    const Lock lock(mutex_);
    submitted.swap(submitted_);
    ids.swap(cancelled_);
  }
  for (std::unique_ptr<Sequence>& sequence : submitted) {
    scheduler_.add(sequence.get());
    const int64_t id = sequence->id;
    sequences_[id] = std::move(sequence);
  }
  std::vector<Sequence*> cancelled;
  for (const int64_t id : ids) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) continue;  // it ended since, or was cancelled twice
    Sequence* sequence = found->second.get();
    if (sequence->status == SequenceStatus::kFinished) continue;
    scheduler_.end(sequence, FinishReason::kAbort);
    cancelled.push_back(sequence);
  }
  return cancelled;
}

// Runs spans together; where that fails, each half of them, and so on: a request that makes a step
// fail ends alone. A part may write the same cache slots again.
void EngineOfNetwork::run_apart(const Span* begin, const Span* end, Chosen* chosen) {
  Chosen own;
  const Status status = run({begin, end}, &own);
  if (!status.ok() && end - begin > 1) {
    const Span* middle = begin + (end - begin) / 2;
    run_apart(begin, middle, chosen);
    run_apart(middle, end, chosen);
    return;
  }
  if (!status.ok()) {
    fail(begin->sequence, status.message());
    own.tokens.assign(begin->samples, -1);
    own.logprobs.assign(begin->samples, {});
  }
  chosen->tokens.insert(chosen->tokens.end(), own.tokens.begin(), own.tokens.end());
  std::move(own.logprobs.begin(), own.logprobs.end(), std::back_inserter(chosen->logprobs));
}

Status EngineOfNetwork::run(const std::vector<Span>& spans, Chosen* chosen) {
  std::vector<const Sequence*> sampling;
  std::vector<model::Places> places;
  for (const Span& span : spans) {
    places.push_back(span.sequence->places);
    if (span.samples) sampling.push_back(span.sequence);
  }
  const model::NetworkFacts& facts = network_->facts();
  const model::StepRows rows = buffers_.fill(spans, config_.block_size);
  if (logits_.size() < sampling.size() * facts.vocab_size) {
    logits_.resize(sampling.size() * facts.vocab_size);
  }
  REGATTA_RETURN_IF_ERROR(network_->run(placed_.place(facts.positions, rows, places),
                                        sampling.empty() ? nullptr : logits_.data()));
  if (sampling.empty()) return {};
  REGATTA_RETURN_IF_ERROR(
      sampler_.choose(sampling, logits_.data(), &chosen->tokens, &chosen->logprobs));
  for (size_t row = 0; row < sampling.size(); ++row) {
    if (chosen->tokens[row] >= 0) continue;
    fail(sequences_.at(sampling[row]->id).get(),
         "it has no finite largest logit to draw from; the weights or the dtype do not suit the "
         "model");
  }
  return {};
}

void EngineOfNetwork::fail(Sequence* sequence, const std::string& message) {
  scheduler_.end(sequence, FinishReason::kError);
  sequence->error = message;
}

void EngineOfNetwork::count() {
  const Lock lock(mutex_);
  counters_ = scheduler_.counters();
  counters_.num_running = scheduler_.num_running();
  counters_.num_waiting = scheduler_.num_waiting();
  counters_.num_cache_blocks = scheduler_.blocks().num_blocks();
  counters_.num_used_blocks = scheduler_.blocks().num_used_blocks();
  counters_.num_free_blocks = scheduler_.blocks().num_free_blocks();
}

void EngineOfNetwork::end_all(FinishReason reason, const std::string& error) {
  take_in();
  const std::vector<Sequence*> unfinished = scheduler_.unfinished();
  for (Sequence* sequence : unfinished) {
    scheduler_.end(sequence, reason);
    sequence->error = error;
  }
  count();
  std::vector<Sequence*> ended;  // those whose end was not told yet, cancelled ones included
  for (const auto& each : sequences_) ended.push_back(each.second.get());
  std::sort(ended.begin(), ended.end(),
            [](const Sequence* a, const Sequence* b) { return a->id < b->id; });
  forget(ended);
  for (Sequence* sequence : ended) tell(sequence, {});
}

// From now on these cannot be cancelled: their last updates follow.
void EngineOfNetwork::forget(const std::vector<Sequence*>& ended) {
  const Lock lock(mutex_);
  for (const Sequence* sequence : ended) unfinished_.erase(sequence->id);
}

void EngineOfNetwork::tell(Sequence* sequence, Update update) {
  update.request_id = sequence->id;
  update.num_cached_tokens = sequence->num_cached_tokens;
  update.finish_reason = sequence->finish_reason;
  if (sequence->answer) {
    const bool has_ended = update.finish_reason != FinishReason::kNone;
    const Status status = has_ended ? sequence->answer->finish() : Status();
    if (!status.ok() && update.finish_reason != FinishReason::kAbort) {
      update.finish_reason = FinishReason::kError;
      sequence->error = "its text cannot be made: " + status.message();
    }
    update.text = sequence->answer->take();
  }
  update.error = sequence->error;
  std::unique_ptr<Sequence> own;  // gone behind its last update, which is told once
  if (update.finish_reason != FinishReason::kNone) {
    const auto found = sequences_.find(sequence->id);
    own = std::move(found->second);
    sequences_.erase(found);
  }
  if (sequence->on_update) sequence->on_update(update);
}

}  // namespace

Status Engine::make(std::unique_ptr<model::Network> network, std::shared_ptr<const Text> text,
                    const EngineOptions& options, std::unique_ptr<Engine>* engine) {
  const model::NetworkFacts& facts = network->facts();
  SchedulerConfig config;
  config.max_num_seqs = options.batch_size;
  config.max_length = options.max_length == 0 ? facts.max_length : options.max_length;
  config.block_size = facts.block_size;
  config.num_blocks = facts.num_blocks;
  config.reserve_full = options.reserve_full;
  config.prefix_caching = options.prefix_caching;
  config.chunked_prefill = options.chunked_prefill;
  config.separate_steps = options.separate_steps;
  config.max_num_batched_tokens = options.max_num_batched_tokens;
  if (options.max_num_batched_tokens == 0) {
    int64_t budget = std::max(kDefaultBudget, options.batch_size);
    if (!options.chunked_prefill) budget = config.max_length;
    if (facts.positions.runs_whole()) budget = std::max(budget, config.max_length);
    config.max_num_batched_tokens = budget;
  }
  REGATTA_RETURN_IF_ERROR(config.check());
  if (config.max_length > facts.max_length) {
    return Status::error("max_length " + std::to_string(config.max_length) +
                         " is more than the network's (allowed: 2 to " +
                         std::to_string(facts.max_length) + "); lower it");
  }
  if (options.seed < 0) {
    return Status::error("seed " + std::to_string(options.seed) +
                         " is not supported (allowed: 0 to 2**63 - 1)");
  }
  try {
    *engine =
        std::make_unique<EngineOfNetwork>(std::move(network), std::move(text), config, options);
  } catch (const std::exception& error) {  // no memory, or no thread
    return Status::error(std::string("the engine cannot be made: ") + error.what());
  }
  return {};
}

}  // namespace regatta::engine
