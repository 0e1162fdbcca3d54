// What blocks of a decoder have in common, whatever their kind, and what a call gives each of them.
// A kind's record and params stand in csrc/blocks/<kind>/block.h. No framework, no ISA code.
//
// T tokens, L of them wanted, H hidden size; the other dims are attention.h's.
#pragma once

#include <cstdint>

#include "regatta/adapters.h"
#include "regatta/attention.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"
#include "regatta/types.h"

namespace regatta {

namespace runtime {
class Kind;
}

struct NormWeights {
  const void* weight = nullptr;
  const void* bias = nullptr;  // or null
};

struct LinearWeights {
  const TensorView* tensors = nullptr;  // as many as the scheme has
  const void* bias = nullptr;           // [out_features] or null
  LowRankWeights low_rank;              // of adapters, where the block has them
};

// The params of a kind begin with these, and add its record `block` and its tensors, which are of
// one dtype but those that schemes and the cache's format store.
struct BlockParams {
  const runtime::Kind* kind = nullptr;
  DType dtype = DType::kFloat32;
  int64_t num_tokens = 0, hidden_size = 0;
  const void* hidden = nullptr;  // [T, H]
  void* hidden_out = nullptr;    // [T, H]; with rows [L, H]
  NormWeights norm, post_norm;
  AdapterRows adapters;
  // Where some rows of the call are wanted, which they are, [L], or null: all. A kind that reads
  // the step makes these alone; T of the blocks behind it is L. On a GPU AttentionLimits::rows says
  // more.
  const int32_t* rows = nullptr;
  int64_t num_rows = 0;
  // [num_before, H] what the block ahead read, and its rows [T] that are this block's; null: all.
  const void* before = nullptr;
  const int32_t* before_rows = nullptr;
  int64_t num_before = 0;
  // The step, for kinds that read it.
  const int32_t* positions = nullptr;        // [T]
  const int32_t* block_positions = nullptr;  // [T] in the second dimension, or null
  const int32_t* slot_mapping = nullptr;     // [T]
  AttentionBatch batch;
  // [B] slots of the requests' states to read (-1: zeros), and others to write (-1: none). No slot
  // that is written is another request's to read.
  const int32_t *state_src = nullptr, *state_dst = nullptr;
};

}  // namespace regatta
