// regatta_relu_squared(x [T, W]) -> [T, W]
#include "regatta/relu_squared.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> relu_squared(const paddle::Tensor& x) {
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

std::vector<std::vector<int64_t>> infer_shape(const std::vector<int64_t>& x) { return {x}; }

std::vector<paddle::DataType> infer_dtype(const paddle::DataType& x) { return {x}; }

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_relu_squared)
    .Inputs({"x"})
    .Outputs({"out"})
    .SetKernelFn(PD_KERNEL(regatta::binding::relu_squared))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
