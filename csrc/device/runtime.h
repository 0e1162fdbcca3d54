// The CUDA runtime as the plugin uses it: errors as text, the current device, one pool per device,
// and which streams are being captured into a graph. Works without a driver: there are no devices.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "memory_pool.h"

namespace regatta::device {

// True when `error` is success. Else says so on stderr, naming `what`, and keeps the text for
// last_error().
bool succeeded(cudaError_t error, const char* what);

// The text of the last failure of any thread, or "".
std::string last_error();

// The number of devices, 0 without a driver; `device_error()` then says why.
int num_devices();
std::string device_error();

// Makes `device` current in this scope: CUDA allocates, creates streams and launches on it.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

// Allows this thread calls that a capture in "global" mode forbids (cudaMalloc among them). They
// are harmless to the captured graph: they run at once and are no part of it.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

bool is_capturing(cudaStream_t stream);

// Whether this thread has begun a capture, on any stream, and not ended it.
bool is_this_thread_capturing();

// Whether waits for a stream return at once in this thread.
bool& this_thread_leaves_queued();

// One GPU: its memory, and how many captures are going on.
class Gpu : private MemorySource {
 public:
  explicit Gpu(int index);

  void* allocate(size_t bytes) override;  // of the device; see below for the pool's
  MemoryPool& pool() { return pool_; }

  // From the pool. Null when out of memory; out_of_memory() then holds the numbers.
  void* allocate_pooled(size_t bytes);
  bool free_pooled(void* pointer);  // false when it is not the pool's

  cudaError_t begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode);
  cudaError_t end_capture(cudaStream_t stream, cudaGraph_t* graph);
  bool is_any_stream_capturing() const { return num_captures_ > 0; }

  const cudaDeviceProp& properties() const { return properties_; }

 private:
  void release(void* pointer) override;
  bool synchronize() override;

  const int index_;
  // REGATTA_DEVICE_POOL=off: each piece comes from CUDA and goes back to it, slowly, so that
  // compute-sanitizer sees where it ends.
  const bool is_pooled_;
  std::atomic<int> num_captures_{0};
  cudaDeviceProp properties_{};
  MemoryPool pool_;
};

// The GPU with this index; null when there is none. Lives until the process ends.
Gpu* gpu(int index);

// What the last refused allocation asked for and found, as a sentence; "" before the first.
std::string out_of_memory();

// Lets `device` reach `peer`'s memory directly where the hardware can; once per pair.
void enable_peer_access(int device, int peer);

}  // namespace regatta::device
