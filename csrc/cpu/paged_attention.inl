// See attention.inl.
// clang-format off: attention.inl uses what the others define
#include "rows.inl"
#include "attend.inl"
#include "tiles.inl"
#include "kv_rows.inl"
#include "attention.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status paged_attention_typed(const PagedAttentionParams& p) {
  Scratch::Scope scope(Scratch::mine());
  AttentionJob job = make_attention_job(p.batch, p.batch, p.cache, p.num_heads, p.num_kv_heads,
                                        p.head_dim, p.softmax_scale, p.window, Scratch::mine());
  job.softcap = p.softcap;
  job.slopes = p.slopes;
  job.sinks = p.sinks;
  T* out = static_cast<T*>(p.out);
  const int64_t row_size = p.num_heads * p.head_dim;
  const int64_t used = p.batch.cu_seqlens_q[p.batch.num_seqs];
  std::memset(out + used * row_size, 0, (p.batch.num_tokens - used) * row_size * sizeof(T));
  parallel([&](Team& team) {
    attend<T>(team, job, static_cast<const T*>(p.q),
              [&](int64_t token, int64_t head, const float* values) {
                copy_row(values, out + token * row_size + head * p.head_dim, p.head_dim);
              });
  });
  return {};
}

inline Status run_paged_attention(const PagedAttentionParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return paged_attention_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
