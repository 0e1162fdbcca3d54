// See relu_squared.cc. Compiled once per instruction set: Vec has 1, 8 or 16 lanes.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
void relu_squared_row(const T* x, T* out, int64_t width) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= width; i += Vec::kLanes) {
    const Vec positive = max(load(x + i), zero());
    store(out + i, positive * positive);
  }
  const int rest = static_cast<int>(width - i);
  const Vec positive = max(load_n(x + i, rest), zero());
  store_n(out + i, positive * positive, rest);
}

template <class T>
Status relu_squared_typed(const ReluSquaredParams& p) {
  const T* x = static_cast<const T*>(p.x);
  T* out = static_cast<T*>(p.out);
  parallel(threads_for_bytes(p.num_tokens * p.width * 2 * int64_t{sizeof(T)}), [&](Team& team) {
    team.for_chunks(p.num_tokens, rows_per_claim(team, p.num_tokens),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t row = begin; row < end; ++row) {
                        relu_squared_row(x + row * p.width, out + row * p.width, p.width);
                      }
                    });
  });
  return {};
}

inline Status run_relu_squared(const ReluSquaredParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return relu_squared_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
