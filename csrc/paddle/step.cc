// Operators around the network that keep the tokens of consecutive steps on a GPU:
//
// regatta_resolve_tokens(token_ids [T], last_tokens [R]) -> token_ids, in place: a negative id
//     -1 - r becomes last_tokens[r]
// regatta_follow_drafts(token_ids [T], positions [T], slot_mapping [T], context_lens [B],
//     choices, cu_seqlens_q [B + 1], block_tables [B, M], plan [B, W], tokens [R])
//     {block_size} -> the first five, in place (see regatta/follow_drafts.h)
// regatta_sample_step(logits [L, V] float32, choices, last_tokens [R])
//     -> last_tokens, in place: its first L entries are the new tokens, -1 for a row that cannot be
//     drawn from
// regatta_largest_step(logits [L, N] float32, last_tokens [R]) {begin, count}
//     -> last_tokens, in place: its first L entries are the tokens of the largest logits of all
//     ranks, whose first `count` columns are those of tokens from `begin` on here; -1 as above
// regatta_adjust_logits(logits [L, V] float32, penalties, token_ids [T], logit_indices [L],
//     history [S, M] int32, rules [S, W] int32) {first_token}, of the first column
//     -> logits and history, in place (see regatta/adjust_logits.h)
//
// choices, penalties: tables of runtime/columns.h.
//
// GPUs only: on a CPU nothing runs ahead, and regatta_sample says the same.
#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place outputs.
Tensors resolve_tokens(paddle::Tensor& token_ids, const paddle::Tensor& last_tokens) {
  const Device device = gpu_of(token_ids, "token_ids");
  [[maybe_unused]] int32_t* ids = data_of<int32_t>(token_ids, "token_ids", {-1}, device.place);
  [[maybe_unused]] const int32_t* last =
      data_of<int32_t>(last_tokens, "last_tokens", {-1}, device.place);
#ifdef REGATTA_WITH_CUDA
  make_current(device);
  throw_if_error(
      cuda::resolve_tokens(ids, last, token_ids.numel(), last_tokens.numel(), launch_on(device)));
#endif
  return {};
}

Tensors follow_drafts(paddle::Tensor& token_ids, paddle::Tensor& positions,
                      paddle::Tensor& slot_mapping, paddle::Tensor& context_lens,
                      paddle::Tensor& choices, const paddle::Tensor& cu_seqlens_q,
                      const paddle::Tensor& block_tables, const paddle::Tensor& plan,
                      const paddle::Tensor& tokens, int64_t block_size) {
  const Device device = gpu_of(token_ids, "token_ids");
  const phi::Place& place = device.place;
  FollowDraftsParams params;
  params.block_size = static_cast<int32_t>(block_size);
  throw_if_error(runtime::follow_drafts(
      {view(token_ids, "token_ids", place), view(positions, "positions", place),
       view(slot_mapping, "slot_mapping", place), view(context_lens, "context_lens", place),
       view(choices, "choices", place), view(cu_seqlens_q, "cu_seqlens_q", place),
       view(block_tables, "block_tables", place), view(plan, "plan", place),
       view(tokens, "tokens", place)},
      &params));
  REGATTA_RUN_ON_GPU(follow_drafts, params, device);
  return {};
}

Tensors sample_step(const paddle::Tensor& logits, const paddle::Tensor& choices,
                    paddle::Tensor& last_tokens) {
  const Device device = gpu_of(logits, "logits");
  const phi::Place& place = device.place;
  SampleParams params;
  throw_if_error(runtime::sample_step(view(logits, "logits", place),
                                      view(choices, "choices", place),
                                      view(last_tokens, "last_tokens", place), &params));
  REGATTA_RUN_ON_GPU(sample, params, device);
  return {};
}

Tensors largest_step(const paddle::Tensor& logits, paddle::Tensor& last_tokens, int64_t begin,
                     int64_t count) {
  const Device device = gpu_of(logits, "logits");
  const phi::Place& place = device.place;
  const TensorView rows = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, place);
  int32_t* last = data_of<int32_t>(last_tokens, "last_tokens", {-1}, place);
  const int64_t num_rows = rows.shape[0], width = rows.shape[1];
  if (begin < 0 || count < 1 || count > width) {
    fail("begin " + std::to_string(begin) + " and count " + std::to_string(count) +
         " (allowed: from 0 on, and 1 to " + std::to_string(width) + ", the columns of logits)");
  }
  if (last_tokens.numel() < num_rows) {
    fail("last_tokens holds " + std::to_string(last_tokens.numel()) + " (allowed: at least " +
         std::to_string(num_rows) + ", the rows of logits)");
  }
#ifdef REGATTA_WITH_CUDA
  make_current(device);
  const cuda::LargestParams params = {
      static_cast<const float*>(rows.data), last, num_rows, width, begin, count};
  throw_if_error(cuda::largest_over_ranks(params, launch_on(device)));
#else
  static_cast<void>(last);
#endif
  return {};
}

Tensors adjust_logits(paddle::Tensor& logits, const paddle::Tensor& penalties,
                      const paddle::Tensor& token_ids, const paddle::Tensor& logit_indices,
                      paddle::Tensor& history, const paddle::Tensor& rules, int64_t first_token) {
  const Device device = gpu_of(logits, "logits");
  const phi::Place& place = device.place;
  AdjustLogitsParams params;
  params.first_token = first_token;
  throw_if_error(runtime::adjust_logits(
      {view(logits, "logits", place), view(penalties, "penalties", place),
       view(token_ids, "token_ids", place), view(logit_indices, "logit_indices", place),
       view(history, "history", place), view(rules, "rules", place)},
      &params));
  REGATTA_RUN_ON_GPU(adjust_logits, params, device);
  return {};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_resolve_tokens)
    .Inputs({"token_ids", "last_tokens"})
    .Outputs({"resolved"})
    .SetInplaceMap({{"token_ids", "resolved"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::resolve_tokens))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);

PD_BUILD_OP(regatta_follow_drafts)
    .Inputs({"token_ids", "positions", "slot_mapping", "context_lens", "choices", "cu_seqlens_q",
             "block_tables", "plan", "tokens"})
    .Outputs({"token_ids_out", "positions_out", "slot_mapping_out", "context_lens_out",
              "choices_out"})
    .Attrs({"block_size: int64_t"})
    .SetInplaceMap({{"token_ids", "token_ids_out"},
                    {"positions", "positions_out"},
                    {"slot_mapping", "slot_mapping_out"},
                    {"context_lens", "context_lens_out"},
                    {"choices", "choices_out"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::follow_drafts))
    .SetInferShapeFn(regatta::binding::shapes_of<0, 1, 2, 3, 4>)
    .SetInferDtypeFn(regatta::binding::types_of<0, 1, 2, 3, 4>);

PD_BUILD_OP(regatta_sample_step)
    .Inputs({"logits", "choices", "last_tokens"})
    .Outputs({"new_tokens"})
    .SetInplaceMap({{"last_tokens", "new_tokens"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::sample_step))
    .SetInferShapeFn(regatta::binding::shapes_of<2>)
    .SetInferDtypeFn(regatta::binding::types_of<2>);

PD_BUILD_OP(regatta_largest_step)
    .Inputs({"logits", "last_tokens"})
    .Outputs({"new_tokens"})
    .Attrs({"begin: int64_t", "count: int64_t"})
    .SetInplaceMap({{"last_tokens", "new_tokens"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::largest_step))
    .SetInferShapeFn(regatta::binding::shapes_of<1>)
    .SetInferDtypeFn(regatta::binding::types_of<1>);

PD_BUILD_OP(regatta_adjust_logits)
    .Inputs({"logits", "penalties", "token_ids", "logit_indices", "history", "rules"})
    .Outputs({"adjusted", "history_out"})
    .Attrs({"first_token: int64_t"})
    .SetInplaceMap({{"logits", "adjusted"}, {"history", "history_out"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::adjust_logits))
    .SetInferShapeFn(regatta::binding::shapes_of<0, 4>)
    .SetInferDtypeFn(regatta::binding::types_of<0, 4>);
