// silu(gate) * up.
#pragma once

#include "regatta/types.h"

namespace regatta {

struct SiluMulParams {
  const void* gate_up;  // [num_tokens, 2 * intermediate_size], gate first
  void* out;            // [num_tokens, intermediate_size]
  int64_t num_tokens;
  int64_t intermediate_size;
  DType dtype;
};

namespace cpu {
Status silu_mul(const SiluMulParams& params);
}

}  // namespace regatta
