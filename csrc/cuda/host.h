// What host code here shares with and without kernels beside it: any C++ compiler takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/integers.h"
#include "regatta/types.h"

namespace regatta::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                       cudaGetErrorString(error));
}

// Of a kernel that says why it does not do something, or null.
inline Status refusal(const char* kernel, const char* reason) {
  return reason == nullptr ? Status() : Status::error(std::string(kernel) + ": " + reason);
}

// Whether what this thread launches gives a row the same result whatever rows are beside it, and
// however many: every sum in an order of its own, at some cost. Set by
// regatta_set_batch_invariant().
inline thread_local bool is_batch_invariant = false;

}  // namespace regatta::cuda
