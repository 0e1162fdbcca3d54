// regatta_add(a [T, N], b? [T, N]) {a_scale, b_scale} -> a_scale * a + b_scale * b [T, N]
#include "regatta/add.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors add(const paddle::Tensor& a, const MaybeTensor& b, float a_scale, float b_scale) {
  const Device device = device_of(a, "a");
  const TensorView a_view = view(a, "a", device.place);
  check_activation(a_view, "a");
  check_shape(a_view, "a", {-1, -1});
  const std::vector<int64_t> shape = {a_view.shape[0], a_view.shape[1]};
  AddParams params;
  params.a = a_view.data;
  params.b = optional_view(b, "b", a_view.dtype, shape, device.place).data;
  params.count = shape[0] * shape[1];
  params.a_scale = a_scale;
  params.b_scale = b_scale;
  params.dtype = a_view.dtype;
  paddle::Tensor out = device.empty(shape, params.dtype);
  params.out = out.data();
  REGATTA_RUN(add, params, device);
  return {out};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_add)
    .Inputs({"a", paddle::Optional("b")})
    .Outputs({"out"})
    .Attrs({"a_scale: float", "b_scale: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::add))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
