// Rotary embedding of query and key heads and the write into the paged cache, as called inside a
// parallel region by rope_and_cache_write and attention_block.
//
// With q_norm and k_norm, each head is first RMS-normalised over its D values (Qwen3). The first R
// values rotate in half-split pairs (i, i + R / 2), the others pass. All of it in float; one
// rounding at the end, to the dtype or to codes. Bound: memory, a few microseconds per thousand
// tokens and head.
namespace regatta::cpu::REGATTA_ISA {

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
inline void norm_head(const In* x, const T* weight, int64_t dim, float epsilon, float* out) {
  constexpr int kLanes = Vec::kLanes;
  Vec squares = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int n = static_cast<int>(dim - i < kLanes ? dim - i : kLanes);
    const Vec value = load_n(x + i, n);
    squares = fma(value, value, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(dim);
  const Vec scale = set1(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int n = static_cast<int>(dim - i < kLanes ? dim - i : kLanes);
    store_n(out + i, load_n(x + i, n) * scale * load_n(weight + i, n), n);
  }
}

// In: dtype of qkv; T: of cache and norms; Query: of q_out. Index ranges have been checked.
template <class T>
struct RopeJob {
  const int32_t* positions;     // [T]
  const int32_t* slot_mapping;  // [T]
  const float* rope_cache;      // [P, R]
  const T* q_norm;              // [D] or null
  const T* k_norm;              // [D] or null
  PagedCache cache;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
  float epsilon;

  int64_t heads() const { return num_heads + 2 * num_kv_heads; }
};

// One thread's memory for a head.
struct RopeBuffers {
  float* normed;   // [D]
  float* rotated;  // [D]
  uint8_t* codes;  // [D + 1]
};

// to := what the cache is to hold of a key (normalised, rotated) or a value.
template <class T, class In, class Out>
inline void cache_head(const RopeJob<T>& job, bool is_key, const In* x, const float* cosines,
                       float* normed, Out* to) {
  const int64_t dim = job.head_dim, half = job.rotary_dim / 2;
  if (is_key && job.k_norm) {
    norm_head(x, job.k_norm, dim, job.epsilon, normed);
    return rotate_head(normed, cosines, cosines + half, half, dim, to);
  }
  rotate_head(x, cosines, cosines + half, is_key ? half : 0, dim, to);
}

// Head h of a token: [0, Hq) is a query, then Hkv keys, then Hkv values.
template <class T, class In, class Query>
inline void rope_one(const RopeJob<T>& job, int64_t token, int64_t h, const In* qkv, Query* q_out,
                     const RopeBuffers& buffers) {
  float* normed = buffers.normed;
  const int64_t dim = job.head_dim, half = job.rotary_dim / 2;
  const In* x = qkv + (token * job.heads() + h) * dim;
  const float* cosines = job.rope_cache + job.positions[token] * job.rotary_dim;
  const float* sines = cosines + half;
  if (h < job.num_heads) {
    Query* to = q_out + (token * job.num_heads + h) * dim;
    if (job.q_norm) {
      norm_head(x, job.q_norm, dim, job.epsilon, normed);
      rotate_head(normed, cosines, sines, half, dim, to);
    } else {
      rotate_head(x, cosines, sines, half, dim, to);
    }
    return;
  }
  const int64_t slot = job.slot_mapping[token];
  if (slot < 0) return;
  const bool is_key = h < job.num_heads + job.num_kv_heads;
  const int64_t kv_head = h - job.num_heads - (is_key ? 0 : job.num_kv_heads);
  const int64_t row =
      (slot / job.cache.block_size * job.num_kv_heads + kv_head) * job.cache.block_size +
      slot % job.cache.block_size;
  if (job.cache.format == KvFormat::kDense) {
    T* to = static_cast<T*>(is_key ? job.cache.key : job.cache.value) + row * dim;
    return cache_head(job, is_key, x, cosines, normed, to);
  }
  cache_head(job, is_key, x, cosines, normed, buffers.rotated);
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

}  // namespace regatta::cpu::REGATTA_ISA
