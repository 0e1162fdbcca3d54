// See cpu.cc.
#include "cpu/causal_conv.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status short_conv_typed(const ShortConvBlockParams& p) {
  const int64_t size = p.block.size, seqs = p.batch.num_seqs, tokens = p.num_tokens;
  const ConvSpans spans = {
      p.batch.cu_seqlens_q, p.state_src,   p.state_dst, seqs, tokens, p.states, p.taps,
      p.taps_bias,          p.block.width, size};
  const T* const bcx = static_cast<const T*>(p.made_bcx);
  T* const mixed = static_cast<T*>(p.mixed);
  const auto column = [&](int64_t token, int64_t c, int n) REGATTA_LAMBDA_INLINE {
    const T* const row = bcx + token * 3 * size + c;
    return load_n(row, n) * load_n(row + 2 * size, n);
  };
  const int64_t used = seqs > 0 ? p.batch.cu_seqlens_q[seqs] : 0;
  parallel(threads_for_bytes(tokens * size * 4 * int64_t{sizeof(T)}), [&](Team& team) {
    for_span_tokens(team, spans, 1, [&](int64_t seq, int64_t token, int64_t place, int64_t) {
      conv_token(spans, seq, token, place, 0, size, column,
                 [&](int64_t c, int n, Vec sum) REGATTA_LAMBDA_INLINE {
                   const Vec gate = load_n(bcx + (token * 3 + 1) * size + c, n);
                   store_n(mixed + token * size + c, gate * sum, n);
                 });
    });
    for_rows(team, tokens - used, [&](int64_t row) {  // padding
      for_lanes(size, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
        store_n(mixed + (used + row) * size + i, zero(), n);
      });
    });
    team.barrier();
    team.for_each(seqs, [&](int64_t seq) { keep_columns(spans, seq, column); });
  });
  return {};
}

inline Status run_short_conv(const ShortConvBlockParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return short_conv_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
