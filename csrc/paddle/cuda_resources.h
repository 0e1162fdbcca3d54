// What the registrations give to CUDA's composed operators: scratch, cuBLASLt, launch limits.
#pragma once

#include "device.h"

#ifdef REGATTA_WITH_CUDA
#include <cstdio>
#include <map>
#include <mutex>

#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"

namespace regatta::binding {

inline cuda::Launch launch_on(const Device& device) { return {device.stream, /*pdl=*/true}; }

// The longest span and the longest context, which the caller keeps on the CPU.
inline cuda::AttentionLimits limits_of(const paddle::Tensor& max_lens) {
  const auto* lens = static_cast<const int32_t*>(
      checked_view(max_lens, "max_lens", DType::kInt32, {2}).data);
  return {lens[0], lens[1]};
}

// cuBLASLt's handle for a GPU, made at first use and kept; null where cuBLASLt is not there, said
// once. Its own kernels serve any number of rows then, slower for many.
inline void* blas_of(const Device& device) {
  static std::mutex mutex;
  static std::map<int, void*> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  const int index = device.place.GetDeviceId();
  const auto found = handles.find(index);
  if (found != handles.end()) return found->second;
  void* handle = nullptr;
  const Status status = cuda::create_blas(&handle);
  if (!status.ok()) {
    std::fprintf(stderr, "regatta: long prompts run without cuBLASLt: %s\n",
                 status.message().c_str());
  }
  return handles[index] = handle;
}

// Scratch lives as long as this: until the call's kernels are queued. Paddle gives the memory away
// in the order of the stream.
struct CudaResources {
  paddle::Tensor scratch;
  cuda::ComposedResources composed;
};

inline CudaResources resources_of(const Device& device, int64_t num_rows, int64_t scratch_bytes) {
  make_current(device);
  CudaResources result;
  if (scratch_bytes > 0) {
    result.scratch = device.empty({scratch_bytes}, DType::kUInt8);
    result.composed.scratch = result.scratch.data();
    result.composed.scratch_bytes = scratch_bytes;
  }
  // Small batches never use it, and loading it takes a good part of a second.
  if (num_rows > 128) result.composed.blas = blas_of(device);
  return result;
}

}  // namespace regatta::binding
#endif
