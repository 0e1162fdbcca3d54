// The sum of two tensors with a factor each.
#pragma once

#include "regatta/types.h"

namespace regatta {

// out = a_scale * a + b_scale * b, rounded once. out may be a or b.
struct AddParams {
  const void* a = nullptr;  // [count]
  const void* b = nullptr;  // [count] or null: nothing is added
  void* out = nullptr;      // [count]
  int64_t count = 0;
  float a_scale = 1.0f;
  float b_scale = 1.0f;
  DType dtype = DType::kFloat32;
};

namespace cpu {
Status add(const AddParams& params);
}

}  // namespace regatta
