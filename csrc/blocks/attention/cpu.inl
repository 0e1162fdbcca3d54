// See cpu.cc.
// clang-format off: the others use what block.inl includes
#include "cpu/block.inl"
#include "cpu/attend.inl"
#include "cpu/rope.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

// The block's two products, looked up once.
struct BlockKernels {
  Gemm qkv, out;
};

// Which of a piece's tokens have rows in the output.
struct Wanted {
  int64_t num_rows;           // of the output
  int64_t num_used;           // of these, the first ones: tokens of spans, and no padding
  int32_t* places = nullptr;  // [tokens] each one's row, -1: it has none; null: each has its own

  // Of tokens [begin, end) with `batch`, which is narrowed to them: rows [first, last) of p.rows.
  Wanted(const AttentionBlockParams& p, int64_t begin, int64_t end, int64_t first, int64_t last,
         AttentionBatch* batch, Scratch& scratch)
      : num_rows(end - begin), num_used(batch->cu_seqlens_q[batch->num_seqs]) {
    if (p.rows == nullptr) return;
    const int64_t used = std::exchange(num_used, 0);
    num_rows = last - first;
    places = scratch.take<int32_t>(end - begin);
    std::fill(places, places + (end - begin), -1);
    for (int64_t i = first; i < last; ++i) {
      const int64_t token = p.rows[i] - begin;
      places[token] = static_cast<int32_t>(i - first);
      num_used += token < used;
    }
    auto* unread = scratch.take<int32_t>(batch->num_seqs);
    for (int64_t b = 0; b < batch->num_seqs; ++b) {
      const int32_t* const span = places + batch->cu_seqlens_q[b];
      const int32_t* const span_end = places + batch->cu_seqlens_q[b + 1];
      unread[b] = static_cast<int32_t>(
          std::find_if(span, span_end, [](int32_t row) { return row >= 0; }) - span);
    }
    batch->unread = unread;
  }

  int64_t row(int64_t token) const { return places ? places[token] : token; }
};

// Queries, keys and values of a row that has each head's gate behind its query.
inline void drop_gates(const AttentionBlock& block, const float* made, float* qkv) {
  for (int64_t head = 0; head < block.num_heads; ++head) {
    copy_row(made + 2 * head * block.head_dim, qkv + head * block.head_dim, block.head_dim);
  }
  copy_row(made + block.queries_size(), qkv + block.q_size(), 2 * block.kv_size());
}

// out = values * sigmoid(gate), of a head.
inline void gate_head(const float* values, const float* gate, float* out, int64_t dim) {
  for_lanes(dim, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    store_n(out + i, load_n(values + i, n) * sigmoid(load_n(gate + i, n)), n);
  });
}

// Tokens [begin, end), all phases in one region; of p.rows, those are [first, last).
template <class T>
void attention_block_piece(const AttentionBlockParams& p, const BlockKernels& kernels,
                           int64_t begin, int64_t end, int64_t first, int64_t last) {
  using Query = QueryOf<T>;
  const AttentionBlock& block = p.block;
  const int64_t num_tokens = end - begin;
  const int64_t dim = block.head_dim, hidden_size = p.hidden_size;
  const int64_t made_size = kernels.qkv.weight.out_features;
  const int64_t qkv_size = block.qkv_size(), q_size = kernels.out.weight.in_features;
  const T* hidden = static_cast<const T*>(p.hidden) + begin * hidden_size;
  T* out = static_cast<T*>(p.hidden_out) + (p.rows ? first : begin) * hidden_size;
  Scratch& shared = Scratch::mine();
  Scratch::Scope scope(shared);

  RopeJob<T> rope;
  rope.positions = p.positions + begin;
  rope.slot_mapping = p.slot_mapping + begin;
  rope.rope_cache = p.rope_cache;
  rope.query_rope_cache = p.query_rope_cache;
  rope.q_norm = static_cast<const T*>(p.q_norm.weight);
  rope.k_norm = static_cast<const T*>(p.k_norm.weight);
  rope.cache = p.cache;
  rope.num_tokens = num_tokens;
  rope.num_heads = block.num_heads;
  rope.num_kv_heads = block.num_kv_heads;
  rope.head_dim = dim;
  rope.rotary_dim = p.rotary_dim;
  rope.epsilon = block.qk_norm.epsilon;
  rope.plus_one = block.qk_norm.plus_one;
  rope.interleaved = block.positions.interleaved;
  rope.norms_last = block.qk_norm_last;
  const WholeNorms<T> whole(&rope, block.qk_norm_whole, block.all_heads, shared);
  AttentionBatch batch = cut_batch(p.batch, begin, end, shared);
  const Wanted wanted(p, begin, end, first, last, &batch, shared);
  const T* summed = hidden;  // of the output's rows
  AdapterRows adapters = p.adapters;
  if (p.rows) {
    T* rows = shared.take<T>(wanted.num_rows * hidden_size);
    auto* ids = shared.take<int32_t>(wanted.num_rows);
    for (int64_t i = 0; i < wanted.num_rows; ++i) {
      const int64_t token = p.rows[first + i];
      std::copy_n(hidden + (token - begin) * hidden_size, hidden_size, rows + i * hidden_size);
      if (adapters.ids) ids[i] = adapters.ids[token];
    }
    summed = rows;
    if (adapters.ids) adapters.ids = ids;
  }
  AttentionJob attention =
      make_attention_job(p.batch, batch, p.cache, block.num_heads, block.num_kv_heads, dim,
                         block.softmax_scale, block.window, shared);
  attention.softcap = block.softcap;
  attention.slopes = p.slopes;
  attention.sinks = p.sinks;
  const Ending<T> ending(block, p.post_norm, p.out.bias, summed, out, wanted.num_rows, hidden_size,
                         shared);

  const Addend<T> qkv_addend(p.adapters, Adapted::kQkv, p.qkv.low_rank, begin, num_tokens,
                             hidden_size, {block.queries_size(), block.kv_size(), block.kv_size()},
                             shared);
  const Addend<T> out_addend(adapters, Adapted::kOut, p.out.low_rank, p.rows ? 0 : begin,
                             wanted.num_rows, q_size, {hidden_size}, shared);
  const Kept<T> input(ending, block.norm, hidden, qkv_addend.any(), num_tokens, shared);
  const PackedRows normed = make_rows(kernels.qkv, shared, num_tokens, Fill::kByRow);
  const PackedRows attended =
      make_rows(kernels.out, shared, std::max<int64_t>(wanted.num_rows, 1), Fill::kByColumns);
  float* made = shared.take<float>(num_tokens * made_size);
  float* qkv = block.out_gate ? shared.take<float>(num_tokens * qkv_size) : made;
  Query* q = shared.take<Query>(num_tokens * q_size);
  // Heads can be packed one by one where they begin at a cache line of the packed row.
  const bool packs_heads = dim % 32 == 0 && !out_addend.any();
  float* mixed = packs_heads ? nullptr : shared.take<float>(wanted.num_rows * q_size);
  float* zeros = shared.take<float>(q_size);
  for (int64_t i = 0; i < q_size; ++i) zeros[i] = 0.0f;

  parallel([&](Team& team) {
    take_rows(team, normed, hidden, block.norm, p.norm, input.kept);
    complete_rows(team, normed);
    shrink(team, qkv_addend, input.rows, hidden_size);
    gemm(team, kernels.qkv, normed, [&](const Tile& tile) {
      qkv_addend.add(tile);
      store_tile(tile, static_cast<const T*>(p.qkv.bias), made, made_size);
    });
    team.barrier();
    if (block.out_gate) {
      for_rows(team, num_tokens, [&](int64_t token) {
        drop_gates(block, made + token * made_size, qkv + token * qkv_size);
      });
      team.barrier();
    }
    whole.apply(team, num_tokens, qkv, qkv);
    rope_rows(team, rope, qkv, q);
    if (wanted.num_rows == 0) return;
    team.barrier();
    attend<T>(team, attention, q, [&](int64_t token, int64_t head, const float* values) {
      const int64_t row = wanted.row(token);
      if (row < 0) return;
      Scratch::Scope own(Scratch::mine());
      if (block.out_gate) {
        float* const open = Scratch::mine().take<float>(dim);
        gate_head(values, made + token * made_size + (2 * head + 1) * dim, open, dim);
        values = open;
      }
      if (packs_heads) {
        pack_columns(attended, row, head * dim, values, dim);
      } else {
        copy_row(values, mixed + row * q_size + head * dim, dim);
      }
    });
    team.for_each(wanted.num_rows - wanted.num_used,
                  [&](int64_t i) { pack_row(attended, wanted.num_used + i, zeros); });
    if (!packs_heads) {
      team.barrier();
      for_rows(team, wanted.num_used,
               [&](int64_t i) { pack_row(attended, i, mixed + i * q_size); });
    }
    complete_rows(team, attended);
    shrink(team, out_addend, mixed, q_size);
    gemm(team, kernels.out, attended, [&](const Tile& tile) {
      out_addend.add(tile);
      ending(tile);
    });
    ending.complete(team);
  });
}

inline Status run_attention_block(const AttentionBlockParams& p) {
  const AttentionBlock& block = p.block;
  BlockKernels kernels;
  Status status =
      find_linear("qkv", p.qkv, block.qkv, p.hidden_size, block.made_size(), p.dtype, &kernels.qkv);
  if (!status.ok()) return status;
  status =
      find_linear("out", p.out, block.out, block.q_size(), p.hidden_size, p.dtype, &kernels.out);
  if (!status.ok()) return status;
  return with_dtype(p.dtype, [&](auto like) {
    int64_t first = 0;
    for (int64_t begin = 0; begin < p.batch.num_tokens; begin += kMaxBlockRows) {
      const int64_t end = std::min(begin + kMaxBlockRows, p.batch.num_tokens);
      int64_t last = first;
      while (p.rows && last < p.num_rows && p.rows[last] < end) ++last;
      attention_block_piece<decltype(like)>(p, kernels, begin, end, std::exchange(first, last),
                                            last);
    }
    return Status();
  });
}

}  // namespace regatta::cpu::REGATTA_ISA
