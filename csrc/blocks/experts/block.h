// The experts of a decoder layer: a router, the MLPs that it chooses among, and a shared one.
#pragma once

#include "blocks/experts/record.h"
#include "regatta/blocks.h"

namespace regatta {

constexpr int64_t kMaxExperts = 512;  // of one block
constexpr int64_t kMaxChosen = 32;    // of them, for one row

struct ExpertBlock : ExpertFields {
  // Those whose weights are here; ids of experts count from the first of them.
  int64_t num_own() const { return own_experts ? own_experts : router.num_experts; }
  int64_t up_size() const { return intermediate_size * (activation.gated ? 2 : 1); }
  int64_t shared_up_size() const { return shared_size * (activation.gated ? 2 : 1); }
};

// Weights of experts have one more dimension, the first: as many as are here.
struct ExpertBlockParams : BlockParams {
  ExpertBlock block;
  const void* router = nullptr;        // [E, H]
  const float* router_bias = nullptr;  // [E] or null
  const float* correction = nullptr;   // [E] or null
  LinearWeights gate_up, down;         // of E experts
  LinearWeights shared_gate_up, shared_down;
  const void* shared_gate = nullptr;  // [H] or null
};

namespace cpu {
Status expert_block(const ExpertBlockParams& params);
}

}  // namespace regatta
