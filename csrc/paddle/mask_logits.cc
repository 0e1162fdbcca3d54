// regatta_mask_logits(logits [L, V] float32, masks [R, W] int32) -> logits, in place: row r of L
//     keeps the tokens whose bits are 1 in row r of masks, R >= L, 32 W >= V
#include "regatta/mask_logits.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors mask_logits(paddle::Tensor& logits, const paddle::Tensor& masks) {
  const Device device = device_of(logits, "logits");
  const TensorView x = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, device.place);
  const TensorView bits = checked_view(masks, "masks", DType::kInt32, {-1, -1}, device.place);
  MaskLogitsParams params;
  params.logits = static_cast<float*>(const_cast<void*>(x.data));
  params.masks = static_cast<const int32_t*>(bits.data);
  params.num_rows = x.shape[0];
  params.vocab_size = x.shape[1];
  params.num_words = bits.shape[1];
  if (bits.shape[0] < params.num_rows || 32 * params.num_words < params.vocab_size) {
    fail("masks is [" + std::to_string(bits.shape[0]) + ", " + std::to_string(params.num_words) +
         "] for logits [" + std::to_string(params.num_rows) + ", " +
         std::to_string(params.vocab_size) + "] (allowed: as many rows, 32 tokens per word)");
  }
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
