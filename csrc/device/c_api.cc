// The C functions that predict/device/devices.py calls through ctypes: what Paddle's Python has no
// words for (which devices there are and why not, pinned memory, copies that overlap, graphs). They
// work on any CUDA memory and stream, so also beside a Paddle that has CUDA itself.
//
// Functions that can fail return 0 when done, else 1; regatta_device_error() is then the reason.
#include <cstdint>
#include <cstdio>
#include <string>

#include "regatta/abi.h"
#include "runtime.h"

namespace device = regatta::device;

namespace {

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return result + "\"";
}

// Stays valid until the thread's next call.
const char* keep(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

int result_of(cudaError_t error, const char* what) {
  return device::succeeded(error, what) ? 0 : 1;
}

}  // namespace

#define REGATTA_RESULT(call) result_of((call), #call)

namespace {

// How a device reaches another's memory: 0 not at all, 1 over PCIe, 2 over NVLink, where it can
// make atomic operations there.
int link_of(int device, int other) {
  int possible = device == other, atomics = possible;
  if (device != other && (cudaDeviceCanAccessPeer(&possible, device, other) != cudaSuccess ||
                          cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported,
                                                    device, other) != cudaSuccess)) {
    cudaGetLastError();
    possible = 0;
  }
  return possible ? 1 + (atomics != 0) : 0;
}

}  // namespace

// {"abi", "cuda": compiled for, "driver": newest CUDA that the driver serves (12040 is 12.4, 0
// without a driver), "error": why there are no devices, "devices": [{"name", "capability",
// "total_bytes", "num_multiprocessors", "links": to each device, see link_of()}]}
REGATTA_EXPORT const char* regatta_device_info() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
  std::string text = "{\"abi\": " + std::to_string(REGATTA_ABI) +
                     ", \"cuda\": " + std::to_string(CUDART_VERSION) +
                     ", \"driver\": " + std::to_string(driver) +
                     ", \"error\": " + quoted(device::device_error()) + ", \"devices\": [";
  for (int i = 0; i < device::num_devices(); ++i) {
    const cudaDeviceProp& properties = device::gpu(i)->properties();
    text += (i ? ", " : "") + ("{\"name\": " + quoted(properties.name)) + ", \"capability\": [" +
            std::to_string(properties.major) + ", " + std::to_string(properties.minor) +
            "], \"total_bytes\": " + std::to_string(properties.totalGlobalMem) +
            ", \"num_multiprocessors\": " + std::to_string(properties.multiProcessorCount) +
            ", \"links\": [";
    for (int j = 0; j < device::num_devices(); ++j) {
      text += (j ? ", " : "") + std::to_string(link_of(i, j));
    }
    text += "]}";
  }
  return keep(text + "]}");
}

REGATTA_EXPORT const char* regatta_device_error() { return keep(device::last_error()); }

// The last refused allocation, as a sentence with its numbers; "" before the first.
REGATTA_EXPORT const char* regatta_device_out_of_memory() { return keep(device::out_of_memory()); }

// numbers: [6], bytes: total, free (by the driver), held by this process's pool, of it in use, the
// most that was in use; then the number of segments.
REGATTA_EXPORT int regatta_device_memory(int index, uint64_t* numbers) {
  device::Gpu* const gpu = device::gpu(index);
  if (!gpu) return result_of(cudaErrorInvalidDevice, "regatta_device_memory");
  const device::DeviceScope scope(index);
  size_t free = 0, total = 0;
  const int result = REGATTA_RESULT(cudaMemGetInfo(&free, &total));
  const device::PoolStats stats = gpu->pool().stats();
  const uint64_t values[] = {
      total, free, stats.held, stats.in_use, stats.peak_in_use, stats.num_segments};
  for (int i = 0; i < 6; ++i) numbers[i] = values[i];
  return result;
}

// Gives the pool's free segments back to the driver; returns their bytes.
REGATTA_EXPORT uint64_t regatta_device_release_cached(int index) {
  device::Gpu* const gpu = device::gpu(index);
  return gpu ? gpu->pool().release_cached() : 0;
}

// See MemoryPool::keep, add_owner and drop_owner; what: 0 keep off, 1 keep on, 2 add an owner, 3
// drop one.
REGATTA_EXPORT void regatta_device_keep(int index, int what) {
  device::Gpu* const gpu = device::gpu(index);
  if (!gpu) return;
  if (what <= 1) gpu->pool().keep(what == 1);
  if (what == 2) gpu->pool().add_owner();
  if (what == 3) gpu->pool().drop_owner();
}

// Page-locked memory: copies from and to it overlap with other work. Null when there is none.
REGATTA_EXPORT void* regatta_device_pin(uint64_t bytes) {
  void* pointer = nullptr;
  const device::RelaxedCapture relaxed;
  return REGATTA_RESULT(cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable)) ? nullptr : pointer;
}

REGATTA_EXPORT void regatta_device_unpin(void* pointer) {
  if (cudaFreeHost(pointer) != cudaSuccess) cudaGetLastError();  // at exit: freed already
}

// Whether waits of this thread for a stream return at once; returns what was so before.
REGATTA_EXPORT int regatta_device_leave_queued(int on) {
  bool& leaves = device::this_thread_leaves_queued();
  const bool before = leaves;
  leaves = on != 0;
  return before;
}

// Between any two of device memory and pinned memory, in the order of `stream`.
REGATTA_EXPORT int regatta_device_copy(void* to, const void* from, uint64_t bytes, void* stream) {
  return REGATTA_RESULT(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

// An event; with timing, regatta_device_elapsed can read it. Null when it failed.
REGATTA_EXPORT void* regatta_device_create_event(int timing) {
  cudaEvent_t event = nullptr;
  const unsigned flags = timing ? cudaEventDefault : cudaEventDisableTiming;
  REGATTA_RESULT(cudaEventCreateWithFlags(&event, flags));
  return event;
}

REGATTA_EXPORT void regatta_device_destroy_event(void* event) {
  if (cudaEventDestroy(static_cast<cudaEvent_t>(event)) != cudaSuccess) cudaGetLastError();
}

REGATTA_EXPORT int regatta_device_record(void* event, void* stream) {
  return REGATTA_RESULT(
      cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}

REGATTA_EXPORT int regatta_device_synchronize_event(void* event) {
  return REGATTA_RESULT(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
}

// Milliseconds between two timing events that are done; negative when it failed.
REGATTA_EXPORT float regatta_device_elapsed(void* first, void* second) {
  float milliseconds = -1;
  REGATTA_RESULT(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(first),
                                      static_cast<cudaEvent_t>(second)));
  return milliseconds;
}

// What is queued on `stream` from now on is recorded, not run.
REGATTA_EXPORT int regatta_device_begin_capture(int index, void* stream) {
  device::Gpu* const gpu = device::gpu(index);
  if (!gpu) return result_of(cudaErrorInvalidDevice, "regatta_device_begin_capture");
  // Relaxed: another thread's (or Paddle's) cudaMalloc must not end the capture.
  return result_of(
      gpu->begin_capture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeRelaxed),
      "cudaStreamBeginCapture");
}

// Ends the recording; the graph, ready to launch, or null when something in it cannot be recorded.
// num_nodes: of the graph.
REGATTA_EXPORT void* regatta_device_end_capture(int index, void* stream, uint64_t* num_nodes) {
  device::Gpu* const gpu = device::gpu(index);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (!gpu || result_of(gpu->end_capture(static_cast<cudaStream_t>(stream), &graph),
                        "cudaStreamEndCapture")) {
    return nullptr;
  }
  size_t count = 0;
  if (REGATTA_RESULT(cudaGraphGetNodes(graph, nullptr, &count)) ||
      REGATTA_RESULT(cudaGraphInstantiate(&executable, graph, 0))) {
    executable = nullptr;
  }
  *num_nodes = count;
  cudaGraphDestroy(graph);
  return executable;
}

REGATTA_EXPORT int regatta_device_launch_graph(void* graph, void* stream) {
  return REGATTA_RESULT(
      cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream)));
}

REGATTA_EXPORT void regatta_device_destroy_graph(void* graph) {
  if (cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)) != cudaSuccess) {
    cudaGetLastError();
  }
}
