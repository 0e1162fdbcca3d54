// A short gated convolution (predict/nn/kinds/short_conv.py).
#pragma once

#include "blocks/short_conv/record.h"
#include "regatta/blocks.h"

namespace regatta {

struct ShortConvBlockParams : BlockParams {
  ShortConvFields block;
  LinearWeights bcx, out;
  const float* taps = nullptr;       // [width, size]
  const float* taps_bias = nullptr;  // [size] or null
  float* states = nullptr;           // [slots, width - 1, size], in place
  // Of the step, made by kind.cc.
  const void* made_bcx = nullptr;  // [T, 3 * size]
  void* mixed = nullptr;           // [T, size]
};

namespace cpu {
// From the first product to the input of the last one.
Status short_conv(const ShortConvBlockParams& params);
}  // namespace cpu

}  // namespace regatta
