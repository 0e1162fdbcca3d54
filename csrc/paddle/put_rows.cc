// regatta_put_rows(table [R, W], rows [C], x [C, W]) -> table in place: row rows[i] is x[i]
#include "cuda_resources.h"
#include "regatta/picture_rows.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place output.
Tensors put_rows(paddle::Tensor& table, const paddle::Tensor& rows, const paddle::Tensor& x) {
  const Device device = device_of(table, "table");
  const TensorView to = view(table, "table", device.place);
  check_activation(to, "table");
  check_shape(to, "table", {-1, -1});
  const TensorView from = checked_view(x, "x", to.dtype, {-1, to.shape[1]}, device.place);
  PutRowsParams params;
  params.rows = data_of<int32_t>(rows, "rows", {from.shape[0]}, device.place);
  params.x = from.data;
  params.table = table.data();
  params.num_rows = from.shape[0];
  params.num_table_rows = to.shape[0];
  params.width = to.shape[1];
  params.dtype = to.dtype;
  REGATTA_RUN(put_rows, params, device);
  return {};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_put_rows)
    .Inputs({"table", "rows", "x"})
    .Outputs({"table_out"})
    .SetInplaceMap({{"table", "table_out"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::put_rows))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
