// See rope.inl.
// clang-format off: rope.inl uses what the others define
#include "rows.inl"
#include "kv_rows.inl"
#include "rope.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

// out[i] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i] over one head.
template <class In, class T, class Out>
inline void norm_head(const In* x, const T* weight, int64_t dim, float epsilon, bool plus_one,
                      Out* out) {
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
  const auto rotate = [&](const auto* from, auto* to) {
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
  if (!norm) return rotate(x, to);
  if (job.norms_last) {
    rotate(x, normed);
    return norm_head(normed, norm, dim, job.epsilon, job.plus_one, to);
  }
  norm_head(x, norm, dim, job.epsilon, job.plus_one, normed);
  rotate(static_cast<const float*>(normed), to);
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

template <class T, class In, class Query>
void rope_rows(Team& team, const RopeJob<T>& job, const In* qkv, Query* q_out) {
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

template <class T>
Status rope_and_cache_write_typed(const RopeAndCacheWriteParams& p) {
  RopeJob<T> job;
  job.positions = p.positions;
  job.slot_mapping = p.slot_mapping;
  job.rope_cache = p.rope_cache;
  job.query_rope_cache = p.query_rope_cache;
  job.q_norm = static_cast<const T*>(p.q_norm);
  job.k_norm = static_cast<const T*>(p.k_norm);
  job.cache = p.cache;
  job.num_tokens = p.num_tokens;
  job.num_heads = p.num_heads;
  job.num_kv_heads = p.num_kv_heads;
  job.head_dim = p.head_dim;
  job.rotary_dim = p.rotary_dim;
  job.epsilon = p.epsilon;
  job.plus_one = p.plus_one;
  job.interleaved = p.interleaved;
  job.norms_last = p.last;
  job.block_positions = p.block_positions;
  const T* qkv = static_cast<const T*>(p.qkv);
  T* q_out = static_cast<T*>(p.q_out);
  const int64_t width = job.heads() * p.head_dim;
  const int64_t bytes = p.num_tokens * width * static_cast<int64_t>(sizeof(T));
  const WholeNorms<T> whole(&job, p.whole, 0, Scratch::mine());
  if (!whole.are_there) {
    parallel(threads_for_bytes(bytes), [&](Team& team) { rope_rows(team, job, qkv, q_out); });
    return {};
  }
  Scratch::Scope scope(Scratch::mine());
  float* normed = Scratch::mine().take<float>(p.num_tokens * width);
  parallel(threads_for_bytes(bytes), [&](Team& team) {
    whole.apply(team, p.num_tokens, qkv, normed);
    rope_rows(team, job, static_cast<const float*>(normed), q_out);
  });
  return {};
}

inline Status run_rope_and_cache_write(const RopeAndCacheWriteParams& p) {
  return with_dtype(p.dtype,
                    [&](auto like) { return rope_and_cache_write_typed<decltype(like)>(p); });
}

// Of blocks; those of the op above are made where it calls them.
template void rope_rows(Team&, const RopeJob<float>&, const float*, float*);
template void rope_rows(Team&, const RopeJob<bf16>&, const float*, QueryOf<bf16>*);
template void rope_rows(Team&, const RopeJob<fp16>&, const float*, float*);

}  // namespace regatta::cpu::REGATTA_ISA
