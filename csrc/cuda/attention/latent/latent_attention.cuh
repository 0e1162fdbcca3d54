// What the kernels of attention over latents share: arguments, spans, what a token sees.
#pragma once

#include "cuda/attention/latent/latent.h"
#include "cuda/common.cuh"

namespace regatta::cuda {

struct LatentArgs {
  const void* q_latent;
  const void* q_rope;
  const void* cache;
  const void* tail;     // of codes
  const float* scales;  // of codes, null without
  void* out;
  // What blocks leave for who adds it up, not normalised: [places, rows, L] and, of each row, its
  // largest score (base 2) and the sum of exponentials. Null where contexts are not split. The mma
  // kernel's places are parts, its rows all; the sm90 kernel's are LatentPlan::num_places() and
  // place_rows.
  float* partial;
  float2* sums;
  const int32_t* cu_seqlens_q;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const uint32_t* tree_mask;
  int64_t tree_words, max_blocks;
  int num_tokens, num_seqs, num_heads, rank, rope, block_size;
  int parts;         // of the mma kernel
  int max_span_len;  // longer spans are attended otherwise
  float scale_log2;
};

// Where a span lies, and what its tokens see.
struct LatentSpan {
  int start, length, context, before;
  bool tree;

  __device__ __forceinline__ LatentSpan() {}
  __device__ __forceinline__ LatentSpan(const LatentArgs& a, int seq) {
    start = a.cu_seqlens_q[seq];
    length = a.cu_seqlens_q[seq + 1] - start;
    context = a.context_lens[seq];
    before = context - length;
    tree = a.tree_mask != nullptr && length <= 32 * a.tree_words;
  }
  // Whether token i of the span sees position p.
  __device__ __forceinline__ bool sees(const LatentArgs& a, int i, int p) const {
    if (!tree || p < before) return p <= before + i;
    const int other = p - before;
    if (other >= length) return false;
    const uint32_t* words = a.tree_mask + (start + i) * a.tree_words;
    return words[other / 32] >> other % 32 & 1;
  }
  // Positions that tokens up to i see at most.
  __device__ __forceinline__ int last(int i) const { return tree ? context : before + i + 1; }
  // Of a row of the span in q_latent, q_rope and out.
  __device__ __forceinline__ int64_t index(const LatentArgs& a, int row) const {
    return static_cast<int64_t>(row % a.num_heads) * a.num_tokens + start + row / a.num_heads;
  }
};

// How the sm90 kernel's blocks share out what there is to do. Rows of a span come in groups of
// kLatentRows * lanes; blocks of a group read the same latents at the same time, each for a lane of
// it.
constexpr int kLatentRows = 64;

struct LatentPlan {
  int lanes;        // 1 or 2
  int units;        // blocks of a lane
  bool shares;      // the tiles of keys of all groups in equal parts; else a group is a unit's
  bool reads_once;  // latents are no other group's
  int place_rows;   // of what a block leaves of a group that it does not take alone

  int64_t num_places() const { return shares && units > 1 ? int64_t{2} * units * lanes : 0; }
};

// Of caches of bf16 or fp16, L = 512 and R = 64; num_slots: of the cache.
Status launch_latent_attention_sm90(const LatentArgs& args, const LatentPlan& plan, DType dtype,
                                    int64_t num_slots, const Launch& launch);

}  // namespace regatta::cuda
