// regatta_sample(logits [L, V] float32, temperature [L] float32, top_k [L] int32,
//     top_p [L] float32, seeds [L] int64, offsets [L] int64, optional min_p [L] float32,
//     optional typical_p [L] float32) -> token_ids [L] int32, -1 for a row that cannot
//     be drawn from
#include "regatta/sample.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors sample(const paddle::Tensor& logits, const paddle::Tensor& temperature,
               const paddle::Tensor& top_k, const paddle::Tensor& top_p,
               const paddle::Tensor& seeds, const paddle::Tensor& offsets, const MaybeTensor& min_p,
               const MaybeTensor& typical_p) {
  const Device device = device_of(logits, "logits");
  const phi::Place& place = device.place;
  const TensorView x = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, place);
  const int64_t num_rows = x.shape[0];
  paddle::Tensor token_ids = device.empty({num_rows}, DType::kInt32);
  SampleParams params;
  params.logits = static_cast<const float*>(x.data);
  params.temperature = data_of<float>(temperature, "temperature", {num_rows}, place);
  params.top_k = data_of<int32_t>(top_k, "top_k", {num_rows}, place);
  params.top_p = data_of<float>(top_p, "top_p", {num_rows}, place);
  params.seeds = data_of<int64_t>(seeds, "seeds", {num_rows}, place);
  params.offsets = data_of<int64_t>(offsets, "offsets", {num_rows}, place);
  params.min_p = data_of<float>(min_p, "min_p", {num_rows}, place);
  params.typical_p = data_of<float>(typical_p, "typical_p", {num_rows}, place);
  params.token_ids = static_cast<int32_t*>(token_ids.data());
  params.num_rows = num_rows;
  params.vocab_size = x.shape[1];
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
