// What REGATTA_KERNEL forces of expert blocks. Host code.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/common.cuh"

namespace regatta::cuda {

// The compute capability (* 10) whose kernels route, sort and multiply for experts: `own`, the
// GPU's, or an older one: REGATTA_KERNEL=experts=sm80 or sm75, so that kernels of every GPU can be
// tried on a new one.
inline int experts_capability(int own) {
  const std::string forced = forced_candidate("experts");
  if (forced == "sm80") return std::min(own, 80);
  if (forced == "sm75") return std::min(own, 75);
  return own;
}

}  // namespace regatta::cuda
