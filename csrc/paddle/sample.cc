// regatta_sample(logits [L, V] float32, temperature [L] float32, top_k [L] int32,
//     top_p [L] float32, seeds [L] int64, offsets [L] int64, optional min_p [L] float32,
//     optional typical_p [L] float32) -> token_ids [L] int32, -1 for a row that cannot
//     be drawn from
#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

Tensors sample(const paddle::Tensor& logits, const paddle::Tensor& temperature,
               const paddle::Tensor& top_k, const paddle::Tensor& top_p,
               const paddle::Tensor& seeds, const paddle::Tensor& offsets, const MaybeTensor& min_p,
               const MaybeTensor& typical_p) {
  const Device device = device_of(logits, "logits");
  const phi::Place& place = device.place;
  SampleParams params;
  throw_if_error(
      runtime::sample({view(logits, "logits", place), view(temperature, "temperature", place),
                       view(top_k, "top_k", place), view(top_p, "top_p", place),
                       view(seeds, "seeds", place), view(offsets, "offsets", place),
                       view(min_p, "min_p", place), view(typical_p, "typical_p", place)},
                      &params));
  paddle::Tensor token_ids = device.empty({params.num_rows}, DType::kInt32);
  params.token_ids = static_cast<int32_t*>(token_ids.data());
  REGATTA_RUN(sample, params, device);
  return {token_ids};
}

std::vector<Shape> infer_shape(const Shape& logits, const Shape&, const Shape&, const Shape&,
                               const Shape&, const Shape&, const MaybeShape&, const MaybeShape&) {
  return {{logits[0]}};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_sample)
    .Inputs({"logits", "temperature", "top_k", "top_p", "seeds", "offsets",
             paddle::Optional("min_p"), paddle::Optional("typical_p")})
    .Outputs({"token_ids"})
    .SetKernelFn(PD_KERNEL(regatta::binding::sample))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(regatta::binding::types_of<2>);
