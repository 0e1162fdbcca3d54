// Attention over latents on GPUs, in the forms of cpu.cc. Host code.
#include <algorithm>

#include "blocks/latent_attention/block.h"
#include "cuda/attention/latent/expanded.h"
#include "cuda/attention/latent/latent.h"
#include "cuda/attention/latent/select.h"
#include "cuda/capability.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

LatentAttentionParams latent_attention_params(const LatentAttentionBlockParams& l) {
  LatentAttentionParams a;
  a.dtype = l.dtype;
  a.cache = l.cache.key;
  a.tail = l.cache.tail;
  a.scales = l.cache.key_scale;
  a.num_blocks = l.cache.num_blocks;
  a.block_size = l.cache.block_size;
  a.batch = l.batch;
  a.num_heads = l.block.num_heads;
  a.latent_rank = l.block.kv_lora_rank;
  a.rope_size = l.block.qk_rope_head_dim;
  a.softmax_scale = l.block.softmax_scale;
  return a;
}

LatentSizes latent_sizes(const LatentAttentionBlock& block) {
  return {block.kv_lora_rank, block.qk_rope_head_dim, block.qk_nope_head_dim, block.v_head_dim};
}

// The spans that a block of latent attention expands in a step: the long ones, or none. The form
// "expanded" is as "cheaper" here: expanding short spans costs more.
struct Expansion {
  int64_t rows = 0;      // tokens of their contexts; 0: nothing
  int64_t heads = 0;     // at a time
  bool is_all = false;   // no other span is there
  AttentionLimits rest;  // of the spans that are absorbed

  static Expansion of(const LatentAttentionBlockParams& l, const AttentionLimits& limits) {
    const LatentAttentionBlock& block = l.block;
    Expansion made;
    made.rest = limits;
    LatentProblem problem;
    problem.dtype = l.dtype;
    problem.num_heads = block.num_heads;
    problem.latent_rank = block.kv_lora_rank;
    problem.rope_size = block.qk_rope_head_dim;
    problem.nope_size = block.qk_nope_head_dim;
    problem.value_size = block.v_head_dim;
    problem.num_tokens = l.batch.num_tokens;
    problem.max_query_len = limits.max_query_len;
    problem.max_short_len = limits.max_short_len;
    problem.num_long_tokens = limits.num_long_tokens;
    problem.has_trees = l.batch.tree_mask != nullptr;
    problem.is_absorbed = block.form == LatentForm::kAbsorbed;
    problem.is_batch_invariant = is_batch_invariant;
    if (select_long_spans(problem, compute_capability()) == LongSpans::kAbsorbed) return made;
    made.rows = limits.num_long_tokens;
    made.heads = expanded_heads(problem);
    made.is_all = limits.max_short_len == 0;
    made.rest = {std::max<int64_t>(limits.max_short_len, 1), limits.max_context_len};
    return made;
  }
};

// Of latent attention; head-major tensors are [Hq, T, ...].
struct LatentScratch : Buffers {
  Values made{this};      // [T, a_size()] by the first product
  Values q_normed{this};  // [T, q_lora_rank]
  Values q{this};         // [T, q_size()]
  Values q_nope{this};    // [Hq, T, N]
  Values q_rope{this};    // [Hq, T, R]
  Values q_latent{this};  // [Hq, T, L]
  Values mixed{this};     // [Hq, T, L]
  Values values{this};    // [Hq, T, V]
  Words ends{this};       // [Hq]
  Bytes workspace{this};
  // Of long spans, S and Hg as in expanded.h.
  Values latents{this};    // [S, L]
  Values rope{this};       // [S, R]
  Values keys{this};       // [S, Hg, N]
  Values expanded{this};   // [S, Hg, V]: values
  Words first_rows{this};  // [B]
  Bytes expanded_workspace{this};
  Values rows{this};  // [T, Hq V]: what the heads made, side by side

  Status prepare(const Launch& launch) const override {
    return zero_ahead(expanded_workspace, expanded_attention_zeroed_bytes(), launch);
  }
};

BlockView view(const LatentAttentionBlockParams& l) {
  return view_of(l, l.block.qkv_a, l.block.out);
}

void count_absorbed(const LatentAttentionBlockParams& l, const AttentionLimits& limits,
                    SharedScratch& shared, LatentScratch& scratch) {
  const LatentAttentionBlock& block = l.block;
  const int64_t heads = block.num_heads, pairs = l.batch.num_tokens * heads;
  scratch.q_latent.need(pairs * block.kv_lora_rank);
  scratch.mixed.need(pairs * block.kv_lora_rank);
  scratch.values.need(pairs * block.v_head_dim);
  scratch.workspace.need(latent_attention_workspace_bytes(latent_attention_params(l), limits));
  shared.product.count(SchemeId::kDense, l.dtype, pairs, block.qk_nope_head_dim, block.kv_lora_rank,
                       false, false, heads);
  shared.product.count(SchemeId::kDense, l.dtype, pairs, block.kv_lora_rank, block.v_head_dim,
                       false, false, heads);
}

void count_expanded(const LatentAttentionBlockParams& l, const Expansion& expansion,
                    const AttentionLimits& limits, SharedScratch& shared, LatentScratch& scratch) {
  const LatentAttentionBlock& block = l.block;
  const int64_t rows = expansion.rows, rank = block.kv_lora_rank;
  const int64_t keys = expansion.heads * block.qk_nope_head_dim;
  const int64_t values = expansion.heads * block.v_head_dim;
  scratch.latents.need(rows * rank);
  scratch.rope.need(rows * block.qk_rope_head_dim);
  scratch.keys.need(rows * keys);
  scratch.expanded.need(rows * values);
  scratch.first_rows.need(l.batch.num_seqs);
  scratch.expanded_workspace.need(expanded_attention_workspace_bytes(latent_sizes(block), limits));
  shared.product.count(SchemeId::kDense, l.dtype, rows, rank, keys);
  shared.product.count(SchemeId::kDense, l.dtype, rows, rank, values);
}

void count(const LatentAttentionBlockParams& l, const AttentionLimits& limits,
           SharedScratch& shared, LatentScratch& scratch) {
  const LatentAttentionBlock& block = l.block;
  const Expansion expansion = Expansion::of(l, limits);
  const int64_t rows = l.batch.num_tokens, pairs = rows * block.num_heads;
  scratch.made.need(rows * block.a_size());
  scratch.q_nope.need(pairs * block.qk_nope_head_dim);
  scratch.q_rope.need(pairs * block.qk_rope_head_dim);
  scratch.ends.need(block.num_heads);
  scratch.rows.need(rows * block.mixed_size());
  if (!expansion.is_all) count_absorbed(l, expansion.rest, shared, scratch);
  if (expansion.rows > 0) count_expanded(l, expansion, limits, shared, scratch);
  shared.product.count(block.qkv_a, l.dtype, rows, l.hidden_size, block.a_size());
  shared.product.count(block.out, l.dtype, rows, block.mixed_size(), l.hidden_size);
  shared.need_adapters(l.adapters, rows, l.hidden_size, 2, block.a_size());
  shared.need_adapters(l.adapters, rows, block.mixed_size(), 1, l.hidden_size);
  if (block.q_lora_rank == 0) return;
  scratch.q_normed.need(rows * block.q_lora_rank);
  scratch.q.need(rows * block.q_size());
  shared.product.count(block.q_b, l.dtype, rows, block.q_lora_rank, block.q_size());
  shared.need_adapters(l.adapters, rows, block.q_lora_rank, 1, block.q_size());
}

// One block.
class LatentRun {
 public:
  LatentRun(const LatentAttentionBlockParams& l, const LatentScratch& x, Walk& walk)
      : l_(l), x_(x), walk_(walk) {}

  // What the first products made -> the cache and x.rows.
  Status attend() {
    const Expansion expansion = Expansion::of(l_, walk_.limits);
    const LatentWriteParams write = latent_write_params();
    if (expansion.rows == 0 && takes_head_products(write)) return attend_few(write);
    REGATTA_RETURN_IF_ERROR(latent_write(write, walk_.launch));
    if (!expansion.is_all) REGATTA_RETURN_IF_ERROR(attend_absorbed(expansion));
    return expansion.rows > 0 ? attend_expanded(expansion) : Status();
  }

  // Whether a step is one of few tokens, whose products by each head's matrix have a kernel. Not in
  // the batch-invariant mode, where tokens are added up as they are in a prompt.
  bool takes_head_products(const LatentWriteParams& write) const {
    return !is_batch_invariant && l_.batch.num_tokens <= kHeadProductTokens &&
           l_.kv_b.key_absorb.dtype == l_.dtype && l_.kv_b.value_up.dtype == l_.dtype &&
           takes_queries(write, queries_product(write)) && takes_head_product(values_product());
  }

  // Queries as the first product left them -> x.q_latent.
  HeadProductParams queries_product(const LatentWriteParams& write) const {
    HeadProductParams p = head_product_params(l_.kv_b.key_absorb);
    p.x = write.q;
    p.x_token_stride = write.q_stride;
    p.x_head_stride = write.nope_size + write.rope_size;
    p.out = x_.q_latent;
    p.out_token_stride = p.out_features;
    p.out_head_stride = p.num_tokens * p.out_features;
    return p;
  }

  // x.mixed -> x.rows, whose rows have the heads side by side.
  HeadProductParams values_product() const {
    HeadProductParams p = head_product_params(l_.kv_b.value_up);
    p.x = x_.mixed;
    p.x_token_stride = p.in_features;
    p.x_head_stride = p.num_tokens * p.in_features;
    p.out = x_.rows;
    p.out_token_stride = p.num_heads * p.out_features;
    p.out_head_stride = p.out_features;
    return p;
  }

  HeadProductParams head_product_params(const TensorView& matrices) const {
    HeadProductParams p;
    p.dtype = l_.dtype;
    p.weight = matrices.data;
    p.num_tokens = l_.batch.num_tokens;
    p.num_heads = l_.block.num_heads;
    p.in_features = matrices.shape[2];
    p.out_features = matrices.shape[1];
    return p;
  }

  // attend() of few tokens: three launches, or four where attention has two.
  Status attend_few(const LatentWriteParams& write) {
    REGATTA_RETURN_IF_ERROR(latent_write_and_queries(write, queries_product(write), walk_.launch));
    REGATTA_RETURN_IF_ERROR(attend_latents(walk_.limits));
    return head_product(values_product(), walk_.launch);
  }

  // x.q_latent, x.q_rope and the cache -> x.mixed.
  Status attend_latents(const AttentionLimits& limits) {
    LatentAttentionParams attended = latent_attention_params(l_);
    attended.q_latent = x_.q_latent;
    attended.q_rope = x_.q_rope;
    attended.out = x_.mixed;
    return latent_attention(attended, limits, x_.workspace, walk_.launch);
  }

  // x.q_nope, x.q_rope and the cache -> x.rows, of spans that are not expanded: queries and
  // outputs go through each head's matrix.
  Status attend_absorbed(const Expansion& expansion) {
    const LatentAttentionBlock& block = l_.block;
    REGATTA_RETURN_IF_ERROR(multiply_heads(l_.kv_b.key_absorb, x_.q_nope, x_.q_latent));
    REGATTA_RETURN_IF_ERROR(attend_latents(expansion.rest));
    const bool alone = l_.batch.num_tokens == 1;  // whose heads are a row already
    const Status status = multiply_heads(l_.kv_b.value_up, x_.mixed, alone ? x_.rows : x_.values);
    if (!status.ok() || alone) return status;
    HeadsToRowsParams rows;
    rows.x = x_.values;
    rows.out = x_.rows;
    rows.num_tokens = l_.batch.num_tokens;
    rows.num_heads = block.num_heads;
    rows.width = block.v_head_dim;
    rows.dtype = l_.dtype;
    if (expansion.rows > 0) rows.cu_seqlens_q = l_.batch.cu_seqlens_q;
    rows.num_seqs = l_.batch.num_seqs;
    rows.max_span_len = walk_.limits.max_short_len;
    return heads_to_rows(rows, walk_.launch);
  }

  // The same of long spans: keys and values of their contexts, of some heads after others.
  Status attend_expanded(const Expansion& expansion) {
    const LatentAttentionBlock& block = l_.block;
    GatherLatentsParams gathered;
    static_cast<LatentCache&>(gathered) = latent_attention_params(l_);
    gathered.max_short_len = walk_.limits.max_short_len;
    gathered.num_long_tokens = expansion.rows;
    gathered.latents = x_.latents;
    gathered.rope = x_.rope;
    gathered.first_rows = x_.first_rows;
    REGATTA_RETURN_IF_ERROR(gather_latents(gathered, walk_.launch));
    ExpandedAttentionParams attended;
    attended.dtype = l_.dtype;
    attended.q_nope = x_.q_nope;
    attended.q_rope = x_.q_rope;
    attended.keys = x_.keys;
    attended.values = x_.expanded;
    attended.rope = x_.rope;
    attended.first_rows = x_.first_rows;
    attended.batch = l_.batch;
    attended.out = x_.rows;
    attended.num_heads = block.num_heads;
    attended.sizes = latent_sizes(block);
    attended.softmax_scale = block.softmax_scale;
    for (int64_t first = 0; first < block.num_heads; first += expansion.heads) {
      const int64_t count = std::min(expansion.heads, block.num_heads - first);
      REGATTA_RETURN_IF_ERROR(expand_heads(expansion.rows, l_.kv_b.key_up, first, count, x_.keys));
      REGATTA_RETURN_IF_ERROR(
          expand_heads(expansion.rows, l_.kv_b.value_up, first, count, x_.expanded));
      attended.first_head = first;
      attended.num_expanded_heads = count;
      REGATTA_RETURN_IF_ERROR(
          expanded_attention(attended, walk_.limits, x_.expanded_workspace, walk_.launch));
    }
    return {};
  }

  // x.latents [S, L] by the matrices [heads, out, L] of some heads -> out [S, count, out].
  Status expand_heads(int64_t rows, const TensorView& matrices, int64_t first, int64_t count,
                      void* out) {
    const int64_t width = matrices.shape[1], rank = matrices.shape[2];
    TensorView some = matrices;
    some.data =
        static_cast<const char*>(matrices.data) + first * width * rank * dtype_size(l_.dtype);
    some.rank = 2;
    some.shape[0] = count * width;
    some.shape[1] = rank;
    return walk_.multiply(
        {"expanded", SchemeId::kDense, {&some}, x_.latents, out, rows, rank, count * width},
        l_.dtype);
  }

  // The first columns of what the first product made, normed -> the queries.
  Status make_queries() {
    const LatentAttentionBlock& block = l_.block;
    const int64_t rows = l_.batch.num_tokens;
    REGATTA_RETURN_IF_ERROR(
        norm_columns({x_.made, l_.q_a_norm.weight, x_.q_normed, rows, block.q_lora_rank,
                      block.a_size(), block.q_a_norm.epsilon, l_.dtype},
                     walk_.launch));
    Product q("q_b", block.q_b, l_.q_b, x_.q_normed, x_.q, rows, block.q_lora_rank, block.q_size());
    if (l_.adapters.ids != nullptr) {
      Adding adding;
      REGATTA_RETURN_IF_ERROR(walk_.adding_to(q, l_.q_b.low_rank, l_.adapters, Adapted::kQkv,
                                              {q.out_features}, q.x, nullptr, l_.dtype, &adding));
      REGATTA_RETURN_IF_ERROR(walk_.add_ahead(q, adding, nullptr));
    }
    return walk_.multiply(q, l_.dtype);
  }

  LatentWriteParams latent_write_params() const {
    const LatentAttentionBlock& block = l_.block;
    const int64_t first = block.a_size() - block.latent_size();  // columns ahead of the latent
    LatentWriteParams p;
    p.dtype = l_.dtype;
    p.q = block.q_lora_rank > 0 ? x_.q : x_.made;
    p.q_stride = block.q_lora_rank > 0 ? block.q_size() : block.a_size();
    p.latents = static_cast<const char*>(x_.made.data()) + first * dtype_size(l_.dtype);
    p.latent_stride = block.a_size();
    p.norm_weight = l_.kv_a_norm.weight;
    p.rope_cache = l_.rope_cache;
    p.positions = l_.positions;
    p.slot_mapping = l_.slot_mapping;
    p.cache = l_.cache.key;
    p.tail = l_.cache.tail;
    p.scales = l_.cache.key_scale;
    p.q_nope = x_.q_nope;
    p.q_rope = x_.q_rope;
    p.head_ends = x_.ends;
    p.num_tokens = l_.batch.num_tokens;
    p.num_heads = block.num_heads;
    p.latent_rank = block.kv_lora_rank;
    p.rope_size = block.qk_rope_head_dim;
    p.nope_size = block.qk_nope_head_dim;
    p.num_positions = l_.num_positions;
    p.epsilon = block.kv_a_norm.epsilon;
    p.interleaved = block.positions.interleaved;
    return p;
  }

  // from [Hq, T, in] by each head's matrix [Hq, out, in] -> to [Hq, T, out].
  Status multiply_heads(const TensorView& matrices, const void* from, void* to) {
    TensorView first = matrices;
    first.rank = 2;
    std::copy(matrices.shape + 1, matrices.shape + 3, first.shape);
    Product p("heads", SchemeId::kDense, {&first}, from, to,
              l_.batch.num_tokens * l_.block.num_heads, first.shape[1], first.shape[0]);
    p.num_groups = l_.block.num_heads;
    p.group_ends = x_.ends;
    p.group_ends_ready = from == x_.mixed;  // attention came between
    return walk_.multiply(p, l_.dtype);
  }

 private:
  const LatentAttentionBlockParams& l_;
  const LatentScratch& x_;
  Walk& walk_;
};

Status run(const LatentAttentionBlockParams& l, const BlockView& view, const LatentScratch& x,
           Walk& walk) {
  const LatentAttentionBlock& block = l.block;
  const int64_t rows = l.num_tokens;
  LatentRun run(l, x, walk);
  Product first("qkv_a", block.qkv_a, l.qkv_a, l.hidden, x.made, rows, l.hidden_size,
                block.a_size());
  REGATTA_RETURN_IF_ERROR(
      walk.multiply_first(first, l.qkv_a, {block.q_a_size(), block.latent_size()}, view));
  if (block.q_lora_rank > 0) REGATTA_RETURN_IF_ERROR(run.make_queries());
  REGATTA_RETURN_IF_ERROR(run.attend());
  const bool some = l.rows != nullptr && walk.limits.rows != StepRows::kAll;
  void* const made = walk.shared.some;
  Product out("out", block.out, l.out, x.rows, some ? made : l.hidden_out, rows, block.mixed_size(),
              l.hidden_size);
  REGATTA_RETURN_IF_ERROR(walk.keep_wanted(l, some));
  const Status status = walk.end_block(out, view, walk.source_of(view), !some, l.adapters,
                                       Adapted::kOut, l.out.low_rank);
  if (!status.ok() || !some) return status;
  return gather_rows({l.rows, made, l.hidden_out, l.num_rows, rows, l.hidden_size, l.dtype},
                     walk.launch);
}

const KindOnGpuOf<LatentAttentionBlockParams, LatentScratch> kLatentAttention("latent_attention",
                                                                              view, count, run);

}  // namespace
}  // namespace regatta::cuda
