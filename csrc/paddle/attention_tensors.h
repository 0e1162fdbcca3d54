// What the registrations of the attention ops share: the cache's and the batch's tensors, checked.
#pragma once

#include "common.h"
#include "regatta/attention.h"

namespace regatta::binding {

struct HeadCounts {
  int64_t num_heads, num_kv_heads, head_dim;
};

inline void check_heads(const HeadCounts& heads) {
  if (heads.num_heads < 1 || heads.num_kv_heads < 1 || heads.head_dim < 1 ||
      heads.num_heads % heads.num_kv_heads != 0) {
    fail("num_heads " + std::to_string(heads.num_heads) + ", num_kv_heads " +
         std::to_string(heads.num_kv_heads) + ", head_dim " + std::to_string(heads.head_dim) +
         " do not go together (allowed: 1 and more, num_heads a multiple of num_kv_heads)");
  }
}

// key_cache and value_cache [num_blocks, num_kv_heads, block_size, head_dim] of the activations'
// dtype. -1 for num_kv_heads or head_dim: what the cache has.
inline PagedCache cache_of(const paddle::Tensor& key, const paddle::Tensor& value, DType dtype,
                           int64_t num_kv_heads, int64_t head_dim,
                           const phi::Place& place = phi::CPUPlace()) {
  const TensorView keys =
      checked_view(key, "key_cache", dtype, {-1, num_kv_heads, -1, head_dim}, place);
  const TensorView values =
      checked_view(value, "value_cache", dtype,
                   {keys.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]}, place);
  PagedCache cache;
  cache.key = const_cast<void*>(keys.data);
  cache.value = const_cast<void*>(values.data);
  cache.num_blocks = keys.shape[0];
  cache.block_size = keys.shape[2];
  return cache;
}

inline AttentionBatch batch_of(const paddle::Tensor& cu_seqlens_q,
                               const paddle::Tensor& context_lens,
                               const paddle::Tensor& block_tables, const paddle::Tensor& max_lens,
                               int64_t num_tokens, const phi::Place& place = phi::CPUPlace()) {
  const TensorView lengths = checked_view(context_lens, "context_lens", DType::kInt32, {-1}, place);
  const TensorView borders =
      checked_view(cu_seqlens_q, "cu_seqlens_q", DType::kInt32, {lengths.shape[0] + 1}, place);
  const TensorView tables =
      checked_view(block_tables, "block_tables", DType::kInt32, {lengths.shape[0], -1}, place);
  // On the CPU everywhere: launch choices for GPUs, which the host cannot ask for the lengths.
  checked_view(max_lens, "max_lens", DType::kInt32, {2});
  AttentionBatch batch;
  batch.cu_seqlens_q = static_cast<const int32_t*>(borders.data);
  batch.context_lens = static_cast<const int32_t*>(lengths.data);
  batch.block_tables = static_cast<const int32_t*>(tables.data);
  batch.num_tokens = num_tokens;
  batch.num_seqs = lengths.shape[0];
  batch.max_blocks = tables.shape[1];
  return batch;
}

inline void check_softmax_scale(float scale) {
  if (!(scale > 0.0f)) {
    fail("softmax_scale is " + std::to_string(scale) + " (allowed: more than 0)");
  }
}

// cos | sin table [positions, rotary dims], at most head_dim of them, in pairs.
inline TensorView rope_table(const paddle::Tensor& rope_cache, int64_t head_dim,
                             const phi::Place& place = phi::CPUPlace()) {
  const TensorView table = checked_view(rope_cache, "rope_cache", DType::kFloat32, {-1, -1}, place);
  if (table.shape[1] % 2 != 0 || table.shape[1] > head_dim) {
    fail("rope_cache has shape " + shape_string(table) + ", its last dimension must be even and " +
         "at most head_dim, " + std::to_string(head_dim));
  }
  return table;
}

}  // namespace regatta::binding
