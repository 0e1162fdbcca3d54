#include "engine/stepper.h"

#include <algorithm>
#include <iterator>

namespace regatta::engine {

Stepper::Stepper(model::Network* network, const SchedulerConfig& config, int64_t seed)
    : network_(network),
      config_(config),
      scheduler_(config),
      sampler_(seed, network->facts().vocab_size) {}

void Stepper::add(std::unique_ptr<Sequence>&& sequence) {
  Sequence* const added = sequence.get();
  std::unique_ptr<Sequence>& place = sequences_[added->id];
  place = std::move(sequence);
  scheduler_.add(added);
}

void Stepper::cancel(int64_t id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  scheduler_.end(found->second.get(), FinishReason::kAbort);
  tell(found->second.get(), {});
}

bool Stepper::step() {
  const Batch batch = scheduler_.schedule();
  if (batch.spans.empty()) return false;
  Chosen chosen;
  run_apart(batch.spans.data(), batch.spans.data() + batch.spans.size(), &chosen);
  scheduler_.update(batch, chosen.tokens, network_->facts().stop_ids);
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
  return true;
}

// Runs spans together; where that fails, each half of them, and so on: a request that makes a step
// fail ends alone. A part may write the same cache slots again.
void Stepper::run_apart(const Span* begin, const Span* end, Chosen* chosen) {
  Chosen own;
  const Status status = run({begin, end}, &own);
  if (!status.ok() && end - begin > 1) {
    const Span* const middle = begin + (end - begin) / 2;
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

Status Stepper::run(const std::vector<Span>& spans, Chosen* chosen) {
  std::vector<Sequence*> sampling;
  std::vector<model::Places> places;
  for (const Span& span : spans) {
    places.push_back(span.sequence->places);
    if (span.samples) sampling.push_back(span.sequence);
  }
  const model::NetworkFacts& facts = network_->facts();
  const model::StepRows rows = buffers_.fill(spans, config_.block_size);
  const size_t num_logits = sampling.size() * size_t(facts.vocab_size);
  if (logits_.size() < num_logits) logits_.resize(num_logits);
  REGATTA_RETURN_IF_ERROR(network_->run(placed_.place(facts.positions, rows, places),
                                        sampling.empty() ? nullptr : logits_.data()));
  if (sampling.empty()) return {};
  REGATTA_RETURN_IF_ERROR(sampler_.choose({sampling.begin(), sampling.end()}, logits_.data(),
                                          &chosen->tokens, &chosen->logprobs));
  for (size_t row = 0; row < sampling.size(); ++row) {
    if (chosen->tokens[row] >= 0) continue;
    fail(sampling[row],
         "it has no finite largest logit to draw from; the weights or the dtype do not suit the "
         "model");
  }
  return {};
}

void Stepper::fail(Sequence* sequence, const std::string& message) {
  scheduler_.end(sequence, FinishReason::kError);
  sequence->error = message;
}

void Stepper::end_all(FinishReason reason, const std::string& error) {
  for (Sequence* sequence : scheduler_.unfinished()) {
    scheduler_.end(sequence, reason);
    sequence->error = error;
  }
  std::vector<Sequence*> all;  // those of a step that was left amid, too
  for (const auto& each : sequences_) {
    Sequence* const sequence = each.second.get();
    if (sequence->finish_reason == FinishReason::kNone) sequence->finish_reason = reason;
    if (sequence->finish_reason == FinishReason::kError && sequence->error.empty()) {
      sequence->error = error;
    }
    all.push_back(sequence);
  }
  std::sort(all.begin(), all.end(),
            [](const Sequence* a, const Sequence* b) { return a->id < b->id; });
  for (Sequence* sequence : all) tell(sequence, {});
}

void Stepper::tell(Sequence* sequence, Update update) {
  update.request_id = sequence->id;
  update.num_cached_tokens = sequence->num_cached_tokens;
  update.finish_reason = sequence->finish_reason;
  const bool has_ended = update.finish_reason != FinishReason::kNone;
  if (sequence->answer) {
    const Status status = has_ended ? sequence->answer->finish() : Status();
    if (!status.ok() && sequence->error.empty()) {
      update.finish_reason = FinishReason::kError;
      sequence->error = "its text cannot be made: " + status.message();
    }
    update.text = sequence->answer->take();
  }
  update.error = sequence->error;
  news_.push_back({sequence, std::move(update), nullptr});
  if (!has_ended) return;
  const auto found = sequences_.find(sequence->id);
  news_.back().ended = std::move(found->second);
  sequences_.erase(found);
}

std::vector<News> Stepper::take_news() {
  std::vector<News> news;
  news.swap(news_);
  return news;
}

Counters Stepper::counters() const {
  Counters counters = scheduler_.counters();
  counters.num_running = scheduler_.num_running();
  counters.num_waiting = scheduler_.num_waiting();
  counters.num_cache_blocks = scheduler_.blocks().num_blocks();
  counters.num_used_blocks = scheduler_.blocks().num_used_blocks();
  counters.num_free_blocks = scheduler_.blocks().num_free_blocks();
  return counters;
}

}  // namespace regatta::engine
