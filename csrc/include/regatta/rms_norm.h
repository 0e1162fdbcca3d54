// Root mean square normalisation, with the residual addition in front of it.
#pragma once

#include "regatta/types.h"

namespace regatta {

struct RmsNormParams {
  const void* x;         // [num_tokens, hidden_size]
  const void* weight;    // [hidden_size]; on a GPU null for ones
  const void* residual;  // [num_tokens, hidden_size] or null
  void* out;             // [num_tokens, hidden_size]: norm(x + residual) * weight
  void* residual_out;  // [num_tokens, hidden_size]: x + residual, rounded to dtype before the norm
  int64_t num_tokens;
  int64_t hidden_size;
  float epsilon;
  DType dtype;
};

namespace cpu {
Status rms_norm(const RmsNormParams& params);
}

}  // namespace regatta
