// From a scheduled batch to the network's rows: predict/engine/batch.py.
#pragma once

#include "engine/scheduler.h"
#include "model/network.h"

namespace regatta::engine {

// The memory of a step's rows, kept from step to step.
class StepBuffers {
 public:
  // Rows of logits in the order of the spans that sample. Valid until the next call.
  model::StepRows fill(const std::vector<Span>& spans, int64_t block_size);

 private:
  Ids token_ids_, positions_, slots_, borders_, context_lens_, tables_, logit_indices_, lengths_;
};

}  // namespace regatta::engine
