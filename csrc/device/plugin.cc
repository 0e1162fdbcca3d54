// The NVIDIA GPU as a Paddle custom device, for Paddle builds that have no CUDA of their own.
//
// Paddle loads this library from the folder that CUSTOM_DEVICE_ROOT names, when it is imported, and
// calls InitPlugin, which fills the table of functions below. Devices "nvgpu:0", ... then have CUDA
// streams and CUDA memory. Operators that are not in our library fall back to Paddle's CPU kernels.
//
// What Paddle's side expects beyond the header's comments
//  * device_memory_allocate: success with a null pointer means out of memory. Paddle then frees its
//    own idle chunks and asks again; any other status is an error at once.
//  * synchronize_stream is called at the end of paddle.inference's run: under capture it must
//    succeed, and else the host would not run ahead (regatta_device_leave_queued).
//  * init_blas_handle and init_blaslt_handle must give something that is not null.
//  * query functions: anything but success means "not yet".
// CUDA graphs: memory that a captured graph uses must not be given to others afterwards. A stream
// on which only captures run has an allocator and memory of its own (predict/device/devices.py).
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "paddle/phi/backends/device_ext.h"
#include "runtime.h"

namespace regatta::device {
namespace {

constexpr char kDeviceType[] = "nvgpu";

cudaStream_t cuda(C_Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t cuda(C_Event event) { return reinterpret_cast<cudaEvent_t>(event); }

C_Status status(cudaError_t error, const char* what) {
  return succeeded(error, what) ? C_SUCCESS : C_FAILED;
}
#define REGATTA_STATUS(call) status((call), #call)

// At exit Paddle destroys streams and events after the driver may have gone, with all they held.
C_Status status_at_exit(cudaError_t error, const char* what) {
  return error == cudaErrorCudartUnloading ? C_SUCCESS : status(error, what);
}

C_Status succeed() { return C_SUCCESS; }
C_Status succeed_for(const C_Device) { return C_SUCCESS; }

// devices

C_Status get_device_count(size_t* count) {
  *count = num_devices();
  return C_SUCCESS;
}

C_Status get_device_list(size_t* devices) {
  for (int i = 0; i < num_devices(); ++i) devices[i] = i;
  return C_SUCCESS;
}

C_Status set_device(const C_Device device) { return REGATTA_STATUS(cudaSetDevice(device->id)); }

C_Status init_device(const C_Device device) {
  // The first call that needs a context makes it, which takes a fraction of a second: now.
  return set_device(device) == C_SUCCESS ? REGATTA_STATUS(cudaFree(nullptr)) : C_FAILED;
}

C_Status get_device(const C_Device device) { return REGATTA_STATUS(cudaGetDevice(&device->id)); }

C_Status synchronize_device(const C_Device device) {
  // Under capture nothing has been queued that could be waited for, and waiting would spoil it.
  if (gpu(device->id)->is_any_stream_capturing()) return C_SUCCESS;
  const DeviceScope scope(device->id);
  return REGATTA_STATUS(cudaDeviceSynchronize());
}

// streams and events

C_Status create_stream(const C_Device device, C_Stream* stream) {
  const DeviceScope scope(device->id);
  return REGATTA_STATUS(
      cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking));
}

C_Status destroy_stream(const C_Device, C_Stream stream) {
  return status_at_exit(cudaStreamDestroy(cuda(stream)), "cudaStreamDestroy");
}

C_Status query_stream(const C_Device, C_Stream stream) {
  const cudaError_t error = cudaStreamQuery(cuda(stream));
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return C_FAILED;
  }
  return status(error, "cudaStreamQuery");
}

C_Status synchronize_stream(const C_Device, C_Stream stream) {
  if (is_capturing(cuda(stream)) || this_thread_leaves_queued()) return C_SUCCESS;
  return REGATTA_STATUS(cudaStreamSynchronize(cuda(stream)));
}

struct HostCallback {
  C_Device_st device;
  C_Stream stream;
  C_Callback function;
  void* data;
};

void CUDART_CB run_callback(void* pointer) {
  const std::unique_ptr<HostCallback> callback(static_cast<HostCallback*>(pointer));
  C_Status ignored = C_SUCCESS;
  callback->function(&callback->device, callback->stream, callback->data, &ignored);
}

C_Status stream_add_callback(const C_Device device, C_Stream stream, C_Callback function,
                             void* data) {
  if (is_capturing(cuda(stream))) {
    // It frees what it is called with: replayed, it would do so again each time.
    return status(cudaErrorStreamCaptureUnsupported, "a host callback during a capture");
  }
  auto callback = std::make_unique<HostCallback>(HostCallback{*device, stream, function, data});
  const C_Status result =
      REGATTA_STATUS(cudaLaunchHostFunc(cuda(stream), run_callback, callback.get()));
  if (result == C_SUCCESS) callback.release();  // run_callback owns it now
  return result;
}

C_Status create_event(const C_Device device, C_Event* event) {
  const DeviceScope scope(device->id);
  return REGATTA_STATUS(
      cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
}

C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  return REGATTA_STATUS(cudaEventRecord(cuda(event), cuda(stream)));
}

C_Status destroy_event(const C_Device, C_Event event) {
  return status_at_exit(cudaEventDestroy(cuda(event)), "cudaEventDestroy");
}

C_Status query_event(const C_Device, C_Event event) {
  const cudaError_t error = cudaEventQuery(cuda(event));
  if (error == cudaErrorNotReady || error == cudaErrorCapturedEvent) {
    cudaGetLastError();
    return C_FAILED;
  }
  return status(error, "cudaEventQuery");
}

C_Status synchronize_event(const C_Device, C_Event event) {
  return REGATTA_STATUS(cudaEventSynchronize(cuda(event)));
}

C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  return REGATTA_STATUS(cudaStreamWaitEvent(cuda(stream), cuda(event), 0));
}

// memory

C_Status allocate(const C_Device device, void** pointer, size_t size) {
  *pointer = gpu(device->id)->allocate_pooled(size);
  return C_SUCCESS;
}

C_Status deallocate(const C_Device device, void* pointer, size_t) {
  return gpu(device->id)->free_pooled(pointer) ? C_SUCCESS : C_ERROR;
}

C_Status allocate_host(const C_Device device, void** pointer, size_t size) {
  const DeviceScope scope(device->id);
  const RelaxedCapture relaxed;
  return REGATTA_STATUS(cudaHostAlloc(pointer, size, cudaHostAllocPortable));
}

C_Status deallocate_host(const C_Device, void* pointer, size_t) {
  return status_at_exit(cudaFreeHost(pointer), "cudaFreeHost");
}

constexpr char kFallback[] =
    "a copy during a capture (an operator that has no GPU kernel and fell back to the CPU, or a "
    "tensor made from Python values?)";

// Synchronous work has a stream of its own: Paddle's streams do not order themselves with CUDA's
// default one, and that one may not be used while another stream is being captured. In the thread
// that captures it is refused: it would run now, and be missing from each replay.
template <class Queue>
C_Status run_now(const C_Device device, const char* what, Queue queue) {
  if (is_this_thread_capturing()) return status(cudaErrorStreamCaptureUnsupported, kFallback);
  const DeviceScope scope(device->id);
  const RelaxedCapture relaxed;
  const C_Status result = status(queue(cudaStreamPerThread), what);
  return result == C_SUCCESS ? REGATTA_STATUS(cudaStreamSynchronize(cudaStreamPerThread)) : result;
}

C_Status set_memory(const C_Device device, void* pointer, unsigned char value, size_t size) {
  return run_now(device, "cudaMemsetAsync", [=](cudaStream_t stream) {
    return cudaMemsetAsync(pointer, value, size, stream);
  });
}

template <cudaMemcpyKind kKind>
C_Status copy(const C_Device device, void* to, const void* from, size_t size) {
  return run_now(device, "cudaMemcpyAsync", [=](cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, kKind, stream);
  });
}

bool is_pageable(const void* pointer) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    cudaGetLastError();
    return true;
  }
  return attributes.type == cudaMemoryTypeUnregistered;
}

template <cudaMemcpyKind kKind>
C_Status copy_on_stream(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  if (kKind != cudaMemcpyDeviceToDevice && is_capturing(cuda(stream)) &&
      is_pageable(kKind == cudaMemcpyHostToDevice ? from : to)) {
    // A replay would copy from or to an address that is something else's by then.
    return status(cudaErrorStreamCaptureUnsupported, kFallback);
  }
  return REGATTA_STATUS(cudaMemcpyAsync(to, from, size, kKind, cuda(stream)));
}

C_Status copy_to_peer(const C_Device to_device, const C_Device from_device, void* to,
                      const void* from, size_t size) {
  enable_peer_access(from_device->id, to_device->id);
  return run_now(from_device, "cudaMemcpyPeerAsync", [=](cudaStream_t stream) {
    return cudaMemcpyPeerAsync(to, to_device->id, from, from_device->id, size, stream);
  });
}

C_Status copy_to_peer_on_stream(const C_Device to_device, const C_Device from_device,
                                C_Stream stream, void* to, const void* from, size_t size) {
  enable_peer_access(from_device->id, to_device->id);
  return REGATTA_STATUS(
      cudaMemcpyPeerAsync(to, to_device->id, from, from_device->id, size, cuda(stream)));
}

// What can still be had: the driver's free memory and the pool's.
C_Status memory_stats(const C_Device device, size_t* total, size_t* free) {
  const DeviceScope scope(device->id);
  const C_Status result = REGATTA_STATUS(cudaMemGetInfo(free, total));
  const PoolStats stats = gpu(device->id)->pool().stats();
  *free += stats.held - stats.in_use;
  return result;
}

C_Status min_chunk_size(const C_Device, size_t* size) {
  *size = 256;  // what cudaMalloc guarantees, and more than the widest access (128 bytes) needs
  return C_SUCCESS;
}

// properties

int attribute(const C_Device device, cudaDeviceAttr name) {
  int value = 0;
  succeeded(cudaDeviceGetAttribute(&value, name, device->id), "cudaDeviceGetAttribute");
  return value;
}

template <cudaDeviceAttr kName>
C_Status attribute_of(const C_Device device, size_t* value) {
  *value = attribute(device, kName);
  return C_SUCCESS;
}

C_Status compute_capability(const C_Device device, size_t* value) {
  const cudaDeviceProp& properties = gpu(device->id)->properties();
  *value = properties.major * 10 + properties.minor;
  return C_SUCCESS;
}

C_Status runtime_version(const C_Device, size_t* value) {
  int version = 0;
  const C_Status result = REGATTA_STATUS(cudaRuntimeGetVersion(&version));
  *value = version;
  return result;
}

C_Status driver_version(const C_Device, size_t* value) {
  int version = 0;
  const C_Status result = REGATTA_STATUS(cudaDriverGetVersion(&version));
  *value = version;
  return result;
}

C_Status max_grid_dim_size(const C_Device device, std::array<unsigned int, 3>* size) {
  const int* const limits = gpu(device->id)->properties().maxGridSize;
  for (int i = 0; i < 3; ++i) (*size)[i] = limits[i];
  return C_SUCCESS;
}

template <int kOldest>
C_Status is_supported_from(const C_Device device, bool* supported) {
  size_t capability = 0;
  compute_capability(device, &capability);
  *supported = capability >= kOldest;
  return C_SUCCESS;
}

C_Status no_dnn(const C_Device, bool* supported) {
  *supported = false;
  return C_SUCCESS;
}

// BLAS handles that are not null, and not used

int placeholder;

C_Status init_blas(const C_Device, C_BLASHandle* handle, C_Stream) {
  *handle = reinterpret_cast<C_BLASHandle>(&placeholder);
  return C_SUCCESS;
}

C_Status init_blaslt(const C_Device, C_BLASLtHandle* handle) {
  *handle = reinterpret_cast<C_BLASLtHandle>(&placeholder);
  return C_SUCCESS;
}

C_Status set_blas_mode(const C_Device, C_BLASHandle, int) { return C_SUCCESS; }
C_Status destroy_blas(const C_Device, C_BLASHandle) { return C_SUCCESS; }
C_Status destroy_blaslt(const C_Device, C_BLASLtHandle) { return C_SUCCESS; }

// CUDA graphs, behind paddle.device.cuda.graphs.CUDAGraph

cudaStreamCaptureMode cuda(C_StreamCaptureMode mode) {
  switch (mode) {
    case C_StreamCaptureModeGlobal:
      return cudaStreamCaptureModeGlobal;
    case C_StreamCaptureModeThreadLocal:
      return cudaStreamCaptureModeThreadLocal;
    default:
      return cudaStreamCaptureModeRelaxed;
  }
}

C_StreamCaptureMode paddle_mode(cudaStreamCaptureMode mode) {
  switch (mode) {
    case cudaStreamCaptureModeGlobal:
      return C_StreamCaptureModeGlobal;
    case cudaStreamCaptureModeThreadLocal:
      return C_StreamCaptureModeThreadLocal;
    default:
      return C_StreamCaptureModeRelaxed;
  }
}

C_Status begin_capture(const C_Device device, C_Stream stream, C_StreamCaptureMode mode) {
  return status(gpu(device->id)->begin_capture(cuda(stream), cuda(mode)), "cudaStreamBeginCapture");
}

C_Status end_capture(const C_Device device, C_Stream stream, C_CudaGraph* graph) {
  return status(gpu(device->id)->end_capture(cuda(stream), reinterpret_cast<cudaGraph_t*>(graph)),
                "cudaStreamEndCapture");
}

C_Status instantiate_graph(C_GraphExec* executable, C_CudaGraph* graph, void**, char*, size_t) {
  return REGATTA_STATUS(cudaGraphInstantiate(reinterpret_cast<cudaGraphExec_t*>(executable),
                                             *reinterpret_cast<cudaGraph_t*>(graph), 0));
}

C_Status launch_graph(const C_Device, C_GraphExec executable, C_Stream stream) {
  return REGATTA_STATUS(
      cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(executable), cuda(stream)));
}

C_Status destroy_graph(C_CudaGraph graph) {
  return status_at_exit(cudaGraphDestroy(reinterpret_cast<cudaGraph_t>(graph)), "cudaGraphDestroy");
}

C_Status destroy_executable_graph(C_GraphExec executable) {
  return status_at_exit(cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(executable)),
                        "cudaGraphExecDestroy");
}

C_Status graph_nodes(C_CudaGraph graph, C_CudaGraphNode* nodes, size_t* count) {
  return REGATTA_STATUS(cudaGraphGetNodes(reinterpret_cast<cudaGraph_t>(graph),
                                          reinterpret_cast<cudaGraphNode_t*>(nodes), count));
}

C_Status capture_info(const C_Device, C_Stream stream, C_StreamCaptureStatus* capture_status,
                      unsigned long long* id,  // NOLINT: the header's type
                      C_CudaGraph*, C_CudaGraphNode*, void**, size_t*) {
  cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
  const C_Status result = REGATTA_STATUS(cudaStreamIsCapturing(cuda(stream), &found));
  // Both list none, active, invalidated in this order.
  if (capture_status) *capture_status = static_cast<C_StreamCaptureStatus>(found);
  if (id) *id = 0;
  return result;
}

// Paddle can change kernel parameters between replays; our operators read theirs from memory.
C_Status no_parameter_setters(C_CudaGraph, C_GraphHookManager* hooks) {
  if (hooks) *hooks = {0, nullptr, nullptr};
  return C_SUCCESS;
}

C_Status print_graph(C_CudaGraph graph, const char* path, unsigned int flags) {
  return REGATTA_STATUS(cudaGraphDebugDotPrint(reinterpret_cast<cudaGraph_t>(graph), path, flags));
}

C_Status exchange_capture_mode(C_StreamCaptureMode* mode) {
  cudaStreamCaptureMode exchanged = cuda(*mode);
  const C_Status result = REGATTA_STATUS(cudaThreadExchangeStreamCaptureMode(&exchanged));
  *mode = paddle_mode(exchanged);
  return result;
}

void fill(C_DeviceInterface* table) {
  std::memset(static_cast<void*>(table), 0, sizeof(*table));
  table->size = sizeof(*table);
  table->initialize = succeed;
  table->finalize = succeed;
  table->init_device = init_device;
  table->deinit_device = succeed_for;
  table->set_device = set_device;
  table->get_device = get_device;
  table->get_device_count = get_device_count;
  table->get_device_list = get_device_list;
  table->synchronize_device = synchronize_device;

  table->create_stream = create_stream;
  table->destroy_stream = destroy_stream;
  table->query_stream = query_stream;
  table->synchronize_stream = synchronize_stream;
  table->stream_add_callback = stream_add_callback;
  table->stream_wait_event = stream_wait_event;
  table->create_event = create_event;
  table->record_event = record_event;
  table->destroy_event = destroy_event;
  table->query_event = query_event;
  table->synchronize_event = synchronize_event;

  table->device_memory_allocate = allocate;
  table->device_memory_deallocate = deallocate;
  table->device_memory_set = set_memory;
  table->host_memory_allocate = allocate_host;
  table->host_memory_deallocate = deallocate_host;
  table->memory_copy_h2d = copy<cudaMemcpyHostToDevice>;
  table->memory_copy_d2h = copy<cudaMemcpyDeviceToHost>;
  table->memory_copy_d2d = copy<cudaMemcpyDeviceToDevice>;
  table->memory_copy_p2p = copy_to_peer;
  table->async_memory_copy_h2d = copy_on_stream<cudaMemcpyHostToDevice>;
  table->async_memory_copy_d2h = copy_on_stream<cudaMemcpyDeviceToHost>;
  table->async_memory_copy_d2d = copy_on_stream<cudaMemcpyDeviceToDevice>;
  table->async_memory_copy_p2p = copy_to_peer_on_stream;
  table->device_memory_stats = memory_stats;
  table->device_min_chunk_size = min_chunk_size;

  table->get_compute_capability = compute_capability;
  table->get_runtime_version = runtime_version;
  table->get_driver_version = driver_version;
  table->get_multi_process = attribute_of<cudaDevAttrMultiProcessorCount>;
  table->get_max_threads_per_mp = attribute_of<cudaDevAttrMaxThreadsPerMultiProcessor>;
  table->get_max_threads_per_block = attribute_of<cudaDevAttrMaxThreadsPerBlock>;
  table->get_max_grid_dim_size = max_grid_dim_size;
  table->is_float16_supported = is_supported_from<53>;
  table->is_bfloat16_supported = is_supported_from<80>;
  table->is_dnn_supported = no_dnn;

  table->init_blas_handle = init_blas;
  table->blas_set_math_mode = set_blas_mode;
  table->init_blaslt_handle = init_blaslt;
  table->destroy_blas_handle = destroy_blas;
  table->destroy_blaslt_handle = destroy_blaslt;

  table->cuda_stream_begin_capture = begin_capture;
  table->cuda_stream_end_captrue = end_capture;  // spelled so in the header
  table->cuda_graph_instantiate = instantiate_graph;
  table->cuda_graph_launch = launch_graph;
  table->cuda_graph_destroy = destroy_graph;
  table->cuda_graph_exec_destroy = destroy_executable_graph;
  table->cuda_graph_get_nodes = graph_nodes;
  table->cuda_stream_capture_info = capture_info;
  table->get_parameter_setter_for_exec_graph = no_parameter_setters;
  table->cuda_graph_debug_dot_print = print_graph;
  table->cuda_thread_exchange_stream_capthure_mode = exchange_capture_mode;
}

}  // namespace
}  // namespace regatta::device

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params);

namespace regatta::device {
namespace {

// Loads <this file's folder>/../libregatta_kernels.so, which adds to the kernels that Paddle
// registers once its plugins are loaded. It is a library of its own because it needs Paddle's
// symbols, and this one is also loaded where Paddle has not been imported; and in another folder
// because Paddle would take it for a plugin.
void load_kernels() {
  Dl_info own = {};
  dladdr(reinterpret_cast<void*>(&InitPlugin), &own);
  const std::string path(own.dli_fname ? own.dli_fname : "");
  const std::string kernels =
      path.substr(0, path.find_last_of('/') + 1) + "../libregatta_kernels.so";
  if (!dlopen(kernels.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    std::fprintf(stderr, "regatta device: views of tensors will not work: %s\n", dlerror());
  }
}

}  // namespace
}  // namespace regatta::device

void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(regatta::device::kDeviceType);
  params->sub_device_type = const_cast<char*>("");
  regatta::device::fill(params->interface);
  regatta::device::load_kernels();
}
