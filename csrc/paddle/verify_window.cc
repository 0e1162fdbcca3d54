// regatta_verify_window(logits [L, V] float32, choices, token_ids [T] int32,
//     logit_indices [L] int32, last_tokens [R] int32) {window, max_candidate_len}
//     -> last_tokens, in place: the first L are what regatta_sample_step drew, and become the
//     drafts that stand (see regatta/verify_window.h). choices: of runtime/columns.h. token_ids:
//     resolved.
//
// GPUs only: on a CPU predict/engine/window.py does the same.
#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place output.
Tensors verify_window(const paddle::Tensor& logits, const paddle::Tensor& choices,
                      const paddle::Tensor& token_ids, const paddle::Tensor& logit_indices,
                      paddle::Tensor& last_tokens, int64_t window, int64_t max_candidate_len) {
  const Device device = gpu_of(logits, "logits");
  const phi::Place& place = device.place;
  VerifyWindowParams params;
  throw_if_error(runtime::verify_window(
      {view(logits, "logits", place), view(choices, "choices", place),
       view(token_ids, "token_ids", place), view(logit_indices, "logit_indices", place),
       view(last_tokens, "last_tokens", place)},
      window, max_candidate_len, &params));
#ifdef REGATTA_WITH_CUDA
  make_current(device);
  const int64_t bytes = params.num_rows * static_cast<int64_t>(sizeof(int32_t));
  params.verdicts = static_cast<int32_t*>(scratch_of(device, bytes));
  throw_if_error(cuda::verify_window(params, launch_on(device)));
#endif
  return {};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_verify_window)
    .Inputs({"logits", "choices", "token_ids", "logit_indices", "last_tokens"})
    .Outputs({"new_tokens"})
    .Attrs({"window: int64_t", "max_candidate_len: int64_t"})
    .SetInplaceMap({{"last_tokens", "new_tokens"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::verify_window))
    .SetInferShapeFn(regatta::binding::shapes_of<4>)
    .SetInferDtypeFn(regatta::binding::types_of<4>);
