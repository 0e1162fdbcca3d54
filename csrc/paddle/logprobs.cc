// regatta_logprobs(logits [L, V] float32, token_ids [R] int32) {num_top} -> measured
//     [L, 2 + 2 num_top] int32: see regatta/logprobs.h; R is at least L
//
// GPUs only: on a CPU NumPy does the same (predict/engine/logprobs.py).
#include "regatta/logprobs.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors logprobs(const paddle::Tensor& logits, const paddle::Tensor& token_ids, int64_t num_top) {
  const Device device = gpu_of(logits, "logits");
  const TensorView x = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, device.place);
  const TensorView ids = checked_view(token_ids, "token_ids", DType::kInt32, {-1}, device.place);
  const int64_t num_rows = x.shape[0];
  if (ids.shape[0] < num_rows || num_top < 0 || num_top > kMaxTopLogprobs) {
    fail("token_ids has " + std::to_string(ids.shape[0]) + " entries for " +
         std::to_string(num_rows) + " rows of logits, and num_top is " + std::to_string(num_top) +
         " (allowed: at least as many; 0 to " + std::to_string(kMaxTopLogprobs) + ")");
  }
  paddle::Tensor measured = device.empty({num_rows, 2 + 2 * num_top}, DType::kInt32);
  LogprobsParams params;
  params.logits = static_cast<const float*>(x.data);
  params.token_ids = static_cast<const int32_t*>(ids.data);
  params.out = static_cast<int32_t*>(measured.data());
  params.num_rows = num_rows;
  params.vocab_size = x.shape[1];
  params.num_top = num_top;
  REGATTA_RUN_ON_GPU(logprobs, params, device);
  return {measured};
}

std::vector<Shape> logprobs_shape(const Shape& logits, const Shape&, int64_t num_top) {
  return {{logits[0], 2 + 2 * num_top}};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_logprobs)
    .Inputs({"logits", "token_ids"})
    .Outputs({"measured"})
    .Attrs({"num_top: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::logprobs))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::logprobs_shape))
    .SetInferDtypeFn(regatta::binding::types_of<1>);
