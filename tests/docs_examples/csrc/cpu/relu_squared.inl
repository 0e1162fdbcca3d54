// See relu_squared.cc. Compiled once per instruction set: Vec has 1, 4, 8 or 16 lanes.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
void relu_squared_row(const T* x, T* out, int64_t width) {
  for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {  // n: all lanes, or the rest
    const Vec positive = max(load_n(x + i, n), zero());
    store_n(out + i, positive * positive, n);
  });
}

template <class T>
Status relu_squared_typed(const ReluSquaredParams& p) {
  const T* x = static_cast<const T*>(p.x);
  T* out = static_cast<T*>(p.out);
  parallel(threads_for_bytes(p.num_tokens * p.width * 2 * int64_t{sizeof(T)}), [&](Team& team) {
    for_rows(team, p.num_tokens, [&](int64_t row) {
      relu_squared_row(x + row * p.width, out + row * p.width, p.width);
    });
  });
  return {};
}

inline Status run_relu_squared(const ReluSquaredParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return relu_squared_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
