// Rows times a stored weight, plus bias, and what adapters add.
#pragma once

#include "regatta/adapters.h"
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
  // Of requests with adapters; else adapters.ids is null.
  AdapterRows adapters = {};
  Adapted which = Adapted::kQkv;
  LowRankWeights low_rank = {};
  int64_t part_sizes[3] = {};  // output features of each part, 0 behind the last
};

namespace cpu {
Status linear(const LinearParams& params);
}

}  // namespace regatta
