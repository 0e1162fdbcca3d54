// regatta_embedding(token_ids [T], weight, position_table? [P, H], positions? [T],
//                   image_table? [R, H], image_rows? [T])
//     {packed, hidden_size, scale} -> [T, H]
// weight: [V, H], or with packed=true the dense LM head of a tied model.
#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

Tensors embedding(const paddle::Tensor& token_ids, const paddle::Tensor& weight,
                  const MaybeTensor& position_table, const MaybeTensor& positions,
                  const MaybeTensor& image_table, const MaybeTensor& image_rows, bool packed,
                  int64_t hidden_size, float scale) {
  const Device device = device_of(weight, "weight");
  const phi::Place& place = device.place;
  EmbeddingParams params = {};
  params.hidden_size = hidden_size;
  params.packed = packed;
  params.scale = scale;
  throw_if_error(runtime::embedding(
      {view(token_ids, "token_ids", place), view(weight, "weight", place),
       view(position_table, "position_table", place), view(positions, "positions", place),
       view(image_table, "image_table", place), view(image_rows, "image_rows", place)},
      &params));
  paddle::Tensor out = device.empty({params.num_tokens, hidden_size}, params.dtype);
  params.out = out.data();
  REGATTA_RUN(embedding, params, device);
  return {out};
}

std::vector<Shape> infer_shape(const Shape& token_ids, const Shape&, const MaybeShape&,
                               const MaybeShape&, const MaybeShape&, const MaybeShape&, bool,
                               int64_t hidden_size, float) {
  return {{token_ids[0], hidden_size}};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_embedding)
    .Inputs({"token_ids", "weight", paddle::Optional("position_table"),
             paddle::Optional("positions"), paddle::Optional("image_table"),
             paddle::Optional("image_rows")})
    .Outputs({"out"})
    .Attrs({"packed: bool", "hidden_size: int64_t", "scale: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::embedding))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(regatta::binding::types_of<1>);
