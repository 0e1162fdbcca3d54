// Types of activations by their names.
#pragma once

#include "common.h"

namespace regatta::binding {

inline DType activation_type(const std::string& name) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  fail("dtype '" + name + "' is not known (allowed: float32, bfloat16, float16)");
}

}  // namespace regatta::binding
