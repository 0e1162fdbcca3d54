// A weight matrix in the layout that the "dense" scheme multiplies.
#pragma once

#include "regatta/types.h"

namespace regatta {

struct PackDenseParams {
  const void*
      weight;    // [out_features, in_features] if transposed, else [in_features, out_features]
  void* packed;  // float32, float16: [panels, in_features, 32];
                 // bfloat16: [panels, ceil(in_features / 2), 32, 2]; zero padded
  int64_t in_features;
  int64_t out_features;
  bool transposed;
  DType from;  // of weight
  DType to;    // of packed
};

namespace cpu {
Status pack_dense(const PackDenseParams& params);
}

}  // namespace regatta
