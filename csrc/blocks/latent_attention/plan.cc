#include "blocks/latent_attention/plan.h"

#include <algorithm>

namespace regatta::cpu {
namespace {

// Matrices [rows, columns] of each head; `views` has room for them.
Status find_head_gemms(const TensorView& stacked, int64_t rows, int64_t columns, DType dtype,
                       std::vector<TensorView>* views, std::vector<Gemm>* gemms) {
  TensorView one = stacked;
  one.rank = stacked.rank - 1;
  int64_t bytes = dtype_size(stacked.dtype);
  for (int i = 0; i < one.rank; ++i) bytes *= one.shape[i] = stacked.shape[i + 1];
  Gemm gemm;
  const Status status = find_gemm(SchemeId::kDense, {&one, 1, columns, rows}, dtype, &gemm);
  if (!status.ok()) return status;
  for (int64_t head = 0; head < stacked.shape[0]; ++head) {
    views->push_back(one);
    gemm.weight.tensors = &views->back();
    gemms->push_back(gemm);
    one.data = static_cast<const char*>(one.data) + bytes;
  }
  return {};
}

}  // namespace

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

Status find_latent_kernels(const LatentAttentionBlockParams& p, LatentKernels* kernels) {
  const LatentAttentionBlock& block = p.block;
  Status status = find_linear("qkv_a", p.qkv_a, block.qkv_a, p.hidden_size, block.a_size(), p.dtype,
                              &kernels->qkv_a);
  if (status.ok() && block.q_lora_rank > 0) {
    status = find_linear("q_b", p.q_b, block.q_b, block.q_lora_rank, block.q_size(), p.dtype,
                         &kernels->q_b);
  }
  if (status.ok()) {
    status = find_linear("out", p.out, block.out, block.mixed_size(), p.hidden_size, p.dtype,
                         &kernels->out);
  }
  const int64_t rank = block.kv_lora_rank, own = block.qk_nope_head_dim;
  kernels->views.reserve(3 * block.num_heads);  // gemms refer to them
  const auto of_heads = [&](const char* name, const TensorView& stacked, int64_t rows,
                            int64_t columns, std::vector<Gemm>* gemms) {
    if (!status.ok()) return;
    status = find_head_gemms(stacked, rows, columns, p.dtype, &kernels->views, gemms);
    if (!status.ok()) status = Status::error(std::string(name) + ": " + status.message());
  };
  of_heads("key_up", p.kv_b.key_up, own, rank, &kernels->key_up);
  of_heads("value_up", p.kv_b.value_up, block.v_head_dim, rank, &kernels->value_up);
  of_heads("key_absorb", p.kv_b.key_absorb, rank, own, &kernels->key_absorb);
  return status;
}

int64_t most_rows(const LatentAttentionBlock& block) {
  constexpr int64_t kMaxBytes = int64_t{96} << 20;
  const int64_t row_bytes = block.num_heads * (block.latent_size() + block.kv_lora_rank) *
                            static_cast<int64_t>(sizeof(float));
  return std::max<int64_t>(kChunk, std::min(kMaxBlockRows, kMaxBytes / row_bytes));
}

}  // namespace regatta::cpu
