// Attention over latents (DeepSeek-V2, 2024), absorbed: a query is multiplied by latents
// themselves. What stands around its products, and the attention itself.
//
// T tokens, Hq heads, L values of a latent and R of its rotated part, N of a head's query beside
// those R, V of a head's output. Head-major tensors are [Hq, T, ...]: rows of one head are a group
// of GemmParams. All memory is the device's.
//
// A cache's rows are L + R values. With scales they are codes (regatta/kv_format.h): L bytes e4m3
// each, R values in the cache's tail, and a scale.
#pragma once

#include <cstdint>

#include "regatta/attention.h"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

// out = x's first columns / sqrt(their mean square + epsilon) * weight.
struct NormColumnsParams {
  const void* x = nullptr;       // [T, stride]
  const void* weight = nullptr;  // [width]
  void* out = nullptr;           // [T, width]
  int64_t num_rows = 0, width = 0, stride = 0;
  float epsilon = 0.f;
  DType dtype = DType::kBFloat16;
};
Status norm_columns(const NormColumnsParams& params, const Launch& launch);

// Rotates queries, norms and rotates latents, and writes these into the cache.
struct LatentWriteParams {
  DType dtype = DType::kBFloat16;
  const void* q = nullptr;  // [T, q_stride]: of each head N values, then R
  int64_t q_stride = 0;
  const void* latents = nullptr;  // [T, latent_stride]: L values, then R
  int64_t latent_stride = 0;
  const void* norm_weight = nullptr;      // [L]
  const float* rope_cache = nullptr;      // [P, R]
  const int32_t* positions = nullptr;     // [T]
  const int32_t* slot_mapping = nullptr;  // [T]
  void* cache = nullptr;                  // [blocks, block_size, L + R], or L bytes
  void* tail = nullptr;                   // [blocks, block_size, R]
  float* scales = nullptr;                // [blocks, block_size]; null: rows are values
  void* q_nope = nullptr;                 // [Hq, T, N]
  void* q_rope = nullptr;                 // [Hq, T, R]
  int32_t* head_ends = nullptr;           // [Hq]: (head + 1) * T, as GemmParams::group_ends
  int64_t num_tokens = 0, num_heads = 0, latent_rank = 0, rope_size = 0, nope_size = 0;
  int64_t num_positions = 0;
  float epsilon = 0.f;
  bool interleaved = true;
};
Status latent_write(const LatentWriteParams& params, const Launch& launch);

// out = x times each head's matrix, of few tokens. Token t of head h lies at t times the tokens'
// stride and h times the heads'. The order of an output's sum does not depend on the batch.
struct HeadProductParams {
  DType dtype = DType::kBFloat16;
  const void* x = nullptr;       // in_features values of each token and head
  const void* weight = nullptr;  // [Hq, out_features, in_features]
  void* out = nullptr;           // out_features values of each
  int64_t x_token_stride = 0, x_head_stride = 0;
  int64_t out_token_stride = 0, out_head_stride = 0;
  int64_t num_tokens = 0, num_heads = 0, in_features = 0, out_features = 0;
};
// Up to so many tokens it is made for: two tiles of a block. Beyond, tiles of gemm() read x less
// often, and copies of heads' rows are small beside the products.
constexpr int64_t kHeadProductTokens = 128;
// Whether the current device has a kernel for it: sm_80 and later, 16-bit values, up to 512 of them
// in rows of 16 bytes.
bool takes_head_product(const HeadProductParams& params);
Status head_product(const HeadProductParams& params, const Launch& launch);

// What a step of few tokens does ahead of attention, in one launch: latent_write(), but q_nope and
// head_ends, and the product of queries where the first product left them. takes_queries(): whether
// the current device has a kernel for both.
bool takes_queries(const LatentWriteParams& write, const HeadProductParams& product);
Status latent_write_and_queries(const LatentWriteParams& write, const HeadProductParams& product,
                                const Launch& launch);

struct LatentCache {
  DType dtype = DType::kBFloat16;
  const void* cache = nullptr;    // [blocks, block_size, L + R], or L bytes
  const void* tail = nullptr;     // [blocks, block_size, R]
  const float* scales = nullptr;  // [blocks, block_size]; null: rows are values
  int64_t num_blocks = 0, block_size = 0, latent_rank = 0, rope_size = 0;
  AttentionBatch batch;
};
struct LatentAttentionParams : LatentCache {
  const void* q_latent = nullptr;  // [Hq, T, L]
  const void* q_rope = nullptr;    // [Hq, T, R]
  void* out = nullptr;             // [Hq, T, L]; rows of padding are left as they are
  int64_t num_heads = 0;
  float softmax_scale = 1.f;
};
// Of the spans of at most limits.max_query_len tokens; rows of the others stay, or become anything.
int64_t latent_attention_workspace_bytes(const LatentAttentionParams& params,
                                         const AttentionLimits& limits);
Status latent_attention(const LatentAttentionParams& params, const AttentionLimits& limits,
                        void* workspace, const Launch& launch);

// [T, Hq, width] of [Hq, T, width].
struct HeadsToRowsParams {
  const void* x = nullptr;
  void* out = nullptr;
  int64_t num_tokens = 0, num_heads = 0, width = 0;
  DType dtype = DType::kBFloat16;
  // [B + 1], where rows of spans of more tokens than max_span_len stay as they are; null: none do.
  const int32_t* cu_seqlens_q = nullptr;
  int64_t num_seqs = 0, max_span_len = 0;
};
Status heads_to_rows(const HeadsToRowsParams& params, const Launch& launch);

}  // namespace regatta::cuda
