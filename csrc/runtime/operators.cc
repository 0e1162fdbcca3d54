#include "runtime/operators.h"

#include <algorithm>
#include <numeric>

#include "runtime/adapters.h"
#include "runtime/columns.h"

namespace regatta::runtime {
namespace {

// [L, V] float32.
template <class Params>
void take_logits(Reader& read, const TensorView& logits, Params* p) {
  p->logits = read.values<float>(logits, "logits", {-1, -1});
  p->num_rows = logits.shape[0];
  p->vocab_size = logits.shape[1];
}

std::string columns_for(const char* name, int64_t columns, int64_t rows) {
  return std::string(name) + " has " + std::to_string(columns) + " columns for " +
         std::to_string(rows);
}

Status check_drawing(int64_t columns, const TensorView& last_tokens, int64_t num_rows, bool even) {
  if (columns >= num_rows && last_tokens.shape[0] >= num_rows && !(even && columns % 2 != 0)) {
    return {};
  }
  return Status::error("choices has " + std::to_string(columns) + " columns and last_tokens " +
                       std::to_string(last_tokens.shape[0]) + " entries for " +
                       std::to_string(num_rows) + " rows of logits (allowed: at least as many" +
                       (even ? "; choices an even number)" : ")"));
}

}  // namespace

Status embedding(const EmbeddingViews& v, EmbeddingParams* p) {
  Reader read;
  const int64_t width = p->hidden_size;
  p->token_ids = read.values<int32_t>(v.token_ids, "token_ids", {-1});
  p->dtype = v.weight.dtype;
  read.check(check_activation(v.weight, "weight"));
  if (!p->packed) {
    read.check(check_shape(v.weight, "weight", {-1, width}));
  } else if (p->dtype == DType::kBFloat16) {
    read.check(check_shape(v.weight, "packed weight", {-1, (width + 1) / 2, 32, 2}));
  } else {
    read.check(check_shape(v.weight, "packed weight", {-1, width, 32}));
  }
  p->weight = v.weight.data;
  p->num_tokens = v.token_ids.shape[0];
  p->vocab_size = v.weight.shape[0] * (p->packed ? 32 : 1);
  if (v.image_table.rank != 0 && v.image_rows.rank != 0) {
    p->image_table = read.data(v.image_table, "image_table", p->dtype, {-1, width});
    p->num_image_rows = v.image_table.shape[0];
    p->image_rows = read.values<int32_t>(v.image_rows, "image_rows", {p->num_tokens});
  }
  if (v.position_table.rank == 0 || v.positions.rank == 0) return read.status();
  p->position_table = read.data(v.position_table, "position_table", p->dtype, {-1, width});
  p->num_positions = v.position_table.shape[0];
  p->positions = read.values<int32_t>(v.positions, "positions", {p->num_tokens});
  return read.status();
}

Status linear(const TensorView& x, TensorList weight, const TensorView& bias, LinearParams* p) {
  Reader read;
  p->x = read.activations(x, "x");
  p->dtype = x.dtype;
  p->num_tokens = x.shape[0];
  p->in_features = x.shape[1];
  p->weight = weight.data;
  p->num_weights = static_cast<int>(weight.size);
  p->bias = read.optional_data(bias, "bias", x.dtype, {p->out_features});
  return read.status();
}

Status check_adapted(const std::vector<int>& part_sizes, int64_t which) {
  const auto num_parts = static_cast<int64_t>(part_sizes.size());
  constexpr int64_t kMost = sizeof(LinearParams::part_sizes) / sizeof(int64_t);
  const bool are_sizes =
      std::all_of(part_sizes.begin(), part_sizes.end(), [](int size) { return size > 0; });
  if (num_parts < 1 || num_parts > kMost || !are_sizes) {
    return Status::error("part_sizes has " + std::to_string(num_parts) + " sizes (allowed: 1 to " +
                         std::to_string(kMost) + ", each above 0)");
  }
  if (which >= 0 && which < kNumAdapted) return {};
  return Status::error("which is " + std::to_string(which) + " (allowed: 0 to " +
                       std::to_string(kNumAdapted - 1) + ")");
}

Status adapted_linear(const AdaptedViews& v, const std::vector<int>& part_sizes, int64_t which,
                      bool on_cpu, LinearParams* p) {
  REGATTA_RETURN_IF_ERROR(check_adapted(part_sizes, which));
  REGATTA_RETURN_IF_ERROR(low_rank_weights(v.a, v.b, "adapters", part_sizes.size(), p->in_features,
                                           p->out_features, p->dtype, on_cpu, &p->low_rank));
  p->which = static_cast<Adapted>(which);
  std::copy(part_sizes.begin(), part_sizes.end(), p->part_sizes);
  return adapter_rows(v.ids, v.pages, p->low_rank.num_pages, p->num_tokens, on_cpu, &p->adapters);
}

Status logits(const LogitsViews& v, LogitsParams* p) {
  Reader read;
  p->hidden = read.activations(v.hidden, "hidden");
  p->dtype = v.hidden.dtype;
  p->num_tokens = v.hidden.shape[0];
  p->hidden_size = v.hidden.shape[1];
  p->norm_weight = read.optional_data(v.norm_weight, "norm_weight", p->dtype, {p->hidden_size});
  p->head = v.head.data;
  p->num_head = static_cast<int>(v.head.size);
  p->logit_indices = read.optional_values<int32_t>(v.logit_indices, "logit_indices", {-1});
  p->num_logits = v.logit_indices.rank == 0 ? p->num_tokens : v.logit_indices.shape[0];
  p->bias = read.optional_data(v.bias, "bias", p->dtype, {p->vocab_size});
  return read.status();
}

Status sample(const SampleViews& v, SampleParams* p) {
  Reader read;
  take_logits(read, v.logits, p);
  p->temperature = read.values<float>(v.temperature, "temperature", {p->num_rows});
  p->top_k = read.values<int32_t>(v.top_k, "top_k", {p->num_rows});
  p->top_p = read.values<float>(v.top_p, "top_p", {p->num_rows});
  p->seeds = read.values<int64_t>(v.seeds, "seeds", {p->num_rows});
  p->offsets = read.values<int64_t>(v.offsets, "offsets", {p->num_rows});
  p->min_p = read.optional_values<float>(v.min_p, "min_p", {p->num_rows});
  p->typical_p = read.optional_values<float>(v.typical_p, "typical_p", {p->num_rows});
  return read.status();
}

Status sample_step(const TensorView& logits, const TensorView& choices,
                   const TensorView& last_tokens, SampleParams* p) {
  Reader read;
  take_logits(read, logits, p);
  const Choices drawing = choices_of(read, choices);
  p->token_ids = read.values<int32_t>(last_tokens, "last_tokens", {-1});
  read.check(check_drawing(drawing.num_columns, last_tokens, p->num_rows, /*even=*/true));
  p->temperature = drawing.temperature;
  p->top_k = drawing.top_k;
  p->top_p = drawing.top_p;
  p->min_p = drawing.min_p;
  p->seeds = drawing.seed;
  p->offsets = drawing.offset;
  p->typical_p = drawing.typical_p;
  return read.status();
}

Status adjust_logits(const AdjustLogitsViews& v, AdjustLogitsParams* p) {
  Reader read;
  take_logits(read, v.logits, p);
  const Penalties changing = penalties_of(read, v.penalties);
  p->history = read.values<int32_t>(v.history, "history", {-1, -1});
  p->rules = read.values<int32_t>(v.rules, "rules", {v.history.shape[0], -1});
  if (changing.num_columns < p->num_rows) {
    read.check(Status::error(columns_for("penalties", changing.num_columns, p->num_rows) +
                             " rows of logits (allowed: at least as many)"));
  }
  p->repetition = changing.repetition;
  p->presence = changing.presence;
  p->frequency = changing.frequency;
  p->slot = changing.slot;
  p->length = changing.length;
  p->num_prompt = changing.num_prompt;
  p->num_new = changing.num_new;
  p->no_repeat_ngram_size = changing.no_repeat_ngram_size;
  p->token_ids = read.values<int32_t>(v.token_ids, "token_ids", {-1});
  p->logit_indices = read.values<int32_t>(v.logit_indices, "logit_indices", {p->num_rows});
  p->max_length = v.history.shape[1];
  p->rules_width = v.rules.shape[1];
  return read.status();
}

Status follow_drafts(const FollowDraftsViews& v, FollowDraftsParams* p) {
  Reader read;
  const Choices drawing = choices_of(read, v.choices);
  const int64_t num_tokens = v.token_ids.shape[0];
  p->num_seqs = v.context_lens.shape[0];
  if (drawing.num_columns < p->num_seqs || drawing.num_columns % 2 != 0) {
    read.check(Status::error(columns_for("choices", drawing.num_columns, p->num_seqs) +
                             " requests (allowed: an even number, at least as many)"));
  }
  p->token_ids = read.values<int32_t>(v.token_ids, "token_ids", {-1});
  p->positions = read.values<int32_t>(v.positions, "positions", {num_tokens});
  p->slot_mapping = read.values<int32_t>(v.slot_mapping, "slot_mapping", {num_tokens});
  p->context_lens = read.values<int32_t>(v.context_lens, "context_lens", {-1});
  p->offsets = drawing.offset;
  p->cu_seqlens_q = read.values<int32_t>(v.cu_seqlens_q, "cu_seqlens_q", {p->num_seqs + 1});
  p->block_tables = read.values<int32_t>(v.block_tables, "block_tables", {p->num_seqs, -1});
  p->plan = read.values<int32_t>(v.plan, "plan", {p->num_seqs, -1});
  p->tokens = read.values<int32_t>(v.tokens, "tokens", {-1});
  p->blocks_per_seq = v.block_tables.shape[1];
  p->plan_width = v.plan.shape[1];
  return read.status();
}

Status verify_window(const VerifyWindowViews& v, int64_t window, int64_t max_candidate_len,
                     VerifyWindowParams* p) {
  Reader read;
  take_logits(read, v.logits, p);
  const Choices drawing = choices_of(read, v.choices);
  p->token_ids = read.values<int32_t>(v.token_ids, "token_ids", {-1});
  p->drawn = read.values<int32_t>(v.last_tokens, "last_tokens", {-1});
  read.check(check_drawing(drawing.num_columns, v.last_tokens, p->num_rows, /*even=*/false));
  if (window < 1) {
    read.check(Status::error("window is " + std::to_string(window) + " (allowed: 1 and more)"));
  }
  if (max_candidate_len < 2 || max_candidate_len > kMaxWindowCandidates) {
    read.check(Status::error("max_candidate_len is " + std::to_string(max_candidate_len) +
                             " (allowed: 2 to " + std::to_string(kMaxWindowCandidates) + ")"));
  }
  p->temperature = drawing.temperature;
  p->top_k = drawing.top_k;
  p->top_p = drawing.top_p;
  p->min_p = drawing.min_p;
  p->num_drafts = drawing.num_drafts;
  p->logit_indices = read.values<int32_t>(v.logit_indices, "logit_indices", {p->num_rows});
  p->num_tokens = v.token_ids.shape[0];
  p->window = static_cast<int32_t>(window);
  p->max_candidate_len = static_cast<int32_t>(max_candidate_len);
  return read.status();
}

Status logprobs(const TensorView& logits, const TensorView& token_ids, LogprobsParams* p) {
  Reader read;
  take_logits(read, logits, p);
  p->token_ids = read.values<int32_t>(token_ids, "token_ids", {-1});
  if (token_ids.shape[0] < p->num_rows || p->num_top < 0 || p->num_top > kMaxTopLogprobs) {
    read.check(Status::error("token_ids has " + std::to_string(token_ids.shape[0]) +
                             " entries for " + std::to_string(p->num_rows) +
                             " rows of logits, and num_top is " + std::to_string(p->num_top) +
                             " (allowed: at least as many; 0 to " +
                             std::to_string(kMaxTopLogprobs) + ")"));
  }
  return read.status();
}

Status mask_logits(const TensorView& logits, const TensorView& masks, MaskLogitsParams* p) {
  Reader read;
  take_logits(read, logits, p);
  p->masks = read.values<int32_t>(masks, "masks", {-1, -1});
  p->num_words = masks.shape[1];
  if (masks.shape[0] < p->num_rows || 32 * p->num_words < p->vocab_size) {
    read.check(Status::error("masks is " + shape_string(masks) + " for logits " +
                             shape_string(logits) +
                             " (allowed: as many rows, 32 tokens per word)"));
  }
  return read.status();
}

}  // namespace regatta::runtime
