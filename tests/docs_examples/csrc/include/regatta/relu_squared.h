// max(x, 0) squared.
#pragma once

#include "regatta/types.h"

namespace regatta {

struct ReluSquaredParams {
  const void* x;  // [num_tokens, width]
  void* out;      // [num_tokens, width]
  int64_t num_tokens;
  int64_t width;
  DType dtype;
};

namespace cpu {
Status relu_squared(const ReluSquaredParams& params);
}

}  // namespace regatta
