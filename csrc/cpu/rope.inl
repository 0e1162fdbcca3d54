// Rotary embedding of query and key heads and the write into the paged cache, as called inside a
// parallel region by rope_and_cache_write and attention_block.
//
// With block_positions the R values behind those rotate too, by another row of the table.
// With q_norm and k_norm, each head is first RMS-normalised over its D values (Qwen3). The first R
// values rotate in pairs (i, i + R / 2) or (2i, 2i + 1), the others pass. All of it in float; one
// rounding at the end, to the dtype or to codes. Bound: memory, a few microseconds per thousand
// tokens and head.
namespace regatta::cpu::REGATTA_ISA {

// The same of pairs (2i, 2i + 1).
template <class In, class Out>
inline void rotate_pairs(const In* x, const float* cosines, const float* sines, int64_t half,
                         int64_t dim, Out* out) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[2 * i]), second = to_float(x[2 * i + 1]);
    from_float(first * cosines[i] - second * sines[i], out + 2 * i);
    from_float(second * cosines[i] + first * sines[i], out + 2 * i + 1);
  }
  for (int64_t i = 2 * half; i < dim; ++i) from_float(to_float(x[i]), out + i);
}

// out[0 .. dim) = x rotated by the angles' cosines [half] and sines [half].
template <class In, class Out>
inline void rotate_head(const In* x, const float* cosines, const float* sines, int64_t half,
                        int64_t dim, Out* out) {
  constexpr int kLanes = Vec::kLanes;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = static_cast<int>(half - i < kLanes ? half - i : kLanes);
    const Vec first = load_n(x + i, n), second = load_n(x + half + i, n);
    const Vec c = load_n(cosines + i, n), s = load_n(sines + i, n);
    store_n(out + i, fnma(second, s, first * c), n);
    store_n(out + half + i, fma(first, s, second * c), n);
  }
  for (int64_t i = 2 * half; i < dim; i += kLanes) {
    const int n = static_cast<int>(dim - i < kLanes ? dim - i : kLanes);
    store_n(out + i, load_n(x + i, n), n);
  }
}

// In: dtype of qkv; T: of cache and norms; Query: of q_out. Index ranges have been checked.
template <class T>
struct RopeJob {
  const int32_t* positions;                 // [T]
  const int32_t* slot_mapping;              // [T]
  const float* rope_cache;                  // [P, R], or null: nothing rotates
  const float* query_rope_cache = nullptr;  // [P, R] or null: rope_cache
  const T* q_norm;                          // [D] or null
  const T* k_norm;                          // [D] or null
  PagedCache cache;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
  float epsilon;
  bool plus_one = false, interleaved = false, norms_last = false;
  const int32_t* block_positions = nullptr;  // [T] or null: one dimension

  int64_t heads() const { return num_heads + 2 * num_kv_heads; }
};

// All heads of all tokens. No barrier at the end. Compiled for each ISA in rope_and_cache_write.cc.
template <class T, class In, class Query>
void rope_rows(Team& team, const RopeJob<T>& job, const In* qkv, Query* q_out);

template <class In>
inline float sum_of_squares(const In* x, int64_t width) {
  Vec sum = zero();
  for (int64_t i = 0; i < width; i += Vec::kLanes) {
    const Vec value = load_n(x + i, lanes_left(width - i));
    sum = fma(value, value, sum);
  }
  return reduce_add(sum);
}

// An RMS norm of values whose mean of squares is known.
template <class In, class T>
inline void scale_row(const In* x, const RowNorm<T>& norm, float mean, float* out, int64_t width) {
  const Vec scale = set1(1.0f / __builtin_sqrtf(mean + norm.epsilon));
  const Vec one = set1(norm.plus_one ? 1.0f : 0.0f);
  for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    store_n(out + i, load_n(x + i, n) * scale * (load_n(norm.weight + i, n) + one), n);
  });
}

// The norms of queries and keys over all heads' values, which come ahead of rope_rows().
template <class T>
struct WholeNorms {
  RowNorm<T> q = {}, k = {};
  int64_t q_size = 0, k_size = 0;
  bool are_there = false;
  // Of several ranks: values of all queries, query heads of a key head here, and room for what the
  // ranks sum, [tokens, 2].
  int64_t all_size = 0, group = 1;
  float* squares = nullptr;

  // Takes the job's norms over where they are `whole`. all_heads: of all ranks' queries, 0: these.
  WholeNorms(RopeJob<T>* job, bool whole, int64_t all_heads, Scratch& scratch) {
    if (!whole || !job->q_norm) return;
    are_there = true;
    all_size = all_heads * job->head_dim;
    group = job->num_heads / job->num_kv_heads;
    if (all_size) squares = scratch.take<float>(2 * job->num_tokens);
    q = {job->q_norm, nullptr, job->epsilon, false, job->plus_one};
    k = {job->k_norm, nullptr, job->epsilon, false, job->plus_one};
    q_size = job->num_heads * job->head_dim;
    k_size = job->num_kv_heads * job->head_dim;
    job->q_norm = job->k_norm = nullptr;
  }

  // qkv -> out, which may be the same memory; then a barrier. Nothing where they are not there.
  template <class In>
  void apply(Team& team, int64_t num_tokens, const In* qkv, float* out) const {
    if (!are_there) return;
    if (squares) return apply_of_ranks(team, num_tokens, qkv, out);
    const int64_t width = q_size + 2 * k_size;
    for_rows(team, num_tokens, [&](int64_t row) {
      const In* from = qkv + row * width;
      float* to = out + row * width;
      norm_row(from, q, to, q_size);
      norm_row(from + q_size, k, to + q_size, k_size);
      copy_row(from + q_size + k_size, to + q_size + k_size, k_size);
    });
    team.barrier();
  }

  // A key head counts as often as query heads read it: of all ranks together that is once for each
  // of its group, however many ranks have it.
  template <class In>
  void apply_of_ranks(Team& team, int64_t num_tokens, const In* qkv, float* out) const {
    const int64_t width = q_size + 2 * k_size;
    for_rows(team, num_tokens, [&](int64_t row) {
      const In* from = qkv + row * width;
      squares[2 * row] = sum_of_squares(from, q_size);
      squares[2 * row + 1] = static_cast<float>(group) * sum_of_squares(from + q_size, k_size);
    });
    team.barrier();
    team.once([&] { sum_of_ranks(squares, 2 * num_tokens); });
    team.barrier();
    for_rows(team, num_tokens, [&](int64_t row) {
      const In* from = qkv + row * width;
      float* to = out + row * width;
      const float* sums = squares + 2 * row;
      scale_row(from, q, sums[0] / static_cast<float>(all_size), to, q_size);
      scale_row(from + q_size, k, sums[1] / static_cast<float>(all_size), to + q_size, k_size);
      copy_row(from + q_size + k_size, to + q_size + k_size, k_size);
    });
    team.barrier();
  }
};

}  // namespace regatta::cpu::REGATTA_ISA
