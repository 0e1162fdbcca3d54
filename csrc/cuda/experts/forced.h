// What REGATTA_KERNEL forces of expert blocks. Host code.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/common.cuh"

namespace regatta::cuda {

// The compute capability (* 10) whose kernels route, sort and multiply for experts: `own`, the
// GPU's, or an older one: REGATTA_KERNEL=experts=sm89, sm80 or sm75, so that kernels of every GPU
// can be tried on a new one.
inline int experts_capability(int own) {
  const std::string forced = forced_candidate("experts");
  for (const int capability : {89, 80, 75}) {
    if (forced == "sm" + std::to_string(capability)) return std::min(own, capability);
  }
  return own;
}

}  // namespace regatta::cuda
