// See silu_mul.cc.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status silu_mul_typed(const SiluMulParams& p) {
  const T* gate_up = static_cast<const T*>(p.gate_up);
  T* out = static_cast<T*>(p.out);
  const int64_t width = p.intermediate_size;
  parallel(threads_for_bytes(p.num_tokens * width * 3 * int64_t{sizeof(T)}), [&](Team& team) {
    team.for_chunks(p.num_tokens, rows_per_claim(team, p.num_tokens),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t row = begin; row < end; ++row) {
                        const T* gate = gate_up + row * 2 * width;
                        silu_mul_row(gate, gate + width, out + row * width, width);
                      }
                    });
  });
  return {};
}

inline Status run_silu_mul(const SiluMulParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return silu_mul_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
