// The short gated convolution between its products on GPUs. Host code.
#pragma once

#include "blocks/short_conv/block.h"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

// made_bcx -> mixed = c * conv(b * x), in float; rows behind the last span become zeros. The slots
// that a request reads and writes differ.
Status short_conv(const ShortConvBlockParams& params, const Launch& launch);

}  // namespace regatta::cuda
