// What the registrations give to CUDA's composed operators: scratch, cuBLASLt, launch limits.
#pragma once

#include "device.h"

#ifdef REGATTA_WITH_CUDA
#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"

namespace regatta::binding {

inline cuda::Launch launch_on(const Device& device) { return {device.stream, /*pdl=*/true}; }

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

// Scratch of a GPU, one piece for all calls: they are queued one after the other, and so are the
// replays of graphs that recorded calls. It grows by doubling; what was too small stays, because
// graphs may point into it, and so does the last one at exit, when the device is gone already.
inline void* scratch_of(const Device& device, int64_t bytes) {
  static std::mutex mutex;
  static auto* const pieces = new std::map<int, Tensors>;
  const std::lock_guard<std::mutex> lock(mutex);
  Tensors& mine = (*pieces)[device.place.GetDeviceId()];
  const int64_t size = mine.empty() ? 0 : mine.back().numel();
  if (size < bytes) {
    mine.push_back(device.empty({std::max(bytes, 2 * size)}, DType::kUInt8));
  }
  return mine.back().data();
}

inline cuda::ComposedResources resources_of(const Device& device, int64_t num_rows,
                                            int64_t scratch_bytes) {
  make_current(device);
  cuda::ComposedResources result;
  if (scratch_bytes > 0) {
    result.scratch = scratch_of(device, scratch_bytes);
    result.scratch_bytes = scratch_bytes;
  }
  // Small batches never use it, and loading it takes a good part of a second.
  if (num_rows > 128) result.blas = blas_of(device);
  return result;
}

}  // namespace regatta::binding

// Runs the operator OP of regatta::cpu or regatta::cuda, whichever the device is.
#define REGATTA_RUN(OP, PARAMS, DEVICE)       \
  do {                                        \
    if ((DEVICE).is_cpu()) {                  \
      throw_if_error(cpu::OP(PARAMS));        \
    } else {                                  \
      REGATTA_RUN_ON_GPU(OP, PARAMS, DEVICE); \
    }                                         \
  } while (false)
#define REGATTA_RUN_ON_GPU(OP, PARAMS, DEVICE)           \
  do {                                                   \
    make_current(DEVICE);                                \
    throw_if_error(cuda::OP(PARAMS, launch_on(DEVICE))); \
  } while (false)

#else
// device_of() and gpu_of() fail for GPUs.
#define REGATTA_RUN(OP, PARAMS, DEVICE) throw_if_error(cpu::OP(PARAMS))
#define REGATTA_RUN_ON_GPU(OP, PARAMS, DEVICE) static_cast<void>(PARAMS)
#endif
