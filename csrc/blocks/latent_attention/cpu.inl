// See cpu.cc.
// clang-format off: the others use what block.inl includes
#include "cpu/block.inl"
#include "cpu/attend.inl"
#include "cpu/kv_rows.inl"
#include "cpu/rope.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

// Tokens [begin, end) of a batch, in one form.
template <class T>
class LatentAttention {
 public:
  using Query = QueryOf<T>;

  LatentAttention(const LatentAttentionBlockParams& params, const LatentKernels& kernels,
                  LatentPiece piece, Scratch& scratch)
      : p_(params),
        kernels_(kernels),
        begin_(piece.begin),
        num_tokens_(piece.end - piece.begin),
        heads_(params.block.num_heads),
        rank_(params.block.kv_lora_rank),
        own_(params.block.qk_nope_head_dim),
        rotated_(params.block.qk_rope_head_dim),
        value_dim_(params.block.v_head_dim),
        scratch_(scratch),
        batch_(cut_batch(params.batch, piece.begin, piece.end, scratch)),
        used_(batch_.cu_seqlens_q[batch_.num_seqs]),
        hidden_(static_cast<const T*>(params.hidden) + piece.begin * params.hidden_size),
        ending_(params.block, params.post_norm, params.out.bias, hidden_,
                static_cast<T*>(params.hidden_out) + piece.begin * params.hidden_size, num_tokens_,
                params.hidden_size, scratch),
        a_addend_(addend(params.qkv_a, Adapted::kQkv, params.hidden_size,
                         {params.block.q_a_size(), params.block.latent_size()})),
        q_addend_(
            addend(params.q_b, Adapted::kQkv, params.block.q_lora_rank, {params.block.q_size()})),
        out_addend_(
            addend(params.out, Adapted::kOut, params.block.mixed_size(), {params.hidden_size})),
        input_(ending_, params.block.norm, hidden_, a_addend_.any(), num_tokens_, scratch),
        normed_(make_rows(kernels.qkv_a, scratch, num_tokens_, Fill::kByRow)),
        attended_(make_rows(kernels.out, scratch, num_tokens_, Fill::kByColumns)),
        packs_heads_(value_dim_ % kPanel == 0 && !out_addend_.any()),
        a_(scratch.take<float>(num_tokens_ * params.block.a_size())),
        queries_(a_),
        query_stride_(params.block.a_size()) {
    const LatentAttentionBlock& block = params.block;
    if (!packs_heads_) mixed_ = scratch.take<float>(num_tokens_ * block.mixed_size());
    zeros_ = scratch.take<float>(std::max(block.mixed_size(), rank_));
    std::fill(zeros_, zeros_ + std::max(block.mixed_size(), rank_), 0.0f);
    if (block.q_lora_rank == 0) return;
    normed_q_ = make_rows(kernels.q_b, scratch, num_tokens_, Fill::kByRow);
    if (q_addend_.any()) kept_q_ = scratch.take<float>(num_tokens_ * block.q_lora_rank);
    queries_ = scratch.take<float>(num_tokens_ * block.q_size());
    query_stride_ = block.q_size();
  }

  // A query over latents of each head, attention over one row per token, values of what it gives.
  void run_absorbed() {
    const int64_t width = rank_ + rotated_;
    Query* queries = scratch_.take<Query>(num_tokens_ * heads_ * width);
    const std::vector<PackedRows> own = rows_of_heads(kernels_.key_absorb);
    const std::vector<PackedRows> latents = rows_of_heads(kernels_.value_up);
    AttentionJob job = make_attention_job(p_.batch, batch_, p_.cache, heads_, 1, width,
                                          p_.block.softmax_scale, -1, scratch_, rank_);
    if (!is_dense()) job.tail_dim = rotated_;
    parallel([&](Team& team) {
      project(team);
      for_rows(team, num_tokens_, [&](int64_t token) {
        for (int64_t h = 0; h < heads_; ++h) {
          pack_columns(own[h], token, 0, query(token, h), own_);
          rotate(token, query(token, h) + own_, queries + (token * heads_ + h) * width + rank_);
        }
      });
      team.barrier();
      const auto rows_of = [&](int64_t h) -> const PackedRows& { return own[h]; };
      head_products(team, kernels_.key_absorb.data(), 0, heads_, rows_of, [&](const Tile& tile) {
        store_tile(tile, static_cast<const T*>(nullptr), queries + tile.owner * width,
                   heads_ * width);
      });
      team.barrier();
      const auto take = [&](int64_t token, int64_t head, const float* values) {
        pack_columns(latents[head], token, 0, values, rank_);
      };
      attend_latents<T>(team, job, queries, take);
      team.for_each(num_tokens_ - used_, [&](int64_t i) {
        for (const PackedRows& rows : latents) pack_row(rows, used_ + i, zeros_);
      });
      team.barrier();
      const auto latents_of = [&](int64_t h) -> const PackedRows& { return latents[h]; };
      head_products(team, kernels_.value_up.data(), 0, heads_, latents_of, [&](const Tile& tile) {
        for (int64_t i = 0; i < tile.num_rows; ++i) {
          take_values(tile.row + i, tile.owner, tile.column, tile.products + i * kPanel,
                      tile.num_columns);
        }
      });
      finish(team);
    });
  }

  // Keys and values of all contexts, of as many heads at a time as stay in cache.
  void run_expanded() {
    const ExpandedContexts contexts(batch_);
    const int64_t num_rows = contexts.num_rows(), width = own_ + rotated_;
    const PackedRows latents =
        make_rows(kernels_.key_up[0], scratch_, std::max<int64_t>(num_rows, 1), Fill::kByRow);
    Query* queries = scratch_.take<Query>(num_tokens_ * heads_ * width);
    const int64_t head_bytes = 2 * num_rows * width * static_cast<int64_t>(sizeof(T));
    const int64_t most = std::max<int64_t>(1, kMaxExpandedBytes / std::max<int64_t>(head_bytes, 1));
    const int64_t num_groups = (heads_ + most - 1) / most;
    const int64_t group = (heads_ + num_groups - 1) / num_groups;
    T* keys = scratch_.take<T>(num_rows * group * width);
    T* values = scratch_.take<T>(num_rows * group * width);
    parallel([&](Team& team) {
      project(team);
      for_rows(team, num_tokens_, [&](int64_t token) {
        for (int64_t h = 0; h < heads_; ++h) {
          const int64_t first = h / group * group, count = std::min(group, heads_ - first);
          Query* to = queries + (first * num_tokens_ + token * count + h - first) * width;
          copy_row(query(token, h), to, own_);
          rotate(token, query(token, h) + own_, to + own_);
        }
      });
      pack_contexts(team, contexts, latents);
    });
    for (int64_t first = 0; first < heads_; first += group) {
      const int64_t count = std::min(group, heads_ - first);
      attend_expanded(contexts, latents, first, count, keys, values,
                      queries + first * num_tokens_ * width);
    }
    parallel([&](Team& team) {
      team.for_each(num_tokens_ - used_,
                    [&](int64_t i) { pack_row(attended_, used_ + i, zeros_); });
      finish(team);
    });
  }

 private:
  // Keys and values of some heads: beyond this they take turns in L3. Measured on Zen 4.
  static constexpr int64_t kMaxExpandedBytes = int64_t{16} << 20;

  Addend<T> addend(const LinearWeights& linear, Adapted which, int64_t in_features,
                   std::initializer_list<int64_t> part_sizes) const {
    return {p_.adapters, which,       linear.low_rank, begin_,
            num_tokens_, in_features, part_sizes,      scratch_};
  }

  bool is_dense() const { return p_.cache.format == KvFormat::kDense; }

  const float* query(int64_t token, int64_t head) const {
    return queries_ + token * query_stride_ + head * (own_ + rotated_);
  }

  std::vector<PackedRows> rows_of_heads(const std::vector<Gemm>& gemms) const {
    std::vector<PackedRows> rows;
    for (const Gemm& gemm : gemms) {
      rows.push_back(make_rows(gemm, scratch_, num_tokens_, Fill::kByColumns));
    }
    return rows;
  }

  // to[0 .. R) = x turned by the token's position.
  template <class Out>
  void rotate(int64_t token, const float* x, Out* to) const {
    const int64_t half = p_.rotary_dim / 2;
    const float* angles = p_.rope_cache + p_.positions[begin_ + token] * p_.rotary_dim;
    if (p_.block.positions.interleaved) {
      rotate_pairs(x, angles, angles + half, half, rotated_, to);
    } else {
      rotate_head(x, angles, angles + half, half, rotated_, to);
    }
  }

  // Queries to queries_, latents to the cache; then a barrier.
  void project(Team& team) const {
    const LatentAttentionBlock& block = p_.block;
    take_rows(team, normed_, hidden_, block.norm, p_.norm, input_.kept);
    complete_rows(team, normed_);
    shrink(team, a_addend_, input_.rows, p_.hidden_size);
    gemm(team, kernels_.qkv_a, normed_, [&](const Tile& tile) {
      a_addend_.add(tile);
      store_tile(tile, static_cast<const T*>(p_.qkv_a.bias), a_, block.a_size());
    });
    team.barrier();
    const RowNorm<T> q_norm = row_norm<T>(block.q_a_norm, p_.q_a_norm);
    Scratch::Scope scope(team.scratch());
    float* row = team.scratch().take<float>(std::max(rank_, block.q_lora_rank));
    for_rows(team, num_tokens_, [&](int64_t token) {
      const float* from = a_ + token * block.a_size();
      if (block.q_lora_rank) {
        norm_row(from, q_norm, row, block.q_lora_rank);
        pack_row(normed_q_, token, row);
        if (kept_q_) copy_row(row, kept_q_ + token * block.q_lora_rank, block.q_lora_rank);
      }
      keep_latent(token, from + block.a_size() - block.latent_size(), row);
    });
    if (block.q_lora_rank) {
      complete_rows(team, normed_q_);
      shrink(team, q_addend_, kept_q_, block.q_lora_rank);
      gemm(team, kernels_.q_b, normed_q_, [&](const Tile& tile) {
        q_addend_.add(tile);
        store_tile(tile, static_cast<const T*>(nullptr), queries_, query_stride_);
      });
    }
    team.barrier();
  }

  // normed: room for L values.
  void keep_latent(int64_t token, const float* latent, float* normed) const {
    const int64_t slot = p_.slot_mapping[begin_ + token];
    if (slot < 0) return;
    norm_row(latent, row_norm<T>(p_.block.kv_a_norm, p_.kv_a_norm), normed, rank_);
    if (is_dense()) {
      copy_row(normed, latent_of(slot), rank_);
    } else {
      store_latent_codes(p_.cache, slot, normed, rank_);
    }
    rotate(token, latent + rank_, tail_of(slot));
  }

  // A slot's latent in a dense cache, and its R values in any.
  T* latent_of(int64_t slot) const {
    return static_cast<T*>(p_.cache.key) + slot * (rank_ + rotated_);
  }
  T* tail_of(int64_t slot) const {
    return is_dense() ? latent_of(slot) + rank_ : static_cast<T*>(p_.cache.tail) + slot * rotated_;
  }

  int64_t slot_of(int64_t span, int64_t position) const {
    const int64_t block = position / p_.cache.block_size;
    const int64_t id = batch_.block_tables[span * batch_.max_blocks + block];
    return (id - block) * p_.cache.block_size + position;
  }

  // Rows of the last block of a context that are behind its end stay as they are: none sees them.
  void pack_contexts(Team& team, const ExpandedContexts& contexts, const PackedRows& rows) const {
    Scratch::Scope scope(team.scratch());
    float* read = team.scratch().take<float>(rank_);
    team.for_each(static_cast<int64_t>(contexts.blocks.size()), [&](int64_t i) {
      const ExpandedContexts::Block& block = contexts.blocks[i];
      for (int64_t j = 0; j < block.count; ++j) {
        const int64_t row = i * kChunk + j, slot = slot_of(block.span, block.first + j);
        if (is_dense()) {
          pack_columns(rows, row, 0, latent_of(slot), rank_);
        } else {
          load_latent_codes(p_.cache, slot, rank_, read);
          pack_columns(rows, row, 0, read, rank_);
        }
      }
    });
  }

  // Heads [first, first + count): their keys and values [block][head][kChunk][N + R] of the
  // contexts, then their attention.
  void attend_expanded(const ExpandedContexts& contexts, const PackedRows& latents, int64_t first,
                       int64_t count, T* keys, T* values, const Query* queries) {
    const int64_t width = own_ + rotated_;
    Scratch::Scope scope(scratch_);
    PagedCache cache;
    cache.key = keys;
    cache.value = values;
    cache.num_blocks = static_cast<int64_t>(contexts.blocks.size());
    cache.block_size = kChunk;
    AttentionBatch batch = batch_;
    batch.block_tables = contexts.tables.data();
    batch.max_blocks = contexts.max_blocks;
    const AttentionJob job = make_attention_job(p_.batch, batch, cache, count, count, width,
                                                p_.block.softmax_scale, -1, scratch_, value_dim_);
    const auto row_of = [&](T* rows, int64_t row, int64_t head) {
      return rows + ((row / kChunk * count + head - first) * kChunk + row % kChunk) * width;
    };
    const auto store_to = [&](T* rows) {
      return [&, rows](const Tile& tile) {
        for (int64_t i = 0; i < tile.num_rows; ++i) {
          copy_row(tile.products + i * kPanel, row_of(rows, tile.row + i, tile.owner) + tile.column,
                   tile.num_columns);
        }
      };
    };
    const auto rows = [&](int64_t) -> const PackedRows& { return latents; };
    parallel([&](Team& team) {
      head_products(team, kernels_.key_up.data(), first, count, rows, store_to(keys));
      head_products(team, kernels_.value_up.data(), first, count, rows, store_to(values));
      team.for_each(cache.num_blocks, [&](int64_t i) {
        const ExpandedContexts::Block& block = contexts.blocks[i];
        for (int64_t j = 0; j < block.count; ++j) {
          const T* shared = tail_of(slot_of(block.span, block.first + j));
          for (int64_t h = first; h < first + count; ++h) {
            copy_row(shared, row_of(keys, i * kChunk + j, h) + own_, rotated_);
          }
        }
      });
      team.barrier();
      attend_latents<T>(team, job, queries, [&](int64_t token, int64_t head, const float* mixed) {
        take_values(token, first + head, 0, mixed, value_dim_);
      });
    });
  }

  // Some columns of what the output product reads of a head.
  void take_values(int64_t token, int64_t head, int64_t column, const float* values,
                   int64_t count) const {
    const int64_t at = head * value_dim_ + column;
    if (packs_heads_) return pack_columns(attended_, token, at, values, count);
    copy_row(values, mixed_ + token * heads_ * value_dim_ + at, count);
  }

  void finish(Team& team) const {
    if (!packs_heads_) {
      team.barrier();
      for_rows(team, used_,
               [&](int64_t i) { pack_row(attended_, i, mixed_ + i * heads_ * value_dim_); });
    }
    complete_rows(team, attended_);
    shrink(team, out_addend_, mixed_, p_.block.mixed_size());
    gemm(team, kernels_.out, attended_, [&](const Tile& tile) {
      out_addend_.add(tile);
      ending_(tile);
    });
    ending_.complete(team);
  }

  const LatentAttentionBlockParams& p_;
  const LatentKernels& kernels_;
  const int64_t begin_, num_tokens_;
  const int64_t heads_, rank_, own_, rotated_, value_dim_;
  Scratch& scratch_;
  const AttentionBatch batch_;
  const int64_t used_;  // tokens that are no padding
  const T* hidden_;
  const Ending<T> ending_;
  const Addend<T> a_addend_, q_addend_, out_addend_;
  const Kept<T> input_;
  const PackedRows normed_, attended_;
  const bool packs_heads_;  // a head begins at a cache line of the packed row, which alone is read
  float* a_;                // [tokens, a_size]
  float* queries_;          // [tokens, heads, N + R], tokens query_stride_ apart
  int64_t query_stride_;
  PackedRows normed_q_;
  float* kept_q_ = nullptr;  // [tokens, q_lora_rank] where adapters read them
  float* mixed_ = nullptr;   // [tokens, heads, V], unless packs_heads_
  float* zeros_ = nullptr;
};

inline Status run_latent_attention_block(const LatentAttentionBlockParams& p) {
  LatentKernels kernels;
  const Status status = find_latent_kernels(p, &kernels);
  if (!status.ok()) return status;
  return with_dtype(p.dtype, [&](auto like) {
    for (const LatentPiece& piece : latent_pieces(p.block, p.batch, most_rows(p.block))) {
      Scratch& scratch = Scratch::mine();
      Scratch::Scope scope(scratch);
      LatentAttention<decltype(like)> attention(p, kernels, piece, scratch);
      piece.expanded ? attention.run_expanded() : attention.run_absorbed();
    }
    return Status();
  });
}

}  // namespace regatta::cpu::REGATTA_ISA
