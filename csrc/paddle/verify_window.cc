// regatta_verify_window(logits [L, V] float32, choices, token_ids [T] int32,
//     logit_indices [L] int32, last_tokens [R] int32) {window, max_candidate_len}
//     -> last_tokens, in place: the first L are what regatta_sample_step drew, and become the
//     drafts that stand (see regatta/verify_window.h). choices: of columns.h. token_ids: resolved.
//
// GPUs only: on a CPU predict/engine/window.py does the same.
#include "regatta/verify_window.h"

#include "columns.h"
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place output.
Tensors verify_window(const paddle::Tensor& logits, const paddle::Tensor& choices,
                      const paddle::Tensor& token_ids, const paddle::Tensor& logit_indices,
                      paddle::Tensor& last_tokens, int64_t window, int64_t max_candidate_len) {
  const Device device = gpu_of(logits, "logits");
  const phi::Place& place = device.place;
  const TensorView x = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, place);
  const Choices drawing = choices_of(choices, place);
  const TensorView ids = checked_view(token_ids, "token_ids", DType::kInt32, {-1}, place);
  const TensorView drawn = checked_view(last_tokens, "last_tokens", DType::kInt32, {-1}, place);
  const int64_t num_rows = x.shape[0], stride = drawing.num_columns;
  if (stride < num_rows || drawn.shape[0] < num_rows) {
    fail("choices has " + std::to_string(stride) + " columns and last_tokens " +
         std::to_string(drawn.shape[0]) + " entries for " + std::to_string(num_rows) +
         " rows of logits (allowed: at least as many)");
  }
  if (window < 1) fail("window is " + std::to_string(window) + " (allowed: 1 and more)");
  if (max_candidate_len < 2 || max_candidate_len > kMaxWindowCandidates) {
    fail("max_candidate_len is " + std::to_string(max_candidate_len) + " (allowed: 2 to " +
         std::to_string(kMaxWindowCandidates) + ")");
  }
  VerifyWindowParams params;
  params.logits = static_cast<const float*>(x.data);
  params.temperature = drawing.temperature;
  params.top_k = drawing.top_k;
  params.top_p = drawing.top_p;
  params.min_p = drawing.min_p;
  params.num_drafts = drawing.num_drafts;
  params.token_ids = static_cast<const int32_t*>(ids.data);
  params.logit_indices = data_of<int32_t>(logit_indices, "logit_indices", {num_rows}, place);
  params.drawn = static_cast<int32_t*>(const_cast<void*>(drawn.data));
  params.num_rows = num_rows;
  params.num_tokens = ids.shape[0];
  params.vocab_size = x.shape[1];
  params.window = static_cast<int32_t>(window);
  params.max_candidate_len = static_cast<int32_t>(max_candidate_len);
#ifdef REGATTA_WITH_CUDA
  make_current(device);
  const int64_t bytes = num_rows * static_cast<int64_t>(sizeof(int32_t));
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
