// What host code here shares with and without kernels beside it: any C++ compiler takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "regatta/types.h"

namespace regatta::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                       cudaGetErrorString(error));
}

// Whether what this thread launches gives a row the same result whatever rows are beside it, and
// however many: every sum in an order of its own, at some cost. Set by
// regatta_set_batch_invariant().
inline thread_local bool is_batch_invariant = false;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace regatta::cuda
