// A step's tensors and a layer's caches, checked.
#pragma once

#include <string>
#include <vector>

#include "regatta/attention.h"
#include "regatta/cuda_ops.h"
#include "runtime/checks.h"

namespace regatta::runtime {

inline Status check_heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  if (num_heads >= 1 && num_kv_heads >= 1 && head_dim >= 1 && num_heads % num_kv_heads == 0) {
    return {};
  }
  return Status::error("num_heads " + std::to_string(num_heads) + ", num_kv_heads " +
                       std::to_string(num_kv_heads) + ", head_dim " + std::to_string(head_dim) +
                       " do not go together (allowed: 1 and more, num_heads a multiple of " +
                       "num_kv_heads)");
}

inline Status check_softmax_scale(float scale) {
  if (scale > 0.0f) return {};
  return Status::error("softmax_scale is " + std::to_string(scale) + " (allowed: more than 0)");
}

// A layer's caches: key, value [num_blocks, Hkv, block_size, row], and the format's scales. See
// regatta/kv_format.h.
inline Status cache_of(const TensorView* caches, KvFormat format, DType dtype, int64_t num_kv_heads,
                       int64_t head_dim, PagedCache* cache) {
  const KvFormatInfo& info = kv_format_info(format);
  const DType stored = info.code_bits == 0 ? dtype : DType::kUInt8;
  const int64_t row = kv_row_bytes(format, head_dim, dtype_size(dtype)) / dtype_size(stored);
  const TensorView &keys = caches[0], &values = caches[1];
  REGATTA_RETURN_IF_ERROR(check(keys, "key_cache", stored, {-1, num_kv_heads, -1, row}));
  REGATTA_RETURN_IF_ERROR(
      check(values, "value_cache", stored, {keys.shape[0], num_kv_heads, keys.shape[2], row}));
  cache->key = const_cast<void*>(keys.data);
  cache->value = const_cast<void*>(values.data);
  cache->num_blocks = keys.shape[0];
  cache->block_size = keys.shape[2];
  cache->format = format;
  if (info.scale_floats == 0) return {};
  std::vector<int64_t> shape = {num_kv_heads};
  if (info.token_scales) shape = {cache->num_blocks, num_kv_heads, cache->block_size};
  if (info.scale_floats > 1) shape.push_back(info.scale_floats);
  cache->key_scale = static_cast<float*>(const_cast<void*>(caches[2].data));
  cache->value_scale = static_cast<float*>(const_cast<void*>(caches[3].data));
  REGATTA_RETURN_IF_ERROR(check(caches[2], "key_scale", DType::kFloat32, shape));
  return check(caches[3], "value_scale", DType::kFloat32, shape);
}

// A layer's cache of latents [num_blocks, 1, block_size, row]; values are the first ones of keys.
// As codes of `rank` values: these, their tails of `tail` values, and scales.
inline Status latent_cache_of(const TensorView* caches, KvFormat format, DType dtype, int64_t rank,
                              int64_t tail, PagedCache* cache) {
  const TensorView& latents = caches[0];
  const bool dense = format == KvFormat::kDense;
  REGATTA_RETURN_IF_ERROR(check(latents, "latent_cache", dense ? dtype : DType::kUInt8,
                                {-1, 1, -1, dense ? rank + tail : rank}));
  cache->key = cache->value = const_cast<void*>(latents.data);
  cache->num_blocks = latents.shape[0];
  cache->block_size = latents.shape[2];
  cache->format = format;
  if (dense) return {};
  cache->tail = const_cast<void*>(caches[1].data);
  cache->key_scale = cache->value_scale = static_cast<float*>(const_cast<void*>(caches[2].data));
  REGATTA_RETURN_IF_ERROR(check(caches[1], "latent_tail_cache", dtype,
                                {cache->num_blocks, 1, cache->block_size, tail}));
  return check(caches[2], "latent_scale", DType::kFloat32,
               {cache->num_blocks, 1, cache->block_size});
}

// The tensors of a step: the first rows of predict.nn.inputs.FIELDS, of which there may be more.
enum StepField : uint8_t {
  kTokenIds,
  kPositions,
  kSlotMapping,
  kCuSeqlensQ,
  kContextLens,
  kBlockTables,
  kLogitIndices,
  kMaxLens,
  kNumStepFields,
};
// Behind them where requests have adapters: such networks have no other optional fields.
constexpr int kAdapterIds = kNumStepFields, kAdapterPages = kNumStepFields + 1;

constexpr int64_t kNumMaxLens = 5;

// What max_lens says, which is on the CPU everywhere: launch choices for GPUs, which the host
// cannot ask for the lengths.
inline Status limits_of(const TensorView& max_lens, cuda::AttentionLimits* limits) {
  const int32_t* lens;
  REGATTA_RETURN_IF_ERROR(take_ids(max_lens, "max_lens", {kNumMaxLens}, &lens));
  const int32_t rows = lens[4];
  if (rows < 0 || rows > 3) {
    return Status::error("max_lens[4] is " + std::to_string(rows) + " (allowed: 0 .. 3)");
  }
  // A step without logits brings the rows that cost least: the last ones.
  *limits = {lens[0], lens[1], lens[2], lens[3],
             rows == 3 ? cuda::StepRows::kLast : cuda::StepRows(rows)};
  return {};
}

// tree_mask: of rank 0 where there is none.
inline Status batch_of(const TensorView& cu_seqlens_q, const TensorView& context_lens,
                       const TensorView& block_tables, const TensorView& tree_mask,
                       int64_t num_tokens, AttentionBatch* batch) {
  const int64_t num_seqs = context_lens.shape[0];
  batch->num_tokens = num_tokens;
  batch->num_seqs = num_seqs;
  batch->max_blocks = block_tables.shape[1];
  REGATTA_RETURN_IF_ERROR(take_ids(context_lens, "context_lens", {-1}, &batch->context_lens));
  REGATTA_RETURN_IF_ERROR(
      take_ids(cu_seqlens_q, "cu_seqlens_q", {num_seqs + 1}, &batch->cu_seqlens_q));
  REGATTA_RETURN_IF_ERROR(
      take_ids(block_tables, "block_tables", {num_seqs, -1}, &batch->block_tables));
  if (tree_mask.rank == 0) return {};
  batch->tree_words = tree_mask.shape[1];
  return take_ids(tree_mask, "tree_mask", {num_tokens, -1}, &batch->tree_mask);
}

// table: cos | sin [positions, rotary dims], at most head_dim of them, in pairs.
template <class Params>
Status set_rope_table(const TensorView& table, int64_t head_dim, Params* params) {
  params->rope_cache = static_cast<const float*>(table.data);
  params->rotary_dim = table.shape[1];
  params->num_positions = table.shape[0];
  if (table.shape[1] % 2 == 0 && table.shape[1] <= head_dim) return {};
  return Status::error("rope_cache has shape " + shape_string(table) +
                       ", its last dimension must be even and at most head_dim, " +
                       std::to_string(head_dim));
}

}  // namespace regatta::runtime
