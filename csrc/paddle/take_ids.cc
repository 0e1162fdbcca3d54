// regatta_take_ids(ids [T], rows [L]) -> [L]: those of the rows
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors take_ids(const paddle::Tensor& ids, const paddle::Tensor& rows) {
  const Device device = device_of(ids, "ids");
  const TensorView from = checked_view(ids, "ids", DType::kInt32, {-1}, device.place);
  const TensorView places = checked_view(rows, "rows", DType::kInt32, {-1}, device.place);
  const int64_t num_ids = from.shape[0], num_rows = places.shape[0];
  paddle::Tensor out = device.empty({num_rows}, DType::kInt32);
  if (device.is_cpu()) {
    const auto* const values = static_cast<const int32_t*>(from.data);
    const auto* const row_ids = static_cast<const int32_t*>(places.data);
    auto* const taken = static_cast<int32_t*>(out.data());
    for (int64_t i = 0; i < num_rows; ++i) {
      if (row_ids[i] < 0 || row_ids[i] >= num_ids) {
        fail("rows holds " + std::to_string(row_ids[i]) + " (allowed: 0 to " +
             std::to_string(num_ids - 1) + ")");
      }
      taken[i] = values[row_ids[i]];
    }
  }
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    make_current(device);
    // Four bytes a row, whatever they mean.
    throw_if_error(cuda::gather_rows({static_cast<const int32_t*>(places.data), from.data,
                                      out.data(), num_rows, num_ids, 1, DType::kFloat32},
                                     launch_on(device)));
  }
#endif
  return {out};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_take_ids)
    .Inputs({"ids", "rows"})
    .Outputs({"taken"})
    .SetKernelFn(PD_KERNEL(regatta::binding::take_ids))
    .SetInferShapeFn(regatta::binding::shapes_of<1>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
