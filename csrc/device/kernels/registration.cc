// Kernels of Paddle itself. Two have no fallback to the CPU: a view (slice, transpose) of a tensor
// on the plugin's device could neither be read by an operator nor be written to without them. The
// third is what clone() runs, whose fallback waits for the device and cannot be recorded into a
// graph. The plugin loads this library when Paddle loads the plugin.
#include <vector>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/backends/device_manager.h"
#include "paddle/phi/core/kernel_registry.h"
#include "paddle/phi/core/tensor_utils.h"
#include "strided_copy.h"

namespace {

void copy(const phi::CustomContext& context, const phi::DenseTensor& from, phi::DenseTensor* to) {
  regatta::device::StridedCopy task;
  task.from = from.data();
  task.to = to->data();
  task.rank = from.dims().size();
  task.element_size = static_cast<int>(phi::SizeOf(from.dtype()));
  for (int dim = 0; dim < task.rank; ++dim) {
    task.shape[dim] = from.dims()[dim];
    task.from_strides[dim] = from.strides()[dim];
    task.to_strides[dim] = to->strides()[dim];
  }
  phi::DeviceManager::SetDevice(context.GetPlace());
  const char* const error =
      regatta::device::strided_copy(task, static_cast<CUstream_st*>(context.stream()));
  if (error) PADDLE_THROW(common::errors::External("strided_copy: %s", error));
}

}  // namespace

// In the global namespace, where Paddle's macro instantiates them.

template <class T, class Context>
void regatta_contiguous(const Context& context, const phi::DenseTensor& input,
                        phi::DenseTensor* out) {
  phi::DenseTensorMeta meta = input.meta();
  meta.strides = phi::DenseTensorMeta::calc_strides(meta.dims);
  meta.offset = 0;
  out->set_meta(meta);
  context.template Alloc<T>(out);
  if (input.numel() > 0) copy(context, input, out);
}

// Writes `input` into the view of out's memory that dims, out_stride and offset (bytes) describe.
template <class T, class Context>
void regatta_strided_copy(const Context& context, const phi::DenseTensor& input,
                          const std::vector<int64_t>& dims, const std::vector<int64_t>& out_stride,
                          int64_t offset, phi::DenseTensor* out) {
  phi::DenseTensorMeta meta = input.meta();
  meta.dims = common::make_ddim(dims);
  meta.strides = common::make_ddim(out_stride);
  meta.offset = offset;
  out->set_meta(meta);
  PADDLE_ENFORCE_EQ(
      input.dims(), out->dims(),
      common::errors::InvalidArgument("a tensor of shape [%s] cannot be written into a view of "
                                      "shape [%s]; make the shapes alike",
                                      input.dims(), out->dims()));
  if (input.numel() > 0) copy(context, input, out);
}

template <class T, class Context>
void regatta_assign(const Context& context, const phi::DenseTensor& input, phi::DenseTensor* out) {
  phi::Copy(context, input, context.GetPlace(), /*blocking=*/false, out);
}

PD_REGISTER_PLUGIN_KERNEL(assign, nvgpu, ALL_LAYOUT, regatta_assign, bool, uint8_t, int8_t, int16_t,
                          int32_t, int64_t, float, double, phi::dtype::float16,
                          phi::dtype::bfloat16, phi::dtype::float8_e4m3fn,
                          phi::dtype::float8_e5m2) {}
PD_REGISTER_PLUGIN_KERNEL(contiguous, nvgpu, ALL_LAYOUT, regatta_contiguous, bool, uint8_t, int8_t,
                          int16_t, int32_t, int64_t, float, double, phi::dtype::float16,
                          phi::dtype::bfloat16, phi::dtype::float8_e4m3fn,
                          phi::dtype::float8_e5m2) {}
PD_REGISTER_PLUGIN_KERNEL(strided_copy, nvgpu, ALL_LAYOUT, regatta_strided_copy, bool, uint8_t,
                          int8_t, int16_t, int32_t, int64_t, float, double, phi::dtype::float16,
                          phi::dtype::bfloat16, phi::dtype::float8_e4m3fn,
                          phi::dtype::float8_e5m2) {}
