// The part of the CUDA runtime that csrc/device uses, over ordinary memory: FAKE_CUDA_DEVICES
// devices (default 2) of FAKE_CUDA_BYTES bytes each (default 256 MiB). Streams run at once; a
// capture records copies and memsets, and a launch repeats them. It is linked in the runtime's
// place, so that the plugin, Paddle's side of it and predict/device.py are tested where there is no
// GPU.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <vector>

using Node = std::function<void()>;

struct CUstream_st {
  bool capturing = false;
  std::vector<Node> nodes;
};
struct CUevent_st {
  bool captured = false;
};
struct CUgraph_st {
  std::vector<Node> nodes;
};
struct CUgraphExec_st {
  std::vector<Node> nodes;
};

namespace {

size_t setting(const char* name, size_t value) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : value;
}

struct Allocation {
  int device;
  size_t size;
};

struct State {
  int num_devices = static_cast<int>(setting("FAKE_CUDA_DEVICES", 2));
  size_t num_bytes = setting("FAKE_CUDA_BYTES", size_t{256} << 20);
  int current = 0;
  std::map<int, size_t> used;
  std::map<char*, Allocation> allocations;  // device -1: pinned host memory
  int num_capturing = 0;
};

State& state() {
  static State* const state = new State;
  return *state;
}

cudaError_t queue(cudaStream_t stream, Node node) {
  const bool has_state = stream && stream != cudaStreamPerThread;
  if (has_state && stream->capturing) {
    stream->nodes.push_back(std::move(node));
  } else {
    node();
  }
  return cudaSuccess;
}

const Allocation* allocation_of(const void* pointer) {
  auto found =
      state().allocations.upper_bound(const_cast<char*>(static_cast<const char*>(pointer)));
  if (found == state().allocations.begin()) return nullptr;
  --found;
  const bool inside = static_cast<const char*>(pointer) < found->first + found->second.size;
  return inside ? &found->second : nullptr;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = state().num_devices;
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "fake GPU");
  properties->major = 9;
  properties->totalGlobalMem = state().num_bytes;
  properties->multiProcessorCount = 132;
  for (int& limit : properties->maxGridSize) limit = 65535;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1024;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = state().num_devices ? CUDART_VERSION : 0;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= state().num_devices) return cudaErrorInvalidDevice;
  state().current = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = state().current;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return state().num_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "an error";
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaMalloc(void** pointer, size_t size) {
  State& s = state();
  size_t& used = s.used[s.current];
  if (size > s.num_bytes || used > s.num_bytes - size) return cudaErrorMemoryAllocation;
  *pointer = std::aligned_alloc(512, (size + 511) / 512 * 512);
  std::memset(*pointer, 0xff, size);  // NaN in every float type
  s.allocations[static_cast<char*>(*pointer)] = {s.current, size};
  used += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  const auto found = state().allocations.find(static_cast<char*>(pointer));
  if (found == state().allocations.end()) return cudaErrorInvalidValue;
  state().used[found->second.device] -= found->second.size;
  state().allocations.erase(found);
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = state().num_bytes;
  *free = state().num_bytes - state().used[state().current];
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned int) {
  *pointer = std::aligned_alloc(512, (size + 511) / 512 * 512);
  state().allocations[static_cast<char*>(*pointer)] = {-1, size};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  state().allocations.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Allocation* allocation = allocation_of(pointer);
  attributes->type = !allocation              ? cudaMemoryTypeUnregistered
                     : allocation->device < 0 ? cudaMemoryTypeHost
                                              : cudaMemoryTypeDevice;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  return queue(stream, [=] { std::memmove(to, from, size); });
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  return queue(stream, [=] { std::memset(pointer, value, size); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const bool capturing = stream && stream != cudaStreamPerThread && stream->capturing;
  return capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream->capturing) return cudaErrorIllegalState;
  stream->capturing = true;
  stream->nodes.clear();
  ++state().num_capturing;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!stream->capturing) return cudaErrorIllegalState;
  stream->capturing = false;
  --state().num_capturing;
  *graph = new CUgraph_st{stream->nodes};
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const Node& node : executable->nodes) node();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned int) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

}  // extern "C"
