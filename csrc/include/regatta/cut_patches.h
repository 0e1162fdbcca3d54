// Patches of pictures, scaled and normalised, from their pixels.
#pragma once

#include "regatta/types.h"

namespace regatta {

constexpr int kNumChannels = 3;

// out[p, (c * side + y) * side + x] = (pixel * factor - mean[c]) / std[c] of the pixel at
// origins[p] + 3 * (y * strides[p] + x) + c, and zeros from num_values on. Rounded once.
struct CutPatchesParams {
  const uint8_t* pixels = nullptr;   // [num_bytes], pictures one behind the other
  const int32_t* origins = nullptr;  // [num_patches], bytes
  const int32_t* strides = nullptr;  // [num_patches], pixels of a row of the picture
  void* out = nullptr;               // [num_patches, width]
  int64_t num_bytes = 0;
  int64_t num_patches = 0;
  int64_t side = 0;   // pixels of a patch
  int64_t width = 0;  // at least 3 * side^2
  float factor = 1.0f;
  float mean[kNumChannels] = {};
  float std[kNumChannels] = {1.0f, 1.0f, 1.0f};
  DType dtype = DType::kFloat32;
};

namespace cpu {
Status cut_patches(const CutPatchesParams& params);
}

}  // namespace regatta
