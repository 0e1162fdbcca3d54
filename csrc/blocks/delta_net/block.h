// Linear attention with a decaying state of each request (predict/nn/kinds/delta_net.py).
#pragma once

#include "blocks/delta_net/record.h"
#include "regatta/blocks.h"

namespace regatta {

struct DeltaNetBlock : DeltaNetFields {
  int64_t key_size() const { return num_key_heads * key_dim; }
  int64_t value_size() const { return num_value_heads * value_dim; }
  int64_t conv_size() const { return 2 * key_size() + value_size(); }
  int64_t decays() const { return decay == Decay::kChannel ? key_dim : 1; }  // of a value head
  int64_t decay_size() const { return num_value_heads * decays(); }
  int64_t gate_size() const {
    return decay_size() + (write == WriteBy::kSigmoid ? num_value_heads : 0);
  }
  // Outputs of a first product's second part, which adapters change apart from the first: gates of
  // outputs, decays. Of rows that lay key head by key head, or without strengths, there is one.
  int64_t second_size(int64_t size) const { return grouped_rows ? 0 : size; }
  int64_t second_gates() const { return write == WriteBy::kSigmoid ? decay_size() : 0; }
};

struct DeltaNetBlockParams : BlockParams {
  DeltaNetBlock block;
  LinearWeights qkvz, ba, out;
  const float* conv = nullptr;       // [conv_width, conv_size]
  const float* conv_bias = nullptr;  // [conv_size] or null
  const float* decay_log = nullptr;  // [V]
  const float* step_bias = nullptr;  // [decay_size]
  const float* skip = nullptr;       // [V] or null
  const float* out_norm = nullptr;   // [E], or with norm_groups [V * E]
  float* conv_states = nullptr;      // [slots, conv_width - 1, conv_size], in place
  float* states = nullptr;           // [slots, V, D, E], in place
  // On GPUs bfloat16, too; `states` points to such values then.
  DType states_dtype = DType::kFloat32;
  // Of the step, made by kind.cc.
  const void* made_qkvz = nullptr;  // [T, conv_size + V * E]
  const void* made_ba = nullptr;    // [T, gate_size]
  void* mixed = nullptr;            // [T, V * E]
};

namespace cpu {
// From the first products to the input of the last one.
Status delta_net(const DeltaNetBlockParams& params);
}  // namespace cpu

}  // namespace regatta
