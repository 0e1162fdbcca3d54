#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

namespace regatta::device {
namespace {

// A text that any thread may set and any may read.
class SharedText {
 public:
  void set(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    text_ = std::move(text);
  }
  std::string get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

// Never destroyed: Paddle frees tensors while the process exits, after static destructors.
SharedText& error_text() {
  static SharedText* const text = new SharedText;
  return *text;
}

SharedText& out_of_memory_text() {
  static SharedText* const text = new SharedText;
  return *text;
}

thread_local int num_captures_here = 0;
thread_local bool leaves_queued = false;

struct Devices {
  std::vector<std::unique_ptr<Gpu>> gpus;
  std::string error;
};

Devices& devices() {
  static Devices* const devices = [] {
    auto* found = new Devices;
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
      cudaGetLastError();  // not an error of whoever calls CUDA next
      found->error = cudaGetErrorString(error);
      return found;
    }
    if (count == 0) found->error = "the driver shows no devices";
    for (int index = 0; index < count; ++index) {
      found->gpus.push_back(std::make_unique<Gpu>(index));
    }
    return found;
  }();
  return *devices;
}

std::string size_text(uint64_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB"};
  int unit = 0;
  double value = static_cast<double>(bytes);
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit ? "%.2f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

bool is_pool_off() {
  const char* const text = std::getenv("REGATTA_DEVICE_POOL");
  return text && std::strcmp(text, "off") == 0;
}

}  // namespace

bool succeeded(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  cudaGetLastError();
  const std::string text =
      std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  // Paddle's own message has the number of a status only.
  std::fprintf(stderr, "regatta device: %s\n", text.c_str());
  error_text().set(text);
  return false;
}

std::string last_error() { return error_text().get(); }

int num_devices() { return static_cast<int>(devices().gpus.size()); }

std::string device_error() { return devices().error; }

DeviceScope::DeviceScope(int device) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current != device &&
      succeeded(cudaSetDevice(device), "cudaSetDevice")) {
    previous_ = current;
  }
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

bool is_this_thread_capturing() { return num_captures_here > 0; }

bool& this_thread_leaves_queued() { return leaves_queued; }

Gpu::Gpu(int index) : index_(index), is_pooled_(!is_pool_off()), pool_(this) {
  succeeded(cudaGetDeviceProperties(&properties_, index), "cudaGetDeviceProperties");
}

void* Gpu::allocate(size_t bytes) {
  const DeviceScope scope(index_);
  const RelaxedCapture relaxed;
  void* pointer = nullptr;
  const cudaError_t error = cudaMalloc(&pointer, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  return succeeded(error, "cudaMalloc") ? pointer : nullptr;
}

void Gpu::release(void* pointer) {
  const DeviceScope scope(index_);
  const cudaError_t error = cudaFree(pointer);
  // At exit the driver may be gone before Paddle's last tensor; it has freed everything.
  if (error != cudaErrorCudartUnloading) succeeded(error, "cudaFree");
}

bool Gpu::synchronize() {
  if (is_any_stream_capturing()) return false;  // it would end the capture with an error
  const DeviceScope scope(index_);
  const cudaError_t error = cudaDeviceSynchronize();
  return error == cudaErrorCudartUnloading || succeeded(error, "cudaDeviceSynchronize");
}

void* Gpu::allocate_pooled(size_t bytes) {
  void* const pointer = is_pooled_ ? pool_.allocate(bytes) : allocate(bytes);
  if (pointer) return pointer;
  size_t free = 0, total = 0;
  {
    const DeviceScope scope(index_);
    cudaMemGetInfo(&free, &total);
  }
  const PoolStats stats = pool_.stats();
  std::string text = "GPU " + std::to_string(index_) + " (" + properties_.name +
                     ") is out of memory: " + size_text(bytes) + " were asked for (" +
                     std::to_string(bytes) + " bytes), " + size_text(free) + " of " +
                     size_text(total) + " are free, and this process holds " +
                     size_text(stats.held) + ", of which " + size_text(stats.in_use) +
                     " are in use";
  if (is_any_stream_capturing()) text += "; cached memory cannot be given back during a capture";
  out_of_memory_text().set(std::move(text));
  return nullptr;
}

bool Gpu::free_pooled(void* pointer) {
  if (is_pooled_) return pool_.free(pointer);
  if (!synchronize()) return true;  // a capture goes on and may need it: it stays
  release(pointer);
  return true;
}

cudaError_t Gpu::begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const cudaError_t error = cudaStreamBeginCapture(stream, mode);
  if (error == cudaSuccess) {
    ++num_captures_;
    ++num_captures_here;
  }
  return error;
}

cudaError_t Gpu::end_capture(cudaStream_t stream, cudaGraph_t* graph) {
  // A capture that failed on the way still ends here.
  if (is_capturing(stream)) {
    --num_captures_;
    num_captures_here = std::max(0, num_captures_here - 1);  // 0: another thread began it
  }
  return cudaStreamEndCapture(stream, graph);
}

Gpu* gpu(int index) {
  auto& gpus = devices().gpus;
  return index >= 0 && index < static_cast<int>(gpus.size()) ? gpus[index].get() : nullptr;
}

std::string out_of_memory() { return out_of_memory_text().get(); }

void enable_peer_access(int device, int peer) {
  static std::mutex* const mutex = new std::mutex;
  static std::set<std::pair<int, int>>* const done = new std::set<std::pair<int, int>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  if (device == peer || !done->emplace(device, peer).second) return;
  int possible = 0;
  if (cudaDeviceCanAccessPeer(&possible, device, peer) != cudaSuccess || !possible) {
    cudaGetLastError();  // copies between the two then go through host memory
    return;
  }
  const DeviceScope scope(device);
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    succeeded(error, "cudaDeviceEnablePeerAccess");
  }
}

}  // namespace regatta::device
