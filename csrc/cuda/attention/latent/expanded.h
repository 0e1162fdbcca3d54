// Latent attention of long spans, expanded: keys and values of whole contexts are made of their
// latents by two products (csrc/blocks), and attended as any others, a key being N + R wide and a
// value V, in place of L + R and L. Which spans are long says AttentionLimits.
//
// S context tokens of long spans, a context's behind each other, contexts in the order of their
// spans. Keys and values are matrices of as many rows, no caches: the attention kernel reads heads
// as columns of them. Hg heads at a time, as scratch has room for. The other dims are latent.h's.
// All memory is the device's.
#pragma once

#include <cstdint>

#include "cuda/attention/latent/latent.h"
#include "regatta/attention.h"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

struct LatentSizes {
  int64_t latent_rank = 0, rope_size = 0, nope_size = 0, value_size = 0;
};

// Copies latents of long spans' contexts out of a paged cache; codes become values.
struct GatherLatentsParams : LatentCache {
  int64_t max_short_len = 0, num_long_tokens = 0;  // AttentionLimits'
  void* latents = nullptr;        // [S, L]; rows behind the last context stay as they are
  void* rope = nullptr;           // [S, R], alike
  int32_t* first_rows = nullptr;  // [B] where a long span's context begins
};
Status gather_latents(const GatherLatentsParams& params, const Launch& launch);

struct ExpandedAttentionParams {
  DType dtype = DType::kBFloat16;
  const void* q_nope = nullptr;         // [Hq, T, N]
  const void* q_rope = nullptr;         // [Hq, T, R]
  const void* keys = nullptr;           // [S, Hg, N]; rows behind the last context may hold NaN
  const void* values = nullptr;         // [S, Hg, V], alike
  const void* rope = nullptr;           // [S, R], alike: the rest of all heads' keys
  const int32_t* first_rows = nullptr;  // [B]
  AttentionBatch batch;
  void* out = nullptr;  // [T, Hq, V], of long spans and heads [first_head, first_head + Hg) alone
  int64_t num_heads = 0, first_head = 0, num_expanded_heads = 0;
  LatentSizes sizes;
  float softmax_scale = 1.f;
};
// The first zeroed_bytes are zero ahead of the first call, and each call leaves them so.
int64_t expanded_attention_workspace_bytes(const LatentSizes& sizes, const AttentionLimits& limits);
int64_t expanded_attention_zeroed_bytes();
Status expanded_attention(const ExpandedAttentionParams& params, const AttentionLimits& limits,
                          void* workspace, const Launch& launch);

}  // namespace regatta::cuda
