// This process's GPU as one of the ranks of a model.
#pragma once

#include "cuda/ranks/exchange.cuh"

namespace regatta::cuda {

// Null where a model has one rank. Kernels that take it run in the same order, with the same sizes
// and grids, on all ranks.
const Exchange* current_exchange();

}  // namespace regatta::cuda
