// What GPU it is, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace regatta::cuda {

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
