// Where an operator runs: the device of its tensors, and the CUDA stream to launch on.
//
// One registration serves CPU tensors, tensors of a Paddle that has CUDA ("gpu:0"), and tensors of
// our plugin device on a Paddle that has none ("nvgpu:0", csrc/device). What is compiled in depends
// on the library: libregatta_cpu.so has the CPU only; libregatta_cuda.so is compiled with
// REGATTA_WITH_CUDA and has the CPU, and the one of the two GPU places that its Paddle knows.
//
//   const Device device = device_of(x, "x");
//   paddle::Tensor out = device.empty(shape, x_view.dtype);
//   if (device.is_cpu()) return cpu::op(params);
//   make_current(device);
//   cuda::op(params, {device.stream, /*pdl=*/true});
#pragma once

#include <string>
#include <vector>

#include "common.h"

#if defined(REGATTA_WITH_CUDA) && defined(PADDLE_WITH_CUDA)
#include "paddle/phi/backends/gpu/gpu_context.h"
#include "paddle/phi/backends/gpu/gpu_info.h"
#elif defined(REGATTA_WITH_CUDA)
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/backends/device_manager.h"
#endif
#ifdef REGATTA_WITH_CUDA
#include "paddle/phi/backends/context_pool.h"
#endif

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace regatta::binding {

// The type of the plugin's places; csrc/device/plugin.cc registers it.
constexpr char kPluginDeviceType[] = "nvgpu";

struct Device {
  phi::Place place;
  CUstream_st* stream = nullptr;  // the one that Paddle queues its own work of this thread on

  bool is_cpu() const { return place.GetType() == phi::AllocationType::CPU; }

  paddle::Tensor empty(const std::vector<int64_t>& shape, DType dtype) const {
    return paddle::empty(shape, paddle_dtype(dtype), place);
  }
};

// Fails unless `place` is one that this library computes on.
inline Device device_at(const phi::Place& place, const std::string& name) {
  if (place.GetType() == phi::AllocationType::CPU) return {place, nullptr};
#if defined(REGATTA_WITH_CUDA) && defined(PADDLE_WITH_CUDA)
  if (place.GetType() == phi::AllocationType::GPU) {
    const auto* context =
        static_cast<const phi::GPUContext*>(phi::DeviceContextPool::Instance().Get(place));
    return {place, context->stream()};
  }
#elif defined(REGATTA_WITH_CUDA)
  if (place.GetType() == phi::AllocationType::CUSTOM &&
      place.GetDeviceType() == kPluginDeviceType) {
    const auto* context =
        static_cast<const phi::CustomContext*>(phi::DeviceContextPool::Instance().Get(place));
    return {place, static_cast<CUstream_st*>(context->stream())};
  }
#endif
#ifdef REGATTA_WITH_CUDA
  fail(name + " is on " + place.DebugString() +
       ", and these operators compute on the CPU and on NVIDIA GPUs");
#else
  fail(name + " is on " + place.DebugString() +
       ", and this library computes on the CPU; move it there with .cpu(), or for a GPU build the "
       "CUDA library: python csrc/setup_cuda.py install");
#endif
}

// The device of `tensor`, which has memory; the CPU for an empty one without.
inline Device device_of(const paddle::Tensor& tensor, const char* name) {
  if (tensor.defined() && tensor.numel() == 0 && !tensor.has_allocation()) return {phi::CPUPlace()};
  if (!tensor.defined() || !tensor.has_allocation()) {
    fail(std::string(name) + " has no memory: it was never written");
  }
  return device_at(tensor.place(), name);
}

// The same, for operators that a CPU does not have.
inline Device gpu_of(const paddle::Tensor& tensor, const char* name) {
  const Device device = device_of(tensor, name);
  if (device.is_cpu()) fail(std::string(name) + " is on the CPU; this operator is for GPUs");
  return device;
}

// Fails unless `tensor` is on `device`; an empty one may be anywhere.
inline void check_device(const paddle::Tensor& tensor, const char* name, const Device& device) {
  if (tensor.numel() == 0 || tensor.place() == device.place) return;
  fail(std::string(name) + " is on " + tensor.place().DebugString() +
       ", the other tensors are on " + device.place.DebugString() + "; move it there first");
}

// Makes a GPU the calling thread's current one, which CUDA launches on; nothing for the CPU. Paddle
// does the same before its own operators and expects no other to be restored.
inline void make_current(const Device& device) {
  if (device.is_cpu()) return;
#if defined(REGATTA_WITH_CUDA) && defined(PADDLE_WITH_CUDA)
  phi::backends::gpu::SetDeviceId(device.place.GetDeviceId());
#elif defined(REGATTA_WITH_CUDA)
  phi::DeviceManager::SetDevice(device.place);
#endif
}

}  // namespace regatta::binding
