// regatta_add(a [T, N], b? [T, N]) {a_scale, b_scale} -> a_scale * a + b_scale * b [T, N]
#include "regatta/add.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> add(const paddle::Tensor& a, const paddle::optional<paddle::Tensor>& b,
                                float a_scale, float b_scale) {
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
  if (device.is_cpu()) throw_if_error(cpu::add(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    make_current(device);
    throw_if_error(cuda::add(params, launch_on(device)));
  }
#endif
  return {out};
}

using Shape = std::vector<int64_t>;

std::vector<Shape> infer_shape(const Shape& a, const paddle::optional<Shape>&, float, float) {
  return {a};
}

std::vector<paddle::DataType> infer_dtype(const paddle::DataType& a,
                                          const paddle::optional<paddle::DataType>&) {
  return {a};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_add)
    .Inputs({"a", paddle::Optional("b")})
    .Outputs({"out"})
    .Attrs({"a_scale: float", "b_scale: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::add))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
