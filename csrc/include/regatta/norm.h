// Normalisation over the last dimension, with a residual addition in front of it.
#pragma once

#include "regatta/record_parts.h"
#include "regatta/types.h"

namespace regatta {

struct NormParams {
  const void* x = nullptr;         // [num_tokens, hidden_size]
  const void* weight = nullptr;    // [hidden_size]; on a GPU null for ones
  const void* bias = nullptr;      // [hidden_size] or null; as many rows as weight
  const void* residual = nullptr;  // [num_tokens, hidden_size] or null
  void* out = nullptr;             // [num_tokens, hidden_size]: norm(x + residual) * weight + bias
  // [num_tokens, hidden_size]: x + residual, rounded to dtype before the norm.
  void* residual_out = nullptr;
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  float epsilon = 0.0f;
  DType dtype = DType::kFloat32;
  NormKind kind = NormKind::kRms;
  bool plus_one = false;  // the factor is 1 + weight
  // Heads with a factor of their own: row r is part r % num_parts, and takes row r % num_parts of
  // weight [num_weights, hidden_size]; parts from num_weights on stay as they are.
  int64_t num_parts = 1;
  int64_t num_weights = 1;
};

namespace cpu {
Status norm(const NormParams& params);
}

}  // namespace regatta
