// regatta_activate(x [T, I], or with a gate [T, 2I]) {function, gated, clamp, slope, up_offset}
//     -> [T, I]
// As regatta/activate.h has them.
#include "regatta/activate.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors activate(const paddle::Tensor& x, int64_t function, bool gated, float clamp, float slope,
                 float up_offset) {
  if (function < 0 || function >= kNumFunctions) {
    fail("function is " + std::to_string(function) + " (allowed: 0 to " +
         std::to_string(kNumFunctions - 1) + ")");
  }
  const Device device = device_of(x, "x");
  const TensorView x_view = view(x, "x", device.place);
  check_activation(x_view, "x");
  check_shape(x_view, "x", {-1, -1});
  if (gated && x_view.shape[1] % 2) {
    fail("x has " + std::to_string(x_view.shape[1]) + " columns, expected an even number");
  }
  ActivateParams params;
  params.x = x_view.data;
  params.num_tokens = x_view.shape[0];
  params.intermediate_size = x_view.shape[1] / (gated ? 2 : 1);
  params.dtype = x_view.dtype;
  params.activation = {static_cast<Function>(function), gated, clamp, slope, up_offset};
  const bool of_silu = params.activation.function == Function::kSilu || slope == 1.0f;
  if (!params.activation.is_plain() && (!gated || !of_silu)) {
    fail("clamp, slope and up_offset are of a gate, a slope of silu (allowed without: 0, 1, 0)");
  }
  paddle::Tensor out = device.empty({params.num_tokens, params.intermediate_size}, params.dtype);
  params.out = out.data();
  REGATTA_RUN(activate, params, device);
  return {out};
}

std::vector<Shape> infer_shape(const Shape& x, int64_t, bool gated, float, float, float) {
  return {{x[0], x[1] < 0 ? -1 : x[1] / (gated ? 2 : 1)}};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_activate)
    .Inputs({"x"})
    .Outputs({"out"})
    .Attrs({"function: int64_t", "gated: bool", "clamp: float", "slope: float", "up_offset: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::activate))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(regatta::binding::types_of<0>);
