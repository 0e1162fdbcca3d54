// Blocks as operators get them: a text attribute, read into the records of regatta/blocks.h.
//
//   "attention num_heads=32 num_kv_heads=8 head_dim=128 norm.kind=rms norm.epsilon=1e-06 qkv=dense"
//   "mlp intermediate_size=14336 activation.function=silu norm.kind=rms gate_up=w4a8 down=dense"
//
// Records are joined by "|". A field that is not named has its default; a norm is there when one of
// its fields is named. Kinds are named as predict/nn/blocks.py names them.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "regatta/blocks.h"

namespace regatta::binding {

using BlockRecord = std::variant<AttentionBlock, MlpBlock, ExpertBlock, LatentAttentionBlock>;

// The records of `text`, which are kept. Throws for what cannot be read.
const std::vector<BlockRecord>& block_records(const std::string& text);

}  // namespace regatta::binding
