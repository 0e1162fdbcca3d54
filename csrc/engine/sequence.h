// The state of a request while the engine has it: its tokens, its blocks, its text.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/adjustment.h"
#include "engine/answer_text.h"
#include "engine/block_manager.h"
#include "engine/request.h"
#include "model/network.h"

namespace regatta::engine {

enum class SequenceStatus { kWaiting, kRunning, kPreempted, kFinished };

// The scheduler is its only writer once it was added. `ids` is prompt then answer and only grows;
// keys and values of its first num_computed tokens lie in `blocks`, in order.
struct Sequence {
  int64_t id = 0;
  Request request;
  Adjustment adjustment;
  OnUpdate on_update;
  std::unique_ptr<AnswerText> answer;  // null: no tokenizer
  Ids ids;
  int64_t num_prompt_tokens = 0;
  int64_t max_num_tokens = 0;  // prompt and answer
  int64_t max_num_blocks = 0;  // for these
  model::Places places;
  bool runs_whole = false;  // its prompt, in one step; it shares no blocks

  SequenceStatus status = SequenceStatus::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;  // where finish_reason is kError
  int64_t num_computed = 0;
  Ids blocks;
  Chain chain;                // that the blocks are known by
  int64_t num_published = 0;  // leading blocks that others may match
  bool was_scheduled = false;
  int64_t num_cached_tokens = 0;  // of the prompt, at first admission

  int64_t num_tokens() const { return static_cast<int64_t>(ids.size()); }
  int64_t num_left() const { return num_tokens() - num_computed; }  // 1 while it decodes
  int64_t num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
};

}  // namespace regatta::engine
