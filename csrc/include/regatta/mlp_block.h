// hidden + down(silu(gate) * up), gate and up of norm(hidden).
#pragma once

#include <string>

#include "regatta/types.h"

namespace regatta {

struct MlpBlockParams {
  const void* hidden;         // [num_tokens, hidden_size]
  const void* norm_weight;    // [hidden_size]
  const TensorView* gate_up;  // [hidden_size, 2 * intermediate_size] as the scheme stores it
  int num_gate_up;            // tensors in gate_up
  const void* gate_up_bias;   // [2 * intermediate_size] or null
  const TensorView* down;     // [intermediate_size, hidden_size] as the scheme stores it
  int num_down;               // tensors in down
  const void* down_bias;      // [hidden_size] or null
  void* out;                  // [num_tokens, hidden_size]
  int64_t num_tokens;
  int64_t hidden_size;
  int64_t intermediate_size;
  float epsilon;
  DType dtype;  // of everything but what the scheme stores
  std::string scheme;
};

namespace cpu {
Status mlp_block(const MlpBlockParams& params);
}

}  // namespace regatta
