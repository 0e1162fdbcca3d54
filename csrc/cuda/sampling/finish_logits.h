// What a model does to logits behind the product, in place.
#pragma once

#include "regatta/cuda_ops.h"

namespace regatta::cuda {

// logits = cap(scale * (logits + bias)), cap(x) = softcap * tanh(x / softcap).
struct FinishLogitsParams {
  float* logits = nullptr;     // [num_rows, vocab_size]
  const void* bias = nullptr;  // [vocab_size] of dtype, or null
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  DType dtype = DType::kFloat32;
};

Status finish_logits(const FinishLogitsParams& params, const Launch& launch);

}  // namespace regatta::cuda
