// regatta_mlp_block(hidden [T, H], norm_weight [H], gate_up..., gate_up_bias? [2I], down...,
//                   down_bias? [H]) {scheme, intermediate_size, epsilon} -> hidden_out [T, H]
#include "regatta/mlp_block.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> mlp_block(const paddle::Tensor& hidden,
                                      const paddle::Tensor& norm_weight,
                                      const std::vector<paddle::Tensor>& gate_up,
                                      const paddle::optional<paddle::Tensor>& gate_up_bias,
                                      const std::vector<paddle::Tensor>& down,
                                      const paddle::optional<paddle::Tensor>& down_bias,
                                      const std::string& scheme, int64_t intermediate_size,
                                      float epsilon) {
  const Device device = device_of(norm_weight, "norm_weight");
  const phi::Place& place = device.place;
  const TensorView hidden_view = view(hidden, "hidden", place);
  check_activation(hidden_view, "hidden");
  check_shape(hidden_view, "hidden", {-1, -1});
  const DType dtype = hidden_view.dtype;
  const int64_t hidden_size = hidden_view.shape[1];
  const std::vector<TensorView> gate_up_views = views(gate_up, "gate_up", place);
  const std::vector<TensorView> down_views = views(down, "down", place);
  paddle::Tensor out = device.empty({hidden_view.shape[0], hidden_size}, dtype);
  MlpBlockParams params;
  params.hidden = hidden_view.data;
  params.norm_weight = checked_view(norm_weight, "norm_weight", dtype, {hidden_size}, place).data;
  params.gate_up = gate_up_views.data();
  params.num_gate_up = static_cast<int>(gate_up_views.size());
  params.gate_up_bias =
      optional_view(gate_up_bias, "gate_up_bias", dtype, {2 * intermediate_size}, place).data;
  params.down = down_views.data();
  params.num_down = static_cast<int>(down_views.size());
  params.down_bias = optional_view(down_bias, "down_bias", dtype, {hidden_size}, place).data;
  params.out = out.data();
  params.num_tokens = hidden_view.shape[0];
  params.hidden_size = hidden_size;
  params.intermediate_size = intermediate_size;
  params.epsilon = epsilon;
  params.dtype = dtype;
  params.scheme = scheme;
  if (device.is_cpu()) throw_if_error(cpu::mlp_block(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const CudaResources resources =
        resources_of(device, params.num_tokens, cuda::mlp_block_scratch_bytes(params));
    throw_if_error(cuda::mlp_block(params, resources.composed, launch_on(device)));
  }
#endif
  return {out};
}

std::vector<std::vector<int64_t>> infer_shape(const std::vector<int64_t>& hidden,
                                              const std::vector<int64_t>&,
                                              const std::vector<std::vector<int64_t>>&,
                                              const paddle::optional<std::vector<int64_t>>&,
                                              const std::vector<std::vector<int64_t>>&,
                                              const paddle::optional<std::vector<int64_t>>&,
                                              const std::string&, int64_t, float) {
  return {hidden};
}

std::vector<paddle::DataType> infer_dtype(const paddle::DataType& hidden, const paddle::DataType&,
                                          const std::vector<paddle::DataType>&,
                                          const paddle::optional<paddle::DataType>&,
                                          const std::vector<paddle::DataType>&,
                                          const paddle::optional<paddle::DataType>&) {
  return {hidden};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_mlp_block)
    .Inputs({"hidden", "norm_weight", paddle::Vec("gate_up"), paddle::Optional("gate_up_bias"),
             paddle::Vec("down"), paddle::Optional("down_bias")})
    .Outputs({"hidden_out"})
    .Attrs({"scheme: std::string", "intermediate_size: int64_t", "epsilon: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::mlp_block))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
