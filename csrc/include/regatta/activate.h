// What stands between an MLP's products: function(gate) * up, or function(up) without a gate.
#pragma once

#include "regatta/record_parts.h"
#include "regatta/types.h"

namespace regatta {

struct ActivateParams {
  const void* x = nullptr;  // [num_tokens, intermediate_size], gated twice as wide, gate first
  void* out = nullptr;      // [num_tokens, intermediate_size]
  int64_t num_tokens = 0;
  int64_t intermediate_size = 0;
  DType dtype = DType::kFloat32;
  Activation activation;
};

namespace cpu {
Status activate(const ActivateParams& params);
}

}  // namespace regatta
