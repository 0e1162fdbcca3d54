// What the registrations of the attention ops share: the cache's and the batch's tensors, checked.
#pragma once

#include "common.h"
#include "regatta/attention.h"
#include "regatta/cuda_ops.h"

namespace regatta::binding {

inline void check_heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  if (num_heads < 1 || num_kv_heads < 1 || head_dim < 1 || num_heads % num_kv_heads != 0) {
    fail("num_heads " + std::to_string(num_heads) + ", num_kv_heads " +
         std::to_string(num_kv_heads) + ", head_dim " + std::to_string(head_dim) +
         " do not go together (allowed: 1 and more, num_heads a multiple of num_kv_heads)");
  }
}

inline KvFormat kv_format_of(const std::string& name) {
  KvFormat format;
  if (parse_kv_format(name.c_str(), &format)) return format;
  std::string known;
  for (const KvFormatInfo& info : kKvFormats)
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  fail("kv_format is \"" + name + "\" (allowed: " + known + ")");
}

// caches: of one layer.
inline void check_num_caches(size_t num_caches, KvFormat format) {
  const size_t expected = num_kv_tensors(format, 2);
  if (num_caches == expected) return;
  fail("caches holds " + std::to_string(num_caches) + " tensors for 1 layer of kv_format " +
       kv_format_info(format).name + " (expected: " + std::to_string(expected) +
       " for each: key, value" + (expected == 4 ? ", key scales, value scales)" : ")"));
}

// A layer's caches: key, value [num_blocks, Hkv, block_size, row], and the format's scales. See
// regatta/kv_format.h.
inline PagedCache cache_of(const TensorView* caches, KvFormat format, DType dtype,
                           int64_t num_kv_heads, int64_t head_dim) {
  const KvFormatInfo& info = kv_format_info(format);
  const DType stored = info.code_bits == 0 ? dtype : DType::kUInt8;
  const int64_t row = kv_row_bytes(format, head_dim, dtype_size(dtype)) / dtype_size(stored);
  const TensorView &keys = caches[0], &values = caches[1];
  check(keys, "key_cache", stored, {-1, num_kv_heads, -1, row});
  check(values, "value_cache", stored, {keys.shape[0], num_kv_heads, keys.shape[2], row});
  PagedCache cache;
  cache.key = const_cast<void*>(keys.data);
  cache.value = const_cast<void*>(values.data);
  cache.num_blocks = keys.shape[0];
  cache.block_size = keys.shape[2];
  cache.format = format;
  if (info.scale_floats == 0) return cache;
  std::vector<int64_t> shape = {num_kv_heads};
  if (info.token_scales) shape = {cache.num_blocks, num_kv_heads, cache.block_size};
  if (info.scale_floats > 1) shape.push_back(info.scale_floats);
  const auto scales = [&](const TensorView& view, const char* name) {
    check(view, name, DType::kFloat32, shape);
    return static_cast<float*>(const_cast<void*>(view.data));
  };
  cache.key_scale = scales(caches[2], "key_scale");
  cache.value_scale = scales(caches[3], "value_scale");
  return cache;
}

// A layer's cache of latents [num_blocks, 1, block_size, row]; values are the first ones of keys.
// As codes of `rank` values: these, their tails of `tail` values, and scales.
inline PagedCache latent_cache_of(const TensorView* caches, KvFormat format, DType dtype,
                                  int64_t rank, int64_t tail) {
  const TensorView& latents = caches[0];
  const bool dense = format == KvFormat::kDense;
  check(latents, "latent_cache", dense ? dtype : DType::kUInt8,
        {-1, 1, -1, dense ? rank + tail : rank});
  PagedCache cache;
  cache.key = cache.value = const_cast<void*>(latents.data);
  cache.num_blocks = latents.shape[0];
  cache.block_size = latents.shape[2];
  cache.format = format;
  if (dense) return cache;
  check(caches[1], "latent_tail_cache", dtype, {cache.num_blocks, 1, cache.block_size, tail});
  check(caches[2], "latent_scale", DType::kFloat32, {cache.num_blocks, 1, cache.block_size});
  cache.tail = const_cast<void*>(caches[1].data);
  cache.key_scale = cache.value_scale = static_cast<float*>(const_cast<void*>(caches[2].data));
  return cache;
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

// What max_lens says, which is on the CPU.
inline cuda::AttentionLimits limits_of(const paddle::Tensor& max_lens) {
  const TensorView view = checked_view(max_lens, "max_lens", DType::kInt32, {kNumMaxLens});
  const auto* lens = static_cast<const int32_t*>(view.data);
  const int32_t rows = lens[4];
  if (rows < 0 || rows > 3) fail("max_lens[4] is " + std::to_string(rows) + " (allowed: 0 .. 3)");
  // A step without logits brings the rows that cost least: the last ones.
  return {lens[0], lens[1], lens[2], lens[3],
          rows == 3 ? cuda::StepRows::kLast : cuda::StepRows(rows)};
}

inline void check_step(const Tensors& step) {
  if (step.size() >= kNumStepFields) return;
  fail("step holds " + std::to_string(step.size()) + " tensors (allowed: those of " +
       "predict.nn.inputs.FIELDS, " + std::to_string(kNumStepFields) + " and more)");
}

inline AttentionBatch batch_of(const paddle::Tensor& cu_seqlens_q,
                               const paddle::Tensor& context_lens,
                               const paddle::Tensor& block_tables, const paddle::Tensor& max_lens,
                               const MaybeTensor& tree_mask, int64_t num_tokens,
                               const phi::Place& place = phi::CPUPlace()) {
  const TensorView lengths = checked_view(context_lens, "context_lens", DType::kInt32, {-1}, place);
  const TensorView borders =
      checked_view(cu_seqlens_q, "cu_seqlens_q", DType::kInt32, {lengths.shape[0] + 1}, place);
  const TensorView tables =
      checked_view(block_tables, "block_tables", DType::kInt32, {lengths.shape[0], -1}, place);
  // On the CPU everywhere: launch choices for GPUs, which the host cannot ask for the lengths.
  checked_view(max_lens, "max_lens", DType::kInt32, {kNumMaxLens});
  AttentionBatch batch;
  batch.cu_seqlens_q = static_cast<const int32_t*>(borders.data);
  batch.context_lens = static_cast<const int32_t*>(lengths.data);
  batch.block_tables = static_cast<const int32_t*>(tables.data);
  batch.num_tokens = num_tokens;
  batch.num_seqs = lengths.shape[0];
  batch.max_blocks = tables.shape[1];
  if (tree_mask) {
    const TensorView mask =
        checked_view(*tree_mask, "tree_mask", DType::kInt32, {num_tokens, -1}, place);
    batch.tree_mask = static_cast<const int32_t*>(mask.data);
    batch.tree_words = mask.shape[1];
  }
  return batch;
}

inline void check_softmax_scale(float scale) {
  if (!(scale > 0.0f)) {
    fail("softmax_scale is " + std::to_string(scale) + " (allowed: more than 0)");
  }
}

// table: cos | sin [positions, rotary dims], at most head_dim of them, in pairs.
template <class Params>
void set_rope_table(Params& params, const TensorView& table, int64_t head_dim) {
  if (table.shape[1] % 2 != 0 || table.shape[1] > head_dim) {
    fail("rope_cache has shape " + shape_string(table) + ", its last dimension must be even and " +
         "at most head_dim, " + std::to_string(head_dim));
  }
  params.rope_cache = static_cast<const float*>(table.data);
  params.rotary_dim = table.shape[1];
  params.num_positions = table.shape[0];
}

}  // namespace regatta::binding
