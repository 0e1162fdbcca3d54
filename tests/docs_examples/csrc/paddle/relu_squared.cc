// regatta_relu_squared(x [T, W]) -> [T, W]
#include "regatta/relu_squared.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors relu_squared(const paddle::Tensor& x) {
  const Device device = device_of(x, "x");
  const TensorView x_view = view(x, "x", device.place);
  check_activation(x_view, "x");
  check_shape(x_view, "x", {-1, -1});
  ReluSquaredParams params;
  params.num_tokens = x_view.shape[0];
  params.width = x_view.shape[1];
  params.dtype = x_view.dtype;
  paddle::Tensor out = device.empty({params.num_tokens, params.width}, params.dtype);
  params.x = x_view.data;
  params.out = out.data();
  if (!device.is_cpu()) fail("relu_squared runs on the CPU only");
  throw_if_error(cpu::relu_squared(params));
  return {out};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_relu_squared)
    .Inputs({"x"})
    .Outputs({"out"})
    .SetKernelFn(PD_KERNEL(regatta::binding::relu_squared))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
