// See rope.inl.
// clang-format off: rope.inl uses what the others define
#include "rows.inl"
#include "kv_rows.inl"
#include "rope.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

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
  job.block_positions = p.block_positions;
  const T* qkv = static_cast<const T*>(p.qkv);
  T* q_out = static_cast<T*>(p.q_out);
  const int64_t width = job.heads() * p.head_dim;
  const int64_t bytes = p.num_tokens * width * static_cast<int64_t>(sizeof(T));
  const WholeNorms<T> whole(&job, p.whole);
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

}  // namespace regatta::cpu::REGATTA_ISA
