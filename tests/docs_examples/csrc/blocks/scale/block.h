// The block's input times a factor, and the residual's sum.
#pragma once

#include "blocks/scale/record.h"
#include "regatta/blocks.h"

namespace regatta {

struct ScaleBlockParams : BlockParams {
  ScaleFields block;
};

}  // namespace regatta
