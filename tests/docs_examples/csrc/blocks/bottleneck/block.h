// x + up(gelu(down(norm(x)))), a few features wide (Houlsby et al. 2019).
#pragma once

#include "blocks/bottleneck/record.h"
#include "regatta/blocks.h"

namespace regatta {

struct BottleneckBlockParams : BlockParams {
  BottleneckFields block;
  LinearWeights down, up;

  Activation activation() const {
    Activation made;
    made.function = Function::kGelu;
    made.gated = false;
    return made;
  }
};

}  // namespace regatta
