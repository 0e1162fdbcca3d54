// See rope.inl.
// clang-format off: rope.inl uses what kv_rows.inl defines
#include "kv_rows.inl"
#include "rope.inl"
#include "rows.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status rope_and_cache_write_typed(const RopeAndCacheWriteParams& p) {
  RopeJob<T> job;
  job.positions = p.positions;
  job.slot_mapping = p.slot_mapping;
  job.rope_cache = p.rope_cache;
  job.q_norm = static_cast<const T*>(p.q_norm);
  job.k_norm = static_cast<const T*>(p.k_norm);
  job.cache = p.cache;
  job.num_tokens = p.num_tokens;
  job.num_heads = p.num_heads;
  job.num_kv_heads = p.num_kv_heads;
  job.head_dim = p.head_dim;
  job.rotary_dim = p.rotary_dim;
  job.epsilon = p.epsilon;
  const int64_t bytes = p.num_tokens * job.heads() * p.head_dim * static_cast<int64_t>(sizeof(T));
  parallel(threads_for_bytes(bytes), [&](Team& team) {
    rope_rows(team, job, static_cast<const T*>(p.qkv), static_cast<T*>(p.q_out));
  });
  return {};
}

inline Status run_rope_and_cache_write(const RopeAndCacheWriteParams& p) {
  return with_dtype(p.dtype,
                    [&](auto like) { return rope_and_cache_write_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
