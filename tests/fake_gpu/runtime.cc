// The part of the CUDA runtime that csrc/device and csrc/paddle use, over ordinary memory:
// FAKE_CUDA_DEVICES devices (default 2) of FAKE_CUDA_BYTES bytes each (default 256 MiB). A capture
// records what is queued, and each launch of its graph repeats it. It is linked in the runtime's
// place, so that all but csrc/cuda is tested where there is no GPU.
//
// Work runs when it is queued; with FAKE_CUDA_LATE=1 as late as it may: when somebody waits for it.
// That shows who reads results too early, or changes what a copy has yet to read.
#include "runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

using Node = std::function<void()>;

struct CUstream_st {
  bool capturing = false;
  std::vector<Node> recorded;
  std::deque<Node> pending;
  uint64_t num_queued = 0, num_done = 0;
};
struct CUevent_st {
  CUstream_st* stream = nullptr;
  uint64_t position = 0;  // of the stream's nodes, those before it
};
struct CUgraph_st {
  std::vector<Node> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<Node>> nodes;
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
  bool is_late = setting("FAKE_CUDA_LATE", 0) != 0;
  std::recursive_mutex mutex;
  std::map<int, size_t> used;
  std::map<char*, Allocation> allocations;  // device -1: pinned host memory
  std::vector<CUstream_st*> streams;
  int num_capturing = 0;
  std::string failure;  // of work, until somebody hears of it
  std::string told;     // the last one that somebody heard of
};

thread_local int current = 0;

// Never destroyed: Paddle frees tensors while the process exits.
State& state() {
  static State* const state = new State;
  return *state;
}

using Lock = std::lock_guard<std::recursive_mutex>;

// What a call returns: its own error, or that of work before it.
cudaError_t result() {
  State& s = state();
  if (s.failure.empty()) return cudaSuccess;
  s.told = std::exchange(s.failure, {});
  return cudaErrorLaunchFailure;
}

// CUDA's own streams run at once: nothing here orders itself with them.
bool is_own(cudaStream_t stream) { return stream && stream != cudaStreamPerThread; }

void run_until(cudaStream_t stream, uint64_t position) {
  while (stream->num_done < position) {
    const Node node = std::move(stream->pending.front());
    stream->pending.pop_front();
    ++stream->num_done;
    node();
  }
}

void run_all(cudaStream_t stream) {
  if (is_own(stream)) run_until(stream, stream->num_queued);
}

cudaError_t queue(cudaStream_t stream, Node node) {
  if (!is_own(stream)) {
    node();
  } else if (stream->capturing) {
    stream->recorded.push_back(std::move(node));
  } else {
    stream->pending.push_back(std::move(node));
    ++stream->num_queued;
    if (!state().is_late) run_all(stream);
  }
  return result();
}

void run_everything() {
  for (CUstream_st* stream : state().streams) run_all(stream);
}

const Allocation* allocation_of(const void* pointer) {
  auto found =
      state().allocations.upper_bound(const_cast<char*>(static_cast<const char*>(pointer)));
  if (found == state().allocations.begin()) return nullptr;
  --found;
  const bool inside = static_cast<const char*>(pointer) < found->first + found->second.size;
  return inside ? &found->second : nullptr;
}

bool is_pageable(const void* pointer) { return allocation_of(pointer) == nullptr; }

}  // namespace

void fake_cuda_queue(CUstream_st* stream, std::function<void()> work) {
  const Lock lock(state().mutex);
  queue(stream, std::move(work));
}

void fake_cuda_fail(const std::string& message) { state().failure = message; }

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
  current = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Lock lock(state().mutex);
  if (state().num_capturing) return cudaErrorStreamCaptureUnsupported;
  run_everything();
  return result();
}
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) {
  *value = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorLaunchFailure) return state().told.c_str();
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "an error";
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
cudaError_t cudaGetLastError() {
  const Lock lock(state().mutex);
  return result();
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  State& s = state();
  const Lock lock(s.mutex);
  size_t& used = s.used[current];
  if (size > s.num_bytes || used > s.num_bytes - size) return cudaErrorMemoryAllocation;
  *pointer = std::aligned_alloc(512, (size + 511) / 512 * 512);
  std::memset(*pointer, 0xff, std::min(size, size_t{64} << 20));  // NaN in every float type
  s.allocations[static_cast<char*>(*pointer)] = {current, size};
  used += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  const Lock lock(state().mutex);
  run_everything();
  const auto found = state().allocations.find(static_cast<char*>(pointer));
  if (found == state().allocations.end()) return cudaErrorInvalidValue;
  state().used[found->second.device] -= found->second.size;
  state().allocations.erase(found);
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock(state().mutex);
  *total = state().num_bytes;
  *free = state().num_bytes - state().used[current];
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned int) {
  const Lock lock(state().mutex);
  *pointer = std::aligned_alloc(512, (size + 511) / 512 * 512);
  state().allocations[static_cast<char*>(*pointer)] = {-1, size};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  const Lock lock(state().mutex);
  run_everything();
  state().allocations.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(state().mutex);
  const Allocation* allocation = allocation_of(pointer);
  attributes->type = !allocation              ? cudaMemoryTypeUnregistered
                     : allocation->device < 0 ? cudaMemoryTypeHost
                                              : cudaMemoryTypeDevice;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  const Lock lock(state().mutex);
  const cudaError_t error = queue(stream, [=] { std::memmove(to, from, size); });
  // As CUDA does with memory that is not pinned.
  if (is_pageable(to) || is_pageable(from)) run_all(stream);
  return error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  const Lock lock(state().mutex);
  return queue(stream, [=] { std::memset(pointer, value, size); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const Lock lock(state().mutex);
  return queue(stream, [=] { function(data); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  const Lock lock(state().mutex);
  *stream = new CUstream_st;
  state().streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(state().mutex);
  run_all(stream);  // events may still point to it: it stays
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(state().mutex);
  if (is_own(stream) && stream->capturing) return cudaErrorStreamCaptureUnsupported;
  run_all(stream);
  return result();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const Lock lock(state().mutex);
  if (!event->stream) return cudaSuccess;
  return queue(stream,
               [from = event->stream, position = event->position] { run_until(from, position); });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool capturing = is_own(stream) && stream->capturing;
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const Lock lock(state().mutex);
  if (stream->capturing) return cudaErrorIllegalState;
  stream->capturing = true;
  stream->recorded.clear();
  ++state().num_capturing;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(state().mutex);
  if (!stream->capturing) return cudaErrorIllegalState;
  stream->capturing = false;
  --state().num_capturing;
  *graph = new CUgraph_st{std::move(stream->recorded)};
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraphExec_st{std::make_shared<const std::vector<Node>>(graph->nodes)};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const Lock lock(state().mutex);
  return queue(stream, [nodes = executable->nodes] {
    for (const Node& node : *nodes) node();
  });
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
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(state().mutex);
  const bool waits = is_own(stream) && !stream->capturing;
  *event = waits ? CUevent_st{stream, stream->num_queued} : CUevent_st{};
  return result();
}
// Late work is not done yet whenever it is asked for, and then runs: loops that ask still end.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(state().mutex);
  if (!event->stream || event->stream->num_done >= event->position) return result();
  run_until(event->stream, event->position);
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock lock(state().mutex);
  if (event->stream) run_until(event->stream, event->position);
  return result();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

}  // extern "C"
