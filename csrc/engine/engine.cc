#include "engine/engine.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "engine/checks.h"
#include "engine/stepper.h"
#include "engine/stops.h"

namespace regatta::engine {
namespace {

constexpr int64_t kDefaultBudget = 512;  // tokens of a step

// The salt of a request's blocks: what positions make of the same tokens differs by the first row.
std::string salt_of(const model::Positions& positions, const model::Places& places) {
  const int64_t first_row = places.first_row;
  if (positions.kind == model::Positions::kPlain) return "";
  return {reinterpret_cast<const char*>(&first_row), sizeof first_row};
}

// Doors for any thread, over a Stepper that one thread at a time has.
class EngineOfNetwork final : public Engine {
 public:
  EngineOfNetwork(std::unique_ptr<model::Network> network, std::shared_ptr<const Text> text,
                  const SchedulerConfig& config, const EngineOptions& options)
      : network_(std::move(network)),
        text_(std::move(text)),
        config_(config),
        own_thread_(options.own_thread),
        stepper_(network_.get(), config, options.seed),
        counters_(stepper_.counters()) {
    if (own_thread_) thread_ = std::thread([this] { step_until_closed(); });
  }
  ~EngineOfNetwork() override {
    const Status closed = close();
    static_cast<void>(closed);  // an error on a callback alone, which must not delete the engine
  }

  const model::NetworkFacts& facts() const override { return network_->facts(); }
  const Text* text() const override { return text_.get(); }

  Status submit(Request request, OnUpdate on_update, int64_t* id) override;
  Status cancel(int64_t id) override;
  Status step(bool* ran) override;
  Status wait() override;
  Status close() override;

  Counters counters() const override {
    const Lock lock(mutex_);
    Counters counters = counters_;
    counters.num_waiting += int64_t(submitted_.size());
    return counters;
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  Status prepare(Request request, Sequence* sequence) const;
  bool is_on_callback() const { return is_stepping_ && thread_id_ == std::this_thread::get_id(); }
  bool step_unlocked(Lock* lock);
  void end_all(std::vector<std::unique_ptr<Sequence>>* submitted, FinishReason reason,
               const std::string& error);
  void step_until_closed();

  const std::unique_ptr<model::Network> network_;
  const std::shared_ptr<const Text> text_;
  const SchedulerConfig config_;
  const bool own_thread_;
  Stepper stepper_;  // of the thread that has set is_stepping_

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // With the mutex.
  std::vector<std::unique_ptr<Sequence>> submitted_;  // not taken in yet
  std::vector<int64_t> cancelled_;
  std::unordered_set<int64_t> unfinished_;
  int64_t num_submitted_ = 0;
  bool is_stepping_ = false;
  std::thread::id thread_id_;  // of who does
  bool is_closing_ = false, is_closed_ = false;
  std::string broken_;  // why nothing can run any more
  Counters counters_;

  std::thread thread_;
};

// Of any thread, without the mutex: what takes long is made here.
Status EngineOfNetwork::prepare(Request request, Sequence* sequence) const {
  const model::NetworkFacts& facts = network_->facts();
  REGATTA_RETURN_IF_ERROR(check_request(request, facts.vocab_size, text_ != nullptr));
  sequence->ids = request.ids;
  sequence->num_prompt_tokens = int64_t(request.ids.size());
  sequence->places = facts.positions.of(request.ids);
  sequence->runs_whole = facts.positions.runs_whole();
  sequence->chain = BlockManager::chain_of(salt_of(facts.positions, sequence->places));
  AnswerText::Hidden hidden;
  std::unique_ptr<TextStream> stream;
  if (text_) {
    REGATTA_RETURN_IF_ERROR(find_special_stops(*text_, &request, &hidden));
    REGATTA_RETURN_IF_ERROR(text_->stream(request.ids, &stream));
    sequence->answer = std::make_unique<AnswerText>(std::move(stream), request.stop,
                                                    request.include_stop, std::move(hidden));
  }
  sequence->adjustment = Adjustment(request, facts.stop_ids);
  sequence->request = std::move(request);
  return set_limits(config_, sequence);
}

Status EngineOfNetwork::submit(Request request, OnUpdate on_update, int64_t* id) {
  auto sequence = std::make_unique<Sequence>();
  REGATTA_RETURN_IF_ERROR(prepare(std::move(request), sequence.get()));
  sequence->on_update = std::move(on_update);
  const Lock lock(mutex_);
  if (is_closing_) return Status::error("the engine is closed; make another one");
  if (!broken_.empty()) return Status::error(broken_ + "; make another engine");
  *id = sequence->id = num_submitted_;
  unfinished_.insert(num_submitted_);
  try {
    submitted_.push_back(std::move(sequence));
  } catch (...) {  // refused, and nobody waits for it
    unfinished_.erase(num_submitted_);
    throw;
  }
  ++num_submitted_;
  changed_.notify_all();
  return {};
}

Status EngineOfNetwork::cancel(int64_t id) {
  const Lock lock(mutex_);
  if (unfinished_.count(id) > 0) {
    cancelled_.push_back(id);
    return {};
  }
  return Status::error("request " + std::to_string(id) + " is unknown or has ended");
}

Status EngineOfNetwork::step(bool* ran) {
  *ran = false;
  Lock lock(mutex_);
  const char* refusal = nullptr;
  if (is_on_callback()) {
    refusal = "step() was called on a callback, which a step waits for";
  } else if (own_thread_) {
    refusal = "a thread of the engine steps; wait(), or make the engine without own_thread";
  } else if (is_stepping_) {
    refusal = "another thread steps; call step() on one thread";
  } else if (is_closing_) {
    refusal = "the engine is closed; make another one";
  }
  if (refusal) return Status::error(refusal);
  *ran = step_unlocked(&lock);
  return {};
}

Status EngineOfNetwork::wait() {
  Lock lock(mutex_);
  if (is_on_callback()) {
    return Status::error("wait() was called on a callback, which a step waits for");
  }
  if (!own_thread_) {
    return Status::error("the caller steps; call step(), or make the engine with own_thread");
  }
  changed_.wait(lock, [this] { return unfinished_.empty() && !is_stepping_; });
  return {};
}

Status EngineOfNetwork::close() {
  Lock lock(mutex_);
  if (is_on_callback()) {
    return Status::error(
        "close() was called on a callback, which a step waits for; cancel the requests, and "
        "close() behind the step");
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
    step_unlocked(&lock);
  }
  is_closed_ = true;
  changed_.notify_all();
  return {};
}

void EngineOfNetwork::step_until_closed() {
  Lock lock(mutex_);
  for (bool closes = false; !closes;) {
    changed_.wait(lock, [this] { return is_closing_ || !unfinished_.empty(); });
    closes = is_closing_;  // then this step ends all
    step_unlocked(&lock);
  }
}

// A step, and its callbacks, with the mutex free meanwhile; whether there was anything to do. What
// throws, memory above all, ends all requests: no one knows then what the network did.
bool EngineOfNetwork::step_unlocked(Lock* lock) {
  is_stepping_ = true;
  thread_id_ = std::this_thread::get_id();
  const bool closes = is_closing_;
  std::vector<std::unique_ptr<Sequence>> submitted;
  std::vector<int64_t> cancelled;
  submitted.swap(submitted_);
  cancelled.swap(cancelled_);
  lock->unlock();
  bool ran = false;
  std::string broken;  // broken_ changes on this thread alone
  try {
    for (std::unique_ptr<Sequence>& sequence : submitted) stepper_.add(std::move(sequence));
    for (const int64_t id : cancelled) stepper_.cancel(id);
    if (!closes && broken_.empty()) ran = stepper_.step();
  } catch (const std::exception& error) {
    broken = std::string("the engine cannot go on: ") + error.what();
  }
  if (closes) {
    end_all(&submitted, FinishReason::kAbort, "");
  } else if (!broken.empty() || !broken_.empty()) {
    end_all(&submitted, FinishReason::kError, broken_.empty() ? broken : broken_);
  }
  std::vector<News> news = stepper_.take_news();
  lock->lock();
  if (broken_.empty()) broken_.swap(broken);
  counters_ = stepper_.counters();
  for (const News& each : news) {
    if (each.ended) unfinished_.erase(each.update.request_id);
  }
  lock->unlock();
  for (const News& each : news) {
    try {
      if (each.sequence->on_update) each.sequence->on_update(each.update);
    } catch (...) {  // memory that ends while it is told: the next one is told, and no thread ends
    }
  }
  ran |= !news.empty();
  news.clear();  // what has ended, its tokenizer's stream too: code of the caller, without a lock
  lock->lock();
  is_stepping_ = false;
  changed_.notify_all();
  return ran;
}

// submitted: those that are not null were not added. Where memory ends here, too, the next step
// tells the rest.
void EngineOfNetwork::end_all(std::vector<std::unique_ptr<Sequence>>* submitted,
                              FinishReason reason, const std::string& error) {
  try {
    for (std::unique_ptr<Sequence>& sequence : *submitted) {
      if (sequence) stepper_.add(std::move(sequence));
    }
    stepper_.end_all(reason, error);
  } catch (const std::exception&) {
  }
}

}  // namespace

Status Engine::make(std::unique_ptr<model::Network> network, std::shared_ptr<const Text> text,
                    const EngineOptions& options, std::unique_ptr<Engine>* engine) {
  const model::NetworkFacts& facts = network->facts();
  SchedulerConfig config;
  config.max_num_seqs = options.batch_size;
  config.max_num_batched_tokens = options.max_num_batched_tokens;
  config.max_length = options.max_length == 0 ? facts.max_length : options.max_length;
  config.block_size = facts.block_size;
  config.num_blocks = facts.num_blocks;
  config.reserve_full = options.reserve_full;
  config.prefix_caching = options.prefix_caching;
  config.chunked_prefill = options.chunked_prefill;
  config.separate_steps = options.separate_steps;
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
