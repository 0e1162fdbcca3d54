// Two operators that the tests call: registered as ours are, through csrc/paddle/device.h.
#include "axpb.h"
#include "device.h"
#include "paddle/phi/api/ext/op_meta_info.h"

namespace regatta::binding {
namespace {

void run(const Device& device, const float* x, float* y, float a, float b, int64_t n) {
  if (device.is_cpu()) {
    for (int64_t i = 0; i < n; ++i) y[i] = a * x[i] + b;
    return;
  }
  make_current(device);
  launch_axpb(x, y, a, b, n, device.stream);
}

std::vector<paddle::Tensor> axpb(const paddle::Tensor& x, float a, float b) {
  const Device device = device_of(x, "x");
  paddle::Tensor y = device.empty(x.shape(), dtype_of(x, "x"));
  run(device, x.data<float>(), y.data<float>(), a, b, x.numel());
  return {y};
}

std::vector<paddle::Tensor> scale_into(paddle::Tensor& cache, const paddle::Tensor& x, float a) {
  const Device device = device_of(cache, "cache");
  check_device(x, "x", device);
  run(device, x.data<float>(), cache.data<float>(), a, 0.0f, x.numel());
  return {cache};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_test_axpb)
    .Inputs({"x"})
    .Outputs({"y"})
    .Attrs({"a: float", "b: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::axpb));
PD_BUILD_OP(regatta_test_scale_into)
    .Inputs({"cache", "x"})
    .Outputs({"cache_out"})
    .SetInplaceMap({{"cache", "cache_out"}})
    .Attrs({"a: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::scale_into));
