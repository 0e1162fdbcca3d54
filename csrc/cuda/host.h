// What host code here shares with and without kernels beside it: any C++ compiler takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
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

// Of the current device, times 10: 90 for sm_90; 0 where it cannot be asked. Asked once: launches
// want it.
inline int compute_capability() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices] = {};
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return 0;
  int capability = known[device].load(std::memory_order_relaxed);
  if (capability == 0) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    capability = major * 10 + minor;
    known[device].store(capability, std::memory_order_relaxed);
  }
  return capability;
}

}  // namespace regatta::cuda
