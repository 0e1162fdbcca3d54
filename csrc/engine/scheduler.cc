#include "engine/scheduler.h"

#include <algorithm>

#include "engine/stopping.h"

namespace regatta::engine {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

void append_span(Sequence* sequence, int64_t num_tokens, Batch* batch) {
  const int64_t start = sequence->num_computed;
  const bool samples = start + num_tokens == sequence->num_tokens();
  batch->spans.push_back({sequence, num_tokens, start, samples});
  batch->num_tokens += num_tokens;
  batch->num_samples += samples;
}

}  // namespace

Status SchedulerConfig::check() const {
  const struct {
    const char* name;
    int64_t value;
    int64_t least;
  } sizes[] = {{"batch_size", max_num_seqs, 1},
               {"max_num_batched_tokens", max_num_batched_tokens, 1},
               {"max_length", max_length, 2},  // a prompt and an output token
               {"block_size", block_size, 1},
               {"num_blocks", num_blocks, 1}};
  for (const auto& size : sizes) {
    if (size.value >= size.least) continue;
    return Status::error(std::string(size.name) + " " + text(size.value) +
                         " is too small (allowed: " + text(size.least) + " or more)");
  }
  if (max_num_batched_tokens >= max_num_seqs) return {};
  return Status::error("max_num_batched_tokens " + text(max_num_batched_tokens) +
                       " is less than batch_size " + text(max_num_seqs) +
                       ": a step could not decode every sequence; raise max_num_batched_tokens or "
                       "lower batch_size");
}

Status set_limits(const SchedulerConfig& config, Sequence* sequence) {
  const int64_t longest = config.max_length, num_prompt_tokens = sequence->num_prompt_tokens;
  if (num_prompt_tokens >= longest) {
    return Status::error("the prompt has " + text(num_prompt_tokens) +
                         " tokens, the engine's max_length is " + text(longest) +
                         " tokens for prompt and output together (allowed: prompts of at most " +
                         text(longest - 1) + " tokens); shorten the prompt or raise max_length");
  }
  const int64_t room = longest - num_prompt_tokens, wanted = sequence->request.max_new_tokens;
  const int64_t num_new = wanted > 0 ? std::min(wanted, room) : room;
  sequence->max_num_tokens = num_prompt_tokens + num_new;
  sequence->max_num_blocks = num_blocks_for(sequence->max_num_tokens, config.block_size);
  const int64_t budget = config.max_num_batched_tokens;
  if (sequence->runs_whole && config.chunked_prefill && num_prompt_tokens > budget) {
    return Status::error(text(num_prompt_tokens) +
                         " prompt tokens are more than a step takes (allowed: 1 to " +
                         text(budget) +
                         "), and this model's prompts see themselves both ways: they run in one "
                         "step; shorten the prompt, or raise max_num_batched_tokens");
  }
  if (sequence->max_num_blocks <= config.num_blocks) return {};
  return Status::error(text(num_prompt_tokens) + " prompt tokens and up to " + text(num_new) +
                       " output tokens need " + text(sequence->max_num_blocks) +
                       " cache blocks of " + text(config.block_size) + " tokens, the cache has " +
                       text(config.num_blocks) +
                       " (allowed: " + text(config.num_blocks * config.block_size) +
                       " tokens in all); lower max_length or max_new_tokens, or give the cache "
                       "more blocks");
}

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config), blocks_(config.num_blocks, config.block_size, config.prefix_caching) {}

std::vector<Sequence*> Scheduler::unfinished() const {
  std::vector<Sequence*> all = running_;
  all.insert(all.end(), waiting_.begin(), waiting_.end());
  return all;
}

void Scheduler::add(Sequence* sequence) { waiting_.push_back(sequence); }

void Scheduler::end(Sequence* sequence, FinishReason reason) {
  if (sequence->status == SequenceStatus::kRunning) {
    running_.erase(std::find(running_.begin(), running_.end(), sequence));
    release(sequence);
  } else {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), sequence));
  }
  sequence->status = SequenceStatus::kFinished;
  sequence->finish_reason = reason;
}

Batch Scheduler::schedule() {
  Batch batch;
  const bool separate = config_.separate_steps;
  if (separate && prompts_are_next_) prompts(&batch);
  if (!batch.spans.empty()) {
    prompts_are_next_ = false;
  } else {
    decodes(&batch);
    prompts_are_next_ = !batch.spans.empty();
    if (!separate || batch.spans.empty()) prompts(&batch);
  }
  if (!batch.spans.empty()) {
    ++counters_.num_steps;
    counters_.num_scheduled_tokens += batch.num_tokens;
  }
  return batch;
}

// A span for each decoding request. There are tokens for all of them: see SchedulerConfig::check.
void Scheduler::decodes(Batch* batch) {
  for (size_t i = 0; i < running_.size(); ++i) {  // preemption shortens it from the end
    Sequence* sequence = running_[i];
    if (sequence->num_left() > 1) continue;  // a prompt
    const int64_t room = int64_t(sequence->blocks.size()) * config_.block_size;
    if (sequence->num_tokens() > room && !grow(sequence, batch)) break;
    append_span(sequence, 1, batch);
  }
}

// The rest of the tokens: prompts that have begun, then waiting ones.
void Scheduler::prompts(Batch* batch) {
  const size_t num_decodes = batch->spans.size();
  int64_t budget = config_.max_num_batched_tokens - batch->num_tokens;
  for (Sequence* sequence : running_) {
    if (sequence->num_left() <= 1) continue;
    const bool first = batch->spans.size() == num_decodes;
    const int64_t num_tokens = chunk(*sequence, sequence->num_computed, budget, first);
    if (num_tokens > 0) append_span(sequence, num_tokens, batch);
    budget -= num_tokens;
  }
  if (batch->preempted.empty()) admit(budget, num_decodes, batch);
}

// Tokens of a prompt to run now; only the `first` whole prompt may exceed the budget. One that runs
// whole is never cut, and the tokens generated behind it before a preemption may be.
int64_t Scheduler::chunk(const Sequence& sequence, int64_t start, int64_t budget,
                         bool first) const {
  const int64_t num_left = sequence.num_tokens() - start;
  const bool over_budget = first && !config_.chunked_prefill;
  const bool is_whole = sequence.runs_whole && start < sequence.num_prompt_tokens;
  if (is_whole && budget < sequence.num_prompt_tokens && !over_budget) return 0;
  if (config_.chunked_prefill) return std::min(num_left, budget);
  return num_left <= budget || first ? num_left : 0;
}

// Moves requests, in order, into the batch while sequences, budget and blocks last.
void Scheduler::admit(int64_t budget, size_t num_decodes, Batch* batch) {
  // One free block stays for each running request that may still grow: otherwise the newcomer would
  // be preempted, and its prefill lost, within a few steps. A request that is alone needs none.
  int64_t headroom = 0;
  for (const Sequence* each : running_) {
    headroom += !config_.reserve_full && int64_t(each->blocks.size()) < each->max_num_blocks;
  }
  while (!waiting_.empty() && budget > 0 && num_running() < config_.max_num_seqs) {
    const size_t begun = batch->spans.size();
    if (!enter(running_.empty(), headroom, budget, begun == num_decodes, batch)) return;
    const Sequence* last = running_.back();
    headroom += int64_t(last->blocks.size()) < last->max_num_blocks;
    budget -= batch->spans[begun].num_tokens;
  }
}

// Moves the first waiting request into the batch; false: there is no room.
bool Scheduler::enter(bool is_alone, int64_t headroom, int64_t budget, bool first, Batch* batch) {
  Sequence* sequence = waiting_.front();
  // Ahead of the search for its prompt: it needs one block of its own in any case.
  if (!blocks_.can_allocate(1 + headroom)) return false;
  Ids shared;
  if (!sequence->runs_whole) shared = blocks_.match_prefix(sequence->ids, &sequence->chain);
  const auto num_shared = int64_t(shared.size());
  const int64_t num_cached = num_shared * config_.block_size;
  const int64_t num_blocks = config_.reserve_full
                                 ? sequence->max_num_blocks
                                 : num_blocks_for(sequence->num_tokens(), config_.block_size);
  const int64_t num_spare = is_alone ? 0 : headroom + (num_blocks < sequence->max_num_blocks);
  const int64_t num_tokens = chunk(*sequence, num_cached, budget, first);
  const int64_t num_new = num_blocks - num_shared;
  if (num_tokens < 1 || !blocks_.can_allocate(num_new + num_spare, shared)) return false;
  blocks_.acquire(shared);
  blocks_.allocate(num_new, &shared);
  sequence->blocks = std::move(shared);
  sequence->num_published = num_shared;
  sequence->num_computed = num_cached;
  sequence->status = SequenceStatus::kRunning;
  if (!sequence->was_scheduled) {
    sequence->was_scheduled = true;
    sequence->num_cached_tokens = num_cached;
    counters_.num_prompt_tokens += sequence->num_prompt_tokens;
    counters_.num_prefix_hit_tokens += num_cached;
  }
  waiting_.pop_front();
  running_.push_back(sequence);
  append_span(sequence, num_tokens, batch);
  return true;
}

// Gives a request one more block, preempting from the last; false: itself preempted.
bool Scheduler::grow(Sequence* sequence, Batch* batch) {
  while (blocks_.num_free_blocks() == 0) {
    if (preempt_last(batch) == sequence) return false;
  }
  blocks_.allocate(1, &sequence->blocks);
  return true;
}

// Frees the blocks of the last running request, which waits again ahead of all others.
Sequence* Scheduler::preempt_last(Batch* batch) {
  Sequence* sequence = running_.back();
  running_.pop_back();
  release(sequence);
  sequence->status = SequenceStatus::kPreempted;
  ++counters_.num_preemptions;
  waiting_.push_front(sequence);
  batch->preempted.push_back(sequence);
  return sequence;
}

void Scheduler::release(Sequence* sequence) {
  blocks_.free(sequence->blocks);
  sequence->blocks.clear();
  sequence->num_computed = sequence->num_published = 0;
}

std::vector<Sequence*> Scheduler::update(const Batch& batch, const Ids& tokens,
                                         const Ids& stop_ids) {
  std::vector<Sequence*> finished;
  size_t row = 0;
  for (const Span& span : batch.spans) {
    Sequence* sequence = span.sequence;
    const int32_t token = span.samples ? tokens[row++] : -1;
    if (sequence->status == SequenceStatus::kFinished) continue;
    sequence->num_computed = span.start + span.num_tokens;
    FinishReason reason = FinishReason::kNone;
    if (span.samples) {
      reason = append_token(sequence, token, stop_ids);
      ++counters_.num_output_tokens;
    }
    const int64_t num_full = sequence->num_computed / config_.block_size;
    if (num_full > sequence->num_published) {
      if (!sequence->runs_whole) {
        blocks_.publish(sequence->blocks, sequence->ids, &sequence->chain, sequence->num_published,
                        num_full);
      }
      sequence->num_published = num_full;
    }
    if (reason == FinishReason::kNone) continue;
    end(sequence, reason);
    finished.push_back(sequence);
  }
  return finished;
}

bool Scheduler::is_in_order() const {
  Ids held;
  for (const Sequence* each : running_) {
    held.insert(held.end(), each->blocks.begin(), each->blocks.end());
  }
  return blocks_.is_held_by(held);
}

}  // namespace regatta::engine
