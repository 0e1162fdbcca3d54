// regatta_linear(x [T, K], weight..., bias? [N]) {scheme, out_features} -> [T, N]
#include "regatta/linear.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> linear(const paddle::Tensor& x,
                                   const std::vector<paddle::Tensor>& weight,
                                   const paddle::optional<paddle::Tensor>& bias,
                                   const std::string& scheme, int64_t out_features) {
  const Device device = weight.empty() ? device_of(x, "x") : device_of(weight[0], "weight");
  const TensorView x_view = view(x, "x", device.place);
  check_activation(x_view, "x");
  check_shape(x_view, "x", {-1, -1});
  const std::vector<TensorView> weight_views = views(weight, "weight", device.place);
  const TensorView bias_view =
      optional_view(bias, "bias", x_view.dtype, {out_features}, device.place);
  paddle::Tensor out = device.empty({x_view.shape[0], out_features}, x_view.dtype);
  LinearParams params;
  params.x = x_view.data;
  params.weight = weight_views.data();
  params.num_weights = static_cast<int>(weight_views.size());
  params.bias = bias_view.data;
  params.out = out.data();
  params.num_tokens = x_view.shape[0];
  params.in_features = x_view.shape[1];
  params.out_features = out_features;
  params.dtype = x_view.dtype;
  params.scheme = scheme_of(scheme);
  if (device.is_cpu()) throw_if_error(cpu::linear(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const CudaResources resources =
        resources_of(device, params.num_tokens, cuda::linear_scratch_bytes(params));
    throw_if_error(cuda::linear(params, resources.composed, launch_on(device)));
  }
#endif
  return {out};
}

std::vector<std::vector<int64_t>> infer_shape(const std::vector<int64_t>& x,
                                              const std::vector<std::vector<int64_t>>&,
                                              const paddle::optional<std::vector<int64_t>>&,
                                              const std::string&, int64_t out_features) {
  return {{x[0], out_features}};
}

std::vector<paddle::DataType> infer_dtype(const paddle::DataType& x,
                                          const std::vector<paddle::DataType>&,
                                          const paddle::optional<paddle::DataType>&) {
  return {x};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_linear)
    .Inputs({"x", paddle::Vec("weight"), paddle::Optional("bias")})
    .Outputs({"out"})
    .Attrs({"scheme: std::string", "out_features: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::linear))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
