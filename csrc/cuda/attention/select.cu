// The candidates for paged attention, and how many launches a call is. Host code alone: any C++
// compiler takes it.
#include <algorithm>

#include "cuda/attention/select.h"
#include "cuda/candidates.h"

namespace regatta::cuda {
namespace {

// What both tensor-core kernels refuse.
std::string refuses_matrix_units(const AttentionProblem& p) {
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  const auto allowed = {64, 80, 96, 128, 256};
  if (std::find(allowed.begin(), allowed.end(), p.head_dim) == allowed.end()) {
    return "head_dim " + std::to_string(p.head_dim) + " (allowed: 64, 80, 96, 128, 256)";
  }
  return p.num_seqs > 4096 ? "more than 4096 requests" : "";
}

std::string refuses_sm80(const AttentionProblem& p) {
  if (p.has_trees) return "has no draft trees";
  if (p.format != KvFormat::kDense) {
    return std::string("kv_format ") + kv_format_info(p.format).name + " (allowed: dense)";
  }
  return refuses_matrix_units(p);
}

std::string refuses_generic(const AttentionProblem& p) {
  return p.head_dim > 256 ? "head_dim " + std::to_string(p.head_dim) + " is larger than 256" : "";
}

using Kernel = AttentionKernel;

constexpr Candidate<AttentionProblem, Kernel> kCandidates[] = {
    {"sm90", Kernel::kSm90, 90, 90, refuses_matrix_units, /*is_alike=*/true},
    {"sm80", Kernel::kSm80, 80, kAllArchitectures, refuses_sm80},
    {"generic", Kernel::kGeneric, 0, kAllArchitectures, refuses_generic, /*is_alike=*/true},
};

bool has_norms(const RopeAndCacheWriteParams& rope) {
  return rope.q_norm != nullptr || rope.k_norm != nullptr;
}

// In one launch: vectors of eight columns, one new token per span, and norms over single heads.
bool writes_cache(const AttentionProblem& p) {
  return p.has_plain_rope && p.max_query_len == 1 && !p.is_batch_invariant &&
         p.rotary_dim % 16 == 0 && p.rotary_dim <= p.head_dim;
}

// Short contexts: the sm90 prefill kernel takes single tokens as fast as it can read the cache, and
// a launch in front of it costs 15 us. Its rows do not depend on each other.
bool prefills_alone(const AttentionProblem& p) {
  if (p.has_trees) return false;
  const bool short_contexts = p.format == KvFormat::kDense && p.max_context_len <= kShortContext;
  return p.is_batch_invariant || (p.has_long_spans() && (p.num_seqs == 1 || short_contexts));
}

}  // namespace

AttentionProblem::AttentionProblem(const PagedAttentionParams& p, const AttentionLimits& limits,
                                   const RopeAndCacheWriteParams* rope)
    : dtype(p.dtype),
      format(p.cache.format),
      head_dim(p.head_dim),
      num_heads(p.num_heads),
      num_kv_heads(p.num_kv_heads),
      num_tokens(p.batch.num_tokens),
      num_seqs(p.batch.num_seqs),
      max_query_len(limits.max_query_len),
      max_context_len(limits.max_context_len),
      window(p.window),
      has_trees(p.batch.tree_mask != nullptr),
      has_prefixes(p.batch.prefix_lens != nullptr),
      tree_words(p.batch.tree_words),
      has_plain_rope(rope != nullptr && rope->positions != nullptr &&
                     rope->block_positions == nullptr &&
                     !((rope->whole || rope->last) && has_norms(*rope))),
      rotary_dim(rope == nullptr || rope->rope_cache == nullptr ? 0 : rope->rotary_dim) {}

// Spans that may be trees of drafts are the decode kernel's, prompts with a prefix the other one's.
int AttentionProblem::max_decode_rows() const {
  if (has_prefixes) return 0;  // single tokens alone
  return has_trees ? std::max<int>(kMaxDecodeRows, 32 * tree_words * group()) : kMaxDecodeRows;
}

bool AttentionProblem::has_long_spans() const {
  return !is_decode_span(static_cast<int>(max_query_len), group(), max_decode_rows());
}

bool AttentionProblem::shares_prefill() const {
  return !is_batch_invariant && has_long_spans() && max_context_len > kShortContext &&
         (window < 0 || window > kShortContext);
}

Status select_attention(const AttentionProblem& p, int architecture, const std::string& force,
                        AttentionLaunches* launches) {
  std::string reasons;
  const auto* const row = select(kCandidates, p, architecture, force, &reasons);
  if (row == nullptr) return Status::error("paged_attention: no kernel fits" + reasons);
  *launches = {};
  launches->kernel = row->kernel;
  if (row->kernel == Kernel::kGeneric) return {};
  const bool sm90 = row->kernel == Kernel::kSm90, has_long = p.has_long_spans();
  launches->decodes = !sm90 || !prefills_alone(p);
  launches->prefills = has_long || !launches->decodes;
  launches->writes_cache = sm90 && writes_cache(p);
  // Beside longer ones, spans of several tokens are the sm90 prefill kernel's, but trees.
  launches->max_decode_rows = sm90 && has_long && !p.has_trees ? 0 : p.max_decode_rows();
  return {};
}

}  // namespace regatta::cuda
