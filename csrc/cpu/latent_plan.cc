#include "latent_plan.h"

#include <algorithm>

namespace regatta::cpu {

bool is_cheaper_expanded(const LatentAttentionBlock& block, int64_t num_tokens, int64_t context) {
  const auto rank = static_cast<double>(block.kv_lora_rank);
  const auto own = static_cast<double>(block.qk_nope_head_dim + block.v_head_dim);
  const auto rotated = static_cast<double>(block.qk_rope_head_dim);
  const auto tokens = static_cast<double>(num_tokens), all = static_cast<double>(context);
  const double pairs = tokens * (all - (tokens - 1) / 2);
  const double absorbed = tokens * rank * own + pairs * (2 * rank + rotated);
  const double expanded = all * rank * own + pairs * (own + rotated);
  return expanded < absorbed;
}

std::vector<LatentPiece> latent_pieces(const LatentAttentionBlock& block,
                                       const AttentionBatch& batch, int64_t max_rows) {
  // A row of an expanded cache holds a key, and a value is no longer.
  const bool may_expand =
      block.form != LatentForm::kAbsorbed && block.v_head_dim <= block.q_head_size();
  std::vector<LatentPiece> pieces;
  LatentPiece piece = {0, 0, false};
  const auto cut = [&](int64_t end) {
    for (; piece.begin < end; piece.begin = piece.end) {
      piece.end = std::min(piece.begin + max_rows, end);
      pieces.push_back(piece);
    }
  };
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    const int64_t begin = batch.cu_seqlens_q[b], end = batch.cu_seqlens_q[b + 1];
    if (begin == end) continue;
    const bool expanded =
        may_expand && (block.form == LatentForm::kExpanded ||
                       is_cheaper_expanded(block, end - begin, batch.context_lens[b]));
    if (expanded != piece.expanded) cut(begin);
    piece.expanded = expanded;
  }
  cut(batch.num_tokens);
  return pieces;
}

ExpandedContexts::ExpandedContexts(const AttentionBatch& batch) {
  const auto length = [&](int64_t b) -> int64_t {
    return batch.cu_seqlens_q[b] == batch.cu_seqlens_q[b + 1] ? 0 : batch.context_lens[b];
  };
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    max_blocks = std::max(max_blocks, (length(b) + kChunk - 1) / kChunk);
  }
  tables.resize(batch.num_seqs * max_blocks);
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    for (int64_t first = 0; first < length(b); first += kChunk) {
      tables[b * max_blocks + first / kChunk] = static_cast<int32_t>(blocks.size());
      blocks.push_back({static_cast<int32_t>(b), static_cast<int32_t>(first),
                        static_cast<int32_t>(std::min(kChunk, length(b) - first))});
    }
  }
}

}  // namespace regatta::cpu
