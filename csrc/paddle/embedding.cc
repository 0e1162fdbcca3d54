// regatta_embedding(token_ids [T], weight) {packed, hidden_size} -> [T, H]
// weight: [V, H], or with packed=true the dense LM head of a tied model.
#include "regatta/embedding.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> embedding(const paddle::Tensor& token_ids, const paddle::Tensor& weight,
                                      bool packed, int64_t hidden_size) {
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
  if (device.is_cpu()) throw_if_error(cpu::embedding(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    make_current(device);
    throw_if_error(cuda::embedding(params, launch_on(device)));
  }
#endif
  return {out};
}

std::vector<std::vector<int64_t>> infer_shape(const std::vector<int64_t>& token_ids,
                                              const std::vector<int64_t>&, bool,
                                              int64_t hidden_size) {
  return {{token_ids[0], hidden_size}};
}

std::vector<paddle::DataType> infer_dtype(const paddle::DataType&, const paddle::DataType& weight) {
  return {weight};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_embedding)
    .Inputs({"token_ids", "weight"})
    .Outputs({"out"})
    .Attrs({"packed: bool", "hidden_size: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::embedding))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
