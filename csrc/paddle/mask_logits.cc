// regatta_mask_logits(logits [L, V] float32, masks [R, W] int32) -> logits, in place: row r of L
//     keeps the tokens whose bits are 1 in row r of masks, R >= L, 32 W >= V
#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

Tensors mask_logits(paddle::Tensor& logits, const paddle::Tensor& masks) {
  const Device device = device_of(logits, "logits");
  MaskLogitsParams params;
  throw_if_error(runtime::mask_logits(view(logits, "logits", device.place),
                                      view(masks, "masks", device.place), &params));
  REGATTA_RUN(mask_logits, params, device);
  return {};  // Paddle itself returns the in-place output
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_mask_logits)
    .Inputs({"logits", "masks"})
    .Outputs({"masked"})
    .SetInplaceMap({{"logits", "masked"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::mask_logits))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
