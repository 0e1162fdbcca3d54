#include "engine/batch.h"

#include <algorithm>

namespace regatta::engine {

using model::RowKind;

static RowKind row_kind(size_t num_rows, size_t num_tokens, size_t num_spans) {
  if (num_rows == 0) return RowKind::kNone;
  if (num_rows == num_tokens) return RowKind::kAll;
  return num_rows == num_spans ? RowKind::kLast : RowKind::kListed;
}

model::StepRows StepBuffers::fill(const std::vector<Span>& spans, int64_t block_size) {
  for (Ids* each :
       {&token_ids_, &positions_, &slots_, &context_lens_, &logit_indices_, &lengths_}) {
    each->clear();
  }
  borders_.assign(1, 0);
  int64_t width = 0;
  for (const Span& span : spans) {
    const Sequence& sequence = *span.sequence;
    const int64_t end = span.start + span.num_tokens;
    for (int64_t at = span.start; at < end; ++at) {
      token_ids_.push_back(sequence.ids[at]);
      positions_.push_back(int32_t(at));
      slots_.push_back(int32_t(sequence.blocks[at / block_size] * block_size + at % block_size));
    }
    borders_.push_back(int32_t(token_ids_.size()));
    context_lens_.push_back(int32_t(end));
    lengths_.push_back(int32_t(span.num_tokens));
    if (span.samples) logit_indices_.push_back(borders_.back() - 1);
    width = std::max(width, num_blocks_for(end, block_size));
  }
  tables_.assign(spans.size() * width, -1);
  for (size_t i = 0; i < spans.size(); ++i) {
    const int64_t count = num_blocks_for(context_lens_[i], block_size);
    std::copy_n(spans[i].sequence->blocks.begin(), count, tables_.begin() + i * width);
  }
  const RowKind kind = row_kind(logit_indices_.size(), token_ids_.size(), spans.size());
  if (kind == RowKind::kNone) {
    for (size_t i = 1; i < borders_.size(); ++i) logit_indices_.push_back(borders_[i] - 1);
  }
  model::StepRows rows;
  rows.token_ids = token_ids_;
  rows.positions = positions_;
  rows.slot_mapping = slots_;
  rows.cu_seqlens_q = borders_;
  rows.context_lens = context_lens_;
  rows.block_tables = tables_;
  rows.logit_indices = logit_indices_;
  rows.max_blocks = width;
  rows.max_lens = model::max_lens_of(lengths_, context_lens_, kind);
  return rows;
}

}  // namespace regatta::engine
