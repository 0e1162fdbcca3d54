// Rows times a stored weight, plus bias.
#pragma once

#include "regatta/scheme.h"
#include "regatta/types.h"

namespace regatta {

struct LinearParams {
  const void* x;             // [num_tokens, in_features]
  const TensorView* weight;  // what the scheme stores
  int num_weights;           // tensors in `weight`
  const void* bias;          // [out_features] or null
  void* out;                 // [num_tokens, out_features]
  int64_t num_tokens;
  int64_t in_features;
  int64_t out_features;
  DType dtype;  // of x, bias and out
  SchemeId scheme;
};

namespace cpu {
Status linear(const LinearParams& params);
}

}  // namespace regatta
