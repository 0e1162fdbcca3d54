// regatta_rms_norm(x [T, H], weight [H], residual? [T, H]) {epsilon} -> out [T, H], residual_out
#include "regatta/rms_norm.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> rms_norm(const paddle::Tensor& x, const paddle::Tensor& weight,
                                     const paddle::optional<paddle::Tensor>& residual,
                                     float epsilon) {
  const Device device = device_of(weight, "weight");
  const phi::Place& place = device.place;
  const TensorView x_view = view(x, "x", place);
  check_activation(x_view, "x");
  check_shape(x_view, "x", {-1, -1});
  const std::vector<int64_t> shape = {x_view.shape[0], x_view.shape[1]};
  const TensorView weight_view = checked_view(weight, "weight", x_view.dtype, {shape[1]}, place);
  const TensorView residual_view = optional_view(residual, "residual", x_view.dtype, shape, place);
  paddle::Tensor out = device.empty(shape, x_view.dtype);
  paddle::Tensor residual_out = device.empty(shape, x_view.dtype);
  RmsNormParams params;
  params.x = x_view.data;
  params.weight = weight_view.data;
  params.residual = residual_view.data;
  params.out = out.data();
  params.residual_out = residual_out.data();
  params.num_tokens = shape[0];
  params.hidden_size = shape[1];
  params.epsilon = epsilon;
  params.dtype = x_view.dtype;
  if (device.is_cpu()) throw_if_error(cpu::rms_norm(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    make_current(device);
    throw_if_error(cuda::rms_norm(params, launch_on(device)));
  }
#endif
  return {out, residual_out};
}

std::vector<std::vector<int64_t>> infer_shape(const std::vector<int64_t>& x,
                                              const std::vector<int64_t>&,
                                              const paddle::optional<std::vector<int64_t>>&,
                                              float) {
  return {x, x};
}

std::vector<paddle::DataType> infer_dtype(const paddle::DataType& x, const paddle::DataType&,
                                          const paddle::optional<paddle::DataType>&) {
  return {x, x};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_rms_norm)
    .Inputs({"x", "weight", paddle::Optional("residual")})
    .Outputs({"out", "residual_out"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::rms_norm))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
