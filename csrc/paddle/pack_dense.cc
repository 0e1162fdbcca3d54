// regatta_pack_dense(weight [K, N], or [N, K] with transposed=true) {transposed, dtype} -> packed
//
// packed is the layout that regatta_linear reads on the weight's device: panels on the CPU, [N, K]
// on a GPU, which multiplies matrices as checkpoints store them.
#include "regatta/pack_dense.h"

#include "activation_type.h"
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<int64_t> packed_shape(int64_t in_features, int64_t out_features, DType dtype) {
  const int64_t panels = (out_features + 31) / 32;
  if (dtype == DType::kBFloat16) return {panels, (in_features + 1) / 2, 32, 2};
  return {panels, in_features, 32};
}

Tensors pack_dense(const paddle::Tensor& weight, bool transposed, const std::string& dtype) {
  const Device device = device_of(weight, "weight");
  const TensorView weight_view = view(weight, "weight", device.place);
  check_activation(weight_view, "weight");
  check_shape(weight_view, "weight", {-1, -1});
  PackDenseParams params;
  params.in_features = weight_view.shape[transposed ? 1 : 0];
  params.out_features = weight_view.shape[transposed ? 0 : 1];
  params.transposed = transposed;
  params.from = weight_view.dtype;
  params.to = activation_type(dtype);
  paddle::Tensor packed = device.empty(
      device.is_cpu() ? packed_shape(params.in_features, params.out_features, params.to)
                      : std::vector<int64_t>{params.out_features, params.in_features},
      params.to);
  params.weight = weight_view.data;
  params.packed = packed.data();
  REGATTA_RUN(pack_dense, params, device);
  return {packed};
}

// The CPU's: an exported program packs nothing, so no shape of a GPU is ever inferred.
std::vector<Shape> infer_shape(const Shape& weight, bool transposed, const std::string& dtype) {
  return {
      packed_shape(weight[transposed ? 1 : 0], weight[transposed ? 0 : 1], activation_type(dtype))};
}

std::vector<Type> infer_dtype(const Type&, bool, const std::string& dtype) {
  return {paddle_dtype(activation_type(dtype))};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_pack_dense)
    .Inputs({"weight"})
    .Outputs({"packed"})
    .Attrs({"transposed: bool", "dtype: std::string"})
    .SetKernelFn(PD_KERNEL(regatta::binding::pack_dense))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
