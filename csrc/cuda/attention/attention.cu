// paged_attention on the GPU: checks, workspace, and the choice of kernels.
//
// A call is one or two launches: the decode kernel (it also clears padding rows), and the prefill
// kernel when a span may be longer than what the decode kernel takes; on sm_90 the prefill kernel
// alone where no context is long, or only one request. Under programmatic dependent launch the
// two overlap: the decode kernel triggers its dependent only after it has waited for everything in
// front, so the prefill kernel starts without a wait, and waits for the decode kernel before it
// ends; whoever waits for the prefill kernel thereby waits for both.
//
// Which candidate runs: the first of kCandidates that does not refuse. REGATTA_KERNEL may force one
// ("paged_attention=sm80").
#include <algorithm>
#include <cmath>

#include "attention.cuh"

namespace regatta::cuda {
namespace {

bool one_of(int64_t x, std::initializer_list<int64_t> allowed) {
  return std::find(allowed.begin(), allowed.end(), x) != allowed.end();
}

// What both tensor-core kernels refuse.
std::string refuse_matrix_units(const PagedAttentionParams& p) {
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  if (!one_of(p.head_dim, {64, 80, 96, 128, 256})) {
    return "head_dim " + std::to_string(p.head_dim) + " (allowed: 64, 80, 96, 128, 256)";
  }
  return p.batch.num_seqs > 4096 ? "more than 4096 requests" : "";
}

std::string refuse_sm80(const PagedAttentionParams& p) {
  const int architecture = compute_capability();
  if (architecture < 80) return "needs sm_80 or later";
  if (p.batch.tree_mask != nullptr) return "has no draft trees";
  if (p.cache.format != KvFormat::kDense) {
    return std::string("kv_format ") + kv_format_info(p.cache.format).name + " (allowed: dense)";
  }
  return refuse_matrix_units(p);
}

// Spans that may be trees of drafts are the decode kernel's, prompts with a prefix the other one's.
int max_decode_rows(const PagedAttentionParams& p) {
  if (p.batch.prefix_lens != nullptr) return 0;  // single tokens alone
  if (p.batch.tree_mask == nullptr) return kMaxDecodeRows;
  return std::max<int>(kMaxDecodeRows, 32 * p.batch.tree_words * (p.num_heads / p.num_kv_heads));
}

std::string refuse_sm90(const PagedAttentionParams& p) {
  const int architecture = compute_capability();
  return architecture != 90 ? "needs sm_90" : refuse_matrix_units(p);
}

std::string refuse_generic(const PagedAttentionParams& p) {
  return p.head_dim > 256 ? "head_dim " + std::to_string(p.head_dim) + " is larger than 256" : "";
}

enum class Kernel { kSm90, kSm80, kGeneric };

struct Candidate {
  const char* name;
  Kernel kernel;
  std::string (*refuse)(const PagedAttentionParams&);
};

constexpr Candidate kCandidates[] = {
    {"sm90", Kernel::kSm90, refuse_sm90},
    {"sm80", Kernel::kSm80, refuse_sm80},
    {"generic", Kernel::kGeneric, refuse_generic},
};

Status choose(const PagedAttentionParams& params, Kernel* kernel) {
  const std::string forced = forced_candidate("paged_attention");
  std::string reasons;
  for (const Candidate& candidate : kCandidates) {
    if (!forced.empty() && forced != candidate.name) continue;
    const std::string reason = candidate.refuse(params);
    if (reason.empty()) {
      *kernel = candidate.kernel;
      return {};
    }
    reasons += std::string("\n  ") + candidate.name + ": " + reason;
  }
  return Status::error("paged_attention: no kernel fits" + reasons);
}

Status check(const PagedAttentionParams& p, const AttentionLimits& limits) {
  if (!one_of(p.cache.block_size, {16, 32, 64, 128})) {
    return Status::error("block_size " + std::to_string(p.cache.block_size) +
                         " is not supported by paged_attention (allowed: 16, 32, 64, 128); set "
                         "--block_size");
  }
  if (p.num_kv_heads <= 0 || p.num_heads % p.num_kv_heads != 0) {
    return Status::error("paged_attention: num_heads " + std::to_string(p.num_heads) +
                         " must be a multiple of num_kv_heads " + std::to_string(p.num_kv_heads));
  }
  if (p.window == 0 || p.window < -1) {
    return Status::error("paged_attention: window " + std::to_string(p.window) +
                         " (allowed: -1 for none, or 1 and more)");
  }
  if (!(p.softcap >= 0.f) || std::isinf(p.softcap)) {
    return Status::error("paged_attention: softcap " + std::to_string(p.softcap) +
                         " (allowed: 0 for none, or a positive number)");
  }
  if (p.batch.prefix_lens != nullptr &&
      (p.batch.tree_mask != nullptr || p.slopes != nullptr || p.window != -1)) {
    return Status::error("paged_attention: prefix_lens goes with no tree_mask, slopes or window");
  }
  if (limits.max_query_len < 1 || limits.max_context_len < 0) {
    return Status::error("paged_attention: limits must be at least 1 token, got max_query_len " +
                         std::to_string(limits.max_query_len) + ", max_context_len " +
                         std::to_string(limits.max_context_len));
  }
  return {};
}

constexpr int kTileRows = 16;            // of the sm80 decode kernel
constexpr int64_t kShortContext = 4096;  // tokens that one block may read without splitting

// Whether spans may be longer than what the decode kernel takes.
bool has_prefills(const PagedAttentionParams& p, const AttentionLimits& limits) {
  return !is_decode_span(static_cast<int>(limits.max_query_len),
                         static_cast<int>(p.num_heads / p.num_kv_heads), max_decode_rows(p));
}

// Whether blocks of the sm90 prefill kernel may share an item.
bool shares_prefill(const PagedAttentionParams& p, const AttentionLimits& limits) {
  return !is_batch_invariant && has_prefills(p, limits) && limits.max_context_len > kShortContext &&
         (p.window < 0 || p.window > kShortContext);
}

// The prefill kernels' tickets, and what blocks of a kernel leave for each other (AttentionArgs).
struct Workspace {
  int64_t units = 0;         // upper bound of (row tile, split) over the batch
  int64_t partial_rows = 0;  // rows kept per unit
  int64_t counter_bytes = 0, stats_bytes = 0, out_bytes = 0;
  int64_t prefill_offset = 0;  // floats in front of the sm90 prefill kernel's

  Workspace(const PagedAttentionParams& p, const AttentionLimits& limits) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    const int64_t rows =
        std::max(group, std::min(limits.max_query_len * group, int64_t{kMaxDecodeRows}));
    // At most, by split_tokens().
    const int length = static_cast<int>(std::clamp<int64_t>(limits.max_context_len, 1, 1 << 30));
    const int64_t splits = length <= kMinSplit ? 1 : length <= 8192 ? 8 : kMaxSplits;
    const int64_t tiles_by_tokens = p.batch.num_seqs + p.batch.num_tokens * group / kTileRows;
    units = std::min(p.batch.num_seqs * ceil_div(rows, kTileRows), tiles_by_tokens) * splits;
    partial_rows = std::min<int64_t>(rows, kTileRows);
    const int64_t entries = units * p.num_kv_heads;
    int64_t counters = entries;
    stats_bytes = round_up(entries * partial_rows * 8, 256);
    out_bytes = entries * partial_rows * p.head_dim * 4;
    // The sm90 kernels': one behind the other, since the two may run at the same time.
    constexpr int64_t kBlocks = kMaxMultiprocessors;
    const int64_t vectors = 2 * p.batch.num_seqs * p.num_kv_heads > kBlocks
                                ? 0
                                : kBlocks * kDecodeRows * p.head_dim / 4;
    const int64_t pieces = shares_prefill(p, limits) ? 2 * kBlocks : 0;
    prefill_offset = vectors * 4;
    stats_bytes = std::max(stats_bytes, vectors * 8);
    out_bytes = std::max(out_bytes, vectors * 16 + pieces * 2 * 128 * (p.head_dim / 2 + 4) * 4);
    counters = std::max(counters, 3 * kBlocks);
    counter_bytes = 256 + round_up(counters * 4, 256);  // the tickets first
  }
  int64_t bytes() const { return counter_bytes + stats_bytes + out_bytes; }
};

}  // namespace

int64_t paged_attention_workspace_bytes(const PagedAttentionParams& params,
                                        const AttentionLimits& limits) {
  if (!check(params, limits).ok()) return 0;  // paged_attention() reports it
  return Workspace(params, limits).bytes();
}

int64_t paged_attention_zeroed_bytes(const PagedAttentionParams& params,
                                     const AttentionLimits& limits) {
  if (!check(params, limits).ok()) return 0;
  return Workspace(params, limits).counter_bytes;
}

namespace {

int64_t rotary_dim_of(const RopeAndCacheWriteParams& rope) {
  return rope.rope_cache == nullptr ? 0 : rope.rotary_dim;
}

bool has_norms(const RopeAndCacheWriteParams& rope) {
  return rope.q_norm != nullptr || rope.k_norm != nullptr;
}

// rope: done on the way when not null.
Status run(const PagedAttentionParams& params, const RopeAndCacheWriteParams* rope,
           const AttentionLimits& limits, void* workspace, int64_t workspace_bytes, Kernel kernel,
           const Launch& launch_on) {
  AttentionArgs args = {};
  args.q = params.q;
  args.key = params.cache.key;
  args.value = params.cache.value;
  args.key_scale = params.cache.key_scale;
  args.value_scale = params.cache.value_scale;
  args.out = params.out;
  args.cu_seqlens_q = params.batch.cu_seqlens_q;
  args.context_lens = params.batch.context_lens;
  args.block_tables = params.batch.block_tables;
  args.tree_mask = reinterpret_cast<const uint32_t*>(params.batch.tree_mask);
  args.tree_words = static_cast<int>(params.batch.tree_words);
  args.prefix_lens = params.batch.prefix_lens;
  args.num_tokens = static_cast<int>(params.batch.num_tokens);
  args.num_seqs = static_cast<int>(params.batch.num_seqs);
  args.max_blocks = static_cast<int>(params.batch.max_blocks);
  args.num_heads = static_cast<int>(params.num_heads);
  args.num_kv_heads = static_cast<int>(params.num_kv_heads);
  args.group = args.num_heads / args.num_kv_heads;
  args.group_inverse =
      args.group == 1 ? 0 : static_cast<uint32_t>(((1ull << 32) + args.group - 1) / args.group);
  args.block_shift = static_cast<int>(std::lround(std::log2(params.cache.block_size)));
  args.window =
      params.window < 0 || params.window > kNoWindow ? kNoWindow : static_cast<int>(params.window);
  args.scale_log2 = params.softmax_scale * kLog2E;
  args.cap_log2 = params.softcap * kLog2E;
  args.cap_exponent = params.softcap == 0.f ? 0.f : 2.f / params.softcap;
  args.slopes = params.slopes;
  args.sinks = params.sinks;
  args.bf16 = params.dtype == DType::kBFloat16;
  const int head_dim = static_cast<int>(params.head_dim);
  const KvFormat format = params.cache.format;
  if (kernel == Kernel::kGeneric) {
    return launch_attention_generic(args, params.dtype, format, head_dim, launch_on);
  }
  if (rope != nullptr) {
    args.rope.qkv = rope->qkv;
    args.rope.positions = rope->positions;
    args.rope.slot_mapping = rope->slot_mapping;
    args.rope.table = rope->rope_cache;
    args.rope.q_norm = rope->q_norm;
    args.rope.k_norm = rope->k_norm;
    args.rope.rotary_dim = static_cast<int>(rotary_dim_of(*rope));
    args.rope.num_positions = static_cast<int>(rope->num_positions);
    args.rope.num_slots = static_cast<int>(params.cache.num_blocks * params.cache.block_size);
    args.rope.epsilon = rope->epsilon;
    args.rope.query_table = rope->rope_cache != nullptr ? rope->query_rope_cache : nullptr;
    args.rope.plus_one = rope->plus_one && has_norms(*rope);
    args.rope.interleaved = rope->rope_cache != nullptr && rope->interleaved;
  }

  const Workspace sizes(params, limits);
  if (workspace_bytes < sizes.bytes()) {
    return Status::error("paged_attention: workspace of " + std::to_string(workspace_bytes) +
                         " bytes is too small (needs " + std::to_string(sizes.bytes()) +
                         "); allocate paged_attention_workspace_bytes() for the same limits");
  }
  auto* bytes = static_cast<uint8_t*>(workspace);
  args.tickets = reinterpret_cast<int*>(bytes);
  args.counters = reinterpret_cast<int*>(bytes + 256);
  args.partial_stats = reinterpret_cast<float2*>(bytes + sizes.counter_bytes);
  args.partial_out = reinterpret_cast<float*>(bytes + sizes.counter_bytes + sizes.stats_bytes);
  args.tile_rows = kTileRows;
  args.partial_rows = static_cast<int>(sizes.partial_rows);
  const bool trees = args.tree_mask != nullptr;
  args.max_decode_rows = max_decode_rows(params);
  const bool prefills = has_prefills(params, limits);
  const bool prefill_sm90 = kernel == Kernel::kSm90;
  if (prefills && prefill_sm90 && !trees) args.max_decode_rows = 0;  // single tokens alone
  // Short contexts: the prefill kernel takes single tokens as fast as it can read the cache, and a
  // launch in front of it costs 15 us. Its rows do not depend on each other.
  args.prefill_alone =
      prefill_sm90 && !trees &&
      (is_batch_invariant ||
       (prefills && (args.num_seqs == 1 ||
                     (format == KvFormat::kDense && limits.max_context_len <= kShortContext))));
  args.shares_prefill = shares_prefill(params, limits);
  const int num_sms = num_multiprocessors();
  if (!args.prefill_alone) {
    const Status status =
        kernel == Kernel::kSm90
            ? launch_attention_decode_sm90(args, params.dtype, format, head_dim, limits, num_sms,
                                           launch_on)
            : launch_attention_decode_sm80(args, params.dtype, head_dim, num_sms, launch_on);
    if (!status.ok() || !prefills) return status;
  }
  args.counters += kMaxMultiprocessors;
  args.partial_out += sizes.prefill_offset;
  const int64_t cache_rows =
      params.cache.num_blocks * params.num_kv_heads * params.cache.block_size;
  return prefill_sm90 ? launch_attention_prefill_sm90(args, params.dtype, format, head_dim,
                                                      cache_rows, num_sms, launch_on)
                      : launch_attention_prefill_sm80(args, params.dtype, head_dim, launch_on);
}

Status prepare(const PagedAttentionParams& params, const AttentionLimits& limits, Kernel* kernel) {
  REGATTA_RETURN_IF_ERROR(check(params, limits));
  REGATTA_RETURN_IF_ERROR(choose(params, kernel));
  if (is_batch_invariant && *kernel == Kernel::kSm80) *kernel = Kernel::kGeneric;
  return {};
}

}  // namespace

Status paged_attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                       void* workspace, int64_t workspace_bytes, const Launch& launch_on) {
  if (params.batch.num_tokens == 0) return {};
  Kernel kernel;
  REGATTA_RETURN_IF_ERROR(prepare(params, limits, &kernel));
  return run(params, nullptr, limits, workspace, workspace_bytes, kernel, launch_on);
}

Status rope_and_paged_attention(const RopeAndCacheWriteParams& rope,
                                const PagedAttentionParams& params, const AttentionLimits& limits,
                                void* workspace, int64_t workspace_bytes, const Launch& launch_on) {
  if (params.batch.num_tokens == 0) return {};
  Kernel kernel;
  REGATTA_RETURN_IF_ERROR(prepare(params, limits, &kernel));
  // In one launch: vectors of eight columns, one new token per span, and norms over single heads
  // ahead of the rotation.
  const int64_t rotary_dim = rotary_dim_of(rope);
  const bool fused = kernel == Kernel::kSm90 && limits.max_query_len == 1 && !is_batch_invariant &&
                     rotary_dim % 16 == 0 && rotary_dim <= params.head_dim &&
                     rope.positions != nullptr && rope.block_positions == nullptr &&
                     !((rope.whole || rope.last) && has_norms(rope));
  if (!fused) {
    REGATTA_RETURN_IF_ERROR(rope_and_cache_write(rope, launch_on));
  }
  return run(params, fused ? &rope : nullptr, limits, workspace, workspace_bytes, kernel,
             launch_on);
}

}  // namespace regatta::cuda
