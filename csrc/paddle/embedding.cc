// regatta_embedding(token_ids [T], weight, position_table? [P, H], positions? [T])
//     {packed, hidden_size, scale} -> [T, H]
// weight: [V, H], or with packed=true the dense LM head of a tied model.
#include "regatta/embedding.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors embedding(const paddle::Tensor& token_ids, const paddle::Tensor& weight,
                  const MaybeTensor& position_table, const MaybeTensor& positions, bool packed,
                  int64_t hidden_size, float scale) {
  const Device device = device_of(weight, "weight");
  const TensorView ids = checked_view(token_ids, "token_ids", DType::kInt32, {-1}, device.place);
  const TensorView table = view(weight, "weight", device.place);
  check_activation(table, "weight");
  if (!packed) {
    check_shape(table, "weight", {-1, hidden_size});
  } else if (table.dtype == DType::kBFloat16) {
    check_shape(table, "packed weight", {-1, (hidden_size + 1) / 2, 32, 2});
  } else {
    check_shape(table, "packed weight", {-1, hidden_size, 32});
  }
  EmbeddingParams params;
  params.num_tokens = ids.shape[0];
  params.vocab_size = table.shape[0] * (packed ? 32 : 1);
  params.hidden_size = hidden_size;
  params.packed = packed;
  params.dtype = table.dtype;
  paddle::Tensor out = device.empty({params.num_tokens, hidden_size}, params.dtype);
  params.token_ids = static_cast<const int32_t*>(ids.data);
  params.weight = table.data;
  params.out = out.data();
  params.scale = scale;
  if (position_table && positions) {
    const TensorView rows = checked_view(*position_table, "position_table", table.dtype,
                                         {-1, hidden_size}, device.place);
    params.position_table = rows.data;
    params.num_positions = rows.shape[0];
    params.positions = data_of<int32_t>(*positions, "positions", {params.num_tokens}, device.place);
  }
  REGATTA_RUN(embedding, params, device);
  return {out};
}

std::vector<Shape> infer_shape(const Shape& token_ids, const Shape&, const MaybeShape&,
                               const MaybeShape&, bool, int64_t hidden_size, float) {
  return {{token_ids[0], hidden_size}};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_embedding)
    .Inputs({"token_ids", "weight", paddle::Optional("position_table"),
             paddle::Optional("positions")})
    .Outputs({"out"})
    .Attrs({"packed: bool", "hidden_size: int64_t", "scale: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::embedding))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(regatta::binding::types_of<1>);
