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
// regatta_adjust_logits(logits [L, V] float32, penalties, token_ids [T], logit_indices [L],
//     history [S, M] int32, rules [S, W] int32)
//     -> logits and history, in place (see regatta/adjust_logits.h)
//
// choices, penalties: tables of columns.h.
//
// GPUs only: on a CPU nothing runs ahead, and regatta_sample says the same.
#include "columns.h"
#include "cuda_resources.h"
#include "regatta/adjust_logits.h"
#include "regatta/follow_drafts.h"
#include "regatta/sample.h"

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
  const Choices drawing = choices_of(choices, place);
  FollowDraftsParams params;
  const int64_t num_tokens = token_ids.numel(), stride = drawing.num_columns;
  params.num_seqs = context_lens.numel();
  if (stride < params.num_seqs || stride % 2 != 0) {
    fail("choices has " + std::to_string(stride) + " columns for " +
         std::to_string(params.num_seqs) + " requests (allowed: an even number, at least as many)");
  }
  const TensorView tables =
      checked_view(block_tables, "block_tables", DType::kInt32, {params.num_seqs, -1}, place);
  const TensorView rows = checked_view(plan, "plan", DType::kInt32, {params.num_seqs, -1}, place);
  params.token_ids = data_of<int32_t>(token_ids, "token_ids", {-1}, device.place);
  params.positions = data_of<int32_t>(positions, "positions", {num_tokens}, device.place);
  params.slot_mapping = data_of<int32_t>(slot_mapping, "slot_mapping", {num_tokens}, device.place);
  params.context_lens = data_of<int32_t>(context_lens, "context_lens", {-1}, device.place);
  params.offsets = drawing.offset;
  params.cu_seqlens_q =
      data_of<int32_t>(cu_seqlens_q, "cu_seqlens_q", {params.num_seqs + 1}, device.place);
  params.block_tables = static_cast<const int32_t*>(tables.data);
  params.plan = static_cast<const int32_t*>(rows.data);
  params.tokens = data_of<int32_t>(tokens, "tokens", {-1}, device.place);
  params.blocks_per_seq = tables.shape[1];
  params.plan_width = rows.shape[1];
  params.block_size = static_cast<int32_t>(block_size);
  REGATTA_RUN_ON_GPU(follow_drafts, params, device);
  return {};
}

Tensors sample_step(const paddle::Tensor& logits, const paddle::Tensor& choices,
                    paddle::Tensor& last_tokens) {
  const Device device = gpu_of(logits, "logits");
  const TensorView x = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, device.place);
  const Choices drawing = choices_of(choices, device.place);
  const int64_t num_rows = x.shape[0], stride = drawing.num_columns;
  if (stride < num_rows || stride % 2 != 0 || last_tokens.numel() < num_rows) {
    fail("choices has " + std::to_string(stride) + " columns and last_tokens " +
         std::to_string(last_tokens.numel()) + " entries for " + std::to_string(num_rows) +
         " rows of logits (allowed: at least as many; choices an even number)");
  }
  SampleParams params;
  params.logits = static_cast<const float*>(x.data);
  params.temperature = drawing.temperature;
  params.top_k = drawing.top_k;
  params.top_p = drawing.top_p;
  params.min_p = drawing.min_p;
  params.seeds = drawing.seed;
  params.offsets = drawing.offset;
  params.typical_p = drawing.typical_p;
  params.token_ids = data_of<int32_t>(last_tokens, "last_tokens", {-1}, device.place);
  params.num_rows = num_rows;
  params.vocab_size = x.shape[1];
  REGATTA_RUN_ON_GPU(sample, params, device);
  return {};
}

Tensors adjust_logits(paddle::Tensor& logits, const paddle::Tensor& penalties,
                      const paddle::Tensor& token_ids, const paddle::Tensor& logit_indices,
                      paddle::Tensor& history, const paddle::Tensor& rules) {
  const Device device = gpu_of(logits, "logits");
  const phi::Place& place = device.place;
  const TensorView x = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, place);
  const Penalties changing = penalties_of(penalties, place);
  const TensorView past = checked_view(history, "history", DType::kInt32, {-1, -1}, place);
  const TensorView table = checked_view(rules, "rules", DType::kInt32, {past.shape[0], -1}, place);
  const int64_t num_rows = x.shape[0], stride = changing.num_columns;
  if (stride < num_rows) {
    fail("penalties has " + std::to_string(stride) + " columns for " + std::to_string(num_rows) +
         " rows of logits (allowed: at least as many)");
  }
  AdjustLogitsParams params;
  params.logits = static_cast<float*>(const_cast<void*>(x.data));
  params.repetition = changing.repetition;
  params.presence = changing.presence;
  params.frequency = changing.frequency;
  params.slot = changing.slot;
  params.length = changing.length;
  params.num_prompt = changing.num_prompt;
  params.num_new = changing.num_new;
  params.no_repeat_ngram_size = changing.no_repeat_ngram_size;
  params.token_ids = data_of<int32_t>(token_ids, "token_ids", {-1}, device.place);
  params.logit_indices = data_of<int32_t>(logit_indices, "logit_indices", {num_rows}, device.place);
  params.history = static_cast<int32_t*>(const_cast<void*>(past.data));
  params.rules = static_cast<const int32_t*>(table.data);
  params.num_rows = num_rows;
  params.vocab_size = x.shape[1];
  params.max_length = past.shape[1];
  params.rules_width = table.shape[1];
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

PD_BUILD_OP(regatta_adjust_logits)
    .Inputs({"logits", "penalties", "token_ids", "logit_indices", "history", "rules"})
    .Outputs({"adjusted", "history_out"})
    .SetInplaceMap({{"logits", "adjusted"}, {"history", "history_out"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::adjust_logits))
    .SetInferShapeFn(regatta::binding::shapes_of<0, 4>)
    .SetInferDtypeFn(regatta::binding::types_of<0, 4>);
