// regatta_write_places(table [P, R] float32, places [T, 3]) {axes, first} -> table in place
// axes: of each of the R / 2 angles. first: the row of token 0. See regatta/picture_rows.h.
#include "cuda_resources.h"
#include "regatta/picture_rows.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place output.
Tensors write_places(paddle::Tensor& table, const paddle::Tensor& places,
                     const std::vector<int>& axes, int64_t first) {
  const Device device = device_of(table, "table");
  const auto num_angles = static_cast<int64_t>(axes.size());
  const TensorView to =
      checked_view(table, "table", DType::kFloat32, {-1, 2 * num_angles}, device.place);
  const TensorView of = checked_view(places, "places", DType::kInt32, {-1, kNumAxes}, device.place);
  WritePlacesParams params;
  if (num_angles > kMaxAngles) {
    fail("axes are " + std::to_string(num_angles) + " (allowed: up to " +
         std::to_string(kMaxAngles) + ")");
  }
  for (int64_t j = 0; j < num_angles; ++j) {
    if (axes[j] < 0 || axes[j] >= kNumAxes) {
      fail("axes holds " + std::to_string(axes[j]) + " (allowed: 0 to 2)");
    }
    params.axes[j] = static_cast<uint8_t>(axes[j]);
  }
  if (first < 0 || first + of.shape[0] > to.shape[0]) {
    fail("rows " + std::to_string(first) + " to " + std::to_string(first + of.shape[0]) +
         " of a table of " + std::to_string(to.shape[0]));
  }
  params.table = table.data<float>();
  params.places = static_cast<const int32_t*>(of.data);
  params.num_places = of.shape[0];
  params.num_table_rows = to.shape[0];
  params.num_angles = num_angles;
  params.first = first;
  REGATTA_RUN(write_places, params, device);
  return {};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_write_places)
    .Inputs({"table", "places"})
    .Outputs({"table_out"})
    .Attrs({"axes: std::vector<int>", "first: int64_t"})
    .SetInplaceMap({{"table", "table_out"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::write_places))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
