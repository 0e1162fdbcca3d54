// The candidates for attention over latents. Host code alone: any C++ compiler takes it.
#include <algorithm>

#include "cuda/attention/latent/select.h"
#include "cuda/candidates.h"
#include "cuda/integers.h"

namespace regatta::cuda {
namespace {

// Keys and values of so many bytes are made of latents at a time, of as many heads as that allows.
// On the host, predict/loading/memory.py has room for as much.
constexpr int64_t kMaxExpandedBytes = int64_t{256} << 20;

// A function of the model and the cache, not of the batch.
std::string refuses_sm90(const LatentProblem& p) {
  const int64_t block = p.block_size;
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  if (p.has_codes) return "takes caches of values";
  if (p.latent_rank != 512 || p.rope_size != 64) return "takes latents of 512 and 64 values";
  const bool fits = block >= 64 ? block % 64 == 0 : block >= 8 && (block & (block - 1)) == 0;
  if (!fits) return "block_size " + std::to_string(block) + " fits no tiles of 64 tokens";
  return p.num_blocks > 0 && p.num_blocks * block <= INT32_MAX ? "" : "too many slots, or none";
}

// All heads of a token that is decoded, or 64 rows, whose tiles of tokens are smaller. What
// DeepSeek's 576 values take of shared memory Hopper has for all of them, sm_80 for 64 rows alone,
// and others for none. A row's bits follow from the tile of tokens: in the batch-invariant mode it
// is one.
template <int kRows, int kTile>
std::string refuses_mma(const LatentProblem& p) {
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  if (p.latent_rank % 32 != 0 || (p.latent_rank + p.rope_size) % 32 != 0 || p.latent_rank > 512 ||
      p.rope_size > 64) {
    return "takes latents of up to 512 and 64 values, multiples of 32";
  }
  if (p.block_size % 4 != 0) return "block_size is no multiple of 4";
  if (kRows < 64 && p.num_heads * p.max_query_len > kRows) return "a span has more rows";
  constexpr int64_t kOwn = 1024;  // the kernel's variables, up to where its tiles are aligned
  const int64_t bytes = latent_tile_bytes(kRows, kTile, p.has_codes, p.latent_rank, p.rope_size);
  return bytes + kOwn <= p.max_shared_bytes ? "" : "too little shared memory";
}

std::string refuses_expanded(const LatentProblem& p) {
  if (p.is_absorbed) return "the block is absorbed";
  if (p.num_long_tokens == 0 || p.max_short_len >= p.max_query_len) return "no span is long";
  if (p.has_trees) return "has no draft trees";
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  if (p.latent_rank % 8 != 0 || p.nope_size != 128 || p.rope_size != 64 || p.value_size != 128) {
    return "takes keys of 128 and 64 values, and values of 128";
  }
  return expanded_heads(p) > 0 ? "" : "contexts are too long";
}

using K = LatentKernel;
constexpr Candidate<LatentProblem, K> kKernels[] = {
    {"sm90", K::kSm90, 90, 90, refuses_sm90, /*is_alike=*/true},
    {"sm80", K::kMma16, 80, kAllArchitectures, refuses_mma<16, 64>},
    {"sm80", K::kMma32, 80, kAllArchitectures, refuses_mma<32, 64>},
    {"sm80", K::kMma64, 80, kAllArchitectures, refuses_mma<64, 32>, /*is_alike=*/true},
    {"plain", K::kPlain, 0, kAllArchitectures, nullptr, /*is_alike=*/true},
};

using L = LongSpans;
constexpr Candidate<LatentProblem, L> kLongSpans[] = {
    {"expanded", L::kExpanded, 90, 90, refuses_expanded},
    {"absorbed", L::kAbsorbed, 0, kAllArchitectures, nullptr, /*is_alike=*/true},
};

}  // namespace

LatentKernel select_latent_attention(const LatentProblem& p, int architecture,
                                     const std::string& force) {
  const auto* const row = select(kKernels, p, architecture, force);
  return row == nullptr ? LatentKernel::kPlain : row->kernel;
}

LongSpans select_long_spans(const LatentProblem& p, int architecture) {
  return select(kLongSpans, p, architecture)->kernel;
}

int64_t expanded_heads(const LatentProblem& p) {
  const int64_t row_bytes = p.num_long_tokens * dtype_size(p.dtype);
  const int64_t left = kMaxExpandedBytes - row_bytes * (p.latent_rank + p.rope_size);
  const int64_t most = left / (row_bytes * (p.nope_size + p.value_size));
  if (left < 0 || most == 0) return 0;
  return ceil_div(p.num_heads, ceil_div(p.num_heads, most));
}

}  // namespace regatta::cuda
