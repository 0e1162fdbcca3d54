// Range checks that the attention ops share, beyond the tensor shapes that the registration checks.
#pragma once

#include "regatta/attention.h"

namespace regatta::cpu {

// Names the first position or slot that is out of range.
Status check_rope_indices(const char* op, const int32_t* positions, const int32_t* slot_mapping,
                          int64_t num_tokens, int64_t num_positions, int64_t num_slots);

// vdpbf16ps multiplies pairs of values, so it wants an even head_dim.
inline const char* refuse_odd_head_dim(DType dtype, int64_t head_dim) {
  return dtype == DType::kBFloat16 && head_dim % 2 ? "head_dim is odd" : nullptr;
}

}  // namespace regatta::cpu
