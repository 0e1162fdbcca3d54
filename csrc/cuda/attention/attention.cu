// paged_attention on the GPU: checks, workspace, and launches.
//
// A call is one or two launches: the decode kernel (it also clears padding rows), and the prefill
// kernel when a span may be longer than what the decode kernel takes; on sm_90 the prefill kernel
// alone where no context is long, or only one request. Under programmatic dependent launch the
// two overlap: the decode kernel triggers its dependent only after it has waited for everything in
// front, so the prefill kernel starts without a wait, and waits for the decode kernel before it
// ends; whoever waits for the prefill kernel thereby waits for both.
//
// Which candidate runs, and in how many launches: select.h. REGATTA_KERNEL may force one
// ("paged_attention=sm80").
#include <algorithm>
#include <cmath>

#include "attention.cuh"
#include "cuda/attention/select.h"

namespace regatta::cuda {
namespace {

bool one_of(int64_t x, std::initializer_list<int64_t> allowed) {
  return std::find(allowed.begin(), allowed.end(), x) != allowed.end();
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
  if (p.batch.prefix_lens != nullptr && (p.batch.tree_mask != nullptr || p.slopes != nullptr)) {
    return Status::error("paged_attention: prefix_lens goes with no tree_mask and no slopes");
  }
  if (limits.max_query_len < 1 || limits.max_context_len < 0) {
    return Status::error("paged_attention: limits must be at least 1 token, got max_query_len " +
                         std::to_string(limits.max_query_len) + ", max_context_len " +
                         std::to_string(limits.max_context_len));
  }
  return {};
}

constexpr int kTileRows = 16;  // of the sm80 decode kernel

AttentionProblem problem_of(const PagedAttentionParams& params, const AttentionLimits& limits,
                            const RopeAndCacheWriteParams* rope = nullptr) {
  AttentionProblem problem(params, limits, rope);
  problem.is_batch_invariant = is_batch_invariant;
  return problem;
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
    const int64_t pieces = problem_of(p, limits).shares_prefill() ? 2 * kBlocks : 0;
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

bool has_norms(const RopeAndCacheWriteParams& rope) {
  return rope.q_norm != nullptr || rope.k_norm != nullptr;
}

// rope: done on the way when not null.
Status run(const PagedAttentionParams& params, const RopeAndCacheWriteParams* rope,
           const AttentionLimits& limits, void* workspace, int64_t workspace_bytes,
           const AttentionProblem& problem, const AttentionLaunches& launches,
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
  if (launches.kernel == AttentionKernel::kGeneric) {
    return launch_attention_generic(args, params.dtype, format, head_dim, launch_on);
  }
  if (rope != nullptr) {
    args.rope.qkv = rope->qkv;
    args.rope.positions = rope->positions;
    args.rope.slot_mapping = rope->slot_mapping;
    args.rope.table = rope->rope_cache;
    args.rope.q_norm = rope->q_norm;
    args.rope.k_norm = rope->k_norm;
    args.rope.rotary_dim = static_cast<int>(problem.rotary_dim);
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
  args.max_decode_rows = launches.max_decode_rows;
  args.prefill_alone = !launches.decodes;
  args.shares_prefill = problem.shares_prefill();
  const bool sm90 = launches.kernel == AttentionKernel::kSm90;
  const int num_sms = num_multiprocessors();
  if (launches.decodes) {
    const Status status =
        sm90 ? launch_attention_decode_sm90(args, params.dtype, format, head_dim, limits, num_sms,
                                            launch_on)
             : launch_attention_decode_sm80(args, params.dtype, head_dim, num_sms, launch_on);
    if (!status.ok() || !launches.prefills) return status;
  }
  args.counters += kMaxMultiprocessors;
  args.partial_out += sizes.prefill_offset;
  const int64_t cache_rows =
      params.cache.num_blocks * params.num_kv_heads * params.cache.block_size;
  return sm90 ? launch_attention_prefill_sm90(args, params.dtype, format, head_dim, cache_rows,
                                              num_sms, launch_on)
              : launch_attention_prefill_sm80(args, params.dtype, head_dim, launch_on);
}

// rope: null, or done first where it is not done on the way.
Status attend(const PagedAttentionParams& params, const RopeAndCacheWriteParams* rope,
              const AttentionLimits& limits, void* workspace, int64_t workspace_bytes,
              const Launch& launch_on) {
  if (params.batch.num_tokens == 0) return {};
  REGATTA_RETURN_IF_ERROR(check(params, limits));
  const AttentionProblem problem = problem_of(params, limits, rope);
  AttentionLaunches launches;
  REGATTA_RETURN_IF_ERROR(select_attention(problem, compute_capability(),
                                           forced_candidate("paged_attention"), &launches));
  if (rope != nullptr && !launches.writes_cache) {
    REGATTA_RETURN_IF_ERROR(rope_and_cache_write(*rope, launch_on));
    rope = nullptr;
  }
  return run(params, rope, limits, workspace, workspace_bytes, problem, launches, launch_on);
}

}  // namespace

Status paged_attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                       void* workspace, int64_t workspace_bytes, const Launch& launch_on) {
  return attend(params, nullptr, limits, workspace, workspace_bytes, launch_on);
}

Status rope_and_paged_attention(const RopeAndCacheWriteParams& rope,
                                const PagedAttentionParams& params, const AttentionLimits& limits,
                                void* workspace, int64_t workspace_bytes, const Launch& launch_on) {
  return attend(params, &rope, limits, workspace, workspace_bytes, launch_on);
}

}  // namespace regatta::cuda
