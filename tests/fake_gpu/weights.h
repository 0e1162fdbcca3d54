// How weights lie in the memory of the fake GPU.
#pragma once

#include <cstdint>

#include "regatta/blocks.h"

namespace regatta::cuda {

// What pack_weight() leaves of a matrix [N, K] with G groups of columns.
struct PackedWeight {
  int64_t num_groups = 0;         // G; 0: the scales are a tensor of their own, one for each row
  const float* scale = nullptr;   // [N, G]
  const float* zero = nullptr;    // [N, G] or null
  const int8_t* codes = nullptr;  // [N, K]
};
PackedWeight unpack(const void* packed, int64_t out_features, int64_t in_features);

}  // namespace regatta::cuda
