// regatta_logprobs(logits [L, V] float32, token_ids [R] int32) {num_top} -> measured
//     [L, 2 + 2 num_top] int32: see regatta/logprobs.h; R is at least L
//
// GPUs only: on a CPU NumPy does the same (predict/engine/logprobs.py).
#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

Tensors logprobs(const paddle::Tensor& logits, const paddle::Tensor& token_ids, int64_t num_top) {
  const Device device = gpu_of(logits, "logits");
  const phi::Place& place = device.place;
  LogprobsParams params;
  params.num_top = num_top;
  throw_if_error(runtime::logprobs(view(logits, "logits", place),
                                   view(token_ids, "token_ids", place), &params));
  paddle::Tensor measured = device.empty({params.num_rows, 2 + 2 * num_top}, DType::kInt32);
  params.out = static_cast<int32_t*>(measured.data());
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
