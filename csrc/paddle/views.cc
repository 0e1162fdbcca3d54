// regatta_views(tensors...) -> views uint8 [N, sizeof(TensorView)]
//
// Where tensors lie, as one tensor that operators take in place of a list of them. It keeps none of
// them: they have to outlive it.
#include <cstring>

#include "common.h"

namespace regatta::binding {
namespace {

Tensors views_tensor(const Tensors& tensors) {
  if (tensors.empty()) fail("tensors is empty (allowed: one and more)");
  const std::vector<TensorView> list = views(tensors, "tensors", tensors[0].place());
  const int64_t row = sizeof(TensorView);
  paddle::Tensor out = empty({static_cast<int64_t>(list.size()), row}, DType::kUInt8);
  std::memcpy(out.data(), list.data(), list.size() * sizeof(TensorView));
  return {out};
}

std::vector<Shape> infer_shape(const std::vector<Shape>& tensors) {
  return {{static_cast<int64_t>(tensors.size()), static_cast<int64_t>(sizeof(TensorView))}};
}

std::vector<Type> infer_dtype(const std::vector<Type>&) { return {Type::UINT8}; }

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_views)
    .Inputs({paddle::Vec("tensors")})
    .Outputs({"views"})
    .SetKernelFn(PD_KERNEL(regatta::binding::views_tensor))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
