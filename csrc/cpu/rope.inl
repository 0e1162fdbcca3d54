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

// out[i] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i] over one head.
template <class In, class T>
inline void norm_head(const In* x, const T* weight, int64_t dim, float epsilon, bool plus_one,
                      float* out) {
  constexpr int kLanes = Vec::kLanes;
  Vec squares = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec value = load_n(x + i, lanes_left(dim - i));
    squares = fma(value, value, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(dim);
  const Vec scale = set1(1.0f / __builtin_sqrtf(mean + epsilon));
  const Vec one = set1(plus_one ? 1.0f : 0.0f);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int n = lanes_left(dim - i);
    store_n(out + i, load_n(x + i, n) * scale * (load_n(weight + i, n) + one), n);
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
  bool plus_one = false, interleaved = false;
  const int32_t* block_positions = nullptr;  // [T] or null: one dimension

  int64_t heads() const { return num_heads + 2 * num_kv_heads; }
};

// One thread's memory for a head.
struct RopeBuffers {
  float* normed;   // [D]
  float* rotated;  // [D]
  uint8_t* codes;  // [D + 1]
};

// to := a query or a key, normalised and rotated, or a value as it is.
// again: the angles of the second dimension, or null.
template <class T, class In, class Out>
inline void turn_head(const RopeJob<T>& job, const T* norm, const float* angles, const float* again,
                      const In* x, float* normed, Out* to) {
  const int64_t dim = job.head_dim, half = angles ? job.rotary_dim / 2 : 0;
  const auto rotate = [&](const auto* from) {
    if (again) {
      const int64_t first = 2 * half;
      rotate_head(from, angles, angles + half, half, first, to);
      return rotate_head(from + first, again, again + half, half, dim - first, to + first);
    }
    if (job.interleaved && half > 0) {
      return rotate_pairs(from, angles, angles + half, half, dim, to);
    }
    rotate_head(from, angles, angles + half, half, dim, to);
  };
  if (!norm) return rotate(x);
  norm_head(x, norm, dim, job.epsilon, job.plus_one, normed);
  rotate(static_cast<const float*>(normed));
}

// Head h of a token: [0, Hq) is a query, then Hkv keys, then Hkv values.
template <class T, class In, class Query>
inline void rope_one(const RopeJob<T>& job, int64_t token, int64_t h, const In* qkv, Query* q_out,
                     const RopeBuffers& buffers) {
  float* normed = buffers.normed;
  const int64_t dim = job.head_dim;
  const In* x = qkv + (token * job.heads() + h) * dim;
  const int64_t angle = job.positions[token] * job.rotary_dim;
  const int64_t other = job.block_positions ? job.block_positions[token] * job.rotary_dim : -1;
  const auto second = [&](const float* table) {
    return table && other >= 0 ? table + other : nullptr;
  };
  if (h < job.num_heads) {
    const float* table = job.query_rope_cache ? job.query_rope_cache : job.rope_cache;
    Query* to = q_out + (token * job.num_heads + h) * dim;
    return turn_head(job, job.q_norm, table ? table + angle : nullptr, second(table), x, normed,
                     to);
  }
  const int64_t slot = job.slot_mapping[token];
  if (slot < 0) return;
  const bool is_key = h < job.num_heads + job.num_kv_heads;
  const int64_t kv_head = h - job.num_heads - (is_key ? 0 : job.num_kv_heads);
  const int64_t row =
      (slot / job.cache.block_size * job.num_kv_heads + kv_head) * job.cache.block_size +
      slot % job.cache.block_size;
  const float* angles = is_key && job.rope_cache ? job.rope_cache + angle : nullptr;
  const float* again = is_key ? second(job.rope_cache) : nullptr;
  const T* norm = is_key ? job.k_norm : nullptr;
  if (job.cache.format == KvFormat::kDense) {
    T* to = static_cast<T*>(is_key ? job.cache.key : job.cache.value) + row * dim;
    return turn_head(job, norm, angles, again, x, normed, to);
  }
  turn_head(job, norm, angles, again, x, normed, buffers.rotated);
  store_cache_row(job.cache, is_key, row, kv_head, buffers.rotated, dim, buffers.codes);
}

// All heads of all tokens. No barrier at the end.
template <class T, class In, class Query>
inline void rope_rows(Team& team, const RopeJob<T>& job, const In* qkv, Query* q_out) {
  Scratch::Scope scope(team.scratch());
  const RopeBuffers buffers = {team.scratch().take<float>(job.head_dim),
                               team.scratch().take<float>(job.head_dim),
                               team.scratch().take<uint8_t>(job.head_dim + 1)};
  const int64_t count = job.num_tokens * job.heads();
  // At least a few heads per claim: a head is some tens of nanoseconds of work.
  const int64_t share = count / (4 * team.num_threads());
  const int64_t chunk = share > 8 ? share : 8;
  team.for_chunks(count, chunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      rope_one(job, i / job.heads(), i % job.heads(), qkv, q_out, buffers);
    }
  });
}

// The norms of queries and keys over all heads' values, which come ahead of rope_rows().
template <class T>
struct WholeNorms {
  RowNorm<T> q = {}, k = {};
  int64_t q_size = 0, k_size = 0;
  bool are_there = false;

  // Takes the job's norms over where they are `whole`.
  WholeNorms(RopeJob<T>* job, bool whole) {
    if (!whole || !job->q_norm) return;
    are_there = true;
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
    const int64_t width = q_size + 2 * k_size;
    team.for_chunks(num_tokens, rows_per_claim(team, num_tokens), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const In* from = qkv + row * width;
        float* to = out + row * width;
        norm_row(from, q, to, q_size);
        norm_row(from + q_size, k, to + q_size, k_size);
        copy_row(from + q_size + k_size, to + q_size + k_size, k_size);
      }
    });
    team.barrier();
  }
};

}  // namespace regatta::cpu::REGATTA_ISA
