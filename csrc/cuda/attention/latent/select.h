// Which kernel attends over latents, and which spans are expanded: a function of the block, of the
// call and of the GPU alone.
//
// No CUDA and no device calls: any C++ compiler takes this file and select.cu, and
// tests/csrc/test_select_kernels.py asks them on a CPU.
#pragma once

#include <string>

#include "regatta/types.h"

namespace regatta::cuda {

constexpr int kLatentStages = 2;  // of the mma kernel's tiles of latents

// Of a block of the mma kernel: so many rows, and tiles of so many tokens.
constexpr int64_t latent_tile_bytes(int64_t rows, int64_t tile, bool codes, int64_t rank,
                                    int64_t rope) {
  const int64_t stages = codes ? kLatentStages * tile * (rank + rope * 2 + 4) : 0;
  return (rows + (codes ? 1 : kLatentStages) * tile) * (rank + rope + 8) * 2 + stages +
         rows * (tile + 4) * 4 + rows * (tile + 8) * 2 + rows * 3 * 4 + 1024;
}

// DeepSeek-V3's block, and a step that decodes, as far as the choice depends on them.
struct LatentProblem {
  DType dtype = DType::kBFloat16;
  int64_t num_heads = 128, latent_rank = 512, rope_size = 64, nope_size = 128, value_size = 128;
  bool has_codes = false;  // in the cache
  int64_t block_size = 64, num_blocks = 1024;
  int64_t num_tokens = 1, max_query_len = 1;
  int64_t max_short_len = 1, num_long_tokens = 0;  // AttentionLimits
  bool has_trees = false;
  bool is_absorbed = false;              // the block's form
  int64_t max_shared_bytes = 227 << 10;  // of a block of threads
  // A row has the same bits whatever rows are beside it.
  bool is_batch_invariant = false;
};

enum class LatentKernel : uint8_t {
  kSm90,
  kMma16,
  kMma32,
  kMma64,
  kPlain
};  // Mma: rows of a block
enum class LongSpans : uint8_t { kExpanded, kAbsorbed };

// force: the candidate that REGATTA_KERNEL names, or "". Where it does not take the problem, the
// plain kernel does.
LatentKernel select_latent_attention(const LatentProblem& problem, int architecture,
                                     const std::string& force = "");
// What is done with spans beyond max_short_len.
LongSpans select_long_spans(const LatentProblem& problem, int architecture);

// Heads whose keys and values there is room for at a time; 0: not for one.
int64_t expanded_heads(const LatentProblem& problem);

}  // namespace regatta::cuda
