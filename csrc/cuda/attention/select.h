// Which kernels attend: a function of the call and of the GPU alone.
//
// No CUDA and no device calls: any C++ compiler takes this file and select.cu, and
// tests/csrc/test_select_kernels.py asks them on a CPU.
#pragma once

#include <string>

#include "regatta/cuda_ops.h"

namespace regatta::cuda {

constexpr int kMaxDecodeRows = 64;       // with more rows the matrix units are the bound
constexpr int64_t kShortContext = 4096;  // tokens that one block may read without splitting

constexpr bool is_decode_span(int num_tokens, int group, int max_rows = kMaxDecodeRows) {
  return num_tokens == 1 || num_tokens * group <= max_rows;
}

// A call of paged attention as far as the choice depends on it.
struct AttentionProblem {
  DType dtype = DType::kBFloat16;
  KvFormat format = KvFormat::kDense;
  int64_t head_dim = 128, num_heads = 32, num_kv_heads = 8;
  int64_t num_tokens = 1, num_seqs = 1;
  int64_t max_query_len = 1, max_context_len = 1;  // AttentionLimits
  int64_t window = -1;
  bool has_trees = false, has_prefixes = false;
  int64_t tree_words = 0;
  // A rotary embedding and cache write ahead, by single heads and one table of positions; and the
  // dims that it rotates.
  bool has_plain_rope = false;
  int64_t rotary_dim = 0;
  // A row has the same bits whatever rows are beside it.
  bool is_batch_invariant = false;

  AttentionProblem() = default;
  // What the call says: not the mode. rope: null where there is none.
  AttentionProblem(const PagedAttentionParams& params, const AttentionLimits& limits,
                   const RopeAndCacheWriteParams* rope = nullptr);

  int group() const { return static_cast<int>(num_heads / num_kv_heads); }
  // Per KV head, of spans of several tokens that a decode kernel takes.
  int max_decode_rows() const;
  // Whether spans may be longer than what a decode kernel takes.
  bool has_long_spans() const;
  // Whether blocks of the sm90 prefill kernel may share an item.
  bool shares_prefill() const;
};

enum class AttentionKernel : uint8_t { kSm90, kSm80, kGeneric };

// The launches of a call. kGeneric is one launch of its own.
struct AttentionLaunches {
  AttentionKernel kernel = AttentionKernel::kGeneric;
  bool decodes = false;       // of spans of few rows; it also clears rows of padding
  bool prefills = false;      // of the others; of all where it is alone
  bool writes_cache = false;  // the rotary embedding and cache write are done on the way
  int max_decode_rows = 0;
};

// An error where no candidate takes it. force: the name of the only one to consider, unless empty.
Status select_attention(const AttentionProblem& problem, int architecture, const std::string& force,
                        AttentionLaunches* launches);

}  // namespace regatta::cuda
