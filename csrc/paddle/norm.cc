// regatta_norm(x [T, H], weight [H], bias? [H], residual? [T, H]) {kind, epsilon, plus_one}
//     -> out [T, H], residual_out [T, H]
// kind: of regatta/norm.h. A weight [P, D] norms the first P parts of each row, of D values each
// and each with its own row of weight and bias [P, D]; the parts behind them stay as they are.
#include "regatta/norm.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors norm(const paddle::Tensor& x, const paddle::Tensor& weight, const MaybeTensor& bias,
             const MaybeTensor& residual, int64_t kind, float epsilon, bool plus_one) {
  if (kind < 0 || kind > static_cast<int64_t>(NormKind::kLayer)) {
    fail("kind is " + std::to_string(kind) + " (allowed: 0, RMS; 1, layer)");
  }
  const Device device = device_of(weight, "weight");
  const phi::Place& place = device.place;
  const TensorView x_view = view(x, "x", place);
  check_activation(x_view, "x");
  check_shape(x_view, "x", {-1, -1});
  const std::vector<int64_t> shape = {x_view.shape[0], x_view.shape[1]};
  paddle::Tensor out = device.empty(shape, x_view.dtype);
  paddle::Tensor residual_out = device.empty(shape, x_view.dtype);
  NormParams params;
  params.x = x_view.data;
  std::vector<int64_t> factors = {shape[1]};
  params.num_tokens = shape[0];
  params.hidden_size = shape[1];
  if (weight.dims().size() == 2) {
    factors = {weight.dims()[0], weight.dims()[1]};
    if (factors[1] < 1 || shape[1] % factors[1] != 0 || factors[0] * factors[1] > shape[1]) {
      fail("weight is " + runtime::dims_string(factors) + ", and rows of x have " +
           std::to_string(shape[1]) + " values: no whole number of its rows, or less than it has");
    }
    params.num_parts = shape[1] / factors[1];
    params.num_weights = factors[0];
    params.num_tokens = shape[0] * params.num_parts;
    params.hidden_size = factors[1];
  }
  params.weight = checked_view(weight, "weight", x_view.dtype, factors, place).data;
  params.bias = optional_view(bias, "bias", x_view.dtype, factors, place).data;
  params.residual = optional_view(residual, "residual", x_view.dtype, shape, place).data;
  params.out = out.data();
  params.residual_out = residual_out.data();
  params.epsilon = epsilon;
  params.dtype = x_view.dtype;
  params.kind = static_cast<NormKind>(kind);
  params.plus_one = plus_one;
  REGATTA_RUN(norm, params, device);
  return {out, residual_out};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_norm)
    .Inputs({"x", "weight", paddle::Optional("bias"), paddle::Optional("residual")})
    .Outputs({"out", "residual_out"})
    .Attrs({"kind: int64_t", "epsilon: float", "plus_one: bool"})
    .SetKernelFn(PD_KERNEL(regatta::binding::norm))
    .SetInferShapeFn(regatta::binding::shapes_of<0, 0>)
    .SetInferDtypeFn(regatta::binding::types_of<0, 0>);
