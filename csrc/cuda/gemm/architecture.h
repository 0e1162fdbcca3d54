// What the current device is, as kernels are chosen for it.
#pragma once

#include "cuda/gemm/select.h"

namespace regatta::cuda {

// Asked once a device: every product wants it.
GemmArchitecture current_architecture();

}  // namespace regatta::cuda
