// See norm.cc.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status norm_typed(const NormParams& p) {
  const T* x = static_cast<const T*>(p.x);
  const T* residual = static_cast<const T*>(p.residual);
  T* out = static_cast<T*>(p.out);
  T* total = static_cast<T*>(p.residual_out);
  const int64_t width = p.hidden_size;
  const T *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  const auto one_row = [&](int64_t row, float* normed) {
    const T* from = x + row * width;
    if (residual) {
      add_row(from, residual + row * width, total + row * width, width);
    } else {
      copy_row(from, total + row * width, width);
    }
    const int64_t part = row % p.num_parts;
    if (part >= p.num_weights) return copy_row(total + row * width, out + row * width, width);
    const RowNorm<T> norm = {weight + part * width, bias ? bias + part * width : nullptr, p.epsilon,
                             p.kind == NormKind::kLayer, p.plus_one};
    norm_row(total + row * width, norm, normed, width);
    copy_row(normed, out + row * width, width);
  };
  parallel(threads_for_bytes(p.num_tokens * width * 4 * int64_t{sizeof(T)}), [&](Team& team) {
    Scratch::Scope scope(team.scratch());
    float* normed = team.scratch().take<float>(width);
    for_rows(team, p.num_tokens, [&](int64_t row) { one_row(row, normed); });
  });
  return {};
}

inline Status run_norm(const NormParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return norm_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
