// regatta_fold_norm(weight [N, K], norm [K]) -> weight with its columns times norm, in place
//
// For scheme "dense_folded" (regatta/cuda_ops.h); GPUs only.
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place output.
Tensors fold_norm(paddle::Tensor& weight, const paddle::Tensor& norm) {
  const Device device = device_of(weight, "weight");
  if (device.is_cpu()) fail("fold_norm is for GPUs; on the CPU norms stay as they are");
  const TensorView matrix = view(weight, "weight", device.place);
  check_activation(matrix, "weight");
  check_shape(matrix, "weight", {-1, -1});
  [[maybe_unused]] const TensorView scales =
      checked_view(norm, "norm", matrix.dtype, {matrix.shape[1]}, device.place);
#ifdef REGATTA_WITH_CUDA
  make_current(device);
  throw_if_error(cuda::fold_norm_weight(const_cast<void*>(matrix.data), scales.data, matrix.dtype,
                                        matrix.shape[0], matrix.shape[1], device.stream));
#endif
  return {};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_fold_norm)
    .Inputs({"weight", "norm"})
    .Outputs({"weight_out"})
    .SetInplaceMap({{"weight", "weight_out"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::fold_norm))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
