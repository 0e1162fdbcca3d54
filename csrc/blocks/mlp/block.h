// The MLP of a decoder layer, with the norm ahead of it and the sum behind.
#pragma once

#include "blocks/mlp/record.h"
#include "regatta/blocks.h"

namespace regatta {

struct MlpBlock : MlpFields {
  int64_t up_size() const { return intermediate_size * (activation.gated ? 2 : 1); }
};

struct MlpBlockParams : BlockParams {
  MlpBlock block;
  LinearWeights gate_up, down;

  const void* input() const { return block.parallel ? before : hidden; }
};

namespace cpu {
Status mlp_block(const MlpBlockParams& params);
// As smaller operators.
Status mlp_sequence(const MlpBlockParams& params);
}  // namespace cpu

}  // namespace regatta
