// Which tokens of which requests run in the next step, and how its result changes the requests.
//
// The twin of predict/engine/{scheduler,planning,queue}.py without what this engine refuses:
// tests/csrc/test_engine_trace.py holds both to the same spans, blocks and preemptions, step by
// step. There stands why it never runs out of blocks and never starves a request. Here all requests
// have one order, that of their arrival.
#pragma once

#include <deque>
#include <vector>

#include "engine/engine.h"
#include "engine/sequence.h"

namespace regatta::engine {

// Fields and meaning of predict.engine.scheduled.SchedulerConfig.
struct SchedulerConfig {
  int64_t max_num_seqs = 0;
  int64_t max_num_batched_tokens = 0;
  int64_t max_length = 0;
  int64_t block_size = 0;
  int64_t num_blocks = 0;
  bool reserve_full = false;
  bool prefix_caching = true;
  bool chunked_prefill = true;
  bool separate_steps = false;

  Status check() const;
};

// Consecutive tokens of a request in one step: `start` .. `start + num_tokens - 1`.
struct Span {
  Sequence* sequence;
  int64_t num_tokens;
  int64_t start;
  bool samples;  // reaches the end of the tokens: a new one comes of it
};

// One step: decoding spans in the order of arrival, then those of prompts.
struct Batch {
  std::vector<Span> spans;
  std::vector<Sequence*> preempted;  // the last first; they wait again
  int64_t num_tokens = 0;
  int64_t num_samples = 0;
};

// Sets where a request ends, and the blocks that it fills then. An error where it never fits.
Status set_limits(const SchedulerConfig& config, Sequence* sequence);

// A step is schedule(), run it, update(). One thread.
class Scheduler {
 public:
  // config.check() is ok.
  explicit Scheduler(const SchedulerConfig& config);

  const BlockManager& blocks() const { return blocks_; }
  const Counters& counters() const { return counters_; }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  bool has_unfinished() const { return !running_.empty() || !waiting_.empty(); }
  std::vector<Sequence*> unfinished() const;

  // Puts a request with limits behind all others. It must live until it is finished.
  void add(Sequence* sequence);

  // Ends an unfinished request and frees its blocks.
  void end(Sequence* sequence, FinishReason reason);

  // The next step; without spans where nothing runs.
  Batch schedule();

  // Writes back a batch's tokens, one for each span that samples; those below 0 are of requests
  // that ended since. stop_ids: the model's. Returns the requests that ended.
  std::vector<Sequence*> update(const Batch& batch, const Ids& tokens, const Ids& stop_ids);

  // Whether the blocks are held by those who have them, and all others are free.
  bool is_in_order() const;

 private:
  void decodes(Batch* batch);
  void prompts(Batch* batch);
  void admit(int64_t budget, size_t num_decodes, Batch* batch);
  bool enter(bool is_alone, int64_t headroom, int64_t budget, bool first, Batch* batch);
  int64_t chunk(const Sequence& sequence, int64_t start, int64_t budget, bool first) const;
  bool grow(Sequence* sequence, Batch* batch);
  Sequence* preempt_last(Batch* batch);
  void release(Sequence* sequence);

  const SchedulerConfig config_;
  BlockManager blocks_;
  std::deque<Sequence*> waiting_;   // by arrival
  std::vector<Sequence*> running_;  // by arrival, all ahead of the waiting ones
  bool prompts_are_next_ = true;    // with separate_steps
  Counters counters_;
};

}  // namespace regatta::engine
