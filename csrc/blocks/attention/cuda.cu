// Attention over keys and values on GPUs: a product, the attention with rotary embedding and cache
// write, a product. Host code.
#include <vector>

#include "blocks/attention/block.h"
#include "cuda/attention/out_gate.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

// Attention's workspace; blocks of one shape share one (paged_attention_workspace_bytes()).
struct AttentionSpace {
  AttentionBlock shape;
  int64_t bytes = 0, zeroed_bytes = 0;
  void* memory = nullptr;

  bool serves(const AttentionBlock& block) const {
    return shape.num_heads == block.num_heads && shape.num_kv_heads == block.num_kv_heads &&
           shape.head_dim == block.head_dim && shape.kv_format == block.kv_format;
  }
};

struct AttentionScratch : Buffers {
  Values made{this};     // [T, (2 Hq + 2 Hkv) D] by the first product, with out_gate
  Values qkv{this};      // [T, (Hq + 2 Hkv) D]
  Values q{this};        // [T, Hq D]
  Values mixed{this};    // [T, Hq D]
  Floats squares{this};  // [T, 2], of norms over all ranks' heads
  std::vector<AttentionSpace> spaces;

  void take(Arena& arena, DType dtype) override {
    for (AttentionSpace& space : spaces) space.memory = arena.take(space.bytes);
    Buffers::take(arena, dtype);
  }
  Status prepare(const Launch& launch) const override {
    for (const AttentionSpace& space : spaces) {
      REGATTA_RETURN_IF_ERROR(zero_ahead(space.memory, space.zeroed_bytes, launch));
    }
    return {};
  }
  // Null where none is there.
  const AttentionSpace* space_of(const AttentionBlock& block) const {
    for (const AttentionSpace& space : spaces) {
      if (space.serves(block)) return &space;
    }
    return nullptr;
  }
};

BlockView view(const AttentionBlockParams& a) { return view_of(a, a.block.qkv, a.block.out); }

bool norms_over_ranks(const AttentionBlock& block) {
  return block.qk_norm_whole && block.all_heads > 0;
}

PagedAttentionParams paged_attention_params(const AttentionBlockParams& p) {
  const AttentionBlock& block = p.block;
  PagedAttentionParams a;
  a.dtype = p.dtype;
  a.cache = p.cache;
  a.batch = p.batch;
  a.num_heads = block.num_heads;
  a.num_kv_heads = block.num_kv_heads;
  a.head_dim = block.head_dim;
  a.softmax_scale = block.softmax_scale;
  a.window = block.window;
  a.softcap = block.softcap;
  a.slopes = p.slopes;
  a.sinks = p.sinks;
  return a;
}

void count(const AttentionBlockParams& a, const AttentionLimits& limits, SharedScratch& shared,
           AttentionScratch& scratch) {
  const AttentionBlock& block = a.block;
  const int64_t rows = a.num_tokens;
  scratch.qkv.need(rows * block.qkv_size());
  scratch.q.need(rows * block.q_size());
  scratch.mixed.need(rows * block.q_size());
  if (block.out_gate) scratch.made.need(rows * block.made_size());
  if (norms_over_ranks(block)) scratch.squares.need(rows * 2);
  shared.product.count(block.qkv, a.dtype, rows, a.hidden_size, block.made_size(), false,
                       !norms_ahead(rows));
  shared.product.count(block.out, a.dtype, rows, block.q_size(), a.hidden_size);
  shared.need_adapters(a.adapters, rows, a.hidden_size, 3, block.made_size());
  shared.need_adapters(a.adapters, rows, block.q_size(), 1, a.hidden_size);
  if (scratch.space_of(block) != nullptr) return;
  const PagedAttentionParams attended = paged_attention_params(a);
  scratch.spaces.push_back({block, paged_attention_workspace_bytes(attended, limits),
                            paged_attention_zeroed_bytes(attended, limits)});
}

// Whether both products around attention are launches of one block per multiprocessor, which takes
// about half of its shared memory (packed_weight.cuh).
bool packed_by_halves(const AttentionBlock& block, int64_t rows) {
  return rows <= kRowsWithoutScratch && is_packed(block.qkv) && is_packed(block.out);
}

OutGateParams out_gate_params(const AttentionBlockParams& a, const AttentionScratch& s) {
  OutGateParams gate;
  gate.made = s.made;
  gate.qkv = s.qkv;
  gate.mixed = s.mixed;
  gate.num_tokens = gate.num_rows = a.num_tokens;
  gate.num_heads = a.block.num_heads;
  gate.head_dim = a.block.head_dim;
  gate.rest = 2 * a.block.kv_size();
  gate.dtype = a.dtype;
  return gate;
}

RopeAndCacheWriteParams rope_params(const AttentionBlockParams& a, const AttentionScratch& s) {
  const AttentionBlock& block = a.block;
  RopeAndCacheWriteParams rope;
  rope.dtype = a.dtype;
  rope.qkv = s.qkv;
  rope.positions = a.positions;
  rope.slot_mapping = a.slot_mapping;
  rope.rope_cache = a.rope_cache;
  rope.query_rope_cache = a.query_rope_cache;
  rope.q_norm = a.q_norm.weight;
  rope.k_norm = a.k_norm.weight;
  rope.cache = a.cache;
  rope.q_out = s.q;
  rope.num_tokens = a.num_tokens;
  rope.num_heads = block.num_heads;
  rope.num_kv_heads = block.num_kv_heads;
  rope.head_dim = block.head_dim;
  rope.rotary_dim = a.rotary_dim;
  rope.num_positions = a.num_positions;
  rope.epsilon = block.qk_norm.epsilon;
  rope.plus_one = block.qk_norm.plus_one;
  rope.whole = block.qk_norm_whole;
  rope.last = block.qk_norm_last;
  rope.interleaved = block.positions.interleaved;
  return rope;
}

// Attention behind the cache write, of the last row of each span alone, each a span of its own
// that sees what is in the cache; their `source` to shared.some. s.qkv and shared.sumsq are free by
// then.
Status attend_last_rows(const AttentionBlockParams& a, PagedAttentionParams attended,
                        const AttentionScratch& s, const AttentionSpace& space, const void* source,
                        Walk& walk) {
  const int64_t rows = a.batch.num_seqs, tokens = a.num_tokens;
  const Launch& launch = walk.launch;
  REGATTA_RETURN_IF_ERROR(
      gather_rows({a.rows, s.q, s.qkv, rows, tokens, a.block.q_size(), a.dtype}, launch));
  if (source != nullptr) {
    REGATTA_RETURN_IF_ERROR(gather_rows(
        {a.rows, source, walk.shared.some, rows, tokens, a.hidden_size, a.dtype}, launch));
  }
  auto* borders = reinterpret_cast<int32_t*>(walk.shared.sumsq.data());
  REGATTA_RETURN_IF_ERROR(count_up(borders, rows + 1, launch));
  attended.q = s.qkv;
  attended.batch.cu_seqlens_q = borders;
  attended.batch.num_tokens = rows;
  return paged_attention(attended, {1, walk.limits.max_context_len}, space.memory, space.bytes,
                         launch);
}

Status run(const AttentionBlockParams& a, const BlockView& view, const AttentionScratch& s,
           Walk& walk) {
  const AttentionBlock& block = a.block;
  const int64_t rows = a.num_tokens;
  Product qkv("qkv", block.qkv, a.qkv, a.hidden, block.out_gate ? s.made : s.qkv, rows,
              a.hidden_size, block.made_size());
  REGATTA_RETURN_IF_ERROR(walk.multiply_first(
      qkv, a.qkv, {block.queries_size(), block.kv_size(), block.kv_size()}, view));
  OutGateParams gate = out_gate_params(a, s);
  if (block.out_gate) REGATTA_RETURN_IF_ERROR(drop_gates(gate, walk.launch));

  RopeAndCacheWriteParams rope = rope_params(a, s);
  if (norms_over_ranks(block)) {
    REGATTA_RETURN_IF_ERROR(whole_squares(rope, s.squares, walk.launch));
    REGATTA_RETURN_IF_ERROR(
        sum_ranks({s.squares, s.squares, 2 * rows, DType::kFloat32}, walk.launch));
    rope.whole_squares = s.squares;
    rope.whole_size = block.all_heads * block.head_dim;
  }
  const AttentionSpace& space = *s.space_of(block);
  PagedAttentionParams attended = paged_attention_params(a);
  attended.q = s.q;
  attended.out = s.mixed;
  const void* source = walk.source_of(view);
  void* const made = walk.shared.some;
  const bool some = a.rows != nullptr && walk.limits.rows != StepRows::kAll;
  const bool lasts = some && walk.limits.rows == StepRows::kLast && a.batch.tree_mask == nullptr;
  if (lasts) {
    REGATTA_RETURN_IF_ERROR(rope_and_cache_write(rope, walk.launch));
    REGATTA_RETURN_IF_ERROR(attend_last_rows(a, attended, s, space, source, walk));
    if (source != nullptr) source = made;
    gate.rows = a.rows;
    gate.num_rows = a.num_rows;
  } else {
    Launch between = walk.launch;
    between.between_halves = packed_by_halves(block, rows) && !block.out_gate;
    REGATTA_RETURN_IF_ERROR(
        rope_and_paged_attention(rope, attended, walk.limits, space.memory, space.bytes, between));
  }
  if (block.out_gate) REGATTA_RETURN_IF_ERROR(gate_outputs(gate, walk.launch));
  REGATTA_RETURN_IF_ERROR(walk.keep_wanted(a, some));

  Product out("out", block.out, a.out, s.mixed, some && !lasts ? made : a.hidden_out,
              lasts ? a.num_rows : rows, block.q_size(), a.hidden_size);
  const AdapterRows adapters = lasts ? walk.of_wanted(a.adapters) : a.adapters;
  const Status status =
      walk.end_block(out, view, source, !some, adapters, Adapted::kOut, a.out.low_rank);
  if (!status.ok() || !some || lasts) return status;
  return gather_rows({a.rows, made, a.hidden_out, a.num_rows, rows, a.hidden_size, a.dtype},
                     walk.launch);
}

const KindOnGpuOf<AttentionBlockParams, AttentionScratch> kAttention("attention", view, count, run);

}  // namespace
}  // namespace regatta::cuda
